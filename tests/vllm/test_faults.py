"""`dynctl test` at a real engine with a fault: it is named."""

import asyncio

from dynctl.experiments.trial import TrialOptions, run_trial
from tests.vllm.stack import Stack
from tests.waiting import patience


def test_an_engine_without_a_prefix_cache() -> None:
    with Stack() as stack:
        engine = stack.engine("without", "--no-enable-prefix-caching")
        stack.wait(engine)
        options = TrialOptions(engine.url, only=("reuse",), timeout=patience(60), duration=600)
        report = asyncio.run(run_trial(options))
    assert {check.code for check in report.checks if check.findings} == {"DYE0401"}, report.checks
