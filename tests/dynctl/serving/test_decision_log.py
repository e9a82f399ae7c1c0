"""Golden log lines: the 0.9 guide's own, and those captured from Dynamo 1.6.1."""

import io
import json
import logging

import pytest

from dynctl.serving.records.decision_log import REFUSALS_A_SECOND, DecisionLog, lines
from dynctl.serving.telemetry.log_format import LOGGERS, TextFormatter, configure_logging
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import Decision, ModelRuntimeConfig, Role, Worker, constraints
from tests.dynctl.serving.routed import request, router, store, worker
from tests.router_core.test_pairs import BEST, WEIGHT, place, with_table

A, B = 7587893399646425890, 7587893399646425892
P0, P1, D = 7587893399646425930, 7587893399646425934, 7587893399646425936


def written(decision: Decision | None, *, tree_size: int = 0, old: bool = True) -> list[str]:
    assert decision is not None
    return lines(decision, every=True, old=old, tree_size=lambda ref: tree_size)


@pytest.mark.seed("smart-routing-guide-0.9: cost: log lines")
def test_seed_aggregated_cold_start_34_tokens():
    made = router(worker(A), worker(B), prefill_load_scale=1.5)
    plan = made.plan(request(range(34)), samples=(0.9, 0.0))
    assert written(plan.decode) == [
        f"Formula for worker_id={A} dp_rank=0 with 0 cached blocks: 5.188 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 2.125 + 2.000",
        f"Formula for worker_id={B} dp_rank=0 with 0 cached blocks: 5.188 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 2.125 + 2.000",
        f"Selected worker: worker_id={B} dp_rank=0, logit: 5.188, cached blocks: 0, tree size: 0,"
        " total blocks: 75379",
    ]


@pytest.mark.seed("smart-routing-guide-0.9: cost: log lines")
def test_seed_aggregated_second_request_36_tokens_one_block_cached():
    made = router(worker(A), worker(B), prefill_load_scale=1.5)
    store(made, B, range(16))
    plan = made.plan(request(range(36)))
    assert written(plan.decode, tree_size=8) == [
        f"Formula for worker_id={A} dp_rank=0 with 0 cached blocks: 5.375 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 2.250 + 2.000",
        f"Formula for worker_id={B} dp_rank=0 with 1 cached blocks: 3.875 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 1.250 + 2.000",
        f"Selected worker: worker_id={B} dp_rank=0, logit: 3.875, cached blocks: 1, tree size: 8,"
        " total blocks: 75379",
    ]


@pytest.mark.seed("smart-routing-guide-0.9: cost: log lines")
def test_seed_disaggregated_44_tokens():
    made = router(
        worker(P0, "prefill"),
        worker(P1, "prefill"),
        worker(D, "decode"),
        prefill_load_scale=1.5,
    )
    plan = made.plan(request(range(44)))
    assert written(plan.prefill) == [
        f"Formula for worker_id={P0} dp_rank=0 with 0 cached blocks: 4.125 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 2.750 + 0.000",
        f"Formula for worker_id={P1} dp_rank=0 with 0 cached blocks: 4.125 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 2.750 + 0.000",
        f"Selected worker: worker_id={P0} dp_rank=0, logit: 4.125, cached blocks: 0, tree size: 0,"
        " total blocks: 75379",
    ]
    assert written(plan.decode, tree_size=9) == [
        f"Formula for worker_id={D} dp_rank=0 with 0 cached blocks: 2.000 = 0.0 * prefill_blocks"
        " + decode_blocks = 0.0 * 2.750 + 2.000",
        f"Selected worker: worker_id={D} dp_rank=0, logit: 2.000, cached blocks: 0, tree size: 0,"
        " total blocks: 75379",
    ]


@pytest.mark.seed("smart-routing-guide-0.9: cost: log lines")
def test_seed_disaggregated_40_tokens_one_block_cached():
    made = router(
        worker(P0, "prefill"),
        worker(P1, "prefill"),
        worker(D, "decode"),
        prefill_load_scale=1.5,
    )
    store(made, P0, range(16))
    plan = made.plan(request(range(40)))
    assert written(plan.prefill, tree_size=2) == [
        f"Formula for worker_id={P0} dp_rank=0 with 1 cached blocks: 2.250 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 1.500 + 0.000",
        f"Formula for worker_id={P1} dp_rank=0 with 0 cached blocks: 3.750 = 1.5 * prefill_blocks"
        " + decode_blocks = 1.5 * 2.500 + 0.000",
        f"Selected worker: worker_id={P0} dp_rank=0, logit: 2.250, cached blocks: 1, tree size: 2,"
        " total blocks: 75379",
    ]


