"""The prefix index: worked examples, one behaviour per test. Random ones: test_index_properties."""

import gc
import json
import pickle
from array import array

import pytest

from router_core.changes import KvEvent, WorkerUpserted
from router_core.errors import SnapshotError
from router_core.events import BlocksStored, Fault, RemoveResult, StoreResult
from router_core.hashing import hash_prompt, sequence_hashes
from router_core.index import PrefixIndex
from router_core.router import Router
from router_core.routing_view import RoutingRequest
from router_core.runs import LIMIT
from router_core.worker_sets import NO_OVERLAPS, Overlaps, slots_of
from tests.router_core.fleet import MODEL, worker

LOCAL = hash_prompt(list(range(96)), 16).local
PROMPT = sequence_hashes(LOCAL)
NAMES = [101, 102, 103, 104, 105, 106]


def depths(index: PrefixIndex, sequence: list[int] | None = None) -> dict[int, int]:
    return dict(index.find_matches(PROMPT if sequence is None else sequence).items())


def stored(*slots: int) -> PrefixIndex:
    index = PrefixIndex()
    for slot in slots:
        assert index.store(slot, None, NAMES, LOCAL) == StoreResult(6, 0)
    return index


def test_matches_are_leading_blocks_per_slot() -> None:
    index = stored(0)
    index.store(1, None, NAMES[:2], LOCAL[:2])
    index.store(2, None, NAMES[:2], LOCAL[:2])
    index.store(70, None, NAMES[:5], LOCAL[:5])
    found = index.find_matches(PROMPT)
    assert found.levels == ((6, 1), (5, 1 << 70), (2, 0b110))
    assert [found.get(slot) for slot in (0, 1, 2, 3, 70)] == [6, 2, 2, 0, 5]
    assert depths(index, PROMPT[:3]) == {0: 3, 70: 3, 1: 2, 2: 2}
    assert depths(index, sequence_hashes(LOCAL[1:])) == {}, (
        "identical tokens at another depth do not match"
    )
    assert depths(index, []) == {}


def test_candidates_restrict_the_search() -> None:
    index = stored(0, 3)
    index.store(1, None, NAMES[:2], LOCAL[:2])
    assert index.find_matches(PROMPT, 0b1010).levels == ((6, 0b1000), (2, 0b10))
    assert index.find_matches(PROMPT, 0b100) is NO_OVERLAPS
    assert index.find_matches(PROMPT, 0) is NO_OVERLAPS


def test_a_chain_continues_under_its_parent() -> None:
    index = PrefixIndex()
    index.store(0, None, NAMES[:3], LOCAL[:3])
    assert index.store(0, 103, NAMES[3:], LOCAL[3:]) == StoreResult(3, 0)
    assert depths(index) == {0: 6}


def test_an_unknown_parent_refuses_the_whole_event() -> None:
    index = stored(0)
    result = index.store(1, 103, NAMES[3:], LOCAL[3:])
    assert (result.stored, result.known) == (0, 0)
    assert result.refused is not None
    assert (result.refused.code, result.refused.value) == (Fault.UNKNOWN_PARENT, 103)
    assert "103" in result.refused.message
    assert depths(index) == {0: 6}, "another worker's block is no parent"
    assert index.is_free(1)


def test_storing_again_changes_nothing_and_is_not_counted_twice() -> None:
    index = stored(0)
    assert index.store(0, None, NAMES, LOCAL) == StoreResult(0, 6)
    assert index.block_count(0) == 6
    index.remove(0, NAMES)
    assert depths(index) == {}
    assert (index.entry_count, index.node_count) == (0, 0)


def test_removing_a_middle_block_hides_the_blocks_after_it_until_stored_again() -> None:
    index = stored(0, 1)
    assert index.remove(0, [103]) == RemoveResult(removed=1, hidden=3, unknown=0)
    assert depths(index) == {0: 2, 1: 6}
    assert index.store(0, 102, [103], [LOCAL[2]]) == StoreResult(1, 0)
    assert depths(index) == {0: 3, 1: 6}
    assert index.remove(0, [104, 105]) == RemoveResult(0, 0, 2), "hidden blocks are not held"
    assert index.store(0, 103, NAMES[3:], LOCAL[3:]) == StoreResult(3, 0)
    assert depths(index) == {0: 6, 1: 6}


