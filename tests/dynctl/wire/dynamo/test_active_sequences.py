"""Bookings of routers, read from captured bytes of both transports."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceFreed,
    SequencePrefillDone,
    SequenceUnknown,
    decode_sequences,
    encode_sequences,
)
from dynctl.wire.dynamo.events import decode_envelope, decode_zmq_frames
from dynctl.wire.dynamo.payload import PayloadLimits

CAPTURES = Path(__file__).parents[3] / "captures"
TOPIC = "active_sequences_events"


def captured():
    """(run, payload, what an independent decoder made of its events)."""
    for line in (CAPTURES / "dynamo-events-zmq.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["decoded"]["topic"] == TOPIC:
            frames = [bytes.fromhex(frame) for frame in row["frames_hex"]]
            recorded = row["decoded"]["payload"]["events"]
            yield row["run"], decode_zmq_frames(frames).payload, recorded
    for line in (CAPTURES / "dynamo-events-nats.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["decoded"]["topic"] == TOPIC:
            payload = decode_envelope(bytes.fromhex(row["hex"])).payload
            yield row["run"], payload, [row["decoded"]["payload"]]


def test_captured_events_of_both_transports():
    runs, kinds = set(), set()
    for run, payload, recorded in captured():
        events = decode_sequences(payload)
        assert len(events) == len(recorded)
        for event, each in zip(events, recorded, strict=True):
            runs.add(run)
            kinds.add(type(event))
            assert event.request_id == each["request_id"]
            assert {"worker_id": event.worker_id, "dp_rank": event.dp_rank} == each["worker"]
            assert event.router_id == each["router_id"]
            match event:
                case SequenceAdded():
                    data = each["data"]["AddRequest"]
                    hashes = data["token_sequence"]
                    assert event.token_sequence == (None if hashes is None else tuple(hashes))
                    hint = data["prefill_load_hint"] or {"initial_effective_prefill_tokens": 0}
                    assert event.prefill_tokens == hint["initial_effective_prefill_tokens"]
                case SequencePrefillDone():
                    assert each["data"] == "MarkPrefillCompleted"
                case SequenceFreed():
                    assert each["data"] == "Free"
        again = encode_sequences(events, batched=run.startswith("zmq"))
        assert again == payload
    assert runs == {"zmq-agg-replica", "zmq-disagg", "nats-removed"}
    assert kinds == {SequenceAdded, SequencePrefillDone, SequenceFreed}


EVENT: dict[str, Any] = {
    "request_id": "r1",
    "worker": {"worker_id": 9, "dp_rank": 1},
    "data": "Free",
    "router_id": 3,
    "lora_name": None,
}


def add(**fields) -> dict:
    return EVENT | {"data": {"AddRequest": fields}}


def encode(value) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize("data", ["Paused", {"Paused": {"for": 1}}])
def test_events_of_an_unknown_kind_are_named(data):
    unknown = EVENT | {"data": data}
    expected = SequenceUnknown("r1", 9, 1, 3, "Paused")
    assert decode_sequences(encode(unknown)) == (expected,)
    assert decode_sequences(encode({"events": [EVENT, unknown]})) == (
        SequenceFreed("r1", 9, 1, 3),
        expected,
    )


def test_untracked_prefill_is_no_load():
    hint = {"initial_effective_prefill_tokens": 50, "expected_prefill_duration": 0.5}
    (event,) = decode_sequences(
        encode(
            add(token_sequence=[1, 2**64 - 1], track_prefill_tokens=False, prefill_load_hint=hint)
        )
    )
    assert isinstance(event, SequenceAdded)
    assert (event.token_sequence, event.prefill_tokens) == ((1, 2**64 - 1), 0)


@pytest.mark.parametrize("seconds", [None, 0.0, 0.25, 3.5])
def test_an_expected_prefill_is_a_duration(seconds):
    event = SequenceAdded("r1", 9, 1, None, 50, 3, expected_prefill_s=seconds)
    payload = encode_sequences([event])
    assert decode_sequences(payload) == (event,)
    hint = msgspec.msgpack.decode(payload)["events"][0]["data"]["AddRequest"]["prefill_load_hint"]
    whole = None if seconds is None else {"secs": int(seconds), "nanos": int(seconds % 1 * 1e9)}
    assert hint["expected_prefill_duration"] == whole


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        *((0.5, 0.5), (-1.0, 0.0), (math.inf, 86_400.0), (-math.inf, 0.0), (math.nan, None)),
        ({"secs": 2**64 - 1, "nanos": 0}, 86_400.0),
    ],
)
def test_a_duration_that_no_prefill_has_is_bounded(sent, read):
    hint = {"initial_effective_prefill_tokens": 50, "expected_prefill_duration": sent}
    (event,) = decode_sequences(encode(add(token_sequence=[1], prefill_load_hint=hint)))
    assert isinstance(event, SequenceAdded)
    assert (event.prefill_tokens, event.expected_prefill_s) == (50, read)


def test_unknown_fields_are_ignored():
    assert decode_sequences(encode({"events": [EVENT | {"trace": "x"}], "schema": 2})) == (
        SequenceFreed("r1", 9, 1, 3),
    )


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ([], "event"),
        ({}, "event"),
        ({"events": 1}, "events"),
        ({"events": [EVENT, {}]}, "events[1]"),
        ({"events": [EVENT | {"worker": {"worker_id": -2}}]}, "events[0].worker.worker_id"),
        (EVENT | {"request_id": "r" * 300}, "event.request_id"),
        (EVENT | {"data": 3}, "event.data"),
        (add(token_sequence=["a"]), "event.data.AddRequest.token_sequence[0]"),
        (
            add(prefill_load_hint={"initial_effective_prefill_tokens": -1}),
            "event.data.AddRequest.prefill_load_hint.initial_effective_prefill_tokens",
        ),
    ],
)
def test_invalid_events(payload, where):
    with pytest.raises(WireError) as caught:
        decode_sequences(encode(payload))
    assert caught.value.where == where


def test_bounds():
    two = encode({"events": [add(token_sequence=[1, 2])] * 2})
    assert len(decode_sequences(two, PayloadLimits(events=2, blocks=4))) == 2
    with pytest.raises(WireError, match="2 events, expected at most 1"):
        decode_sequences(two, PayloadLimits(events=1))
    with pytest.raises(WireError, match="4 hashes, expected at most 3"):
        decode_sequences(two, PayloadLimits(blocks=3))


@given(st.binary(max_size=200))
def test_any_bytes_give_an_answer_or_a_wire_error(payload):
    with contextlib.suppress(WireError):
        decode_sequences(payload)


@pytest.mark.parametrize("tokens", [2**32, 2**63 - 1, 2**64 - 1])
def test_a_booking_has_at_most_the_tokens_of_a_prompt(tokens: int):
    event = {
        "request_id": "r",
        "worker": {"worker_id": 1, "dp_rank": 0},
        "data": {"AddRequest": {"prefill_load_hint": {"initial_effective_prefill_tokens": 1}}},
        "router_id": 1,
    }
    assert decode_sequences(msgspec.msgpack.encode(event))
    hint = event["data"]["AddRequest"]["prefill_load_hint"]  # type: ignore[index]
    hint["initial_effective_prefill_tokens"] = tokens
    with pytest.raises(WireError, match="initial_effective_prefill_tokens"):
        decode_sequences(msgspec.msgpack.encode(event))
