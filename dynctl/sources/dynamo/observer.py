"""Follow a live deployment and keep a router's state as its own router has it.

Discovery says who is there, KV events and recovery what they cache, sequence events and reports
what they carry. Everything becomes a change of one :class:`Router`; questions are answered from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from dynctl.adapters.ports import (
    ChannelValue,
    Discovery,
    DiscoveryChange,
    EventPlane,
    Interrupted,
    Listed,
    RequestPlane,
    RequestPlaneError,
    StreamCondition,
)
from dynctl.base.tasks import Supervisor
from dynctl.documents.workers import StreamState
from dynctl.health.deployment import Deployment, ObservedWorker, Registrations
from dynctl.serving.index_runtime import IndexRuntime
from dynctl.sources.dynamo.load_mirror import LoadMirror
from dynctl.sources.dynamo.planes import watch_discovery
from dynctl.sources.dynamo.rank_index import RankIndex
from dynctl.wire.dynamo.active_sequences import SequenceEvent
from dynctl.wire.dynamo.discovery import EventChannel, EventSource, Instance
from dynctl.wire.dynamo.recovery import (
    RecoveryAnswer,
    TieredScores,
    indexer_query,
    parse_recovery,
    parse_scores,
    recovery_query,
)
from router_core import (
    Applied,
    BlockHashes,
    BlocksStored,
    Change,
    Expired,
    IndexMarked,
    KvEvent,
    Router,
    Worker,
    WorkerLost,
    WorkerUpserted,
    preset,
)

PRESET: Final = "dynamo-1.6"
"""Whose settings hold where nobody tells others."""
_EXPIRY_S: Final = 5.0
#: A subscription reaches its publisher a little after the connection does.
_SUBSCRIBED_S: Final = 0.05

Rank = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ObserverBounds:
    """``recoveries``: workers asked at a time. ``recovery_bytes``: of one worker's answer.

    ``recovery_s``: seconds that each part of an answer may take.
    """

    recoveries: int = 8
    recovery_bytes: int = 256 * 1024 * 1024
    recovery_s: float = 5.0


@dataclass(slots=True)
class _Follower:
    channel: EventChannel
    task: asyncio.Task[None]


@dataclass(slots=True)
class _FollowedRank:
    index: RankIndex
    source: EventSource
    channel: EventChannel | None
    tasks: list[asyncio.Task[None]]


@dataclass(slots=True)
class Asked:
    """What observing has cost so far, in questions and bytes of answers."""

    recoveries: int = 0
    indexers: int = 0
    recovery_bytes: int = 0


def live_router() -> Router:
    """A router that decides as a live Dynamo's does, which has no decode-capacity guard."""
    return Router(preset(PRESET).with_values({"decode_capacity_guard": False}))