@pytest.mark.parametrize("order", [[104, 105, 106], [106, 105, 104], [105, 104, 106, 104]])
def test_a_tail_is_removed_in_any_order(order: list[int]) -> None:
    index = stored(0)
    assert index.remove(0, order) == RemoveResult(3, 0, 0)
    assert depths(index) == {0: 3}


def test_removals_of_blocks_not_held_are_counted() -> None:
    index = stored(0)
    index.store(1, None, NAMES[:1], LOCAL[:1])
    assert index.remove(1, [999, 106, 101]) == RemoveResult(1, 0, 2)
    assert depths(index) == {0: 6}


@pytest.mark.seed("smart-routing-guide-0.9: infrastructure: PYTHONHASHSEED")
def test_workers_that_disagree_about_engine_hashes() -> None:
    """Dynamo keeps the first worker's names and ignores the second one's removals for good."""
    index = stored(0)
    own = [name + 1000 for name in NAMES]
    assert index.store(1, None, own[:4], LOCAL[:4]) == StoreResult(4, 0)
    assert index.store(1, own[3], own[4:], LOCAL[4:]) == StoreResult(2, 0)
    assert depths(index) == {0: 6, 1: 6}
    assert index.remove(1, [103]) == RemoveResult(0, 0, 1), "not this worker's name"
    assert index.store(1, 103, [777], [LOCAL[3]]).refused is not None
    assert index.remove(1, [1103]) == RemoveResult(1, 3, 0)
    assert depths(index) == {0: 6, 1: 2}
    index.remove(0, NAMES)
    assert index.remove(1, own[:2]) == RemoveResult(2, 0, 2 - 2)
    assert (index.entry_count, index.node_count) == (0, 0)


def test_the_same_engine_hash_for_other_content_on_another_worker() -> None:
    index = stored(0)
    other = hash_prompt(list(range(500, 532)), 16)
    assert index.store(1, None, NAMES[:2], other.local) == StoreResult(2, 0)
    assert depths(index, other.sequence) == {1: 2}
    index.remove(1, [102])
    assert depths(index, other.sequence) == {1: 1}
    assert depths(index) == {0: 6}


def test_a_hash_conflict_on_one_worker_is_refused_from_there() -> None:
    index = PrefixIndex()
    index.store(0, None, NAMES[:2], LOCAL[:2])
    result = index.store(0, 102, [103, 101, 105], LOCAL[2:5])
    assert (result.stored, result.known) == (1, 0)
    assert result.refused is not None
    assert result.refused.code == Fault.HASH_CONFLICT
    assert (result.refused.value, result.refused.blocks) == (101, 2)
    assert depths(index) == {0: 3}


def test_one_event_cannot_give_one_name_to_two_blocks() -> None:
    for names, stored_before in (([101, 101], []), ([777, 777], NAMES[:1])):
        index = PrefixIndex()
        if stored_before:
            index.store(1, None, stored_before, LOCAL[:1])
        result = index.store(0, None, names, LOCAL[:2])
        assert (result.stored, result.known) == (1, 0)
        assert result.refused is not None
        assert result.refused.code == Fault.HASH_CONFLICT
        assert depths(index)[0] == 1


def test_a_removed_only_child_is_replaced_not_kept_as_a_branch() -> None:
    index = PrefixIndex()
    index.store(0, None, [1], [1])
    for turn in range(20):
        index.store(0, 1, [10 + turn], [10 + turn])
        index.remove(0, [10 + turn])
    assert not index._runs.forks


@pytest.mark.parametrize("steps", [[(None, 2)], [(None, 1), (101, 1)]])
@pytest.mark.parametrize("others_hold_the_first", [False, True])
def test_a_prompt_that_claims_to_start_with_a_longer_prefix(
    steps: list[tuple[int | None, int]], others_hold_the_first: bool
) -> None:
    """A hostile local hash disturbs no other worker, and every slot can still be emptied."""
    index = PrefixIndex()
    index.store(0, None, [900], [PROMPT[1]])
    if others_hold_the_first:
        index.store(2, None, NAMES[:1], LOCAL[:1])
    at = 0
    for parent, count in steps:
        event = NAMES[at : at + count], LOCAL[at : at + count]
        assert index.store(1, parent, *event) == StoreResult(count, 0)
        at += count
    assert index.store(1, NAMES[1], NAMES[2:], LOCAL[2:]) == StoreResult(4, 0)
    assert index.find_matches(PROMPT).get(1) == 6
    assert index.block_count(0) == 1
    for slot in (0, 1, 2):
        index.begin_drop(slot)
    assert index.sweep(1000) == 0
    assert (index.entry_count, index.node_count) == (0, 0)


