"""A hybrid model (Gemma 3): layers with a sliding window beside layers with full attention.

Each kind is a cache group with events of its own; what is reused is what all groups allow.
"""

from collections.abc import Iterator

import pytest

from tests.vllm import every_engine
from tests.vllm.conftest import Judge
from tests.vllm.rates import ask_all, computed_meanwhile
from tests.vllm.stack import Engine, Stack
from tests.vllm.traffic import mixed


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engine(stack: Stack) -> Engine:
    engine = stack.engine("gemma", model="gemma")
    stack.wait(engine)
    return engine


def test_small_requests_prove_it(stack: Stack, engine: Engine) -> None:
    """Windows leave nothing out, but for the second of several prompts with one beginning."""
    frontend = stack.frontend(engine.spec(), model="gemma")
    every_engine.small_requests_prove_the_fleet(
        frontend, {"gemma": engine}, passed=("DYE0405", "DYE0501", "DYE0502")
    )
    stack.stop(frontend)


def test_hybrid_model(stack: Stack, engine: Engine, judged: Judge) -> None:
    frontend = stack.frontend(engine.spec(), model="gemma")
    judged("hybrid model, one after another", ask_all(frontend, mixed(100)))
    outcomes = ask_all(frontend, mixed(60, seed=2), at_once=8)
    judged("hybrid model, 8 at once", outcomes, computed_meanwhile(outcomes, engine), least=0.5)
