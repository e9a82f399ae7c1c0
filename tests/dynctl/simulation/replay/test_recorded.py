"""The fleet of a recording: which workers, with what, and what a note has to say."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem
from dynctl.documents.recording import Arrived, Changed, Decided, Finished, Record, State
from dynctl.documents.recording_file import encode_records, read_recording
from dynctl.documents.replay import ReplayResult
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import (
    FleetChange,
    ReplayPolicy,
    SimulatedFleet,
    SimulatedWorker,
)
from dynctl.simulation.replay.fleets import simulated_fleet
from dynctl.simulation.replay.inputs import TraceInput
from dynctl.simulation.replay.recorded import fleet_of_recording
from dynctl.simulation.replay.simulation import simulate
from dynctl.wire.traces import TraceRequest
from router_core import (
    BlocksStored,
    Change,
    Cleared,
    KvEvent,
    ModelRuntimeConfig,
    Role,
    Router,
    RouterConfig,
    Worker,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
)
from tests.dynctl.health.recorded_fleet import RecordedFleet, chats
from tests.dynctl.serving.fleets import WORDS, site
from tests.waiting import until


def written(path: Path, records: Sequence[Record]) -> Path:
    path.write_bytes(encode_records(records))
    return path


def worker(number: int, **config) -> Worker:
    return Worker(number, f"w{number}", "m", runtime_config=ModelRuntimeConfig(**config))


def upserted(at: float, *workers: Worker) -> list[Record]:
    return [Changed(at, WorkerUpserted(one)) for one in workers]


def changed(at: float, *changes: Change) -> list[Record]:
    return [Changed(at, one) for one in changes]


def replayed(file: Path, speed: float = 1.0, model: str = "m", **engine: Any) -> ReplayResult:
    """Its requests in turn on its own fleet, in which a prompt token takes 1 ms."""
    source = fleet_of_recording(file, model)
    assert source is not None
    fleet = simulated_fleet(source, {"prefill_tokens_per_s": 1000.0, **engine}, block_size=16)
    policy = ReplayPolicy("round-robin", RouterConfig(router_mode="round-robin"))
    given = TraceInput(path=file, speed=speed)
    return simulate(given.requests(1), fleet.faster(speed), policy)


def arrived(at: float, model: str = "m") -> Arrived:
    return Arrived(at, f"r{at}", model, 40, 16, (1, 2))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.dynrec"


@pytest.mark.parametrize("bootstrap", [(), (1, 2), (1,)])
def test_a_recording_shows_which_prefill_workers_start_with_a_decode_worker(
    file: Path, bootstrap: tuple[int, ...]
) -> None:
    """Worker 3 prefills nothing: it is as those that start pairs, where there are any."""
    prefill = [SimulatedWorker(n, Role.PREFILL, bootstrap=n in bootstrap) for n in (1, 2, 3)]
    recorded = SimulatedFleet(
        (*prefill, SimulatedWorker(4, Role.DECODE)),
        EngineConfig(block_size=16),
        model="m",
        changes=(FleetChange(0.0, 3, "unavailable", "cordoned"),),
    )
    trace = [TraceRequest(float(n + 1), f"r{n}", 40, 2, (n, n), 16, "m") for n in range(9)]
    records: list[Record] = []
    policy = ReplayPolicy("round-robin", RouterConfig(router_mode="round-robin"))
    simulate(trace, recorded, policy, records=records.append)
    source = fleet_of_recording(written(file, records), "m")
    assert source is not None
    assert source.shows_pairs
    fleet = simulated_fleet(source, {}, block_size=16)
    assert [one.bootstrap for one in fleet.workers if one.role is Role.PREFILL] == [
        1 in bootstrap,
        2 in bootstrap,
        bool(bootstrap),
    ]
    assert not fleet.workers[0].bootstrap
    other = simulated_fleet(source, {}, block_size=16, bootstrap=not bootstrap)
    assert {one.bootstrap for one in other.workers[1:]} == {not bootstrap}


def test_roles_zones_and_capacity_come_from_the_recording(file: Path) -> None:
    fleet = RecordedFleet(workers=2, decoders=3, zones=("a", "b"), blocks=500, state=True)
    source = fleet_of_recording(written(file, fleet.records(chats(3, 2))), "tiny")
    assert source is not None
    roles = sorted((one.role, one.domains["zone"]) for one in source.workers)
    assert roles == [
        (Role.DECODE, "a"), (Role.DECODE, "a"), (Role.DECODE, "b"),
        (Role.PREFILL, "a"), (Role.PREFILL, "b"),
    ]  # fmt: skip
    assert source.card == {
        "total_blocks": 500, "max_num_batched_tokens": 8192, "block_size": 16,
    }  # fmt: skip
    assert "kv_transfer_ms_per_block" in source.assumed_options({})
    assert "prefill_tokens_per_s" not in source.assumed_options({"prefill_tokens_per_s": 1.0})
    assert source.notes == ()


def test_the_workers_are_those_at_the_first_request_whether_by_state_or_by_change(
    file: Path,
) -> None:
    router = Router()
    router.apply(WorkerUpserted(worker(1, data_parallel_size=2)), 0.0)
    records: list[Record] = [
        *upserted(0.0, worker(7)),  # the state that follows does not have it
        State(1.0, router.snapshot()),
        *upserted(1.5, worker(2)),
        arrived(2.0),
        *upserted(3.0, worker(2), worker(3)),
        Changed(4.0, WorkerLost(1)),
        arrived(5.0),
    ]
    source = fleet_of_recording(written(file, records), "m")
    assert source is not None
    assert [one.ranks for one in source.workers] == [2, 1, 1]
    assert source.changes == (FleetChange(1.0, 3, "joins"), FleetChange(2.0, 1, "leaves"))
    assert source.notes == ()
    first = fleet_of_recording(file, "m", limit=1)
    assert first is not None
    assert (first.workers, first.changes) == (source.workers[:2], ())


def test_a_state_without_a_worker_of_before_shows_that_it_left(file: Path) -> None:
    router = Router()
    router.apply(WorkerUpserted(worker(1)), 0.0)
    records = [
        *upserted(0.0, worker(1), worker(2)),
        arrived(1.0),
        State(2.0, router.snapshot()),
        arrived(3.0),
    ]
    source = fleet_of_recording(written(file, records), None)
    assert source is not None
    assert source.changes == (FleetChange(1.0, 2, "leaves"),)


def test_requests_before_any_worker_get_the_first_ones_and_no_workers_give_none(
    file: Path, tmp_path: Path
) -> None:
    source = fleet_of_recording(written(file, [arrived(0.0), *upserted(1.0, worker(4))]), "m")
    assert source is not None
    assert len(source.workers) == 1
    assert fleet_of_recording(written(tmp_path / "b", [arrived(0.0)]), "m") is None


def test_workers_of_another_model_are_left_out_and_aliases_are_not(file: Path) -> None:
    other = replace(worker(2), model="other")
    adapted = replace(worker(3), adapters=("lora",))
    written(file, [*upserted(0.0, worker(1), other, adapted), arrived(1.0)])
    found = fleet_of_recording(file, "lora")
    assert found is not None
    assert len(found.workers) == 1
    with pytest.raises(UsageProblem, match="workers of m, other"):
        fleet_of_recording(file, None)


@pytest.mark.parametrize("published", [False, True])
def test_the_transfer_policy_is_that_of_the_workers_else_that_of_the_router(
    file: Path, published: bool
) -> None:
    policy: dict[str, Any] = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}
    settings = {
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": "preferred",
        "kv_transfer_preferred_weight": 0.5,
    }
    fleet = RecordedFleet(workers=2, decoders=2, zones=("a", "b"), config=settings, state=True)
    records = fleet.records(chats(2, 2))
    if published:
        cards = [
            replace(one, runtime_config=replace(one.runtime_config, **policy))
            for one in map(fleet.worker, range(4))
        ]
        records = [records[0], *upserted(0.0, *cards), *records[2:]]
        records = [
            one
            for one in records
            if not (isinstance(one, Changed) and isinstance(one.change, WorkerUpserted))
            or one.change.worker in cards
        ]
    source = fleet_of_recording(written(file, records), "tiny")
    assert source is not None
    engine = simulated_fleet(source, {}, block_size=16).engine
    assert engine.kv_transfer_domain == "zone"
    assert engine.kv_transfer_enforcement == ("required" if published else "preferred")
    assert engine.kv_transfer_preferred_weight == (None if published else 0.5)


def test_a_state_with_workers_that_cannot_be_is_named(file: Path) -> None:
    snapshot = Router().snapshot()
    snapshot["registry"]["workers"] = [{"worker_id": 1, "name": "", "model": "m"}]
    with pytest.raises(WireError, match="a state with invalid workers"):
        fleet_of_recording(written(file, [State(0.0, snapshot), arrived(1.0)]), "m")


# -- what happens to the workers -------------------------------------------------------------


def test_the_hits_and_shares_of_a_fleet_that_changes_are_those_computed_by_hand(
    file: Path,
) -> None:
    """One prompt of 40 tokens, two full blocks of 16, every 10 s; workers take it in turn.

    r0 and r1: one on w1, one on w2, nothing cached. Then w1 leaves and w3 joins. r2 and r3: one on
    w2, 32 tokens cached, one on w3, nothing cached, since it begins empty. Then w2 is cordoned: r4
    and r5 on w3, 32 tokens each. Then w2 is back and w3 is lost: r6 on w2, 32 tokens.
    """
    written(
        file,
        [
            *upserted(100.0, worker(1), worker(2)),
            *(arrived(at) for at in (100.0, 110.0)),
            *changed(115.0, WorkerLost(1), WorkerUpserted(worker(3))),
            *(arrived(at) for at in (120.0, 130.0)),
            *changed(135.0, WorkerAvailability(2, "cordoned")),
            *(arrived(at) for at in (140.0, 150.0)),
            *changed(155.0, WorkerAvailability(2, None), WorkerLost(3)),
            arrived(160.0),
        ],
    )
    for speed in (1.0, 4.0):
        found = replayed(file, speed)
        assert [(one.requests, one.cached_tokens) for one in found.workers] == [
            (1, 0), (3, 64), (3, 64),
        ]  # fmt: skip
        assert (found.cache.cached_tokens, found.cache.prompt_tokens) == (128, 280)
        assert found.counts.finished == 7
        assert found.fleet["changes"] == {
            "available": 1, "joins": 1, "leaves": 2, "unavailable": 1,
        }  # fmt: skip


def test_requests_of_a_worker_that_leaves_start_again_or_fail(file: Path) -> None:
    """Both prompts take 40 ms. w1 leaves after 20 ms: its request waits for w2, which computes the
    other one until 40 ms, and has its first token at 80 ms. When w2 leaves at 85 ms, the one that
    decodes there fails; there is no worker for the next one."""
    written(
        file,
        [
            *upserted(0.0, worker(1), worker(2)),
            Arrived(0.0, "a", "m", 40, 16, (1, 2)),
            Arrived(0.0, "b", "m", 40, 16, (3, 4)),
            *changed(0.02, WorkerLost(1)),
            Finished(0.03, "b", 200, "success", output_tokens=1),
            Finished(0.08, "a", 200, "success", output_tokens=9),
            *changed(0.085, WorkerLost(2)),
            arrived(0.1),
        ],
    )
    found = replayed(file)
    assert (found.counts.finished, found.counts.failed, found.counts.retried) == (1, 1, 1)
    assert found.counts.refusals == {"no_workers": 1}
    assert [one.lost_requests for one in found.workers] == [1, 1]


def test_a_worker_whose_cache_is_cleared_while_it_is_unavailable_restarted(file: Path) -> None:
    event = KvEvent(1, 0, BlocksStored(None, (1, 2), (1, 2)))
    away, back = WorkerAvailability(1, "no response"), WorkerAvailability(1, None)
    clear = KvEvent(1, 0, Cleared())
    hits = {}
    for name, between in {
        "restarted": (away, clear, back),
        "unreachable": (away, back),
        "unknown": (clear,),
    }.items():
        records = [*upserted(0.0, worker(1)), arrived(0.0), *changed(1.0, event)]
        records += [Changed(2.0 + n, one) for n, one in enumerate(between)]
        written(file, [*records, arrived(6.0), arrived(7.0)])
        hits[name] = replayed(file).cache.cached_tokens
        source = fleet_of_recording(file, "m")
        assert source is not None
        noted = "a cache was cleared 1 times: not simulated" in " ".join(source.notes)
        assert noted == (name == "unknown")
    assert hits == {"restarted": 32, "unreachable": 64, "unknown": 64}


def test_a_worker_that_returns_is_the_same_one_and_one_that_changed_is_named(file: Path) -> None:
    same, other = replace(worker(9), name="w1"), replace(worker(8, data_parallel_size=2), name="w1")
    written(
        file,
        [
            *upserted(0.0, worker(1), worker(2)),
            arrived(1.0),
            *changed(2.0, WorkerLost(1), WorkerUpserted(same)),
            *changed(3.0, WorkerLost(9), WorkerUpserted(other)),
            *upserted(4.0, replace(worker(2), role=Role.PREFILL)),
            arrived(5.0),
            *changed(6.0, WorkerLost(2)),  # nothing is sent after it
        ],
    )
    source = fleet_of_recording(file, "m")
    assert source is not None
    assert [one.ranks for one in source.workers] == [1, 2, 1]
    assert [(one.worker_id, one.what) for one in source.changes] == [
        (1, "leaves"), (1, "joins"), (1, "leaves"), (2, "joins"),
    ]  # fmt: skip
    assert source.notes == (
        "1 workers changed their role, ranks, topology or sizes while they ran: not simulated, "
        "each stays as it was first",
    )


async def test_a_live_fleet_in_which_one_worker_leaves_and_one_joins_replays_to_its_hits(
    file: Path,
) -> None:
    config = RouterConfig(router_mode="round-robin")
    engines = [{"name": f"a{n}"} for n in range(3)]
    async with site(engines, router=config, record=file) as fleet:
        members = {one.spec.name: one.spec for one in fleet.frontend.fleet}
        await fleet.frontend.fleet.remove("a2")

        async def ask(times: int) -> None:
            for _ in range(times):
                status, _, _ = await fleet.chat(WORDS * 5, max_tokens=2)
                assert status == 200
                await fleet.idle()

        await ask(6)
        await fleet.frontend.fleet.remove("a0")
        await ask(3)
        member = await fleet.frontend.fleet.add(members["a2"], "test")
        await until(lambda: member.worker is not None)
        await ask(8)
    records = list(read_recording(file))
    live: Counter[int] = Counter()
    cached: Counter[int] = Counter()
    where: dict[str, int] = {}
    for one in records:
        if isinstance(one, Decided) and one.decode is not None:
            where[one.id] = one.decode[0]
        elif isinstance(one, Finished):
            live[where[one.id]] += 1
            cached[where[one.id]] += one.cached_tokens or 0
    source = fleet_of_recording(file, "demo")
    assert source is not None
    stays = ("available", "unavailable")  # as a probe that is late on a busy machine
    assert [one.what for one in source.changes if one.what not in stays] == ["leaves", "joins"]
    fast = {"prefill_tokens_per_s": 1e9, "decode_itl_ms": 0.001}
    found = replayed(file, model="demo", **fast)
    order = [members[f"a{n}"].worker_id for n in range(3)]
    assert [one.requests for one in found.workers] == [live[one] for one in order]
    assert [one.cached_tokens for one in found.workers] == [cached[one] for one in order]
    assert min(live.values()) > 0
    assert min(cached.values()) > 0
