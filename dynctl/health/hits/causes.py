"""Why a request reused less than it could have: the loss of each step, block by block."""

from __future__ import annotations

import math
from typing import Final

from dynctl.documents.hits import UNEXPLAINED
from dynctl.documents.recording import Decided, Finished
from dynctl.health.hits.caches import Caches
from dynctl.health.hits.choice import beaten
from dynctl.health.hits.past import (
    OTHER_BLOCK_SIZE,
    Fate,
    Gap,
    RankHistory,
    RecordedRouter,
    Request,
)
from dynctl.health.hits.prompts import PromptCauses
from router_core import Router

#: Seconds after the end of a request until its losses are judged.
GRACE_S: Final = 30.0
#: The router mode that reads what is cached.
READS_CACHES: Final = "kv"
#: Causes of a choice of a worker with fewer blocks than another candidate.
OF_CHOICE: Final = ("spread", "load", "no_credit", "tier_weight", "session", "temperature")
#: Parts whose gain can be computed.
COMPUTABLE: Final = frozenset(
    {
        ("capacity", "capacity"),
        ("reused", "alignment"),
        *(("expected", cause) for cause in OF_CHOICE),
    }
)
#: Reports from which the block size of an engine is derived.
_ENOUGH_REPORTS: Final = 8


class Causes:
    """Gives the losses of requests to causes, in ``Request.parts``.

    ``missing``, ``choice`` and ``remember_senders`` judge at the decision; ``gaps``,
    ``prompt`` and ``reuse`` judge when the request has ended.
    """

    def __init__(self, caches: Caches, sources: dict[int, RecordedRouter]) -> None:
        self._caches = caches
        self._sources = sources

    def missing(self, request: Request, router: Router | None, best: int, above: int) -> None:
        """Why no worker has the blocks from ``best`` to ``above``."""
        size = request.arrived.block_size
        if above < best:
            request.parts["best", "kept"] += (above - best) * size
            return
        gap: Gap | None = None
        for block in request.hashes[best:above]:
            fate = self._caches.fates.get(block)
            if fate is None:
                request.parts["best", UNEXPLAINED] += size
                continue
            sender = fate.by
            was_there = fate.sent_at < max(fate.stored_at, fate.removed_at)
            if sender is None or sender.rank is None or was_there:
                request.parts["best", self._gone_cause(request, router, fate)] += size
                continue
            if gap is not None and gap.sender is sender and gap.rank is sender.rank:
                gap.tokens += size
                continue
            state = index_state(router, sender.rank)
            gap = Gap(size, sender, sender.rank, state, request.decided_at)
            request.gaps.append(gap)
            fate.waiting = [*(fate.waiting or ()), gap]

    def _gone_cause(self, request: Request, router: Router | None, fate: Fate) -> str:
        """Why a block that a rank had stored is not there any more."""
        rank = fate.rank
        if rank is None:
            return UNEXPLAINED
        if fate.removed_at < fate.stored_at:
            if rank.epoch != fate.epoch:
                return "restart"
            if index_state(router, rank) not in ("current", ""):
                return "events_lost"
        return "split" if request.source.mode == READS_CACHES else "spread"

    def choice(
        self, request: Request, decided: Decided, best: int | None, above: int, expected: int
    ) -> None:
        """Why the router counted fewer blocks than the best worker has (or the shared cache)."""
        source, size, parts = request.source, request.arrived.block_size, request.parts
        top = above if best is None else best
        if source.mode != READS_CACHES:
            if best is not None:
                parts["expected", "spread"] += (top - expected) * size
            return
        eligible = decided.best_cached_blocks
        if request.tiered and request.excluded == UNEXPLAINED:
            eligible = None  # a candidate has more than this, below its device
        counted = top if eligible is None else min(round(eligible), len(request.hashes))
        counted = max(counted, expected)
        if best is None:
            self._lost_by_senders(request, "expected", expected, above, counted)
            return
        if counted > top:
            # Booked there just now, and not in the index yet.
            parts["expected", "predicted"] += (top - counted) * size
        elif counted < top:
            parts["expected", request.excluded] += (top - counted) * size
        if counted > expected:
            lost = counted - expected
            # What the index of the chosen worker has beyond that is not trusted in full.
            untrusted = min(lost, max(0, (request.depth or 0) - expected))
            if untrusted:
                parts["expected", "events_lost"] += untrusted * size
            parts["expected", beaten(request, decided)] += (lost - untrusted) * size

    def remember_senders(self, request: Request, above: int) -> None:
        """Which decision put each block where it is, where no index shows it."""
        for block in request.hashes[:above]:
            fate = self._caches.fates.get(block)
            sender = None if fate is None else fate.by
            if sender is None or sender.rank is None:
                origin = UNEXPLAINED
            elif sender.router != request.router:
                origin = "blind"
            elif sender.rank is request.rank:
                origin = "here"
            else:
                origin = "there"
            if request.senders and request.senders[-1][0] == origin:
                request.senders[-1] = (origin, request.senders[-1][1] + 1)
            else:
                request.senders.append((origin, 1))

    def _lost_by_senders(
        self, request: Request, rung: str, low: int, high: int, counted: int
    ) -> None:
        """Give the blocks from ``low`` to ``high`` to causes by the decision that sent them."""
        size = request.arrived.block_size
        if high < low:
            cause = "predicted" if rung == "expected" else "more"
            request.parts[rung, cause] += (high - low) * size
            return
        mode = request.source.mode
        at = 0
        for origin, blocks in request.senders:
            lost = min(high, at + blocks) - max(low, at)
            start = max(low, at)
            at += blocks
            if lost <= 0:
                continue
            if origin in (UNEXPLAINED, "blind"):
                request.parts[rung, origin] += lost * size
            elif mode != READS_CACHES:
                cause = "spread" if origin == "there" else "no_events"
                request.parts[rung, cause] += lost * size
            else:
                # The router counted the first blocks on another worker, and forgot the others.
                knew = max(0, min(lost, counted - start))
                cause = "load" if request.decided is None else beaten(request, request.decided)
                request.parts[rung, cause] += knew * size
                request.parts[rung, "estimate"] += (lost - knew) * size
        if at < high:
            request.parts[rung, UNEXPLAINED] += (high - max(at, low)) * size

    def gaps(self, request: Request, now: float) -> None:
        for gap in request.gaps:
            request.parts["best", self._gap_cause(request, gap, now)] += gap.tokens

    def _gap_cause(self, request: Request, gap: Gap, now: float) -> str:
        sender, rank, since = gap.sender, gap.rank, gap.since
        computed = sender.computed_at
        if gap.stored_at is None and sender.failed:
            return "not_computed"
        if computed is None or computed > since:
            shares = request.source.config.router_replica_sync
            return "in_flight" if shares or sender.router == request.router else "blind"
        cause = self._cause_of_index(sender, gap.state)
        if cause is not None:
            return cause
        if any(computed <= at <= since for at in rank.clears):
            return "restart"
        if gap.stored_at is not None:
            request.delays.append(gap.stored_at - computed)
            return "stale"
        if now < computed + GRACE_S:
            return UNEXPLAINED  # the records end before a late event could have come
        return "events_lost" if rank.stored else "no_events"

    def _cause_of_index(self, request: Request, state: str) -> str | None:
        """What the index of the rank of a request lacked, by its ``state``; None if nothing."""
        if OTHER_BLOCK_SIZE in self._codes(request):
            return "block_size"
        if state in ("absent", "estimated"):
            return "no_events"
        return "events_lost" if state not in ("current", "") else None

    def _salts(self, request: Request) -> int:
        """Blocks that were not reachable, but whose content had been stored under another salt.
        Returns the leading blocks with these."""
        size, rungs = request.arrived.block_size, request.rungs
        reachable = (rungs["reachable"] or 0) // size
        first = max(1, reachable)
        twin: tuple[str, bool, float] | None = None
        same = first
        for block in request.hashes[first:]:
            fate = self._caches.fates.get(block)
            other = None if fate is None else fate.twin
            if other is None or other[2] >= request.decided_at:
                break
            twin = twin or other
            same += 1
        if twin is None or not _is_of_another_salt(request, twin):
            return reachable
        rungs["shared"] = same * size
        request.parts["reachable", "salts"] += (same - reachable) * size
        return same

    def prompt(self, request: Request) -> None:
        """What is in the prompt: blocks that no earlier one had there, and why."""
        PromptCauses(request, self._caches.fates, self._salts(request)).judge()

    def note_report(self, request: Request) -> None:
        end, rank = request.finished, request.rank
        if end is not None and end.cached_tokens and rank is not None:
            rank.reports += 1
            rank.granularity = math.gcd(rank.granularity, end.cached_tokens)

    def reuse(self, request: Request) -> None:
        end = request.finished
        self.note_report(request)
        if end is None or end.cached_tokens is None:
            return
        rungs, isl = request.rungs, request.arrived.isl_tokens
        reused = min(end.cached_tokens, isl)
        rungs["reused"] = reused
        expected = rungs["expected"]
        if expected is None:
            self._judge_unrouted(request, reused)
            return
        lost = expected - reused
        if lost < 0:
            request.parts["reused", "more"] += lost
        elif lost:
            self._judge_loss(request, end, expected, reused)

    def _judge_unrouted(self, request: Request, reused: int) -> None:
        """The loss from the last known rung, where it is unknown what the router expected."""
        size, rungs = request.arrived.block_size, request.rungs
        known = (rungs[rung] for rung in ("best", "capacity", "reachable"))
        top = next(tokens for tokens in known if tokens is not None)
        if rungs["best"] is not None or reused > top:
            request.parts["reused", "more" if reused > top else UNEXPLAINED] += top - reused
            return
        low = -(-reused // size)
        self._lost_by_senders(request, "reused", low, top // size, 0)
        request.parts["reused", "alignment"] += low * size - reused

    def _judge_loss(self, request: Request, end: Finished, expected: int, reused: int) -> None:
        parts, size, isl = request.parts, request.arrived.block_size, request.arrived.isl_tokens
        lost = expected - reused
        if end.prompt_tokens is not None and end.prompt_tokens != isl:
            parts["reused", "tokens"] += lost
            return
        own = _blocks_of_engine(request)
        usable = min(expected, max(0, isl - 1))
        whole = usable // own * own
        aligned = min(lost, expected - whole)
        parts["reused", "alignment"] += aligned
        if own > size:
            # Hashes of smaller blocks than those of the router are not in the records.
            request.gains["reused", "alignment"] = min(aligned, usable // size * size - whole)
        lost -= aligned
        if lost:
            parts["reused", self._reuse_cause(request, end, reused // size)] += lost

    def gains(self, request: Request) -> None:
        """What the worker with the most blocks would have reused in addition."""
        rungs, own = request.rungs, _blocks_of_engine(request)
        best, base = rungs["best"], rungs.get("reused")
        if base is None:
            base = rungs["expected"]
        if best is None or base is None:
            return
        rest = max(0, min(best, request.arrived.isl_tokens - 1) // own * own - base)
        for cause in OF_CHOICE:
            lost = request.parts["expected", cause]
            if lost > 0:
                request.gains["expected", cause] = gain = min(lost, rest)
                rest -= gain

    def _reuse_cause(self, request: Request, end: Finished, position: int) -> str:
        """Why the engine did not reuse the block at ``position``, on which the router counted."""
        rank, since = request.rank, request.decided_at
        if rank is None:
            return UNEXPLAINED
        cause = self._cause_of_index(request, request.state)
        if cause is not None:
            return cause
        until = end.at + GRACE_S
        if any(since <= at <= until for at in rank.clears):
            return "restart"
        fate = self._caches.fates.get(request.hashes[position])
        removed = None if fate is None else fate.removed_between(since, until, rank)
        if removed is not None:
            return _removal_cause(request, removed)
        if request.depth is not None and position >= request.depth:
            return "in_flight"
        if any(since <= at <= until for at in rank.troubles):
            return "events_lost"
        return "other_salt" if fate is not None and _has_other_salt(request, fate) else UNEXPLAINED

    def _codes(self, request: Request) -> set[str]:
        """The conditions that were in force for the rank of a request, from all routers."""
        name = request.worker.partition("/")[0]
        return {code for own in self._sources.values() for code in own.codes.get(name, ())}


def _blocks_of_engine(request: Request) -> int:
    """Tokens of a block that the engine reuses, as far as its reports show that it is larger."""
    size, rank = request.arrived.block_size, request.rank
    if rank is None or rank.reports < _ENOUGH_REPORTS or rank.granularity % size:
        return size
    return max(size, rank.granularity)


def index_state(router: Router | None, rank: RankHistory) -> str:
    """The state of a rank's index now; empty where the rank is not registered."""
    if router is None:
        return ""
    slot = router.registry.slot(*rank.key)
    fresh = None if slot is None else router.freshness.get(slot)
    return "" if fresh is None else fresh.state


def _removal_cause(request: Request, removed: float) -> str:
    """Why a block that was removed at ``removed``, after the decision, was not reused."""
    computed = request.computed_at
    if computed is None or removed <= computed:
        return "evicted_waiting"
    request.delays.append(removed - computed)
    return "stale"


def _is_of_another_salt(request: Request, twin: tuple[str, bool, float]) -> bool:
    """Whether the first block with the same content was another tenant's."""
    return twin[0] != request.arrived.tenant and (request.arrived.salted or twin[1])


def _has_other_salt(request: Request, fate: Fate) -> bool:
    """Whether the request that sent the block before had another salt."""
    sender = fate.by
    if sender is None or sender is request:
        return False
    before, now = sender.arrived, request.arrived
    return before.tenant != now.tenant and (before.salted or now.salted)
