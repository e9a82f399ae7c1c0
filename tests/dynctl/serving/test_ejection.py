"""When an engine gets no requests, for how long, and how it comes back: the rules, without IO."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynctl.serving.engines.ejection import Ejection, FirstOutputs
from dynctl.serving.routing.config import EjectionLimits

LIMITS = EjectionLimits(failures=3, pause_s=5.0, max_pause_s=40.0)


def ejected(limits: EjectionLimits = LIMITS) -> Ejection:
    found = Ejection(limits)
    assert [found.failed(0.0, "x") for _ in range(limits.failures)][-1]
    return found


def test_failures_in_a_row_eject_and_an_answer_between_them_does_not():
    found = Ejection(LIMITS)
    for _ in range(5):
        assert not found.failed(0.0, "x")
        assert not found.failed(0.0, "x")
        assert not found.answered(0.0)
    assert found.open
    assert [found.failed(0.0, "no output") for _ in range(3)] == [False, False, True]
    assert found.reason() == "ejected for 5 s: 3 requests in a row failed, the last one: no output"


def test_a_silent_engine_is_ejected_at_once():
    found = Ejection(LIMITS)
    assert found.failed(0.0, "no output", silent=True)
    assert found.reason() == "ejected for 5 s: no output"


def test_zero_failures_never_eject():
    found = Ejection(EjectionLimits(failures=0))
    assert not any(found.failed(0.0, "x", silent=True) for _ in range(100))


def test_pauses_double_up_to_the_longest_and_an_answer_ends_the_trial():
    found, now, pauses = ejected(), 0.0, []
    for _ in range(5):
        wait = found.wait_s(now)
        assert wait is not None
        assert not found.tick(now + wait / 2)
        pauses.append(wait)
        now += wait
        assert found.tick(now)
        assert found.reason() is None
        assert found.sent(now)
        assert found.reason() is not None
        assert not found.sent(now)
        assert found.failed(now, "x")
    assert pauses == [5.0, 10.0, 20.0, 40.0, 40.0]
    now += 40.0
    assert found.tick(now)
    assert found.sent(now)
    assert found.answered(now)
    assert found.open
    assert found.reason() is None


@pytest.mark.parametrize(("stayed", "pause"), [(9.0, 10.0), (11.0, 5.0)])
def test_a_worker_that_fails_again_soon_pauses_longer(stayed: float, pause: float):
    found = ejected()
    assert found.tick(5.0)
    assert found.answered(6.0)
    assert found.failed(6.0 + stayed, "x", silent=True)
    assert found.wait_s(6.0 + stayed) == pause


def test_a_trial_without_a_result_is_followed_by_another():
    found = ejected()
    assert found.tick(5.0)
    assert found.sent(6.0)
    assert not found.tick(10.9)
    assert found.tick(11.0)
    assert found.open


class Machine(RuleBasedStateMachine):
    """Any order of calls: it always comes back, and never gets two requests on trial."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.found = Ejection(LIMITS)

    @rule(seconds=st.floats(0, 50))
    def later(self, seconds: float) -> None:
        self.now += seconds
        self.found.tick(self.now)

    @rule(silent=st.booleans())
    def failed(self, silent: bool) -> None:
        if self.found.failed(self.now, "x", silent=silent):
            assert not self.found.open

    @rule()
    def answered(self) -> None:
        self.found.answered(self.now)
        assert self.found.state == "in"

    @rule()
    def sent(self) -> None:
        if self.found.sent(self.now):
            assert not self.found.open

    @invariant()
    def comes_back_within_the_longest_pause(self) -> None:
        wait = self.found.wait_s(self.now)
        assert self.found.open == (self.found.reason() is None)
        assert self.found.open == (wait is None)
        assert wait is None or 0 <= wait <= LIMITS.max_pause_s


TestEjection = Machine.TestCase


def test_the_time_out_is_the_longest_one_until_something_is_measured():
    found = FirstOutputs(300.0)
    assert found.timeout_s("m", 10) == 300.0
    found.observe("m", 0, 0.1)
    assert found.timeout_s("m", 0) == 10.0
    assert found.timeout_s("m", 100_000) == 110.0
    assert found.timeout_s("other", 0) == 300.0
    found.observe("m", 1000, 8.0)
    assert found.timeout_s("m", 1000) == 64.0
    for _ in range(1000):
        found.observe("m", 0, 0.1)
    assert found.timeout_s("m", 0) == 10.0
    assert FirstOutputs(300.0, 2.0).timeout_s("m", 0) == 2.0


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100)), min_size=1, max_size=20),
    st.integers(0, 10**6),
)
def test_a_request_like_the_last_one_is_never_timed_out(seen, more):
    found = FirstOutputs(10**9)
    for tokens, seconds in seen:
        found.observe("m", tokens, seconds)
    tokens, seconds = seen[-1]
    assert found.timeout_s("m", tokens) >= seconds
    assert found.timeout_s("m", tokens + more) >= found.timeout_s("m", tokens)
