"""The app: what it lists, what it imports, where options may stand, and how it fails."""

from __future__ import annotations

import inspect
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from dynctl.__main__ import main as program
from dynctl.base.errors import ExitCode, TimedOut, Unreachable, UsageProblem, exit_code_of
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.cli import app as cli
from dynctl.cli.global_options import with_globals
from dynctl.cli.help import chosen
from dynctl.cli.table import COMMANDS, GROUPS, Reads, formats_of
from tests.waiting import patience

HEAVY = (
    "aiohttp",
    "asyncio",
    "etcd3",
    "grpc",
    "http.client",
    "httpx",
    "jinja2",
    "kubernetes",
    "msgspec",
    "nats",
    "prometheus_client",
    "textual",
    "tokenizers",
    "tomllib",
    "uvloop",
    "xxhash",
    "yaml",
    "zmq",
)


def in_new_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--help"],
        ["--version"],
        ["help", "route"],
        ["--help=global"],
        ["route", "--help"],
        ["serve", "frontend", "--help"],
        ["workers"],
        ["context", "add", "--help"],
        ["top", "--help"],
    ],
)
def test_help_loads_no_client_library(line: list[str]):
    code = (
        "import sys; from dynctl.cli.app import run; code = run(sys.argv[1:]); "
        f"print(code, [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = in_new_process(code, *line)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith(("Usage: dynctl", "dynctl"))


@pytest.mark.parametrize("line", [[], ["--help"], ["--version"], ["help"]])
def test_the_first_screen_needs_no_terminal_library(line: list[str]):
    code = (
        "import sys; from dynctl.cli.app import run; run(sys.argv[1:]); "
        "print('rich' in sys.modules, file=sys.stderr)"
    )
    assert in_new_process(code, *line).stderr == "False\n"


def test_help_loads_of_this_program_what_it_shows():
    code = (
        "import sys; from dynctl.cli.app import run; run(['--help']); "
        "print(sorted(m for m in sys.modules if m.startswith(('dynctl.', 'router_core'))),"
        " file=sys.stderr)"
    )
    names = ["base", "base.backends", "base.errors", "base.options", "base.quantities", "cli"]
    names += [
        "cli.app",
        "cli.completion",
        "cli.given_options",
        "cli.global_options",
        "cli.help",
        "cli.shared_options",
        "cli.table",
    ]
    assert in_new_process(code).stderr == f"{[f'dynctl.{name}' for name in names]}\n"


def test_a_command_imports_only_itself():
    code = (
        "import sys; from dynctl.cli.app import run; run(['version', '--client']); "
        "print(sorted(m for m in sys.modules if m.startswith('dynctl.cli.commands.')),"
        " file=sys.stderr)"
    )
    done = in_new_process(code)
    names = ["version"]
    assert done.stderr == f"{[f'dynctl.cli.commands.{name}' for name in names]}\n"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_loads_and_is_described(path: str):
    row = COMMANDS[path]
    function = cli.function_of(row)
    assert inspect.getdoc(function)
    assert row.summary.endswith(".")
    assert len(row.summary) <= 66, "the help page would cut it"
    assert "options" in inspect.signature(function).parameters
    with_globals(function, row)


def test_a_row_names_options_that_there_are():
    root = cli.program()
    for path, row in COMMANDS.items():
        _, command = chosen(path.split(), root)
        known = {name for option in command.params for name in option.opts}
        assert set(row.first) <= known, path
        assert {*row.also, *row.ignores, *(row.unserved or ())} <= set(fields_of_options())
        assert row.reads is not Reads.NOTHING or not row.instead or row.serves


def fields_of_options() -> set[str]:
    return {item.name for item in fields(GlobalOptions)}


def test_groups_and_commands_agree():
    groups = {path.split()[0] for path in COMMANDS if " " in path}
    assert groups == set(GROUPS)


def test_the_first_screen_fits_a_terminal_and_lists_every_command_once(dynctl):
    ran = dynctl()
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert len(lines) < 24
    assert max(map(len, lines)) <= 79
    table = [line for line in lines[2:] if line][: lines[2:].index("")]
    listed = [part.split()[0] for line in table for part in (line[8:46], line[46:]) if part.strip()]
    assert sorted(listed) == sorted({path.split()[0] for path in COMMANDS})
    assert dynctl("--help").out == dynctl("help").out == ran.out


def test_the_examples_of_the_first_screen_are_commands(dynctl):
    page = dynctl().out
    words = set(re.findall(r"dynctl ([a-z]+)", page[page.index("Try ") :]))
    assert words <= {path.split()[0] for path in COMMANDS}
    assert set(re.findall(r"--[a-z-]+", page)) - {"--keep", "--load", "--explain", "--help"} <= set(
        re.findall(r"--[a-z-]+", dynctl("--help=global").out)
    )


def test_global_options_have_one_page_and_stand_on_no_other(dynctl):
    page = dynctl("--help=global").out
    assert all(len(line) <= 80 for line in page.splitlines())
    for name in ("--frontend", "--kubeconfig", "--discovery", "--no-color"):
        assert page.count(f"│ {name} ") == 1
        assert f"│ {name} " not in dynctl("workers", "list", "--help").out
        assert f"│ {name} " in dynctl("workers", "list", "--help=global").out
        assert f"│ {name} " in dynctl("workers", "list", "--help=all").out
    assert re.search(r"│ workers +Workers of a router: list, ", page)
    assert re.search(r"│ +engine or its sidecar\. +│", page)
    assert "--frontend" in dynctl("workers", "list", "--help").out
    for local in ("serve frontend", "topology render", "context use"):
        assert "--frontend" not in dynctl(*local.split(), "--help").out


def test_a_page_states_a_default_once(dynctl):
    for path in ("", *(path for path in COMMANDS)):
        page = dynctl(*path.split(), "--help").out + dynctl("--help=global").out
        for entry in re.split(r"\n│ (?=-)", page):
            assert entry.count("default: ") <= 1, entry


def test_version_and_help_in_their_usual_spellings(dynctl):
    from dynctl import version

    assert dynctl("--version").out == dynctl("-V").out == f"dynctl {version()}\n"
    assert dynctl("help", "workers", "list").out == dynctl("workers", "list", "--help").out
    assert dynctl("help", "serve").out == dynctl("serve", "--help").out
    ran = dynctl("help", "workers", "lst")
    assert (ran.code, ran.err) == (2, "error: unknown command 'workers lst'\n  try: dynctl help\n")


def test_a_page_of_many_options_shows_the_first_and_names_the_groups(dynctl):
    first = dynctl("serve", "frontend", "--help").out
    assert len(first.splitlines()) <= 40
    assert first.index("│ --worker SPEC") < first.index("│ --model-path DIR")
    assert "--router-queue-policy" not in first
    assert "--http-port, --port PORT      Listen port; 0: a free one. [default: 8000]" in first
    groups = " ".join(first.partition("one of ")[2].split()).partition(". Global")[0].split(", ")
    everything = dynctl("serve", "frontend", "--help=all").out
    for group in groups:
        page = dynctl("serve", "frontend", f"--help={group}").out
        options = set(re.findall(r"│ (--[a-z-]+)", page))
        assert options
        assert options <= set(re.findall(r"│ (--[a-z-]+)", everything)), group
    assert "--router-queue-policy" in dynctl("serve", "frontend", "--help=queue").out
    assert "--ais-backend-version" in dynctl("serve", "frontend", "--help=not-supported").out
    ran = dynctl("serve", "frontend", "--help=nonsense")
    assert (ran.code, ran.out) == (2, "")
    assert "--help=nonsense: dynctl serve frontend has no such group of options" in ran.err
    assert "router-queue" in " ".join(ran.err.split())


def test_every_option_is_on_its_page_with_its_whole_name(dynctl, monkeypatch):
    """At 80 columns too, so that each can be copied."""
    root = cli.program()
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        for path in COMMANDS:
            _, command = chosen(path.split(), root)
            page = dynctl(*path.split(), "--help=all").out
            words = set(re.split(r"[\s,]+", page))
            for parameter in command.params:
                if parameter.param_type_name == "option" and not parameter.hidden:
                    assert set(parameter.opts) <= words, (path, parameter.opts)


@pytest.mark.parametrize(
    ("word", "instead"),
    [("audit", "dynctl hits --predicted"), ("options", "dynctl --help=global")],
)
def test_an_older_command_names_the_current_one(dynctl, word: str, instead: str):
    ran = dynctl(word)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: '{word}': dynctl has this command no longer\n")
    assert instead in ran.err


def test_every_command_has_a_help_page_of_its_own(dynctl):
    for path in COMMANDS:
        ran = dynctl(*path.split(), "--help")
        assert ran.code == 0
        assert ran.out.startswith(f"Usage: dynctl {path} ")
        assert ran.out.splitlines()[-1].startswith("Global options (")
        assert len(ran.out.splitlines()) <= 48, path
        assert all(len(line) <= 100 for line in ran.out.splitlines())


@pytest.mark.parametrize(
    "line",
    [
        ["--demo", "-o", "name", "workers", "list"],
        ["workers", "--demo", "-o", "name", "list"],
        ["workers", "list", "--demo", "-o", "name"],
        ["--demo", "workers", "list", "-o", "name"],
        ["-o", "json", "workers", "list", "--demo", "-o", "name"],
    ],
)
def test_global_options_work_before_and_after_the_command(dynctl, line: list[str]):
    ran = dynctl(*line)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == [
        "prefill-a0", "decode-a0", "prefill-b0", "prefill-b1", "decode-b0", "decode-b1",
    ]  # fmt: skip


def test_repeated_frontends_add_up_on_both_sides_of_the_command(dynctl):
    ran = dynctl("--frontend", "http://127.0.0.1:1", "version", "--frontend", "http://127.0.0.1:2")
    assert "http://127.0.0.1:1 " in ran.out
    assert "http://127.0.0.1:2 " in ran.out


def test_a_refused_format_lists_those_of_the_command(dynctl):
    def listed(*line):
        err = " ".join(dynctl(*line).err.split())
        return err.partition("expected one of ")[2].partition(" try:")[0].split(", ")

    usual = ["table", "wide", "json", "jsonl", "yaml", "name"]
    assert listed("hits", "-o", "xml") == usual
    assert listed("-o", "xml", "hits") == usual
    assert listed("hits", "--output=xml") == usual
    assert listed("check", "-o", "xml") == [*usual, "junit"]
    assert listed("replay", "-o", "xml") == [*usual, "csv"]
    assert listed("events", "tail", "-o", "xml") == ["table", "wide", "jsonl"]
    assert listed("topology", "render", "-o", "xml") == ["table", "yaml", "json"]


def test_a_command_has_no_other_formats_than_those_that_it_lists(dynctl):
    """The refusals of a command itself, and the list of an unknown format, agree."""
    for line in (("version",), ("topology", "lint", "-f", "/dev/null"), ("topology", "render")):
        for output in set(OutputFormat) - set(formats_of(" ".join(line[:2]))):
            ran = dynctl(*line, "-o", output)
            assert (ran.code, ran.out) == (2, ""), (line, output)


@pytest.mark.parametrize("line", ["completion bash", "top --once --demo", "demo"])
def test_a_command_whose_answer_has_no_names_refuses_to_print_them(dynctl, line):
    ran = dynctl(*line.split(), "-o", "name")
    assert (ran.code, ran.out) == (2, "")
    command = line.split()[0]
    assert ran.err == (
        f"error: -o name: the answer of {command} has no names; "
        "expected one of table, wide, json, jsonl, yaml\n"
    )


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        (["route", "hi", "-o", "xml"], "expected one of table, wide, json,", "dynctl route --help"),
        (
            ["version", "--timeout", "soon"],
            "--timeout 'soon': expected a duration of 1ms to 24h,",
            "dynctl version --help",
        ),
        (
            ["version", "--timeout", "0"],
            "--timeout '0': expected a duration of 1ms to 24h,",
            "dynctl version --help",
        ),
    ],
)
def test_wrong_command_lines_name_the_word_and_the_help_page(dynctl, line, error, hint):
    ran = dynctl(*line)
    assert ran.code == ExitCode.USAGE
    assert ran.out == ""
    assert error in ran.err.splitlines()[0]
    assert ran.err.startswith("error: ")
    assert ran.err.endswith(f"try: {hint}\n")


