"""Dynamo's event plane over core NATS: all publishers of an endpoint's topic share one subject.

One connection serves all followers; a subject is subscribed once and each message goes to the
follower of its publisher. Core NATS stores nothing: messages sent while we are disconnected, or too
slow, are lost, and the sequence numbers show it.

The library's own reconnection gives up after some refusals, so it is disabled, and every connection
is a new client.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoServersError, SlowConsumerError

from dynctl.adapters.event_channel import AnyPublisher, ChannelIntake
from dynctl.adapters.nats.address import NATS_ERRORS, NatsAuth, NatsServer, nats_servers
from dynctl.adapters.ports import ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, Unreachable, network_reason
from dynctl.base.tasks import TURN_BYTES, TURN_MESSAGES, Supervisor, end_tasks
from dynctl.wire.dynamo.discovery import EventChannel, NatsTransport
from dynctl.wire.dynamo.events import Envelope, decode_envelope
from dynctl.wire.dynamo.payload import DEFAULT_LIMITS, PayloadLimits

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# The library also prints the errors that it passes to our callbacks.
logging.getLogger("nats").addHandler(logging.NullHandler())
logging.getLogger("nats").propagate = False


def _concerns_users(record: logging.LogRecord) -> bool:
    """The library begins TLS on a connection whose reader stays as it was, and at the end of each
    asyncio warns of that."""
    return "eof_received() has no effect when using ssl" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_concerns_users)


@dataclass(frozen=True, slots=True)
class NatsBounds:
    """``pending_messages`` and ``pending_bytes``: messages of one subject that wait for us;
    further ones are dropped. Times in seconds: ``dial`` for one server, ``connect`` for the first
    round over all of them, ``retry`` the first pause between rounds and ``retry_max`` the longest;
    a lost host is noticed after two to three times ``ping``.
    """

    pending_messages: int = 65_536
    pending_bytes: int = 64 * 1024 * 1024
    message: PayloadLimits = DEFAULT_LIMITS
    dial: float = 2.0
    connect: float = 4.5
    retry: float = 0.1
    retry_max: float = 1.0
    ping: float = 1.0


class NatsEventPlane:
    """Followers that share one connection to one of ``servers``.

    The connection is made when the first follower runs, and again after each loss; meanwhile
    followers report CHANNEL_DISCONNECTED with the reason. :meth:`connect` checks first whether NATS
    is reachable. ``servers``: ``nats://HOST:PORT``, several with commas or as
    a list; ``auth`` is read from the environment unless given. Raises UsageProblem for a server or
    invalid credentials.
    """

    def __init__(
        self,
        servers: str | list[str] | tuple[str, ...],
        auth: NatsAuth | None = None,
        *,
        bounds: NatsBounds | None = None,
    ) -> None:
        self._servers = nats_servers(servers)
        self._auth = NatsAuth.from_environment() if auth is None else auth
        for server in self._servers:
            self._auth.options(server)  # to report an invalid file at once
        self._bounds = bounds or NatsBounds()
        self._followers: dict[str, list[NatsFollower]] = {}
        self._subscribed: dict[str, Subscription] = {}
        self._refused: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._tried = asyncio.Event()  # the first round over all servers is done
        self._address: str | None = None
        self._problem = ""
        self._tasks = Supervisor(lambda name, message: self._disconnect_all(f"{name}: {message}"))
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        self.slow_drops = 0
        """Messages that our own full queue dropped; the followers count them as dropped too."""
        self.unclaimed = 0
        """Messages of publishers without a follower."""

    @property
    def title(self) -> str:
        """The addresses for display, without credentials."""
        return ", ".join(server.title for server in self._servers)

    def follow(self, channel: EventChannel, emit: Callable[[ChannelValue], None]) -> "NatsFollower":
        """Never fails: a channel of another transport reports it once it runs."""
        return self.follow_with(ChannelIntake(channel, emit))

    def follow_with(self, intake: ChannelIntake | AnyPublisher) -> "NatsFollower":
        """A follower that gives what arrives to ``intake``."""
        return NatsFollower(self, intake)

    async def connect(self) -> None:
        """Connect, or raise Unreachable within five seconds and close everything."""
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.connect):
                await self._tried.wait()
        if self._address is None:
            await self.close()
            hint = "set --nats-server or NATS_SERVER"
            if "uthorization" in self._problem:
                hint += f" and credentials ({_VARIABLES})"
            if "CERTIFICATE" in self._problem:
                hint += "; NATS_TLS_CA_CERT_PATH has the authority of its certificate"
            raise Unreachable(self._unreachable(), hint)

    async def close(self) -> None:
        """End the connection and all running followers, as by a cancellation."""
        if self._keeper is not None:
            # In addition to the cancellation, which the library may lose.
            self._closing = True
            self._wake.set()
            await end_tasks((self._keeper,))
            self._keeper = None
        for follower in [each for all_ in self._followers.values() for each in all_]:
            follower.stop()
        self._tried.clear()

    # -- followers --------------------------------------------------------------------------

    def start(self) -> None:
        if self._keeper is None or self._keeper.done():
            self._closing = False
            self._keeper = self._tasks.start("NATS connection", self._keep_connected)

    def add(self, subject: str, follower: "NatsFollower") -> None:
        self._followers.setdefault(subject, []).append(follower)
        self.start()
        if self._tried.is_set() and self._address is None:
            follower.disconnect(self._unreachable())
        self._wake.set()

    def remove(self, subject: str, follower: "NatsFollower") -> None:
        followers = self._followers[subject]
        followers.remove(follower)
        if not followers:
            del self._followers[subject]
            self._wake.set()

    # -- the connection ---------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        pause = self._bounds.retry
        while True:
            client = await self._dial_any()
            self._tried.set()
            if client is None:
                self._disconnect_all(self._unreachable())
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._bounds.retry_max)
                continue
            pause = self._bounds.retry
            try:
                await self._serve(client)
            finally:
                self._subscribed.clear()
                self._refused.clear()
                address, self._address = self._address, None
                await hang_up(client)
            if self._closing:
                return
            self._problem = self._problem or "the connection ended"
            self._disconnect_all(f"lost {address}: {self._problem}; reconnecting")
            await asyncio.sleep(pause)

    def _unreachable(self) -> str:
        problem = self._problem or f"no response within {self._bounds.connect:g} s"
        return f"cannot reach NATS at {self.title}: {problem}"

    async def _dial_any(self) -> Client | None:
        problems = []
        for server in self._servers:
            self._problem = ""
            client = Client()
            try:
                async with asyncio.timeout(self._bounds.dial):
                    await self._dial(client, server)
                self._problem = ""
                self._address = server.title
                return client
            except Exception as error:  # also any error of a key or a certificate
                problem = self._problem if isinstance(error, NoServersError) else ""
                problem = problem or reason_of(error, self._bounds.dial)
                problem = self._auth.explain(problem, server)
                several = len(self._servers) > 1
                problems.append(f"{server.title}: {problem}" if several else problem)
            finally:
                if self._address is None:
                    await hang_up(client)
        self._problem = "; ".join(problems)
        return None

    async def _dial(self, client: Client, server: NatsServer) -> None:
        # The library's types are whole seconds; it accepts fractions.
        await client.connect(
            servers=[server.url],
            name="dynctl",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=cast(int, self._bounds.dial),
            ping_interval=cast(int, self._bounds.ping),
            max_outstanding_pings=2,
            error_cb=self._on_error,
            closed_cb=self._on_closed,
            **self._auth.options(server),
        )

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self.slow_drops += 1
            return
        reason = reason_of(error, self._bounds.dial)
        _log.debug("NATS: %s", reason)
        if "permissions violation" in reason.lower():
            for subject in self._followers:
                if f'"{subject.lower()}"' in reason.lower():
                    self._refused[subject] = reason
                    self._wake.set()
            return
        self._problem = reason

    async def _on_closed(self) -> None:
        self._wake.set()

    async def _serve(self, client: Client) -> None:
        """Keep the subscriptions of the followers up to date until the connection ends."""
        with contextlib.suppress(*NATS_ERRORS):
            while not client.is_closed and not self._closing:
                self._wake.clear()
                for subject in self._followers.keys() - self._subscribed.keys():
                    self._subscribed[subject] = await self._subscribe(client, subject)
                for subject in self._subscribed.keys() - self._followers.keys():
                    await self._subscribed.pop(subject).unsubscribe()
                # The response to a ping shows whether the server accepted the subscriptions;
                # to the second ping, because the first is sent before the buffered commands.
                await client.flush()
                await client.flush()
                self._connect_all()
                await self._change(client)

    async def _change(self, client: Client) -> None:
        """Wait for other followers, or for the end of the connection, which the library does not
        report after some errors."""
        while not (self._wake.is_set() or client.is_closed):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._bounds.ping):
                    await self._wake.wait()

    async def _subscribe(self, client: Client, subject: str) -> Subscription:
        turn = size = 0

        async def received(message: Msg) -> None:
            nonlocal turn, size
            self._deliver(subject, message.data)
            turn, size = turn + 1, size + len(message.data)
            if turn >= TURN_MESSAGES or size >= TURN_BYTES:
                turn = size = 0
                await asyncio.sleep(0)

        return await client.subscribe(
            subject,
            cb=received,
            pending_msgs_limit=self._bounds.pending_messages,
            pending_bytes_limit=self._bounds.pending_bytes,
        )

    # -- followers ------------------------------------------------------------------

    def _connect_all(self) -> None:
        for subject, followers in self._followers.items():
            refused = self._refused.get(subject)
            for follower in followers:
                if refused is not None:
                    follower.disconnect(f"{self._address} refuses {subject}: {refused}")
                elif subject in self._subscribed:
                    follower.connect(f"{self._address}, subject {subject}")

    def _disconnect_all(self, why: str) -> None:
        for followers in self._followers.values():
            for follower in followers:
                follower.disconnect(why)

    def _deliver(self, subject: str, body: bytes) -> None:
        followers = self._followers.get(subject, ())
        try:
            envelope = decode_envelope(body, self._bounds.message)
        except WireError as error:
            # The publisher is unknown.
            for follower in list(followers):
                follower.malformed(error)
            return
        claimed = False
        for follower in list(followers):
            if follower.intake.claims(envelope):
                claimed = True
                follower.take(envelope)
        self.unclaimed += not claimed


class NatsFollower:
    """Follows one publisher on the subject that it shares with others."""

    def __init__(self, plane: NatsEventPlane, intake: ChannelIntake | AnyPublisher) -> None:
        self.intake = intake
        self.counts = self.intake.counts
        self._plane = plane
        self._end: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        return self.intake.connected

    def stop(self) -> None:
        if self._end is not None and not self._end.done():
            self._end.cancel()

    def connect(self, address: str) -> None:
        self._give(self.intake.connect, address)

    def disconnect(self, why: str) -> None:
        self._give(self.intake.disconnect, why)

    def take(self, envelope: Envelope) -> None:
        self._give(self.intake.take, envelope)

    def malformed(self, error: WireError) -> None:
        self._give(self.intake.malformed, error)

    def _give(self, act: Callable[[_T], None], value: _T) -> None:
        """Pass a value on; an error of its reader ends only this follower."""
        if self._end is None or self._end.done():
            return
        try:
            act(value)
        except Exception as error:
            self._end.set_exception(error)

    async def run(self) -> None:
        """Follow until cancelled, or until the plane is closed."""
        channel = self.intake.channel
        self._end = asyncio.get_running_loop().create_future()
        if not isinstance(channel.transport, NatsTransport):
            self.intake.disconnect(
                f"{channel.scope} publishes {channel.topic} over ZMQ, and this plane reads NATS"
            )
            await self._end
            return
        subject = f"{channel.transport.subject_prefix}.{channel.topic}"
        self._plane.add(subject, self)
        try:
            await self._end
        finally:
            self._plane.remove(subject, self)
            self.intake.connected = False


_VARIABLES: Final = (
    "NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD, NATS_AUTH_TOKEN, NATS_AUTH_NKEY or "
    "NATS_AUTH_CREDENTIALS_FILE"
)


def reason_of(error: BaseException, seconds: float) -> str:
    """One line without credentials: only the type of errors that might have some."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"no response within {seconds:g} s"
    if isinstance(error, OSError):
        return network_reason(error)
    if isinstance(error, NatsError | DynctlError) and str(error):
        return str(error).removeprefix("nats: ").strip("'")
    return type(error).__name__


async def hang_up(client: Any) -> None:
    """Close a client that may not be connected."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(1.0):
            await client.close()
