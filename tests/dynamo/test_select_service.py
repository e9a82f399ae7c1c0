"""`serve router` as Dynamo's selection service and slot tracker: the same answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from dynctl.wire.vllm_events import BlockRemoved, BlockStored, EventBatch, encode_message
from tests.dynamo.services import Reply, Services, send
from tests.ports import free_port
from tests.waiting import until_now

BLOCK, MODEL = 4, "tiny"


@pytest.fixture(scope="module")
def select(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    directory = tmp_path_factory.mktemp("select")
    ours = ["serve", "router", "--http-port", "0", "--select-service-port", "{port}"]
    with Services(["dynamo.select_service"], ours, directory) as made:
        yield made


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    directory = tmp_path_factory.mktemp("slots")
    ours = ["serve", "router", "--http-port", "0", "--slot-tracker-port", "{port}"]
    with Services(["dynamo.slot_tracker"], ours, directory) as made:
        yield made


def settled(value: Any) -> Any:
    """The answer without the order of Dynamo's tables: rows and taints have none."""
    if isinstance(value, dict):
        return {key: sorted(one) if key == "taints" else settled(one) for key, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sorted(map(settled, value), key=lambda row: json.dumps(row, sort_keys=True))
    return value


def same(pair: Services, method: str, path: str, body: Any = None, **more: Any) -> Reply:
    """The answer of both; raises AssertionError if they differ."""
    theirs, ours = pair.both(method, path, body, **more)
    expected = (theirs.status, theirs.kind, settled(theirs.body))
    assert (ours.status, ours.kind, settled(ours.body)) == expected, (method, path, body, more)
    return theirs


def worker(number: int, **more: Any) -> dict[str, Any]:
    fields = {
        "worker_id": number,
        "model_name": MODEL,
        "endpoint": f"http://worker-{number}:1",
        "block_size": BLOCK,
        "kv_events_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    return fields | more


REFUSED: tuple[tuple[str, str, bytes], ...] = (
    ("POST", "/workers", b"{}"),
    ("POST", "/workers", b""),
    ("POST", "/workers", b'{"worker_id":"x"}'),
    ("POST", "/workers", b'{"worker_id":1,"taints":[5]}'),
    ("POST", "/workers", b'{"worker_id":1,"topology_domains":[]}'),
    ("POST", "/workers", b'{"worker_id":1,"is_eagle":5}'),
    ("POST", "/workers", b'{"worker_id":1,"kv_transfer_preferred_weight":"x"}'),
    ("POST", "/workers", b'{"worker_id":1,"kv_transfer_enforcement":"sometimes"}'),
    ("POST", "/select", b"{}"),
    ("POST", "/select", b'{"model_name":5}'),
    ("POST", "/select", b'{"token_ids":"x"}'),
    ("POST", "/select", b'{"token_ids":[-1]}'),
    ("POST", "/select", b'{"token_ids":[1],"isl_tokens":-1}'),
    ("POST", "/select", b'{"token_ids":[1],"pinned_worker":5}'),
    ("POST", "/select", b'{"token_ids":[1],"pinned_worker":{}}'),
    ("POST", "/select", b'{"token_ids":[1],"routing_constraints":{"required_taints":5}}'),
    ("POST", "/select", b'{"token_ids":[1],"allowed_worker_ids":["x"]}'),
    ("POST", "/select", b'{"token_ids":[1],"selection_id":5}'),
    ("POST", "/select", b'{"token_ids":[1],'),
    ("POST", "/reservations", b"{}"),
    ("POST", "/reservations", b'{"selection_id":"never"}'),
    ("POST", "/reservations", b'{"selection_id":"x","worker_id":"y"}'),
    ("POST", "/potential_loads", b'{"token_ids":5}'),
    ("POST", "/overlap_scores", b"{}"),
    ("POST", "/select_and_reserve", b'{"token_ids":[1]}'),
    ("POST", "/reservations/none/output_block", b"{}"),
    ("POST", "/reservations/none/prefill_complete", b"{}"),
    ("PATCH", "/workers/9", b"{}"),
    ("PATCH", "/workers/x", b"{}"),
    ("POST", "/replica_sync/register_peer", b'{"endpoint":"tcp://127.0.0.1:5"}'),
)


def test_what_is_refused_has_the_status_and_the_text_of_dynamo(select: Services) -> None:
    for method, path, raw in REFUSED:
        assert same(select, method, path, raw=raw).status >= 400
    for method, path in (
        ("GET", "/select"),
        ("GET", "/nothing"),
        ("GET", "/reservations"),
        ("DELETE", "/workers/9"),
        ("DELETE", "/workers/x"),
        ("DELETE", "/reservations/none"),
        ("GET", "/ready"),
        ("GET", "/loads"),
        ("GET", "/workers"),
        ("GET", "/health"),
        ("GET", "/replica_sync/peers"),
    ):
        same(select, method, path)


def test_workers_have_the_lifecycle_of_dynamo(select: Services) -> None:
    """Incomplete ones with their reasons, schedulable ones, changes, and their end."""
    shared = f"tcp://127.0.0.1:{free_port()}"
    for body in (
        {"worker_id": 21, "model_name": "life"},
        worker(22, model_name="life", taints=["b", "a=1"], topology_domains={"zone": "z"},
               kv_transfer_domain="rack", kv_transfer_enforcement="preferred",
               kv_transfer_preferred_weight=0.85, total_kv_blocks=64, stable_routing_id="s"),
        worker(23, model_name="life", block_size=8),
        worker(24, model_name="life", kv_events_endpoint="nonsense"),
        worker(25, model_name="life", data_parallel_size=0),
        worker(26, model_name="life", endpoint=""),
        worker(27, model_name="life", replay_endpoint="nonsense"),
        worker(28, model_name="life", routing_group="g", data_parallel_size=2),
        worker(29, model_name="life", routing_group="g", data_parallel_size=2,
               kv_events_endpoints={"0": shared, "1": shared}, kv_events_endpoint=None),
    ):  # fmt: skip
        assert same(select, "POST", "/workers", body).status == 201
    same(select, "GET", "/workers")
    same(select, "GET", "/workers?model_name=life&routing_group=g")
    same(select, "GET", "/ready")
    same(select, "GET", "/loads?model_name=life")
    for body in ({"total_kv_blocks": 77, "taints": []}, {"block_size": 8}, {"endpoint": ""},
                 {"endpoint": "http://again", "block_size": 4}):  # fmt: skip
        same(select, "PATCH", "/workers/22", body)
    for number in range(21, 30):
        same(select, "DELETE", f"/workers/{number}")
    same(select, "GET", "/loads?model_name=life")


def test_seeded_requests_get_the_answers_of_dynamo(
    select: Services, finding: Callable[[str], None]
) -> None:
    """KV events of several tiers, selections, reservations and their ends, in one random order."""
    chance, steps = random.Random(23), 160
    roots = [[chance.randrange(3, 300) for _ in range(BLOCK * 9)] for _ in range(4)]
    context: zmq.Context[Any] = zmq.Context()
    sockets: dict[tuple[int, int], tuple[Any, list[int]]] = {}
    try:
        for number, ranks in ((1, 1), (2, 2), (3, 1)):
            endpoints = {}
            for rank in range(ranks):
                socket = context.socket(zmq.PUB)
                port = socket.bind_to_random_port("tcp://127.0.0.1")
                endpoints[str(rank)] = f"tcp://127.0.0.1:{port}"
                sockets[number, rank] = (socket, [0])
            body: dict[str, Any] = worker(
                number,
                kv_events_endpoint=None,
                kv_events_endpoints=endpoints,
                data_parallel_size=ranks,
                max_num_batched_tokens=512,
                total_kv_blocks=400,
                taints=["gpu=a"] if number < 3 else ["gpu=b"],
            )
            assert same(select, "POST", "/workers", body).body["lifecycle"] == "schedulable"

        def publish(ref: tuple[int, int], event: BlockStored | BlockRemoved) -> None:
            socket, sent = sockets[ref]
            socket.send_multipart(encode_message(b"", sent[0], EventBatch(0.0, (event,), ref[1])))
            sent[0] += 1

        def asked(tokens: list[int]) -> dict[str, Any]:
            return {"model_name": MODEL, "token_ids": tokens}

        def names(which: int) -> tuple[int, ...]:
            return tuple(range(100 * which + 1, 100 * which + 10))

        def device(port: int, ref: tuple[int, int], tokens: list[int]) -> int:
            rows = send(port, "POST", "/overlap_scores", asked(tokens)).body["workers"]
            found = {(row["worker_id"], row["dp_rank"]): row["device_blocks"] for row in rows}
            return int(found[ref])

        def applied(ref: tuple[int, int], name: int) -> None:
            """Wait until both have taken all events of a rank: the last is a block of its own."""
            tokens = [1_000 + name] * BLOCK
            publish(ref, BlockStored((1_000 + name,), None, tuple(tokens), BLOCK))
            until_now(
                lambda: device(select.theirs, ref, tokens) == device(select.ours, ref, tokens) == 1
            )

        # A subscription reaches its publisher late: the first block is sent until both count it.
        for ref in sockets:

            def heard(ref: tuple[int, int] = ref) -> bool:
                publish(ref, BlockStored(names(0)[:1], None, tuple(roots[0][:BLOCK]), BLOCK))
                ports = (select.theirs, select.ours)
                return all(device(port, ref, roots[0]) == 1 for port in ports)

            until_now(heard)

        def agree() -> bool:
            return all(
                settled(theirs.body) == settled(ours.body)
                for theirs, ours in (
                    select.both("POST", "/overlap_scores", asked(root)) for root in roots
                )
            )

        running: list[str] = []
        certain = tiered = 0
        for step in range(steps):
            ref = chance.choice(list(sockets))
            if chance.random() < 0.35:
                which, begin = chance.randrange(4), chance.randrange(9)
                end = min(9, begin + chance.randrange(1, 6))
                medium = chance.choice(["GPU", "GPU", "CPU", "DISK"])
                if chance.random() < 0.3:
                    publish(ref, BlockRemoved(names(which)[begin:end][::-1], medium=medium))
                else:
                    parent = names(which)[begin - 1] if begin else None
                    tokens = tuple(roots[which][BLOCK * begin : BLOCK * end])
                    stored = BlockStored(
                        names(which)[begin:end], parent, tokens, BLOCK, medium=medium
                    )
                    publish(ref, stored)
                applied(ref, step)
                until_now(agree)
                tiered += medium != "GPU"
                continue
            root = chance.choice(roots)
            tail = [chance.randrange(3, 300) for _ in range(chance.randrange(9))]
            body = asked(root[: chance.randrange(1, len(root) + 1)] + tail)
            if chance.random() < 0.2:
                body["routing_constraints"] = {"preferred_taints": {"gpu=b": 0.5}}
            if chance.random() < 0.1:
                body["routing_constraints"] = {"required_taints": [chance.choice(["gpu=a", "no"])]}
            if chance.random() < 0.1:
                body["router_config_override"] = {"overlap_score_credit": 0.25}
            if chance.random() < 0.1:
                body["allowed_worker_ids"] = [2, 3]
            same(select, "POST", "/potential_loads", body)
            same(select, "POST", "/overlap_scores", body)
            theirs = send(select.theirs, "POST", "/select", body)
            choices = [send(select.ours, "POST", "/select", body) for _ in range(6)]
            if theirs.status != 200:
                assert choices[0] == theirs, body
                continue
            refs = {(one.body["worker_id"], one.body["dp_rank"]) for one in choices}
            chosen = (theirs.body["worker_id"], theirs.body["dp_rank"])
            for _ in range(60):  # a tie is drawn
                if chosen in refs:
                    break
                drawn = send(select.ours, "POST", "/select", body).body
                refs.add((drawn["worker_id"], drawn["dp_rank"]))
            assert chosen in refs, (step, body, refs, theirs.body)
            certain += len(refs) == 1
            # The same worker on both from here on.
            pinned = {
                **body,
                "selection_id": f"s{step}",
                "pinned_worker": {"worker_id": chosen[0], "dp_rank": chosen[1]},
            }
            if chance.random() < 0.5:
                same(select, "POST", "/select", pinned)
                same(
                    select,
                    "POST",
                    "/reservations",
                    {"model_name": MODEL, "selection_id": f"s{step}"},
                )
            else:
                same(select, "POST", "/select_and_reserve", pinned)
                same(select, "POST", "/select_and_reserve", pinned)
            running.append(f"s{step}")
            for name in chance.sample(running, len(running) // 4):
                match chance.randrange(3):
                    case 0:
                        same(select, "POST", f"/reservations/{name}/prefill_complete")
                    case 1:
                        same(select, "POST", f"/reservations/{name}/output_block", {})
                    case 2:
                        same(select, "DELETE", f"/reservations/{name}")
                        running.remove(name)
            same(select, "GET", "/loads?model_name=tiny")
        explicit = {"model_name": MODEL, "selection_id": "e1", "worker_id": 2, "dp_rank": 1}
        for body in (
            explicit,
            {**explicit, "sequence_hashes": [5, -6], "isl_tokens": 8},
            {**explicit, "sequence_hashes": [5, -6], "isl_tokens": 8},
            {
                **explicit,
                "selection_id": "e2",
                "token_ids": roots[0],
                "effective_prefill_tokens": 9,
            },
            {**explicit, "selection_id": "e3", "token_ids": roots[0], "dp_rank": 9},
            {**explicit, "selection_id": "e3", "token_ids": roots[0], "worker_id": 77},
        ):
            same(select, "POST", "/reservations", body)
        same(select, "GET", "/loads?model_name=tiny")
        for number in (1, 2, 3):
            same(select, "DELETE", f"/workers/{number}")
        same(select, "GET", "/loads?model_name=tiny")
        finding(f"selection service: {steps} seeded steps alike, {certain} choices without a tie")
        assert certain > 20
        assert tiered > 5
    finally:
        context.destroy(0)


def test_the_slot_tracker_adds_up_what_dynamo_adds_up(
    slots: Services, finding: Callable[[str], None]
) -> None:
    chance, steps = random.Random(29), 200
    base = {"model_name": MODEL, "block_size": BLOCK, "dp_start": 0, "dp_size": 2}
    for body in (
        {"worker_id": 1, **base},
        {"worker_id": 1, **base},
        {"worker_id": 2, **base, "dp_start": 1, "dp_size": 1},
        {"worker_id": 3, **base, "block_size": 8},
        {"worker_id": 3, **base, "block_size": 0},
        {"worker_id": 3, **base, "dp_size": 0},
        {"worker_id": 3, **base, "dp_start": 2**32 - 1},
        {"worker_id": 1, **base, "routing_group": "g"},
        {"worker_id": 1},
        {"worker_id": 3, **base, "dp_start": None},
    ):
        same(slots, "POST", "/register", body)
    refs = [(1, 0), (1, 1), (2, 1)]
    roots = [[chance.randrange(-(2**63), 2**63) for _ in range(12)] for _ in range(3)]
    requests = [f"r{number}" for number in range(40)]
    for _ in range(steps):
        name, (number, rank) = chance.choice(requests), chance.choice([*refs, (1, 7)])
        hashes = chance.choice(roots)[: chance.randrange(13)]
        asked = {"model_name": MODEL, "request_id": name}
        match chance.randrange(5):
            case 0 | 1:
                tokens = chance.randrange(0, 60)
                added = {"worker_id": number, "dp_rank": rank, "sequence_hashes": hashes}
                same(slots, "POST", "/add", {**asked, **added, "new_isl_tokens": tokens})
            case 2:
                same(slots, "POST", "/prefill_complete", asked)
            case 3:
                same(slots, "POST", "/free", asked)
            case 4:
                projected = {"model_name": MODEL, "sequence_hashes": hashes, "new_isl_tokens": 9}
                same(slots, "POST", "/potential_loads", projected)
        same(slots, "GET", "/loads")
    for path, raw in (
        ("/add", b'{"model_name":"tiny","sequence_hashes":"x"}'),
        ("/add", b'{"model_name":"tiny","sequence_hashes":[9223372036854775808]}'),
        ("/add", b"{}"),
        ("/potential_loads", b'{"model_name":"none","sequence_hashes":[]}'),
        ("/free", b'{"model_name":"none","request_id":"x"}'),
        ("/unregister", b'{"worker_id":9,"model_name":"tiny"}'),
        ("/unregister", b'{"worker_id":1,"model_name":"tiny"}'),
        ("/replica_sync/register_peer", b'{"endpoint":"tcp://127.0.0.1:5"}'),
    ):
        same(slots, "POST", path, raw=raw)
    for path in ("/loads", "/workers", "/peers", "/add", "/health", "/workers?routing_group=g"):
        same(slots, "GET", path)
    finding(f"slot tracker: {steps} seeded steps alike")
