"""Nothing is silent: what a user sets has an effect, or a warning or an error names it."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.settings.router_options import ROUTER_OPTIONS
from router_core import SETTINGS, Setting

#: Settings that another one must accompany.
BESIDE = {
    "kv_transfer_enforcement": {"kv_transfer_domain": "zone"},
    "kv_transfer_preferred_weight": {
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": "preferred",
    },
    "router_prefill_load_model": {
        "ais_backend": "vllm",
        "ais_system": "h200_sxm",
        "ais_model_path": "m",
    },
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that would have been run."""
    found: list[Any] = []

    def takes(config: Any) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("dynctl.serving.http.server.run_frontend", takes)
    monkeypatch.setattr("dynctl.serving.http.router_server.run_router", takes)
    monkeypatch.setattr("dynctl.simulation.engine.process.run_engine", takes)
    return found


def another_value(setting: Setting) -> str:
    """A value, as typed, that differs from the default."""
    if setting.type is bool:
        return "false" if setting.default else "true"
    if setting.choices:
        return next(one for one in reversed(setting.choices) if one != setting.default)
    if setting.type is str:
        return "zone"
    return "503" if setting.name == "overload_status_code" else "1"


def as_flags(name: str, text: str) -> list[str]:
    flag = ROUTER_OPTIONS[name].flags[0]
    if SETTINGS[name].type is not bool:
        return [flag, text]
    return [flag if text == "true" else flag.replace("--", "--no-", 1)]


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("way", ["flag", "variable"])
@pytest.mark.parametrize("command", ["serve frontend", "serve router", "config show"])
def test_every_setting_has_an_effect_or_is_named(
    dynctl: Any,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    way: str,
    name: str,
) -> None:
    setting, option = SETTINGS[name], ROUTER_OPTIONS[name]
    text = another_value(setting)
    given = as_flags(name, text)
    typed = given[0] if way == "flag" else option.env[0]
    if way == "variable":
        monkeypatch.setenv(option.env[0], text)
        given = []
    for other, value in BESIDE.get(name, {}).items():
        given += as_flags(other, value)
    ran = dynctl(*command.split(), *given, *(["-o", "json"] if command == "config show" else []))
    assert ran.code == 0
    if started:
        value, source = getattr(started[0].router, name), started[0].origins[name]
    else:
        row = next(row for row in ran.json["settings"] if row["name"] == name)
        value, source = row["value"], row["source"]
    assert value == setting.parse(text)
    assert source == f"{'flag' if way == 'flag' else 'env'} {typed}"
    named = any(line.startswith(f"warning: {typed}") for line in ran.err.splitlines())
    assert named is not setting.is_built(value)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_set_of_a_dry_run_has_an_effect_or_is_named(dynctl: Any, name: str) -> None:
    setting = SETTINGS[name]
    typed = f"{name}={another_value(setting)}"
    others = [f"{key}={value}" for key, value in BESIDE.get(name, {}).items()]
    line = [word for one in (*others, typed) for word in ("--set", one)]
    ran = dynctl("route", "--demo", "hello", *line, "-o", "json")
    assert ran.code == 0
    named = f"warning: --set {typed}" in ran.err
    assert named is not (
        setting.is_built(setting.parse(typed.partition("=")[2])) and not (setting.dry_run)
    )
    doubts = [one["what"] for one in ran.json["doubts"] if one["code"] == "DYR0727"]
    assert any(one.startswith(f"--set {typed}") for one in doubts) is named
    # What is ignored is not listed as assumed.
    assert any(f"{name}=" in one for one in ran.json["assumptions"]) is not named


def test_a_dry_run_names_a_setting_of_another_mode_and_stays_certain(dynctl: Any) -> None:
    line = ["route", "--demo", "hello", "--set", "router_mode=random", "--set", "temperature=1"]
    ran = dynctl(*line, "-o", "json")
    expected = "--set temperature=1 has no effect with router_mode random: expected kv"
    assert ran.err == f"warning: {expected}\n"
    (one,) = [one for one in ran.json["doubts"] if one["code"] == "DYR0727"]
    assert (one["what"], one["matters"]) == (expected, False)
