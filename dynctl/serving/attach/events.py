"""The KV events of an engine's rank as Dynamo's workers publish them, with their recovery.

The engine's events arrive as changes of the index (:mod:`dynctl.adapters.zmq.kv_events`). vLLM
reports every copy of a block; subscribers get its first store and its last removal, as from
Dynamo's own workers. The last events and a tree of their result answer ``worker_kv_query``.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

from dynctl.adapters.dynamo.publishing import TopicPublisher
from dynctl.adapters.dynamo.request_server import PlaneRequest
from dynctl.adapters.ports import IndexUpdate, StreamCondition, StreamValue
from dynctl.wire.dynamo.discovery import EndpointId
from dynctl.wire.dynamo.events import RouterEvent, encode_router_events
from dynctl.wire.dynamo.recovery import RecoveryQuery, encode_dump, encode_events
from router_core import BlocksRemoved, BlocksStored, CacheEvent, Cleared

KEPT_EVENTS: Final = 1024
"""As Dynamo's local indexer."""
MAX_BLOCKS: Final = 8 * 1024 * 1024
"""Blocks of one rank on all tiers; an engine has fewer."""

_log = logging.getLogger(__name__)

PlainEvent = BlocksStored | BlocksRemoved | Cleared


class BlockTree:
    """The blocks of one rank: engine's name -> (parent's name, local hash), for each tier.

    Names of blocks are u64. Copies of a block are counted for each cache group.
    """

    def __init__(self) -> None:
        self._tiers: dict[str, dict[int, tuple[int | None, int]]] = {}
        self._copies: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))

    def apply(self, event: CacheEvent) -> Iterable[PlainEvent]:
        """What subscribers have to hear of this event; nothing of one that changes no block."""
        if isinstance(event, Cleared):
            self._tiers.clear()
            self._copies.clear()
            return (event,)
        if isinstance(event, BlocksStored):
            return self._store_blocks(event)
        if isinstance(event, BlocksRemoved):
            return self._remove_blocks(event)
        return ()  # blocks of a sliding window: Dynamo's events do not describe them

    def _store_blocks(self, event: BlocksStored) -> Iterable[PlainEvent]:
        blocks = self._tiers.setdefault(event.tier, {})
        parent, news = event.parent_hash, False
        for name, local in zip(event.block_hashes, event.local_hashes, strict=True):
            if event.counted or name not in blocks:
                self._copies[event.tier, name] += 1
            if name not in blocks:
                blocks[name] = (parent, local)
                news = True
            parent = name
        return (event,) if news else ()

    def _remove_blocks(self, event: BlocksRemoved) -> Iterable[PlainEvent]:
        blocks = self._tiers.get(event.tier, {})
        gone = []
        for name in event.block_hashes:
            left = self._copies[event.tier, name] - 1
            if left > 0:
                self._copies[event.tier, name] = left
                continue
            del self._copies[event.tier, name]
            if blocks.pop(name, None) is not None:
                gone.append(name)
        return (BlocksRemoved(tuple(gone), event.tier),) if gone else ()

    def copy(self) -> dict[str, dict[int, tuple[int | None, int]]]:
        return {tier: dict(blocks) for tier, blocks in self._tiers.items()}


def dump_of(tiers: Mapping[str, Mapping[int, tuple[int | None, int]]]) -> list[BlocksStored]:
    """Chains of blocks, parents first; blocks whose parent is gone cannot be reached and are left
    out."""
    events = []
    for tier, blocks in tiers.items():
        children: dict[int | None, list[int]] = {}
        for name, (parent, _) in blocks.items():
            children.setdefault(parent, []).append(name)
        starts: list[tuple[int | None, int]] = [(None, name) for name in children.get(None, ())]
        while starts:
            parent, first = starts.pop()
            chain = [first]
            while len(following := children.get(chain[-1], [])) == 1:
                chain.append(following[0])
            locals_ = [blocks[name][1] for name in chain]
            events.append(BlocksStored(parent, chain, locals_, tier))
            starts += [(chain[-1], name) for name in following]
    return events


