"""What `serve attach` requests of engines, and what it makes of their answers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from dynctl.adapters.dynamo.request_server import ErrorItem, PlaneRequest
from dynctl.serving.attach.generation import Generation
from dynctl.serving.engines.http_client import Upstream
from dynctl.wire.dynamo.engine_output import EngineOutput
from dynctl.wire.dynamo.engine_request import ReceivedRequest
from dynctl.wire.engine_kinds.sglang import tokens as sglang
from dynctl.wire.engine_kinds.sglang.tokens import SglangReader
from dynctl.wire.engine_kinds.tokens import (
    EngineRefused,
    EngineTarget,
    InvalidOutput,
    UnexpectedAnswer,
    engine_body,
)
from dynctl.wire.engine_kinds.vllm import tokens as vllm
from dynctl.wire.engine_kinds.vllm.tokens import VllmReader
from router_core import Role

VLLM = EngineTarget("http://e:8000", "tiny", vllm.API, context_length=100, adapters=("fine",))
SGLANG = EngineTarget("http://e:8000", "tiny", sglang.API, context_length=100)
BOOTSTRAP = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}


def request(**fields: Any) -> ReceivedRequest:
    return msgspec.convert({"model": "shown", "token_ids": [1, 2, 3], **fields}, ReceivedRequest)


def events(*chunks: Any) -> list[bytes]:
    return [msgspec.json.encode(chunk) for chunk in chunks]


def read(reader: Any, *chunks: Any) -> list[EngineOutput]:
    found = [output for event in events(*chunks) for output in reader.read(event)]
    return [*found, *reader.end()]


# -- requests --------------------------------------------------------------------------------------


def test_vllm_gets_token_ids_and_returns_them():
    url, body = engine_body(request(), VLLM)
    assert url == "http://e:8000/v1/completions"
    assert body == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": 97,  # what the context has left
    }


def test_sampling_and_stop_conditions_are_passed_on():
    _, body = engine_body(
        request(
            stop_conditions={
                "max_tokens": 5,
                "min_tokens": 2,
                "stop": ["the frontend's work"],
                "stop_token_ids": [7],
                "stop_token_ids_hidden": [1, 7],
                "max_thinking_tokens": 3,
            },
            sampling_options={"temperature": 0.5, "top_k": 4, "seed": 9, "n": 2, "min_p": 0.1},
            output_options={"logprobs": 2, "skip_special_tokens": False},
            routing={"cache_salt": "s", "lora_name": "fine"},
        ),
        VLLM,
    )
    assert body["model"] == "fine"
    assert body["stop_token_ids"] == [7, 1]
    assert "stop" not in body
    assert (body["max_tokens"], body["min_tokens"], body["n"], body["seed"]) == (5, 2, 2, 9)
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (2, True)
    assert (body["cache_salt"], body["thinking_token_budget"]) == ("s", 3)


def test_ids_that_end_a_generation_are_ignored_where_it_ignores_its_end():
    stops = {"ignore_eos": True, "stop_token_ids": [7], "stop_token_ids_hidden": [1]}
    _, body = engine_body(request(stop_conditions=stops), VLLM)
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [7])


def test_guided_decoding_becomes_structured_outputs():
    guided = {"json": {"type": "object"}, "regex": None, "backend": "xgrammar"}
    _, body = engine_body(request(sampling_options={"guided_decoding": guided}), VLLM)
    assert body["structured_outputs"] == {"json": {"type": "object"}}
    _, body = engine_body(request(sampling_options={"guided_decoding": guided}), SGLANG)
    assert body["sampling_params"]["json_schema"] == '{"type":"object"}'


def test_sglang_gets_its_own_request():
    url, body = engine_body(
        request(
            stop_conditions={"max_tokens": 5},
            sampling_options={"temperature": 0.5, "seed": 4},
            output_options={"logprobs": 1},
        ),
        SGLANG,
    )
    assert url == "http://e:8000/generate"
    assert body == {
        "input_ids": [1, 2, 3],
        "stream": True,
        "sampling_params": {"max_new_tokens": 5, "temperature": 0.5, "sampling_seed": 4},
        "return_logprob": True,
        "top_logprobs_num": 1,
    }


@pytest.mark.parametrize(
    ("fields", "target", "named"),
    [
        ({"token_ids": []}, VLLM, "no tokens"),
        ({"sampling_options": {"use_beam_search": True}}, VLLM, "beam search"),
        ({"sampling_options": {"best_of": 3}}, VLLM, "best_of is 3"),
        ({"sampling_options": {"n": 100_000}}, VLLM, "n is 100000"),
        ({"sampling_options": {"n": 2}}, SGLANG, "n is 2"),
        ({"output_options": {"prompt_logprobs": 1}}, VLLM, "prompt_logprobs"),
        ({"routing": {"lora_name": "other"}}, VLLM, "adapter 'other'"),
        ({"sampling_options": {"guided_decoding": {"poem": "x"}}}, VLLM, "poem"),
        ({"stop_conditions": {"max_thinking_tokens": 2}}, SGLANG, "max_thinking_tokens"),
        ({"multi_modal_data": {"image_url": [{"Url": "http://x"}]}}, VLLM, "multi_modal_data"),
        ({"multi_modal_data": {"image_url": [{"Url": "http://x"}]}}, SGLANG, "multi_modal_data"),
        ({"multi_modal_uuids": {"image": ["u"]}}, VLLM, "multi_modal_uuids"),
        ({"prompt_embeds": "AAAA"}, VLLM, "prompt_embeds"),
        ({"encoder_result": {"disaggregated_params": 1}}, VLLM, "encoder_result"),
        ({"extra_args": {"sampling_options": {"bad_words": ["x"]}}}, VLLM, "sampling_options"),
        ({"extra_args": {"mm_hashes": [1], "nvext": {}}}, VLLM, "extra_args mm_hashes are"),
        (
            {
                "extra_args": {"reasoning_ended": True},
                "sampling_options": {"guided_decoding": {"regex": "a"}},
            },
            VLLM,
            "reasoning_ended",
        ),
        ({"bootstrap_info": BOOTSTRAP}, VLLM, "bootstrap_info with vLLM"),
        ({"bootstrap_info": BOOTSTRAP}, SGLANG, "disaggregated"),
        ({"prefill_result": {"disaggregated_params": {}}}, SGLANG, "disaggregated"),
        ({}, replace(SGLANG, role=Role.PREFILL), "prefill engines expect one"),
        (
            {"prefill_result": {"disaggregated_params": {}}},
            replace(SGLANG, role=Role.DECODE),
            "decode engines expect one",
        ),
    ],
)
async def test_what_an_engine_cannot_do_is_refused_by_name(
    fields: dict[str, Any], target: EngineTarget, named: str
):
    generation = Generation(cast(Upstream, None), lambda: target)
    asked = cast(PlaneRequest, SimpleNamespace(body=request(**fields), request_id="r"))
    with pytest.raises(ErrorItem, match=named) as refused:
        await anext(generation.handle(asked))
    assert refused.value.kind == "InvalidArgument"


async def test_a_refusal_is_logged_with_its_reason_and_without_the_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = SimpleNamespace(body=request(bootstrap_info=BOOTSTRAP), request_id="r1")
    generation = Generation(cast(Upstream, None), lambda: VLLM)
    with pytest.raises(ErrorItem):
        await anext(generation.handle(cast(PlaneRequest, refused)))
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "request r1 is refused: dynctl serve attach: bootstrap_info with vLLM"


def test_what_does_not_change_the_answer_is_accepted():
    harmless = request(
        multi_modal_data={},
        extra_args={
            "nvext": {"extra_fields": ["timing"]},
            "reasoning_ended": True,
            "mm_hashes": [],
        },
        require_reasoning=True,
        routing={"priority": 3, "expected_output_tokens": 9},
    )
    assert engine_body(harmless, VLLM) == engine_body(request(), VLLM)
    assert engine_body(harmless, SGLANG) == engine_body(request(), SGLANG)


def test_sglang_keeps_caches_of_salts_apart_and_waits_for_the_end_of_reasoning():
    guided = {"guided_decoding": {"regex": "a"}}
    salted = request(routing={"cache_salt": "s"}, require_reasoning=True, sampling_options=guided)
    _, body = engine_body(salted, SGLANG)
    assert (body["extra_key"], body["cache_salt"]) == ("s", "s")
    assert body["require_reasoning"]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_engines_of_sglang_meet_in_the_room_of_the_frontend(role: Role):
    _, body = engine_body(request(bootstrap_info=BOOTSTRAP), replace(SGLANG, role=role))
    assert {name: body[name] for name in BOOTSTRAP} == BOOTSTRAP


async def test_a_prefill_engine_of_sglang_returns_its_room_first():
    """Dynamo's frontend reads it from the first item, and the rest is for the count of tokens."""
    meta = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 1}
    chunk = {"output_ids": [5], "meta_info": {**meta, "finish_reason": {"type": "length"}}}
    whole = msgspec.json.encode(chunk)

    async def read_whole(_limit: int) -> bytes:
        return whole

    async def opened(*_: Any) -> Any:
        return SimpleNamespace(headers={}, read=read_whole, close=lambda: None)

    upstream = cast(Upstream, SimpleNamespace(open=opened))
    generation = Generation(upstream, lambda: replace(SGLANG, role=Role.PREFILL))
    asked = SimpleNamespace(
        body=request(bootstrap_info=BOOTSTRAP), request_id="r", on_stop=lambda stop: None
    )
    items = [one async for one in generation.handle(cast(PlaneRequest, asked))]
    first, tokens, end = [one.data for one in items if one.data is not None]
    assert (first.token_ids, first.disaggregated_params) == ([], BOOTSTRAP)
    assert (tokens.token_ids, end.finish_reason) == ([5], "length")


