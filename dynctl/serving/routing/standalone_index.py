"""An index of its own: engines that are registered by the address of their KV events, and matches.

It has no router: no load, no decisions. Engines of one model and routing group share an index
(a partition) with one block size. Blocks count as in Dynamo's indexer, so a block that an engine
stored twice is gone with the first removal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dynctl.adapters.ports import StreamCode, StreamCondition
from dynctl.adapters.zmq.kv_event_source import EndpointError, KvEventSource, dialable_endpoint
from dynctl.base.tasks import Supervisor
from dynctl.documents.index_dump import RankDump, RegisteredRank, chains_of
from dynctl.health import conditions as codes
from dynctl.health.conditions import Conditions
from dynctl.serving.routing.index_runtime import IndexRuntime, IndexSeed
from dynctl.wire.dynamo.events import RouterEvent
from router_core import (
    DEVICE,
    OK,
    TIERS,
    Applied,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    Change,
    Cleared,
    KvEvent,
    LowerTiers,
    PrefixIndex,
    WindowStored,
    sequence_hashes,
)

_log = logging.getLogger(__name__)

DEFAULT_GROUP: Final = "default"
#: Ranks of all engines: each has two sockets, and three descriptors of the process.
MOST_RANKS: Final = 4_096
DESCRIPTORS_PER_RANK: Final = 3
MOST_PARTITIONS: Final = 1024
#: Stored blocks after which the size of the whole index is compared with its bound.
_COMPARED_EVERY: Final = 4096

Key = tuple[str, str]
"""Model and routing group."""


class RegistrationRefused(ValueError):
    """An engine that cannot be registered or unregistered. ``missing``: it is not there."""

    def __init__(self, text: str, *, missing: bool = False) -> None:
        super().__init__(text)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Listener:
    """Where one rank publishes its KV events, and where it repeats them (None: nowhere)."""

    endpoint: str
    replay: str | None = None


@dataclass(slots=True)
class Instance:
    """An engine: its partition and the listener of each of its ranks."""

    instance_id: int
    key: Key
    block_size: int
    listeners: dict[int, Listener] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks of a prompt that a rank holds: on the device, and in what continues them."""

    instance_id: int
    dp_rank: int
    device: int
    host: int
    disk: int


