"""Flag over environment over preset, remembered sources, old names and warnings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.cli import router_flags
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.settings.router_settings import Resolved, bounds, parse_assignments, resolve
from router_core import PRESETS, SETTINGS, ConfigError, RouterConfig


def test_flag_wins_over_environment_and_environment_over_preset():
    env = {
        "DYN_ROUTER_TEMPERATURE": "0.5",
        "DYN_ROUTER_PREFILL_LOAD_SCALE": "2",
        "DYN_ROUTER_MODE": "kv",
    }
    found = resolve({"--router-temperature": "0.7"}, env, preset_name="dynamo-0.9")
    assert found.config.router_temperature == 0.7
    assert found.sources["router_temperature"] == "flag --router-temperature"
    assert found.config.prefill_load_scale == 2.0
    assert found.sources["prefill_load_scale"] == "env DYN_ROUTER_PREFILL_LOAD_SCALE"
    assert found.config.overload_status_code == 503
    assert found.sources["overload_status_code"] == "preset dynamo-0.9"
    assert all(one.startswith("preset dynamo-0.9: ") for one in found.warnings)


def test_every_setting_has_a_source():
    assert set(resolve({}, {}).sources) == set(SETTINGS)


def test_every_setting_has_its_names_and_help():
    assert list(ROUTER_OPTIONS) == list(SETTINGS)
    for name, option in ROUTER_OPTIONS.items():
        assert option.help, name
        assert option.flags[0].startswith("--"), name
        assert all(variable.startswith("DYN_") for variable in option.env), name
    names = [one for option in ROUTER_OPTIONS.values() for one in (*option.flags, *option.env)]
    assert len(names) == len(set(names))


def test_preset_from_the_environment_and_unknown_presets():
    assert resolve({}, {"DYNCTL_PRESET": "dynamo-0.9"}).preset == "dynamo-0.9"
    assert resolve({}, {}).preset == "dynamo-1.6"
    with pytest.raises(UsageProblem, match=r"--preset dynamo-2: expected one of dynamo-1.6"):
        resolve({}, {}, preset_name="dynamo-2")


POLICY_FILE = Path(__file__).with_name("policy-classes.yaml")


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.seed("router-guide: arguments: --router-mode")
@pytest.mark.seed("router-guide: arguments: --router-temperature")
@pytest.mark.seed("router-guide: environment: DYN_ROUTER_MODE")
@pytest.mark.seed("router-guide: environment: DYN_ROUTER_TEMPERATURE")
@pytest.mark.seed("router-guide: environment: DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT")
@pytest.mark.seed("router-guide: environment: DYN_ROUTER_QUEUE_POLICY")
@pytest.mark.seed("router-guide: environment: DYN_ENCODER_CUDA_TO_CPU_RATIO")
@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_ROUTER_TEMPERATURE")
@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_KV_OVERLAP_SCORE_WEIGHT")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: --router-ttl")
@pytest.mark.seed("dep-topology: names: kv_transfer_topology_level")
def test_every_spelling_of_every_setting_is_read(name: str):
    setting, option = SETTINGS[name], ROUTER_OPTIONS[name]
    value = setting.default
    if setting.type is bool:
        text, value = ("false", False) if setting.default else ("true", True)
    elif setting.choices:
        value = text = setting.choices[-1]
    elif setting.type is str:
        texts = {"router_own_domains": "zone=a", "router_policy_config": str(POLICY_FILE)}
        value = text = texts.get(name, "zone")
    else:
        value = setting.type(500 if name == "overload_status_code" else 1)
        text = str(value)
    extra = {"--kv-transfer-preferred-weight": "1"} if text == "preferred" else {}
    if name == "router_prefill_load_model":
        extra = {"--ais-backend": "vllm", "--ais-system": "x", "--ais-model-path": "x"}
    elif name == "router_approximate_cache_policy":
        extra = {"--router-kv-events": "false"}
    for index, spelling in enumerate((*option.flags, *option.env)):
        flags = {spelling: text} if spelling.startswith("--") else {}
        env = {} if flags else {spelling: text}
        found = resolve({**flags, **extra}, env)
        assert getattr(found.config, name) == value
        assert found.sources[name].endswith(f" {spelling}")
        old = index not in (0, len(option.flags))
        assert any("deprecated" in warning for warning in found.warnings) is old
        mine = [w for w in found.warnings if w.startswith(f"{spelling}: ")]
        assert any("not built yet: ignored" in w for w in mine) is not setting.has_effect


def test_deprecated_names_say_what_to_use():
    found = resolve({"--kv-overlap-score-weight": "1.5"}, {})
    assert found.config.prefill_load_scale == 1.5
    assert found.warnings == (
        "--kv-overlap-score-weight is deprecated: use --router-prefill-load-scale",
    )


@pytest.mark.parametrize(
    "spelling", ["--router-kv-overlap-score-weight", "DYN_KV_OVERLAP_SCORE_WEIGHT"]
)
@pytest.mark.seed("router-guide: arguments: --router-kv-overlap-score-weight")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: overlap weight: 0")
def test_a_legacy_overlap_weight_of_0_turns_the_credit_off_too(spelling: str):
    flag = spelling.startswith("--")
    found = resolve({spelling: "0"} if flag else {}, {} if flag else {spelling: "0"})
    assert found.config.prefill_load_scale == 0
    assert found.config.overlap_score_credit == 0
    assert found.sources["overlap_score_credit"].endswith(spelling)


def test_the_current_name_wins_over_the_old_one():
    flags = {"--router-prefill-load-scale": "2", "--kv-overlap-score-weight": "3"}
    assert resolve(flags, {}).config.prefill_load_scale == 2


@pytest.mark.parametrize(("policy", "means"), [("fail", "required"), ("fallback", "fallback")])
@pytest.mark.parametrize("kind", ["flag", "env"])
@pytest.mark.seed("dep-topology: names: kv_transfer_mismatch_policy")
def test_the_mismatch_policy_is_an_enforcement(policy: str, means: str, kind: str):
    domain = {"--router-kv-transfer-topology-level": "zone"}
    name = "--router-kv-transfer-mismatch-policy"
    variable = "DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY"
    found = resolve(
        {**domain, name: policy} if kind == "flag" else domain,
        {variable: policy} if kind == "env" else {},
    )
    assert found.config.kv_transfer_enforcement == means
    assert found.sources["kv_transfer_enforcement"].startswith(kind)
    assert found.warnings == ()


def test_the_policy_lru_needs_events_off():
    lru = {"--router-approximate-cache-policy": "lru"}
    with pytest.raises(
        UsageProblem, match=r"lru and --router-kv-events: .* are not read"
    ) as raised:
        resolve(lru, {})
    assert "--no-router-kv-events" in str(raised.value.hint)
    config = resolve({**lru, "--router-kv-events": False}, {}).config
    assert config.router_approximate_cache_policy == "lru"


def test_the_mismatch_policy_must_not_contradict_the_enforcement():
    flags = {
        "--router-kv-transfer-topology-level": "zone",
        "--router-kv-transfer-mismatch-policy": "fallback",
        "--kv-transfer-enforcement": "required",
    }
    with pytest.raises(UsageProblem, match="fallback means --kv-transfer-enforcement fallback"):
        resolve(flags, {})
    agreeing = {**flags, "--kv-transfer-enforcement": "fallback"}
    assert resolve(agreeing, {}).config.kv_transfer_enforcement == "fallback"
    # A flag corrects a variable, it does not contradict it.
    env = {"DYN_ROUTER_KV_TRANSFER_ENFORCEMENT": "required"}
    del flags["--kv-transfer-enforcement"]
    assert resolve(flags, env).config.kv_transfer_enforcement == "fallback"


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        (
            {"--router-temperature": "warm"},
            {},
            "--router-temperature: expected a number, got 'warm'",
        ),
        ({"--router-temperature": "-1"}, {}, "--router-temperature: expected at least 0, got -1"),
        ({"--router-mode": "best"}, {}, "--router-mode: expected one of kv, round-robin"),
        ({"--router-mode": "fastest"}, {}, "expected one of kv, round-robin, "),
        ({}, {"DYN_ROUTER_TEMPERATURE": "x"}, "DYN_ROUTER_TEMPERATURE: expected a number"),
        ({}, {"DYN_ROUTER_ASSUME_KV_REUSE": "maybe"}, "expected true or false"),
        ({"--router-kv-transfer-mismatch-policy": "maybe"}, {}, "expected one of fail, fallback"),
        (
            {"--router-kv-transfer-topology-level": "z", "--kv-transfer-enforcement": "preferred"},
            {},
            "kv_transfer_preferred_weight: required",
        ),
    ],
)
def test_bad_values_name_the_spelling_the_value_and_the_bounds(flags, env, expected):
    with pytest.raises(UsageProblem) as caught:
        resolve(flags, env)
    assert expected in caught.value.message


def test_an_enforcement_without_a_domain_is_reported():
    found = resolve({"--kv-transfer-enforcement": "fallback"}, {})
    assert found.warnings == (
        "--kv-transfer-enforcement has no effect without --router-kv-transfer-topology-level",
    )


@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_ROUTER_MODE")
def test_underscored_modes_and_empty_variables():
    assert resolve({"--router-mode": "round_robin"}, {}).config.router_mode == "round-robin"
    assert resolve({}, {"DYN_ROUTER_MODE": " "}) == resolve({}, {})


def test_bounds_in_words():
    assert bounds(SETTINGS["active_decode_blocks_threshold"]) == "number 0..1, or none"
    assert bounds(SETTINGS["router_mode"]) == (
        "kv|round-robin|random|power-of-two|least-loaded|direct|device-aware-weighted"
    )
    assert bounds(SETTINGS["overload_status_code"]) == "whole number 400..599"
    assert bounds(SETTINGS["decode_capacity_guard"]) == "true|false"


def test_resolved_is_a_value():
    assert isinstance(resolve({}, {}), Resolved)


def test_kv_events_can_be_switched_off():
    resolved = resolve({}, {"DYN_ROUTER_USE_KV_EVENTS": "false"})
    assert resolved.config.use_kv_events is False
    assert not resolved.warnings


_OLD, _NEW = "--no-track-active-blocks", "--no-router-track-active-blocks"


@pytest.mark.parametrize("spelling", [_NEW, _OLD])
def test_a_switch_that_is_off_is_named_as_typed(spelling: str):
    found = resolve({spelling.replace("--no-", "--"): False, "--router-mode": "random"}, {})
    assert found.sources["router_track_active_blocks"] == f"flag {spelling}"
    assert any(one.startswith(f"{spelling} has no effect") for one in found.warnings)
    assert (f"{_OLD} is deprecated: use {_NEW}" in found.warnings) is (spelling == _OLD)


@pytest.mark.parametrize(
    ("spelling", "deprecated"), [("--no-router-kv-events", False), ("--no-kv-events", True)]
)
@pytest.mark.seed("router-guide: arguments: --router-kv-events")
@pytest.mark.seed("router-guide: environment: DYN_ROUTER_USE_KV_EVENTS")
@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_KV_EVENTS")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: --no-kv-events")
def test_every_spelling_switches_kv_events_off(spelling: str, deprecated: bool):
    found = resolve({spelling.replace("--no-", "--"): False}, {})
    assert found.config.use_kv_events is False
    assert [" is deprecated: " in one for one in found.warnings] == [True] * deprecated


def test_settings_of_another_mode_are_reported():
    found = resolve({"--router-mode": "random"}, {"DYN_ROUTER_TEMPERATURE": "1"})
    assert found.warnings == (
        "DYN_ROUTER_TEMPERATURE has no effect with --router-mode random: expected kv",
    )


def test_values_that_switch_a_feature_off_need_no_feature():
    flags: dict[str, str | bool] = {"--router-queue-threshold": "none"}
    assert resolve({**flags, "--router-replica-sync": False}, {}).warnings == ()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"--router-kv-transfer-weight": "50"},
            "--router-kv-transfer-weight has no effect without --router-kv-transfer-qos",
        ),
        (
            {"--router-kv-transfer-qos": "f"},
            "--router-kv-transfer-qos has no effect without --router-kv-transfer-weight",
        ),
        (
            {"--router-own-domains": "zone=a"},
            "--router-own-domains has no effect without --router-kv-transfer-weight",
        ),
        (
            {"--router-pair-selection": "best", "--router-mode": "least-loaded"},
            "--router-pair-selection has no effect with --router-mode least-loaded: expected kv",
        ),
        (
            {"--router-pair-selection": "best", "--router-decode-capacity-guard": False},
            "--no-router-decode-capacity-guard has no effect with --router-pair-selection best: "
            "expected greedy",
        ),
    ],
)
def test_what_belongs_together_is_named(flags: dict[str, str | bool], expected: str):
    assert resolve(flags, {}).warnings == (expected,)


@pytest.mark.parametrize("mode", ["kv", None])
def test_a_preset_names_its_values_without_effect(mode):
    flags = {} if mode is None else {"--router-mode": mode}
    warnings = resolve(flags, {}, preset_name="dynamo-0.9").warnings
    for name, value in PRESETS["dynamo-0.9"].items():
        setting = SETTINGS[name]
        if value == setting.default:
            continue
        named = any(one.startswith(f"preset dynamo-0.9: {name} ") for one in warnings)
        elsewhere = mode is None and setting.only != ()
        assert named is (elsewhere or not setting.is_built(value))


@pytest.mark.seed("router-guide: arguments: --router-mode")
@pytest.mark.seed("router-guide: arguments: --router-queue-threshold")
def test_the_preset_of_0_9_follows_its_guide_and_says_so():
    found = resolve({}, {}, preset_name="dynamo-0.9")
    config = found.config
    assert (config.router_mode, config.router_queue_threshold) == ("round-robin", 4.0)
    assert config.overload_status_code == 503
    assert found.changed_by_preset == (
        "preset dynamo-0.9: --router-mode round-robin, --router-queue-threshold 4.0, "
        "--http-overload-status-code 503, --router-max-tree-size 1048576"
    )
    kept = resolve({"--router-mode": "kv"}, {}, preset_name="dynamo-0.9").changed_by_preset
    assert kept is not None
    assert "--router-mode" not in kept
    assert resolve({}, {}).changed_by_preset is None
    given = resolve({"--router-queue-threshold": "2"}, {}, preset_name="dynamo-0.9").warnings
    assert not any("preset dynamo-0.9: router_queue_threshold" in one for one in given)


def test_unknown_variables_of_the_router_are_named():
    found = resolve({}, {"DYN_ROUTER_TEMPRATURE": "1", "DYN_ROUTER_X": "", "DYN_OTHER": "1"})
    assert found.warnings == (
        "DYN_ROUTER_TEMPRATURE has no effect: unknown variable; "
        "did you mean DYN_ROUTER_TEMPERATURE?",
    )


_MODELLED = {"--ais-backend": "vllm", "--ais-system": "h200_sxm", "--aic-model-path": "m"}


@pytest.mark.seed("router-guide: prefill load: --aic-backend-version")
def test_the_version_of_a_backend_has_no_effect_and_is_named():
    flags = {**_MODELLED, "--router-prefill-load-model": "aic", "--aic-backend-version": "1.0"}
    found = resolve(flags, {})
    expected = (
        "--aic-backend-version: a database of measured kernel times is not built yet: ignored"
    )
    assert expected in found.warnings
    assert found.config.ais_backend_version == "1.0"


@pytest.mark.seed("router-guide: prefill load: required --router-mode kv")
@pytest.mark.seed("router-guide: prefill load: required --router-track-prefill-tokens")
@pytest.mark.parametrize("model", ["aic", "ais", "measured"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, ["--ais-backend", "--ais-system", "--ais-model-path"]),
        ({"--ais-backend": "vllm", "--ais-system": "h200_sxm"}, ["--ais-model-path"]),
        ({**_MODELLED, "--router-mode": "random"}, ["--router-mode random", "kv"]),
        (
            {**_MODELLED, "--router-track-prefill-tokens": False},
            ["--no-router-track-prefill-tokens"],
        ),
    ],
)
@pytest.mark.seed("router-guide: arguments: --router-prefill-load-model")
def test_a_load_model_without_what_it_needs_names_each_flag(flags, named, model):
    given = {**flags, "--router-prefill-load-model": model}
    if model == "measured" and not flags:
        assert resolve(given, {}).config.router_prefill_load_model == "measured"
        return
    with pytest.raises(UsageProblem) as caught:
        resolve(given, {})
    for one in (f"--router-prefill-load-model {model}", *named):
        assert one in caught.value.message
    expected = f"remove --router-prefill-load-model {model}"
    if model == "measured" and named == ["--ais-model-path"]:
        expected = "specify all of them"
    assert expected in caught.value.hint
    with pytest.raises(UsageProblem, match="DYN_ROUTER_PREFILL_LOAD_MODEL ais: "):
        resolve({}, {"DYN_ROUTER_PREFILL_LOAD_MODEL": "ais"})


_ON = {"--router-conditional-disagg": True}
_JSON = "--router-conditional-disagg-config"


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
def test_dynamos_json_has_the_settings_of_conditional_disaggregation():
    text = (
        '{"policy":"isl_or_load","eff_isl_threshold":4096,"eff_isl_ratio_threshold":0.8,'
        '"prefill_busy_threshold":16,"decode_busy_threshold":null}'
    )
    found = resolve({**_ON, _JSON: text}, {})
    assert found.config.conditional_disagg_policy == "isl-or-load"
    assert found.config.conditional_disagg_eff_isl_threshold == 4096
    assert found.config.conditional_disagg_eff_isl_ratio_threshold == 0.8
    assert found.config.conditional_disagg_prefill_busy_threshold == 16.0
    assert found.config.conditional_disagg_decode_busy_threshold is None
    assert found.sources["conditional_disagg_policy"] == f"flag {_JSON}"
    assert found.warnings == ()
    env = {"DYN_ROUTER_CONDITIONAL_DISAGG": "1", "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG": text}
    found = resolve({"--router-bypass-eff-isl-threshold": "7"}, env)
    assert found.config.conditional_disagg_eff_isl_threshold == 7  # a flag corrects a variable
    assert found.sources["conditional_disagg_policy"] == "env DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG"
    _, values, ignored = parse_assignments(
        RouterConfig(), ["router_conditional_disagg=1", f"conditional_disagg_config={text}"]
    )
    assert (values["conditional_disagg_eff_isl_threshold"], ignored) == (4096, [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({_JSON: "{}"}, ""),
        ({_JSON: '{"policy":"isl_bounding"}'}, f"{_JSON} without --router-conditional-disagg: "),
        ({**_ON, _JSON: "isl"}, f"{_JSON}: expected a JSON object, got 'isl'"),
        ({**_ON, _JSON: "[" * 9_999}, f"{_JSON}: expected a JSON object"),
        ({**_ON, _JSON: "[1]"}, f"{_JSON}: expected a JSON object"),
        ({**_ON, _JSON: '{"moon":1}'}, f"{_JSON}: unknown field 'moon'"),
        ({**_ON, _JSON: '{"policy":1}'}, f"{_JSON}: policy: expected str, got 1"),
        ({**_ON, _JSON: '{"eff_isl_threshold":1.5}'}, "eff_isl_threshold: expected int, got 1.5"),
        ({**_ON, _JSON: '{"eff_isl_ratio_threshold":1.5}'}, "expected at most 1, got 1.5"),
        ({**_ON, _JSON: '{"decode_busy_threshold":NaN}'}, "expected a finite number"),
        (
            {**_ON, _JSON: '{"eff_isl_threshold":1}', "--router-bypass-eff-isl-threshold": "2"},
            f"{_JSON} and --router-bypass-eff-isl-threshold 2: they give",
        ),
        ({**_ON, "--router-mode": "random"}, "--router-conditional-disagg and --router-mode rando"),
        ({**_ON, "--router-kv-events": False}, "and --no-router-kv-events: conditional disaggreg"),
        (
            {**_ON, "--router-bypass-policy": "prefill-load"},
            "--router-bypass-policy prefill-load: --router-bypass-prefill-busy-threshold or "
            "--router-queue-threshold is needed",
        ),
    ],
)
def test_contradictions_of_conditional_disaggregation_are_named(flags, words):
    if not words:
        assert resolve(flags, {}).config == RouterConfig()
        return
    with pytest.raises(UsageProblem) as caught:
        resolve(flags, {})
    assert words in str(caught.value)


def test_a_dry_run_needs_the_line_of_a_load_policy_too():
    given = ["conditional_disagg_enabled=1", "bypass_policy=isl_or_load"]
    with pytest.raises(ConfigError, match="conditional_disagg_prefill_busy_threshold or router_qu"):
        parse_assignments(RouterConfig(), given)
    config, _, _ = parse_assignments(RouterConfig(), [*given, "router_queue_threshold=2"])
    assert config.bypass_busy_threshold == 2.0


def test_a_setting_needs_no_environment_variable(dynctl, monkeypatch):
    option = ROUTER_OPTIONS["router_temperature"]
    monkeypatch.setitem(ROUTER_OPTIONS, "router_temperature", replace(option, env=()))
    annotation = router_flags._annotation(SETTINGS["router_temperature"], option.flags[0], False)
    (typed,) = annotation.__metadata__
    assert typed.help.endswith("[number 0..; default: 0.0]")
    found = resolve({"--router-temperature": "1"}, {"DYN_ROUTER_TEMPERATURE": "3"})
    assert found.sources["router_temperature"] == "flag --router-temperature"
    ran = dynctl("config", "show", "-o", "json")
    assert ran.code == 0, ran.err
    assert '"env":""' in ran.out.replace(" ", "")