def test_alternatives_of_sglang_arrive():
    meta = {
        "completion_tokens": 1,
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, 9, None]],
        "output_top_logprobs": [[[-0.5, 9, None], [-2.0, 4, None]]],
    }
    reader = SglangReader(request(output_options={"logprobs": 2}))
    first = read(reader, {"output_ids": [9], "meta_info": meta})[0]
    assert first.top_logprobs is not None
    assert [(one.rank, one.token_id, one.logprob) for one in first.top_logprobs[0]] == [
        (1, 9, -0.5),
        (2, 4, -2.0),
    ]


def test_prefill_and_decode_hand_over_what_the_engines_need():
    prefill = EngineTarget("http://e:1", "tiny", vllm.API, role=Role.PREFILL)
    _, body = engine_body(request(stop_conditions={"max_tokens": 50}), prefill)
    assert (body["stream"], body["max_tokens"]) == (False, 1)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    [end] = read(
        VllmReader(Role.PREFILL),
        {
            "choices": [{"index": 0, "token_ids": [9], "finish_reason": "length"}],
            "kv_transfer_params": {"remote_engine_id": "p"},
        },
    )
    assert end.token_ids == [9]
    assert end.disaggregated_params == {"kv_transfer_params": {"remote_engine_id": "p"}}
    decode = EngineTarget("http://e:1", "tiny", vllm.API, role=Role.DECODE)
    result = {"disaggregated_params": end.disaggregated_params}
    _, body = engine_body(request(prefill_result=result), decode)
    assert body["kv_transfer_params"] == {"remote_engine_id": "p"}


