"""Channels of Dynamo before 1.4: events reach the rank that they name, conditions all ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hypothesis import given
from hypothesis import strategies as st

from dynctl.adapters.ports import (
    ChannelCode,
    ChannelCondition,
    ChannelMessage,
    ChannelValue,
    IndexUpdate,
    StreamValue,
)
from dynctl.serving.dynamo.recovery import RankIndex
from dynctl.serving.dynamo.shared_channels import SharedChannels
from dynctl.wire.dynamo.discovery import EndpointId, EventChannel, EventSource, ZmqTransport
from dynctl.wire.dynamo.events import RouterEvent, encode_router_events
from dynctl.wire.dynamo.recovery import RecoveryAnswer
from router_core import BlocksStored

SCOPE = EndpointId("dynamo", "backend", "")
FIRST, SECOND, THIRD = (11, 0), (12, 0), (13, 0)
CONNECTED, LOST = ChannelCode.CHANNEL_CONNECTED, ChannelCode.CHANNEL_DISCONNECTED


def never(source: EventSource, start: int | None) -> Awaitable[RecoveryAnswer]:
    raise AssertionError("recovery does not run in these tests")


class Component:
    """Ranks of a component, and the callbacks of its channels by publisher."""

    def __init__(self, *ranks: tuple[int, int], publishers: tuple[int, ...]) -> None:
        self.values: dict[tuple[int, int], list[StreamValue]] = {rank: [] for rank in ranks}
        self.ranks = {
            rank: RankIndex(
                EventSource(SCOPE, "kv-events", rank[0], *rank), never, values.append, lambda: 1.0
            )
            for rank, values in self.values.items()
        }
        self.channels = SharedChannels(lambda: self.ranks)
        self.take: dict[int, Callable[[ChannelValue], None]] = {
            one: self.channels.add(EventChannel(SCOPE, "kv-events", one, ZmqTransport("tcp://x")))
            for one in publishers
        }

    def condition(self, publisher: int, code: ChannelCode) -> None:
        self.take[publisher](ChannelCondition("kv-events", publisher, code, "said by the test"))

    def event(self, publisher: int, rank: tuple[int, int], number: int) -> None:
        event = RouterEvent(*rank, number, BlocksStored(None, (number,), (number,)))
        payload = encode_router_events([event])[1:]  # one event, without the array around it
        self.take[publisher](ChannelMessage("kv-events", publisher, number, 0, payload))

    def connected(self) -> set[tuple[int, int]]:
        return {rank for rank, index in self.ranks.items() if index.state().connected}

    def batches(self) -> dict[tuple[int, int], int]:
        return {rank: index.state().batches for rank, index in self.ranks.items()}


def test_a_rank_is_connected_while_every_channel_that_can_be_its_own_is() -> None:
    one = Component(FIRST, SECOND, publishers=(1, 2))
    one.condition(1, CONNECTED)
    assert one.connected() == set()
    one.condition(2, CONNECTED)
    assert one.connected() == {FIRST, SECOND}
    one.condition(1, LOST)
    assert one.connected() == set()


def test_after_an_event_a_channel_is_that_of_its_rank_alone() -> None:
    one = Component(FIRST, SECOND, publishers=(1, 2))
    one.condition(1, CONNECTED)
    one.condition(2, CONNECTED)
    one.event(2, FIRST, 1)
    assert one.batches() == {FIRST: 1, SECOND: 0}
    one.condition(1, LOST)
    assert one.connected() == {FIRST}
    one.condition(1, CONNECTED)
    one.condition(2, LOST)
    assert one.connected() == {SECOND}


def test_a_late_rank_is_connected_if_its_channel_can_be_open() -> None:
    one = Component(FIRST, SECOND, publishers=(1, 2))
    late = one.ranks.pop(SECOND)
    one.condition(1, CONNECTED)
    one.condition(2, CONNECTED)
    one.event(1, FIRST, 1)
    one.channels.attach(late, "kv-events")
    assert late.state().connected


def test_an_unreadable_message_concerns_every_rank_that_can_have_sent_it() -> None:
    one = Component(FIRST, SECOND, THIRD, publishers=(1, 2, 3))
    for publisher in (1, 2, 3):
        one.condition(publisher, CONNECTED)
    one.event(1, FIRST, 1)
    one.take[2](ChannelMessage("kv-events", 2, 0, 0, b"\xc1"))
    assert {rank: i.state().malformed for rank, i in one.ranks.items()} == {
        FIRST: 0,
        SECOND: 1,
        THIRD: 1,
    }


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([0, 1])), max_size=40))
def test_every_event_reaches_the_rank_that_it_names_once(sent: list[tuple[int, int]]) -> None:
    """Publishers 1 and 2 have one rank each, publisher 3 has two ranks of one worker."""
    ranks = {1: [FIRST, FIRST], 2: [SECOND, SECOND], 3: [THIRD, (13, 1)]}
    one = Component(FIRST, SECOND, THIRD, (13, 1), publishers=(1, 2, 3))
    for publisher in (1, 2, 3):
        one.condition(publisher, CONNECTED)
    numbers = dict.fromkeys(one.ranks, 0)
    for publisher, which in sent:
        rank = ranks[publisher][which]
        numbers[rank] += 1
        one.event(publisher, rank, numbers[rank])
    assert one.batches() == numbers
    for rank, values in one.values.items():
        updates = [value for value in values if isinstance(value, IndexUpdate)]
        assert all((value.worker_id, value.dp_rank) == rank for value in updates)
