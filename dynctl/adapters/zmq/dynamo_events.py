"""Dynamo's event plane over ZMQ: one publishing socket for each publisher and topic.

ZMQ reconnects by itself and loses the messages sent meanwhile; the sequence numbers show it. If we
read too slowly, our queue fills, then the publisher's, which then drops: the numbers show that too.
 A follower takes one socket and its monitor: four file descriptors.
"""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dynctl.adapters.event_channel import AnyPublisher, ChannelIntake
from dynctl.adapters.ports import ChannelValue
from dynctl.adapters.zmq.context import (
    Backlog,
    SocketWatch,
    close_context,
    drain,
    new_context,
    ready_sockets,
    subscriber,
)
from dynctl.adapters.zmq.kv_event_source import EndpointError, dialable_endpoint
from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.discovery import EventChannel, ZmqTransport
from dynctl.wire.dynamo.events import ENVELOPE_MARGIN_BYTES, decode_zmq_frames
from dynctl.wire.dynamo.payload import DEFAULT_LIMITS, PayloadLimits

# ZMQ drops the connection at its own limit, so a message that is merely too big must stay below it
# to be reported as one.
_MESSAGE_MARGIN: Final = 2
_WATCHED: Final = int(zmq.Event.HANDSHAKE_SUCCEEDED) | int(zmq.Event.DISCONNECTED)
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_PAUSE_S: Final = 5.0
#: A connection that lasted this long starts again with the first pause.
_STABLE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ZmqBounds:
    """``queue_messages``: messages of one channel that wait for us; further ones are dropped.
    ``queue_bytes``: their bytes; above it the connection is closed and opened again.

    Times in seconds: a reconnect is tried every ``reconnect`` at first, up to ``reconnect_max``
    apart; a lost host is noticed after ``heartbeat_timeout``.
    """

    queue_messages: int = 16_384
    queue_bytes: int = 128 * 1024 * 1024
    message: PayloadLimits = DEFAULT_LIMITS
    reconnect: float = 0.1
    reconnect_max: float = 2.0
    heartbeat: float = 5.0
    heartbeat_timeout: float = 15.0


class ZmqEventPlane:
    """Followers that share one ZMQ context, and so one IO thread.

    A given ``context`` stays the caller's; otherwise :meth:`close` ends the plane's.
    """

    def __init__(
        self, *, context: zmq.asyncio.Context | None = None, bounds: ZmqBounds | None = None
    ) -> None:
        self._bounds = bounds or ZmqBounds()
        self._owned = context is None
        self._context = context
        #: Wakes the followers of sockets that have messages, a few in each turn.
        self.ready = ready_sockets()
        self._running: set[asyncio.Task[None]] = set()

    def follow(self, channel: EventChannel, emit: Callable[[ChannelValue], None]) -> "ZmqFollower":
        """Never fails: a channel with an invalid address reports it once it runs."""
        return self.follow_with(ChannelIntake(channel, emit))

    def follow_with(self, intake: ChannelIntake | AnyPublisher) -> "ZmqFollower":
        """A follower that gives what arrives to ``intake``."""
        return ZmqFollower(self, intake, self._bounds)

    async def close(self) -> None:
        """End all running followers, as by a cancellation."""
        await end_tasks(self._running)
        if self._owned and self._context is not None:
            close_context(self._context)
        self._context = None

    def context(self) -> zmq.asyncio.Context:
        """The shared context, made when the first channel is followed."""
        if self._context is None:
            self._context = new_context()
        return self._context

    async def keep(self, following: Coroutine[Any, Any, None]) -> None:
        """Run it until it is cancelled or the plane is closed, and wait for its end."""
        task = asyncio.create_task(following)
        self._running.add(task)
        try:
            await task
        finally:
            await end_tasks((task,))
            self._running.discard(task)


