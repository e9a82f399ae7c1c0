"""The lines above the panels: source, routing mode, numbers, and whether the data is current."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec import UnsetType
from rich.style import Style

from dynctl.base.quantities import percent
from dynctl.documents.fleet_load import LastTest, Rates
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.snapshot import DomainView, Meter, Snapshot
from dynctl.screens.cells import cells, pad_cells
from dynctl.screens.decisions import clock
from dynctl.screens.numbers import age, amount, count, middle
from dynctl.screens.topology import policy_text
from dynctl.top.history import History
from dynctl.top.marks import ACCENT, BAD, BLOCKS, BOLD, DIM, GOOD, PLAIN, WARN, Line, Marks, plain

#: A snapshot is out of date after this many intervals without a new one.
_TURNS = 3


@dataclass(frozen=True, slots=True)
class State:
    """Modes of the dashboard. ``rate``: seconds between two readings. ``past``: what the source
    shows in place of the present; empty where it is live."""

    rate: float
    paused: bool = False
    readonly: bool = False
    past: str = ""


def header(
    snapshot: Snapshot | None,
    view: DomainView | None,
    title: str,
    state: State,
    width: int,
    now: float,
    history: History | None = None,
) -> list[Line]:
    """Two lines of ``width`` cells, and between them the rates of requests where the source counts
    them. ``title``: shown until the first snapshot."""
    if snapshot is None:
        return [plain(f" dynctl top  {title}", BOLD), plain(" reading ..")]
    time_of_day = clock(now, tenths=False)
    room = width - len(time_of_day) - 3
    first = fitting(facts(snapshot, view), room - 1)
    word, style = currency_mark(snapshot, state, now)
    room_below = max(10, width - len(word) - 3)
    second = fitting(numbers(snapshot), room_below)
    counted = history is not None and not isinstance(snapshot.header.traffic, UnsetType)
    uncounted = snapshot.unknown("rates") if history is not None and not counted else None
    return [
        [(f" {pad_cells(first, room)} ", BOLD), (time_of_day, BOLD)],
        *([rates_line(history, snapshot.at, BLOCKS, width)] if counted and history else []),
        *(
            [plain(middle(f" requests/s unknown: {uncounted.unknown}", width), DIM)]
            if uncounted
            else []
        ),
        [(f" {pad_cells(second, room_below)} ", PLAIN), (word, style)],
    ]


def rates_line(history: History, at: float, marks: Marks, width: int) -> Line:
    """Requests a second, time to the first token, hit rate, refusals and errors of the last
    seconds, each with the last minutes as a sparkline.

    Where they do not fit, refusals and errors leave while there are none; sparklines become
    shorter before any that there are leaves.
    """
    now = history.rates(at)
    if now is None:
        return plain(" requests: counting ..", DIM)
    texts = rate_texts(now)
    longest, step = _trend_size(width)
    shown, count = _fitting_rates(now, texts, longest, width)
    trend = history.trend(count, step, at) if count else []
    line: list[tuple[str, Style]] = [(" ", PLAIN)]
    for name, text, top in texts:
        if name in shown:
            values = [getattr(rates, name) if rates else None for rates in trend]
            drawn = marks.sparkline(values, top) if count else ""
            line += [(f"{text} " if drawn else text, _rate_style(name, now)), (drawn, ACCENT)]
            line.append((GAP[:-1], PLAIN))
    return line


def _fitting_rates(
    now: Rates, texts: Sequence[RateText], longest: int, width: int
) -> tuple[set[str], int]:
    """The rates that fit, and the marks of each sparkline."""
    calm = {name for name in ("refused", "errors") if not getattr(now, name)}

    def room(names: Container[str], count: int) -> int:
        """Cells that are left beside the texts of ``names``, with sparklines of ``count``."""
        trail = count + 1 if count else 0
        used = [len(text) + trail for name, text, _ in texts if name in names]
        return width - 1 - sum(used) - (len(GAP) - 1) * (len(used) - 1)

    shown = {name for name, _, _ in texts if name not in calm}
    count = next((count for count in (longest, 5, 3) if room(shown, count) >= 0), 0)
    for name, _, _ in texts:
        if room({*shown, name}, count) >= 0:
            shown.add(name)
    return shown, count


def _trend_size(width: int) -> tuple[int, float]:
    """Marks of the longest sparkline, and the seconds of each."""
    if width >= 160:
        return 16, 15.0
    return (8, 15.0) if width >= 100 else (5, 12.0)


def _rate_style(name: str, now: Rates) -> Style:
    if name == "refused" and now.refused:
        return BOLD + WARN
    return BOLD + (BAD if name == "errors" and now.errors else PLAIN)


RateText: TypeAlias = tuple[str, str, float | None]
"""The field whose trend belongs to a rate, its text, and the value of a full mark (None: the
largest)."""


def rate_texts(now: Rates) -> Sequence[RateText]:
    """The rates of the last seconds as texts."""
    times = "-" if now.ttft_p50 is None else f"{_time(now.ttft_p50)} p99 {_time(now.ttft_p99)}"
    return (
        ("per_second", f"{_number(now.per_second)} req/s", None),
        ("ttft_p99", f"TTFT p50 {times}", None),
        ("hits", f"hits {_share(now.hits)}", 1.0),
        ("refused", f"refused {_share(now.refused)}", 0.2),
        ("errors", f"errors {_share(now.errors)}", 0.2),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _share(value: float | None) -> str:
    if value is None:
        return "-"
    return percent(value, 1 if 0 < value < 0.0995 else 0)


def currency_mark(snapshot: Snapshot, state: State, now: float) -> tuple[str, Style]:
    """Whether the data is current, in a few words."""
    mode = "  readonly" if state.readonly else ""
    if state.paused:
        return f"‖ PAUSED at {clock(snapshot.at, tenths=False)}{mode}", WARN
    if state.past:
        return f"○ {state.past}, not live{mode}", WARN
    if snapshot.problem:
        read = [one.at for one in snapshot.parts.values() if one.at is not None]
        return f"✗ NOT CURRENT, {age(now - max(read, default=now))} old{mode}", BAD
    old = currency(snapshot, now)
    if old and now - snapshot.at > _TURNS * state.rate:
        return f"✗ {old}{mode}", BAD
    return f"● live, every {state.rate:g} s{mode}", GOOD


GAP: Final = "   "
_MODELS: Final = 3
#: Seconds from which on a snapshot is shown as old.
LATE_S: Final = 3.0


def facts(snapshot: Snapshot, view: DomainView | None) -> list[str]:
    """Facts that rarely change, most important first."""
    header = snapshot.header
    parts = [f"dynctl top  {snapshot.source}"]
    models = list(header.models)
    if models:
        more = f" +{len(models) - _MODELS}" if len(models) > _MODELS else ""
        parts.append(", ".join(models[:_MODELS]) + more)
    parts += [header.mode] if header.mode is not None else []
    parts += policies(view)
    if header.frontends is not None and header.frontends[1] > 1:
        answering, named = header.frontends
        parts.append(f"{answering} of {named} frontends")
    if header.preset is not None:
        parts.append(header.preset)
    return parts


def policies(view: DomainView | None) -> list[str]:
    """The KV-transfer policies in force: ``required zone``."""
    found: dict[str | None, dict[str, None]] = {}
    for row in view.rows if view is not None else ():
        for one in row.capacity.policies:
            if one.enforcement is not None:
                kinds = found.setdefault(one.domain, {})
                kinds[policy_text(one, one.domain)] = None
    return [f"{' / '.join(kinds)} {domain or '?'}" for domain, kinds in found.items()]


def other_routers(routers: Sequence[ReplicaRow]) -> str:
    """How many other routers share their load, and those whose load is out of date."""
    states = Counter(one.state for one in routers if one.state != "in step")
    late = "".join(f", {number} {state}" for state, number in sorted(states.items()))
    return f"{len(routers)} other router{'s' * (len(routers) != 1)}{late}"


def numbers(snapshot: Snapshot) -> list[str]:
    """Numbers that change all the time: requests, the router's queue, decisions."""
    header = snapshot.header
    parts = [f"{available(snapshot)} worker{'s' * (len(snapshot.workers) != 1)}"]
    if header.in_flight is not None:
        parts.append(f"in flight {count(header.in_flight)}")
    if not isinstance(header.routers, UnsetType):
        parts.append(other_routers(header.routers))
    parts.append(f"router queue {queue(snapshot)}")
    made = decisions_made(snapshot)
    if made is not None:
        parts.append(f"{count(made)} decision{'s' * (made != 1)}")
    if not isinstance(header.tested, UnsetType):
        parts.append(last_test(header.tested, snapshot.at))
    return parts