def test_columns_may_be_any_sequence() -> None:
    index = PrefixIndex()
    assert index.store(0, None, tuple(NAMES), tuple(LOCAL)) == StoreResult(6, 0)
    assert index.store(1, None, tuple(NAMES), tuple(LOCAL)) == StoreResult(6, 0)
    assert not index._runs.forks
    assert depths(index) == {0: 6, 1: 6}


def test_the_last_name_for_a_block_counts() -> None:
    index = stored(0)
    assert index.store(0, None, [201], LOCAL[:1]) == StoreResult(0, 1)
    assert index.remove(0, [101]) == RemoveResult(0, 0, 1)
    assert index.remove(0, [201]) == RemoveResult(1, 5, 0)


@pytest.mark.parametrize(
    ("parent", "names", "local", "code", "kept"),
    [
        (None, [1, 2], [3], Fault.COLUMNS_DIFFER, 0),
        (None, [1], [-1], Fault.NOT_A_HASH, 0),
        (None, [1], [2**64], Fault.NOT_A_HASH, 0),
        (None, [1, 2, 3], [5, 2**64, 6], Fault.NOT_A_HASH, 1),
    ],
)
def test_a_bad_event_is_refused_not_raised(
    parent: int | None, names: list[int], local: list[int], code: Fault, kept: int
) -> None:
    index = PrefixIndex()
    result = index.store(0, parent, names, local)
    assert result.refused is not None
    assert result.refused.code == code
    assert result.refused.blocks == len(names) - kept
    assert result.stored == index.block_count(0) == kept


def test_an_empty_event_changes_nothing() -> None:
    index = PrefixIndex()
    assert index.store(0, None, [], []) == StoreResult(0, 0)
    assert index.is_free(0)


def test_clear_empties_one_slot_and_leaves_it_usable() -> None:
    index = stored(0, 1)
    assert index.clear(0) == 6
    assert index.clear(0) == 0
    assert depths(index) == {1: 6}
    index.store(0, None, NAMES[:1], LOCAL[:1])
    assert depths(index) == {0: 1, 1: 6}


def test_a_dropped_slot_vanishes_at_once_and_is_swept_in_slices() -> None:
    index = stored(0, 1)
    index.begin_drop(0)
    assert depths(index) == {1: 6}
    assert not index.is_free(0)
    assert index.block_count(0) == 6
    late = index.store(0, 106, [107], [7])
    assert late.refused is not None
    assert late.refused.code == Fault.SLOT_DROPPED
    assert index.remove(0, [101]) == RemoveResult(0, 0, 1)
    assert index.clear(0) == 0
    assert index.sweep(0) == 6
    assert [index.sweep(2), index.sweep(2), index.sweep(2)] == [4, 2, 0]
    assert index.is_free(0)
    assert depths(index) == {1: 6}
    index.store(0, None, NAMES[:1], LOCAL[:1])
    assert depths(index) == {0: 1, 1: 6}, "the next worker in the slot inherits nothing"


def test_slots_swept_together_share_the_budget() -> None:
    index = stored(0, 1, 2)
    index.begin_drop(0)
    index.begin_drop(1)
    index.begin_drop(1)
    assert index.sweep(8) == 4
    assert index.sweep(100) == 0
    assert depths(index) == {2: 6}


def test_dropping_an_empty_slot_needs_no_sweep() -> None:
    index = PrefixIndex()
    index.begin_drop(4)
    assert index.is_free(4)
    assert index.sweep(10) == 0