def test_1_6_lines_as_captured():
    """log-fe-disagg-required.txt, the request of 113 tokens (see captures of Dynamo 1.6.1)."""
    prefill, decode = 2324035517153284967, 2324035517153284965
    made = router(worker(prefill, "prefill", total=128), worker(decode, "decode", total=128))
    request_id = "899b8ab9-f00b-40e2-8a9a-376de7f54274"
    plan = made.plan(request(range(113), request_id))
    assert plan.prefill is not None
    assert plan.decode is not None
    assert lines(plan.prefill, every=False, old=False) == [
        f'Selected worker router_mode="kv" request_id="{request_id}" worker_id={prefill}'
        " worker_type=prefill dp_rank=0 logit=7.0625 effective_cached_blocks=0.0"
        " host_pinned_blocks=0 disk_blocks=0 total_kv_blocks=Some(128)"
    ]
    assert lines(plan.decode, every=False, old=False) == [
        f'Selected worker router_mode="kv" request_id="{request_id}" worker_id={decode}'
        " worker_type=decode dp_rank=0 logit=7.0 host_pinned_blocks=0 disk_blocks=0"
    ]


def test_all_logs_every_candidate_before_the_winner():
    made = router(worker(1), worker(2), worker(3))
    plan = made.plan(request())
    assert [line.split()[0] for line in written(plan.decode, old=False)] == [
        "Candidate",
        "Candidate",
        "Candidate",
        "Selected",
    ]


def test_other_modes_have_no_formula_under_0_9():
    made = router(worker(1), worker(2), router_mode="round-robin")
    found = written(made.plan(request()).decode)
    assert not [line for line in found if line.startswith("Formula")]
    assert 'router_mode="round-robin"' in found[-1]


def test_what_0_9_did_not_have_is_said_after_its_line():
    card = ModelRuntimeConfig(taints=frozenset({"gpu=h100"}))
    made = router(Worker(1, "w", "tiny", Role.AGGREGATED, runtime_config=card))
    wanted = constraints((), {"gpu=h100": 1.0})
    line = written(made.plan(request(constraints=wanted)).decode)[0]
    assert line.endswith("1.0 * 2.125 + 2.000, times 0.4669 for preferred taints")


def test_distances_and_the_next_hop_follow_too():
    made = with_table(
        router(
            place(1, "p", "prefill", "a", "1"),
            place(2, "d", "decode", "a", "1"),
            **WEIGHT,
            **BEST,
        )
    )
    plan = made.plan(request())
    assert written(plan.prefill)[0].endswith("1.0 * 2.125 + 0.000, plus 3.750 for the next hop")
    assert written(plan.decode)[0].endswith("+ 2.000 + 50.0 * 0.035000 transfer seconds")
    assert written(plan.prefill, old=False)[0].endswith("next_hop=3.75 effective_cached_blocks=0.0")
    assert "transfer=0.035 transfer_weight=50" in written(plan.decode, old=False)[0]


def test_a_weight_that_one_decimal_cannot_say_is_said_whole():
    made = router(worker(1), prefill_load_scale=0.25)
    assert (
        "0.25 * prefill_blocks + decode_blocks = 0.25 * 2.125"
        in written(made.plan(request()).decode)[0]
    )


@pytest.fixture
def log():
    stream = io.StringIO()
    logger = logging.Logger("dynctl.decisions", logging.INFO)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    logger.addHandler(handler)
    return logger, stream


def test_off_is_silent_about_winners_and_not_about_refusals(log):
    logger, stream = log
    writer = DecisionLog("off", logger=logger)
    made = router(worker(1))
    plan = made.plan(request())
    record = record_of(plan.id)
    writer.on_hop(plan.final, request(), record)
    writer.on_decision(plan, request(), record)
    assert stream.getvalue() == ""
    refused = made.plan(request(constraints=constraints(["gpu=b200"])))
    writer.on_decision(refused, request(), record)
    line = stream.getvalue()
    assert (
        " WARN dynctl.decisions{decision=r1 stage=aggregated outcome=no_eligible_worker}:" in line
    )
    assert "Refused: 0/1 workers eligible: 1 missing taint gpu=b200" in line


def test_winner_writes_one_line_a_hop_with_the_decision_id(log):
    logger, stream = log
    writer = DecisionLog("winner", "dynamo-0.9", tree_size=lambda ref: 3, logger=logger)
    plan = router(worker(1, total=10)).plan(request())
    writer.on_hop(plan.final, request(), record_of(plan.id))
    assert stream.getvalue().endswith(
        "Z  INFO dynctl.decisions{decision=r1}: Selected worker: worker_id=1 dp_rank=0,"
        " logit: 4.125, cached blocks: 0, tree size: 3, total blocks: 10\n"
    )


def test_a_storm_of_refusals_is_counted_not_written(log):
    logger, stream = log
    writer = DecisionLog("off", logger=logger)
    refusal = router().plan(request()).final
    for _ in range(REFUSALS_A_SECOND + 30):
        writer.refusal(refusal, 100.5)
    assert stream.getvalue().count("Refused:") == REFUSALS_A_SECOND
    writer.refusal(refusal, 101.0)
    assert "30 more requests were refused or failed and not logged" in stream.getvalue()
    assert stream.getvalue().count("Refused:") == REFUSALS_A_SECOND + 1


