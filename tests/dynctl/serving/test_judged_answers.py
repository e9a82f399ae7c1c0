"""Wrong answers of engines are retried before the first byte and reported after it."""

from __future__ import annotations

import asyncio
import json
import logging
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.terminal import UNSAFE
from dynctl.serving.engines.apis import EventCut, event_name
from dynctl.serving.engines.failures import engine_reason
from dynctl.serving.routing.config import Limits
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.serving.fleets import SLOW_HEALTH, chat_body, site
from tests.dynctl.serving.hostile import (
    DONE,
    EVENT,
    GOOD,
    Behaviour,
    answers,
    dies,
    hostile,
    specs,
    streams,
)
from tests.dynctl.serving.sockets import chat_bytes, raw
from tests.waiting import patience

JSON = b'{"choices": []}'
HTML = b"<html><body>It works!</body></html>"


async def sent(fleet, *, stream: bool = True) -> tuple[int, bytes]:
    body = chat_body("hi", stream=stream)
    async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
        return answer.status, await answer.read()


def failures(fleet) -> dict[tuple[str, str], int]:
    return dict(fleet.service.engine_failures)


def compressed(content_type: str) -> Behaviour:
    """An answer that is compressed, although the request accepts none."""

    async def behave(_: web.Request) -> web.StreamResponse:
        headers = {"content-type": content_type, "content-encoding": "gzip"}
        return web.Response(body=b"\x1f\x8b", headers=headers)

    return behave


BAD_STREAMS = {
    "a compressed stream": compressed("text/event-stream"),
    "a web page": answers(HTML, "text/html"),
    "a web page that claims to be events": answers(HTML),
    "JSON instead of events": answers(JSON, "application/json"),
    "a redirect": answers(b"", "text/plain", 302),
    "no content": answers(b"", "text/plain", 204),
    "an end before any event": answers(DONE),
    "nothing": streams(),
    "an event that is not JSON": answers(b"data: {not json\n\n" + GOOD),
    "an event of half an object": streams(EVENT[:-4]),
    "a huge event that is not JSON": streams(b"data: " + b"x" * 200_000 + b"\n\n", GOOD),
    "comments without an event": streams(*[b": ping\n\n" * 100] * 100),
    "comments and an end": streams(b": ping\n\n"),
    # Each line was looked at from each line before it: 20,000 of them took 2 s.
    "empty lines and no event": answers(b"\n" * 60_000 + b"x"),
    "binary": streams(b"\x00\x01\x02\x03" * 8),
}
BAD_BODIES = {
    "a compressed body": compressed("application/json"),
    "a web page": answers(HTML, "text/html"),
    "a web page that claims to be JSON": answers(HTML, "application/json"),
    "half of an object": answers(JSON[:-1], "application/json"),
    "a list": answers(b"[1]", "application/json"),
    "a redirect": answers(JSON, "application/json", 302),
    "events": answers(GOOD),
}


