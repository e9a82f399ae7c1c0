"""`serve epp`: choices, bookings and refusals by ext_proc; grpcio is the gateway."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import msgspec
import pytest
from grpc import aio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    SettingsAcknowledged,
    StreamReset,
)
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, PingFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import given
from hypothesis import strategies as st

from dynctl.serving.epp import exchange, grpc_server, process
from dynctl.serving.http.start import StartError
from dynctl.serving.routing.config import Limits, PickerConfig
from dynctl.wire.directions import ENGINE_HEADERS
from dynctl.wire.envoy import ext_proc, health
from dynctl.wire.envoy.ext_proc import BodyMode
from dynctl.wire.envoy.health import Serving
from dynctl.wire.envoy.schema import message
from router_core import RouterConfig, ThresholdsSet
from tests.dynctl.serving.fleets import WORDS, chat_body, zone
from tests.dynctl.serving.gateways import (
    FULL,
    check,
    gateway,
    headers_message,
    refusal_of,
    removed_headers,
    set_headers,
)
from tests.waiting import patience, until

TWO = ({"name": "a"}, {"name": "b"})
CHAT = chat_body(WORDS * 20)
TOKENS = 472


def bodies(answers: list[Any], kind: str) -> bytes:
    return b"".join(
        getattr(one, kind).response.body_mutation.streamed_response.body for one in answers
    )


# -- a request from its first message to its end ---------------------------------------------


@pytest.mark.seed("dynamo-1.6: operation: gateway picks by EPP")
async def test_a_request_is_routed_booked_and_freed() -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        first = await stream.ask(CHAT, x_request_id="mine")
        headers = set_headers(first)
        engines = {
            engine.url.removeprefix("http://"): name for name, engine in site.engines.items()
        }
        name = engines[headers[ext_proc.DESTINATION]]
        worker = site.service.router.registry.by_name(name)
        assert first.WhichOneof("kind") == "request_headers"
        assert first.request_headers.response.clear_route_cache
        (outer,) = first.dynamic_metadata.fields
        (inner,) = outer.value.struct_value.fields
        assert (outer.key, inner.key) == ("envoy.lb", ext_proc.DESTINATION)
        assert inner.value.string_value == headers[ext_proc.DESTINATION]
        assert headers[ext_proc.WORKER_ID] == str(worker.worker_id)
        assert headers[ext_proc.ROUTING_MODE] == "aggregated"
        piece = (await stream.answer()).request_body.response.body_mutation.streamed_response
        assert msgspec.json.decode(piece.body) == CHAT
        assert piece.end_of_stream
        assert site.load()[name][:2] == (1, TOKENS)
        await stream.response()
        decision = set_headers(await stream.answer())["x-dynctl-decision"]
        assert site.load()[name][:2] == (1, TOKENS)
        await stream.body(b"data: {}\n\n", kind="response_body")
        answered = await stream.answer()
        assert bodies([answered], "response_body") == b"data: {}\n\n"
        # The first output: the prompt is computed.
        assert site.load()[name][:2] == (1, 0)
        usage = b'data: {"usage":{"prompt_tokens":472,"completion_tokens":5}}\n\n'
        await stream.body(usage, kind="response_body", end=True)
        await stream.answer()
        assert site.load()[name] == (0, 0, 0)
        assert not site.frontend.core.inference.in_flight
        await stream.call.done_writing()
        assert await stream.answer() is None
        assert await stream.call.code() == grpc.StatusCode.OK
        _, why = await site.get(f"/v1/decisions/{decision}")
        assert why["decode"]["winner"]["worker"] == name
        _, metrics = await site.get("/metrics")
        assert b'dynamo_frontend_requests_total{endpoint="chat_completions",' in metrics


async def test_a_body_in_many_pieces_comes_back_in_pieces_of_at_most_62000_bytes() -> None:
    body = msgspec.json.encode(chat_body("x " * 200_000))
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.send(headers_message())
        for begin in range(0, len(body), 30_000):
            await stream.body(body[begin : begin + 30_000])
        await stream.body(b"", end=True)
        found = [await stream.answer()]
        status = found[0].WhichOneof("kind")
        if status == "immediate_response":  # longer than the engines' context
            assert refusal_of(found[0])[1]["code"] == "context_length_exceeded"
    short = msgspec.json.encode(chat_body("y", metadata={"pad": "z" * 300_000}))
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.send(headers_message())
        await stream.body(short)
        await stream.trailers("request_trailers")
        await stream.choice()
        found = [await stream.answer() for _ in range(-(-len(short) // ext_proc.MOST_BODY))]
        assert bodies(found, "request_body") == short
        pieces = [one.request_body.response.body_mutation.streamed_response for one in found]
        assert not any(piece.end_of_stream for piece in pieces)
        assert (await stream.answer()).WhichOneof("kind") == "request_trailers"


async def test_equal_beginnings_go_to_the_same_worker() -> None:
    async with gateway(TWO) as site:
        await site.connected()
        status, _, _ = await site.engine_chat("a", WORDS * 20)
        assert status == 200
        router = site.service.router
        slot = router.registry.slots(router.registry.by_name("a").worker_id)[0]
        await until(lambda: router.cached_blocks(slot) > 0)
        for _ in range(6):
            stream = site.request()
            headers = set_headers(await stream.ask(CHAT))
            assert headers[ext_proc.DESTINATION] == site.engines["a"].url.removeprefix("http://")
            stream.call.cancel()


async def test_prefill_and_decode_are_named_and_freed_apart() -> None:
    engines = [
        {"name": "p", "role": "prefill", **zone("zone-a")},
        {"name": "d", "role": "decode", **zone("zone-a")},
    ]
    async with gateway(engines) as site:
        stream = site.request()
        headers = set_headers(await stream.ask(CHAT))
        address = {name: one.url.removeprefix("http://") for name, one in site.engines.items()}
        registry = site.service.router.registry
        assert headers[ext_proc.DESTINATION] == address["d"]
        assert headers[ext_proc.PREFILLER] == address["p"]
        assert headers[ext_proc.ROUTING_MODE] == "disaggregated"
        assert headers[ext_proc.PREFILL_WORKER_ID] == str(registry.by_name("p").worker_id)
        assert headers[ext_proc.WORKER_ID] == str(registry.by_name("d").worker_id)
        assert headers[ext_proc.PREFILL_DP_RANK] == headers[ext_proc.DP_RANK] == "0"
        assert site.load()["p"][0] == site.load()["d"][0] == 1
        await stream.answer()
        await stream.response()
        await stream.answer()
        await stream.body(b"x", kind="response_body")
        await stream.answer()
        assert site.load()["p"] == (0, 0, 0)
        assert site.load()["d"][0] == 1
        stream.call.cancel()
        await site.idle()


# -- the modes of a gateway ------------------------------------------------------------------


async def test_a_buffered_body_is_answered_with_the_choice() -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        own: dict[str, Any] = {"x_worker_instance_id": "1", "x_prefiller_host_port": "evil:1"}
        modes = (BodyMode.BUFFERED, BodyMode.BUFFERED)
        await stream.send(headers_message(modes=modes, **own))
        passed = await stream.answer()
        assert passed.WhichOneof("kind") == "request_headers"
        assert removed_headers(passed) == ["x-prefiller-host-port", "x-worker-instance-id"]
        await stream.body(msgspec.json.encode(CHAT), end=True)
        answer = await stream.answer()
        assert answer.WhichOneof("kind") == "request_body"
        assert ext_proc.DESTINATION in set_headers(answer)
        await stream.response()
        await stream.answer()
        await stream.body(b'{"usage":{"prompt_tokens":3}}', kind="response_body", end=True)
        assert (await stream.answer()).response_body.HasField("response")
        await site.idle()


async def test_a_streamed_body_that_comes_before_the_answer() -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        modes = (BodyMode.STREAMED, BodyMode.STREAMED)
        await stream.send(headers_message(modes=modes, eager=True))
        body = msgspec.json.encode(CHAT)
        await stream.body(body[:10])
        await stream.body(body[10:], end=True)
        kinds = [(await stream.answer()).WhichOneof("kind") for _ in range(3)]
        assert kinds == ["request_headers", "request_body", "request_body"]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
async def test_without_a_body_the_load_decides(mode: BodyMode) -> None:
    async with gateway(TWO) as site:
        streams = []
        seen = set()
        for _ in range(2):
            stream = site.request()
            streams.append(stream)
            await stream.send(headers_message(modes=(mode, BodyMode.NONE), content_length="4000"))
            seen.add((await stream.choice())[ext_proc.DESTINATION])
        assert len(seen) == 2
        assert {row[:2] for row in site.load().values()} == {(1, 1000)}
        _, found = await site.get("/v1/decisions")
        _, why = await site.get(f"/v1/decisions/{found['decisions'][0]['id']}")
        assert "cache overlap not modelled" in str(why["decode"]["notes"])
        for stream in streams:
            await stream.response()
            await stream.answer()
            # Without the response's body the prompt is computed when its headers come.
            await stream.call.done_writing()
        await site.idle()


async def test_a_request_without_a_body_gets_a_worker_and_is_no_load() -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.send(headers_message("/v1/models", method="GET", end=True))
        assert ext_proc.DESTINATION in await stream.choice()
        assert set(site.load().values()) == {(0, 0, 0)}


async def test_another_path_is_routed_by_load_and_by_its_model() -> None:
    async with gateway([*TWO, {"name": "c", "model": "other"}]) as site:
        stream = site.request()
        answer = await stream.ask({"model": "other", "input": "x"}, path="/v1/audio/speech")
        at = site.engines["c"].url.removeprefix("http://")
        assert set_headers(answer)[ext_proc.DESTINATION] == at
        assert site.load()["c"][0] == 1
        assert (await site.request().refused({"a": 1}, path="/v1/other"))[0] == 400
        assert (await site.request().refused({"model": "no"}, path="/v1/other"))[0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "demo", "prompt_embeds": "AAAA"}),
        ("/v1/completions", {"model": "demo", "prompt": None, "prompt_embeds": ["AAAA"]}),
        (
            "/v1/chat/completions",
            {"model": "demo", "messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
        ),
    ],
)
async def test_what_cannot_be_counted_is_routed_by_load(path: str, body: dict[str, Any]) -> None:
    async with gateway(TWO) as site:
        answer = await site.request().ask(body, path=path)
        assert ext_proc.DESTINATION in set_headers(answer)


@pytest.mark.parametrize("name", ["grpc mode", "observability", "body first", "twice", "nothing"])
async def test_what_cannot_be_processed_ends_the_stream_with_a_reason(name: str) -> None:
    request = message("ProcessingRequest")
    body = request()
    body.request_body.body = b"x"
    silent = headers_message()
    silent.observability_mode = True
    cases: Mapping[str, tuple[list[Any], grpc.StatusCode, str]] = {
        "grpc mode": ([headers_message(modes=(5, 5))], grpc.StatusCode.UNIMPLEMENTED, "GRPC"),
        "observability": ([silent], grpc.StatusCode.INVALID_ARGUMENT, "observability_mode"),
        "body first": ([body], grpc.StatusCode.INVALID_ARGUMENT, "unexpected request_body"),
        "twice": (
            [headers_message(), headers_message()],
            grpc.StatusCode.INVALID_ARGUMENT,
            "unexpected request_headers",
        ),
        "nothing": ([request()], grpc.StatusCode.INVALID_ARGUMENT, "without headers"),
    }
    sent, code, text = cases[name]
    async with gateway(TWO) as site:
        stream = site.request()
        for one in sent:
            await stream.send(one)
        assert await stream.call.code() == code
        assert text in await stream.call.details()
        await until(lambda: not site.frontend.core.inference.in_flight)
        assert not len(site.part.picker)


# -- headers of clients ----------------------------------------------------------------------


async def test_clients_cannot_choose_a_worker_by_the_pickers_headers() -> None:
    async with gateway(TWO) as site:
        await site.connected()
        assert (await site.engine_chat("a", WORDS * 20))[0] == 200
        router = site.service.router
        slot = router.registry.slots(router.registry.by_name("a").worker_id)[0]
        await until(lambda: router.cached_blocks(slot) > 0)
        other = str(router.registry.by_name("b").worker_id)
        stream = site.request()
        own = {name.replace("-", "_"): other for name in ext_proc.OWN_HEADERS}
        answer = await stream.ask(CHAT, **own)
        headers = set_headers(answer)
        assert headers[ext_proc.DESTINATION] == site.engines["a"].url.removeprefix("http://")
        # Each is replaced or removed.
        assert set(headers) | set(removed_headers(answer)) == set(ext_proc.OWN_HEADERS)
        assert not set(headers) & set(removed_headers(answer))


async def test_no_engine_behind_a_gateway_is_directed_by_a_client() -> None:
    own = {name.replace("-", "_"): "7" for name in ENGINE_HEADERS}
    async with gateway(TWO) as site:
        answer = await site.request().ask(CHAT, **own)
        assert set(ENGINE_HEADERS) <= set(removed_headers(answer))
        directed: list[dict[str, Any]] = [
            {"bootstrap_host": "10.9.9.9"},
            {"priority": 0},
            {"vllm_xargs": {"kv_transfer_params": "x"}},
            {"sampling_params": {"extra_args": {"kv_transfer_params": {}}}},
            {"nvext": {"metadata_upload": {"url": "s3://b"}}},
        ]
        for path in ("/v1/chat/completions", "/generate", "/v1/chat/completions/"):
            for more in directed:
                status, error = await site.request().refused({**CHAT, **more}, path=path)
                assert (status, error["code"]) == (400, "field_not_allowed"), (path, more)
        assert sum(requests for requests, _, _ in site.load().values()) == 1


@pytest.mark.parametrize(
    "body",
    [
        msgspec.json.encode({"model": "demo", "bootstrap_host": "h"}).decode().encode("utf-16"),
        b'{"model":"demo","x":NaN,"bootstrap_host":"h"}',
        b'\xef\xbb\xbf{"model":"demo","bootstrap_host":"h"}',
        b'[{"bootstrap_host":"h"}]',
    ],
    ids=["utf-16", "NaN", "byte order mark", "array"],
)
async def test_a_body_that_engines_may_read_in_another_way_is_refused(body: bytes) -> None:
    """Python's json reads all of these."""
    async with gateway(TWO) as site:
        for path in ("/generate", "/v1/completions"):
            stream = site.request()
            await stream.send(headers_message(path, content_type="application/json"))
            await stream.body(body, end=True)
            assert refusal_of(await stream.answer())[0] == 400
        stream = site.request()
        kind = "multipart/form-data; boundary=b"
        await stream.send(headers_message("/v1/audio/transcriptions", content_type=kind))
        await stream.body(b"--b\r\n", end=True)
        assert ext_proc.DESTINATION in set_headers(await stream.answer())


