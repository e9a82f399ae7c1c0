"""The suite against a real SGLang: marked, with a plain message when SGLang is not installed."""

import subprocess
from pathlib import Path

import pytest

from tests.sglang.stack import SGLANG_PYTHON
from tests.vllm.conftest import finding, judged, pytest_terminal_summary
from tests.waiting import patience

__all__ = ("finding", "judged", "pytest_terminal_summary")

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session", autouse=True)
def sglang_version() -> str:
    """Ends the run if there is no SGLang: a suite that skips itself would look like a green one."""
    if not SGLANG_PYTHON:
        pytest.exit("DYNCTL_SGLANG_PYTHON is not set; run `make test-sglang`", returncode=2)
    asked = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run(
            [SGLANG_PYTHON, "-c", asked],
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.exit(f"{SGLANG_PYTHON} has no sglang: {error}; run `make test-sglang`", 2)
    return done.stdout.strip()