class RankEvents:
    """One rank's publisher, with its numbers, tree and last events.

    ``worker_id`` is set when the worker is registered, and changes with its registration.
    """

    def __init__(self, publisher: TopicPublisher, dp_rank: int) -> None:
        self.publisher = publisher
        self.dp_rank = dp_rank
        self.worker_id: int | None = None
        self.tree = BlockTree()
        self.last_event_id = 0
        self._kept: deque[tuple[int, PlainEvent]] = deque(maxlen=KEPT_EVENTS)

    def recovery_endpoint(self, scope: EndpointId) -> EndpointId:
        """The endpoint that answers queries of missed events."""
        name = f"worker_kv_query_source_{self.publisher.channel.publisher_id:x}"
        return EndpointId(scope.namespace, scope.component, name)

    def take(self, value: StreamValue) -> None:
        """Publish what a value of the engine's stream changes."""
        events: Iterable[CacheEvent] = ()
        if isinstance(value, IndexUpdate):
            events = value.events
        elif isinstance(value, StreamCondition) and value.clears:
            events = (Cleared(),)
        self.publish(change for event in events for change in self.tree.apply(event))
        if len(self.tree) > MAX_BLOCKS:
            _log.error("rank %d has more than %s blocks; starting again", self.dp_rank, MAX_BLOCKS)
            self.publish(self.tree.apply(Cleared()))

    def publish(self, changes: Iterable[PlainEvent]) -> None:
        batch = []
        for change in changes:
            self.last_event_id += 1
            self._kept.append((self.last_event_id, change))
            batch.append((self.last_event_id, change))
        if batch and self.worker_id is not None:
            self.publisher.publish(encode_router_events(self._router_events(batch)))

    async def answer(self, request: PlaneRequest) -> AsyncIterator[Any]:
        """The handler of the recovery endpoint; bodies are RecoveryQuery."""
        query: RecoveryQuery = request.body
        yield await self._answer(query)

    async def _answer(self, query: RecoveryQuery) -> Any:
        if query.worker_id != self.worker_id:
            return _mismatch("worker_id", query.worker_id, self.worker_id)
        if query.dp_rank != self.dp_rank:
            return _mismatch("dp_rank", query.dp_rank, self.dp_rank)
        start, end, newest = query.start_event_id, query.end_event_id, self.last_event_id
        if start is not None and end is not None and end < start:
            return {"InvalidRange": {"start_id": start, "end_id": end}}
        if start is not None and start > newest:
            fields = {"requested_start": start, "requested_end": end, "newest_available": newest}
            return {"TooNew": fields}
        if start is not None and self._kept and start >= self._kept[0][0]:
            kept = [pair for pair in self._kept if pair[0] >= start]
            return encode_events(self._router_events(kept), newest)
        tiers = self.tree.copy()
        return await asyncio.to_thread(self._dump, tiers, newest)

    def _dump(self, tiers: dict[str, dict[int, tuple[int | None, int]]], newest: int) -> Any:
        chains: list[tuple[int, PlainEvent]] = list(enumerate(dump_of(tiers)))
        return encode_dump(self._router_events(chains), newest)

    def _router_events(self, batch: Iterable[tuple[int, PlainEvent]]) -> list[RouterEvent]:
        worker_id = self.worker_id
        assert worker_id is not None
        return [
            RouterEvent(worker_id, self.dp_rank, number, event, getattr(event, "tier", "device"))
            for number, event in batch
        ]


def _mismatch(name: str, requested: int, own: int | None) -> dict[str, str]:
    """As a real worker's answer."""
    problem = f"{name} mismatch: request.{name}={requested} this.{name}={own}"
    return {"Error": f"WorkerKvQueryEngine::generate {problem}"}
