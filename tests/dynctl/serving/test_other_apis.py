"""``/v1/responses`` and ``/v1/messages``: routed like chats, passed on as they are; and the small
requests that any engine answers."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from dynctl.serving.routing.config import FrontendConfig, Limits
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.serving.fleets import QUICK_HEALTH, SLOW_HEALTH, WORDS, Site, site
from tests.dynctl.serving.hostile import Behaviour, answers, hostile, specs, streams

TWO: list[dict[str, Any]] = [{"name": "a0"}, {"name": "a1"}]
PAIR: list[dict[str, Any]] = [
    {"name": "p0", "role": "prefill"},
    {"name": "d0", "role": "decode"},
]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
APIS = [MESSAGES, RESPONSES]


def body_of(path: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    if path == MESSAGES:
        turns = [{"role": "user", "content": text}]
        return {"model": "demo", "max_tokens": 6, "messages": turns, **fields}
    return {"model": "demo", "max_output_tokens": 6, "input": text, **fields}


async def raw(fleet: Site, path: str, body: Any, **kwargs: Any) -> tuple[int, bytes, Any]:
    async with fleet.client.post(fleet.url(path), json=body, **kwargs) as answer:
        return answer.status, await answer.read(), answer.headers


def named(stream: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in stream.split(b"\n\n"):
        if event:
            first, second = event.split(b"\n")
            name = first.removeprefix(b"event: ").decode()
            found.append((name, msgspec.json.decode(second.removeprefix(b"data: "))))
    return found


def text_of(path: str, answer: Any) -> str:
    content = answer["content"] if path == MESSAGES else answer["output"][0]["content"]
    return str(content[0]["text"])


def usage_of(path: str, answer: Any) -> tuple[int, int, int]:
    usage = answer["usage"]
    if path == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return usage["input_tokens"], cached, usage["output_tokens"]


@pytest.mark.parametrize("fleet_of", [TWO, PAIR], ids=["aggregated", "prefill-decode"])
@pytest.mark.parametrize("path", APIS)
async def test_an_answer_and_its_stream(path: str, fleet_of: list[dict[str, Any]]) -> None:
    async with site(fleet_of) as fleet:
        status, answer, headers = await fleet.post(path, body_of(path))
        assert (status, answer["model"]) == (200, "demo")
        assert headers["x-dynctl-decision"]
        again, stream, streamed = await raw(fleet, path, body_of(path, stream=True))
        assert (again, streamed["content-type"]) == (200, "text/event-stream; charset=utf-8")
        events = named(stream)
        text = "".join(
            data["delta"] if path == RESPONSES else data["delta"]["text"]
            for name, data in events
            if name in ("content_block_delta", "response.output_text.delta")
        )
        assert text == text_of(path, answer)
        assert events[0][0] == ("message_start" if path == MESSAGES else "response.created")
        assert events[-1][0] == ("message_stop" if path == MESSAGES else "response.completed")
        await fleet.idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", APIS)
async def test_what_the_answer_shows_is_recorded(path: str, stream: bool) -> None:
    async with site(TWO[:1]) as fleet:
        seen: list[Any] = []

        class Watch(ServiceObserver):
            def on_finished(self, record: RequestRecord) -> None:
                seen.append(record)

        fleet.service.observers.append(Watch())
        prompt = WORDS * 8
        for _ in range(2):
            status, _, _ = await raw(fleet, path, body_of(path, prompt, stream=stream))
            assert status == 200
            await fleet.idle()
        record = seen[-1]
        endpoint = "anthropic_messages" if path == MESSAGES else "responses"
        assert (record.endpoint, record.outcome, record.stream) == (endpoint, "success", stream)
        assert record.output_tokens == 6
        assert record.prompt_tokens == record.isl_tokens
        assert record.cached_tokens
        assert (record.first_token_at is not None) == stream
        _, metrics = await fleet.get("/metrics")
        assert f'endpoint="{endpoint}"'.encode() in metrics


@pytest.mark.parametrize("path", APIS)
async def test_it_goes_where_the_chat_with_the_same_prompt_is_cached(path: str) -> None:
    """Both render the same tokens, so a chat's blocks are found by the other API and reused."""
    async with site(TWO) as fleet:
        await fleet.connected()
        prompt = WORDS * 12
        ids = {"extra_fields": ["worker_id"]}
        for other in ("one ", "two ", "three "):
            await fleet.chat(other + WORDS * 3, max_tokens=1)
        _, chat, _ = await fleet.chat(prompt, max_tokens=2, nvext=ids)
        await fleet.idle()
        await fleet.followed()
        status, answer, _ = await fleet.post(path, body_of(path, prompt, nvext=ids))
        assert status == 200
        assert answer["nvext"]["worker_id"] == chat["nvext"]["worker_id"]
        tokens, cached, _ = usage_of(path, answer)
        assert tokens == chat["usage"]["prompt_tokens"]
        assert cached >= tokens - 16


