"""Predicted durations of prefills: the estimate, what is measured, and what requests show of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.base.errors import UsageProblem
from dynctl.cli.config_report import remote_report
from dynctl.documents.config import ConfigDocument
from dynctl.planning.prefill_load import (
    ACCELERATORS,
    Estimate,
    Measured,
    PrefillModel,
    PrefillTimes,
    prefill_model,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.config import config_report
from dynctl.serving.http.server import build_frontend
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.services.router_server import build_router
from dynctl.wire.model_config import ModelShape
from router_core import (
    PredictedPrefill,
    Role,
    Router,
    RouterConfig,
    RoutingRequest,
    WorkerUpserted,
)
from tests.dynctl.serving.fleets import WORDS, site
from tests.dynctl.serving.routed import store, worker
from tests.dynctl.serving.test_router_service import TOKENS, loads, routing
from tests.dynctl.wire.test_model_config import DEEPSEEK_V3, LLAMA_8B
from tests.waiting import until

SHAPE = ModelShape(32, 4096, 128_256, 6_979_321_856, 8192, 65_536)
FP8 = replace(SHAPE, weights="fp8", arithmetic="fp8")
WORKER = worker(1)


# -- the estimate ------------------------------------------------------------------------------


def seconds(tokens: int, cached: int = 0, system: str = "h200_sxm", tp: int = 1) -> float:
    return Estimate(system, SHAPE, tp, "m").seconds(tokens, cached)


def test_the_estimate_is_the_longer_of_computing_and_reading() -> None:
    # 2 * 6.98e9 weights * 8,192 tokens + 2 * 32 layers * 8,192 * 8,192 * 8,193 / 2 pairs, and the
    # output matrix once, at half of 989 TFLOPS.
    operations = 2 * 6_979_321_856 * 8192 + 2 * 32 * 8192 * 8192 * 8193 / 2 + 2 * 4096 * 128_256
    assert seconds(8192) == pytest.approx(operations / (989e12 * 0.5))
    # One token: its weights and the output matrix are read, at 80 % of 4,800 GB/s.
    weights = (6_979_321_856 + 4096 * 128_256) * 2
    assert seconds(1) == pytest.approx(weights / (4.8e12 * 0.8), rel=1e-3)
    # What is cached is read, not computed.
    cached = (weights + 100_000 * 131_072) / (4.8e12 * 0.8)
    assert seconds(1, 100_000) == pytest.approx(cached, rel=1e-3)
    assert seconds(0) == 0.0


def test_faster_arithmetic_and_more_accelerators_are_faster() -> None:
    assert seconds(8192, tp=8) == pytest.approx(seconds(8192) / 8)
    assert Estimate("h200_sxm", FP8, 1, "m").seconds(2048, 0) < seconds(2048) * 0.6
    # The A100 has no FP8 arithmetic: it computes as bf16, and reads half of the bytes.
    assert Estimate("a100_sxm", FP8, 1, "m").seconds(8192, 0) == seconds(8192, system="a100_sxm")
    assert Estimate("a100_sxm", FP8, 1, "m").seconds(1, 0) < seconds(1, system="a100_sxm") * 0.6


@given(
    st.sampled_from(sorted(ACCELERATORS)),
    st.integers(1, 8),
    st.integers(0, 200_000),
    st.integers(0, 200_000),
    st.integers(0, 1000),
)
def test_more_tokens_never_take_less_time(
    system: str, tp: int, tokens: int, cached: int, more: int
) -> None:
    for kind in (SHAPE, FP8, replace(SHAPE, experts=8, active_experts=2, expert_weights=10**9)):
        model = Estimate(system, kind, tp, "m")
        least = model.seconds(tokens, cached)
        assert 0 <= least <= model.seconds(tokens + more, cached)
        assert least <= model.seconds(tokens, cached + more)


def test_every_accelerator_has_a_peak_for_the_formats_and_a_bandwidth() -> None:
    for name, one in ACCELERATORS.items():
        assert 100 <= one.tera["bf16"] <= 3_000, name
        assert 300 <= one.bandwidth <= 10_000, name
        assert all(one.tera[kind] > one.tera["bf16"] for kind in one.tera if kind != "bf16"), name


def configured(tmp_path: Path, **values: object) -> RouterConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    given = {
        "router_prefill_load_model": "aic",
        "ais_backend": "vllm",
        "ais_system": "h200_sxm",
        "ais_model_path": str(tmp_path),
    }
    return RouterConfig().with_values(given | values)


@pytest.mark.seed("router-guide: prefill load: required --aic-backend")
@pytest.mark.seed("router-guide: prefill load: required --aic-system")
@pytest.mark.seed("router-guide: prefill load: required --aic-model-path")
@pytest.mark.seed("router-guide: prefill load: --aic-tp-size")
@pytest.mark.parametrize("name", ["aic", "ais"])
def test_the_settings_make_an_estimate_that_shows_its_numbers(tmp_path: Path, name: str) -> None:
    config = configured(tmp_path, router_prefill_load_model=name, ais_tp_size=2)
    model = prefill_model(config)
    assert isinstance(model, Estimate)
    first, second, third = model.describe()
    assert "2 h200_sxm (989 TFLOPS bf16 at 50 %, 4,800 GB/s at 80 % each" in first
    assert f"{tmp_path.name}: 6.98 billion weights a token (bf16), 32 layers" in second
    assert third.startswith("predicted prefill: 512 tokens ")
    assert re.fullmatch(r"(, )?([\d,]+ tokens [\d.,]+ ms(, )?){4}", third.split(": ", 1)[1])
    predicted = model.predict(WORKER, 512, 64)
    assert predicted is not None
    assert predicted.model == "estimate for h200_sxm, tp 2"
    assert (predicted.tokens, predicted.cached) == (512, 64)
    assert prefill_model(RouterConfig()) is None


@pytest.mark.seed("router-guide: prefill load: standalone router")
def test_frontend_and_router_have_the_model_of_their_flags(tmp_path: Path) -> None:
    config = FrontendConfig(router=configured(tmp_path))
    for process in (build_frontend(config), build_router(config)):
        model = process.service.prefill_model
        assert isinstance(model, Estimate)
        found = model.predict(WORKER, 512, 0)
        assert found is not None
        assert found.model == "estimate for h200_sxm, tp 1"  # tp is 1 by default
    wrong = FrontendConfig(router=configured(tmp_path, ais_system="h200"))
    with pytest.raises(UsageProblem, match="--ais-system h200"):
        build_router(wrong)
    assert build_frontend(FrontendConfig()).service.prefill_model is None


@pytest.mark.seed("router-guide: prefill load: prefix")
@pytest.mark.seed("router-guide: prefill load: effective_isl")
@pytest.mark.seed("router-guide: prefill load: router side only")
async def test_what_is_cached_on_the_chosen_worker_is_not_predicted() -> None:
    async with routing() as (_, service, _, _):
        plain = await _prepared(service)
        before = service.plan(plain.request).final
        service.prefill_model = Fixed()
        store(service.router, 1, range(100, 132))
        decision = service.plan(plain.request).final
        assert decision.predicted is not None
        # Two blocks of 16 tokens are cached; of 34 tokens 2 are left.
        assert (decision.predicted.cached, decision.predicted.tokens) == (32, 2)
        assert before.predicted is None
        booked = service.router.booking(decision, plain.request)
        assert (booked.prefill_tokens, booked.predicted_s) == (2, 0.2)
        # The blocks of the prompt count as before.
        assert len(booked.sequence_hashes) == 2


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"ais_system": "h200"}, "--ais-system h200: unknown accelerator; expected one of a100"),
        ({"ais_model_path": "org/name"}, "--ais-model-path org/name: org/name/config.json does"),
        ({"ais_system": None}, "--router-prefill-load-model aic: --ais-system and"),
    ],
)
def test_a_description_that_cannot_be_used_is_refused(
    tmp_path: Path, values: dict[str, object], named: str
) -> None:
    with pytest.raises(UsageProblem) as caught:
        prefill_model(configured(tmp_path, **values))
    assert named in caught.value.message


def test_a_broken_config_names_file_and_field(tmp_path: Path) -> None:
    config = configured(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V3, "v_head_dim": None}))
    with pytest.raises(UsageProblem, match=r"--ais-model-path .*: v_head_dim: expected 1 to"):
        prefill_model(config)


# -- measured ----------------------------------------------------------------------------------


def learned(pairs: list[tuple[int, float]], before: Estimate | None = None) -> Measured:
    model = Measured(before)
    for tokens, took in pairs:
        model.observe(WORKER, tokens, took)
    return model


def predicted_s(model: Measured, tokens: int) -> float | None:
    found = model.predict(WORKER, tokens, 0)
    return None if found is None else found.seconds


def test_until_enough_is_measured_the_estimate_is_used_or_nothing() -> None:
    pairs = [(100 * n, 0.01 + 0.0001 * 100 * n) for n in range(1, 20)]
    assert predicted_s(learned(pairs), 500) is None
    estimate = Estimate("h200_sxm", SHAPE, 1, "m")
    before = learned(pairs, estimate).predict(WORKER, 500, 0)
    assert before is not None
    assert before.model == "estimate for h200_sxm, tp 1"
    model = learned([*pairs, (2000, 0.21)], estimate)
    after = model.predict(WORKER, 500, 0)
    assert after is not None
    assert after.model == "measured on 20 prefills of aggregated workers of tiny"
    assert after.seconds == pytest.approx(0.06)
    assert "20 prefills of aggregated workers of tiny: 10 ms + 100 ms per 1,000 tokens" in (
        model.describe()
    )
    # Another role of the same model is measured on its own.
    assert model.predict(replace(WORKER, role=Role.PREFILL), 500, 0) == estimate.predict(
        WORKER, 500, 0
    )


def test_one_length_gives_a_proportion() -> None:
    model = learned([(1000, 0.5)] * 30)
    assert predicted_s(model, 1000) == pytest.approx(0.5)
    assert predicted_s(model, 2000) == pytest.approx(1.0)


def test_slow_first_prefills_and_single_outliers_change_little() -> None:
    rng = random.Random(1)
    pairs = [(n, 0.02 + 0.0001 * n) for n in (rng.randrange(100, 8000) for _ in range(200))]
    pairs[0] = (50, 60.0)  # a warm-up
    pairs[5] = (4000, 120.0)
    pairs[100] = (300, 90.0)
    pairs[150] = (5000, 1e-6)
    found = predicted_s(learned(pairs), 4000)
    assert found == pytest.approx(0.42, rel=0.15)


def test_a_lasting_change_is_followed() -> None:
    rng = random.Random(2)
    lengths = [rng.randrange(100, 8000) for _ in range(2200)]
    model = learned([(n, 0.02 + 0.0001 * n) for n in lengths[:200]])
    for n in lengths[200:]:
        model.observe(WORKER, n, 10 * (0.02 + 0.0001 * n))
    assert predicted_s(model, 4000) == pytest.approx(4.2, rel=0.05)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**7),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=80,
    ),
    st.integers(0, 10**7),
)
def test_any_measurement_gives_a_finite_duration(
    pairs: list[tuple[int, float]], tokens: int
) -> None:
    found = predicted_s(learned(pairs), tokens)
    assert found is None or 0.0 <= found < float("inf")


def test_the_number_of_groups_is_bounded() -> None:
    model = Measured()
    for number in range(1000):
        model.observe(replace(WORKER, model=f"m{number}"), 100, 0.1)
    assert len(model._lines) == 256


# -- in a process ------------------------------------------------------------------------------


class Fixed:
    """A model that takes a second for ``pace`` tokens."""

    def __init__(self, pace: int = 10) -> None:
        self.pace = pace
        self.seen: list[tuple[int, float]] = []

    def predict(self, worker, tokens, cached):
        return PredictedPrefill("fixed", tokens, cached, tokens / self.pace)

    def observe(self, worker, tokens, took):
        self.seen.append((tokens, took))

    def describe(self):
        return ["fixed"]


def ended(times: PrefillTimes, model: PrefillModel, tokens: int, sent: float, now: float) -> None:
    """A prefill of ``tokens`` on the only rank."""
    router = Router(RouterConfig())
    assert router.apply(WorkerUpserted(WORKER), 0.0).ok
    request = RoutingRequest("r", WORKER.model, tokens, 16)
    decision = router.plan(request).final
    predicted = PredictedPrefill("m", tokens, 0, 1.0)
    times.ended(model, replace(decision, predicted=predicted), sent, now)


def test_prefills_of_a_rank_run_one_after_the_other() -> None:
    times, model = PrefillTimes(), Fixed()
    ended(times, model, 100, 0.0, 2.0)
    ended(times, model, 300, 1.0, 5.0)  # sent while the first ran: 3 s
    ended(times, model, 50, 9.0, 10.0)  # after a pause: 1 s
    ended(times, model, 70, 9.5, 10.05)  # together with the one before it
    assert model.seen == [(100, 2.0), (300, 3.0)]
    ended(times, model, 10, 20.0, 21.0)
    tokens, took = model.seen[-1]
    assert (len(model.seen), tokens, round(took, 6)) == (3, 120, 1.05)
    ((count, predicted, measured),) = times.rows.values()
    assert (count, predicted, round(measured, 6)) == (5, 5.0, 2 + 3 + 1 + 0.05 + 1)


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.3, 2.0])
def test_what_an_engine_computes_is_learned_under_any_load(pause: float) -> None:
    """An engine that takes 10 ms and 1 ms a token, one prompt after the other."""
    times, model, rng = PrefillTimes(), Measured(), random.Random(4)
    sent = free = 0.0
    for _ in range(100):
        tokens = rng.randrange(20, 500)
        sent += pause * rng.random() * 2
        free = max(sent, free) + 0.01 + 0.001 * tokens
        ended(times, model, tokens, sent, free)
    for tokens in (50, 250, 500):
        assert predicted_s(model, tokens) == pytest.approx(0.01 + 0.001 * tokens, rel=0.1)


@pytest.mark.seed("router-guide: arguments: --router-prefill-load-model")
@pytest.mark.seed("router-guide: prefill load: one hint a request")
async def test_load_falls_everywhere_alike() -> None:
    async with routing() as (client, service, _, clock):
        service.prefill_model = Fixed()
        metrics = Metrics(service, router_id=7)
        body = {"token_ids": TOKENS, "request_id": "r1", "model": "tiny"}
        assert (await client.post("/v1/select_and_book", json=body)).status == 201
        assert await loads(client) == {1: (1, 34, 2), 2: (0, 0, 0)}
        clock.now += 1.7
        assert await loads(client) == {1: (1, 17, 2), 2: (0, 0, 0)}
        (row,) = [one for one in service.workers() if one.worker_id == 1]
        assert row.ranks[0].active_prefill_tokens == 17
        assert row.ranks[0].booked_prefill_tokens == 34
        gauge = next(
            line for line in metrics.render().splitlines()
            if line.startswith("dynamo_frontend_worker_active_prefill_tokens{") and '"1"' in line
        )  # fmt: skip
        assert gauge.endswith(" 17")
        # A decision sees the same.
        request = replace((await _prepared(service)).request, id="r2")
        decision = service.plan(request).final
        rows = {one.worker.worker_id: one for one in decision.rows()}
        assert rows[1].active_prefill_tokens == 17
        assert rows[1].booked_prefill_tokens == 34
        assert decision.predicted is not None
        assert decision.predicted.model == "fixed"
        clock.now += 0.3
        await client.post("/v1/bookings/r1/first_token")
        text = metrics.render()
        assert 'dynctl_prefills_predicted_total{model="tiny",role="aggregated"} 1' in text
        assert 'dynctl_prefill_predicted_seconds_total{model="tiny",role="aggregated"} 3.4' in text
        assert 'dynctl_prefill_measured_seconds_total{model="tiny",role="aggregated"} 2' in text
        # Once only: the end is not another prefill.
        await client.post("/v1/bookings/r1/first_token")
        assert service.prefill_times.rows == {("tiny", "aggregated"): (1, 3.4, 2.0)}


async def _prepared(service: RoutingService):
    from dynctl.serving.routing.prompts import Prompt

    return await service.preparation.prepare("tiny", Prompt(token_ids=tuple(range(100, 134))))


async def test_the_prefill_of_two_hops_is_measured_when_decode_begins() -> None:
    workers = (worker(1, "prefill"), worker(2, "decode"))
    async with routing(*workers) as (client, service, _, clock):
        service.prefill_model = Fixed()
        body = {"token_ids": TOKENS, "request_id": "r1", "hops": "prefill"}
        assert (await client.post("/v1/select_and_book", json=body)).status == 201
        clock.now += 1.5
        assert (await client.post("/v1/bookings/r1/decode")).status == 201
        await client.post("/v1/bookings/r1/first_token")
        assert service.prefill_times.rows == {("tiny", "prefill"): (1, 3.4, 1.5)}


@pytest.mark.seed("router-guide: prefill load: standalone router")
@pytest.mark.parametrize("how", ["end", "stage", "failed"])
async def test_the_end_of_a_prefill_pools_booking_is_that_of_its_prefill(how: str) -> None:
    async with routing(worker(1, "prefill"), worker(2, "prefill")) as (client, service, _, clock):
        service.prefill_model = Fixed()
        body = {"token_ids": TOKENS, "request_id": "r1", "hops": "prefill"}
        answer = await client.post("/v1/select_and_book", json=body)
        assert answer.status == 201
        assert (await answer.json())["decode"] is None
        clock.now += 1.7
        assert sum(row[1] for row in (await loads(client)).values()) == 17
        query = {"end": "", "stage": "?stage=prefill", "failed": "?outcome=error"}[how]
        assert (await client.delete(f"/v1/bookings/r1{query}")).status == 200
        measured = [(n, round(took, 6)) for n, _, took in service.prefill_times.rows.values()]
        assert measured == ([] if how == "failed" else [(1, 1.7)])


async def test_blocks_of_a_booking_weigh_less_towards_the_expected_end() -> None:
    async with routing() as (client, _service, _, _):
        body = {"token_ids": TOKENS, "request_id": "r1", "expected_output_tokens": 64}
        assert (await client.post("/v1/select_and_book", json=body)).status == 201
        seen = []
        for _ in range(5):
            await client.post("/v1/bookings/r1/output_block")
            seen.append((await loads(client))[1][2])
        # 2 prompt blocks and 1 to 5 of the output, times 0.75, 0.5, 0.25, 0 and 0.
        assert seen == [2, 2, 1, 0, 0]
        await client.post("/v1/bookings/r1/output_block", json={"decay_fraction": 1.0})
        assert (await loads(client))[1][2] == 8


@pytest.mark.parametrize("value", [0, -1, "many", 2**32])
async def test_a_wrong_expected_output_is_refused(value: object) -> None:
    async with routing() as (client, _, _, _):
        body = {"token_ids": TOKENS, "expected_output_tokens": value}
        answer = await client.post("/v1/select_and_book", json=body)
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "expected_output_tokens"


async def test_a_frontend_measures_predicts_and_explains() -> None:
    config = RouterConfig().with_values({"router_prefill_load_model": "measured"})
    async with site([{"name": "a"}, {"name": "b"}], router=config) as found:
        for number in range(40):
            status, _, _ = await found.stream(WORDS * (1 + number % 5) + str(number), max_tokens=2)
            assert status == 200
        await until(lambda: sum(row[0] for row in found.service.prefill_times.rows.values()) >= 1)
        status, result, _ = await found.post("/v1/route", {"model": "demo", "prompt": WORDS})
        assert status == 200
        hop = result["decode"]
        assert hop["prefill_load"]["model"].startswith("measured on ")
        assert hop["prefill_load"]["tokens"] + hop["prefill_load"]["cached"] == result["tokens"]
        assert 0 < hop["prefill_load"]["seconds"] < 60
        model = found.service.prefill_model
        assert isinstance(model, Measured)
        _, config_now = await found.get("/v1/config")
        assert config_now["prefill_load"] == model.describe()
        shown = remote_report("x", msgspec.convert(config_now, ConfigDocument))
        assert model.describe()[1] in " ".join(config_report(shown, Canvas(100)).split())
        assert any(" prefills of aggregated workers of " in one for one in model.describe())


async def test_both_hops_of_a_frontend_measure_the_prefill_hop_only() -> None:
    engines = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    config = RouterConfig().with_values({"router_prefill_load_model": "measured"})
    async with site(engines, router=config) as found:
        model = found.service.prefill_model = Fixed()
        for number in range(3):
            status, _, _ = await found.chat(f"{number} {WORDS}", max_tokens=2)
            assert status == 200
        ((key, (count, _, measured)),) = found.service.prefill_times.rows.items()
        assert (key, count) == (("demo", "prefill"), 3)
        assert measured > 0
        assert model.seen
        assert all(tokens > 0 and took > 0 for tokens, took in model.seen)
        status, body, _ = await found.post("/v1/route", {"model": "demo", "prompt": WORDS})
        assert status == 200
        assert body["prefill"]["prefill_load"]["model"] == "fixed"
        assert "prefill_load" not in body["decode"]
        await found.idle()


async def test_a_running_prefill_falls_in_every_answer_of_a_frontend() -> None:
    slow = {"name": "a", "prefill_tokens_per_s": 1.0, "speedup_ratio": 1.0}
    async with site([slow], router=RouterConfig()) as found:
        found.service.prefill_model = Fixed()
        running = asyncio.create_task(found.stream(WORDS * 40, max_tokens=1))
        try:
            await until(lambda: found.service.router.load.decaying)
            started = found.service.router.load.booked_prefill(0)
            await until(lambda: found.service.workers()[0].ranks[0].active_prefill_tokens < started)
            _, listed = await found.get("/v1/workers")
            [rank] = listed["workers"][0]["ranks"]
            assert rank["active_prefill_tokens"] < rank["booked_prefill_tokens"] == started
            body = {"model": "demo", "prompt": "hello"}
            _, result, _ = await found.post("/v1/route", body)
            [row] = result["decode"]["candidates"]
            assert row["active_prefill_tokens"] < row["booked_prefill_tokens"] == started
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await found.idle()


async def test_a_request_leaves_the_queue_when_the_load_has_fallen() -> None:
    slow = {"name": "a", "prefill_tokens_per_s": 1.0, "speedup_ratio": 1.0}
    config = RouterConfig().with_values({"router_queue_threshold": 0.01})  # of 8,192 tokens
    async with site([slow], router=config) as found:
        found.service.prefill_model = Fixed(pace=500)
        queue, load = found.service.router.queue, found.service.router.load
        waiting = []
        try:
            waiting.append(asyncio.create_task(found.stream(WORDS * 40, max_tokens=1)))
            await until(lambda: load.decaying)
            waiting.append(asyncio.create_task(found.stream("hello", max_tokens=1)))
            await until(lambda: len(queue) == 1 or sum(load.requests) == 2)
            # Nothing ends: the time alone admits it.
            await until(lambda: sum(load.requests) == 2)
            assert load.booked_prefill(0) > 500
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await found.idle()


@pytest.mark.parametrize("nvext", [{"agent_hints": {"osl": 64}}, {}])
async def test_blocks_of_a_stream_weigh_less_towards_the_expected_length(
    nvext: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RouterConfig().with_values({"router_track_output_blocks": True})
    async with site([{"name": "a"}], router=config) as found:
        service, seen = found.service, []
        count = service.output_block

        def counted(request_id: str, decay: float | None = None) -> object:
            applied = count(request_id, decay)
            seen.append((decay, found.load()["a"][2]))
            return applied

        monkeypatch.setattr(service, "output_block", counted)
        assert (await found.stream("hello", max_tokens=80, nvext=nvext))[0] == 200
        await found.idle()
        decays, blocks = zip(*seen, strict=True)
        assert len(seen) >= 4
        if nvext:
            assert all(0.0 <= later < one for one, later in pairwise(decays[:3]))
            assert decays[-1] == 0.0
            assert blocks[-1] == 0
        else:
            assert set(decays) == {None}
            assert list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))


async def test_without_a_model_nothing_is_predicted_or_shown() -> None:
    async with site([{"name": "a"}]) as found:
        assert (await found.stream("hello"))[0] == 200
        _, result, _ = await found.post("/v1/route", {"model": "demo", "prompt": "hello"})
        assert "prefill_load" not in result["decode"]
        assert "booked_prefill_tokens" not in json.dumps(result)
        assert found.service.prefill_times.rows == {}
        assert "prefill_load" not in (await found.get("/v1/config"))[1]