class Partition:
    """The index of one model and routing group. Slots are those of (instance, rank).

    ``pairs``: its engines publish pairs of tokens (SGLang with EAGLE).
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.pairs = False
        self.index = PrefixIndex()
        self.tiers = LowerTiers()
        self.slots: dict[tuple[int, int], int] = {}
        self._refs: dict[int, tuple[int, int]] = {}
        self._free: list[int] = []
        self._draining: list[int] = []
        self._next = 0

    @property
    def size(self) -> int:
        """Entries that take memory."""
        return self.index.table_size + self.tiers.total_blocks

    def rank_size(self, ref: tuple[int, int]) -> int:
        slot = self.slots[ref]
        return self.index.block_count(slot) + sum(self.tiers.block_count(slot))

    def slot(self, ref: tuple[int, int]) -> int:
        """The slot of a rank, a new one if it has none."""
        slot = self.slots.get(ref)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._next = self._next, self._next + 1
            self.slots[ref] = slot
            self._refs[slot] = ref
        return slot

    def drop(self, ref: tuple[int, int]) -> None:
        """Forget a rank; :meth:`sweep` frees its blocks."""
        slot = self.slots.pop(ref, None)
        if slot is not None:
            del self._refs[slot]
            self.index.begin_drop(slot)
            self.tiers.clear(slot)
            self._draining.append(slot)

    def sweep(self, max_blocks: int) -> bool:
        """Free some blocks of forgotten ranks; True while there are more."""
        more = self.tiers.sweep(max_blocks)
        if self._draining:
            self.index.sweep(max_blocks)
            left = [slot for slot in self._draining if not self.index.is_free(slot)]
            self._free += [slot for slot in self._draining if self.index.is_free(slot)]
            self._draining = left
        return more or bool(self._draining)

    def apply(self, ref: tuple[int, int], event: CacheEvent) -> None:
        """Apply an event of a rank. One that the index cannot use changes nothing."""
        slot = self.slot(ref)
        if isinstance(event, Cleared):
            self.index.clear(slot)
            self.tiers.clear(slot)
        elif event.tier != DEVICE:
            if event.tier not in TIERS or isinstance(event, WindowStored):
                return
            if isinstance(event, BlocksRemoved):
                self.tiers.remove(slot, event.tier, event.block_hashes)
            elif len(event.block_hashes) == len(event.local_hashes):
                names, hashes = event.block_hashes, event.local_hashes
                self.tiers.store(slot, event.tier, event.parent_hash, names, hashes)
        elif isinstance(event, BlocksStored):
            names, hashes = event.block_hashes, event.local_hashes
            self.index.store(slot, event.parent_hash, names, hashes, event.group)
        elif isinstance(event, WindowStored):
            self.index.store_window(slot, event.group, event.block_hashes, event.needed, event.span)
        else:
            self.index.remove(slot, event.block_hashes, event.group)

    def copy(self) -> Partition:
        """An independent copy for reading: 0.1 s for a million blocks."""
        made = Partition(self.block_size)
        made.pairs = self.pairs
        made.index, made.tiers = self.index.copy(), self.tiers.copy()
        made.slots, made._refs = self.slots.copy(), self._refs.copy()
        return made

    def matches(self, local_hashes: Sequence[int]) -> Iterator[Match]:
        """The ranks that hold the prompt's first block, in any tier."""
        held = dict(self.index.find_matches_local(local_hashes).items())
        hashes = sequence_hashes(local_hashes) if self.tiers.mask else []
        for slot, ref in self._refs.items():
            depth, host, disk = held.get(slot, 0), 0, 0
            if self.tiers.mask >> slot & 1:
                parent = self.index.name_of(slot, hashes[:depth]) if depth else None
                host, disk = self.tiers.extend(slot, parent, local_hashes, depth)
            if depth or host or disk:
                yield Match(*ref, depth, host, disk)

    def events(self) -> Iterator[RouterEvent]:
        """The events that make this index of an empty one."""
        lower: dict[int, list[BlocksStored]] = {}
        for row in self.tiers.dump():
            for parent, local, name in row["blocks"]:
                one = BlocksStored(parent, (name,), (local,), tier=row["tier"])
                lower.setdefault(row["slot"], []).append(one)
        number = 0
        for (instance_id, rank), slot in self.slots.items():
            for event in (*self.index.stored_events(slot), *lower.get(slot, ())):
                yield RouterEvent(instance_id, rank, number, event, event.tier)
                number += 1


