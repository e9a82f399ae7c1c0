"""Nothing is silent: what a user sets has an effect, or a warning or an error names it."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dynctl as package
from dynctl.base.errors import UsageProblem
from dynctl.base.options import (
    OUTPUT,
    PLACES,
    PLANE_VARIABLES,
    READ_BY,
    SOURCES,
    WORKER_VARIABLES,
    GlobalOptions,
)
from dynctl.cli.global_options import _without_effect
from dynctl.cli.table import COMMANDS
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.settings.router_settings import resolve
from dynctl.simulation.engine.config import OPTIONS
from router_core import SETTINGS, ConfigError, RouterConfig, Setting
from tests.commands import all_commands
from tests.dynctl.serving.fleets import WORDS, chat_body, site, zone

#: What the estimate of the prefill load model needs.
MODELLED = {
    "ais_backend": "vllm",
    "ais_system": "h200_sxm",
    "ais_model_path": str(Path(__file__).parents[2] / "captures" / "tiny-model"),
}
LINKS = Path(__file__).with_name("links.yaml")
#: Settings whose values are not any text.
TEXTS = {"router_kv_transfer_qos": str(LINKS), "router_own_domains": "zone=zone-a", **MODELLED}
#: Settings that another one must accompany.
BESIDE = {
    "kv_transfer_enforcement": {"kv_transfer_domain": "zone"},
    "kv_transfer_preferred_weight": {
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": "preferred",
    },
    "router_kv_transfer_weight": {"router_kv_transfer_qos": str(LINKS)},
    "router_kv_transfer_qos": {"router_kv_transfer_weight": "50"},
    "router_own_domains": {
        "router_kv_transfer_weight": "50",
        "router_kv_transfer_qos": str(LINKS),
    },
    "conditional_disagg_policy": {
        "conditional_disagg_enabled": "true",
        "conditional_disagg_prefill_busy_threshold": "1",
    },
    "conditional_disagg_prefill_busy_threshold": {
        "conditional_disagg_enabled": "true",
        "conditional_disagg_policy": "prefill-load",
    },
    "conditional_disagg_eff_isl_threshold": {"conditional_disagg_enabled": "true"},
    "conditional_disagg_eff_isl_ratio_threshold": {"conditional_disagg_enabled": "true"},
    "conditional_disagg_decode_busy_threshold": {"conditional_disagg_enabled": "true"},
    "conditional_disagg_require_can_prefill": {"conditional_disagg_enabled": "true"},
    "router_prefill_load_model": MODELLED,
    **{
        name: {"router_prefill_load_model": "aic", **MODELLED}
        for name in SETTINGS
        if name.startswith("ais_")
    },
    "router_taints_in_all_modes": {"router_mode": "random"},
    "encoder_cuda_to_cpu_ratio": {"router_mode": "device-aware-weighted"},
    "router_approximate_cache_policy": {"use_kv_events": "false"},
    "router_session_affinity_mode": {"router_session_affinity_ttl_secs": "60"},
    "router_session_affinity_yield_blocks": {
        "router_session_affinity_ttl_secs": "60",
        "router_session_affinity_mode": "soft",
    },
    "router_reset_states": {"router_durable_kv_events": "true"},
    "router_queue_policy": {"router_queue_threshold": "4"},
    "router_queue_max_requests": {"router_queue_threshold": "4"},
    "router_queue_max_wait_secs": {"router_queue_threshold": "4"},
}


POLICY_FILE = Path(__file__).with_name("policy-classes.yaml")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that would have been run."""
    found: list[Any] = []

    def takes(config: Any, extra_routes: Any = ()) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("dynctl.serving.http.server.run_frontend", takes)
    monkeypatch.setattr("dynctl.serving.services.router_server.run_router", takes)
    monkeypatch.setattr("dynctl.simulation.engine.process.run_engine", takes)
    monkeypatch.setattr("dynctl.serving.epp.process.run_picker", takes)
    monkeypatch.setattr("dynctl.serving.services.indexer.run_indexer", takes)
    monkeypatch.setattr(
        "dynctl.serving.services.processes.run_processes", lambda config, *_: takes(config)
    )
    return found


