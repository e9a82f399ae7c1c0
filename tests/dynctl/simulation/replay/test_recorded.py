"""The fleet of a recording: which workers, with what, and what a note has to say."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem
from dynctl.documents.recording import Arrived, Changed, Record, State
from dynctl.documents.recording_file import encode_records
from dynctl.simulation.replay.fleets import simulated_fleet
from dynctl.simulation.replay.recorded import fleet_of_recording
from router_core import (
    ModelRuntimeConfig,
    Role,
    Router,
    Worker,
    WorkerLost,
    WorkerUpserted,
)
from tests.dynctl.health.recorded_fleet import RecordedFleet, chats


def written(path: Path, records: Sequence[Record]) -> Path:
    path.write_bytes(encode_records(records))
    return path


def worker(number: int, **config) -> Worker:
    return Worker(number, f"w{number}", "m", runtime_config=ModelRuntimeConfig(**config))


def upserted(at: float, *workers: Worker) -> list[Record]:
    return [Changed(at, WorkerUpserted(one)) for one in workers]


def arrived(at: float, model: str = "m") -> Arrived:
    return Arrived(at, f"r{at}", model, 40, 16, (1, 2))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.dynrec"


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
    assert "kv_transfer_ms_per_block" in source.assumed({})
    assert "prefill_tokens_per_s" not in source.assumed({"prefill_tokens_per_s": 1.0})
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
    assert [one.ranks for one in source.workers] == [2, 1]
    assert "1 joined, 1 left" in source.notes[0]
    first = fleet_of_recording(file, "m", limit=1)
    assert first is not None
    assert (first.workers, first.notes) == (source.workers, ())


def test_a_state_without_a_worker_of_before_shows_that_it_left(file: Path) -> None:
    router = Router()
    router.apply(WorkerUpserted(worker(1)), 0.0)
    records = [*upserted(0.0, worker(1), worker(2)), arrived(1.0), State(2.0, router.snapshot())]
    source = fleet_of_recording(written(file, records), None)
    assert source is not None
    assert "0 joined, 1 left" in source.notes[0]


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
