"""Checks of Dynamo's operators, which copy node labels to pods: DYT03. Modelled from source.

An operator watches the whole cluster, or only its own namespace. In the second case it holds a
lease there, and operators of the whole cluster leave that namespace to it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import option
from dynctl.verify.checks.access import rule
from dynctl.verify.cluster_facts import Account
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import cluster_of, has_cluster, has_policy
from dynctl.verify.wording import many, some
from dynctl.wire.kubernetes.names import OPERATOR_APP
from dynctl.wire.kubernetes.objects import KubeDeployment

_TOPOLOGIES: Final = (
    ("grove.io", "clustertopologybindings"),
    ("grove.io", "clustertopologies"),
)
_OF_THE_CLUSTER: Final = ("nodes",)
_NO_OPERATOR: Final = "no operator (DYT0301)"
_LOST: Final = {
    "nodes": "it cannot read node labels and copies none",
    "pods": "it cannot write the copied label",
    **{name: "it cannot read the levels of Grove topologies" for _, name in _TOPOLOGIES},
}


# -- operators -------------------------------------------------------------------------------------


FIRST_WITH_POLICY: Final = (1, 2)
"""The first version of the operator that supports transfer policies."""
_VERSION: Final = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?!\d)")
_NAMESPACE_OPTIONS: Final = ("--restrictedNamespace", "--restricted-namespace", "--namespace")
_CONFIG_OPTION: Final = "--config"


@dataclass(frozen=True, slots=True)
class Scope:
    """The watched namespaces. ``namespace``: the only one, empty for all. ``known``: if known."""

    namespace: str = ""
    known: bool = True

    def may_watch(self, namespace: str) -> bool:
        """Whether the operator may watch a namespace, as far as it is known."""
        return self.namespace in ("", namespace)


def subject(operator: KubeDeployment) -> str:
    """``Deployment name.namespace``."""
    return f"Deployment {operator.name}.{operator.namespace}"


def account(operator: KubeDeployment) -> str:
    """The operator's service account, as RBAC names it."""
    return f"system:serviceaccount:{operator.namespace}:{operator.service_account}"


def scope(operator: KubeDeployment) -> Scope:
    """The namespaces in its arguments; a configuration file is not read."""
    words = [word for arg in operator.args for word in arg.split()]
    for name in _NAMESPACE_OPTIONS:
        namespace = option(words, name)
        if namespace:
            return Scope(namespace)
    return Scope(known=option(words, _CONFIG_OPTION) is None)


def watching(
    operators: Iterable[KubeDeployment], namespaces: Iterable[str]
) -> list[KubeDeployment]:
    """The operators that may watch one of these namespaces, running or not."""
    spaces = sorted(set(namespaces))
    return [operator for operator in operators if any(map(scope(operator).may_watch, spaces))]


def version(operator: KubeDeployment) -> tuple[int, int] | None:
    """Major and minor version from the image tag; None for a digest or another tag."""
    match = _VERSION.match(_tag(image(operator)))
    return (int(match[1]), int(match[2])) if match else None


def image(operator: KubeDeployment) -> str:
    """The image of the operator, not of its proxies; empty if unknown."""
    named = [reference for reference in operator.images if "operator" in _repository(reference)]
    candidates: Sequence[str] = named or operator.images
    return candidates[0] if len(candidates) == 1 else ""


def _repository(name: str) -> str:
    """The last part of an image name, without tag and digest."""
    return name.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _tag(name: str) -> str:
    return name.partition("@")[0].rpartition("/")[2].partition(":")[2]


def _operators(joined: JoinedFacts) -> tuple[KubeDeployment, ...]:
    operators = cluster_of(joined).operators
    return () if isinstance(operators, Unread) else operators


def _namespaces(joined: JoinedFacts, *, governed_only: bool) -> list[str]:
    """The namespaces of the graphs."""
    graphs = joined.governed if governed_only else joined.graphs
    return sorted({graph.name.rpartition("/")[0] for graph in graphs})


def operators_read(joined: JoinedFacts) -> Skipped | None:
    """The Deployments of operators were read."""
    operators = cluster_of(joined).operators
    if isinstance(operators, Unread):
        return Skipped(f"operators: {operators.why}", unread=True)
    return None


