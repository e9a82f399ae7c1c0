"""Every group of `dynctl test`, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dynctl.experiments.groups.change import CHANGE
from dynctl.experiments.groups.group import TrialGroup
from dynctl.experiments.groups.index import INDEX
from dynctl.experiments.groups.isolation import ISOLATION
from dynctl.experiments.groups.limits import LIMITS
from dynctl.experiments.groups.load import LOAD
from dynctl.experiments.groups.names import NAMES
from dynctl.experiments.groups.restart import RESTART
from dynctl.experiments.groups.reuse import REUSE
from dynctl.experiments.groups.streams import STREAMS
from dynctl.experiments.groups.tokens import TOKENS
from dynctl.experiments.groups.topology import TOPOLOGY

GROUPS: Final[Sequence[TrialGroup[Any]]] = (
    *(NAMES, TOKENS, STREAMS, REUSE, INDEX, ISOLATION, TOPOLOGY, LOAD),
    *(LIMITS, CHANGE, RESTART),
)
NOT_RESTARTED: Final = "restarts of workers: --allow-changes --restart COMMAND"
