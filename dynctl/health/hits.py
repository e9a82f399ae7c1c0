"""Why the prefix hit rate is what it is: the ladder of hits, from the records of routers.

One pass over the records (:mod:`dynctl.documents.recording`), in bounded memory. Each router of the
recording is replayed from its changes, so that the caches are as the router knew them at each
decision. The rungs of a request, in tokens of its prompt:

* reachable: blocks that any earlier request or any engine had before it;
* capacity: those that one shared LRU cache with the blocks of the whole fleet still has;
* best: the most that the index shows on one worker;
* expected: what the router counted on the chosen worker;
* reused: what the engine reported.

The loss of a step is given to causes block by block, by what happened to the blocks: sent, stored,
removed, cleared. Some are known only later (an event that comes late, a gap that shows later), so a
request is judged :data:`GRACE_S` after its end. What no record explains stays ``unexplained``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import nlargest
from itertools import islice
from statistics import median
from typing import Any, Final

import msgspec

from dynctl.documents.doubts import Doubt, doubt, some_names
from dynctl.documents.hits import (
    CAUSES,
    RUNGS,
    UNEXPLAINED,
    HitsCause,
    HitsGroup,
    HitsReport,
    HitsRung,
)
from dynctl.documents.recording import (
    Arrived,
    Changed,
    Decided,
    Finished,
    Noted,
    Record,
    Start,
    State,
)
from router_core import (
    DEVICE,
    TOPOLOGY_PREFIX,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    ConfigError,
    IndexConnected,
    IndexMarked,
    KvEvent,
    PrefillDone,
    Role,
    Router,
    RouterConfig,
    SnapshotError,
    Worker,
    WorkerLost,
    sequence_hashes,
    slots_of,
)

#: Seconds after the end of a request until its losses are judged.
GRACE_S: Final = 30.0
#: Examples of each cause.
MOST_EXAMPLES: Final = 3
#: Groups of a report; the others are one.
MOST_GROUPS: Final = 1_000
#: Delays of late events from which the median is taken.
_MOST_DELAYS: Final = 1_000
#: Times of clears and of troubles that are kept for each rank.
_MOST_TIMES: Final = 64
#: Reports from which the block size of an engine is derived.
_ENOUGH_REPORTS: Final = 8
#: The content of a prompt's first block, which is not known where it has a salt.
_FIRST: Final = 1
#: Share of stored blocks above which another router sends requests too.
_FOREIGN: Final = 0.1
#: Earlier times are those of a trace, which begins at 0.
_REAL_TIME: Final = 31_536_000.0
_OTHERS: Final = "(others)"
_NO_SALT: Final = "(no salt)"
_READS_CACHES: Final = "kv"
#: Causes by the short reason of a decision.
_BY_REASON: Final = {"session": "session"}

RankKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept: distinct blocks ever seen, blocks of the shared cache, blocks whose fate is
    known, requests that wait for their end. A block takes about 100 bytes in each."""

    seen: int = 4_000_000
    shared: int = 2_000_000
    fates: int = 1_000_000
    requests: int = 100_000


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that count: those decided from ``start`` on and before ``end`` (wall clock)."""

    start: float = -math.inf
    end: float = math.inf

    def has(self, at: float) -> bool:
        return self.start <= at < self.end


class SharedCache:
    """One LRU cache of ``most`` blocks, and the blocks that one of twice the size would have."""

    __slots__ = ("_hot", "_warm", "most")

    def __init__(self) -> None:
        self.most = 0
        self._hot: OrderedDict[int, None] = OrderedDict()
        self._warm: OrderedDict[int, None] = OrderedDict()

    def resize(self, most: int) -> None:
        """Let it have ``most`` blocks."""
        self.most = most
        while self._warm and len(self._hot) < most:
            block, _ = self._warm.popitem()
            self._hot[block] = None
            self._hot.move_to_end(block, last=False)
        self._shrink()

    def leading(self, hashes: Sequence[int]) -> tuple[int, int]:
        """Leading blocks that it has, and that one of twice the size has."""
        hot, warm = self._hot, self._warm
        first = both = 0
        for block in hashes:
            if block in hot:
                first += first == both
            elif block not in warm:
                break
            both += 1
        return first, both

    def use(self, hashes: Sequence[int]) -> None:
        """A request uses these blocks: a block is less recent than the one before it."""
        hot, warm = self._hot, self._warm
        for block in reversed(hashes):
            if block in hot:
                hot.move_to_end(block)
            else:
                warm.pop(block, None)
                hot[block] = None
        self._shrink()

    def add(self, block: int) -> None:
        """An engine has a block that no request asked for yet, such as output."""
        if block not in self._hot:
            self._warm.pop(block, None)
            self._hot[block] = None
            self._shrink()

    def _shrink(self) -> None:
        while len(self._hot) > self.most:
            block, _ = self._hot.popitem(last=False)
            self._warm[block] = None
        while len(self._warm) > self.most:
            self._warm.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Model:
    """What requests and engines of one model had so far."""

    seen: set[int] = field(default_factory=set)
    cache: SharedCache = field(default_factory=SharedCache)
    #: KV blocks of all its workers that compute prompts; None: a worker does not declare them.
    blocks: int | None = 0
    version: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Rank:
    """What happened to one rank: clears and losses of events, what it stored and reported."""

    key: RankKey
    epoch: int = 0
    stored: bool = False
    clears: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    troubles: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    reports: int = 0
    granularity: int = 0


@dataclass(slots=True, eq=False)
class _Fate:
    """What happened to one block last. ``by`` sent it; times are wall clock, -inf: never."""

    by: _Request | None = None
    sent_at: float = -math.inf
    rank: _Rank | None = None
    epoch: int = 0
    stored_at: float = -math.inf
    removed_at: float = -math.inf
    removed_from: _Rank | None = None
    content: int = 0
    #: Tenant, whether salted, and time of the first block with the same content.
    twin: tuple[str, bool, float] | None = None
    foreign: bool = False
    waiting: list[_Gap] | None = None


@dataclass(slots=True, eq=False)
class _Gap:
    """Blocks that no worker had although ``sender`` had asked a rank to compute them.

    ``state``: of that rank's index at the decision. ``stored_at``: when the event came after all.
    """

    tokens: int
    sender: _Request
    rank: _Rank
    epoch: int
    state: str
    since: float
    stored_at: float | None = None


@dataclass(slots=True, eq=False)
class _Request:
    """One request from its arrival until it is judged."""

    arrived: Arrived
    source: _Source
    group: str = ""
    hashes: tuple[int, ...] = ()
    decided: Decided | None = None
    decided_at: float = math.inf
    refused: bool = False
    rank: _Rank | None = None
    epoch: int = 0
    worker: str = ""
    state: str = ""
    depth: int | None = None
    rungs: dict[str, int | None] = field(default_factory=dict)
    twice: int = 0
    parts: Counter[tuple[str, str]] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)
    gaps: list[_Gap] = field(default_factory=list)
    #: Who sent the blocks before: (cause, blocks) from the start, where no index shows the caches.
    senders: list[tuple[str, int]] = field(default_factory=list)
    others: dict[int, _Request | None] = field(default_factory=dict)
    prefilled_at: float | None = None
    finished: Finished | None = None
    done: bool = False

    @property
    def router(self) -> tuple[int, int]:
        """The router that took it."""
        return self.source.number, self.arrived.router

    @property
    def computed_at(self) -> float | None:
        """When its prompt was computed, as far as it is known."""
        if self.prefilled_at is not None:
            return self.prefilled_at
        end = self.finished
        if end is None:
            return None
        if end.ttft_s is not None:
            return min(end.at, self.arrived.at + end.ttft_s)
        return end.at

    @property
    def failed(self) -> bool:
        end = self.finished
        if end is None or end.outcome in ("completed", "success", ""):
            return False
        return end.ttft_s is None and not end.output_tokens


@dataclass(slots=True, eq=False)
class _Source:
    """One recorded router: its replay, and what it says about itself."""

    number: int
    start: Start | None = None
    router: Router | None = None
    config: RouterConfig = field(default_factory=RouterConfig)
    pending: dict[str, _Request] = field(default_factory=dict)
    #: Names of workers -> codes of conditions that were in force.
    codes: dict[str, set[str]] = field(default_factory=dict)
    incomplete: bool = False

    def gives(self, kind: str) -> bool:
        return self.start is None or kind in self.start.complete

    @property
    def mode(self) -> str:
        return str(self.config.router_mode)


@dataclass(slots=True)
class _Part:
    tokens: int = 0
    requests: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)
    workers: Counter[str] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)

    def add(self, tokens: int, request: _Request, cause: str) -> None:
        self.tokens += tokens
        self.requests += 1
        self.workers[request.worker] += tokens
        self.examples.append((abs(tokens), request.arrived.id))
        if len(self.examples) > 8 * MOST_EXAMPLES:
            self.examples = nlargest(MOST_EXAMPLES, self.examples)
        if cause == "stale" and len(self.delays) < _MOST_DELAYS:
            self.delays += request.delays


@dataclass(slots=True)
class _Tally:
    """Sums over requests: tokens of each rung (None: unknown for one of them), and the parts."""

    requests: int = 0
    tokens: int = 0
    twice: int = 0
    rungs: dict[str, int | None] = field(default_factory=dict)
    parts: dict[tuple[str, str], _Part] = field(default_factory=dict)
    #: By cause, what was lost and not gained back on a later rung.
    net: dict[str, _Part] = field(default_factory=dict)
    start: float = math.inf
    end: float = -math.inf

    def add(self, request: _Request) -> None:
        self.requests += 1
        self.tokens += request.arrived.isl_tokens
        self.twice += request.twice
        self.start = min(self.start, request.decided_at)
        self.end = max(self.end, request.decided_at)
        for rung, tokens in request.rungs.items():
            known = self.rungs.get(rung, 0)
            self.rungs[rung] = None if known is None or tokens is None else known + tokens
        for key, tokens in request.parts.items():
            if tokens:
                self.parts.setdefault(key, _Part()).add(tokens, request, key[1])
        for cause, tokens in _net(request.parts).items():
            self.net.setdefault(cause, _Part()).add(tokens, request, cause)


class Ladder:
    """The ladder over the records of one router or of several; see the module.

    Records of one router come in order of time; those of several merged by time. ``by``: one of
    ``dynctl.documents.hits.BY``, or empty.
    """

    def __init__(
        self, *, by: str = "", window: Window = Window(), bounds: Bounds = Bounds()
    ) -> None:
        self._by = by
        self._window = window
        self._bounds = bounds
        self._sources: dict[int, _Source] = {}
        self._models: dict[str, _Model] = {}
        self._ranks: dict[RankKey, _Rank] = {}
        self._fates: dict[int, _Fate] = {}
        self._contents: dict[int, tuple[int, str, bool, float]] = {}
        self._due: deque[tuple[float, _Request]] = deque()
        self._all = _Tally()
        self._reported = _Tally()
        self._groups: dict[str, tuple[_Tally, _Tally]] = {}
        self._skipped: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._names: set[str] = set()
        self._foreign = self._stored = 0
        self._warm = False
        self._now = -math.inf

    # -- records ---------------------------------------------------------------------------

    def take(self, record: Record, source: int = 0) -> None:
        """Take the next record, of the router number ``source``."""
        due = self._due
        self._now = max(self._now, record.at)
        while due and due[0][0] <= record.at:
            self._judge(due.popleft()[1])
        mine = self._sources.get(source)
        if mine is None:
            mine = self._sources[source] = _Source(source)
        match record:
            case Changed():
                self._changed(mine, record)
            case Arrived():
                self._arrived(mine, record)
            case Decided():
                self._decided(mine, record)
            case Finished():
                self._finished(mine, record)
            case Start():
                self._started(mine, record)
            case State():
                self._state(mine, record)
            case Noted():
                self._noted(mine, record)

    def _started(self, source: _Source, record: Start) -> None:
        source.start = record
        # Engines of a simulation begin empty.
        self._warm = self._warm or record.source == "simulation"
        source.config = _config(record.settings)
        # What ran when the process ended has no end.
        for request in source.pending.values():
            self._end(request)
        source.pending.clear()
        source.router = None

    def _state(self, source: _Source, record: State) -> None:
        if source.router is not None and not source.incomplete:
            return
        try:
            router = Router.restore(record.snapshot)
        except SnapshotError:
            self._left_out["snapshots that cannot be read"] += 1
            return
        source.router, source.incomplete = router, False
        source.config = router.config
        self._warm = True
        for slot in router.freshness:
            worker, ref = router.registry.worker(slot), router.registry.ref(slot)
            rank = self._rank((ref.worker_id, ref.dp_rank))
            names: dict[int, int] = {}
            for event in router.index.stored_events(slot):
                parent = None if event.parent_hash is None else names.get(event.parent_hash)
                chained = sequence_hashes(event.local_hashes, parent)
                columns = zip(event.block_hashes, event.local_hashes, chained, strict=True)
                for name, local, block in columns:
                    names[name] = block
                    self._was_stored(worker.model, rank, block, parent, local, record.at)
                    parent = block
        # Whose blocks they are is not known.
        self._foreign = self._stored = 0
        for fate in self._fates.values():
            fate.foreign = False

    def _changed(self, source: _Source, record: Changed) -> None:
        router = source.router
        if router is None:
            start = source.start
            router = source.router = Router(
                source.config,
                exact_reuse=start is not None and start.exact_reuse,
                learns=start is not None and start.learns,
            )
        change, at = record.change, record.at
        match change:
            case KvEvent():
                self._kv_event(router, change, at)
                return
            case WorkerLost():
                for slot in router.registry.slots(change.worker_id):
                    worker_id, dp_rank = router.registry.ref(slot)
                    self._cleared(self._rank((worker_id, dp_rank)), at)
            case IndexMarked() if change.state in ("gapped", "over_limit"):
                self._rank((change.worker_id, change.dp_rank)).troubles.append(at)
            case IndexConnected() if not change.connected:
                self._rank((change.worker_id, change.dp_rank)).troubles.append(at)
            case PrefillDone():
                request = source.pending.get(change.request_id)
                if request is not None:
                    request.prefilled_at = at
        router.apply(change, at)
        source.config = router.config
        if isinstance(change, WorkerLost):
            while router.sweep(1_000_000):
                pass

    def _kv_event(self, router: Router, change: KvEvent, at: float) -> None:
        key = (change.worker_id, change.dp_rank)
        slot = router.registry.slot(*key)
        event = change.event
        if slot is None:
            router.apply(change, at)
            return
        rank = self._rank(key)
        if isinstance(event, Cleared):
            router.apply(change, at)
            self._cleared(rank, at)
        elif isinstance(event, BlocksRemoved) and event.tier == DEVICE:
            blocks = [router.index.sequence_of(slot, name) for name in event.block_hashes]
            router.apply(change, at)
            for block, name in zip(blocks, event.block_hashes, strict=True):
                fate = None if block is None else self._fates.get(block)
                # A copy of it may be left.
                if fate is not None and router.index.sequence_of(slot, name) is None:
                    fate.removed_at, fate.removed_from = at, rank
        elif isinstance(event, BlocksStored) and event.tier == DEVICE:
            router.apply(change, at)
            model = router.registry.worker(slot).model
            parent = None
            if event.parent_hash is not None:
                parent = router.index.sequence_of(slot, event.parent_hash)
            for name, local in zip(event.block_hashes, event.local_hashes, strict=False):
                block = router.index.sequence_of(slot, name)
                if block is not None:
                    self._was_stored(model, rank, block, parent, local, at)
                parent = block
        else:
            router.apply(change, at)

    def _was_stored(
        self, model: str, rank: _Rank, block: int, parent: int | None, local: int, at: float
    ) -> None:
        """A rank has a block now, after ``parent``."""
        rank.stored = True
        self._stored += 1
        caches = self._model(model)
        new = block not in caches.seen
        self._see(caches, block)
        caches.cache.add(block)
        fate = self._fate(block)
        above = None if parent is None else self._fates.get(parent)
        if new and (parent is None or (above is not None and above.foreign)):
            fate.foreign = True
            self._foreign += 1
        fate.rank, fate.epoch, fate.stored_at = rank, rank.epoch, at
        if fate.waiting is not None:
            for gap in fate.waiting:
                if gap.rank is rank and gap.stored_at is None:
                    gap.stored_at = at
            fate.waiting = None
        if not fate.content and (parent is None or (above is not None and above.content)):
            content = _FIRST
            if above is not None:
                content = sequence_hashes((local,), above.content)[0]
            fate.content = content
            if above is not None:
                sender = fate.by
                tenant = "" if sender is None else sender.arrived.tenant
                salted = sender is not None and sender.arrived.salted
                first = self._contents.setdefault(content, (block, tenant, salted, at))
                if first[0] != block:
                    fate.twin = first[1:]
                _bound(self._contents, self._bounds.fates)

    def _cleared(self, rank: _Rank, at: float) -> None:
        rank.epoch += 1
        rank.clears.append(at)

    def _noted(self, source: _Source, record: Noted) -> None:
        if record.kind == "began" and record.code:
            source.codes.setdefault(record.subject, set()).add(record.code)
        elif record.kind in ("dropped", "skipped"):
            source.incomplete = True
            self._left_out["gaps in the recording"] += 1
        elif record.kind == "cut":
            self._left_out["the end of a recording that is cut"] += 1

    def _arrived(self, source: _Source, record: Arrived) -> None:
        if len(source.pending) >= self._bounds.requests:
            oldest = source.pending.pop(next(iter(source.pending)))
            self._left_out["requests without an end"] += 1
            oldest.done = True
        request = source.pending[record.id] = _Request(record, source, hashes=record.hashes)
        if not source.gives("decisions"):
            self._measure(request, None, record.at)

    def _decided(self, source: _Source, record: Decided) -> None:
        request = source.pending.get(record.id)
        if request is None:
            return
        if record.outcome != "selected":
            request.refused = True
            return
        request.refused = False
        if request.decided is None:
            self._measure(request, record, record.at)

    def _finished(self, source: _Source, record: Finished) -> None:
        request = source.pending.pop(record.id, None)
        if request is None:
            return
        request.finished = record
        self._end(request)

    def _end(self, request: _Request) -> None:
        """The request ended: judge it when late events have come."""
        at = request.arrived.at if request.finished is None else request.finished.at
        self._due.append((at + GRACE_S, request))

    # -- a decision ------------------------------------------------------------------------

    def _measure(self, request: _Request, decided: Decided | None, at: float) -> None:
        """The rungs of a request at the moment of its decision, and what is known of its losses."""
        source, arrived, hashes = request.source, request.arrived, request.hashes
        request.decided, request.decided_at = decided, at
        if not hashes:
            return
        router, size = source.router, arrived.block_size
        mask, name = 0, arrived.model
        if router is not None:
            registry = router.registry
            mask = registry.model(arrived.model)
            mask = mask & ~registry.role(Role.DECODE) or mask & registry.can_prefill
            if mask:
                name = registry.worker((mask & -mask).bit_length() - 1).model
        self._names.add(name)
        caches = self._model(name)
        self._resize(caches, source, mask)
        exact = router is not None and router.index.exact
        most = min(len(hashes), max(0, arrived.isl_tokens - 1) // size) if exact else len(hashes)
        usable = hashes[:most]
        shared, twice = caches.cache.leading(usable)
        reachable = shared
        for block in islice(usable, shared, None):
            if block not in caches.seen:
                break
            reachable += 1
        if caches.blocks is not None and caches.blocks >= len(caches.seen):
            shared = twice = reachable
        capacity = None if caches.blocks is None else shared
        self._choose(request, router, decided, mask)
        best = self._best(request, router, usable, mask)
        expected = self._expected(request, decided)
        request.twice = twice * size
        request.rungs = {
            "shared": reachable * size,
            "reachable": reachable * size,
            "capacity": None if capacity is None else capacity * size,
            "best": None if best is None else best * size,
            "expected": None if expected is None else min(expected * size, arrived.isl_tokens),
        }
        if capacity is not None:
            request.parts["capacity", "capacity"] += (reachable - capacity) * size
        above = reachable if capacity is None else capacity
        if best is None:
            self._remember_senders(request, above)
        else:
            self._missing(request, router, best, above)
        if expected is not None and decided is not None:
            self._explain_choice(request, router, decided, best, above, expected, mask)
        for block in hashes:
            self._see(caches, block)
        caches.cache.use(hashes)
        self._remember(request, at)

    def _choose(
        self, request: _Request, router: Router | None, decided: Decided | None, mask: int
    ) -> None:
        """Note the rank that computes the prompt, and the state of its index."""
        chosen = None if decided is None else decided.prefill or decided.decode
        if self._by == "hour":
            request.group = _hour(request.decided_at)
        elif self._by == "tenant":
            request.group = request.arrived.tenant or _NO_SALT
        elif self._by == "model":
            request.group = request.arrived.model
        if chosen is None:
            return
        rank = request.rank = self._rank((chosen[0], chosen[1]))
        request.epoch = rank.epoch
        request.worker = str(chosen[0])
        worker = None if router is None else router.registry.get(chosen[0])
        if worker is not None and router is not None:
            request.worker = worker.name
            if worker.runtime_config.data_parallel_size > 1:
                request.worker += f"/{chosen[1]}"
            slot = router.registry.slot(*chosen)
            fresh = None if slot is None else router.freshness.get(slot)
            request.state = "" if fresh is None else fresh.state
        if self._by == "worker":
            request.group = request.worker
        elif self._by == "domain":
            request.group = "-" if worker is None else _domain(worker)

    def _best(
        self, request: _Request, router: Router | None, usable: Sequence[int], mask: int
    ) -> int | None:
        """The most leading blocks on one worker; None where no worker reports what it caches."""
        if router is None or not mask or not request.source.gives("kv_events"):
            return None
        silent = router.freshness.none | router.freshness.estimated
        if not mask & ~silent:
            return None
        found = router.index.find_matches(usable, mask, len(usable))
        rank = request.rank
        slot = None if rank is None else router.registry.slot(*rank.key)
        request.depth = None if slot is None else min(found.get(slot), len(usable))
        return min(found.best(mask)[0], len(usable))

    def _expected(self, request: _Request, decided: Decided | None) -> int | None:
        """Blocks that the router counted; those in the index where its mode counts none."""
        if decided is None:
            return None
        if request.source.mode != _READS_CACHES:
            return request.depth
        if decided.cached_blocks is None:
            return request.depth
        return min(round(decided.cached_blocks), len(request.hashes))

    def _missing(self, request: _Request, router: Router | None, best: int, above: int) -> None:
        """Why no worker has the blocks from ``best`` to ``above``."""
        size = request.arrived.block_size
        if above < best:
            request.parts["best", "kept"] += (above - best) * size
            return
        gap: _Gap | None = None
        for block in request.hashes[best:above]:
            fate = self._fates.get(block)
            if fate is None:
                request.parts["best", UNEXPLAINED] += size
                continue
            sender = fate.by
            if (
                sender is None
                or sender.rank is None
                or fate.sent_at < max(fate.stored_at, fate.removed_at)
            ):
                request.parts["best", self._gone(request, router, fate)] += size
                continue
            if gap is not None and gap.sender is sender and gap.rank is sender.rank:
                gap.tokens += size
                continue
            state = _state_of(router, sender.rank)
            gap = _Gap(size, sender, sender.rank, sender.epoch, state, request.decided_at)
            request.gaps.append(gap)
            fate.waiting = [*(fate.waiting or ()), gap]

    def _gone(self, request: _Request, router: Router | None, fate: _Fate) -> str:
        """Why a block that a rank had stored is not there any more."""
        rank = fate.rank
        if rank is None:
            return UNEXPLAINED
        if fate.removed_at < fate.stored_at:
            if rank.epoch != fate.epoch:
                return "restart"
            if _state_of(router, rank) not in ("current", ""):
                return "events_lost"
        return "split" if request.source.mode == _READS_CACHES else "spread"

    def _explain_choice(
        self,
        request: _Request,
        router: Router | None,
        decided: Decided,
        best: int | None,
        above: int,
        expected: int,
        mask: int,
    ) -> None:
        """Why the router counted fewer blocks than the best worker has (or the shared cache)."""
        source, size, parts = request.source, request.arrived.block_size, request.parts
        top = above if best is None else best
        if source.mode != _READS_CACHES:
            if best is not None:
                parts["expected", "spread"] += (top - expected) * size
            return
        eligible = decided.best_cached_blocks
        counted = top if eligible is None else min(round(eligible), len(request.hashes))
        counted = max(counted, expected)
        if best is None:
            self._lost_by_senders(request, "expected", expected, above, counted)
            return
        if counted > top:
            # Booked there just now, and not in the index yet.
            parts["expected", "predicted"] += (top - counted) * size
        elif counted < top and router is not None:
            cause = self._excluded(request, router, decided, counted, mask)
            parts["expected", cause] += (top - counted) * size
        if counted > expected:
            trusted = request.depth is None or request.depth <= expected
            cause = _beaten(request, decided) if trusted else "events_lost"
            lost = counted - expected
            if not trusted and request.depth is not None:
                # The index of the chosen worker is not trusted in full.
                untrusted = min(lost, request.depth - expected)
                parts["expected", "events_lost"] += untrusted * size
                lost -= untrusted
                cause = _beaten(request, decided)
            parts["expected", cause] += lost * size

    def _excluded(
        self, request: _Request, router: Router, decided: Decided, counted: int, mask: int
    ) -> str:
        """Why the workers with more blocks than ``counted`` were not candidates."""
        found = router.index.find_matches(request.hashes, mask, len(request.hashes))
        slots = found.best(mask)[1]
        chosen = None if request.rank is None else router.registry.get(request.rank.key[0])
        reasons = [self._reason(request, router, slot, chosen) for slot in slots_of(slots)]
        return next((one for one in reasons if one != UNEXPLAINED), UNEXPLAINED)

    def _reason(self, request: _Request, router: Router, slot: int, chosen: Worker | None) -> str:
        """Why one rank was not a candidate, by what the request asked and the state of the rank."""
        worker, asked, bit = router.registry.worker(slot), request.arrived.asked, 1 << slot
        pin, allowed = asked.get("pin_prefill") or asked.get("pin_decode"), asked.get("allowed")
        if pin and pin[0] != worker.worker_id:
            return "constraints"
        if allowed is not None and worker.worker_id not in allowed:
            return "constraints"
        if router.registry.unavailable & bit:
            return "unavailable"
        taints = worker.runtime_config.taints
        lacks = [one for one in asked.get("required", ()) if one not in taints]
        if lacks:
            local = all(one.startswith(TOPOLOGY_PREFIX) for one in lacks)
            return "topology" if local else "constraints"
        if router.busy.mask & bit:
            return "busy"
        if router.freshness.degraded & bit:
            return "events_lost"
        if chosen is not None and worker.domains != chosen.domains:
            by_card = worker.runtime_config.kv_transfer_domain
            if by_card or request.source.config.kv_transfer_domain:
                return "topology"
        return UNEXPLAINED

    def _remember(self, request: _Request, at: float) -> None:
        """The blocks that the chosen rank has to compute are sent there now."""
        rank = request.rank
        if rank is None:
            return
        held = request.depth or 0
        for block in request.hashes[held:]:
            fate = self._fate(block)
            fate.by, fate.sent_at, fate.foreign = request, at, False

    # -- without an index --------------------------------------------------------------------

    def _remember_senders(self, request: _Request, above: int) -> None:
        """Which decision put each block where it is, where no index shows it."""
        for block in request.hashes[:above]:
            fate = self._fates.get(block)
            sender = None if fate is None else fate.by
            if sender is None or sender.rank is None:
                who = UNEXPLAINED
            elif sender.router != request.router:
                who = "blind"
            elif sender.rank is request.rank:
                who = "here"
            else:
                who = "there"
            if request.senders and request.senders[-1][0] == who:
                request.senders[-1] = (who, request.senders[-1][1] + 1)
            else:
                request.senders.append((who, 1))

    def _lost_by_senders(
        self, request: _Request, rung: str, low: int, high: int, counted: int
    ) -> None:
        """Give the blocks from ``low`` to ``high`` to causes by who had sent them."""
        size = request.arrived.block_size
        if high < low:
            request.parts[rung, "predicted" if rung == "expected" else "more"] += (
                high - low
            ) * size
            return
        mode = request.source.mode
        at = 0
        for who, blocks in request.senders:
            lost = min(high, at + blocks) - max(low, at)
            start = max(low, at)
            at += blocks
            if lost <= 0:
                continue
            if who in (UNEXPLAINED, "blind"):
                request.parts[rung, who] += lost * size
            elif mode != _READS_CACHES:
                cause = "spread" if who == "there" else "no_events"
                request.parts[rung, cause] += lost * size
            else:
                # The router counted the first blocks on another worker, and forgot the others.
                knew = max(0, min(lost, counted - start))
                beaten = "load" if request.decided is None else _beaten(request, request.decided)
                request.parts[rung, beaten] += knew * size
                request.parts[rung, "estimate"] += (lost - knew) * size
        if at < high:
            request.parts[rung, UNEXPLAINED] += (high - max(at, low)) * size

    # -- the judgement -----------------------------------------------------------------------

    def _judge(self, request: _Request) -> None:
        """Judge an ended request, and count it."""
        if request.done:
            return
        request.done = True
        counts = self._window.has(request.decided_at)
        if request.refused or request.decided_at == math.inf:
            if self._window.has(request.arrived.at):
                self._skipped["refused" if request.refused else "without a decision"] += 1
        elif not request.hashes:
            if counts:
                self._skipped["without block hashes"] += 1
        elif counts:
            self._judge_gaps(request)
            self._judge_salts(request)
            self._judge_reuse(request)
            self._count(request)
        elif request.finished is not None:
            self._note_report(request)
        request.hashes, request.gaps, request.senders = (), [], []

    def _judge_gaps(self, request: _Request) -> None:
        for gap in request.gaps:
            request.parts["best", self._gap_cause(request, gap)] += gap.tokens

    def _gap_cause(self, request: _Request, gap: _Gap) -> str:
        sender, rank, since = gap.sender, gap.rank, gap.since
        computed = sender.computed_at
        if gap.stored_at is None and sender.failed:
            return "not_computed"
        if computed is None or computed > since:
            shares = request.source.config.router_replica_sync
            return "in_flight" if shares or sender.router == request.router else "blind"
        if "BLOCK_SIZE_MISMATCH" in self._codes(sender):
            return "block_size"
        if gap.state in ("absent", "estimated"):
            return "no_events"
        if gap.state not in ("current", ""):
            return "events_lost"
        if any(computed <= at <= since for at in rank.clears):
            return "restart"
        if gap.stored_at is not None:
            request.delays.append(gap.stored_at - computed)
            return "stale"
        if self._now < computed + GRACE_S:
            return UNEXPLAINED  # the records end before a late event could have come
        return "events_lost" if rank.stored else "no_events"

    def _judge_salts(self, request: _Request) -> None:
        """Blocks that were not reachable, but whose content had been stored under other hashes."""
        size, rungs = request.arrived.block_size, request.rungs
        reachable = (rungs["reachable"] or 0) // size
        first = max(1, reachable)
        twin: tuple[str, bool, float] | None = None
        same = first
        for block in request.hashes[first:]:
            fate = self._fates.get(block)
            found = None if fate is None else fate.twin
            if found is None or found[2] >= request.decided_at:
                break
            twin = twin or found
            same += 1
        if twin is None:
            return
        salted = request.arrived.salted or twin[1]
        other = salted and twin[0] != request.arrived.tenant
        lost = (same - reachable) * size
        rungs["shared"] = reachable * size + lost
        request.parts["reachable", "salts" if other else "first_block"] += lost

    def _note_report(self, request: _Request) -> None:
        end, rank = request.finished, request.rank
        if end is not None and end.cached_tokens and rank is not None:
            rank.reports += 1
            rank.granularity = math.gcd(rank.granularity, end.cached_tokens)

    def _judge_reuse(self, request: _Request) -> None:
        end = request.finished
        self._note_report(request)
        if end is None or end.cached_tokens is None:
            return
        rungs, isl = request.rungs, request.arrived.isl_tokens
        reused = min(end.cached_tokens, isl)
        rungs["reused"] = reused
        expected = rungs["expected"]
        if expected is None:
            self._judge_unrouted(request, reused)
            return
        lost = expected - reused
        if lost < 0:
            request.parts["reused", "more"] += lost
        elif lost:
            self._judge_loss(request, end, expected, reused)

    def _judge_unrouted(self, request: _Request, reused: int) -> None:
        """The loss from the last known rung, where it is unknown what the router expected."""
        size, rungs = request.arrived.block_size, request.rungs
        top = next(
            rungs[one] or 0 for one in ("best", "capacity", "reachable") if rungs[one] is not None
        )
        if rungs["best"] is not None or reused > top:
            request.parts["reused", "more" if reused > top else UNEXPLAINED] += top - reused
            return
        low = -(-reused // size)
        self._lost_by_senders(request, "reused", low, top // size, 0)
        request.parts["reused", "alignment"] += low * size - reused

    def _judge_loss(self, request: _Request, end: Finished, expected: int, reused: int) -> None:
        parts, size, isl = request.parts, request.arrived.block_size, request.arrived.isl_tokens
        lost = expected - reused
        if end.prompt_tokens is not None and end.prompt_tokens != isl:
            parts["reused", "tokens"] += lost
            return
        own = size
        rank = request.rank
        if rank is not None and rank.reports >= _ENOUGH_REPORTS and rank.granularity % size == 0:
            own = max(size, rank.granularity)
        whole = min(expected, max(0, isl - 1)) // own * own
        aligned = min(lost, expected - whole)
        parts["reused", "alignment"] += aligned
        lost -= aligned
        if lost:
            parts["reused", self._reuse_cause(request, end, reused // size)] += lost

    def _reuse_cause(self, request: _Request, end: Finished, position: int) -> str:
        """Why the engine did not reuse the block at ``position``, on which the router counted."""
        rank, since = request.rank, request.decided_at
        if rank is None:
            return UNEXPLAINED
        if "BLOCK_SIZE_MISMATCH" in self._codes(request):
            return "block_size"
        if request.state in ("absent", "estimated"):
            return "no_events"
        if request.state not in ("current", ""):
            return "events_lost"
        until = end.at + GRACE_S
        if any(since <= at <= until for at in rank.clears):
            return "restart"
        fate = self._fates.get(request.hashes[position])
        if fate is not None and fate.removed_from is rank and since < fate.removed_at <= until:
            computed = request.computed_at
            late = computed is not None and fate.removed_at > computed
            if late and computed is not None:
                request.delays.append(fate.removed_at - computed)
            return "stale" if late else "evicted_waiting"
        if request.depth is not None and position >= request.depth:
            return "in_flight"
        if any(since <= at <= until for at in rank.troubles):
            return "events_lost"
        sender = None if fate is None else fate.by
        if sender is not None and sender is not request:
            one, other = sender.arrived, request.arrived
            if one.tenant != other.tenant and (one.salted or other.salted):
                return "other_salt"
        return UNEXPLAINED

    def _count(self, request: _Request) -> None:
        if not request.rungs:
            return
        reported = request.rungs.get("reused") is not None
        tallies = [(self._all, self._reported)]
        if self._by:
            name = request.group or "-"
            if name not in self._groups and len(self._groups) >= MOST_GROUPS:
                name = _OTHERS
            tallies.append(self._groups.setdefault(name, (_Tally(), _Tally())))
        if not reported:
            end = request.finished
            self._skipped["still running" if end is None else "reuse not reported"] += 1
        for every, known in tallies:
            every.add(request)
            if reported:
                known.add(request)

    # -- tables ----------------------------------------------------------------------------

    def _rank(self, key: RankKey) -> _Rank:
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = _Rank(key)
        return rank

    def _model(self, name: str) -> _Model:
        caches = self._models.get(name)
        if caches is None:
            caches = self._models[name] = _Model()
            caches.cache.resize(self._bounds.shared)
        return caches

    def _resize(self, caches: _Model, source: _Source, mask: int) -> None:
        """Give the shared cache the blocks of the fleet as it is now."""
        router = source.router
        version = (source.number, -1 if router is None else router.registry.version)
        if caches.version == version:
            return
        caches.version = version
        total: int | None = None
        if router is not None and mask and source.gives("workers"):
            counts = [
                router.registry.worker(slot).runtime_config.total_kv_blocks
                for slot in slots_of(mask)
            ]
            if all(counts):
                total = sum(one or 0 for one in counts)
        caches.blocks = total
        caches.cache.resize(min(self._bounds.shared, total or self._bounds.shared))

    def _see(self, caches: _Model, block: int) -> None:
        if block in caches.seen:
            return
        if len(caches.seen) >= self._bounds.seen:
            self._left_out["blocks that were seen before"] += 1
            return
        caches.seen.add(block)

    def _fate(self, block: int) -> _Fate:
        fate = self._fates.get(block)
        if fate is None:
            fate = self._fates[block] = _Fate()
            if _bound(self._fates, self._bounds.fates):
                self._left_out["blocks whose past was forgotten"] += 1
        return fate

    def _codes(self, request: _Request) -> set[str]:
        """The conditions that were in force for the rank of a request, from all routers."""
        name = request.worker.partition("/")[0]
        return {code for one in self._sources.values() for code in one.codes.get(name, ())}

    # -- the report ------------------------------------------------------------------------

    def report(self, title: str = "") -> HitsReport:
        """The ladder of all records so far; ``title`` names their source."""
        while self._due:
            self._judge(self._due.popleft()[1])
        for source in self._sources.values():
            for request in source.pending.values():
                self._judge(request)
            source.pending.clear()
        known = self._reported.requests > 0
        tally = self._reported if known else self._all
        rungs = list(self._rungs(tally))
        caches = [one for name, one in self._models.items() if name in self._names]
        blocks = [one.blocks for one in caches]
        capacity = None if None in blocks else sum(one or 0 for one in blocks)
        at = next((one for one in rungs if one.rung == "capacity"), None)
        twice = (
            tally.twice / tally.tokens if tally.tokens and at and at.tokens is not None else None
        )
        groups = [
            self._group(name, both[1] if known else both[0])
            for name, both in self._groups.items()
            if (both[1] if known else both[0]).requests
        ]
        return HitsReport(
            source=title,
            start=tally.start if tally.requests else None,
            end=tally.end if tally.requests else None,
            requests=tally.requests,
            prompt_tokens=tally.tokens,
            workers=len({key[0] for key in self._ranks}),
            models=sorted(self._names),
            rungs=rungs,
            largest=_largest(tally),
            capacity_blocks=capacity,
            with_twice=twice,
            by=self._by,
            groups=sorted(groups, key=lambda one: (-one.prompt_tokens, one.name)),
            skipped=dict(self._skipped),
            left_out=dict(self._left_out),
            foreign_blocks=self._foreign,
            stored_blocks=self._stored,
            doubts=list(self._doubts(tally, rungs)),
        )

    def _rungs(self, tally: _Tally) -> Iterator[HitsRung]:
        before: int | None = None
        reachable = tally.rungs.get("reachable")
        for rung, title in RUNGS.items():
            tokens = tally.rungs.get(rung)
            if rung == "shared" and (tokens is None or tokens == reachable):
                continue
            if tokens is None:
                yield HitsRung(rung, title, unknown=self._unknown(rung, tally))
                continue
            parts = {c: p for (r, c), p in tally.parts.items() if r == rung and p.tokens}
            if before is None:
                yield HitsRung(rung, title, tokens, _rate(tokens, tally))
            else:
                lost = before - tokens
                causes = _causes(parts, lost, tally)
                yield HitsRung(rung, title, tokens, _rate(tokens, tally), lost, causes)
            before = tokens

    def _unknown(self, rung: str, tally: _Tally) -> str:
        """Which input would give a rung that is unknown."""
        if not tally.requests:
            return "no requests"
        if rung == "capacity":
            return "a worker does not declare its KV blocks (total-blocks= of --worker)"
        if rung == "best":
            return "no worker reports KV events"
        if rung == "expected":
            if not all(one.gives("decisions") for one in self._sources.values()):
                return "the recording has no decisions"
            return "the router mode counts no cached blocks, and no worker reports KV events"
        return "no engine reported the tokens that it reused"

    def _group(self, name: str, tally: _Tally) -> HitsGroup:
        rungs = list(self._rungs(tally))
        worst = next(iter(_largest(tally)), None)
        return HitsGroup(
            name,
            tally.requests,
            tally.tokens,
            {one.rung: one.rate for one in rungs},
            "" if worst is None else worst.cause,
            0.0 if worst is None else worst.share,
        )

    def _doubts(self, tally: _Tally, rungs: Sequence[HitsRung]) -> Iterator[Doubt]:
        unknown = [one for one in rungs if one.unknown]
        if unknown and tally.requests:
            yield doubt(
                "DYR0765",
                rungs=", ".join(one.title for one in unknown),
                why="; ".join(dict.fromkeys(one.unknown for one in unknown)),
            )
        if tally.requests and not self._warm:
            yield doubt("DYR0766")
        # Requests that were under way at the start have no arrival.
        if self._foreign > _FOREIGN * self._stored:
            yield doubt("DYR0767", blocks=f"{self._foreign:,}", all=f"{self._stored:,}")
        if self._left_out:
            yield doubt(
                "DYR0768",
                what=some_names(f"{name} ({n:,})" for name, n in self._left_out.items()),
            )
        silent = self._skipped.get("reuse not reported", 0)
        if silent and rungs and rungs[-1].tokens is not None:
            yield doubt("DYR0769", silent=f"{silent:,}", requests=f"{silent + tally.requests:,}")


def hits(
    records: Iterable[Record],
    *,
    title: str = "",
    by: str = "",
    window: Window = Window(),
    bounds: Bounds = Bounds(),
) -> HitsReport:
    """The ladder of the records of one router."""
    ladder = Ladder(by=by, window=window, bounds=bounds)
    for record in records:
        ladder.take(record)
    return ladder.report(title)


# -- inside --------------------------------------------------------------------------------


class _Candidate(msgspec.Struct):
    overlap_blocks: int = 0
    cost: float = 0.0
    multiplier: float = 1.0
    following: float = 0.0


class _Hop(msgspec.Struct):
    candidates: list[_Candidate] = []


class _Document(msgspec.Struct):
    """What is read of a RouteResult."""

    prefill: _Hop | None = None
    decode: _Hop | None = None

    def hop(self, stage: str) -> _Hop | None:
        return self.prefill if stage == "prefill" else self.decode


def _document(decided: Decided) -> _Document | None:
    if not decided.document:
        return None
    try:
        return msgspec.json.decode(decided.document, type=_Document)
    except (msgspec.DecodeError, RecursionError):
        return None


def _beaten(request: _Request, decided: Decided) -> str:
    """What made the router choose a worker with fewer cached blocks than the best candidate."""
    named = _BY_REASON.get(decided.why)
    if named is not None:
        return named
    config = request.source.config
    # The credit is taken from the prefill blocks, or else from the decode blocks.
    weight = config.router_track_active_blocks
    if config.router_track_prefill_tokens:
        weight = config.prefill_load_scale > 0
    if not (config.overlap_score_credit and weight):
        return "no_credit"
    if decided.margin is not None and decided.margin < 0:
        return "temperature"
    stage = "prefill" if decided.prefill is not None else "decode"
    document = _document(decided)
    hop = None if document is None else document.hop(stage)
    if hop is not None and len(hop.candidates) > 1 and decided.cost is not None:
        best = max(hop.candidates, key=lambda one: (one.overlap_blocks, -one.cost))
        won = min(hop.candidates, key=lambda one: abs(one.cost - (decided.cost or 0.0)))

        def own(one: _Candidate) -> float:
            return (one.cost - one.following) / (one.multiplier or 1.0)

        if best.cost > won.cost and own(best) < own(won):
            return "topology"
    return "load"


def _config(settings: dict[str, Any]) -> RouterConfig:
    """The settings of a recording; those that this release does not have are left out."""
    known = {k: v for k, v in settings.items() if k in RouterConfig.__dataclass_fields__}
    try:
        return RouterConfig().with_values(known)
    except (ConfigError, TypeError, ValueError):
        mode = known.get("router_mode", _READS_CACHES)
        return RouterConfig().with_values({"router_mode": mode})


def _state_of(router: Router | None, rank: _Rank) -> str:
    """The state of a rank's index now; empty where the rank is not registered."""
    if router is None:
        return ""
    slot = router.registry.slot(*rank.key)
    fresh = None if slot is None else router.freshness.get(slot)
    return "" if fresh is None else fresh.state


