"""CPU time of decisions in two checkouts, in turns and with the same prompts.

    python -m tests.bench.compare_trees OLD NEW [--workers N] [--rounds N] [--prompts N]

Each checkout has a process with its own `.venv`, which fills the caches of `scale_workload` and
makes decisions as `scale_router` does, without sockets and events: hash, plan, book, notify the
observers; the prompt is computed 0.2 s later and its request ends after 2 s, by a clock that a
decision moves by 0.5 ms. Both must choose the same workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from statistics import median
from typing import Any

_PREFILL_S, _RESPONSE_S, _STEP_S = 0.2, 2.0, 0.0005
_CONVERSATIONS = 12
_WARM = 10


def measured(tree: str, workers: int, prompts: int) -> None:
    """In the process of a checkout: a line of CPU seconds by part for each line of stdin."""
    sys.path.insert(0, tree)
    os.chdir(tree)
    # Those of the checkout.
    from tests.bench import scale_workload as workload

    workload.CONVERSATIONS_HELD = _CONVERSATIONS
    from dynctl.serving.http.start import settle_garbage_collector
    from dynctl.serving.telemetry.observers import RequestRecord
    from router_core import RoutingRequest
    from tests.bench import scale_router as bench

    router = bench.ScaleRouter(workers, [])
    router.fill()
    settle_garbage_collector()
    service, clock, draw = router._service, time.thread_time, random.Random(5)
    now, first = 1000.0, [0] * workers
    service.clock = lambda: now
    service.sample = random.Random(9).random
    more: dict[str, Any] = {}
    if "chained" in RoutingRequest.__slots__:
        more["chained"] = True
    started: deque[tuple[float, str]] = deque()
    running: deque[tuple[float, Any]] = deque()
    chosen = 0
    print("ready", flush=True)
    for _ in sys.stdin:
        ready = [workload.as_array(router._fleet.prompt(draw, first)) for _ in range(prompts)]
        parts: dict[str, float] = defaultdict(float)
        for ids in ready:
            now += _STEP_S
            at = clock()
            while started and started[0][0] <= now:
                service.prefill_done(started.popleft()[1])
            while running and running[0][0] <= now:
                record = running.popleft()[1]
                service.free(record.decision_id)
                record.status, record.outcome, record.finished_at = 200, "success", now
                for observer in service.observers:
                    observer.on_finished(record)
            parts["end"] -= at - (at := clock())
            hashes = router._hasher.hash_prompt(ids)
            parts["hash"] -= at - (at := clock())
            request = RoutingRequest(
                id=service.new_id(), model=workload.MODEL, isl_tokens=len(ids),
                block_size=workload.BLOCK, sequence_hashes=hashes.sequence,
                local_hashes=hashes.local, arrived_at=now, **more,
            )  # fmt: skip
            record = RequestRecord(request.id, request.id, "chat", now, 0.0, model=workload.MODEL)
            for observer in service.observers:
                observer.on_received(record)
            plan = service.plan(request)
            parts["plan"] -= at - (at := clock())
            decision = plan.final
            service.book(decision, request, record)
            parts["book"] -= at - (at := clock())
            service.decided(plan, request, record)
            parts["notify"] -= at - clock()
            chosen = (chosen * 31 + decision.require().worker_id) % 2**48
            started.append((now + _PREFILL_S, request.id))
            running.append((now + _RESPONSE_S, record))
        print(json.dumps({"chosen": chosen, "parts": parts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=500, help="of each turn")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        return measured(str(given.old), given.workers, given.prompts)
    trees = [given.old.resolve(), given.new.resolve()]
    options = ["--workers", str(given.workers), "--prompts", str(given.prompts), "--measure"]
    children = [
        subprocess.Popen(
            [tree / ".venv/bin/python", __file__, tree, tree, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree in trees
    ]

    def turn(child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        found: dict[str, Any] = json.loads(child.stdout.readline())
        return found

    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        made: list[list[dict[str, Any]]] = [[], []]
        for number in range(_WARM + given.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                made[which].append(turn(children[which]))
        old, new = (rows[_WARM:] for rows in made)
        assert old[-1]["chosen"] == new[-1]["chosen"], "the checkouts chose different workers"
        for part in ("all", *old[0]["parts"]):
            both = [
                [sum(row["parts"].values()) if part == "all" else row["parts"][part] for row in of]
                for of in (old, new)
            ]
            ratios = sorted(b / a for a, b in zip(*both, strict=True))
            before, after = (median(of) / given.prompts * 1e6 for of in both)
            print(
                f"{part:8} {before:8.1f} -> {after:8.1f} us, ratio {median(ratios):.2f}"
                f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