async def test_a_gateways_clients_may_be_allowed_to_direct() -> None:
    async with gateway(TWO, client_fields=frozenset({"priority"})) as site:
        answer = await site.request().ask({**CHAT, "priority": 1}, x_vllm_priority="1")
        assert ext_proc.DESTINATION in set_headers(answer)
        assert "x-vllm-priority" not in removed_headers(answer)


# -- subsets and refusals --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["list", "text", "host"])
async def test_only_endpoints_of_the_subset_are_picked(form: str) -> None:
    async with gateway(TWO) as site:
        at = site.engines["b"].url.removeprefix("http://")
        subset: Any = {"list": ["10.9.9.9:1", at], "text": f"10.9.9.9:1, {at}", "host": "127.0.0.1"}
        found = set()
        for _ in range(4):
            stream = site.request()
            headers = set_headers(await stream.ask(CHAT, subset=subset[form]))
            found.add(headers[ext_proc.DESTINATION])
        assert found == ({at} if form != "host" else {e.url[7:] for e in site.engines.values()})


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], ""])
async def test_a_subset_without_a_worker_is_503(subset: Any) -> None:
    async with gateway(TWO) as site:
        status, error = await site.request().refused(CHAT, subset=subset)
        assert (status, error["code"]) == (503, "no_endpoint_in_subset")
        assert set(site.load().values()) == {(0, 0, 0)}


