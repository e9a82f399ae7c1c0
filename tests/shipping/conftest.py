"""The suite of what is shipped: builds, installs and checks it with the tools of others."""

from pathlib import Path

import pytest

from tests.kube.conftest import api_server
from tests.kube.witness.conftest import kubectl
from tests.shipping.artefacts import SHIP_PYTHON

__all__ = ["api_server", "kubectl"]

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ship)


@pytest.fixture(scope="session", autouse=True)
def tools() -> Path:
    """The directory of the tools. Ends the run without them: a suite that skips itself would look
    like a green one."""
    if not SHIP_PYTHON or not Path(SHIP_PYTHON).is_file():
        pytest.exit("DYNCTL_SHIP_PYTHON is not set; run `make test-ship`", returncode=2)
    return Path(SHIP_PYTHON).parent