def test_dump_is_json_with_parents_first_and_each_workers_names() -> None:
    index = stored(0)
    index.store(1, None, [1, 2, 3], LOCAL[:3])
    index.store(1, 2, [4], [LOCAL[5]])
    index.store(2, None, [9], [LOCAL[1]])
    index.begin_drop(2)
    dump = json.loads(json.dumps(index.dump()))
    assert dump["slots"][0]["events"] == [
        {"parent_hash": None, "block_hashes": NAMES, "local_hashes": LOCAL}
    ]
    events = dump["slots"][1]["events"]
    assert events[0] == {"parent_hash": None, "block_hashes": [1, 2], "local_hashes": LOCAL[:2]}
    assert sorted((event["parent_hash"], event["block_hashes"]) for event in events[1:]) == [
        (2, [3]),
        (2, [4]),
    ]
    assert [entry["slot"] for entry in dump["slots"]] == [0, 1]
    again = PrefixIndex.restore(dump)
    assert depths(again) == depths(index) == {0: 6, 1: 3}
    assert again.remove(1, [2]) == RemoveResult(1, 2, 0)
    assert depths(pickle.loads(pickle.dumps(index))) == {0: 6, 1: 3}


def test_stored_events_are_cut_to_a_bound() -> None:
    events = list(stored(0).stored_events(0, max_blocks=4))
    assert events == [
        BlocksStored(None, NAMES[:4], LOCAL[:4]),
        BlocksStored(104, NAMES[4:], LOCAL[4:]),
    ]
    assert list(PrefixIndex().stored_events(3)) == []


def test_restore_refuses_other_schemas_and_broken_chains() -> None:
    with pytest.raises(SnapshotError, match="schema 2"):
        PrefixIndex.restore({"schema": 2, "slots": []})
    broken = {"parent_hash": 5, "block_hashes": [6], "local_hashes": [7]}
    with pytest.raises(SnapshotError, match="parent block 5"):
        PrefixIndex.restore({"schema": 1, "slots": [{"slot": 0, "events": [broken]}]})


def test_passing_children_leave_no_links_behind() -> None:
    """A shared system prompt outlives thousands of conversations."""
    index = PrefixIndex()
    index.store(0, None, [1], [1])
    for turn in range(2000):
        index.store(0, 1, [10 + turn], [10 + turn])
        if turn >= 5:
            index.remove(0, [10 + turn - 5])
    assert index.node_count == 6
    assert len(index._runs.bodies) <= 16


def test_equal_sets_of_holders_are_one_object() -> None:
    index = stored(40, 50, 60)
    for slot in (40, 50, 60):
        index.store(slot, None, [900], [900])
    first, second = (index._runs.holders[run] for run in (1, 2))
    assert first == 1 << 40 | 1 << 50 | 1 << 60
    assert first is second


def test_matches_from_local_hashes_are_those_from_sequence_hashes() -> None:
    index = stored(0)
    index.store(1, None, NAMES[:4], LOCAL[:4])
    index.store(2, None, NAMES[:2], LOCAL[:2])
    index.store(2, NAMES[1], [900, 901], [7, 8])
    for local in (LOCAL, LOCAL[:3], [*LOCAL[:2], 7, 8, 9], [1, 2], [], tuple(LOCAL)):
        for candidates in (None, 0b101, 0):
            expected = index.find_matches(sequence_hashes(local), candidates)
            assert index.find_matches_local(local, candidates) == expected
    assert index.find_matches_local(array("Q", LOCAL)) == index.find_matches(PROMPT)
    exact = PrefixIndex(exact=True)
    exact.store(0, None, NAMES, LOCAL)
    assert exact.find_matches_local(LOCAL, limit=4).levels == ((4, 1),)
    exact.store(0, None, NAMES[:2], LOCAL[:2], group=1)
    assert exact.find_matches_local(LOCAL) == exact.find_matches(PROMPT)


def test_the_garbage_collector_visits_no_run() -> None:
    """A million objects that it visits would stop every stream for tens of milliseconds."""
    index = PrefixIndex()
    texts = [list(range(100 * start, 100 * start + 50)) for start in range(40)]
    for start, local in enumerate(texts):
        for slot, length in ((3, 50), (70, 40), (80, 20), (90, 30)):
            index.store(slot, None, local[:length], local[:length])
        index.store(3, local[30], [1_000_000 + start], [5])
    runs = index._runs
    assert any(isinstance(held, tuple) for held in runs.holders)
    assert {type(body) for body in runs.bodies[1:]} == {bytes}
    index.store(3, texts[-1][-1], [2_000_000], [6])
    assert type(runs.bodies[-2]) is bytearray
    gc.collect()  # which stops visiting tuples of ints
    assert not any(map(gc.is_tracked, [*runs.bodies, *runs.holders, *runs.kids.shards, runs.forks]))


