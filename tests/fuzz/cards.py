"""Model cards as Dynamo's workers register them, valid and hostile, and what follows them.

Mutated bytes of a card are seldom JSON. This grammar writes whole entries: a worker's instance and
its card, with fields that are absent, null, of other types, out of range, nested or repeated.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

from dynctl.adapters.dynamo.model_files import file_hosts
from dynctl.documents.view import decode_view, encode_view
from dynctl.health.deployment import ProblemCode, join
from dynctl.wire.dynamo.discovery import ModelCard, parse_entry
from router_core import Router, RoutingRequest, WorkerUpserted
from tests.fuzz.mutator import Message

_KEY: Final = "v1/{kind}/dynamo/backend/generate/{worker:x}"
_TEXTS: Final = (
    "", "m", "tiny", "a=b", " a ", "zone", "required", "preferred", "decode", "prefill",
    "aggregated", "Chat | Completions", "Tensor", "a\nb", "\x1b[31m", "\u202e", "é" * 40,
    "x" * 2_000, "../../etc", "http://127.0.0.1:1/f", "http://[", "file:///etc/passwd",
    "nats://h/b", "1e-320",
    "dynamo.topology/zone=a", "blake3:" + "0" * 64, "blake3:", "..", "/", "\ud83d\ude00",
)  # fmt: skip
_NUMBERS: Final = (
    0, 1, 2, 16, 1024, 1025, 2**31, 2**32, 2**53, 2**53 + 1, 2**63, 2**64 - 1, 2**64, 10**40, -1,
    0.5, -0.0, 1e-320, 1e308, 1.0,
)  # fmt: skip
_COUNTS: Final = (
    "total_kv_blocks", "max_num_batched_tokens", "max_num_seqs", "context_length",
    "data_parallel_start_rank", "data_parallel_size",
)  # fmt: skip
_REQUEST: Final = RoutingRequest("x", "tiny", 64, 16, (1, 2, 3, 4))


def card_entries(random: Random) -> Message:
    """The instances and cards of one to three workers: key, value, key, value, ..."""
    made: list[bytes] = []
    for worker in range(1, random.randint(2, 4)):
        place = {
            "namespace": "dynamo", "component": "backend", "endpoint": "generate",
            "instance_id": worker,
        }  # fmt: skip
        instance = {**place, "transport": {"tcp": "127.0.0.1:1/x"}, "device_type": "cuda"}
        card = _card(random)
        _spoilt(random, card)
        _spoilt(random, card.get("runtime_config"))
        model = {"type": "Model", **place, "card_json": card}
        if random.random() < 0.05:
            _spoilt(random, random.choice((instance, model)))
        for kind, entry in (("instances", instance), ("mdc", model)):
            made.append(_KEY.format(kind=kind, worker=worker).encode())
            made.append(json.dumps(entry).encode())
    return tuple(made)


def read_cards(*frames: bytes) -> None:
    """Follow a Dynamo with these entries: join, route to its workers, save and read its view."""
    pairs = zip(frames[::2], frames[1::2], strict=False)
    entries = [
        (key.decode(errors="replace"), parse_entry(key.decode(errors="replace"), value))
        for key, value in pairs
    ]
    deployment = join(entries)
    for problem in deployment.problems:
        assert len(problem.message) < 10_000, problem.message[:200]
    for _, entry in entries:
        if isinstance(entry, ModelCard):
            file_hosts(entry)
    router = Router()
    for item in deployment.workers:
        router.apply(WorkerUpserted(item.worker), 1.0)
    for model in {"tiny", *router.registry.served_names()}:
        router.plan(RoutingRequest("x", model, 64, 16, (1, 2, 3, 4)), detail=True)
    # A card that breaks a rule of Dynamo is routed to, as there, and a view of it is refused.
    if all(problem.code is not ProblemCode.CARD_REJECTED for problem in deployment.problems):
        decode_view(encode_view(router.capture(), now=2.0)).router.plan(_REQUEST)


def _card(random: Random) -> dict[str, Any]:
    domains = {"zone": "a", "rack": "r1"} if random.random() < 0.5 else {}
    policy = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}
    file = {"path": "http://127.0.0.1:1/f", "checksum": "blake3:" + "0" * 64, "size": 10}
    return {
        "display_name": "tiny",
        "source_path": "/models/tiny",
        "model_info": {"hf_config_json": dict(file)},
        "tokenizer": {"hf_tokenizer_json": dict(file)},
        "prompt_formatter": {"hf_tokenizer_config_json": dict(file)},
        "extra_files": [],
        "context_length": 8_192,
        "kv_cache_block_size": 16,
        "model_type": "Chat | Completions",
        "model_input": "Tokens",
        "worker_type": random.choice(("decode", "prefill", "aggregated", None)),
        "needs": random.choice(([], [["prefill"]], None)),
        "aliases": ["other"],
        "lora": {"name": "adapter"} if random.random() < 0.05 else None,
        "router_config": None,
        "migration_limit": 0,
        "runtime_config": {
            **{name: random.choice((1, 2, 128)) for name in _COUNTS},
            "taints": ["t"],
            "topology_domains": domains,
            **(policy if domains else {}),
            "kv_transfer_preferred_weight": None,
            "enable_eagle": False,
            "runtime_data": {},
        },
    }


def _spoilt(random: Random, entry: Any) -> None:
    """Replace some values of an entry, if it is a mapping; a third of the entries stay as is."""
    for _ in range(random.choice((0, 0, 1, 1, 2, 4))):
        parent, at = entry, None
        while isinstance(parent, (dict, list)) and parent:
            names = list(parent) if isinstance(parent, dict) else range(len(parent))
            at = random.choice(names)
            if random.random() < 0.3 or not isinstance(parent[at], (dict, list)) or not parent[at]:
                break
            parent = parent[at]
        if at is None or not isinstance(parent, (dict, list)):
            continue
        if random.random() < 0.1:
            del parent[at]
        else:
            parent[at] = _value(random)


def _value(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return random.choice((None, True, False))
    if kind == 1:
        return random.choice(_NUMBERS)
    if kind < 4:
        return random.choice(_TEXTS)
    values = [_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 4:
        return values
    return {random.choice(_TEXTS): value for value in values}
