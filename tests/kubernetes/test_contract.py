"""The contract of the API server of our tests, held by a real one."""

from tests.kube.test_contract import *  # noqa: F403
