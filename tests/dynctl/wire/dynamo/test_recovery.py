"""Queries to a worker's local indexer and to a frontend's indexer, and their answers."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.events import RouterEvent
from dynctl.wire.dynamo.msgpack_slices import SLICE_BYTES, find_long_array
from dynctl.wire.dynamo.recovery import (
    MAX_HASHES,
    Events,
    EventSlices,
    InvalidRange,
    RecoveryError,
    TieredScores,
    TooNew,
    TreeDump,
    indexer_query,
    parse_recovery,
    parse_scores,
    recovery_query,
)
from dynctl.wire.dynamo.request_plane import AnswerDecoder, FrameDecoder, RawItem
from router_core import BlocksRemoved, BlocksStored
from tests.dynctl.wire.dynamo.request_plane_captures import CAPTURES, exchanges

WORKER = 2324035517153285056


def captured_item(what: str) -> RawItem:
    recorded = exchanges()[what]
    assert recorded.answer is not None
    frames = FrameDecoder()
    frames.feed(recorded.answer)
    assert frames.next_frame(4096)
    decoder = AnswerDecoder(recorded.codec, 1_000_000, frames)
    decoder.next_step()
    item = decoder.next_step()
    assert isinstance(item, RawItem)
    return item


def all_of(events: EventSlices) -> list[RouterEvent]:
    return [event for part in events.slices() for event in part]


def one_block(number: int, **others: Any) -> dict[str, Any]:
    """An event as a worker writes it when it makes one up from its tree."""
    block = {"block_hash": 2**63 + number, "tokens_hash": number, "mm_extra_info": None}
    stored = {"parent_hash": None, "start_position": None, "blocks": [block]}
    event = {"event_id": number, "data": {"stored": stored}, "dp_rank": 0}
    return {
        "worker_id": WORKER,
        "storage_tier": "device",
        "residency_domain": "worker",
        "event": event,
        **others,
    }


def dump_of(events: list[Any], last: int = 7) -> dict[str, Any]:
    return {"TreeDump": {"events": events, "last_event_id": last, "reset_scope": "all"}}


def raw(item: Any) -> RawItem:
    return RawItem(msgspec.msgpack.encode(item), "msgpack")


# -- questions -------------------------------------------------------------------------------------


def test_recovery_query_is_that_of_dynamos_router() -> None:
    assert recovery_query(5, 1) == {
        "worker_id": 5,
        "dp_rank": 1,
        "start_event_id": None,
        "end_event_id": None,
        "supports_tree_dump_failed": True,
        "kind": "recovery",
    }
    assert recovery_query(5, 1, 3) == recovery_query(5, 1) | {"start_event_id": 3}


def test_indexer_query_has_only_hashes_and_is_bounded() -> None:
    assert indexer_query("tiny", (2**64 - 1,)) == {
        "model_name": "tiny",
        "block_hashes": [2**64 - 1],
    }
    with pytest.raises(ValueError, match="65,537 hashes"):
        indexer_query("tiny", range(MAX_HASHES + 1))


# -- answers of a worker ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["TreeDump", "json TreeDump"])
def test_captured_tree_dump(what: str) -> None:
    item = captured_item(what)
    answer = parse_recovery(item)
    assert isinstance(answer, TreeDump)
    assert answer.reset_scope == "all"
    events = all_of(answer.events)
    assert len(events) == len(answer.events) > 0
    assert answer.last_event_id == events[-1].event_id
    stored = events[0].event
    assert isinstance(stored, BlocksStored)
    recorded = item.decode()["TreeDump"]["events"][0]["event"]["data"]["stored"]["blocks"]
    assert list(stored.block_hashes) == [block["block_hash"] for block in recorded]
    assert list(stored.local_hashes) == [block["tokens_hash"] for block in recorded]


def test_captured_tree_dump_with_removals() -> None:
    recorded = json.loads((CAPTURES / "worker-kv-query-treedump.json").read_text())
    answer = parse_recovery(recorded["data"])
    assert isinstance(answer, TreeDump)
    kinds = [type(event.event) for event in all_of(answer.events)]
    assert (kinds.count(BlocksStored), kinds.count(BlocksRemoved)) == (
        sum("stored" in event["event"]["data"] for event in recorded["data"]["TreeDump"]["events"]),
        sum(
            "removed" in event["event"]["data"] for event in recorded["data"]["TreeDump"]["events"]
        ),
    )
    assert BlocksRemoved in kinds
    assert answer.last_event_id == 13


def test_captured_answers_without_a_dump() -> None:
    events = parse_recovery(captured_item("Events"))
    assert isinstance(events, Events)
    assert [event.event_id for event in all_of(events.events)][-1] == events.last_event_id
    assert parse_recovery(captured_item("TooNew")) == TooNew(100, events.last_event_id)
    assert parse_recovery(captured_item("InvalidRange")) == InvalidRange(5, 2)
    for what, field in (("wrong worker", "worker_id"), ("wrong rank", "dp_rank")):
        refused = parse_recovery(captured_item(what))
        assert isinstance(refused, RecoveryError)
        assert refused.message.startswith(f"WorkerKvQueryEngine::generate {field} mismatch")


def test_too_new_by_one_means_that_nothing_was_missed() -> None:
    assert TooNew(12, 11).nothing_missed
    assert not TooNew(13, 11).nothing_missed
    assert not TooNew(5, 0).nothing_missed


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"Error": "it\nbroke"}, "it\N{REPLACEMENT CHARACTER}broke"),
        ({"TreeDumpFailed": {"last_event_id": 3, "error": "busy"}}, "could not dump .*: busy"),
        ({"TreeDumpFailed": {"last_event_id": 3}}, "no reason reported"),
        ({"Novelty": {}}, "unknown answer: Novelty"),
        ("Novelty", "unknown answer: Novelty"),
        ({"event": "error", "error": {"message": "TypeError"}}, "TypeError"),
    ],
)
def test_a_failure_is_a_recovery_error(item: Any, message: str) -> None:
    for given_as in (item, raw(item)):
        answer = parse_recovery(given_as)
        assert isinstance(answer, RecoveryError)
        assert re.search(message, answer.message)


@pytest.mark.parametrize(
    "item",
    [
        None,
        [],
        {},
        {"a": 1, "b": 2},
        {"TreeDump": None},
        {"TreeDump": {"last_event_id": 3}},
        {"TreeDump": {"events": [], "last_event_id": -1}},
        {"TreeDump": {"events": {}, "last_event_id": 1}},
        {"Events": {"events": []}},
        {"TooNew": {"requested_start": "x"}},
        {"InvalidRange": {"start_id": 1}},
    ],
)
def test_an_unreadable_answer_is_a_wire_error(item: Any) -> None:
    with pytest.raises(WireError):
        parse_recovery(item)


def test_an_event_that_cannot_be_read_is_named_by_its_place() -> None:
    answer = parse_recovery(dump_of([one_block(1), {"worker_id": "x"}]))
    assert isinstance(answer, TreeDump)
    with pytest.raises(WireError, match=r"events\[1\]"):
        all_of(answer.events)


# -- long answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [300, 5_000])
def test_a_long_answer_comes_in_slices_and_is_the_same(count: int) -> None:
    item = dump_of([one_block(number) for number in range(count)], last=10_582_021)
    long, short = (
        parse_recovery(raw(item)),
        parse_recovery(RawItem(json.dumps(item).encode(), "json")),
    )
    assert isinstance(long, TreeDump)
    assert isinstance(short, TreeDump)
    assert len(long.events) == count
    assert long.last_event_id == 10_582_021
    parts = list(long.events.slices())
    assert len(parts) > 1
    assert max(map(len, parts)) < 300
    assert all_of(long.events) == all_of(short.events)  # and they can be read again


def test_events_of_all_lengths_are_sliced_exactly() -> None:
    def event(number: int, blocks: int) -> dict[str, Any]:
        made = one_block(number)
        made["event"]["data"]["stored"]["blocks"] *= blocks
        return made

    lengths = [1, 3_000, 1, 1, 900, 40, 2, 5_000, 1, 1]
    answer = parse_recovery(raw(dump_of([event(n, many) for n, many in enumerate(lengths)])))
    assert isinstance(answer, TreeDump)
    read = [event.event for event in all_of(answer.events)]
    assert [len(e.block_hashes) for e in read if isinstance(e, BlocksStored)] == lengths


@given(
    st.lists(
        st.one_of(
            st.integers(0, 2**64 - 1).map(lambda n: {"worker_id": n}),
            # The bytes with which every element begins, inside an element.
            st.integers(0, 3).map(lambda n: {"worker_id": b"\x81\xa9worker_id\x01" * n}),
            st.integers(0, 2).map(lambda n: {"worker_id": [{"worker_id": 1}] * n}),
            st.none(),
        ),
        max_size=12,
    ),
    st.integers(0, 2**64 - 1),
)
def test_slices_hold_exactly_the_elements(elements: list[Any], last: int) -> None:
    long = [*elements, {"worker_id": "x" * SLICE_BYTES}, *elements, *elements * 40]
    document = msgspec.msgpack.encode(
        {"Events": {"events": long, "last_event_id": last, "more": "x"}}
    )
    array = find_long_array(memoryview(document), "events", "last_event_id")
    assert array is not None
    assert (array.name, array.fields) == ("Events", {"last_event_id": last, "more": "x"})
    read = [element for part in array.slices() for element in msgspec.msgpack.decode(part)]
    assert read == long


@pytest.mark.parametrize("claimed", [1, 999, 1_999, 2_001, 65_535])
def test_a_wrong_count_of_elements_is_a_wire_error(claimed: int) -> None:
    document = msgspec.msgpack.encode(dump_of([one_block(number) for number in range(2_000)]))
    at = document.index(b"\xdc") + 1
    lying = document[:at] + claimed.to_bytes(2, "big") + document[at + 2 :]
    answer = parse_recovery(RawItem(lying, "msgpack"))
    assert isinstance(answer, TreeDump)
    with pytest.raises(WireError):
        all_of(answer.events)


def test_a_broken_element_in_a_long_answer_is_a_wire_error() -> None:
    document = msgspec.msgpack.encode(dump_of([one_block(number) for number in range(2_000)]))
    middle = len(document) // 2
    at = document.index(b"\xa9worker_id", middle)
    broken = document[:at] + b"\xc1" + document[at + 1 :]
    answer = parse_recovery(RawItem(broken, "msgpack"))
    assert isinstance(answer, TreeDump)
    with pytest.raises(WireError):
        all_of(answer.events)


def test_fields_in_another_order_are_read_whole() -> None:
    events = [one_block(number) for number in range(1_000)]
    item = {"TreeDump": {"last_event_id": 7, "events": events}}
    answer = parse_recovery(raw(item))
    assert isinstance(answer, TreeDump)
    assert (answer.last_event_id, len(all_of(answer.events))) == (7, 1_000)


# -- answers of a served indexer -------------------------------------------------------------------


def test_captured_scores_of_a_real_frontend() -> None:
    worker = {"worker_id": 11091743340972701229, "dp_rank": 0}
    device = {"scores": [[worker, 25]], "frequencies": []}
    item = {"TieredScores": {"device": device, "lower_tier": []}}
    assert parse_scores(item) == TieredScores({(11091743340972701229, 0): 25})
    assert parse_scores(raw(item)) == parse_scores(item)


def test_scores_of_an_unknown_model_are_an_error() -> None:
    text = "served indexer model nope is not registered"
    assert parse_scores({"Error": text}) == RecoveryError(text)


@pytest.mark.parametrize(
    "item",
    [
        {"TieredScores": {}},
        {"TieredScores": {"device": {"scores": [[{"worker_id": 1}]]}}},
        {"TieredScores": {"device": {"scores": [[{"worker_id": 1}, -1]]}}},
        {"TieredScores": {"device": {"scores": {}}}},
    ],
)
def test_scores_that_cannot_be_read_are_a_wire_error(item: Any) -> None:
    with pytest.raises(WireError):
        parse_scores(item)


@pytest.mark.parametrize("kind", ["TreeDump", "Events"])
def test_dynamo_1_0_sends_the_events_alone(kind: str) -> None:
    event = {"event_id": 4, "data": {"removed": {"block_hashes": [7]}}, "dp_rank": 0}
    answer = parse_recovery({kind: [{"worker_id": 1, "event": event}]})
    assert isinstance(answer, TreeDump | Events)
    assert [one.event_id for part in answer.events.slices() for one in part] == [4]
    # The numbers of a dump mean nothing.
    assert answer.last_event_id == (4 if kind == "Events" else None)
    empty = parse_recovery({kind: []})
    assert isinstance(empty, TreeDump | Events)
    assert (len(empty.events), empty.last_event_id) == (0, None)
