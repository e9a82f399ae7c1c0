"""A small run of `make fuzz` in the tests: all seeds, the whole corpus, some mutants."""

import pytest

from tests.fuzz.decoders import Target, targets
from tests.fuzz.endpoints import fuzz_endpoints
from tests.fuzz.gateways import Grammar, fuzz_gateway
from tests.fuzz.mutator import Mutator
from tests.fuzz.runner import Defect, corpus, feed, run

TARGETS = list(targets())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_seeds_are_valid(target):
    refused = {message: feed(target, message) for message in target.seeds()}
    assert not [outcome for outcome in refused.values() if outcome]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_corpus(target):
    for message in corpus(target.name):
        feed(target, message)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutants(target):
    result = run(target, 300, seed=7)
    assert result.messages == 300


async def test_mutants_to_endpoints():
    answers = await fuzz_endpoints(200, seed=7)
    assert not answers.defects
    assert len(answers.statuses) > 2


async def test_streams_of_a_gateway():
    outcomes = await fuzz_gateway(200, seed=7)
    assert not outcomes.defects
    assert outcomes.ends["routed"] > 20
    assert len(outcomes.ends) > 4


def test_a_seed_gives_the_same_streams():
    first, second = Grammar(3), Grammar(3)
    assert [first.stream() for _ in range(50)] == [second.stream() for _ in range(50)]


def test_a_seed_gives_the_same_mutants():
    seeds = [(b'{"a": [1, 2]}', b"key")]
    first, second = Mutator(seeds, 3), Mutator(seeds, 3)
    assert [next(first) for _ in range(200)] == [next(second) for _ in range(200)]


@pytest.mark.parametrize(
    "fault", [KeyError("x"), RecursionError(), ValueError("x" * 5000), ValueError("\x1b[31m")]
)
def test_an_unexpected_error_is_a_defect(fault):
    def read(_):
        raise fault

    errors = (ValueError,) if type(fault) is ValueError else ()
    target = Target("x", read, lambda: [(b"{}",)], errors)
    with pytest.raises(Defect):
        run(target, 1, seed=1)
