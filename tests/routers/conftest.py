"""The suite behind routers that others made: marked, with a plain message without any."""

from pathlib import Path

import pytest

from tests.routers.router import ROUTERS

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.routers)
            if not ROUTERS:
                item.add_marker(pytest.mark.skip(reason="no routers: run make test-routers"))
