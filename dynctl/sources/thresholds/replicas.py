"""Busy thresholds of all replicas of a frontend: read and compared, set on all of them or on none.

Each frontend process has its own thresholds. Where replicas differ, the result of a request
depends on the replica that it reaches. So they are set together: if one fails, the others are set
back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeVar

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.documents.workers import WorkerRow
from router_core import THRESHOLD_SETTINGS

State = Literal["set", "failed", "set back", "left over"]

_AT_ONCE: Final = 8
_T = TypeVar("_T")
_R = TypeVar("_R")


class HoldsThresholds(Protocol):
    """What has busy thresholds: a dynctl frontend, a Dynamo frontend, or a saved view.

    Methods raise DynctlError.
    """

    def thresholds(self) -> dict[str, Thresholds]:
        """Model -> all its thresholds."""
        ...

    def check_values(self, model: str, present: ThresholdValues, values: ThresholdValues) -> None:
        """Raise UsageProblem where ``values`` cannot replace ``present``."""
        ...

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        """Set some thresholds; returns all that are in force then."""
        ...

    def settable_values(self, values: ThresholdValues) -> Thresholds:
        """``values``, with a limit above any load in place of None where off cannot be set."""
        ...


class BusyProbe(Protocol):
    """How to find out which workers a Dynamo frontend treats as busy: it exports no such value.

    Raises nothing.
    """

    def refuses_worker(self, model: str, worker_id: int, dp_rank: int | None) -> bool | None:
        """True: busy; False: the frontend uses the worker; None: unknown."""
        ...

    def no_report_reason(self) -> str:
        """Why the report of a worker may be unknown."""
        ...


class NamedHolder(HoldsThresholds, Protocol):
    """A frontend with its address."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Replica:
    """One holder. ``name`` is shown; ``workers`` returns the workers with the load that the replica
    counts (raises DynctlError). ``probe`` None: the rows have the busy state. ``group``: the
    deployment of the replica, where several deployments are read together. ``metrics`` returns the
    body of its ``GET /metrics`` (raises DynctlError); None: it has none."""

    name: str
    holder: HoldsThresholds
    workers: Callable[[], list[WorkerRow]] = list
    probe: BusyProbe | None = None
    group: str = ""
    metrics: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True)
