"""What a fleet is made of: one plan for each worker, and the two usual shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["aggregated", "prefill", "decode"]
Kind = Literal["mocker", "held", "scripted"]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker. ``domains`` become its topology files (``{"zone": "zone-a"}``).

    With domains the KV transfer policy is set too: ``transfer_domain``, ``enforcement`` and
    ``weight`` (None leaves it unset). ``late``: not started with the fleet, but by
    :meth:`DynamoFleet.start_worker`. ``system_server`` off: no metrics and no metadata over HTTP,
    hence no known instance id, and paths in its card. ``args`` and ``environment`` go to the
    process as they are.
    """

    name: str
    role: Role = "aggregated"
    kind: Kind = "mocker"
    domains: Mapping[str, str] = field(default_factory=dict)
    transfer_domain: str = "zone"
    enforcement: str | None = "required"
    weight: float | None = None
    late: bool = False
    system_server: bool = True
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def aggregated(
    count: int = 2, *, kind: Kind = "mocker", args: Sequence[str] = ()
) -> list[WorkerPlan]:
    """``worker-0`` ..., no topology."""
    return [WorkerPlan(f"worker-{n}", kind=kind, args=tuple(args)) for n in range(count)]


def two_zones(
    enforcement: str = "required",
    weight: float | None = None,
    *,
    prefill: int = 1,
    decode: int = 1,
    kind: Kind = "mocker",
    args: Sequence[str] = (),
) -> list[WorkerPlan]:
    """``prefill-a0``, ``prefill-b0``, ``decode-a0``, ...: so many of each role in each zone."""
    counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
    return [
        WorkerPlan(
            f"{role}-{zone}{number}",
            role,
            kind,
            {"zone": f"zone-{zone}", "rack": f"rack-{zone}"},
            enforcement=enforcement,
            weight=weight,
            args=tuple(args),
        )
        for role, count in counts.items()
        for zone in "ab"
        for number in range(count)
    ]
