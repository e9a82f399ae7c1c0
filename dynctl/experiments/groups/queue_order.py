"""Group "load": of two requests that wait in the router queue, the higher priority is first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Final

from msgspec import UNSET

from dynctl.base.errors import DynctlError
from dynctl.documents.decisions import PastDecision
from dynctl.documents.route_result import QueueRow
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.canary import Chat, Reply
from dynctl.experiments.groups.group import NO_NAMES, Bench, refusal
from dynctl.experiments.operator import FleetFacts
from dynctl.findings.runner import Outcome, Passed, Skipped, Wrong, found
from router_core import Role

QUEUE_REQUESTS: Final = 7
"""The most that are sent, of one generated token each."""
_SCOUT_WORDS: Final = 100
_MOST_TOKENS: Final = 4000
"""Of a prompt that fills a worker until others wait."""
_SPARE: Final = 1.25
"""Length of a prompt over that which makes others wait."""
_MOST_LIMIT: Final = _MOST_TOKENS / _SPARE
_FIRST: Final = 4
"""Length of the first prompt over that of those that wait for it."""
_PRIORITY: Final = 100
_WAIT_S: Final = 2.0
_STEP_S: Final = 0.02
_SURELY_S: Final = 0.05
"""A request enters the queue a moment after its first decision."""
_TOO_FAST: Final = Skipped("the worker computed a prompt before two others waited", unread=True)


@dataclass(frozen=True, slots=True)
class Waited:
    """A request and what the router did with it, at first when it came (``decision.at``)."""

    reply: Reply
    decision: PastDecision
    queue: QueueRow

    @property
    def left_at(self) -> float:
        return self.decision.at + (self.queue.waited_s or 0.0)


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """Two requests that waited for ``worker``: ``low`` came first, ``high`` has the priority."""

    worker: str
    low: Waited
    high: Waited

    @property
    def together(self) -> bool:
        """Whether both surely waited at one time."""
        low, high = self.low.queue, self.high.queue
        waited = low.waited_s is not None and high.waited_s is not None
        return waited and self.low.left_at - self.high.decision.at > _SURELY_S


async def try_queue_order(bench: Bench) -> QueueOrder | Skipped:
    """Fill a worker with one prompt, so that two others wait for it. All need this worker, so that
    requests of other clients do not wait for them."""
    if not bench.subject.names_workers:
        return NO_NAMES
    fleet = await bench.operator.fleet(bench.subject.model)
    if fleet is None or not bench.subject.shows_decisions:
        return bench.operator.unreadable("the workers and decisions are unknown")
    worker = worker_of_prompts(fleet)
    if worker is None:
        return Skipped("no ready worker with one rank computes prompts")
    scout = await _settled(
        bench,
        await bench.client.chat(pinned_chat(bench, worker, bench.prompts.fresh(_SCOUT_WORDS))),
    )
    if isinstance(scout, Skipped):
        return scout
    limit = _limit(scout.queue, worker)
    if limit is None or limit > _MOST_LIMIT:
        return _out_of_reach(limit, worker)
    tokens_of_a_word = max(1.0, (scout.reply.prompt_tokens or 0) / _SCOUT_WORDS)
    tokens = limit * _SPARE + _SCOUT_WORDS
    words = ceil(tokens / tokens_of_a_word)
    order: QueueOrder | Skipped = _TOO_FAST
    # A short prompt may be computed before two others wait.
    for length in (min(_FIRST * tokens, _MOST_TOKENS), _MOST_TOKENS):
        order = await _send_three(bench, worker, ceil(length / tokens_of_a_word), words, limit)
        if isinstance(order, Skipped) or order.together:
            return order
    return order


def worker_of_prompts(fleet: FleetFacts) -> WorkerRow | None:
    """A worker for whose prompts requests wait, the one with least load."""
    prefill = [row for row in fleet.workers if row.role == Role.PREFILL and row.gets_requests]
    rows = [row for row in prefill or fleet.answering() if len(row.ranks) == 1]
    return min(rows, key=lambda row: (row.ranks[0].active_prefill_tokens, row.name), default=None)


def pinned_chat(bench: Bench, worker: WorkerRow, text: str, **hints: Any) -> Chat:
    """A canary whose prompt this worker computes."""
    pin = "prefill_worker_id" if worker.role == Role.PREFILL else "decode_worker_id"
    nvext = {"extra_fields": ["worker_id"], pin: worker.worker_id}
    if hints:
        nvext["agent_hints"] = hints
    return bench.chat(text, nvext=nvext)


def _limit(queue: QueueRow, worker: WorkerRow) -> float | None:
    """Active prompt tokens of a worker above which requests wait; None where that is unknown."""
    limits: list[float] = []
    if queue.prefill_busy_threshold is not None:
        limits.append(queue.prefill_busy_threshold)
    batched = worker.runtime_config.get("max_num_batched_tokens")
    if queue.prefill_busy_threshold_frac is not None and batched:
        limits.append(queue.prefill_busy_threshold_frac * batched)
    return min(limits, default=None)


def _out_of_reach(limit: float | None, worker: WorkerRow) -> Skipped:
    """Why the prompts of a test do not fill the worker, and the setting with which they do."""
    shown = "10,000,000" if limit is None else f"{limit:,.0f}"
    mend = "the worker does not publish max_num_batched_tokens"
    if batched := worker.runtime_config.get("max_num_batched_tokens"):
        mend = f"at --router-queue-threshold {floor(100 * _MOST_LIMIT / batched) / 100:g} they do"
    return Skipped(
        f"requests wait above {shown} active prompt tokens of a worker, which the test's prompts "
        f"do not reach; {mend}"
    )


async def _send_three(
    bench: Bench, worker: WorkerRow, first_words: int, words: int, limit: float
) -> QueueOrder | Skipped:
    """A prompt of ``first_words``, then two of ``words``, above the ``limit`` of active tokens."""
    chats = (
        pinned_chat(bench, worker, bench.prompts.fresh(first_words)),
        pinned_chat(bench, worker, bench.prompts.fresh(words)),
        pinned_chat(bench, worker, bench.prompts.fresh(words), priority=_PRIORITY),
    )
    tasks: list[asyncio.Task[Reply]] = []

    async def is_full() -> bool:
        fleet = await bench.operator.fleet(bench.subject.model)
        row = None if fleet is None else fleet.worker(worker.worker_id)
        return row is not None and row.ranks[0].active_prefill_tokens > limit

    async def is_waiting() -> bool:
        return bool((await bench.operator.call(bench.operator.client.fleet)).queue)

    try:
        tasks.append(asyncio.create_task(bench.client.chat(chats[0])))
        await _until(bench, is_full, tasks[0])
        tasks.append(asyncio.create_task(bench.client.chat(chats[1])))
        await _until(bench, is_waiting, tasks[1])
        tasks.append(asyncio.create_task(bench.client.chat(chats[2])))
        replies = await asyncio.gather(*tasks)
    except DynctlError as error:
        return Skipped(f"the router queue cannot be read: {error.message}", unread=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    low, high = await _settled(bench, replies[1]), await _settled(bench, replies[2])
    if isinstance(low, Skipped):
        return low
    return high if isinstance(high, Skipped) else QueueOrder(worker.name, low, high)


async def _until(
    bench: Bench, condition: Callable[[], Awaitable[bool]], task: asyncio.Task[Reply]
) -> None:
    """Wait until ``condition`` holds or ``task`` has ended, at most 2 s."""
    for _ in range(round(_WAIT_S / _STEP_S)):
        if task.done() or await condition():
            return
        await bench.pause(_STEP_S)


async def _settled(bench: Bench, reply: Reply) -> Waited | Skipped:
    """What the router did with an answered request, or why that is not known."""
    if (refused := refusal([reply])) is not None:
        return refused
    decision = await bench.client.decision(reply)
    hop = None if decision is None else decision.prefill or decision.decode
    if decision is None or hop is None:
        return bench.operator.unreadable("past decisions cannot be read", unread=True)
    if hop.queue is UNSET:
        return Skipped(
            "the router queue is off, or the class of the request has no threshold: set "
            "--router-queue-threshold"
        )
    return Waited(reply, decision, hop.queue)


def higher_is_first(order: QueueOrder | Skipped) -> Outcome:
    """The outcome of the check."""
    if isinstance(order, Skipped):
        return order
    low, high = order.low, order.high
    if high.queue.priority != _PRIORITY:
        seen = f"the router got priority {high.queue.priority}, of a request with {_PRIORITY}"
        return Wrong((found(order.worker, seen=seen),))
    if not order.together:
        return _TOO_FAST
    if low.queue.policy_class != high.queue.policy_class:
        return Skipped("the two requests waited in two classes", unread=True)
    times = f"priority {_PRIORITY} waited {high.queue.waited_s or 0.0:.3f} s"
    other = f"{low.queue.waited_s or 0.0:.3f} s"
    if high.left_at > low.left_at:
        seen = f"{times} and left after a request without one, which waited {other}"
        return Wrong((found(order.worker, seen=seen),))
    return Passed(f"{order.worker}: {times}, a request before it {other}")
