"""The golden screens of `topology plan`, by name.

``python -m tests.golden.plan_screens`` writes the files; read the diff before you
commit it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dynctl.documents.topology import TopologyPlan
from dynctl.manifests.files import parse_manifests
from dynctl.planning.capacity import Ratio
from dynctl.planning.domain_capacity import topology_show
from dynctl.planning.plan import topology_plan
from dynctl.planning.planned_fleet import (
    PlannedFleet,
    fleet_of_flags,
    fleet_of_manifests,
    fleet_of_workers,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.render import draw
from tests.golden.fleets import settings, stranded_zones

HERE = Path(__file__).parent / "plans"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "plan"
WIDTHS = (80, 200)
HALF = Ratio(1, 2)

#: The example of the guide: 60 prefill and 120 decode workers over two zones.
GUIDE = ("az-1:prefill=30,decode=60", "az-2:prefill=30,decode=60")


def manifests(*names: str, over: tuple[str, ...] = ()) -> PlannedFleet:
    found = [one for n in names for one in parse_manifests((FIXTURES / n).read_bytes(), n)]
    return fleet_of_manifests(found, ", ".join(names), None, over)


def live() -> PlannedFleet:
    source = stranded_zones()
    workers = source.workers()
    return fleet_of_workers(topology_show("test", workers, settings(source)), workers)


def screens() -> dict[str, Callable[[int], str]]:
    plans = {
        "guide": topology_plan(fleet_of_flags(GUIDE, None), ratio=HALF),
        "guide-from-nothing": topology_plan(
            fleet_of_flags(["az-1:", "az-2:"], None), target=(60, 120)
        ),
        "guide-manifest": topology_plan(manifests("zones.yaml"), ratio=HALF),
        "switch": topology_plan(manifests("alpha.yaml"), enforcement="required", ratio=HALF),
        "unpinned": topology_plan(manifests("unpinned.yaml"), ratio=HALF),
        "unpinned-over": topology_plan(manifests("unpinned.yaml", over=("az-1", "az-2"))),
        "several": topology_plan(manifests("zones.yaml", "alpha.yaml"), ratio=HALF),
        "live": topology_plan(live(), ratio=Ratio(1, 1)),
        "large": topology_plan(
            fleet_of_flags([f"r{n}:prefill={n % 7},decode={n % 5}" for n in range(17)], "rack"),
            ratio=HALF,
        ),
    }
    return {name: partial(drawn, plan) for name, plan in plans.items()}


def drawn(plan: TopologyPlan, width: int) -> str:
    return draw(plan, Canvas(width))


def write() -> None:
    for name, screen in screens().items():
        for width in WIDTHS:
            (HERE / f"{name}-{width}.txt").write_text(screen(width))


if __name__ == "__main__":
    write()