def another_value(setting: Setting) -> str:
    """A value, as typed, that differs from the default."""
    if setting.type is bool:
        return "false" if setting.default else "true"
    if setting.choices:
        return next(one for one in reversed(setting.choices) if one != setting.default)
    if setting.name == "router_policy_config":
        return str(POLICY_FILE)
    if setting.type is str:
        return TEXTS.get(setting.name, "zone")
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
    typed = given[0] if way == "flag" else option.variable
    if way == "variable":
        if not typed:
            pytest.skip("the setting has no variable")
        monkeypatch.setenv(typed, text)
        given = []
    for other, value in BESIDE.get(name, {}).items():
        given += as_flags(other, value) if other != name else []
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
    others = [f"{key}={value}" for key, value in BESIDE.get(name, {}).items() if key != name]
    line = [word for one in (*others, typed) for word in ("--set", one)]
    ran = dynctl("route", "--demo", "hello", *line, "-o", "json")
    assert ran.code == 0
    named = f"warning: --set {typed}" in ran.err
    # The workers of the demo fleet publish their policies.
    published = name in ("kv_transfer_enforcement", "kv_transfer_preferred_weight")
    built = setting.is_built(setting.parse(typed.partition("=")[2]))
    assert named is not (built and not setting.dry_run and not published)
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


def flat(text: str) -> str:
    return " ".join(text.split())


#: A value for each global option, as typed and as parsed.
GLOBALS: dict[str, tuple[str | None, Any]] = {
    "frontend": ("http://127.0.0.1:1", ("http://127.0.0.1:1",)),
    "view": ("FILE", Path("FILE")),
    "demo": (None, True),
    "output": ("json", "json"),
    "timeout": ("3", 3.0),
    "token": ("t", "t"),
    "token_env": ("T", "T"),
    "token_file": ("FILE", Path("FILE")),
    "ca_cert": ("FILE", Path("FILE")),
    "context": ("c", "c"),
    "discovery": ("etcd", "etcd"),
    "dyn_namespace": ("n", "n"),
    "file_kv": ("DIR", Path("DIR")),
    "etcd_endpoints": ("127.0.0.1:1", "127.0.0.1:1"),
    "nats_server": ("nats://127.0.0.1:1", "nats://127.0.0.1:1"),
    "recording": ("FILE", Path("FILE")),
    "at": ("+1s", "+1s"),
    "namespace": ("n", "n"),
    "all_namespaces": (None, True),
    "kube_context": ("k", "k"),
    "kubeconfig": ("FILE", Path("FILE")),
    "reach": ("direct", "direct"),
    "wait": ("1", 1.0),
    "no_color": (None, True),
    "debug": (None, True),
}
#: Source -> the options that name it.
CHOICES: dict[str, dict[str, Any]] = {
    "--demo": {"demo": True},
    "--view": {"view": Path("FILE")},
    "--recording": {"recording": Path("FILE"), "at": "+1s"},
    "--frontend": {"frontend": ("http://127.0.0.1:1",)},
    "file": {"discovery": "file"},
    "etcd": {"discovery": "etcd"},
    "kubernetes": {"discovery": "kubernetes"},
}


def test_the_table_has_every_global_option() -> None:
    internal = {"given", "context_applied", "environment_sources"}
    names = {item.name for item in fields(GlobalOptions)} - internal
    assert set(GLOBALS) == names
    assert OUTPUT.union(*READ_BY.values()) == names
    assert set(CHOICES) == set(READ_BY)


#: Options that give `serve frontend` the workers of a Dynamo deployment.
DISCOVERIES = ("discovery", "file_kv", "etcd_endpoints")


@pytest.mark.parametrize("command", ["frontend", "router", "engine"])
@pytest.mark.parametrize("name", list(GLOBALS))
def test_serve_names_every_global_option_without_effect(
    dynctl: Any, started: list[Any], command: str, name: str
) -> None:
    flag, (value, _) = "--" + name.replace("_", "-"), GLOBALS[name]
    ran = dynctl("serve", command, flag, *([value] if value else []))
    if command == "frontend" and name in DISCOVERIES:
        assert (ran.code, ran.err) == (0, "")
        assert started[0].dynamo.planes.given == {name}
        return
    if name in SOURCES:
        assert (ran.code, started) == (2, [])
        assert f"error: {flag} specifies a source, but serve {command} has no source" in ran.err
        return
    if name in PLACES and command != "engine":
        assert (ran.code, started) == (2, [])
        assert f"error: {flag}" in ran.err
        assert f"names a place, and has no effect on serve {command}" in flat(ran.err)
        return
    assert (ran.code, len(started)) == (0, 1)
    expected = "" if name in ("no_color", "debug") else f"warning: {flag}"
    assert ran.err.startswith(expected)
    assert ran.err.count("warning: ") == bool(expected)
    assert f"no effect on serve {command}" in ran.err or not expected


