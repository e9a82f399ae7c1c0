"""The advice on settings, against the tables of the tuning guide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.documents.advice import AdvisedSetting, ModelAdvice, advise, try_advice
from dynctl.documents.route_result import (
    CandidateRow,
    DecisionResult,
    Ref,
    RouteResult,
    Term,
    Winner,
)
from dynctl.wire.dynamo.frontend_metrics import Lengths, read_lengths
from router_core import PRESETS, SETTINGS, preset

CAPTURED = Path(__file__).parents[2] / "captures" / "metrics-frontend-agg.txt"


@pytest.mark.seed("smart-routing-guide-0.9: tuning: TTFT")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: overlap weight: prefill-heavy")
def test_long_prompts_with_short_outputs_are_prefill_heavy() -> None:
    [one] = advise({"m": Lengths(10, 2_001.0, 199.0)}, {"prefill_load_scale": 1.0})
    assert (one.workload, one.preset, one.requests) == ("prefill-heavy", "ttft", 10)
    rows = {row.name: (row.low, row.high) for row in one.settings}
    assert rows == {
        "prefill_load_scale": (1.5, 2.0),
        "active_decode_blocks_threshold": (0.7, 0.7),
        "active_prefill_tokens_threshold": (500, 500),
        "router_temperature": (0.0, 0.1),
    }
    assert "2,001" in one.why
    assert not any(row.fits for row in one.settings)


@pytest.mark.seed("smart-routing-guide-0.9: tuning: throughput")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: overlap weight: decode-heavy")
def test_short_prompts_with_long_outputs_are_decode_heavy() -> None:
    [one] = advise({"m": Lengths(10, 499.0, 1_001.0)}, {})
    assert (one.workload, one.preset) == ("decode-heavy", "throughput")
    rows = {row.name: (row.low, row.high) for row in one.settings}
    assert rows == {
        "prefill_load_scale": (0.5, 0.8),
        "active_decode_blocks_threshold": (0.95, 0.95),
        "active_prefill_tokens_threshold": (2000, 2000),
        "router_temperature": (0.3, 0.5),
    }


@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_KV_OVERLAP_SCORE_WEIGHT")
@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_ROUTER_TEMPERATURE")
@pytest.mark.seed("smart-routing-guide-0.9: thresholds: DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD")
@pytest.mark.seed("smart-routing-guide-0.9: thresholds: DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD")
@pytest.mark.parametrize("lengths", [(2_000.0, 199.0), (2_001.0, 200.0), (500.0, 1_001.0)])
def test_other_lengths_get_the_general_values(lengths: tuple[float, float]) -> None:
    [one] = advise({"m": Lengths(10, *lengths)}, {"active_prefill_tokens_threshold": 10_000})
    assert (one.workload, one.preset) == ("mixed", None)
    assert [(row.low, row.high) for row in one.settings] == [
        (1.5, 1.5),
        (0.85, 0.85),
        (10_000, 10_000),
        (0.1, 0.1),
    ]
    assert [row.fits for row in one.settings] == [False, False, True, False]


@pytest.mark.seed("smart-routing-guide-0.9: tuning: TTFT")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: throughput")
@pytest.mark.parametrize(("name", "lengths"), [("ttft", (4e3, 90.0)), ("throughput", (90.0, 4e3))])
def test_the_presets_have_the_values_of_the_guide(name: str, lengths: tuple[float, float]) -> None:
    config = preset(name)
    values = {one: getattr(config, one) for one in SETTINGS}
    [one] = advise({"m": Lengths(1, *lengths)}, values)
    assert one.preset == name
    assert set(PRESETS[name]) == {row.name for row in one.settings}
    assert all(row.fits for row in one.settings)


def test_what_is_not_known_is_unknown() -> None:
    for lengths in (None, {}, {"m": Lengths(3, 10.0, None)}, {"m": Lengths(3, None, 10.0)}):
        [one] = advise(lengths, {})
        assert one.workload == "unknown"
        assert one.why
        assert one.settings == []


def test_lengths_of_frontends_are_added_by_model() -> None:
    captured = CAPTURED.read_bytes()
    [(model, one)] = read_lengths([captured]).items()
    assert (model, one.requests) == ("tiny", 2)
    assert one.input_tokens is not None
    assert 210 < one.input_tokens <= 430, "its bucket"
    twice = read_lengths([captured, captured])["tiny"]
    assert twice.requests == 2 * one.requests
    assert (twice.input_tokens, twice.output_tokens) == (one.input_tokens, one.output_tokens)
    assert read_lengths([]) == {}


@given(st.binary(max_size=80), st.sampled_from(["1e999", "nan", "-1", "x", "3"]))
def test_broken_numbers_are_left_out(junk: bytes, number: str) -> None:
    row = f'dynamo_frontend_input_sequence_tokens_sum{{model="m"}} {number}\n'
    count = 'dynamo_frontend_input_sequence_tokens_count{model="m"} 1\n'
    try:
        found = read_lengths([(row + count).encode()])
    except ValueError:  # WireError: not in the format at all
        return
    assert found["m"].input_tokens == (3.0 if number == "3" else 0.0)


# -- tried on recorded decisions -------------------------------------------------------------------


def decided(
    tokens: Sequence[int],
    *,
    model: str = "m",
    cached: Sequence[int] = (0, 0),
    stage: str = "aggregated",
) -> RouteResult:
    """A decision between two workers with these active prefill tokens; the cheapest won."""
    rows = []
    for name, busy, held in zip(("a", "b"), tokens, cached, strict=True):
        prefill = (busy + 2_500) / 16 - held
        load = 10.0 if name == "b" else 0.0
        rows.append(
            CandidateRow(
                name,
                ord(name),
                prefill + load,
                overlap_blocks=held,
                prefill_blocks=prefill,
                decode_blocks=load,
                active_prefill_tokens=busy,
                terms={"prefill_blocks": prefill, "decode_blocks": load},
            )
        )
    best = min(rows, key=lambda row: row.cost)
    winner = Ref(best.worker, best.worker_id)
    terms = [Term("prefill_blocks", "blocks", 1.0), Term("decode_blocks", "blocks", 1.0)]
    hop = DecisionResult("1", stage, "kv", "selected", winner=winner, terms=terms, candidates=rows)
    return RouteResult(model, "kv", 2_500, 16, 156, Winner(None, winner), None, hop)


def rows_of(advice: ModelAdvice) -> dict[str, AdvisedSetting]:
    return {row.name: row for row in advice.settings}


PREFILL_HEAVY = {"m": Lengths(12, 2_500.0, 20.0)}
VALUES = {"prefill_load_scale": 1.0, "router_temperature": 0.0}
BLOCKS = {"a": 10_000, "b": 10_000}


def test_a_threshold_that_refuses_recorded_requests_is_not_advised() -> None:
    [guide] = advise(PREFILL_HEAVY, VALUES)
    recorded = [decided((0, 0)), decided((2_500, 0)), *([decided((2_500, 2_500))] * 10)]
    found = try_advice(guide, recorded, BLOCKS)
    row = rows_of(found)["active_prefill_tokens_threshold"]
    assert (row.advised, row.refused, row.tried) == (None, 10, 12)
    assert found.preset is None
    assert "would have refused 10 of 12" in found.not_preset
    assert "ttft" in found.not_preset


def test_a_threshold_below_one_prompt_is_not_advised_to_an_idle_fleet() -> None:
    [guide] = advise(PREFILL_HEAVY, VALUES)
    found = try_advice(guide, [decided((0, 0))] * 5, BLOCKS)
    row = rows_of(found)["active_prefill_tokens_threshold"]
    assert (row.advised, row.refused) == (None, 0)
    assert "2,500 tokens" in row.result
    assert found.preset is None


def test_a_weight_is_advised_where_it_changes_recorded_choices_and_only_there() -> None:
    [guide] = advise(PREFILL_HEAVY, VALUES)
    near = decided((0, 0), cached=(0, 8))
    changed = rows_of(try_advice(guide, [near, near, decided((0, 0))], BLOCKS))[
        "prefill_load_scale"
    ]
    assert (changed.advised, changed.changed, changed.tried) == (1.5, 2, 3)
    assert (changed.tokens, "+256 cached tokens" in changed.result) == (256, True)
    same = rows_of(try_advice(guide, [decided((0, 0))] * 3, BLOCKS))["prefill_load_scale"]
    assert (same.advised, same.changed, same.idle) == (None, 0, True)


@pytest.mark.parametrize("decisions", [None, [], [decided((0, 0), model="other")]])
def test_without_recorded_decisions_nothing_is_advised(decisions: list[RouteResult] | None) -> None:
    [guide] = advise(PREFILL_HEAVY, VALUES)
    found = try_advice(guide, decisions, {})
    assert [row.advised for row in found.settings] == [None] * 4
    assert all("not tried" in row.result for row in found.settings if not row.fits)
    assert (found.preset, "not tried" in found.not_preset) == (None, True)


def test_a_preset_whose_values_help_and_refuse_nothing_is_recommended() -> None:
    [guide] = advise({"m": Lengths(12, 90.0, 4_000.0)}, {"prefill_load_scale": 1.0})
    found = try_advice(guide, [decided((500, 0))] * 3, BLOCKS)
    assert (found.preset, found.not_preset) == ("throughput", "")
    assert all(row.refused == 0 for row in found.settings)


def test_a_temperature_changes_no_choice_between_equal_costs() -> None:
    [guide] = advise({"m": Lengths(12, 900.0, 90.0)}, VALUES)
    tie = decided((0, 160))
    rows = (
        [msgspec.structs.replace(row, cost=7.0) for row in tie.decode.candidates]
        if tie.decode
        else []
    )
    assert tie.decode is not None
    tie = msgspec.structs.replace(tie, decode=msgspec.structs.replace(tie.decode, candidates=rows))
    row = rows_of(try_advice(guide, [tie] * 3, BLOCKS))["router_temperature"]
    assert (row.advised, row.changed, row.idle) == (None, 0, True)
