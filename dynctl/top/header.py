"""The two lines on top: facts and the time, numbers and whether this is the present. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.style import Style

from dynctl.documents.snapshot import DomainView, Meter, Snapshot
from dynctl.screens.numbers import age, amount, count, middle, plural
from dynctl.screens.topology import policy_text
from dynctl.top.marks import BAD, BOLD, GOOD, PLAIN, WARN, Line, Marks, plain
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


GAP: Final = "   "
_MODELS: Final = 3
#: Data this much older than it should be is said to be old.
LATE_S: Final = 3.0


def facts(snapshot: Snapshot, view: DomainView | None) -> list[str]:
    """What does not change from second to second, most important first."""
    header = snapshot.header
    told = [f"dynctl top  {snapshot.source}"]
    models = list(header.models)
    if models:
        more = f" +{len(models) - _MODELS}" if len(models) > _MODELS else ""
        told.append(", ".join(models[:_MODELS]) + more)
    told += [header.mode] if header.mode is not None else []
    told += policies(view)
    if header.frontends is not None and header.frontends[1] > 1:
        answering, named = header.frontends
        told.append(f"{answering} of {named} frontends")
    if header.preset is not None:
        told.append(header.preset)
    return told


def policies(view: DomainView | None) -> list[str]:
    """The KV-transfer policies in force in one word each: ``required zone``."""
    found: dict[str | None, dict[str, None]] = {}
    for row in view.rows if view is not None else ():
        for one in row.capacity.policies:
            if one.enforcement is not None:
                kinds = found.setdefault(one.domain, {})
                kinds[policy_text(one, one.domain)] = None
    return [f"{' / '.join(kinds)} {domain or '?'}" for domain, kinds in found.items()]


def numbers(snapshot: Snapshot) -> list[str]:
    """What changes all the time: requests, the router's queue, decisions."""
    header = snapshot.header
    workers = snapshot.workers
    told = [plural(len(workers), "worker")]
    if header.in_flight is not None:
        told.append(f"in flight {count(header.in_flight)}")
    told.append(f"router queue {queue(snapshot)}")
    if header.recorded is not None:
        told.append(f"decisions {count(header.recorded)}")
    return told


def queue(snapshot: Snapshot) -> str:
    """The router's own queue: a number, ``none`` where it has none, ``?`` where nobody tells."""
    if snapshot.header.queue is not None:
        return count(snapshot.header.queue)
    unknown = snapshot.unknown("queue")
    return "none" if unknown is not None and "has no queue" in unknown.unknown else "?"


def fitting(parts: Sequence[str], width: int) -> str:
    """As many of ``parts`` as fit, the first ones; the first is shortened if it must be."""
    line = middle(parts[0], width)
    for part in parts[1:]:
        if len(line) + len(GAP) + len(part) <= width:
            line += GAP + part
    return line


def meter_line(meter: Meter, marks: Marks, now: float, width: int | None = None) -> str:
    """How near a preferred domain is to spilling, as of the last decision that preferred it."""
    preference = meter.preference
    place = f"prefers {meter.value} {amount(preference.weight)}"
    when = f"{age(max(0.0, now - meter.at))} ago"
    if preference.now is None:
        told = [f"{place}: {preference.verdict}", f"({when})"]
    else:
        fullness = meter.fullness or 0.0
        mark = "SPILLS" if fullness >= 1 else "local"
        bar = marks.bar(fullness, 10)
        told = [
            f"{place}  {bar} {mark} {preference.now:.2f}x",
            f"the best other, spills at {preference.crossover:.2f}x",
            f"({when})",
        ]
    line = told[0]
    for part in told[1:]:
        if width is not None and len(line) + 1 + len(part) > width:
            break
        line += f" {part}"
    return line


def currency(snapshot: Snapshot, now: float) -> str:
    """Empty while this is the present; else since when it is not, and why."""
    late = now - snapshot.at
    if snapshot.problem:
        told = [one.at for one in snapshot.told.values() if one.at is not None]
        last = f"as of {clock(max(told), tenths=False)}: " if told else ""
        return f"{last}{snapshot.problem}"
    return f"{age(late)} old" if late > LATE_S else ""
