"""Our replica-sync events, read by Dynamo's own decoder, and its events, read by ours.

Dynamo's selection service shares load with others of its kind over ZMQ. It wraps the same events
as its frontends do in an envelope of its own, so it shows what Dynamo makes of our bytes without a
deployment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceEvent,
    SequenceFreed,
    SequencePrefillDone,
    decode_sequences,
    encode_sequences,
)
from tests.dynamo.fleet import DYNAMO_PYTHON
from tests.dynamo.processes import ProcessGroup
from tests.ports import free_port
from tests.waiting import patience, until_now

TOPIC = b"dynamo.slot-tracker.v1"
MODEL, BLOCK, WORKER = "m", 16, 1


class Service:
    """A selection service that reads what we publish, and whose events we read."""

    def __init__(self, client: httpx.Client, pub: Any, sub: Any) -> None:
        self.client, self._pub, self._sub = client, pub, sub

    def send(self, *events: SequenceEvent) -> None:
        for event in events:
            wrapped = {
                "model_name": MODEL,
                "routing_group": "default",
                "block_size": BLOCK,
                "event": msgspec.Raw(encode_sequences([event], batched=False)),
            }
            self._pub.send_multipart([TOPIC, msgspec.msgpack.encode(wrapped)])

    def reserve(self, body: dict[str, Any]) -> bool:
        return self.client.post("/select_and_reserve", json=body).status_code == 200

    def heard(self) -> bool:
        """Whether one of its events arrived: what it sent before we were connected is lost."""
        return bool(self._sub.poll(500))

    def receive(self, request: str = "") -> SequenceEvent:
        """Its next event, of this request where it is named."""
        while (event := self._next()).request_id != request and request:
            pass
        return event

    def _next(self) -> SequenceEvent:
        topic, body = self._sub.recv_multipart()
        assert topic == TOPIC
        raw = msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw])["event"]
        (event,) = decode_sequences(bytes(raw))
        # Byte for byte what we would have sent.
        assert encode_sequences([event], batched=False) == bytes(raw)
        return event

    def load(self) -> tuple[int, int, int]:
        """Requests, prefill tokens and blocks of the worker."""
        (model,) = self.client.get("/loads").json()
        (row,) = model["loads"]
        return (
            row["active_requests"],
            row["potential_prefill_tokens"],
            row["potential_decode_blocks"],
        )


@contextmanager
def service(directory: Path) -> Iterator[Service]:
    group = ProcessGroup(directory)
    context: Any = zmq.Context()
    http, theirs = free_port(), free_port()
    pub, sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
    ours = pub.bind_to_random_port("tcp://127.0.0.1")
    command = [DYNAMO_PYTHON, "-m", "dynamo.select_service", "--port", str(http)]
    command += ["--replica-sync-port", str(theirs)]
    command += ["--replica-sync-peers", f"tcp://127.0.0.1:{ours}"]
    try:
        process = group.start("select", command, os.environ)
        sub.connect(f"tcp://127.0.0.1:{theirs}")
        sub.subscribe(b"")
        sub.set(zmq.RCVTIMEO, int(patience(10.0) * 1000))
        with httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=patience(10.0)) as client:

            def healthy() -> bool:
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    assert process.alive, process.tail()
                    return False

            until_now(healthy, 30.0)
            worker = {"worker_id": WORKER, "model_name": MODEL, "block_size": BLOCK}
            worker |= {"endpoint": "http://127.0.0.1:1", "kv_events_endpoint": "tcp://127.0.0.1:9"}
            worker |= {"max_num_batched_tokens": 8192, "total_kv_blocks": 1000}
            assert client.post("/workers", json=worker).status_code == 201
            found = Service(client, pub, sub)
            until_now(lambda: _connected(found), 20.0)
            yield found
    finally:
        pub.close(linger=0)
        sub.close(linger=0)
        context.destroy(linger=0)
        group.close()


def _connected(found: Service) -> bool:
    """Whether the service reads what we publish."""
    found.send(SequenceAdded("probe", WORKER, 0, (1,), 0, 777))
    rows = found.client.get("/loads").json()
    if not rows or not rows[0]["loads"][0]["active_requests"]:
        return False
    found.send(SequenceFreed("probe", WORKER, 0, 777))
    until_now(lambda: found.load() == (0, 0, 0))
    return True


@pytest.mark.seed("dynamo-1.6: replica sync: load is shared")
def test_dynamo_reads_our_events(tmp_path: Path) -> None:
    with service(tmp_path) as dynamo:
        dynamo.send(SequenceAdded("a", WORKER, 0, (1, 2, 3), 93, 777))
        until_now(lambda: dynamo.load() == (1, 93, 3))
        # A shared prefix counts once; a request without prefill has no hint.
        dynamo.send(SequenceAdded("b", WORKER, 0, (1, 2, 4), 0, 777, track_prefill_tokens=False))
        until_now(lambda: dynamo.load() == (2, 93, 4))
        dynamo.send(SequenceAdded("c", WORKER, 0, None, 50, 777))
        until_now(lambda: dynamo.load() == (3, 143, 4))
        dynamo.send(SequencePrefillDone("a", WORKER, 0, 777))
        until_now(lambda: dynamo.load() == (3, 50, 4))
        dynamo.send(*(SequenceFreed(name, WORKER, 0, 777) for name in "abc"))
        until_now(lambda: dynamo.load() == (0, 0, 0))


def test_dynamo_reads_the_predicted_duration_of_a_prefill(tmp_path: Path) -> None:
    """The tokens fall with time: the duration was read as seconds and nanoseconds."""
    with service(tmp_path) as dynamo:
        dynamo.send(SequenceAdded("a", WORKER, 0, None, 10_000, 777, expected_prefill_s=5.5))
        until_now(lambda: 0 < dynamo.load()[1] < 10_000)
        until_now(lambda: dynamo.load() == (1, 0, 0), 20.0)


def test_we_read_the_events_of_dynamo(tmp_path: Path) -> None:
    with service(tmp_path) as dynamo:
        body = {"model_name": MODEL, "token_ids": list(range(64))}
        until_now(lambda: dynamo.reserve(body) and dynamo.heard())
        added = dynamo.receive()
        request = added.request_id
        assert isinstance(added, SequenceAdded)
        assert (added.worker_id, added.prefill_tokens) == (WORKER, 64)
        assert len(added.token_sequence or ()) == 4
        dynamo.client.post(f"/reservations/{request}/prefill_complete")
        # It may have been late with an event, and have reserved twice.
        assert dynamo.receive(request) == SequencePrefillDone(request, WORKER, 0, added.router_id)
        dynamo.client.delete(f"/reservations/{request}")
        assert dynamo.receive(request) == SequenceFreed(request, WORKER, 0, added.router_id)
