"""Prefill to decode: vLLM's kv_transfer_params and SGLang's bootstrap room, engine to engine."""

import asyncio
from functools import partial

import pytest

from dynctl.simulation.engine.config import Faults
from dynctl.simulation.engine.process import RunningEngine
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
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


async def prefill(http, engine: RunningEngine, **fields) -> dict:
    answer = await complete(
        http, engine, PROMPT, max_tokens=1, kv_transfer_params=TO_DECODE, **fields
    )
    params: dict = answer["kv_transfer_params"]
    return params


async def used(http, engine: RunningEngine) -> int:
    return (await load_of(http, engine, "kv_used_blocks"))[0]


async def test_vllm_hand_off_pulls_and_frees(start: StartEngine, http) -> None:
    one, two = await start(role="prefill"), await start(role="decode")
    params = await prefill(http, one)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert len(params["remote_block_ids"]) == 3
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", one.engine.port)
    assert await used(http, one) == 3

    answer = await complete(http, two, PROMPT, max_tokens=20, kv_transfer_params=params)
    assert await used(http, one) == 0
    assert answer["usage"]["completion_tokens"] == 20
    alone = await complete(http, await start(), PROMPT, max_tokens=20)
    assert answer["choices"] == alone["choices"]
    # The decode engine computed one prompt token itself; the rest was pulled.
    load = await get(http, two, "/load")
    assert load["kv_used_blocks"] == 0
    assert load["kv_cached_blocks"] == 3  # 40 prompt + 19 computed output tokens


async def test_older_vllm_sends_only_block_ids(start: StartEngine, http) -> None:
    one, two = await start(role="prefill"), await start(role="decode", can_prefill=False)
    params = await prefill(http, one)
    del params["remote_request_id"]
    await complete(http, two, PROMPT, max_tokens=2, kv_transfer_params=params)
    assert await used(http, one) == 0


async def test_a_second_pull_finds_nothing(start: StartEngine, http) -> None:
    one = await start(role="prefill")
    two = await start(role="decode", kv_load_failure_policy="fail")
    params = await prefill(http, one)
    await complete(http, two, PROMPT, max_tokens=2, kv_transfer_params=params)
    body = {"model": "demo", "prompt": PROMPT, "kv_transfer_params": params}
    status, answer = await post(http, two, "/v1/completions", body)
    assert status == 500
    assert answer["error"]["type"] == "KvLostError"
    assert "was pulled before" in answer["error"]["message"]
    assert await used(http, two) == 0


async def test_a_stop_string_does_not_lose_the_hand_off(start: StartEngine, http) -> None:
    one, two = await start(role="prefill"), await start(role="decode", can_prefill=False)
    text = (await complete(http, await start(), PROMPT, max_tokens=30))["choices"][0]["text"]
    answer = await complete(
        http, one, PROMPT, max_tokens=30, stop=text[:3], kv_transfer_params=TO_DECODE
    )
    assert answer["choices"][0]["text"] == ""
    await complete(http, two, PROMPT, max_tokens=2, kv_transfer_params=answer["kv_transfer_params"])
    await idle(http, one)


@pytest.mark.parametrize("loss", ["restart", "gone"])
async def test_lost_kv_is_recomputed_or_fails(start: StartEngine, http, loss: str) -> None:
    one = await start(role="prefill")
    recompute = await start(role="decode")
    fail = await start(role="decode", can_prefill=False)
    params = await prefill(http, one)
    if loss == "restart":
        await post(http, one, "/engine/faults", {"restart_silently": True})
    else:
        await one.close()
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": params}
    status, answer = await post(http, fail, "/v1/completions", body)
    assert status == 500
    assert "KV transfer from 127.0.0.1" in answer["error"]["message"]
    answer = await complete(http, recompute, PROMPT, max_tokens=5, kv_transfer_params=params)
    assert answer["usage"]["completion_tokens"] == 5


async def test_unpulled_blocks_are_freed(start: StartEngine, http) -> None:
    engine = await start(role="prefill", kv_hold_timeout_s=0.05)
    await prefill(http, engine)
    await idle(http, engine)
    async with http.get(engine.url + "/metrics") as answer:
        assert "dynctl_engine_expired_handoffs_total 1" in await answer.text()


async def test_only_missing_blocks_are_pulled(start: StartEngine, http) -> None:
    one, two = await start(role="prefill"), await start(role="decode")
    await complete(http, two, PROMPT, max_tokens=1)
    params = await prefill(http, one)
    answer = await complete(http, two, PROMPT, max_tokens=1, kv_transfer_params=params)
    assert cached_tokens(answer) == 32
    assert await used(http, one) == 0


async def test_transfer_time_depends_on_the_domain(start: StartEngine) -> None:
    near = {"topology_domains": {"zone": "a"}, "kv_transfer_domain": "zone"}
    engine = await start(
        role="prefill",
        speedup_ratio=2.0,
        kv_transfer_ms_per_block=10.0,
        kv_transfer_cross_domain_factor=5.0,
        **near,
    )
    timer = engine.engine.timer
    assert timer.kv_transfer(4, {"zone": "a"}) == pytest.approx(0.02)
    assert timer.kv_transfer(4, {"zone": "b"}) == pytest.approx(0.1)
    assert timer.kv_transfer(4, {}) == pytest.approx(0.1)
    engine.engine.faults.update({"slow_factor": 3})
    assert timer.kv_transfer(4, {"zone": "a"}) == pytest.approx(0.06)


