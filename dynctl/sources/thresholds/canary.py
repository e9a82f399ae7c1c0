"""A canary of busy thresholds: they are set, watched by conditions, and set back on a breach.

The thresholds stay only where every condition was measured and held. What cannot be measured
proves nothing, so the old values return then as well.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, UsageProblem
from dynctl.base.quantities import percent
from dynctl.documents.fleet_load import ended_requests, quantile
from dynctl.documents.thresholds import CanaryCondition, CanaryState, CanaryVerdict, ThresholdValues
from dynctl.serving.dynamo.frontend_traffic import counters_fell
from dynctl.sources.http import HttpFrontend
from dynctl.sources.thresholds.replicas import Replica, at_once
from dynctl.wire.dynamo.frontend_metrics import RequestTotals, buckets, read_request_totals

#: A condition is measured over the last readings of this long.
WINDOW_S: Final = 60.0
#: Seconds between two readings.
EVERY_S: Final = 1.0
#: A replica that does not answer for so long, or for a quarter of the canary, ends it.
SILENT_S: Final = 15.0
MAX_CONDITIONS: Final = 16
#: Seconds that the setting of all replicas may take.
_SETTING_S: Final = 10.0

_FORM: Final = re.compile(
    r"(refused|errors|hits|(ttft|itl)_p(\d{1,2}(?:\.\d)?))\s*(>=?|<=?)\s*"
    r"(\d{1,9}(?:\.\d{1,6})?)\s*(%|ms|s|)"
)
_EXAMPLES: Final = "for example: --revert-if 'refused>1%' --revert-if 'ttft_p99>2s'"


@dataclass(frozen=True, slots=True)
class RevertCondition:
    """``signal`` compared with ``limit``: a share (0..1), or seconds. ``quantile``: of a latency,
    0..1."""

    text: str
    signal: str
    quantile: float
    above: bool
    strict: bool
    limit: float

    def breached(self, value: float) -> bool:
        """Whether ``value`` is on the wrong side of the limit."""
        if value == self.limit:
            return not self.strict
        return value > self.limit if self.above else value < self.limit


def read_condition(text: str) -> RevertCondition:
    """``refused>1%``, ``errors>=0.5%``, ``hits<30%``, ``ttft_p99>2s`` or ``itl_p50>40ms``.

    Raises UsageProblem.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(
            f"--revert-if {text!r}: expected refused, errors, hits, ttft_pNN or itl_pNN, then > "
            "or <, then a share in % or a time in ms or s",
            _EXAMPLES,
        )
    name, kind, quantile, relation, number, unit = match.groups()
    share = kind is None
    if share and unit not in ("%", ""):
        raise UsageProblem(f"--revert-if {text!r}: {name} is a share; expected %", _EXAMPLES)
    if not share and unit not in ("ms", "s"):
        raise UsageProblem(f"--revert-if {text!r}: {name} is a time; expected ms or s", _EXAMPLES)
    limit = float(number) * {"%": 0.01, "ms": 0.001}.get(unit, 1.0)
    if share and limit > 1:
        raise UsageProblem(
            f"--revert-if {text!r}: a share is at most 100 %, this is {percent(limit)}", _EXAMPLES
        )
    at = float(quantile or 0) / 100
    if not share and not 0 < at < 1:
        raise UsageProblem(f"--revert-if {text!r}: expected p1 to p99.9", _EXAMPLES)
    signal = kind or name
    condition = RevertCondition(
        text.strip(), signal, at, relation[0] == ">", len(relation) == 1, limit
    )
    if not condition.breached(math.inf if not share else 1.0) and not condition.breached(0.0):
        values = "a share is from 0 to 100 %" if share else "a time is at least 0"
        raise UsageProblem(f"--revert-if {text!r}: {values}, so this never reverts", _EXAMPLES)
    return condition


