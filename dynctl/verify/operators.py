"""Dynamo's operators: which version, which namespaces, whose account. Modelled from source.

An operator watches the whole cluster, or one namespace where it was installed that way; it then
holds a lease there, and operators of the whole cluster leave that namespace to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.manifests.component_role import option
from dynctl.wire.kubernetes.objects import Workload

FIRST_WITH_POLICY: Final = (1, 2)
"""The first version of the operator that knows a transfer policy."""
_VERSION: Final = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?!\d)")
_NAMESPACE_OPTIONS: Final = ("--restrictedNamespace", "--restricted-namespace", "--namespace")
_CONFIG_OPTION: Final = "--config"


@dataclass(frozen=True, slots=True)
class Scope:
    """``namespace``: the only one that is watched, empty for all. ``known`` False: not told."""

    namespace: str = ""
    known: bool = True

    def may_watch(self, namespace: str) -> bool:
        """Whether the operator may be in charge of a namespace, as far as it is known."""
        return self.namespace in ("", namespace)


def subject(operator: Workload) -> str:
    """``Deployment name.namespace``."""
    return f"Deployment {operator.name}.{operator.namespace}"


def account(operator: Workload) -> str:
    """As RBAC names it."""
    return f"system:serviceaccount:{operator.namespace}:{operator.service_account}"


def scope(operator: Workload) -> Scope:
    """What it watches, by its arguments; a configuration file is not read."""
    words = [word for arg in operator.args for word in arg.split()]
    for name in _NAMESPACE_OPTIONS:
        told = option(words, name)
        if told:
            return Scope(told)
    return Scope(known=option(words, _CONFIG_OPTION) is None)


def in_charge(operators: Iterable[Workload], namespaces: Iterable[str]) -> list[Workload]:
    """The operators that may be in charge of one of these namespaces, whether they run or not."""
    spaces = sorted(set(namespaces))
    return [one for one in operators if any(map(scope(one).may_watch, spaces))]


def version(operator: Workload) -> tuple[int, int] | None:
    """Major and minor by the tag of its image; None where that is a digest or another word."""
    found = _VERSION.match(_tag(image(operator)))
    return (int(found[1]), int(found[2])) if found else None


def image(operator: Workload) -> str:
    """The image of the operator itself: proxies may stand beside it. Empty where it is not told."""
    named = [one for one in operator.images if "operator" in _repository(one)]
    candidates: Sequence[str] = named or operator.images
    return candidates[0] if len(candidates) == 1 else ""


def _repository(name: str) -> str:
    """The last part of an image's path, without tag and digest."""
    return name.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _tag(name: str) -> str:
    return name.partition("@")[0].rpartition("/")[2].partition(":")[2]
