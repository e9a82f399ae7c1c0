"""Group "load": busy workers are passed over, thresholds act, and the queue keeps its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from dynctl.base.errors import DynctlError
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.canary import Chat, HeldStream, Reply
from dynctl.experiments.groups.group import (
    NO_CHANGES,
    NO_NAMES,
    REFUSED,
    SHARED,
    Bench,
    TrialGroup,
    is_shared,
    refusal,
)
from dynctl.experiments.groups.prompt_limits import (
    PROMPT_LIMIT_REQUESTS,
    PromptLimits,
    prompt_limits_act,
    try_prompt_limits,
)
from dynctl.experiments.groups.queue_order import (
    QUEUE_REQUESTS,
    QueueOrder,
    higher_is_first,
    try_queue_order,
)
from dynctl.experiments.operator import FleetFacts
from dynctl.experiments.shares import at_most_by_chance
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found
from dynctl.planning.domain_capacity import derive_constraints
from router_core import Role

_HELD: Final = 3
"""Streams that run at a time; the fourth request in flight is the one that is judged."""
_HELD_TOKENS: Final = 128
_HELD_WORDS: Final = 200
_ROOMY_TOKENS: Final = 64
"""Of the stream that runs while the threshold is above the load."""
_ROOMY_TRIES: Final = 3
"""How often it is begun, where the last one proved nothing."""
_ROOMY_PROBES: Final = 3
_MOST_PROBE_TOKENS: Final = 256
_SHOWN_S: Final = 0.5
"""Until the frontend shows what a new threshold does."""
_SCOUTS: Final = 8
"""Requests that find workers where the server does not list them."""
_PROBES: Final = 16
_LIMIT_PROBES: Final = 16
_WORDS: Final = 24
_LEAST_EVIDENCE: Final = 0.05
"""A result that chance alone brings about more often shows nothing."""
_BUSY_S: Final = 2.0
_STEP_S: Final = 0.1
_THRESHOLD: Final = "active_decode_blocks_threshold"


Place = tuple[int, int]
"""The id of a worker, and a rank of it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A request that was sent while streams ran at ``busy``, before and after it."""

    reply: Reply
    busy: frozenset[Place]

    @property
    def at_busy(self) -> bool:
        return _place(self.reply) in self.busy


@dataclass(frozen=True, slots=True)
class PassedOver:
    """``ranks``: how many could have answered the probes. ``shared``: other requests ran too."""

    probes: Sequence[Probe]
    ranks: int
    shared: bool = False

    @property
    def chance(self) -> float:
        """The share of probes that a choice without regard to load sends to busy ranks."""
        if not self.probes:
            return 0.0
        return sum(len(probe.busy) for probe in self.probes) / len(self.probes) / self.ranks


@dataclass(frozen=True, slots=True)
class Limited:
    """With the threshold ``below`` what the workers with a stream hold, a share of their KV blocks.

    ``held``: these workers. ``busy``: the frontend showed them as busy. ``probes``: sent meanwhile.
    ``after``: a request with the former value. ``roomy``: with a threshold above what they hold.
    """

    held: frozenset[Place]
    workers: int
    below: float
    busy: bool
    probes: Sequence[Probe] = ()
    after: Reply | None = None
    roomy: Roomy | None = None


@dataclass(frozen=True, slots=True)
class Roomy:
    """With the threshold ``above`` what each worker can hold during the test.

    ``busy``: names of workers that the frontend showed as busy although no number of theirs is over
    it. ``replies``: to requests that were sent meanwhile.
    """

    above: float
    busy: Sequence[str]
    replies: Sequence[Reply]


@dataclass(frozen=True, slots=True)
class LoadFacts:
    model: str
    passed_over: PassedOver | Skipped
    limited: Limited | Skipped
    order: QueueOrder | Skipped
    prompt_limits: PromptLimits | Skipped


async def _gather(bench: Bench) -> LoadFacts:
    passed_over = await _pass_over(bench)
    limited = await _limit(bench)
    order = await try_queue_order(bench)
    prompt_limits = await try_prompt_limits(bench)
    return LoadFacts(bench.subject.model, passed_over, limited, order, prompt_limits)


# -- a busy worker ---------------------------------------------------------------------------------


async def _pass_over(bench: Bench) -> PassedOver | Skipped:
    skipped = _unnamed(bench)
    ranks = 0 if skipped is not None else await _count_ranks(bench)
    if isinstance(ranks, Skipped):
        return ranks
    if skipped is not None or ranks < 2:
        return skipped or Skipped("one worker answers: no other can be chosen")
    shared = False
    async with _held(bench, min(_HELD, ranks - 1), _HELD_TOKENS) as streams:
        probes: list[Probe] = []
        while len(probes) < _PROBES and (sent := await _probe(bench, streams, 1)):
            probes += sent
            if shared := await is_shared(bench, len(streams)):
                break
    return PassedOver(probes, ranks, shared)


def _unnamed(bench: Bench) -> Skipped | None:
    return None if bench.subject.names_workers else NO_NAMES


async def _count_ranks(bench: Bench) -> int | Skipped:
    """The number of ranks between which load decides, or why it is not known."""
    fleet = bench.subject.fleet
    if fleet is not None and _is_bound(fleet):
        return Skipped("hand-offs are bound to domains (DYE0701), which leave load no choice")
    if await is_shared(bench, 0):
        return SHARED
    if fleet is not None:
        return fleet.ranks()
    scouts = [
        await bench.client.chat(bench.chat(bench.prompts.fresh(_WORDS))) for _ in range(_SCOUTS)
    ]
    if any(reply.prefill != reply.decode for reply in scouts if reply.answered):
        return bench.operator.unreadable("the domains of prefill and decode workers are unknown")
    return len(set(filter(None, map(_place, scouts))))


def _place(reply: Reply) -> Place | None:
    """Where a request was answered, as far as the reply names it."""
    return None if reply.decode is None else (reply.decode, reply.decode_rank)


def _is_bound(fleet: FleetFacts) -> bool:
    """Whether a policy restricts the hand-offs of a prefill worker."""
    rows = [row for row in fleet.workers if row.role == Role.PREFILL]
    derived = [derive_constraints(row, fleet.policy) for row in rows]
    return any(isinstance(item, str) or item.constraints for item in derived)


@asynccontextmanager
async def _held(bench: Bench, number: int, tokens: int) -> AsyncIterator[list[HeldStream]]:
    """At most ``number`` streams of ``tokens`` that run; they are ended afterwards."""
    streams: list[HeldStream] = []
    exactly = True
    try:
        while len(streams) < number + (not exactly):
            chat = bench.chat(bench.prompts.fresh(_HELD_WORDS))
            chat = replace(chat, tokens=tokens, stream=True, exactly=exactly)
            streams.append(await bench.client.hold_stream(chat))
            exactly = exactly and not _is_refused(streams[-1])
        yield streams
    finally:
        for stream in streams:
            await stream.close()


def _is_refused(stream: HeldStream) -> bool:
    """Whether the server refuses the fields with which an engine goes on."""
    task = stream.task
    return task.done() and not task.cancelled() and task.result().status in (400, 422)


async def _probe(bench: Bench, streams: Sequence[HeldStream], number: int) -> list[Probe]:
    """Send new prompts one after the other, as long as a stream runs."""
    probes: list[Probe] = []
    while len(probes) < number and (busy := _busy(streams)):
        chat: Chat = bench.chat(bench.prompts.fresh(_WORDS))
        reply = await bench.client.chat(chat)
        busy &= _busy(streams)
        if busy:
            probes.append(Probe(reply, busy))
    return probes


def _busy(streams: Sequence[HeldStream]) -> frozenset[Place]:
    """Where the streams run now."""
    replies = [stream.reply for stream in streams if stream.running and stream.reply is not None]
    return frozenset(filter(None, map(_place, replies)))


def _passes_over(facts: LoadFacts) -> Outcome:
    passed = facts.passed_over
    if isinstance(passed, Skipped):
        return passed
    if passed.shared:
        return SHARED
    if not passed.probes:
        return Skipped(f"streams of {_HELD_TOKENS} tokens end before another request is answered")
    if refused := refusal([probe.reply for probe in passed.probes]):
        return refused
    number, chance = len(passed.probes), passed.chance
    hits = sum(probe.at_busy for probe in passed.probes)
    if hits >= max(2.0, number * chance / 2):
        return Wrong(
            (found(facts.model, hits=str(hits), probes=str(number), workers=str(passed.ranks)),)
        )
    if at_most_by_chance(hits, number, chance) > _LEAST_EVIDENCE:
        return Skipped(f"{hits} of {number} requests went to busy workers: chance explains it")
    return Passed(f"{hits} of {number} requests went to a busy one of {passed.ranks} workers")


# -- a threshold -----------------------------------------------------------------------------------


async def _limit(bench: Bench) -> Limited | Skipped:
    changes = bench.changes
    if not changes.allowed:
        return NO_CHANGES
    fleet = await bench.operator.fleet(bench.subject.model)
    if _unnamed(bench) is not None or fleet is None:
        return bench.operator.unreadable("the workers are unknown")
    answering = fleet.answering()
    if any("total_kv_blocks" not in row.runtime_config for row in answering) or not answering:
        return Skipped(
            "a worker does not publish total_kv_blocks, of which the threshold is a share"
        )
    if fleet.ranks() > len(answering):
        return Skipped("a worker with several data-parallel ranks is busy when all of them are")
    if await is_shared(bench, 0):
        return Skipped("other requests run in this fleet, which a low threshold would refuse")
    try:
        limited = await _limit_below(bench, answering)
        if not limited.held or not limited.busy:
            return limited
        for _ in range(_ROOMY_TRIES):
            if (roomy := await _limit_above(bench, limited)) is not None:
                return replace(limited, roomy=roomy)
        return limited
    except DynctlError as error:
        return Skipped(f"the threshold cannot be changed: {error.message}", unread=True)


async def _limit_below(bench: Bench, answering: Sequence[WorkerRow]) -> Limited:
    """Streams run, and the threshold is just below what they hold. Raises DynctlError."""
    model, number = answering[0].model, min(_HELD, len(answering))
    async with _held(bench, number, _HELD_TOKENS) as streams:
        below = await _share_below(bench, streams)
        async with bench.changes.only_threshold(model, _THRESHOLD, below):
            held = _busy(streams)
            busy = await _shown_busy(bench, held)
            probes = await _probe(bench, streams, _LIMIT_PROBES) if busy else []
    after = await bench.client.chat(bench.chat(bench.prompts.fresh(_WORDS)))
    return Limited(held, len(answering), below, busy, probes, after)


async def _share_below(bench: Bench, streams: Sequence[HeldStream]) -> float:
    """Half a block less than the router counts on each worker with a stream, as a share of its
    blocks. 0 where that is unknown, or would not hold until the streams end."""
    counts = Counter(place for stream in streams for place in _busy([stream]))
    rows = {row.worker_id: row for row in await _answering(bench)}
    if not counts or max(counts.values()) > 1 or any(worker not in rows for worker, _ in counts):
        return 0.0
    return max(0.0, min(_share(rows[worker], _booked(rows[worker]) - 0.5) for worker, _ in counts))


async def _limit_above(bench: Bench, limited: Limited) -> Roomy | None:
    """A stream runs, and the threshold is just above what each worker can hold until it ends; None
    where none can be, a worker was over it, or the stream ended too soon. Raises DynctlError."""
    more = _ROOMY_TOKENS + ((limited.after and limited.after.prompt_tokens) or _MOST_PROBE_TOKENS)
    async with _held(bench, 1, _ROOMY_TOKENS) as streams:
        rows = await _answering(bench)
        above = max(
            (_share(row, _high(row) + more / row.block_size + 2) for row in rows), default=2
        )
        if above > 1.0:
            return None
        async with bench.changes.only_threshold(rows[0].model, _THRESHOLD, above):
            await bench.pause(_SHOWN_S)
            busy = [row for row in await _answering(bench) if row.busy]
            if any(_share(row, _high(row)) > above for row in busy) or not _busy(streams):
                return None
            text = bench.prompts.fresh(_WORDS)
            replies = [await bench.client.chat(bench.chat(text)) for _ in range(_ROOMY_PROBES)]
    return Roomy(above, [row.name for row in busy], replies)


async def _answering(bench: Bench) -> list[WorkerRow]:
    """The workers that may generate answers; none where they are unknown."""
    fleet = await bench.operator.fleet(bench.subject.model)
    return [] if fleet is None else fleet.answering()


def _share(row: WorkerRow, blocks: float) -> float:
    """``blocks`` as a share of a worker's KV blocks."""
    return blocks / max(1, int(row.runtime_config["total_kv_blocks"]))