class StandaloneIndex:
    """The partitions, the engines, and the streams of their KV events.

    ``clock``: monotonic seconds; ``wall``: seconds since 1970. ``most_blocks`` bounds all
    partitions together: above it the largest rank starts again. ``most_ranks`` bounds the ranks.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        wall: Callable[[], float],
        tasks: Supervisor,
        most_blocks: int,
        most_ranks: int = MOST_RANKS,
    ) -> None:
        self._most_ranks = most_ranks
        self.instances: dict[int, Instance] = {}
        self.partitions: dict[Key, Partition] = {}
        self.conditions = Conditions(wall)
        self.runtime = IndexRuntime(self._apply, self._sweep, self._report, clock, tasks)
        #: (kind of event) -> how many were applied.
        self.applied = {"stored": 0, "removed": 0, "cleared": 0}
        self._most_blocks = most_blocks
        self._stored = 0
        self._leaving: list[Partition] = []

    # -- engines ---------------------------------------------------------------------------

    def register(
        self, instance_id: int, dp_rank: int, key: Key, block_size: int, listener: Listener
    ) -> None:
        """Follow a rank of an engine. Raises RegistrationRefused, with Dynamo's texts."""
        known, partition = self.instances.get(instance_id), self.partitions.get(key)
        if known is not None and known.key != key:
            raise RegistrationRefused(
                f"instance {instance_id} is already registered for {written(known.key)}"
            )
        if known is not None and dp_rank in known.listeners:
            raise RegistrationRefused(
                f"instance {instance_id} dp_rank {dp_rank} already registered"
            )
        if partition is not None and partition.block_size != block_size:
            raise RegistrationRefused(
                f"block_size mismatch for {written(key)}: existing={partition.block_size}, "
                f"requested={block_size}"
            )
        if sum(len(instance.listeners) for instance in self.instances.values()) >= self._most_ranks:
            raise RegistrationRefused(f"{self._most_ranks:,} ranks are registered, the maximum")
        if partition is None and len(self.partitions) >= MOST_PARTITIONS:
            raise RegistrationRefused(f"{MOST_PARTITIONS:,} models are registered, the maximum")
        source = KvEventSource(
            instance_id,
            listener.endpoint,
            block_size,
            dp_rank,
            listener.replay,
            salt_each_block=True,
        )
        if block_size:  # without blocks there is nothing to index; Dynamo takes such an engine too
            try:
                self.runtime.follow(source, f"instance {instance_id}")
            except EndpointError as error:
                raise RegistrationRefused(str(error)) from None
        if partition is None:
            self.partitions[key] = Partition(block_size)
        if known is None:
            known = self.instances[instance_id] = Instance(instance_id, key, block_size)
        known.listeners[dp_rank] = listener

    def unregister(self, instance_id: int, key: Key | None, dp_rank: int | None = None) -> None:
        """Forget a rank of an engine, or all of them. ``key`` None: of any partition.

        Raises RegistrationRefused, with Dynamo's texts.
        """
        known = self.instances.get(instance_id)
        if known is None:
            raise RegistrationRefused(f"instance {instance_id} not found", missing=True)
        if key is not None and known.key != key:
            raise RegistrationRefused(
                f"instance {instance_id} is registered for {written(known.key)}", missing=True
            )
        if dp_rank is not None and dp_rank not in known.listeners:
            raise RegistrationRefused(
                f"instance {instance_id} dp_rank {dp_rank} not found", missing=True
            )
        partition = self.partitions[known.key]
        if dp_rank is not None and len(known.listeners) > 1:
            del known.listeners[dp_rank]
            self.runtime.unfollow(instance_id, dp_rank)
            partition.drop((instance_id, dp_rank))
        else:
            del self.instances[instance_id]
            self.runtime.unfollow(instance_id)
            for ref in [ref for ref in partition.slots if ref[0] == instance_id]:
                partition.drop(ref)
            self._leave(known.key)
        for code in [condition.code for condition in self.conditions]:
            for rank in known.listeners if dp_rank is None else (dp_rank,):
                self.conditions.clear(code, _subject(instance_id, rank))
        self.runtime.request_sweep()

    def _leave(self, key: Key) -> None:
        if all(instance.key != key for instance in self.instances.values()):
            self._leaving.append(self.partitions.pop(key))

    # -- answers ---------------------------------------------------------------------------

    def matches(self, key: Key, local_hashes: Sequence[int]) -> list[Match]:
        """The ranks of a partition that hold the start of a prompt; KeyError without it."""
        return list(self.partitions[key].matches(local_hashes))

    def take(self, key: Key, block_size: int, events: Iterable[RouterEvent]) -> int:
        """Apply events of another indexer's dump; returns how many. Only for a new partition, and
        for engines whose streams have applied nothing yet."""
        partition = self.partitions.get(key)
        if partition is None or partition.block_size != block_size:
            return 0
        taken = 0
        for event in events:
            known = self.instances.get(event.worker_id)
            if known is not None and known.key == key and isinstance(event.event, BlocksStored):
                partition.apply((event.worker_id, event.dp_rank), event.event)
                taken += 1
        return taken

    # -- snapshots -------------------------------------------------------------------------

    def registered(self) -> list[RegisteredRank]:
        """All ranks that are followed."""
        return [
            RegisteredRank(
                instance.instance_id,
                rank,
                *instance.key,
                instance.block_size,
                listener.endpoint,
                listener.replay,
            )
            for instance in self.instances.values()
            for rank, listener in instance.listeners.items()
        ]

    async def capture(self, timeout_s: float) -> Iterator[RankDump]:
        """The ranks whose stream is connected and complete, as they are now; encoded when read,
        which another thread may do.

        Raises TimeoutError if events arrive faster than they are applied. Takes 0.3 s for a million
        blocks.
        """
        async with asyncio.timeout(timeout_s):
            await self.runtime.drained()
        rows: list[tuple[Key, tuple[int, int], int, tuple[str, int, int]]] = []
        for instance in self.instances.values():
            partition = self.partitions[instance.key]
            for rank in instance.listeners:
                ref = (instance.instance_id, rank)
                slot, position = partition.slots.get(ref), self.runtime.position(*ref)
                # Windows of several cache groups are left to the engine.
                if slot is not None and position and not partition.index.has_groups(slot):
                    rows.append((instance.key, ref, slot, position))
        return _encoded(rows, self.copies())

    def copies(self) -> dict[Key, Partition]:
        """Copies of the partitions for reading, which another thread may do."""
        return {key: partition.copy() for key, partition in self.partitions.items()}

    def seed(self, ranks: Iterable[RankDump]) -> int:
        """Begin the streams that are registered next with these ranks; returns their blocks."""
        blocks = 0
        for rank in ranks:
            self.runtime.seeds[rank.worker_id, rank.dp_rank] = IndexSeed(
                rank.endpoint, rank.block_size, rank.sequence, rank.digest, rank.events
            )
            blocks += rank.blocks
        return blocks

    # -- inside ----------------------------------------------------------------------------

    def _apply(self, change: Change) -> Applied:
        if not isinstance(change, KvEvent):
            return OK
        instance = self.instances.get(change.worker_id)
        if instance is None:
            return OK
        event = change.event
        if isinstance(event, BlocksStored) and event.counted:
            event = replace(event, counted=False)
        partition, ref = self.partitions[instance.key], (change.worker_id, change.dp_rank)
        partition.apply(ref, event)
        if isinstance(event, Cleared):
            self.applied["cleared"] += 1
        elif isinstance(event, BlocksRemoved):
            self.applied["removed"] += 1
        else:
            self.applied["stored"] += 1
            self._stored += len(event.block_hashes)
            if self._stored >= _COMPARED_EVERY:
                self._stored = 0
                self._keep_within_bound()
        return OK

    def _keep_within_bound(self) -> None:
        total = sum(partition.size for partition in self.partitions.values())
        if total <= self._most_blocks:
            return
        sizes = {
            (partition.rank_size(ref), ref, partition)
            for partition in self.partitions.values()
            for ref in partition.slots
        }
        size, ref, partition = max(sizes, key=lambda row: row[0])
        partition.drop(ref)
        self.runtime.request_sweep()
        why = (
            f"all ranks have {total:,} blocks, expected at most {self._most_blocks:,}; this one "
            f"had the most, {size:,}, and starts again"
        )
        self._condition(codes.INDEX_OVER_LIMIT, _subject(*ref), why)

    def _sweep(self, max_blocks: int) -> bool:
        more = False
        for partition in (*self.partitions.values(), *self._leaving):
            more = partition.sweep(max_blocks) or more
        self._leaving = [leaving for leaving in self._leaving if leaving.index.table_size]
        return more

    def _report(self, condition: StreamCondition) -> None:
        if condition.code in (StreamCode.PAIRS_PUBLISHED, StreamCode.TOKENS_PUBLISHED):
            instance = self.instances.get(condition.worker_id)
            if instance is not None:
                pairs = condition.code == StreamCode.PAIRS_PUBLISHED
                self.partitions[instance.key].pairs = pairs
            return
        for rank in condition.ranks:
            subject = _subject(condition.worker_id, rank)
            for code in _ENDED_BY.get(condition.code, ()):
                self.conditions.clear(code, subject)
            if condition.code not in _RECOVERIES:
                self._condition(str(condition.code), subject, condition.message)

    def _condition(self, code: str, subject: str, message: str) -> None:
        changed = self.conditions.set(code, subject, message) is not None
        if changed and self.conditions.may_log(code, subject):
            _log.warning("%s %s: %s", code, subject, message)