class ZmqFollower:
    """Follows one publisher's socket."""

    def __init__(
        self,
        plane: ZmqEventPlane,
        intake: ChannelIntake | AnyPublisher,
        bounds: ZmqBounds,
    ) -> None:
        self.intake = intake
        self.counts = self.intake.counts
        self._plane = plane
        self._bounds = bounds

    @property
    def connected(self) -> bool:
        return self.intake.connected

    async def run(self) -> None:
        """Follow until cancelled, or until the plane is closed; leaves no socket behind."""
        try:
            await self._plane.keep(self._follow())
        finally:
            self.intake.connected = False

    async def _follow(self) -> None:
        try:
            endpoint = _endpoint(self.intake.channel)
        except EndpointError as error:
            self.intake.disconnect(str(error))
            await asyncio.Future()
            return
        loop, pause = asyncio.get_running_loop(), self._bounds.reconnect
        while True:
            began = loop.time()
            try:
                # ZMQ does not reconnect after a message over its limit, so that every lost
                # connection gets a new socket.
                with contextlib.ExitStack() as stack:
                    await self._listen(endpoint, stack)
                if loop.time() - began >= _STABLE_S:
                    pause = self._bounds.reconnect
                await asyncio.sleep(pause)
                pause = min(self._bounds.reconnect_max, 2 * pause)
            except (zmq.ZMQError, OSError) as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self.intake.disconnect(
                    f"no socket for {endpoint}: {error}; raise the limit of open files (ulimit -n)"
                )
                await asyncio.sleep(_EXHAUSTED_PAUSE_S)

    async def _listen(self, endpoint: str, stack: contextlib.ExitStack) -> None:
        """Follow one socket until its connection is lost and its last message is read."""
        bounds = self._bounds
        sub, monitor = subscriber(self._plane.context(), _WATCHED, stack)
        sub.set(zmq.RCVHWM, bounds.queue_messages)
        longest = bounds.message.payload_bytes + ENVELOPE_MARGIN_BYTES
        sub.set(zmq.MAXMSGSIZE, _MESSAGE_MARGIN * longest)
        sub.set(zmq.IPV6, 1)
        sub.set(zmq.RECONNECT_IVL, int(bounds.reconnect * 1000))
        sub.set(zmq.RECONNECT_IVL_MAX, int(bounds.reconnect_max * 1000))
        # A lost host sends no FIN: without heartbeats its channel looks idle.
        sub.set(zmq.HEARTBEAT_IVL, int(bounds.heartbeat * 1000))
        sub.set(zmq.HEARTBEAT_TIMEOUT, int(bounds.heartbeat_timeout * 1000))
        sub.set(zmq.SUBSCRIBE, b"")
        sub.connect(endpoint)

        watch = SocketWatch(sub, monitor, readers=self._plane.ready)
        stack.callback(watch.close)
        backlog = Backlog(
            sub,
            endpoint,
            most_bytes=bounds.queue_bytes,
            most_messages=bounds.queue_messages,
        )
        lost = False
        while not backlog.overflowed:
            if not (lost or backlog):
                await watch.wait(None)
            backlog.read()
            received = backlog.take()
            # Read after the messages: a disconnect is always reported before the first message of
            # the connection that followed.
            lost = self._watch_connection(monitor, endpoint) or lost
            for frames in received:
                self._take(frames)
            if received:
                await asyncio.sleep(0)
            elif lost:
                return
        self.intake.disconnect(
            f"more than {bounds.queue_bytes:,} bytes of messages from {endpoint} waited to be "
            "read; reconnecting"
        )

    def _watch_connection(self, changes: zmq.Socket[bytes], endpoint: str) -> bool:
        """Report what the monitor saw; returns whether the connection was lost."""
        lost = False
        for frames in drain(changes):
            event = parse_monitor_message(frames)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.intake.connect(endpoint)
            elif event == zmq.Event.DISCONNECTED:
                lost = True
                self.intake.disconnect(f"lost {endpoint}; reconnecting")
        return lost

    def _take(self, frames: list[bytes]) -> None:
        try:
            envelope = decode_zmq_frames(frames, self._bounds.message)
        except WireError as error:
            self.intake.malformed(error)
        else:
            self.intake.take(envelope)


def _endpoint(channel: EventChannel) -> str:
    transport = channel.transport
    if not isinstance(transport, ZmqTransport):
        raise EndpointError(
            f"{channel.scope} publishes {channel.topic} over NATS, and this plane reads ZMQ"
        )
    return dialable_endpoint(transport.endpoint)