def test_exit_codes_by_kind_of_error():
    assert exit_code_of(UsageProblem("x")) == 2
    assert exit_code_of(Unreachable("x")) == 3
    assert exit_code_of(TimedOut("x")) == 4
    assert exit_code_of(KeyboardInterrupt()) == 130
    assert exit_code_of(FileNotFoundError(2, "no such file", "a.json")) == 2
    assert exit_code_of(ZeroDivisionError()) is None


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageProblem("a: b", "try c"), 2, "error: a: b\n  try c\n"),
        (Unreachable("gone"), 3, "error: gone\n"),
        (TimedOut("slow"), 4, "error: slow\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            PermissionError(13, "Permission denied", "/x"),
            2,
            "error: /x: no permission to read it\n",
        ),
    ],
)
def test_errors_of_a_command_become_exit_codes(dynctl, monkeypatch, error, code, said):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("dynctl.sources.connect.connect", fails)
    ran = dynctl("workers", "list")
    assert (ran.code, ran.out, ran.err) == (code, "", said)


def test_ctrl_c_while_modules_are_imported_is_130(monkeypatch: pytest.MonkeyPatch):
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "dynctl.cli.app", Interrupted("dynctl.cli.app"))
    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 130


def test_a_defect_is_not_an_answer_and_shows_no_traceback(dynctl, monkeypatch):
    def fails(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("dynctl.sources.connect.connect", fails)
    ran = dynctl("workers", "list")
    assert ran.code == ExitCode.DEFECT
    assert "Traceback" not in ran.err
    assert "ZeroDivisionError: by zero" in ran.err
    assert "--debug" in ran.err
    with pytest.raises(ZeroDivisionError):
        dynctl("workers", "list", "--debug")


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m dynctl config show -o json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].endswith("0")


