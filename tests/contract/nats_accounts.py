"""Who may connect to NATS: users with passwords and nkeys, or with credential files."""

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]


class NatsAccounts:
    """An operator with one account, which a server's configuration names; :meth:`write` makes the
    file of a user."""

    def __init__(self) -> None:
        self._operator = _pair(nkeys.PREFIX_BYTE_OPERATOR)
        self._account = _pair(nkeys.PREFIX_BYTE_ACCOUNT)

    @property
    def config(self) -> str:
        """The lines of nats-server's configuration."""
        operator, account = _public(self._operator), _public(self._account)
        operator_token = _token(self._operator, operator, "operator", {})
        unlimited = dict.fromkeys(
            ("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1
        )
        account_token = _token(
            self._operator, account, "account", {"limits": unlimited | {"wildcards": True}}
        )
        return (
            f"operator: {operator_token}\nresolver: MEMORY\n"
            f"resolver_preload: {{ {account}: {account_token} }}\n"
        )

    def write(self, path: Path, seconds: float = 86_400, **permissions: Any) -> None:
        """The file of a new user. ``seconds``: until it expires. ``permissions``: as in a token:
        ``pub={"deny": ["subject"]}``."""
        pair = _pair(nkeys.PREFIX_BYTE_USER)
        claims = {"subs": -1, "data": -1, "payload": -1, **permissions}
        token = _token(self._account, _public(pair), "user", claims, seconds)
        parts = {"NATS USER JWT": token, "USER NKEY SEED": pair.seed.decode()}
        text = "\n".join(
            f"-----BEGIN {name}-----\n{value}\n------END {name}------\n"
            for name, value in parts.items()
        )
        new = path.with_suffix(".new")
        new.write_text(text)
        new.rename(path)


class NatsUsers:
    """Users of a server's configuration, each with the variables that a process needs: one with a
    password, one with an nkey, and a reader that may only subscribe."""

    def __init__(self) -> None:
        self._key = _pair(nkeys.PREFIX_BYTE_USER)

    @property
    def config(self) -> str:
        """The lines of nats-server's configuration."""
        return (
            "authorization { users = [\n"
            '  { user: "dynamo", password: "for-dynamo" }\n'
            f"  {{ nkey: {_public(self._key)} }}\n"
            '  { user: "reader", password: "for-reader",\n'
            '    permissions: { publish: { deny: ">" } } }\n'
            "] }\n"
        )

    @property
    def password(self) -> dict[str, str]:
        return _variables("dynamo", "for-dynamo", "")

    @property
    def nkey(self) -> dict[str, str]:
        return _variables("", "", str(self._key.seed.decode()))

    @property
    def reader(self) -> dict[str, str]:
        return _variables("reader", "for-reader", "")


def _variables(user: str, password: str, nkey: str) -> dict[str, str]:
    return {
        "NATS_AUTH_USERNAME": user,
        "NATS_AUTH_PASSWORD": password,
        "NATS_AUTH_NKEY": nkey,
    }


def _pair(prefix: int) -> nkeys.KeyPair:
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix)))


def _public(pair: nkeys.KeyPair) -> str:
    return str(pair.public_key.decode())


def _token(
    signer: nkeys.KeyPair, subject: str, kind: str, claims: dict[str, Any], seconds: float = 0
) -> str:
    body: dict[str, Any] = {
        "jti": os.urandom(16).hex(),
        "iat": int(time.time()),
        "iss": _public(signer),
        "name": kind,
        "sub": subject,
        "nats": {**claims, "type": kind, "version": 2},
    }
    if seconds:
        body["exp"] = int(time.time() + seconds)
    signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(body)}"
    return f"{signed}.{_base64(signer.sign(signed.encode()))}"


def _part(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value).encode())


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")
