"""The router settings in a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynctl.wire.dynamo.router_settings import MAX_NAMED, CardSettings, read_router_config
from router_core import SETTINGS, RouterConfig

CARDS = json.loads((Path(__file__).parents[3] / "captures" / "card-router-config.json").read_text())


def captured(flag: str) -> CardSettings:
    [card] = [row["router_config"] for row in CARDS if flag in row["flags"]]
    return read_router_config(card)


def changed(read: CardSettings) -> dict[str, Any]:
    return {name: v for name, v in read.values.items() if v != SETTINGS[name].default}


def kv(**values: Any) -> CardSettings:
    return read_router_config({"router_mode": "k_v", "kv_router_config": values})


def test_scale_sync_and_a_threshold():
    read = captured("--router-replica-sync")
    assert changed(read) == {
        "prefill_load_scale": 3.0,
        "router_replica_sync": True,
        "active_decode_blocks_threshold": 0.4,
    }
    assert read.values["router_mode"] == "kv"
    config = RouterConfig().with_values(read.values)
    assert (config.prefill_load_scale, config.active_decode_blocks_threshold) == (3.0, 0.4)


def test_queue_prediction_and_disaggregation():
    read = captured("--router-predicted-ttl-secs")
    assert changed(read) == {
        "decode_active_request_weight": 0.5,
        "router_temperature": 0.5,
        "router_queue_threshold": 2.0,
        "router_queue_policy": "wspt",
        "router_predicted_ttl_secs": 4.0,
        "conditional_disagg_enabled": True,
        "active_prefill_tokens_threshold": 100,
        "active_prefill_tokens_threshold_frac": 1.5,
    }
    # A shared cache is not switched on, so its multiplier changes nothing.
    named = {found.setting for found in read.not_followed}
    assert not any("conditional_disagg" in one for one in named)
    assert "kv_router_config.router_predicted_ttl_secs" in named
    assert "kv_router_config.shared_cache_multiplier" not in named


def test_session_affinity():
    read = captured("--router-session-affinity-ttl-secs")
    assert changed(read) == {}
    assert [str(found) for found in read.not_followed] == [
        "session_affinity_ttl_secs 60: in Dynamo requests of a session stay with their worker, "
        "which only the frontend knows"
    ]


def test_a_mode_of_a_real_card():
    read = captured("power-of-two")
    assert (read.values["router_mode"], read.not_followed) == ("power-of-two", ())


def test_an_unknown_mode():
    read = read_router_config({"router_mode": "sticky"})
    assert "router_mode" not in read.values
    [found] = read.not_followed
    assert (found.setting, found.value) == ("router_mode", "'sticky'")
    assert "expected one of kv, " in found.reason


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("k_v", "kv"),
        ("round_robin", "round-robin"),
        ("random", "random"),
        ("least_loaded", "least-loaded"),
        ("power_of_two_choices", "power-of-two"),
        ("direct", "direct"),
        ("device_aware_weighted", "device-aware-weighted"),
    ],
)
def test_modes(theirs, ours):
    read = read_router_config({"router_mode": theirs})
    assert (read.values["router_mode"], read.not_followed) == (ours, ())


def test_a_missing_key_means_dynamos_default():
    # The card replaces the frontend's own configuration, thresholds too.
    values = read_router_config({"router_mode": "k_v", "load_threshold_config": {}}).values
    assert values["active_decode_blocks_threshold"] is None
    assert values["prefill_load_scale"] == 1.0
    assert values["decode_active_request_weight"] == 0.0


def test_unknown_keys_are_named_at_every_level():
    read = read_router_config(
        {
            "router_mode": "k_v",
            "kv_router_config": {"router_magic": [1], "router_temperature": 0.2},
            "load_threshold_config": {"moon_phase": "full"},
            "policy": {"a": 1},
        }
    )
    assert [(found.setting, found.value) for found in read.not_followed] == [
        ("kv_router_config.router_magic", "an array"),
        ("load_threshold_config.moon_phase", "'full'"),
        ("policy", "an object"),
    ]
    assert all("unknown setting" in found.reason for found in read.not_followed)
    assert changed(read) == {"router_temperature": 0.2}


def test_a_value_out_of_bounds_is_named_and_the_default_stays():
    read = kv(router_temperature=-1.0, host_cache_hit_weight="hot", use_kv_events=None)
    assert changed(read) == {}
    assert [(found.setting, found.reason) for found in read.not_followed] == [
        ("kv_router_config.router_temperature", "expected at least 0, got -1.0"),
        ("kv_router_config.host_cache_hit_weight", "expected float, got 'hot'"),
        ("kv_router_config.use_kv_events", "a value is required, got none"),
    ]


@pytest.mark.parametrize(
    ("key", "quiet", "loud", "reason"),
    [
        ("router_policy_config", None, "policy.yaml", "not built yet"),
        ("shared_cache_type", "none", "hicache", "not built yet"),
        ("router_tracking_hash", "public-xxh3-v1", "keyed-xxh3-v1", "not built yet"),
        ("use_remote_indexer", False, True, "not visible"),
        ("use_kv_events", True, False, "not built yet"),
    ],
)
def test_unsupported_features_are_named_if_they_are_on(key, quiet, loud, reason):
    assert kv(**{key: quiet}).not_followed == ()
    [found] = kv(**{key: loud}).not_followed
    assert found.setting == f"kv_router_config.{key}"
    assert reason in found.reason


@pytest.mark.parametrize(
    ("weight", "scale", "credit"), [(2.5, 2.5, 1.0), (0, 0.0, 0.0), (None, 7.0, 1.0)]
)
def test_the_old_weight_has_precedence_over_the_scale(weight, scale, credit):
    values = kv(overlap_score_weight=weight, prefill_load_scale=7.0).values
    assert (values["prefill_load_scale"], values["overlap_score_credit"]) == (scale, credit)


@pytest.mark.parametrize("mode", [None, 3, ["k_v"], "warp"])
def test_invalid_modes(mode):
    read = read_router_config({"router_mode": mode})
    assert "router_mode" not in read.values
    assert [found.setting for found in read.not_followed] == ["router_mode"]


def test_invalid_sections():
    read = read_router_config(
        {"router_mode": "k_v", "kv_router_config": [], "load_threshold_config": 3}
    )
    assert [str(found) for found in read.not_followed] == [
        "kv_router_config an array: expected an object",
        "load_threshold_config 3: expected an object",
    ]


def test_a_flood_of_unknown_keys_is_bounded():
    read = kv(**{f"{'x' * 500}{i}": "y" * 500 for i in range(1000)})
    assert len(read.not_followed) == MAX_NAMED + 1
    assert read.not_followed[-1].reason == "and 960 more settings"
    assert all(len(str(found)) < 250 for found in read.not_followed)
