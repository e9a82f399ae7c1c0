"""A real hand-off: the prefill engine writes its cache to a directory, the decode engine reads it.

``ExampleConnector`` is the connector of vLLM that works on CPUs. What the client gets as usage is
the decode engine's, so the prefill engine's reuse is read from its metrics, request by request.
"""

import json
from collections.abc import Iterator

import pytest

from tests.vllm.conftest import Judge
from tests.vllm.rates import ask
from tests.vllm.stack import Engine, Stack
from tests.vllm.traffic import mixed


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engines(stack: Stack) -> list[Engine]:
    def started(name: str, role: str) -> Engine:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": f"{stack.directory}/transfer"},
        }
        return stack.engine(name, "--kv-transfer-config", json.dumps(transfer))

    engines = [started("prefill", "kv_producer"), started("decode", "kv_consumer")]
    stack.wait(*engines)
    return engines


def test_hand_off(stack: Stack, engines: list[Engine], judged: Judge) -> None:
    prefill, decode = engines
    frontend = stack.frontend(prefill.spec(role="prefill"), decode.spec(role="decode"))
    loaded = decode.hit_tokens(external=True)
    outcomes = [ask(frontend, body, hop="prefill", reused=prefill.hit_tokens) for body in mixed(40)]
    judged("prefill of a hand-off", outcomes)
    assert decode.hit_tokens(external=True) > loaded
