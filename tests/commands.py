"""The commands of the program with all their options, for tests that read them."""

from functools import cache
from typing import Any

from dynctl.cli.app import program


@cache
def all_commands() -> Any:
    """The program, built once: that takes a second. Callers do not change it."""
    return program()
