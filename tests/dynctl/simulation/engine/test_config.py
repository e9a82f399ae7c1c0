"""Options are declared once: flags, variables and the config agree."""

from dataclasses import fields

import pytest

from dynctl.simulation.engine.config import (
    OPTIONS,
    EngineConfig,
    EngineConfigError,
    Faults,
    build_config,
    split_endpoint,
)


def test_every_field_but_topology_has_an_option() -> None:
    settings = {option.field for option in OPTIONS if not option.fault}
    by_hand = {f.name for f in fields(EngineConfig)} - settings
    assert by_hand == {
        "faults",
        "topology_domains",
        "kv_transfer_domain",
        "kv_transfer_enforcement",
        "kv_transfer_preferred_weight",
    }
    assert {option.field for option in OPTIONS if option.fault} == {f.name for f in fields(Faults)}
    assert all(option.help.endswith((".", "off.")) for option in OPTIONS)
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)


def test_a_flag_wins_over_a_variable_wins_over_the_default() -> None:
    env = {"DYNCTL_ENGINE_BLOCK_SIZE": "32", "DYNCTL_ENGINE_NAME": "from-env"}
    config = build_config({"name": "from-flag", "fault-drop-events": 3, "lora": ["a"]}, env)
    assert (config.name, config.block_size, config.port) == ("from-flag", 32, 0)
    assert config.faults == Faults(drop_events=3)
    assert config.lora == ("a",)


def test_variables_of_every_type() -> None:
    env = {
        "DYNCTL_ENGINE_CAN_PREFILL": "no",
        "DYNCTL_ENGINE_SPEEDUP_RATIO": "2.5",
        "DYNCTL_ENGINE_LORA": "a,b",
        "DYNCTL_ENGINE_FAULT_STOP_PUBLISHING": "on",
    }
    config = build_config({}, env)
    assert (config.can_prefill, config.speedup_ratio, config.lora) == (False, 2.5, ("a", "b"))
    assert config.faults.stop_publishing


@pytest.mark.parametrize(
    ("given", "env", "says"),
    [
        ({"role": "router"}, {}, "--role is 'router'; expected aggregated or prefill or decode"),
        ({"speedup-ratio": float("nan")}, {}, "--speedup-ratio is nan"),
        ({"name": " "}, {}, "--name is empty"),
        ({"lora": ("demo",)}, {}, "--lora names must differ"),
        ({"nope": 1}, {}, "unknown engine option --nope"),
        ({}, {"DYNCTL_ENGINE_CAN_PREFILL": "maybe"}, "DYNCTL_ENGINE_CAN_PREFILL is 'maybe'"),
        ({}, {"DYNCTL_ENGINE_DECODE_ITL_MS": "x"}, "expected a number"),
    ],
)
def test_errors_name_the_option_and_the_value(given: dict, env: dict, says: str) -> None:
    with pytest.raises(EngineConfigError) as error:
        build_config(given, env)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://host", "tcp://:5", "ipc:///x", "tcp://h:x", "tcp://h:70000"]
)
def test_endpoints_are_checked(endpoint: str) -> None:
    with pytest.raises(EngineConfigError, match="expected"):
        split_endpoint(endpoint)


def test_context_length_fits_the_blocks() -> None:
    assert EngineConfig(total_blocks=10, block_size=16).context_length == 160
    assert EngineConfig().context_length == 8192
    assert EngineConfig(max_model_len=100).context_length == 100
