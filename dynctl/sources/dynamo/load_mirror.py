"""The load that routers put on workers, from the replica-sync events between them.

Every event is applied as Dynamo's own replicas apply it, in the order of arrival. There is no
history: requests that began before :attr:`LoadMirror.since` are unknown.
"""

from __future__ import annotations

from collections.abc import Callable
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
from router_core import Applied, Booked, Change, Freed, PrefillDone, Role, Stage, WorkerRegistry

_STAGES: Final[dict[Role, Stage]] = {
    Role.AGGREGATED: "aggregated",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
}
_GAUGE: Final = "frontend metrics"


class LoadMirror:
    """Turns load events into a router's changes. ``clock``: monotonic seconds.

    ``books`` False: requests in the events are not counted as load, which has another origin then.
    ``added`` counts requests, ``malformed`` unreadable messages.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        apply: Callable[[Change], Applied],
        clock: Callable[[], float],
        *,
        books: bool = True,
        on_sequence: Callable[[SequenceEvent], None] = lambda event: None,
    ) -> None:
        self._books = books
        self._on_sequence = on_sequence
        self._registry = registry
        self._apply = apply
        self.since = clock()
        self.added = 0
        self.reports = 0
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
                self._apply(decode_kv_metrics(value.payload).change())
                self.reports += 1
            except WireError:
                self.malformed += 1

    def _sequence(self, event: SequenceEvent) -> None:
        worker = self._registry.get(event.worker_id)
        if worker is None:
            return
        stage = _STAGES[worker.role]
        match event:
            case SequenceAdded():
                self.added += 1
                if not self._books:
                    return
                self._apply(
                    Booked(
                        event.request_id,
                        stage,
                        event.worker_id,
                        event.dp_rank,
                        prefill_tokens=event.prefill_tokens,
                        sequence_hashes=event.token_sequence or (),
                    )
                )
            case SequencePrefillDone() if self._books:
                self._apply(PrefillDone(event.request_id))
            case SequenceFreed() if self._books:
                self._apply(Freed(event.request_id, stage))


def gauge_changes(registry: WorkerRegistry, loads: dict[tuple[int, int], RankLoad]) -> list[Change]:
    """The changes that apply the load which frontends export.

    Gauges are sums without block hashes: a prompt that shares blocks with a running request looks
    more expensive here than to the router itself.
    """
    changes: list[Change] = []
    for (worker_id, dp_rank), load in loads.items():
        worker = registry.get(worker_id)
        if worker is None or dp_rank not in worker.ranks:
            continue
        name = f"{_GAUGE} {worker_id:x}.{dp_rank}"
        changes.append(Freed(name))
        if load.active_prefill_tokens or load.active_decode_blocks:
            changes.append(
                Booked(
                    name,
                    _STAGES[worker.role],
                    worker_id,
                    dp_rank,
                    prefill_tokens=load.active_prefill_tokens,
                    anonymous_blocks=load.active_decode_blocks,
                )
            )
    return changes