def _booked(row: WorkerRow) -> float:
    """The blocks that the router counts on a worker with one rank."""
    return max((rank.active_decode_blocks for rank in row.ranks), default=0.0)


def _high(row: WorkerRow) -> float:
    """The most blocks that the router counts or the worker reports."""
    reports = [rank.reported for rank in row.ranks]
    used = [max(load.active_decode_blocks or 0, load.kv_used_blocks or 0) for load in reports]
    return max([_booked(row), *used])


async def _shown_busy(bench: Bench, held: frozenset[Place]) -> bool:
    """Whether the frontend shows these workers as busy within 2 s."""
    workers = {worker for worker, _ in held}
    for _ in range(round(_BUSY_S / _STEP_S)):
        fleet = await bench.operator.fleet(bench.subject.model)
        rows: Sequence[WorkerRow] = () if fleet is None else fleet.workers
        if held and all(row.busy for row in rows if row.worker_id in workers):
            return True
        await bench.pause(_STEP_S)
    return False


def _acts(facts: LoadFacts) -> Outcome:
    limited = facts.limited
    if isinstance(limited, Skipped):
        return limited
    if not limited.held:
        return Skipped(f"streams of {_HELD_TOKENS} tokens end before the threshold is set")
    if seen := _acts_wrongly_below(limited):
        return Wrong((found(facts.model, value=f"{limited.below:.4g}", seen=seen),))
    roomy = limited.roomy
    if roomy is not None and (seen := _acts_wrongly_above(roomy)):
        return Wrong((found(facts.model, value=f"{roomy.above:.4g}", seen=seen),))
    above = "" if roomy is None else f"; free at {roomy.above:.4g}"
    return _keeps_away(limited, f"at {limited.below:.4g}: ", above)


