"""Requests over NATS: each endpoint of a worker with Dynamo's NATS request plane has a subject.

:class:`NatsMessenger` sends them, :class:`NatsListener` receives them.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, MaxPayloadError, NoRespondersError, NoServersError

from dynctl.adapters.nats.address import NATS_ERRORS, NatsAuth, NatsServer, nats_servers
from dynctl.adapters.nats.dynamo_events import hang_up, reason_of
from dynctl.adapters.ports import PlaneInterrupted, RequestPlaneError
from dynctl.base.errors import Unreachable, network_reason
from dynctl.base.tasks import end_tasks

Take = Callable[[bytes, Mapping[str, str]], str]
"""Gets the body and the headers of a request; returns the reply, empty for an accepted one."""

_DIAL_S: Final = 2.0
_PING_S: Final = 5.0
_PORT: Final = 4222
_CHECK_S: Final = 0.25
_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 1.0
_FLUSH_S: Final = 5.0
#: Seconds that a server has to respond to a ping.
_ALIVE_S: Final = 1.0
#: Seconds between two pings of ours: a server that is stopped is noticed within three.
_WATCH_S: Final = 1.0
#: Seconds that our event loop must have been late for a missing response to be its own fault.
_LATE_S: Final = 0.5
#: Seconds for which workers may still be on their way back after we lost a connection ourselves:
#: Dynamo's client dials again after at most 4 s.
RETURN_S: Final = 6.0
#: How long one request waits for its worker to come back, and how often it looks.
_AWAIT_S: Final = 3.0
#: The same while our own connection is well: a worker's own may have been lost just now.
_BRIEF_S: Final = 0.3
#: How long requests wait for a server while none is reachable.
OUTAGE_S: Final = 8.0
_LOOK_S: Final = 0.05
#: The status of the reply where no process listens at a subject.
_NO_RESPONDERS: Final = "503"
#: The subjects of replies, as permissions of NATS name them.
_INBOXES: Final = "_INBOX.>"
#: What may wait for us on one subject; the server's limit of one message is 1 MiB unless set.
_PENDING_MESSAGES: Final = 2048
_PENDING_BYTES: Final = 128 * 1024 * 1024


class _Replies:
    """The requests over one connection. Their replies arrive at one subscription.

    The library's own requests are not used: when the connection ends, or the server refuses their
    subject, they wait until their time is over.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._subscribed = False
        self._subscription: Subscription | None = None

    async def request(
        self, subject: str, body: bytes, headers: dict[str, str] | None, timeout: float
    ) -> Msg:
        """Raises the library's errors, TimeoutError, or RequestPlaneError for a lack of
        permission."""
        if not self._subscribed:
            self._subscribed = True
            self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._take)
        inbox = f"{self._inbox}.{next(self._numbers)}"
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = subject, reply
        try:
            await self._client.publish(subject, body, inbox, headers)
            message = await asyncio.wait_for(reply, timeout)
        finally:
            del self._waiting[inbox]
        if message.headers is not None and message.headers.get("Status") == _NO_RESPONDERS:
            raise NoRespondersError
        return message

    async def refuse(self, violation: str) -> str | None:
        """End the requests that cannot succeed. Returns the problem, None without such requests.

        ``violation``: the server's words about a permission that its user does not have.
        """
        violation = violation.lower()
        if self._inbox.lower() in violation:
            problem = f"needs a permission of NATS: to subscribe to {_INBOXES}"
            self.end(RequestPlaneError(problem, "plane"))
            refused, self._subscription, self._subscribed = self._subscription, None, False
            if refused is not None:
                await refused.unsubscribe()
            return problem
        for subject, reply in list(self._waiting.values()):
            if f'"{subject.lower()}"' in violation:
                problem = f"needs a permission of NATS: to publish to {subject}"
                _fail(reply, RequestPlaneError(problem, "plane"))
                return problem
        return None

    def end(self, error: Exception) -> None:
        """End the wait of all requests: no reply can arrive any more."""
        for _, reply in list(self._waiting.values()):
            _fail(reply, error)

    async def _take(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)


