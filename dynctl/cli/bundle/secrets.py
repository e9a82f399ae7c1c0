"""The secrets that are known on this machine, so that none of them leaves it in a bundle."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.yaml_reader import YamlError, read_yaml
from dynctl.settings.contexts.precedence import in_context
from dynctl.settings.contexts.tokens import read_token

_SECRET_NAME: Final = re.compile(
    r"(?i)password|passwd|secret|credential|apikey|(?:^|_)nkey|token(?:_|$)"
    r"|(?:^|_)(?:auth|creds)(?:_|$)|(?:^|_)(?:key|cookie)$"
)
#: What such a variable holds without being a secret.
_HARMLESS: Final = frozenset({"true", "false", "none", "null", "yes", "no", "on", "off", "auto"})
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s,]+", re.IGNORECASE)
_LARGEST_BYTES: Final = 1 << 20
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
#: Of a user of a kubeconfig: what is no secret though it stands there.
_HARMLESS_USER_KEYS: Final = frozenset({"apiVersion", "command", "interactiveMode", "name"})
_SHORTEST_LEAF: Final = 8
_SHORTEST_LINE: Final = 8


def known_secrets(options: GlobalOptions, environ: Mapping[str, str]) -> set[str]:
    """Every secret that the options, the environment and the kubeconfigs hold or name."""
    found: set[str] = set()
    try:
        options = in_context(options)
        found.add(read_token(options) or "")
    except UsageProblem:
        # Broken or missing; the section that needs it says so.
        pass
    for name in filter(None, (options.token_env, "DYNCTL_TOKEN")):
        found.add(environ.get(name, ""))
    if options.token_file is not None:
        found.add(_content(options.token_file))
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and not _harmless(value):
            found.update(_lines(_content(Path(value))) if _is_path(value) else {value})
        found.update(_in_urls(value))
    for text in (*options.frontend, options.nats_server or "", options.etcd_endpoints or ""):
        found.update(_in_urls(text))
    found.update(_of_kubeconfigs(options, environ))
    found.add(_content(_SERVICE_ACCOUNT))
    return {one.strip() for one in found if one.strip()}


def _harmless(value: str) -> bool:
    """A switch or a number is no secret."""
    plain = value.strip().lower()
    return plain in _HARMLESS or (plain.replace(".", "", 1).isdigit() and len(plain) < 8)


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~", "./"))


def _lines(text: str) -> Iterator[str]:
    """The lines of a file that holds credentials, but for its headings."""
    for line in text.splitlines():
        if len(line.strip()) >= _SHORTEST_LINE and "-----" not in line:
            yield line.strip()


def _in_urls(text: str) -> Iterator[str]:
    """User names and passwords of the URLs in a text."""
    for url in _URL.findall(text):
        try:
            parts = urlsplit(url)
            who = (parts.username or "", parts.password or "")
        except ValueError:
            continue
        yield from (unquote(one) for one in who if one)


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
    """The text of a file; empty where it cannot be read."""
    try:
        with path.expanduser().open("rb") as file:
            return file.read(_LARGEST_BYTES).decode("utf-8", "replace").strip()
    except (OSError, RuntimeError):
        return ""