@pytest.mark.parametrize("name", PLANE_VARIABLES)
@pytest.mark.seed("smart-routing-guide-0.9: infrastructure: DYN_EVENT_PLANE")
def test_serve_names_every_variable_of_a_source(
    dynctl: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "file")
    for workers in ([], ["--worker", "http://127.0.0.1:1"]):
        started.clear()
        ran = dynctl("serve", "frontend", *workers)
        assert (ran.code, len(started)) == (0, 1)
        if not workers and name in ("DYN_DISCOVERY_BACKEND", "DYN_FILE_KV", "ETCD_ENDPOINTS"):
            assert (ran.err, started[0].dynamo is not None) == ("", True)
            continue
        warning = f"warning: {name} has no effect on serve frontend: the command reads no source\n"
        assert (ran.err, started[0].dynamo) == (warning, None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--discovery", "file", "--wait", "3"], "--wait has no effect"),
        (["--discovery", "file", "--token", "x"], "--token has no effect"),
        (["--discovery", "file", "--model-name", "m"], "--model-name has no effect"),
        (["--discovery", "file", "--kv-cache-block-size", "32"], "--kv-cache-block-size has no"),
        (["--response-port", "1234"], "--response-port has no effect without --discovery"),
        (["--migration-limit", "2"], "--migration-limit has no effect without --discovery"),
        (["--migration-max-seq-len", "2"], "--migration-max-seq-len has no effect"),
        (["--answer-parsing", "dynamo-1.6"], "--answer-parsing has no effect without --discovery"),
        (["--namespace-prefix", "a"], "--namespace-prefix has no effect without --discovery"),
        (["--event-plane", "nats"], "--event-plane has no effect without --discovery"),
        (["--discovery", "mem", "--event-plane", "nats"], "without --router-replica-sync"),
    ],
)
def test_serve_names_what_has_no_effect_on_the_workers_of_a_dynamo(
    dynctl: Any, started: list[Any], given: list[str], named: str
) -> None:
    ran = dynctl("serve", "frontend", *given)
    assert (ran.code, len(started)) == (0, 1)
    assert (ran.err.count("warning: "), named in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--file-kv", "/tmp/store"], ""),
        (["--nats-server", "nats://127.0.0.1:1"], ""),
        (["--wait", "3"], "--wait has no effect"),
    ],
)
@pytest.mark.seed("router-guide: deployments: --endpoint")
def test_a_router_of_an_endpoint_reads_discovery(
    dynctl: Any,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    named: str,
) -> None:
    endpoint = ("--endpoint", "dynamo.backend.generate")
    ran = dynctl("serve", "router", "--discovery", "file", *endpoint, *given)
    assert (ran.code, ran.err.count("warning: "), named in ran.err) == (0, bool(named), True)
    assert started[0].dynamo.endpoint.name == "generate"
    for name in PLANE_VARIABLES:
        monkeypatch.setenv(name, "file")
    ran = dynctl("serve", "router", *endpoint)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("own", ["--worker", "--workers-file", "--router"])
@pytest.mark.parametrize("flag", ["--discovery", "--file-kv", "--etcd-endpoints"])
def test_a_frontend_has_workers_of_one_kind(
    dynctl: Any, started: list[Any], own: str, flag: str
) -> None:
    ran = dynctl("serve", "frontend", own, "http://127.0.0.1:1", flag, "file")
    assert (ran.code, started) == (2, [])
    assert f"error: {flag} and {own}: set only one of them" in ran.err


@pytest.mark.parametrize(
    ("given", "namespace"),
    [
        ([], None),
        (["--dyn-namespace", "prod"], "prod"),
        (["--dyn-namespace", "*"], None),
        (["--namespace-prefix", "prod"], "prod*"),
        (["--namespace-prefix", "prod", "--dyn-namespace", "other"], "prod*"),
    ],
)
def test_the_namespaces_that_a_frontend_serves(
    dynctl: Any, started: list[Any], given: list[str], namespace: str | None
) -> None:
    ran = dynctl("serve", "frontend", "--discovery", "mem", *given)
    assert (ran.code, ran.err) == (0, "")
    assert started[0].dynamo.namespace == namespace


