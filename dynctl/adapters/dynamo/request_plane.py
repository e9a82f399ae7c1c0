"""Requests to workers over Dynamo's request plane (see dynctl.wire.dynamo.request_plane).

A request goes to the worker over TCP or over NATS; the response always arrives over TCP.
"""

import asyncio
import ipaddress
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, cast

from dynctl.adapters.dynamo.call_home import CallHome, CallHomeCounts, Receiver
from dynctl.adapters.ports import NotCalledBack, PlaneInterrupted, RequestPlaneError
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import CONNECTION_REFUSED, network_reason
from dynctl.base.peer_hosts import SILENT_S, is_host_silent, probe_host
from dynctl.wire.dynamo.discovery import Instance
from dynctl.wire.dynamo.request_plane import (
    NO_CONTEXT,
    Address,
    AnswerDecoder,
    Begun,
    Completed,
    FrameDecoder,
    RawItem,
    RequestRefused,
    Sentinel,
    Step,
    decode_reply,
    encode_control,
    encode_payload,
    encode_request,
    format_host_port,
    parse_address,
    printable,
)

RESPONSE_HOST_VARIABLE: Final = "DYN_TCP_RESPONSE_STREAM_HOST"

_SENTINEL_S: Final = 1.0
_ANY: Final = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound


#: Bytes of a response that wait for its reader before the connection is paused.
_BUFFER_BYTES: Final = 256 * 1024
#: Seconds after which a connection to a worker without requests is closed.
_IDLE_S: Final = 30.0
#: Requests of a connection without an acknowledgement. A worker may respond without one, so only
#: this bounds them.
_UNACKNOWLEDGED: Final = 16_384


