"""`dynctl __complete KIND PREFIX [WORD ..]`: live names, within 180 ms or not at all.

The process ends itself 180 ms after its start, so imports are few and late. WORDs are the line as
typed; its ``--frontend`` or ``--context`` specifies the source. Only dynctl frontends are queried,
for their workers.

Names become part of a command line, so a name that a shell would not read as one word is left out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from dynctl.base.options import GlobalOptions

WORD: Final = "__complete"
#: From the start of the process to its end.
LIMIT_S: Final = 0.18

_MOST: Final = 1000
_LARGEST_BYTES: Final = 4 << 20
_LONGEST: Final = 256
#: Characters without a meaning in any of the three shells.
_PLAIN: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:@%+=,-"
)
_FIELDS: Final = ("model", "name", "role", "status")

Row = Mapping[str, Any]


def answer(arguments: Sequence[str]) -> NoReturn:
    """Print the names, one per line, and end the process with 0, also after errors."""
    watch()
    try:
        kind, prefix, *line = [*arguments, "", ""][: max(2, len(arguments))]
        text = "".join(f"{name}\n" for name in names(kind, prefix, line))
        os.write(sys.stdout.fileno(), text.encode())
    except (Exception, KeyboardInterrupt):  # noqa: S110  the shell shows no errors
        pass
    # Skip the interpreter's slow shutdown.
    os._exit(0)


def watch() -> None:
    """End this process at an age of :data:`LIMIT_S`.

    The kernel ends it, since Python runs no handler while it waits in a library.
    """
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, max(0.001, LIMIT_S - age_s()))


def age_s() -> float:
    """Seconds since the start of this process, to 0.01 s; its CPU time if unknown."""
    used = time.process_time()
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return used
    # In a container the two clocks may count from different moments.
    return age if used <= age < 10 else used


def names(kind: str, prefix: str, line: Sequence[str] = ()) -> list[str]:
    """The names that begin with ``prefix``, sorted; raises any error."""
    if kind == "context":
        return _fitting(_contexts(), prefix)
    options = _options(line)
    if options is None:
        return []
    found: Iterable[str] = ()
    if kind == "kube-context":
        from dynctl.settings.contexts.kubeconfig_names import kube_context_names
        from dynctl.settings.contexts.precedence import in_context

        found = kube_context_names(in_context(options).kubeconfig)
    elif kind in _KINDS:
        rows = _workers(options)
        found = _KINDS[kind](rows, prefix)
    return _fitting(found, prefix)


def _fitting(found: Iterable[str], prefix: str) -> list[str]:
    return sorted({name for name in found if name.startswith(prefix) and _is_word(name)})[:_MOST]


def _is_word(name: str) -> bool:
    # A ! starts history expansion, except before =, as in `zone!=zone-a`.
    plain = _PLAIN.issuperset(name.replace("!=", "="))
    return 0 < len(name) <= _LONGEST and name[0] not in "-=!" and plain


def _contexts() -> Iterable[str]:
    """The context names in the file, which is not validated here."""
    import tomllib

    from dynctl.settings.contexts.path import LARGEST_BYTES, TABLE, config_file

    with open(config_file(), "rb") as file:
        table = tomllib.loads(file.read(LARGEST_BYTES).decode()).get(TABLE)
    return table if isinstance(table, dict) else ()


# -- of workers ------------------------------------------------------------------------------------


def _models(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    return (row["model"] for row in rows)


def _workers_names(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    return (row["name"] for row in rows)


def _domains(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    return (domain for row in rows for domain in row["domains"])


def _domain_values(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    """``zone-a``, also as the last of several: ``zone-a,zone-b``."""
    before = prefix[: prefix.rfind(",") + 1]
    return (before + value for row in rows for value in row["domains"].values())


def _selectors(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    """``zone=`` and then ``zone=zone-a``, also as the last of several."""
    before = prefix[: prefix.rfind(",") + 1]
    key, sign, _ = prefix[len(before) :].partition("=")
    if not sign:
        return (f"{before}{one}=" for one in (*_domains(rows, ""), *_FIELDS))
    name = key.removesuffix("!")
    values = (
        row["domains"].get(name) or (row.get(name) if name in _FIELDS else None) for row in rows
    )
    return (f"{before}{key}={value}" for value in values if value)


def _taints(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    return (taint for row in rows for taint in row["runtime_config"].get("taints", ()))


_KINDS: Final[Mapping[str, Callable[[Sequence[Row], str], Iterable[str]]]] = {
    "model": _models,
    "worker": _workers_names,
    "domain": _domains,
    "domain-value": _domain_values,
    "selector": _selectors,
    "taint": _taints,
}


def _workers(options: GlobalOptions) -> list[Row]:
    """The workers of the specified frontend, else of the default one."""
    from dynctl.adapters.dynamo.planes import backend
    from dynctl.base.options import PLACES
    from dynctl.settings.contexts.precedence import in_context, places_without_source
    from dynctl.sources.named import DEFAULT_FRONTEND, frontends, token

    options = in_context(options)
    named = frontends(options)
    if options.offline or (not named and backend(options) is not None):
        return []
    if not named and (options.given & PLACES or places_without_source(options)):
        return []  # the command would end with an error: the default address is another fleet
    document = _fetch((named or (DEFAULT_FRONTEND,))[0], token(options))
    if isinstance(document, dict):
        document = document.get("workers", document.get("items"))
    return [
        {"domains": {}, "runtime_config": {}, **row}
        for row in document
        if isinstance(row.get("name"), str) and isinstance(row.get("model"), str)
    ]


def _fetch(url: str, token: str | None) -> Any:
    """The response of ``GET /v1/workers``, without proxy, redirects and retries."""
    import json
    from http.client import HTTPConnection, HTTPSConnection
    from urllib.parse import urlsplit

    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return []
    connection: HTTPConnection
    if parts.scheme == "https":
        import ssl

        trusted = ssl.create_default_context(cafile=os.environ.get("DYNCTL_CA_CERT") or None)
        connection = HTTPSConnection(parts.hostname, parts.port, timeout=LIMIT_S, context=trusted)
    else:
        connection = HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)
    headers = {"accept": "application/json", "connection": "close"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    connection.request("GET", parts.path.rstrip("/") + "/v1/workers", headers=headers)
    response = connection.getresponse()
    data = response.read(_LARGEST_BYTES + 1)
    if response.status != 200 or len(data) > _LARGEST_BYTES:
        return []
    return json.loads(data)


# -- of the line -----------------------------------------------------------------------------------


def _options(line: Sequence[str]) -> GlobalOptions | None:
    """The source options of the line; None if one needs an expansion by the shell."""
    from dynctl.base.options import GlobalOptions
    from dynctl.settings.contexts.keys import KEYS, option_value

    flags = {key.flag: key for key in KEYS.values() if key.kind in ("text", "texts", "path")}
    others = {"--token": "token", "--context": "context"}
    found: dict[str, Any] = {}
    words = iter(line)
    for raw in words:
        flag, equals, value = raw.partition("=")
        if raw == "--":
            break
        if flag in ("--demo", "--view"):
            found |= {"demo": True}
        if flag not in flags and flag not in others:
            continue
        text = _unquoted(value if equals else next(words, ""))
        if text is None:
            return None
        if flag == "--frontend":
            found["frontend"] = (*found.get("frontend", ()), text)
        elif flag in flags:
            found[flags[flag].field] = option_value(flags[flag], text)
        else:
            found[others[flag]] = text
    return GlobalOptions(**found, given=frozenset(found))


def _unquoted(word: str) -> str | None:
    """A word without its quotes; None if only the shell can expand it."""
    if not word.strip("\"'") or set(word) & set("$`*?[]{}"):
        return None
    if not set(word) & set("\"'\\"):
        return word
    import shlex

    parts = shlex.split(word)
    return parts[0] if len(parts) == 1 else None