def test_an_outage_that_is_a_condition_is_not_written_for_each_request(log):
    logger, stream = log
    code = None
    writer = DecisionLog("off", logger=logger, outage=lambda: code)
    refusal = router().plan(request()).final
    code = "REQUEST_PLANE_LOST"
    for tenth in range(200):
        writer.refusal(refusal, 100 + tenth / 10)
    assert stream.getvalue().count("Refused:") == 4
    assert "98 more requests were refused or failed and not logged; condition" in stream.getvalue()
    code = None
    writer.refusal(refusal, 120.0)
    writer.refusal(refusal, 120.1)
    assert stream.getvalue().count("Refused:") == 6


def test_clients_cannot_forge_lines(log):
    logger, stream = log
    evil = "x\n2026-11-21T00:00:00Z  INFO dynctl: all is well"
    made = router(worker(1))
    DecisionLog("winner", logger=logger).hop(made.plan(request(request_id=evil)).final)
    DecisionLog("off", logger=logger).refusal(made.plan(request(model=evil)).final, 1.0)
    found = stream.getvalue()
    assert found.count("\n") == 2
    assert "\\n2026" in found or "\\u000a2026" in found


@pytest.fixture
def loggers():
    """Leaves the process's loggers as they were."""
    known = [logging.getLogger(name) for name in LOGGERS]
    before = [(one, list(one.handlers), one.level, one.propagate) for one in known]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


def test_json_lines_have_the_same_message_and_the_fields(loggers):
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    plan = router(worker(1)).plan(request())
    DecisionLog("winner").hop(plan.final)
    line = json.loads(stream.getvalue())
    assert line["decision"] == "r1"
    assert line["level"] == "info"
    assert line["target"] == "dynctl.decisions"
    assert line["message"].startswith('Selected worker router_mode="kv"')


def test_libraries_speak_the_same_format(loggers):
    first, stream = io.StringIO(), io.StringIO()
    configure_logging("text", "info", first)
    configure_logging("json", "warning", stream)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("aiohttp.server").exception("Error handling request")
    logging.getLogger("dynctl.serving").info("not shown at this level")
    (line,) = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert line["target"] == "aiohttp.server"
    assert line["exception"].endswith("RuntimeError: boom")
    assert first.getvalue() == ""


def test_a_message_without_end_is_cut():
    record = logging.LogRecord("dynctl", logging.INFO, "x.py", 1, "y" * 100_000, None, None)
    line = TextFormatter().format(record)
    assert len(line) < 9_000
    assert line.endswith("yyy... (100,000 characters)")


def test_bad_choices_are_named():
    with pytest.raises(ValueError, match="off, winner, all, got 'some'"):
        DecisionLog("some")
    with pytest.raises(ValueError, match="text, json, got 'xml'"):
        configure_logging("xml")
    with pytest.raises(ValueError, match="debug, info, warning, error, got 'loud'"):
        configure_logging("text", "loud")


def record_of(decision_id: str):
    from dynctl.serving.telemetry.observers import RequestRecord

    return RequestRecord(decision_id, "req", "chat_completions", 0.0, 100.0)


def test_the_line_of_a_draw_has_the_pair_and_that_of_devices_the_budget():
    made = router(worker(A), worker(B), router_mode="power-of-two")
    (line,) = lines(made.plan(request(range(34))).final, every=False, old=False)
    assert line.endswith(f" drawn={A}/0:0,{B}/0:0")
    made = router(worker(A), worker(B), router_mode="device-aware-weighted")
    (line,) = lines(made.plan(request(range(34))).final, every=False, old=False)
    assert line.endswith(
        " next_class=accelerator cpu_requests=0 allowed_cpu=0 accelerator_requests=0"
    )


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
@pytest.mark.parametrize(("level", "written_lines"), [("off", 0), ("winner", 1)])
def test_the_verdict_about_the_prefill_hop_is_logged(caplog, level, written_lines):
    made = router(worker(P0, "prefill"), worker(D, "decode"), conditional_disagg_enabled=True)
    store(made, D, range(32))
    asked = request(range(34), request_id="r1")
    record = RequestRecord("r1", "r1", "chat", 0.0, 0.0, "tiny")
    with caplog.at_level(logging.INFO, "dynctl.decisions"):
        DecisionLog(level).on_decision(made.plan(asked), asked, record)
    assert caplog.messages == [
        'Conditional disagg decision request_id="r1" bypass=true reason=short_prefill: prefill hop '
        f"left out: decode-{D} computes 2 of 34 prompt tokens < 2,048 and 6 % < 70 %"
    ][:written_lines]  # fmt: skip