def graphs_exist(joined: JoinedFacts) -> Skipped | None:
    """The cluster has graphs."""
    return None if joined.graphs else Skipped("no graphs")


def operators_exist(joined: JoinedFacts) -> Skipped | None:
    """At least one operator may watch a graph's namespace."""
    there = watching(_operators(joined), _namespaces(joined, governed_only=False))
    return None if there else Skipped(_NO_OPERATOR)


# -- running operators -----------------------------------------------------------------------------


def _operator_runs(joined: JoinedFacts) -> Outcome:
    namespaces = _namespaces(joined, governed_only=False)
    mine = watching(_operators(joined), namespaces)
    if not mine:
        what = (
            f"no Deployment with app.kubernetes.io/name={OPERATOR_APP} watches {some(namespaces)}"
        )
        others = [subject(operator) for operator in _operators(joined)]
        what += f" (the cluster has: {some(others)})" if others else ""
        look = f"kubectl get deployments -A -l app.kubernetes.io/name={OPERATOR_APP}"
        return outcome([found(f"Deployment {OPERATOR_APP}", what=what, look=look)])
    return outcome(
        (
            found(
                subject(operator),
                what=_not_ready(operator),
                look=f"kubectl describe deployment {operator.name} -n {operator.namespace}",
            )
            for operator in mine
            if not operator.ready
        ),
        summary=some(
            f"{_version_text(operator) or 'ready'} ({subject(operator)})" for operator in mine
        ),
    )


def _not_ready(workload: KubeDeployment) -> str:
    if not workload.replicas:
        return "is scaled to 0 replicas"
    return f"{workload.ready:,} of {workload.replicas:,} replicas are ready"


def _version_text(workload: KubeDeployment) -> str:
    number = version(workload)
    return "" if number is None else f"{number[0]}.{number[1]}"


def _one_operator(joined: JoinedFacts) -> Outcome:
    running = [operator for operator in _operators(joined) if operator.replicas]
    wrong: list[Found] = []
    unclear: list[str] = []
    for namespace in _namespaces(joined, governed_only=False):
        mine = watching(running, [namespace])
        rivals = _rivals(mine)
        if len(rivals) > 1:
            names = some(f"{operator.name}.{operator.namespace}" for operator in rivals)
            wrong.append(found(f"Namespace {namespace}", operators=names))
        elif len(mine) > 1 and not any(scope(operator).namespace for operator in rivals):
            unclear += [subject(operator) for operator in mine if not scope(operator).known]
    if unclear and not wrong:
        names = some(dict.fromkeys(unclear))
        return Skipped(f"{names}: its namespaces are in an unread configuration file")
    return outcome(wrong)


def _rivals(operators: Sequence[KubeDeployment]) -> list[KubeDeployment]:
    """The operators that certainly work on a namespace, of those that may watch it."""
    restricted = [operator for operator in operators if scope(operator).namespace]
    # Operators of the whole cluster leave a namespace to one that is restricted to it.
    return restricted or [operator for operator in operators if scope(operator).known]


def _supports_policy(joined: JoinedFacts) -> Outcome:
    mine = watching(_operators(joined), _namespaces(joined, governed_only=True))
    wrong: list[Found] = []
    known: list[KubeDeployment] = []
    for operator in mine:
        number = version(operator)
        if number is None:
            continue
        known.append(operator)
        if number < FIRST_WITH_POLICY:
            wrong.append(found(subject(operator), image=image(operator)))
    if not known:
        names = some(image(operator) or f"{len(operator.images)} images" for operator in mine)
        return Skipped(f"{names}: version unknown" if mine else _NO_OPERATOR)
    images = {image(operator).rpartition("/")[2] for operator in known}
    return outcome(wrong, summary=some(sorted(images)))


# -- permissions -----------------------------------------------------------------------------------


