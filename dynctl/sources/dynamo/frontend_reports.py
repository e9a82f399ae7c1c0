"""What a deployment's frontends tell of load and settings.

One that a person named must answer. Of those that were found in a cluster a silent one is a doubt:
it must not hide what discovery and the others tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynctl.base.errors import TimedOut, Unreachable
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.live_state import Thresholds
from dynctl.sources.kubernetes.frontends import Reached
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics


@dataclass(frozen=True, slots=True)
class FrontendsTold:
    """``thresholds``: model -> its busy thresholds. ``doubts``: what is not known, for people."""

    metrics: list[FrontendMetrics]
    thresholds: Mapping[str, Thresholds]
    doubts: tuple[str, ...] = ()


def ask_frontends(frontends: Sequence[DynamoFrontend], ways: Reached | None) -> FrontendsTold:
    """Settings come from the first that answers, load from every one.

    ``ways``: how they were found in a cluster; None: they were named. Raises Unreachable or
    TimedOut where a named one does not answer.
    """
    metrics: list[FrontendMetrics] = []
    doubts: list[str] = []
    answering: list[DynamoFrontend] = []
    for place, frontend in enumerate(frontends):
        try:
            metrics.append(frontend.metrics())
            answering.append(frontend)
        except (Unreachable, TimedOut) as error:
            if ways is None:
                raise
            name = ways.names[place]
            said = error.message.replace(frontend.url, name).rstrip(".")
            doubts.append(f"{said}; its load is not known")
    thresholds: Mapping[str, Thresholds] = {}
    try:
        thresholds = answering[0].thresholds() if answering else {}
    except Unreachable as error:
        # Dynamo before 1.0 has no such address, and a gateway may keep it to itself.
        doubts.append(f"busy thresholds are not known: {error.message}")
    return FrontendsTold(metrics, thresholds, tuple(doubts))