@pytest.mark.parametrize("source", list(CHOICES))
@pytest.mark.parametrize("name", list(GLOBALS))
def test_each_source_names_the_options_that_it_does_not_read(source: str, name: str) -> None:
    if name in SOURCES:
        return  # it names a source itself
    if name == "context":
        return  # it has an effect by its values: tests/dynctl/cli/test_places.py
    values = {**CHOICES[source], name: GLOBALS[name][1]}
    options = GlobalOptions(**values, given=frozenset(values), context_applied=True)
    flag = "--" + name.replace("_", "-")
    if name in PLACES - READ_BY[source]:
        with pytest.raises(UsageProblem) as refused:
            list(_without_effect(options, COMMANDS["route"]))
        assert refused.value.message.startswith(flag)
        assert source in refused.value.message
        return
    named = list(_without_effect(options, COMMANDS["route"]))
    if name in OUTPUT | READ_BY[source]:
        assert named == []
    else:
        (one,) = named
        assert one.startswith(flag)
        assert source in one


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("workers list --timeout 3 --demo", "--timeout has no effect with --demo"),
        ("explain DYR0101 --discovery etcd", "--discovery has no effect on explain"),
        (
            "config show --router-mode direct --router-session-affinity-ttl-secs 5",
            "--router-session-affinity-ttl-secs has no effect with --router-mode direct: expected"
            " kv or round-robin or random or power-of-two or least-loaded or device-aware-weighted",
        ),
        ("config show --wait 3", "--wait has no effect on config show"),
        ("top --once --demo --wait 3", "--wait has no effect with --demo"),
    ],
)
def test_commands_name_options_without_effect(dynctl: Any, line: str, named: str) -> None:
    ran = dynctl(*line.split())
    assert (ran.code, ran.err) == (0, f"warning: {named}\n")


#: Options of other programs in dynctl's texts: kubectl, etcdctl, engines, Dynamo, its operator, hf.
FOREIGN = frozenset(
    (
        *("--api-group", "--config", "--field-selector", "--overwrite", "--patch-file"),
        *("--previous", "--server-side", "--type", "--restricted", "--restricted-namespace"),
        *("--disaggregation-mode", "--is-decode-worker", "--is-prefill-worker"),
        *("--enable-cache-report", "--enable-prompt-tokens-details", "--kv-events-config"),
        *("--page-size", "--prefix-caching-hash-algo", "--publish-events-and-metrics"),
        *("--served-model-name", "--durable-kv-events", "--local-dir"),
        *("--context-length", "--data", "--max-queued-requests", "--chat-template", "--prefix"),
        "--prefix-cache-retention-interval",
        "--router-session-affinity-ttl-secs",
    )
)
#: Placeholders in docstrings, a prefix, and what every command has.
NOT_NAMES = frozenset(("--x", "--no", "--help"))


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)


def _texts(path: Path) -> Iterator[str]:
    if path.suffix == ".toml":
        yield path.read_text()
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_texts_recommend_only_options_that_exist() -> None:
    known = {*_options(all_commands()), *FOREIGN, *NOT_NAMES}
    name = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
    folder = Path(package.__file__).parent
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".toml")]
    unknown = {
        (found, str(path.relative_to(folder)))
        for path in files
        for text in _texts(path)
        for found in name.findall(text)
        if found not in known
    }
    assert not unknown


