"""Group "change": a cordoned worker drains, nothing is lost, and it returns with its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynctl.base.errors import DynctlError
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.canary import Reply
from dynctl.experiments.groups.group import Bench, TrialGroup, changeable_fleet
from dynctl.experiments.groups.reuse import reused
from dynctl.experiments.journal import FleetChange
from dynctl.experiments.operator import FleetFacts
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found
from dynctl.sources.frontend.source import substitutes
from router_core import Role

_PRIMES: Final = 3
_OTHERS: Final = 8
_RETURNS: Final = 12
_WORDS: Final = 200
_SHORT: Final = 24
_STREAM_TOKENS: Final = 64
_DRAINED_S: Final = 10.0
_RETURNED_S: Final = 5.0
_STEP_S: Final = 0.25
NO_SPARE: Final = Skipped(
    "no worker has another ready one of its role and domain: the fleet would be left without a "
    "worker"
)


@dataclass(frozen=True, slots=True)
class ChangedWorker:
    """What happened while ``worker`` was cordoned, and afterwards.

    ``replies``: sent while it was cordoned. ``stream``: one that ran there when it was cordoned,
    None where none did. ``drained_s``: until it had no request, None: not within 10 s.
    ``returned_s``: from the end of the cordon until a prompt that it has was reused there, None:
    not within 5 s. ``primed``: it has prompts of the test.
    """

    worker: WorkerRow
    replies: Sequence[Reply]
    stream: Reply | None
    drained_s: float | None
    running: int
    returned_s: float | None
    primed: bool


@dataclass(frozen=True, slots=True)
class ChangeFacts:
    """``mended``, ``left``: of an earlier test."""

    changed: ChangedWorker | Skipped
    mended: Sequence[FleetChange]
    left: Sequence[tuple[FleetChange, str]]


async def _gather(bench: Bench) -> ChangeFacts:
    changes = bench.changes
    return ChangeFacts(await _change(bench), changes.mended, changes.left)


async def _change(bench: Bench) -> ChangedWorker | Skipped:
    fleet = await changeable_fleet(bench)
    if isinstance(fleet, Skipped):
        return fleet
    worker = spare_worker(fleet)
    if worker is None:
        return NO_SPARE
    try:
        return await _cordon(bench, worker)
    except DynctlError as error:
        return Skipped(f"worker {worker.name} cannot be cordoned: {error.message}", unread=True)


def spare_worker(fleet: FleetFacts) -> WorkerRow | None:
    """The least used of the workers that another one can replace."""
    spare = [
        row
        for row in fleet.answering()
        if row.status == "ready" and substitutes(row, fleet.workers)
    ]
    return min(spare, key=lambda row: (_running(row), row.name), default=None)


def _running(row: WorkerRow) -> int:
    return sum(rank.active_requests for rank in row.ranks)


async def _cordon(bench: Bench, worker: WorkerRow) -> ChangedWorker:
    texts = [bench.prompts.fresh(_WORDS) for _ in range(_PRIMES)]
    primes = await bench.client.chats(*(bench.chat_at(worker.worker_id, text) for text in texts))
    primed = [
        text
        for text, reply in zip(texts, primes, strict=True)
        if reply.answered and reply.decode == worker.worker_id
    ]
    chat = bench.chat_at(worker.worker_id, bench.prompts.fresh(_SHORT))
    chat = replace(chat, tokens=_STREAM_TOKENS, stream=True)
    stream = await bench.client.hold_stream(chat)
    try:
        async with bench.changes.cordoned(worker):
            ran = stream.running
            others = [bench.prompts.fresh(_SHORT) for _ in range(_OTHERS)]
            replies = [await bench.client.chat(bench.chat(text)) for text in (*primed, *others)]
            await stream.task
            drained_s, running = await drain(bench, worker)
    finally:
        await stream.close()
    returned_s = await _return(bench, worker, primed) if primed else None
    whole = stream.task.result() if ran else None
    return ChangedWorker(worker, replies, whole, drained_s, running, returned_s, bool(primed))


async def drain(bench: Bench, worker: WorkerRow) -> tuple[float | None, int]:
    """Seconds until the worker has no request, at most 10; and the requests that it has then."""
    started, running = time.monotonic(), 0
    while time.monotonic() - started < _DRAINED_S:
        fleet = await bench.operator.fleet(bench.subject.model)
        row = None if fleet is None else fleet.worker(worker.worker_id)
        running = 0 if row is None else _running(row)
        if row is not None and not running:
            return time.monotonic() - started, 0
        await bench.pause(_STEP_S)
    return None, running


async def _return(bench: Bench, worker: WorkerRow, texts: Sequence[str]) -> float | None:
    """Seconds until one of the prompts is reused at the worker again, at most 5."""
    started = time.monotonic()
    for number in range(_RETURNS):
        reply = await bench.client.chat(bench.chat(texts[number % len(texts)]))
        if reply.decode == worker.worker_id and reused(reply):
            return time.monotonic() - started
        if time.monotonic() - started > _RETURNED_S:
            break
        await bench.pause(_RETURNED_S / _RETURNS)
    return None


def _gets_none(facts: ChangeFacts) -> Outcome:
    changed = facts.changed
    if isinstance(changed, Skipped):
        return changed
    worker = changed.worker
    count = sum(worker.worker_id in reply.place for reply in changed.replies)
    if count:
        return Wrong((found(worker.name, count=str(count), requests=str(len(changed.replies))),))
    if not any(reply.answered for reply in changed.replies):
        return Skipped(f"no request was answered: {changed.replies[0]}", unread=True)
    return Passed(f"{worker.name}: none of {len(changed.replies)} requests")


def _loses_none(facts: ChangeFacts) -> Outcome:
    changed = facts.changed
    if isinstance(changed, Skipped):
        return changed
    name = changed.worker.name
    failed = [reply for reply in changed.replies if not reply.answered]
    if failed:
        seen = f"{len(failed)} of {len(changed.replies)} requests failed: {failed[0]}"
        return Wrong((found(name, seen=seen),))
    if changed.stream is None:
        return Passed(f"{len(changed.replies)} requests; no stream ran on it when it was cordoned")
    if not changed.stream.answered or not changed.stream.done:
        return Wrong((found(name, seen=f"a stream that ran on it did not end: {changed.stream}"),))
    return Passed(f"{len(changed.replies)} requests, and a stream that ran on it")


def _drains(facts: ChangeFacts) -> Outcome:
    changed = facts.changed
    if isinstance(changed, Skipped):
        return changed
    if changed.drained_s is None:
        return Wrong((found(changed.worker.name, running=str(changed.running)),))
    return Passed(f"{changed.worker.name}: after {changed.drained_s:.1f} s")


def _returns(facts: ChangeFacts) -> Outcome:
    changed = facts.changed
    if isinstance(changed, Skipped):
        return changed
    if not changed.primed:
        return Skipped("the server does not let a client choose the worker of a prompt")
    if changed.worker.role != Role.AGGREGATED:
        return Skipped("a decode worker is not chosen by its cache")
    if changed.returned_s is None:
        return Wrong((found(changed.worker.name),))
    return Passed(f"{changed.worker.name}: after {changed.returned_s:.1f} s")


def _left_nothing(facts: ChangeFacts) -> Outcome:
    if facts.left:
        return Wrong(
            tuple(found(change.name, change=str(change), reason=why) for change, why in facts.left)
        )
    if facts.mended:
        return Passed(f"put back: {', '.join(map(str, facts.mended))}")
    return Passed("none is written down on this machine")


CHANGE: Final = TrialGroup(
    "change",
    "change",
    requests=2 * _PRIMES + 1 + _OTHERS + _RETURNS,
    generated=2 * _PRIMES + _STREAM_TOKENS + _OTHERS + _RETURNS,
    gather=_gather,
    checks=(
        Check("DYE1001", _gets_none),
        Check("DYE1002", _loses_none),
        Check("DYE1003", _drains),
        Check("DYE1004", _returns),
        Check("DYE1005", _left_nothing),
    ),
)
