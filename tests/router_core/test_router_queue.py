"""The router queue: order within a class, turns between classes, limits, and who has to wait."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router_core import (
    ConfigError,
    ConfigSet,
    Dequeued,
    Enqueued,
    Freed,
    Pin,
    PolicyClass,
    PolicyClasses,
    PolicyTable,
    PrefillDone,
    QueueFull,
    Router,
    RouterConfig,
    RouterQueue,
    RoutingConstraints,
    RoutingRequest,
    TaintConstraint,
    WorkerUpserted,
    read_policy_classes,
)
from router_core.router_queue import MOST_LANES, QueueEntry, score
from tests.router_core.fleet import MODEL, active, apply_all, request, router, stored, worker

ONE = PolicyTable((PolicyClass("default"),))


def put(queue: RouterQueue, name: str, tokens: int, at: float = 0.0, **more: Any) -> None:
    policy = more.pop("policy", PolicyClass("default"))
    given = {"cached_tokens": 0, "arrived_at": at, **more}
    assert queue.add(name, MODEL, policy, at, isl_tokens=tokens, **given)


def pop(queue: RouterQueue, table: PolicyTable = ONE, blocked: set[str] | None = None) -> str:
    turn = queue.next(MODEL, table, lambda entry: entry.request_id not in (blocked or ()))
    if turn is None:
        return ""
    assert queue.take(turn.entry.request_id, turn.credits, turn.cursor)
    return turn.entry.request_id


def drained(queue: RouterQueue, table: PolicyTable = ONE) -> list[str]:
    found = []
    while (name := pop(queue, table)) != "":
        found.append(name)
    return found


# -- order ---------------------------------------------------------------------------------

#: As observed on a real Dynamo 1.6.1: (name, prompt tokens, priority, strict priority), by arrival.
OBSERVED = [
    ("60", 60, 0, 0), ("200", 200, 0, 0), ("61p", 61, 5, 0), ("300s", 300, 0, 1),
    ("110", 110, 0, 0), ("400p", 400, 5, 0), ("120n", 120, -3, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(
            "fcfs",
            "300s 61p 400p 60 200 110 120n",
            marks=pytest.mark.seed("router-guide: arguments: --router-queue-policy fcfs"),
        ),
        pytest.param(
            "wspt",
            "300s 61p 60 400p 110 120n 200",
            marks=pytest.mark.seed("router-guide: arguments: --router-queue-policy wspt"),
        ),
        pytest.param(
            "lcfs",
            "300s 400p 61p 120n 110 200 60",
            marks=pytest.mark.seed("router-guide: arguments: --router-queue-policy lcfs"),
        ),
    ],
)
def test_the_order_is_that_of_a_real_dynamo(policy: str, expected: str) -> None:
    queue = RouterQueue()
    for number, (name, tokens, priority, strict) in enumerate(OBSERVED):
        put(queue, name, tokens, number / 10, priority=priority, strict_priority=strict,
            policy=PolicyClass("default", policy))  # fmt: skip
    assert drained(queue) == expected.split()


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 500),  # prompt tokens
        st.integers(0, 600),  # cached tokens
        st.integers(-3, 9),  # priority
        st.integers(0, 2),  # strict priority
        st.floats(0, 5),  # seconds since the one before
    ),
    min_size=1,
    max_size=40,
)


@given(REQUESTS, st.sampled_from(["fcfs", "wspt", "lcfs"]))
def test_each_policy_serves_by_strict_priority_then_score_then_arrival(
    found: list[tuple[int, int, int, int, float]], policy: str
) -> None:
    queue, at, expected = RouterQueue(), 0.0, []
    for number, (tokens, cached, priority, strict, gap) in enumerate(found):
        at += gap
        put(queue, str(number), tokens, at, cached_tokens=cached, priority=priority,
            strict_priority=strict, policy=PolicyClass("default", policy))  # fmt: skip
        jump, left = max(0, priority), max(1, tokens - min(tokens, cached))
        value = {"fcfs": jump - at, "lcfs": jump + at, "wspt": (1 + jump) / left}[policy]
        expected.append((-strict, -value, number))
    assert drained(queue) == [str(number) for *_, number in sorted(expected)]
    assert (len(queue), queue.models()) == (0, [])


@given(REQUESTS, st.data())
def test_place_and_statistics_are_those_of_what_waits(found: list[Any], data: Any) -> None:
    queue = RouterQueue()
    for number, (tokens, cached, priority, strict, _) in enumerate(found):
        put(queue, str(number), tokens, float(number), cached_tokens=cached, priority=priority,
            strict_priority=strict)  # fmt: skip
    leaving = data.draw(st.sets(st.sampled_from([str(n) for n in range(len(found))])))
    for name in leaving:
        assert queue.take(name, (), None)
        assert not queue.take(name, (), None)
    left = sorted(queue, key=lambda entry: entry.key)
    stats = queue.stats(MODEL, "default")
    assert stats.requests == len(left) == len(found) - len(leaving)
    assert stats.isl_tokens == sum(entry.isl_tokens for entry in left)
    assert stats.cached_tokens == sum(entry.cached_tokens for entry in left)
    for place, entry in enumerate(left):
        assert queue.ahead(MODEL, "default", entry.key) == place
    assert drained(queue) == [entry.request_id for entry in left]


def test_a_pinned_head_blocks_its_own_lane_only() -> None:
    queue = RouterQueue()
    put(queue, "pinned", 10, 0.0, lane=(1, None))
    put(queue, "pinned too", 10, 1.0, lane=(1, None))
    put(queue, "free", 10, 2.0)
    assert pop(queue, blocked={"pinned"}) == "free"
    assert pop(queue, blocked={"pinned"}) == ""
    assert drained(queue) == ["pinned", "pinned too"]


def test_a_blocked_head_of_the_common_lane_is_not_overtaken() -> None:
    queue = RouterQueue()
    put(queue, "first", 10, 0.0)
    put(queue, "second", 10, 1.0)
    assert pop(queue, blocked={"first"}) == ""


# -- turns between classes -----------------------------------------------------------------


def classes(**quanta: int) -> PolicyTable:
    return PolicyTable(tuple(PolicyClass(name, quantum=n) for name, n in quanta.items()))


def test_credit_is_granted_by_round_not_by_request() -> None:
    table = classes(a=10, b=10)
    queue = RouterQueue()
    for number in range(4):
        put(queue, f"a{number}", 3, policy=table.classes[0])
        put(queue, f"b{number}", 3, policy=table.classes[1])
    assert drained(queue, table) == "a0 a1 a2 b0 b1 b2 a3 b3".split()


def test_large_requests_get_the_rounds_that_they_need_at_once() -> None:
    table = PolicyTable(
        (PolicyClass("standard", quantum=1000), PolicyClass("latency", quantum=2000))
    )
    queue = RouterQueue()
    put(queue, "s", 7000, policy=table.classes[0])
    put(queue, "l", 9000, policy=table.classes[1])
    put(queue, "l2", 9000, policy=table.classes[1])
    turn = queue.next(MODEL, table, lambda _: True)
    assert turn is not None
    assert (turn.entry.request_id, dict(turn.credits)) == ("l", {"standard": 5000, "latency": 1000})


@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=4),
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=40), min_size=4, max_size=4),
)
@pytest.mark.seed("dynamo-1.6: router queue: deficit round robin")
def test_no_class_starves_and_tokens_follow_the_quanta(
    quanta: list[int], costs: list[list[int]]
) -> None:
    """While classes wait, each is granted about the same number of rounds.

    Not exactly: as in Dynamo, a class that can pay from carried credit is granted none that time.
    """
    table = PolicyTable(tuple(PolicyClass(f"c{n}", quantum=q) for n, q in enumerate(quanta)))
    queue = RouterQueue()
    for one, sizes in zip(table.classes, costs, strict=False):
        for number, tokens in enumerate(sizes):
            put(queue, f"{one.name}-{number}", tokens, float(number), policy=one)
    served = dict.fromkeys((one.name for one in table.classes), 0)
    while all(queue.stats(MODEL, one.name).requests for one in table.classes):
        turn = queue.next(MODEL, table, lambda _: True)
        assert turn is not None
        served[turn.entry.policy_class] += turn.entry.cost
        queue.take(turn.entry.request_id, turn.credits, turn.cursor)
        left = {name: credit for _, name, credit in queue.dump()["credits"]}
        rounds = [
            (served[one.name] + left[one.name]) / one.quantum
            for one in table.classes
            if one.name in left
        ]
        assert max(rounds) <= 1.25 * min(rounds) + 4
        # Credit that is not spent is less than what one request and one round take.
        assert all(left.get(one.name, 0) < 300 + one.quantum for one in table.classes)


@given(st.integers(1, 8))
def test_equal_costs_are_served_as_the_quanta(ratio: int) -> None:
    table = PolicyTable(
        (PolicyClass("premium", quantum=512 * ratio), PolicyClass("regular", quantum=512))
    )
    queue = RouterQueue()
    for number in range(200):
        for one in table.classes:
            put(queue, f"{one.name}-{number}", 512, float(number), policy=one)
    served = Counter(pop(queue, table).partition("-")[0] for _ in range(20 * (ratio + 1)))
    assert served == {"premium": 20 * ratio, "regular": 20}


def test_a_blocked_class_keeps_its_credit_and_earns_none() -> None:
    table = classes(a=5, b=5)
    queue = RouterQueue()
    for number in range(3):
        put(queue, f"a{number}", 8, float(number), policy=table.classes[0])
        put(queue, f"b{number}", 8, float(number), policy=table.classes[1])
    blocked = {f"a{number}" for number in range(3)}
    assert [pop(queue, table, blocked) for _ in range(3)] == ["b0", "b1", "b2"]
    assert pop(queue, table, blocked) == ""
    assert drained(queue, table) == ["a0", "a1", "a2"]


# -- conservation --------------------------------------------------------------------------


class Conservation(RuleBasedStateMachine):
    """What enters leaves once, by a turn or by itself, and a copy of the queue agrees."""

    TABLE = classes(a=7, b=40)

    def __init__(self) -> None:
        super().__init__()
        self.queue = RouterQueue()
        self.waiting: set[str] = set()
        self.count = 0

    @rule(
        tokens=st.integers(0, 200),
        first=st.booleans(),
        lane=st.sampled_from([None, (1, 0), "alias"]),
    )
    def enter(self, tokens: int, first: bool, lane: Any) -> None:
        name = f"r{self.count}"
        self.count += 1
        put(self.queue, name, tokens, float(self.count), lane=lane,
            policy=self.TABLE.classes[not first])  # fmt: skip
        self.waiting.add(name)

    @precondition(lambda self: self.waiting)
    @rule(blocked=st.sampled_from([None, (1, 0)]))
    def turn(self, blocked: Any) -> None:
        turn = self.queue.next(MODEL, self.TABLE, lambda entry: entry.lane != blocked)
        same = RouterQueue.restore(json.loads(json.dumps(self.queue.dump())))
        assert same.next(MODEL, self.TABLE, lambda entry: entry.lane != blocked) == turn
        free = [entry for entry in self.queue if entry.lane != blocked]
        assert (turn is None) == (not free)
        if turn is not None:
            assert min(credit for _, credit in turn.credits) >= 0
            assert self.queue.take(turn.entry.request_id, turn.credits, turn.cursor)
            self.waiting.remove(turn.entry.request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.take(name, (), None)
        self.waiting.remove(name)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert {entry.request_id for entry in self.queue} == self.waiting
        stats = [self.queue.stats(MODEL, one.name) for one in self.TABLE.classes]
        assert sum(one.requests for one in stats) == len(self.waiting) == len(self.queue)


TestConservation = Conservation.TestCase


def test_many_that_leave_take_no_memory() -> None:
    queue = RouterQueue()
    put(queue, "stays", 1, 0.0)
    for number in range(1000):
        put(queue, str(number), 1, float(number))
        queue.take(str(number), (), None)
    ((_, one),) = queue._classes.items()
    assert sum(len(heap) for heap in one.lanes.values()) < 40


# -- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "kind", "current", "limit"),
    [
        ({"request_queue_limit_per_worker": 1}, "requests", 2, 2),
        ({"raw_isl_token_queue_limit_per_worker": 50}, "raw_isl_tokens", 108, 100),
        ({"cached_token_queue_limit_per_worker": 40}, "cached_tokens", 104, 80),
    ],
)
@pytest.mark.seed("dynamo-1.6: router queue: limits")
def test_a_limit_refuses_the_request_after_the_one_that_crosses_it(
    limits: dict[str, int], kind: str, current: int, limit: int
) -> None:
    policy = PolicyClass("capped", **limits)  # type: ignore[arg-type]
    queue = RouterQueue()
    for name, tokens, cached in (("first", 8, 4), ("crosses", 100, 100)):
        assert queue.full(MODEL, policy, 2, 9) is None
        put(queue, name, tokens, cached_tokens=cached, policy=policy)
    assert queue.full(MODEL, policy, 2, 9) == QueueFull("capped", kind, current, limit)  # type: ignore[arg-type]
    assert queue.full("other", policy, 2, 9) is None
    assert queue.full(MODEL, policy, 200, 9) is None
    assert queue.full("other", policy, 200, 2) == QueueFull("capped", "total_requests", 2, 2)
    queue.take("crosses", (), None)
    assert queue.full(MODEL, policy, 2, 9) is None


# -- who has to wait -----------------------------------------------------------------------


def two(**settings: Any) -> Router:
    workers = (worker(one, max_num_batched_tokens=100) for one in (1, 2))
    return router(*workers, **{"router_queue_threshold": 1.0, **settings})


def load(made: Router, worker_id: int, tokens: int) -> str:
    name = f"load-{worker_id}-{tokens}"
    apply_all(made, active(worker_id, name, prefill_tokens=tokens))
    return name


@pytest.mark.seed("router-guide: arguments: --router-queue-threshold")
def test_a_request_waits_only_while_every_rank_is_over_the_threshold() -> None:
    made = two()
    asked = request(32)
    load(made, 1, 150)
    free = made.plan(asked).first.queue
    assert free is not None
    assert (free.waits, free.all_busy, free.ranks) == (False, False, 2)
    last = load(made, 2, 100)
    at_the_limit = made.plan(asked).first.queue
    assert at_the_limit is not None
    assert not at_the_limit.waits
    made.apply(Freed(last), 1.0)
    last = load(made, 2, 124)
    over = made.plan(asked).first.queue
    assert over is not None
    assert (over.waits, over.all_busy, over.needs, over.nearest) == (True, True, 24, "w2")
    made.apply(PrefillDone(last), 2.0)
    assert not made.plan(asked).first.queue.waits  # type: ignore[union-attr]


def test_a_pinned_request_waits_for_its_worker() -> None:
    made = two()
    load(made, 1, 150)
    pinned = replace(request(32), pin_decode=Pin(1))
    found = made.plan(pinned).first.queue
    assert found is not None
    assert (found.waits, found.ranks) == (True, 1)
    change = made.entering(made.plan(pinned), pinned)
    assert isinstance(change, Enqueued)
    assert change.lane == (1, None)


def test_what_a_worker_has_cached_of_a_waiting_prompt_counts_for_its_class() -> None:
    made = two()
    apply_all(made, stored(2, 2))
    load(made, 1, 150)
    load(made, 2, 150)
    change = made.entering(made.plan(request(40)), request(40))
    assert isinstance(change, Enqueued)
    assert (change.isl_tokens, change.cached_tokens) == (40, 32)
    assert made.apply(change, 1.0).ok
    stats = made.queue.stats(MODEL, "default")
    assert (stats.isl_tokens, stats.cached_tokens) == (40, 32)
    assert [one.cost for one in made.queue] == [8]


def test_pinned_requests_are_not_tried_while_their_worker_has_no_room() -> None:
    made = two()
    loads = [load(made, 1, 150), load(made, 2, 150)]
    for number, pin in enumerate((Pin(1), Pin(2, 0), Pin(3))):
        pinned = replace(request(32), id=f"r{number}", pin_decode=pin, arrived_at=float(number))
        change = Enqueued(pinned.id, MODEL, "default", 32, 0, float(number), lane=(
            pin.worker_id, pin.dp_rank))  # fmt: skip
        made.apply(change, 1.0)
    tried: list[str] = []

    def admissible(entry: QueueEntry) -> bool:
        tried.append(entry.request_id)
        return False

    assert made.next_turn(MODEL, admissible) is None
    assert tried == ["r2"]  # its worker is not registered: it is tried, and refused
    made.apply(Freed(loads[1]), 2.0)
    tried.clear()
    assert made.next_turn(MODEL, admissible) is None
    assert tried == ["r1", "r2"]


def zoned(number: int, zone: str) -> RoutingRequest:
    taint = TaintConstraint(f"dynamo.topology/zone={zone}", "required")
    asked = replace(request(32), id=f"{zone}{number}", arrived_at=float(number))
    return replace(asked, constraints=RoutingConstraints((taint,)))


def test_a_head_that_needs_a_busy_zone_holds_back_only_its_own_kind() -> None:
    """In Dynamo it holds back its class (read from its source)."""
    zones = [worker(1, max_num_batched_tokens=100, zone="a")]
    zones.append(worker(2, max_num_batched_tokens=100, zone="b"))
    made = router(*zones, router_queue_threshold=1.0)
    loads = [load(made, 1, 150), load(made, 2, 150)]
    waiting = {asked.id: asked for asked in (zoned(0, "a"), zoned(1, "a"), zoned(2, "b"))}
    waiting["any"] = replace(request(32), id="any", arrived_at=3.0)
    for asked in waiting.values():
        change = made.entering(made.plan(asked), asked)
        assert isinstance(change, Enqueued)
        assert made.apply(change, 1.0).ok

    def admissible(entry: QueueEntry) -> bool:
        queue = made.plan(waiting[entry.request_id]).first.queue
        return queue is not None and not queue.all_busy

    def next_id() -> str | None:
        turn = made.next_turn(MODEL, admissible)
        if turn is None:
            return None
        made.apply(Dequeued(turn.entry.request_id, turn.credits, turn.cursor), 2.0)
        return turn.entry.request_id

    assert next_id() is None
    made.apply(Freed(loads[1]), 2.0)
    assert [next_id(), next_id(), next_id()] == ["b2", "any", None]
    made.apply(Freed(loads[0]), 3.0)
    assert [next_id(), next_id()] == ["a0", "a1"]


def test_the_heads_that_are_tried_have_a_bound() -> None:
    queue = RouterQueue()
    for number in range(MOST_LANES):
        lane = queue.open_lane(MODEL, "default", f"need {number}")
        assert lane == f"need {number}"
        put(queue, str(number), 10, lane=lane)
    assert queue.open_lane(MODEL, "default", "one more") is None
    assert queue.open_lane(MODEL, "default", "need 0") == "need 0"
    assert queue.open_lane(MODEL, "default", (1, None)) == (1, None)
    assert queue.open_lane("other", "default", "one more") == "one more"


def test_a_backlog_of_its_class_makes_a_request_wait() -> None:
    made = two()
    loads = [load(made, 1, 150), load(made, 2, 150)]
    first = replace(request(32), id="first", arrived_at=1.0)
    entering = made.entering(made.plan(first), first)
    assert isinstance(entering, Enqueued)
    assert made.apply(entering, 1.0).ok
    assert made.apply(entering, 1.0).code == "duplicate_request"
    for name in loads:
        made.apply(Freed(name), 2.0)
    later = replace(request(32), id="later", arrived_at=2.0)
    found = made.plan(later).first.queue
    assert found is not None
    assert (found.waits, found.all_busy, found.backlog, found.ahead) == (True, False, 1, 1)
    urgent = made.plan(replace(later, priority=5)).first.queue
    assert urgent is not None
    assert (urgent.backlog, urgent.ahead) == (1, 0)
    turn = made.next_turn(MODEL, lambda _: True)
    assert turn is not None
    assert made.apply(Dequeued("first", turn.credits, turn.cursor), 3.0).ok
    assert made.apply(Dequeued("first"), 3.0).code == "unknown_request"
    assert not made.plan(later).first.queue.waits  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "settings", [{"router_queue_threshold": None}, {"router_mode": "round-robin"}]
)
def test_without_a_threshold_or_in_another_mode_nothing_waits(settings: dict[str, Any]) -> None:
    made = two(**settings)
    load(made, 1, 500)
    load(made, 2, 500)
    assert made.plan(request(32)).first.queue is None


def test_a_refused_request_does_not_wait() -> None:
    made = two(active_prefill_tokens_threshold=10)
    load(made, 1, 500)
    load(made, 2, 500)
    plan = made.plan(request(32))
    assert (plan.ok, plan.final.outcome, plan.first.queue) == (False, "all_busy", None)


def test_the_first_hop_waits_and_decode_does_not() -> None:
    made = router(
        worker(1, role="prefill", max_num_batched_tokens=100),
        worker(2, role="decode", max_num_batched_tokens=100),
        router_queue_threshold=0.5,
    )
    apply_all(made, active(1, "load", stage="prefill", prefill_tokens=80))
    plan = made.plan(request(32))
    assert plan.prefill is not None
    assert plan.decode is not None
    assert plan.first is plan.prefill
    assert plan.prefill.queue is not None
    assert plan.prefill.queue.waits
    assert plan.decode.queue is None


def test_the_uncached_part_of_a_prompt_decides_its_class_and_cost() -> None:
    made = two(router_queue_policy="wspt")
    load(made, 1, 150)
    load(made, 2, 150)
    apply_all(made, stored(2, 2))
    found = made.plan(request(64)).first.queue
    assert found is not None
    assert found.uncached_tokens == 32


def test_a_snapshot_keeps_queue_and_classes() -> None:
    made = two()
    assert not {"queue", "policy_classes"} & made.snapshot().keys()
    load(made, 1, 150)
    load(made, 2, 150)
    for number in range(3):
        asked = replace(request(32), id=f"r{number}", arrived_at=float(number), priority=number)
        change = made.entering(made.plan(asked), asked)
        assert isinstance(change, Enqueued)
        made.apply(change, float(number))
    again = Router.restore(json.loads(json.dumps(made.snapshot())))
    assert list(again.queue) == list(made.queue)
    asked = replace(request(32), arrived_at=9.0)
    assert again.plan(asked).first.queue == made.plan(asked).first.queue
    classed = Router(RouterConfig(), policy_classes=read_policy_classes(TABLES))
    same = Router.restore(json.loads(json.dumps(classed.snapshot())))
    assert same.policy_classes == classed.policy_classes


def test_a_bound_on_all_requests_refuses() -> None:
    made = two(router_queue_max_requests=0)
    load(made, 1, 150)
    load(made, 2, 150)
    full = made.entering(made.plan(request(32)), request(32))
    assert isinstance(full, QueueFull)
    assert "0 requests wait in the router queue, the limit is 0" in full.message


def test_with_the_queue_switched_off_the_waiting_are_admitted() -> None:
    made = two()
    load(made, 1, 150)
    load(made, 2, 150)
    change = made.entering(made.plan(request(32)), request(32))
    assert isinstance(change, Enqueued)
    made.apply(change, 1.0)
    made.apply(ConfigSet({"router_queue_threshold": None}), 2.0)
    assert made.plan(request(32)).first.queue is None
    assert made.next_turn(MODEL, lambda _: True) is not None


# -- policy classes ------------------------------------------------------------------------

TABLES: dict[str, Any] = {
    "default_policy_family": "standard",
    "uncached_isl_buckets": [
        {"min_tokens": 0, "bucket": "cached"},
        {"min_tokens": 64, "bucket": "uncached"},
    ],
    "policy_classes": [
        {"name": "std-cached", "policy_family": "standard", "cache_bucket": "cached",
         "queue_policy": "wspt", "quantum": 4, "prefill_busy_threshold": 100},
        {"name": "std-uncached", "policy_family": "standard", "cache_bucket": "uncached",
         "quantum": 1, "prefill_busy_threshold_frac": 0.5},
        {"name": "fast-cached", "policy_family": "fast", "cache_bucket": "cached", "quantum": 8},
        {"name": "fast-uncached", "policy_family": "fast", "cache_bucket": "uncached",
         "quantum": 8},
        {"name": "vip", "quantum": 9, "request_queue_limit_per_worker": 0,
         "prefill_busy_threshold": 0},
    ],
    "models": {
        "large": {
            "default_policy_family": "only",
            "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "all"}],
            "policy_classes": [
                {"name": "only", "policy_family": "only", "cache_bucket": "all", "quantum": 1}
            ],
        }
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "uncached", "expected"),
    [
        (None, 0, "std-cached"),
        (None, 63, "std-cached"),
        (None, 64, "std-uncached"),
        ("fast", 10, "fast-cached"),
        ("fast", 10**9, "fast-uncached"),
        ("unknown", 64, "std-uncached"),
        # The name of a cell of the table is not a family.
        ("std-cached", 64, "std-uncached"),
        # A class outside the table is named by requests.
        ("vip", 64, "vip"),
    ],
)
@pytest.mark.seed("dynamo-1.6: router queue: policy classes")
def test_family_and_uncached_tokens_choose_the_class(
    wanted: str | None, uncached: int, expected: str
) -> None:
    found = read_policy_classes(TABLES)
    assert found.table("small", RouterConfig()).class_of(wanted, uncached).name == expected
    assert found.table("large", RouterConfig()).class_of(wanted, uncached).name == "only"
    assert read_policy_classes(found.dump()) == found


def test_without_classes_the_settings_make_one() -> None:
    config = RouterConfig(router_queue_threshold=2.0, router_queue_policy="wspt")
    (only,) = PolicyClasses().table("any", config).classes
    assert (only.name, only.queue_policy, only.limit(100)) == ("default", "wspt", 200.0)
    assert PolicyClass("c", prefill_busy_threshold=50, prefill_busy_threshold_frac=2.0).limit(
        100
    ) == (50)


def test_each_class_has_its_own_threshold() -> None:
    made = Router(RouterConfig(), policy_classes=read_policy_classes(TABLES))
    made.apply(WorkerUpserted(worker(1, max_num_batched_tokens=100)), 0.0)
    load(made, 1, 80)
    short = made.plan(request(32)).first.queue
    long = made.plan(request(96)).first.queue
    fast = made.plan(replace(request(96), policy_class="fast")).first.queue
    assert short is not None
    assert long is not None
    assert (short.policy_class, short.waits) == ("std-cached", False)
    assert (long.policy_class, long.waits, long.needs) == ("std-uncached", True, 30)
    assert fast is None
    vip = replace(request(96), policy_class="vip")
    full = made.entering(made.plan(vip), vip)
    assert isinstance(full, QueueFull)
    assert (full.policy_class, full.limit_kind, full.limit) == ("vip", "requests", 0)


def changed(path: list[Any], value: Any) -> Any:
    """A copy of the tables with one field set (or removed, for ...)."""
    document = json.loads(json.dumps(TABLES))
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "document: expected a mapping"),
        ({}, "no classes: expected"),
        ({"worker_selection": {}}, "worker_selection: worker-selection plug-ins are not supported"),
        (changed(["policy_classes"], ...), "policy_classes: required beside"),
        (changed(["policy_classes"], []), "policy_classes: expected a list of 1 to 256, got 0"),
        (changed(["policy_classes", 1, "quantum"], 0), "policy_classes[1].quantum: expected at l"),
        (changed(["policy_classes", 1, "quantum"], ...), "policy_classes[1].quantum: expected a w"),
        (changed(["policy_classes", 1, "name"], "a b"), "policy_classes[1].name: expected letters"),
        (changed(["policy_classes", 1, "name"], "vip"), "policy_classes[4].name: 'vip' occurs t"),
        (changed(["policy_classes", 0, "queue_policy"], "lifo"), "queue_policy: expected one of"),
        (changed(["policy_classes", 0, "quantums"], 1), "policy_classes[0].quantums: unknown"),
        (
            changed(["policy_classes", 1, "prefill_busy_threshold_frac"], -1),
            "policy_classes[1].prefill_busy_threshold_frac: expected a number from 0",
        ),
        (
            changed(["policy_classes", 1, "prefill_busy_threshold_frac"], float("nan")),
            "policy_classes[1].prefill_busy_threshold_frac: expected a number from 0",
        ),
        (
            changed(["policy_classes", 0, "cache_bucket"], ...),
            "policy_classes[0].cache_bucket: required beside policy_family",
        ),
        (
            changed(["policy_classes", 0, "cache_bucket"], "warm"),
            "policy_classes[0].cache_bucket: expected one of cached, uncached, got 'warm'",
        ),
        (
            changed(["policy_classes", 3], {"name": "x", "quantum": 1}),
            "expected one class of family 'fast' and bucket 'uncached', got none",
        ),
        (changed(["policy_classes", 4, "name"], "fast"), "has the name of a family"),
        (changed(["default_policy_family"], "slow"), "no class has the family 'slow'; families: s"),
        (changed(["uncached_isl_buckets", 0, "min_tokens"], 1), "expected 0 for the first bucket"),
        (changed(["uncached_isl_buckets", 1, "min_tokens"], 0), "expected more than 0, got 0"),
        (changed(["uncached_isl_buckets", 1, "bucket"], "cached"), "'cached' occurs twice"),
        (changed(["models", "large", "quantum"], 1), "models.large.quantum: unknown"),
    ],
)
def test_a_wrong_table_names_the_field(document: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_policy_classes(document)
    assert problem in str(caught.value)


KEYS = st.sampled_from([*sorted(TABLES), "name", "quantum", "bucket", "min_tokens"])
SCALARS = st.none() | st.integers() | st.text(max_size=3) | st.floats() | st.just("fcfs")
ROWS = st.dictionaries(KEYS, SCALARS, max_size=4)
DOCUMENTS = st.dictionaries(KEYS, SCALARS | ROWS | st.lists(SCALARS | ROWS, max_size=3), max_size=4)


@given(SCALARS | DOCUMENTS | st.dictionaries(KEYS, DOCUMENTS, max_size=2))
def test_any_plain_data_is_read_or_refused(document: Any) -> None:
    with contextlib.suppress(ConfigError):
        read_policy_classes(document)


def test_the_score_of_an_entry_is_the_formula() -> None:
    entry = QueueEntry("a", MODEL, "default", 400, 0, 1.0, 0, score("wspt", 1.0, 5, 400))
    assert entry.score == pytest.approx(6 / 400)
    assert score("fcfs", 7.0, 5, 1) == -2.0
    assert score("lcfs", 7.0, -5, 1) == 7.0
    assert isinstance(request(32), RoutingRequest)