async def test_without_workers_503() -> None:
    async with gateway([]) as site:
        status, error = await site.request().refused(CHAT)
        assert (status, error["type"]) == (503, "service_unavailable")
        assert await site.health("readiness") == Serving.NOT_SERVING


async def test_unknown_models_and_broken_bodies_are_the_clients_errors() -> None:
    async with gateway(TWO) as site:
        status, error = await site.request().refused({**CHAT, "model": "no"})
        assert (status, error["code"]) == (404, "model_not_found")
        status, error = await site.request().refused({"model": "demo", "messages": 1})
        assert status == 400
        assert "messages" in error["message"]


async def test_busy_workers_are_429_with_the_time_to_retry() -> None:
    config = RouterConfig().with_values({"overload_status_code": 429})
    async with gateway(TWO, router=config) as site:
        site.service.apply(ThresholdsSet("demo", {"active_prefill_tokens_threshold": 100}))
        streams = [site.request() for _ in range(2)]
        for stream in streams:
            await stream.ask(CHAT)
        answer = await (late := site.request()).ask(CHAT)
        status, error = refusal_of(answer)
        assert (status, error["type"]) == (429, "overloaded")
        given = {
            one.header.key: one.header.raw_value
            for one in answer.immediate_response.headers.set_headers
        }
        assert given["retry-after"] == b"1"
        assert given["content-type"] == b"application/json"
        assert "a" not in error["message"].split()
        late.call.cancel()
        for stream in streams:
            stream.call.cancel()
        await site.idle()