@pytest.mark.parametrize("path", APIS)
async def test_what_only_an_engine_can_render_is_routed_by_load_and_says_so(path: str) -> None:
    image = [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]
    if path == RESPONSES:
        image = [{"type": "input_image", "image_url": "http://x/y.png"}]
    turns = [{"role": "user", "content": image}]
    body = body_of(path) | {"messages" if path == MESSAGES else "input": turns}
    async with hostile(answers(b'{"content":[],"output":[]}', "application/json")) as engines:
        for engine in engines:
            engine.healthy = answers(b"{}", "application/json")
        async with site([], config=_over(engines)) as fleet:
            status, _, headers = await fleet.post(path, body)
            assert status == 200
            _, decision = await fleet.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
            assert "cache overlap not modelled" in str(decision)


@pytest.mark.parametrize("path", APIS)
async def test_a_dry_run_names_the_workers(path: str) -> None:
    async with site(TWO) as fleet:
        body = body_of(path, nvext={"annotations": ["query_instance_id:"]})
        status, answer, _ = await fleet.post(path, body)
        assert status == 200
        assert answer["nvext"]["worker_id"]["decode_worker_id"]
        assert answer["content" if path == MESSAGES else "output"] == []


# -- errors ----------------------------------------------------------------------------------------


def error_of(path: str, answer: Any) -> dict[str, Any]:
    if path == MESSAGES:
        assert answer["type"] == "error"
    else:
        assert "type" not in answer
    found: dict[str, Any] = answer["error"]
    return found


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "other"}, 404, "not_found_error"),
        ({"stream": "yes"}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_the_shape_of_their_api(
    path: str, fields: dict[str, Any], status: int, kind: str
) -> None:
    async with site(TWO[:1]) as fleet:
        found, answer, headers = await fleet.post(path, body_of(path, **fields))
        assert (found, error_of(path, answer)["type"]) == (status, kind)
        assert headers["x-dynctl-decision"]


@pytest.mark.parametrize("path", APIS)
async def test_an_engines_refusal_passes_in_the_shape_of_the_api(path: str) -> None:
    async with site(TWO[:1]) as fleet:
        status, answer, _ = await fleet.post(path, body_of(path, tool_choice={"type": "tool"}))
        assert status == 400
        assert "tool_choice" in error_of(path, answer)["message"]


async def test_a_key_may_come_as_clients_of_the_messages_api_send_it() -> None:
    async with site(TWO[:1], api_keys=("sk-1",), health=SLOW_HEALTH) as fleet:
        body = body_of(MESSAGES)
        status, answer, _ = await fleet.post(MESSAGES, body)
        assert (status, error_of(MESSAGES, answer)["type"]) == (401, "authentication_error")
        for header in ({"x-api-key": "sk-1"}, {"authorization": "Bearer sk-1"}):
            assert (await fleet.post(MESSAGES, body, headers=header))[0] == 200
        wrong = {"x-api-key": "sk-1", "authorization": "Bearer sk-2"}
        assert (await fleet.post(MESSAGES, body, headers=wrong))[0] == 401


async def test_without_a_worker_the_refusal_says_overloaded() -> None:
    async with site(TWO[:1], health=QUICK_HEALTH) as fleet:
        await fleet.engines["a0"].close()
        status, answer, _ = await fleet.post(MESSAGES, body_of(MESSAGES))
        assert status in (502, 503)
        assert error_of(MESSAGES, answer)["type"] in ("api_error", "overloaded_error")


# -- streams of broken engines ---------------------------------------------------------------------


def sse(name: str, **data: Any) -> bytes:
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name, **data}) + b"\n\n"


