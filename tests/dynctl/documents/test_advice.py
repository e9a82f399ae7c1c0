"""The advice on settings, against the tables of the tuning guide."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.documents.advice import advise
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