async def test_a_request_waits_in_the_queue_until_there_is_room() -> None:
    config = RouterConfig().with_values({"router_queue_threshold": 0.01})
    async with gateway([{"name": "a", "max_num_batched_tokens": 8192}], router=config) as site:
        first, second = site.request(), site.request()
        await first.ask(CHAT)
        waiting = asyncio.create_task(second.ask(CHAT))
        await until(lambda: len(site.service.router.queue) == 1)
        first.call.cancel()
        assert ext_proc.DESTINATION in set_headers(await waiting)
        third = site.request()
        gone = asyncio.create_task(third.ask(CHAT))
        await until(lambda: len(site.service.router.queue) == 1)
        third.call.cancel()
        with suppress(asyncio.CancelledError, aio.AioRpcError):
            await gone
        await until(lambda: not len(site.service.router.queue))
        second.call.cancel()
        await site.idle()


async def test_a_dry_run_is_answered_at_once() -> None:
    async with gateway(TWO) as site:
        body = {**CHAT, "nvext": {"annotations": ["query_instance_id:"]}}
        answer = await site.request().ask(body)
        assert answer.immediate_response.status.code == 200
        assert b"worker_id" in answer.immediate_response.body
        assert set(site.load().values()) == {(0, 0, 0)}


# -- bounds ----------------------------------------------------------------------------------


async def test_a_body_over_the_limit_is_413() -> None:
    async with gateway(TWO, limits=Limits(body_bytes=2000)) as site:
        stream = site.request()
        await stream.send(headers_message())
        await stream.body(b"x" * 1500)
        await stream.body(b"x" * 1500)
        status, error = refusal_of(await stream.answer())
        assert (status, error["code"]) == (413, "body_too_large")
        assert site.part.picker.held == 0


async def test_all_bodies_together_have_a_bound() -> None:
    limits = Limits(body_bytes=2000, all_bodies_bytes=3000)
    async with gateway(TWO, limits=limits) as site:
        first, second = site.request(), site.request()
        await first.send(headers_message())
        await first.body(b"x" * 1900)
        await until(lambda: site.part.picker.held == 1900)
        await second.send(headers_message())
        await second.body(b"x" * 1900)
        status, error = refusal_of(await second.answer())
        assert (status, error["code"]) == (529, "too_many_requests_in_flight")
        first.call.cancel()
        await until(lambda: site.part.picker.held == 0)


async def test_a_body_that_does_not_arrive_is_408() -> None:
    async with gateway(TWO, limits=Limits(body_s=0.2)) as site:
        stream = site.request()
        await stream.send(headers_message())
        status, error = refusal_of(await stream.answer())
        assert (status, error["code"]) == (408, "request_timeout")


async def test_a_stream_without_a_request_ends() -> None:
    async with gateway(TWO, limits=Limits(body_s=0.2)) as site:
        stream = site.request()
        await stream.call.wait_for_connection()
        with pytest.raises(aio.AioRpcError, match="no request within"):
            await stream.answer()
        assert not len(site.part.picker)


async def test_a_stream_that_stays_open_after_its_answer_is_closed() -> None:
    async with gateway(TWO, limits=Limits(body_s=2.0)) as site:
        stream = site.request()
        await stream.refused({**CHAT, "model": "no"})
        assert await stream.answer() is None
        assert not len(site.part.picker)


async def test_a_gateway_that_is_silent_about_a_request_loses_its_stream() -> None:
    async with gateway(TWO, limits=Limits(stream_silence_s=0.3)) as site:
        stream = site.request()
        await stream.ask(CHAT)
        await stream.answer()
        with pytest.raises(aio.AioRpcError, match="no message within"):
            await stream.answer()
        await site.idle()


async def test_more_requests_than_the_limit_are_shed() -> None:
    async with gateway(TWO, limits=Limits(in_flight=1)) as site:
        first = site.request()
        await first.ask(CHAT)
        await (second := site.request()).send(headers_message())
        assert refusal_of(await second.answer())[1]["code"] == "too_many_requests_in_flight"


async def test_a_message_over_the_limit_ends_the_stream() -> None:
    async with gateway(TWO, limits=Limits(body_bytes=1000)) as site:
        stream = site.request()
        await stream.send(headers_message())
        await stream.body(b"x" * (3 << 20))
        assert await stream.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_bytes_that_are_not_http2_end_the_connection() -> None:
    async with gateway(TWO, limits=Limits(header_s=0.3)) as site:
        port = site.part.picker_port
        for sent in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x00" * 100, b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(patience(10)):
                while await reader.read(4096):
                    pass
            writer.close()
        assert ext_proc.DESTINATION in set_headers(await site.request().ask(CHAT))


