"""Messages on stderr: as wide as the terminal, one line each in a pipe."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.base.terminal import advise, wrapped

LONG = "note: " + " ".join(["caches of the workers are unknown"] * 9)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("text", [LONG, LONG.replace("note", "warning"), f"probe {LONG}"])
def test_a_long_message_is_wrapped_and_goes_on_below_the_text_of_a_note(
    text: str, width: int, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    advise(text)
    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) <= width for line in lines)
    assert 1 < len(lines) <= -(-len(text) // (width - 20))
    assert all(line.startswith(" " * 6) and line[6] != " " for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == text


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
