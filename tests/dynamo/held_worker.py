"""A Dynamo worker that responds on command, so that load in flight is exact, not timed.

Runs under a Python that has ai-dynamo; :mod:`tests.dynamo.held` speaks with it over stdin and
stdout, a JSON object a line. Its own output and Dynamo's logs go to stderr. It ends when stdin
ends, so it does not outlive the test that started it.

A request is held before its first token (``prefill``) or after it (``decode``) if the switch of
that name was on when the request arrived. Commands::

    {"op": "hold", "prefill": bool, "decode": bool}     for requests that arrive from now on
    {"op": "requests"}                                  -> [{"id", "tokens", "state"}]
    {"op": "step", "id": ID | null}                     end the present hold of one, or of all
    {"op": "release", "id": ID | null}                  let it (or all) run to its end
    {"op": "store" | "remove", "tokens": [int]}         publish KV events for a prompt's blocks
    {"op": "tier", "tokens": [int], "medium": "CPU", "first": 2}  stored there, from a block on
    {"op": "load", "active_decode_blocks": n | null, "kv_used_blocks": n | null, "dp_rank": 0}
"""

import argparse
import asyncio
import hashlib
import json
import os
import struct
import sys
import time
from dataclasses import dataclass, field

# Before Dynamo is imported: nothing but our answers may reach the parent's pipe.
_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import msgspec  # noqa: E402
import zmq  # noqa: E402
from dynamo.common.utils.runtime import create_runtime  # type: ignore[import-not-found] # noqa: E402
from dynamo.common.utils.topology import (  # type: ignore[import-not-found] # noqa: E402
    apply_topology_config,
)
from dynamo.llm import (  # type: ignore[import-not-found] # noqa: E402
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
)

# Any id of the tiny vocabulary that is neither a special token nor the end.
TOKEN = 100


@dataclass
class Held:
    """One request, and where it stands: prefill | decode | done | cancelled | failed."""

    id: str
    tokens: int
    hold_prefill: bool
    hold_decode: bool
    state: str = "prefill"
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self):
        self.go.set()

    def release(self):
        self.hold_prefill = self.hold_decode = False
        self.go.set()