class Raw:
    """A client of HTTP/2 that does as the test needs."""

    def __init__(self, port: int) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self._port = port

    async def __aenter__(self) -> Raw:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.h2.initiate_connection()
        await self.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def receive(self) -> list[Event] | None:
        """The next events; None at the end of the connection."""
        async with asyncio.timeout(patience(20)):
            try:
                data = await self.reader.read(1 << 16)
            except ConnectionError:
                return None
        if not data:
            return None
        events = self.h2.receive_data(data)
        await self.flush()
        return events

    async def wait(self, kind: type[Event]) -> None:
        while not any(isinstance(event, kind) for event in await self.receive() or ()):
            pass

    def begin(self, *headers: tuple[str, str]) -> int:
        """A new call of ext_proc."""
        stream = self.h2.get_next_available_stream_id()
        first = [(":method", "POST"), (":path", ext_proc.PROCESS), (":scheme", "http")]
        more = [(":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers")]
        self.h2.send_headers(stream, [*first, *more, *headers])
        return stream


async def test_messages_that_are_not_complete_count_as_bodies() -> None:
    limits = Limits(body_bytes=2 << 20, all_bodies_bytes=1 << 20)
    async with gateway(TWO, limits=limits) as site, Raw(site.part.picker_port) as client:
        await client.wait(RemoteSettingsChanged)
        ended: list[Event] = []
        for _ in range(2):
            stream, left = client.begin(), 3 << 19
            client.h2.send_data(stream, b"\0" + (left + 1).to_bytes(4))
            while left and not ended:
                size = min(left, 16384, client.h2.local_flow_control_window(stream))
                if size:
                    client.h2.send_data(stream, bytes(size))
                    left -= size
                    await client.flush()
                else:
                    events = await client.receive() or []
                    ended = [one for one in events if isinstance(one, ResponseReceived)]
        while not ended:
            ended = [e for e in await client.receive() or () if isinstance(e, ResponseReceived)]
        (event,) = ended
        assert isinstance(event, ResponseReceived)
        assert (b"grpc-status", b"8") in event.headers
        # The first one goes on: what it has is within the bound.
        assert site.part.gateways.buffered == (3 << 19) + 5
        client.writer.close()
        await until(lambda: site.part.gateways.buffered == 0)


