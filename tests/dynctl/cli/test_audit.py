"""`dynctl hits --predicted`: the rate, the exit code, and what the table shows."""

from __future__ import annotations

import msgspec
import pytest

from dynctl.documents.audit import CAUSES, AuditRow, add_by_worker, audit_report, since
from dynctl.documents.fleet_load import FleetLoad
from dynctl.screens.audit import audit_screen
from dynctl.screens.canvas import Canvas
from dynctl.sources.client import FrontendClient

GOOD = AuditRow("prefill-a0", 1, "prefill", 8, 8, 256, 256)
BAD = AuditRow("prefill-b0", 2, "prefill", 4, 1, 128, 32, causes={"not_reused": 2, "tokens": 1})


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> list[list[AuditRow]]:
    """What the frontend answers, one reading after the other; the last one again and again."""
    readings = [[GOOD, BAD]]

    def read(_client: FrontendClient) -> FleetLoad:
        found = readings.pop(0) if len(readings) > 1 else readings[0]
        return FleetLoad(1.0, "1", "c", [], audit=found)

    monkeypatch.setattr(FrontendClient, "fleet", read)
    return readings


def test_the_rate_the_worst_worker_first_and_the_causes(dynctl, fleet):
    ran = dynctl("hits", "--predicted", "--frontend", "http://one")
    assert ran.code == 0
    assert "rate     75.0 %  9 of 12 requests as predicted" in ran.out
    lines = ran.out.splitlines()
    table = [line.split() for line in lines if line.startswith("prefill-")]
    assert table[0] == ["prefill-b0", "prefill", "4", "25", "%", "128", "32"]
    assert table[1] == ["prefill-a0", "prefill", "8", "100", "%", "256", "256"]
    assert "cause    not_reused, 2 on prefill-b0: the index has blocks that the engine" in ran.out
    found = dynctl("hits", "--predicted", "--frontend", "http://one", "-o", "json").json
    assert (found["kind"], found["compares"], found["rate"]) == ("AuditReport", "reuse", 0.75)


@pytest.mark.parametrize(("rate", "code"), [("0.75", 0), ("0.8", 1)])
def test_a_rate_below_the_minimum_is_exit_code_1(dynctl, fleet, rate: str, code: int):
    assert (
        dynctl("hits", "--predicted", "--frontend", "http://one", "--min-rate", rate).code == code
    )


def test_an_unknown_rate_does_not_pass(dynctl, fleet):
    fleet[:] = [[]]
    ran = dynctl("hits", "--predicted", "--frontend", "http://one", "--min-rate", "0")
    assert ran.code == 1
    assert "no engine reported reused prompt tokens: vLLM needs" in ran.out
    assert dynctl("hits", "--predicted", "--frontend", "http://one").code == 0


def test_with_a_duration_only_what_happened_in_it_counts(dynctl, fleet):
    later = msgspec.structs.replace(GOOD, requests=10, hits=9, causes={"running": 1})
    fleet[:] = [[GOOD, BAD], [later, BAD]]
    found = dynctl(
        "hits", "--predicted", "--frontend", "http://one", "--for", "0.01", "-o", "json"
    ).json
    assert (found["requests"], found["hits"], found["seconds"]) == (2, 1, 0.01)
    assert found["workers"][0]["causes"] == {"running": 1}


def test_sources_without_traffic_are_refused(dynctl, tmp_path):
    ran = dynctl("hits", "--predicted", "--demo")
    assert ran.code == 2
    assert "routes no requests, so there is nothing to compare" in ran.err
    assert dynctl("hits", "--predicted", "--min-rate", "1.5", "--demo").code == 2


def test_a_log_is_for_a_live_dynamo(dynctl, fleet):
    ran = dynctl("decisions", "compare", "--frontend", "http://one", "--frontend-log", "x")
    assert ran.code == 2
    assert "--frontend-log x: a dynctl frontend does not need a log" in ran.err


def test_each_comparison_names_the_command_of_the_other(dynctl, fleet, monkeypatch):
    ran = dynctl("decisions", "compare", "--frontend", "http://one")
    assert (ran.code, ran.out) == (2, "")
    assert "it compares tokens that engines reuse" in ran.err
    assert ran.err.endswith("use: dynctl hits --predicted\n")
    observed = FleetLoad(1.0, "1", "c", [], audit=[GOOD], compares="choice")
    monkeypatch.setattr(FrontendClient, "fleet", lambda _client: observed)
    ran = dynctl("hits", "--predicted", "--frontend", "http://one")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("use: dynctl decisions compare\n")
    assert dynctl("decisions", "compare", "--frontend", "http://one").code == 0


def test_predictions_take_no_options_of_a_trace(dynctl, fleet):
    ran = dynctl("hits", "--predicted", "--generate", "chat", "--frontend", "http://one")
    assert (ran.code, ran.out) == (2, "")
    assert "--predicted: expected no FILE, --generate, --by or --record beside it" in ran.err
    ran = dynctl("hits", "--min-rate", "0.5", "--frontend", "http://one")
    assert (ran.code, ran.err) == (2, "error: --min-rate needs --predicted\n")


def test_replicas_are_added_and_a_frontend_that_restarted_counts_from_zero():
    assert [row.requests for row in add_by_worker([GOOD, BAD, GOOD])] == [16, 4]
    [row] = since([BAD], [msgspec.structs.replace(BAD, requests=9)])
    assert row == BAD


def test_every_cause_has_a_meaning_and_choices_have_their_reasons():
    row = AuditRow("w", 1, "decode", 3, 1, causes=dict.fromkeys(CAUSES, 1))
    report = audit_report("x", "choice", [row], skipped={"one worker only": 4}, seconds=5.0)
    screen = audit_screen(report, Canvas(80))
    assert "workers predicted, and chosen by the frontends, in 5 s" in screen
    assert "skipped  4: one worker only" in screen
    assert "PREDICTED" not in screen
    assert all(f"cause    {name}, 1 on w: " in screen for name in CAUSES)
    assert max(map(len, screen.splitlines())) <= 80
    empty = audit_screen(audit_report("x", "choice", []), Canvas(80))
    assert "no request was compared; follow longer" in empty