def _acts_wrongly_below(limited: Limited) -> str:
    """What is wrong while the threshold is below the load; empty if nothing."""
    if not limited.busy:
        return f"{len(limited.held)} workers with a running request are not busy after 2 s"
    let = [probe for probe in limited.probes if probe.at_busy and probe.reply.answered]
    if let:
        return f"{len(let)} of {len(limited.probes)} requests went to a busy worker"
    if limited.after is None or not limited.after.answered:
        return f"with the former value again: {limited.after}"
    return ""


def _acts_wrongly_above(roomy: Roomy) -> str:
    """What is wrong while the threshold is above the load; empty if nothing."""
    if roomy.busy:
        return f"{', '.join(roomy.busy[:4])} hold fewer blocks and are busy"
    refused = [reply for reply in roomy.replies if reply.status in REFUSED]
    return f"{len(refused)} of {len(roomy.replies)} requests: {refused[0]}" if refused else ""


def _keeps_away(limited: Limited, below: str, above: str) -> Outcome:
    """Whether the requests below the load show that the threshold keeps them away."""
    number = len(limited.probes)
    refused = [probe for probe in limited.probes if probe.reply.status in REFUSED]
    if refused:
        return Passed(
            f"{below}{len(refused)} of {number} requests refused: {refused[0].reply}{above}"
        )
    if at_most_by_chance(0, number, len(limited.held) / limited.workers) > _LEAST_EVIDENCE:
        return Skipped(f"no request of {number} went to a busy worker: chance explains it")
    text = f"no request of {number} went to a busy one of {limited.workers} workers"
    return Passed(f"{below}{text}{above}")


_SINGLES: Final = (
    _SCOUTS + _PROBES + _LIMIT_PROBES + 1 + _ROOMY_PROBES + QUEUE_REQUESTS + PROMPT_LIMIT_REQUESTS
)
"""Requests of one generated token, at most."""

LOAD: Final = TrialGroup(
    "load",
    "load",
    requests=_SINGLES + 2 * (_HELD + 1) + 2 * _ROOMY_TRIES,
    generated=_SINGLES + 2 * (_HELD + 1) * _HELD_TOKENS + 2 * _ROOMY_TRIES * _ROOMY_TOKENS,
    gather=_gather,
    checks=(
        Check("DYE0801", _passes_over),
        Check("DYE0802", _acts),
        Check("DYE0803", lambda facts: higher_is_first(facts.order)),
        Check("DYE0804", lambda facts: prompt_limits_act(facts.prompt_limits)),
    ),
)
