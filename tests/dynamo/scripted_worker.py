"""A Dynamo worker whose answers are written in the prompts, so that any output can be had.

Runs under a Python that has ai-dynamo. A prompt contains ``@@SCRIPT@@``, where SCRIPT is JSON::

    {"key": 7, "chunks": [{"token_ids": [5, 6]}, {"token_ids": [], "finish_reason": "stop"}]}

The worker sends the chunks as they are. ``raise`` raises an exception with that text after them (of
the class that ``kind`` names), ``hold`` waits for the end of the request after them. Every request
is appended to the file of ``--record`` as one JSON line, with its key. It ends when stdin ends.
"""

import argparse
import asyncio
import json
import os
import re
import sys

from dynamo.common.utils.runtime import create_runtime  # type: ignore[import-not-found]
from dynamo.llm import (  # type: ignore[import-not-found]
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from tokenizers import Tokenizer

try:
    from dynamo.llm.exceptions import InvalidArgument  # type: ignore[import-not-found]
except ImportError:  # a version without it
    InvalidArgument = ValueError
_ERRORS = {each.__name__: each for each in (RuntimeError, TypeError, ValueError, KeyError)}
_ERRORS["InvalidArgument"] = InvalidArgument
_SCRIPT = re.compile(r"@@(.*?)@@", re.DOTALL)


class Worker:
    def __init__(self, tokenizer, record):
        self.tokenizer = tokenizer
        self.record = record

    async def generate(self, request, context):
        text = self.tokenizer.decode(request["token_ids"], skip_special_tokens=False)
        found = _SCRIPT.search(text)
        script = json.loads(found[1]) if found else {"chunks": []}
        line = json.dumps({"key": script.get("key"), "body": request})
        self.record.write(line + "\n")
        self.record.flush()
        for chunk in script.get("chunks", ()):
            yield chunk
        if "hold" in script:
            await context.async_killed_or_stopped()
        if "raise" in script:
            raise _ERRORS[script.get("kind", "RuntimeError")](script["raise"])


async def until_stdin_ends():
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--component", default="backend")
    parser.add_argument("--record", required=True)
    parser.add_argument(
        "--model", action="append", required=True, help="NAME=JSON of fields of the card"
    )
    parser.add_argument("--lora", action="append", default=[], help="an adapter of the first model")
    parser.add_argument("--no-base", action="store_true", help="register adapters only")
    arguments = parser.parse_args()
    with open(arguments.record, "a") as record:
        asyncio.run(serve(arguments, record))


async def serve(arguments, record):
    environment = os.environ
    runtime, _ = create_runtime(
        environment.get("DYN_DISCOVERY_BACKEND", "file"),
        environment.get("DYN_REQUEST_PLANE", "tcp"),
        environment.get("DYN_EVENT_PLANE", "zmq"),
    )
    tokenizer = Tokenizer.from_file(f"{arguments.model_path}/tokenizer.json")
    worker = Worker(tokenizer, record)
    tasks = [asyncio.ensure_future(until_stdin_ends())]
    for number, text in enumerate(arguments.model):
        name, _, fields = text.partition("=")
        config = ModelRuntimeConfig()
        config.total_kv_blocks = 512
        config.max_num_seqs = 256
        config.max_num_batched_tokens = 8192
        config.data_parallel_size = 1
        for field, value in json.loads(fields or "{}").items():
            setattr(config, field, value)
        component = f"{arguments.component}{number or ''}"
        endpoint = runtime.endpoint(f"{arguments.namespace}.{component}.generate")
        tasks.append(asyncio.ensure_future(endpoint.serve_endpoint(worker.generate)))
        adapters = [] if number else arguments.lora
        path = arguments.model_path
        cards = [(each, {"lora_name": each, "base_model_path": path}) for each in adapters]
        if not arguments.no_base:
            cards.insert(0, (name, {}))
        for each, lora in cards:
            await register_model(
                ModelInput.Tokens,
                ModelType.Chat | ModelType.Completions,
                endpoint,
                path,
                each,
                worker_type=WorkerType.Aggregated,
                kv_cache_block_size=16,
                runtime_config=config,
                **lora,
            )
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    runtime.shutdown()
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    main()