# -- answers ---------------------------------------------------------------------------------------


def test_tokens_of_vllm_arrive_with_their_usage_at_the_end():
    first, second, end = read(
        VllmReader(Role.AGGREGATED),
        {"choices": [{"index": 0, "text": "ignored", "token_ids": [5, 6]}]},
        {"choices": [{"index": 0, "token_ids": [7], "finish_reason": "length"}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        },
    )
    assert (first.token_ids, second.token_ids, end.token_ids) == ([5, 6], [7], [])
    assert end.finish_reason == "length"
    assert end.completion_usage is not None
    assert end.completion_usage.total_tokens == 6
    assert end.completion_usage.prompt_tokens_details is not None
    assert end.completion_usage.prompt_tokens_details.cached_tokens == 2


def test_choices_keep_their_index_and_end_each():
    outputs = read(
        VllmReader(Role.AGGREGATED),
        {"choices": [{"index": 1, "token_ids": [5]}, {"index": 0, "token_ids": [6]}]},
        {"choices": [{"index": 0, "token_ids": [], "finish_reason": "stop"}]},
        {"choices": [{"index": 1, "token_ids": [], "finish_reason": "length"}]},
    )
    assert [(one.index, one.token_ids, one.finish_reason) for one in outputs] == [
        (1, [5], None),
        (0, [6], None),
        (0, [], "stop"),
        (1, [], "length"),
    ]


def test_log_probs_are_named_by_token_id():
    logprobs = {
        "tokens": ["token_id:5"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:9": -0.75, "token_id:5": -0.5}],
    }
    output, _ = read(
        VllmReader(Role.AGGREGATED),
        {"choices": [{"token_ids": [5], "logprobs": logprobs, "finish_reason": "stop"}]},
    )
    assert output.log_probs == [-0.5]
    assert output.top_logprobs is not None
    assert [(top.rank, top.token_id, top.logprob) for top in output.top_logprobs[0]] == [
        (1, 5, -0.5),
        (2, 9, -0.75),
    ]


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_of_sglang_are_new_ones_in_both_of_its_forms(incremental: bool):
    def chunk(ids: list[int], total: int, finish: Any = None) -> dict[str, Any]:
        meta = {"prompt_tokens": 3, "completion_tokens": total, "cached_tokens": 1}
        return {"text": "", "output_ids": ids, "meta_info": {**meta, "finish_reason": finish}}

    finish = {"type": "length", "length": 3}
    if incremental:
        chunks = [chunk([5], 1), chunk([6], 2), chunk([7], 3, finish)]
    else:
        chunks = [chunk([5], 1), chunk([5, 6], 2), chunk([5, 6, 7], 3, finish)]
    *outputs, end = read(SglangReader(request()), *chunks)
    assert [output.token_ids for output in outputs] == [[5], [6], [7]]
    assert end.finish_reason == "length"
    assert end.completion_usage is not None
    assert end.completion_usage.completion_tokens == 3


def test_an_engine_without_token_ids_is_named():
    with pytest.raises(UnexpectedAnswer, match="return_token_ids"):
        read(VllmReader(Role.AGGREGATED), {"choices": [{"index": 0, "text": "words"}]})


@pytest.mark.parametrize("reader", [VllmReader(Role.AGGREGATED), SglangReader(request())])
def test_what_is_no_answer_counts_as_a_failure_of_the_engine(reader: Any):
    for garbage in (b"", b"[]", b'{"choices":3}', b'{"output_ids":"x","choices":"x"}', b"\xff"):
        with pytest.raises((InvalidOutput, UnexpectedAnswer)):
            list(reader.read(garbage))
    with pytest.raises(InvalidOutput, match="without a finish"):
        list(reader.end())


def test_errors_inside_a_stream_end_it_with_their_text():
    with pytest.raises(EngineRefused, match="out of memory"):
        read(VllmReader(Role.AGGREGATED), {"error": {"message": "out of memory"}})
    with pytest.raises(EngineRefused, match="too long"):
        read(SglangReader(request()), {"error": {"message": "too long"}})
