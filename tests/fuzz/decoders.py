"""The decoders that `make fuzz` feeds, with valid messages to start from and expected errors.

A decoder reads a message, and what it returns is used as the caller would use it. Any error that
is not in its list is a defect, and so is an error text that is long or has control characters.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from dynctl.base.decode_errors import RequestError, WireError
from dynctl.base.errors import UsageProblem
from dynctl.base.yaml_reader import YamlError, read_yaml_documents
from dynctl.documents import codec, recording, recording_file
from dynctl.documents.fleet_load import Condition, FleetLoad, Transfer, WorkerLoad
from dynctl.documents.index_dump import Chain, RankDump, decode_snapshot, encode_dump
from dynctl.documents.replicas import ReplicaMessage, decode_replica_message, encode_replica_message
from dynctl.documents.route_result import RouteResult
from dynctl.documents.selection import parse_select
from dynctl.documents.view import decode_view, encode_view
from dynctl.documents.workers import RankRow
from dynctl.manifests.files import parse_manifests
from dynctl.serving.engines.facts import (
    bootstrap_address,
    build_worker,
    contradictions,
    event_sources,
)
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.worker_spec import WorkerSpecError, parse_worker_spec, worker_spec
from dynctl.serving.http.busy_threshold import BadBody, read_body
from dynctl.settings.contexts.file import parse as parse_contexts
from dynctl.sources.thresholds.canary import read_condition
from dynctl.wire.anthropic import parse_messages_request
from dynctl.wire.dynamo.active_sequences import decode_sequences
from dynctl.wire.dynamo.discovery import parse_entry
from dynctl.wire.dynamo.events import (
    decode_durable_event,
    decode_forward_pass,
    decode_kv_metrics,
    decode_router_events,
    decode_zmq_frames,
)
from dynctl.wire.dynamo.frontend_log import read_line
from dynctl.wire.dynamo.frontend_metrics import read_frontend_metrics
from dynctl.wire.dynamo.recovery import RecoveryError, parse_recovery
from dynctl.wire.dynamo.request_plane import (
    AnswerDecoder,
    FrameDecoder,
    RawItem,
    decode_reply,
    parse_handshake,
)
from dynctl.wire.dynamo.router_settings import read_router_config
from dynctl.wire.engine_kinds.facts import facts_from_models
from dynctl.wire.engine_kinds.sglang.kind import facts_from_server_info
from dynctl.wire.engine_kinds.simulated import facts_from_info
from dynctl.wire.engine_kinds.table import METRIC_NAMES
from dynctl.wire.engine_metrics import read_engine_metrics
from dynctl.wire.envoy import ext_proc
from dynctl.wire.envoy.ext_proc import ExtProcError
from dynctl.wire.index_events import to_index_events
from dynctl.wire.json_body import decode_object
from dynctl.wire.nvext import parse_nvext
from dynctl.wire.openai import (
    parse_chat_request,
    parse_completion_request,
    parse_embedding_request,
    reported_usage,
)
from dynctl.wire.responses import parse_responses_request
from dynctl.wire.traces import read_trace
from dynctl.wire.vllm_events import decode_batch, decode_message
from router_core import Booked, Dequeued, Enqueued, KvEvent
from router_core.events import BlocksStored
from tests.fuzz.cards import card_entries, read_cards
from tests.fuzz.mutator import Message
from tests.fuzz.streams import read_stream, streams
from tests.golden.fleets import NOW, two_zones

_CAPTURES: Final = Path(__file__).parents[1] / "captures"
_MANIFESTS: Final = Path(__file__).parents[1] / "fixtures" / "manifests"
_LIMIT: Final = 1 << 20


@dataclass(frozen=True)
class Target:
    """One decoder. ``read`` gets the frames of a message; ``errors`` are what it may raise."""

    name: str
    read: Callable[..., Any]
    seeds: Callable[[], list[Message]]
    errors: tuple[type[Exception], ...] = (WireError,)
    #: Share of the messages: slow decoders get fewer.
    weight: float = field(default=1.0)
    #: Writes whole messages; half of those that are fed come from it.
    grammar: Callable[[Random], Message] | None = None


def targets() -> Iterator[Target]:
    """All decoders of bytes that others send."""
    yield Target("vllm-events", _vllm_events, lambda: _frames("vllm-zmq-kv-events"), weight=4)
    yield Target("dynamo-events", _dynamo_events, lambda: _frames("dynamo-events-zmq"), weight=4)
    yield Target("durable-events", _durable_event, _durable_events)
    yield Target("request-plane", _answer, _answers, weight=2)
    yield Target("request-plane-reply", decode_reply, lambda: [(b"\x00\x00\x00\x00",)])
    yield Target("recovery", _recovery, _recoveries)
    yield Target("discovery", _entry, _entries)
    yield Target("model-cards", read_cards, _card_seeds, (), weight=0.5, grammar=card_entries)
    yield Target("router-config", _router_config, _router_configs, (RequestError,))
    yield Target(
        "engine-metrics",
        lambda body: read_engine_metrics(body, METRIC_NAMES),
        _engine_metrics,
        weight=0.5,
    )
    yield Target("engine-facts", _engine_facts, _engine_reports, (RequestError, WorkerSpecError))
    yield Target("usage", reported_usage, _usages)
    yield Target("frontend-metrics", read_frontend_metrics, _frontend_metrics, weight=0.1)
    yield Target("frontend-log", _log_line, _log_lines)
    yield Target("chat", _chat, _chats, (RequestError,), weight=2)
    yield Target("completion", _completion, _completions, (RequestError,), weight=2)
    yield Target("embedding", _embedding, _embeddings, (RequestError,))
    yield Target("nvext", _nvext, _nvexts, (RequestError,))
    yield Target("selection", _selection, _selections, (RequestError,))
    yield Target("busy-threshold", _threshold, _thresholds, (BadBody,))
    yield Target("worker-spec", _worker_spec, _worker_specs, (WorkerSpecError,))
    yield Target("yaml", read_yaml_documents, _yaml, (YamlError,), weight=0.1)
    yield Target("manifests", _manifest, _manifests, (UsageProblem,), weight=0.1)
    yield Target("contexts", _contexts, _toml, (UsageProblem,), weight=0.5)
    yield Target("worker-row", _worker_row, _worker_rows, (RequestError, WorkerSpecError))
    yield Target("view", decode_view, _views, weight=0.5)
    yield Target("route-result", _route_result, _route_results)
    yield Target("fleet-load", _fleet_load, _fleet_loads)
    yield Target("replica-message", decode_replica_message, _replica_messages)
    yield Target("index-dump", _index_dump, _index_dumps)
    yield Target("responses", _responses, _responses_requests, (RequestError,), weight=2)
    yield Target("messages", _messages, _messages_requests, (RequestError,), weight=2)
    yield Target("recording", _recording, _recordings, weight=2)
    yield Target("trace", _trace, _traces, weight=0.2)
    yield Target("canary", _canary, _canaries, (UsageProblem,))
    yield Target("http-stream", read_stream, streams, (UpstreamFailure,), weight=0.1)
    yield Target("ext-proc", ext_proc.decode, _gateway_messages, (ExtProcError,))


# ---- events


def _vllm_events(*frames: bytes) -> None:
    _, _, payload = decode_message(frames)
    to_index_events(decode_batch(payload), 16)


def _dynamo_events(*frames: bytes) -> None:
    envelope = decode_zmq_frames(frames)
    for decode in _BY_TOPIC.get(envelope.topic, tuple(_DECODERS)):
        try:
            decode(envelope.payload)
        except WireError:
            if len(_BY_TOPIC.get(envelope.topic, ())) == 1:
                raise


_DECODERS: Final[tuple[Callable[[bytes], Any], ...]] = (
    decode_router_events,
    decode_kv_metrics,
    decode_sequences,
    decode_forward_pass,
)
_BY_TOPIC: Final[dict[str, tuple[Callable[[bytes], Any], ...]]] = {
    "kv-events": (decode_router_events,),
    "kv_metrics": (decode_kv_metrics,),
    "active_sequences_events": (decode_sequences,),
    "forward-pass-metrics": (decode_forward_pass,),
}


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_CAPTURES / name).read_text().splitlines()]


def _frames(name: str) -> list[Message]:
    rows = _rows(f"{name}.jsonl")
    messages = [tuple(bytes.fromhex(frame) for frame in row["frames_hex"]) for row in rows]
    return sorted(messages, key=lambda frames: sum(map(len, frames)))[:100]


def _durable_event(payload: bytes) -> None:
    decode_durable_event(payload)


def _durable_events() -> list[Message]:
    block = {"block_hash": 7, "tokens_hash": 8}
    stored = {"stored": {"parent_hash": None, "blocks": [block]}}
    removed = {"removed": {"block_hashes": [7]}}
    event = {"event_id": 3, "dp_rank": 0, "data": stored}
    plain = {"worker_id": 2**63, "event": event}
    return _encoded(
        plain,
        {**plain, "storage_tier": "device"},
        {**plain, "event": {**event, "data": removed}},
        {**plain, "event": {**event, "data": "cleared"}},
    )


# ---- Dynamo's request plane and discovery


def _answer(received: bytes) -> None:
    for item in _items(received):
        item.decode()


def _items(received: bytes) -> Iterator[RawItem]:
    frames = FrameDecoder()
    frames.feed(received)
    greeting = frames.next_frame(_LIMIT)
    if greeting is None:
        return
    parse_handshake(greeting)
    decoder = AnswerDecoder("msgpack", _LIMIT, frames)
    while (step := decoder.next_step()) is not None:
        if isinstance(step, RawItem):
            yield step


def _answers() -> list[Message]:
    rows = _rows("dynamo-request-plane.jsonl")
    return [(bytes.fromhex(row["answer_hex"]),) for row in rows if _is_msgpack(row)]


def _is_msgpack(row: dict[str, Any]) -> bool:
    return row["codec"] == "msgpack" and row["answer_hex"] is not None


def _recovery(item: bytes) -> None:
    read = parse_recovery(RawItem(item, "msgpack"))
    if not isinstance(read, RecoveryError) and hasattr(read, "events"):
        for _ in read.events.slices():
            pass


def _recoveries() -> list[Message]:
    return [
        (msgspec.msgpack.encode(item.decode()),)
        for (answer,) in _answers()
        for item in _items(answer)
    ]


def _entry(key: bytes, value: bytes) -> None:
    parse_entry(key.decode(errors="replace"), value)


def _entries() -> list[Message]:
    found = json.loads((_CAPTURES / "etcd-disagg-required.json").read_text())
    return [(key.encode(), json.dumps(row["value"]).encode()) for key, row in found.items()]


def _card_seeds() -> list[Message]:
    return [card_entries(Random(seed)) for seed in range(8)]


def _router_config(body: bytes) -> None:
    read_router_config(decode_object(body, _LIMIT))


def _router_configs() -> list[Message]:
    return _encoded(*json.loads((_CAPTURES / "card-router-config.json").read_text()))


# ---- texts


def _engine_metrics() -> list[Message]:
    return [
        (
            b"# HELP vllm:num_requests_waiting x\n# TYPE vllm:num_requests_waiting gauge\n"
            b'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0\n'
            b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            b'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="1024"} 1.0\n',
        ),
        (b'sglang:num_queue_reqs{dp_rank="1"} 2\nsglang:token_usage{dp_rank="1"} NaN\n',),
    ]


def _engine_facts(body: bytes) -> None:
    answer, spec = decode_object(body, _LIMIT), parse_worker_spec("http://10.0.0.1:1,name=a")
    for facts in (
        facts_from_info(answer, "10.0.0.1"),
        facts_from_models(answer),
        facts_from_server_info(answer, "10.0.0.1"),
    ):
        contradictions(spec, facts)
        worker = build_worker(spec, facts, model="demo", block_size=16)
        event_sources(spec, facts, worker)
        bootstrap_address(spec, facts)


def _engine_reports() -> list[Message]:
    events = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    card = {"total_kv_blocks": 100, "topology_domains": {"zone": "a"}, "data_parallel_size": 2}
    endpoints = [{"endpoint": "tcp://10.0.0.1:5", "replay": "tcp://10.0.0.1:6", "topic": "kv"}]
    info = {
        "simulated": True,
        "model": "demo",
        "role": "decode",
        "block_size": 16,
        "lora": ["x"],
        "engine_id": "e",
    }
    adapter = {"id": "x", "parent": "demo"}
    server = {"page_size": 64, "max_total_num_tokens": 6400, "dp_size": 2}
    return _encoded(
        {
            **info,
            "engine_id": "e",
            "runtime_config": card,
            "kv_events": endpoints,
            "can_prefill": True,
        },
        {"data": [{"id": "demo", "max_model_len": 2048, "parent": None}, adapter]},
        {**server, "kv_events_config": json.dumps(events), "disaggregation_mode": "prefill"},
        {**server, "kv_events_config": events, "disaggregation_bootstrap_port": 8998},
    )


def _gateway_messages() -> list[Message]:
    made = json.loads((_CAPTURES.parent / "dynctl/wire/ext_proc_messages.json").read_text())
    return [(bytes.fromhex(one),) for one in made["requests"].values()]


def _usages() -> list[Message]:
    usage = {"prompt_tokens": 45, "prompt_tokens_details": {"cached_tokens": 32}}
    return _encoded({"choices": [], "usage": usage})


def _frontend_metrics() -> list[Message]:
    return [(path.read_bytes(),) for path in sorted(_CAPTURES.glob("metrics-frontend-*.txt"))]


def _log_line(line: bytes) -> None:
    read_line(line.decode(errors="replace"))


def _log_lines() -> list[Message]:
    return [
        (
            b"2026-11-20T10:00:00.000000Z  INFO dynamo_llm::kv_router: Selected worker: "
            b'worker_id=123 dp_rank=0, logit: 12.500, cached blocks: 4 request_id="r-1"',
        ),
        (
            b'{"time":"2026-11-20T10:00:00Z","level":"INFO","message":"Selected worker",'
            b'"worker_id":123,"dp_rank":0,"logit":12.5,"request_id":"r-1"}',
        ),
        (b'2026-11-20T10:00:00Z WARN scheduling failed: all workers busy request_id="r-2"',),
    ]


def _yaml() -> list[Message]:
    return [*_manifests(), (b"a: &a {x: 1}\nb: {<<: *a, c: !!int 3}\n---\n- |\n  x\n",)]


def _manifests() -> list[Message]:
    return [(path.read_bytes(),) for path in sorted(_MANIFESTS.glob("*.yaml"))[:20]]


def _manifest(text: bytes) -> None:
    parse_manifests(text, "x.yaml")


def _contexts(text: bytes) -> None:
    parse_contexts(Path("contexts.toml"), text.decode(errors="replace"))


def _toml() -> list[Message]:
    return [
        (
            b'current = "prod"\n[contexts.prod]\nfrontend = ["http://10.0.0.1:8000"]\n'
            b'namespace = "dynamo"\ntimeout = 5\n[contexts.local]\netcd-endpoints = "a:2379"\n',
        )
    ]


def _worker_spec(text: bytes) -> None:
    parse_worker_spec(text.decode(errors="replace"))


def _worker_specs() -> list[Message]:
    return [
        (
            b"http://127.0.0.1:8001,name=a,role=prefill,zone=zone-a,dp=2,block_size=16,"
            b"total_blocks=100,taint=x/y,kv-events=tcp://127.0.0.1:5557",
        ),
        (b"https://[::1]:8001/v1,name=b,kv-events=ipc:///run/e.sock,replay=tcp://10.0.0.1:1",),
    ]


def _worker_row(body: bytes) -> None:
    worker_spec(decode_object(body, _LIMIT), where="body")


def _worker_rows() -> list[Message]:
    row = {"url": "http://127.0.0.1:8001", "name": "a", "role": "decode", "zone": "a", "dp": 2}
    return _encoded(row, {**row, "domains": {"rack": "1"}, "taints": ["x/y"], "block_size": 16})


# ---- JSON bodies


def _chat(body: bytes) -> None:
    parse_chat_request(decode_object(body, _LIMIT))


def _completion(body: bytes) -> None:
    parse_completion_request(decode_object(body, _LIMIT))


_NVEXT: Final = {
    "annotations": ["token_ids"],
    "backend_instance_id": 2**63,
    "token_data": [1, 2, 3],
    "agent_hints": {"priority": 1},
    "extra_fields": ["worker_id"],
}


def _chats() -> list[Message]:
    message = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"model": "demo", "messages": [message], "stream": True, "max_tokens": 3}
    return _encoded(body, {**body, "tools": tools, "nvext": _NVEXT, "n": 1, "stop": ["x"]})


def _completions() -> list[Message]:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 3}
    return _encoded(body, {**body, "prompt": [[1, 2], [3]]}, {**body, "prompt": ["a", "b"]})


def _embedding(body: bytes) -> None:
    parse_embedding_request(decode_object(body, _LIMIT))


def _embeddings() -> list[Message]:
    body = {"model": "demo", "input": "hello", "dimensions": 3}
    more = {"encoding_format": "base64", "nvext": _NVEXT}
    return _encoded(body, {**body, "input": [[1, 2], [3]]}, {**body, "input": ["a", "b"], **more})


def _nvext(body: bytes) -> None:
    parse_nvext(decode_object(body, _LIMIT))


def _nvexts() -> list[Message]:
    return _encoded(_NVEXT)


def _selection(body: bytes) -> None:
    parse_select(decode_object(body, _LIMIT))


def _selections() -> list[Message]:
    return _encoded(
        {"model": "demo", "token_ids": [1, 2, 3], "hops": "prefill", "allowed_worker_ids": [4]},
        {"model": "demo", "block_hashes": [1, 2], "isl_tokens": 40, "routing_constraints": {}},
    )


def _responses(body: bytes) -> None:
    parse_responses_request(decode_object(body, _LIMIT))


def _responses_requests() -> list[Message]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    content = [{"type": "input_text", "text": "hello"}]
    item = {"role": "user", "content": content, "type": "message", "status": "completed"}
    tool = {"type": "function", "name": "f", "parameters": {}}
    body = {"model": "demo", "input": "hello", "max_output_tokens": 3, "nvext": _NVEXT}
    more = {"tools": [tool], "instructions": "x", "reasoning": {"effort": "low"}}
    return _encoded(body, {**body, **more, "input": [item, call, output], "stream": True})


def _messages(body: bytes) -> None:
    parse_messages_request(decode_object(body, _LIMIT))


def _messages_requests() -> list[Message]:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}, use]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "demo", "max_tokens": 3, "messages": messages, "system": "s"}
    tool = {"name": "f", "input_schema": {}, "description": "d"}
    more = {"thinking": {"type": "enabled"}, "tools": [tool], "nvext": _NVEXT}
    return _encoded(body, {**body, **more, "system": [{"type": "text", "text": "s"}]})


def _recording(hashes: bytes, body: bytes) -> None:
    """A chunk with these hashes and this MessagePack; its lengths and checksum are right."""
    columns = hashes[: len(hashes) // 8 * 8]
    payload = (len(columns) // 8).to_bytes(4, "little") + columns + zlib.compress(body, 1)
    head = recording_file.ChunkHeader(
        0, False, 3, 1.0, 2.0, len(payload), len(body), zlib.crc32(payload)
    )  # fmt: skip
    for record in recording_file.decode_chunk(head, payload):
        assert 0 <= record.at < 253_402_300_800


def _recordings() -> list[Message]:
    hashes = tuple(range(4))
    made: list[recording.Record] = [
        recording.Start(1.0, "frontend", "r", "1", {"router_mode": "kv"}, {"m": 16}),
        recording.Arrived(1.0, "a", "m", 64, 16, hashes, asked={"allowed": [1]}),
        recording.Changed(1.0, Booked("a", "aggregated", 7, 0, 64, hashes)),
        recording.Decided(1.0, "a", "m", None, (7, 0), 0.0, 0.0, 2.0, None, why="load"),
        recording.Changed(1.5, KvEvent(7, 0, BlocksStored(None, hashes, hashes))),
        recording.Changed(1.5, Enqueued("q", "m", "default", 32, 0, 1.5, lane=(7, 0))),
        recording.Changed(1.6, Dequeued("q", (("default", 1),))),
        recording.Finished(2.0, "a", 200, "success", 64, 16, 5, 0.1),
        recording.Noted(2.0, "stopped", "recording", text="the end"),
    ]
    found: list[Message] = []
    for at in range(0, len(made), 3):
        writer = recording_file.ChunkWriter()
        for record in made[at : at + 3]:
            writer.add(record)
        data = recording_file.pack_chunk(writer.take())
        head = recording_file.chunk_header(data)
        assert head is not None
        payload = data[-head.length :]
        columns = 4 + 8 * int.from_bytes(payload[:4], "little")
        found.append((payload[4:columns], zlib.decompress(payload[columns:])))
    return found


def _trace(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            for one in read_trace(Path(file.name)):
                assert one.input_tokens > 0
        except WireError as error:
            raise WireError("trace", error.problem) from None


def _traces() -> list[Message]:
    line = {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]}
    lines = b"\n".join(json.dumps({**line, "timestamp": at}).encode() for at in (0, 27.5, 3000))
    head = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = b"2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    return [(lines,), (head + rows,)]


def _canary(text: bytes) -> None:
    read_condition(text.decode(errors="replace"))


def _canaries() -> list[Message]:
    return [(b"refused>1%",), (b"ttft_p99>2s",), (b"itl_p99.9>80ms",), (b"hits<30%",)]


def _threshold(body: bytes) -> None:
    read_body("application/json", body)


def _thresholds() -> list[Message]:
    return _encoded({"model": "demo", "active_decode_blocks_threshold": 0.8})


def _route_result(body: bytes) -> None:
    codec.decode(body, RouteResult)


def _route_results() -> list[Message]:
    hop = {"id": "x", "stage": "prefill", "mode": "kv", "outcome": "selected", "candidates": []}
    sizes = {"model": "demo", "mode": "kv", "tokens": 3, "block_size": 16, "blocks": 0}
    return _encoded({**sizes, "winner": {}, "prefill": hop, "decode": None})


def _views() -> list[Message]:
    router = two_zones().view.router
    return [(encode_view(router.capture(), now=NOW),)]


def _replica_messages() -> list[Message]:
    alive = ReplicaMessage("alive", "http://a:8000", 7, 3, [1, 2])
    part = ReplicaMessage("bookings", "a", 7, 3, part=1, parts=2, events=b"\x80")
    return [(encode_replica_message(one),) for one in (alive, part)]


def _index_dump(body: bytes) -> None:
    for rank in decode_snapshot(body)[1]:
        for event in rank.events():
            assert len(event.block_hashes) == len(
                getattr(event, "local_hashes", event.block_hashes)
            )


def _index_dumps() -> list[Message]:
    chain = Chain(None, bytes(16), bytes(range(16)))
    rank = RankDump(1, 0, "m", 16, "tcp://e:1", 7, 9, [chain], [(0, 2)], {"disk": [(None, 1, 2)]})
    return [(b"".join(encode_dump("1", [rank])),)]


def _fleet_load(body: bytes) -> None:
    codec.decode(body, FleetLoad)


def _fleet_loads() -> list[Message]:
    load = FleetLoad(
        at=1.0,
        version="1",
        cards="x",
        loads=[WorkerLoad(1, [RankRow(0)])],
        conditions=[Condition("EVENTS_LOST", "w", "3 batches", 1.0, 2.0)],
        transfers=[Transfer("zone", "a", 1, 2)],
        thresholds={"demo": {"active_decode_blocks_threshold": 0.5}},
    )
    return [(codec.encode(load),)]


def _encoded(*bodies: Any) -> list[Message]:
    return [(json.dumps(body).encode(),) for body in bodies]