#: Seconds between two looks at the host of a worker that has not accepted a request.
_LOOK_S: Final = 0.25
#: Probes of a worker's host: a request that was not accepted may go to another worker at once.
_PROBES: Final = 3
#: How often a request is sent over NATS while servers fail under it.
_SENDINGS: Final = 3


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of all requests: seconds, and connections.

    ``connections``: to one worker; each takes any number of requests, one after the other.
    ``port``: where responses arrive; 0: a free port.
    """

    connect_s: float = 2.0
    handshake_s: float = 5.0
    strangers: int = 64
    connections: int = 4
    port: int = 0


class Messenger(Protocol):
    """Sends a request to a subject of NATS."""

    async def request(
        self, subject: str, body: bytes, headers: dict[str, str], timeout: float
    ) -> bytes:
        """The reply. Raises RequestPlaneError with the reason."""
        ...

    async def local_host(self) -> str:
        """The address of this host towards the server. Raises RequestPlaneError."""
        ...

    async def close(self) -> None: ...


class TcpRequestPlane:
    """Sends requests to workers; responses arrive at our listener, opened at the first request.

    ``nats`` makes what sends to workers with the NATS request plane, when it is first needed; None:
    they cannot be requested.

    ``listen_host`` is the local address to listen at. None: the local address of the route to each
    worker, which is loopback for a worker on loopback, so that no other network can connect.
    ``advertised_host`` is sent to workers instead; if it is an address of this host, it is listened
    at too, else NAT must forward it.
    """

    def __init__(
        self,
        *,
        listen_host: str | None = None,
        advertised_host: str | None = None,
        limits: RequestLimits = RequestLimits(),
        nats: Callable[[], Messenger] | None = None,
    ) -> None:
        self._new_messenger = nats
        self._messenger: Messenger | None = None
        self._listen_host = listen_host
        self._advertised_host = advertised_host
        self._limits = limits
        self._home = CallHome(
            strangers=limits.strangers, handshake_s=limits.handshake_s, port=limits.port
        )
        self._workers: dict[tuple[str, int], _Worker] = {}

    @property
    def calls(self) -> CallHomeCounts:
        """Counts of the connections to the listener."""
        return self._home.counts

    async def send(
        self,
        instance: Instance,
        body: Any,
        receiver: Receiver,
        *,
        timeout: float,
        request_id: str | None = None,
        context: Mapping[str, str] = NO_CONTEXT,
    ) -> tuple[str, str]:
        """Send a request whose response goes to ``receiver``; returns once the worker accepted it:
        it has sent the acknowledgement or connected to us, and either may be first.

        ``context``: more headers, for the trace of the request.

        A receiver may be called after a cancellation of this, so that it can stop the worker.

        Returns the subject, for :meth:`forget`, and the address that the worker connects to.
        Connecting and the acknowledgement may take ``timeout`` seconds each (connecting at most as
        long as the limits). Raises RequestPlaneError; then nothing is received.
        """
        if instance.transport != "tcp" and (instance.transport != "nats_tcp" or not self._has_nats):
            nats = instance.transport == "nats_tcp"
            what = "NATS, and no server is set" if nats else "a transport that is not supported"
            known = f"needs {what} ({printable(instance.transport)!r})"
            _fail(instance, f"{known}; its events can be followed, but not recovered")
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[str | None] = loop.create_future()
        subject = self._home.expect(receiver, accepted)
        request_id = request_id or str(uuid.uuid4())
        try:
            if instance.transport == "tcp":
                home = await self._send(
                    instance, body, subject, timeout, request_id, accepted, context
                )
            else:
                home = await self._put_over_nats(
                    instance, body, subject, timeout, request_id, accepted, context
                )
        except asyncio.CancelledError:
            # The worker may have the request already: its receiver can stop it when it connects.
            loop.call_later(timeout, self._home.forget, subject)
            raise
        except BaseException:
            self._home.forget(subject)
            raise
        return subject, home

    def forget(self, subject: str) -> None:
        """Drop the response of a request that has not arrived yet."""
        self._home.forget(subject)

    async def ask(
        self, instance: Instance, body: Any, *, timeout: float, max_bytes: int
    ) -> AsyncGenerator[Any, None]:
        """The items of the response, decoded; see ask_raw."""
        raw = self.ask_raw(instance, body, timeout=timeout, max_bytes=max_bytes)
        async with aclosing(raw):
            async for item in raw:
                try:
                    decoded = item.decode()
                except WireError as error:
                    _fail(instance, f"sent an invalid response: {error}")
                yield decoded

    async def ask_raw(
        self, instance: Instance, body: Any, *, timeout: float, max_bytes: int
    ) -> AsyncGenerator[RawItem, None]:
        """The items of the response as they arrive.

        Connecting, the acknowledgement, the call home and each item may take ``timeout`` seconds
        each (connecting at most as long as the limits); ``max_bytes`` bounds the whole response.
        Raises RequestPlaneError. A caller that stops early closes the generator (``aclosing``):
        the request is then cancelled at the worker.
        """
        response = _OpenResponse(instance, max_bytes)
        try:
            subject, home = await self.send(instance, body, response, timeout=timeout)
        except BaseException:
            response.left = True
            raise
        try:
            await response.called_home(home, timeout)
            step = await response.step(timeout, 0)
            if isinstance(step, RequestRefused):
                response.finished = True
                _fail(instance, f"returned an error: {step.error}", kind="refusal")
            if not isinstance(step, Begun):
                _fail(instance, "began its response without a prologue")
            items = 0
            while True:
                step = await response.step(timeout, items)
                if isinstance(step, Completed):
                    break
                if not isinstance(step, RawItem):
                    _fail(instance, f"ended its response early, after {items} items", kind="reset")
                items += 1
                yield step
            await response.sentinel(timeout)
            response.finished = True
        finally:
            self._home.forget(subject)
            response.hang_up()

    async def close(self) -> None:
        """Stop listening and end all running requests."""
        await self._home.close()
        if self._messenger is not None:
            await self._messenger.close()
            self._messenger = None
        for worker in list(self._workers.values()):
            worker.abort()

    # -- the request

    async def _send(
        self,
        instance: Instance,
        body: Any,
        subject: str,
        timeout: float,
        request_id: str,
        accepted: asyncio.Future[str | None],
        context: Mapping[str, str],
    ) -> str:
        """Send the request; returns the address sent to the worker once it has accepted."""
        try:
            address = parse_address(instance.address)
        except WireError as error:
            _fail(instance, f"cannot be requested: {error}")
        connection = await self._connection(instance, address, timeout)
        if connection.home is None:
            connection.home = await self._home_for(instance, connection.local_host)
        try:
            request = encode_request(
                address.path,
                request_id,
                body,
                call_home=connection.home,
                subject=subject,
                codec=instance.codec,
                context=context,
            )
        except WireError as error:
            _fail(instance, f"cannot be requested: {error}")
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        late = loop.call_later(min(timeout, SILENT_S), connection.judge, accepted, until)
        try:
            refusal = await connection.request(request, accepted)
        except _HostSilent:
            _fail(instance, "is not reachable: its host does not respond", kind="vanished")
        except TimeoutError:
            _fail(instance, f"did not accept the request within {timeout:g} s", kind="timeout")
        except OSError as error:
            _fail(
                instance,
                f"lost the connection before it accepted the request: {network_reason(error)}",
                kind="reset",
            )
        except WireError as error:
            _fail(instance, f"does not use Dynamo's request plane: {error}")
        finally:
            late.cancel()
        if refusal is None:
            _fail(instance, "closed the connection before it accepted the request", kind="reset")
        if refusal:
            _fail(instance, f"refused the request: {printable(refusal)}", kind="refusal")
        return connection.home

    @property
    def _has_nats(self) -> bool:
        return self._messenger is not None or self._new_messenger is not None

    async def _put_over_nats(
        self,
        instance: Instance,
        body: Any,
        subject: str,
        timeout: float,
        request_id: str,
        accepted: asyncio.Future[str | None],
        context: Mapping[str, str],
    ) -> str:
        """As _send, to the instance's subject; an empty reply accepts the request."""
        if self._messenger is None:
            assert self._new_messenger is not None
            self._messenger = self._new_messenger()
        try:
            home = await self._home_for(instance, await self._messenger.local_host())
            reply = await self._reply_over_nats(
                self._messenger,
                instance.address,
                lambda id: encode_payload(
                    id, body, call_home=home, subject=subject, codec=instance.codec
                ),
                {"request-id": request_id, **context},
                timeout,
                accepted,
            )
        except WireError as error:
            _fail(instance, f"cannot be requested: {error}")
        except RequestPlaneError as error:
            _fail(instance, str(error), kind=error.kind, gone=error.gone)
        if reply:
            _fail(
                instance,
                f"refused the request: {printable(reply[:200].decode(errors='replace'))}",
                kind="refusal",
            )
        return home

    async def _reply_over_nats(
        self,
        messenger: Messenger,
        address: str,
        encode: Callable[[str], bytes],
        headers: dict[str, str],
        timeout: float,
        accepted: asyncio.Future[str | None],
    ) -> bytes:
        """The worker's reply; empty also if it connected to us and its reply was lost.

        A request whose way was cut is sent again. Its worker may get both, so the second has an id
        of its own, and the response of the one that connects first is taken.
        """
        for left in reversed(range(_SENDINGS)):
            payload = encode(headers["request-id"])
            try:
                return await messenger.request(address, payload, headers, timeout)
            except RequestPlaneError as error:
                if accepted.done():
                    break
                if left == 0 or not isinstance(error, PlaneInterrupted):
                    raise
            headers = {**headers, "request-id": str(uuid.uuid4())}
        return b""

    async def _connection(
        self, instance: Instance, address: Address, timeout: float
    ) -> "_WorkerConnection":
        """An open connection to the worker: an idle one, else the one with the fewest requests."""
        key = address.host, address.port
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = _Worker()
        found = worker.best(self._limits.connections)
        if found is not None:
            return found
        wait = min(timeout, self._limits.connect_s)
        try:
            async with asyncio.timeout(wait), worker.connecting:
                found = worker.best(self._limits.connections)
                if found is None:
                    _, found = await asyncio.get_running_loop().create_connection(
                        lambda: _WorkerConnection(worker), address.host, address.port
                    )
                return found
        except TimeoutError:
            self._leave(key)
            _fail(instance, f"did not accept the connection within {wait:g} s", kind="connect")
        except OSError as error:
            self._leave(key)
            reason = network_reason(error)
            kind = "refused" if reason == CONNECTION_REFUSED else "connect"
            _fail(instance, f"is not reachable: {reason}", kind=kind)

    def _leave(self, key: tuple[str, int]) -> None:
        """Forget a worker without a connection: workers come and go for as long as we run."""
        worker = self._workers.get(key)
        if worker is not None and not worker.open:
            del self._workers[key]

    async def _home_for(self, instance: Instance, local: str) -> str:
        """HOST:PORT for this worker's connection to us. ``local``: our address towards it."""
        advertised = self._advertised_host or self._listen_host
        if advertised is None or advertised in _ANY:
            advertised = local
        if self._listen_host is None and self._advertised_host is not None:
            # The advertised address is usually one of this host; behind NAT it is not.
            with suppress(OSError):
                return format_host_port(
                    _without_mapping(advertised), await self._home.port(advertised)
                )
        listen = local if self._listen_host is None else self._listen_host
        try:
            return format_host_port(_without_mapping(advertised), await self._home.port(listen))
        except OSError as error:
            _fail(
                instance,
                f"cannot connect back: listening at {listen or 'any address'} failed: "
                f"{network_reason(error)}"
                f" ({RESPONSE_HOST_VARIABLE} sets the address)",
            )


