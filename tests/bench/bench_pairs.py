"""Prefill and decode of a request: hop by hop, with distances, as the best pair.

    python -m tests.bench.bench_pairs [--smoke]

Half of the workers are prefill, half decode workers, in 4 zones of 8 racks, all loaded differently;
the prompt has 4,096 tokens. Under `required` a KV cache stays in its zone. Without a policy every
pair is possible; the last rows compare the best pair with trying the decode hop for each prefill
worker, which finds the same.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from router_core import (
    Booked,
    Link,
    ModelRuntimeConfig,
    Role,
    Router,
    RouterConfig,
    RoutingPlan,
    RoutingRequest,
    TransferTable,
    TransferTableSet,
    Worker,
    WorkerUpserted,
)
from tests.bench.harness import Row, bench_parser, measure, print_table, row

LEVELS = TransferTable(
    (("rack", Link(2e-5, 5e10)), ("zone", Link(5e-4, 3e9))), Link(3e-2, 6e8), 131_072
)
#: Each worker is a rack of its own: no two prefill workers are in one group.
SINGLE = replace(LEVELS, levels=(("host", Link(1e-6, 4e11)), *LEVELS.levels))
DISTANCE = {"router_kv_transfer_weight": 50.0, "router_kv_transfer_qos": "links.yaml"}
BEST = {"router_pair_selection": "best"}
REQUIRED = {"kv_transfer_domain": "zone"}
CASES = (
    ("hop by hop, required", REQUIRED, LEVELS),
    ("hop by hop, required, distances", {**REQUIRED, **DISTANCE}, LEVELS),
    ("best pair, required", {**REQUIRED, **BEST}, LEVELS),
    ("best pair, required, distances", {**REQUIRED, **BEST, **DISTANCE}, LEVELS),
    ("best pair, no policy, distances", {**BEST, **DISTANCE}, LEVELS),
    ("best pair, no policy, distances, no two in one place", {**BEST, **DISTANCE}, SINGLE),
)


def build(workers: int, settings: Mapping[str, Any], table: TransferTable) -> Router:
    """A fleet with its load."""
    router = Router(RouterConfig().with_values(settings))
    router.apply(TransferTableSet(table), 0.0)
    source = random.Random(workers)
    for number in range(workers):
        place = number // 2
        domains = {"zone": f"z{place % 4}", "rack": f"r{place // 4 % 8}", "host": f"h{number}"}
        role = Role.DECODE if number % 2 else Role.PREFILL
        card = ModelRuntimeConfig(topology_domains=domains)
        one = Worker(number + 1, f"w{number}", "m", role, runtime_config=card)
        assert router.apply(WorkerUpserted(one), 0.0).ok
    for number in range(3 * workers):
        worker = source.randrange(workers)
        decode = worker % 2
        booked = Booked(
            f"b{number}",
            "decode" if decode else "prefill",
            worker + 1,
            0,
            prefill_tokens=0 if decode else source.randrange(2_000),
            anonymous_blocks=source.randrange(100) if decode else 0,
        )
        assert router.apply(booked, 0.0).ok
    return router


def exhaustive(router: Router, request: RoutingRequest, made: RoutingPlan) -> float:
    """The lowest sum of all pairs, by the decode hop after each prefill candidate."""
    assert made.prefill is not None
    lowest = float("inf")
    for position, own in enumerate(made.prefill.own_costs):
        after = router.continue_plan(request, replace(made.prefill, winner=position)).decode
        assert after is not None
        lowest = min(lowest, own + min(after.costs))
    return lowest


def main() -> None:
    arguments = bench_parser(__doc__).parse_args()
    inner, rounds = (1, 1) if arguments.smoke else (20, 9)
    request = RoutingRequest.from_tokens("r", "m", range(4_096), 16)
    rows: list[Row] = []
    for workers in (16, 1_024):
        fleets = [(name, build(workers, settings, table)) for name, settings, table in CASES]
        for name, router in fleets:
            taken = measure(
                partial(router.plan, request), rounds, inner=inner, clock=time.process_time_ns
            )
            rows.append(row(f"{workers:,} workers: {name}", "us CPU", taken / 1_000))
        router = fleets[-1][1]
        made = router.plan(request)
        assert made.prefill is not None
        assert min(made.prefill.costs) == exhaustive(router, request, made)
        taken = measure(
            partial(exhaustive, router, request, made),
            1 if arguments.smoke else 3,
            clock=time.process_time_ns,
        )
        rows.append(
            row(f"{workers:,} workers: the same, every pair tried", "us CPU", taken / 1_000)
        )
    print_table("pairs", rows)


if __name__ == "__main__":
    main()