def last_test(tested: LastTest, now: float) -> str:
    """Age and result of the last `dynctl test`: ``tested 3 h ago: 1 failed``."""
    wrong = [f"{tested.failed} failed"] if tested.failed else []
    wrong += [f"{tested.warnings} warning{'s' * (tested.warnings != 1)}"] if tested.warnings else []
    when = f"tested {age(max(0.0, now - tested.at))} ago"
    return f"{when}: {', '.join(wrong)}" if wrong else when


def decisions_made(snapshot: Snapshot) -> int | None:
    """Decisions since the source started; None where it does not count them."""
    recorded = snapshot.header.recorded
    # The list is read after the count, and may have newer ones.
    return None if recorded is None else max(recorded, len(snapshot.decisions))


def decisions_listed(snapshot: Snapshot, listed: int | None = None) -> str:
    """How many decisions a list has, of those that the header counts:
    ``last 500 of 577 since start``."""
    listed = len(snapshot.decisions) if listed is None else listed
    made = decisions_made(snapshot)
    if made is None:
        made = len(snapshot.decisions) + snapshot.missed
    if listed == made:
        return f"{listed:,}"
    return f"{'last ' if listed else ''}{listed:,} of {made:,} since start"


def available(snapshot: Snapshot) -> str:
    """The number of workers; ``4/6`` if two of six are unavailable."""
    number = len(snapshot.workers)
    alive = sum(row.status == "ready" for row in snapshot.workers)
    return f"{number:,}" if alive == number else f"{alive:,}/{number:,}"


