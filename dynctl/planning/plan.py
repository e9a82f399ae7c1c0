"""`topology plan`: the capacity of every domain, the cost of losses, and what to add.

Pure: a fleet in, one document out.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

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
    Bounds,
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
    judged = {pool: enforcement or _judged(fleet, pool) for pool in pools}
    if ratio is None and target is not None and min(target) > 0:
        ratio = Ratio(*target).reduced()
    rows = _rows(fleet, judged, ratio, target)
    bounds = list(_bounds(fleet, judged))
    patches, notes = _patches(fleet, rows)
    return TopologyPlan(
        source=fleet.source,
        domain=fleet.domain,
        enforcement=_common([judged[pool] for pool in pools]) or "required",
        in_force=_common([fleet.in_force.get(pool) for pool in pools]),
        ratio=None if ratio is None else str(ratio),
        prefill=sum(_all(fleet, pool, "prefill") for pool in pools),
        decode=sum(_all(fleet, pool, "decode") for pool in pools),
        state=_overall(rows, bounds),
        rows=rows,
        losses=list(_losses(fleet, judged, ratio)),
        bounds=bounds,
        patches=patches,
        warnings=list(_warnings(fleet, rows, bounds)),
        notes=[*fleet.notes, *_unplaced(fleet, ratio, target), *notes],
    )


def _judged(fleet: PlannedFleet, pool: str) -> str:
    in_force = fleet.in_force.get(pool, "required")
    return "required" if in_force == "mixed" else in_force


def _common(modes: Sequence[str | None]) -> str | None:
    found = set(modes)
    return "mixed" if len(found) > 1 else next(iter(found), None)


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
        unknown = any(one.pool == pool for one in fleet.floating)
        wanted = {} if unknown else _targets(cells, target)
        no_decode = unknown and mode != "required" and not _all(fleet, pool, "decode")
        stranded, idle = stranded_prefill(cells, mode), idle_decode(cells, mode)
        for cell, lacking, useless in zip(cells, stranded, idle, strict=True):
            spare = None if ratio is None or unknown else headroom(cell, ratio)
            add = Change()
            if cell.value in wanted:
                prefill, decode = wanted[cell.value]
                add = Change(prefill - cell.prefill, decode - cell.decode)
            elif ratio is not None and not unknown and cell.value is not None:
                add = Change(*additions(cell.prefill, cell.decode, ratio))
            rows.append(
                DomainPlan(
                    pool=pool,
                    value=cell.value,
                    enforcement=mode,
                    prefill=cell.prefill,
                    decode=cell.decode,
                    unpinned_prefill=_may_land(fleet, cell, "prefill"),
                    unpinned_decode=_may_land(fleet, cell, "decode"),
                    decode_per_prefill=None if unknown else _per(cell),
                    headroom=Headroom(spare, cell.kv_blocks_free, cell.batched_tokens_free),
                    stranded_prefill=lacking if no_decode or not unknown else 0,
                    idle_decode=0 if unknown else useless,
                    state=_state(
                        mode, lacking, useless, spare, unknown=unknown, no_decode=no_decode
                    ),
                    add=add,
                )
            )
    return sorted(rows, key=lambda r: (r.pool, r.value is None, r.value or ""))


def _targets(
    cells: Sequence[Cell], target: tuple[int, int] | None
) -> dict[str | None, tuple[int, int]]:
    """The even split of the target over the values of one pool."""
    values = sorted(cell.value for cell in cells if cell.value is not None)
    return dict(even_split(*target, values).items()) if target and values else {}


def _per(cell: Cell) -> float | None:
    return round(cell.decode / cell.prefill, 6) if cell.prefill and cell.decode else None


def _state(
    mode: str, stranded: int, idle: int, spare: int | None, *, unknown: bool, no_decode: bool
) -> str:
    """``unknown``: the placement is unknown; ``no_decode``: the pool has no decode worker."""
    if unknown and not no_decode:
        # A decode hop that is not bound to a value does not depend on placement.
        return "unknown" if mode == "required" else "ok"
    if stranded:
        return "stranded"
    if spare is not None and spare < 0:
        return "short"
    return "idle" if idle else "ok"


def _overall(rows: Sequence[DomainPlan], bounds: Sequence[StrandedBounds]) -> str:
    states = {row.state for row in rows} | {"stranded" for one in bounds if one.at_least}
    for state in ("stranded", "unknown", "short"):
        if state in states:
            return state
    return "ok"


def _may_land(fleet: PlannedFleet, cell: Cell, role: str) -> int:
    return sum(
        one.workers
        for one in fleet.floating
        if (one.pool, one.role) == (cell.pool, role)
        and (cell.value is None or one.may_land_in(cell.value))
    )


def _all(fleet: PlannedFleet, pool: str, role: str) -> int:
    """The workers of a role, pinned or not."""
    pinned = sum(
        cell.prefill if role == "prefill" else cell.decode
        for cell in fleet.cells
        if cell.pool == pool
    )
    return pinned + sum(
        one.workers for one in fleet.floating if (one.pool, one.role) == (pool, role)
    )


def _unplaced(
    fleet: PlannedFleet, ratio: Ratio | None, target: tuple[int, int] | None
) -> Iterator[str]:
    """Notes about pools whose placement is unknown."""
    for pool in sorted({one.pool for one in fleet.floating}):
        prefill, decode = _all(fleet, pool, "prefill"), _all(fleet, pool, "decode")
        missing = 0 if ratio is None else ratio.decode_for(prefill) - decode
        if missing > 0:
            yield f"{pool}: {missing:,} decode workers are missing for {ratio}, in any placement"
        split = _targets([cell for cell in fleet.cells if cell.pool == pool], target)
        if split:
            shares = ", ".join(f"{value} {p:,}:{d:,}" for value, (p, d) in split.items())
            yield f"{pool}: pin a component of each role to each value first, then {shares}"


# -- what placement leaves open --------------------------------------------------------------------


def _bounds(fleet: PlannedFleet, judged: Mapping[str, str]) -> Iterator[StrandedBounds]:
    for pool in sorted({one.pool for one in fleet.floating}):
        if judged[pool] != "required":
            continue
        cells = [cell for cell in fleet.cells if cell.pool == pool]
        loose = [one for one in fleet.floating if one.pool == pool]
        found: Bounds = stranded_bounds(cells, loose, closed=fleet.closed)
        counts: dict[str, int] = defaultdict(int)
        for one in loose:
            counts[one.role] += one.workers
        yield StrandedBounds(pool, counts["prefill"], counts["decode"], found.best, found.worst)


# -- losses ----------------------------------------------------------------------------------------


def _losses(fleet: PlannedFleet, judged: Mapping[str, str], ratio: Ratio | None) -> Iterator[Loss]:
    """Losses of a worker of each role, a node and a domain, for pools whose placement is known."""
    loose = {one.pool for one in fleet.floating}
    for pool in sorted({cell.pool for cell in fleet.cells} - loose):
        cells = [cell for cell in fleet.cells if cell.pool == pool]
        whole = Cell(pool, None, sum(c.prefill for c in cells), sum(c.decode for c in cells))
        if not (whole.prefill or whole.decode):
            continue
        mode = judged[pool]
        if mode in ("preferred", "none"):
            # Where a worker is makes no difference, and one cell is quicker than all.
            spread, now = [whole], uncarried_prefill([whole], mode, ratio)
        else:
            spread, now = cells, uncarried_prefill(cells, mode, ratio)
        yield _loss("nothing", None, whole, Cell(pool, None), now)
        for cell in cells:
            for what, node, lost in _losable(cell, alone=len(cells) == 1):
                hit = lost if spread is cells else replace(lost, value=None)
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
    notes = []
    for row in rows:
        for role, change in (("prefill", row.add.prefill), ("decode", row.add.decode)):
            if change == 0 or row.pool not in graphs or row.value is None:
                continue
            homes = [
                home
                for home in fleet.homes
                if (home.pool, home.value, home.role) == (row.pool, row.value, role)
            ]
            problem = _set(wanted[row.pool], homes, change)
            if problem is not None:
                notes.append(f"{row.pool}: {change:+,} {role} in {row.value}: {problem}")
    return [replicas_patch(graphs[name], each) for name, each in wanted.items() if each], notes


def _set(wanted: dict[str, int], homes: Sequence[Home], change: int) -> str | None:
    """Add ``change`` to the widest component; returns why that is not possible."""
    if not homes:
        return "no component of this role is pinned there; add one, pinned by nodeSelector"
    one = widest([home.component for home in homes])
    if scaled_elsewhere(one):
        return f"a scaling adapter sets the replicas of {one.name}; scale that one"
    if one.replicas + change < 0:
        return f"{one.name} has only {one.replicas:,}; take the rest from the others there"
    wanted[one.name] = one.replicas + change
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
        names = [one.name for one in graph.components]
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
    return max(components, key=lambda one: one.replicas)


# -- warnings --------------------------------------------------------------------------------------


def _warnings(
    fleet: PlannedFleet, rows: Sequence[DomainPlan], bounds: Sequence[StrandedBounds]
) -> Iterator[str]:
    for pool, now in sorted(fleet.in_force.items()):
        mine = [row for row in rows if row.pool == pool]
        stranded = [row for row in mine if row.stranded_prefill]
        if not stranded or now == "required" or mine[0].enforcement != "required":
            continue
        where = ", ".join(row.value or f"(no {fleet.domain})" for row in stranded)
        switch = "all to" if now == "mixed" else f"from {now} to"
        yield (
            f"do not switch {pool} {switch} required yet: it strands "
            f"{sum(row.stranded_prefill for row in stranded):,} of "
            f"{sum(row.prefill for row in mine):,} prefill workers ({where}); "
            "add decode there first"
        )
    for one in bounds:
        if one.at_most:
            yield (
                f"{one.pool}: nothing pins {_loose(one)} to one {fleet.domain}: required strands "
                f"{_range(one)} prefill workers, as the scheduler places them; pin them, or name "
                "every value with --over"
            )


def _loose(one: StrandedBounds) -> str:
    parts = [f"{one.prefill:,} prefill"] if one.prefill else []
    parts += [f"{one.decode:,} decode"] if one.decode else []
    return " and ".join(parts)


def _range(one: StrandedBounds) -> str:
    if one.at_least == one.at_most:
        return f"{one.at_least:,}"
    return f"{one.at_least:,} (at best) to {one.at_most:,} (at worst)"
