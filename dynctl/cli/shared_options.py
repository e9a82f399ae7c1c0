"""`--fail-on`: how bad a finding must be for exit code 1, the same in every command that checks."""

import re
from typing import Annotated, TypeAlias

import typer

from dynctl.base.errors import UsageProblem

FailOn: TypeAlias = Annotated[
    str, typer.Option(metavar="LEVEL", help="What makes the exit code 1: fail, or warn too.")
]


def expect_level(fail_on: str) -> None:
    """Raises UsageProblem for what is no level."""
    if fail_on not in ("fail", "warn"):
        raise UsageProblem(f"--fail-on {fail_on}: expected fail or warn")


_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 86400.0


def seconds(text: str) -> float:
    """The duration in seconds, above 0 and at most a day."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip())
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < value <= _LONGEST_S:
        raise typer.BadParameter(
            f"{text!r} is no duration; expected a number above 0 with ms, s, m or h, at most "
            "24h, for example 30s"
        )
    return value
