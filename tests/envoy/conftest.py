"""The suite behind a real Envoy: marked, with a plain message when Envoy is not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dynamo.processes import ProcessGroup
from tests.envoy.gateway import PROGRAM

HERE = Path(__file__).resolve().parent


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    processes = ProcessGroup(tmp_path)
    yield processes
    processes.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.envoy)
            if not PROGRAM:
                item.add_marker(pytest.mark.skip(reason="no Envoy: run make test-envoy"))
