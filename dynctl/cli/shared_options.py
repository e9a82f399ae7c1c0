"""Options that several commands share, and how they are read."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

import typer
from typer.models import OptionInfo

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.base.quantities import SIZES, duration, duration_text, size
from dynctl.cli.completion import codes, names_of

if TYPE_CHECKING:
    from dynctl.base.worker_environment import TopologyConfig
    from dynctl.simulation.engine.config import Option as EngineOption


@dataclass(frozen=True, slots=True)
class Needs:
    """An option has an effect only while others of its command are set.

    It stands beside the ``typer.Option`` of its annotation. ``parameters``: one of these must be
    set, which None, False, an empty value and ``unset`` are not. ``dynamo``: the workers must be
    those of a Dynamo deployment, or must not be. ``without``: none of these must be set.
    ``not_on``: commands on which it has no effect, and the place where it has one.
    """

    parameters: tuple[str, ...] = ()
    unset: Any = None
    dynamo: bool | None = None
    without: tuple[str, ...] = ()
    not_on: Mapping[str, str] = field(default_factory=dict)

    def is_set(self, value: Any) -> bool:
        """Whether a parameter of ``parameters`` or ``without`` is set, by its value."""
        if value is None or value is False or value == self.unset:
            return False
        return not (isinstance(value, (str, list, tuple)) and not value)


def in_panel(panel: str | None, annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Annotations of options; those that name no panel stand in ``panel`` of the help page."""
    placed = {}
    for name, annotation in annotations.items():
        kind, *parts = get_args(annotation)
        parts = [copy(part) for part in parts]
        for part in parts:
            if isinstance(part, OptionInfo) and part.rich_help_panel is None:
                part.rich_help_panel = panel
        placed[name] = Annotated[kind, *parts]
    return placed


FailOn: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="fail|skip|warn",
        help="Level for exit code 1; skip: also checks that could not be read; warn: all levels.",
    ),
]
Suppress: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CODE[=SUBJECT]",
        autocompletion=codes,
        help="Suppress a check or a finding (repeatable): --suppress 'DYT0902=Pod my-*.prod'.",
    ),
]
RecordedFiles: TypeAlias = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE",
        help="A recording (of several routers one each), or a trace.",
        show_default=False,
    ),
]
RecordFor: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="DURATION",
        help="Record a live router for this time, as 5m. [default: 1m]",
    ),
]
SkipBad: TypeAlias = Annotated[
    bool, typer.Option("--skip-bad", help="Leave damaged chunks and bad lines out.")
]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Only workers of this model.", autocompletion=names_of("model")
    ),
]
Selector: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--selector",
        "-l",
        metavar="KEY=VALUE,..",
        autocompletion=names_of("selector"),
        help="Only workers that match: domain, name, role, model or status; != excludes.",
    ),
]
NoHeaders: TypeAlias = Annotated[
    bool, typer.Option("--no-headers", help="Print the rows without a heading.")
]
Watch: TypeAlias = Annotated[
    bool, typer.Option("--watch", "-w", help="Show the list again every 2 s, until Ctrl-C.")
]
Yes: TypeAlias = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Change the fleet at the default address without a question."),
]
Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Stop after N lines.")
]

MinRate: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--min-rate",
        metavar="RATE",
        min=0,
        max=1,
        help="Exit code 1 below this rate of right predictions, or where nothing was compared.",
    ),
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
    if output in [form.value for form in OutputFormat]:
        return None, replace(options, output=OutputFormat(output))
    return Path(output), options


def expect_level(fail_on: str) -> None:
    """Raise UsageProblem for an unknown level."""
    one_choice("--fail-on", fail_on, ("fail", "skip", "warn"))


#: The longest duration of an option.
DAY_S = 86400.0
#: Unit of a number alone -> examples, and its name.
_EXAMPLES = {"s": ("20s, 2m or 1h", "seconds"), "ms": ("50ms or 2s", "milliseconds")}


def seconds(
    low: float = 0.001, high: float = DAY_S, *, unit: str = "s"
) -> Callable[[str | float], float]:
    """What Typer reads a duration with: seconds, ``low`` to ``high``.

    A number alone has the unit ``unit``; of unit ``ms`` the value is in milliseconds.
    """
    examples, about = _EXAMPLES[unit]

    def duration_in_bounds(text: str | float) -> float:
        value = duration(str(text), unit)
        if value is None or not low <= value <= high:
            raise typer.BadParameter(
                f"expected a duration of {duration_text(low)} to {duration_text(high)}, for "
                f"example {examples}; a number alone is in {about}"
            )
        return value * 1000 if unit == "ms" else value

    return duration_in_bounds


def read_as(option: "EngineOption", metavar: str | None) -> dict[str, Any]:
    """What Typer reads an option of the simulated engine with; ``metavar`` if it is no quantity."""
    if option.quantity == "bytes":
        return {"metavar": "SIZE", "parser": _bytes}
    if option.quantity:
        return {"metavar": "DURATION", "parser": seconds(0.0, unit=option.quantity)}
    return {"metavar": metavar}


def _bytes(text: str | int) -> int:
    number = size(str(text))
    if number is None:
        raise typer.BadParameter(f"expected {SIZES}")
    return number


def seconds_of(option: str, text: str, low: float = 0.001, high: float = DAY_S) -> float:
    """As :func:`seconds`, outside Typer; raises UsageProblem."""
    try:
        return seconds(low, high)(text)
    except typer.BadParameter as error:
        raise UsageProblem(f"{option} {text[:64]!r}: {error.message}") from None


#: The smallest useful index, and the smallest recording that has room for a state, in bytes.
SMALLEST_MEMORY = 1 << 20


def one_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageProblem for a value that is not one of ``choices``."""
    if value not in choices:
        raise UsageProblem(f"{flag} {value[:100]}: expected one of {', '.join(choices)}")


def size_of(flag: str, text: str) -> int:
    """The size in bytes, 0 to 1 TiB; raises UsageProblem."""
    number = size(text)
    if number is None or number > 1 << 40:
        raise UsageProblem(f"{flag} {text[:64]!r}: expected {SIZES}")
    return number


def memory_of(flag: str, text: str) -> int:
    """The bound of an index or a recording in bytes, 1 MiB to 1 TiB; raises UsageProblem."""
    number = size_of(flag, text)
    if number < SMALLEST_MEMORY:
        raise UsageProblem(f"{flag}: expected at least 1MiB, got {number:,} bytes")
    return number


Duration: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--duration", metavar="DURATION", parser=seconds(0.0), help="Stop after this time: 10m."
    ),
]


def worker_environment() -> "TopologyConfig | None":
    """The topology that the environment sets for a worker; None where it sets none.

    Waits as a worker does; the log goes to stderr. Raises TopologyEnvironmentError.
    """
    import logging
    import os
    import time

    from dynctl.base.worker_environment import read_worker_environment, variables_without_effect
    from dynctl.screens.render import talk

    for name in variables_without_effect(os.environ):
        talk(f"warning: {name} has no effect without DYN_TOPOLOGY_ENABLED=true")
    return read_worker_environment(
        os.environ,
        now=time.monotonic,
        sleep=time.sleep,
        log=lambda level, line: talk(f"{logging.getLevelName(level)} {line}"),
    )
