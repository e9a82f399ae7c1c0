"""Mutants for decoders and endpoints: ``python -m tests.fuzz [--messages N] [TARGET ...]``."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback

from tests.fuzz.decoders import Target, targets
from tests.fuzz.endpoints import ENDPOINTS, fuzz_endpoints
from tests.fuzz.gateways import GATEWAY, fuzz_gateway
from tests.fuzz.runner import Defect, run, save


def main() -> int:
    """Returns 1 if a message was not handled; it is in the corpus then."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="in total")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("targets", nargs="*", help="names; all if none is given")
    given = parser.parse_args()
    chosen = [one for one in targets() if not given.targets or one.name in given.targets]
    endpoints = not given.targets or ENDPOINTS in given.targets
    gateway = not given.targets or GATEWAY in given.targets
    if not chosen and not endpoints and not gateway:
        names = ", ".join([*(one.name for one in targets()), ENDPOINTS, GATEWAY])
        print(f"no such target: {' '.join(given.targets)}; expected some of {names}")
        return 2
    over_http = given.messages // 100 if endpoints else 0
    streams = given.messages // 100 if gateway else 0
    weights = sum(one.weight for one in chosen)
    total = failed = 0
    for target in chosen:
        share = int((given.messages - over_http - streams) * target.weight / weights) + 1
        total += share
        failed += not _decoder(target, share, given.seed)
    if endpoints:
        total += over_http
        answers = asyncio.run(fuzz_endpoints(over_http, given.seed))
        failed += bool(answers.defects)
        for defect in answers.defects:
            print(f"FAIL  {defect}")
        shown = ", ".join(
            f"{status}: {count:,}" for status, count in sorted(answers.statuses.items())
        )
        print(f"{ENDPOINTS:20} {over_http:>9,} requests  {shown}")
    if gateway:
        total += streams
        failed += not _gateway(streams, given.seed)
    print(f"{total:,} messages with seed {given.seed}, {failed} targets failed")
    return 1 if failed else 0


def _gateway(streams: int, seed: int) -> bool:
    outcomes = asyncio.run(fuzz_gateway(streams, seed))
    for defect in outcomes.defects:
        print(f"FAIL  {defect}")
    shown = ", ".join(f"{end}: {count:,}" for end, count in sorted(outcomes.ends.items()))
    print(
        f"{GATEWAY:20} {streams:>9,} streams   {outcomes.messages:,} messages, the slowest "
        f"{1000 * outcomes.slowest_s:.0f} ms CPU  {shown}"
    )
    return not outcomes.defects


def _decoder(target: Target, messages: int, seed: int) -> bool:
    started = time.process_time()
    try:
        result = run(target, messages, seed)
    except Defect as defect:
        path = save(target.name, defect.message)
        print(f"FAIL  {defect}\n      kept as {path.name} in the corpus")
        if defect.__cause__ is not None:
            traceback.print_exception(defect.__cause__)
        return False
    each = (time.process_time() - started) / messages * 1e6
    print(
        f"{target.name:20} {messages:>9,} messages  read {result.read:,}  "
        f"refused {result.refused:,} in {len(result.outcomes):,} ways  {each:.0f} us CPU each"
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