def test_output_to_a_closed_stream_prints_no_traceback():
    # The pipe is closed before anything is written, so that the write itself fails.
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); "
        "from dynctl.cli.app import run; sys.exit(run(['workers', 'list', '--demo']))"
    )
    done = in_new_process(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("variable", ["NO_COLOR", None])
def test_colour_needs_a_terminal_and_leave(variable, monkeypatch, tmp_path):
    from dynctl.base.options import GlobalOptions
    from dynctl.screens.canvas import Canvas

    class Terminal:
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            raise OSError

    monkeypatch.setenv("TERM", "xterm")
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    canvas = Canvas.from_options(GlobalOptions(), Terminal())  # type: ignore[arg-type]
    assert canvas.color is (variable is None)
    assert canvas.width == 80
    assert not Canvas.from_options(GlobalOptions(no_color=True), Terminal()).color  # type: ignore[arg-type]
    with (tmp_path / "file").open("w") as file:
        assert Canvas.from_options(GlobalOptions(), file) == Canvas(None)


@pytest.mark.parametrize(
    ("encoding", "term", "blocks"),
    [
        ("UTF-8", "xterm", True),
        ("utf8", "xterm", True),
        ("UTF-8", "dumb", False),
        ("UTF-8", "linux", False),
        ("ISO-8859-1", "xterm", False),
        (None, "xterm", False),
    ],
)
def test_block_characters_need_a_terminal_that_draws_them(monkeypatch, encoding, term, blocks):
    from dynctl.base.options import GlobalOptions
    from dynctl.screens.canvas import Canvas

    class Terminal:
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            raise OSError

    terminal = Terminal()
    terminal.encoding = encoding  # type: ignore[attr-defined]
    monkeypatch.setenv("TERM", term)
    # NO_COLOR concerns colors only.
    monkeypatch.setenv("NO_COLOR", "1")
    canvas = Canvas.from_options(GlobalOptions(), terminal)  # type: ignore[arg-type]
    assert (canvas.unicode, canvas.color) == (blocks, False)


def test_errors_wrap_at_words_at_the_width_of_the_terminal(capsys, monkeypatch):
    long = "frontend http://127.0.0.1:8000 does not answer: " + "word " * 20
    for columns, width in (("", 80), ("100", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        cli._say(f"error: {long}", f"dynctl version --frontend {'x' * 90} shows more\nshort")
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("error: frontend")
        assert lines[1].startswith("       word")
        assert lines[-1] == "  short"
        assert all(len(line) <= width or "x" * 90 in line for line in lines)
        assert " ".join(" ".join(lines).split()).startswith(long.strip()[:20], 7)


def test_a_help_page_of_80_columns_breaks_no_name(dynctl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = dynctl("serve", "engine", "--help=all").out
    assert all(len(line) <= 80 for line in page.splitlines())
    assert "DYNCTL_ENGINE_KV_TRANSFER_CROSS_DOMAIN_FACTOR]" in page.split()


def test_margins_of_decisions_do_not_repeat_their_reasons(dynctl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rows = dynctl("decisions", "list", "--demo").out.splitlines()
    margin = rows[0].index("MARGIN") + len("MARGIN")
    alone = [row[:margin].split()[-1] for row in rows if row.endswith("only one")]
    ties = [row[:margin].split()[-1] for row in rows if row.endswith("tie")]
    assert set(alone) == {"-"}
    assert set(ties) == {"0"}
    # `dynctl why --demo` starts another demo, which has other decisions.
    assert not any("dynctl why" in row for row in rows)


@pytest.mark.parametrize("command", [["workers", "list"], ["top", "--once"], ["config", "show"]])
def test_an_exceeded_timeout_is_exit_code_4(dynctl, command):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ran = dynctl(*command, "--frontend", url, "--timeout", "0.2")
    assert ran.code == ExitCode.TIMEOUT
    assert "within 0.2 s" in ran.err


def test_an_etcd_without_a_response_in_the_timeout_is_exit_code_4(dynctl):
    line = ["workers", "list", "--discovery", "etcd", "--timeout"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert dynctl(*line, "0.5", "--etcd-endpoints", address).code == ExitCode.TIMEOUT
    long = f"{patience(2):.3f}"
    assert dynctl(*line, long, "--etcd-endpoints", address).code == ExitCode.UNREACHABLE


@pytest.mark.parametrize(
    "command",
    [
        ["workers", "list"],
        ["topology", "show"],
        ["topology", "verify"],
        ["config", "show"],
        ["thresholds", "get"],
        ["context", "show"],
        ["check"],
        ["version"],
        ["why", "--last"],
        ["top", "--once"],
        ["route", "hi"],
        ["bundle", "b.tgz"],
    ],
)
def test_an_unknown_context_or_a_dead_source_is_not_success(dynctl, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    if command[0] not in ("context", "topology"):
        ran = dynctl(*command, "--frontend", "http://127.0.0.1:1")
        assert ran.code == (1 if command == ["check"] else 3)
    monkeypatch.setenv("DYNCTL_CONTEXT", "bad")
    ran = dynctl(*command, *(["--force"] if command[0] == "bundle" else []))
    assert ran.code == 2
    assert "$DYNCTL_CONTEXT bad: unknown context" in ran.err + " ".join(ran.out.split())
    assert (tmp_path / "b.tgz").exists() is (command[0] == "bundle")


@pytest.mark.parametrize(
    "command",
    [
        ["workers", "list", "--demo"],
        ["topology", "show", "--demo"],
        ["route", "--demo", "--explain", "hi"],
    ],
)
def test_wide_output_is_wider_in_a_pipe_as_well(dynctl, command):
    table, wide = (dynctl(*command, "-o", name).out for name in ("table", "wide"))
    assert max(map(len, wide.splitlines())) > max(map(len, table.splitlines()))


def test_a_session_is_looked_up_in_a_running_frontend_only(dynctl):
    ran = dynctl("route", "--demo", "hi", "--session-id", "alice")
    assert ran.code == 2
    assert "--session-id: only a running frontend has sessions" in ran.err
    assert "alice" not in ran.err


def _bash(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = text.replace("dynctl ", f"{sys.executable} -m dynctl ")
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=patience(20)
    )


@pytest.mark.parametrize(
    "command",
    ["config show", "workers list --demo -o json", "route --demo hi", "--help", "help route"],
)
def test_a_full_disk_below_stdout_is_named(tmp_path: Path, command: str):
    done = _bash(f"dynctl {command} > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: the output cannot be written: no space is left on its device\n",
    )


@pytest.mark.parametrize(
    ("closed", "shown"),
    [("<&-", True), (">&-", False), ("2>&-", True), ("<&- >&- 2>&-", False)],
)
def test_closed_standard_streams_are_no_defect(tmp_path: Path, closed: str, shown: bool):
    done = _bash(f"dynctl workers list --demo {closed}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("prefill-a0" in done.stdout) is shown
    assert _bash(f"dynctl workers list --no-such {closed}", tmp_path).returncode == 2


def test_the_most_similar_option_is_proposed(dynctl):
    ran = dynctl("workers", "list", "--frontned", "http://127.0.0.1:1")
    shown = " ".join(ran.err.split())
    assert "has no such option; did you mean --frontend?" in shown


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            ["workers", "list", "-l", "zne=zone-a,zone=zone-b"],
            ["no worker has zne; known: name, role, model, status, rack, zone"],
        ),
        (["topology", "show", "-l", "row=r1"], ["no worker has row; known: "]),
        (["workers", "list", "--model", "nope"], ["models: demo"]),
        (["workers", "list", "-l", "zone=zone-x"], []),
    ],
)
def test_a_filter_without_a_match_names_what_no_worker_has(dynctl, command, lines):
    ran = dynctl(*command, "--demo")
    first, *rest = ran.out.splitlines()
    assert (ran.code, first.startswith("0 of 6 workers match ")) == (0, True)
    assert len(rest) == len(lines)
    assert all(shown.startswith(line) for shown, line in zip(rest, lines, strict=True))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("route --demo hi --save-view v.json", "v.json"),
        ("bundle b.tar.gz --demo", "b.tar.gz"),
    ],
)
def test_a_file_that_cannot_grow_is_named(tmp_path: Path, command: str, name: str):
    """The limit of a process stands for the full disk, which has no other number either. Python
    would keep bytecode that is cut at the limit."""
    done = _bash(f"ulimit -f 1; export PYTHONDONTWRITEBYTECODE=1; dynctl {command}", tmp_path)
    assert done.returncode == 2
    assert f"error: {name}: " in done.stderr
    assert "larger than this process may write" in " ".join(done.stderr.split())