#: Router settings that do something on a frontend of plain engines with no other option. All other
#: ones must be named at the start, or refused, while nothing else is set.
ALONE = frozenset(
    (
        *("router_mode", "overlap_score_credit", "overlap_score_credit_decay"),
        *("prefill_load_scale", "decode_active_request_weight", "router_temperature"),
        *("router_track_active_blocks", "router_track_output_blocks", "router_assume_kv_reuse"),
        *("router_track_prefill_tokens", "active_decode_blocks_threshold"),
        *("active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac"),
        *("kv_transfer_domain", "decode_capacity_guard", "router_pair_selection"),
        *("conditional_disagg_enabled", "router_on_degraded", "router_session_affinity_ttl_secs"),
        *("active_request_expiry_secs", "overload_status_code", "use_kv_events"),
        *("router_ttl_secs", "router_max_tree_size", "router_prune_target_ratio"),
        *("router_queue_threshold", "router_policy_config", "host_cache_hit_weight"),
        *("disk_cache_hit_weight", "router_predicted_ttl_secs", "router_prefill_load_model"),
    )
)


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("command", ["frontend", "router", "epp"])
def test_a_router_setting_alone_has_an_effect_or_is_named(
    dynctl: Any, started: list[Any], command: str, name: str
) -> None:
    given = as_flags(name, another_value(SETTINGS[name]))
    own = ["--worker", "http://127.0.0.1:1"]
    ran = dynctl("serve", command, *own, *given)
    # What it lacks is named: by its own name, or by that of the part that is missing.
    silent = (ran.code, ran.err) == (0, "")
    assert silent is (name in ALONE), ran.err
    if not silent:
        assert given[0] in ran.err or name == "router_replica_sync"
        assert ran.code in (0, 2)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_what_a_setting_waits_for_can_be_unmet(name: str) -> None:
    """A condition that always holds never warns: a switch was once read as set, on or off."""
    defaults = {one.name: one.default for one in SETTINGS.values()}
    for only in SETTINGS[name].only:
        other = SETTINGS[only.setting]
        assert set(only.values) <= set(other.choices or (True, False))
        tried = [None] if other.optional else [defaults[other.name], *other.choices]
        tried += [not defaults[other.name]] if other.type is bool else []
        tried += [0.0] if other.type is float else []
        off = {"router_taints_in_all_modes": False, "conditional_disagg_enabled": False}
        kept = {}
        for value in tried:
            with contextlib.suppress(ConfigError):
                config = RouterConfig().with_values(off | {other.name: value})
                kept[value] = only.holds(config)
        assert False in kept.values(), (name, only)


@pytest.mark.seed("smart-routing-guide-0.9: replicas: --router-reset-states")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--router-reset-states"], "has no effect without --router-durable-kv-events"),
        (["--router-queue-policy", "wspt"], "has no effect without --router-queue-threshold"),
        (["--no-router-kv-events", "--router-on-degraded", "full"], "without --router-kv-events"),
        (
            ["--router-prefill-load-scale", "0", "--router-kv-overlap-score-credit-decay", "1"],
            "has no effect with --router-prefill-load-scale 0: expected more than 0",
        ),
        (
            ["--no-router-track-prefill-tokens", "--router-queue-threshold", "2"],
            "--router-queue-threshold has no effect without --router-track-prefill-tokens",
        ),
        (
            [
                *("--router-mode", "random", "--no-router-taints-in-all-modes"),
                *("--router-kv-transfer-topology-level", "zone"),
            ],
            "has no effect with --router-mode random: expected kv, or --router-taints-in-all",
        ),
    ],
)
def test_a_setting_names_what_makes_it_count(
    dynctl: Any, started: list[Any], given: list[str], named: str
) -> None:
    ran = dynctl("serve", "frontend", *given)
    assert (ran.code, len(started)) == (0, 1)
    assert named in ran.err


#: What `serve` does with a setting of Dynamo's shared index: nothing without discovery, and with it
#: the process has them.
@pytest.mark.parametrize("name", [one.name for one in SETTINGS.values() if one.dynamo])
def test_settings_of_a_dynamo_deployment_count_with_discovery(
    dynctl: Any, started: list[Any], name: str
) -> None:
    given = as_flags(name, "true")
    durable = ["--router-durable-kv-events"] if name == "router_reset_states" else []
    ran = dynctl("serve", "frontend", "--discovery", "mem", *durable, *given)
    assert (ran.code, ran.err) == (0, "")
    assert getattr(started[0].router, name) is True
    ran = dynctl("serve", "frontend", *durable, *given)
    assert f"without the workers of a Dynamo deployment {given[0]} has no effect" in ran.err


