"""Addresses and credentials of NATS from Dynamo's variables; no message has credentials."""

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import urlsplit

from nats.errors import Error as NatsError

from dynctl.base.errors import UNTRUSTED, UsageProblem, file_problem
from dynctl.base.files import expect_regular

_SCHEMES: Final = ("nats", "tls")
_PORT: Final = 4222
#: What the library raises where a connection is lost. RuntimeError is uvloop's, for one that it has
#: closed and the library has not noticed yet.
NATS_ERRORS: Final = (NatsError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class NatsServer:
    """One server: ``url`` for connections, ``title`` without the part before an ``@``."""

    url: str = field(repr=False)
    title: str

    @property
    def has_credentials(self) -> bool:
        return "@" in self.url


def nats_servers(given: str | Sequence[str]) -> tuple[NatsServer, ...]:
    """Servers from a list, or from a text with commas. Raises UsageProblem."""
    several = [given] if isinstance(given, str) else given
    parts = [part.strip() for each in several for part in each.split(",")]
    servers = tuple(_server(part) for part in parts if part)
    if not servers:
        raise UsageProblem("no NATS server is set", "set --nats-server or NATS_SERVER")
    return servers


def _server(given: str) -> NatsServer:
    url = given if "://" in given else f"nats://{given}"
    # The part before an @ may be a password, so a wrong address is quoted from there on.
    shown = url.rpartition("@")[2]
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if not host or scheme not in _SCHEMES:
        raise UsageProblem(
            f"NATS server {shown!r}: expected nats://HOST:PORT or tls://HOST:PORT",
            "set --nats-server or NATS_SERVER",
        )
    shown_host = f"[{host}]" if ":" in host else host
    user = url.rpartition("@")[0].partition("://")[2]
    address = f"{shown_host}:{port or _PORT}"
    return NatsServer(
        f"{scheme}://{user}@{address}" if user else f"{scheme}://{address}",
        f"{scheme}://{address}",
    )


@dataclass(frozen=True, slots=True)
class NatsAuth:
    """Our credentials. The first that is set counts: user and password, token, nkey seed,
    credentials file. ``ca_file`` is a PEM with the authority of a TLS server.
    """

    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    nkey_seed: str | None = field(default=None, repr=False)
    credentials_file: str | None = None
    ca_file: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "NatsAuth":
        """Read Dynamo's variables. Raises UsageProblem for an incomplete pair."""
        read = os.environ if environment is None else environment
        auth = cls(
            read.get("NATS_AUTH_USERNAME") or None,
            read.get("NATS_AUTH_PASSWORD") or None,
            read.get("NATS_AUTH_TOKEN") or None,
            read.get("NATS_AUTH_NKEY") or None,
            read.get("NATS_AUTH_CREDENTIALS_FILE") or None,
            read.get("NATS_TLS_CA_CERT_PATH") or None,
        )
        if (auth.username is None) != (auth.password is None):
            there, lacks = "NATS_AUTH_USERNAME", "NATS_AUTH_PASSWORD"
            if auth.username is None:
                there, lacks = lacks, there
            raise UsageProblem(f"{there} is set and {lacks} is not", "set both, or neither")
        return auth

    def explain(self, reason: str, server: NatsServer) -> str:
        """The reason for which a server is not reachable, with the credentials or the file that
        it is about."""
        if "uthenti" in reason or "uthoriz" in reason:
            return f"{reason} (credentials: {self._source(server)})"
        if UNTRUSTED in reason:
            return f"{reason} (NATS_TLS_CA_CERT_PATH: {self.ca_file or 'not set'})"
        return reason

    def _source(self, server: NatsServer) -> str:
        if server.has_credentials:
            return "those in the address"
        if self.username is not None:
            return "NATS_AUTH_USERNAME, NATS_AUTH_PASSWORD"
        if self.token is not None:
            return "NATS_AUTH_TOKEN"
        if self.nkey_seed is not None:
            return "NATS_AUTH_NKEY"
        if self.credentials_file is not None:
            return f"NATS_AUTH_CREDENTIALS_FILE {self.credentials_file}"
        return "no NATS_AUTH_ variable is set"

    def options(self, server: NatsServer) -> dict[str, Any]:
        """The options for the client library. Raises UsageProblem for unreadable files."""
        return self._who(server) | self._tls()

    def _who(self, server: NatsServer) -> dict[str, Any]:
        if server.has_credentials:
            return {}
        if self.username is not None:
            return {"user": self.username, "password": self.password}
        if self.token is not None:
            return {"token": self.token}
        if self.nkey_seed is not None:
            _need_nkeys("NATS_AUTH_NKEY")
            return {"nkeys_seed_str": self.nkey_seed}
        if self.credentials_file is not None:
            _need_nkeys("NATS_AUTH_CREDENTIALS_FILE")
            _need_file(self.credentials_file, "NATS_AUTH_CREDENTIALS_FILE")
            return {"user_credentials": self.credentials_file}
        # Dynamo's default; a server without users accepts it.
        return {"user": "user", "password": "user"}

    def _tls(self) -> dict[str, Any]:
        if self.ca_file is None:
            return {}
        try:
            expect_regular(self.ca_file)
            return {"tls": ssl.create_default_context(cafile=self.ca_file)}
        except OSError as error:  # ssl.SSLError is one
            reason = "not a PEM file" if isinstance(error, ssl.SSLError) else file_problem(error)
            raise UsageProblem(
                f"{self.ca_file}: {reason}", "NATS_TLS_CA_CERT_PATH has its path"
            ) from None


def _need_file(path: str, variable: str) -> None:
    try:
        expect_regular(path)
    except OSError as error:
        raise UsageProblem(f"{path}: {file_problem(error)}", f"{variable} has its path") from None


def _need_nkeys(variable: str) -> None:
    if find_spec("nkeys") is None:
        raise UsageProblem(
            f"{variable} is set, and the package nkeys that signs with it is not installed",
            "pip install nkeys",
        )
