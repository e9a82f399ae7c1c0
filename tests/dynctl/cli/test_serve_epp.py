"""`dynctl serve epp`: its options, and the process from its start to SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynctl.serving.routing.config import PickerConfig
from tests.ports import free_port
from tests.waiting import patience


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that would have been run."""
    found: list[Any] = []

    def takes(config: Any) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("dynctl.serving.epp.process.run_picker", takes)
    return found


def test_defaults_are_loopback_with_tls_and_429(dynctl: Any, started: list[Any]) -> None:
    assert dynctl("serve", "epp", "--worker", "http://127.0.0.1:1").code == 0
    (config,) = started
    assert config.picker == PickerConfig("127.0.0.1", 9002, 9003, True)
    assert (config.host, config.port, config.tls_cert) == ("127.0.0.1", 9090, None)
    assert config.router.overload_status_code == 429
    assert (config.limits.body_bytes, config.limits.stream_silence_s) == (16 << 20, 3600)


def test_options_make_the_configuration(
    dynctl: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNCTL_POOL", "llama")
    ran = dynctl(
        *("serve", "epp", "-n", "inference", "--no-tls", "--health-port", "-1"),
        *("--pod-kv-events", "5557", "--pod-replay", "5558", "--pod-domain", "rack=x/rack"),
        *("--http-overload-status-code", "503", "--body-limit", "1MiB", "--host", "0.0.0.0"),
    )
    assert ran.code == 0, ran.err
    (config,) = started
    pool = config.picker.pool
    assert (pool.name, pool.cluster.namespace, pool.domains) == (
        "llama",
        "inference",
        {"rack": "x/rack"},
    )
    assert (pool.events_port, pool.replay_port) == (5557, 5558)
    assert (config.picker.tls, config.picker.health_port) == (False, None)
    # The operators' HTTP stays on loopback: --host is for gateways.
    assert (config.picker.host, config.host) == ("0.0.0.0", "127.0.0.1")
    assert (config.router.overload_status_code, config.limits.body_bytes) == (503, 1 << 20)


def test_dynamo_workers_are_reached_through_its_frontends(
    dynctl: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    words = ("--dynamo-frontend", "[::1]:8001", "--namespace-prefix", "prod")
    assert dynctl("serve", "epp", *words).code == 0
    (config,) = started
    assert config.picker.dynamo_frontend == ("::1", 8001)
    assert config.dynamo.namespace == "prod*"
    # Engines of the options win over the variables of a Dynamo deployment, as in a frontend.
    assert dynctl("serve", "epp", "--worker", "http://127.0.0.1:1").code == 0
    assert started[1].dynamo is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tls-cert", "c.pem"], "--tls-cert needs --tls-key"),
        (["--tls-key", "k.pem"], "--tls-key needs --tls-cert"),
        (["--tls-cert", "c", "--tls-key", "k", "--no-tls"], "--no-tls and --tls-cert: set only"),
        (["--pool", "p", "--pod-domain", "zone"], "--pod-domain zone: expected DOMAIN=LABEL"),
        (["--discovery", "file"], "Dynamo workers have no HTTP address"),
        (["--dynamo-frontend", ":1"], "--dynamo-frontend needs Dynamo's discovery"),
        (["--discovery", "file", "--dynamo-frontend", "a:1"], "expected IP:PORT, or :PORT"),
        (["--discovery", "file", "--dynamo-frontend", ":0"], "expected IP:PORT, or :PORT"),
        (["--discovery", "file", "--pool", "p"], "--discovery and --worker, --workers-file or"),
        (["--body-limit", "1B"], "--body-limit 1B: expected 1KiB to 1GiB"),
        (["--body-limit", "x"], "--body-limit 'x': expected a number of bytes"),
        (["--log-format", "xml"], "--log-format xml: expected one of text, json"),
    ],
)
def test_what_is_wrong_is_named(
    dynctl: Any, started: list[Any], words: list[str], text: str
) -> None:
    ran = dynctl("serve", "epp", *words)
    assert (ran.code, started) == (2, [])
    assert text in " ".join(ran.err.split())


def test_options_of_pods_without_a_pool_have_no_effect(dynctl: Any, started: list[Any]) -> None:
    ran = dynctl("serve", "epp", "--pod-kv-events", "5557")
    assert "--pod-kv-events has no effect without --pool" in ran.err
    assert started[0].picker.pool is None


def test_a_pool_is_in_one_namespace(dynctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n"
    )
    ran = dynctl("serve", "epp", "--pool", "p", "-A", "--kubeconfig", str(file), "--no-tls")
    assert ran.code == 2
    assert "--pool: an InferencePool is in one namespace" in ran.err


def test_the_process_tells_its_ports_and_ends_with_0() -> None:
    command = [sys.executable, "-m", "dynctl", "serve", "epp", "--announce"]
    command += ["--port", "0", "--health-port", "0", "--http-port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=patience(30))[1]
        finally:
            process.kill()
    assert process.returncode == 0
    assert len({started["port"], started["picker_port"], started["health_port"]}) == 3
    assert "TLS with a certificate made at this start" in said
    assert "no workers are configured" in said
    assert "Traceback" not in said


def test_one_port_for_two_listeners_is_named() -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "dynctl", "serve", "epp", "--no-tls"]
    done = subprocess.run(
        [*command, "--http-port", "0", "--port", port, "--health-port", port],
        capture_output=True,
        text=True,
        timeout=patience(30),
    )
    assert done.returncode == 2
    assert f"error: cannot listen on 127.0.0.1:{port}: the address is in use" in done.stderr
    assert "Unclosed" not in done.stderr
