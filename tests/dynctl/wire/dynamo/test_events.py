"""Dynamo's event plane, read from captured bytes and from invalid bytes."""

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.events import (
    Envelope,
    KvMetrics,
    RouterEvent,
    UnknownEvent,
    decode_envelope,
    decode_kv_metrics,
    decode_router_events,
    decode_zmq_frames,
    encode_envelope,
    encode_kv_metrics,
    encode_router_events,
    encode_zmq_frames,
    router_event_from,
)
from dynctl.wire.dynamo.payload import PayloadLimits
from router_core import BlocksRemoved, BlocksStored, Cleared, LoadReported, sequence_hashes

CAPTURES = Path(__file__).parents[3] / "captures"
ZMQ, NATS = (
    [
        json.loads(row)
        for row in (CAPTURES / f"dynamo-events-{plane}.jsonl").read_text().split("\n")[:-1]
    ]
    for plane in ("zmq", "nats")
)
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


def frames_of(row) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in row["frames_hex"]]


def payloads(topic):
    """(payload bytes, what an independent decoder made of it) of both transports."""
    for row in ZMQ:
        if row["decoded"]["topic"] == topic:
            yield decode_zmq_frames(frames_of(row)).payload, row["decoded"]["payload"]
    for row in NATS:
        if row["decoded"]["topic"] == topic:
            yield decode_envelope(bytes.fromhex(row["hex"])).payload, row["decoded"]["payload"]


# -- envelopes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ZMQ)
def test_captured_zmq_message(row):
    frames = frames_of(row)
    envelope = decode_zmq_frames(frames)
    recorded = row["decoded"]
    assert (envelope.publisher_id, envelope.sequence) == (
        recorded["publisher_id"],
        recorded["sequence"],
    )
    assert (envelope.topic, envelope.published_at) == (recorded["topic"], recorded["published_at"])
    assert msgspec.msgpack.decode(envelope.payload) == recorded["payload"]
    assert decode_zmq_frames(encode_zmq_frames(envelope)) == envelope
    assert encode_zmq_frames(envelope)[:3] == tuple(frames[:3])


@pytest.mark.parametrize("row", NATS)
def test_captured_nats_message(row):
    envelope = decode_envelope(bytes.fromhex(row["hex"]))
    recorded = row["decoded"]
    assert (envelope.publisher_id, envelope.sequence) == (
        recorded["publisher_id"],
        recorded["sequence"],
    )
    assert row["subject"].endswith("." + envelope.topic)
    assert msgspec.msgpack.decode(envelope.payload) == recorded["payload"]
    assert decode_envelope(encode_envelope(envelope)) == envelope


ENVELOPE = Envelope(7, 3, 1000, "kv-events", b"\x90")
FRAMES = encode_zmq_frames(ENVELOPE)


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        (FRAMES[:3], "message"),
        ((*FRAMES, b""), "message"),
        ((FRAMES[0], b"1234567", *FRAMES[2:]), "publisher_id"),
        ((*FRAMES[:2], b"", FRAMES[3]), "sequence"),
        ((*FRAMES[:3], b"\x01\x00"), "envelope"),
        ((*FRAMES[:3], b"\x02" + FRAMES[3][1:]), "envelope.version"),
        ((*FRAMES[:3], FRAMES[3] + b"x"), "envelope.length"),
        ((*FRAMES[:3], FRAMES[3][:-1]), "envelope.length"),
        ((b"kv_metrics", *FRAMES[1:]), "topic"),
        ((FRAMES[0], bytes(8), *FRAMES[2:]), "publisher_id"),
        ((*FRAMES[:2], bytes(8), FRAMES[3]), "sequence"),
    ],
)
def test_invalid_frames(frames, where):
    with pytest.raises(WireError) as caught:
        decode_zmq_frames(frames)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "envelope"),
        (b"\x90", "envelope"),
        (b"\xc1", "envelope"),
        (b"\x81" * 5000, "envelope"),
        (msgspec.msgpack.encode({"publisher_id": 1}), "envelope"),
        (encode_envelope(ENVELOPE)[:-1], "envelope"),
        (
            msgspec.msgpack.encode(msgspec.structs.asdict(ENVELOPE) | {"sequence": -1}),
            "envelope.sequence",
        ),
        (
            msgspec.msgpack.encode(msgspec.structs.asdict(ENVELOPE) | {"topic": "t" * 300}),
            "envelope.topic",
        ),
    ],
)
def test_invalid_bodies(body, where):
    with pytest.raises(WireError) as caught:
        decode_envelope(body)
    assert caught.value.where == where


