"""The OpenAI endpoints of a real engine on a free port."""

import asyncio
import json
from functools import partial

import aiohttp
import pytest

from dynctl.tokenization import ModelTokenizer
from tests.dynctl.simulation.engine.conftest import (
    StartEngine,
    cached_tokens,
    complete,
    eventually,
    get,
    idle,
    load_of,
    post,
)

PROMPT = list(range(1, 41))


async def events_of(answer: aiohttp.ClientResponse) -> list:
    """The parsed `data:` lines of a stream; the last one is "[DONE]"."""
    lines = [line for line in (await answer.text()).split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "[DONE]" else json.loads(line) for line in (x[6:] for x in lines)]


async def test_chat_unary_and_streamed_agree(start: StartEngine, http) -> None:
    engine = await start()
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    status, whole = await post(http, engine, "/v1/chat/completions", body)
    assert status == 200
    assert whole["object"] == "chat.completion"
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert whole["usage"]["completion_tokens"] == 12

    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with http.post(engine.url + "/v1/chat/completions", json=body) as answer:
        assert answer.content_type == "text/event-stream"
        *chunks, usage, done = await events_of(answer)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 13 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_text_and_token_prompts_are_the_same_request(start: StartEngine, http) -> None:
    engine = await start()
    text = "the same prompt as text and as tokens"
    status, tokens = await post(http, engine, "/tokenize", {"model": "demo", "prompt": text})
    assert status == 200
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 8192
    one = await complete(http, engine, text, max_tokens=9)
    two = await complete(http, engine, tokens["tokens"], max_tokens=9)
    assert one["choices"] == two["choices"]
    assert one["usage"]["prompt_tokens"] == tokens["count"]


async def test_cached_tokens_are_whole_blocks_and_never_the_whole_prompt(
    start: StartEngine, http
) -> None:
    engine = await start()
    prompt = list(range(100, 148))  # three blocks of 16

    assert cached_tokens(await complete(http, engine, prompt, max_tokens=1)) == 0
    assert cached_tokens(await complete(http, engine, prompt, max_tokens=1)) == 32
    assert cached_tokens(await complete(http, engine, [*prompt, 7], max_tokens=1)) == 48
    assert cached_tokens(await complete(http, engine, [7, *prompt], max_tokens=1)) == 0
    assert cached_tokens(await complete(http, engine, prompt, max_tokens=1, cache_salt="x")) == 0


async def test_the_next_turn_finds_the_last_answer_in_the_cache(
    start: StartEngine, http, tokenizer: ModelTokenizer
) -> None:
    engine = await start()
    prompt = "a question that is long enough to fill a block or two of tokens"
    answer = await complete(http, engine, prompt, max_tokens=100)
    spoken = prompt + answer["choices"][0]["text"]
    turn = await complete(http, engine, spoken + " and then", max_tokens=1)
    # The last token was never computed, so its block is not stored.
    assert cached_tokens(turn) == (len(tokenizer.encode(spoken)) - 1) // 16 * 16

    message = {"role": "user", "content": "tell me of the river and the stone"}
    body: dict = {"model": "demo", "messages": [message], "max_tokens": 100}
    _, said = await post(http, engine, "/v1/chat/completions", body)
    body["messages"] += [said["choices"][0]["message"], message]
    _, next_turn = await post(http, engine, "/v1/chat/completions", body)
    assert cached_tokens(next_turn) == (said["usage"]["total_tokens"] - 1) // 16 * 16


