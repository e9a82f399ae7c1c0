"""Frontends that each hold busy thresholds of their own: read them all, set them all or none.

A threshold lives in one frontend's process. Replicas that were set one by one drift apart, and a
request's fate depends on which of them it meets; so they are compared, and written together: a
replica that fails has the others set back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeVar

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.documents.workers import WorkerRow
from router_core import THRESHOLD_SETTINGS

Values = Mapping[str, float | int | None]
"""Threshold -> value; None is off."""
State = Literal["set", "failed", "set back", "left over"]

_AT_ONCE: Final = 8
_T = TypeVar("_T")
_R = TypeVar("_R")


class HoldsThresholds(Protocol):
    """A process that holds busy thresholds: our frontend, Dynamo's, or a saved view of one.

    Methods raise DynctlError.
    """

    def thresholds(self) -> dict[str, dict[str, float | int | None]]:
        """Model -> all its thresholds."""
        ...

    def refuse(self, model: str, present: Values, values: Values) -> None:
        """Raises UsageProblem where ``values`` cannot be set over ``present`` there."""
        ...

    def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]:
        """Set some thresholds; returns all that are in force then."""
        ...

    def nearest(self, values: Values) -> dict[str, float | int | None]:
        """What to set where ``values`` cannot be had back: None where off cannot be set again."""
        ...


class OfDynamo(Protocol):
    """What a Dynamo frontend's replica is asked besides, since nothing that it tells says who is
    busy. Raises nothing."""

    def refuses_worker(self, model: str, worker_id: int, dp_rank: int | None) -> bool | None:
        """True: busy, False: it would use the worker; None: it does not say."""
        ...

    def unheard(self) -> str:
        """Why the report of a worker may not be known."""
        ...


@dataclass(frozen=True, slots=True)
class Replica:
    """One holder. ``name`` is what people see; ``workers`` gives the workers with the load that
    this replica counts (raises DynctlError). ``dynamo`` None: the rows say who is busy. ``group``:
    what it is a replica of, where several deployments are looked at at once."""

    name: str
    holder: HoldsThresholds
    workers: Callable[[], list[WorkerRow]] = list
    dynamo: OfDynamo | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one replica holds: model -> thresholds. ``error``: why that is not known."""

    replica: Replica
    thresholds: Mapping[str, Values] = field(default_factory=dict)
    error: DynctlError | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What setting did on one replica. ``after``: what it holds now, None where not known.

    ``failed``: it was not set, or nobody knows; ``set back``: as before, because another failed;
    ``left over``: it could not be set back.
    """

    replica: Replica
    state: State
    before: Values | None = None
    after: Values | None = None
    error: DynctlError | None = None


@dataclass(frozen=True, slots=True)
class SetResult:
    """All replicas in their order."""

    outcomes: tuple[Outcome, ...]
    values: Values

    @property
    def ok(self) -> bool:
        return all(one.state == "set" for one in self.outcomes)

    @property
    def agree(self) -> bool:
        """Whether no replica was left with what another lacks."""
        return self.ok or all(one.state in ("failed", "set back") for one in self.outcomes)

    @property
    def error(self) -> DynctlError | None:
        return next((one.error for one in self.outcomes if one.error is not None), None)


def read_all(replicas: Sequence[Replica]) -> list[Reading]:
    """What each replica holds now, asked at the same time; never raises DynctlError."""

    def read(replica: Replica) -> Reading:
        try:
            return Reading(replica, replica.holder.thresholds())
        except DynctlError as error:
            return Reading(replica, error=error)

    return at_once(read, replicas)


def serving(readings: Sequence[Reading], model: str) -> dict[str, list[Reading]]:
    """Group -> its readings, of the groups of which one replica at least serves the model."""
    groups = {one.replica.group for one in readings if model in one.thresholds}
    return {
        group: [one for one in readings if one.replica.group == group] for group in sorted(groups)
    }


def differing(readings: Sequence[Reading], model: str) -> dict[str, list[str]]:
    """Replica -> the thresholds that it holds otherwise than most of its group do; empty where all
    agree.

    A replica that does not serve the model differs in all of them. One that told nothing is not
    counted. Where no value is that of most, the first replica's counts.
    """
    found: dict[str, list[str]] = {}
    for group in serving(readings, model).values():
        found |= _apart(group, model)
    return found


def _apart(readings: Sequence[Reading], model: str) -> dict[str, list[str]]:
    rows = {one.replica.name: one.thresholds.get(model) for one in readings if one.error is None}
    found: dict[str, list[str]] = {}
    for name in THRESHOLD_SETTINGS:
        held = {who: "absent" if row is None else row.get(name) for who, row in rows.items()}
        if len(set(held.values())) > 1:
            usual = Counter(held.values()).most_common(1)[0][0]
            for who, value in held.items():
                if value != usual:
                    found.setdefault(who, []).append(name)
    return found


def set_everywhere(
    replicas: Sequence[Replica], model: str, values: Values, *, partial: bool = False
) -> SetResult:
    """Set on every replica, read it back from each; set all back where one fails.

    ``partial``: what could be set stays. Nothing is written, and DynctlError raised, where it can
    be seen before that one will fail (with ``partial``: that all will). So is the error of the only
    replica that there is, where that is as it was before.
    """
    outcomes = _looked_at(replicas, model, values, partial=partial)
    stopped = False
    for at, outcome in enumerate(outcomes):
        if outcome.state != "failed" and not stopped:
            outcomes[at] = _written(outcome, model, values)
            stopped = outcomes[at].state == "failed" and not partial
    outcomes = [_verified(one, model, values) for one in outcomes]
    only = outcomes[0]
    if len(outcomes) == 1 and only.error is not None and only.after == only.before:
        raise only.error
    if not partial and any(one.state == "failed" for one in outcomes):
        outcomes = [_set_back(one, model, values) for one in outcomes]
    return SetResult(tuple(outcomes), dict(values))


def failure(result: SetResult, *, partial: bool) -> DynctlError:
    """The error that says what became of a setting that did not succeed everywhere."""
    done = sum(one.state == "set" for one in result.outcomes)
    stuck = [one.replica.name for one in result.outcomes if one.state == "left over"]
    told = _told(result.outcomes)
    message = f"thresholds were set on {done} of {len(result.outcomes)} frontends: {told}"
    if stuck:
        message += f"; could not be set back: {', '.join(stuck)}"
    elif not partial:
        message += "; what was set before that is set back"
    first = result.error
    kind = type(first) if first is not None else Unreachable
    hint = "run the same command again once all of them answer"
    return kind(message, hint if partial else f"{hint}, or keep what can be set: --partial")


def at_once(ask: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """``ask`` of each, in their order, several at the same time."""
    if len(items) == 1:
        return [ask(items[0])]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(ask, items))


def _told(outcomes: Sequence[Outcome]) -> str:
    """Who failed and why; most errors name the address already."""
    told = []
    for one in outcomes:
        if one.error is not None:
            text = one.error.message
            named = one.replica.name in text
            told.append(text if named else f"{one.replica.name}: {text}")
    return "; ".join(told)


# -- one replica -----------------------------------------------------------------------------------


def _looked_at(
    replicas: Sequence[Replica], model: str, values: Values, *, partial: bool
) -> list[Outcome]:
    """Each replica as it is before anything is written; those that will fail are ``failed``."""
    found = []
    for reading in read_all(replicas):
        present = reading.thresholds.get(model)
        error = reading.error
        if error is None and present is None:
            served = ", ".join(sorted(reading.thresholds)) or "none"
            error = UsageProblem(f"it serves no model {model}; it serves {served}")
        elif error is None and present is not None:
            try:
                reading.replica.holder.refuse(model, present, values)
            except UsageProblem as refused:
                error = refused
        state: State = "set" if error is None else "failed"
        found.append(Outcome(reading.replica, state, present, present, error))
    failed = [one for one in found if one.error is not None]
    if failed and (not partial or len(failed) == len(found)):
        first = failed[0].error
        assert first is not None
        if len(found) == 1:
            raise first
        raise type(first)(
            f"thresholds were set on 0 of {len(found)} frontends, nothing is changed: "
            + _told(failed),
            first.hint if partial else "set what can be set, and keep it: --partial",
        )
    return found


def _written(outcome: Outcome, model: str, values: Values) -> Outcome:
    holder = outcome.replica.holder
    try:
        after = holder.set_thresholds(model, values)
    except DynctlError as error:
        return Outcome(outcome.replica, "failed", outcome.before, None, error)
    return Outcome(outcome.replica, "set", outcome.before, after)


def _verified(outcome: Outcome, model: str, values: Values) -> Outcome:
    """With what the replica holds now, as it tells it when asked again."""
    before, error = outcome.before, outcome.error
    try:
        after = outcome.replica.holder.thresholds().get(model)
    except DynctlError as lost:
        return Outcome(outcome.replica, "failed", before, None, error or lost)
    if error is None and (after is None or not _holds(after, values)):
        name = next((one for one in values if after and after.get(one) != values[one]), "")
        told = "it serves the model no more" if after is None else f"{name} is {after.get(name)}"
        error = Unreachable(f"{told} after {name} was set to {values.get(name)}" if name else told)
    return Outcome(outcome.replica, "set" if error is None else "failed", before, after, error)


def _set_back(outcome: Outcome, model: str, values: Values) -> Outcome:
    """As it was before, where this replica holds anything else now."""
    before, after = outcome.before, outcome.after
    if before is None or (after is not None and dict(after) == dict(before)):
        return (
            outcome
            if outcome.state == "failed"
            else Outcome(outcome.replica, "set back", before, before)
        )
    holder = outcome.replica.holder
    wanted = {name: before.get(name) for name in values}
    state: State = "failed" if outcome.state == "failed" else "set back"
    try:
        now = holder.set_thresholds(model, holder.nearest(wanted))
    except DynctlError as error:
        return Outcome(outcome.replica, "left over", before, after, outcome.error or error)
    if not _holds(now, wanted):
        return Outcome(outcome.replica, "left over", before, now, outcome.error)
    return Outcome(outcome.replica, state, before, now, outcome.error)


def _holds(row: Values, values: Values) -> bool:
    return all(row.get(name) == value for name, value in values.items())
