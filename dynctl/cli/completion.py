"""Shell completion: Typer's own scripts and words, with the current names of live things.

On TAB the script of a shell starts dynctl with the typed line in the environment. Commands and
options come from the commands, words of a value from its metavar (``tcp|nats``), names of workers,
models, decisions and contexts from :func:`names_of`. Names become part of a command line, so a
name that a shell would not read as one plain word is left out.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from dynctl.base.options import GlobalOptions

SHELLS: Final = ("bash", "zsh", "fish")
#: The variable with which a script of Typer asks; its value is ``complete_SHELL``.
VARIABLE: Final = "_DYNCTL_COMPLETE"
#: Time for live names, in seconds; a source that takes longer completes nothing.
LIMIT_S: Final = 0.4

_MOST: Final = 1000
_LARGEST_BYTES: Final = 4 << 20
_LONGEST: Final = 256
#: Characters without a meaning in any of the three shells.
_PLAIN: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:@%+=,-"
)
_FIELDS: Final = ("model", "role", "status", "name")
_LITERAL: Final = re.compile(r"(?=.*[a-z])[A-Za-z][\w.-]*")

#: A script that zsh finds in its path runs at the first TAB, which it has to answer.
_FOUND_BY_ZSH: Final = """\
[[ $zsh_eval_context[-1] != loadautofunc ]] || _dynctl_completion "$@"
"""

Row = Mapping[str, Any]
Completer = Callable[[typer.Context, str], list[str]]


def script(root: Any, shell: str) -> str:
    """The script of Typer for a shell of :data:`SHELLS`; ``root``: the whole program."""
    text = _of_typer(root, f"source_{shell}")[0].strip() + "\n"
    return text + _FOUND_BY_ZSH if shell == "zsh" else text


def _of_typer(root: Any, instruction: str) -> tuple[str, int]:
    """What Typer answers to a script that asks with this instruction, and the exit code."""
    os.environ[VARIABLE] = instruction
    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            root.main([], prog_name="dynctl", complete_var=VARIABLE)
    except SystemExit as end:
        return out.getvalue(), int(end.code or 0)
    finally:
        del os.environ[VARIABLE]
    return "", 1


# -- words -----------------------------------------------------------------------------------------


def words_of(metavar: str | None) -> Completer | None:
    """The words that a metavar lists (``tcp|nats``, ``0..1|off``); None if it lists none."""
    parts = (metavar or "").strip("[]").split("|")
    literals = [part for part in parts if _LITERAL.fullmatch(part)]
    if len(parts) < 2 or not literals:
        return None

    def words(context: typer.Context, incomplete: str) -> list[str]:
        return literals

    return words


def formats(context: typer.Context, incomplete: str) -> list[str]:
    """The output formats of the command."""
    from dynctl.cli.table import formats_of

    return [str(form) for form in formats_of(context.command_path.partition(" ")[2])]


def codes(context: typer.Context, incomplete: str) -> list[str]:
    """The codes of findings and doubts in use."""
    from dynctl.findings.catalogue import all_codes

    return [entry.code for entry in all_codes().values() if not entry.retired]


def trial_groups(context: typer.Context, incomplete: str) -> list[str]:
    """The groups of `test`."""
    from dynctl.experiments.groups.all import GROUPS

    return [group.word for group in GROUPS]


def policies(context: typer.Context, incomplete: str) -> list[str]:
    """The policies of a replay, behind their label; after a comma their settings."""
    from dynctl.simulation.replay.policies import BUILT_IN
    from router_core import PRESETS

    before = incomplete[: max(incomplete.rfind(":"), incomplete.rfind(",")) + 1]
    words = _settings() if "," in before else [*BUILT_IN, *PRESETS]
    return [before + word for word in words]


def assignments(context: typer.Context, incomplete: str) -> list[str]:
    """``setting=value`` of `--set`, and one more of each load of the live workers."""
    return [*_settings(), *names_of("load")(context, incomplete)]


def _settings() -> list[str]:
    """Each setting with each of its values where they are few, else with its default."""
    from router_core import SETTINGS

    offered = []
    for setting in SETTINGS.values():
        words: Iterable[str] = setting.choices or [
            "none" if setting.default is None else str(setting.default)
        ]
        if setting.type is bool:
            words = ("true", "false")
        offered += [f"{setting.name}={word}" for word in words]
    return list(filter(_is_word, offered))


# -- live names ------------------------------------------------------------------------------------


def names_of(kind: str) -> Completer:
    """Names of a kind of :data:`_KINDS`, ``context`` or ``kube-context``.

    They come from the source that the line, the environment or the context names, if it is a
    router of dynctl that answers within :data:`LIMIT_S`; otherwise there are none.
    """

    def names(context: typer.Context, incomplete: str) -> list[str]:
        fitting: list[str] = []

        def look_up() -> None:
            try:
                fitting.extend(_fitting(_names(kind, context, incomplete), incomplete))
            except Exception:
                fitting.clear()  # the shell shows no errors

        # A library that waits cannot be interrupted: the process ends without it.
        thread = threading.Thread(target=look_up, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        return [] if thread.is_alive() else fitting

    return names


def _names(kind: str, context: typer.Context, prefix: str) -> Iterable[str]:
    from dynctl.settings.contexts.precedence import in_context

    if kind == "context":
        return _contexts()
    options = _options(context)
    if options is None:
        return ()
    if kind == "kube-context":
        from dynctl.adapters.kubernetes.demo_cluster import PREFIX, demo_contexts
        from dynctl.settings.contexts.kubeconfig_names import kube_context_names

        if prefix.startswith(PREFIX):
            return demo_contexts()
        return kube_context_names(in_context(options).kubeconfig)
    path = "/v1/decisions?limit=100" if kind == "decision" else "/v1/workers"
    return _KINDS[kind](_rows(options, path), prefix)


def _fitting(names: Iterable[str], prefix: str) -> list[str]:
    return sorted({name for name in names if name.startswith(prefix) and _is_word(name)})[:_MOST]


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


def _options(context: typer.Context) -> GlobalOptions | None:
    """The global options of the line; None if a value needs an expansion by the shell."""
    from dynctl.cli.given_options import options_of_line

    options = options_of_line(context)
    typed = (*options.frontend, options.context or "", options.token or "", options.discovery or "")
    return None if any(set(text) & set("$`*?[]{}\"'\\ ") for text in typed) else options


def _rows(options: GlobalOptions, path: str) -> list[Row]:
    """What the specified frontend lists, else the default one."""
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
    trusted = options.ca_cert or os.environ.get("DYNCTL_CA_CERT")
    document = _fetch((named or (DEFAULT_FRONTEND,))[0], path, token(options), trusted)
    if isinstance(document, dict):
        lists = (document.get(key) for key in ("workers", "decisions", "items"))
        document = next(rows for rows in lists if rows is not None)
    return [{"domains": {}, "runtime_config": {}, **row} for row in document]


def _fetch(url: str, path: str, token: str | None, trusted: Any) -> Any:
    """The response of a GET, without proxy, redirects and retries."""
    import json
    from http.client import HTTPConnection, HTTPSConnection
    from urllib.parse import urlsplit

    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return []
    connection: HTTPConnection
    if parts.scheme == "https":
        import ssl

        secure = ssl.create_default_context(cafile=trusted or None)
        connection = HTTPSConnection(parts.hostname, parts.port, timeout=LIMIT_S, context=secure)
    else:
        connection = HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)
    headers = {"accept": "application/json", "connection": "close"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
    response = connection.getresponse()
    data = response.read(_LARGEST_BYTES + 1)
    if response.status != 200 or len(data) > _LARGEST_BYTES:
        return []
    return json.loads(data)


def _domain_values(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    """``zone-a``, also as the last of several: ``zone-a,zone-b``."""
    before = prefix[: prefix.rfind(",") + 1]
    return (before + value for row in rows for value in row["domains"].values())


def _loads(workers: Iterable[str]) -> Iterable[str]:
    from dynctl.sources.dry_run import LOADS

    return (f"load.{worker}.{load}=+1" for worker in workers for load in LOADS)


def _selectors(rows: Sequence[Row], prefix: str) -> Iterable[str]:
    """``zone=zone-a``, also as the last of several, and ``zone!=zone-a`` once that is typed."""
    before = prefix[: prefix.rfind(",") + 1]
    sign = "!=" if "!" in prefix[len(before) :] else "="
    for row in rows:
        pairs = {**{key: row.get(key) for key in _FIELDS}, **row["domains"]}
        yield from (f"{before}{key}{sign}{value}" for key, value in pairs.items() if value)


_KINDS: Final[Mapping[str, Callable[[Sequence[Row], str], Iterable[str]]]] = {
    "model": lambda rows, _: (row["model"] for row in rows),
    "worker": lambda rows, _: (row["name"] for row in rows),
    "decision": lambda rows, _: (row["id"] for row in rows),
    "load": lambda rows, _: _loads(row["name"] for row in rows),
    "domain": lambda rows, _: (domain for row in rows for domain in row["domains"]),
    "domain-value": _domain_values,
    "selector": _selectors,
    "taint": lambda rows, _: (
        taint for row in rows for taint in row["runtime_config"].get("taints", ())
    ),
}


# -- the line of a shell ---------------------------------------------------------------------------


def answer(build: Callable[[list[str], str], tuple[Any, list[str]]]) -> NoReturn:
    """Print what completes the line in the environment, and end the process.

    ``build``: the program for the words of a line and the unfinished last word; and the words with
    the command that they leave out.
    """
    code = 1
    try:
        shell = os.environ[VARIABLE].removeprefix("complete_")
        typed, ahead = _typed_line(shell)
        words = _split(typed)
        incomplete = "" if not typed or typed[-1].isspace() else words.pop()
        command, words = build(words[1:], incomplete)
        _hand_over(["dynctl", *words, incomplete])
        text, code = _of_typer(command, os.environ[VARIABLE])
        if shell != "zsh":
            text = "".join(f"{word}\n" for word in _whole(text.splitlines(), incomplete, ahead))
        os.write(sys.stdout.fileno(), text.encode())
    except (Exception, KeyboardInterrupt):  # noqa: S110  the shell shows no errors
        pass
    # Skip the interpreter's slow shutdown, and a thread that still waits.
    os._exit(code)


def _typed_line(shell: str) -> tuple[str, str]:
    """The line up to the cursor; and of bash the part of its last word that readline keeps."""
    if shell != "bash":
        return os.environ.get("_TYPER_COMPLETE_ARGS", ""), ""
    pieces = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
    words: list[str] = []
    glued = False
    for piece in pieces:
        # Readline splits words at : = and @; an @ may also begin an argument, as in `route @FILE`.
        sign = bool(piece) and set(piece) <= set(":=")
        value = piece == "@" and len(words) > 1 and words[-2].startswith("-")
        if words and piece and (glued or sign or value):
            words[-1] += piece
        else:
            words.append(piece)
        glued = sign or piece == "@"
    # Readline replaces what stands after the last : or =, or from the last @ on.
    last = "" if pieces[-1:] and set(pieces[-1]) <= set(":=") else "".join(pieces[-1:])
    if pieces[-2:-1] == ["@"] and last:
        last = f"@{last}"
    return " ".join(words), words[-1].removesuffix(last) if words else ""


def _split(text: str) -> list[str]:
    """The words of a line as a shell reads them; the last one may be unfinished."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token)
    return words


def _hand_over(words: Sequence[str]) -> None:
    """Put the words where Typer reads them."""
    *before, incomplete = map(shlex.quote, words)
    last = incomplete if words[-1] else ""
    os.environ["COMP_WORDS"] = "\n".join((*before, last))
    os.environ["COMP_CWORD"] = str(len(before))
    os.environ["_TYPER_COMPLETE_ARGS"] = " ".join((*before, last))


def _whole(lines: Iterable[str], incomplete: str, ahead: str) -> Iterable[str]:
    """The words as the shell expects them: with the option of ``--output=VALUE``, without what
    readline keeps."""
    option = incomplete.partition("=")[0] + "=" if re.match(r"--[^=]+=", incomplete) else ""
    return ((option + line).removeprefix(ahead) for line in lines if line)