async def test_every_engine_gives_the_same_answer(start: StartEngine, http) -> None:
    one, two, other = await start(), await start(name="b"), await start(seed=1)
    texts = [
        (await complete(http, engine, PROMPT, max_tokens=30))["choices"][0]["text"]
        for engine in (one, two, other)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_length_without_max_tokens(start: StartEngine, http) -> None:
    engine = await start(default_output_tokens=7, max_model_len=64)
    answer = await complete(http, engine, PROMPT)
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "stop"
    answer = await complete(http, engine, PROMPT, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_stop_strings_cut_the_text(start: StartEngine, http) -> None:
    engine = await start()
    text = (await complete(http, engine, PROMPT, max_tokens=60))["choices"][0]["text"]
    stop = text[10:14]
    expected = text[: text.index(stop)]
    answer = await complete(http, engine, PROMPT, max_tokens=60, stop=[stop, "never there"])
    assert answer["choices"][0] == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
        "text": expected,
    }
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 60, "stop": stop, "stream": True}
    async with http.post(engine.url + "/v1/completions", json=body) as streamed:
        *chunks, _done = await events_of(streamed)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert "kv_transfer_params" not in answer
    await idle(http, engine)  # a request that stops early gives its blocks back, once
    assert await load_of(http, engine, "kv_used_blocks") == (0,)
    await complete(http, engine, PROMPT, max_tokens=60)


async def test_an_absent_stop_string_changes_nothing(start: StartEngine, http) -> None:
    engine = await start()
    plain = await complete(http, engine, PROMPT, max_tokens=20)
    stopped = await complete(http, engine, PROMPT, max_tokens=20, stop="zzzzzzzz")
    assert plain["choices"] == stopped["choices"]


async def test_lora_adapters_are_models(start: StartEngine, http) -> None:
    engine = await start(lora=("adapter-a",))
    models = await get(http, engine, "/v1/models")
    assert [(m["id"], m["parent"]) for m in models["data"]] == [
        ("demo", None),
        ("adapter-a", "demo"),
    ]
    await complete(http, engine, PROMPT, max_tokens=1)
    answer = await complete(http, engine, PROMPT, max_tokens=1, model="adapter-a")
    assert answer["model"] == "adapter-a"
    assert cached_tokens(answer) == 0


async def test_tokenize_chat_and_back(start: StartEngine, http, tokenizer: ModelTokenizer) -> None:
    engine = await start()
    messages = [{"role": "user", "content": "hello"}]
    _, with_prompt = await post(http, engine, "/tokenize", {"messages": messages})
    assert with_prompt["tokens"] == tokenizer.encode_chat(messages)
    _, without = await post(
        http, engine, "/tokenize", {"messages": messages, "add_generation_prompt": False}
    )
    assert without["tokens"] == tokenizer.encode_chat(messages, add_generation_prompt=False)
    tokens = tokenizer.encode("hello there")
    _, text = await post(http, engine, "/detokenize", {"tokens": tokens})
    assert text == {"prompt": "hello there"}


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({"model": "", "prompt": "x"}, 400, "model", "must not be empty"),
        ({"model": "nope", "prompt": "x"}, 404, "model", "this engine serves demo"),
        ({"model": 1, "prompt": "x"}, 400, "model", "expected a string"),
        ({"model": "demo"}, 400, "prompt", "is required"),
        ({"model": "demo", "prompt": 5}, 400, "prompt", "got an integer"),
        ({"model": "demo", "prompt": [1, -1]}, 400, "prompt[1]", "expected a token id"),
        ({"model": "demo", "prompt": [2**32]}, 400, "prompt[0]", "expected a token id"),
        ({"model": "demo", "prompt": ["a", "b"]}, 400, "prompt", "2 prompts"),
        ({"model": "demo", "prompt": []}, 400, "prompt", "must not be empty"),
        ({"model": "demo", "prompt": ""}, 400, "prompt", "no tokens"),
        ({"model": "demo", "prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1, got 0"),
        ({"model": "demo", "prompt": "x", "max_tokens": "9"}, 400, "max_tokens", "an integer"),
        ({"model": "demo", "prompt": "x", "max_tokens": True}, 400, "max_tokens", "an integer"),
        ({"model": "demo", "prompt": "x", "max_tokens": 10_000}, 400, "max_tokens", "8192 tokens"),
        ({"model": "demo", "prompt": [1] * 8192}, 400, "prompt", "maximum context length is 8192"),
        ({"model": "demo", "prompt": "x", "stream": "yes"}, 400, "stream", "true or false"),
        ({"model": "demo", "prompt": "x", "n": 2}, 400, "n", "one choice"),
        ({"model": "demo", "prompt": "x", "stop": [""]}, 400, "stop[0]", "must not be empty"),
        ({"model": "demo", "prompt": "x", "stop": ["y"] * 17}, 400, "stop", "at most 16"),
        (
            {"model": "demo", "prompt": "x", "stream_options": {}},
            400,
            "stream_options",
            "stream: true",
        ),
        (
            {"model": "demo", "prompt": "x", "kv_transfer_params": {"do_remote_decode": 1}},
            400,
            "kv_transfer_params.do_remote_decode",
            "true or false",
        ),
        ({"model": "demo", "prompt": "x", "data_parallel_rank": 1}, 400, "data_parallel_rank", "0"),
    ],
)
async def test_a_wrong_completion_names_its_field(
    start: StartEngine, http, body: dict, status: int, param: str, says: str
) -> None:
    engine = await start()
    got, answer = await post(http, engine, "/v1/completions", body)
    error = answer["error"]
    assert (got, error["param"], error["code"]) == (status, param, status)
    assert says in error["message"]