async def test_a_header_message_costs_what_a_gateway_needs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before, 24 messages of 15 MiB held 1.5 GiB, and 1,500,000 headers kept the loop for 5 s."""
    large = headers_message(x_large="\U0001f600" * 50_000, x_request_id="\U0001f600" * 5000)
    many = headers_message()
    for _ in range(ext_proc.MOST_HEADERS):
        many.request_headers.headers.headers.add(key="a")
    above = headers_message(x_large="y" * ext_proc.MOST_BESIDE_BODY)
    async with gateway(TWO) as site:
        kept = site.request()
        await kept.send(large)
        await until(lambda: len(site.part.picker) == 1 and site.part.picker.held > 0)
        assert site.part.picker.held < 10_000
        for refused, text in ((many, "headers; at most 1,000"), (above, "beside its body")):
            stream = site.request()
            await stream.send(refused)
            assert await stream.call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert text in await stream.call.details()
        kept.call.cancel()
        await until(lambda: not len(site.part.picker))
        assert site.part.picker.held == 0
    assert not caplog.records


async def test_a_subset_counts_as_a_body_until_the_choice() -> None:
    limits = Limits(all_bodies_bytes=150_000)
    async with gateway(TWO, limits=limits) as site:
        at = [engine.url.removeprefix("http://") for engine in site.engines.values()]
        subset = [*at, *(f"10.0.{number // 250}.{number % 250}:80" for number in range(1000))]
        first = site.request()
        await first.send(headers_message(subset=subset))
        await until(lambda: site.part.picker.held > 100_000)
        status, error = await site.request().refused(CHAT, subset=subset)
        assert (status, error["code"]) == (529, "too_many_requests_in_flight")
        await first.body(msgspec.json.encode(CHAT), end=True)
        assert ext_proc.DESTINATION in await first.choice()
        await until(lambda: site.part.picker.held == 0)


@pytest.mark.parametrize("rest", [b"", msgspec.json.encode(CHAT)])
async def test_a_response_before_the_whole_request_ends_it(rest: bytes) -> None:
    """The gateway answers by itself; what still comes of the request books and holds nothing."""
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.send(headers_message(modes=(FULL, FULL)))
        await stream.body(b" ")
        await until(lambda: site.part.picker.held > 0)
        await stream.response(413, end=True)
        assert (await stream.answer()).WhichOneof("kind") == "response_headers"
        assert (site.part.picker.held, site.frontend.core.inference.in_flight) == (0, 0)
        await stream.body(rest, end=True)
        await stream.trailers("request_trailers")
        assert (await stream.answer()).WhichOneof("kind") == "request_trailers"
        assert site.part.picker.held == 0
        assert set(site.load().values()) == {(0, 0, 0)}


async def test_a_response_ends_a_request_that_waits_in_the_queue() -> None:
    config = RouterConfig().with_values({"router_queue_threshold": 0.01})
    async with gateway([{"name": "a", "max_num_batched_tokens": 8192}], router=config) as site:
        first, second = site.request(), site.request()
        await first.ask(CHAT)
        await second.send(headers_message())
        await second.body(msgspec.json.encode(CHAT), end=True)
        await until(lambda: len(site.service.router.queue) == 1)
        await second.response(503, end=True)
        assert (await second.answer()).WhichOneof("kind") == "response_headers"
        await until(lambda: not len(site.service.router.queue))
        first.call.cancel()
        await site.idle()


async def test_a_second_response_is_refused() -> None:
    """Each would count as a failure of the worker, and be kept."""
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.ask(CHAT)
        await stream.answer()
        await stream.response(503)
        await stream.answer()
        await stream.response(503)
        async with asyncio.timeout(patience(10)):
            assert await stream.call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert sum(site.service.engine_failures.values()) == 1


async def test_a_large_question_about_health_is_refused() -> None:
    request = message("HealthCheckRequest")(service="x" * 5000).SerializeToString()
    async with gateway(TWO) as site:
        watch = site.channel.unary_stream(
            health.WATCH, request_serializer=None, response_deserializer=None
        )(request)
        async with asyncio.timeout(patience(10)):
            assert await watch.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_status_of_thousands_of_digits_is_no_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.ask(CHAT)
        await stream.answer()
        answered = message("ProcessingRequest")()
        answered.response_headers.headers.headers.add(key=":status", raw_value=b"9" * 5000)
        await stream.send(answered)
        assert (await stream.answer()).WhichOneof("kind") == "response_headers"
        stream.call.cancel()
        await site.idle()
    assert not [record for record in caplog.records if record.exc_info]


async def test_failures_of_calls_leave_one_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: bytes) -> None:
        raise KeyError("x")

    monkeypatch.setattr(ext_proc, "decode", fail)
    async with gateway(TWO) as site:
        for _ in range(3):
            stream = site.request()
            await stream.send(headers_message())
            assert await stream.call.code() == grpc.StatusCode.INTERNAL
    failures = [record for record in caplog.records if record.message == "a gRPC call failed"]
    assert [bool(record.exc_info) for record in failures] == [True, False, False]


async def begin_unread(client: Raw, count: int, body: Mapping[str, Any]) -> list[int]:
    """Send requests whose answers the client does not let through."""
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    await client.flush()
    await client.wait(SettingsAcknowledged)
    piece = message("ProcessingRequest")()
    piece.request_body.body, piece.request_body.end_of_stream = msgspec.json.encode(body), True
    streams = []
    for _ in range(count):
        streams.append(client.begin())
        for one in (headers_message(), piece):
            data = one.SerializeToString()
            framed = b"\0" + len(data).to_bytes(4) + data
            for begin in range(0, len(framed), 16384):
                client.h2.send_data(streams[-1], framed[begin : begin + 16384])
    await client.flush()
    return streams


async def test_the_end_of_a_stream_frees_its_booking_whatever_its_peer_reads() -> None:
    limits = Limits(stream_silence_s=0.5, unread_s=1.0)
    async with gateway(TWO, limits=limits) as site, Raw(site.part.picker_port) as client:
        streams = await begin_unread(client, 20, CHAT)
        await until(lambda: sum(row[0] for row in site.load().values()) == 20)
        await site.idle()
        assert not len(site.part.picker)
        (connection,) = (
            one for one in site.part.gateways._connections if one._calls.keys() & {*streams}
        )
        # What waits for the peer ends as well: each stream is reset.
        reset: set[int | None] = set()
        while len(reset) < 20:
            for event in await client.receive() or ():
                assert not isinstance(event, DataReceived)
                if isinstance(event, StreamReset):
                    reset.add(event.stream_id)
        assert reset == {*streams}
        assert not connection._calls
        assert site.part.gateways.unread == 0


async def test_what_peers_do_not_read_counts_as_bodies() -> None:
    """A body that is passed on is held until the gateway takes it."""
    limits = Limits(all_bodies_bytes=100_000)
    async with gateway(TWO, limits=limits) as site, Raw(site.part.picker_port) as client:
        body = chat_body(WORDS, metadata={"pad": "z" * 60_000})
        await begin_unread(client, 1, body)
        await until(lambda: site.part.gateways.unread > 60_000)
        bound = site.part.gateways.limits.held_bytes
        await begin_unread(client, 8, body)
        await until(lambda: not site.part.picker.held and not site.part.picker._arriving)
        await until(lambda: sum(row[0] for row in site.load().values()) in range(1, 7))
        assert site.part.gateways.unread <= bound
        client.writer.close()
        await site.idle()
        assert site.part.gateways.unread == 0


async def test_a_client_that_reads_nothing_is_read_no_more_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_server, "_UNREAD_BYTES", 1 << 16)
    monkeypatch.setattr(grpc_server, "_ALLOWED_PER_S", 1e9)
    async with gateway(TWO, limits=Limits(header_s=0.5)) as site:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", site.part.picker_port))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            hello = H2Connection(H2Configuration(client_side=True))
            hello.initiate_connection()
            await loop.sock_sendall(client, hello.data_to_send())
            pings = PingFrame(0, b"12345678").serialize() * 10_000

            async def ping() -> None:
                async with asyncio.timeout(patience(60)):
                    while True:
                        await loop.sock_sendall(client, pings)

            with pytest.raises(ConnectionError):
                await ping()
        assert ext_proc.DESTINATION in set_headers(await site.request().ask(CHAT))


def few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more frames without messages than are allowed at first."""
    monkeypatch.setattr(grpc_server, "_ALLOWED", 100.0)
    monkeypatch.setattr(grpc_server, "_ALLOWED_PER_S", 0.0)
    monkeypatch.setattr(grpc_server, "_SHARED", 100.0)
    monkeypatch.setattr(grpc_server, "_SHARED_PER_S", 1e-6)
    monkeypatch.setattr(grpc_server, "_LONGEST_PAUSE_S", 3600.0)


