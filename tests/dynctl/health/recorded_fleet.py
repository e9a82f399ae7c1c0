"""A small fleet with caches whose faults are chosen, and the records that its routers would write.

The routers are real ones; engines are LRU caches whose prefill takes ``prefill_s``.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, product
from random import Random
from typing import Any

from dynctl.documents.recording import (
    KINDS,
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
    NO_CONSTRAINTS,
    BlocksRemoved,
    BlocksStored,
    Change,
    Freed,
    IndexMarked,
    KvEvent,
    ModelRuntimeConfig,
    PrefillDone,
    Role,
    Router,
    RouterConfig,
    RoutingConstraints,
    RoutingPlan,
    RoutingRequest,
    TaintConstraint,
    Worker,
    WorkerLost,
    WorkerUpserted,
)

SIZE = 16
MODEL = "tiny"


@dataclass(frozen=True)
class Prompt:
    """A request: the contents of its blocks, and what else it has."""

    at: float
    blocks: tuple[int, ...]
    tail: int = 5
    tenant: str = ""
    adapter: str = ""
    required: tuple[str, ...] = ()
    segments: tuple[tuple[str, int], ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.blocks) * SIZE + self.tail

    @property
    def ids(self) -> array[int]:
        """Its token ids: two of each block are its content."""
        found = array("I")
        for one in self.blocks:
            found.extend((one % 2**32, one >> 32, *[0] * (SIZE - 2)))
        return found + array("I", [0] * self.tail)


@dataclass
class Engine:
    """The cache of one worker: names of blocks are their sequence hashes."""

    number: int
    blocks: int
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True)
class RecordedFleet:
    """Its records are those of a recording of ``routers`` routers; see the fields for the faults.

    ``other_block_size``: workers with blocks of twice the tokens. ``conditions``: ``began``, or
    ``holds`` where the recording begins later than they. ``silent``: workers whose events are lost
    from that time on; with ``gaps`` the router notices. ``restarts``: times at which a worker loses
    its cache. ``reuses``: tokens that an engine reports of those that it has. ``state``: whether
    the recording begins with the router's state.
    ``decoders``: decode workers, in the zones in turn; the others then only compute prompts, and a
    decision is recorded when the prompt is computed. ``lost``: times at which workers are lost.
    """

    workers: int = 4
    blocks: int = 4_000
    config: Mapping[str, Any] = field(default_factory=dict)
    routers: int = 1
    kv_events: bool = True
    delay_s: float = 0.001
    prefill_s: float = 0.05
    silent: Mapping[int, float] = field(default_factory=dict)
    gaps: bool = True
    other_block_size: frozenset[int] = frozenset()
    conditions: str = "began"
    restarts: Mapping[int, float] = field(default_factory=dict)
    zones: Sequence[str] = ()
    reuses: Callable[[int], int] = lambda tokens: tokens
    seed: int = 1
    state: bool = False
    exact: bool = True
    decoders: int = 0
    lost: Mapping[int, float] = field(default_factory=dict)

    def worker(self, number: int) -> Worker:
        zone = {"zone": self.zones[number % len(self.zones)]} if self.zones else {}
        return Worker(
            number + 1,
            f"worker-{number}",
            MODEL,
            role=self._role(number),
            block_size=SIZE * (1 + (number in self.other_block_size)),
            kv_events=self.kv_events,
            runtime_config=ModelRuntimeConfig(
                total_kv_blocks=self.blocks, topology_domains=zone, max_num_batched_tokens=8192
            ),
        )

    def _role(self, number: int) -> Role:
        if not self.decoders:
            return Role.AGGREGATED
        return Role.PREFILL if number < self.workers else Role.DECODE

    def records(self, prompts: Sequence[Prompt]) -> list[Record]:
        return [*self._records(prompts)]

    def _records(self, prompts: Sequence[Prompt]) -> Iterator[Record]:
        random, order = Random(self.seed), count()
        config = RouterConfig().with_values(dict(self.config))
        routers = [Router(config, exact_reuse=self.exact, learns=True) for _ in range(self.routers)]
        engines = [Engine(number, self.blocks) for number in range(self.workers)]
        settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
        kinds = frozenset(KINDS) - (frozenset() if self.kv_events else {"kv_events"})
        yield Start(0.0, "frontend", "test", "1", settings, {MODEL: SIZE}, self.exact, True, kinds)
        if self.state:
            yield State(0.0, routers[0].snapshot())
        coming: list[tuple[float, int, Callable[[float], Iterator[Record]]]] = []

        def at(when: float, what: Callable[[float], Iterator[Record]]) -> None:
            heappush(coming, (when, next(order), what))

        def everywhere(now: float, change: Change) -> Iterator[Record]:
            for router in routers:
                router.apply(change, now)
            yield Changed(now, change)

        def announce(engine: Engine, change: Change, now: float) -> None:
            number = engine.number
            if not self.kv_events:
                return
            event = getattr(change, "event", None)
            if number in self.other_block_size and isinstance(event, BlocksStored):
                # Every second block ends one of the engine's, under a name of its own.
                names = tuple(one ^ 1 for one in event.block_hashes[1::2])
                local = tuple(one ^ 1 for one in event.local_hashes[1::2])
                change = KvEvent(number + 1, 0, BlocksStored(None, names, local))
            elif number in self.other_block_size:
                return
            if now >= self.silent.get(number, float("inf")):
                return
            at(now + self.delay_s, lambda when: everywhere(when, change))

        def finish(
            now: float, request: RoutingRequest, router: Router, plan: RoutingPlan
        ) -> Iterator[Record]:
            engine = engines[plan.first.require().worker_id - 1]
            hashes, cached = list(request.sequence_hashes), engine.cached
            held = next((i for i, one in enumerate(hashes) if one not in cached), len(hashes))
            reused = self.reuses(min(held, (request.isl_tokens - 1) // SIZE) * SIZE)
            for block in reversed(hashes):
                cached.pop(block, None)
                cached[block] = None
            gone = []
            while len(cached) > engine.blocks:
                gone.append(cached.popitem(last=False)[0])
            if gone:
                removed = BlocksRemoved(tuple(gone))
                announce(engine, KvEvent(engine.number + 1, 0, removed), now)
            if held < len(hashes):
                parent = hashes[held - 1] if held else None
                local = request.local_hashes[held:]
                stored = BlocksStored(parent, tuple(hashes[held:]), tuple(local))
                announce(engine, KvEvent(engine.number + 1, 0, stored), now)
            if self.decoders:
                freed = Freed(request.id, "prefill")
                router.apply(freed, now)
                yield Changed(now, freed)
                # The events of the prompt come before the decode worker is chosen.
                answer = partial(decode, request=request, router=router, plan=plan, reused=reused)
                at(now + 2 * self.delay_s, answer)
            else:
                yield from end(now, request, router, reused)

        def decode(
            now: float, request: RoutingRequest, router: Router, plan: RoutingPlan, reused: int
        ) -> Iterator[Record]:
            plan = router.continue_plan(request, plan.first)
            if plan.decode is not None and plan.decode.winner is not None:
                booked = router.booking(plan.decode, request)
                router.apply(booked, now)
                yield Changed(now, booked)
            yield decided(now, plan)
            yield from end(now, request, router, reused)

        def end(
            now: float, request: RoutingRequest, router: Router, reused: int
        ) -> Iterator[Record]:
            for change in (PrefillDone(request.id), Freed(request.id)):
                router.apply(change, now)
                yield Changed(now, change)
            yield Finished(
                now,
                request.id,
                200,
                "success",
                request.isl_tokens,
                reused,
                1,
                self.prefill_s,
                None,
                None,
            )

        def arrive(now: float, prompt: Prompt, name: str) -> Iterator[Record]:
            number = random.randrange(self.routers)
            router = routers[number]
            constraints = NO_CONSTRAINTS
            if prompt.required:
                constraints = RoutingConstraints(
                    tuple(TaintConstraint(one, "required") for one in prompt.required)
                )
            request = RoutingRequest.from_tokens(
                name,
                MODEL,
                prompt.ids,
                SIZE,
                constraints=constraints,
                lora_name=prompt.adapter or None,
                cache_salt=prompt.tenant or None,
            )
            asked = {"required": list(prompt.required)} if prompt.required else {}
            yield Arrived(
                now,
                name,
                MODEL,
                prompt.tokens,
                SIZE,
                tuple(request.sequence_hashes),
                bool(prompt.tenant),
                prompt.tenant,
                prompt.adapter,
                asked=asked,
                router=number,
                segments=prompt.segments,
            )
            plan = router.plan(request, samples=(random.random(), random.random()))
            first = plan.first
            if not plan.ok or first.winner is None:
                yield Decided(now, name, MODEL, outcome=plan.final.outcome)
                yield Finished(now, name, 503, "refused")
                return
            booked = router.booking(first, request)
            router.apply(booked, now)
            yield Changed(now, booked)
            if not self.decoders:
                yield decided(now, plan)
            done = now + self.prefill_s
            at(done, lambda when: finish(when, request, router, plan))

        def decided(now: float, plan: RoutingPlan) -> Decided:
            first = plan.first
            refs = [
                None if one is None or one.ref is None else (one.ref.worker_id, one.ref.dp_rank)
                for one in (plan.prefill, plan.decode)
            ]
            cached = best = None
            if first.inputs is not None and first.winner is not None:
                cached = float(first.overlap_blocks(first.winner))
                best = float(max(first.inputs.overlap_blocks, default=0))
            return Decided(
                now,
                plan.id,
                MODEL,
                refs[0],
                refs[1],
                cached_blocks=cached,
                best_cached_blocks=best,
                cost=None if first.winner is None else first.costs[first.winner],
                margin=first.margin,
                outcome=plan.final.outcome,
            )

        def restart(now: float, engine: Engine) -> Iterator[Record]:
            engine.cached.clear()
            yield from everywhere(now, WorkerLost(engine.number + 1))
            for router in routers:
                while router.sweep(100_000):
                    pass
            yield from everywhere(now, WorkerUpserted(self.worker(engine.number)))

        for number in range(self.workers + self.decoders):
            yield from everywhere(0.0, WorkerUpserted(self.worker(number)))
        for number in self.other_block_size:
            name = f"worker-{number}"
            yield Noted(0.0, self.conditions, name, "BLOCK_SIZE_MISMATCH", "blocks of 32")
        for number, when in self.restarts.items():
            at(when, lambda now, number=number: restart(now, engines[number]))  # type: ignore[misc]
        for number, when in self.lost.items():
            gone = WorkerLost(number + 1)
            at(when, lambda now, gone=gone: everywhere(now, gone))  # type: ignore[misc]
        if self.gaps:
            for number, when in self.silent.items():
                mark = IndexMarked(number + 1, 0, "gapped", 3)
                at(when, lambda now, mark=mark: everywhere(now, mark))  # type: ignore[misc]
        for number, prompt in enumerate(sorted(prompts, key=lambda one: one.at)):
            at(
                prompt.at,
                lambda now, prompt=prompt, number=number: arrive(now, prompt, f"r{number}"),  # type: ignore[misc]
            )
        while coming:
            when, _, what = heappop(coming)
            yield from what(when)


def chats(
    conversations: int = 12,
    turns: int = 6,
    *,
    every_s: float = 1.0,
    shared: int = 8,
    own: int = 2,
    tenants: Sequence[str] = ("",),
    adapters: Sequence[str] = ("",),
    seed: int = 7,
) -> list[Prompt]:
    """Conversations in turn: ``shared`` blocks that a conversation repeats, ``own`` new ones.

    With ``tenants`` and ``adapters`` every conversation is sent by each tenant to each adapter.
    """
    random = Random(seed)
    prompts, now = [], 1.0
    starts = [tuple(random.getrandbits(63) for _ in range(shared)) for _ in range(conversations)]
    for _ in range(turns):
        for start in random.sample(starts, len(starts)):
            for tenant, adapter in product(tenants, adapters):
                own_blocks = tuple(random.getrandbits(63) for _ in range(own))
                prompts.append(Prompt(now, start + own_blocks, tenant=tenant, adapter=adapter))
                now += every_s / conversations
    return prompts


def in_zones(prompts: Sequence[Prompt], zones: Sequence[str]) -> list[Prompt]:
    """Each prompt must stay in one of ``zones``, in turn."""
    taints = [f"dynamo.topology/zone={zone}" for zone in zones]
    return [replace(one, required=(taints[i % len(taints)],)) for i, one in enumerate(prompts)]
