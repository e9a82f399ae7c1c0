"""`--fail-on`: how bad a finding must be for exit code 1, the same in every command that checks."""

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