class ThresholdReading:
    """The thresholds of one replica, by model. ``error``: why they are unknown."""

    replica: Replica
    thresholds: Mapping[str, ThresholdValues] = field(default_factory=dict)
    error: DynctlError | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result on one replica. ``after``: its thresholds now, None where unknown.

    ``failed``: not set, or unknown; ``set back``: as before, because another replica failed;
    ``left over``: setting it back failed, or another value than ours was there meanwhile, which
    stays.
    """

    replica: Replica
    state: State
    before: ThresholdValues | None = None
    after: ThresholdValues | None = None
    error: DynctlError | None = None


@dataclass(frozen=True, slots=True)
class SetResult:
    """All replicas in their order."""

    outcomes: tuple[Outcome, ...]
    values: ThresholdValues

    @property
    def ok(self) -> bool:
        return all(outcome.state == "set" for outcome in self.outcomes)

    @property
    def agree(self) -> bool:
        """Whether all replicas have the same values as each other."""
        return self.ok or all(outcome.state in ("failed", "set back") for outcome in self.outcomes)

    @property
    def error(self) -> DynctlError | None:
        return next((outcome.error for outcome in self.outcomes if outcome.error is not None), None)


def read_all(replicas: Sequence[Replica]) -> list[ThresholdReading]:
    """The thresholds of each replica, read at the same time; never raises DynctlError."""

    def read(replica: Replica) -> ThresholdReading:
        try:
            return ThresholdReading(replica, replica.holder.thresholds())
        except DynctlError as error:
            return ThresholdReading(replica, error=error)

    return at_once(read, replicas)


def serving(readings: Sequence[ThresholdReading], model: str) -> dict[str, list[ThresholdReading]]:
    """Group -> its readings, for groups with at least one replica that serves the model."""
    groups = {reading.replica.group for reading in readings if model in reading.thresholds}
    return {
        group: [reading for reading in readings if reading.replica.group == group]
        for group in sorted(groups)
    }


def differing(readings: Sequence[ThresholdReading], model: str) -> dict[str, list[str]]:
    """Replica -> its thresholds that differ from most of its group; empty where all agree.

    A replica that does not serve the model differs in all of them. A replica that cannot be read is
    not counted. Where no value has a majority, the first replica's value counts.
    """
    differences: dict[str, list[str]] = {}
    for group in serving(readings, model).values():
        differences |= _differing_in_group(group, model)
    return differences


def _differing_in_group(readings: Sequence[ThresholdReading], model: str) -> dict[str, list[str]]:
    rows = {
        reading.replica.name: reading.thresholds.get(model)
        for reading in readings
        if reading.error is None
    }
    differences: dict[str, list[str]] = {}
    for name in THRESHOLD_SETTINGS:
        values = {
            holder: "absent" if row is None else row.get(name) for holder, row in rows.items()
        }
        if len(set(values.values())) > 1:
            usual = Counter(values.values()).most_common(1)[0][0]
            for replica, value in values.items():
                if value != usual:
                    differences.setdefault(replica, []).append(name)
    return differences


def set_everywhere(
    replicas: Sequence[Replica], model: str, values: ThresholdValues, *, partial: bool = False
) -> SetResult:
    """Set on every replica and read it back from each; set all back where one fails.

    ``partial``: values that could be set stay. Raises DynctlError, and writes nothing, where a
    replica is certain to fail (with ``partial``: all replicas). With a single replica its error is
    raised, unless its thresholds changed.
    """
    outcomes = _read_before(replicas, model, values, partial=partial)
    stopped = False
    for at, outcome in enumerate(outcomes):
        if outcome.state != "failed" and not stopped:
            outcomes[at] = _write(outcome, model, values)
            stopped = outcomes[at].state == "failed" and not partial
    outcomes = [_read_back(outcome, model, values) for outcome in outcomes]
    only = outcomes[0]
    if len(outcomes) == 1 and only.error is not None and only.after == only.before:
        raise only.error
    if not partial and any(outcome.state == "failed" for outcome in outcomes):
        outcomes = [_set_back(outcome, model, values) for outcome in outcomes]
    return SetResult(tuple(outcomes), dict(values))


def set_back(result: SetResult, model: str) -> SetResult:
    """Give each replica the values from before :func:`set_everywhere`; its other values, and those
    that another operator set meanwhile, stay. Raises nothing."""
    outcomes = at_once(lambda outcome: _set_back(outcome, model, result.values), result.outcomes)
    return SetResult(tuple(outcomes), result.values)


def failure(result: SetResult, *, partial: bool) -> DynctlError:
    """The error for thresholds that were not set on every replica."""
    done = sum(outcome.state == "set" for outcome in result.outcomes)
    stuck = [outcome.replica.name for outcome in result.outcomes if outcome.state == "left over"]
    reasons = _reasons(result.outcomes)
    message = f"thresholds were set on {done} of {len(result.outcomes)} frontends: {reasons}"
    if stuck:
        message += f"; not set back: {', '.join(stuck)}"
    elif not partial:
        message += "; the others were set back"
    first = result.error
    kind = type(first) if first is not None else Unreachable
    hint = "run the same command again once all of them answer"
    return kind(message, hint if partial else f"{hint}, or keep the ones that succeed: --partial")


def set_on_all(holders: Sequence[NamedHolder], model: str, values: ThresholdValues) -> Thresholds:
    """Set on every frontend, or on none of them; returns the thresholds of the first.

    Raises DynctlError.
    """
    result = set_everywhere([Replica(holder.url, holder) for holder in holders], model, values)
    if not result.ok:
        raise failure(result, partial=False)
    return dict(result.outcomes[0].after or {})


def at_once(call: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """``call(item)`` for each item, in their order, several at the same time."""
    if len(items) == 1:
        return [call(items[0])]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(call, items))


def _reasons(outcomes: Sequence[Outcome]) -> str:
    """The failed replicas and their errors; most errors contain the address already."""
    reasons = []
    for outcome in outcomes:
        if outcome.error is not None:
            text = outcome.error.message
            named = outcome.replica.name in text
            reasons.append(text if named else f"{outcome.replica.name}: {text}")
    return "; ".join(reasons)


# -- one replica -----------------------------------------------------------------------------------


def _read_before(
    replicas: Sequence[Replica], model: str, values: ThresholdValues, *, partial: bool
) -> list[Outcome]:
    """Each replica before anything is written; those that are certain to fail are ``failed``."""
    outcomes = []
    for reading in read_all(replicas):
        present = reading.thresholds.get(model)
        error = reading.error
        if error is None and present is None:
            served = ", ".join(sorted(reading.thresholds)) or "none"
            error = UsageProblem(f"it serves no model {model}; it serves {served}")
        elif error is None and present is not None:
            try:
                reading.replica.holder.check_values(model, present, values)
            except UsageProblem as refused:
                error = refused
        state: State = "set" if error is None else "failed"
        outcomes.append(Outcome(reading.replica, state, present, present, error))
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed and (not partial or len(failed) == len(outcomes)):
        first = failed[0].error
        assert first is not None
        if len(outcomes) == 1:
            raise first
        raise type(first)(
            f"thresholds were set on 0 of {len(outcomes)} frontends, nothing is changed: "
            + _reasons(failed),
            first.hint if partial else "to set the frontends that accept it: --partial",
        )
    return outcomes


def _write(outcome: Outcome, model: str, values: ThresholdValues) -> Outcome:
    holder = outcome.replica.holder
    try:
        after = holder.set_thresholds(model, values)
    except DynctlError as error:
        return Outcome(outcome.replica, "failed", outcome.before, None, error)
    return Outcome(outcome.replica, "set", outcome.before, after)


def _read_back(outcome: Outcome, model: str, values: ThresholdValues) -> Outcome:
    """The outcome with the replica's thresholds, read again."""
    before, error = outcome.before, outcome.error
    try:
        after = outcome.replica.holder.thresholds().get(model)
    except DynctlError as lost:
        return Outcome(outcome.replica, "failed", before, None, error or lost)
    if error is None and (after is None or not _holds(after, values)):
        name = next((value for value in values if after and after.get(value) != values[value]), "")
        now = (
            "the model is not served any more" if after is None else f"{name} is {after.get(name)}"
        )
        error = Unreachable(f"{now} after {name} was set to {values.get(name)}" if name else now)
    return Outcome(outcome.replica, "set" if error is None else "failed", before, after, error)