def queue(snapshot: Snapshot) -> str:
    """Length of the router's own queue; ``none`` if it has no queue, ``?`` if unknown."""
    if snapshot.header.queue is not None:
        return count(snapshot.header.queue)
    unknown = snapshot.unknown("queue")
    return "none" if unknown is not None and "has no queue" in unknown.unknown else "?"


def fitting(parts: Sequence[str], width: int) -> str:
    """The first of ``parts`` that fit ``width``; the very first is shortened if necessary."""
    line = middle(parts[0], width)
    for part in parts[1:]:
        if cells(line) + len(GAP) + cells(part) <= width:
            line += GAP + part
    return line


def meter_line(meter: Meter, marks: Marks, now: float, width: int | None = None) -> str:
    """How close a preferred domain is to spilling, at the last decision that preferred it."""
    preference = meter.preference
    place = f"prefers {meter.value} {amount(preference.weight)}"
    when = f"{age(max(0.0, now - meter.at))} ago"
    if preference.now is None:
        parts = [f"{place}: {preference.verdict}", f"({when})"]
    else:
        fullness = meter.fullness or 0.0
        mark = "SPILLS" if fullness >= 1 else "local"
        bar = marks.bar(fullness, 10)
        parts = [
            f"{place}  {bar} {mark} {preference.now:.2f}x",
            f"the best other, spills at {preference.crossover:.2f}x",
            f"({when})",
        ]
    line = parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + 1 + len(part) > width:
            break
        line += f" {part}"
    return line


def currency(snapshot: Snapshot, now: float) -> str:
    """Why and since when the data is out of date; empty if it is current."""
    late = now - snapshot.at
    if snapshot.problem:
        read = [one.at for one in snapshot.parts.values() if one.at is not None]
        last = f"as of {clock(max(read), tenths=False)}: " if read else ""
        return f"{last}{snapshot.problem}"
    return f"{age(late)} old" if late > LATE_S else ""
