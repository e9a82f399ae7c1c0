"""Dynamo's side of the router benchmarks; runs under a Python that has ai-dynamo-runtime.

Not imported by ours: `harness.peer_or_none` starts it and speaks JSON lines with it. Times are of
the CPU.
"""

import asyncio
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("DYN_LOG", "error")

import decision_workload  # type: ignore[import-not-found]
import prefix_workload  # type: ignore[import-not-found]
from dynamo._core import (  # type: ignore[import-not-found]
    RadixTree,
    SelectionService,
    compute_block_hash_for_seq,
)


def resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class Index:
    """Hashes of tokens, and the prefix index."""

    def __init__(self):
        self.tree = RadixTree()
        self.documents = []

    async def hash(self, tokens, block_size, inner, seed):
        source = random.Random(seed)
        prompt = [source.randrange(150_000) for _ in range(tokens)]
        start = time.process_time_ns()
        for _ in range(inner):
            compute_block_hash_for_seq(prompt, block_size)
        return (time.process_time_ns() - start) / inner

    async def build(self, degree, staggered, length=prefix_workload.LENGTH):
        """Events a second, JSON bytes in (the binding takes nothing else), and memory taken.

        The binding applies events in a thread of its own: the CPU is that of the whole process,
        until an answer shows that all are applied.
        """
        gc.collect()
        tree = RadixTree()
        self.documents = prefix_workload.documents(degree, length)
        events = [
            (worker, _stored(number, parent, names, local))
            for number, (worker, parent, names, local) in enumerate(
                prefix_workload.events(self.documents, degree, staggered=staggered)
            )
        ]
        before, worst, began = resident_bytes(), 0, time.process_time_ns()
        for worker, event in events:
            start = time.process_time_ns()
            tree.apply_event(worker, event)
            worst = max(worst, time.process_time_ns() - start)
        tree.find_matches(self.documents[-1][:1])
        spent = time.process_time_ns() - began
        gc.collect()
        memory = resident_bytes() - before
        self.tree = tree
        return {
            "events_per_s": len(events) / spent * 1e9,
            "worst_ms": worst / 1e6,
            "bytes": memory,
            "entries": sum(map(len, self.documents)) * degree,
        }

    async def find(self, blocks, inner):
        """Nanoseconds a call; the scores read as a dict of workers."""
        prompts = [document[:blocks] for document in self.documents]
        find = self.tree.find_matches
        start = time.process_time_ns()
        for number in range(inner):
            find(prompts[number % len(prompts)])
        return (time.process_time_ns() - start) / inner

    async def scores(self, document, blocks):
        scores = self.tree.find_matches(self.documents[document][:blocks]).scores
        return sorted([worker, depth] for (worker, _rank), depth in scores.items())


def _stored(number, parent, names, local):
    """One event in JSON."""
    blocks = [
        {"block_hash": name, "tokens_hash": value} for name, value in zip(names, local, strict=True)
    ]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


class Select:
    """The SelectionService."""

    def __init__(self):
        self.service = SelectionService(indexer_threads=1)
        self.tokens = 0

    async def register(self, workers, tokens, publishers, silent):
        """Make the fleet known. ``publishers``: worker number -> endpoint of its KV events."""
        self.tokens = tokens
        for number in range(workers):
            await self.service.upsert_worker(
                {
                    "worker_id": number + 1,
                    "model_name": decision_workload.MODEL,
                    "endpoint": f"http://worker-{number}:1",
                    "block_size": decision_workload.BLOCK,
                    "kv_events_endpoints": {0: publishers.get(str(number), silent)},
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "max_num_batched_tokens": decision_workload.MAX_BATCHED_TOKENS,
                    "total_kv_blocks": decision_workload.TOTAL_KV_BLOCKS,
                }
            )

    async def overlaps(self):
        """Document -> worker id -> blocks that it has of the document, as the service sees it."""
        known = {}
        for number, text in enumerate(decision_workload.documents(self.tokens)):
            answer = await self.service.overlap_scores(_prompt(text))
            known[number] = {
                str(row["worker_id"]): row["device_blocks"]
                for row in answer["workers"]
                if row["device_blocks"]
            }
        return known

    async def book(self, count, seed):
        """Give ``count`` requests to the fleet, so that there is load to weigh."""
        for number, prompt in enumerate(decision_workload.prompts(self.tokens, count, seed)):
            await self.service.select_and_reserve(
                {**_prompt(prompt), "selection_id": f"booked-{number}"}
            )

    async def select(self, inner, seed):
        """Nanoseconds a decision: ``inner`` prompts in turn, after as many to warm up."""
        prompts = decision_workload.prompts(self.tokens, 2 * inner, seed)
        for prompt in prompts[:inner]:
            await self.service.select(_prompt(prompt))
        start = time.process_time_ns()
        for prompt in prompts[inner:]:
            await self.service.select(_prompt(prompt))
        return (time.process_time_ns() - start) / inner


def _prompt(tokens):
    return {"model_name": decision_workload.MODEL, "token_ids": tokens}


async def main():
    side = Index() if sys.argv[1] == "index" else Select()
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        answer = await getattr(side, request.pop("op"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
