"""Replica sync: the routers of one fleet share the load that each of them puts on the workers.

A router publishes its bookings as Dynamo's replicas do, and books those of the others in its own
router, through the same `apply`. Prompts never travel, only the hashes of their blocks. Output
blocks and the prefix index are not shared, as in Dynamo.

What Dynamo does not have: a router that misses events notices it (by their numbers, or by the
number of bookings that the others report every second) and requests all bookings of that router
again; a Free that arrives before its Add leaves no load behind; the bookings of a router that runs
do not expire.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Literal

from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelMessage,
    ChannelValue,
    ReplicaPlane,
)
from dynctl.base.decode_errors import WireError
from dynctl.documents.replicas import (
    REPLICAS,
    ReplicaMessage,
    ReplicaRow,
    decode_replica_message,
    encode_replica_message,
)
from dynctl.health import conditions as codes
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
from dynctl.wire.dynamo.discovery import ACTIVE_SEQUENCES
from dynctl.wire.dynamo.events import Envelope
from router_core import (
    ActiveRequest,
    Booked,
    Change,
    Expired,
    Freed,
    PrefillDone,
    Progressed,
    Worker,
    WorkerLost,
    WorkerUpserted,
)

_log = logging.getLogger(__name__)

TOPICS: Final = (ACTIVE_SEQUENCES, REPLICAS)
#: Events and hashes of one message, and how long the first of them waits for others.
BATCH_EVENTS: Final = 256
BATCH_HASHES: Final = 65_536
BATCH_S: Final = 0.001
#: Events that wait to be sent; newer ones are dropped.
MOST_PENDING: Final = 8192
#: Seconds between two reports that this router runs, and after which another one is silent.
ALIVE_S: Final = 1.0
SILENT_S: Final = 5.0
#: Seconds between two sendings of all bookings, and between two requests for those of a router.
RESEND_S: Final = 1.0
REQUEST_S: Final = 3.0
#: A Free is remembered this long, for an Add that arrives after it.
EARLY_S: Final = 60.0
MOST_PEERS: Final = 64
MOST_FREED: Final = 8192
#: Bookings of all other routers, and of one: none keeps out the requests of the others.
MOST_BOOKINGS: Final = 200_000
MOST_OF_ONE: Final = MOST_BOOKINGS // 4
#: Hashes in the bookings of all other routers, and of one; about 250 bytes each. The blocks of
#: further bookings count by their number.
MOST_HASHES: Final = 8 * 1024 * 1024
MOST_HASHES_OF_ONE: Final = MOST_HASHES // 4
#: After as many seconds without a word another router of the same name is the same one again.
_REPLACED_S: Final = 2.5 * ALIVE_S

_OF_PEERS: Final = (
    *(codes.REPLICA_BEHIND, codes.REPLICA_OVER_LIMIT, codes.REPLICA_SILENT),
    codes.REPLICA_WORKERS_DIFFER,
)

_Key = tuple[str, int, int]
"""Request id, worker id, rank."""


@dataclass(slots=True)
class _Mirrored:
    """A booking of another router. ``number``: of the message that brought it. ``applied``: it
    counts here; False while its worker is unknown."""

    booking_id: str
    number: int
    applied: bool


@dataclass(slots=True)
class Share:
    """What one other router has booked here. ``over``: it had too many requests."""

    bookings: int = 0
    hashes: int = 0
    over: bool = False


@dataclass(slots=True)
class _Peer:
    """Another router. ``last``: the number of its last message of events, None: none yet.

    ``freed``: key -> number of the last Free, its time, and whether it came before its Add.
    ``reported``: the number that it had sent by its last report; ``synced_to``: when it sent all
    its bookings. ``strangers``: requests ran on unknown workers at the last judgement. ``given``:
    the bookings in the ``parts`` of its bookings that have arrived.
    """

    router_id: int
    address: str
    name: str
    heard_at: float
    last: int | None = None
    reported: int | None = None
    lost: int = 0
    resyncs: int = 0
    in_step: bool = False
    silent: bool = False
    mismatches: int = 0
    synced_to: int = -1
    strangers: bool = False
    asked_at: float = float("-inf")
    bookings: dict[_Key, _Mirrored] = field(default_factory=dict)
    freed: dict[_Key, tuple[int, float, bool]] = field(default_factory=dict)
    given: set[_Key] | None = None
    parts: int = 0
    share: Share = field(default_factory=Share)


def _foreign_booking(
    booking_id: str, worker: Worker, event: SequenceAdded, *, hashes: bool
) -> Booked:
    """The booking of another router, as a change that is not sent on."""
    blocks = event.token_sequence or ()
    return Booked(
        booking_id,
        worker.role.value,
        event.worker_id,
        event.dp_rank,
        prefill_tokens=event.prefill_tokens,
        sequence_hashes=blocks if hashes else (),
        anonymous_blocks=0 if hashes else len(blocks),
        predicted_s=event.expected_prefill_s,
        replica=True,
    )


class SharedBookings:
    """The events about the bookings of this router, for other routers.

    Those of others in ``_foreign`` (id here -> whose it is, and its hashes) are left out.
    ``router_id`` (u64) is this router's. ``later(seconds, call)`` runs a call in the event loop.
    :meth:`_emit` sends a batch.
    """

    #: Whether a message may have several events.
    batched = True

    def __init__(
        self,
        service: RoutingService,
        router_id: int,
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._service = service
        self._id = router_id
        self._later = later
        self._clock = service.clock
        self._foreign: dict[str, tuple[Share, int]] = {}
        self._hashes = 0
        self._pending: deque[SequenceEvent] = deque()
        self._flushing = False
        #: (``sent`` or ``received``, kind of event) -> how many.
        self.events: Counter[tuple[str, str]] = Counter()
        #: Why events do not count -> how many: ``lost`` (messages), ``dropped``, ``malformed``,
        #: ``unknown_worker``, ``early_free``, ``too_many``, ``unknown_kind``.
        self.missed: Counter[str] = Counter()

    def _emit(self, batch: list[SequenceEvent]) -> bool:
        """Send events in one message; False if they are lost."""
        raise NotImplementedError

    def _note_drop(self) -> None:
        """An event was dropped, because too many wait."""

    def before(self, change: Change) -> None:
        """Publish what a change is about to end, while it is still booked."""
        load, registry = self._service.router.load, self._service.router.registry
        match change:
            case PrefillDone():
                for booked in self._own(load.bookings(change.request_id)):
                    if booked.prefill_tokens:
                        self._queue(SequencePrefillDone(*self._place(booked), self._id))
            case Freed():
                for booked in self._own(load.bookings(change.request_id)):
                    if change.stage in (None, booked.stage):
                        self._queue(SequenceFreed(*self._place(booked), self._id))
            case Expired():
                limit = self._service.router.config.active_request_expiry_secs
                now = self._clock()
                for booked in self._own(load):
                    if now - booked.seen_at > limit:
                        self._queue(SequenceFreed(*self._place(booked), self._id))
            case WorkerLost():
                slots = registry.slots(change.worker_id)
                for booked in self._own(load):
                    if booked.slot in slots:
                        self._queue(SequenceFreed(*self._place(booked), self._id))
            case _:
                pass

    def after(self, change: Change) -> None:
        """Publish a booking."""
        if isinstance(change, Booked) and change.request_id not in self._foreign:
            self._queue(self._sequence_added(change))

    # -- bookings of others ------------------------------------------------------------------

    def _mirror(self, share: Share, booking_id: str, event: SequenceAdded) -> bool | None:
        """Book a request of another router: whether it counts here. None: it is one too many."""
        if share.bookings >= MOST_OF_ONE or len(self._foreign) >= MOST_BOOKINGS:
            share.over = share.over or share.bookings >= MOST_OF_ONE
            self.missed["too_many"] += 1
            return None
        count = len(event.token_sequence or ())
        fits = share.hashes + count <= MOST_HASHES_OF_ONE and self._hashes + count <= MOST_HASHES
        worker = self._service.router.registry.get(event.worker_id)
        applied = False
        # First, so that it is not published as a booking of this router.
        self._foreign[booking_id] = share, count if fits and worker is not None else 0
        if worker is not None:
            booked = _foreign_booking(booking_id, worker, event, hashes=fits)
            applied = self._service.apply(booked).ok
        share.bookings += 1
        share.hashes += self._foreign[booking_id][1]
        self._hashes += self._foreign[booking_id][1]
        if not applied:
            self.missed["unknown_worker"] += 1
        return applied

    def _dismiss(self, booking_id: str) -> None:
        """The booking of another router ended."""
        share, hashes = self._foreign.pop(booking_id)
        share.bookings -= 1
        share.hashes -= hashes
        self._hashes -= hashes

    def _judge_share(self, share: Share, name: str) -> None:
        """Report a router that has too many requests, until it has room for a tenth again."""
        share.over = share.over and share.bookings > MOST_OF_ONE * 0.9
        if share.over:
            message = (
                f"it has more than {MOST_OF_ONE:,} requests: further ones do not count as load here"
            )
            self._service.set_condition(codes.REPLICA_OVER_LIMIT, name, message)
        else:
            self._service.clear_condition(codes.REPLICA_OVER_LIMIT, name)

    def _own(self, bookings: Iterable[ActiveRequest]) -> Iterator[ActiveRequest]:
        return (booking for booking in bookings if booking.request_id not in self._foreign)

    def _place(self, booked: ActiveRequest) -> tuple[str, int, int]:
        ref = self._service.router.registry.ref(booked.slot)
        return booked.request_id, ref.worker_id, ref.dp_rank

    def _sequence_added(self, change: Booked) -> SequenceAdded:
        config = self._service.router.config
        hashes = tuple(change.sequence_hashes)
        if change.anonymous_blocks:
            # Only their number is useful, as in Dynamo without assumed reuse.
            hashes = tuple(random.getrandbits(64) for _ in range(change.anonymous_blocks))
        tracked = change.stage != "decode" and config.router_track_prefill_tokens
        return SequenceAdded(
            change.request_id,
            change.worker_id,
            change.dp_rank,
            hashes or None,
            change.prefill_tokens,
            self._id,
            None,
            tracked or change.prefill_tokens > 0,
            expected_prefill_s=change.predicted_s,
        )

    def _booked_now(self, booked: ActiveRequest) -> SequenceAdded:
        """The event that books a request as it is now."""
        return self._sequence_added(
            Booked(
                booked.request_id,
                booked.stage,
                *self._place(booked)[1:],
                prefill_tokens=booked.prefill_tokens,
                sequence_hashes=booked.sequence_hashes,
                anonymous_blocks=booked.anonymous_blocks,
                predicted_s=booked.predicted_s,
            )
        )

    def _queue(self, event: SequenceEvent) -> None:
        if len(self._pending) >= MOST_PENDING:
            self.missed["dropped"] += 1
            self._note_drop()
            return
        self._pending.append(event)
        if not self._flushing:
            self._flushing = True
            self._later(BATCH_S, self.flush)
        elif len(self._pending) == BATCH_EVENTS:
            self._later(0, self.flush)

    def flush(self) -> None:
        """Send what waits."""
        self._flushing = False
        while self._pending:
            batch: list[SequenceEvent] = []
            hashes = 0
            while self._pending and len(batch) < (BATCH_EVENTS if self.batched else 1):
                event = self._pending[0]
                hashes += len(_hashes(event))
                if batch and hashes > BATCH_HASHES:
                    break
                batch.append(self._pending.popleft())
            if self._emit(batch):
                for event in batch:
                    self.events["sent", kind_of(event)] += 1
            else:
                self.missed["dropped"] += len(batch)


class ReplicaSync(SharedBookings):
    """Shares the load of ``service`` with other routers over ``plane``.

    ``router_id`` (u64) and ``name`` are this router's. ``later(seconds, call)`` runs a call in the
    event loop. `beat` runs every ALIVE_S seconds.
    """

    def __init__(
        self,
        service: RoutingService,
        plane: ReplicaPlane,
        *,
        router_id: int,
        name: str,
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        super().__init__(service, router_id, later)
        self.plane = plane
        self.batched = plane.batched
        self.name = name
        self._began = service.clock()
        self._peers: dict[int, _Peer] = {}
        self._heard: dict[str, float] = {}
        self._unused: set[str] = set()  # listed addresses reported as silent
        self._numbers: Counter[str] = Counter()
        self._resend_at = float("-inf")
        self._resending = False
        self._parts: deque[ReplicaMessage] = deque()
        service.share_load(self)

    # -- what this router does -----------------------------------------------------------------

    def before(self, change: Change) -> None:
        super().before(change)
        if isinstance(change, WorkerLost):
            for peer in self._peers.values():
                for key, held in peer.bookings.items():
                    if key[1] == change.worker_id:
                        held.applied = False

    def after(self, change: Change) -> None:
        """Publish a booking; request those on a worker that was unknown before."""
        super().after(change)
        if isinstance(change, WorkerUpserted):
            worker_id = change.worker.worker_id
            for peer in self._peers.values():
                held = peer.bookings.items()
                if any(key[1] == worker_id and not change.applied for key, change in held):
                    peer.in_step = False

    def keep_alive(self) -> None:
        """Renew the bookings of the routers that run, before those without progress expire."""
        for peer in self._peers.values():
            if not peer.silent:
                for held in peer.bookings.values():
                    if held.applied:
                        self._service.apply(Progressed(held.booking_id))

    # -- sending -------------------------------------------------------------------------------

    def _emit(self, batch: list[SequenceEvent]) -> bool:
        payload = encode_sequences(batch, batched=self.batched)
        return self._send(ACTIVE_SEQUENCES, payload)

    def _note_drop(self) -> None:
        self._numbers[ACTIVE_SEQUENCES] += 1  # the others see that something is missing

    def _send(self, topic: str, payload: bytes) -> bool:
        number = self._numbers[topic]
        self._numbers[topic] = number + 1
        at = int(self._service.wall() * 1000)
        return self.plane.publish(Envelope(self._id, number, at, topic, payload))

    def beat(self) -> None:
        """Report that this router runs, request what is missing, notice who is silent."""
        now = self._clock()
        for peer in list(self._peers.values()):
            self._judge(peer, now)
        self._judge_addresses(now)
        wants = []
        for peer in self._peers.values():
            if not peer.in_step and not peer.silent and now - peer.asked_at >= REQUEST_S:
                peer.asked_at = now
                wants.append(peer.router_id)
        self.flush()
        self._report("alive", wants)

    def leave(self) -> None:
        """Report that this router and its requests end."""
        self.flush()
        self._report("leaving", [])

    def _report(self, kind: str, wants: list[int]) -> None:
        leaving = kind == "leaving"
        message = ReplicaMessage(
            "leaving" if leaving else "alive",
            self.name,
            self._last_sent,
            sum(1 for _ in self._own(self._service.router.load)),
            wants,
        )
        self._send(REPLICAS, encode_replica_message(message))

    @property
    def _last_sent(self) -> int | None:
        return self._numbers[ACTIVE_SEQUENCES] - 1 if self._numbers[ACTIVE_SEQUENCES] else None

    def _resend(self) -> None:
        """Send all bookings, in parts: one for each turn of the event loop."""
        self._resending = False
        self._resend_at = self._clock()
        self.flush()
        batches: list[list[SequenceAdded]] = [[]]
        hashes = 0
        for booked in self._own(self._service.router.load):
            event = self._booked_now(booked)
            hashes += len(event.token_sequence or ())
            if batches[-1] and (len(batches[-1]) >= BATCH_EVENTS or hashes > BATCH_HASHES):
                batches.append([])
                hashes = len(event.token_sequence or ())
            batches[-1].append(event)
        count = sum(map(len, batches))
        self._parts.clear()
        for part, batch in enumerate(batches):
            self._parts.append(
                ReplicaMessage(
                    "bookings",
                    self.name,
                    self._last_sent,
                    count,
                    part=part,
                    parts=len(batches),
                    events=encode_sequences(batch),
                )
            )
        self._send_part()

    def _send_part(self) -> None:
        if self._parts:
            self._send(REPLICAS, encode_replica_message(self._parts.popleft()))
            if self._parts:
                self._later(0, self._send_part)

    # -- receiving -----------------------------------------------------------------------------

    def take(self, address: str, value: ChannelValue) -> None:
        """Take what the plane received at an address of another router (empty: shared by all)."""
        if isinstance(value, ChannelCondition):
            self._condition(value)
            return
        self._heard[address] = self._clock()
        if value.publisher_id == self._id:
            return
        peer = self._peer(value.publisher_id, address)
        if peer is None:
            self.missed["too_many"] += 1
            return
        if peer.address != address:
            return  # another name of an address that is read already
        peer.heard_at = self._clock()
        if peer.silent:
            peer.silent = peer.in_step = False
        try:
            if value.topic == ACTIVE_SEQUENCES:
                self._events(peer, value)
            else:
                self._message(peer, decode_replica_message(value.payload))
        except WireError as error:
            self.missed["malformed"] += 1
            self._behind(peer, 0, f"a message of it is unreadable: {error}")

    def _condition(self, value: ChannelCondition) -> None:
        if value.code is ChannelCode.MALFORMED_MESSAGE:
            self.missed["malformed"] += value.count
        elif value.code is ChannelCode.EVENTS_DROPPED and value.topic == REPLICAS:
            # Those of events are counted by their numbers; here a part of the bookings may lack.
            peer = self._peers.get(value.publisher_id)
            if peer is not None:
                peer.given = None

    def _peer(self, router_id: int, address: str) -> _Peer | None:
        peer = self._peers.get(router_id)
        if peer is not None:
            return peer
        if len(self._peers) >= MOST_PEERS:
            return None
        if address:
            # One process has one address: the one before it ended, and its requests with it.
            for old in [peer for peer in self._peers.values() if peer.address == address]:
                self._forget(old)
        peer = _Peer(router_id, address, address or f"{router_id:016x}", self._clock())
        self._peers[router_id] = peer
        self._later(0, self._request_soon)
        return peer

    def _request_soon(self) -> None:
        if any(
            not peer.in_step and self._clock() - peer.asked_at >= REQUEST_S
            for peer in self._peers.values()
        ):
            self.beat()

    def _events(self, peer: _Peer, message: ChannelMessage) -> None:
        if peer.last is not None and message.sequence > peer.last + 1:
            missing = message.sequence - peer.last - 1
            self._behind(peer, missing, f"{missing:,} of its messages were lost")
        peer.last = max(message.sequence, -1 if peer.last is None else peer.last)
        for event in decode_sequences(message.payload):
            if event.router_id != self._id:
                self._event(peer, event, message.sequence)

    def _event(self, peer: _Peer, event: SequenceEvent, number: int) -> None:
        key = (event.request_id, event.worker_id, event.dp_rank)
        self.events["received", kind_of(event)] += 1
        match event:
            case SequenceAdded():
                freed = peer.freed.pop(key, None)
                if freed is not None and freed[2] and self._clock() - freed[1] <= EARLY_S:
                    self.missed["early_free"] += 1
                elif key not in peer.bookings:
                    self._book(peer, key, event, number)
            case SequencePrefillDone():
                held = peer.bookings.get(key)
                if held is not None and held.applied:
                    self._service.apply(PrefillDone(held.booking_id))
            case SequenceFreed():
                held = peer.bookings.get(key)
                if held is not None:
                    self._free(peer, key, held)
                while len(peer.freed) >= MOST_FREED:
                    del peer.freed[next(iter(peer.freed))]
                peer.freed.pop(key, None)
                early = held is None and peer.in_step and number > peer.synced_to
                peer.freed[key] = (number, self._clock(), early)
            case SequenceUnknown():
                self.missed["unknown_kind"] += 1

    def _book(self, peer: _Peer, key: _Key, event: SequenceAdded, number: int) -> None:
        booking_id = f"{peer.router_id:016x}/{event.worker_id:x}.{event.dp_rank}/{key[0]}"
        applied = self._mirror(peer.share, booking_id, event)
        if applied is not None:
            peer.bookings[key] = _Mirrored(booking_id, number, applied)

    def _free(self, peer: _Peer, key: _Key, held: _Mirrored) -> None:
        del peer.bookings[key]
        self._service.apply(Freed(held.booking_id))
        self._dismiss(held.booking_id)

    def _message(self, peer: _Peer, message: ReplicaMessage) -> None:
        self._name_peer(peer, message.name)
        if message.kind == "leaving":
            self._forget(peer)
            return
        if message.kind == "bookings":
            self._collect(peer, message)
            return
        self._compare(peer, message)
        if self._id in message.wants and not self._resending:
            self._resending = True
            self._later(max(0.0, self._resend_at + RESEND_S - self._clock()), self._resend)

    def _name_peer(self, peer: _Peer, name: str) -> None:
        if peer.name != name:
            self._clear(peer)
            peer.name = name
            self._replace_old(peer)

    def _replace_old(self, peer: _Peer) -> None:
        """A router that started again is a new one with the name of the old one, which is silent:
        a name alone ends no requests of a router that runs."""
        now = self._clock()
        for old in [one for one in self._peers.values() if one.name == peer.name]:
            if old is not peer and now - old.heard_at > _REPLACED_S >= now - peer.heard_at:
                self._forget(old)

    def _compare(self, peer: _Peer, message: ReplicaMessage) -> None:
        """Compare what a router reports with what arrived."""
        if peer.reported is not None and peer.last is not None and peer.last < peer.reported:
            missing = peer.reported - peer.last
            peer.last = peer.reported
            self._behind(peer, missing, f"{missing:,} of its messages were lost")
        peer.reported = message.sent
        held = len(peer.bookings)
        full = peer.share.over or len(self._foreign) >= MOST_BOOKINGS
        settled = peer.in_step and message.sent == peer.last and not full
        peer.mismatches = peer.mismatches + 1 if settled and held != message.requests else 0
        if peer.mismatches > 1:
            self._behind(peer, 0, f"it has {message.requests:,} requests, {held:,} arrived")

    def _collect(self, peer: _Peer, message: ReplicaMessage) -> None:
        """Take a part of all bookings of a router, as they were after its message ``sent``.

        Messages after it may have arrived before: what they added stays, what they freed is not
        booked again.
        """
        if message.part == 0:
            peer.given, peer.parts = set(), 0
        if peer.given is None or message.part != peer.parts:
            peer.given = None
            return
        sent = -1 if message.sent is None else message.sent
        for event in decode_sequences(message.events):
            if isinstance(event, SequenceAdded) and len(peer.given) < MOST_OF_ONE:
                key = (event.request_id, event.worker_id, event.dp_rank)
                peer.given.add(key)
                self._take_given(peer, key, event, sent)
        peer.parts += 1
        if peer.parts == message.parts:
            given, peer.given = peer.given, None
            self._replace_bookings(peer, given, sent)

    def _take_given(self, peer: _Peer, key: _Key, event: SequenceAdded, sent: int) -> None:
        known, freed = peer.bookings.get(key), peer.freed.get(key)
        if known is not None and not known.applied and known.number <= sent:
            self._free(peer, key, known)  # its worker may be known now
            known = None
        if freed is not None and freed[0] > sent:
            return
        if known is None:
            peer.freed.pop(key, None)
            self._book(peer, key, event, sent)
        elif known.applied and not event.prefill_tokens:
            self._service.apply(PrefillDone(known.booking_id))

    def _replace_bookings(self, peer: _Peer, given: set[_Key], sent: int) -> None:
        """All bookings of a router were taken: the others ended."""
        for key, held in list(peer.bookings.items()):
            if held.number <= sent and key not in given:
                self._free(peer, key, held)
        peer.last = sent if peer.last is None else max(peer.last, sent)
        peer.synced_to = sent
        peer.resyncs += 1
        peer.mismatches = 0
        peer.in_step = True
        self._service.clear_condition(codes.REPLICA_BEHIND, peer.name)

    # -- the others ----------------------------------------------------------------------------

    def _behind(self, peer: _Peer, missing: int, why: str) -> None:
        peer.lost += missing
        self.missed["lost"] += missing
        if peer.in_step:
            peer.in_step, peer.mismatches = False, 0
            message = f"{why}: its load is out of date until it sends its bookings again"
            self._service.set_condition(codes.REPLICA_BEHIND, peer.name, message)
            self._later(0, self._request_soon)

    def _judge(self, peer: _Peer, now: float) -> None:
        freed = takewhile(lambda item: now - item[1][1] > EARLY_S, peer.freed.items())
        for key, _ in list(freed):
            del peer.freed[key]
        age = now - peer.heard_at
        if age > self._service.router.config.active_request_expiry_secs:
            self._forget(peer)
        elif age > SILENT_S:
            peer.silent, peer.in_step = True, False
            self._service.clear_condition(codes.REPLICA_BEHIND, peer.name)
            self._service.set_condition(
                codes.REPLICA_SILENT,
                peer.name,
                f"nothing was received from it for more than {SILENT_S:g} s: what it sent to "
                f"workers until then ({_requests(len(peer.bookings))}) counts until it expires",
            )
        else:
            self._service.clear_condition(codes.REPLICA_SILENT, peer.name)
        self._judge_workers(peer)
        self._judge_share(peer.share, peer.name)
        if not peer.silent:
            self._replace_old(peer)

    def _judge_workers(self, peer: _Peer) -> None:
        """Report requests on workers that are unknown here, in two reports in a row."""
        unknown = [key[1] for key, held in peer.bookings.items() if not held.applied]
        if unknown and peer.strangers:
            named = ", ".join(f"{name:016x}" for name in sorted(set(unknown))[:3])
            self._service.set_condition(
                codes.REPLICA_WORKERS_DIFFER,
                peer.name,
                f"{_requests(len(unknown))} of it on workers that are unknown here (ids {named}): "
                "their load does not count",
            )
        elif not unknown:
            self._service.clear_condition(codes.REPLICA_WORKERS_DIFFER, peer.name)
        peer.strangers = bool(unknown)

    def _judge_addresses(self, now: float) -> None:
        """Report listed addresses at which no router was heard lately."""
        used = {peer.address for peer in self._peers.values()}
        for address in self.plane.addresses:
            if address in used or now - self._heard.get(address, self._began) <= SILENT_S:
                if address in self._unused:
                    self._unused.remove(address)
                    self._service.clear_condition(codes.REPLICA_SILENT, address)
            else:
                self._unused.add(address)
                never = address not in self._heard
                self._service.set_condition(
                    codes.REPLICA_SILENT,
                    address,
                    "no router was heard at this address"
                    + (" since this one started" if never else f" for more than {SILENT_S:g} s"),
                )

    def _forget(self, peer: _Peer) -> None:
        for key, held in list(peer.bookings.items()):
            self._free(peer, key, held)
        self._peers.pop(peer.router_id, None)
        self._clear(peer)

    def _clear(self, peer: _Peer) -> None:
        for code in _OF_PEERS:
            self._service.clear_condition(code, peer.name)

    def rows(self) -> list[ReplicaRow]:
        """The other routers: those that were heard, then addresses where none was."""
        now = self._clock()
        rows = []
        for peer in sorted(self._peers.values(), key=lambda one: one.name):
            rows.append(
                ReplicaRow(
                    peer.name,
                    f"{peer.router_id:016x}",
                    peer.address or None,
                    "silent" if peer.silent else "in step" if peer.in_step else "behind",
                    round(now - peer.heard_at, 3),
                    sum(held.applied for held in peer.bookings.values()),
                    peer.lost,
                    peer.resyncs,
                )
            )
        used = {peer.address for peer in self._peers.values()}
        for address in self.plane.addresses:
            heard = self._heard.get(address)
            if address in used or (heard is not None and now - heard <= SILENT_S):
                continue
            age = None if heard is None else round(now - heard, 3)
            state: Literal["silent", "never heard"] = "never heard" if heard is None else "silent"
            rows.append(ReplicaRow(address, None, address, state, age))
        return rows

    def out_of_date(self) -> str:
        """The routers whose load here is out of date, with the reason; empty if none."""
        late = [row for row in self.rows() if row.state != "in step"]
        return ", ".join(f"{row.name} ({row.state})" for row in late[:3])


def _requests(number: int) -> str:
    return f"{number:,} request{'s' * (number != 1)}"


def _hashes(event: SequenceEvent) -> tuple[int, ...]:
    return (event.token_sequence or ()) if isinstance(event, SequenceAdded) else ()