START = {
    MESSAGES: sse("message_start", message={"id": "m"}),
    RESPONSES: sse("response.created", response={}) + sse("response.in_progress", response={}),
}
TEXT = {
    MESSAGES: sse("content_block_delta", delta={"text": "x"}),
    RESPONSES: sse("response.output_text.delta", delta="x"),
}
END = {
    MESSAGES: sse("message_delta", usage={"output_tokens": 1}) + sse("message_stop"),
    RESPONSES: sse(
        "response.completed",
        response={"output": ["y" * 4000], "usage": {"input_tokens": 5, "output_tokens": 9}},
    ),
}
ERROR = sse("error", error={"type": "api_error", "message": "out of memory"})


def _over(engines: Any, **limits: Any) -> FrontendConfig:
    return FrontendConfig(
        port=0,
        workers=specs(engines),
        model_path=DEMO_MODEL_DIR,
        health=SLOW_HEALTH,
        limits=Limits(**limits),
    )


async def streamed(
    path: str, *behaviours: Behaviour, **limits: Any
) -> tuple[int, bytes, list[int], Any]:
    """Status, bytes, how often each engine was asked, and the record of the request."""
    seen: list[Any] = []

    class Watch(ServiceObserver):
        def on_finished(self, record: RequestRecord) -> None:
            seen.append(record)

    async with hostile(*behaviours) as engines, site([], config=_over(engines, **limits)) as fleet:
        fleet.service.observers.append(Watch())
        status, stream, _ = await raw(fleet, path, body_of(path, stream=True))
        await fleet.idle()
        return status, stream, [engine.seen for engine in engines], seen[-1]


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_passes_byte_by_byte(path: str) -> None:
    whole = START[path] + b": a comment\n\n" + TEXT[path] * 3 + END[path]
    pieces = [whole[at : at + 41] for at in range(0, len(whole), 41)]
    status, stream, _, record = await streamed(path, streams(*pieces))
    assert (status, stream) == (200, whole)
    assert (record.outcome, record.output_events) == ("success", 3)
    assert record.reported_output == (1 if path == MESSAGES else 9)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("broken", ["cut", "error", "silent"])
async def test_before_the_first_output_another_engine_answers(path: str, broken: str) -> None:
    """The events before the output promise nothing: the request is not lost."""
    first = {
        "cut": streams(START[path], dies=True),
        "error": streams(START[path], ERROR),
        "silent": streams(START[path]),
    }[broken]
    good = streams(START[path], TEXT[path], END[path])
    status, stream, asked, record = await streamed(path, first, good)
    while asked[0] == 0:  # the good engine was chosen first
        status, stream, asked, record = await streamed(path, first, good)
    assert (status, stream) == (200, START[path] + TEXT[path] + END[path])
    assert asked == [1, 1]
    assert record.outcome == "success"
    assert len(record.attempts) == 1


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_that_breaks_ends_with_an_error_event(path: str) -> None:
    begun = START[path] + TEXT[path]
    status, stream, _, record = await streamed(path, streams(begun, TEXT[path][:9], dies=True))
    assert (status, record.outcome) == (200, "upstream_error")
    assert stream.startswith(begun)
    ((name, data),) = named(stream[len(begun) :])
    assert (name, data["type"]) == ("error", "error")
    if path == MESSAGES:
        assert data["error"]["type"] == "api_error"
    else:
        assert data["sequence_number"] == 3


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_without_its_last_event_is_a_failure(path: str) -> None:
    _, stream, _, record = await streamed(path, streams(START[path], TEXT[path]))
    assert record.outcome == "upstream_error"
    assert named(stream)[-1][0] == "error"


