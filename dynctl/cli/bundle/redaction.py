"""Redaction of secrets and prompts.

Three layers: known secrets are removed from every text; texts that look like credentials are
masked; values under secret keys are masked, values under prompt and token keys are hashed.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import msgspec
from xxhash import xxh3_64_hexdigest

from dynctl.base.backends import PLACES
from dynctl.base.errors import UsageProblem
from dynctl.base.files import read_file
from dynctl.base.options import GlobalOptions
from dynctl.base.yaml_reader import YamlError, read_yaml
from dynctl.settings.contexts.precedence import in_context
from dynctl.settings.contexts.tokens import read_token

MASK: Final = "***"
#: Shorter secrets are masked as whole words only.
_SHORTEST: Final = 4
#: Secrets of at least this length are also searched in other encodings.
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
    """``secrets``: values to remove everywhere."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {spelling for secret in secrets for spelling in _spellings(secret)}
        # The longest first, since a secret may be part of another.
        ordered = sorted(known, key=lambda spelling: (-len(spelling), spelling))
        whole = [re.escape(spelling) for spelling in ordered if len(spelling) >= _SHORTEST]
        words = [
            rf"(?<!\w){re.escape(spelling)}(?!\w)"
            for spelling in ordered
            if len(spelling) < _SHORTEST
        ]
        self._known = re.compile("|".join([*whole, *words])) if ordered else None
        self._bytes = [spelling.encode() for spelling in ordered if len(spelling) >= _SHORTEST]

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
        """JSON data without secrets and prompts, in the same shape."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {
                    self.text(str(key)): self._redact_value(str(key), item)
                    for key, item in value.items()
                }
            case list() | tuple():
                return [self.plain(item) for item in value]
            case _:
                return value

    def holds_secret(self, data: bytes) -> bool:
        """Whether ``data`` contains a known secret."""
        return any(spelling in data for spelling in self._bytes)

    def _redact_value(self, key: str, value: Any) -> Any:
        if _SECRET_KEY.search(key) and isinstance(value, (str, bytes, list, tuple, Mapping)):
            return MASK if value else value
        # Numbers stay: they are token counts.
        if key.lower() in _PROMPT_KEYS and isinstance(value, (str, bytes, list, tuple, Mapping)):
            return hashed(value) if value else value
        return self.plain(value)


def hashed(value: Any) -> dict[str, Any]:
    """The replacement of a prompt or tokens; equal values stay recognisable."""
    return {
        "xxh3": xxh3_64_hexdigest(msgspec.json.encode(value)),
        "length": len(value),
    }


def _spellings(secret: str) -> set[str]:
    """A secret in its encodings: plain, URL, base64, JSON."""
    secret = secret.strip()
    if not secret:
        return set()
    if len(secret) < _SPELLED:
        return {secret}
    encoded = base64.b64encode(secret.encode()).decode()
    escaped = msgspec.json.encode(secret).decode()[1:-1]
    # The last characters of base64 depend on what follows, so the padding is also removed.
    return {secret, quote(secret, safe=""), encoded, encoded.rstrip("="), escaped}


_SECRET_NAME: Final = re.compile(
    r"(?i)password|passwd|secret|credential|apikey|(?:^|_)nkey|token(?:_|$)"
    r"|(?:^|_)(?:auth|creds)(?:_|$)|(?:^|_)(?:key|cookie)$"
)
#: Values of such variables that are not secrets.
_HARMLESS: Final = frozenset({"true", "false", "none", "null", "yes", "no", "on", "off", "auto"})
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s,]+", re.IGNORECASE)
_LARGEST_BYTES: Final = 1 << 20
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
#: Keys of a kubeconfig user that are not secret.
_HARMLESS_USER_KEYS: Final = frozenset({"apiVersion", "command", "interactiveMode", "name"})
_SHORTEST_LEAF: Final = 8
_SHORTEST_LINE: Final = 8


def known_secrets(options: GlobalOptions, environ: Mapping[str, str]) -> set[str]:
    """All secrets in the options, the environment and the kubeconfigs, and in files they name."""
    texts: set[str] = set()
    try:
        options = in_context(options)
        texts.add(read_token(options) or "")
    except UsageProblem:
        # Broken or missing; the section that needs it reports it.
        pass
    for name in filter(None, (options.token_env, "DYNCTL_TOKEN")):
        texts.add(environ.get(name, ""))
    if options.token_file is not None:
        texts.add(_content(options.token_file))
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and not _harmless(value):
            texts.update(_lines(_content(Path(value))) if _is_path(value) else {value})
        texts.update(_in_urls(value))
    addresses = (options.nats_server, *(getattr(options, place) for place in PLACES))
    for text in (*options.frontend, *(str(address) for address in addresses if address)):
        texts.update(_in_urls(text))
    texts.update(_of_kubeconfigs(options, environ))
    texts.add(_content(_SERVICE_ACCOUNT))
    return {text.strip() for text in texts if text.strip()}


def _harmless(value: str) -> bool:
    """Whether a value is a switch or a number."""
    plain = value.strip().lower()
    return plain in _HARMLESS or (plain.replace(".", "", 1).isdigit() and len(plain) < 8)


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~", "./"))


def _lines(text: str) -> Iterator[str]:
    """The lines of a credentials file without its headings."""
    for line in text.splitlines():
        if len(line.strip()) >= _SHORTEST_LINE and "-----" not in line:
            yield line.strip()


def _in_urls(text: str) -> Iterator[str]:
    """User names and passwords of the URLs in a text."""
    for url in _URL.findall(text):
        try:
            parts = urlsplit(url)
            credentials = (parts.username or "", parts.password or "")
        except ValueError:
            continue
        yield from (unquote(credential) for credential in credentials if credential)


def _of_kubeconfigs(options: GlobalOptions, environ: Mapping[str, str]) -> Iterator[str]:
    paths = [options.kubeconfig] if options.kubeconfig is not None else []
    paths += [Path(part) for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    paths.append(Path("~/.kube/config"))
    for path in paths:
        text = _content(path)
        if text:
            yield from _of_users(_yaml(text), path.expanduser().parent)


def _of_users(document: Any, folder: Path) -> Iterator[str]:
    users = document.get("users") if isinstance(document, dict) else None
    for entry in users if isinstance(users, list) else ():
        user = entry.get("user") if isinstance(entry, dict) else None
        if isinstance(user, dict):
            yield from _leaves(user)
            for key in ("tokenFile", "client-key"):
                if isinstance(user.get(key), str):
                    yield from _lines(_content(folder / user[key]))


def _leaves(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, key)
    elif isinstance(value, str) and key not in _HARMLESS_USER_KEYS:
        always = key in ("token", "password", "username")
        if always or len(value) >= _SHORTEST_LEAF:
            yield value


def _yaml(text: str) -> Any:
    try:
        return read_yaml(text.encode(), strict=False)
    except YamlError:
        return None


def _content(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        data = read_file(path.expanduser(), _LARGEST_BYTES, pipe=False)
        return data[:_LARGEST_BYTES].decode("utf-8", "replace").strip()
    except (OSError, RuntimeError):
        return ""
