"""The whole control API against any JSON: no 500, and chats still work afterwards."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import build_router
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import (
    SETTINGS,
    ConfigError,
    LoadReported,
    Router,
    RouterConfig,
    WorkerUpserted,
)
from tests.dynctl.serving.fleets import SLOW_HEALTH, chat_body, site
from tests.dynctl.serving.routed import request, worker

NUMBERS = st.sampled_from((1e-320, 5e-324, 1e16, 0.5, -0.0, 1.7e19, 9e18)) | st.sampled_from(
    (0, -1, 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64, 10**30, 10**400, 1e308, -1e308)
)
TEXTS = st.sampled_from(["demo", "a0", "prefill", "decode", "", "\x1b[2J", "x" * 3000, "zone=a"])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
FIELDS = st.sampled_from(
    ["model", "clear", "prompt", "messages", "nvext", "role", "content", "token_ids", "isl_tokens"]
    + ["block_hashes", "sequence_hashes", "constraints", "pins", "allowed_worker_ids", "hops"]
    + [
        "decay_fraction",
        "request_id",
        "stream",
        "cache_salt",
        "lora_name",
        "max_tokens",
        "n",
        "url",
        "name",
    ]
    + ["dp", "block-size", "total-blocks", "max-num-batched-tokens", "domains", "bootstrap"]
    + ["worker_id", "dp_rank", "routing_constraints", "required_taints", "preferred_taints"]
    + ["agent_hints", "osl", "priority", "extra_fields", "annotations", "decode_worker_id"]
    + [name for name in SETTINGS if name.endswith(("threshold", "threshold_frac"))]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=12,
)
#: Objects with the fields that most endpoints need, so that the others are reached.
LIKELY = st.builds(
    lambda more, base: base | more,
    st.dictionaries(FIELDS, JSON, max_size=5),
    st.sampled_from(
        [
            {"model": "demo"},
            {"model": "demo", "prompt": "hello"},
            {"model": "demo", "messages": [{"role": "user", "content": "hello"}]},
            {"model": "demo", "token_ids": [1, 2, 3]},
            {"model": "demo", "sequence_hashes": [1], "isl_tokens": 20},
            {},
        ]
    ),
)
CALLS = [
    ("POST", "/v1/route"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/busy_threshold"),
    ("GET", "/busy_threshold"),
    ("POST", "/v1/workers"),
    ("GET", "/v1/workers"),
    ("GET", "/v1/workers/{word}"),
    ("DELETE", "/v1/workers/no-{word}"),
    ("GET", "/v1/decisions?limit={word}&since={word}"),
    ("GET", "/v1/decisions?domain={word}&worker={word}&preferences=1"),
    ("GET", "/v1/decisions/{word}"),
    ("GET", "/v1/config"),
    ("GET", "/v1/fleet?cards={word}"),
    ("GET", "/v1/view"),
    ("GET", "/v1/models/{word}"),
    ("GET", "/v1/models/{word}/ready"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]
SELECTIONS = [
    ("POST", "/v1/select"),
    ("POST", "/v1/select_and_book"),
    ("POST", "/v1/overlap_scores"),
    ("POST", "/v1/bookings/{word}/decode"),
    ("POST", "/v1/bookings/{word}/first_token"),
    ("POST", "/v1/bookings/{word}/output_block"),
    ("DELETE", "/v1/bookings/{word}?stage={word}&output_tokens={word}"),
    ("GET", "/v1/loads?model={word}"),
]
WORDS = st.sampled_from(["a0", "demo", "0", "-1", "1e308", "9" * 400, "%1b%5B2J", "b1", "..%2f"])
TOKEN = "t0ken"


@pytest.mark.parametrize(("calls", "router"), [(CALLS, False), (SELECTIONS, True)])
def test_any_json_for_any_endpoint(calls, router):
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start() -> tuple[Any, Any]:
            fleet = await stack.enter_async_context(
                site([{"name": "a0"}], api_token=TOKEN, health=SLOW_HEALTH)
            )
            if not router:
                return fleet, fleet.frontend
            worker = f"{fleet.engines['a0'].url},name=a0"
            other = build_router(
                FrontendConfig(
                    port=0, workers=(worker,), model_path=DEMO_MODEL_DIR, api_token=TOKEN,
                    health=SLOW_HEALTH,
                )
            )  # fmt: skip
            await other.start()
            stack.push_async_callback(other.close)
            return fleet, other

        fleet, server = runner.run(start())
        try:

            @given(st.sampled_from(calls), LIKELY | JSON, WORDS)
            @settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
            def check(call: tuple[str, str], body: Any, word: str) -> None:
                method, path = call
                url = server.url + path.replace("{word}", word)

                async def exchange() -> tuple[int, str]:
                    data = json.dumps(body) if method == "POST" else None
                    async with fleet.client.request(
                        method, url, data=data, headers=headers
                    ) as answer:
                        return answer.status, await answer.text()

                status, text = runner.run(exchange())
                # 503: for example a pin or a taint that no worker satisfies.
                assert status < 500 or status in (503, 507, 529), (status, text)
                assert "internal error" not in text

            check()

            async def afterwards() -> None:
                model = {
                    "model": "demo",
                    "clear": list(fleet.service.router.busy.default.to_dict()),
                }
                if not router:
                    status, body, _ = await fleet.post("/busy_threshold", model, headers=headers)
                    assert status == 200, body
                status, body, _ = await fleet.chat()
                assert status == 200, body

            runner.run(afterwards())
        finally:
            runner.run(stack.aclose())


async def test_a_huge_threshold_is_refused_and_chats_go_on():
    async with site([{"name": "a0"}]) as fleet:
        name = "active_prefill_tokens_threshold_frac"
        for value in (1e308, 1e10):
            status, body, _ = await fleet.post("/busy_threshold", {"model": "demo", name: value})
            assert status == 400
            assert "at most" in body["error"]
        assert (await fleet.chat())[0] == 200


@pytest.mark.parametrize("depth", [150, 400, 900, 20_000])
@pytest.mark.usefixtures("no_collection")
async def test_deep_bodies_are_a_400_or_work(depth):
    async with site([{"name": "a0"}]) as fleet:
        deep = "[" * depth + "]" * depth
        for fields in (f'"metadata": {deep}', f'"nvext": {{"x": {deep}}}', f'"tools": [{deep}]'):
            body = json.dumps(chat_body("hi"))[:-1] + f", {fields}}}"
            for path in ("/v1/chat/completions", "/v1/route", "/busy_threshold"):
                async with fleet.client.post(
                    fleet.url(path), data=body, headers={"content-type": "application/json"}
                ) as answer:
                    assert answer.status in (200, 400), (path, await answer.text())
        assert (await fleet.chat())[0] == 200


ANY_NUMBER = NUMBERS | st.floats() | st.integers()


@given(st.dictionaries(st.sampled_from(list(SETTINGS)), ANY_NUMBER, max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_every_accepted_setting_can_be_routed_with(values, data):
    try:
        config = RouterConfig().with_values(values)
    except ConfigError:
        return
    router = Router(config)
    for number in (1, 2):
        assert router.apply(WorkerUpserted(worker(number)), 0.0).ok
    big = data.draw(st.sampled_from([0, 1, 2**53]))
    router.apply(LoadReported(1, 0, active_decode_blocks=big, active_prefill_tokens=big), 0.0)
    router.plan(request(), samples=(0.5, 0.5), detail=True)
