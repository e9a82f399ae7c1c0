"""Group "load": a worker is busy above a threshold of prompt tokens, and not at it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from msgspec import UNSET

from dynctl.base.errors import DynctlError
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.canary import Reply
from dynctl.experiments.groups.group import (
    REFUSED,
    SHARED,
    Bench,
    changeable_fleet,
    is_shared,
    refusal,
)
from dynctl.experiments.groups.queue_order import pinned_chat, worker_of_prompts
from dynctl.experiments.operator import FleetFacts
from dynctl.findings.runner import Outcome, Passed, Skipped, Wrong, found

_TOKENS: Final = (1000, 4000)
"""Of a prompt that is computed while the worker is read; the longer one for fast workers."""
_WORDS: Final = 100
"""Of other prompts."""
_SIDES: Final = 4
"""Two thresholds, each just below and just above the load."""
PROMPT_LIMIT_REQUESTS: Final = 1 + 2 * (len(_TOKENS) + _SIDES)
"""The most that are sent, of one generated token each."""
_IDLE_S: Final = 10.0
_STEP_S: Final = 0.01
_ABSOLUTE: Final = "active_prefill_tokens_threshold"
_FRACTION: Final = "active_prefill_tokens_threshold_frac"
_TOO_FAST: Final = Skipped(
    f"the worker computed prompts of {_TOKENS[0]:,} or more tokens before it was read", unread=True
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a frontend shows of a worker at one moment: active prompt tokens that the router counts,
    those that the worker reported last, and whether it is busy."""

    counted: int = 0
    reported: int = 0
    busy: bool = False

    @property
    def tokens(self) -> int:
        """The larger number, which a threshold is compared with."""
        return max(self.counted, self.reported)


@dataclass(frozen=True, slots=True)
class Computing:
    """A worker that computes the prompt of ``whole``.

    ``first``: when the router counted its tokens, None if that was not seen. ``reply``: to another
    request, sent then, that this worker alone may answer. ``later``: until the reply had come.
    """

    whole: Reply
    first: Reading | None = None
    reply: Reply | None = None
    later: Sequence[Reading] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """What a worker did with ``value`` of a threshold, which is ``limit`` tokens.

    ``first``, ``reply`` and ``later`` as in `Computing`.
    """

    threshold: str
    value: float
    limit: int
    first: Reading
    reply: Reply
    later: Sequence[Reading]

    @property
    def refused(self) -> bool:
        return self.reply.status in REFUSED

    @property
    def is_proven(self) -> bool:
        """Whether the threshold surely acted, or surely did not and was above the load."""
        if self.first.counted > self.limit:
            return self.first.busy and self.refused
        return not self.first.busy and self.reply.answered

    @property
    def beside(self) -> bool:
        """Whether the other request was surely routed before the prompt was computed: then both
        were counted, or the prompt still is."""
        counts = [reading.counted for reading in self.later]
        return max(counts) > self.first.counted or counts[-1] >= self.first.counted

    def fault(self) -> str:
        """What is wrong; empty if nothing."""
        tokens, over = f"{self.first.tokens:,} active prompt tokens", self.first.tokens > self.limit
        if over != self.first.busy:
            return f"{tokens}, and {'not ' if over else ''}busy"
        if self.first.counted > self.limit and self.beside and self.reply.answered:
            return f"a request was answered at {tokens}"
        never = not over and all(reading.tokens <= self.limit for reading in self.later)
        return f"a request was refused at {tokens}: {self.reply}" if never and self.refused else ""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """``sides``: fewer than were tried, where a prompt was computed too soon."""

    worker: str
    tried: int
    sides: Sequence[Side]


async def try_prompt_limits(bench: Bench) -> PromptLimits | Skipped:
    """Let a worker compute prompts, with each threshold just below and just above them."""
    fleet = await changeable_fleet(bench)
    if isinstance(fleet, Skipped):
        return fleet
    worker = worker_of_prompts(fleet)
    if worker is None:
        return Skipped("no ready worker with one rank computes prompts")
    if await is_shared(bench, 0):
        return SHARED
    try:
        return await _try_sides(bench, worker)
    except DynctlError as error:
        return Skipped(f"the thresholds cannot be tried: {error.message}", unread=True)


async def _try_sides(bench: Bench, worker: WorkerRow) -> PromptLimits | Skipped:
    scout = await bench.client.chat(pinned_chat(bench, worker, bench.prompts.fresh(_WORDS)))
    if (refused := refusal([scout])) is not None:
        return refused
    if worker.worker_id not in scout.place:
        return Skipped("the server does not let a client choose the worker of a prompt")
    # From now on the worker has the beginning of all prompts in its cache.
    await bench.pause(bench.settle_s)
    tokens_of_a_word = max(1.0, (scout.prompt_tokens or 0) / _WORDS)
    for length in _TOKENS:
        first, *texts = bench.prompts.reordered(ceil(length / tokens_of_a_word), 1 + _SIDES)
        seen = await _compute(bench, worker, first)
        if seen.first is not None:
            # A worker may report what the router does not count, as it is cached: at most all.
            at = max(seen.first.counted, seen.whole.prompt_tokens or 0)
            limits = (seen.first.counted - 1, at)
            return await _measure_sides(bench, worker, limits, texts)
    return _TOO_FAST


