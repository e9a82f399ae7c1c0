"""Width of text on a terminal: wide characters, as in Chinese and Japanese, have two cells."""

from __future__ import annotations

from rich.cells import get_character_cell_size


def cells(text: str) -> int:
    """Cells that ``text`` takes on a terminal."""
    return len(text) if text.isascii() else sum(map(get_character_cell_size, text))


def pad_cells(text: str, width: int, *, right: bool = False) -> str:
    """``text`` on at least ``width`` cells; ``right``: with the blanks before it."""
    blanks = " " * max(0, width - cells(text))
    return blanks + text if right else text + blanks


def beginning(text: str, width: int) -> str:
    """The most of the beginning of ``text`` that has at most ``width`` cells."""
    if text.isascii():
        return text[: max(0, width)]
    used = 0
    for place, character in enumerate(text):
        used += get_character_cell_size(character)
        if used > width:
            return text[:place]
    return text


def ending(text: str, width: int) -> str:
    """The most of the end of ``text`` that has at most ``width`` cells."""
    if text.isascii():
        return text[len(text) - min(len(text), max(0, width)) :]
    used = 0
    for place in range(len(text) - 1, -1, -1):
        used += get_character_cell_size(text[place])
        if used > width:
            return text[place + 1 :]
    return text