def _has_permissions(joined: JoinedFacts) -> Outcome:
    cluster = cluster_of(joined)
    operators = watching(_operators(joined), _namespaces(joined, governed_only=True))
    by_account = {account(operator): operator for operator in operators}
    mine = [reviewed for reviewed in cluster.operator_accounts if reviewed.user in by_account]
    if not mine:
        return Skipped(
            "the permissions of the operator were not reviewed" if operators else _NO_OPERATOR
        )
    wrong: list[Found] = []
    unread: list[str] = []
    for reviewed in sorted(mine, key=lambda reviewed: reviewed.user):
        if isinstance(reviewed.allowed, Unread):
            unread.append(f"{_account_subject(reviewed)}: {reviewed.allowed.why}")
        else:
            wrong += _denied_permissions(joined, reviewed, by_account[reviewed.user], unread)
    names = some(map(_account_subject, mine))
    return outcome(wrong, unread, f"{many(len(mine), 'account')} ({names})")


def _account_subject(reviewed: Account) -> str:
    namespace, _, name = reviewed.user.removeprefix("system:serviceaccount:").partition(":")
    return f"ServiceAccount {name}.{namespace}"


def _denied_permissions(
    joined: JoinedFacts, reviewed: Account, operator: KubeDeployment, unread: list[str]
) -> Iterator[Found]:
    answers = _answers_by_namespace(reviewed)
    topologies = {key: answers.pop(key) for key in list(answers) if key[:2] in _TOPOLOGIES}
    if topologies and not _may_read_one(topologies.values()) and _has_grove_policy(joined):
        yield _permission_finding(reviewed, *next(iter(topologies)))
    yield from _denied_here(reviewed, answers, scope(operator), unread)


def _denied_here(
    reviewed: Account, answers: Mapping[_Permission, _Answers], watched: Scope, unread: list[str]
) -> Iterator[Found]:
    """The permissions that an operator lacks in the namespaces that it watches."""
    for (group, resource, verb), spaces in sorted(answers.items()):
        inside = {space: may for space, may in spaces.items() if space and watched.may_watch(space)}
        denied = sorted(space for space, may in inside.items() if not may)
        if spaces.get(None) is True:
            continue
        if inside:
            if denied:
                where = f" in {some(denied)}"
                yield _permission_finding(reviewed, group, resource, verb, where)
        elif resource in _OF_THE_CLUSTER or watched == Scope():
            yield _permission_finding(reviewed, group, resource, verb)
        else:
            unread.append(
                f"{_account_subject(reviewed)}: permission to {verb} {resource} in its namespaces "
                "is unknown"
            )


def _may_read_one(answers: Iterable[_Answers]) -> bool:
    """Grove has renamed the resource: one of the two names is enough."""
    return any(any(by_namespace.values()) for by_namespace in answers)


#: Group, resource, verb.
_Permission = tuple[str, str, str]
#: The answer for each namespace, and for the cluster (None).
_Answers = dict[str | None, bool]


def _answers_by_namespace(reviewed: Account) -> dict[_Permission, _Answers]:
    answers: dict[_Permission, _Answers] = defaultdict(dict)
    allowed = {} if isinstance(reviewed.allowed, Unread) else reviewed.allowed
    for item, answer in allowed.items():
        answers[item.group, item.resource, item.verb][item.namespace] = answer
    return answers


def _has_grove_policy(joined: JoinedFacts) -> bool:
    return any(graph.policy and graph.policy.cluster_topology for graph in joined.governed)


def _permission_finding(
    reviewed: Account, group: str, resource: str, verb: str, where: str = ""
) -> Found:
    return found(
        _account_subject(reviewed),
        what=f"{verb} {resource}{where}",
        lost=_LOST.get(resource, "it needs this for topology"),
        rule=rule(group, resource, (verb,)),
    )


_OPERATORS: Final = (has_cluster, operators_read, graphs_exist)

OPERATOR_CHECKS: Final[tuple[Check[JoinedFacts], ...]] = (
    Check("DYT0301", _operator_runs, _OPERATORS),
    Check("DYT0302", _one_operator, (*_OPERATORS, operators_exist)),
    Check("DYT0303", _has_permissions, (*_OPERATORS, has_policy)),
    Check("DYT0304", _supports_policy, (*_OPERATORS, has_policy)),
)
