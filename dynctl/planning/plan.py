"""`topology plan`: the capacity of every domain, the cost of losses, and what to add.

Pure: a fleet in, one document out.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from msgspec import structs

from dynctl.documents.topology import (
    Change,
    DomainPlan,
    Headroom,
    Loss,
    Patch,
    StrandedBounds,
    TopologyPlan,
)
from dynctl.manifests.graphs import GRAPH_GROUP, Component, Graph
from dynctl.planning.capacity import (
    Cell,
    Ratio,
    additions,
    even_split,
    headroom,
    idle_decode,
    stranded_bounds,
    stranded_prefill,
    uncarried_after,
    uncarried_prefill,
)
from dynctl.planning.planned_fleet import Home, PlannedFleet


def topology_plan(
    fleet: PlannedFleet,
    *,
    enforcement: str | None = None,
    ratio: Ratio | None = None,
    target: tuple[int, int] | None = None,
) -> TopologyPlan:
    """The plan of a fleet.

    ``enforcement`` None: the policy in force in each pool, ``required`` where its workers differ or
    it is unknown. ``target``: a whole fleet (prefill, decode) to split evenly over the values of
    each pool. Without it ``add`` has the workers that the ratio needs, and without a ratio none.
    """
    pools = sorted({c.pool for c in fleet.cells} | {f.pool for f in fleet.floating})
    judged = {pool: enforcement or _judged_enforcement(fleet, pool) for pool in pools}
    if ratio is None and target is not None and min(target) > 0:
        ratio = Ratio(*target).reduced()
    rows = _rows(fleet, judged, ratio, target)
    bounds = list(_bounds(fleet, judged))
    patches, notes = _patches(fleet, rows)
    return TopologyPlan(
        source=fleet.source,
        domain=fleet.domain,
        enforcement=_common_mode(judged.values()) or "required",
        in_force=_common_mode(map(fleet.in_force.get, pools)),
        ratio=None if ratio is None else str(ratio),
        prefill=sum(_all_workers(fleet, pool, "prefill") for pool in pools),
        decode=sum(_all_workers(fleet, pool, "decode") for pool in pools),
        state=_overall_state(rows, bounds),
        rows=rows,
        losses=list(_losses(fleet, judged, ratio)),
        bounds=bounds,
        patches=patches,
        warnings=list(_warnings(fleet, rows, bounds)),
        notes=[*fleet.notes, *_unplaced_notes(fleet, ratio, target), *notes],
    )


def _judged_enforcement(fleet: PlannedFleet, pool: str) -> str:
    in_force = fleet.in_force.get(pool, "required")
    return "required" if in_force == "mixed" else in_force


def _common_mode(modes: Iterable[str | None]) -> str | None:
    distinct = set(modes)
    return "mixed" if len(distinct) > 1 else next(iter(distinct), None)


# -- rows ------------------------------------------------------------------------------------------


def _rows(
    fleet: PlannedFleet,
    judged: Mapping[str, str],
    ratio: Ratio | None,
    target: tuple[int, int] | None,
) -> list[DomainPlan]:
    rows: list[DomainPlan] = []
    for pool, mode in judged.items():
        cells = [cell for cell in fleet.cells if cell.pool == pool] or [Cell(pool, None)]
        if any(floating.pool == pool for floating in fleet.floating):
            rows += _rows_unplaced(fleet, cells, mode)
        else:
            rows += _rows_placed(fleet, cells, mode, ratio, target)
    return sorted(rows, key=lambda row: (row.pool, row.value is None, row.value or ""))


def _rows_unplaced(fleet: PlannedFleet, cells: Sequence[Cell], mode: str) -> Iterator[DomainPlan]:
    """The rows of a pool with workers that the scheduler may place in several values."""
    no_decode = mode != "required" and not _all_workers(fleet, cells[0].pool, "decode")
    for cell, lacking in zip(cells, stranded_prefill(cells, mode), strict=True):
        row = _row_of_cell(fleet, cell, mode)
        if no_decode:
            state = "stranded" if lacking else "ok"
            yield structs.replace(row, stranded_prefill=lacking, state=state)
        else:
            # A decode hop that is not bound to a value does not depend on placement.
            yield structs.replace(row, state="unknown" if mode == "required" else "ok")


def _rows_placed(
    fleet: PlannedFleet,
    cells: Sequence[Cell],
    mode: str,
    ratio: Ratio | None,
    target: tuple[int, int] | None,
) -> Iterator[DomainPlan]:
    """The rows of a pool whose workers are all pinned to one value."""
    wanted = _targets(cells, target)
    stranded, idle = stranded_prefill(cells, mode), idle_decode(cells, mode)
    for cell, lacking, useless in zip(cells, stranded, idle, strict=True):
        spare = None if ratio is None else headroom(cell, ratio)
        add = Change()
        if cell.value in wanted:
            prefill, decode = wanted[cell.value]
            add = Change(prefill - cell.prefill, decode - cell.decode)
        elif ratio is not None and cell.value is not None:
            add = Change(*additions(cell.prefill, cell.decode, ratio))
        yield structs.replace(
            _row_of_cell(fleet, cell, mode),
            decode_per_prefill=_decode_per_prefill(cell),
            headroom=Headroom(spare, cell.kv_blocks_free, cell.batched_tokens_free),
            stranded_prefill=lacking,
            idle_decode=useless,
            state=_state(lacking, useless, spare),
            add=add,
        )


def _row_of_cell(fleet: PlannedFleet, cell: Cell, mode: str) -> DomainPlan:
    """What is known of a cell wherever the scheduler places other workers."""
    return DomainPlan(
        pool=cell.pool,
        value=cell.value,
        enforcement=mode,
        prefill=cell.prefill,
        decode=cell.decode,
        unpinned_prefill=_may_land(fleet, cell, "prefill"),
        unpinned_decode=_may_land(fleet, cell, "decode"),
        decode_per_prefill=None,
        headroom=Headroom(None, cell.kv_blocks_free, cell.batched_tokens_free),
        stranded_prefill=0,
        idle_decode=0,
        state="ok",
        add=Change(),
    )


def _targets(
    cells: Sequence[Cell], target: tuple[int, int] | None
) -> dict[str | None, tuple[int, int]]:
    """The even split of the target over the values of one pool."""
    values = sorted(cell.value for cell in cells if cell.value is not None)
    return dict(even_split(*target, values).items()) if target and values else {}


def _decode_per_prefill(cell: Cell) -> float | None:
    return round(cell.decode / cell.prefill, 6) if cell.prefill and cell.decode else None


def _state(stranded: int, idle: int, spare: int | None) -> str:
    if stranded:
        return "stranded"
    if spare is not None and spare < 0:
        return "short"
    return "idle" if idle else "ok"


def _overall_state(rows: Sequence[DomainPlan], bounds: Sequence[StrandedBounds]) -> str:
    states = {row.state for row in rows} | {"stranded" for bound in bounds if bound.at_least}
    for state in ("stranded", "unknown", "short"):
        if state in states:
            return state
    return "ok" if rows else "unknown"


def _may_land(fleet: PlannedFleet, cell: Cell, role: str) -> int:
    own = [group for group in fleet.floating if (group.pool, group.role) == (cell.pool, role)]
    return sum(g.workers for g in own if cell.value is None or g.may_land_in(cell.value))


def _all_workers(fleet: PlannedFleet, pool: str, role: str) -> int:
    """The workers of a role, pinned or not."""
    pinned: int = sum(getattr(cell, role) for cell in fleet.cells if cell.pool == pool)
    own = [group for group in fleet.floating if (group.pool, group.role) == (pool, role)]
    return pinned + sum(group.workers for group in own)


def _unplaced_notes(
    fleet: PlannedFleet, ratio: Ratio | None, target: tuple[int, int] | None
) -> Iterator[str]:
    """Notes about pools whose placement is unknown."""
    for pool in sorted({floating.pool for floating in fleet.floating}):
        prefill = _all_workers(fleet, pool, "prefill")
        decode = _all_workers(fleet, pool, "decode")
        missing = 0 if ratio is None else ratio.decode_for(prefill) - decode
        if missing > 0:
            yield f"{pool}: {missing:,} decode workers are missing for {ratio}, in any placement"
        split = _targets([cell for cell in fleet.cells if cell.pool == pool], target)
        if split:
            shares = ", ".join(f"{value} {p:,}:{d:,}" for value, (p, d) in split.items())
            yield f"{pool}: pin a component of each role to each value first, then {shares}"


# -- what placement leaves open --------------------------------------------------------------------


def _bounds(fleet: PlannedFleet, judged: Mapping[str, str]) -> Iterator[StrandedBounds]:
    for pool in sorted({floating.pool for floating in fleet.floating}):
        if judged[pool] != "required":
            continue
        cells = [cell for cell in fleet.cells if cell.pool == pool]
        loose = [floating for floating in fleet.floating if floating.pool == pool]
        bounds = stranded_bounds(cells, loose, closed=fleet.closed)
        counts: dict[str, int] = defaultdict(int)
        for floating in loose:
            counts[floating.role] += floating.workers
        yield StrandedBounds(pool, counts["prefill"], counts["decode"], bounds.best, bounds.worst)


# -- losses ----------------------------------------------------------------------------------------


def _losses(fleet: PlannedFleet, judged: Mapping[str, str], ratio: Ratio | None) -> Iterator[Loss]:
    """Losses of a worker of each role, a node and a domain, for pools whose placement is known."""
    loose = {floating.pool for floating in fleet.floating}
    for pool in sorted({cell.pool for cell in fleet.cells} - loose):
        cells = [cell for cell in fleet.cells if cell.pool == pool]
        if any(cell.prefill or cell.decode for cell in cells):
            yield from _losses_of_pool(pool, cells, judged[pool], ratio)


def _losses_of_pool(
    pool: str, cells: Sequence[Cell], mode: str, ratio: Ratio | None
) -> Iterator[Loss]:
    whole = Cell(pool, None, sum(c.prefill for c in cells), sum(c.decode for c in cells))
    by_place = mode not in ("preferred", "none")
    # Where the place of a worker makes no difference, one cell is quicker than all.
    spread = cells if by_place else [whole]
    now = uncarried_prefill(spread, mode, ratio)
    yield _loss("nothing", None, whole, Cell(pool, None), now)
    for cell in cells:
        for what, node, lost in _losable(cell, alone=len(cells) == 1):
            hit = lost if by_place else replace(lost, value=None)
            after = uncarried_after(spread, hit, mode, ratio, now)
            yield _loss(what, node, whole, lost, after)


def _losable(cell: Cell, *, alone: bool) -> Iterator[tuple[str, str | None, Cell]]:
    if cell.prefill:
        yield "prefill", None, Cell(cell.pool, cell.value, prefill=1)
    if cell.decode:
        yield "decode", None, Cell(cell.pool, cell.value, decode=1)
    for node in cell.nodes:
        yield "node", node.name, Cell(cell.pool, cell.value, node.prefill, node.decode)
    if cell.value is not None and not alone and (cell.prefill or cell.decode):
        yield "domain", None, Cell(cell.pool, cell.value, cell.prefill, cell.decode)


def _loss(what: str, node: str | None, whole: Cell, lost: Cell, stranded: Fraction) -> Loss:
    prefill = whole.prefill - lost.prefill
    return Loss(
        what=what,
        pool=lost.pool,
        value=lost.value,
        node=node,
        prefill_left=prefill,
        decode_left=whole.decode - lost.decode,
        stranded_prefill=round(float(stranded), 6),
        stranded_share=_share(stranded, prefill),
        served_share=_share(prefill - stranded, whole.prefill),
    )


def _share(part: Fraction, whole: int) -> float:
    return round(float(part / whole), 6) if whole else 0.0


# -- patches ---------------------------------------------------------------------------------------


def _patches(fleet: PlannedFleet, rows: Sequence[DomainPlan]) -> tuple[list[Patch], list[str]]:
    """One patch per graph, and notes about changes that replicas cannot make."""
    wanted: dict[str, dict[str, int]] = defaultdict(dict)
    graphs = {home.graph.name: home.graph for home in fleet.homes}
    homes: dict[tuple[str, str | None, str], list[Home]] = defaultdict(list)
    for home in fleet.homes:
        homes[home.pool, home.value, home.role].append(home)
    notes = []
    for row in rows:
        if row.pool not in graphs or row.value is None:
            continue
        for role, change in (("prefill", row.add.prefill), ("decode", row.add.decode)):
            if change == 0:
                continue
            problem = _set_replicas(wanted[row.pool], homes[row.pool, row.value, role], change)
            if problem is not None:
                notes.append(f"{row.pool}: {change:+,} {role} in {row.value}: {problem}")
    return [replicas_patch(graphs[name], each) for name, each in wanted.items() if each], notes


def _set_replicas(wanted: dict[str, int], homes: Sequence[Home], change: int) -> str | None:
    """Add ``change`` to the widest component; returns why that is not possible."""
    if not homes:
        return "no component of this role is pinned there; add one, pinned by nodeSelector"
    component = widest([home.component for home in homes])
    name, replicas = component.name, component.replicas
    if scaled_elsewhere(component):
        return f"a scaling adapter sets the replicas of {name}; scale that one"
    if replicas + change < 0:
        return f"{name} has only {replicas:,}; take the rest from the others there"
    wanted[name] = replicas + change
    return None


def replicas_patch(graph: Graph, wanted: Mapping[str, int]) -> Patch:
    """Set the replicas of components by name.

    Components of v1beta1 are a list, which a merge patch would replace as a whole. A JSON patch
    addresses one entry and tests its name first, so it never scales another component.
    """
    if graph.version == "v1alpha1":
        kind = "merge"
        body: Any = {"spec": {"services": {n: {"replicas": r} for n, r in wanted.items()}}}
    else:
        kind = "json"
        names = [component.name for component in graph.components]
        body = []
        for name, replicas in wanted.items():
            path = f"/spec/components/{names.index(name)}"
            body.append({"op": "test", "path": f"{path}/name", "value": name})
            # `add` replaces an existing member.
            body.append({"op": "add", "path": f"{path}/replicas", "value": replicas})
    manifest = graph.manifest
    words = [
        "kubectl", "patch", f"dynamographdeployments.{graph.version}.{GRAPH_GROUP}", manifest.name,
        *(["-n", manifest.namespace] if manifest.namespace else []),
        "--type", kind, "-p", json.dumps(body, separators=(",", ":")),
    ]  # fmt: skip
    return Patch(graph.name, kind, body, " ".join(map(shlex.quote, words)))


def scaled_elsewhere(component: Component) -> bool:
    """Whether a scaling adapter owns the replicas: it would undo a patch of the graph."""
    adapter = component.body.get("scalingAdapter")
    return isinstance(adapter, Mapping) and adapter.get("enabled", True) is not False


def widest(components: Sequence[Component]) -> Component:
    """The component with the most replicas; of equals the first."""
    return max(components, key=lambda component: component.replicas)


# -- warnings --------------------------------------------------------------------------------------


def _warnings(
    fleet: PlannedFleet, rows: Sequence[DomainPlan], bounds: Sequence[StrandedBounds]
) -> Iterator[str]:
    for pool, now in sorted(fleet.in_force.items()):
        mine = [row for row in rows if row.pool == pool]
        if now != "required" and any(row.stranded_prefill for row in mine):
            yield from _switch_warnings(fleet, pool, now, mine)
    for bound in bounds:
        if bound.at_most:
            yield (
                f"{bound.pool}: nothing pins {_loose_workers(bound)} to one {fleet.domain}: "
                f"required strands {_stranded_range(bound)} prefill workers, as the scheduler "
                "places them; pin them, or name every value with --over"
            )


def _switch_warnings(
    fleet: PlannedFleet, pool: str, now: str, rows: Sequence[DomainPlan]
) -> Iterator[str]:
    """What required would strand in a pool where it is not in force."""
    if rows[0].enforcement != "required":
        return
    stranded = [row for row in rows if row.stranded_prefill]
    where = ", ".join(row.value or f"(no {fleet.domain})" for row in stranded)
    switch = "all to" if now == "mixed" else f"from {now} to"
    yield (
        f"do not switch {pool} {switch} required yet: it strands "
        f"{sum(row.stranded_prefill for row in stranded):,} of "
        f"{sum(row.prefill for row in rows):,} prefill workers ({where}); "
        "add decode there first"
    )


def _loose_workers(bounds: StrandedBounds) -> str:
    counts = [f"{bounds.prefill:,} prefill"] if bounds.prefill else []
    counts += [f"{bounds.decode:,} decode"] if bounds.decode else []
    return " and ".join(counts)


def _stranded_range(bounds: StrandedBounds) -> str:
    if bounds.at_least == bounds.at_most:
        return f"{bounds.at_least:,}"
    return f"{bounds.at_least:,} (at best) to {bounds.at_most:,} (at worst)"