def _encoded(
    rows: list[tuple[Key, tuple[int, int], int, tuple[str, int, int]]],
    copies: Mapping[Key, Partition],
) -> Iterator[RankDump]:
    lower: dict[tuple[Key, int], dict[str, list[tuple[int | None, int, int]]]] = {}
    for key, partition in copies.items():
        for row in partition.tiers.dump():
            blocks = [(parent, block, name) for parent, block, name in row["blocks"]]
            lower.setdefault((key, row["slot"]), {})[row["tier"]] = blocks
    for key, ref, slot, position in rows:
        try:
            chains = chains_of(copies[key].index, slot)
        except OverflowError:
            continue  # names that are no hashes: the engine has to be read
        held = lower.get((key, slot), {})
        size = copies[key].block_size
        endpoint, sequence, digest = position
        holes = copies[key].index.holes(slot)
        yield RankDump(
            *ref, key[0], size, endpoint, sequence, digest, chains, lower=held, holes=holes
        )


_RECOVERIES: Final = frozenset(
    (
        StreamCode.EVENTS_KEPT_UP,
        StreamCode.INDEX_CURRENT,
        StreamCode.REPLAY_AVAILABLE,
        StreamCode.STREAM_CONNECTED,
    )
)
#: Code of a stream that recovered -> the conditions that end.
_ENDED_BY: Final[dict[str, tuple[str, ...]]] = {
    StreamCode.INDEX_CURRENT: (StreamCode.EVENTS_LOST,),
    StreamCode.EVENTS_KEPT_UP: (StreamCode.EVENTS_OVERFLOW,),
    StreamCode.REPLAY_AVAILABLE: (StreamCode.REPLAY_UNAVAILABLE,),
    StreamCode.STREAM_CONNECTED: (StreamCode.STREAM_DISCONNECTED,),
    StreamCode.ENGINE_RESTARTED: (
        *(StreamCode.EVENTS_LOST, StreamCode.EVENTS_OVERFLOW, StreamCode.MALFORMED_BATCH),
    ),
}


