"""Entries that dynctl registers, compared with those of real workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynctl.wire.dynamo.discovery import (
    EndpointId,
    EventChannel,
    JetStreamTransport,
    Malformed,
    encode_entry,
    instance_of,
    parse_entry,
    slug_of,
)

CAPTURES = Path(__file__).parents[3] / "captures"
CAPTURED: dict[str, Any] = {
    key: found["value"]
    for key, found in json.loads((CAPTURES / "etcd-disagg-required.json").read_text()).items()
}


@pytest.mark.parametrize("key", CAPTURED)
def test_entries_are_written_as_a_real_worker_writes_them(key: str) -> None:
    entry = parse_entry(key, json.dumps(CAPTURED[key]).encode())
    assert not isinstance(entry, Malformed)
    written_key, written = encode_entry(entry)
    assert written_key == key
    assert json.loads(written) == CAPTURED[key]
    if not key.startswith("v1/mdc/"):
        # Dynamo's own order of the fields.
        assert written.decode() == json.dumps(CAPTURED[key], separators=(",", ":"))
    assert parse_entry(key, written) == entry


def test_the_captures_have_every_kind_of_entry() -> None:
    assert {key.split("/")[1] for key in CAPTURED} == {
        "instances", "mdc", "event_channels", "event_sources"
    }  # fmt: skip


def test_an_instance_has_its_path_on_the_request_plane() -> None:
    made = instance_of(EndpointId("dyn", "backend", "generate"), 2**63 - 1, "[::1]:80")
    assert made.address == "[::1]:80/7fffffffffffffff/dyn/backend/generate"


def test_a_stream_of_jetstream_is_not_an_entry() -> None:
    at = EndpointId("dyn", "backend", "")
    with pytest.raises(ValueError, match="JetStream"):
        encode_entry(EventChannel(at, "kv-events", 1, JetStreamTransport("s")))


def test_slugs_have_no_separators_of_keys() -> None:
    assert slug_of("Meta/Llama 3.1-8B") == "meta_llama_3_1-8b"
