"""What is simulated: the fleet, the policy of its routers, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dynctl.simulation.engine.config import EngineConfig
from router_core import NO_CLASSES, PolicyClasses, Role, RouterConfig, TransferTable


class ReplayError(ValueError):
    """A trace or fleet that cannot be simulated; the text names the value and what is expected."""


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """One engine. ``domains``: its topology (domain -> value). ``ranks``: data-parallel ranks.

    ``bootstrap``: a prefill worker where decode workers meet a prefill (SGLang), so that both get a
    request at once.
    """

    worker_id: int
    role: Role = Role.AGGREGATED
    domains: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    bootstrap: bool = False


@dataclass(frozen=True, slots=True)
class FleetLoss:
    """Workers that are lost at ``at`` (seconds of the trace), and return empty at ``until``.

    Either one worker, or all workers with ``value`` of ``domain``. ``until`` None: never.
    """

    at: float
    worker_id: int | None = None
    domain: str = ""
    value: str = ""
    until: float | None = None


@dataclass(frozen=True, slots=True)
class FleetChange:
    """What happened to a worker of a recording at ``at`` (seconds of the trace).

    ``joins``: it is there from now on, with an empty cache; ``leaves``: it is lost with its cache
    and its requests; ``unavailable``: routers send it no request, for ``reason``, and its requests
    go on; ``available``: they do again.
    """

    at: float
    worker_id: int
    what: Literal["joins", "leaves", "unavailable", "available"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Engines of one model and what connects them.

    ``engine``: timing and cache of every engine; `total_blocks` counts blocks of `block_size`
    tokens. ``engine.kv_transfer_domain``, ``kv_transfer_enforcement`` and
    ``kv_transfer_preferred_weight`` are the topology policy that the workers publish.
    ``link_domain``: a transfer between two of its values takes longer by
    ``engine.kv_transfer_cross_domain_factor``; empty: the policy's domain. Without
    ``engine.max_model_len`` the KV blocks bound a request.
    ``events_delay_s``: time from a cache event to the router; ``events_loss``: share of event
    batches that no router receives (0 to 1). ``block_bytes``: bytes of a KV block, 0: unknown.
    ``losses``: workers that fail. ``migration_limit``: how often a request that has output goes on
    with another worker after its worker was lost; not one whose prompt has more than
    ``migration_max_tokens``. ``changes``: of the workers, in order of time; one that joins
    before it leaves is not there at first.
    """

    workers: tuple[SimulatedWorker, ...]
    engine: EngineConfig
    model: str = "model"
    events_delay_s: float = 0.0
    events_loss: float = 0.0
    link_domain: str = ""
    block_bytes: int = 0
    losses: tuple[FleetLoss, ...] = ()
    changes: tuple[FleetChange, ...] = ()
    migration_limit: int = 0
    migration_max_tokens: int | None = None

    def moves(self, prompt_tokens: int) -> int:
        """How often a request with such a prompt may go on with another worker."""
        most = self.migration_max_tokens
        return 0 if most is not None and prompt_tokens > most else self.migration_limit

    def faster(self, speed: float) -> SimulatedFleet:
        """The fleet of a trace at ``speed`` times its rate: its changes come sooner too."""
        changes = tuple(replace(change, at=change.at / speed) for change in self.changes)
        return replace(self, changes=changes)


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """A named setting of the routers. ``classes``: of the router queue; ``transfer``: the links
    between topology domains, where distances cost."""

    name: str
    config: RouterConfig
    classes: PolicyClasses = NO_CLASSES
    transfer: TransferTable | None = None


@dataclass(frozen=True, slots=True)
class SimulatedSync:
    """Whether routers share their bookings: ``delay_s`` later, or not at all."""

    mode: Literal["none", "delayed"] = "none"
    delay_s: float = 0.001


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits of a good request, in seconds; None: no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None
