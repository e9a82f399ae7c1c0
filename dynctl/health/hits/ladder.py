"""The ladder: takes the records, measures each request, and reports."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from dynctl.documents.doubts import Doubt, doubt, some_names
from dynctl.documents.hits import RUNGS, UNEXPLAINED, HitsGroup, HitsReport, HitsRung
from dynctl.documents.recording import (
    NO_OUTCOMES,
    NO_PROMPT_HASHES,
    OF_DYNAMO,
    Arrived,
    Changed,
    Decided,
    Finished,
    Noted,
    Record,
    Start,
    State,
)
from dynctl.health.hits.caches import Bounds, Caches, ModelCaches
from dynctl.health.hits.causes import GRACE_S, READS_CACHES, Causes, index_state
from dynctl.health.hits.choice import exclusion
from dynctl.health.hits.hot import HotPrefixes
from dynctl.health.hits.past import RankKey, RecordedRouter, Request
from dynctl.health.hits.tally import Tally, causes, largest, rate
from dynctl.health.hits.trials import BRIDGED_S, Trials, sent_blocks
from router_core import (
    Booked,
    ConfigError,
    Role,
    Router,
    RouterConfig,
    SnapshotError,
    Worker,
    slots_of,
)

#: Groups of a report; the others are one.
MOST_GROUPS: Final = 1_000
#: Share of stored blocks above which another router sends requests too.
_FOREIGN: Final = 0.1
#: Share of the prompts above which new text may be text that moved within its blocks.
_MOVED: Final = 0.01
#: Earlier times are those of a trace, which begins at 0.
_REAL_TIME: Final = 31_536_000.0
_OTHERS: Final = "(others)"
_NO_HASHES: Final = "without block hashes"
_SHORT: Final = "shorter than one block"
_NO_SALT: Final = "(no salt)"
_UNKNOWN_OF_WORKERS: Final = {
    "capacity": "a worker does not declare its KV blocks (total-blocks= of --worker)",
    "best": "not every worker reports KV events",
}
#: Places of the three tallies of a group.
_ALL, _REPORTED, _BARE = range(3)


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that count: those decided from ``start`` on and before ``end`` (wall clock)."""

    start: float = -math.inf
    end: float = math.inf

    def has(self, at: float) -> bool:
        return self.start <= at < self.end


