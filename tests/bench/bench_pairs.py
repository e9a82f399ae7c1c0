"""Prefill and decode of a request: hop by hop, as the best pair, and with distances.

Half of the workers are prefill, half decode workers, in 4 zones of 8 racks, all loaded differently;
the prompt has 4,096 tokens. Under `required` a KV cache stays in its zone.
"""

import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from router_core import (
    Booked,
    Link,
    ModelRuntimeConfig,
    Role,
    Router,
    RouterConfig,
    RoutingRequest,
    TransferTable,
    TransferTableSet,
    Worker,
    WorkerUpserted,
)
from tests.bench.harness import Options, Row, measure, row

TABLE = TransferTable(
    (("rack", Link(2e-5, 5e10)), ("zone", Link(5e-4, 3e9))), Link(3e-2, 6e8), 131_072
)
REQUIRED = {"kv_transfer_domain": "zone"}
BEST = {**REQUIRED, "router_pair_selection": "best"}
DISTANCE = {"router_kv_transfer_weight": 50.0, "router_kv_transfer_qos": "links.yaml"}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hop by hop", REQUIRED),
    ("best pair", BEST),
    ("best pair with distances", {**BEST, **DISTANCE}),
)


def build(workers: int, settings: Mapping[str, Any]) -> Router:
    """A fleet with its load."""
    router = Router(RouterConfig().with_values(settings))
    router.apply(TransferTableSet(TABLE), 0.0)
    source = random.Random(workers)
    for number in range(workers):
        place = number // 2
        domains = {"zone": f"z{place % 4}", "rack": f"r{place // 4 % 8}", "host": f"h{number}"}
        role = Role.DECODE if number % 2 else Role.PREFILL
        card = ModelRuntimeConfig(topology_domains=domains)
        worker = Worker(number + 1, f"w{number}", "m", role, runtime_config=card)
        assert router.apply(WorkerUpserted(worker), 0.0).ok
    for number in range(3 * workers):
        holder = source.randrange(workers)
        decode = holder % 2
        booked = Booked(
            f"b{number}",
            "decode" if decode else "prefill",
            holder + 1,
            0,
            prefill_tokens=0 if decode else source.randrange(2_000),
            anonymous_blocks=source.randrange(100) if decode else 0,
        )
        assert router.apply(booked, 0.0).ok
    return router


def rows(options: Options) -> Iterator[Row]:
    rounds, inner = (1, 1) if options.smoke else (9, 20)
    request = RoutingRequest.from_tokens("r", "m", range(4_096), 16)
    for workers in (16, 1_024):
        for name, settings in CASES:
            plan = partial(build(workers, settings).plan, request)
            assert plan().prefill is not None
            taken = measure(plan, rounds, inner=inner) / 1000
            yield row(f"{workers:,} workers, {name}: a plan", "us", taken)
