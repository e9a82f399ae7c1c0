"""A snapshot or recording with one hostile value is refused by name, or is a router that works."""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem
from dynctl.documents.recording_file import RecordingFile
from dynctl.documents.view import decode_view, encode_view
from dynctl.health.hits.ladder import hits
from dynctl.simulation.replay.inputs import TraceInput
from dynctl.simulation.replay.recorded import fleet_of_recording
from dynctl.sources.recording import RecordedMoment
from router_core import Router, SnapshotError
from router_core.changes import Booked, Dequeued, Enqueued, Expired, Freed, KvEvent
from router_core.events import BlocksStored
from router_core.sessions import SessionTable
from router_core.workers import WorkerWithDpRank
from tests.dynctl.documents.hostile_leaves import (
    HOSTILE,
    HOSTILE_PACKED,
    OTHER_SHAPES,
    REQUEST,
    PackedRecords,
    at,
    full_records,
    full_router,
    places,
    replaced,
)


def worked(router: Router) -> None:
    """Everything that a router does with its state; fails where it raises."""
    router.advance(200.0)
    plan = router.plan(REQUEST, detail=True)
    again = Router.restore(router.snapshot())
    again.advance(200.0)
    assert again.plan(REQUEST, detail=True).final.costs == plan.final.costs
    if plan.ok:
        router.apply(router.booking(plan.final, REQUEST), 201.0)
    for change in (
        KvEvent(1, 0, BlocksStored(None, (91,), (92,))),
        Booked("x", "aggregated", 1, 0, 16, (1, 9)),
        Enqueued("y", "m", "default", 32, 0, 201.0),
        Dequeued("y"),
        Freed("r1"),
        Freed("r2"),
        Freed("x"),
        Expired(),
    ):
        router.apply(change, 202.0)
    for model in router.queue.models():
        router.next_turn(model, lambda _: True)
    while router.sweep(1_000, 1e9):
        pass
    router.plan(REQUEST, detail=True)
    Router.restore(router.snapshot())


def test_a_full_snapshot_is_read_and_works() -> None:
    plain = full_router().snapshot()
    assert [name for name, value in plain.items() if value in (None, [], {})] == []
    again = Router.restore(plain).snapshot()
    assert Router.restore(again).snapshot() == again
    text = json.dumps(again)
    assert json.dumps(Router.restore(json.loads(text)).snapshot()) == text
    worked(Router.restore(plain))


PARTS = sorted(full_router().snapshot())


@pytest.mark.parametrize("part", PARTS)
def test_each_leaf_of_a_snapshot_is_refused_by_its_path_or_works(part: str) -> None:
    plain = full_router().snapshot()
    seen: Counter[bool] = Counter()
    for path in places(plain[part], (part,)):
        before = at(plain, path)
        for value in OTHER_SHAPES if isinstance(before, (dict, list, tuple)) else HOSTILE:
            if value == before and type(value) is type(before):
                continue
            hostile = replaced(plain, path, value)
            try:
                router = Router.restore(hostile)
            except SnapshotError as error:
                message = str(error)
                # The path, and not the words of an exception that restore did not expect.
                named = (
                    message.removeprefix("a name in ")
                    .removeprefix("snapshot ")
                    .startswith(tuple(PARTS))
                )
                assert named, (path, message)
                assert len(message) < 500, (path, message[:600])
                seen[False] += 1
                continue
            except Exception as error:
                raise AssertionError((path, repr(value)[:60])) from error
            try:
                worked(router)
            except Exception as error:
                raise AssertionError((path, repr(value)[:60])) from error
            seen[True] += 1
    assert seen[False]


PACKED = PackedRecords(full_records())
LEAVES = list(places(PACKED.rows))


def read_in_every_way(path: Path) -> None:
    """Read a recording as `--recording`, `why`, `replay` and `hits` do."""
    with suppress(UsageProblem):
        moment = RecordedMoment(path, None)
        moment.decision("a")
        worked(moment.playback.router or Router())
    with suppress(UsageProblem, WireError):
        fleet_of_recording(path, None)
    with suppress(UsageProblem, WireError):
        list(TraceInput(path).requests(0))
    with suppress(UsageProblem, WireError):
        hits(RecordingFile(path))


def test_a_full_recording_is_read_in_every_way(tmp_path: Path) -> None:
    path = tmp_path / "full"
    PACKED.write(PACKED.rows, path)
    moment = RecordedMoment(path, None)
    assert moment.decision("a").kind
    worked(moment.playback.router or Router())
    assert fleet_of_recording(path, None) is not None
    assert hits(RecordingFile(path)).requests
    assert list(TraceInput(path).requests(0))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(LEAVES), value=st.sampled_from(HOSTILE_PACKED))
@example(path=(0, 5, "router_mode"), value=None)
@example(path=(1, 2, "tiers", 0, "tier"), value=None)
@example(path=(5, 4, 3), value=None)  # a block below the device without its local hash
def test_each_leaf_of_a_recording_is_refused_or_works(
    tmp_path: Path, path: tuple[Any, ...], value: Any
) -> None:
    file = tmp_path / "hostile"
    PACKED.write(replaced(PACKED.rows, path, value), file)
    read_in_every_way(file)


def test_a_hash_that_is_no_integer_is_named_by_its_path(tmp_path: Path) -> None:
    place = next(n for n, row in enumerate(PACKED.rows) if isinstance(row[2], dict))
    rows = replaced(
        PACKED.rows, (place, 2, "index", "slots", 0, "events", 0, "local_hashes", 0), 1e-320
    )
    PACKED.write(rows, tmp_path / "hostile")
    expected = (
        r"index\.slots\[0\]\.events\[0\]\.local_hashes\[0\]: 1e-320, an integer from 0 to 2\^64-1"
    )
    with pytest.raises(UsageProblem, match=expected):
        RecordedMoment(tmp_path / "hostile", None)


def test_a_view_is_read_as_strictly(tmp_path: Path) -> None:
    view = json.loads(encode_view(full_router().capture(), now=200.0))
    assert decode_view(json.dumps(view).encode()).router.plan(REQUEST).ok
    view["snapshot"]["registry"]["workers"][0]["block_size"] = 1e-320
    expected = r"registry\.workers\[0\]\.block_size: 1e-320, an integer from 1 to 1048576 expected"
    with pytest.raises(WireError, match=expected):
        decode_view(json.dumps(view).encode())


def test_a_running_session_without_time_left_ends_the_look_for_old_ones() -> None:
    """A time so short that it does not move a clock: `expire` went round without end."""
    sessions = SessionTable(1e-320)
    sessions.bind("s", "m", "decode", WorkerWithDpRank(1), "r", 100.0)
    sessions.expire(100.0)
    assert len(sessions) == 1
