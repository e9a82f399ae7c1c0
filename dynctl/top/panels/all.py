"""The panels of the dashboard, in the order of their keys."""

from typing import Final

from dynctl.top.panels.alerts import AlertContent
from dynctl.top.panels.content import AnyContent
from dynctl.top.panels.decisions import DecisionContent
from dynctl.top.panels.domains import DomainContent
from dynctl.top.panels.workers import WorkerContent

#: A new panel is added here: its key, its name for ``:``, and its part of ``top --once`` follow.
PANELS: Final[tuple[type[AnyContent], ...]] = (
    DomainContent,
    WorkerContent,
    DecisionContent,
    AlertContent,
)
