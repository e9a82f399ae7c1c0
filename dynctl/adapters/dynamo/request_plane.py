"""Requests to workers over Dynamo's request plane (see dynctl.wire.dynamo.request_plane).

A request goes to the worker over TCP or over NATS; the response always arrives over TCP.
"""

import asyncio
import ipaddress
import os
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from dynctl.adapters.dynamo.call_home import READ_BYTES, Caller, CallHome, CallHomeCounts
from dynctl.adapters.ports import NotCalledBack, RequestPlaneError
from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.discovery import Instance
from dynctl.wire.dynamo.request_plane import (
    Address,
    AnswerDecoder,
    Begun,
    Completed,
    RawItem,
    Refused,
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


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of all requests: seconds, and connections."""

    connect_s: float = 3.0
    handshake_s: float = 5.0
    strangers: int = 64


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
        self._home = CallHome(strangers=limits.strangers, handshake_s=limits.handshake_s)
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def calls(self) -> CallHomeCounts:
        """Counts of the connections to the listener."""
        return self._home.counts

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
        if instance.transport != "tcp" and (instance.transport != "nats_tcp" or not self._has_nats):
            nats = instance.transport == "nats_tcp"
            what = "NATS, and no server is set" if nats else "a transport that is not supported"
            known = f"needs {what} ({printable(instance.transport)!r})"
            _fail(instance, f"{known}; its events can be followed, but not recovered")
        subject, calling = self._home.expect()
        finished = False
        answer: AnswerDecoder | None = None
        try:
            put = self._put if instance.transport == "tcp" else self._put_over_nats
            home = await put(instance, body, subject, timeout)
            caller = await self._called(instance, calling, home, timeout)
            answer = AnswerDecoder(instance.codec, max_bytes, caller.frames)
            step = await self._step(instance, caller, answer, timeout, 0)
            if isinstance(step, Refused):
                finished = True
                _fail(instance, f"returned an error: {step.error}")
            if not isinstance(step, Begun):
                _fail(instance, "began its response without a prologue")
            items = 0
            while True:
                step = await self._step(instance, caller, answer, timeout, items)
                if isinstance(step, Completed):
                    break
                if not isinstance(step, RawItem):
                    _fail(instance, f"ended its response early, after {items} items")
                items += 1
                yield step
            await self._sentinel(caller, answer, timeout)
            finished = True
        finally:
            self._home.forget(subject)
            if calling.done() and not calling.cancelled():
                # A caller that needs one item stops before the end is read, though it has arrived.
                finished = finished or (answer is not None and _at_end(answer))
                self._hang_up(calling.result(), finished=finished)

    async def close(self) -> None:
        """Stop listening and end all running requests."""
        await self._home.close()
        if self._messenger is not None:
            await self._messenger.close()
            self._messenger = None
        for writer in list(self._open):
            writer.transport.abort()

    # -- the request

    async def _put(self, instance: Instance, body: Any, subject: str, timeout: float) -> str:
        """Send the request; returns the address sent to the worker once it has accepted."""
        try:
            address = parse_address(instance.address)
        except WireError as error:
            _fail(instance, f"cannot be requested: {error}")
        reader, writer = await self._connect(instance, address, timeout)
        try:
            home = await self._home_for(instance, writer.get_extra_info("sockname")[0])
            try:
                request = encode_request(
                    address.path,
                    str(uuid.uuid4()),
                    body,
                    call_home=home,
                    subject=subject,
                    codec=instance.codec,
                )
            except WireError as error:
                _fail(instance, f"cannot be requested: {error}")
            try:
                async with asyncio.timeout(timeout):
                    writer.write(request)
                    await writer.drain()
                    refusal = await _reply(reader)
            except TimeoutError:
                _fail(instance, f"did not accept the request within {timeout:g} s")
            except OSError as error:
                _fail(instance, f"lost the connection before it accepted the request: {error}")
            except WireError as error:
                _fail(instance, f"does not use Dynamo's request plane: {error}")
            if refusal is None:
                _fail(instance, "closed the connection before it accepted the request")
            if refusal:
                _fail(instance, f"refused the request: {printable(refusal)}")
            return home
        finally:
            writer.close()

    @property
    def _has_nats(self) -> bool:
        return self._messenger is not None or self._new_messenger is not None

    async def _put_over_nats(
        self, instance: Instance, body: Any, subject: str, timeout: float
    ) -> str:
        """As _put, to the instance's subject; an empty reply accepts the request."""
        if self._messenger is None:
            assert self._new_messenger is not None
            self._messenger = self._new_messenger()
        request_id = str(uuid.uuid4())
        try:
            home = await self._home_for(instance, await self._messenger.local_host())
            payload = encode_payload(
                request_id, body, call_home=home, subject=subject, codec=instance.codec
            )
            headers = {"request-id": request_id}
            reply = await self._messenger.request(instance.address, payload, headers, timeout)
        except WireError as error:
            _fail(instance, f"cannot be requested: {error}")
        except RequestPlaneError as error:
            _fail(instance, str(error))
        if reply:
            _fail(
                instance, f"refused the request: {printable(reply[:200].decode(errors='replace'))}"
            )
        return home

    async def _connect(
        self, instance: Instance, address: Address, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        wait = min(timeout, self._limits.connect_s)
        try:
            async with asyncio.timeout(wait):
                return await asyncio.open_connection(address.host, address.port)
        except TimeoutError:
            _fail(instance, f"did not accept the connection within {wait:g} s")
        except OSError as error:
            # asyncio's own text repeats the address instead of the problem.
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else str(error)
            _fail(instance, f"is not reachable: {reason}")

    async def _home_for(self, instance: Instance, local: str) -> str:
        """HOST:PORT for this worker's connection to us. ``local``: our address towards it."""
        advertised = self._advertised_host or self._listen_host
        if advertised is None or advertised in _ANY:
            advertised = local
        if self._listen_host is None and self._advertised_host is not None:
            # The advertised address is usually one of this host; behind NAT it is not.
            with suppress(OSError):
                return format_host_port(_unmapped(advertised), await self._home.port(advertised))
        listen = local if self._listen_host is None else self._listen_host
        try:
            return format_host_port(_unmapped(advertised), await self._home.port(listen))
        except OSError as error:
            _fail(
                instance,
                f"cannot connect back: listening at {listen or 'any address'} failed: {error}"
                f" ({RESPONSE_HOST_VARIABLE} sets the address)",
            )

    # -- the answer

    async def _called(
        self, instance: Instance, calling: asyncio.Future[Caller], home: str, timeout: float
    ) -> Caller:
        await asyncio.wait([calling], timeout=timeout)
        if calling.cancelled():
            _fail(instance, "did not respond before the request plane was closed")
        if not calling.done():
            _fail(
                instance,
                f"accepted the request and did not connect back to {home} within {timeout:g} s:"
                " it cannot read the request or cannot reach that address"
                f" ({RESPONSE_HOST_VARIABLE} sets it)",
                NotCalledBack,
            )
        caller = calling.result()
        self._open.add(caller.writer)
        return caller

    async def _step(
        self,
        instance: Instance,
        caller: Caller,
        answer: AnswerDecoder,
        timeout: float,
        items: int,
    ) -> Step:
        try:
            async with asyncio.timeout(timeout):
                step = await _next_step(caller, answer)
        except TimeoutError:
            _fail(instance, f"sent nothing for {timeout:g} s in its response, after {items} items")
        except OSError as error:
            _fail(instance, f"lost the connection in its response, after {items} items: {error}")
        except WireError as error:
            _fail(instance, f"sent an invalid response, after {items} items: {error}")
        if step is None:
            where = "inside a frame" if answer.midway else "early"
            _fail(instance, f"ended its response {where}, after {items} items")
        return step

    async def _sentinel(self, caller: Caller, answer: AnswerDecoder, timeout: float) -> None:
        """Let the worker close first: closing on its last frame is an error in its log."""
        with suppress(OSError, TimeoutError, WireError):
            async with asyncio.timeout(min(timeout, _SENTINEL_S)):
                while (step := await _next_step(caller, answer)) is not None:
                    if isinstance(step, Sentinel):
                        return

    def _hang_up(self, caller: Caller, *, finished: bool) -> None:
        """Close the connection of a response without awaiting; the worker drops the rest."""
        self._open.discard(caller.writer)
        if not finished and not caller.writer.is_closing():
            caller.writer.write(encode_control("kill"))
        caller.writer.close()


async def _reply(reader: asyncio.StreamReader) -> str | None:
    """The acknowledgement's text, None if the connection ended before it."""
    received = b""
    while (reply := decode_reply(received)) is None:
        data = await reader.read(READ_BYTES)
        if not data:
            return None
        received += data
    return reply


async def _next_step(caller: Caller, answer: AnswerDecoder) -> Step | None:
    """None at the end of the stream."""
    while (step := answer.next_step()) is None:
        data = await caller.reader.read(READ_BYTES)
        if not data:
            return None
        answer.feed(data)
    return step


def _at_end(answer: AnswerDecoder) -> bool:
    """Whether the received bytes end the stream."""
    with suppress(WireError):
        return isinstance(answer.next_step(), Completed)
    return False


def _unmapped(host: str) -> str:
    """An IPv4 address as IPv4 where the system writes it as IPv6 (``::ffff:10.0.0.1``)."""
    try:
        mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    except ValueError:
        return host
    return host if mapped is None else str(mapped)


def _fail(
    instance: Instance, problem: str, kind: type[RequestPlaneError] = RequestPlaneError
) -> NoReturn:
    location = printable(instance.address.partition("/")[0])
    who = f"{instance.endpoint} of worker {instance.instance_id:x} at {location}"
    raise kind(f"{who} {problem}") from None
