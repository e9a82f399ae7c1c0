"""Prefill and decode engines of SGLang: both get a request at once and meet in a bootstrap room.

The KV cache goes over Mooncake's TCP transport. The frontend reads roles and the address of the
bootstrap server from the engines.
"""

import random
from collections.abc import Iterator

import httpx
import pytest

from dynctl.serving.engines.flow import REPORT_S
from tests.dynamo.fleet import DynamoFleet
from tests.dynamo.processes import ProcessGroup
from tests.ports import free_port
from tests.sglang.stack import SglangStack
from tests.vllm.conftest import Judge
from tests.vllm.joined import Joined
from tests.vllm.rates import Outcome, ask
from tests.vllm.stack import BLOCK, Engine, Frontend
from tests.vllm.traffic import mixed, words
from tests.waiting import until_now

TRANSFER = ("--disaggregation-transfer-backend", "mooncake")
OVER_TCP = {
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_HOST_IP": "127.0.0.1",
    # Mooncake sends each part of a request's metadata on its own. The decode engine waits for one
    # of them, the room: on a busy machine it reads cached_tokens before they arrive. With this the
    # parts arrive in order.
    "SGLANG_MOONCAKE_SEND_AUX_TCP": "1",
}


@pytest.fixture(scope="module")
def stack() -> Iterator[SglangStack]:
    with SglangStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engines(stack: SglangStack) -> dict[str, Engine]:
    mode, port = "--disaggregation-mode", "--disaggregation-bootstrap-port"
    # Without it a decode engine keeps copies in pinned memory of a GPU's host.
    backup = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    prefill = (mode, "prefill", port, str(free_port()), *TRANSFER)
    made = {
        "prefill": stack.engine("prefill", *prefill, environment=OVER_TCP),
        "decode": stack.engine("decode", mode, "decode", *backup, *TRANSFER, environment=OVER_TCP),
        "alone": stack.engine("alone"),
    }
    stack.wait(*made.values())
    return made


@pytest.fixture(scope="module")
def frontend(stack: SglangStack, engines: dict[str, Engine]) -> Frontend:
    """Nothing is typed but addresses."""
    return stack.frontend(engines["prefill"].spec(), engines["decode"].url + ",name=decode")


def test_a_handed_off_prompt_is_answered_as_by_one_engine(
    frontend: Frontend, engines: dict[str, Engine]
) -> None:
    roles = {row["name"]: (row["role"], row["can_prefill"]) for row in frontend.fleet()["workers"]}
    assert roles == {"prefill": ("prefill", True), "decode": ("decode", False)}
    for seed in range(4):
        prompt = words(random.Random(seed), 60 + 20 * seed)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        alone = engines["alone"].http.post("/v1/completions", json=body).json()
        handed = frontend.send(body).json()
        assert handed["choices"][0]["text"] == alone["choices"][0]["text"]
        assert handed["usage"]["completion_tokens"] == 12


def test_what_the_prefill_engine_reuses(frontend: Frontend, judged: Judge) -> None:
    """The decode engine may be done first: its answer waits a second for the other's usage."""

    def explain(outcome: Outcome) -> str | None:
        waited = outcome.ended - outcome.began >= REPORT_S
        return "usage of the prefill engine too late" if waited and not outcome.reported else None

    outcomes = [ask(frontend, body, hop="prefill") for body in mixed(40)]
    judged("prefill of a hand-off through a bootstrap room", outcomes, explain, least=0.9)


def test_behind_a_dynamo_frontend(stack: SglangStack, engines: dict[str, Engine]) -> None:
    """Its prefill router names the room; the sidecars pass it on to the engines."""
    model = stack.directory / "models" / "llama"
    with DynamoFleet([], model_dir=model, block_size=BLOCK) as fleet:
        group = ProcessGroup(fleet.directory)
        try:
            Joined(group, fleet, engines["prefill"], str(model), "prefill")
            joined = Joined(group, fleet, engines["decode"], str(model), "decode")
            joined.workers(2)
            for seed in range(4):
                prompt = words(random.Random(seed), 50 + 20 * seed)
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
                alone = engines["alone"].http.post("/v1/completions", json=body).json()
                handed = joined.ask(prompt, 12)
                assert handed.body["choices"][0]["text"] == alone["choices"][0]["text"]
        finally:
            group.close()


def test_without_a_prefill_engine_requests_are_refused(
    frontend: Frontend, engines: dict[str, Engine]
) -> None:
    """SGLang's decode engines cannot prefill: they answer 400, as if the request were bad."""
    engines["prefill"].process.kill()

    def refused() -> httpx.Response | None:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        answer = frontend.http.post("/v1/completions", json=body)
        return answer if "cannot prefill" in answer.text else None

    until_now(lambda: refused() is not None, 60)
    answer = refused()
    assert answer is not None
    assert answer.status_code == 503