def checked_listener(endpoint: str, replay: str | None) -> str | None:
    """What is wrong with the addresses of a rank, in Dynamo's words; None if nothing is."""
    problem = endpoint_problem(endpoint)
    if problem is not None:
        return problem
    if replay is None:
        return None
    problem = endpoint_problem(replay)
    return None if problem is None else f"invalid replay endpoint `{replay[:200]}`: {problem}"


def endpoint_problem(endpoint: str) -> str | None:
    """What is wrong with an address of KV events, in Dynamo's words; None if nothing is."""
    start = f"invalid ZMQ endpoint `{endpoint[:200]}`: "
    scheme, found, address = endpoint.partition("://")
    if not found:
        return f"{start}missing scheme"
    if not address:
        return f"{start}missing address"
    if scheme not in ("tcp", "ipc", "inproc"):
        return f"{start}unsupported scheme `{scheme[:40]}`"
    if scheme == "tcp":
        port = address.rpartition(":")[2] if ":" in address else ""
        if ":" not in address:
            return f"{start}missing TCP port"
        if not port.isascii() or not port.isdigit():
            kind = "cannot parse integer from empty string" if not port else "invalid digit found"
            return f"{start}invalid TCP port: {kind}{'' if not port else ' in string'}"
        if int(port[:8]) > 65535:
            return f"{start}invalid TCP port: number too large to fit in target type"
    try:
        dialable_endpoint(endpoint)
    except EndpointError as error:
        return f"{start}{error}"
    return None


def written(key: Key) -> str:
    """A model and its routing group as in Dynamo's errors."""
    return f"model={key[0]} routing_group={key[1]}"


def _subject(instance_id: int, dp_rank: int) -> str:
    return f"instance {instance_id} rank {dp_rank}"
