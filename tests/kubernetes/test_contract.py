"""The contract of the API server of our tests, held by a real one."""

import pytest

from tests.kube.test_contract import *  # noqa: F403
from tests.kube.test_contract import Place
from tests.waiting import until_now


@pytest.fixture(autouse=True)
def default_account(place: Place) -> None:
    """Without it pods are refused; a controller makes it after the namespace."""
    until_now(lambda: place.core.list_namespaced_service_account(place.namespace).items)
