"""Nothing is silent: what a user sets has an effect, or a warning or an error names it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import dynctl as package
from dynctl.base.options import OUTPUT, PLANE_VARIABLES, READ_BY, SOURCES, GlobalOptions
from dynctl.cli.app import build_app
from dynctl.cli.global_options import _without_effect
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.settings.router_settings import resolve
from router_core import SETTINGS, Setting
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
    monkeypatch.setattr("dynctl.serving.http.router_server.run_router", takes)
    monkeypatch.setattr("dynctl.simulation.engine.process.run_engine", takes)
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
    typed = given[0] if way == "flag" else option.env[0]
    if way == "variable":
        monkeypatch.setenv(option.env[0], text)
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
    "etcd_client": ("gateway", "gateway"),
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
PLACES: dict[str, dict[str, Any]] = {
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
    assert set(PLACES) == set(READ_BY)


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
        warning = f"warning: {name} has no effect on serve frontend: it has no source\n"
        assert (ran.err, started[0].dynamo) == (warning, None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--discovery", "file", "--wait", "3"], "--wait has no effect"),
        (["--discovery", "file", "--token", "x"], "--token has no effect"),
        (["--discovery", "file", "--etcd-client", "gateway"], "--etcd-client has no effect"),
        (["--discovery", "file", "--model-name", "m"], "--model-name has no effect"),
        (["--discovery", "file", "--kv-cache-block-size", "32"], "--kv-cache-block-size has no"),
        (["--response-port", "1234"], "--response-port has no effect without --discovery"),
        (["--migration-limit", "2"], "--migration-limit has no effect without --discovery"),
        (["--migration-max-seq-len", "2"], "--migration-max-seq-len has no effect"),
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
        (["--dyn-namespace", "prod"], "--dyn-namespace has no effect"),
        (["--wait", "3"], "--wait has no effect"),
        (["--etcd-client", "gateway"], "--etcd-client has no effect"),
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


@pytest.mark.parametrize("source", list(PLACES))
@pytest.mark.parametrize("name", list(GLOBALS))
def test_each_source_names_the_options_that_it_does_not_read(source: str, name: str) -> None:
    if name in SOURCES:
        return  # it names a source itself
    values = {**PLACES[source], name: GLOBALS[name][1]}
    options = GlobalOptions(**values, given=frozenset(values), context_applied=True)
    named = list(_without_effect(options, "route", False, frozenset()))
    flag = "--" + name.replace("_", "-")
    if name in OUTPUT | READ_BY[source]:
        assert named == []
    else:
        (one,) = named
        assert one.startswith(flag)
        assert source in one


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("route --demo hi -n x", "--namespace (-n) has no effect with --demo"),
        ("workers list --timeout 3 --demo", "--timeout has no effect with --demo"),
        ("explain DYR0101 --discovery etcd", "--discovery has no effect on explain"),
        (
            "config show --router-mode direct --router-session-affinity-ttl-secs 5",
            "--router-session-affinity-ttl-secs has no effect with --router-mode direct: expected"
            " kv or round-robin or random or power-of-two or least-loaded or device-aware-weighted",
        ),
        ("config show -A", "--all-namespaces (-A) has no effect on config show"),
        ("top --once --demo --wait 3", "--wait has no effect with --demo"),
    ],
)
def test_commands_name_options_without_effect(dynctl: Any, line: str, named: str) -> None:
    ran = dynctl(*line.split())
    assert (ran.code, ran.err) == (0, f"warning: {named}\n")


#: Options of other programs in dynctl's texts: kubectl, engines, Dynamo and its operator.
FOREIGN = frozenset(
    (
        *("--api-group", "--config", "--field-selector", "--overwrite", "--patch-file"),
        *("--previous", "--server-side", "--type", "--restricted", "--restricted-namespace"),
        *("--disaggregation-mode", "--is-decode-worker", "--is-prefill-worker"),
        *("--enable-cache-report", "--enable-prompt-tokens-details", "--kv-events-config"),
        *("--page-size", "--prefix-caching-hash-algo", "--publish-events-and-metrics"),
        *("--served-model-name", "--durable-kv-events"),
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
    known = {*_options(typer.main.get_command(build_app())), *FOREIGN, *NOT_NAMES}
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


def test_the_readme_lists_every_feature_that_settings_wait_for() -> None:
    readme = (Path(package.__file__).parents[1] / "README.md").read_text()
    section = readme.partition("## Not built yet")[2].lower()
    missing = {one.needs for one in SETTINGS.values() if one.needs.lower() not in section}
    assert not missing


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
