"""What every test stands on: no trace of the developer's machine, and stable hypothesis runs."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dynctl.serving.telemetry.log_format import LOGGERS

# "ci" gives the same examples every time, so that a red build is reproducible by anyone;
# "explore" looks for new ones: HYPOTHESIS_PROFILE=explore make test.
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Started in the background (`make test &`, nohup), we would hand an ignored Ctrl-C down to every
# child, and none of those that tests interrupt would end.
signal.signal(signal.SIGINT, signal.default_int_handler)

_PREFIXES = ("DYN_", "DYNCTL_", "ETCD_", "NATS_", "OTEL_")
_NAMES = {
    "KUBECONFIG",
    "KUBERNETES_SERVICE_HOST",
    "KUBERNETES_SERVICE_PORT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLUMNS",
    "LINES",
}


@pytest.fixture(autouse=True)
def isolated_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Settings, clusters, proxies and colours of the machine do not reach a test.

    Child processes inherit the same clean environment, since it is ``os.environ`` that changes.
    """
    for name in list(os.environ):
        if name.upper() in _NAMES or name.upper().startswith(_PREFIXES):
            monkeypatch.delenv(name)
    home: Path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("CONFIG", "CACHE", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Where a command that runs in process sends its logs ends with the test."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(one.handlers), one.propagate, one.level) for one in loggers]
    yield
    for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
        one.handlers[:] = handlers
        one.propagate = propagate
        one.setLevel(level)
