"""Taints of workers, constraints of requests, and the weight of a preference.

A taint is an opaque string, compared exactly. Topology is expressed by *canonical* taints,
``dynamo.topology/<domain>=<value>``, one for each domain that a worker publishes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from router_core.errors import ConfigError, ConstraintError, is_a

TOPOLOGY_PREFIX = "dynamo.topology/"

Kind = Literal["required", "preferred"]


def canonical_taint(domain: str, value: str) -> str:
    """The taint of workers that are in ``value`` of ``domain``."""
    return f"{TOPOLOGY_PREFIX}{domain}={value}"


def topology_of(taint: str) -> tuple[str, str] | None:
    """``(domain, value)`` of a canonical topology taint, None for any other taint."""
    if not taint.startswith(TOPOLOGY_PREFIX):
        return None
    domain, separator, value = taint[len(TOPOLOGY_PREFIX) :].partition("=")
    return (domain, value) if separator and domain and value else None


def parse_domains(text: str) -> dict[str, str]:
    """``zone=a,rack=r1`` as a mapping; raises ConfigError."""
    domains: dict[str, str] = {}
    for part in text.split(","):
        name, separator, value = (word.strip() for word in part.partition("="))
        if not (name and separator and value) or "=" in value:
            raise ConfigError(
                f"expected DOMAIN=VALUE, more of them separated by commas, got {text!r}"
            )
        if name in domains:
            raise ConfigError(f"the domain {name} occurs twice in {text!r}")
        domains[name] = value
    return domains


@dataclass(frozen=True, slots=True)
class TaintConstraint:
    """One constraint and its origin.

    ``weight`` is None for a required taint; for a preferred one it is any finite number, and a
    negative one means "avoid". ``origin`` is a text: ``request``, ``kv-transfer policy of worker
    prefill-a0``, ``router policy``.
    """

    taint: str
    kind: Kind
    weight: float | None = None
    origin: str = "request"


@dataclass(frozen=True, slots=True)
class RoutingConstraints:
    """The constraints of one hop of one request, in the order they were given."""

    items: tuple[TaintConstraint, ...] = ()

    @property
    def required(self) -> tuple[TaintConstraint, ...]:
        return tuple(item for item in self.items if item.kind == "required")

    @property
    def preferred(self) -> tuple[TaintConstraint, ...]:
        return tuple(item for item in self.items if item.kind == "preferred")

    def merge(self, derived: Iterable[TaintConstraint]) -> RoutingConstraints:
        """These and ``derived``: required taints are added, a preferred weight is overwritten.

        As in Dynamo 1.6, a derived weight replaces the request's own for the same taint (observed:
        with a request's -5 for the policy's taint, the policy's 0.85 applied).
        """
        items = {(item.taint, item.kind): item for item in self.items}
        for item in derived:
            key = (item.taint, item.kind)
            if item.kind == "preferred" or key not in items:
                items[key] = item
        return RoutingConstraints(tuple(items.values()))


NO_CONSTRAINTS = RoutingConstraints()


def constraints(
    required: Iterable[str] = (),
    preferred: Mapping[str, float] | None = None,
    *,
    origin: str = "request",
) -> RoutingConstraints:
    """Constraints from plain values; raises ConstraintError for a weight that is not a finite
    number, and for a single text in place of several taints.

    An empty required taint is legal and matches no worker, as in Dynamo.
    """
    items: list[TaintConstraint] = []
    if is_a(required, str):
        raise ConstraintError(f"required: expected several taints, got the text {required!r}")
    for taint in dict.fromkeys(required):
        items.append(TaintConstraint(taint, "required", None, origin))
    for taint, weight in (preferred or {}).items():
        if not is_a(weight, int, float) or not math.isfinite(weight):
            raise ConstraintError(
                f"preferred taint {taint!r}: expected a finite weight, got {weight!r}"
            )
        items.append(TaintConstraint(taint, "preferred", float(weight), origin))
    return RoutingConstraints(tuple(items))


def preference_multiplier(weights: Iterable[float]) -> float:
    """The factor on the cost of a worker that has preferred taints, from their weights.

    ``exp(-tanh(sum of the weights))``, between 0.3679 (strongly preferred) and 2.7183 (strongly
    avoided); 1.0 without a match. Source: Dynamo 1.6.1, observed to four digits.
    """
    total = math.fsum(weights)
    return math.exp(-math.tanh(total)) if total else 1.0