def _set_back(outcome: Outcome, model: str, values: ThresholdValues) -> Outcome:
    """The outcome after setting the replica back, where its thresholds changed."""
    before, after = outcome.before, outcome.after
    state: State = "failed" if outcome.state == "failed" else "set back"
    if before is None or (after is not None and dict(after) == dict(before)):
        return outcome if state == "failed" else Outcome(outcome.replica, state, before, before)
    holder = outcome.replica.holder
    now: ThresholdValues = {}
    try:
        now = holder.thresholds().get(model) or {}
        # Another operator may have set a value meanwhile: only ours is replaced.
        theirs = [name for name in values if now.get(name) not in (values[name], before.get(name))]
        wanted = {name: before.get(name) for name in values if name not in theirs}
        if not _holds(now, wanted):
            now = holder.set_thresholds(model, holder.settable_values(wanted))
    except DynctlError as error:
        return Outcome(outcome.replica, "left over", before, now or after, outcome.error or error)
    if not _holds(now, wanted):
        return Outcome(outcome.replica, "left over", before, now, outcome.error)
    if theirs:
        return Outcome(
            outcome.replica, "left over", before, now, _other_operator(theirs, now, before)
        )
    return Outcome(outcome.replica, state, before, now, outcome.error)


def _other_operator(
    theirs: Sequence[str], now: ThresholdValues, before: ThresholdValues
) -> Unreachable:
    """Why values of another operator stay."""
    current = ", ".join(f"{name} is {now.get(name)}" for name in theirs)
    earlier = ", ".join(str(before.get(name)) for name in theirs)
    return Unreachable(
        f"{current}, which this command did not set: another operator changed it, so it is not "
        f"set back to {earlier}"
    )


def _holds(row: ThresholdValues, values: ThresholdValues) -> bool:
    return all(row.get(name) == value for name, value in values.items())