async def test_long_bodies_are_read_like_short_ones(
    start: StartEngine, http, tokenizer: ModelTokenizer
) -> None:
    engine = await start(max_model_len=65536, total_blocks=4096)
    text = "the stone and the river " * 2000
    assert len(text) > 32 * 1024
    tokens = tokenizer.encode_prompt(text)
    _, answer = await post(http, engine, "/tokenize", {"prompt": text})
    assert answer["tokens"] == tokens
    done = await complete(http, engine, text, max_tokens=1)
    assert done["usage"]["prompt_tokens"] == len(tokens)
    status, refused = await post(http, engine, "/tokenize", {"prompt": text, "model": "nope"})
    assert (status, refused["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
    ],
)
async def test_wrong_messages_are_named(start: StartEngine, http, messages, param: str) -> None:
    engine = await start()
    body = {"model": "demo", "messages": messages}
    status, answer = await post(http, engine, "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.usefixtures("no_collection")
async def test_invalid_bodies(start: StartEngine, http) -> None:
    engine = await start(max_body_bytes=2048)
    for raw, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 1500, 400)):
        async with http.post(engine.url + "/v1/completions", data=raw) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["type"] == "BadRequestError"
    async with http.post(engine.url + "/v1/completions", data=b"x" * 4096) as answer:
        assert answer.status == 413
        assert "2048 bytes" in (await answer.json())["error"]["message"]
    async with http.get(engine.url + "/nope") as answer:
        assert answer.status == 404
        assert "GET /nope" in (await answer.json())["error"]["message"]
    async with http.get(engine.url + "/v1/completions") as answer:
        assert answer.status == 405
        assert "POST" in (await answer.json())["error"]["message"]


async def test_a_client_that_leaves_frees_its_blocks(start: StartEngine, http) -> None:
    engine = await start(speedup_ratio=1.0, decode_itl_ms=1.0)
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 8000, "stream": True}
    async with http.post(engine.url + "/v1/completions", json=body) as answer:
        await answer.content.readline()
        assert (await get(http, engine, "/load"))["running"] == 1
        answer.close()
    await idle(http, engine)


async def test_many_requests_on_few_blocks_all_finish(start: StartEngine, http) -> None:
    """Requests wait, are preempted and recomputed, and still say what they would say alone."""
    engine = await start(total_blocks=12, block_size=4, max_num_batched_tokens=16)
    prompts = [[100 + n] * 10 for n in range(8)]
    alone = [await complete(http, engine, prompt, max_tokens=20) for prompt in prompts]
    together = await asyncio.gather(
        *(complete(http, engine, prompt, max_tokens=20) for prompt in prompts)
    )
    assert [a["choices"] for a in together] == [a["choices"] for a in alone]
    load = await get(http, engine, "/load")
    assert load["kv_used_blocks"] == load["running"] == load["waiting"] == 0
    async with http.get(engine.url + "/metrics") as answer:
        text = await answer.text()
    preemptions = [line for line in text.splitlines() if line.startswith("vllm:num_preemptions")]
    assert float(preemptions[0].split()[-1]) > 0


