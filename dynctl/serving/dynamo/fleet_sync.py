"""Replica sync with Dynamo's own frontends: both count the requests of each other as load.

As in Dynamo 1.6, each pool of workers has a topic (``active_sequences_events``), on which every
router publishes its bookings from a channel of its own, which it registers in discovery. Dynamo
has no handshake and no history: what was booked before a router came is unknown to it, and the
bookings of a router that ends without a word expire. Here they end with its channel. Where messages
were lost, a worker that reports no used blocks has no request from before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from dynctl.adapters.ports import ChannelCode, ChannelCondition, ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem
from dynctl.documents.replicas import ReplicaRow
from dynctl.health import conditions as codes
from dynctl.health.deployment import Deployment
from dynctl.serving.routing.replicas import MOST_PEERS, Share, SharedBookings
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceEvent,
    SequenceFreed,
    SequencePrefillDone,
    SequenceUnknown,
    decode_sequences,
    encode_sequences,
    kind_of,
)
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, ZmqTransport, encode_entry
from router_core import Change, Expired, Freed, LoadReported, PrefillDone, WorkerLost

_log = logging.getLogger(__name__)

_Key = tuple[str, int, int]
"""Request id, worker id, rank."""
#: Pools without workers whose channels stay open; the ones opened first close first.
MOST_IDLE: Final = 16
#: Seconds for the messages of the end to leave.
_LEAVE_S: Final = 0.2
#: After so many seconds the requests from before a loss have reached their workers.
_ARRIVED_S: Final = 2.0
#: For so many seconds after a loss requests may run whose begin was lost, and may a rank be in use
#: whose last report has no used blocks. Workers report each change, but for use of under 1 ms.
_UNSEEN_S: Final = 30.0


class Topic(Protocol):
    """A channel of ours that is open (:mod:`dynctl.adapters.dynamo.publishing`)."""

    @property
    def channel(self) -> EventChannel: ...

    @property
    def dropped(self) -> int: ...

    def publish(self, payload: bytes) -> None: ...

    async def run(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Pool:
    topic: Topic
    task: asyncio.Task[None]


@dataclass(slots=True)
class _Router:
    """Another router, by one of its channels. ``missed_at``: when messages of it were lost;
    ``unsure``: the bookings from before that, of which the end may have been lost."""

    name: str
    address: str
    heard_at: float
    router_id: int | None = None
    lost: int = 0
    missed_at: float | None = None
    unsure: set[_Key] = field(default_factory=set)
    bookings: dict[_Key, str] = field(default_factory=dict)
    share: Share = field(default_factory=Share)


class FleetSync(SharedBookings):
    """Shares the load of ``service`` with the routers of a Dynamo deployment.

    ``open_topic(scope)`` opens a channel for a pool of workers; ``changed`` is called when
    :meth:`entries` has others. Give :meth:`take_deployment` what discovery has, and :meth:`take`
    the messages of each channel of others: of routers, and of workers, which report the end of
    prefills.
    """

    def __init__(
        self,
        service: RoutingService,
        open_topic: Callable[[EndpointId], Topic],
        *,
        router_id: int,
        later: Callable[[float, Callable[[], None]], object],
        changed: Callable[[], None],
    ) -> None:
        super().__init__(service, router_id, later)
        self._open_topic = open_topic
        self._changed = changed
        self._pools: dict[EndpointId, _Pool] = {}
        self._pool_of: dict[int, EndpointId] = {}
        self._routers: dict[EventChannel, _Router] = {}
        #: Rank -> when its last report arrived, where it has no used blocks.
        self._idle_at: dict[tuple[int, int], float] = {}
        self._failed: set[EndpointId] = set()
        service.share_load(self)

    # -- the deployment ------------------------------------------------------------------------

    def entries(self, _instance_id: int) -> Iterator[tuple[str, bytes]]:
        """What is registered in discovery: the channels of this router."""
        for pool in self._pools.values():
            yield encode_entry(pool.topic.channel)

    def take_deployment(self, deployment: Deployment) -> None:
        """Publish for every pool of workers; end the bookings of routers whose channel is gone."""
        present = {
            item.worker.worker_id: item.instance.endpoint
            for item in deployment.workers
            if item.worker.worker_id not in self._pool_of
        }
        gone = self._pool_of.keys() - {item.worker.worker_id for item in deployment.workers}
        if gone:
            self.flush()  # what they had is published on their pool's channel
            for worker_id in gone:
                del self._pool_of[worker_id]
        self._pool_of |= present
        used = set(self._pool_of.values())
        for scope in used - self._pools.keys() - self._failed:
            self._open(scope)
        # Deployments that roll have components of other names each time. A pool whose only worker
        # restarts keeps its channel, so that the others need not find another one.
        idle = [scope for scope in self._pools if scope not in used]
        for scope in idle[: max(0, len(idle) - MOST_IDLE)]:
            self._close_pool(scope)
        for channel in self._routers.keys() - set(deployment.sequences):
            self._end(channel)

    def publishers(self) -> set[int]:
        """The publisher ids of this router."""
        return {pool.topic.channel.publisher_id for pool in self._pools.values()}

    def _open(self, scope: EndpointId) -> None:
        at = f"{scope.namespace}.{scope.component}.{scope.name}"
        try:
            topic = self._open_topic(scope)
        except UsageProblem as error:
            self._failed.add(scope)
            message = f"its requests of this router are not shared: {error.message}"
            self._service.set_condition(codes.REPLICA_SILENT, at, message)
            return
        task = self._service.tasks.start("replica sync", topic.run, at)
        self._pools[scope] = _Pool(topic, task)
        self._changed()

    def _close_pool(self, scope: EndpointId) -> None:
        pool = self._pools.pop(scope)
        pool.task.cancel()
        at = f"{scope.namespace}.{scope.component}.{scope.name}"
        self._service.tasks.start("end of replica sync", pool.topic.close, at, restart=False)
        self._changed()

    # -- sending -------------------------------------------------------------------------------

    def before(self, change: Change) -> None:
        super().before(change)
        if isinstance(change, WorkerLost):
            for rank in [rank for rank in self._idle_at if rank[0] == change.worker_id]:
                del self._idle_at[rank]
            for router in self._routers.values():
                for key in [key for key in router.bookings if key[1] == change.worker_id]:
                    self._dismiss(router.bookings.pop(key))

    def after(self, change: Change) -> None:
        super().after(change)
        if isinstance(change, Expired):
            load = self._service.router.load
            for router in self._routers.values():
                for key, held in list(router.bookings.items()):
                    if not any(True for _ in load.bookings(held)):
                        self._dismiss(router.bookings.pop(key))
            self._end_losses()
        elif isinstance(change, LoadReported) and change.kv_used_blocks is not None:
            self._note_use(change)

    def keep_alive(self) -> None:
        """Report who has too many requests."""
        for router in self._routers.values():
            self._judge_share(router.share, router.name)

    def _note_use(self, report: LoadReported) -> None:
        """Workers report used blocks after each change. Active blocks are reported by any router,
        for its own view."""
        rank = (report.worker_id, report.dp_rank)
        if report.kv_used_blocks:
            self._idle_at.pop(rank, None)
        elif report.worker_id in self._pool_of:
            self._idle_at[rank] = self._clock()

    def _end_losses(self) -> None:
        """End the bookings whose end may have been lost, where their rank had no used blocks since.
        Forget the losses before which no booking of now was made.

        A report may arrive before the message by which the loss is noticed, and an idle rank does
        not report again, so its time is compared with that of the booking. A rank that never
        reports the use of short requests is idle if it reports none for _UNSEEN_S either."""
        for router in self._routers.values():
            if router.missed_at is None or self._clock() - router.missed_at < _ARRIVED_S:
                continue
            router.unsure &= router.bookings.keys()
            quiet = self._clock() - router.missed_at > _UNSEEN_S
            for key in list(router.unsure):
                idle_at = self._idle_at.get(key[1:])
                if idle_at is None or not (quiet or self._older(router.bookings[key], idle_at)):
                    continue
                router.unsure.discard(key)
                self._free(router.bookings.pop(key))
            if quiet and not router.unsure:
                router.missed_at = None
                self._service.clear_condition(codes.REPLICA_BEHIND, router.name)

    def _older(self, booking_id: str, at: float) -> bool:
        """Whether a booking was made before ``at``."""
        bookings = self._service.router.load.bookings(booking_id)
        return all(booking.booked_at < at for booking in bookings)

    def _emit(self, batch: list[SequenceEvent]) -> bool:
        by_pool: dict[EndpointId, list[SequenceEvent]] = {}
        for event in batch:
            scope = self._pool_of.get(event.worker_id)
            if scope in self._pools:
                by_pool.setdefault(scope, []).append(event)
        for scope, events in by_pool.items():
            topic = self._pools[scope].topic
            several = isinstance(topic.channel.transport, ZmqTransport)
            for message in [events] if several else [[event] for event in events]:
                topic.publish(encode_sequences(message, batched=several))
        return bool(by_pool)

    async def leave(self) -> None:
        """Free what is still booked, so that it does not count elsewhere until it expires."""
        for booked in self._own(list(self._service.router.load)):
            self._queue(SequenceFreed(*self._place(booked), self._id))
        self.flush()
        if self._pools:
            await asyncio.sleep(_LEAVE_S)

    async def close(self) -> None:
        """Leaves no task and no socket."""
        for pool in self._pools.values():
            pool.task.cancel()
            await pool.topic.close()
        self._pools.clear()

    # -- receiving -----------------------------------------------------------------------------

    def take(self, channel: EventChannel, value: ChannelValue) -> None:
        """Take what was received on a channel of another router."""
        router = self._routers.get(channel)
        if isinstance(value, ChannelCondition):
            if value.code is ChannelCode.MALFORMED_MESSAGE:
                self.missed["malformed"] += value.count
            elif value.code is ChannelCode.EVENTS_DROPPED and router is not None:
                self._behind(router, value.count)
            return
        try:
            events = decode_sequences(value.payload)
        except WireError:
            self.missed["malformed"] += 1
            return
        for event in events:
            if event.router_id != self._id:
                self.events["received", kind_of(event)] += 1
                self._event(channel, event)

    def _event(self, channel: EventChannel, event: SequenceEvent) -> None:
        key = (event.request_id, event.worker_id, event.dp_rank)
        match event:
            case SequenceAdded():
                router = self._router(channel, event.router_id)
                if router is None:
                    self.missed["too_many"] += 1
                elif key not in router.bookings:
                    self._book(router, key, event)
            case SequencePrefillDone():
                # A worker reports it too, for the requests of all routers.
                for router in self._routers.values():
                    if key in router.bookings:
                        self._service.apply(PrefillDone(router.bookings[key]))
            case SequenceFreed():
                known = self._routers.get(channel)
                booking_id = None if known is None else known.bookings.pop(key, None)
                if booking_id is not None:
                    self._free(booking_id)
            case SequenceUnknown():
                self.missed["unknown_kind"] += 1

    def _router(self, channel: EventChannel, router_id: int) -> _Router | None:
        """The router that publishes on a channel; None if there are too many."""
        router = self._routers.get(channel)
        if router is None:
            if len(self._routers) >= MOST_PEERS:
                return None
            pool = f"{channel.scope.namespace}.{channel.scope.component}"
            transport = channel.transport
            address = transport.endpoint if isinstance(transport, ZmqTransport) else ""
            name = f"router {router_id:x} of {pool}"
            router = self._routers[channel] = _Router(name, address, self._clock(), router_id)
            _log.info("%s shares its load", name)
        router.heard_at = self._clock()
        return router

    def _book(self, router: _Router, key: _Key, event: SequenceAdded) -> None:
        booking_id = f"{event.router_id:016x}/{event.worker_id:x}.{event.dp_rank}/{key[0]}"
        if booking_id in self._foreign:
            self.missed["too_many"] += 1  # another channel has it
            return
        applied = self._mirror(router.share, booking_id, event)
        if applied:
            router.bookings[key] = booking_id
        elif applied is not None:
            self._dismiss(booking_id)

    def _free(self, booking_id: str) -> None:
        self._service.apply(Freed(booking_id))
        self._dismiss(booking_id)

    def _behind(self, router: _Router, count: int) -> None:
        router.lost += count
        router.missed_at = self._clock()
        router.unsure |= router.bookings.keys()
        self.missed["lost"] += count
        limit = self._service.router.config.active_request_expiry_secs
        self._service.set_condition(
            codes.REPLICA_BEHIND,
            router.name,
            f"{router.lost:,} of its messages were lost, and no router sends them again: "
            f"requests that ended in them count until their worker reports no used blocks, "
            f"reports no use for {_UNSEEN_S:g} s, or until they expire, after {limit:g} s",
        )

    def _end(self, channel: EventChannel) -> None:
        """The channel of a router is not registered any more: it ended, with its requests."""
        router = self._routers.pop(channel)
        for booking_id in router.bookings.values():
            self._free(booking_id)
        self._service.clear_condition(codes.REPLICA_BEHIND, router.name)
        self._service.clear_condition(codes.REPLICA_OVER_LIMIT, router.name)
        _log.info("%s left", router.name)

    # -- what is shown -------------------------------------------------------------------------

    def rows(self) -> list[ReplicaRow]:
        now = self._clock()
        return [
            ReplicaRow(
                router.name,
                f"{router.router_id or 0:016x}",
                router.address or None,
                "in step" if router.missed_at is None else "behind",
                round(now - router.heard_at, 3),
                len(router.bookings),
                router.lost,
            )
            for router in sorted(self._routers.values(), key=lambda router: router.name)
        ]

    def out_of_date(self) -> str:
        late = [router.name for router in self._routers.values() if router.missed_at is not None]
        return ", ".join(late[:3])
