"""Secrets and prompts out of whatever is to be sent away.

Three nets, each for what the others let through: the secrets that are known here are taken out of
every text, whatever it is; texts that look like credentials are masked; and a value whose key says
that it is a secret is masked, one whose key says that it is a prompt or its tokens is hashed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec
from xxhash import xxh3_64_hexdigest

MASK: Final = "***"
#: Shorter secrets are masked as whole words only: "a" is in every text.
_SHORTEST: Final = 4
#: Secrets of this length and more are looked for in other spellings too.
_SPELLED: Final = 6

_SECRET_KEY: Final = re.compile(
    r"(?:^|[_.-])(?:password|passwd|passphrase|secret|token|apikey|api[_-]?key|authorization"
    r"|private[_-]?key|client[_-]?key(?:[_-]data)?|client[_-]?certificate[_-]data|nkey|seed"
    r"|credentials?|creds|cookie|bearer)$",
    re.IGNORECASE,
)
_PROMPT_KEYS: Final = frozenset(
    {"prompt", "prompts", "messages", "content", "input", "inputs", "input_ids"}
    | {"tokens", "token_ids", "prompt_token_ids", "token_data", "completion"}
)

_USERINFO: Final = re.compile(r"(?<=://)[^\s/@\"'<>]+(?:@[^\s/@\"'<>]+)*@")
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_JWT: Final = re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?")
_PEM: Final = re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL)
_ASSIGNED: Final = re.compile(
    r"(?i)\b((?:[a-z0-9]+[_-])*(?:password|passwd|secret|token|api[_-]?key|access[_-]?key"
    r"|authorization))(\s*[=:]\s*)(?!\*)[^\s,;&\"']+"
)


class Redactor:
    """``secrets``: values that must not come out, wherever they stand."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {one for secret in secrets for one in _spellings(secret)}
        # The longest first: one secret may be a part of another.
        ordered = sorted(known, key=lambda one: (-len(one), one))
        whole = [re.escape(one) for one in ordered if len(one) >= _SHORTEST]
        words = [rf"(?<!\w){re.escape(one)}(?!\w)" for one in ordered if len(one) < _SHORTEST]
        self._known = re.compile("|".join([*whole, *words])) if ordered else None
        self._bytes = [one.encode() for one in ordered if len(one) >= _SHORTEST]

    def text(self, text: str) -> str:
        """``text`` without secrets."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _PEM.sub(MASK, text)
        text = _USERINFO.sub(f"{MASK}@", text)
        text = _BEARER.sub(rf"\1 {MASK}", text)
        text = _JWT.sub(MASK, text)
        return _ASSIGNED.sub(rf"\1\2{MASK}", text)

    def plain(self, value: Any) -> Any:
        """Plain data (what JSON holds) without secrets and prompts; shapes stay."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {
                    self.text(str(key)): self._valued(str(key), item) for key, item in value.items()
                }
            case list() | tuple():
                return [self.plain(item) for item in value]
            case _:
                return value

    def holds_secret(self, data: bytes) -> bool:
        """Whether a known secret stands in ``data``: nothing goes out unlooked at."""
        return any(one in data for one in self._bytes)

    def _valued(self, key: str, value: Any) -> Any:
        if _SECRET_KEY.search(key) and isinstance(value, (str, bytes, list, tuple, Mapping)):
            return MASK if value else value
        # A count of tokens is a number, and stays.
        if key.lower() in _PROMPT_KEYS and isinstance(value, (str, bytes, list, tuple, Mapping)):
            return hashed(value) if value else value
        return self.plain(value)


def hashed(value: Any) -> dict[str, Any]:
    """What stands for a prompt or for tokens: equal ones are still seen to be equal."""
    return {
        "xxh3": xxh3_64_hexdigest(msgspec.json.encode(value)),
        "length": len(value),
    }


def _spellings(secret: str) -> set[str]:
    """A secret as it may be written: plain, in a URL, in base64, in JSON."""
    secret = secret.strip()
    if not secret:
        return set()
    if len(secret) < _SPELLED:
        return {secret}
    encoded = base64.b64encode(secret.encode()).decode()
    escaped = msgspec.json.encode(secret).decode()[1:-1]
    # The last characters of base64 depend on what follows, so the whole groups are looked for.
    return {secret, quote(secret, safe=""), encoded, encoded.rstrip("="), escaped}
