"""Which tokens a body becomes: truncation, batches, bodies without a model, /tokenize."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from dynctl.serving.routing.prompts import Prompt, PromptTokenizers, dynamo_chat, prompts_of
from dynctl.tokenization import DEMO_MODEL_DIR, PromptError
from dynctl.wire.anthropic import parse_messages_request
from dynctl.wire.engine_kinds.sglang.kind import SGLANG
from dynctl.wire.engine_kinds.vllm.kind import VLLM
from dynctl.wire.openai import parse_chat_request, parse_completion_request
from dynctl.wire.responses import parse_responses_request
from tests.dynctl.serving.fleets import (
    SLOW_HEALTH,
    TOKENIZER,
    WORDS,
    chat_body,
    site,
    until,
    zone,
)
from tests.dynctl.serving.hostile import answers, hostile, specs

IDS = {"extra_fields": ["worker_id"]}


@given(
    st.lists(st.integers(0, 99), max_size=12),
    st.none() | st.integers(0, 14),
    st.sampled_from([None, "left", "right"]),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_shortened_prompt_is_its_end_or_its_beginning(ids, keep, cut, added, text):
    prompt = Prompt(text="x" if text else None, token_ids=None if text else ids, keep=keep, cut=cut)
    short = list(prompt.shortened(ids, added) or ())
    assert len(short) == (len(ids) if keep is None else min(keep, len(ids)))
    if cut == "right":
        assert short == ids[: len(short)]
    elif cut == "left" or not text:
        assert short == ids[len(ids) - len(short) :]
    elif len(short) < len(ids):
        kept = min(added, len(short))
        assert short == ids[:kept] + ids[len(ids) - len(short) + kept :]


@pytest.mark.parametrize(
    ("fields", "keep"),
    [
        ({}, None),
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": -1}, 100),
        ({"truncate_prompt_tokens": -1, "max_tokens": 7}, 99),
    ],
)
def test_the_tokens_that_a_body_keeps(fields: dict[str, Any], keep: int | None):
    parsed = parse_completion_request({"model": "m", "prompt": "x", **fields})
    ((prompt,), reason) = prompts_of(parsed, 100)
    assert (prompt.keep, reason) == (keep, None)


async def test_a_truncated_prompt_is_predicted_as_the_engine_reads_it():
    async with site([{"name": "a0"}]) as fleet:
        await fleet.connected()
        body = {"model": "demo", "prompt": "first " + WORDS * 8, "truncate_prompt_tokens": 64}
        assert (await fleet.post("/v1/completions", body))[0] == 200
        index, registry = fleet.service.router.index, fleet.service.router.registry
        slot = registry.slots(registry.by_name("a0").worker_id)[0]
        await until(lambda: index.block_count(slot) >= 4)
        same_end = {**body, "prompt": "another beginning " + WORDS * 8}
        _, result, _ = await fleet.post("/v1/route", same_end)
        hop = result["decode"]
        assert result["tokens"] == 64
        assert hop["candidates"][0]["overlap_blocks"] == 3  # the last token is always computed


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt_embeds": "AAAA"}),
        ("/v1/completions", {"prompt": None, "prompt_embeds": ["AAAA"]}),
        ("/v1/completions", {"prompt": "", "prompt_embeds": "AAAA"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "new"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ["text"]}]}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": [{"image": "data:,"}], "encoding_format": "bytes"}),
    ],
)
async def test_what_cannot_be_counted_is_routed_by_load(path: str, fields: dict[str, Any]):
    good = answers(b'{"choices": [], "data": []}', "application/json")
    async with (
        hostile(good) as engines,
        site([], workers=specs(engines), model_path=DEMO_MODEL_DIR, health=SLOW_HEALTH) as fleet,
    ):
        body = {"model": "demo", **fields}
        if path != "/v1/embeddings" or "input" in body:  # a dry run takes messages for a chat
            _, result, _ = await fleet.post("/v1/route", body)
            assert "cache overlap not modelled" in json.dumps(result)
            assert result["decode"]["candidates"][0]["overlap_blocks"] in (None, 0)
        assert (await fleet.post(path, body))[0] == 200
        assert engines[0].seen == 1


async def test_a_body_without_a_model_is_answered_while_one_model_is_served():
    async with site([{"name": "a0"}], api_token="t") as fleet:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        status, answer, _ = await fleet.post("/v1/chat/completions", body)
        assert (status, answer["model"]) == (200, "demo")
        auth = {"authorization": "Bearer t"}
        url = fleet.engines["a0"].url
        await fleet.post("/v1/workers", {"url": url, "name": "b0", "model": "second"}, headers=auth)
        status, answer, _ = await fleet.post("/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["message"] == (
            "model is required, since this frontend does not serve exactly one; "
            "models: demo, second"
        )


class Batches:
    """An engine for completions. ``texts``: bodies of its /tokenize."""

    def __init__(self) -> None:
        self.tokenized: list[dict[str, Any]] = []
        self.prompts: list[Any] = []
        self.url = ""

    def app(self) -> web.Application:
        async def completions(request: web.Request) -> web.Response:
            self.prompts.append((await request.json())["prompt"])
            return web.json_response({"choices": []})

        async def tokenize(request: web.Request) -> web.Response:
            body = await request.json()
            self.tokenized.append(body)
            return web.json_response({"tokens": list(range(40))})

        async def health(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_post("/v1/completions", completions)
        app.router.add_post("/tokenize", tokenize)
        return app


@pytest.fixture
async def batches() -> AsyncIterator[Batches]:
    made = Batches()
    async with TestServer(made.app()) as server:
        made.url = str(server.make_url("")).rstrip("/")
        yield made


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([[1] * 32, [2] * 48], 80), (["a" * 4, [2] * 48], None), ([3] * 20, 20)],
)
async def test_all_prompts_of_a_batch_count(batches: Batches, prompt: Any, tokens: int | None):
    specs = (f"{batches.url},name=e,model=demo",)
    async with site([], workers=specs, model_path=DEMO_MODEL_DIR) as fleet:
        body = {"model": "demo", "prompt": prompt}
        _, result, _ = await fleet.post("/v1/route", body)
        if tokens is None:
            tokens = 48 + len(TOKENIZER.encode_prompt("a" * 4))
        assert result["tokens"] == tokens
        status, _, _ = await fleet.post("/v1/completions", body)
        assert status == 200
        assert batches.prompts == [prompt]
        await fleet.idle()


async def test_cached_blocks_of_every_prompt_of_a_batch_count():
    async with site([{"name": "a0"}, {"name": "a1"}]) as fleet:
        await fleet.connected()
        one, other = list(range(100, 180)), list(range(200, 264))
        for tokens, worker in ((one, "a0"), (other, "a1")):
            found = fleet.service.router.registry.by_name(worker)
            pinned = {"backend_instance_id": found.worker_id}
            body = {"model": "demo", "prompt": tokens, "max_tokens": 1, "nvext": pinned}
            assert (await fleet.post("/v1/completions", body))[0] == 200
        blocks = fleet.service.router.index.block_count
        await until(lambda: all(blocks(slot) >= 4 for slot in (0, 1)))
        _, result, _ = await fleet.post(
            "/v1/route", {"model": "demo", "prompt": [one, other, other + [7] * 16]}
        )
        hop = result["decode"]
        overlaps = {row["worker"]: row["overlap_blocks"] for row in hop["candidates"]}
        # The last token of each prompt is computed: not 5 and 4 + 4.
        assert overlaps == {"a0": 4, "a1": 3 + 4}


async def test_a_batch_that_would_be_handed_off_is_refused_with_the_reason():
    engines = [
        {"name": f"{role}-a0", "role": role, **zone("zone-a")} for role in ("prefill", "decode")
    ]
    async with site(engines) as fleet:
        body = {"model": "demo", "prompt": ["a", "b"]}
        for path in ("/v1/completions", "/v1/route"):
            status, answer, _ = await fleet.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "batch_not_supported")
            assert "send one request for each prompt" in answer["error"]["message"]
        await fleet.idle()


async def test_what_an_engine_is_asked_to_tokenize_is_what_it_will_read(batches: Batches):
    specs = (f"{batches.url},name=e,model=demo",)
    async with site([], workers=specs, model_path=None) as fleet:
        batches.tokenized.clear()
        body = chat_body(
            "hi",
            documents=[{"text": "d"}],
            chat_template="{{ messages }}",
            add_generation_prompt=False,
            continue_final_message=True,
            reasoning_effort="low",
        )
        _, result, _ = await fleet.post("/v1/route", body)
        assert result["tokens"] == 40
        asked = next(one for one in batches.tokenized if "chat_template" in one)
        assert asked == {
            "model": "demo",
            "messages": body["messages"],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template": "{{ messages }}",
            "chat_template_kwargs": {
                "reasoning_effort": "low",
                "enable_thinking": True,
                "documents": [{"text": "d"}],
            },
        }


async def test_a_text_whose_special_tokens_are_unknown_is_not_cut_by_guess():
    async def engine(_model: str, _prompt: Prompt) -> list[int]:
        return list(range(10))

    tokenizers = PromptTokenizers()
    tokenizers.ask_engines(engine)
    found = await tokenizers.tokenize("m", Prompt(text="x", keep=4))
    assert (found.ids, found.source) == (None, "estimate")
    assert "truncated" in (found.note or "")
    plain = Prompt(text="x", keep=4, add_special_tokens=False)
    assert (await tokenizers.tokenize("m", plain)).ids == [6, 7, 8, 9]


def test_turns_of_tool_calls_are_read_as_vllm_reads_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "done", "tool_calls": []},
    ]
    parsed = parse_chat_request({"model": "m", "messages": turns})
    assert parsed.messages[1] == turns[1]
    assert parsed.messages[2] == {**turns[2], "content": None}
    assert parsed.messages[3] == {"role": "assistant", "content": "done"}
    assert parsed.body["messages"] is turns
    one, other = (TOKENIZER.render_chat(parsed.messages[i : i + 1]) for i in (1, 2))
    assert one == other
    assert "None" not in one


def test_tools_are_written_as_vllm_writes_them():
    bare = {"function": {"parameters": {}, "name": "f", "other": 1}, "type": "function"}
    full = {"type": "function", "function": {"name": "g", "strict": True, "description": "d"}}
    parsed = parse_chat_request(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [bare, full]}
    )
    assert [list(tool["function"].items()) for tool in parsed.tools or ()] == [
        [("name", "f"), ("description", None), ("parameters", {})],
        [("name", "g"), ("description", "d"), ("parameters", None), ("strict", True)],
    ]


TOOL = {"type": "function", "function": {"parameters": {}, "name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXTS: dict[str, Any] = {"role": "user", "content": "x"}
CHATS: dict[str, tuple[dict[str, Any], bool]] = {
    "texts": ({"messages": [TEXTS]}, True),
    "tools": ({"messages": [TEXTS], "tools": [TOOL]}, False),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, False),
    "a call": (
        {"messages": [TEXTS, {"role": "assistant", "content": "y", "tool_calls": [CALL]}]},
        False,
    ),
    "nothing": ({"messages": [TEXTS, {"role": "assistant", "content": None}]}, False),
}


@pytest.mark.parametrize("name", CHATS)
async def test_sglang_is_asked_about_chats_that_it_reads_in_its_own_way(name: str):
    body, plain = CHATS[name]
    asked: list[dict[str, Any]] = []

    async def engine(model: str, prompt: Prompt) -> list[int]:
        asked.append(prompt.to_tokenize_body(model))
        return [1, 2, 3]

    tokenizers = PromptTokenizers(TOKENIZER)
    tokenizers.ask_engines(engine)
    prompts, _ = prompts_of(parse_chat_request({"model": "m", **body}))
    own = await tokenizers.tokenize("m", prompts[0])
    assert (own.source, asked) == ("model", [])

    tokenizers.ask_engines(engine, lambda _: {SGLANG})
    found = await tokenizers.tokenize("m", prompts[0])
    if plain:
        assert (found, asked) == (own, [])
        return
    assert (found.ids, found.source) == ([1, 2, 3], "engine")
    assert asked[0].get("tools") == body.get("tools"), "as the client wrote them"

    tokenizers.ask_engines(engine, lambda _: {SGLANG, VLLM})
    both = await tokenizers.tokenize("m", prompts[0])
    assert (both.ids, both.source, len(asked)) == (None, "estimate", 1)
    assert "each kind of engine" in (both.note or "")


@pytest.mark.parametrize("given", [{}, {"description": "d", "strict": True}])
def test_sglang_fills_in_the_tools_of_other_apis(given: dict[str, Any]):
    schema = {"type": "object"}
    message = parse_messages_request(
        {
            "model": "m",
            "messages": [TEXTS],
            "tools": [{"name": "f", "input_schema": schema, **given}],
        }
    )
    flat = {"type": "function", "name": "f", "parameters": schema, **given}
    response = parse_responses_request({"model": "m", "input": "x", "tools": [flat]})
    for parsed, description in ((message, ""), (response, None)):
        prompt = prompts_of(parsed)[0][0]
        asked = prompt.to_tokenize_body("m", SGLANG)["tools"]
        assert [list(tool["function"].items()) for tool in asked] == [
            [
                ("name", "f"),
                ("description", given.get("description", description)),
                ("parameters", schema),
                ("strict", given.get("strict", False)),
            ]
        ]
        assert prompt.to_tokenize_body("m")["tools"] == parsed.tools


@pytest.mark.parametrize(
    "more", [{}, {"continue_final_message": True, "add_generation_prompt": False}]
)
def test_parts_that_dynamo_refuses_are_named(more: dict[str, Any]):
    body = {"model": "m", "messages": [{"role": "user", "content": ["text"]}], **more}
    with pytest.raises(PromptError, match="expected an object, got a string"):
        dynamo_chat(TOKENIZER, parse_chat_request(body))