def test_an_envelope_may_grow():
    body = msgspec.msgpack.encode(msgspec.structs.asdict(ENVELOPE) | {"schema": 2})
    assert decode_envelope(body) == ENVELOPE


def test_a_body_beyond_the_limit_is_refused_unread():
    with pytest.raises(WireError, match="expected at most 4106 bytes"):
        decode_envelope(bytes(5000), PayloadLimits(payload_bytes=10))


# -- kv-events -------------------------------------------------------------------------------------


def test_captured_events_have_the_sent_content():
    kinds = set()
    for payload, recorded in payloads("kv-events"):
        events = decode_router_events(payload)
        assert [event.event_id for event in events] == [
            each["event"]["event_id"] for each in recorded
        ]
        for event, each in zip(events, recorded, strict=True):
            assert (event.worker_id, event.dp_rank) == (
                each["worker_id"],
                each["event"]["dp_rank"],
            )
            assert event.storage_tier == each["storage_tier"]
            data = each["event"]["data"]
            kinds.add((type(event.event), event.storage_tier))
            match event.event:
                case BlocksStored(parent, names, locals_, tier):
                    blocks = data["stored"]["blocks"]
                    assert parent == data["stored"]["parent_hash"]
                    assert list(names) == [block["block_hash"] for block in blocks]
                    assert list(locals_) == [block["tokens_hash"] for block in blocks]
                    assert tier == each["storage_tier"]
                case BlocksRemoved(names, tier):
                    assert list(names) == data["removed"]["block_hashes"]
                    assert tier == each["storage_tier"]
                case other:
                    assert other == Cleared()
                    assert data == "cleared"
            assert router_event_from(each) == event
        assert msgspec.msgpack.decode(encode_router_events(events)) == recorded
    assert {kind for kind, _ in kinds} == {BlocksStored, BlocksRemoved, Cleared}
    assert {tier for _, tier in kinds} == {"device", "host_pinned"}


def test_the_mockers_names_are_the_chained_hashes():
    chains = 0
    for row in ZMQ:
        if row["decoded"]["topic"] == "kv-events":
            for event in decode_router_events(decode_zmq_frames(frames_of(row)).payload):
                stored = event.event
                if isinstance(stored, BlocksStored) and stored.parent_hash is None:
                    assert sequence_hashes(stored.local_hashes) == list(stored.block_hashes)
                    chains += 1
    assert chains > 3


EVENT: dict[str, Any] = {
    "worker_id": 5,
    "storage_tier": "device",
    "event": {"event_id": 1, "data": {"removed": {"block_hashes": [1]}}, "dp_rank": 2},
}


def changed(**event) -> dict:
    return EVENT | {"event": EVENT["event"] | event}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ("paused", "paused"),
        ({"moved": {"to": [1, 2]}}, "moved"),
        ({}, "(unnamed)"),
        ("x" * 999, "x" * 64),
    ],
)
def test_events_of_an_unknown_kind_are_named_and_keep_their_number(data, kind):
    events = decode_router_events(msgspec.msgpack.encode([EVENT, changed(data=data)]))
    assert events[0].event == BlocksRemoved((1,))
    assert events[1] == RouterEvent(5, 2, 1, UnknownEvent(kind))
    assert router_event_from(changed(data=data)) == events[1]