def _bound(table: dict[int, Any], most: int) -> bool:
    """Drop the oldest tenth of a table that is larger than ``most``; whether it did."""
    if len(table) <= most:
        return False
    for key in list(islice(table, max(1, most // 10))):
        del table[key]
    return True


def _hour(at: float) -> str:
    if at < _REAL_TIME:
        return f"+{int(at // 3600)} h"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:00Z")


def _domain(worker: Worker) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(worker.domains.items())) or "-"


def _rate(tokens: int, tally: _Tally) -> float | None:
    return tokens / tally.tokens if tally.tokens else None


def _cause(name: str, part: _Part, tally: _Tally) -> HitsCause:
    text = CAUSES[name]
    return HitsCause(
        name,
        text.label,
        text.title,
        part.tokens,
        part.tokens / tally.tokens if tally.tokens else 0.0,
        part.requests,
        text.act,
        [one for _, one in nlargest(MOST_EXAMPLES, part.examples)],
        [worker for worker, n in part.workers.most_common(MOST_EXAMPLES) if worker and n],
        list(text.codes),
        median(part.delays) if part.delays else None,
    )


def _causes(parts: dict[str, _Part], lost: int, tally: _Tally) -> list[HitsCause]:
    """The parts of a step, the largest loss first; they add up to ``lost``."""
    rest = lost - sum(part.tokens for part in parts.values())
    if rest:
        known = parts.get(UNEXPLAINED, _Part())
        left = _Part(known.tokens + rest, known.requests, known.examples, known.workers)
        parts = {**parts, UNEXPLAINED: left}
    found = [_cause(name, part, tally) for name, part in parts.items()]
    return sorted(found, key=lambda one: (-one.tokens, one.cause))


def _net(parts: Counter[tuple[str, str]]) -> Counter[str]:
    """What a request lost by each cause and did not gain back on a later rung.

    Rungs count leading blocks, so a gain gives back what was lost last: an engine that reuses more
    than expected reuses blocks that the index lacked.
    """
    lost: list[tuple[str, int]] = []
    for rung in RUNGS:
        gained = 0
        for (at, cause), tokens in reversed(parts.items()):
            if at != rung:
                continue
            if tokens > 0:
                lost.append((cause, tokens))
            else:
                gained -= tokens
        while gained > 0 and lost:
            cause, tokens = lost.pop()
            if tokens > gained:
                lost.append((cause, tokens - gained))
            gained -= min(gained, tokens)
    net: Counter[str] = Counter()
    for cause, tokens in lost:
        net[cause] += tokens
    return net


def _largest(tally: _Tally) -> list[HitsCause]:
    """The causes that an act can change, the largest net loss first."""
    found = [_cause(name, part, tally) for name, part in tally.net.items() if CAUSES[name].act]
    return sorted(found, key=lambda one: (-one.tokens, one.cause))