def read_conditions(texts: Sequence[str]) -> list[RevertCondition]:
    """At least one, at most :data:`MAX_CONDITIONS`. Raises UsageProblem."""
    if not 1 <= len(texts) <= MAX_CONDITIONS:
        raise UsageProblem(
            f"--canary with {len(texts)} --revert-if; expected 1 to {MAX_CONDITIONS}", _EXAMPLES
        )
    return [read_condition(text) for text in texts]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A condition over some requests. ``value`` None: unknown, ``why`` where they are enough."""

    value: float | None
    requests: int
    why: str = ""


def measure(condition: RevertCondition, before: RequestTotals, after: RequestTotals) -> Measurement:
    """The value over the requests that were counted between two readings.

    Shares are of the requests that ended, without those that the client cancelled or got wrong.
    A quantile is interpolated in its bucket as PromQL's ``histogram_quantile`` does.
    """
    if condition.signal in ("ttft", "itl"):
        return _quantile(
            condition,
            before.latencies.get(condition.signal, {}),
            after.latencies.get(condition.signal, {}),
        )
    ended = ended_requests(
        {kind: number - before.ended.get(kind, 0.0) for kind, number in after.ended.items()}
    )
    judged = ended.requests - ended.clients
    if condition.signal == "hits":
        routed = after.tokens.get("input", 0.0) - before.tokens.get("input", 0.0)
        cached = after.tokens.get("cached", 0.0) - before.tokens.get("cached", 0.0)
        served = judged - ended.errors - ended.refused
        return Measurement(cached / routed if routed > 0 else None, served)
    wrong = ended.errors if condition.signal == "errors" else ended.refused
    return Measurement(wrong / judged if judged > 0 else None, judged)


def _quantile(
    condition: RevertCondition, before: Mapping[float, float], after: Mapping[float, float]
) -> Measurement:
    edges, counts = buckets(after)
    _, earlier = buckets({edge: before.get(edge, 0.0) for edge in after})
    counts = tuple(now - then for now, then in zip(counts, earlier, strict=True))
    value, requests = quantile(edges, counts, condition.quantile), sum(counts)
    if value is not None and sum(counts[: len(edges)]) < condition.quantile * requests:
        # It is above the last edge, as far as is known.
        if condition.limit > edges[-1]:
            why = f"more than {edges[-1]:g} s, the last edge of the frontends' histogram"
            return Measurement(None, int(requests), why)
        value = math.nextafter(edges[-1], math.inf)
    return Measurement(value, int(requests))


@dataclass(slots=True)
class _Watched:
    """One replica: its readings of the last window, the first of all, and the last answer."""

    replica: Replica
    readings: deque[tuple[float, RequestTotals]] = field(default_factory=deque)
    first: RequestTotals | None = None
    answered: float = 0.0
    problem: str = ""
    changed: str = ""


class Canary:
    """Watches replicas whose thresholds were just set to ``values``.

    ``least``: requests that a condition needs before it is believed. Once ``ended`` is set, the
    operator wants no more of it.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        model: str,
        values: ThresholdValues,
        conditions: Sequence[RevertCondition],
        seconds: float,
        *,
        least: int,
        ended: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._values = values
        self._conditions = conditions
        self._seconds = seconds
        self._least = least
        self._clock = clock
        self._ended = ended
        self._name = secrets.token_hex(4)
        self._began = clock()
        self._silent = min(SILENT_S, max(seconds / 4, 2 * EVERY_S))
        self._watched = [_Watched(replica, answered=self._began) for replica in replicas]

    def announce(self, text: str, *, wait_s: float = 0.0, ends: bool = False) -> None:
        """Let the frontends know of it. ``wait_s``: seconds before it watches; ``ends``: with the
        next change."""
        replicas = [watched.replica for watched in self._watched]
        seconds = 0 if ends else math.ceil(self._seconds + wait_s + _SETTING_S)
        announce(replicas, text, f"{self._name} {seconds}")

    def begin(self) -> None:
        """Read the counters before the thresholds change. Raises UsageProblem where a replica
        has none."""
        for watched in self._watched:
            if watched.replica.metrics is None:
                raise UsageProblem(
                    f"{watched.replica.name} has no metrics, so a canary cannot be watched there",
                    "name the frontends: --frontend URL",
                )
        self._read()
        silent = next((watched for watched in self._watched if watched.problem), None)
        if silent is not None:
            raise UsageProblem(
                f"{silent.replica.name}: its metrics cannot be read, so a canary cannot be watched "
                f"there: {silent.problem}",
                "check what answers there: dynctl version --frontend URL",
            )

    def watch(self, say: Callable[[str], None]) -> CanaryVerdict:
        """Watch until the time is over, a condition is breached, or a replica is lost.

        ``say`` gets a line about the present values now and then.
        """
        self._began = self._clock()
        for watched in self._watched:
            watched.answered = self._began
        next_line = self._began + min(10.0, self._seconds / 4)
        while True:
            passed = self._clock() - self._began
            if self._ended.wait(max(0.0, min(EVERY_S, self._seconds - passed))):
                return self._verdict("interrupted", passed, "ended by the operator")
            self._read()
            now = self._clock()
            passed = now - self._began
            window = self._window()
            for watched in self._watched:
                if watched.changed:
                    return self._verdict(
                        "changed", passed, f"{watched.replica.name}: {watched.changed}"
                    )
                if now - watched.answered > self._silent:
                    why = (
                        f"{watched.replica.name} did not answer for {now - watched.answered:.0f} s"
                    )
                    return self._verdict("lost", passed, f"{why}: {watched.problem}")
            for condition, measured in zip(self._conditions, window, strict=True):
                if measured.value is None or measured.requests < self._least:
                    continue
                if condition.breached(measured.value):
                    return self._breach_verdict(passed, condition, measured)
            if passed >= self._seconds:
                return self._at_end(passed)
            if now >= next_line:
                next_line += max(10.0, self._seconds / 10)
                say(self._line(passed, window))

    def _at_end(self, passed: float) -> CanaryVerdict:
        whole = list(zip(self._conditions, self._whole(), strict=True))
        few = []
        for condition, measured in whole:
            if measured.value is None or measured.requests < self._least:
                few.append((condition, measured))
            elif condition.breached(measured.value):
                return self._breach_verdict(passed, condition, measured)
        if not few:
            return self._verdict("held", passed, "")
        condition, measured = few[0]
        why = f"measured on {measured.requests:,} requests; expected at least {self._least:,}"
        if measured.requests >= self._least:
            why = f"unknown: {measured.why or 'the frontends export no such values'}"
        return self._verdict("unproven", passed, f"{condition.text}: {why}")

    def _line(self, passed: float, window: Sequence[Measurement]) -> str:
        values = ", ".join(
            f"{condition.text}: "
            + ("unknown" if measured.value is None else shown(condition, measured.value))
            for condition, measured in zip(self._conditions, window, strict=True)
        )
        return f"{passed:.0f} of {self._seconds:.0f} s: {values}"

    # -- inside ------------------------------------------------------------------------------------

    def _read(self) -> None:
        at_once(self._read_one, self._watched)

    def _read_one(self, watched: _Watched) -> None:
        try:
            assert watched.replica.metrics is not None
            totals = read_request_totals(watched.replica.metrics(), self._model)
            held = watched.replica.holder.thresholds().get(self._model) if watched.first else None
        except (DynctlError, WireError) as error:
            watched.problem = error.message if isinstance(error, DynctlError) else str(error)
            return
        now = self._clock()
        watched.answered, watched.problem = now, ""
        if watched.first is None:
            watched.first = totals
        elif counters_fell(watched.readings[-1][1], totals):
            watched.changed = (
                "its counters fell, so it restarted and has the thresholds of its start"
            )
        elif held is None:
            watched.changed = f"it does not serve {self._model} any more"
        else:
            other = [name for name, value in self._values.items() if held.get(name) != value]
            if other:
                watched.changed = (
                    f"{other[0]} is {held.get(other[0])}, which this command did not set"
                )
        watched.readings.append((now, totals))
        while len(watched.readings) > 1 and watched.readings[1][0] <= now - WINDOW_S:
            watched.readings.popleft()

    def _window(self) -> list[Measurement]:
        return self._measure_since([watched.readings[0][1] for watched in self._watched])

    def _whole(self) -> list[Measurement]:
        return self._measure_since([watched.first or RequestTotals() for watched in self._watched])

    def _measure_since(self, starts: Sequence[RequestTotals]) -> list[Measurement]:
        before = _sum(starts)
        after = _sum([one.readings[-1][1] for one in self._watched])
        return [measure(condition, before, after) for condition in self._conditions]

    def _breach_verdict(
        self, passed: float, condition: RevertCondition, measured: Measurement
    ) -> CanaryVerdict:
        assert measured.value is not None
        of = f"{measured.requests:,} requests"
        why = f"{condition.text}: {shown(condition, measured.value)}, measured on {of}"
        return self._verdict("breached", passed, why, condition, measured)

    def _verdict(
        self,
        state: CanaryState,
        passed: float,
        why: str,
        breached: RevertCondition | None = None,
        found: Measurement | None = None,
    ) -> CanaryVerdict:
        rows = []
        for condition, whole in zip(self._conditions, self._whole(), strict=True):
            seen = found if found is not None and condition is breached else whole
            known = seen.value is not None and seen.requests >= self._least
            rows.append(
                CanaryCondition(
                    condition.text,
                    "breached" if condition is breached else "held" if known else "unknown",
                    seen.value,
                    condition.limit,
                    seen.requests,
                )
            )
        values = dict(self._values)
        return CanaryVerdict(state, round(passed, 3), why, rows, values, kept=state == "held")


