"""A collector of OpenTelemetry spans: it decodes what arrives over OTLP/HTTP."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_servers import served
from tests.waiting import until


@dataclass
class Collected:
    """One span. Times are nanoseconds since the epoch; ids hexadecimal, ``parent`` empty: none."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin: int
    end: int
    state: str
    failed: str | None
    attributes: dict[str, Any]
    events: dict[str, tuple[int, dict[str, Any]]]
    resource: dict[str, Any]


@dataclass
class Collector:
    """``status``: with which it answers; ``raw``: every byte that arrived. ``messages``: how many
    arrived; they get no answer while ``answering`` is not set."""

    url: str = ""
    status: int = 200
    messages: int = 0
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    spans: list[Collected] = field(default_factory=list)
    raw: bytes = b""

    async def have(self, count: int) -> list[Collected]:
        """Wait for that many spans."""
        await until(lambda: len(self.spans) >= count, 20)
        return self.spans

    def of(self, trace: str) -> list[Collected]:
        return [span for span in self.spans if span.trace == trace]


@asynccontextmanager
async def collector(status: int = 200) -> AsyncIterator[Collector]:
    found = Collector(status=status)
    found.answering.set()

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        found.messages += 1
        await found.answering.wait()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if found.status == 200:
            assert request.content_type == "application/x-protobuf"
            found.raw += body
            found.spans += _spans(ExportTraceServiceRequest.FromString(body))
        return web.Response(status=found.status)

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with served(app) as found.url:
        try:
            yield found
        finally:
            found.answering.set()


def _spans(message: ExportTraceServiceRequest) -> list[Collected]:
    return [
        Collected(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.trace_state,
            span.status.message if span.status.code == 2 else None,
            _attributes(span.attributes),
            {one.name: (one.time_unix_nano, _attributes(one.attributes)) for one in span.events},
            _attributes(resource.resource.attributes),
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
