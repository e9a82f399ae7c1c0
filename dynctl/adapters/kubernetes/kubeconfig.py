"""The selected cluster: kubeconfig files found, merged and read as by kubectl.

The official client merges too, but uses the last file's current context and resolves a user's
relative paths like the cluster's; so files are merged here, and the client gets one context. The
content of a kubeconfig (tokens, certificates, arguments of plugins) never appears in a message.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.yaml_reader import YamlError, YamlTooLarge, read_yaml_file

VARIABLE: Final = "KUBECONFIG"
DEFAULT: Final = "~/.kube/config"
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER: Final = "in-cluster"
"""The displayed context name if the pod's own service account is used."""

_LARGEST_BYTES: Final = 16 << 20
_MOST_NAMED: Final = 12
_HOW: Final = "set one: --kubeconfig FILE, or KUBECONFIG=FILE in the environment"
_CLUSTER_FILES: Final = ("certificate-authority",)
_USER_FILES: Final = ("client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True, slots=True)
class KubeContext:
    """One context with its cluster and user, with absolute paths.

    ``server`` is the cluster's URL without credentials. ``user`` is empty if the context has none.
    ``origin``: the files, for display.
    """

    name: str
    namespace: str
    server: str
    cluster: Mapping[str, Any]
    user: Mapping[str, Any] = field(default_factory=dict, repr=False)
    user_name: str = ""
    origin: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.server})"


@dataclass(slots=True)
class _Merged:
    """Entries by name; the first of two with one name counts, as for the current context."""

    origin: str
    current: str = ""
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    contexts: dict[str, dict[str, Any]] = field(default_factory=dict)
    users: dict[str, dict[str, Any]] = field(default_factory=dict)


def kube_context(
    kubeconfig: Path | None, context: str | None, *, account: Path = SERVICE_ACCOUNT
) -> KubeContext:
    """The context of the options, else the current one, else the pod's service account.

    ``account`` is the directory of a pod's token. Raises UsageProblem.
    """
    files = _files(kubeconfig)
    if files:
        return _choose_context(_merge(files), context)
    inside = _service_account(account)
    if inside is None:
        raise UsageProblem(
            f"no cluster is configured: --kubeconfig and ${VARIABLE} are not set, there is no "
            f"{DEFAULT}, and this is not a pod (no service account at {account})",
            _HOW,
        )
    if context is not None:
        raise UsageProblem(
            f"--kube-context {context}: no kubeconfig, only the service account of this pod",
            _HOW,
        )
    return inside


def _files(kubeconfig: Path | None) -> list[Path]:
    """The files to merge; empty if none is set and the default one does not exist."""
    if kubeconfig is not None:
        path = kubeconfig.expanduser()
        if not path.exists():
            raise UsageProblem(f"--kubeconfig {kubeconfig}: the file does not exist")
        return [path]
    where = os.environ.get(VARIABLE, "")
    if where:
        named = [Path(part).expanduser() for part in where.split(os.pathsep) if part]
        files = [path for path in named if path.exists()]
        if not files:
            raise UsageProblem(
                f"${VARIABLE} is {where}: the file does not exist", "correct it, or unset it"
            )
        return files
    default = Path(os.path.expanduser(DEFAULT))
    return [default] if default.exists() else []


