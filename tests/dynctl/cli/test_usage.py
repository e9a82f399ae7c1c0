"""Command lines that are not understood: the error has the name, the value, what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from dynctl.base.quantities import duration, size
from dynctl.cli.table import COMMANDS
from tests.commands import all_commands
from tests.docs.cli_page import find_command


@pytest.mark.parametrize(
    ("line", "error", "page"),
    [
        (["rout"], "'rout': dynctl has no such command; did you mean route?", "dynctl"),
        (
            ["workers", "nope"],
            "'nope': dynctl workers has no such command; expected one of list, show, cordon,",
            "dynctl workers",
        ),
        (
            ["route", "--explian"],
            "--explian: dynctl route has no such option; did you mean --explain?",
            "dynctl route",
        ),
        (["route", "-x"], "-x: dynctl route has no such option", "dynctl route"),
        (
            ["workers", "show"],
            "dynctl workers show: expected ID, got none",
            "dynctl workers show",
        ),
        (
            ["serve", "attach"],
            "dynctl serve attach: expected --engine SPEC, got none",
            "dynctl serve attach",
        ),
        (["--demo"], "dynctl: expected a command, got none", "dynctl"),
        (["version", "x"], "dynctl version: 'x': expected no arguments", "dynctl version"),
        (
            ["route", "a", "b", "c"],
            "dynctl route: 'b c': expected PROMPT only; put an argument with spaces in quotes",
            "dynctl route",
        ),
        (
            ["route", "hi", "--set"],
            "--set: expected KEY=VALUE after it, got nothing",
            "dynctl route",
        ),
        (
            ["workers", "--demo=x", "list"],
            "--demo=x: expected --demo without a value",
            "dynctl workers list",
        ),
        (["version", "--timeout", "0"], "--timeout '0': expected a duration of", "dynctl version"),
        (["events", "tail", "--limit=x"], "--limit 'x': expected a whole", "dynctl events tail"),
        (
            ["serve", "router", "--http-port", "70000"],
            "--http-port '70000': expected at most 65535",
            "dynctl serve router",
        ),
        (
            ["--timeout", "soon", "version", "--timeout", "5"],
            "--timeout: expected a duration",
            "dynctl",
        ),
    ],
)  # fmt: skip
def test_an_error_of_usage(dynctl: Any, line: list[str], error: str, page: str) -> None:
    ran = dynctl(*line)
    assert (ran.code, ran.out) == (2, "")
    text = " ".join(ran.err.split())
    assert text.startswith(f"error: {error}")
    assert text.endswith(f"try: {page} --help")


def test_a_wrong_value_of_the_environment_names_the_variable(
    dynctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_HTTP_PORT", "eighty")
    ran = dynctl("serve", "router")
    assert ran.code == 2
    assert ran.err.startswith("error: DYN_HTTP_PORT 'eighty': expected a whole number\n")


def test_a_long_word_of_a_command_line_is_cut_in_the_error(dynctl: Any) -> None:
    ran = dynctl("version", "x" * 10_000)
    assert (ran.code, len(ran.err) < 400) == (2, True)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_reports_an_unknown_option_in_the_same_words(dynctl: Any, path: str) -> None:
    ran = dynctl(*path.split(), "--no-such-option")
    assert ran.code == 2
    assert f"error: --no-such-option: dynctl {path} has no such option" in " ".join(ran.err.split())


def _options() -> Iterator[tuple[str, Any]]:
    root: Any = all_commands()
    for path in COMMANDS:
        command = find_command(root, path)
        for parameter in command.get_params(typer.Context(command)):
            if parameter.param_type_name == "option":
                yield path, parameter


def _quantities(metavar: str) -> list[tuple[str, str]]:
    """A command that has it, and the flag, of each option."""
    found = {max(one.opts, key=len): path for path, one in _options() if one.metavar == metavar}
    return [(path, flag) for flag, path in sorted(found.items())]


def test_every_option_of_a_time_is_a_duration() -> None:
    """What describes seconds or a time has the metavar DURATION; router settings have their own."""
    about = re.compile(r"\b(milli)?seconds\b|-timeout\b|-interval\b|-ms\b|-s\b", re.IGNORECASE)
    wrong = {
        f"{path} {one.opts[0]}"
        for path, one in _options()
        if about.search(f"{one.opts[0]}: {one.help}")
        and not one.opts[0].endswith(("-secs", "-per-s", "-ttl", "-per-block"))
        and one.metavar != "DURATION"
    }
    assert wrong == set()


@pytest.mark.parametrize(("path", "flag"), _quantities("DURATION"))
def test_every_duration_is_refused_with_its_name_and_value(
    dynctl: Any, path: str, flag: str
) -> None:
    needed = {"topology render": ["pod"], "workers drain": ["w"], "workers show": ["w"]}
    ran = dynctl(*path.split(), *needed.get(path, []), f"{flag}=20x")
    text = " ".join(ran.err.split())
    assert ran.code == 2
    assert f"{flag} '20x': expected a duration of" in text


@pytest.mark.parametrize(("path", "flag"), _quantities("SIZE"))
def test_every_size_is_refused_with_its_name_and_value(dynctl: Any, path: str, flag: str) -> None:
    needed = {"serve observe": ["--discovery", "file", "--file-kv", "x"]}
    ran = dynctl(*path.split(), *needed.get(path, []), f"{flag}=20x")
    text = " ".join(ran.err.split())
    assert ran.code == 2
    assert f"{flag} '20x': expected a number of bytes, or one with KiB" in text


@pytest.mark.parametrize("text", ["20", "20s", "1m", "500ms"])
def test_a_duration_before_and_after_the_command(dynctl: Any, text: str) -> None:
    assert duration(text)
    for line in (("--timeout", text, "version"), ("version", "--timeout", text)):
        ran = dynctl(*line, "--frontend", "http://127.0.0.1:1")
        assert "expected" not in ran.err


def test_settings_in_seconds_are_read_with_a_unit(
    dynctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ROUTER_TTL_SECS", "3m")
    ran = dynctl("config", "show", "--router-queue-max-wait-secs", "1m", "-o", "json")
    assert ran.code == 0
    assert re.search(r'"router_ttl_secs".*?180(\.0)?\b', ran.out, re.S)
    assert re.search(r'"router_queue_max_wait_secs".*?60(\.0)?\b', ran.out, re.S)
    ran = dynctl("config", "show", "--router-queue-max-wait-secs", "1x")
    assert "expected a number of seconds, or a duration as 2m, got '1x'" in " ".join(
        ran.err.split()
    )


def test_the_simulated_engine_reads_units_of_flags_and_variables() -> None:
    from dynctl.simulation.engine.config import build_config

    config = build_config(
        {"drain-timeout-s": 20.0},
        {
            "DYNCTL_ENGINE_DECODE_ITL_MS": "2s",
            "DYNCTL_ENGINE_KV_HOLD_TIMEOUT_S": "1m",
            "DYNCTL_ENGINE_MAX_BODY_BYTES": "1MiB",
            "DYNCTL_ENGINE_PREFILL_TOKENS_PER_S": "5000",
        },
    )
    assert (config.decode_itl_ms, config.kv_hold_timeout_s) == (2000.0, 60.0)
    assert (config.max_body_bytes, config.prefill_tokens_per_s) == (1 << 20, 5000.0)
    assert size("1MiB") == config.max_body_bytes
