"""When the prefill of a request ends whose first output is not seen.

The response of an engine to a request without ``stream`` comes as a whole, so its prompt would
count as being computed for the whole generation. Its prefill load ends when the KV events of the
worker store the last complete block of the prompt. Where no event can show it, it ends after the
time that streamed prompts of the worker took; this is an estimate, and never a sample of anything.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from router_core import (
    DEVICE,
    BlocksStored,
    Decision,
    KvEvent,
    Router,
    RoutingRequest,
    WorkerWithDpRank,
)

#: Tokens that take about as long as what every prefill takes beside its tokens.
_FIXED_TOKENS: Final = 64
#: Seconds for a token where no prefill is measured: 5,000 tokens a second.
_UNMEASURED_S: Final = 0.0002
#: The weight of a new measurement.
_NEW: Final = 0.2
#: An estimate is at most so many seconds.
_LONGEST_S: Final = 60.0
#: An event is awaited for so many times the estimate, and at least so many seconds.
_PATIENCE: Final = 8.0
_LEAST_S: Final = 10.0
#: Workers and models whose pace is kept; the one unused for longest goes.
_MOST_PACES: Final = 8_192
#: Entries of the agenda that are left over from requests that ended, beside as many that run.
_MOST_LEFT: Final = 64


class Owner(Protocol):
    """The service whose bookings these are."""

    router: Router
    clock: Callable[[], float]

    def prefill_done(self, request_id: str, *, seen: bool = True) -> object:
        """End the prefill load of a request."""


@dataclass(slots=True)
class _Unseen:
    """A prefill that runs. ``block``: local hash of the prompt block that an event has to store;
    None: no event shows the end."""

    request: RoutingRequest
    ref: WorkerWithDpRank
    slot: int
    until: float
    block: int | None


class UnseenPrefills:
    """The prefills whose end is not seen, of one service. One timer for all of them."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        #: Request id -> its prefill; empty while each request streams.
        self.running: dict[str, _Unseen] = {}
        #: Rank -> local hash of an awaited block -> requests.
        self._awaited: dict[WorkerWithDpRank, dict[int, dict[str, None]]] = {}
        #: (time, request id), the earliest first; entries of requests that ended stay for a while.
        self._agenda: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: Seconds for a token, by worker id and by model.
        self._paces: OrderedDict[int | str, float] = OrderedDict()
        #: Workers whose events did not show the end of their last prefill.
        self._silent: set[int] = set()

    # -- what is measured ------------------------------------------------------------------

    def measured(self, decision: Decision, seconds: float) -> None:
        """A streamed prompt had its first output ``seconds`` after it was sent to the winner."""
        winner = decision.winner
        if winner is None or seconds <= 0:
            return
        worker = decision.workers[winner]
        pace = seconds / (_tokens_before(decision) + _FIXED_TOKENS)
        for key in (worker.worker_id, worker.model):
            before = self._paces.get(key, pace)
            self._paces[key] = before + _NEW * (pace - before)
            self._paces.move_to_end(key)
        while len(self._paces) > _MOST_PACES:
            self._paces.popitem(last=False)

    def estimate_s(self, decision: Decision) -> float:
        """The seconds that a prefill takes from now on, with the prompts that wait before it."""
        worker = decision.worker
        pace = None
        if worker is not None:
            pace = self._paces.get(worker.worker_id) or self._paces.get(worker.model)
        tokens = _tokens_before(decision) + _FIXED_TOKENS
        return min(_LONGEST_S, tokens * (pace or _UNMEASURED_S))

    # -- requests --------------------------------------------------------------------------

    def begin(self, decision: Decision, request: RoutingRequest) -> None:
        """The prefill of a booked hop begins; nothing for a request whose first output is seen."""
        ref = decision.ref
        if request.streams or ref is None or not decision.parameters.track_prefill_tokens:
            return
        slot = self._owner.router.registry.slot(*ref)
        if slot is None:
            return
        if request.id in self.running:
            self.forget(request.id)
        estimate = self.estimate_s(decision)
        block = self._last_block(decision, request, slot, ref)
        if block is not None:
            estimate = max(_LEAST_S, _PATIENCE * estimate)
            self._awaited.setdefault(ref, {}).setdefault(block, {})[request.id] = None
        until = self._owner.clock() + estimate
        self.running[request.id] = _Unseen(request, ref, slot, until, block)
        if len(self._agenda) > 2 * len(self.running) + _MOST_LEFT:
            self._agenda = [(prefill.until, name) for name, prefill in self.running.items()]
            heapq.heapify(self._agenda)
        else:
            heapq.heappush(self._agenda, (until, request.id))
        if self._agenda[0][0] >= until or self._timer is None:
            self._set_timer()

    def forget(self, request_id: str) -> None:
        """The prefill of the request ended, or the whole request."""
        unseen = self.running.pop(request_id, None)
        if unseen is None or unseen.block is None:
            return
        blocks = self._awaited[unseen.ref]
        names = blocks[unseen.block]
        del names[request_id]
        if not names:
            del blocks[unseen.block]
        if not blocks:
            del self._awaited[unseen.ref]

    def stored(self, change: KvEvent) -> None:
        """A KV event of a worker was applied: it may show that prompts are computed."""
        awaited = self._awaited.get(WorkerWithDpRank(change.worker_id, change.dp_rank))
        event = change.event
        if awaited is None or not isinstance(event, BlocksStored) or event.tier != DEVICE:
            return
        names = [
            name
            for local_hash in event.local_hashes
            if local_hash in awaited
            for name in awaited[local_hash]
        ]
        for name in names:
            unseen = self.running.get(name)
            # Another prompt can have an equal block after other ones.
            if unseen is not None and self._is_stored(unseen.request, unseen.slot):
                self._silent.discard(change.worker_id)
                self._end(name)

    # -- inside ----------------------------------------------------------------------------

    def _last_block(
        self, decision: Decision, request: RoutingRequest, slot: int, ref: WorkerWithDpRank
    ) -> int | None:
        """The block whose event shows the end of the prefill; None where none can."""
        row = self._owner.router.freshness.get(slot)
        shown = (
            bool(request.local_hashes)
            and not request.more_hashes
            and row is not None
            and row.state == "current"
            and ref.worker_id not in self._silent
            and not (_is_nearly_cached(decision) and self._is_stored(request, slot))
        )
        return request.local_hashes[-1] if shown else None

    def _is_stored(self, request: RoutingRequest, slot: int) -> bool:
        hashes = request.sequence_hashes
        overlaps = self._owner.router.index.find_matches(hashes, 1 << slot)
        return overlaps.get(slot) >= len(hashes)

    def _end(self, request_id: str) -> None:
        self.forget(request_id)
        self._owner.prefill_done(request_id, seen=False)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._agenda:
            pause = max(0.001, self._agenda[0][0] - self._owner.clock())
            self._timer = asyncio.get_running_loop().call_later(pause, self._pass)

    def _pass(self) -> None:
        """End the prefills whose time is over."""
        self._timer = None
        now = self._owner.clock()
        while self._agenda and self._agenda[0][0] <= now:
            until, name = heapq.heappop(self._agenda)
            unseen = self.running.get(name)
            if unseen is None or unseen.until != until:
                continue
            if unseen.block is not None:
                if len(self._silent) >= _MOST_PACES:
                    self._silent.clear()
                self._silent.add(unseen.ref.worker_id)
            self._end(name)
        self._set_timer()


def _is_nearly_cached(decision: Decision) -> bool:
    """Whether the winner may have all blocks of the prompt: the last one does not always count."""
    inputs, winner = decision.inputs, decision.winner
    if inputs is None or winner is None:
        return True
    return inputs.overlap_blocks[winner] >= decision.prompt_blocks - 1


def _tokens_before(decision: Decision) -> int:
    """Prompt tokens that the winner computes until the request's first output: those of prompts
    before it, and its own without those that are cached."""
    inputs, winner = decision.inputs, decision.winner
    if inputs is None or winner is None:
        return decision.isl_tokens
    booked = inputs.prefill_tokens if inputs.booked_tokens is None else inputs.booked_tokens
    own = decision.isl_tokens - inputs.cached_tokens(winner, decision.parameters)
    return max(0, int(booked[winner])) + max(0, own)