@pytest.mark.parametrize("path", APIS)
async def test_an_error_of_the_engine_in_its_stream_passes_once(path: str) -> None:
    whole = START[path] + TEXT[path] + ERROR
    _, stream, _, record = await streamed(path, streams(whole))
    assert (stream, record.outcome) == (whole, "upstream_error")


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_has_a_bound(path: str) -> None:
    _, stream, _, record = await streamed(
        path, streams(START[path], *[TEXT[path]] * 50), stream_answer_bytes=900
    )
    assert record.outcome == "upstream_error"
    assert len(stream) < 1500


@pytest.mark.parametrize("path", APIS)
async def test_an_answer_that_is_none_is_a_failure(path: str) -> None:
    none = answers(b'{"object":"list"}', "application/json")
    async with hostile(none) as engines, site([], config=_over(engines)) as fleet:
        status, answer, _ = await fleet.post(path, body_of(path))
        assert status == 502
        assert error_of(path, answer)


# -- small requests --------------------------------------------------------------------------------


async def test_tokens_there_and_back() -> None:
    async with site(TWO) as fleet:
        status, found, _ = await fleet.post("/tokenize", {"model": "demo", "prompt": "hello you"})
        assert (status, found["count"]) == (200, len(found["tokens"]))
        status, back, _ = await fleet.post(
            "/detokenize", {"model": "demo", "tokens": found["tokens"]}
        )
        assert (status, "hello you" in back["prompt"]) == (200, True)
        status, counted, _ = await fleet.post("/v1/messages/count_tokens", body_of(MESSAGES))
        _, answer, _ = await fleet.post(MESSAGES, body_of(MESSAGES))
        assert counted["input_tokens"] == usage_of(MESSAGES, answer)[0]
        status, version = await fleet.get("/version")
        assert (status, version["version"][:7]) == (200, "dynctl-")


async def test_the_engines_take_turns_and_a_dead_one_is_left_out() -> None:
    async with site(TWO, health=SLOW_HEALTH) as fleet:
        await fleet.engines["a0"].close()
        for _ in range(4):
            status, _, _ = await fleet.post("/tokenize", {"prompt": "hello"})
            assert status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"model": "other", "prompt": "x"}, 404),
        ("/tokenize", {"model": 7}, 400),
        ("/tokenize", ["x"], 400),
        ("/detokenize", {"model": "demo", "tokens": "x"}, 400),
        ("/v1/messages/count_tokens", {"model": "demo"}, 400),
    ],
)
async def test_small_requests_that_are_wrong(path: str, body: Any, status: int) -> None:
    async with site(TWO[:1]) as fleet:
        found, answer, _ = await fleet.post(path, body)
        assert found == status
        assert ("type" in answer) == path.startswith(MESSAGES)


async def test_engines_without_the_endpoint_and_no_engine() -> None:
    other = answers(b"{}", "application/json")
    async with hostile(other) as engines, site([], config=_over(engines)) as fleet:
        assert (await fleet.post("/tokenize", {"prompt": "x"}))[0] == 501
    async with site(TWO[:1], health=SLOW_HEALTH) as fleet:
        await fleet.engines["a0"].close()
        status, answer, _ = await fleet.post(
            "/tokenize", {"prompt": "x"}, headers={"x-forwarded-for": "192.0.2.7"}
        )
        assert (status, "127.0.0.1" in str(answer)) == (503, False)


async def test_ping_is_readiness() -> None:
    async with site(TWO[:1], health=QUICK_HEALTH) as fleet:
        assert (await fleet.get("/ping"))[0] == 200
        assert (await fleet.post("/ping", {}))[0] == 200
    async with site([]) as fleet:
        assert (await fleet.get("/ping"))[0] == 503


async def test_an_unknown_path_lists_what_is_served() -> None:
    async with site(TWO[:1]) as fleet:
        for method in ("GET", "POST"):
            async with aiohttp.request(method, fleet.url("/v1/images/generations")) as answer:
                found = await answer.json()
            assert answer.status == 404
            assert "POST /v1/responses" in found["error"]["served"]
            assert "GET /v1/models/{model}" in found["error"]["served"]
        status, theirs = await fleet.get("/v1/messages/batches")
        assert (status, theirs["type"]) == (404, "error")