#: Options of `serve` with an effect on their own, for each command.
EFFECTIVE: dict[str, frozenset[str]] = {
    "frontend": frozenset(
        (
            *("http_host", "http_port", "worker", "workers_file", "model_path", "tokenizer"),
            *("model_name", "block_size", "api_token", "log_decisions", "log_format"),
            *("log_level", "decision_memory", "record", "index_memory", "drain_timeout"),
            *("shutdown_delay", "model_return_time"),
            *("system_port", "announce", "admin_token_file", "api_key", "api_key_file"),
            *("engine_api_key", "engine_api_key_file", "unix_socket", "compressed_requests"),
            *("otlp_endpoint", "header_timeout", "keep_alive_timeout", "peer_connections"),
            *("first_byte_timeout", "idle_timeout", "eject_after", "eject_pause"),
            *("eject_max_pause", "panic_threshold", "index_peer", "router", "processes"),
        )
    ),
}
EFFECTIVE["router"] = EFFECTIVE["frontend"] - {"first_byte_timeout", "router", "processes"} | {
    *("select_service_port", "slot_tracker_port"),
}
EFFECTIVE["epp"] = EFFECTIVE["frontend"] - {"router", "processes"} | {
    *("host", "port", "health_port", "tls", "body_limit", "stream_timeout", "pool"),
}
EFFECTIVE["indexer"] = frozenset(
    (
        *("http_host", "http_port", "peers", "snapshot", "api_token", "token_file"),
        *("index_memory", "log_format", "log_level", "announce"),
    )
)
#: A value for an option whose type does not suffice.
VALUES = {
    "decision_memory": "1MiB", "index_memory": "1GiB", "record_max_bytes": "1MiB",
    "body_limit": "1MiB", "log_decisions": "all", "log_format": "json", "log_level": "debug",
    "tokenizer": "exact", "panic_threshold": "10%", "http_host": "127.0.0.2",
    "host": "127.0.0.2", "system_host": "127.0.0.2", "rpc_host": "127.0.0.2",
    "worker": "http://127.0.0.1:1", "router": "http://127.0.0.1:1",
    "index_peer": "http://127.0.0.1:1", "peers": "http://127.0.0.1:1",
    "otlp_endpoint": "http://127.0.0.1:4318", "router_replica_peer": "tcp://127.0.0.1:1",
    "router_replica_nats": "nats://127.0.0.1:1", "event_plane": "nats", "eject_max_pause": "400",
    "workers": "1=tcp://127.0.0.1:1", "replays": "1=tcp://127.0.0.1:1", "pod_domain": "zone=a",
    "endpoint": "a.b.c", "otlp_sample_ratio": "0.5", "dynamo_frontend": "127.0.0.1:1",
}  # fmt: skip


@cache
def _commands() -> Any:
    """The commands of `serve`, by name."""
    root: Any = all_commands()
    return root.commands["serve"].commands


def _served() -> Iterator[tuple[str, str]]:
    """Each command of `serve` with each of its own options."""
    for command in EFFECTIVE:
        for parameter in _commands()[command].params:
            if not parameter.name.startswith(("global_", "router_flag_")):
                yield command, parameter.name


def _typed(command: str, name: str, folder: Path) -> list[str]:
    option = next(one for one in _commands()[command].params if one.name == name)
    flag = str(option.opts[0])
    if option.is_flag:
        return [option.secondary_opts[0] if option.default is True else flag]
    if name.endswith(("_file", "_cert", "_key")) and name not in ("api_key", "engine_api_key"):
        path = folder / "file"
        path.write_text("secret\n")
        return [flag, str(path)]
    return [flag, VALUES.get(name, "3")]


@pytest.mark.parametrize(("command", "name"), list(_served()))
def test_an_option_of_serve_alone_has_an_effect_or_is_named(
    dynctl: Any, started: list[Any], tmp_path: Path, command: str, name: str
) -> None:
    given = _typed(command, name, tmp_path)
    own = ["--worker", "http://127.0.0.1:1"] if command == "epp" and name != "pool" else []
    if name == "worker":
        own = []
    ran = dynctl("serve", command, *own, *given)
    silent = (ran.code, ran.err) == (0, "")
    assert silent is (name in EFFECTIVE[command]), ran.err
    assert silent or given[0] in ran.err


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("DYN_KV_CACHE_BLOCK_SIZE", ["--discovery", "mem"]),
        ("DYN_KV_CACHE_BLOCK_SIZE", ["--router", "http://127.0.0.1:1"]),
        ("DYN_MIGRATION_LIMIT", []),
        ("DYN_NAMESPACE_PREFIX", []),
        ("DYN_TCP_RESPONSE_STREAM_PORT", []),
        ("DYN_SYSTEM_HOST", []),
        ("DYNCTL_OTLP_SAMPLE_RATIO", []),
        ("DYNCTL_ROUTER_TOKEN", []),
        ("DYN_ROUTER_SNAPSHOT_THRESHOLD", []),
    ],
)
def test_a_variable_without_effect_is_named_as_it_was_set(
    dynctl: Any,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    command: list[str],
) -> None:
    monkeypatch.setenv(variable, "1")
    ran = dynctl("serve", "frontend", *command)
    assert (ran.code, len(started)) == (0, 1)
    assert f"warning: {variable} has no effect with" in ran.err


