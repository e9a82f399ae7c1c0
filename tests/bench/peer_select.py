"""Dynamo's SelectionService in a process of its own; runs under a Python that has the runtime.

Not imported by ours: `harness.Peer` starts it and speaks JSON lines with it.
"""

import asyncio
import json
import os
import sys
import time

os.environ.setdefault("DYN_LOG", "error")

import decision_workload as workload  # type: ignore[import-not-found]
from dynamo._core import SelectionService  # type: ignore[import-not-found]


class Side:
    def __init__(self):
        self.service = SelectionService(indexer_threads=1)
        self.tokens = 0

    async def build(self, workers, tokens, publishers, silent):
        """Register the fleet. ``publishers``: worker number -> endpoint of its KV events."""
        self.tokens = tokens
        for number in range(workers):
            await self.service.upsert_worker(
                {
                    "worker_id": number + 1,
                    "model_name": workload.MODEL,
                    "endpoint": f"http://worker-{number}:1",
                    "block_size": workload.BLOCK,
                    "kv_events_endpoints": {0: publishers.get(str(number), silent)},
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "max_num_batched_tokens": workload.MAX_BATCHED_TOKENS,
                    "total_kv_blocks": workload.TOTAL_KV_BLOCKS,
                }
            )

    async def overlaps(self):
        """Worker id -> blocks it holds of each document, as the service sees it."""
        found = {}
        for number, text in enumerate(workload.documents(self.tokens)):
            answer = await self.service.overlap_scores(
                {"model_name": workload.MODEL, "token_ids": text}
            )
            found[number] = {
                str(row["worker_id"]): row["device_blocks"]
                for row in answer["workers"]
                if row["device_blocks"]
            }
        return found

    async def book(self, count, seed):
        """Give ``count`` requests to the fleet, so that there is load to weigh."""
        for number, prompt in enumerate(workload.prompts(self.tokens, count, seed)):
            await self.service.select_and_reserve(
                {
                    "model_name": workload.MODEL,
                    "token_ids": prompt,
                    "selection_id": f"booked-{number}",
                }
            )

    async def select(self, inner, seed):
        """Nanoseconds of CPU a decision: ``inner`` prompts in turn, after as many to warm up."""
        prompts = workload.prompts(self.tokens, 2 * inner, seed)
        select = self.service.select
        for prompt in prompts[:inner]:
            await select({"model_name": workload.MODEL, "token_ids": prompt})
        start = time.process_time_ns()
        for prompt in prompts[inner:]:
            await select({"model_name": workload.MODEL, "token_ids": prompt})
        return (time.process_time_ns() - start) / inner


async def main():
    side = Side()
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        answer = await getattr(side, request.pop("op"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
