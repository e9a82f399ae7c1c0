"""KV event channels of Dynamo before 1.4: only the events name the worker of a channel.

Each channel is followed once, and its events go to the rank that they name. Until a channel has
had an event it can be that of any rank, so its conditions apply to every rank whose channel is not
known yet: such a rank is connected only while all of these channels are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

from dynctl.adapters.ports import ChannelCode, ChannelCondition, ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.serving.dynamo.recovery import RankIndex
from dynctl.wire.dynamo.discovery import EventChannel
from dynctl.wire.dynamo.events import RouterEvent, decode_router_events

Rank = tuple[int, int]
"""Worker id and rank."""


class SharedChannels:
    """The channels of one component. ``ranks``: the followed ranks of its workers, as they are."""

    def __init__(self, ranks: Callable[[], Mapping[Rank, RankIndex]]) -> None:
        self._ranks = ranks
        self._connected: dict[int, bool] = {}
        self._owners: dict[int, set[Rank]] = {}

    def add(self, channel: EventChannel) -> Callable[[ChannelValue], None]:
        """The callback for the follower of one channel."""
        publisher = channel.publisher_id
        self._connected[publisher] = False
        return lambda value: self._take(publisher, value)

    def remove(self, channel: EventChannel) -> None:
        """The channel is not registered any more."""
        self._connected.pop(channel.publisher_id, None)
        self._owners.pop(channel.publisher_id, None)

    def attach(self, index: RankIndex, topic: str) -> None:
        """A rank that is followed from now on."""
        if self._all_open():
            why = "all channels of its component are connected"
            index.take(
                ChannelCondition(
                    topic, index.source.publisher_id, ChannelCode.CHANNEL_CONNECTED, why
                )
            )

    def _all_open(self) -> bool:
        """Whether every channel without a known rank is connected, and there is one."""
        unknown = [channel for key, channel in self._connected.items() if key not in self._owners]
        return bool(unknown) and all(unknown)

    def _take(self, publisher: int, value: ChannelValue) -> None:
        if isinstance(value, ChannelCondition):
            self._condition(publisher, value)
            return
        try:
            events = decode_router_events(value.payload)
        except WireError:
            for index in self._concerned_ranks(publisher):
                index.take(value)
            return
        ranks = self._ranks()
        for rank, group in groupby(events, _rank_of):
            self._owners.setdefault(publisher, set()).add(rank)
            if rank in ranks:
                ranks[rank].take_events(group)

    def _condition(self, publisher: int, value: ChannelCondition) -> None:
        if value.code in (ChannelCode.CHANNEL_CONNECTED, ChannelCode.CHANNEL_DISCONNECTED):
            self._connected[publisher] = value.code is ChannelCode.CHANNEL_CONNECTED
        if (
            value.code is ChannelCode.CHANNEL_CONNECTED
            and publisher not in self._owners
            and not self._all_open()
        ):
            return
        for index in self._concerned_ranks(publisher):
            index.take(value)

    def _concerned_ranks(self, publisher: int) -> list[RankIndex]:
        """The ranks whose channel it is, else those whose channel it can be."""
        ranks = self._ranks()
        if publisher in self._owners:
            return [ranks[rank] for rank in self._owners[publisher] if rank in ranks]
        owned = {rank for each in self._owners.values() for rank in each}
        return [index for rank, index in ranks.items() if rank not in owned]


def _rank_of(event: RouterEvent) -> Rank:
    return event.worker_id, event.dp_rank