@pytest.mark.parametrize(
    "given",
    [
        ["--system-host", "127.0.0.2", "--system-port", "0"],
        ["--processes", "2", "--process-timeout", "5"],
        ["--key-concurrency", "2", "--api-key", "k"],
        ["--record-max-bytes", "1MiB", "--record", "FILE"],
        ["--discovery", "mem", "--migration-limit", "2", "--response-port", "1234"],
        ["--router", "http://127.0.0.1:1", "--router-token", "t"],
        ["--router-durable-kv-events", "--router-reset-states", "--discovery", "mem"],
    ],
)
def test_an_option_that_has_what_it_needs_is_silent(
    dynctl: Any, started: list[Any], given: list[str]
) -> None:
    ran = dynctl("serve", "frontend", *given)
    assert (ran.code, ran.err, len(started)) == (0, "", 1)


@pytest.mark.parametrize("command", ["frontend", "router", "epp"])
@pytest.mark.parametrize("variable", WORKER_VARIABLES)
def test_a_variable_of_workers_is_named_on_a_router(
    dynctl: Any,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    command: str,
) -> None:
    monkeypatch.setenv(variable, "1")
    ran = dynctl("serve", command, "--worker", "http://127.0.0.1:1")
    expected = f"warning: {variable} has no effect on serve {command}: set it on the workers\n"
    assert (ran.code, ran.err, len(started)) == (0, expected, 1)


def test_a_server_of_nats_alone_shares_no_load(
    dynctl: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_SERVER", "nats://127.0.0.1:4222")
    for command in ("frontend", "router", "epp"):
        own = ["--worker", "http://127.0.0.1:1"]
        ran = dynctl("serve", command, *own, "--router-replica-sync")
        assert f"NATS_SERVER has no effect on serve {command}" in ran.err
        assert "or --router-replica-nats (NATS_SERVER is for the workers of a Dynamo" in ran.err


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.needs], ids=lambda one: one.field)
def test_an_option_of_a_simulated_engine_names_what_it_needs(
    dynctl: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch, option: Any
) -> None:
    given = [option.flag.replace("--", "--no-", 1)] if option.default is True else [option.flag]
    values = {"kv_load_failure_policy": "fail", "replay": "tcp://127.0.0.1:0"}
    given += [] if option.type is bool else [values.get(option.field, "3")]
    off = ["--kv-events", ""] + (["--replay", ""] if option.field != "replay" else [])
    ran = dynctl("serve", "engine", *off, *given)
    assert (ran.code, len(started)) == (0, 1)
    assert f"warning: {option.flag} has no effect without --" in ran.err
    needs = [need.replace("_", "-").split("=") for need in option.needs]
    met = [f"--{needs[0][0]}", needs[0][1] if len(needs[0]) > 1 else "3"]
    if met[0] in ("--kv-events", "--replay"):
        met = []
    ran = dynctl("serve", "engine", *met, *given)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DYN_KV_TRANSFER_ENFORCEMENT", "sometimes"), ("DYN_KV_TRANSFER_PREFERRED_WEIGHT", "much")],
)
def test_a_bad_policy_fails_before_topology_is_waited_for(
    dynctl: Any,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    ran = dynctl("serve", "engine")
    assert f"warning: {variable} has no effect without DYN_TOPOLOGY_ENABLED=true" in ran.err
    started.clear()
    monkeypatch.setenv("DYN_TOPOLOGY_ENABLED", "true")
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "zone")
    ran = dynctl("serve", "engine")
    assert (ran.code, started, variable in ran.err) == (1, [], True)
    ran = dynctl("topology", "wait", "--path", tmp_path / "later", "--timeout", "600")
    assert (ran.code, variable in ran.err, "Waiting" in ran.err) == (2, True, False)


#: The flags that the guides of Dynamo name.
GUIDE_FLAGS = (
    *("--router-mode", "--router-temperature", "--kv-cache-block-size", "--no-router-kv-events"),
    *("--router-kv-overlap-score-weight", "--no-router-track-prefill-tokens", "--no-kv-events"),
    *("--router-prefill-load-model", "--router-queue-threshold", "--router-queue-policy"),
    *("--serve-indexer", "--use-remote-indexer", "--aic-backend", "--aic-system"),
    *("--aic-model-path", "--aic-backend-version", "--aic-tp-size", "--router-durable-kv-events"),
    *("--event-plane", "--kv-overlap-score-weight", "--router-ttl", "--router-max-tree-size"),
    *("--router-prune-target-ratio", "--active-decode-blocks-threshold", "--router-reset-states"),
    *("--active-prefill-tokens-threshold", "--router-replica-sync", "--http-port"),
)