async def test_a_full_queue_refuses(start: StartEngine, http) -> None:
    engine = await start(max_num_seqs=1, max_waiting=1, speedup_ratio=1e-3)
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 5, "stream": True}
    url = engine.url + "/v1/completions"
    sent = []

    async def counts_are(expected: tuple[int, int]) -> bool:
        return await load_of(http, engine, "running", "waiting") == expected

    for expected in ((1, 0), (1, 1)):
        sent.append(asyncio.ensure_future(http.post(url, json=body)))
        await eventually(partial(counts_are, expected))
    status, answer = await post(http, engine, "/v1/completions", body)
    assert status == 503
    assert "--max-waiting" in answer["error"]["message"]
    for task in sent:
        task.cancel()
    await asyncio.gather(*sent, return_exceptions=True)


async def test_data_parallel_ranks_have_their_own_cache(start: StartEngine, http) -> None:
    engine = await start(data_parallel_size=2)

    async def cached(rank: int) -> int:
        answer = await complete(http, engine, PROMPT, max_tokens=1, data_parallel_rank=rank)
        return cached_tokens(answer)

    assert await cached(1) == 0
    assert await cached(1) == 32
    assert await cached(0) == 0
    headers = {"X-data-parallel-rank": "1"}
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1}
    async with http.post(engine.url + "/v1/completions", json=body, headers=headers) as answer:
        assert cached_tokens(await answer.json()) == 32
    headers = {"X-data-parallel-rank": "2"}
    async with http.post(engine.url + "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 400


async def test_metrics_parse_and_carry_vllm_names(start: StartEngine, http) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    engine = await start(total_blocks=100)
    for _ in range(2):
        await complete(http, engine, PROMPT, max_tokens=3)
    async with http.get(engine.url + "/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    samples = {s.name: (s.labels, s.value) for f in families for s in f.samples}
    assert samples["vllm:prefix_cache_queries_total"][1] == 80
    assert samples["vllm:prefix_cache_hits_total"][1] == 32
    assert samples["vllm:generation_tokens_total"][1] == 6
    assert samples["vllm:num_requests_running"][1] == 0
    assert samples["vllm:cache_config_info"][0]["num_gpu_blocks"] == "100"
    assert samples["vllm:cache_config_info"][0]["block_size"] == "16"


async def test_request_id_is_part_of_the_answers_id(start: StartEngine, http) -> None:
    engine = await start()
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1}
    headers = {"X-Request-Id": "abc"}
    async with http.post(engine.url + "/v1/completions", json=body, headers=headers) as answer:
        assert (await answer.json())["id"] == "cmpl-abc"


async def test_taints_are_replaced_and_topology_kept(start: StartEngine, http) -> None:
    """Status and bodies as captured from Dynamo 1.6.1's worker (http-model-taints.txt)."""
    engine = await start(topology_domains={"zone": "zone-a"})
    path = "/engine/update/model_taints"
    assert await post(http, engine, path, {"taints": ["a", "b"]}) == (
        200,
        {"status": "ok", "taints": ["a", "b"]},
    )
    info = await get(http, engine, "/engine/info")
    assert info["runtime_config"]["taints"] == ["a", "b", "dynamo.topology/zone=zone-a"]
    status, answer = await post(http, engine, path, {"taints": ["dynamo.topology/zone=z"]})
    assert status == 500
    assert answer == {
        "error": "Handler error",
        "message": "Python callback failed: ValueError: taint 'dynamo.topology/zone=z' uses "
        "reserved prefix 'dynamo.topology/'",
    }
    status, answer = await post(http, engine, path, {"taints": "x"})
    assert status == 500
    assert answer["message"].endswith("'taints' must be a JSON array of strings")


async def test_published_addresses_can_be_connected_to(start: StartEngine, http) -> None:
    engine = await start(host="0.0.0.0", kv_events="tcp://*:0", role="prefill")
    assert engine.url.startswith("http://127.0.0.1:")
    info = await get(http, engine, "/engine/info")
    assert info["kv_events"][0]["endpoint"].startswith("tcp://127.0.0.1:")
    assert info["bootstrap"] == {"host": "127.0.0.1", "port": engine.engine.port}
    named = await start(host="0.0.0.0", advertise_host="localhost", kv_events="tcp://*:0")
    assert named.url.startswith("http://localhost:")
    info = await get(http, named, "/engine/info")
    assert info["kv_events"][0]["endpoint"].startswith("tcp://localhost:")


async def test_embeddings_use_the_cache_and_depend_on_the_tokens_alone(
    start: StartEngine, http
) -> None:
    engine = await start()
    body = {"model": "demo", "input": [PROMPT, PROMPT[:20]], "dimensions": 5_000}
    status, found = await post(http, engine, "/v1/embeddings", body)
    assert (status, found["error"]["param"]) == (400, "dimensions")
    body["dimensions"] = 300
    status, first = await post(http, engine, "/v1/embeddings", body)
    assert (status, first["usage"]["prompt_tokens"]) == (200, 60)
    status, again = await post(http, engine, "/v1/embeddings", {**body, "input": PROMPT})
    assert again["data"][0]["embedding"] == first["data"][0]["embedding"]
    assert cached_tokens(again) == 32
    await idle(http, engine)


async def test_many_wide_embeddings_are_computed_beside_the_streams(
    start: StartEngine, http
) -> None:
    engine = await start()
    body = {"model": "demo", "input": [[n] for n in range(1, 21)], "dimensions": 4_096}
    status, found = await post(http, engine, "/v1/embeddings", body)
    assert (status, len(found["data"]), len(found["data"][19]["embedding"])) == (200, 20, 4_096)


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "demo", "prompt": "hi", "max_tokens": 4}
ITEMS = {"model": "demo", "input": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True}, "logprobs"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
        (
            "/v1/chat/completions",
            CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_object"}},
            "response_format",
        ),
        ("/v1/chat/completions", CHAT | {"guided_json": {"type": "object"}}, "guided_json"),
        ("/v1/completions", TEXT | {"logprobs": 0}, "logprobs"),
        ("/v1/completions", TEXT | {"echo": True}, "echo"),
        ("/v1/completions", TEXT | {"suffix": "x"}, "suffix"),
        ("/v1/responses", ITEMS | {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("/v1/responses", ITEMS | {"tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", ITEMS | {"tools": [{"type": "web_search"}]}, "input"),
        ("/v1/messages", CHAT | {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("/v1/messages", CHAT | {"thinking": {"type": "enabled"}}, "thinking"),
        ("/v1/messages", CHAT | {"max_tokens": None}, "max_tokens"),
    ],
)
async def test_what_is_not_simulated_is_refused_by_name(
    start: StartEngine, http, path: str, body, field: str
) -> None:
    status, answer = await post(http, await start(), path, body)
    assert status == 400
    assert answer["error"]["message"].startswith(f"{field}: ")
    assert (answer.get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            CHAT
            | {
                "logprobs": False,
                "tool_choice": "auto",
                "response_format": {"type": "text"},
                "logit_bias": None,
            },
        ),
        ("/v1/completions", TEXT | {"logprobs": None, "echo": False, "suffix": ""}),
        ("/v1/responses", ITEMS | {"text": {"format": {"type": "text"}}, "tool_choice": "none"}),
        ("/v1/messages", CHAT | {"tool_choice": {"type": "auto"}}),
    ],
)
async def test_fields_that_ask_for_nothing_are_accepted(
    start: StartEngine, http, path: str, body
) -> None:
    status, answer = await post(http, await start(), path, body)
    assert status == 200, answer


async def test_stop_strings_and_lengths_of_messages(start: StartEngine, http) -> None:
    engine = await start()
    _, whole = await post(http, engine, "/v1/messages", CHAT | {"max_tokens": 30})
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    text = whole["content"][0]["text"]
    word = text.split()[2]
    body = CHAT | {"max_tokens": 30, "stop_sequences": [word]}
    _, cut = await post(http, engine, "/v1/messages", body)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", word)
    assert cut["content"][0]["text"] == text[: text.index(word)]


async def test_min_tokens_make_the_answer_longer(start: StartEngine, http) -> None:
    engine = await start(default_output_tokens=3)
    body = {"model": "demo", "messages": CHAT["messages"], "min_tokens": 9}
    _, answer = await post(http, engine, "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 9