def _service_account(account: Path) -> KubeContext | None:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    token, authority = account / "token", account / "ca.crt"
    if not (host and port and token.is_file() and authority.is_file()):
        return None
    try:
        namespace = (account / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        namespace = ""
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    return KubeContext(
        IN_CLUSTER,
        namespace or "default",
        server,
        {"server": server, "certificate-authority": str(authority)},
        {"tokenFile": str(token)},
        "the service account of this pod",
        str(account),
    )


def _merge(files: Sequence[Path]) -> _Merged:
    merged = _Merged(", ".join(map(str, files)))
    for path in files:
        document = _document(path)
        folder = Path(os.path.abspath(path)).parent
        merged.current = merged.current or _word(document.get("current-context"))
        for kind, into, names in (
            ("cluster", merged.clusters, _CLUSTER_FILES),
            ("context", merged.contexts, ()),
            ("user", merged.users, _USER_FILES),
        ):
            for name, entry in _entries(path, document, kind):
                into.setdefault(name, _absolute(entry, names, folder))
    return merged


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = read_yaml_file(path, most_bytes=_LARGEST_BYTES, strict=False)
    except OSError as error:
        raise UsageProblem(f"kubeconfig {path} is not readable: {file_problem(error)}") from error
    except YamlTooLarge as error:
        raise UsageProblem(f"kubeconfig {path}: {error}") from None
    except YamlError as error:
        # The problem is not displayed: it may quote a token.
        place = f" ({error.position})" if error.position else ""
        raise UsageProblem(f"kubeconfig {path} is not YAML{place}") from None
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise UsageProblem(
            f"kubeconfig {path} is not a kubeconfig: expected a mapping with clusters"
        )
    return document


def _entries(
    path: Path, document: Mapping[str, Any], kind: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = document.get(f"{kind}s") or []
    if not isinstance(entries, list):
        raise UsageProblem(f"kubeconfig {path}: expected {kind}s to be a list")
    for number, entry in enumerate(entries, 1):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not name:
            raise UsageProblem(f"kubeconfig {path}: {kind} number {number} has no name")
        body = entry.get(kind)
        if body is not None and not isinstance(body, Mapping):
            raise UsageProblem(f"kubeconfig {path}: {kind} {name} is not a mapping")
        yield name, dict(body or {})


def _absolute(entry: dict[str, Any], names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Resolve relative paths by the file that has them; a plugin's only if it has a slash."""
    for name in names:
        if _word(entry.get(name)):
            entry[name] = os.path.normpath(folder / entry[name])
    plugin = entry.get("exec")
    if isinstance(plugin, Mapping) and "/" in _word(plugin.get("command")):
        entry["exec"] = {**plugin, "command": os.path.normpath(folder / plugin["command"])}
    return entry


def _choose_context(merged: _Merged, wanted: str | None) -> KubeContext:
    if not merged.clusters:
        raise UsageProblem(f"kubeconfig {merged.origin} defines no cluster", _HOW)
    name = wanted or merged.current
    if not name:
        raise UsageProblem(
            f"kubeconfig {merged.origin} has no current context",
            f"select one: --kube-context NAME; {_existing(merged.contexts, '')}",
        )
    if name not in merged.contexts:
        said = f"--kube-context {name}" if wanted else f"the current context {name}"
        raise UsageProblem(
            f"{said}: no such context in {merged.origin}",
            _existing(merged.contexts, name),
        )
    context = merged.contexts[name]
    where = f"context {name} of {merged.origin}"
    cluster_name, user_name = _word(context.get("cluster")), _word(context.get("user"))
    if cluster_name not in merged.clusters:
        raise UsageProblem(
            f"{where}: its cluster {cluster_name or '(none)'} is not defined there",
            _existing(merged.clusters, cluster_name),
        )
    if user_name and user_name not in merged.users:
        raise UsageProblem(
            f"{where}: its user {user_name} is not defined there",
            _existing(merged.users, user_name),
        )
    cluster, user = merged.clusters[cluster_name], merged.users.get(user_name, {})
    _check(f"cluster {cluster_name}", cluster, _CLUSTER_FILES)
    _check(f"user {user_name}", user, _USER_FILES)
    return KubeContext(
        name,
        _word(context.get("namespace")) or "default",
        _server(f"cluster {cluster_name} of {merged.origin}", cluster),
        cluster,
        user,
        user_name,
        merged.origin,
    )


def _check(where: str, entry: Mapping[str, Any], names: Sequence[str]) -> None:
    """Validate an entry: its files exist, and its own data can be decoded."""
    for name in names:
        data, path = entry.get(f"{name}-data"), entry.get(name)
        if data:
            try:
                base64.b64decode("".join(str(data).split()), validate=True)
            except (binascii.Error, ValueError):
                raise UsageProblem(f"kubeconfig: {name}-data of {where} is not base64") from None
        elif path and not Path(str(path)).is_file():
            raise UsageProblem(f"kubeconfig: {name} of {where}: no file {path}")


def _server(where: str, cluster: Mapping[str, Any]) -> str:
    """The URL without user, password and query."""
    server = _word(cluster.get("server"))
    try:
        url = urlsplit(server)
        host, port = url.hostname, url.port
    except ValueError:
        host, port, url = None, None, urlsplit("")
    if url.scheme not in ("http", "https") or not host:
        raise UsageProblem(f"kubeconfig: {where} has no server, expected https://HOST:PORT")
    place = f"[{host}]" if ":" in host else host
    return f"{url.scheme}://{place}{f':{port}' if port else ''}{url.path.rstrip('/')}"


def _existing(names: Mapping[str, Any], wanted: str) -> str:
    """All names, the most similar to the wanted one first."""
    if not names:
        return "none is defined"
    close = difflib.get_close_matches(wanted, names, n=3) if wanted else []
    ordered = [*close, *(name for name in names if name not in close)]
    more = len(ordered) - _MOST_NAMED
    shown = ", ".join(ordered[:_MOST_NAMED])
    return f"defined: {shown}{f' and {more} more' if more > 0 else ''}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""