def test_the_help_of_a_frontend_has_every_flag_of_the_guides(dynctl: Any) -> None:
    words = re.split(r"[\s,]+", dynctl("serve", "frontend", "--help=all").out)
    assert set(GUIDE_FLAGS) <= set(words)


@pytest.mark.parametrize("prefix", ["--aic", "--ais"])
def test_an_error_names_the_flag_that_was_typed(dynctl: Any, tmp_path: Path, prefix: str) -> None:
    line = ["config", "show", "--router-prefill-load-model", "aic"]
    ran = dynctl(*line, f"{prefix}-system", "h200_sxm")
    assert (ran.code, f"{prefix}-backend, {prefix}-model-path not set" in ran.err) == (2, True)
    line += [f"{prefix}-backend", "vllm", f"{prefix}-model-path", str(tmp_path)]
    ran = dynctl(*line, f"{prefix}-system", "abacus")
    assert (ran.code, f"error: {prefix}-system abacus: unknown" in ran.err) == (2, True)
    ran = dynctl(*line, f"{prefix}-system", "h200_sxm")
    assert (ran.code, f"error: {prefix}-model-path {tmp_path}" in ran.err) == (2, True)


def test_config_show_lists_every_option_of_serve_that_steers_routing(dynctl: Any) -> None:
    report = dynctl("config", "show", "-o", "json").json
    flags = {row["flag"] for row in report["settings"] + report["serving"]}
    aliases = {name for row in report["settings"] for name in row["aliases"]}
    panels: tuple[str, ...] = (
        "Router",
        "Busy",
        "KV-transfer",
        "Conditional",
        "Older",
        "Other routers of",
    )
    panels += ("Limits of engines", "Not supported")
    steering = {
        str(option.opts[0])
        for option in _commands()["frontend"].params
        if str(getattr(option, "rich_help_panel", None)).startswith(panels)
    } | {"--kv-cache-block-size"}
    assert steering - {"--preset"} <= flags | aliases
    shown = dynctl("config", "show", "--kv-cache-block-size", "64").out
    assert re.search(r"kv_cache_block_size +64 +flag --kv-cache-block-size", shown)


PAIR: list[dict[str, Any]] = [
    {"name": "prefill-a0", "role": "prefill", **zone("zone-a")},
    {"name": "decode-a0", "role": "decode", **zone("zone-a")},
]


@pytest.mark.parametrize("name", list(SETTINGS))
async def test_a_frontend_starts_and_serves_with_every_setting(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    flags: dict[str, str | bool] = {}
    for other, text in {**BESIDE.get(name, {}), name: another_value(SETTINGS[name])}.items():
        truth = text == "true" if SETTINGS[other].type is bool else text
        flags[ROUTER_OPTIONS[other].flags[0]] = truth
    async with site(PAIR, router=resolve(flags, {}).config) as fleet:
        fleet.frontend.log_start()
        assert "serving on " in caplog.text
        ids = {worker.name: worker.worker_id for worker in fleet.service.router.registry}
        pins = {"prefill_worker_id": ids["prefill-a0"], "decode_worker_id": ids["decode-a0"]}
        body = chat_body(WORDS, nvext=pins)
        for path in ("/v1/chat/completions", "/v1/route", "/v1/chat/completions"):
            status, answer, _ = await fleet.post(path, body)
            assert status == 200, answer
        for path in ("/v1/workers", "/v1/fleet", "/metrics", "/health"):
            status, answer = await fleet.get(path)
            assert status == 200, answer


def test_config_show_reads_the_file_of_links_as_serve_does(dynctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text("levels: []\n")
    line = ("config", "show", "--router-kv-transfer-weight", "50", "--router-kv-transfer-qos")
    ran = dynctl(*line, str(path))
    assert ran.code == 2
    assert "beyond is missing" in ran.err
    ran = dynctl(*line, str(tmp_path / "other.yaml"))
    assert ran.code == 2
    assert "the file does not exist" in ran.err
