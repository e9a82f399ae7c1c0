"""Dynamo's side of the router benchmarks; runs under a Python that has ai-dynamo-runtime.

Not imported by ours: `harness.Peer` starts it and speaks JSON lines with it.
"""

import gc
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("DYN_LOG", "error")

import prefix_workload as workload  # type: ignore[import-not-found]
from dynamo._core import (  # type: ignore[import-not-found]
    RadixTree,
    compute_block_hash_for_seq,
)


def resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def per_call(fn, inner):
    start = time.process_time_ns()
    for _ in range(inner):
        fn()
    return (time.process_time_ns() - start) / inner


class Side:
    def __init__(self):
        self.tree = RadixTree()
        self.documents = []

    def hash(self, tokens, block_size, inner, seed):
        source = random.Random(seed)
        prompt = [source.randrange(150_000) for _ in range(tokens)]
        return per_call(lambda: compute_block_hash_for_seq(prompt, block_size), inner)

    def build(self, degree, staggered, length=workload.LENGTH):
        """Events a CPU second, JSON bytes in (the binding takes nothing else), and memory taken."""
        gc.collect()
        tree = RadixTree()
        self.documents = workload.documents(degree, length)
        before = resident_bytes()
        spent = count = entries = worst = 0
        for number, (worker, parent, names, local) in enumerate(
            workload.events(self.documents, degree, staggered=staggered)
        ):
            blocks = [
                {"block_hash": name, "tokens_hash": value}
                for name, value in zip(names, local, strict=True)
            ]
            data = {"stored": {"parent_hash": parent, "blocks": blocks}}
            event = json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()
            start = time.process_time_ns()
            tree.apply_event(worker, event)
            taken = time.process_time_ns() - start
            worst = max(worst, taken)
            spent += taken
            count += 1
            entries += len(local)
        gc.collect()
        memory = resident_bytes() - before
        self.tree = tree
        return {
            "events_per_s": count / spent * 1e9,
            "worst_ms": worst / 1e6,
            "bytes": memory,
            "entries": entries,
        }

    def find(self, blocks, inner):
        """CPU nanoseconds a call; the scores read as a dict of workers."""
        prompts = [document[:blocks] for document in self.documents]
        find = self.tree.find_matches
        start = time.process_time_ns()
        for number in range(inner):
            find(prompts[number % len(prompts)])
        return (time.process_time_ns() - start) / inner

    def scores(self, document, blocks):
        found = self.tree.find_matches(self.documents[document][:blocks]).scores
        return sorted([worker, depth] for (worker, _rank), depth in found.items())


def main():
    side = Side()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(side, request.pop("op"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