async def _measure_sides(
    bench: Bench, worker: WorkerRow, limits: Sequence[int], texts: Sequence[str]
) -> PromptLimits:
    """Raises DynctlError."""
    batched = worker.runtime_config.get("max_num_batched_tokens")
    values: list[tuple[str, float, int]] = []
    for limit in limits:
        values.append((_ABSOLUTE, limit, limit))
        if batched:
            values.append((_FRACTION, (limit + 0.5) / batched, limit))
    sides = []
    for text, (name, value, limit) in zip(texts, values, strict=False):
        async with bench.changes.only_threshold(worker.model, name, value):
            seen = await _compute(bench, worker, text)
        if seen.first is not None and seen.reply is not None:
            sides.append(Side(name, value, limit, seen.first, seen.reply, seen.later))
    return PromptLimits(worker.name, len(values), sides)


async def _compute(bench: Bench, worker: WorkerRow, text: str) -> Computing:
    """Send a prompt to a worker, and one more while the worker computes it. Raises DynctlError."""
    await _wait_idle(bench, worker)
    chat = replace(pinned_chat(bench, worker, text), stream=True)
    prompt = asyncio.create_task(bench.client.chat(chat))
    reading = Reading()
    reply: Reply | None = None
    later: Sequence[Reading] = ()
    try:
        while not prompt.done() and not reading.counted:
            await bench.pause(_STEP_S)
            reading = await _read(bench, worker)
        if reading.counted:
            reply, later = await _send_beside(bench, worker)
        whole = await prompt
    finally:
        prompt.cancel()
        await asyncio.gather(prompt, return_exceptions=True)
    if not whole.answered and whole.status not in REFUSED:
        raise DynctlError(f"a prompt of the test failed: {whole}")
    return Computing(whole, reading if reading.counted else None, reply, later)


async def _wait_idle(bench: Bench, worker: WorkerRow) -> None:
    """Wait for the end of what the worker computes. Raises DynctlError after 10 s."""
    for _ in range(round(_IDLE_S / _STEP_S)):
        if not (await _read(bench, worker)).tokens:
            return
        await bench.pause(_STEP_S)
    raise DynctlError(f"worker {worker.name} has active prompt tokens of other requests")


async def _send_beside(bench: Bench, worker: WorkerRow) -> tuple[Reply, list[Reading]]:
    """The reply to another request to the worker, and what the frontend shows until it comes."""
    chat = pinned_chat(bench, worker, bench.prompts.fresh(_WORDS))
    other = asyncio.create_task(bench.client.chat(chat))
    readings = []
    try:
        while not other.done():
            await bench.pause(_STEP_S)
            readings.append(await _read(bench, worker))
        reply = await other
    finally:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
    return reply, [*readings, await _read(bench, worker)]


async def _read(bench: Bench, worker: WorkerRow) -> Reading:
    """What the frontend shows of a worker now. Raises DynctlError."""
    rows = await bench.operator.call(bench.operator.client.workers)
    row = FleetFacts(rows).worker(worker.worker_id)
    if row is None or not row.ranks:
        return Reading()
    rank = row.ranks[0]
    if rank.booked_prefill_tokens is not UNSET:
        raise DynctlError(
            "the router lets its count fall while a prompt is computed: --router-prefill-load-model"
        )
    reported = rank.reported.active_prefill_tokens or 0
    return Reading(rank.active_prefill_tokens, reported, row.busy)


def prompt_limits_act(limits: PromptLimits | Skipped) -> Outcome:
    """The outcome of the check."""
    if isinstance(limits, Skipped):
        return limits
    wrong = [
        found(limits.worker, threshold=side.threshold, value=f"{side.value:.6g}", seen=fault)
        for side in limits.sides
        if (fault := side.fault())
    ]
    if wrong:
        return Wrong(tuple(wrong))
    unproven = [side.reply for side in limits.sides if not side.is_proven]
    if unproven or len(limits.sides) < limits.tried:
        return refusal(unproven) or _TOO_FAST
    return Passed(f"{limits.worker}: {_summary(limits.sides)}")


def _summary(sides: Sequence[Side]) -> str:
    """What proven sides show."""
    names = " and ".join(dict.fromkeys(side.threshold for side in sides))
    below, at = sides[0].limit, sides[-1].limit
    return f"busy above {below:,} active prompt tokens, free at {at:,}, by {names}"
