"""The load of workers as their clients report it, in the manner of Dynamo's slot tracker.

Clients register workers and say which requests they have; the tracker adds up prompt tokens and KV
blocks for each rank. It chooses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dynctl.serving.routing.standalone_index import Key, written
from router_core import ActiveSequences, to_unsigned

MOST_TRACKERS: Final = 1024
MOST_RANKS: Final = 65_536
MOST_REQUESTS: Final = 65_536
#: Hashes of all requests; the blocks of a request above that count by their number.
MOST_HASHES: Final = 8 * 1024 * 1024
#: Characters of the id of a request.
MOST_ID: Final = 1024
_STAGE: Final = "aggregated"


class TrackerError(Exception):
    """A request that cannot be answered: HTTP status and Dynamo's text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class _Tracker:
    """The workers and requests of one model and routing group."""

    block_size: int
    load: ActiveSequences = field(default_factory=ActiveSequences)
    #: Worker id -> its first rank and how many it has.
    workers: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: (worker id, rank) -> slot.
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)


class SlotTracker:
    """Workers and requests by model and routing group. ``clock``: monotonic seconds; a request
    without reports for ``idle_s`` seconds ends."""

    def __init__(self, clock: Callable[[], float], idle_s: float) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._trackers: dict[Key, _Tracker] = {}

    # -- workers ---------------------------------------------------------------------------

    def register(self, body: Mapping[str, Any]) -> None:
        """Track a worker."""
        key, worker_id, size = _key(body), body["worker_id"], body["block_size"]
        start, count = body["dp_start"], body["dp_size"]
        if size == 0:
            raise TrackerError(400, "block_size must be greater than 0")
        if count == 0:
            raise TrackerError(400, "dp_size must be greater than 0")
        if start + count - 1 >= 2**32:
            raise TrackerError(400, f"dp range overflows u32: start={start} size={count}")
        tracker = self._trackers.get(key)
        if tracker is not None and tracker.block_size != size:
            raise TrackerError(
                409,
                f"block_size mismatch for {written(key)}: existing={tracker.block_size}, "
                f"requested={size}",
            )
        if tracker is not None and worker_id in tracker.workers:
            raise TrackerError(409, f"worker {worker_id} already registered for {written(key)}")
        if sum(len(tracker.slots) for tracker in self._trackers.values()) + count > MOST_RANKS:
            raise TrackerError(409, f"{MOST_RANKS:,} ranks are the maximum")
        if tracker is None:
            if len(self._trackers) >= MOST_TRACKERS:
                raise TrackerError(409, f"{MOST_TRACKERS:,} models are the maximum")
            tracker = self._trackers[key] = _Tracker(size)
        tracker.workers[worker_id] = (start, count)
        for rank in range(start, start + count):
            slot = tracker.free.pop() if tracker.free else len(tracker.slots)
            tracker.slots[worker_id, rank] = slot
        tracker.load.grow(len(tracker.slots) + len(tracker.free))

    def unregister(self, body: Mapping[str, Any]) -> None:
        """Forget a worker and its requests."""
        key, worker_id = _key(body), body["worker_id"]
        tracker = self._trackers.get(key)
        if tracker is None or worker_id not in tracker.workers:
            raise TrackerError(404, f"worker {worker_id} not found for {written(key)}")
        start, count = tracker.workers.pop(worker_id)
        for rank in range(start, start + count):
            slot = tracker.slots.pop((worker_id, rank))
            tracker.load.drop_slot(slot)
            tracker.free.append(slot)
        if not tracker.workers:
            del self._trackers[key]

    def workers(self, model: str | None = None, group: str | None = None) -> list[dict[str, Any]]:
        """The workers, those of one model or group if given."""
        return [
            {
                "worker_id": worker_id,
                "model_name": key[0],
                "routing_group": key[1],
                "block_size": tracker.block_size,
                "dp_start": start,
                "dp_size": count,
            }
            for key, tracker in self._of(model, group)
            for worker_id, (start, count) in sorted(tracker.workers.items())
        ]

    # -- requests --------------------------------------------------------------------------

    def add(self, body: Mapping[str, Any]) -> None:
        """Count a request on a rank."""
        tracker, request_id = self._tracker(_key(body)), body["request_id"]
        if len(request_id) > MOST_ID:
            raise TrackerError(400, f"request_id is longer than {MOST_ID:,} characters")
        ref = (body["worker_id"], body["dp_rank"])
        slot = tracker.slots.get(ref)
        if slot is None:
            raise TrackerError(404, f"Worker {_ref(*ref)} not found")
        for held in tracker.load.bookings(request_id):
            at = next(ref for ref, slot in tracker.slots.items() if slot == held.slot)
            raise TrackerError(
                409, f"Request {request_id} already exists (assigned to worker {_ref(*at)})"
            )
        if sum(len(tracker.load) for tracker in self._trackers.values()) >= MOST_REQUESTS:
            raise TrackerError(429, f"{MOST_REQUESTS:,} requests are the maximum")
        hashes = tuple(map(to_unsigned, body["sequence_hashes"]))
        total = sum(tracker.load.hashes for tracker in self._trackers.values())
        fits = total + len(hashes) <= MOST_HASHES
        tracker.load.book(
            request_id,
            _STAGE,
            slot,
            prefill_tokens=body["new_isl_tokens"],
            sequence_hashes=hashes if fits else (),
            anonymous_blocks=0 if fits else len(hashes),
            now=self._clock(),
        )

    def prefill_complete(self, body: Mapping[str, Any]) -> None:
        """The first output token of a request arrived."""
        tracker, request_id = self._tracker(_key(body)), body["request_id"]
        if not tracker.load.bookings(request_id):
            raise TrackerError(404, f"Request {request_id} not found")
        tracker.load.prefill_done(request_id, self._clock())

    def free(self, body: Mapping[str, Any]) -> None:
        """A request ended; one that is not known is none."""
        self._tracker(_key(body)).load.free(body["request_id"], None, self._clock())

    def loads(self, model: str | None = None, group: str | None = None) -> list[dict[str, Any]]:
        """The load of each rank."""
        return [
            {
                "model_name": key[0],
                "routing_group": key[1],
                "worker_id": worker_id,
                "dp_rank": rank,
                "active_prefill_tokens": tracker.load.prefill_tokens[slot],
                "active_decode_blocks": tracker.load.decode_blocks[slot],
            }
            for key, tracker in self._of(model, group)
            for (worker_id, rank), slot in sorted(tracker.slots.items())
        ]

    def potential_loads(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The load of each rank with one more request."""
        tracker = self._tracker(_key(body))
        hashes = tuple(map(to_unsigned, body["sequence_hashes"]))
        mask = sum(1 << slot for slot in tracker.slots.values())
        shared = dict(tracker.load.shared_blocks(hashes, mask).items())
        load = tracker.load
        return [
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "potential_prefill_tokens": load.prefill_tokens[slot] + body["new_isl_tokens"],
                "potential_decode_blocks": load.decode_blocks[slot]
                + len(hashes)
                - shared.get(slot, 0),
                "active_requests": load.requests[slot],
            }
            for (worker_id, rank), slot in sorted(tracker.slots.items())
        ]

    def expire(self) -> None:
        """End requests without reports."""
        for tracker in self._trackers.values():
            tracker.load.expire(self._clock(), self._idle_s)

    def _of(self, model: str | None, group: str | None) -> Iterator[tuple[Key, _Tracker]]:
        for key, tracker in sorted(self._trackers.items(), key=lambda row: row[0]):
            if model in (None, key[0]) and group in (None, key[1]):
                yield key, tracker

    def _tracker(self, key: Key) -> _Tracker:
        tracker = self._trackers.get(key)
        if tracker is None:
            raise TrackerError(404, f"no slot tracker for {written(key)}")
        return tracker


def _key(body: Mapping[str, Any]) -> Key:
    return body["model_name"], body["routing_group"]


def _ref(worker_id: int, dp_rank: int) -> str:
    return f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"