def test_prompts_longer_than_a_run() -> None:
    length = 2 * LIMIT + 100
    local = list(range(1, length + 1))
    prompt = sequence_hashes(local)
    index = PrefixIndex()
    for at in range(0, length, 1000):
        parent = local[at - 1] if at else None
        index.store(0, parent, local[at : at + 1000], local[at : at + 1000])
    assert index.store(1, None, local, local) == StoreResult(length, 0)
    assert index.remove(1, [LIMIT + 5]) == RemoveResult(1, length - LIMIT - 5, 0)
    assert index.find_matches(prompt).levels == ((length, 1), (LIMIT + 4, 2))
    assert index.find_matches_local(local).levels == ((length, 1), (LIMIT + 4, 2))
    again = PrefixIndex.restore(index.dump())
    assert again.find_matches(prompt) == index.find_matches(prompt)
    assert index.remove(0, [1]) == RemoveResult(1, length - 1, 0)
    assert index.find_matches(prompt).levels == ((LIMIT + 4, 2),)
    assert index.node_count == LIMIT + 4


def test_a_copy_is_independent() -> None:
    index = stored(0)
    index.store(0, NAMES[2], [900], [900])
    index.store(1, None, [1, 2], LOCAL[:2])
    copied = index.copy()
    index.remove(0, [NAMES[1]])
    index.store(2, None, NAMES, LOCAL)
    assert depths(copied) == {0: 6, 1: 2}
    assert copied.remove(1, [2]) == RemoveResult(1, 0, 0)
    assert copied.remove(0, [900]) == RemoveResult(1, 0, 0)
    assert depths(index) == {0: 1, 1: 2, 2: 6}


def test_overlaps() -> None:
    overlaps = Overlaps(((9, 0b1000), (4, 0b0110)))
    assert list(overlaps.items()) == [(3, 9), (1, 4), (2, 4)]
    assert overlaps.best(-1) == (9, 0b1000)
    assert overlaps.best(0b0111) == (4, 0b0110)
    assert overlaps.best(0b0001) == (0, 0b0001)
    assert overlaps.mask == 0b1110
    assert list(slots_of(1 << 900 | 5)) == [0, 2, 900]


def test_a_prompt_that_is_cached_entirely_reuses_one_block_less() -> None:
    """The last token is always computed. Dynamo's cost model credits its block too."""
    prompt = range(64)
    for exact, blocks in ((True, [3, 4, 6]), (False, [4, 4, 7])):
        router = Router(exact_reuse=exact)
        router.apply(WorkerUpserted(worker(1)), 0.0)
        request = RoutingRequest.from_tokens("r", MODEL, prompt, 16)
        local = request.local_hashes
        router.apply(KvEvent(1, 0, BlocksStored(None, request.sequence_hashes, local)), 0.0)
        longer = RoutingRequest.from_tokens("r", MODEL, range(65), 16)
        batch = RoutingRequest(
            "r",
            MODEL,
            64 + 50,
            16,
            request.sequence_hashes,
            more_hashes=(request.sequence_hashes[:3],),
            lengths=(64, 50),
        )
        router = Router.restore(json.loads(json.dumps(router.snapshot())))
        decisions = [router.plan(one).decode for one in (request, longer, batch)]
        assert [one.overlap_blocks(0) for one in decisions if one] == blocks


def test_the_name_of_a_held_block_leads_to_its_sequence_hash() -> None:
    index = PrefixIndex()
    index.store(3, None, [501, 502], [1, 2])
    expected = sequence_hashes([1, 2])
    assert [index.sequence_of(3, name) for name in (501, 502)] == expected
    assert index.sequence_of(4, 501) is None
    index.remove(3, [502])
    assert [index.sequence_of(3, name) for name in (501, 502)] == [expected[0], None]
