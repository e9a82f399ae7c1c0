"""Fixtures of tests on a cluster: a server of their own, with or without Dynamo's definitions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynctl.cli.app import run
from tests.kube import crds
from tests.kube.api_server import ApiServer
from tests.kube.client import Api
from tests.kube.command_line import Ran, Run, unwrapped


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    """Plain HTTP, everything allowed, the clock of the machine, no custom resources."""
    with ApiServer() as server:
        yield server


@pytest.fixture
def dynamo_api_server() -> Iterator[ApiServer]:
    """As ``api_server``, with the definitions of Dynamo and Grove and the graphs' conversion."""
    with ApiServer() as server:
        crds.install(server)
        yield server


@pytest.fixture
def api(api_server: ApiServer) -> Iterator[Api]:
    with Api(api_server.url) as client:
        yield client


@pytest.fixture
def kubeconfig(api_server: ApiServer, tmp_path: Path) -> Path:
    return api_server.kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
def dynctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``dynctl("topology", "verify", "-A")`` -> exit code, stdout, stderr."""

    def runs(*words: object, width: int = 80) -> Ran:
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return Ran(code, captured.out, unwrapped(captured.err))

    return runs