def announce(replicas: Sequence[Replica], text: str, canary: str = "") -> None:
    """Let each frontend know why its thresholds are set from now on, and of which canary."""
    for replica in replicas:
        if isinstance(replica.holder, HttpFrontend):
            replica.holder.note, replica.holder.canary = text, canary


def release(replicas: Sequence[Replica], model: str) -> None:
    """Report the end of the canary to each frontend that knows of it. Raises nothing: where one
    does not answer, its time ends it."""

    def end(replica: Replica) -> None:
        with contextlib.suppress(DynctlError):
            replica.holder.set_thresholds(model, {})

    at_once(end, [replica for replica in replicas if isinstance(replica.holder, HttpFrontend)])


def shown(condition: RevertCondition, value: float) -> str:
    """A share in percent, or a time."""
    if condition.signal in ("ttft", "itl"):
        return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"
    return percent(value, 2)


def _sum(parts: Sequence[RequestTotals]) -> RequestTotals:
    """Latencies whose buckets differ between parts cannot be added: they are left out."""
    whole = RequestTotals()
    for part in parts:
        for kind, number in part.ended.items():
            whole.ended[kind] += number
    for name in {name for part in parts for name in part.latencies}:
        rows = [part.latencies[name] for part in parts if part.latencies.get(name)]
        if len({frozenset(row) for row in rows}) == 1:
            whole.latencies[name] = {edge: sum(row[edge] for row in rows) for edge in rows[0]}
    for part in parts:
        for name, number in part.tokens.items():
            whole.tokens[name] = whole.tokens.get(name, 0.0) + number
    return whole
