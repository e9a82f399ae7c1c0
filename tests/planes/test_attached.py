"""Discovery in an etcd that loses what it has: leases, history, or everything.

Two simulated engines, each with `dynctl serve attach`, behind our frontend and a real Dynamo's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.etcd_server import EtcdServer
from tests.dynamo.fleet import DynamoFleet
from tests.dynamo.ours import OurFrontend, frontend_of, wait
from tests.dynamo.processes import ProcessGroup
from tests.dynamo.test_attach import Attached, workers
from tests.planes.relay import Relay
from tests.planes.traffic import Scores, Traffic
from tests.waiting import until_now


@dataclass
class Place:
    """``cut_off``: the link of worker ``a`` to etcd; ``blind``: that of our frontend."""

    etcd: EtcdServer
    folder: Path
    fleet: DynamoFleet
    a: Attached
    b: Attached
    ours: OurFrontend
    cut_off: Relay
    blind: Relay

    def ids(self) -> set[int]:
        return {self.a.instance_id, self.b.instance_id}

    def right(self) -> bool:
        """Whether our frontend has both workers and no other."""
        rows = self.ours.workers()
        return len(rows) == 2 and self.ours.ready().keys() == self.ids()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("attached") / "etcd"
    etcd = EtcdServer(folder)
    with ExitStack() as stack:
        stack.callback(etcd.close)
        etcd.start()
        cut_off, blind = (stack.enter_context(Relay(etcd.port)) for _ in range(2))
        arguments = ["--migration-limit", "3"]
        fleet = stack.enter_context(
            DynamoFleet([], discovery="etcd", etcd_endpoints=etcd.url, frontend_args=arguments)
        )
        group = ProcessGroup(fleet.directory)
        stack.callback(group.close)
        through = {"ETCD_ENDPOINTS": f"http://127.0.0.1:{cut_off.port}"}
        a = Attached(group, fleet, "a", environment=through)
        b = Attached(group, fleet, "b")
        workers(fleet, 2)
        planes = {**fleet.environment, "ETCD_ENDPOINTS": f"http://127.0.0.1:{blind.port}"}
        expected = {a.instance_id, b.instance_id}
        ours = stack.enter_context(frontend_of(fleet.directory, "tiny", expected, (), planes))
        yield Place(etcd, folder, fleet, a, b, ours, cut_off, blind)


def listed(place: Place) -> set[int]:
    """The ids of all workers that our frontend has, ready or not."""
    return {int(row["id"]) for row in place.ours.workers()}


def settle(place: Place, requests: Traffic, right: Callable[[], bool]) -> None:
    """Wait until it holds, and note how long that took."""
    began = time.monotonic()
    wait(place.ours, right, "the right workers")
    requests.right_s = time.monotonic() - began


def replace_worker(place: Place) -> int:
    """Kill worker ``b`` and end its lease; another process registers its engine under a new id.

    Returns the id before.
    """
    before = place.b.instance_id
    place.b.sidecar.kill()
    place.etcd.revoke(before)
    place.b.start_sidecar()
    until_now(lambda: place.b.instance_id != before, 30)
    return before


def test_a_lease_ends_while_its_worker_is_cut_off(place: Place, scores: Scores) -> None:
    """The worker returns under its id: one worker, that was away."""
    known = place.a.instance_id
    fault = "lease of a worker ends while its link to etcd is cut"
    with scores.traffic(fault, place.ours, place.fleet.frontend) as requests:
        with place.cut_off.cut():
            place.etcd.revoke(known)
            gone = {place.b.instance_id}
            wait(place.ours, lambda: place.ours.ready().keys() == gone, "the worker to leave")
            assert len(place.ours.workers()) == 1
            until_now(lambda: "REGISTRATION_INTERRUPTED" in place.a.conditions())
        settle(place, requests, place.right)
    assert not requests.lost, requests.lost[:3]
    assert place.a.instance_id == known
    until_now(lambda: not place.a.conditions())


def test_history_is_compacted_while_our_watch_is_cut(place: Place, scores: Scores) -> None:
    """A worker that left meanwhile is no ghost, and the one that came gets requests."""
    fault = "link to etcd cut, a worker replaced, history compacted"
    with scores.traffic(fault, place.ours) as requests:
        with place.blind.cut():
            replace_worker(place)
            place.etcd.compact()
            assert interruption(place)
        settle(place, requests, place.right)
    assert not requests.lost, requests.lost[:3]


def test_a_thousand_workers_come_go_and_come_back_at_once(place: Place, scores: Scores) -> None:
    """Of another model: the requests of this one are answered meanwhile."""
    entries = place.etcd.entries("v1/")
    known = place.b.instance_id
    sample = [
        (key, value)
        for key, value in entries.items()
        if key.startswith(("v1/instances/dynamo/backend/generate/", "v1/mdc/"))
        and key.endswith(f"{known:x}")
    ]
    assert len(sample) == 2
    copies = [
        (
            key.replace(f"{known:x}", f"{number:x}"),
            value.replace(str(known).encode(), str(number).encode()).replace(b'"tiny"', b'"flood"'),
        )
        for number in range(1_000_000, 1_001_000)
        for key, value in sample
    ]
    fault = "1,000 workers of another model come, go and come back at once"
    with scores.traffic(fault, place.ours, place.fleet.frontend) as requests:
        for _ in range(2):
            lease = place.etcd.grant(600)
            place.etcd.put_all(copies, lease)
            wait(place.ours, lambda: len(listed(place)) == 1002, "1,000 workers more")
            place.etcd.revoke(lease)
            settle(place, requests, place.right)
    assert not requests.lost, requests.lost[:3]


def test_an_older_copy_of_etcd_is_restored(place: Place, scores: Scores) -> None:
    """It has a worker that left since then, and lacks the one that came."""
    place.etcd.kill()
    copy = place.folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)  # of an attempt before
    shutil.copytree(place.folder / "data", copy)
    place.etcd.start()
    wait(place.ours, place.right, "both workers")
    before = replace_worker(place)
    wait(place.ours, place.right, "the new worker")
    fault = "etcd restored from a copy that has an older worker"
    with scores.traffic(fault, place.ours, place.fleet.frontend) as requests:
        place.etcd.kill()
        shutil.rmtree(place.folder / "data")
        shutil.copytree(copy, place.folder / "data")
        place.etcd.start()
        wait(place.ours, lambda: before in listed(place), "the older worker")
        settle(place, requests, lambda: place.ours.ready().keys() == place.ids())
        shown = listed(place)
        if place.etcd.lives(before):  # on a slow machine it has ended by itself
            assert shown == {*place.ids(), before}
            place.etcd.revoke(before)
        wait(place.ours, place.right, "the older worker to leave")
    assert not requests.lost, requests.lost[:3]


def test_etcd_is_wiped(place: Place, scores: Scores) -> None:
    """The workers register again under their ids; until then the last view counts."""
    fault = "etcd wiped: it starts without any data"
    with scores.traffic(fault, place.ours, place.fleet.frontend) as requests:
        expected = place.ids()
        place.etcd.kill()
        shutil.rmtree(place.folder / "data")
        place.etcd.start()
        wait(place.ours, lambda: "older data" in interruption(place), "the condition")
        assert listed(place) == expected
        settle(place, requests, lambda: not interruption(place) and place.right())
        time.sleep(1)
    assert not requests.lost, requests.lost[:3]
    assert place.ids() == expected


def test_etcd_is_wiped_while_a_worker_dies(place: Place, scores: Scores) -> None:
    """What vanished for good is removed."""
    with scores.traffic("etcd wiped, and a worker killed meanwhile", place.ours) as requests:
        place.etcd.kill()
        shutil.rmtree(place.folder / "data")
        place.b.sidecar.kill()
        place.etcd.start()
        settle(place, requests, lambda: listed(place) == {place.a.instance_id})
        assert not interruption(place)
    assert not requests.lost, requests.lost[:3]


def interruption(place: Place) -> str:
    """The message of the condition, empty without one."""
    return next(
        (
            message
            for (code, _), message in place.ours.conditions().items()
            if code == "DISCOVERY_INTERRUPTED"
        ),
        "",
    )