class _HostSilent(Exception):
    """The host of a worker does not acknowledge what is sent to it."""


@dataclass(slots=True)
class _Worker:
    """The connections to one address of a worker."""

    open: "list[_WorkerConnection]" = field(default_factory=list)
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def best(self, most: int) -> "_WorkerConnection | None":
        """The connection for the next request; None: open another one."""
        found = min(self.open, key=lambda connection: connection.pending, default=None)
        full = len(self.open) >= most
        return found if found is not None and (full or not found.pending) else None

    def abort(self) -> None:
        for connection in list(self.open):
            connection.abort()


class _WorkerConnection(asyncio.Protocol):
    """A connection that takes requests; the worker acknowledges them in order.

    ``home``: the address for responses of this worker, once it is known.
    """

    def __init__(self, worker: _Worker) -> None:
        self.home: str | None = None
        self.local_host = ""
        self._worker = worker
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._acknowledged: deque[asyncio.Future[str | None]] = deque()
        self._writable: asyncio.Future[None] | None = None
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> int:
        """Requests without an acknowledgement."""
        return len(self._acknowledged)

    async def request(self, data: bytes, acknowledged: asyncio.Future[str | None]) -> str | None:
        """The acknowledgement, which ``acknowledged`` gets: empty if the request is accepted, else
        the worker's reason; None if the connection ended before it. Raises OSError or WireError."""
        if self._transport is None or self._transport.is_closing():
            return None
        if len(self._acknowledged) >= _UNACKNOWLEDGED:
            self.abort()
            return None
        self._acknowledged.append(acknowledged)
        self._transport.write(data)
        if self._writable is not None:
            await asyncio.shield(self._writable)
        return await acknowledged

    def judge(self, acknowledged: asyncio.Future[str | None], until: float) -> None:
        """End the wait for a late acknowledgement: at ``until``, and before it if the worker's host
        is silent. A worker that is stopped or busy has a host that responds."""
        if acknowledged.done():
            return
        loop = asyncio.get_running_loop()
        connection = None if self._transport is None else self._transport.get_extra_info("socket")
        silent, now = is_host_silent(connection), loop.time()
        if not silent and now < until:
            loop.call_at(min(now + _LOOK_S, until), self.judge, acknowledged, until)
            return
        if silent:
            self._end(_HostSilent())
        else:
            acknowledged.set_exception(TimeoutError())
            acknowledged.exception()  # its request may have been cancelled
        self.abort()

    def abort(self) -> None:
        """Cut it; its requests without an acknowledgement end."""
        if self in self._worker.open:
            self._worker.open.remove(self)
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        # A request that has arrived is acknowledged by the system, and then nothing is sent again.
        probe_host(transport.get_extra_info("socket"), _PROBES)
        self.local_host = transport.get_extra_info("sockname")[0]
        self._worker.open.append(self)
        loop = asyncio.get_running_loop()
        self._idle_since = loop.time()
        self._timer = loop.call_later(_IDLE_S, self._check_idle)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (reply := decode_reply(self._received)) is not None:
                size = int.from_bytes(self._received[:4])
                del self._received[: 4 + size]
                if not self._acknowledged:
                    raise WireError("reply", "a reply without a request")
                acknowledged = self._acknowledged.popleft()
                if not acknowledged.done():
                    acknowledged.set_result(reply)
        except WireError as error:
            self._end(error)
            self.abort()
        self._idle_since = asyncio.get_running_loop().time()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self in self._worker.open:
            self._worker.open.remove(self)
        self.resume_writing()
        self._end(_HostSilent() if isinstance(exc, TimeoutError) else exc)

    def _end(self, error: Exception | None) -> None:
        while self._acknowledged:
            acknowledged = self._acknowledged.popleft()
            if acknowledged.done():
                continue
            if error is None:
                acknowledged.set_result(None)
            else:
                acknowledged.set_exception(error)
                acknowledged.exception()  # its request may have been cancelled

    def _check_idle(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._idle_since + _IDLE_S - loop.time()
        if not self._acknowledged and left <= 0:
            self.abort()
        else:
            self._timer = loop.call_later(max(1.0, left), self._check_idle)


class _OpenResponse:
    """A response that is read step by step. ``finished``: the worker has nothing to cancel;
    ``left``: its reader is gone."""

    def __init__(self, instance: Instance, max_bytes: int) -> None:
        self.finished = False
        self.left = False
        self._instance = instance
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._answer: AnswerDecoder | None = None
        self._paused = False
        self._ended = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    # -- Receiver

    def called(self, transport: asyncio.Transport, frames: FrameDecoder) -> None:
        self._transport = transport
        self._answer = AnswerDecoder(self._instance.codec, self._max_bytes, frames)
        self._changed.set()
        if self.left:
            self.hang_up()

    def received(self) -> None:
        self._changed.set()
        answer, transport = self._answer, self._transport
        if answer is not None and transport is not None and answer.waiting > _BUFFER_BYTES:
            self._paused = True
            transport.pause_reading()

    def host_is_silent(self) -> None:
        """Nothing: each of its items has a timeout."""

    def lost(self, error: Exception | None) -> None:
        self._ended, self._error = True, error
        self._changed.set()

    # -- reading

    async def called_home(self, home: str, timeout: float) -> None:
        """Wait until the worker has connected. Raises RequestPlaneError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._answer is None and not self._ended:
                    await self._change()
        if self._answer is not None:
            return
        if self._ended:
            _fail(self._instance, "did not respond before the request plane was closed")
        _fail(
            self._instance,
            f"accepted the request and did not connect back to {home} within {timeout:g} s:"
            " it cannot read the request or cannot reach that address"
            f" ({RESPONSE_HOST_VARIABLE} sets it)",
            NotCalledBack,
            kind="timeout",
        )

    async def step(self, timeout: float, items: int) -> Step:
        """The next step; ``items`` were read before. Raises RequestPlaneError."""
        instance = self._instance
        try:
            async with asyncio.timeout(timeout):
                step = await self._next()
        except TimeoutError:
            problem = f"sent nothing for {timeout:g} s in its response, after {items} items"
            _fail(instance, problem, kind="timeout")
        except OSError as error:
            reason = network_reason(error)
            problem = f"lost the connection in its response, after {items} items: {reason}"
            _fail(instance, problem, kind="reset")
        except WireError as error:
            _fail(instance, f"sent an invalid response, after {items} items: {error}")
        if step is None:
            midway = self._answer is not None and self._answer.midway
            where = "inside a frame" if midway else "early"
            _fail(instance, f"ended its response {where}, after {items} items", kind="reset")
        return step

    async def sentinel(self, timeout: float) -> None:
        """Let the worker close first: closing on its last frame is an error in its log."""
        with suppress(OSError, TimeoutError, WireError):
            async with asyncio.timeout(min(timeout, _SENTINEL_S)):
                while (step := await self._next()) is not None:
                    if isinstance(step, Sentinel):
                        return

    def hang_up(self) -> None:
        """Close the connection without awaiting; the worker drops the rest."""
        if self._transport is None:
            return
        # A caller that needs one item stops before the end is read, though it has arrived.
        finished = self.finished or (self._answer is not None and _at_end(self._answer))
        if not finished and not self._transport.is_closing():
            self._transport.write(encode_control("kill"))
        self._transport.close()

    async def _next(self) -> Step | None:
        """None at the end of the stream."""
        assert self._answer is not None
        while (step := self._answer.next_step()) is None:
            if self._paused and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()
            if self._ended:
                if isinstance(self._error, OSError):
                    raise self._error
                return None
            await self._change()
        return step

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _at_end(answer: AnswerDecoder) -> bool:
    """Whether the received bytes end the stream."""
    with suppress(WireError):
        return isinstance(answer.next_step(), Completed)
    return False


def _without_mapping(host: str) -> str:
    """An IPv4 address as IPv4 where the system writes it as IPv6 (``::ffff:10.0.0.1``)."""
    try:
        mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    except ValueError:
        return host
    return host if mapped is None else str(mapped)


def _fail(
    instance: Instance,
    problem: str,
    error: type[RequestPlaneError] = RequestPlaneError,
    *,
    kind: str = "protocol",
    gone: bool = False,
) -> NoReturn:
    location = printable(instance.address.partition("/")[0])
    who = f"{instance.endpoint} of worker {instance.instance_id:x} at {location}"
    raise error(f"{who} {problem}", kind, gone=gone) from None
