"""What somebody else said, fit to stand in a message of ours."""

from __future__ import annotations

from typing import Final

_MOST: Final = 400


def single_line(text: str, most: int = _MOST) -> str:
    """One line of at most ``most`` characters, none of which could move a terminal's cursor."""
    flat = " ".join(text.split())
    plain = "".join(character if character.isprintable() else "?" for character in flat)
    return plain if len(plain) <= most else plain[: most - 3] + "..."
