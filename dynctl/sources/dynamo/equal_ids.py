"""Refuse to answer for workers of which several have one id."""

from __future__ import annotations

from dynctl.base.errors import UsageProblem
from dynctl.health.deployment import Deployment, ProblemCode


def refuse_equal_ids(deployment: Deployment) -> None:
    """Raises UsageProblem where workers of different namespaces have one id.

    A router knows workers by their ids: of each two it would show one, with the load of both.
    """
    code = ProblemCode.ID_NOT_UNIQUE
    count = sum(problem.code is code for problem in deployment.problems)
    if not count:
        return
    some = "1 worker has" if count == 1 else f"{count:,} workers have"
    raise UsageProblem(
        f"{some} the id of a worker in another namespace: on Kubernetes ids are hashes of the "
        "names of pods",
        "read one namespace: -n NAMESPACE, or --dyn-namespace with one of "
        + ", ".join(deployment.namespaces[:8]),
    )
