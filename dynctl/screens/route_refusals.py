"""What stopped a refused request, and what would admit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from dynctl.documents.route_result import DecisionResult, FunnelRow, RejectedRow, RouteResult
from dynctl.screens.numbers import amount, plural
from dynctl.screens.route_sentences import (
    domains_without_decode,
    has_ranks,
    refusal,
    short_taints,
)
from dynctl.wire.nvext import PREFILL_HEADER, WORKER_HEADER
from router_core import canonical_taint

#: Filters that reject all ranks for the same reason, so that none of them is nearer.
_ALIKE: Final = ("model", "served_name", "role", "direct")


@dataclass(frozen=True, slots=True)
class EmptyStep:
    """The filter of a hop that left no rank. ``nearest``: the one that was closest to pass."""

    model: str
    hop: DecisionResult
    step: FunnelRow
    nearest: RejectedRow | None

    def limit(self, unknown: str) -> object:
        """What the nearest rank did not meet."""
        return unknown if self.nearest is None else self.nearest.limit


def remedies(result: RouteResult) -> Iterator[tuple[str, str]]:
    """For a refusal: the filter that emptied the set, the closest worker, and what to change."""
    hop = refusal(result)
    if hop is None:
        return
    if hop.outcome == "policy_underivable":
        yield "admits", "a prefill worker whose KV-transfer policy can be applied (see above)"
        return
    if hop.queue is not UNSET and hop.queue.refused is not None:
        full = hop.queue.refused
        yield "stopped", f"by the router queue: its limit of {full.limit_kind} is {full.limit:,}"
        yield "admits", "a shorter queue, less prefill load, or a higher limit"
        return
    step = next((step for step in hop.funnel if step.entered and not step.left), None)
    if step is None:
        yield "admits", f"a {hop.stage} worker of model {result.model} (dynctl serve engine)"
        return
    name = step.filter.replace("_", " ")
    entered = plural(step.entered, "rank" if has_ranks(hop) else "worker")
    yield "stopped", f"by the {name} filter of the {hop.stage} hop: {entered} entered, none left"
    nearest = min(step.rejected, key=_distance, default=None)
    if nearest is not None and len(step.rejected) > 1 and step.filter not in _ALIKE:
        yield "nearest", f"{nearest.worker}: {short_taints(nearest.message)}"
    admits = _ADMITS.get(step.filter, _one_more_worker)
    yield "admits", admits(EmptyStep(result.model, hop, step, nearest))


def _distance(row: RejectedRow) -> float:
    """How far a rejected rank is from being admitted: value over limit."""
    numbers = (int, float)
    if isinstance(row.value, numbers) and isinstance(row.limit, numbers) and row.limit:
        return float(row.value) / float(row.limit)
    return 1e9


# -- what would be admitted, by filter -------------------------------------------------------------


def _one_more_worker(empty: EmptyStep) -> str:
    return "one more eligible worker"


def _model(empty: EmptyStep) -> str:
    return f"a worker that serves {empty.model}"


def _served_name(empty: EmptyStep) -> str:
    name = empty.limit("the requested name")
    return f"a worker of {empty.model} that serves the name {name}: GET /v1/models of an engine"


def _role(empty: EmptyStep) -> str:
    role = empty.hop.stage
    return f"a worker that can serve the {role} hop: start one with --role {role}"


def _direct(empty: EmptyStep) -> str:
    header, name, flag = WORKER_HEADER, "decode_worker_id", "--pin-decode"
    if empty.hop.stage == "prefill":
        header, name, flag = PREFILL_HEADER, "prefill_worker_id", "--pin-prefill"
    return f"a worker id in the header {header} or in nvext.{name}; for route: {flag} WORKER"


def _eligible_pin(empty: EmptyStep) -> str:
    return "a pin to an eligible worker, or no pin"


def _available(empty: EmptyStep) -> str:
    return "one of these workers, once it answers its health probe again"


def _domain(empty: EmptyStep) -> str:
    limit = empty.limit("the domain")
    return f"a {empty.hop.stage} worker that publishes {limit}, or the fallback mismatch policy"


def _taints(empty: EmptyStep) -> str:
    constraints = empty.hop.constraints
    wanted = ", ".join(item.taint for item in constraints if item.kind == "required")
    ours = any(item.origin != "request" for item in constraints)
    other = "a policy of preferred" if ours else "a request without that constraint"
    return f"a {empty.hop.stage} worker with {wanted}, or {other}{_taint_of_a_domain(empty)}"


def _taint_of_a_domain(empty: EmptyStep) -> str:
    """The taint that a requirement such as ``zone=zone-a`` probably means; else nothing."""
    domains = {} if empty.nearest is None else empty.nearest.domains
    for item in empty.hop.constraints:
        domain, equals, value = item.taint.partition("=")
        if item.kind == "required" and equals and domain in domains:
            return f"; the taint of a domain is {canonical_taint(domain, value)}"
    return ""


def _decode_capacity(empty: EmptyStep) -> str:
    where = " or ".join(domains_without_decode(empty.step)) or "its transfer domain"
    return f"an eligible decode worker in {where}: dynctl workers list shows their state"


def _busy(empty: EmptyStep) -> str:
    nearest = empty.nearest
    if nearest is None:
        return _one_more_worker(empty)
    over = float(nearest.value or 0) - float(nearest.limit or 0)
    return (
        f"{nearest.worker} once its load falls by {amount(over)}, or a higher busy "
        f"threshold: dynctl thresholds set {empty.model} --help"
    )


_ADMITS: Final[dict[str, Callable[[EmptyStep], str]]] = {
    "model": _model,
    "served_name": _served_name,
    "role": _role,
    "direct": _direct,
    "allowed": _eligible_pin,
    "available": _available,
    "domain": _domain,
    "taints": _taints,
    "decode_capacity": _decode_capacity,
    "busy": _busy,
}