class Ladder:
    """The ladder over the records of one router or of several; see the package.

    Records of one router come in order of time; those of several merged by time. ``by``: one of
    ``dynctl.documents.hits.BY``, or empty. ``hot`` counts the prefixes of the requests.
    """

    def __init__(
        self,
        *,
        by: str = "",
        window: Window = Window(),
        bounds: Bounds = Bounds(),
        hot: HotPrefixes | None = None,
    ) -> None:
        self._hot = hot
        self._by = by
        self._window = window
        self._sources: dict[int, RecordedRouter] = {}
        self._caches = Caches(bounds)
        self._causes = Causes(self._caches, self._sources)
        self._due: deque[tuple[float, Request]] = deque()
        self._all = Tally()
        self._reported = Tally()
        #: Requests without hashes, of which only the expectation of their router is known.
        self._bare = Tally()
        self._bare_skipped: Counter[str] = Counter()
        self._bare_names: set[str] = set()
        self._groups: dict[str, tuple[Tally, Tally, Tally]] = {}
        self._skipped: Counter[str] = Counter()
        self._names: set[str] = set()
        self._warm = False
        self._trials = Trials()
        self._now = -math.inf

    # -- records ----------------------------------------------------------------------

    def take(self, record: Record, source: int = 0) -> None:
        """Take the next record, of the router number ``source``."""
        self._now = max(self._now, record.at)
        self._judge_until(record.at)
        mine = self._sources.get(source)
        if mine is None:
            mine = self._sources[source] = RecordedRouter(source)
        match record:
            case Changed():
                if isinstance(record.change, Booked):
                    self._take_booking(mine, record.change, record.at)
                self._caches.change(mine, record)
            case Arrived():
                self._take_arrival(mine, record)
            case Decided():
                self._take_decision(mine, record)
            case Finished():
                self._take_end(mine, record)
            case Start():
                self._take_start(mine, record)
            case State():
                self._take_state(mine, record)
            case Noted():
                self._take_note(mine, record)

    def _take_start(self, source: RecordedRouter, record: Start) -> None:
        source.start = record
        # Engines of a simulation begin empty.
        self._warm = self._warm or record.source == "simulation"
        source.config = _config(record.settings)
        # What ran when the process ended has no end.
        for request in source.pending.values():
            self._end(request)
        source.pending.clear()
        source.router = None

    def _take_state(self, source: RecordedRouter, record: State) -> None:
        if source.router is not None and not source.incomplete:
            return
        try:
            router = Router.restore(record.snapshot)
        except SnapshotError:
            self._caches.left_out["snapshots that cannot be read"] += 1
            return
        source.router, source.incomplete = router, False
        source.config = router.config
        self._warm = True
        self._caches.restore(router, record.at)

    def _take_note(self, source: RecordedRouter, record: Noted) -> None:
        if record.kind in ("began", "holds") and record.code:
            source.codes.setdefault(record.subject, set()).add(record.code)
        elif record.kind in ("dropped", "skipped"):
            source.incomplete = True
            self._caches.left_out["gaps in the recording"] += 1
        elif record.kind == "cut":
            self._caches.left_out["the end of a recording that is cut"] += 1

    def _take_arrival(self, source: RecordedRouter, record: Arrived) -> None:
        source.arrived += 1
        if len(self._sources) > 1:
            source.shared += any(_is_pending(own, record) for own in self._sources.values())
        if len(source.pending) >= self._caches.bounds.requests:
            oldest = source.pending.pop(next(iter(source.pending)))
            self._caches.left_out["requests without an end"] += 1
            oldest.done = True
        request = source.pending[record.id] = Request(record, source, hashes=record.hashes)
        if not source.gives("decisions"):
            self._measure(request, None, record.at)

    def _take_booking(self, source: RecordedRouter, change: Booked, at: float) -> None:
        """A request is sent to a rank: the caches are as the decision saw them.

        The decision itself is recorded when the last hop is chosen, which with a prefill hop is
        after the prompt was computed.
        """
        request = source.pending.get(change.request_id)
        if request is None or request.decided is not None:
            return
        ref = (change.worker_id, change.dp_rank)
        if request.decided_at == math.inf:
            request.hop = change.stage
            self._measure(request, ref, at)
        elif change.stage == request.hop:
            self._sent_again(request, ref, at)

    def _take_decision(self, source: RecordedRouter, record: Decided) -> None:
        request = source.pending.get(record.id)
        if request is None:
            return
        if record.outcome != "selected":
            request.refused = True
            return
        request.refused = False
        if request.decided is not None:
            return
        request.decided = record
        chosen = record.prefill or record.decode
        if request.decided_at == math.inf:
            self._measure(request, chosen, record.at)
        elif chosen is not None and (request.rank is None or request.rank.key != chosen):
            self._sent_again(request, chosen, record.at)
        self._choose(request, record)

    def _take_end(self, source: RecordedRouter, record: Finished) -> None:
        request = source.pending.pop(record.id, None)
        if request is None:
            return
        request.finished = record
        self._end(request)

    def _end(self, request: Request) -> None:
        """The request ended: judge it when late events have come."""
        at = request.arrived.at if request.finished is None else request.finished.at
        self._due.append((at + GRACE_S, request))

    # -- a decision -------------------------------------------------------------------

    def _measure(self, request: Request, chosen: RankKey | None, at: float) -> None:
        """The rungs of a request at the moment of its decision, and what is known of its losses."""
        source, arrived = request.source, request.arrived
        router, size = source.router, arrived.block_size
        request.decided_at = at
        self._set_group(request, at)
        self._place(request, router, chosen)
        if not request.hashes:
            return
        mask, name = _prompt_ranks(router, arrived.model)
        self._names.add(name)
        caches = self._caches.model(name)
        request.texts = caches.texts
        self._caches.resize(caches, source, mask, size)
        usable = _usable_blocks(request, router)
        request.usable = len(usable)
        above = self._measure_shared(request, caches, usable)
        best = self._best_depth(request, router, usable, mask)
        request.rungs["best"] = None if best is None else best * size
        request.rungs["expected"] = None
        if best is None:
            self._causes.remember_senders(request, above)
        else:
            self._causes.missing(request, router, best, above)
            self._try_settings(request, usable, mask, best, at)
        for block in request.hashes:
            self._caches.see(caches, block)
        caches.cache.use(request.hashes)
        self._remember(request, at)

    def _set_group(self, request: Request, at: float) -> None:
        """The group of a report by time or by request; others need the chosen worker."""
        if self._by == "hour":
            request.group = _hour(at)
        elif self._by == "tenant":
            request.group = request.arrived.tenant or _NO_SALT
        elif self._by == "model":
            request.group = request.arrived.model

    def _measure_shared(self, request: Request, caches: ModelCaches, usable: Sequence[int]) -> int:
        """The rungs of one cache for all; returns the leading blocks that it has."""
        size = request.arrived.block_size
        shared, twice = caches.cache.leading(usable)
        reachable = shared
        for block in islice(usable, shared, None):
            if block not in caches.seen:
                break
            reachable += 1
        if caches.blocks is not None and caches.blocks >= len(caches.seen):
            shared = twice = reachable
        request.twice = twice * size
        request.rungs = {
            "prompt": request.arrived.isl_tokens,
            "shared": reachable * size,
            "reachable": reachable * size,
        }
        request.rungs["capacity"] = None if caches.blocks is None else shared * size
        if caches.blocks is None:
            return reachable
        request.parts["capacity", "capacity"] += (reachable - shared) * size
        request.gains["capacity", "capacity"] = (min(twice, reachable) - shared) * size
        return shared

    def _try_settings(
        self, request: Request, usable: Sequence[int], mask: int, best: int, at: float
    ) -> None:
        """What other settings would have chosen, where another rank has more of the prompt, or was
        sent more of it."""
        router, rank, depth = request.source.router, request.rank, request.depth
        chosen = None if router is None or rank is None else router.registry.slot(*rank.key)
        if router is None or chosen is None or depth is None:
            return
        if best <= depth and not request.gaps:
            return
        router.advance(at)
        matches = router.index.find_matches(usable, mask | 1 << chosen, len(usable))

        def depth_of(slot: int) -> int:
            return self._caches.depth(router, slot, usable, min(matches.get(slot), len(usable)))

        sent: dict[int, int] = {}
        if request.gaps:
            sent = sent_blocks(mask, depth_of, self._sent_to(router, usable, at))
        request.trials = self._trials.of_choice(request.arrived, router, chosen, depth_of, sent)

    def _sent_to(self, router: Router, hashes: Sequence[int], at: float) -> list[int | None]:
        """The slot of the rank to which each block was sent just before, None where it was not."""
        slots: list[int | None] = []
        for block in hashes:
            fate = self._caches.fates.get(block)
            sender = None if fate is None or fate.sent_at < at - BRIDGED_S else fate.by
            rank = None if sender is None else sender.rank
            slots.append(None if rank is None else router.registry.slot(*rank.key))
        return slots

    def _sent_again(self, request: Request, chosen: RankKey, at: float) -> None:
        """The request goes to another rank: the first one failed, or no decode worker was free."""
        router, before, first = request.source.router, request.depth or 0, request.rank
        self._place(request, router, chosen)
        request.prefilled_at = None
        slot = None if router is None else router.registry.slot(*chosen)
        best = request.rungs.get("best")
        if router is not None and slot is not None and best is not None:
            hashes = request.hashes
            most = best // request.arrived.block_size
            device = router.index.find_matches(hashes, 1 << slot, len(hashes)).get(slot)
            request.device = min(device, most)
            request.depth = min(self._caches.depth(router, slot, hashes, device), most)
            if request.depth < before and first is not None:
                old = router.registry.slot(*first.key)
                why = UNEXPLAINED if old is None else exclusion(request, router, 1 << old)
                request.excluded = "unavailable" if why == UNEXPLAINED else why
        self._remember(request, at)

    def _place(self, request: Request, router: Router | None, chosen: RankKey | None) -> None:
        """Note the rank that computes the prompt, and the state of its index."""
        if chosen is None:
            return
        request.rank = self._caches.rank(chosen)
        request.worker = str(chosen[0])
        worker = None if router is None else router.registry.get(chosen[0])
        if worker is not None and router is not None:
            several = worker.runtime_config.data_parallel_size > 1
            request.worker = f"{worker.name}/{chosen[1]}" if several else worker.name
            request.state = index_state(router, request.rank)
        if self._by == "worker":
            request.group = request.worker
        elif self._by == "domain":
            request.group = "-" if worker is None else _domain(worker)

    def _best_depth(
        self, request: Request, router: Router | None, usable: Sequence[int], mask: int
    ) -> int | None:
        """The most leading blocks on one worker; None where no worker reports what it caches."""
        if router is None or not mask or not request.source.gives("kv_events"):
            return None
        silent = router.freshness.none | router.freshness.estimated
        if not mask & ~silent:
            return None
        matches = router.index.find_matches(usable, mask, len(usable))
        rank = request.rank
        slot = None if rank is None else router.registry.slot(*rank.key)
        best, slots = matches.best(mask)
        best = min(best, len(usable))
        for other in slots_of(router.tiers.mask & mask):
            depth = self._caches.depth(router, other, usable, min(matches.get(other), len(usable)))
            if depth > best:
                best, slots, request.tiered = depth, 1 << other, True
            elif depth == best:
                slots |= 1 << other
        if slot is not None:
            request.device = min(matches.get(slot), len(usable))
            request.depth = self._caches.depth(router, slot, usable, request.device)
            if not slots >> slot & 1:
                request.excluded = exclusion(request, router, slots, every=request.tiered)
        return best

    def _choose(self, request: Request, decided: Decided) -> None:
        """The rung of the decision, and what it lost."""
        rungs, size = request.rungs, request.arrived.block_size
        expected = self._expected_blocks(request, decided)
        if not rungs or expected is None:
            return
        rungs["expected"] = min(expected * size, request.arrived.isl_tokens)
        above = rungs["reachable"] if rungs["capacity"] is None else rungs["capacity"]
        best = None if rungs["best"] is None else rungs["best"] // size
        self._causes.choice(request, decided, best, (above or 0) // size, expected)

    def _expected_blocks(self, request: Request, decided: Decided) -> int | None:
        """Blocks that the router counted; those in the index where its mode counts none."""
        if request.source.mode != READS_CACHES:
            return request.depth
        if decided.cached_blocks is None:
            return request.depth
        counted = min(round(decided.cached_blocks), len(request.hashes))
        if request.device is None or request.depth is None or counted < request.device:
            return counted
        # A decision counts the blocks of the device; what is below them it counts with weights.
        return max(counted, request.depth)

    def _remember(self, request: Request, at: float) -> None:
        """The blocks that the chosen rank has to compute are sent there now."""
        rank = request.rank
        if rank is None:
            return
        held = request.depth or 0
        for depth, block in enumerate(request.hashes[held:], held):
            fate = self._caches.fate(block, at)
            if fate.depth < 0:
                fate.depth = depth
            fate.by, fate.sent_at, fate.foreign = request, at, False

    # -- the judgement ----------------------------------------------------------------

    def _judge_until(self, at: float) -> None:
        """Judge the requests whose late events have come."""
        due = self._due
        while due and due[0][0] <= at:
            self._judge(due.popleft()[1])

    def _judge(self, request: Request) -> None:
        """Judge an ended request, and count it."""
        if request.done:
            return
        request.done = True
        decided = request.decided is not None or not request.source.gives("decisions")
        if request.refused or not decided or request.decided_at == math.inf:
            if self._window.has(request.arrived.at):
                self._skipped["refused" if request.refused else "without a decision"] += 1
        elif self._window.has(request.decided_at):
            self._judge_counted(request)
        elif request.hashes and request.finished is not None:
            self._causes.note_report(request)
        request.hashes, request.gaps, request.senders = (), [], []

    def _judge_counted(self, request: Request) -> None:
        """A request whose decision is in the window."""
        if not request.hashes:
            self._count_bare(request)
            return
        if self._hot is not None:
            self._hot.add(request)
        self._causes.gaps(request, self._now)
        self._causes.prompt(request)
        self._causes.reuse(request)
        self._causes.gains(request)
        self._count(request)

    def _count(self, request: Request) -> None:
        if not request.rungs:
            return
        reported = request.rungs.get("reused") is not None
        if not reported:
            end = request.finished
            self._skipped["still running" if end is None else "reuse not reported"] += 1
        for every, known, _ in self._tallies(request):
            every.add(request)
            if reported:
                known.add(request)

    def _count_bare(self, request: Request) -> None:
        """A request without hashes: its router's count of cached blocks may be all there is."""
        reason = _without_hashes(request)
        self._skipped[reason] += 1
        decided, arrived = request.decided, request.arrived
        if decided is None or decided.cached_blocks is None or reason == _SHORT:
            return
        cached = min(round(decided.cached_blocks) * arrived.block_size, arrived.isl_tokens)
        request.rungs = {**dict.fromkeys(RUNGS), "expected": cached}
        self._bare_skipped[reason] += 1
        self._bare_names.add(arrived.model)
        for _, _, bare in self._tallies(request):
            bare.add(request)

    def _tallies(self, request: Request) -> list[tuple[Tally, Tally, Tally]]:
        """Those of all requests and of the request's group: all, with reported reuse, bare."""
        tallies = [(self._all, self._reported, self._bare)]
        if self._by:
            name = request.group or "-"
            if name not in self._groups and len(self._groups) >= MOST_GROUPS:
                name = _OTHERS
            tallies.append(self._groups.setdefault(name, (Tally(), Tally(), Tally())))
        return tallies

    # -- the report -------------------------------------------------------------------

    @property
    def router(self) -> Router | None:
        """The router of the records as it is now; None where they are of several, or show none."""
        routers = [source.router for source in self._sources.values()]
        return routers[0] if len(routers) == 1 else None

    def report(self, title: str = "") -> HitsReport:
        """The ladder of all records so far; ``title`` names their source."""
        self._judge_until(math.inf)
        for source in self._sources.values():
            for request in source.pending.values():
                self._judge(request)
            source.pending.clear()
        kinds = (self._all, self._reported, self._bare)
        kind = next((kind for kind in (_REPORTED, _ALL, _BARE) if kinds[kind].requests), _ALL)
        tally, skipped = kinds[kind], self._skipped
        if kind == _BARE:
            skipped = skipped - self._bare_skipped
            self._names |= self._bare_names
        rungs = list(self._rungs(tally))
        groups = [
            self._group(name, tallies[kind])
            for name, tallies in self._groups.items()
            if tallies[kind].requests
        ]
        workers = len({key[0] for key in self._caches.ranks})
        if self._hot is not None:
            self._hot.locate(self._holders, self._bytes_per_token)
        return HitsReport(
            source=title,
            start=tally.start if tally.requests else None,
            end=tally.end if tally.requests else None,
            requests=tally.requests,
            prompt_tokens=tally.tokens,
            workers=workers,
            models=sorted(self._names),
            rungs=rungs,
            largest=largest(tally),
            capacity_blocks=self._capacity_blocks(),
            with_twice=_rate_with_twice(tally, rungs),
            by=self._by,
            groups=sorted(groups, key=lambda group: (-group.prompt_tokens, group.name)),
            skipped=dict(skipped),
            left_out=dict(self._caches.left_out),
            foreign_blocks=self._caches.foreign,
            stored_blocks=self._caches.stored,
            doubts=list(self._doubts(tally, rungs)),
        )

    def _holders(self, model: str, hashes: Sequence[int]) -> tuple[list[str], int] | None:
        """The workers that have all of these blocks now, and how many compute prompts of the model;
        None where none reports KV events."""
        names: set[str] = set()
        workers: set[int] = set()
        for source in self._sources.values():
            router = source.router
            mask, _ = _prompt_ranks(router, model)
            if router is None or not source.gives("kv_events"):
                continue
            mask &= ~(router.freshness.none | router.freshness.estimated)
            matches = router.index.find_matches(hashes, mask, len(hashes))
            for slot in slots_of(mask):
                workers.add(router.registry.ref(slot).worker_id)
                device = min(matches.get(slot), len(hashes))
                if self._caches.depth(router, slot, hashes, device) == len(hashes):
                    names.add(router.registry.worker(slot).name)
        return (sorted(names), len(workers)) if workers else None

    def _bytes_per_token(self, model: str) -> float | None:
        """Bytes of the KV cache of a token, where all routers that know it agree."""
        routers = [source.router for source in self._sources.values()]
        tables = [None if router is None else router.transfer for router in routers]
        sizes = {table.size_of(model) for table in tables if table is not None} - {None}
        return sizes.pop() if len(sizes) == 1 else None

    def _capacity_blocks(self) -> int | None:
        """The KV blocks of the fleets of all models; None where one is unknown."""
        blocks = [c.blocks for name, c in self._caches.models.items() if name in self._names]
        known = [number for number in blocks if number is not None]
        return sum(known) if known and len(known) == len(blocks) else None

    def twice_read(self) -> int | None:
        """The number of a recording most of whose requests are in another one too, if any."""
        numbers = (n for n, own in self._sources.items() if 2 * own.shared > own.arrived)
        return next(numbers, None)

    def tier_blocks(self) -> dict[str, int]:
        """The most blocks that any rank had in each tier below its device, where it had any."""
        blocks: dict[str, int] = {}
        for rank in self._caches.ranks.values():
            for place, most in () if rank.lower is None else rank.lower.most_of.items():
                if most > blocks.get(place, 0):
                    blocks[place] = most
        return blocks

    def _rungs(self, tally: Tally) -> Iterator[HitsRung]:
        before: int | None = None
        reachable = tally.rungs.get("reachable")
        whole = reachable in (None, tally.rungs.get("shared"))
        for rung, title in RUNGS.items():
            tokens = tally.rungs.get(rung)
            if (rung == "shared" and whole) or (rung == "prompt" and tokens is None):
                continue
            if tokens is None:
                yield HitsRung(rung, title, unknown=self._why_unknown(rung, tally))
                continue
            steps = ("shared", rung) if rung == "reachable" and whole else (rung,)
            parts = {c: p for (r, c), p in tally.parts.items() if r in steps and p.tokens}
            if before is None:
                yield HitsRung(rung, title, tokens, rate(tokens, tally))
            else:
                lost = before - tokens
                losses = causes(parts, lost, tally)
                yield HitsRung(rung, title, tokens, rate(tokens, tally), lost, losses)
            before = tokens

    def _why_unknown(self, rung: str, tally: Tally) -> str:
        """Which input would give a rung that is unknown."""
        if not tally.requests:
            return self._why_no_requests()
        if tally is self._bare and rung in ("reachable", "capacity", "best"):
            of_dynamo = any(NO_PROMPT_HASHES in why for why in self._bare_skipped)
            return NO_PROMPT_HASHES if of_dynamo else "no request has block hashes"
        if rung in _UNKNOWN_OF_WORKERS:
            return _UNKNOWN_OF_WORKERS[rung]
        if rung == "expected":
            if self._sources_giving("decisions") < len(self._sources):
                return "the recording has no decisions"
            return f"the router mode counts no cached blocks, and {_UNKNOWN_OF_WORKERS['best']}"
        if not self._sources_giving("outcomes"):
            return f"{NO_OUTCOMES}: its frontends report it in usage of their answers"
        return "no engine reported the tokens that it reused"

    def _why_no_requests(self) -> str:
        blind = next((why for why in self._skipped if why.startswith(_NO_HASHES)), None)
        return "no requests" if blind is None else f"the requests are {blind}"

    def _sources_giving(self, kind: str) -> int:
        """How many recordings have records of a kind."""
        return sum(source.gives(kind) for source in self._sources.values())

    def _group(self, name: str, tally: Tally) -> HitsGroup:
        rungs = list(self._rungs(tally))
        worst = next(iter(largest(tally)), None)
        return HitsGroup(
            name,
            tally.requests,
            tally.tokens,
            {rung.rung: rung.rate for rung in rungs},
            "" if worst is None else worst.cause,
            0.0 if worst is None else worst.share,
        )

    def _doubts(self, tally: Tally, rungs: Sequence[HitsRung]) -> Iterator[Doubt]:
        unknown = {rung.title: rung.unknown for rung in rungs if rung.unknown}
        if unknown and tally.requests:
            why = "; ".join(dict.fromkeys(unknown.values()))
            yield doubt("DYR0765", rungs=", ".join(unknown), why=why)
        if tally.requests and not self._warm:
            yield doubt("DYR0766")
        yield from self._doubts_of_blocks(tally)
        silent = self._skipped.get("reuse not reported", 0)
        if silent and rungs and rungs[-1].tokens is not None:
            yield doubt("DYR0769", silent=f"{silent:,}", requests=f"{silent + tally.requests:,}")

    def _doubts_of_blocks(self, tally: Tally) -> Iterator[Doubt]:
        if tally.moved > _MOVED * tally.tokens:
            yield doubt("DYR0770", tokens=f"{tally.moved:,}")
        caches = self._caches
        # Requests that were under way at the start have no arrival.
        if caches.foreign > _FOREIGN * caches.stored:
            yield doubt("DYR0767", blocks=f"{caches.foreign:,}", all=f"{caches.stored:,}")
        if caches.left_out:
            names = some_names(f"{name} ({n:,})" for name, n in caches.left_out.items())
            yield doubt("DYR0768", what=names)


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


def _config(settings: dict[str, Any]) -> RouterConfig:
    """The settings of a recording; those that this release does not have are left out."""
    known = {k: v for k, v in settings.items() if k in RouterConfig.__dataclass_fields__}
    try:
        return RouterConfig().with_values(known)
    except (ConfigError, TypeError, ValueError):
        mode = known.get("router_mode", READS_CACHES)
    try:
        return RouterConfig().with_values({"router_mode": mode})
    except ConfigError:
        return RouterConfig()


def _is_pending(source: RecordedRouter, record: Arrived) -> bool:
    """Whether the same request is under way in this recording."""
    request = source.pending.get(record.id)
    return request is not None and request.arrived.hashes == record.hashes


def _without_hashes(request: Request) -> str:
    """Why a request that was decided has no hashes."""
    arrived, start = request.arrived, request.source.start
    if arrived.isl_tokens < arrived.block_size:
        return _SHORT
    if start is not None and start.source in OF_DYNAMO and arrived.asked.get("not_modelled"):
        return f"without block hashes ({NO_PROMPT_HASHES})"
    if arrived.asked.get("not_modelled"):
        return f"{_NO_HASHES} (cache overlap not modelled: no tokens of the prompt)"
    return _NO_HASHES


def _prompt_ranks(router: Router | None, model: str) -> tuple[int, str]:
    """The ranks that may compute prompts of a model, as a mask, and the name of the model there."""
    if router is None:
        return 0, model
    registry = router.registry
    mask = registry.model(model)
    mask = mask & ~registry.roles[Role.DECODE] or mask & registry.can_prefill
    if mask:
        model = registry.worker((mask & -mask).bit_length() - 1).model
    return mask, model


def _usable_blocks(request: Request, router: Router | None) -> Sequence[int]:
    """The blocks that an engine may reuse: where it reuses exact blocks, not the last token's."""
    hashes, arrived = request.hashes, request.arrived
    if router is None or not router.index.exact:
        return hashes
    return hashes[: max(0, arrived.isl_tokens - 1) // arrived.block_size]


def _rate_with_twice(tally: Tally, rungs: Iterable[HitsRung]) -> float | None:
    """The rate of a cache of twice the size; None where the capacity is unknown."""
    known = any(rung.rung == "capacity" and rung.tokens is not None for rung in rungs)
    return rate(tally.twice, tally) if known else None


def _hour(at: float) -> str:
    if at < _REAL_TIME:
        return f"+{int(at // 3600)} h"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:00Z")


def _domain(worker: Worker) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(worker.domains.items())) or "-"