@pytest.mark.parametrize("kind", ["ping", "settings", "reset", "empty data", "window"])
async def test_frames_without_messages_have_an_allowance(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A client that floods is read no more; another one is served meanwhile."""
    few_frames(monkeypatch)
    taken: list[Event] = []
    take = grpc_server._Connection._take

    def counted(self: Any, event: Event) -> None:
        taken.append(event)
        take(self, event)

    async with gateway(TWO) as site, Raw(site.part.picker_port) as client:
        await client.wait(RemoteSettingsChanged)
        monkeypatch.setattr(grpc_server._Connection, "_take", counted)
        (connection,) = site.part.gateways._connections
        if kind == "reset":
            for _ in range(1000):
                stream = client.begin()
                client.h2.reset_stream(stream)
        else:
            stream = client.begin()
            await client.flush()
            frames = {
                "ping": PingFrame(0, b"12345678"),
                "settings": SettingsFrame(0),
                "empty data": DataFrame(stream),
                "window": WindowUpdateFrame(0, window_increment=1),
            }
            client.writer.write(frames[kind].serialize() * 2000)
        client.writer.write(client.h2.data_to_send())
        # Until both allowances are used up, it is read on in the next turn.
        await until(lambda: connection._stopped and site.part.gateways._shared < 0)
        assert len(taken) <= 100 + 100 + 2 * grpc_server._TURN_FRAMES
        before = len(taken)
        assert ext_proc.DESTINATION in set_headers(await site.request().ask(CHAT))
        assert connection._stopped
        assert len(taken) < before + 100


async def test_messages_bring_an_allowance_for_more_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_frames(monkeypatch)
    async with gateway(TWO) as site:
        for _ in range(60):  # over one connection, each with a dozen frames
            stream = site.request()
            assert ext_proc.DESTINATION in set_headers(await stream.ask(CHAT))
            stream.call.cancel()


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 4, 6, 8, 9]), st.integers(0, 700), st.integers(0, 3)),
        max_size=100,
    ),
    st.lists(st.integers(1, 4000), min_size=1, max_size=20),
)
def test_frames_are_cut_as_they_are_in_any_pieces(
    frames: list[tuple[int, int, int]], sizes: list[int]
) -> None:
    whole = grpc_server._PREFACE
    expected = 0
    for kind, length, stream in frames:
        whole += length.to_bytes(3) + bytes([kind, 0]) + stream.to_bytes(4) + bytes(length)
        every = kind == 4 or (kind == 8 and not stream)
        expected += 4 if kind == 1 else (1 + (3 if every else 0)) * (length < 512)
    cutter, taken, count, unread = grpc_server._Frames(), bytearray(), 0, b""
    begin, size = 0, cycle(sizes)
    while begin < len(whole):
        end = begin + next(size)
        unread, begin = unread + whole[begin:end], end
        while unread:
            cut, more = cutter.cut(unread, 48)
            taken += unread[:cut]
            unread, count = unread[cut:], count + more
    assert taken == whole
    assert count == expected


async def test_idle_connections_keep_no_gateway_out() -> None:
    async with gateway(TWO, limits=Limits(in_flight=32)) as site, AsyncExitStack() as idle:
        for _ in range(30):
            client = await idle.enter_async_context(Raw(site.part.picker_port))
            await client.wait(RemoteSettingsChanged)
            await idle.enter_async_context(Raw(site.part.health_port or 0))
        stream = site.request()
        assert ext_proc.DESTINATION in set_headers(await stream.ask(CHAT))
        assert await site.health(process.READINESS) == Serving.SERVING
        # A connection with a request is not closed for new ones.
        for _ in range(30):
            client = await idle.enter_async_context(Raw(site.part.picker_port))
            await client.wait(RemoteSettingsChanged)
        await stream.answer()
        await stream.response(end=True)
        assert (await stream.answer()).WhichOneof("kind") == "response_headers"


async def test_headers_over_the_limit_end_the_connection() -> None:
    async with gateway(TWO) as site, Raw(site.part.picker_port) as client:
        client.begin(*((f"x-{number}", "y" * 200) for number in range(90)))
        await client.flush()
        while await client.receive() is not None:
            pass


async def test_answers_refer_to_a_bounded_table_of_headers() -> None:
    """A client may offer 4 GiB for the names that answers refer back to."""
    async with gateway(TWO) as site, Raw(site.part.picker_port) as client:
        client.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 2**32 - 1})
        await client.flush()
        await client.wait(SettingsAcknowledged)
        (connection,) = site.part.gateways._connections
        assert connection._h2.encoder.header_table_size == 4096


async def test_a_body_that_trickles_is_408() -> None:
    async with gateway(TWO, limits=Limits(body_s=0.5)) as site:
        slow = site.request()
        await slow.send(headers_message())

        async def trickle() -> None:
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await slow.body(b" ")
                    await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        status, error = refusal_of(await slow.answer())
        assert (status, error["code"]) == (408, "request_timeout")
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
        assert site.part.picker.held == 0


async def test_a_body_that_arrives_takes_no_place_of_requests_that_run() -> None:
    async with gateway(TWO, limits=Limits(in_flight=2)) as site:
        slow, *others = (site.request() for _ in range(3))
        await slow.send(headers_message())
        await slow.body(b"{")
        await until(lambda: site.part.picker.held == 1)
        for other in others:
            assert ext_proc.DESTINATION in set_headers(await other.ask(CHAT))
        await slow.body(b"}", end=True)
        assert refusal_of(await slow.answer())[1]["code"] == "too_many_requests_in_flight"


async def test_the_oldest_body_that_arrives_makes_room() -> None:
    async with gateway(TWO, limits=Limits(in_flight=2)) as site:
        streams = [site.request() for _ in range(3)]
        for stream in streams:
            await stream.send(headers_message())
        answers = [asyncio.create_task(stream.answer()) for stream in streams]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [refusal_of(one.result())[0] for one in done] == [408]
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_a_body_in_too_many_pieces_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_MOST_PIECES", 3)
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.send(headers_message())
        for _ in range(4):
            await stream.body(b"")
        status, error = refusal_of(await stream.answer())
        assert (status, error["code"]) == (413, "body_too_large")


async def test_a_client_that_leaves_frees_its_booking() -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.ask(CHAT)
        assert sum(row[0] for row in site.load().values()) == 1
        stream.call.cancel()
        await site.idle()
        await until(lambda: not site.frontend.core.inference.in_flight)
        _, metrics = await site.get("/metrics")
        assert b"dynamo_frontend_disconnected_clients 1" in metrics


async def test_a_gateway_that_dies_frees_all_its_bookings() -> None:
    async with gateway(TWO) as site:
        for _ in range(8):
            await site.request().ask(CHAT)
        assert sum(row[0] for row in site.load().values()) == 8
        await site.channel.close()
        await site.idle()


async def test_a_failed_response_counts_against_its_worker() -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.ask(CHAT)
        await stream.answer()
        await stream.response(500, end=True)
        await stream.answer()
        assert sum(site.service.engine_failures.values()) == 1
        assert set(site.load().values()) == {(0, 0, 0)}


# -- health, TLS, the end ----------------------------------------------------------------------


async def test_health() -> None:
    async with gateway(TWO) as site:
        for service in ("", "liveness", "readiness", ext_proc.SERVICE):
            assert await site.health(service) == Serving.SERVING
        assert await check(site.channel, "readiness") == Serving.SERVING
        with pytest.raises(aio.AioRpcError) as caught:
            await site.health("other")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_watched_health_changes_when_the_workers_leave() -> None:
    async with gateway(TWO) as site:
        async with aio.insecure_channel(f"127.0.0.1:{site.part.health_port}") as channel:
            watch = channel.unary_stream(
                health.WATCH, request_serializer=None, response_deserializer=None
            )
            request = message("HealthCheckRequest")(service="readiness").SerializeToString()
            call = watch(request)
            assert await call.read() == health.status_message(Serving.SERVING)
            for engine in site.engines.values():
                await engine.close()
            async with asyncio.timeout(patience(20)):
                assert await call.read() == health.status_message(Serving.NOT_SERVING)
            call.cancel()
        assert await site.health("liveness") == Serving.SERVING


async def test_a_drained_picker_ends_what_runs_and_refuses_what_comes() -> None:
    async with gateway(TWO) as site:
        stream = site.request()
        await stream.ask(CHAT)
        await stream.answer()
        draining = asyncio.create_task(site.frontend.drain())
        await until(lambda: site.service.draining)
        assert await site.health("readiness") == Serving.NOT_SERVING
        assert await site.health("liveness") == Serving.SERVING
        await stream.response()
        await stream.answer()
        await stream.body(b"x", kind="response_body", end=True)
        assert bodies([await stream.answer()], "response_body") == b"x"
        async with asyncio.timeout(patience(10)):
            await draining
        assert not site.frontend.core.inference.in_flight


async def test_tls_with_a_certificate_of_its_own() -> None:
    async with gateway(TWO, picker=PickerConfig(port=0, health_port=0)) as site:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        port = site.part.picker_port
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        spoken = writer.get_extra_info("ssl_object")
        assert spoken.selected_alpn_protocol() == "h2"
        pem = ssl.DER_cert_to_PEM_cert(spoken.getpeercert(binary_form=True)).encode()
        writer.close()
        trusted = grpc.ssl_channel_credentials(pem)
        async with aio.secure_channel(f"localhost:{port}", trusted) as channel:
            assert await check(channel, ext_proc.SERVICE) == Serving.SERVING
        # Plain HTTP/2 gets no answer.
        with pytest.raises(aio.AioRpcError):
            await check(site.channel, "")


async def hold_open(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


def hello_of(context: ssl.SSLContext) -> bytes:
    """The first message of a handshake."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(received, sent).do_handshake()
    return sent.read()


@pytest.mark.parametrize("sent", ["nothing", "half a hello", "hello", "plain HTTP/2", "garbage"])
async def test_what_is_no_handshake_is_closed_and_keeps_no_gateway_out(sent: str) -> None:
    """30 such connections, of 8 that the picker may have: the longest without a call make room."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    hello = hello_of(context)
    plain = H2Connection(H2Configuration(client_side=True))
    plain.initiate_connection()
    first = {
        "nothing": b"",
        "half a hello": hello[: len(hello) // 2],
        "hello": hello,
        "plain HTTP/2": plain.data_to_send(),
        "garbage": bytes(range(256)) * 100,
    }[sent]
    limits = Limits(in_flight=32, header_s=2.0)
    picker = PickerConfig(port=0, health_port=0)
    async with gateway(TWO, picker=picker, limits=limits) as site:
        port = site.part.picker_port
        opened = [await hold_open(port, first) for _ in range(30)]
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        trusted = grpc.ssl_channel_credentials(pem.encode())
        async with aio.secure_channel(f"localhost:{port}", trusted) as channel:
            assert await check(channel, ext_proc.SERVICE) == Serving.SERVING
        for reader, writer in opened:
            with suppress(ConnectionError):
                async with asyncio.timeout(patience(20)):
                    while await reader.read(1 << 16):
                        pass
            writer.close()
        await until(lambda: not site.part.gateways._connections)


async def test_a_handshake_is_not_repeated_on_a_connection() -> None:
    """Renegotiation, which lets a client have the server compute without end, is refused."""
    async with gateway(TWO, picker=PickerConfig(port=0, health_port=0)) as site:
        certificate = site.part._certificate
        assert certificate is not None
        assert certificate.context.options & ssl.OP_NO_RENEGOTIATION


def test_without_openssl_the_certificate_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(StartError, match="openssl"):
        process._certificate_of(PickerConfig())


def test_a_certificate_that_is_not_one(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    file.write_text("no")
    with pytest.raises(StartError, match="--tls-cert, --tls-key"):
        process._certificate_of(PickerConfig(cert=file, key=file))


def test_modes_of_a_gateway_without_them() -> None:
    assert ext_proc.decode(headers_message(modes=None).SerializeToString()).modes is None
    assert ext_proc.Modes() == ext_proc.Modes(FULL, FULL)
