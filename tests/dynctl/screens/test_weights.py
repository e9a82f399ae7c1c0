"""Where a weight or a mode does less than its name promises, the explain screen says so."""

from __future__ import annotations

from typing import Any

import pytest

from router_core import Booked
from tests.golden.fleets import view, worker
from tests.golden.screens import encoders, explained


def loaded(**settings: Any) -> str:
    """Two workers: four running requests on one and one on the other, all of one prompt."""
    workers = [worker(f"w{n}", "aggregated", n + 1) for n in range(2)]
    running = [
        Booked(f"r{n}", "aggregated", workers[n // 4].worker_id, 0, sequence_hashes=(1, 2))
        for n in range(5)
    ]
    pure = {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}
    text = explained(view(workers, running, pure | settings))(200)
    return " ".join(text.split())


@pytest.mark.seed("smart-routing-guide-0.9: tuning: overlap weight: 0")
def test_a_tie_of_unequal_numbers_of_requests_is_explained() -> None:
    why = (
        "They run 1 to 4 requests: a request counts by its blocks and prefill tokens, not by "
        "number (--router-decode-active-request-weight counts the number too)."
    )
    assert why in loaded()
    assert "tie with" not in loaded(decode_active_request_weight=1.0)


@pytest.mark.seed("router-guide: modes: normalized load")
@pytest.mark.parametrize(
    ("busy", "allowed"),
    [(3, "allow 0 (0.188, rounded down as in Dynamo)"), (0, "allow 0 on"), (16, "allow 1 on")],
)
def test_a_share_that_was_rounded_down_is_shown(busy: int, allowed: str) -> None:
    assert allowed in " ".join(explained(encoders(busy=busy))(200).split())
