"""One engine with two data-parallel ranks: each rank has a cache, and the frontend chooses one."""

from collections.abc import Iterator

import pytest

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
    engine = stack.engine("ranks", ranks=2)
    stack.wait(engine)
    return engine


def test_two_ranks(stack: Stack, engine: Engine, judged: Judge) -> None:
    frontend = stack.frontend(engine.spec())
    outcomes = ask_all(frontend, mixed(100))
    judged("data parallel 2, one after another", outcomes)
    assert {outcome.rank for outcome in outcomes} == {0, 1}
    outcomes = ask_all(frontend, mixed(60, seed=2), at_once=8)
    judged("data parallel 2, 8 at once", outcomes, computed_meanwhile(outcomes, engine), least=0.5)
