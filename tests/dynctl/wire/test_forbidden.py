"""The missing permission in the 403 message of an API server."""

import pytest

from dynctl.wire.kubernetes.forbidden import lacking


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            'pods is forbidden: User "a" cannot list resource "pods" in API group "" in the '
            'namespace "prod"',
            "no permission to list pods in prod",
        ),
        (
            'nodes is forbidden: User "a" cannot list resource "nodes" in API group "" at the '
            "cluster scope",
            "no permission to list nodes",
        ),
        (
            'pods "w-0" is forbidden: User "a" cannot get resource "pods/exec" in API group "" in '
            'the namespace "prod": RBAC: role.rbac.authorization.k8s.io "x" not found',
            "no permission to get pods/exec in prod",
        ),
        ("denied by the policy of our company", ""),
        ("", ""),
    ],
)
def test_missing_permission(message: str, says: str):
    assert lacking(message) == says
