"""Messages on stderr: as wide as the terminal, one line each in a pipe."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.base.terminal import advise, wrapped

LONG = "note: " + " ".join(["caches of the workers are unknown"] * 5)


@pytest.mark.parametrize("width", [80, 200])
def test_a_long_note_is_wrapped_and_goes_on_below_its_text(
    width: int, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    advise(LONG)
    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) == -(-len(LONG) // (width - 10))
    assert all(line.startswith(" " * 6) and line[6] != " " for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == LONG


def test_a_note_in_a_pipe_stays_one_line(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    advise(LONG)
    assert capsys.readouterr().err == f"{LONG}\n"


def test_a_word_that_is_too_long_is_not_broken_and_lines_of_the_text_stay() -> None:
    path = "/a/" + "b" * 70
    assert wrapped(f"see {path} for the rest\nand this", 64, "  ") == [
        "see",
        f"  {path}",
        "  for the rest",
        "and this",
    ]