class Worker:
    def __init__(self, arguments, events, metrics, engine):
        self.role = arguments.role
        self.block_size = arguments.block_size
        self.caches = arguments.cache
        self.eagle = arguments.eagle
        self.bodies = []
        self.events = events
        self.metrics = metrics
        self.engine = engine
        self.engine_events = 0
        self.hold = {"prefill": False, "decode": False}
        self.requests = {}

    async def generate(self, request, context):
        prompt = request["token_ids"]
        self.bodies = [*self.bodies[-63:], {k: v for k, v in request.items() if k != "token_ids"}]
        key = f"{context.id()}"
        held = Held(key, len(prompt), self.hold["prefill"], self.hold["decode"])
        self.requests[key] = held
        try:
            if held.hold_prefill and not await self._wait(held, context):
                return
            if self.caches and self.role != "decode":
                routing = request.get("routing") or {}
                self.store(prompt, routing.get("lora_name"), routing.get("cache_salt"))
            limit = 1 if self.role == "prefill" else request["stop_conditions"]["max_tokens"] or 16
            held.state = "decode"
            for number in range(1, limit + 1):
                chunk = {"token_ids": [TOKEN], "index": 0}
                if number == limit:
                    chunk["finish_reason"] = "length"
                    chunk["completion_usage"] = {
                        "prompt_tokens": len(prompt),
                        "completion_tokens": limit,
                        "total_tokens": len(prompt) + limit,
                    }
                if self.role == "prefill":
                    chunk["disaggregated_params"] = {"held": key}
                # The hold comes after the first token and before anything that would end the
                # stream: a request of one token is held with its first chunk sent unfinished.
                if number == 1 and held.hold_decode and limit == 1:
                    yield {"token_ids": [TOKEN], "index": 0}
                    chunk["token_ids"] = []
                    if not await self._wait(held, context):
                        return
                yield chunk
                holds = number == 1 and limit > 1 and held.hold_decode
                if holds and not await self._wait(held, context):
                    return
            held.state = "done"
        finally:
            if held.state not in ("done", "cancelled"):
                held.state = "failed"

    async def _wait(self, held, context):
        """True once the command to continue arrives; False if the client left."""
        go = asyncio.ensure_future(held.go.wait())
        left = asyncio.ensure_future(context.async_killed_or_stopped())
        await asyncio.wait({go, left}, return_when=asyncio.FIRST_COMPLETED)
        went = go.done()
        go.cancel()
        left.cancel()
        if not went:
            held.state = "cancelled"
        held.go.clear()
        return went

    def store(self, tokens, lora=None, salt=None):
        size = self.block_size
        # Speculative decoding: a block is known once the token behind it is.
        count = (len(tokens) - 1 if self.eagle else len(tokens)) // size
        if count and self.events is not None:
            used = list(tokens[: count * size + self.eagle])
            self.events.publish_stored(
                used,
                [size] * count,
                self._names(used),
                lora_name=lora,
                is_eagle=self.eagle or None,
                cache_salt=salt,
            )

    def store_in(self, medium, tokens, first):
        """As an engine that names the medium: with ``--tiers`` its events are relayed."""
        names = self._names(tokens)
        event = {
            "type": "BlockStored",
            "block_hashes": names[first:],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": list(tokens[first * self.block_size : len(names) * self.block_size]),
            "block_size": self.block_size,
            "medium": medium,
        }
        self.engine.send_multipart(
            [
                b"",
                struct.pack(">Q", self.engine_events),
                msgspec.msgpack.encode([time.time(), [event], 0]),
            ]
        )
        self.engine_events += 1

    def _names(self, tokens):
        """An engine's own block hashes: one for each prefix, unlike the router's on purpose."""
        names = []
        digest = hashlib.blake2b(digest_size=8)
        for start in range(0, len(tokens) // self.block_size * self.block_size, self.block_size):
            digest.update(repr(tokens[start : start + self.block_size]).encode())
            names.append(int.from_bytes(digest.digest(), "big") >> 1)
        return names

    def command(self, order):
        match order["op"]:
            case "hold":
                self.hold = {"prefill": order["prefill"], "decode": order["decode"]}
            case "requests":
                return [
                    {"id": held.id, "tokens": held.tokens, "state": held.state}
                    for held in self.requests.values()
                ]
            case "step" | "release" as op:
                chosen = [order["id"]] if order["id"] is not None else list(self.requests)
                for key in chosen:
                    getattr(self.requests[key], op)()
            case "store":
                self.store(order["tokens"], order.get("lora"), order.get("salt"))
            case "tier":
                self.store_in(order["medium"], order["tokens"], order["first"])
            case "bodies":
                return self.bodies
            case "remove":
                # Leaf first, as engines evict.
                self.events.publish_removed(self._names(order["tokens"])[::-1])
            case "load":
                self.metrics.publish(
                    order["dp_rank"],
                    active_decode_blocks=order["active_decode_blocks"],
                    kv_used_blocks=order["kv_used_blocks"],
                )
            case unknown:
                raise ValueError(f"unknown op {unknown!r}")
        return None


async def commands(worker):
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = {"answer": worker.command(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _answers.write(json.dumps(answer) + "\n")


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--role", choices=("aggregated", "prefill", "decode"), required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--total-blocks", type=int, default=512)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--taint", action="append", default=[])
    parser.add_argument("--cache", action="store_true", help="publish a prompt's blocks once seen")
    parser.add_argument("--publish", action="store_true", help="a decode worker publishes too")
    parser.add_argument("--tiers", action="store_true", help="events only by the op tier")
    parser.add_argument("--component", help="default: prefill, or backend for the other roles")
    parser.add_argument("--context-length", type=int, help="the longest prompt, in the card")
    parser.add_argument("--eagle", action="store_true", help="a card of speculative decoding")
    parser.add_argument("--alias", action="append", default=[], help="another name of the model")
    parser.add_argument("--lora", action="append", default=[], help="an adapter, as a model")
    parser.add_argument("--needs-nothing", action="store_true", help="decode that can prefill")
    parser.add_argument("--engine-specific", action="append", default=[], help="NAME=JSON")
    arguments = parser.parse_args()

    environment = os.environ
    runtime, _ = create_runtime(
        environment.get("DYN_DISCOVERY_BACKEND", "file"),
        environment.get("DYN_REQUEST_PLANE", "tcp"),
        environment.get("DYN_EVENT_PLANE", "zmq"),
    )
    component = arguments.component or ("prefill" if arguments.role == "prefill" else "backend")
    endpoint = runtime.endpoint(f"{arguments.namespace}.{component}.generate")

    config = ModelRuntimeConfig()
    config.total_kv_blocks = arguments.total_blocks
    config.max_num_seqs = 256
    config.max_num_batched_tokens = arguments.max_batched_tokens
    config.data_parallel_size = 1
    publishes = arguments.role != "decode" or arguments.publish
    config.enable_local_indexer = publishes
    if hasattr(config, "kv_event_publishing_enabled"):  # from Dynamo 1.4 on
        config.kv_event_publishing_enabled = publishes
    config.enable_eagle = arguments.eagle
    if arguments.context_length is not None:
        config.context_length = arguments.context_length
    for text in arguments.engine_specific:
        name, _, value = text.partition("=")
        config.set_engine_specific(name, json.loads(value))
    apply_topology_config(config)
    if arguments.taint:
        config.taints = set(arguments.taint)

    events = None
    engine = None
    if publishes:
        relayed = {}
        if arguments.tiers:
            engine = zmq.Context.instance().socket(zmq.PUB)
            port = engine.bind_to_random_port("tcp://127.0.0.1")
            relayed["zmq_endpoint"] = f"tcp://127.0.0.1:{port}"
        events = KvEventPublisher(
            endpoint, kv_block_size=arguments.block_size, enable_local_indexer=True, **relayed
        )
    metrics = WorkerMetricsPublisher()
    await metrics.create_endpoint(endpoint)
    worker = Worker(arguments, events, metrics, engine)
    serving = asyncio.ensure_future(endpoint.serve_endpoint(worker.generate))
    kinds = {
        "aggregated": (WorkerType.Aggregated, []),
        "prefill": (WorkerType.Prefill, [[WorkerType.Decode]]),
        "decode": (WorkerType.Decode, [[WorkerType.Prefill]]),
    }
    worker_type, needs = kinds[arguments.role]
    surface = ModelType.Chat | ModelType.Completions
    card = {
        "worker_type": worker_type,
        "needs": [] if arguments.needs_nothing else needs,
        "kv_cache_block_size": arguments.block_size,
        "runtime_config": config,
    }
    model_type = ModelType.Empty if arguments.role == "prefill" else surface
    await register_model(
        ModelInput.Tokens,
        model_type,
        endpoint,
        arguments.model_path,
        arguments.model_name,
        **({"model_aliases": arguments.alias} if arguments.alias else {}),
        **card,
    )
    for lora in arguments.lora:
        await register_model(
            ModelInput.Tokens,
            model_type,
            endpoint,
            arguments.model_path,
            lora_name=lora,
            base_model_path=arguments.model_path,
            **card,
        )
    control = asyncio.ensure_future(commands(worker))
    await asyncio.wait({serving, control}, return_when=asyncio.FIRST_COMPLETED)
    runtime.shutdown()
    for held in worker.requests.values():
        held.release()
    serving.cancel()


if __name__ == "__main__":
    asyncio.run(main())
