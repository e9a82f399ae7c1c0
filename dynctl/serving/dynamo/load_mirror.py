"""The load that routers put on workers, from the replica-sync events between them.

Every event is applied as Dynamo's own replicas apply it, in the order of arrival. There is no
history: requests that began before :attr:`LoadMirror.since` are unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

from dynctl.adapters.ports import ChannelMessage, ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceEvent,
    SequenceFreed,
    SequencePrefillDone,
    decode_sequences,
)
from dynctl.wire.dynamo.events import decode_kv_metrics
from dynctl.wire.dynamo.frontend_metrics import RankLoad
from router_core import (
    ActiveRequest,
    Applied,
    Booked,
    Change,
    Freed,
    PrefillDone,
    Role,
    Router,
    Stage,
)

_STAGES: Final[dict[Role, Stage]] = {
    Role.AGGREGATED: "aggregated",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
}
_GAUGE: Final = "frontend metrics"
#: Sums of prefill tokens that are remembered for a rank, and ranks.
_EARLIER: Final = 32
_MOST_RANKS: Final = 100_000
#: Routers and ranks that are remembered; above it those that are gone are forgotten.
_MOST_SEEN: Final = 10_000
NO_EARLIER: Final[Mapping[tuple[int, int], Collection[int]]] = {}


class LoadMirror:
    """Turns load events into a router's changes. ``clock``: monotonic seconds.

    ``added`` counts requests, ``malformed`` unreadable messages.
    ``reported``: the ranks whose workers reported their load since then. ``over``: those that were
    over a threshold then. ``earlier``: the last sums of a rank's prefill tokens, by rank.
    """

    def __init__(
        self,
        router: Router,
        apply: Callable[[Change], Applied],
        clock: Callable[[], float],
        *,
        on_sequence: Callable[[SequenceEvent], object] = lambda event: None,
    ) -> None:
        self._on_sequence = on_sequence
        self._router = router
        self._registry = router.registry
        self.earlier: dict[tuple[int, int], deque[int]] = {}
        self._apply = apply
        self.since = clock()
        self.added = 0
        #: Routers whose requests were seen.
        self.routers: set[int] = set()
        self.reports = 0
        self.reported: set[tuple[int, int]] = set()
        self.over: set[tuple[int, int]] = set()
        self.malformed = 0

    def take_sequences(self, value: ChannelValue) -> None:
        """Take a message of ``active_sequences_events``."""
        if isinstance(value, ChannelMessage):
            try:
                for event in decode_sequences(value.payload):
                    self._on_sequence(event)
                    self._sequence(event)
            except WireError:
                self.malformed += 1

    def take_metrics(self, value: ChannelValue) -> None:
        """Take a message of ``kv_metrics``: a worker's load report."""
        if isinstance(value, ChannelMessage):
            try:
                change = decode_kv_metrics(value.payload).change()
                self._apply(change)
                self.reports += 1
                self._forget_gone()
                if self._registry.slot(change.worker_id, change.dp_rank) is not None:
                    self.reported.add((change.worker_id, change.dp_rank))
                    self._latch(change.worker_id, change.dp_rank)
            except WireError:
                self.malformed += 1

    def _sequence(self, event: SequenceEvent) -> None:
        worker = self._registry.get(event.worker_id)
        if worker is None:
            return
        stage = _STAGES[worker.role]
        self._remember(event.worker_id, event.dp_rank)
        match event:
            case SequenceAdded():
                self.added += 1
                self._forget_gone()
                self.routers.add(event.router_id)
                self._apply(
                    Booked(
                        event.request_id,
                        stage,
                        event.worker_id,
                        event.dp_rank,
                        prefill_tokens=event.prefill_tokens,
                        sequence_hashes=event.token_sequence or (),
                        predicted_s=event.expected_prefill_s,
                    )
                )
            case SequencePrefillDone():
                self._apply(PrefillDone(event.request_id))
            case SequenceFreed():
                self._apply(Freed(event.request_id, stage))

    def _forget_gone(self) -> None:
        """Workers and routers come and go for as long as this process runs."""
        for ranks in (self.reported, self.over):
            if len(ranks) >= _MOST_SEEN:
                ranks -= {rank for rank in ranks if self._registry.slot(*rank) is None}
        if len(self.routers) >= _MOST_SEEN:
            self.routers.clear()

    def _latch(self, worker_id: int, dp_rank: int) -> None:
        """Note whether a rank is over a threshold, at its report."""
        slot = self._registry.slot(worker_id, dp_rank)
        if slot is not None and self._router.busy.busy_ranks >> slot & 1:
            self.over.add((worker_id, dp_rank))
        else:
            self.over.discard((worker_id, dp_rank))

    def _remember(self, worker_id: int, dp_rank: int) -> None:
        """Keep the present sum of a rank's prefill tokens before it changes."""
        slot = self._registry.slot(worker_id, dp_rank)
        if slot is None:
            return
        if len(self.earlier) >= _MOST_RANKS:
            self.earlier.clear()
        sums = self.earlier.setdefault((worker_id, dp_rank), deque(maxlen=_EARLIER))
        sums.append(_mirrored_bookings(self._router, slot, _gauge(worker_id, dp_rank))[0])


def gauge_changes(
    router: Router,
    loads: Mapping[tuple[int, int], RankLoad],
    earlier: Mapping[tuple[int, int], Collection[int]] = NO_EARLIER,
) -> list[Change]:
    """The changes that apply the load which frontends export, beyond that of mirrored requests.

    ``earlier``: LoadMirror.earlier. The gauge of a frontend keeps prefill tokens that another has
    finished: where all its blocks are known by request, an earlier sum of tokens is out of date.

    Gauges are sums without block hashes: a prompt that shares blocks with a running request looks
    more expensive here than to the router itself. Requests that the mirror has seen are known with
    their blocks; only the rest of a sum, which began before, is booked as a sum.
    """
    changes: list[Change] = []
    for (worker_id, dp_rank), load in loads.items():
        worker, slot = router.registry.get(worker_id), router.registry.slot(worker_id, dp_rank)
        if worker is None or slot is None:
            continue
        name = _gauge(worker_id, dp_rank)
        changes.append(Freed(name))
        tokens, blocks = _mirrored_bookings(router, slot, name)
        tokens = max(0, load.active_prefill_tokens - tokens)
        blocks = max(0, load.active_decode_blocks - blocks)
        if not blocks and load.active_prefill_tokens in earlier.get((worker_id, dp_rank), ()):
            tokens = 0
        if tokens or blocks:
            stage = _STAGES[worker.role]
            changes.append(
                Booked(
                    name, stage, worker_id, dp_rank, prefill_tokens=tokens, anonymous_blocks=blocks
                )
            )
    return changes


def _gauge(worker_id: int, dp_rank: int) -> str:
    return f"{_GAUGE} {worker_id:x}.{dp_rank}"


def _mirrored_bookings(router: Router, slot: int, gauge: str) -> tuple[int, int]:
    """The prefill tokens and blocks of a slot without those that are booked for its gauge."""
    load = router.load
    tokens, blocks = load.booked_prefill(slot), load.decode_blocks[slot]
    for booked in load.bookings(gauge):
        tokens, blocks = tokens - booked.prefill_tokens, blocks - booked.anonymous_blocks
    return tokens, blocks


def known_as_sums(router: Router) -> list[ActiveRequest]:
    """The parts of gauges that are booked as sums: load whose requests were not mirrored."""
    return [booked for booked in router.load if booked.request_id.startswith(_GAUGE)]
