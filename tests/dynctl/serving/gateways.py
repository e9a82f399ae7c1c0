"""A gateway's side of ext_proc by grpcio, a witness for our HTTP/2."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from grpc import aio  # type: ignore[import-untyped]

from dynctl.serving.epp.process import GatewayPart, build_picker
from dynctl.serving.routing.config import PickerConfig
from dynctl.wire.envoy import ext_proc, health
from dynctl.wire.envoy.ext_proc import BodyMode
from dynctl.wire.envoy.schema import message
from tests.dynctl.serving.fleets import Site, chat_body, site
from tests.waiting import patience

FULL = BodyMode.FULL_DUPLEX_STREAMED
_REQUEST = message("ProcessingRequest")
_RESPONSE = message("ProcessingResponse")
_LARGE = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


def headers_message(
    path: str = "/v1/chat/completions",
    *,
    modes: tuple[int, int] | None = (FULL, FULL),
    eager: bool = False,
    end: bool = False,
    subset: Any = None,
    method: str = "POST",
    **given: Any,
) -> Any:
    """The first message about a request; names of headers have ``_`` for ``-``."""
    found = _REQUEST()
    found.request_headers.SetInParent()
    values = {":path": path, ":method": method}
    values |= {name.replace("_", "-"): value for name, value in given.items()}
    for name, value in values.items():
        found.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    found.request_headers.end_of_stream = end
    if modes is not None:
        found.protocol_config.request_body_mode, found.protocol_config.response_body_mode = modes
        found.protocol_config.send_body_without_waiting_for_header_response = eager
    if subset is not None:
        entry = found.metadata_context.filter_metadata.add(key=ext_proc.SUBSET_METADATA)
        value = entry.value.fields.add(key=ext_proc.SUBSET_KEY).value
        if isinstance(subset, str):
            value.string_value = subset
        else:
            value.list_value.SetInParent()
            for one in subset:
                value.list_value.values.add(string_value=one)
    return found


class Stream:
    """One HTTP request of the gateway."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, one: Any) -> None:
        await self.call.write(one.SerializeToString())

    async def body(self, data: bytes, *, end: bool = False, kind: str = "request_body") -> None:
        one = _REQUEST()
        getattr(one, kind).body, getattr(one, kind).end_of_stream = data, end
        await self.send(one)

    async def response(self, status: int = 200, *, end: bool = False) -> None:
        one = _REQUEST()
        one.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
        one.response_headers.end_of_stream = end
        await self.send(one)

    async def trailers(self, kind: str) -> None:
        one = _REQUEST()
        getattr(one, kind).SetInParent()
        await self.send(one)

    async def answer(self) -> Any:
        """The next answer; None at the end of the stream."""
        async with asyncio.timeout(patience(10)):
            data = await self.call.read()
        return None if data is aio.EOF else _RESPONSE.FromString(data)

    async def choice(self) -> dict[str, str]:
        """The headers of the next answer, which is a choice."""
        return set_headers(await self.answer())

    async def ask(self, body: Mapping[str, Any], **given: Any) -> Any:
        """Send a whole request; the first answer."""
        await self.send(headers_message(**given))
        await self.body(msgspec.json.encode(body))
        await self.body(b"", end=True)
        return await self.answer()

    async def refused(self, body: Mapping[str, Any], **given: Any) -> tuple[int, Any]:
        """Status and error of a request that is refused."""
        return refusal_of(await self.ask(body, **given))


def set_headers(answer: Any) -> dict[str, str]:
    part = getattr(answer, answer.WhichOneof("kind"))
    mutation = part.response.header_mutation
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


def removed_headers(answer: Any) -> list[str]:
    part = getattr(answer, answer.WhichOneof("kind"))
    return list(part.response.header_mutation.remove_headers)


def refusal_of(answer: Any) -> tuple[int, Any]:
    assert answer.WhichOneof("kind") == "immediate_response", answer
    immediate = answer.immediate_response
    return immediate.status.code, msgspec.json.decode(immediate.body)["error"]


class Gateway(Site):
    """A picker with its engines, and a channel to it."""

    channel: Any

    @property
    def part(self) -> GatewayPart:
        return self.frontend.part(GatewayPart)

    def request(self) -> Stream:
        plain = {"request_serializer": None, "response_deserializer": None}
        return Stream(self.channel.stream_stream(ext_proc.PROCESS, **plain)())

    async def engine_chat(self, name: str, text: str) -> tuple[int, Any, Any]:
        """A request to one engine, past the picker: it caches the prompt."""
        url = f"{self.engines[name].url}/v1/chat/completions"
        async with self.client.post(url, json=chat_body(text, max_tokens=1)) as answer:
            return answer.status, await answer.read(), answer.headers

    async def health(self, service: str = "", port: int | None = None) -> int:
        """The state of a service of gRPC's health."""
        where = f"127.0.0.1:{port or self.part.health_port}"
        async with aio.insecure_channel(where) as channel:
            return await check(channel, service)


async def check(channel: Any, service: str) -> int:
    ask = channel.unary_unary(health.CHECK, request_serializer=None, response_deserializer=None)
    request = message("HealthCheckRequest")(service=service).SerializeToString()
    data = await ask(request, timeout=patience(10))
    return int(message("HealthCheckResponse").FromString(data).status)


@asynccontextmanager
async def gateway(
    engines: Any, *, picker: PickerConfig | None = None, **given: Any
) -> AsyncIterator[Gateway]:
    """Engines, a picker before them without TLS, and a gateway's channel to it."""
    options = picker or PickerConfig(port=0, health_port=0, tls=False)
    async with site(engines, kind=build_picker, picker=options, **given) as found:
        found.__class__ = Gateway
        assert isinstance(found, Gateway)
        where = f"127.0.0.1:{found.part.picker_port}"
        async with aio.insecure_channel(where, options=_LARGE) as channel:
            found.channel = channel
            yield found
