"""The two lines on top: facts and the time, numbers and whether this is the present. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style

from dynctl.screens.numbers import age
from dynctl.sources.domains import DomainView
from dynctl.sources.snapshot import Snapshot
from dynctl.top.headline import currency, facts, fitting, numbers
from dynctl.top.lines import BAD, BOLD, GOOD, PLAIN, WARN, Line, plain
from dynctl.top.panels.columns import clock

#: A snapshot is not live any more after this many turns without another.
_TURNS = 3


@dataclass(frozen=True, slots=True)
class State:
    """How the dashboard looks: every ``rate`` seconds, or not at present."""

    rate: float
    paused: bool = False
    readonly: bool = False


def header(
    snapshot: Snapshot | None,
    view: DomainView | None,
    title: str,
    state: State,
    width: int,
    now: float,
) -> list[Line]:
    """Two lines of ``width`` cells. ``title`` stands where nothing was read yet."""
    if snapshot is None:
        return [plain(f" dynctl top  {title}", BOLD), plain(" reading ..")]
    time_of_day = clock(now, tenths=False)
    room = width - len(time_of_day) - 3
    first = fitting(facts(snapshot, view), room - 1)
    word, style = standing(snapshot, state, now)
    room_below = max(10, width - len(word) - 3)
    second = fitting(numbers(snapshot), room_below)
    return [
        [(f" {first.ljust(room)} ", BOLD), (time_of_day, BOLD)],
        [(f" {second.ljust(room_below)} ", PLAIN), (word, style)],
    ]


def standing(snapshot: Snapshot, state: State, now: float) -> tuple[str, Style]:
    """Whether what is shown is the present, in a few words."""
    mode = "  readonly" if state.readonly else ""
    if state.paused:
        return f"‖ PAUSED at {clock(snapshot.at, tenths=False)}{mode}", WARN
    if snapshot.problem:
        heard = [one.at for one in snapshot.told.values() if one.at is not None]
        return f"✗ NOT CURRENT, {age(now - max(heard, default=now))} old{mode}", BAD
    old = currency(snapshot, now)
    if old and now - snapshot.at > _TURNS * state.rate:
        return f"✗ {old}{mode}", BAD
    return f"● live, every {state.rate:g} s{mode}", GOOD