@pytest.mark.parametrize("bad", BAD_STREAMS.values(), ids=BAD_STREAMS.keys())
async def test_a_wrong_stream_is_retried_elsewhere_and_counted(bad: Behaviour):
    async with (
        hostile(bad, answers(GOOD)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        while not engines[0].seen:
            assert await sent(fleet) == (200, GOOD)
        ((worker, kind),) = failures(fleet)
        assert worker == "e0"
        assert kind in ("protocol", "reset")
        _, metrics = await fleet.get("/metrics")
        assert f'dynctl_engine_failures_total{{worker="e0",kind="{kind}"}}' in metrics.decode()
        await fleet.idle()


@pytest.mark.parametrize(
    "first",
    [
        b": queued\n\n" * 3,
        b"id: 1\nevent: message\n",
        b"retry: 10\n\n",
        b'data: {"x": "' + b"y" * 200_000 + b'"}\n\n',
        b"data: {\r\ndata: }\r\n\r\n",
    ],
    ids=["comments", "other fields", "an event without data", "a huge event", "two lines"],
)
async def test_unusual_first_events_are_passed_on(first: bytes):
    whole = first + GOOD
    step = 7 if len(whole) < 1000 else 10_000
    pieces = [whole[i : i + step] for i in range(0, len(whole), step)]
    async with (
        hostile(streams(*pieces)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        assert await sent(fleet) == (200, whole)
        assert not failures(fleet)


async def test_comments_do_not_keep_a_request_waiting():
    async def only_comments(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b": ping\n\n")
            await asyncio.sleep(0.02)

    async with (
        hostile(only_comments, answers(GOOD)) as engines,
        site(
            [],
            workers=specs(engines),
            health=SLOW_HEALTH,
            limits=Limits(first_output_s=patience(0.2)),
        ) as fleet,
    ):
        while not engines[0].seen:
            assert await sent(fleet) == (200, GOOD)
        assert failures(fleet) == {("e0", "timeout"): 1}
        await fleet.idle()


@pytest.mark.parametrize("bad", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_a_wrong_body_is_retried_elsewhere_and_counted(bad: Behaviour):
    async with (
        hostile(bad, answers(JSON, "application/json")) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        while not engines[0].seen:
            assert await sent(fleet, stream=False) == (200, JSON)
        assert set(failures(fleet)) == {("e0", "protocol")}
        await fleet.idle()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (streams(EVENT, EVENT), "without [DONE]"),
        (answers(EVENT), "without [DONE]"),
        (streams(EVENT, dies=True), "closed the connection"),
    ],
)
@pytest.mark.parametrize("annotated", [False, True])
async def test_a_stream_that_is_cut_short_ends_with_an_error_event(
    bad: Behaviour, reason: str, annotated: bool
):
    async with (
        hostile(bad) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        nvext = {"extra_fields": ["timing"]} if annotated else {}
        status, events, _ = await fleet.stream(nvext=nvext)
        assert status == 200
        assert events[0]["choices"]
        assert reason in events[-1]["error"]["message"]
        assert sum(failures(fleet).values()) == 1
        await fleet.idle()


@pytest.mark.parametrize("own", [5, [1], "text"])
async def test_an_nvext_of_an_engine_that_is_no_object_fails_no_request(own: object, caplog):
    event = f'{{"choices": [{{"delta": {{"content": "x"}}}}], "nvext": {json.dumps(own)}}}'.encode()
    async with (
        hostile(answers(event, "application/json")) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        extra = {"extra_fields": ["worker_id", "timing"]}
        status, body, _ = await fleet.chat(nvext=extra)
        assert status == 200
        assert body["nvext"]["timing"]
        engines[0].behave = answers(b"data: " + event + b"\n\n" + DONE)
        status, events, _ = await fleet.stream(nvext=extra)
        assert status == 200
        assert events[0]["nvext"]["worker_id"]
    assert "Traceback" not in caplog.text


async def test_a_defect_within_a_stream_cuts_it_and_sends_no_second_head(monkeypatch, caplog):
    """Its bytes would be read as output, or as the answer to the next request."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with (
        hostile(streams(EVENT, EVENT, DONE, pause=0.01)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
        raw(fleet.frontend.port) as client,
    ):
        monkeypatch.setattr("dynctl.serving.http.inference_responses._note_end", broken)
        body = json.dumps(chat_body("hi", stream=True)).encode()
        await client.send(chat_bytes(body=body))
        got = await client.closed()
        assert got.count(b"HTTP/1.1") == 1
        assert b"internal error" not in got
    assert "ZeroDivisionError" in caplog.text


class Searched(bytes):
    """Counts the bytes in which ends of events are looked for."""

    total = 0

    def rfind(self, *args: Any) -> int:
        Searched.total += len(self)
        return super().rfind(*args)


def test_an_event_in_many_pieces_is_searched_once():
    """With a look at all of it for each piece, 4 MiB stopped every request for minutes."""
    Searched.total = 0
    cut, piece = EventCut(), Searched(b"data: " + b"x" * 1000)
    for _ in range(300):
        assert cut.whole(piece) == b""
    assert Searched.total == 3 * 300 * len(piece)
    assert len(cut.whole(b"\n\n")) == 300 * len(piece) + 2
    assert not cut.waiting


async def test_events_before_the_first_output_are_read_once(monkeypatch):
    read = 0

    def counted(event: bytes) -> str:
        nonlocal read
        read += 1
        return event_name(event)

    monkeypatch.setattr("dynctl.serving.engines.first_output.event_name", counted)
    ping, pieces = b'event: ping\ndata: {"type": "ping"}\n\n', 300
    last = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
    async with (
        hostile(streams(*[ping] * pieces, last, pause=0.001)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        body = chat_body("hi", stream=True, max_tokens=5)
        async with fleet.client.post(fleet.url("/v1/messages"), json=body) as answer:
            assert answer.status == 200
            assert (await answer.read()).count(b"event: ping") == pieces
    assert pieces <= read <= pieces + 2


ENDS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.sampled_from(["data: x", 'data: {"a": 1}', ": ping", "event: e", "data:", "id"])


@given(
    st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6),
    ENDS,
    st.sampled_from(["", "dat", "data: x", ": p"]),
    st.lists(st.integers(0, 200), max_size=10),
)
def test_events_are_cut_as_a_whole_stream_is(
    lines: list[list[str]], end: str, rest: str, places: list[int]
):
    """Whatever the ends of lines are, and wherever the stream is cut."""
    events = [end.join(event).encode() for event in lines]
    whole = b"".join(event + 2 * end.encode() for event in events)
    stream = whole + rest.encode()
    cuts = sorted({0, len(stream), *(at for at in places if at < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(cuts)]
    cut, other = EventCut(), EventCut()
    assert [event for piece in pieces for event in cut.feed(piece)] == events
    assert cut.waiting.strip(b"\n") == rest.encode()
    passed = b""
    for piece in pieces:
        passed += other.whole(piece)
        assert not passed or passed.endswith((b"\n\n", b"\r\n\r\n", b"\r\r", b"\r\n\r"))
    assert passed + other.waiting == stream


async def test_half_an_event_is_not_passed_on_when_the_engine_dies():
    for half in (
        b'data: {"id":"x","choices":[{"ind',
        b"dat",
        b"data: [DO",
        b"data: [DONE]",
        b": pi",
    ):
        for annotated in (False, True):
            for pieces in ((EVENT, half), (EVENT + half,), (EVENT[:9], EVENT[9:] + half)):
                behave = streams(*pieces, dies=True, pause=0.001)
                async with (
                    hostile(behave) as engines,
                    site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
                ):
                    nvext = {"extra_fields": ["timing"]} if annotated else {}
                    body = chat_body("hi", stream=True, nvext=nvext)
                    async with fleet.client.post(
                        fleet.url("/v1/chat/completions"), json=body
                    ) as answer:
                        token, error, rest = (await answer.read()).split(b"\n\n")
                    assert token + b"\n\n" == EVENT
                    assert json.loads(error[5:])["error"]["type"] == "upstream_error"
                    assert rest == b""


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_half_a_named_event_is_not_passed_on_when_the_engine_dies(path: str):
    delta = b'event: x.delta\ndata: {"type": "x.delta"}\n\n'
    for half in (b"event: x", b"event: message_stop\ndata: {", delta[:-1]):
        async with (
            hostile(streams(delta, half, dies=True, pause=0.001)) as engines,
            site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
        ):
            body = chat_body("hi", stream=True, max_tokens=5) | {"input": "hi"}
            async with fleet.client.post(fleet.url(path), json=body) as answer:
                token, error, rest = (await answer.read()).split(b"\n\n")
            assert token + b"\n\n" == delta
            assert error.startswith(b"event: error\ndata: {")
            assert rest == b""


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"])
@pytest.mark.parametrize("annotated", [False, True])
async def test_an_end_without_a_blank_line_is_an_end(end: bytes, annotated: bool):
    async with (
        hostile(streams(EVENT, end)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        nvext = {"extra_fields": ["timing"]} if annotated else {}
        body = chat_body("hi", stream=True, nvext=nvext)
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            whole = await answer.read()
        assert whole.endswith(end.rstrip() + b"\n\n")
        assert not failures(fleet)


async def test_generated_text_is_not_the_end_of_a_stream():
    text = EVENT.replace(b'"x"', b'"data: [DONE]"')
    async with (
        hostile(streams(EVENT, text, dies=True)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        _, events, _ = await fleet.stream()
        assert "error" in events[-1]
        assert failures(fleet)


@pytest.mark.parametrize("split", range(1, len(DONE)))
async def test_an_end_that_arrives_in_two_pieces_is_an_end(split: int):
    whole = EVENT * 2 + DONE
    at = len(whole) - split
    async with (
        hostile(streams(whole[:at], whole[at:], pause=0.01)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        assert await sent(fleet) == (200, whole)
        assert not failures(fleet)


async def test_an_endless_stream_is_ended_at_its_bound():
    limits = Limits(stream_answer_bytes=4096)
    async with (
        hostile(streams(*[EVENT] * 1000, DONE)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH, limits=limits) as fleet,
    ):
        for nvext in ({}, {"extra_fields": ["timing"]}):
            status, events, _ = await fleet.stream(nvext=nvext)
            assert status == 200
            assert len(events) < 1000
            assert "more than 4096 bytes" in events[-1]["error"]["message"]
        await fleet.idle()


async def test_a_request_of_which_engines_die_is_sent_twice_at_most(
    caplog: pytest.LogCaptureFixture,
):
    async with (
        hostile(dies, dies, dies, dies) as engines,
        site(
            [],
            workers=specs(engines),
            health=SLOW_HEALTH,
            model_path=DEMO_MODEL_DIR,
            limits=Limits(attempts=10),
        ) as fleet,
    ):
        with caplog.at_level(logging.WARNING):
            status, answer, headers = await fleet.chat()
        assert (status, headers["retry-after"]) == (502, "1")
        names = [row["worker"] for row in answer["error"]["dynctl"]["attempts"]]
        assert len(names) == len(set(names)) == 2
        assert sum(engine.seen for engine in engines) == 2
        log = caplog.text
        decision = headers["x-dynctl-decision"]
        assert f"request {decision}: {names[0]} may have died of it" in log
        assert f"sent once more, to {names[1]}" in log
        assert (
            f"request {decision}: {names[0]} and then {names[1]} may have died of it; it is "
            "not sent to another engine" in log
        )
        await fleet.idle()


async def test_an_answer_of_500_counts_as_a_death_and_503_does_not():
    for status, tries in ((500, 2), (503, 4)):
        bad = answers(b'{"error": {"message": "no"}}', "application/json", status)
        async with (
            hostile(bad, bad, bad, bad) as engines,
            site(
                [], workers=specs(engines), health=SLOW_HEALTH, limits=Limits(attempts=4)
            ) as fleet,
        ):
            assert (await fleet.chat())[0] == status
            assert sum(engine.seen for engine in engines) == tries
            await fleet.idle()


async def test_a_client_that_does_not_read_stops_its_engine():
    """What waits for it is bounded: sockets' buffers, and a few hundred KiB here."""
    most, piece = 64 << 20, b"data: " + b"x" * 65_536 + b"\n\n"
    written = 0

    async def floods(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENT)
        while written < most:
            await response.write(piece)
            written += len(piece)
        return response

    async with (
        hostile(floods) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        host, port = "127.0.0.1", fleet.frontend.port
        body = json.dumps(chat_body("hello", stream=True)).encode()
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        try:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            before, still = -1, 0
            while still < 20 and written < most:
                still = still + 1 if written == before else 0
                before = written
                await asyncio.sleep(0.05)
            assert 0 < written < most
        finally:
            writer.transport.abort()
        await fleet.idle()


REASONS = {
    "OpenAI": (b'{"error":{"message":"why","type":"T","code":"c","param":"p"}}', "why"),
    "vLLM without its key": (b'{"error":"Unauthorized"}', "Unauthorized"),
    "TGI": (
        b'{"error":"Input validation error","error_type":"validation"}',
        "Input validation error",
    ),
    "SGLang": (b'{"object":"error","message":"why","type":"T","code":400}', "why"),
    "FastAPI": (b'{"detail":"Not here"}', "Not here"),
    "FastAPI's list": (
        b'{"detail":[{"loc":["body","n"],"msg":"a"},{"loc":["query",0],"msg":"b"}]}',
        "body.n: a; query.0: b",
    ),
    "a problem document": (b'{"title":"Bad","detail":"why","status":400}', "why"),
    "Spring": (b'{"status":400,"error":"Bad Request","message":"why"}', "why"),
    "nested": (b'{"error":{"error":{"detail":{"msg":"why"}}}}', "why"),
    "a list": (b'[{"error":{"message":"why"}}]', "why"),
    "texts": (b'{"errors":["a","b"]}', "a; b"),
    "a JSON string": (b'"why"', "why"),
    "text": (b"  why\r\n\tso ", "why so"),
    "a web page": (
        b"<html><head><title>x</title><style>a{}</style></head><body><h1>502 Bad</h1>a &amp; b",
        "502 Bad a & b",
    ),
    "a shape that is not known": (b'{"wrong": 1}', '{"wrong": 1}'),
    "control characters": (b'{"error":"a\\u0000\\u001b[31m\\u202eb"}', "a??[31m?b"),
    "not UTF-8": (b"a\xff", "a\N{REPLACEMENT CHARACTER}"),
    "much": (b"x" * 70_000, "x" * 1997 + "..."),
    "half of an object": (b'{"error": "a', '{"error": "a'),
    "nothing": (b"", None),
    "an empty object": (b"{}", None),
    "null": (b"null", None),
}


@pytest.mark.parametrize(("body", "message"), REASONS.values(), ids=REASONS.keys())
def test_the_reason_of_an_engine_is_read_in_every_shape(body: bytes, message: str | None):
    reason = engine_reason(body)
    assert (None if reason is None else reason.message) == message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["error", "message", "detail", "loc", "code"]), inner)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_every_body_has_a_bounded_printable_reason_or_none(body: bytes):
    reason = engine_reason(body)
    if reason is not None:
        assert 0 < len(reason.message) <= 2000
        assert not UNSAFE.search(reason.message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seen", [{}, {"x-forwarded-for": "10.0.0.1"}], ids=["operator", "client"])
@pytest.mark.parametrize(("status", "body"), [(401, b'{"error":"Unauthorized"}'), (422, b"why")])
async def test_clients_get_the_status_and_the_reason_of_the_engine(
    stream: bool, seen: dict[str, str], status: int, body: bytes
):
    async with (
        hostile(answers(body, "text/plain", status)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        url, chat = fleet.url("/v1/chat/completions"), chat_body("hi", stream=stream)
        async with fleet.client.post(url, json=chat, headers=seen) as answer:
            assert answer.status == status
            message = (await answer.json())["error"]["message"]
        assert message in ("Unauthorized", "why")
        engines[0].behave = answers(b"", "text/plain", status)
        async with fleet.client.post(url, json=chat, headers=seen) as answer:
            assert answer.status == status
            message = (await answer.json())["error"]["message"]
        who = "the engine" if seen else "e0"
        assert message == f"{who} returned status {status} without a reason"


async def test_an_error_as_the_first_event_has_its_own_status():
    event = b'data: {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}\n\n'
    async with (
        hostile(answers(event + DONE), answers(GOOD)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        status, body = await sent(fleet)
        while not engines[0].seen:
            status, body = await sent(fleet)
        assert (status, json.loads(body)["error"]["message"]) == (400, "too long")


async def test_a_small_request_gets_the_reason_of_the_engine_as_json():
    async with (
        hostile(answers(b"<h1>not that way</h1>", "text/html", 400)) as engines,
        site([], workers=specs(engines), health=SLOW_HEALTH) as fleet,
    ):
        status, body, _ = await fleet.post("/v1/messages/count_tokens", chat_body("hi"))
        assert status == 400
        assert body["error"]["message"] == "/v1/messages/count_tokens: not that way"