def _fail(reply: asyncio.Future[Msg], error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
        reply.exception()  # its request may have been given up meanwhile


@dataclass(eq=False, slots=True)
class _Connection:
    """An open connection. ``returned_at``: the loop's time, if an earlier connection was lost or
    refused."""

    client: Client
    server: NatsServer
    replies: _Replies
    returned_at: float | None
    watch: asyncio.Task[None] | None = None

    def workers_return(self) -> bool:
        """Whether workers may still be on their way back to the servers."""
        now = asyncio.get_running_loop().time()
        return self.returned_at is not None and now - self.returned_at < RETURN_S

    def interrupt(self) -> None:
        """End the wait of all requests: no reply can arrive any more."""
        if self.watch is not None and self.watch is not asyncio.current_task():
            self.watch.cancel()
        self.replies.end(ConnectionClosedError())


class NatsMessenger:
    """One connection to one of ``servers``, made when it is first needed and again after a loss.

    ``heard`` gets the server's errors that concern no request, such as a refused subscription.
    ``report`` gets the problem while there is no connection, None when there is one again; with it
    a lost connection is made again without a request. Raises UsageProblem for a server or invalid
    credentials, as NatsEventPlane does.
    """

    def __init__(
        self,
        servers: str | list[str] | tuple[str, ...],
        auth: NatsAuth | None = None,
        heard: Callable[[str], None] = lambda problem: None,
        report: Callable[[str | None], None] | None = None,
    ) -> None:
        self._servers = nats_servers(servers)
        self._heard = heard
        self._report = report
        self._problem: str | None = None
        self._auth = NatsAuth.from_environment() if auth is None else auth
        self._connection: _Connection | None = None
        self._was_lost = False
        #: Set while there is a connection.
        self._open = asyncio.Event()
        self._dialing: asyncio.Task[_Connection | str] | None = None
        self._again: asyncio.Task[None] | None = None

    async def request(
        self, subject: str, body: bytes, headers: dict[str, str], timeout: float
    ) -> bytes:
        """The reply to a message. Raises RequestPlaneError with the reason, PlaneInterrupted if
        the connection was lost before the reply arrived."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            connection = await self._awaited()
            try:
                return await self._reply(connection, subject, body, headers, timeout)
            except NoRespondersError:
                problem = f"does not listen at {subject}"
                returning = connection.workers_return()
            if loop.time() - began >= min(_AWAIT_S if returning else _BRIEF_S, timeout):
                if not returning:
                    raise RequestPlaneError(problem, "connect")
                problem += " yet: NATS was lost, and workers are connecting again"
                raise RequestPlaneError(problem, "plane")
            await asyncio.sleep(_LOOK_S)

    async def _reply(
        self,
        connection: _Connection,
        subject: str,
        body: bytes,
        headers: dict[str, str],
        timeout: float,
    ) -> bytes:
        """The reply over this connection. Raises NoRespondersError, or as :meth:`request`."""
        loop, client = asyncio.get_running_loop(), connection.client
        began = loop.time()
        try:
            reply = await connection.replies.request(subject, body, headers, timeout)
        except NoRespondersError:
            raise
        except MaxPayloadError:
            problem = f"{len(body):,} bytes, over NATS's limit of {client.max_payload:,} a message"
            raise RequestPlaneError(f"cannot get the request: {problem}", "size") from None
        except NATS_ERRORS as error:
            why, waited = reason_of(error, timeout), loop.time() - began
            if self._connection is not connection or not await self._responds(client):
                problem = f"needs NATS, which does not respond: {connection.server.title}"
                raise PlaneInterrupted(problem, "plane") from None
            if waited > timeout + _LATE_S:
                problem = "cannot be judged: this process stood still while the request waited"
                raise PlaneInterrupted(problem, "plane") from None
            kind = "timeout" if isinstance(error, TimeoutError) else "connect"
            raise RequestPlaneError(f"did not accept the request over NATS: {why}", kind) from None
        if self._problem is not None:
            self._say(None)  # a permission that was missing
        return reply.data

    async def listens(self, subject: str, timeout: float) -> bool:
        """Whether a process listens at the subject; also true if that cannot be found out."""
        try:
            connection = await self._connected()
            await connection.replies.request(subject, b"", None, timeout)
        except NoRespondersError:
            return False
        except (*NATS_ERRORS, RequestPlaneError):
            return True
        return True

    @property
    def title(self) -> str:
        """The addresses for display, without credentials."""
        return ", ".join(server.title for server in self._servers)

    async def local_host(self) -> str:
        """The address of this host towards the server. Raises RequestPlaneError."""
        parts = urlsplit((await self._awaited()).server.url)
        return await asyncio.to_thread(_towards, parts.hostname or "", parts.port or _PORT)

    async def close(self) -> None:
        """Leave no connection or task."""
        await end_tasks([task for task in (self._again, self._dialing) if task is not None])
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.interrupt()
            await hang_up(connection.client)

    async def connected(self) -> Client:
        """The connection. Raises RequestPlaneError."""
        return (await self._connected()).client

    # -- inside

    async def _awaited(self) -> _Connection:
        """The connection; one that was lost is awaited, if it is made again without a request.
        Raises RequestPlaneError."""
        loop = asyncio.get_running_loop()
        until = loop.time() + OUTAGE_S
        while True:
            try:
                return await self._connected()
            except RequestPlaneError:
                again = self._again is not None and not self._again.done()
                if not again or loop.time() >= until:
                    raise
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self._open.wait()

    async def _connected(self) -> _Connection:
        connection = self._connection
        if connection is not None:
            if not connection.client.is_closed:
                return connection
            # The library reports the end of a connection late; after some errors it does not.
            self._drop(connection)
        # One attempt for all that wait: a server that never responds costs each the same seconds.
        if self._dialing is None or self._dialing.done():
            self._dialing = asyncio.create_task(self._connect(), name="nats-dial")
        dialing = self._dialing
        try:
            outcome = await asyncio.shield(dialing)
        except asyncio.CancelledError:
            if not dialing.cancelled():
                raise
            outcome = "was closed"
        if isinstance(outcome, str):
            raise RequestPlaneError(outcome, "plane", gone=True)
        return outcome

    async def _connect(self) -> _Connection | str:
        """Connect to the first server that responds; else the problem."""
        problems = []
        for server in self._servers:
            client = Client()
            replies = _Replies(client)
            heard: list[str] = []
            try:
                async with asyncio.timeout(_DIAL_S):
                    await self._dial(client, server, replies, heard)
            except Exception as error:  # also any error of a key or a certificate
                # The library hides the reason behind "no servers available".
                known = heard[-1] if heard and isinstance(error, NoServersError) else ""
                reason = self._auth.explain(known or reason_of(error, _DIAL_S), server)
                problems.append(f"{server.title}: {reason}")
                await hang_up(client)
                continue
            now = asyncio.get_running_loop().time()
            connection = _Connection(client, server, replies, now if self._was_lost else None)
            connection.watch = asyncio.create_task(self._watch(connection), name="nats-watch")
            self._connection = connection
            self._open.set()
            self._say(None)
            return connection
        problem = f"needs NATS, which is not reachable: {'; '.join(problems)}"
        self._lose(problem)
        return problem

    async def _watch(self, connection: _Connection) -> None:
        """Notice a server that is silent, while no request waits too."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if not await self._responds(connection.client):
                return

    async def _responds(self, client: Client) -> bool:
        """Whether the server responds to a ping; without a response the connection is closed."""
        loop = asyncio.get_running_loop()
        for _ in range(2):
            began = loop.time()
            with suppress(*NATS_ERRORS):
                async with asyncio.timeout(2 * _ALIVE_S):
                    await client.flush(cast(int, _ALIVE_S))
                return True
            if client.is_closed or loop.time() - began < _ALIVE_S + _LATE_S:
                break  # else this process stood still, and the response may be here
        connection = self._connection
        if connection is not None and connection.client is client:
            self._drop(connection, f"needs NATS, which does not respond: {connection.server.title}")
            await hang_up(client)
        return False

    def _drop(self, connection: _Connection, problem: str | None = None) -> None:
        """The connection ended, and so does the wait of its requests."""
        self._connection = None
        self._lose(problem)
        connection.interrupt()

    def _lose(self, problem: str | None) -> None:
        """There is no connection, and a problem unless it is not known yet; connect again."""
        self._was_lost = True
        self._open.clear()
        if self._report is None:
            return
        if problem is not None:
            self._say(problem)
        if self._again is None or self._again.done():
            self._again = asyncio.create_task(self._until_connected(), name="nats-again")

    async def _until_connected(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
            with suppress(RequestPlaneError):
                await self.connected()
                return

    def _say(self, problem: str | None) -> None:
        if self._report is not None and problem != self._problem:
            self._problem = problem
            self._report(problem)

    async def _dial(
        self, client: Client, server: NatsServer, replies: _Replies, reasons: list[str]
    ) -> None:
        """Connect; ``reasons`` keeps the last error that the library reported."""

        async def heard(error: Exception) -> None:
            # An error of a request is raised there.
            reason = reason_of(error, _DIAL_S)
            reasons[:] = [reason]
            self._heard(reason)
            if "permissions violation" in reason.lower():
                problem = await replies.refuse(reason)
                if problem is not None:
                    self._say(problem)

        async def closed() -> None:
            connection = self._connection
            if connection is not None and connection.client is client:
                self._drop(connection)

        # The library's types are whole seconds; it accepts fractions.
        await client.connect(
            servers=[server.url],
            name="dynctl",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=cast(int, _DIAL_S),
            ping_interval=cast(int, _PING_S),
            error_cb=heard,
            closed_cb=closed,
            **self._auth.options(server),
        )


class NatsListener:
    """Receives the requests of subjects over one connection, made again after a loss.

    ``report`` gets the problem of the connection, None when it ended. For one event loop.
    """

    def __init__(
        self,
        servers: str | list[str] | tuple[str, ...],
        auth: NatsAuth | None = None,
        report: Callable[[str | None], None] = lambda problem: None,
    ) -> None:
        self._messenger = NatsMessenger(servers, auth, self._heard)
        self._report = report
        self._takers: dict[str, Take] = {}
        self._subscribed: dict[str, Subscription] = {}
        self._refused: dict[str, str] = {}
        self._client: Client | None = None
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._problem: str | None = None

    @property
    def title(self) -> str:
        """The addresses for display, without credentials."""
        return self._messenger.title

    def listen(self, subject: str, take: Take) -> None:
        """Give ``take`` the requests of this subject, from the next :meth:`listening` on."""
        self._takers[subject] = take

    def forget(self, subject: str) -> None:
        """Receive no further requests of this subject, soon."""
        self._takers.pop(subject, None)

    async def listening(self) -> None:
        """Return once the server has all subscriptions. Raises Unreachable."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="nats-listener")
        try:
            await self._subscribe()
        except RequestPlaneError as error:
            self._say(str(error))
            raise Unreachable(
                f"the request plane {error}", "set --nats-server or NATS_SERVER"
            ) from None
        self._say(None)

    async def listens(self, subject: str, timeout: float) -> bool:
        """Whether any process listens at the subject; also true if that cannot be found out."""
        return await self._messenger.listens(subject, timeout)

    async def hush(self) -> None:
        """Receive nothing more. What the server has sent already is still taken."""
        self._takers.clear()
        with suppress(RequestPlaneError):
            await self._subscribe()

    async def close(self) -> None:
        """Leave no connection or task."""
        if self._task is not None:
            await end_tasks([self._task])
            self._task = None
        await self._messenger.close()

    async def _keep(self) -> None:
        """Subscribe again after each loss of the connection."""
        pause = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(_CHECK_S if self._problem is None else pause)
            client = self._client
            lost = client is None or client.is_closed
            if (
                not lost
                and self._problem is None
                and self._subscribed.keys() == self._takers.keys()
            ):
                continue
            try:
                await self._subscribe()
            except RequestPlaneError as error:
                pause = min(2 * pause, _MAX_PAUSE_S)
                self._say(str(error))
            else:
                pause = _FIRST_PAUSE_S
                self._say(None)

    async def _subscribe(self) -> None:
        """Make the server's subscriptions those that are wanted. Raises RequestPlaneError."""
        async with self._turn:
            client = await self._messenger.connected()
            if client is not self._client:
                self._client = client
                self._subscribed.clear()
            self._refused.clear()
            try:
                wanted = dict(self._takers)
                for subject in wanted.keys() - self._subscribed.keys():
                    self._subscribed[subject] = await client.subscribe(
                        subject,
                        cb=self._receiver(wanted[subject]),
                        pending_msgs_limit=_PENDING_MESSAGES,
                        pending_bytes_limit=_PENDING_BYTES,
                    )
                for subject in self._subscribed.keys() - wanted.keys():
                    await cast(Any, self._subscribed.pop(subject)).drain()
                # The response to the second ping shows whether the server accepted the
                # subscriptions: the first one is sent before the buffered commands.
                async with asyncio.timeout(_FLUSH_S):
                    await client.flush()
                    await client.flush()
            except NATS_ERRORS as error:
                await hang_up(client)
                why = reason_of(error, _FLUSH_S)
                raise RequestPlaneError(f"needs NATS, and lost {self.title}: {why}") from None
            for subject, why in self._refused.items():
                self._subscribed.pop(subject, None)
                raise RequestPlaneError(f"cannot listen at {subject}: NATS refuses it: {why}")

    def _receiver(self, take: Take) -> Callable[[Msg], "asyncio.Future[None]"]:
        async def received(message: Msg) -> None:
            reply = take(message.data, message.headers or {})
            if message.reply:
                with suppress(*NATS_ERRORS):
                    await message.respond(reply.encode())

        return cast("Callable[[Msg], asyncio.Future[None]]", received)

    def _heard(self, problem: str) -> None:
        lower = problem.lower()
        for subject in self._takers if "permissions violation" in lower else ():
            if f'"{subject.lower()}"' in lower:
                self._refused[subject] = problem

    def _say(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._report(problem)


def _towards(host: str, port: int) -> str:
    """The local address of the route to a host; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RequestPlaneError(
            f"cannot connect back: no way to {host}: {network_reason(error)}"
        ) from None
