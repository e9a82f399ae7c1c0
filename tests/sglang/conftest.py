"""The suite against a real SGLang: marked, with a plain message when SGLang is not installed."""

from pathlib import Path

import pytest

from tests.sglang.stack import SGLANG_PYTHON
from tests.vllm.conftest import finding, installed_version, judged, pytest_terminal_summary

__all__ = ("finding", "judged", "pytest_terminal_summary")

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session", autouse=True)
def sglang_version() -> str:
    return installed_version("sglang", SGLANG_PYTHON)
