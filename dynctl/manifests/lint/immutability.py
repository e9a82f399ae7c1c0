"""What a file would change of a live graph that cannot be changed: DYT0112.

The operator's webhook compares the transfer policy and the topology constraints of an update with
those of the graph that is there (modelled from source). It decides by meaning: an enforcement that
was left out is ``required``, and both versions of a constraint name the same topology.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dynctl.findings.runner import Found, found
from dynctl.manifests.graphs import POLICY_PATH, Graph
from dynctl.manifests.lint.facts import spec_of, subject_of
from dynctl.manifests.transfer_policy import FIELDS
from dynctl.wire.kubernetes.fields import mapping

CODE: Final = "DYT0112"
_CONSTRAINT: Final = "topologyConstraint"
_TOPOLOGY_NAMES: Final = ("clusterTopologyName", "topologyProfile")


def immutability(live: Graph, file: Graph) -> Iterator[Found]:
    """Every change of ``live`` by ``file`` that is refused; the arguments are those of DYT0112.

    Components of only one of them are no change of a constraint, and are left out.
    """
    subject = subject_of(live)
    told = f"kubectl delete dynamographdeployment {live.manifest.name}"
    if live.manifest.namespace:
        told += f" -n {live.manifest.namespace}"
    changes = [
        _change(POLICY_PATH, _policy(live), _policy(file)),
        _change(
            f"spec.{_CONSTRAINT}",
            _constraint(spec_of(live).get(_CONSTRAINT)),
            _constraint(spec_of(file).get(_CONSTRAINT)),
        ),
    ]
    there = {one.name.lower(): one for one in live.components}
    for one in file.components:
        before = there.get(one.name.lower())
        if before is not None:
            changes.append(
                _change(
                    f"{one.path}.{_CONSTRAINT}",
                    _constraint(before.body.get(_CONSTRAINT)),
                    _constraint(one.body.get(_CONSTRAINT)),
                )
            )
    for change in filter(None, changes):
        path, what = change
        yield found(subject, path=path, change=what, delete=told)


def _change(
    path: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[str, str] | None:
    if before == after:
        return None
    if before is None or after is None:
        return path, f"the file {'adds' if before is None else 'removes'} it"
    names = [name for name in (*before, *after) if before.get(name) != after.get(name)]
    told = [
        f"{name} from {_shown(before.get(name))} to {_shown(after.get(name))}"
        for name in dict.fromkeys(names)
    ]
    return path, f"the file changes {', '.join(told)}"


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _policy(graph: Graph) -> Mapping[str, Any] | None:
    """The policy as it is compared; fields that do not exist never reach the webhook."""
    if graph.policy is None:
        return None
    given = {name: value for name in FIELDS if (value := graph.policy.get(name)) is not None}
    given.setdefault("enforcement", "required")
    if "preferredWeight" in given:
        given["preferredWeight"] = _float32(given["preferredWeight"])
    return given


def _constraint(value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    given = {name: one for name, one in mapping(value).items() if one is not None}
    for name in _TOPOLOGY_NAMES:
        if name in given:
            given["topology"] = given.pop(name)
    return given


def _float32(value: Any) -> Any:
    """The number as the resource holds it; an API server may tell it with more digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return value
    try:
        [held] = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return value
    return round(held, 7)