@pytest.mark.parametrize("decode_first", [True, False])
async def test_sglang_bootstrap_room(start: StartEngine, http, decode_first: bool) -> None:
    one, two = await start(role="prefill", data_parallel_size=2), await start(role="decode")
    fields = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": one.engine.port,
        "bootstrap_room": 7,
    }

    async def send(engine: RunningEngine) -> dict:
        return await complete(http, engine, PROMPT, max_tokens=12, **fields)

    order = [two, one] if decode_first else [one, two]
    first = asyncio.ensure_future(send(order[0]))
    await eventually(partial(used, http, order[0]))  # then it waits for the other
    assert not first.done()
    if decode_first:  # a prompt whose KV comes from elsewhere is no prefill work here
        assert await load_of(http, two, "active_prefill_tokens", "running") == (0, 1)
    second = await send(order[1])
    answers = {id(order[0]): await first, id(order[1]): second}
    assert answers[id(one)]["usage"]["completion_tokens"] == 1
    assert answers[id(two)]["usage"]["completion_tokens"] == 12
    alone = await complete(http, await start(), PROMPT, max_tokens=12)
    assert answers[id(two)]["choices"] == alone["choices"]
    loads = [await get(http, engine, "/load") for engine in (one, two)]
    assert [load["kv_used_blocks"] for load in loads] == [0, 0]
    # room % dp_size is the rank that computed it
    assert [rank["kv_cached_blocks"] for rank in loads[0]["ranks"]] == [0, 2]


async def test_a_room_is_used_once_at_a_time(start: StartEngine, http) -> None:
    engine = await start(role="prefill")
    body = {"model": "demo", "prompt": PROMPT, "bootstrap_room": 3}
    first = asyncio.ensure_future(post(http, engine, "/v1/completions", body))
    await eventually(partial(used, http, engine))
    status, answer = await post(http, engine, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (409, "bootstrap_room")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await idle(http, engine)  # the client left: blocks and room are free again


async def test_an_unpulled_room_is_an_error(start: StartEngine, http) -> None:
    engine = await start(role="prefill", kv_hold_timeout_s=0.05)
    body = {"model": "demo", "prompt": PROMPT, "bootstrap_room": 3}
    status, answer = await post(http, engine, "/v1/completions", body)
    assert status == 500
    assert "no decode engine pulled bootstrap_room 3" in answer["error"]["message"]
    assert await used(http, engine) == 0


async def test_a_failed_prefill_ends_the_waiting_decode(start: StartEngine, http) -> None:
    slow = Faults(slow_factor=1e6)
    one = await start(role="prefill", speedup_ratio=1.0, faults=slow)
    two = await start(role="decode", kv_load_failure_policy="fail")
    fields = {
        "model": "demo",
        "prompt": PROMPT,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": one.engine.port,
        "bootstrap_room": 5,
    }
    waiting = asyncio.ensure_future(post(http, two, "/v1/completions", fields))
    prefilling = asyncio.ensure_future(post(http, one, "/v1/completions", fields))
    await eventually(partial(used, http, one))
    await eventually(partial(used, http, two))
    await asyncio.sleep(0.05)
    prefilling.cancel()
    await asyncio.gather(prefilling, return_exceptions=True)
    status, answer = await waiting
    assert status == 500
    assert "holds no KV blocks" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("role", "fields", "param"),
    [
        ("decode", {"kv_transfer_params": TO_DECODE}, "kv_transfer_params.do_remote_decode"),
        (
            "prefill",
            {
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "remote_engine_id": "x",
                    "remote_block_ids": [1],
                    "remote_host": "127.0.0.1",
                    "remote_port": 1,
                }
            },
            "kv_transfer_params.do_remote_prefill",
        ),
        ("aggregated", {"bootstrap_room": 1}, "bootstrap_room"),
        ("decode", {"bootstrap_room": 1}, "bootstrap_host"),
        ("decode", {"bootstrap_room": 1, "bootstrap_host": "h"}, "bootstrap_port"),
        ("decode", {"bootstrap_room": -1}, "bootstrap_room"),
        ("decode", {"bootstrap_room": 1, "kv_transfer_params": {}}, "bootstrap_room"),
        (
            "decode",
            {"kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "x"}},
            "kv_transfer_params.remote_host",
        ),
        ("decode", {}, "kv_transfer_params"),
    ],
)
async def test_a_hand_off_at_the_wrong_engine_names_the_field(
    start: StartEngine, http, role: str, fields: dict, param: str
) -> None:
    engine = await start(role=role, can_prefill=False)
    body = {"model": "demo", "prompt": PROMPT, **fields}
    status, answer = await post(http, engine, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert engine.engine.active_requests == 0
