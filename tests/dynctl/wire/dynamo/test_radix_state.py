"""The snapshot that routers of Dynamo 1.0 to 1.3 keep, as one of 1.3.1 wrote it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.discovery import EndpointId
from dynctl.wire.dynamo.events import RouterEvent
from dynctl.wire.dynamo.radix_state import decode_radix_state, encode_radix_state, radix_bucket
from router_core import BlocksStored

CAPTURE = Path(__file__).parents[3] / "captures" / "dynamo-1.3.1-radix-state.bin"
U64 = st.integers(0, 2**64 - 1)


def test_a_captured_snapshot_is_read_and_written_byte_for_byte() -> None:
    payload = CAPTURE.read_bytes()
    events = decode_radix_state(payload)
    assert len(events) == 24
    assert len({event.worker_id for event in events}) == 2
    assert [event.event_id for event in events] == list(range(24))
    first = events[0].event
    assert isinstance(first, BlocksStored)
    assert first.parent_hash is None
    # A mock worker's name of a first block is the block's local hash.
    assert first.block_hashes[0] == first.local_hashes[0]
    assert encode_radix_state(events) == payload


@given(
    st.lists(
        st.builds(
            RouterEvent,
            U64,
            st.integers(0, 2**32 - 1),
            st.just(0),
            st.builds(
                lambda parent, blocks: BlocksStored(
                    parent, tuple(b[0] for b in blocks), tuple(b[1] for b in blocks)
                ),
                st.none() | U64,
                st.lists(st.tuples(U64, U64), max_size=5),
            ),
        ),
        max_size=8,
    )
)
def test_what_is_written_is_read_again(events: list[RouterEvent]) -> None:
    read = decode_radix_state(encode_radix_state(events))
    assert [(one.worker_id, one.dp_rank, one.event) for one in read] == [
        (one.worker_id, one.dp_rank, one.event) for one in events
    ]


@given(st.binary(max_size=200))
def test_other_bytes_are_an_error_without_a_traceback(payload: bytes) -> None:
    with contextlib.suppress(WireError):
        decode_radix_state(payload)


@pytest.mark.parametrize("cut", [1, 9, 100, 5407])
def test_a_snapshot_that_is_cut_is_an_error(cut: int) -> None:
    with pytest.raises(WireError):
        decode_radix_state(CAPTURE.read_bytes()[:cut])


def test_the_bucket_has_the_name_of_the_component() -> None:
    name = radix_bucket(EndpointId("dynamo", "Back_End", "generate"))
    assert name == "namespace-dynamo-component-back-end-radix-bucket"
