"""`dynctl serve`: options become configurations; what is wrong is said before anything starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynctl.serving.routing.config import ReplicaConfig
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.simulation.engine.config import OPTIONS
from tests.waiting import patience, until_now


@pytest.fixture
def started(monkeypatch) -> list[Any]:
    """Configurations that would have been run."""
    found: list[Any] = []

    def takes(config: Any, extra_routes: Any = ()) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("dynctl.serving.http.server.run_frontend", takes)
    monkeypatch.setattr("dynctl.serving.services.router_server.run_router", takes)
    monkeypatch.setattr("dynctl.serving.epp.process.run_picker", takes)
    monkeypatch.setattr("dynctl.simulation.engine.process.run_engine", takes)
    return found


@pytest.mark.parametrize("command", ["frontend", "router"])
@pytest.mark.seed("router-guide: arguments: --router-mode")
@pytest.mark.seed("router-guide: environment: DYN_KV_CACHE_BLOCK_SIZE")
@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_KV_CACHE_BLOCK_SIZE")
def test_flags_environment_and_preset_make_the_configuration(dynctl, started, monkeypatch, command):
    monkeypatch.setenv("DYN_HTTP_PORT", "9001")
    monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "0.25")
    monkeypatch.setenv("DYN_DISABLE_FRONTEND_ADMIN_API", "true")
    ran = dynctl(
        "serve", command, "--worker", "http://127.0.0.1:1,zone=a", "--worker", "http://127.0.0.1:2",
        "--router-mode", "round_robin", "--preset", "dynamo-0.9",
        "--no-router-decode-capacity-guard",
        "--decision-memory", "2MiB", "--api-token", "t", "--announce", "--drain-timeout", "3",
    )  # fmt: skip
    assert ran.code == 0
    without_effect = [line for line in ran.err.splitlines() if "preset dynamo-0.9: " not in line]
    assert without_effect == [
        "warning: DYN_ROUTER_TEMPERATURE has no effect with --router-mode round-robin: expected kv"
    ]
    (config,) = started
    assert (config.host, config.port) == ("127.0.0.1", 9001)
    assert config.workers == ("http://127.0.0.1:1,zone=a", "http://127.0.0.1:2")
    assert (config.router.router_mode, config.router.router_temperature) == ("round-robin", 0.25)
    assert config.router.decode_capacity_guard is False
    assert (config.preset, config.router.overload_status_code) == ("dynamo-0.9", 503)
    assert config.origins["router_mode"] == "flag --router-mode"
    assert config.origins["router_temperature"] == "env DYN_ROUTER_TEMPERATURE"
    assert (config.decision_memory_bytes, config.limits.drain_s) == (2 * 1024**2, 3.0)
    assert (config.api_token, config.admin_api, config.announce) == ("t", False, True)


@pytest.mark.seed("router-guide: arguments: --http-port")
def test_defaults_are_loopback_and_quiet(dynctl, started):
    assert dynctl("serve", "frontend").code == 0
    (config,) = started
    assert (config.host, config.port, config.log_decisions) == ("127.0.0.1", 8000, "off")
    assert (config.api_token, config.admin_api, config.announce) == (None, True, False)


def test_serve_alone_means_the_frontend(dynctl, started):
    assert dynctl("serve", "--worker", "http://127.0.0.1:1").code == 0
    assert dynctl("--no-color", "serve", "--http-port", "0").code == 0
    assert [config.port for config in started] == [8000, 0]
    assert dynctl("serve", "--help").out.startswith("Usage: dynctl serve [OPTIONS] COMMAND")
    assert "frontend" in dynctl("serve").out
    assert dynctl("serve", "nothing").code == 2
    assert len(started) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--router-temperature", "-1"], "--router-temperature: expected at least 0, got -1"),
        (["--router-mode", "fastest"], "--router-mode: expected one of kv, round-robin, "),
        (["--preset", "x"], "--preset x: expected one of dynamo-1.6, dynamo-0.9, ttft, throughput"),
        (["--decision-memory", "lots"], "--decision-memory 'lots': expected a number of bytes"),
        (["--log-decisions", "some"], "--log-decisions some: expected one of off, winner, all"),
        (["--log-format", "xml"], "--log-format xml: expected one of text, json"),
        (["--http-port", "70000"], "--http-port"),
        (["--http-port", "http"], "'http'"),
        (["--frontend", "http://127.0.0.1:1"], "--frontend specifies a source"),
    ],
)
def test_wrong_options_start_nothing(dynctl, started, arguments, expected):
    ran = dynctl("serve", "frontend", *arguments)
    assert (ran.code, ran.out, started) == (2, "", [])
    assert expected in ran.err
    assert "Traceback" not in ran.err


def test_a_bad_worker_is_named_before_anything_listens(dynctl):
    ran = dynctl("serve", "frontend", "--http-port", "0", "--worker", "ftp://x,role=prefill")
    assert (ran.code, ran.out) == (2, "")
    assert "ftp://x" in ran.err
    assert "Traceback" not in ran.err


def test_deprecated_and_unbuilt_flags_warn_on_stderr(dynctl, started):
    old = ("--kv-overlap-score-weight", "0", "--router-ttl", "5")
    ran = dynctl("serve", "frontend", *old, "--ais-backend-version", "1.0")
    assert ran.out == ""
    assert "--kv-overlap-score-weight is deprecated" in ran.err
    assert "--router-ttl is deprecated: use --router-ttl-secs" in ran.err
    assert "--ais-backend-version: a database of measured kernel times is not built" in ran.err
    (config,) = started
    assert (config.router.prefill_load_scale, config.router.overlap_score_credit) == (0, 0)
    assert config.router.router_ttl_secs == 5


@pytest.mark.seed("router-guide: arguments: --help")
def test_help_of_serve_frontend_has_every_flag_and_lists_the_old_apart(dynctl):
    out = dynctl("serve", "frontend", "--help=all").out
    for name, option in ROUTER_OPTIONS.items():
        assert option.flags[0] in out
        assert option.variable in out, name
    current, _, rest = out.partition("Older names of router settings")
    older, _, _ = rest.partition("─ Busy thresholds ─")
    for option in ROUTER_OPTIONS.values():
        for flag in option.flags[1:]:
            assert f"│ {flag} " in older
            assert f"│ {flag} " not in current
    for panel in ("Listening", "Workers and models", "Busy thresholds", "Not supported yet"):
        assert f"─ {panel} " in out


def test_engine_options_are_the_engines_own_table(dynctl, started):
    out = dynctl("serve", "engine", "--help=all").out
    for option in OPTIONS:
        assert option.flag in out
    ran = dynctl(
        "serve", "engine", "--name", "e", "--role", "prefill", "--port", "0", "--no-can-prefill",
        "--lora", "a", "--lora", "b", "--speedup-ratio", "2", "--fault-refuse", "503",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    (config,) = started
    assert (config.name, config.role, config.can_prefill) == ("e", "prefill", False)
    assert (config.lora, config.speedup_ratio, config.faults.refuse) == (("a", "b"), 2.0, 503)


def test_engine_reads_its_topology_from_the_environment(
    dynctl, started, monkeypatch, tmp_path: Path
):
    (tmp_path / "zone").write_text("zone-a\n")
    monkeypatch.setenv("DYN_TOPOLOGY_ENABLED", "true")
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path))
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "zone")
    monkeypatch.setenv("DYN_KV_TRANSFER_ENFORCEMENT", "required")
    assert dynctl("serve", "engine").code == 0
    (config,) = started
    assert config.topology_domains == {"zone": "zone-a"}
    assert config.kv_transfer_enforcement == "required"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--role", "encode"], "--role is 'encode'; expected aggregated or prefill or decode"),
        (["--fault-refuse", "200"], "--fault-refuse is 200"),
        (["--block-size", "0"], "--block-size is 0; expected 1..4096"),
        (["--view", "x"], "serve engine has no source"),
    ],
)
def test_wrong_engine_options(dynctl, started, arguments, expected):
    ran = dynctl("serve", "engine", *arguments)
    assert (ran.code, ran.out, started) == (2, "", [])
    assert expected in ran.err


@pytest.mark.parametrize("command", ["frontend", "router"])
def test_who_may_use_the_listener_and_how(dynctl, started, monkeypatch, tmp_path, command):
    monkeypatch.setenv("DYNCTL_API_KEY", "sk-1 sk-2")
    monkeypatch.setenv("DYNCTL_ENGINE_API_KEY", "sk-engine")
    token = tmp_path / "token"
    token.write_text("from-a-file\n")
    ran = dynctl(
        "serve", command, "--admin-token-file", str(token), "--api-key-file", "keys",
        "--key-requests-per-minute", "60", "--key-concurrency", "4", "--unix-socket", "a.sock",
        "--tls-cert", "c.pem", "--tls-key", "k.pem", "--compressed-requests", "--header-timeout",
        "2", "--keep-alive-timeout", "3", "--peer-connections", "5", "--system-port", "9090",
        "--system-host", "0.0.0.0",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    (config,) = started
    assert (config.api_token, config.api_keys) == ("from-a-file", ("sk-1", "sk-2"))
    assert (config.engine_api_key, config.api_key_file) == ("sk-engine", Path("keys"))
    assert (config.key_requests_per_minute, config.key_concurrency) == (60, 4)
    assert (config.tls_cert, config.tls_key) == (Path("c.pem"), Path("k.pem"))
    assert (config.unix_socket, config.compressed_requests) == (Path("a.sock"), True)
    limits = config.limits
    assert (limits.header_s, limits.keep_alive_s, limits.peer_connections) == (2.0, 3.0, 5)
    assert (config.system_host, config.system_port) == ("0.0.0.0", 9090)


@pytest.mark.parametrize("name", ["DYNCTL_ADMIN_TOKEN", "DYNCTL_API_TOKEN"])
def test_the_token_of_operators_has_two_names(dynctl, started, monkeypatch, name):
    monkeypatch.setenv(name, "t")
    assert dynctl("serve", "frontend").code == 0
    assert dynctl("serve", "frontend", "--admin-token", "u").code == 0
    assert [config.api_token for config in started] == ["t", "u"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--tls-cert", "c.pem"], "--tls-cert needs --tls-key"),
        (["--tls-key", "k.pem"], "--tls-key needs --tls-cert"),
        (["--admin-token", "t", "--admin-token-file", "{file}"], "set only one of them"),
        (["--admin-token-file", "{empty}"], "expected one line of printable ASCII"),
        (["--engine-api-key-file", "{missing}"], "the file does not exist"),
    ],
    ids=str,
)
def test_problems_of_access_are_named_and_no_secret(dynctl, started, tmp_path, given, problem):
    files = {name: tmp_path / name for name in ("file", "empty", "missing")}
    files["file"].write_text("s3cret-in-a-file")
    files["empty"].touch()
    ran = dynctl("serve", "frontend", *(word.format(**files) for word in given))
    assert (ran.code, started) == (2, [])
    assert problem in ran.err
    assert "s3cret" not in ran.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--router-replica-bind 5560", ReplicaConfig("tcp://127.0.0.1:5560")),
        (
            "--router-replica-bind tcp://0.0.0.0:0 --router-replica-peer tcp://a:1 "
            "--router-replica-peer tcp://b:1",
            ReplicaConfig("tcp://0.0.0.0:0", ("tcp://a:1", "tcp://b:1")),
        ),
        ("--router-replica-bind ipc:///tmp/a", ReplicaConfig("ipc:///tmp/a")),
        (
            "--router-replica-nats nats://n:4222 --router-replica-group blue",
            ReplicaConfig(nats="nats://n:4222", group="blue"),
        ),
    ],
)
def test_replicas(dynctl, started, line, expected):
    ran = dynctl("serve", "frontend", "--router-replica-sync", *line.split())
    assert (ran.code, ran.err) == (0, "")
    assert started[0].replicas == expected


def test_replica_sync_without_replicas_is_named(dynctl, started):
    ran = dynctl("serve", "router", "--router-replica-sync")
    assert ran.code == 0
    assert started[0].replicas is None
    assert ran.err.startswith("warning: no replica to share load with: set --router-replica-bind")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--router-replica-bind 5560", "--router-replica-bind needs --router-replica-sync"),
        (
            "--router-replica-sync --router-replica-peer tcp://a:1",
            "--router-replica-peer needs --router-replica-bind",
        ),
        (
            "--router-replica-sync --router-replica-bind 1 --router-replica-nats nats://n",
            "load is shared over NATS or over ZMQ",
        ),
        (
            "--router-replica-sync --router-replica-bind 65536",
            "--router-replica-bind 65536: expected a port from 0 to 65535",
        ),
        (
            "--router-replica-sync --router-replica-bind here",
            "--router-replica-bind here: expected a port",
        ),
        (
            "--router-replica-sync --router-replica-bind 1 --router-replica-group x",
            "--router-replica-group x has no effect without --router-replica-nats",
        ),
        (
            "--router-replica-sync --router-replica-nats nats://n --router-replica-group a.b",
            "--router-replica-group 'a.b': expected at most 64 letters",
        ),
    ],
)
def test_replicas_that_cannot_be(dynctl, started, line, problem):
    ran = dynctl("serve", "frontend", *line.split())
    assert (ran.code, started) == (2, [])
    assert problem in ran.err


def test_the_start_shows_what_a_preset_changes(dynctl, started):
    ran = dynctl("serve", "frontend", "--preset", "dynamo-0.9")
    assert (ran.code, len(started)) == (0, 1)
    first = ran.err.splitlines()[0]
    assert first.startswith("preset dynamo-0.9: --router-mode round-robin, ")
    assert dynctl("serve", "frontend").err == ""


def test_config_show_lists_what_a_preset_changes(dynctl):
    ran = dynctl("config", "show", "--preset", "dynamo-0.9", "--router-queue-threshold", "2")
    lines = ran.out.splitlines()
    assert lines[1].startswith("changes router_mode round-robin, ")
    assert "router_queue_threshold 4" not in ran.out
    assert "changes" not in dynctl("config", "show").out.splitlines()[1]


ROUTER = "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--share-port"], "--share-port needs --router"),
        (["--router-token-file", "x"], "--router-token-file needs --router"),
        (["--router", "8080"], "expected the address of a dynctl serve router"),
        (["--router", "http://u:s3cret@h:1"], "expected the address of a dynctl serve router"),
        (["--router", "http://h:1/v1"], "expected the address of a dynctl serve router"),
        (["--router", "http://h:99999"], "expected the address of a dynctl serve router"),
        (["--router", ROUTER, "--worker", "http://h:1"], "--worker and --router"),
        (["--router", ROUTER, "--workers-file", "w.yaml"], "--workers-file and --router"),
    ],
    ids=str,
)
def test_problems_of_a_shared_router_are_named(dynctl, started, given, problem):
    ran = dynctl("serve", "frontend", *given)
    assert (ran.code, started) == (2, [])
    assert problem in ran.err
    assert "s3cret" not in ran.err


def test_a_shared_router_and_its_token(dynctl, started, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("t0ken\n")
    ran = dynctl(
        "serve", "frontend", "--router", ROUTER + "/", "--share-port",
        "--router-token-file", str(tmp_path / "token"),
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    monkeypatch.setenv("DYNCTL_ROUTER", ROUTER)
    monkeypatch.setenv("DYNCTL_ROUTER_TOKEN", "of the environment")
    assert dynctl("serve", "frontend").code == 0
    first, second = started
    assert (first.router_url, first.router_token, first.share_port) == (ROUTER, "t0ken", True)
    assert (second.router_url, second.router_token) == (ROUTER, "of the environment")
    assert "t0ken" not in repr(first)


@pytest.mark.parametrize(
    "option",
    [
        ["--router-mode", "random"],
        ["--router-temperature", "0.5"],
        ["--model-name", "m"],
        ["--kv-cache-block-size", "32"],
        ["--index-memory", "1GiB"],
        ["--index-peer", "http://127.0.0.1:1"],
    ],
    ids=str,
)
def test_what_a_shared_router_decides_is_named(dynctl, started, option):
    ran = dynctl("serve", "frontend", "--router", ROUTER, *option)
    assert (ran.code, len(started)) == (0, 1)
    assert f"warning: {option[0]} has no effect with --router" in ran.err


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--router", ROUTER], "--processes and --router: set only one of them"),
        (["--share-port"], "--share-port needs --router"),
        (["--unix-socket", "s"], "--unix-socket and --processes: set only one of them"),
        (["--index-peer", "http://a:1"], "--index-peer with --processes needs --admin-token"),
        (["--process-timeout", "-1"], "--process-timeout"),
        (["--processes", "0"], "--processes"),
        (["--processes", "65"], "--processes"),
    ],
    ids=str,
)
def test_what_several_processes_cannot_share_is_named(dynctl, started, given, problem):
    ran = dynctl("serve", "frontend", "--processes", "2", *given)
    assert (ran.code, started) == (2, [])
    assert problem in ran.err


def test_several_processes(dynctl, started, monkeypatch):
    counts: list[int] = []
    timeouts: list[float] = []

    def takes(_config: Any, count: int, silent_s: float, module: str) -> int:
        counts.append(count)
        timeouts.append(silent_s)
        return 0

    monkeypatch.setattr("dynctl.serving.services.processes.run_processes", takes)
    assert dynctl("serve", "frontend", "--processes", "3").code == 0
    ran = dynctl("serve", "frontend", "--processes", "2", "--key-concurrency", "5")
    assert (ran.code, counts, started) == (0, [3, 2], [])
    assert "hold for each of the frontend processes" in ran.err
    assert dynctl("serve", "frontend", "--processes", "1").code == 0
    assert (counts, len(started)) == ([3, 2], 1)
    assert dynctl("serve", "frontend", "--processes", "2", "--process-timeout", "5").code == 0
    assert timeouts == [30.0, 30.0, 5.0]


def test_index_peers(dynctl, started):
    line = "--index-peer http://a:8000 --index-peer https://b"
    assert dynctl("serve", "frontend", *line.split()).code == 0
    assert started[0].index_peers == ("http://a:8000", "https://b")


@pytest.mark.parametrize("url", ["a:8000", "http://", "http://u:p@a", "http://a/v1?x", "ftp://a"])
def test_index_peers_that_cannot_be(dynctl, started, url):
    ran = dynctl("serve", "frontend", "--index-peer", url)
    assert (ran.code, started) == (2, [])
    shown = url.replace("u:p@", "***@")
    assert f"error: --index-peer {shown}: expected http://HOST:PORT" in ran.err


@pytest.mark.parametrize("user", ["", "user"])
@pytest.mark.parametrize(
    "line",
    [
        "serve frontend --router URL",
        "serve frontend --otlp-endpoint URL",
        "serve frontend --otlp-endpoint http://127.0.0.1:1?key=s3cret",
        "serve router --index-peer URL",
        "workers list --frontend URL",
        "record new.dynrec --frontend URL",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(dynctl, started, line, user):
    ran = dynctl(*line.replace("URL", f"http://{user}:s3cret@127.0.0.1:1").split())
    assert (ran.code, started) == (2, [])
    assert "s3cret" not in ran.out + ran.err


def test_an_address_that_is_none_is_named(dynctl):
    ran = dynctl("workers", "list", "--frontend", "http://[")
    assert ran.code == 2
    assert "--frontend http://[: expected http://HOST:PORT" in ran.err


@pytest.mark.seed("router-guide: deployments: Standalone")
@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("dynamo.prefill.generate", "needs Dynamo's discovery"),
        ("prefill", "expected NAMESPACE.COMPONENT.ENDPOINT, for example dynamo.prefill.generate"),
        ("dynamo..generate", "expected NAMESPACE.COMPONENT.ENDPOINT"),
    ],
)
def test_a_dynamo_endpoint_is_refused_with_what_is_missing(dynctl, started, endpoint, says):
    ran = dynctl("serve", "router", "--endpoint", endpoint)
    assert (ran.code, started) == (2, [])
    assert says in " ".join(ran.err.split())


@pytest.mark.parametrize("command", ["frontend", "router"])
def test_the_variable_of_a_dynamo_endpoint_is_named(dynctl, started, monkeypatch, command):
    monkeypatch.setenv("DYN_ROUTER_ENDPOINT", "dynamo.prefill.generate")
    ran = dynctl("serve", command)
    assert (ran.code, len(started)) == (0, 1)
    assert "warning: DYN_ROUTER_ENDPOINT has no effect: set --endpoint on dynctl serve" in ran.err


@pytest.mark.parametrize("command", ["frontend", "router"])
def test_only_a_template_of_a_local_model_is_trusted(dynctl, started, tmp_path, command):
    ran = dynctl("serve", command, "--trust-template")
    assert ran.code == 2
    assert "--trust-template: expected --model-path DIR" in ran.err
    assert not started
    ran = dynctl("serve", command, "--trust-template", "--model-path", str(tmp_path))
    assert ran.code == 0
    assert [config.trust_template for config in started] == [True]


def test_what_clients_may_direct_and_share(dynctl, started):
    keys = "--api-key", "sk-0123456789abcdef"
    given = "--isolate-keys", "--hide-key-details"
    fields = "--client-fields", "priority,bootstrap_host", "--client-fields", "session_params"
    assert dynctl("serve", "frontend", *keys, *given, *fields).err == ""
    assert dynctl("serve", "epp", "--worker", "http://127.0.0.1:1", *fields).code == 0
    assert dynctl("serve", "frontend").code == 0
    allowed = {"priority", "bootstrap_host", "session_params"}
    found = [(one.isolate_keys, one.key_details, one.client_fields) for one in started]
    assert found == [(True, False, allowed), (False, True, allowed), (False, True, set())]
    ran = dynctl("serve", "frontend", "--client-fields", "priority,messages")
    assert ran.code == 2
    assert "--client-fields messages: expected one of kv_transfer_params, " in ran.err


@pytest.mark.parametrize(
    "flag", [["--isolate-keys"], ["--hide-key-details"], ["--client-fields", "priority"]]
)
def test_rights_of_clients_without_effect_are_named(dynctl, started, flag):
    ran = dynctl("serve", "router", "--api-key", "sk-0123456789abcdef", *flag)
    assert f"{flag[0]} has no effect on serve router: set it on the frontends" in ran.err
    if len(flag) == 1:
        assert f"{flag[0]} has no effect" in dynctl("serve", "frontend", *flag).err


_APART = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


#: The command line while it imports its modules, for as long as the test needs.
_STARTING = """
import sys, time, types
app = sys.modules["dynctl.cli.app"] = types.ModuleType("dynctl.cli.app")
app.main = lambda: time.sleep(600)
from dynctl.__main__ import main
main()
"""


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_the_first_process_of_a_container_ends_while_it_starts() -> None:
    """A kernel ignores a signal without a handler for process 1."""
    if shutil.which("unshare") is None or subprocess.run([*_APART, "true"]).returncode:
        pytest.skip("no process namespaces here")
    with subprocess.Popen([*_APART, sys.executable, "-c", _STARTING]) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            until_now(lambda: bool(children.read_text().split()), 20)
            first = int(children.read_text().split()[0])
            until_now(lambda: _catches(first, signal.SIGTERM), 20)
            os.kill(first, signal.SIGTERM)
            assert outer.wait(timeout=patience(20)) == 128 + signal.SIGTERM
        finally:
            outer.kill()
