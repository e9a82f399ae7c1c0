"""Generated workloads are reproducible, in order, and share prefixes as their parameters say."""

from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.errors import UsageProblem
from dynctl.simulation.replay.workloads import KINDS, generate, parameters, workload
from dynctl.wire.traces import TraceRequest


def requests(kind: str, *changes: str, seed: int = 1, block_size: int = 16) -> list[TraceRequest]:
    return list(generate(workload(kind, changes), seed, block_size))


def ceiling(found: list[TraceRequest]) -> float:
    """The share of blocks that one cache without limit would have."""
    seen: set[int] = set()
    hits = 0
    for one in found:
        hits += next((i for i, h in enumerate(one.hash_ids) if h not in seen), len(one.hash_ids))
        seen.update(one.hash_ids)
    return hits / sum(len(one.hash_ids) for one in found)


@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 2**64),
    st.sampled_from((1, 16, 512)),
    st.integers(1, 4),
)
def test_requests_are_reproducible_and_in_order(kind, seed, block_size, tenants) -> None:
    changes = ("requests=60", f"tenants={tenants}", "longest_tokens=9000")
    found = requests(kind, *changes, seed=seed, block_size=block_size)
    assert found == requests(kind, *changes, seed=seed, block_size=block_size)
    assert len(found) == 60
    assert all(one.at <= two.at for one, two in pairwise(found))
    assert len({one.id for one in found}) == 60
    parent: dict[int, int] = {}
    for one in found:
        assert len(one.hash_ids) == one.input_tokens // block_size
        assert one.input_tokens >= 1
        assert one.output_tokens >= 1
        for before, after in pairwise((-1, *one.hash_ids)):
            # An id stands for its block and all before it, so that it has one parent.
            assert parent.setdefault(after, before) == before


def test_other_seeds_give_other_requests() -> None:
    assert requests("chat", "requests=20") != requests("chat", "requests=20", seed=2)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_shares_prefixes(kind: str) -> None:
    shared = ceiling(requests(kind, "requests=1000"))
    assert shared > {"agentic": 0.8, "chat": 0.5, "rag": 0.1, "batch": 0.5}[kind]
    assert ceiling(requests(kind, "requests=1000", "tenants=500")) < shared


def test_the_rate_is_that_of_requests() -> None:
    found = requests("chat", "requests=8000", "rate=20", "think_s=1")
    # Sessions need a while until all their turns have come.
    late = found[2000:]
    assert 15 < len(late) / (late[-1].at - late[0].at) < 25


def test_a_burst_multiplies_arrivals() -> None:
    found = requests("rag", "requests=6000", "rate=10", "burst=10", "burst_s=10")
    inside = Counter(one.at % 60 < 10 for one in found)
    assert 1.6 < inside[True] / inside[False] < 2.4  # 100 a second for 10 s, 10 for 50 s


def test_zones_and_jobs() -> None:
    found = requests("batch", "requests=2000", "zones=zone-a:3,zone-b", "together=50")
    zones = Counter(one.zone for one in found)
    assert 2 < zones["zone-a"] / zones["zone-b"] < 4
    assert set(Counter(one.at for one in found).values()) == {50}


def test_memory_is_of_running_sessions_only() -> None:
    endless = generate(workload("agentic", ("requests=100000000",)), 1, 512)
    assert len(list(islice(endless, 3000))) == 3000


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("rate", "expected NAME=VALUE with a name of requests, rate"),
        ("speed=1", "expected NAME=VALUE"),
        ("rate=fast", "--workload rate=fast: expected a number"),
        ("rate=0", "expected 0.001 to 1,000,000"),
        ("rate=nan", "expected 0.001"),
        ("requests=1.5", "expected a whole number"),
        ("requests=-1", "expected 1 to 100,000,000"),
        ("zones=a,a", "expected different names"),
        ("zones=a:0", "expected 1e-06"),
        ("documents_each=3", "there are no documents; set documents=N too"),
    ],
)
def test_a_bad_parameter_is_named(change: str, problem: str) -> None:
    with pytest.raises(UsageProblem, match="--workload") as raised:
        workload("chat", (change,))
    assert problem in str(raised.value)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(UsageProblem, match="--generate poems: expected one of agentic, chat"):
        workload("poems")


def test_every_parameter_has_a_meaning() -> None:
    assert all(meaning for _, meaning in parameters())
    assert set(workload("chat").parameters()) == {"kind", *(name for name, _ in parameters())}
