"""The arithmetic of capacity, mostly as laws that hold for every fleet."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.errors import UsageProblem
from dynctl.planning.capacity import (
    ENFORCEMENTS,
    Cell,
    Floating,
    Ratio,
    additions,
    even_split,
    headroom,
    idle_decode,
    restore,
    stranded_bounds,
    stranded_prefill,
    subtract,
    uncarried_after,
    uncarried_prefill,
)

counts = st.integers(0, 200)
ratios = st.builds(Ratio, st.integers(1, 9), st.integers(1, 9))
cells = st.lists(st.tuples(counts, counts), min_size=1, max_size=6).map(
    lambda found: [Cell("m", f"z{i}", p, d) for i, (p, d) in enumerate(found)]
)
enforcements = st.sampled_from(ENFORCEMENTS)


@given(counts, counts, ratios)
def test_additions_reach_the_ratio(p: int, d: int, r: Ratio):
    more_p, more_d = additions(p, d, r)
    assert more_p >= 0
    assert more_d >= 0
    p, d = p + more_p, d + more_d
    assert d >= r.decode_for(p)
    assert r.decode_for(p + 1) > d
    assert additions(p, d, r) == (0, 0)


@given(
    st.integers(0, 25), st.integers(0, 25), st.builds(Ratio, st.integers(1, 4), st.integers(1, 4))
)
def test_additions_are_minimal(p: int, d: int, r: Ratio):
    more_p, more_d = additions(p, d, r)
    for a, b in product(range(more_p + 1), range(more_d + 1)):
        reached = r.decode_for(p + a) <= d + b < r.decode_for(p + a + 1)
        assert not reached or (a, b) == (more_p, more_d)


@given(cells, ratios, enforcements)
def test_domains_at_the_ratio_carry_all_prefill(found: list[Cell], r: Ratio, mode: str):
    full = [
        restore([cell], Cell("m", cell.value, *additions(cell.prefill, cell.decode, r)))[0]
        for cell in found
    ]
    assert uncarried_prefill(full, mode, r) == 0
    assert not any(stranded_prefill(full, mode))
    assert all(headroom(cell, r) >= 0 for cell in full)


@given(cells, st.integers(0, 5))
def test_restore_reverses_subtract(found: list[Cell], which: int):
    lost = found[which % len(found)]
    left = subtract(found, lost)
    assert sum(c.prefill for c in left) == sum(c.prefill for c in found) - lost.prefill
    assert (left[which % len(found)].prefill, left[which % len(found)].decode) == (0, 0)
    assert restore(left, lost) == found


@given(cells, st.integers(0, 5), st.one_of(st.none(), ratios), enforcements)
def test_a_loss_costs_as_much_as_planning_without_it(
    found: list[Cell], which: int, r: Ratio | None, mode: str
):
    lost = found[which % len(found)]
    before = uncarried_prefill(found, mode, r)
    left = subtract(found, lost)
    assert uncarried_after(found, lost, mode, r, before) == uncarried_prefill(left, mode, r)


@given(cells, ratios)
def test_required_never_carries_more_than_preferred(found: list[Cell], r: Ratio):
    assert uncarried_prefill(found, "required", r) >= uncarried_prefill(found, "preferred", r)
    for free, bound in zip(
        stranded_prefill(found, "preferred"), stranded_prefill(found, "required"), strict=True
    ):
        assert free <= bound


def test_workers_without_a_partner_by_enforcement():
    fleet = [
        Cell("m", "a", 2, 3),
        Cell("m", "b", 4, 0),
        Cell("m", "c", 0, 5),
        Cell("m", None, 1, 1),
    ]
    assert stranded_prefill(fleet, "required") == [0, 4, 0, 1]
    assert idle_decode(fleet, "required") == [0, 0, 5, 1]
    for mode in ("preferred", "fallback", "none"):
        assert stranded_prefill(fleet, mode) == [0, 0, 0, 0]
        assert idle_decode(fleet, mode) == [0, 0, 0, 0]
    alone = [Cell("m", "a", 2, 0), Cell("other", "a", 0, 9)]
    assert stranded_prefill(alone, "preferred") == [2, 0]


@given(counts, counts, st.integers(1, 9))
def test_a_split_is_complete_and_even(p: int, d: int, n: int):
    split = list(even_split(p, d, [f"z{i}" for i in range(n)]).values())
    assert sum(a for a, _ in split) == p
    assert sum(b for _, b in split) == d
    assert max(a for a, _ in split) - min(a for a, _ in split) <= 1


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_a_split_keeps_a_ratio_that_divides(p: int, decode: int, n: int):
    for a, b in even_split(p, p * decode, [f"z{i}" for i in range(n)]).values():
        assert b == a * decode


def test_the_example_of_the_guide_splits_evenly():
    assert even_split(60, 120, ["az-1", "az-2"]) == {"az-1": (30, 60), "az-2": (30, 60)}


@pytest.mark.parametrize(
    "text", ["", "1", "1:", ":2", "0:1", "1:0", "a:b", "-1:2", "1:2:3", "1.5:2"]
)
def test_an_invalid_ratio_is_refused(text: str):
    with pytest.raises(UsageProblem, match="--ratio"):
        Ratio.parse(text)


def test_a_ratio_is_reduced():
    assert str(Ratio.parse("60:120")) == "1:2"


# -- bounds ----------------------------------------------------------------------------------------

VALUES = ("a", "b", "c")
allowed = st.one_of(st.none(), st.sets(st.sampled_from(VALUES), min_size=1).map(frozenset))
floats = st.lists(
    st.builds(
        Floating, st.just("m"), st.sampled_from(("prefill", "decode")), st.integers(0, 2), allowed
    ),
    max_size=3,
)
small = st.tuples(*(st.tuples(st.integers(0, 2), st.integers(0, 1)) for _ in VALUES)).map(
    lambda found: [Cell("m", v, p, d) for v, (p, d) in zip(VALUES, found, strict=True)]
)


def placements(found: list[Cell], loose: list[Floating]) -> list[int]:
    """Stranded prefill of every placement, by trying them all."""
    workers = [(one.role, one) for one in loose for _ in range(one.workers)]
    options = [[v for v in VALUES if one.may_land_in(v)] for _, one in workers]
    results = []
    for chosen in product(*options):
        placed = found
        for (role, _), value in zip(workers, chosen, strict=True):
            placed = restore(placed, Cell("m", value, role == "prefill", role == "decode"))
        results.append(sum(stranded_prefill(placed, "required")))
    return results


@given(small, floats)
def test_bounds_hold_for_every_placement(found: list[Cell], loose: list[Floating]):
    bounds = stranded_bounds(found, loose, closed=True)
    every = placements(found, loose)
    assert bounds.best <= min(every)
    assert bounds.worst == max(every)


def test_workers_may_be_placed_in_unlisted_values():
    loose = [Floating("m", "prefill", 6), Floating("m", "decode", 12)]
    assert stranded_bounds([], loose, closed=False).best == 0
    assert stranded_bounds([], loose, closed=False).worst == 6
    one = [Cell("m", "a", 3, 0)]
    assert stranded_bounds(one, loose, closed=True).worst == 0
    assert stranded_bounds(one, loose, closed=False).worst == 9
