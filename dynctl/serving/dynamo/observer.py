"""Follow a live deployment and keep a router in the state of the deployment's own router.

Workers come from discovery, caches from KV events and recovery, load from sequence events and load
reports. Everything becomes a change of one :class:`Router`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from dynctl.adapters.dynamo.planes import Planes, watch_discovery
from dynctl.adapters.ports import (
    ChannelValue,
    DiscoveryChange,
    Interrupted,
    Listed,
    RequestPlaneError,
    StreamCondition,
)
from dynctl.base.tasks import Supervisor
from dynctl.documents.workers import StreamState
from dynctl.health.deployment import (
    Deployment,
    Problem,
    ProblemCode,
    RegisteredWorker,
    Registrations,
    one_endpoint_each,
)
from dynctl.serving.dynamo.durable import DurableEvents
from dynctl.serving.dynamo.load_mirror import LoadMirror
from dynctl.serving.dynamo.recovery import RankIndex
from dynctl.serving.dynamo.shared_channels import SharedChannels
from dynctl.serving.routing.index_runtime import IndexRuntime
from dynctl.wire.dynamo.active_sequences import SequenceEvent
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, EventSource, Instance
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
    Role,
    Router,
    RouterQueue,
    Worker,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
    preset,
)

PRESET: Final = "dynamo-1.6"
"""Its settings are used where no card has any."""
_EXPIRY_S: Final = 5.0
#: A subscription reaches its publisher a little after the connection does.
_SUBSCRIBED_S: Final = 0.05
#: All entries are joined after a change. Where that takes longer than so many seconds, as with
#: hundreds of workers, changes wait so many times as long as the last join took.
_QUICK_JOIN_S: Final = 0.005
_JOIN_REST: Final = 4.0
_LONGEST_REST_S: Final = 1.0

Rank = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ObserverBounds:
    """``recoveries``: recovery requests at a time. ``recovery_bytes``: limit of one response.

    ``recovery_s``: seconds for each part of a response.
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
    shared: bool = False


@dataclass(slots=True)
class _Component:
    """The shared channels of a component (Dynamo before 1.4), by publisher."""

    channels: SharedChannels
    followers: dict[int, _Follower]


@dataclass(slots=True)
class _Durable:
    """The stream of a component (``--durable-kv-events``) and who reads it."""

    events: DurableEvents
    follower: _Follower


@dataclass(frozen=True, slots=True)
class ObserverRuntime:
    """What a serving process has already: its tasks, and what applies KV events."""

    tasks: Supervisor
    index: IndexRuntime


@dataclass(slots=True)
class RequestCounts:
    """Requests to workers and indexers so far, and bytes of their responses."""

    recoveries: int = 0
    indexers: int = 0
    recovery_bytes: int = 0


def live_router() -> Router:
    """A router that decides as a live Dynamo's does, which has no decode-capacity guard.

    What waits in the queues of its frontends is not known: their gauges stay 0.
    """
    # Dynamo has no guard, applies taints in mode kv only, counts what its index has, complete or
    # not, and does not look whether a decode worker can prefill.
    values = {
        "decode_capacity_guard": False,
        "router_taints_in_all_modes": False,
        "router_on_degraded": "full",
        "conditional_disagg_require_can_prefill": False,
    }
    router = Router(preset(PRESET).with_values(values))
    router.queue = RouterQueue(known=False)
    return router


