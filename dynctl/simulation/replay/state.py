"""What is under way in a replay: routers, ranks, requests and hand-offs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynctl.planning.prefill_load import PrefillModel, PrefillTimes
from dynctl.simulation.engine.prefix_cache import BlockTable
from dynctl.simulation.replay.fleet import SimulatedWorker
from dynctl.simulation.replay.rank import VirtualRank, VirtualRequest
from dynctl.wire.traces import TraceRequest
from router_core import LeanBooking, LeanRouter, Router, RoutingPlan, RoutingRequest


@dataclass(slots=True, eq=False)
class VirtualFrontend:
    """One router, and the requests that wait in its queue.

    ``lean`` decides in place of ``router`` where both decide the same. ``model`` predicts how long
    prefills take, from ``times`` where it measures them; None: their load does not fall.
    ``again``: those that wait are tried again soon, because loads fall.
    """

    router: Router
    number: int
    lean: LeanRouter | None = None
    model: PrefillModel | None = None
    times: PrefillTimes = field(default_factory=PrefillTimes)
    again: bool = False
    waiting: OrderedDict[str, LiveRequest] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class VirtualHandoff:
    """The blocks of a finished prefill, until another engine has pulled them.

    ``pair``: the request whose two workers got it at once. ``pulling``: an engine pulls them.
    """

    rank: ReplayRank
    table: BlockTable
    pair: LiveRequest | None = None
    pulling: bool = False
    freed: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether the blocks cannot be pulled: they are free, or their engine was lost."""
        return self.freed or self.table.owner is not self.rank.engine.cache


@dataclass(slots=True, eq=False)
class Pull:
    """A request that waits on a decode worker for the ``missing`` blocks of its prefill."""

    rank: ReplayRank
    engine: VirtualRank
    generation: VirtualRequest
    missing: int


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way. Times are in ns; -1: not yet. ``sent``: when its first worker got it, s.

    ``rank`` runs ``generation``. ``prefiller``: where its prefill ran, or runs. ``companion``: of a
    pair of workers that got it at once, what the prefill worker computes, until its blocks were
    pulled. ``pull``: the decode worker of a pair waits for the blocks. ``output``: tokens from
    ``lost``, the workers that lost it, which are a part of its prompt now; ``moves``: how often it
    may still go on elsewhere; ``moving``: no worker has its next part yet. ``reachable``: tokens of
    its prompt that one cache without limit would have reused.
    """

    trace: TraceRequest
    frontend: VirtualFrontend
    number: int
    arrived: int
    hashes: Sequence[int]
    local: Sequence[int] = ()
    routed: RoutingRequest | None = None
    booking: LeanBooking | None = None
    attempts: int = 0
    failures: int = 0
    output: int = 0
    moves: int = 0
    moving: bool = False
    lost: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    admitted: bool = False
    waits: RoutingPlan | None = None
    enqueued: int = -1
    queued_s: float | None = None
    sent: float = 0.0
    plan: RoutingPlan | None = None
    generation: VirtualRequest | None = None
    rank: ReplayRank | None = None
    prefiller: ReplayRank | None = None
    companion: VirtualRequest | None = None
    pull: Pull | None = None
    held: VirtualHandoff | None = None
    first: int = -1
    cached_tokens: int | None = None
    host_tokens: int = 0
    disk_tokens: int = 0
    expected_tokens: int = 0
    reachable: int = 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens of output that are not produced yet."""
        return self.trace.output_tokens - self.output

    @property
    def request(self) -> RoutingRequest:
        if self.routed is None:
            raise AssertionError(f"request {self.trace.id} has a lean router")
        return self.routed


@dataclass(slots=True, eq=False)
class ReplayRank:
    """One rank of a worker, its engine and its counts."""

    worker: SimulatedWorker
    dp_rank: int
    engine: VirtualRank
    news: list[VirtualRequest]
    number: int
    watched: int = -1
    alive: bool = True
    gap: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    output_tokens: int = 0
    evicted: int = 0
    lost_requests: int = 0
    busy_ns: int = 0
    preemptions: int = 0
    peak: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.worker.worker_id, self.dp_rank


class NotedRequest(VirtualRequest):
    """A generation that notes its first and last token."""

    __slots__ = ("news",)
    news: list[VirtualRequest]

    def token_produced(self) -> None:
        self.news.append(self)
