"""The progress bar of long work: on stderr, only on a terminal, only beside a table."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.screens import progress as module
from dynctl.screens.progress import progress

REPLAY = ("replay", "--generate", "chat", "--workload", "requests=400", "--policy", "round-robin")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr, for which every work is long."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    return screen


def test_a_bar_shows_the_work_its_share_and_the_count(monkeypatch: pytest.MonkeyPatch):
    terminal = terminal_of(monkeypatch)
    with progress(GlobalOptions()) as bar:
        assert list(bar.following(range(200), "kv, seed 1", 400, "requests")) == [*range(200)]
    assert "kv, seed 1" in terminal.getvalue()
    assert "192 requests" in terminal.getvalue()
    assert "48%" in terminal.getvalue()


def test_a_name_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal = terminal_of(monkeypatch)
    with progress(GlobalOptions()) as bar:
        bar.begin("a[red]b\x1b]0;title\x07", 2)
        bar.step(1, "c\x1b[2Jd")
    assert "\x1b]0" not in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()


@pytest.mark.parametrize("form", [OutputFormat.JSON, OutputFormat.NAME, OutputFormat.YAML])
def test_programs_that_read_the_answer_see_no_bar(
    monkeypatch: pytest.MonkeyPatch, form: OutputFormat
):
    terminal = terminal_of(monkeypatch)
    with progress(GlobalOptions(output=form)) as bar:
        bar.pulse("reading")
        bar.step(1)
    assert terminal.getvalue() == ""


def test_a_terminal_without_movement_has_no_bar(monkeypatch: pytest.MonkeyPatch):
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with progress(GlobalOptions()) as bar:
        bar.pulse("reading")
    assert terminal.getvalue() == ""


def test_a_pipe_has_no_bar_and_the_answer_is_the_same_with_one():
    """A replay whose stderr is a terminal, beside one in pipes."""
    command = [sys.executable, "-c", _IMPATIENT, *REPLAY]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    piped = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert piped.stderr == b""
    ours, theirs = pty.openpty()
    try:
        shown = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=theirs, check=True, env=environment
        )
        drawn = os.read(ours, 1 << 16)
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown.stdout == piped.stdout
    assert b"round-robin" in drawn


_IMPATIENT = """
import sys
from dynctl.cli.app import main
from dynctl.screens import progress
progress._PATIENCE_S = 0.0
main(sys.argv[1:])
"""