class Observer:
    """One deployment. ``plane_of`` gives the event plane of a channel's transport.

    ``namespace``: Dynamo's; None for all. ``clock``: monotonic seconds. ``prefer``: a model whose
    workers are asked first. ``books`` False: requests that routers tell each other are not counted
    as load; ``on_sequence`` hears of them all the same. ``on_pass`` hears what engines tell of
    their schedulers, which is not followed where it is None. Use as an async context manager, or
    :meth:`start` and :meth:`close`.
    """

    def __init__(
        self,
        router: Router,
        discovery: Discovery,
        plane_of: Callable[[EventChannel], EventPlane],
        requests: RequestPlane,
        clock: Callable[[], float],
        *,
        namespace: str | None = None,
        prefer: str | None = None,
        follow_index: bool = True,
        follow_load: bool = True,
        books: bool = True,
        on_sequence: Callable[[SequenceEvent], None] = lambda event: None,
        on_pass: Callable[[ChannelValue], None] | None = None,
        on_condition: Callable[[StreamCondition], None] = lambda condition: None,
        on_change: Callable[[Change], None] = lambda change: None,
        bounds: ObserverBounds = ObserverBounds(),
    ) -> None:
        self.router = router
        self.discovery = discovery
        self.deployment = Deployment()
        self.asked = Asked()
        self._plane_of = plane_of
        self._requests = requests
        self._clock = clock
        self._namespace = namespace
        self._prefer = prefer
        self._follow_index = follow_index
        self._follow_load = follow_load
        self._on_change = on_change
        self._on_pass = on_pass
        self._bounds = bounds
        self._registrations = Registrations()
        self._asking = asyncio.Semaphore(bounds.recoveries)
        self._ranks: dict[Rank, _FollowedRank] = {}
        self._channels: dict[tuple[str, int], _Follower] = {}
        self.tasks = Supervisor()
        self.load = LoadMirror(
            router.registry, self.apply, clock, books=books, on_sequence=on_sequence
        )
        self.applier = IndexRuntime(self.apply, router.sweep, on_condition, clock, self.tasks)

    async def __aenter__(self) -> Observer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Read what is registered and begin to follow it. Raises Unreachable."""
        try:
            self._take(await self.discovery.list())
        except BaseException:
            await self.close()
            raise
        self.applier.start()
        self.tasks.start("discovery", partial(watch_discovery, self.discovery, self._take))
        self.tasks.start("booking expiry", self._expire)

    async def close(self) -> None:
        """Leaves no task, socket or thread."""
        await self.tasks.close()
        self._ranks.clear()
        self._channels.clear()
        await self.applier.close()
        await self._requests.close()
        await self.discovery.close()

    def apply(self, change: Change) -> Applied:
        """Take a change now."""
        self._on_change(change)
        return self.router.apply(change, self._clock())

    # -- what is known ---------------------------------------------------------------------

    @property
    def interrupted(self) -> str | None:
        """Why discovery cannot be heard at present; None if it can."""
        return self._registrations.interrupted

    async def settled(self) -> None:
        """Until every rank's index was recovered, or its recovery failed, and all is applied."""
        await asyncio.gather(*(rank.index.settled() for rank in list(self._ranks.values())))
        await self.applier.drained()

    def not_current(self) -> dict[Rank, str]:
        """The ranks whose index cannot be believed now, and why."""
        found = {}
        for rank, followed in self._ranks.items():
            if followed.channel is None:
                found[rank] = "nobody announces where its events are heard"
            elif not followed.index.current:
                found[rank] = followed.index.problem or "being asked"
        return found

    def stream_states(self) -> dict[Rank, StreamState]:
        """How far each rank's events can be believed."""
        return {rank: followed.index.state() for rank, followed in self._ranks.items()}

    # -- the index, in two ways ------------------------------------------------------------

    def follow_indexes(self) -> None:
        """Begin to follow what every worker caches, where that was not asked for at first."""
        self._follow_index = True
        for item in self._preferred_first():
            self._follow_worker(item)

    def follow_index_of(self, worker_id: int) -> bool:
        """Begin to follow what one worker caches; False where nobody is registered as that."""
        for item in self.deployment.workers:
            if item.worker.worker_id == worker_id:
                self._follow_worker(item)
                return True
        return False

    async def ask_indexer(
        self, indexer: Instance, model: str, hashes: BlockHashes, workers: Iterable[Worker]
    ) -> None:
        """Learn from a served indexer how much of one prompt ``workers`` hold; nothing else.

        Only the prompt's hashes travel. Raises RequestPlaneError or WireError; then nothing is
        taken over.
        """
        body = indexer_query(model, hashes.local)
        bounds = self._bounds
        self.asked.indexers += 1
        scores = None
        answer = self._requests.ask_raw(
            indexer, body, timeout=bounds.recovery_s, max_bytes=bounds.recovery_bytes
        )
        async with aclosing(answer) as items:
            async for item in items:
                self.asked.recovery_bytes += len(item.document)
                scores = parse_scores(item)
        if not isinstance(scores, TieredScores):
            told = "nothing" if scores is None else scores.message
            raise RequestPlaneError(f"the indexer of {indexer.endpoint} answered: {told}")
        for worker in workers:
            for rank in worker.ranks:
                held = min(scores.device.get((worker.worker_id, rank), 0), len(hashes.sequence))
                if held:
                    first = BlocksStored(None, hashes.sequence[:held], hashes.local[:held])
                    self.apply(KvEvent(worker.worker_id, rank, first))
                self.apply(IndexMarked(worker.worker_id, rank, "current"))

    # -- discovery -------------------------------------------------------------------------

    def _take(self, change: DiscoveryChange) -> None:
        self._registrations.apply(change)
        if isinstance(change, Interrupted):
            return
        before = self.deployment
        self.deployment = self._registrations.deployment(self._namespace)
        if self.deployment != before or isinstance(change, Listed):
            self._follow_deployment(before)

    def _follow_deployment(self, before: Deployment) -> None:
        known = {item.worker.worker_id: item for item in before.workers}
        present = {item.worker.worker_id: item for item in self.deployment.workers}
        for worker_id in known.keys() - present.keys():
            self._unfollow(worker_id)
            self.apply(WorkerLost(worker_id))
            self.applier.request_sweep()
        for item in self._preferred_first():
            old = known.get(item.worker.worker_id)
            if old is None or old.worker != item.worker:
                self.apply(WorkerUpserted(item.worker))
                # Nobody has told what it caches yet; until somebody does, that is not "nothing".
                for rank in item.worker.ranks:
                    self.apply(IndexMarked(item.worker.worker_id, rank, "absent"))
            if self._follow_index:
                self._follow_worker(item)
        if self._follow_load:
            self._follow_loads()

    def _preferred_first(self) -> list[ObservedWorker]:
        """Who is followed first is asked first: the candidates of the question at hand."""
        workers = self.deployment.workers
        return sorted(workers, key=lambda item: item.worker.model != self._prefer)

    # -- the index -------------------------------------------------------------------------

    def _follow_worker(self, item: ObservedWorker) -> None:
        worker_id = item.worker.worker_id
        for rank in item.worker.ranks:
            key = (worker_id, rank)
            source, channel = item.sources.get(rank), item.kv_events.get(rank)
            followed = self._ranks.get(key)
            if followed is not None and (followed.source, followed.channel) == (source, channel):
                continue
            if followed is not None:
                self._end(followed.tasks)
                del self._ranks[key]
            self.apply(IndexMarked(worker_id, rank, "absent"))
            if source is not None:
                self._ranks[key] = self._followed(source, channel)

    def _followed(self, source: EventSource, channel: EventChannel | None) -> _FollowedRank:
        index = RankIndex(source, self._recover, self.applier.take, self._clock)
        of = f"{source.worker_id:x} rank {source.dp_rank}"
        tasks = [self.tasks.start("index recovery", index.run, of)]
        if channel is None:
            index.ask()
        else:
            follower = self._plane_of(channel).follow(channel, index.take)
            tasks.append(self.tasks.start("KV event stream", follower.run, of))
        return _FollowedRank(index, source, channel, tasks)

    def _unfollow(self, worker_id: int) -> None:
        for key in [key for key in self._ranks if key[0] == worker_id]:
            self._end(self._ranks.pop(key).tasks)
        self.applier.unfollow(worker_id)

    def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel tasks; close() waits for those that have not ended."""
        for task in tasks:
            task.cancel()

    async def _recover(self, source: EventSource, start: int | None) -> RecoveryAnswer:
        if source.recovery is None:
            raise RequestPlaneError("it has no local indexer that could be asked")
        body = recovery_query(source.worker_id, source.dp_rank, start)
        bounds = self._bounds
        await asyncio.sleep(_SUBSCRIBED_S)
        async with self._asking:
            self.asked.recoveries += 1
            answer = self._requests.ask_raw(
                source.recovery,
                body,
                timeout=bounds.recovery_s,
                max_bytes=bounds.recovery_bytes,
            )
            async with aclosing(answer) as items:
                async for item in items:
                    self.asked.recovery_bytes += len(item.document)
                    return parse_recovery(item)
        raise RequestPlaneError("it answered with nothing")

    # -- load ------------------------------------------------------------------------------

    def _follow_loads(self) -> None:
        wanted = {("sequences", c.publisher_id): c for c in self.deployment.sequences}
        wanted |= {("loads", c.publisher_id): c for c in self.deployment.loads}
        if self._on_pass is not None:
            wanted |= {("passes", c.publisher_id): c for c in self.deployment.passes}
        for key, followed in list(self._channels.items()):
            if wanted.get(key) != followed.channel:
                self._end([self._channels.pop(key).task])
        for key, channel in wanted.items():
            if key not in self._channels:
                self._channels[key] = self._followed_channel(key[0], channel)

    def _followed_channel(self, kind: str, channel: EventChannel) -> _Follower:
        takes = {"sequences": self.load.take_sequences, "loads": self.load.take_metrics}
        take = self._on_pass if kind == "passes" and self._on_pass is not None else takes[kind]
        follower = self._plane_of(channel).follow(channel, take)
        of = f"publisher {channel.publisher_id:x}"
        return _Follower(channel, self.tasks.start(f"{kind} stream", follower.run, of))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            self.apply(Expired())
