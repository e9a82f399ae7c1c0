"""Options and durations that several commands share."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat

FailOn: TypeAlias = Annotated[
    str, typer.Option(metavar="LEVEL", help="Level for exit code 1: fail, or warn as well.")
]
Suppress: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CODE[=SUBJECT]",
        help="Suppress a check or a finding (repeatable): --suppress 'DYT0902=Pod my-*.prod'.",
    ),
]
Model: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only workers of this model.")
]
Selector: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--selector",
        "-l",
        metavar="KEY=VALUE,..",
        help="Only workers that match: domain, name, role, model or status; != excludes.",
    ),
]
NoHeaders: TypeAlias = Annotated[
    bool, typer.Option("--no-headers", help="Print the rows without a heading.")
]
Watch: TypeAlias = Annotated[
    bool, typer.Option("--watch", "-w", help="Show the list again every 2 s, until Ctrl-C.")
]
Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Stop after N lines.")
]
Duration: TypeAlias = Annotated[
    float | None,
    typer.Option("--duration", metavar="SECONDS", min=0, help="Stop after this time."),
]

FileOrFormat: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE|FORMAT",
        help="Same as the argument FILE, or an output format (json, yaml, ..).",
    ),
]


def file_or_format(options: GlobalOptions, output: str | None) -> tuple[Path | None, GlobalOptions]:
    """The file that ``output`` names, if it is no format; the options with the format, if it is."""
    if output is None:
        return None, options
    if output in [one.value for one in OutputFormat]:
        return None, replace(options, output=OutputFormat(output))
    return Path(output), options


def expect_level(fail_on: str) -> None:
    """Raise UsageProblem for an unknown level."""
    if fail_on not in ("fail", "warn"):
        raise UsageProblem(f"--fail-on {fail_on}: expected fail or warn")


_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 86400.0


def seconds(text: str, option: str = "") -> float:
    """The duration in seconds, above 0 and at most a day. ``option`` is named in the error where
    Typer does not name it."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip())
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < value <= _LONGEST_S:
        problem = (
            f"{text!r} is not a duration; expected a number above 0 with ms, s, m or h, at most "
            "24h, for example 30s"
        )
        raise UsageProblem(f"{option}: {problem}") if option else typer.BadParameter(problem)
    return value


#: The smallest useful index, and the smallest recording that has room for a state, in bytes.
SMALLEST_MEMORY = 1 << 20
_BYTES = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}


def one_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageProblem for a value that is not one of ``choices``."""
    if value not in choices:
        raise UsageProblem(f"{flag} {value[:100]}: expected one of {', '.join(choices)}")


def size_of(flag: str, text: str) -> int:
    """The size in bytes, 0 to 1 TiB; raises UsageProblem."""
    digits = text.strip().rstrip("BKMGTibkmgt")
    unit = text.strip()[len(digits) :].upper()
    try:
        size = int(float(digits) * _BYTES[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if not 0 <= size <= 1 << 40:
        raise UsageProblem(f"{flag} {text}: expected a size, for example 64MiB or 1GiB")
    return size


def memory_of(flag: str, text: str) -> int:
    """The bound of an index or a recording in bytes, 1 MiB to 1 TiB; raises UsageProblem."""
    size = size_of(flag, text)
    if size < SMALLEST_MEMORY:
        raise UsageProblem(f"{flag}: expected at least 1MiB, got {size:,} bytes")
    return size
