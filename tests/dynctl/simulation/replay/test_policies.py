"""Policies are built-in names, files, and single settings; what is wrong is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.simulation.replay.policies import BUILT_IN, policies
from router_core import RouterConfig


def test_a_policy_with_a_prefill_load_model_that_cannot_be_made_is_refused_before_the_replay():
    given = "kv,router_prefill_load_model=ais,ais_backend=vllm,ais_model_path=/nowhere"
    with pytest.raises(UsageProblem, match="--ais-system x: unknown accelerator"):
        policies([f"{given},ais_system=x"])
    with pytest.raises(UsageProblem, match="--ais-model-path /nowhere"):
        policies([f"{given},ais_system=h200_sxm"])
    found, _ = policies(["kv,router_prefill_load_model=measured"])
    assert found[0].config.router_prefill_load_model == "measured"


def test_every_built_in_policy_is_valid_and_has_no_warning() -> None:
    found, warnings = policies(list(BUILT_IN))
    assert [one.name for one in found] == list(BUILT_IN)
    assert warnings == []
    assert found[0].config == RouterConfig(router_mode="round-robin")


def test_settings_after_a_name_and_a_label() -> None:
    found, _ = policies(["kv,prefill_load_scale=2", "mine:kv,router-temperature=0.2", "ttft"])
    assert [one.name for one in found] == ["kv,prefill_load_scale=2", "mine", "ttft"]
    assert found[0].config.prefill_load_scale == 2
    assert found[1].config.router_temperature == 0.2
    assert found[2].config.active_prefill_tokens_threshold == 500


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "router_mode: kv\ntemperature: 0.3\nkv-transfer-domain: null\n"),
        ("a.toml", 'router_mode = "kv"\nrouter_temperature = 0.3\n'),
        ("a.yaml", "preset: throughput\n"),
    ],
)
def test_a_file_of_settings(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found, _ = policies([str(tmp_path / name)])
    assert found[0].name == "a"
    assert found[0].config.router_temperature == 0.3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kvv", "--policy kvv: no such policy or file; expected round-robin"),
        ("kv,temprature=1", "no such setting; did you mean router_temperature?"),
        ("kv,router_temperature", "expected SETTING=VALUE"),
        ("kv,router_temperature=-1", "--router-temperature: expected at least 0"),
        ("{file}", "broken: not YAML"),
        ("{list}", "expected a mapping from settings to values"),
        ("{nested}", "router_mode: expected a single value, got list"),
        ("{preset}", "preset 'fast'; expected one of"),
        ("{toml}", "not TOML"),
    ],
)
def test_a_bad_policy_is_named(tmp_path: Path, text: str, problem: str) -> None:
    files = {
        "file": ("broken", "a: [", ""),
        "list": ("l.yaml", "- kv", ""),
        "nested": ("n.yaml", "router_mode: [kv]", ""),
        "preset": ("p.yaml", "preset: fast", ""),
        "toml": ("t.toml", "a = = 1", ""),
    }
    for name, content, _ in files.values():
        (tmp_path / name).write_text(content)
    typed = text.format(**{key: tmp_path / one[0] for key, one in files.items()})
    with pytest.raises(UsageProblem) as raised:
        policies([typed])
    assert problem in str(raised.value)


def test_two_policies_with_one_name_and_too_many_are_refused() -> None:
    with pytest.raises(UsageProblem, match="kv is given twice"):
        policies(["kv", "kv"])
    with pytest.raises(UsageProblem, match="expected at most 20"):
        policies([f"p{number}:kv" for number in range(21)])


def test_a_replay_loads_no_libraries_of_tokenizers():
    """They take more memory than a short replay itself."""
    code = (
        "import sys, dynctl.simulation.replay.simulation, dynctl.simulation.replay.policies\n"
        "print([name for name in ('tokenizers', 'jinja2') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
