"""The requests of a live Dynamo's clients, added up from the counters of its frontends."""

from __future__ import annotations

import pytest

from dynctl.documents.fleet_load import Traffic, rates_between
from dynctl.serving.dynamo.frontend_traffic import FrontendTraffic
from dynctl.sources.thresholds.canary import measure, read_condition
from dynctl.wire.dynamo.frontend_metrics import RequestTotals, read_request_totals

MODEL = 'model="m"'


def body(
    good: int, refused: int = 0, failed: int = 0, gone: int = 0, *, model: str = MODEL
) -> bytes:
    """What a Dynamo frontend exports: half of the good requests had their first token in 0.1 s,
    the others in 1 s, and half of each prompt of 100 tokens was in a cache."""
    kinds = {"": good, "overload": refused, "internal": failed, "cancelled": gone}
    rows = [
        f'dynamo_frontend_requests_total{{endpoint="chat",error_type="{kind}",{model},'
        f'request_type="stream",status="{"error" if kind else "success"}"}} {number}'
        for kind, number in kinds.items()
    ]
    times = {"0.1": good // 2, "1": good, "+Inf": good}
    name = "dynamo_frontend_time_to_first_token_seconds_bucket"
    rows += [f'{name}{{{model},le="{edge}"}} {number}' for edge, number in times.items()]
    rows.append(f"dynamo_frontend_cached_tokens_sum{{{model}}} {good * 50}")
    rows.append(f"dynamo_frontend_input_sequence_tokens_sum{{{model}}} {good * 100}")
    return "\n".join([*rows, ""]).encode()


def totals(*counts: int) -> RequestTotals:
    return read_request_totals(body(*counts))


def test_the_difference_of_two_readings_is_what_clients_got():
    traffic = FrontendTraffic()
    traffic.take("a", totals(1000, 500))
    assert traffic.total == Traffic(), "what was counted before the first reading does not count"
    traffic.take("a", totals(1080, 515, 5, 20))
    found = traffic.total
    assert found == Traffic(120, 5, 15, (0.1, 1.0), (40, 40, 0), 8000, 4000, 20)
    rates = rates_between(Traffic(), found, 10.0)
    assert (rates.per_second, rates.hits) == (12.0, 0.5)
    assert (rates.refused, rates.errors) == (0.15, 0.05), "of the 100 that were not cancelled"
    assert rates.ttft_p50 == pytest.approx(0.1)
    assert rates.ttft_p99 == pytest.approx(0.1 + 0.9 * 0.98)


@pytest.mark.parametrize(
    "text", ["refused>1%", "errors>1%", "hits<1%", "ttft_p50>1s", "ttft_p99>1s"]
)
def test_a_canary_and_top_measure_the_same(text: str):
    before, after = totals(10, 1, 1, 1), totals(110, 21, 8, 40)
    traffic = FrontendTraffic()
    traffic.take("a", before)
    traffic.take("a", after)
    assert traffic.total is not None
    rates = rates_between(Traffic(), traffic.total, 1.0)
    field = text.partition(">")[0].partition("<")[0]
    assert measure(read_condition(text), before, after).value == getattr(rates, field)


def test_several_frontends_add_up():
    traffic = FrontendTraffic()
    for name in "ab":
        traffic.take(name, totals(100))
    traffic.take("a", totals(104, 1))
    traffic.take("b", totals(106, 2))
    assert traffic.total is not None
    assert (traffic.total.requests, traffic.total.refused) == (13, 3)
    assert traffic.total.ttft == (5, 5, 0)


def test_a_restart_a_new_frontend_and_one_that_left_add_nothing_of_their_own():
    traffic = FrontendTraffic()
    traffic.take("a", totals(100))
    traffic.take("a", totals(3))  # restarted
    assert traffic.total == Traffic()
    traffic.take("a", totals(5))
    traffic.take("b", totals(9000))  # new
    assert traffic.total is not None
    assert traffic.total.requests == 2
    traffic.lost("a")
    traffic.take("a", totals(500))  # what it counted meanwhile has no time
    traffic.take("b", totals(9001))
    assert traffic.total.requests == 3
    traffic.lost("a")
    traffic.lost("b")
    assert traffic.total is None, "no frontend answers, so the rates are unknown"


def test_what_a_frontend_does_not_export_stays_unknown():
    traffic = FrontendTraffic()
    only = b"".join(line + b"\n" for line in body(10).splitlines() if b"requests_total" in line)
    more = only.replace(b" 10\n", b" 14\n")
    traffic.take("a", read_request_totals(only))
    traffic.take("a", read_request_totals(more))
    assert traffic.total is not None
    rates = rates_between(Traffic(), traffic.total, 2.0)
    assert (rates.per_second, rates.ttft_p50, rates.ttft_p99, rates.hits) == (2.0, None, None, None)

    uncounted = b"".join(
        line + b"\n" for line in body(10).splitlines() if b"requests_total" not in line
    )
    traffic.take("a", read_request_totals(uncounted))
    assert traffic.total is None, "times of requests without their number"


def test_models_add_up_and_a_failure_without_its_kind_is_an_error():
    found = read_request_totals(body(4) + body(6, model='model="n"'))
    assert found.ended[""] == 10
    assert found.latencies["ttft"] == {0.1: 5, 1.0: 10, float("inf"): 10}
    old = b'dynamo_frontend_requests_total{model="m",status="error"} 3\n'
    assert read_request_totals(old).ended == {"internal": 3}
