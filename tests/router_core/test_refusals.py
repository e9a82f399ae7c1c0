"""Refusals of the library have the name, the value, and what is expected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast, get_args

import pytest

import router_core
from router_core import (
    Applied,
    BlocksRemoved,
    BlocksStored,
    Booked,
    Change,
    Cleared,
    ConfigError,
    ConfigSet,
    ConstraintError,
    Dequeued,
    Freed,
    HashingError,
    IndexBound,
    IndexMarked,
    KvEvent,
    LeanIndex,
    LeanRouter,
    LoadReported,
    ModelRuntimeConfig,
    OutputBlock,
    PrefillDone,
    PrefixIndex,
    Progressed,
    Role,
    Router,
    RouterConfig,
    RoutingRequest,
    SnapshotError,
    TransferTableSet,
    WindowStored,
    Worker,
    WorkerAvailability,
    WorkerError,
    WorkerLost,
    WorkerUpserted,
    constraints,
    hash_prompt,
    legacy_overlap_weight,
)
from router_core.decision import Outcome

PAGE = Path(router_core.__file__).parents[1] / "docs" / "router-api.md"
TOKENS = range(40)


def router(**options: Any) -> Router:
    made = Router(**options)
    assert made.apply(WorkerUpserted(Worker(1, "w1", "m")), 0.0).ok
    return made


def stored(**changes: Any) -> KvEvent:
    values = {"parent_hash": None, "block_hashes": (1,), "local_hashes": (1,)} | changes
    return KvEvent(1, 0, BlocksStored(**values))


ODD = cast(Any, object())
REFUSED: list[tuple[Change, str, str]] = [
    (stored(block_hashes=(b"12345678",)), "not_a_hash", "block_hashes[0]: expected an unsigned"),
    (stored(block_hashes=(1, b"1"), local_hashes=(1, 2)), "not_a_hash", "block_hashes[1]: "),
    (stored(block_hashes=("a",)), "not_a_hash", "block_hashes[0]: "),
    (stored(block_hashes=(1.5,)), "not_a_hash", "got float"),
    (stored(block_hashes=5), "not_a_hash", "block_hashes: expected a sequence"),
    (stored(block_hashes=b"123"), "columns_differ", "3 block hashes and 1 local hashes"),
    (stored(local_hashes=(b"1",)), "not_a_hash", "local_hashes[0]: "),
    (stored(local_hashes=(None,)), "not_a_hash", "local_hashes[0]: "),
    (stored(local_hashes=(2**64,)), "not_a_hash", "not an unsigned 64-bit number"),
    (stored(local_hashes=(-1,)), "not_a_hash", "not an unsigned 64-bit number"),
    (stored(parent_hash=b"1"), "not_a_hash", "parent_hash: expected an unsigned"),
    (stored(parent_hash="1"), "not_a_hash", "parent_hash: "),
    (stored(block_hashes=(b"1",), tier="disk"), "not_a_hash", "block_hashes[0]: "),
    (stored(local_hashes=()), "columns_differ", "1 block hashes and 0 local hashes"),
    (KvEvent(1, 0, BlocksRemoved(cast(Any, (b"1",)))), "not_a_hash", "block_hashes[0]: "),
    (KvEvent(1, 0, BlocksRemoved(cast(Any, 5))), "not_a_hash", "block_hashes: "),
    (KvEvent(1, 0, WindowStored(1, cast(Any, (b"1",)), 1)), "not_a_hash", "block_hashes[0]: "),
    (KvEvent(1, 0, cast(Any, None)), "not_a_hash", "event: expected a CacheEvent, got NoneType"),
    (KvEvent(1, 7, Cleared()), "unknown_worker", "rank 7 of worker 1 is not registered"),
    (KvEvent(9, 0, Cleared()), "unknown_worker", "rank 0 of worker 9"),
    (cast(Any, None), "invalid", "change: expected a Change"),
    (cast(Any, Worker(1, "w", "m")), "invalid", "change: expected a Change, got 'Worker'"),
    (WorkerUpserted(Worker(2, "w1", "m")), "invalid", "belongs to worker 1"),
    (WorkerLost(9), "unknown_worker", "worker 9 is not registered"),
    (WorkerAvailability(9, None), "unknown_worker", "worker 9"),
    (Freed("x"), "unknown_request", "request x has no active booking"),
    (Freed("x", cast(Any, "first")), "invalid", "stage: expected one of prefill, decode,"),
    (PrefillDone("x"), "unknown_request", "request x"),
    (Progressed("x"), "unknown_request", "request x"),
    (OutputBlock("x"), "unknown_request", "request x"),
    (OutputBlock("x", 2.0), "invalid", "decay_fraction: expected 0 to 1"),
    (Dequeued("x"), "unknown_request", "request x does not wait"),
    (Booked("x", cast(Any, "first"), 1, 0), "invalid", "stage: expected one of"),
    (Booked("x", "decode", 1, 0, prefill_tokens=-1), "invalid", "prefill_tokens: expected 0"),
    (Booked("x", "decode", 1, 0, anonymous_blocks=-1), "invalid", "anonymous_blocks: "),
    (Booked("x", "decode", 1, 0, predicted_s=-1.0), "invalid", "predicted_s: "),
    (Booked("x", "decode", 1, 3), "unknown_worker", "rank 3 of worker 1"),
    (IndexMarked(1, 0, cast(Any, "good")), "invalid", "state: expected one of current, gapped"),
    (IndexMarked(1, 0, "gapped", -1), "invalid", "missing: "),
    (LoadReported(1, 0, active_prefill_tokens=-5), "invalid", "active_prefill_tokens: "),
    (LoadReported(1, 0, kv_used_blocks=cast(Any, "x")), "invalid", "kv_used_blocks: "),
    (ConfigSet({"nope": 1}), "invalid", "nope: no such setting"),
    (TransferTableSet(cast(Any, "x")), "invalid", "table: expected a TransferTable"),
]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("change", "code", "message"), REFUSED)
def test_a_refused_change_says_why_and_changes_nothing(
    change: Change, code: str, message: str, exact: bool
) -> None:
    made = router(exact_reuse=exact)
    before = made.snapshot()
    applied = made.apply(change, 1.0)
    assert (applied.ok, applied.code) == (False, code)
    assert message in applied.message
    after = made.snapshot()
    for one in (before, after):
        one.pop("freshness")  # the time of the last event
    assert after == before


def test_a_request_that_is_known_is_freed_once_on_each_hop() -> None:
    made = router()
    assert made.apply(Booked("r", "aggregated", 1, 0, prefill_tokens=5), 0.0).ok
    codes = [
        made.apply(change, 1.0).code
        for change in (
            *(PrefillDone("r"), PrefillDone("r"), Freed("r", "decode"), Freed("r"), Freed("r")),
        )
    ]
    assert codes == ["ok", "ok", "unknown_request", "ok", "unknown_request"]


def every_code() -> set[str]:
    """The codes of `Applied`, each as it comes."""
    made, exact = router(), router(exact_reuse=True)
    seen = {made.apply(change, 1.0).code for change, _, _ in REFUSED}
    seen.add(made.apply(Booked("r", "decode", 1, 0), 1.0).code)
    seen.add(made.apply(Booked("r", "decode", 1, 0), 1.0).code)
    seen.add(made.apply(stored(tier="tape"), 1.0).code)
    seen.add(made.apply(stored(parent_hash=9), 1.0).code)
    seen.add(exact.apply(stored(parent_hash=9), 1.0).code)
    made.apply(stored(), 1.0)
    seen.add(made.apply(stored(local_hashes=(2,)), 1.0).code)
    card = ModelRuntimeConfig(total_kv_blocks=1)
    assert made.apply(WorkerUpserted(Worker(1, "w1", "m", runtime_config=card)), 1.0).ok
    made.bound_index(IndexBound(spare=0))
    many = stored(block_hashes=(11, 12, 13), local_hashes=(11, 12, 13))
    seen |= {made.apply(many, 1.0).code, made.apply(many, 1.0).code}
    return seen


def test_the_page_lists_the_codes_that_come_and_no_others() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| code | ok | when |") :]
    listed = re.findall(r"^\| `(\w+)` \| (?:yes|no) \|", table[: table.index("\n\n")], re.M)
    assert set(listed) == every_code()
    [outcomes] = re.findall(r"^\| `Outcome` \| (.*) \|$", text, re.M)
    assert set(re.findall(r"`(\w+)`", outcomes)) == set(get_args(Outcome))


def test_blocks_of_another_size_are_unknown_and_not_absent() -> None:
    made = router()
    cached = hash_prompt(TOKENS, 16)
    assert made.apply(KvEvent(1, 0, BlocksStored(None, cached.sequence, cached.local)), 0.0).ok
    same = RoutingRequest.from_tokens("r", "m", TOKENS, 16)
    assert [*made.overlap_scores(same).values()] == [2]
    other = RoutingRequest.from_tokens("r", "m", TOKENS, 8)
    for plan in (made.plan(other), made.plan_hop(other, "decode")):
        decision = plan.final
        assert not decision.overlap_modelled
        assert "blocks of 8 tokens" in decision.notes[0]
        assert "blocks of 16" in decision.notes[0]
    for read in (made.overlap_scores, made.potential_loads):
        with pytest.raises(HashingError, match="blocks of 8 tokens, the workers of m blocks of 16"):
            read(other)
    # One worker of that size is enough, and a fleet without workers has none.
    assert made.apply(WorkerUpserted(Worker(2, "w2", "m", block_size=8)), 1.0).ok
    assert [*made.overlap_scores(other).values()] == [0, 0]
    assert made.plan(other).final.overlap_modelled
    assert Router().overlap_scores(other) == {}
    assert not Router().plan(other).ok


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (("a", "m", -1, 16), "isl_tokens is -1"),
        (("a", "m", "10", 16), "isl_tokens is '10'"),
        (("a", "m", float("nan"), 16), "isl_tokens is nan"),
        (("a", "m", 10, 0), "block size is 0"),
        (("a", "m", 10, 1.5), "block size is 1.5"),
        (("a", "m", 32, 16, (b"x",)), "sequence_hashes[0] is of type bytes"),
    ],
)
def test_requests_that_cannot_be(request_of: tuple[Any, ...], message: str) -> None:
    made, request = router(), RoutingRequest(*request_of)
    for read in (made.plan, made.overlap_scores, made.potential_loads):
        with pytest.raises(HashingError, match=re.escape(message)):
            read(request)


@pytest.mark.parametrize("sample", [-0.1, 1.0, 2.0, float("nan")])
def test_samples_that_are_none(sample: float) -> None:
    with pytest.raises(ValueError, match="sample: expected at least 0 and below 1"):
        router().plan(RoutingRequest("r", "m", 1, 16), samples=(0.0, sample))


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: Worker(ODD, "w", "m"), WorkerError, "id expected in"),
        (lambda: Worker(1, cast(Any, 5), "m"), WorkerError, "name expected a string"),
        (lambda: Worker(1, "w", "m", cast(Any, "decode")), WorkerError, "role expected a Role"),
        (lambda: Worker(1, "w", "m", Role.DECODE, cast(Any, "16")), WorkerError, "block_size"),
        (
            lambda: Worker(1, "w", "m", runtime_config=cast(Any, {})),
            WorkerError,
            "runtime_config expected a ModelRuntimeConfig",
        ),
        (lambda: Worker(1, "w", "m", aliases=cast(Any, "abc")), WorkerError, "tuple of strings"),
        (lambda: ModelRuntimeConfig(taints=cast(Any, "abc")), WorkerError, "taints: expected"),
        (
            lambda: ModelRuntimeConfig(topology_domains=cast(Any, 5)),
            WorkerError,
            "topology_domains: expected a mapping",
        ),
        (lambda: RoutingRequest.from_tokens("r", "m", cast(Any, 5), 16), HashingError, "type int"),
        (lambda: hash_prompt([1], cast(Any, "16")), HashingError, "block size is '16'"),
        (lambda: hash_prompt([1] * 4, 4, lora_name=cast(Any, 5)), HashingError, "lora_name"),
        (lambda: constraints("abc"), ConstraintError, "several taints, got the text 'abc'"),
        (lambda: constraints(preferred={"a": cast(Any, "x")}), ConstraintError, "finite weight"),
        (lambda: legacy_overlap_weight(-1), ConfigError, "overlap_score_weight"),
        (lambda: Router(cast(Any, {})), ConfigError, "config: expected a RouterConfig"),
        (lambda: Router.restore(cast(Any, None)), SnapshotError, "expected a mapping"),
        (lambda: LeanRouter(RouterConfig(), [], 16, LeanIndex(0)), ValueError, "0 ranks"),
    ],
)
def test_values_of_another_type(made: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        made()


def test_an_index_alone_refuses_names_that_are_no_numbers() -> None:
    index = PrefixIndex()
    assert index.store(0, None, [1, 2], [1, 2]).refused is None
    for names in ([b"3"], [3, b"4"]):
        refused = index.store(0, 2, cast(Any, names), [*range(len(names))]).refused
        assert refused is not None
        assert "expected an unsigned 64-bit number, got bytes" in refused.message
    assert index.block_count(0) == 2


def test_a_result_that_is_ok_is_true_in_code_and_ok() -> None:
    assert Applied() == Applied(True, "ok", "")
