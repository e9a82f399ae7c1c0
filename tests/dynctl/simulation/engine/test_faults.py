"""Faults, at start and changed while the engine runs."""

import asyncio
import contextlib
import io
import signal

import aiohttp
import pytest

from dynctl.simulation.engine import process
from dynctl.simulation.engine.config import EngineConfig, EngineConfigError, Faults
from dynctl.simulation.engine.faults import FaultState
from dynctl.simulation.engine.process import RunningEngine, start_engine
from tests.dynctl.simulation.engine.conftest import StartEngine, complete, get, idle, post

PROMPT = list(range(1, 41))
CUT = (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, OSError)
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 20}


async def test_refuse_applies_to_inference_and_health_only(start: StartEngine, http) -> None:
    engine = await start()
    status, answer = await post(http, engine, "/engine/faults", {"refuse": True})
    assert (status, answer["refuse"]) == (200, 503)
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, answer = await post(http, engine, path, BODY)
        assert (status, answer["error"]["code"]) == (503, 503)
    async with http.get(engine.url + "/health") as health:
        assert health.status == 503
        assert health.headers["Retry-After"] == "1"
    await get(http, engine, "/live")
    await post(http, engine, "/engine/faults", {"refuse": 429})
    assert (await post(http, engine, "/v1/completions", BODY))[0] == 429
    await post(http, engine, "/engine/faults", {"refuse": False})
    await complete(http, engine, PROMPT, max_tokens=1)


@pytest.mark.parametrize("stream", [True, False])
async def test_die_mid_stream_cuts_the_connection(start: StartEngine, http, stream: bool) -> None:
    engine = await start(faults=Faults(die_mid_stream_after=3))
    received = bytearray()

    async def read() -> None:
        body = {**BODY, "stream": stream}
        async with http.post(engine.url + "/v1/completions", json=body) as answer:
            async for part in answer.content.iter_any():
                received.extend(part)

    with pytest.raises(CUT):
        await read()
    assert b"[DONE]" not in received
    assert received.count(b"data: ") == (3 if stream else 0)
    load = await get(http, engine, "/load")
    assert load["running"] == load["kv_used_blocks"] == 0


async def test_a_silent_restart_cuts_running_streams(start: StartEngine, http) -> None:
    engine = await start(speedup_ratio=1.0, decode_itl_ms=1.0)
    body = {**BODY, "max_tokens": 8000, "stream": True}

    async def read() -> None:
        async with http.post(engine.url + "/v1/completions", json=body) as answer:
            await answer.content.readline()
            await post(http, engine, "/engine/faults", {"restart_silently": True})
            await answer.read()

    with pytest.raises(CUT):
        await read()
    load = await get(http, engine, "/load")
    assert load["running"] == load["kv_used_blocks"] == load["kv_cached_blocks"] == 0
    await complete(http, engine, PROMPT, max_tokens=1)


async def test_slow_factor_scales_every_duration(start: StartEngine, http) -> None:
    engine = await start(speedup_ratio=1.0, decode_itl_ms=10.0, prefill_tokens_per_s=1000.0)
    timer = engine.engine.timer
    assert timer.step(100, 0) == pytest.approx(0.1)
    assert timer.step(0, 64) == pytest.approx(0.01)
    assert timer.step(100, 1) == pytest.approx(0.11)
    await post(http, engine, "/engine/faults", {"slow_factor": 4})
    assert timer.step(100, 1) == pytest.approx(0.44)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"explode": True}, "unknown fault 'explode'"),
        ({"refuse": "yes"}, "expected an integer"),
        ({"refuse": 200}, "400..599"),
        ({"slow_factor": -1}, "--fault-slow-factor is -1.0"),
        ({"slow_factor": True}, "expected a number"),
        ({"stop_publishing": 1}, "expected true or false"),
        ({"restart_silently": 1}, "restart_silently: expected true or false, got 1"),
    ],
)
async def test_an_invalid_fault_changes_nothing(
    start: StartEngine, http, changes: dict, says: str
) -> None:
    engine = await start()
    before = await get(http, engine, "/engine/faults")
    status, answer = await post(http, engine, "/engine/faults", {"drop_events": 5, **changes})
    assert status == 400
    assert says in answer["error"]["message"]
    assert await get(http, engine, "/engine/faults") == before


def test_dropped_batches_are_counted_down() -> None:
    state = FaultState(Faults(drop_events=2))
    assert [state.take_dropped_batch() for _ in range(3)] == [True, True, False]


def test_a_success_status_is_not_a_refusal() -> None:
    with pytest.raises(EngineConfigError, match="--fault-refuse is 200"):
        Faults(refuse=200)


async def test_load_returns_to_zero_after_a_mix_of_failures(start: StartEngine, http) -> None:
    engine = await start(speedup_ratio=1.0, decode_itl_ms=0.5, total_blocks=64, max_model_len=512)

    async def one(number: int) -> None:
        body = {**BODY, "prompt": [number] * 40, "max_tokens": 60, "stream": number % 2 == 0}
        try:
            async with http.post(engine.url + "/v1/completions", json=body) as answer:
                if number % 5 == 0:
                    await answer.content.readline()
                    return  # hangs up
                await answer.read()
        except (aiohttp.ClientError, OSError):
            pass

    tasks = [asyncio.ensure_future(one(number)) for number in range(40)]
    await asyncio.sleep(0.02)
    await post(http, engine, "/engine/faults", {"die_mid_stream_after": 30})
    await asyncio.sleep(0.02)
    tasks[7].cancel()
    await post(http, engine, "/engine/faults", {"restart_silently": True})
    await asyncio.gather(*tasks, return_exceptions=True)
    await idle(http, engine)


async def test_a_scheduler_that_fails_ends_its_requests_and_the_engine_refuses_more(start, http):
    engine = await start(name="a0")

    def fails(prefill_tokens: int, decodes: int) -> float:
        raise KeyError("a defect")

    engine.engine.timer.step = fails
    body = {"model": "demo", "prompt": "hello"}
    with contextlib.suppress(aiohttp.ClientError):  # the connection is cut
        await post(http, engine, "/v1/completions", body)
    assert engine.engine.failed.is_set()
    status, answer = await post(http, engine, "/v1/completions", body)
    assert (status, "stopped by an internal error" in str(answer)) == (503, True)


async def test_the_process_of_a_failed_engine_ends_with_the_exit_code_of_a_defect(tokenizer):
    out, err = io.StringIO(), io.StringIO()
    started: list[RunningEngine] = []

    async def start_and_fail(config, tokenizer):
        started.append(await start_engine(config, tokenizer))
        asyncio.get_running_loop().call_soon(started[0].engine.failed.set)
        return started[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start_engine", start_and_fail)
        code = await process._serve(EngineConfig(port=0), out, err, tokenizer)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    assert code == 70