def test_unknown_fields_and_tiers_are_accepted():
    recorded = changed(data={"removed": {"block_hashes": [1], "why": "old"}}, lease=1)
    (event,) = decode_router_events(
        msgspec.msgpack.encode([recorded | {"storage_tier": "tape", "new": {"a": 1}}])
    )
    assert event == RouterEvent(5, 2, 1, BlocksRemoved((1,), "tape"), "tape")


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ("events", "events"),
        ({"worker_id": 1}, "events[0]"),  # one event, as Dynamo before 1.4 writes it
        ([1], "events[0]"),
        ([EVENT, {"worker_id": 1}], "events[1]"),
        ([EVENT | {"worker_id": -1}], "events[0].worker_id"),
        ([EVENT | {"storage_tier": "t" * 300}], "events[0].storage_tier"),
        ([changed(event_id="1")], "events[0].event.event_id"),
        ([changed(data=None)], "events[0].event.data"),
        ([changed(data={"removed": {}})], "events[0].event.data.removed"),
        (
            [changed(data={"removed": {"block_hashes": [1, -1]}})],
            "events[0].event.data.removed.block_hashes[1]",
        ),
        (
            [changed(data={"stored": {"parent_hash": None, "blocks": [{"block_hash": 1}]}})],
            "events[0].event.data.stored.blocks[0]",
        ),
    ],
)
def test_invalid_events(payload, where):
    with pytest.raises(WireError) as caught:
        decode_router_events(msgspec.msgpack.encode(payload))
    assert caught.value.where == where


def test_a_decoded_hash_beyond_64_bits_is_refused_without_its_value():
    with pytest.raises(WireError) as caught:
        router_event_from(changed(data={"removed": {"block_hashes": [2**64]}}), "events[3]")
    assert caught.value.where.startswith("events[3]")
    assert str(2**64) not in str(caught.value)


def test_bounds():
    many = msgspec.msgpack.encode([EVENT] * 3)
    assert len(decode_router_events(many, PayloadLimits(events=3, blocks=3))) == 3
    with pytest.raises(WireError, match="3 events, expected at most 2"):
        decode_router_events(many, PayloadLimits(events=2))
    with pytest.raises(WireError, match="3 blocks, expected at most 2"):
        decode_router_events(many, PayloadLimits(blocks=2))
    with pytest.raises(WireError, match="expected at most 9 bytes"):
        decode_router_events(many, PayloadLimits(payload_bytes=9))


columns = st.lists(st.tuples(U64, U64), max_size=5)
tiers = st.sampled_from(["device", "host_pinned", "disk"])


@st.composite
def router_events(draw):
    tier = draw(tiers)
    pairs = draw(columns)
    names, locals_ = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    event = draw(
        st.sampled_from(
            [
                BlocksStored(draw(st.none() | U64), names, locals_, tier),
                BlocksRemoved(names, tier),
                Cleared(),
                UnknownEvent("later"),
            ]
        )
    )
    return RouterEvent(draw(U64), draw(U32), draw(U64), event, tier)


@given(st.lists(router_events(), max_size=4))
def test_round_trip_of_events(events):
    payload = encode_router_events(events)
    assert list(decode_router_events(payload)) == events
    assert [router_event_from(each) for each in msgspec.msgpack.decode(payload)] == events


@given(st.binary(max_size=200))
def test_any_bytes_give_an_answer_or_a_wire_error(payload):
    for decode in (decode_envelope, decode_router_events, decode_kv_metrics):
        with contextlib.suppress(WireError):
            decode(payload)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_capture_gives_an_answer_or_a_wire_error(place, byte):
    for topic, decode in (("kv-events", decode_router_events), ("kv_metrics", decode_kv_metrics)):
        payload = bytearray(next(payloads(topic))[0])
        payload[place % len(payload)] = byte
        with contextlib.suppress(WireError):
            decode(bytes(payload))


# -- kv_metrics ------------------------------------------------------------------------------------


def test_captured_metrics():
    seen = 0
    for payload, recorded in payloads("kv_metrics"):
        metrics = decode_kv_metrics(payload)
        assert msgspec.structs.asdict(metrics) == recorded
        assert metrics.change() == LoadReported(**recorded)
        assert decode_kv_metrics(encode_kv_metrics(metrics)) == metrics
        seen += 1
    assert seen > 5


def test_an_older_report_leaves_what_it_does_not_name():
    payload = msgspec.msgpack.encode({"worker_id": 2**64 - 1, "active_decode_blocks": 4})
    assert decode_kv_metrics(payload) == KvMetrics(2**64 - 1, 0, 4)


@pytest.mark.parametrize("value", [-1, 1.5, "7", True])
def test_invalid_metrics(value):
    payload = msgspec.msgpack.encode({"worker_id": 1, "kv_used_blocks": value})
    with pytest.raises(WireError) as caught:
        decode_kv_metrics(payload)
    assert caught.value.where == "metrics.kv_used_blocks"