class Observer:
    """One deployment, followed into ``router`` (None: :func:`live_router`).

    ``namespace``: Dynamo's; None for all. ``clock``: monotonic seconds. ``apply`` changes the
    router, in a process where more than this observer does; None: the router itself; and
    ``changing_many`` is entered while it is called for many workers. ``prefer``: a model whose
    workers are read first. ``on_sequence`` gets the events of active requests.
    ``on_pass`` gets the engines' forward-pass metrics, which are followed only with it. Use as an
    async context manager, or :meth:`start` and :meth:`close`, which also closes ``planes``.

    A process that serves gives its ``runtime``; ``on_deployment`` gets what changed, and
    ``on_available`` which workers may get requests (None: the router does). ``sequences``
    False: the load of other routers is not followed. ``only``: the workers of this endpoint alone,
    as one pool of workers for whole requests, whatever their role is.
    """

    def __init__(  # noqa: PLR0913  keyword arguments of three kinds of processes
        self,
        planes: Planes,
        router: Router | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        apply: Callable[[Change], Applied] | None = None,
        changing_many: Callable[[], AbstractContextManager[object]] = nullcontext,
        namespace: str | None = None,
        prefer: str | None = None,
        follow_index: bool = True,
        follow_load: bool = True,
        on_sequence: Callable[[SequenceEvent], object] = lambda event: None,
        on_pass: Callable[[ChannelValue], None] | None = None,
        on_condition: Callable[[StreamCondition], None] = lambda condition: None,
        on_change: Callable[[Change], None] = lambda change: None,
        on_deployment: Callable[[Deployment], None] = lambda deployment: None,
        on_available: Callable[[Mapping[int, str]], None] | None = None,
        on_interrupted: Callable[[str | None], None] = lambda reason: None,
        sequences: bool = True,
        only: EndpointId | None = None,
        runtime: ObserverRuntime | None = None,
        bounds: ObserverBounds = ObserverBounds(),
    ) -> None:
        self.router = router = live_router() if router is None else router
        self._apply = apply or (lambda change: router.apply(change, clock()))
        self._changing_many = changing_many
        self._planes = planes
        self.deployment = Deployment()
        #: The last join of all entries: when it ended and how long it took, in seconds; and whether
        #: the next one is due.
        self._joined_at = 0.0
        self._join_s = 0.0
        self._joining = False
        self.requested = RequestCounts()
        self._clock = clock
        self._namespace = namespace
        self._prefer = prefer
        self._follow_index = follow_index
        self._follow_load = follow_load
        self._on_change = on_change
        self._on_pass = on_pass
        self._bounds = bounds
        self._registrations = Registrations()
        self._recoveries = asyncio.Semaphore(bounds.recoveries)
        self._ranks: dict[Rank, _FollowedRank] = {}
        self._rejected: dict[int, str] = {}
        self._channels: dict[tuple[str, int], _Follower] = {}
        self._components: dict[tuple[str, str], _Component] = {}
        self._durable: dict[EventChannel, _Durable] = {}
        self._on_deployment = on_deployment
        self._on_available = on_available
        self._on_interrupted = on_interrupted
        self._sequences = sequences
        self._only = only
        self._take_sequences: Callable[[EventChannel, ChannelValue], None] | None = None
        self._own_publishers: Callable[[], Collection[int]] = tuple
        self.tasks = Supervisor() if runtime is None else runtime.tasks
        self.load = LoadMirror(router, self.apply, clock, on_sequence=on_sequence)
        self.applier = (
            IndexRuntime(self.apply, router.sweep, on_condition, clock, self.tasks)
            if runtime is None
            else runtime.index
        )
        self._own = runtime is None

    def share_load(
        self,
        take: Callable[[EventChannel, ChannelValue], None],
        own: Callable[[], Collection[int]],
    ) -> None:
        """Give the messages of other routers to ``take``, in place of the mirror of their load.

        ``own``: the publisher ids of this process, whose channels are not followed. Call it before
        :meth:`start`.
        """
        self._sequences, self._take_sequences, self._own_publishers = True, take, own

    async def __aenter__(self) -> Observer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Read the registered workers and start to follow them. Raises Unreachable."""
        try:
            self._take(await self._planes.discovery.list())
        except BaseException:
            await self.close()
            raise
        self.tasks.start("discovery", partial(watch_discovery, self._planes.discovery, self._take))
        if self._own:
            self.applier.start()
            self.tasks.start("booking expiry", self._expire)

    async def close(self) -> None:
        """Leaves no task, socket or thread."""
        await self.tasks.close()
        self._ranks.clear()
        self._channels.clear()
        self._components.clear()
        self._durable.clear()
        await self.applier.close()
        await self._planes.close()

    def apply(self, change: Change) -> Applied:
        """Apply a change to the router now."""
        self._on_change(change)
        return self._apply(change)

    # -- state -----------------------------------------------------------------------------

    @property
    def interrupted(self) -> str | None:
        """Why discovery is interrupted; None if it is not."""
        return self._registrations.interrupted

    async def settled(self) -> None:
        """Wait until the recovery of every rank succeeded or failed, and all events are applied."""
        reads = [rank.index.settled() for rank in self._ranks.values()]
        reads += [stream.events.settled() for stream in self._durable.values()]
        await asyncio.gather(*reads)
        await self.applier.drained()

    def not_current(self) -> dict[Rank, str]:
        """The ranks whose index is incomplete or out of date, and why."""
        reasons = {}
        for rank, followed in self._ranks.items():
            if followed.channel is None and not followed.shared:
                reasons[rank] = "no event channel is registered"
            elif not followed.index.current:
                reasons[rank] = followed.index.problem or "recovery is running"
        for stream in self._durable.values():
            reasons |= stream.events.not_current()
        return reasons

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The deployment's problems, without missing events that were found in a stream."""
        read = {
            worker_id for stream in self._durable.values() for worker_id in stream.events.read()
        }
        heard = {i.worker.name for i in self.deployment.workers if i.worker.worker_id in read}
        return tuple(
            problem
            for problem in self.deployment.problems
            if problem.code is not ProblemCode.EVENTS_MISSING or problem.subject not in heard
        )

    def stream_states(self) -> dict[Rank, StreamState]:
        """The state of each rank's event stream."""
        states = {rank: followed.index.state() for rank, followed in self._ranks.items()}
        for stream in self._durable.values():
            states |= stream.events.states()
        return states

    # -- reading the index -----------------------------------------------------------------

    def follow_indexes(self) -> None:
        """Start to follow what every worker caches, if ``follow_index`` was False."""
        self._follow_index = True
        for item in self._preferred_first():
            self._follow_worker(item)

    def follow_index_of(self, worker_id: int) -> bool:
        """Start to follow what one worker caches; False if it is not registered."""
        for item in self.deployment.workers:
            if item.worker.worker_id == worker_id:
                self._follow_worker(item)
                return True
        return False

    def read_again(self, worker_id: int) -> None:
        """Read the whole index of a worker's ranks again."""
        for (owner, _), followed in self._ranks.items():
            if owner == worker_id:
                followed.index.read_again()

    async def query_indexer(
        self, indexer: Instance, model: str, hashes: BlockHashes, workers: Iterable[Worker]
    ) -> bool:
        """Read from a served indexer how much of one prompt each of ``workers`` caches.

        Only the prompt's hashes are sent. Returns whether the answer has blocks of lower tiers too,
        which are not counted. Raises RequestPlaneError or WireError; then nothing is applied.
        """
        body = indexer_query(model, hashes.local)
        bounds = self._bounds
        self.requested.indexers += 1
        scores = None
        answer = self._planes.requests.ask_raw(
            indexer, body, timeout=bounds.recovery_s, max_bytes=bounds.recovery_bytes
        )
        async with aclosing(answer) as items:
            async for item in items:
                self.requested.recovery_bytes += len(item.document)
                scores = parse_scores(item)
        if not isinstance(scores, TieredScores):
            answer_text = "nothing" if scores is None else scores.message
            raise RequestPlaneError(f"the indexer of {indexer.endpoint} answered: {answer_text}")
        for worker in workers:
            for rank in worker.ranks:
                held = min(scores.device.get((worker.worker_id, rank), 0), len(hashes.sequence))
                if held:
                    first = BlocksStored(None, hashes.sequence[:held], hashes.local[:held])
                    self.apply(KvEvent(worker.worker_id, rank, first))
                self.apply(IndexMarked(worker.worker_id, rank, "current"))
        return bool(scores.lower_tiers)

    # -- discovery -------------------------------------------------------------------------

    def _take(self, change: DiscoveryChange) -> None:
        was_interrupted = self.interrupted
        self._registrations.apply(change)
        if self.interrupted != was_interrupted:
            self._on_interrupted(self.interrupted)
        if isinstance(change, Interrupted):
            return
        listed = isinstance(change, Listed)
        pause = min(_JOIN_REST * self._join_s, _LONGEST_REST_S)
        if listed or self._join_s < _QUICK_JOIN_S or time.monotonic() - self._joined_at >= pause:
            self._join(listed=listed)
        elif not self._joining:
            self._joining = True
            self.tasks.start("join of entries", partial(self._join_later, pause), restart=False)

    async def _join_later(self, pause: float) -> None:
        await asyncio.sleep(pause)
        if self._joining:
            self._join(listed=False)

    def _join(self, *, listed: bool) -> None:
        """Follow the deployment of the entries that are registered now."""
        self._joining = False
        began = time.monotonic()
        before = self.deployment
        self.deployment = self._registrations.deployment(self._namespace)
        if self._only is not None:
            self.deployment = _pool(self.deployment, self._only)
        self.deployment = one_endpoint_each(self.deployment)
        if self.deployment != before or listed:
            with self._changing_many():
                self._follow_workers(before)
            self._on_deployment(self.deployment)
            self._mark_available()
            if self._follow_load:
                self._follow_loads()
        self._joined_at = time.monotonic()
        self._join_s = self._joined_at - began

    def _follow_workers(self, before: Deployment) -> None:
        known = {item.worker.worker_id: item for item in before.workers}
        present = {item.worker.worker_id: item for item in self.deployment.workers}
        for worker_id in known.keys() - present.keys():
            self._unfollow(worker_id)
            self.apply(WorkerLost(worker_id))
            self.applier.request_sweep()
        for item in self._preferred_first():
            old = known.get(item.worker.worker_id)
            if old is None or old.worker != item.worker:
                learned = self.router.learns and not self.router.config.use_kv_events
                worker = replace(item.worker, kv_events=False) if learned else item.worker
                self.apply(WorkerUpserted(worker))
                # Its cache is unknown until it is read, which is different from empty.
                for rank in () if learned else worker.ranks:
                    if old is None or rank not in old.worker.ranks:
                        self.apply(IndexMarked(item.worker.worker_id, rank, "absent"))
            if self._follow_index:
                self._follow_worker(item)

    def reject(self, reasons: Mapping[int, str]) -> None:
        """Exclude the workers whose card the frontend rejected: worker id -> why."""
        if reasons != self._rejected:
            self._rejected = dict(reasons)
            self._mark_available()

    def _mark_available(self) -> None:
        """Exclude rejected workers, and those whose namespace serves no requests."""
        registry = self.router.registry
        reasons = {
            worker_id: worker_set.not_ready
            for worker_set in self.deployment.worker_sets
            if worker_set.not_ready and worker_set.role is not Role.PREFILL
            for worker_id in worker_set.worker_ids
        } | self._rejected
        if self._on_available is not None:
            self._on_available(reasons)
            return
        for item in self.deployment.workers:
            worker_id = item.worker.worker_id
            if registry.unavailable_reason(worker_id) != reasons.get(worker_id):
                self.apply(WorkerAvailability(worker_id, reasons.get(worker_id)))

    def _preferred_first(self) -> list[RegisteredWorker]:
        """All workers, those of the preferred model first: their indexes are read first."""
        workers = self.deployment.workers
        return sorted(workers, key=lambda item: item.worker.model != self._prefer)

    # -- the index -------------------------------------------------------------------------

    def _follow_worker(self, item: RegisteredWorker) -> None:
        for rank in item.worker.ranks:
            self._follow_rank_of(item, rank)
        if item.shared_events:
            self._follow_shared(item)
        if item.durable_events is not None:
            self._follow_durable(item, item.durable_events)

    def _follow_rank_of(self, item: RegisteredWorker, rank: int) -> None:
        worker_id = item.worker.worker_id
        key = (worker_id, rank)
        source, channel = item.sources.get(rank), item.kv_events.get(rank)
        followed = self._ranks.get(key)
        if followed is None and item.durable_events is not None:
            return
        if followed is not None:
            if (followed.source, followed.channel) == (source, channel):
                return
            self._end(followed.tasks)
            del self._ranks[key]
        self.apply(IndexMarked(worker_id, rank, "absent"))
        if source is not None and channel is None and item.shared_events:
            self._ranks[key] = self._sharing(source, item)
        elif source is not None:
            self._ranks[key] = self._follow_rank(source, channel)

    def _follow_durable(self, item: RegisteredWorker, channel: EventChannel) -> None:
        if channel not in self._durable:
            events = DurableEvents(self.applier.take, self._clock)
            self._durable[channel] = _Durable(events, self._durable_follower(channel, events))
        durable = self._durable[channel]
        if durable.events.attach(item.worker.worker_id, item.worker.ranks):
            # Events of this worker were skipped before it registered: the stream still has them.
            self._end([durable.follower.task])
            durable.events.restart()
            durable.follower = self._durable_follower(channel, durable.events)

    def _durable_follower(self, channel: EventChannel, events: DurableEvents) -> _Follower:
        follower = self._planes.plane_of(channel).follow(channel, events.reader())
        of = f"the stream of {channel.scope.namespace}/{channel.scope.component}"
        return _Follower(channel, self.tasks.start("KV event stream", follower.run, of))

    def _sharing(self, source: EventSource, item: RegisteredWorker) -> _FollowedRank:
        """A rank whose channel is one of its component's."""
        index = RankIndex(source, self._recover, self.applier.take, self._clock)
        of = f"{source.worker_id:x} rank {source.dp_rank}"
        tasks = [self.tasks.start("index recovery", index.run, of)]
        component = self._component(item)
        component.channels.attach(index, source.topic)
        return _FollowedRank(index, source, None, tasks, shared=True)

    def _component(self, item: RegisteredWorker) -> _Component:
        key = (item.card.endpoint.namespace, item.card.endpoint.component)

        def ranks() -> dict[Rank, RankIndex]:
            return {
                rank: followed.index
                for rank, followed in self._ranks.items()
                if followed.shared
                and (followed.source.scope.namespace, followed.source.scope.component) == key
            }

        if key not in self._components:
            self._components[key] = _Component(SharedChannels(ranks), {})
        return self._components[key]

    def _follow_shared(self, item: RegisteredWorker) -> None:
        component = self._component(item)
        wanted = {channel.publisher_id: channel for channel in item.shared_events}
        for publisher, followed in list(component.followers.items()):
            if wanted.get(publisher) != followed.channel:
                self._end([component.followers.pop(publisher).task])
                component.channels.remove(followed.channel)
        for publisher, channel in wanted.items():
            if publisher not in component.followers:
                take = component.channels.add(channel)
                follower = self._planes.plane_of(channel).follow(channel, take)
                of = f"publisher {publisher:x}"
                task = self.tasks.start("KV event stream", follower.run, of)
                component.followers[publisher] = _Follower(channel, task)

    def _follow_rank(self, source: EventSource, channel: EventChannel | None) -> _FollowedRank:
        index = RankIndex(source, self._recover, self.applier.take, self._clock)
        of = f"{source.worker_id:x} rank {source.dp_rank}"
        tasks = [self.tasks.start("index recovery", index.run, of)]
        if channel is None:
            index.request_recovery()
        else:
            follower = self._planes.plane_of(channel).follow(channel, index.take)
            tasks.append(self.tasks.start("KV event stream", follower.run, of))
        return _FollowedRank(index, source, channel, tasks)

    def _unfollow(self, worker_id: int) -> None:
        for key in [key for key in self._ranks if key[0] == worker_id]:
            self._end(self._ranks.pop(key).tasks)
        for channel, durable in list(self._durable.items()):
            durable.events.detach(worker_id)
            if durable.events.empty:
                self._end([self._durable.pop(channel).follower.task])
        self.applier.unfollow(worker_id)

    def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel tasks; close() waits for those that have not ended."""
        for task in tasks:
            task.cancel()

    async def _recover(self, source: EventSource, start: int | None) -> RecoveryAnswer:
        if source.recovery is None:
            raise RequestPlaneError("the worker has no local indexer")
        body = recovery_query(source.worker_id, source.dp_rank, start)
        bounds = self._bounds
        await asyncio.sleep(_SUBSCRIBED_S)
        async with self._recoveries:
            self.requested.recoveries += 1
            answer = self._planes.requests.ask_raw(
                source.recovery,
                body,
                timeout=bounds.recovery_s,
                max_bytes=bounds.recovery_bytes,
            )
            async with aclosing(answer) as items:
                async for item in items:
                    self.requested.recovery_bytes += len(item.document)
                    return parse_recovery(item)
        raise RequestPlaneError("the response was empty")

    # -- load ------------------------------------------------------------------------------

    def _follow_loads(self) -> None:
        wanted: dict[tuple[str, int], EventChannel] = {}
        if self._sequences:
            own = self._own_publishers()
            wanted = {
                ("sequences", c.publisher_id): c
                for c in self.deployment.sequences
                if c.publisher_id not in own
            }
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
        if kind == "sequences" and self._take_sequences is not None:
            take = partial(self._take_sequences, channel)
        follower = self._planes.plane_of(channel).follow(channel, take)
        of = f"publisher {channel.publisher_id:x}"
        return _Follower(channel, self.tasks.start(f"{kind} stream", follower.run, of))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            self.apply(Expired())


def _pool(deployment: Deployment, endpoint: EndpointId) -> Deployment:
    """The workers of one endpoint, for which a router decides one hop."""
    workers = tuple(
        replace(item, worker=replace(item.worker, role=Role.AGGREGATED))
        for item in deployment.workers
        if item.instance.endpoint == endpoint
    )
    return replace(deployment, workers=workers, worker_sets=())
