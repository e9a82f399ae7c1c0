"""Requests to Dynamo workers and their answers, against bodies of a real frontend and worker."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.engine_output import (
    ERROR_EVENT,
    EngineItem,
    EngineOutput,
    decode_engine_item,
)
from dynctl.wire.dynamo.engine_request import EngineRequest
from dynctl.wire.dynamo.request_plane import RawItem, decode_body, encode_body

CAPTURE = Path(__file__).parents[3] / "captures" / "dynamo-generate.jsonl"
ROWS = [json.loads(line) for line in CAPTURE.read_text().splitlines()]
REQUESTS = [row["item"] for row in ROWS if row["what"] == "request"]
OUTPUTS = [row["item"] for row in ROWS if row["what"] == "output"]


@pytest.mark.parametrize("body", REQUESTS)
@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_a_request_is_written_as_it_was_read(body: dict[str, Any], codec: str) -> None:
    read = decode_body(encode_body(body, codec), codec, EngineRequest)
    assert encode_body(read, codec) == encode_body(body, codec)


def test_the_id_of_a_transfer_is_16_bytes_in_msgpack_and_text_in_json() -> None:
    """As captured from a frontend whose prefill worker has a bootstrap endpoint."""
    name = UUID("bcadd4ce-43c3-4676-9f33-eadcd67a256a")
    info = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2, "handoff_id": name}
    for codec, written in (("msgpack", b"\xc4\x10" + name.bytes), ("json", b'"bcadd4ce-43c3-')):
        body = encode_body({"token_ids": [1], "bootstrap_info": info}, codec)
        assert written in body
        read = decode_body(body, codec, EngineRequest)
        assert read.bootstrap_info is not None
        assert read.bootstrap_info.handoff_id == name


def test_a_minimal_request_has_defaults_and_unknown_fields_are_dropped() -> None:
    body = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 2, "x": 1}, "later": {}}
    read = decode_body(msgspec.msgpack.encode(body), "msgpack", EngineRequest)
    assert read.token_ids == [1, 2]
    assert read.stop_conditions.max_tokens == 2
    assert "later" not in msgspec.to_builtins(read)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        msgspec.msgpack.encode({"token_ids": [-1]}),
        msgspec.msgpack.encode({"token_ids": ["secret"]}),
        msgspec.msgpack.encode({"model": "m"}),
        msgspec.msgpack.encode([1]),
    ],
)
def test_a_broken_request_is_an_error_without_its_content(body: bytes) -> None:
    with pytest.raises(WireError) as error:
        decode_body(body, "msgpack", EngineRequest)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("item", OUTPUTS)
@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_an_output_is_written_as_it_was_read(item: dict[str, Any], codec: str) -> None:
    read = decode_engine_item(RawItem(encode_body(item, codec), codec))
    assert read.data is not None
    assert encode_body(EngineItem(data=read.data), codec) == encode_body(item, codec)


@pytest.mark.parametrize(
    "reason", ["finished", {"failed": "x"}, {"error": "a", "b": "c"}, 3, "error"]
)
def test_an_unknown_finish_reason_is_an_error(reason: object) -> None:
    body = msgspec.json.encode({"data": {"token_ids": [], "finish_reason": reason}})
    with pytest.raises(WireError):
        decode_engine_item(RawItem(body, "json"))


def test_errors_are_read_from_both_of_their_forms() -> None:
    finish = EngineOutput(token_ids=[], finish_reason={"error": "out of memory"})
    read = decode_engine_item(RawItem(encode_body(EngineItem(data=finish), "json"), "json"))
    assert read.data is not None
    assert read.data.error == "out of memory"
    error = {
        "error_type": {"Backend": "Unknown"},
        "class": "Internal",
        "reason": "backend.unknown",
        "message": "boom",
    }
    written = encode_body(EngineItem(event=ERROR_EVENT, error=error), "json")
    event = decode_engine_item(RawItem(written, "json"))
    assert event.data is None
    assert (event.event, event.error) == (ERROR_EVENT, error)
