"""The suite with the client libraries of others: a plain message when they are not installed."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SDK_PYTHON = os.environ.get("DYNCTL_SDK_PYTHON", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sdk)


@pytest.fixture(scope="session", autouse=True)
def sdk_python() -> str:
    """The Python with the libraries. Ends the run without it: a suite that skips itself would look
    like a green one."""
    if not SDK_PYTHON or not Path(SDK_PYTHON).is_file():
        pytest.exit("DYNCTL_SDK_PYTHON is not set; run `make test-sdk`", returncode=2)
    return SDK_PYTHON
