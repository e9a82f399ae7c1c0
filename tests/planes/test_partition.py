"""Two frontends that share load, of which one is cut off from NATS, or from etcd."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.contract.etcd_server import EtcdServer
from tests.contract.nats_accounts import NatsUsers
from tests.contract.nats_server import NatsServer
from tests.dynamo.fleet import DynamoFleet, Worker
from tests.dynamo.ours import OurFrontend, our_frontend, wait
from tests.dynamo.plans import WorkerPlan
from tests.planes.relay import Relay
from tests.planes.traffic import Scores, traffic

SHARED = ("--router-replica-sync", "--event-plane", "nats")


@dataclass
class Pair:
    """``far`` reaches etcd and NATS through relays, and ``near`` does not."""

    near: OurFrontend
    far: OurFrontend
    to_etcd: list[Relay]
    to_nats: list[Relay]

    def views(self) -> list[dict[tuple[str, int], tuple[int, int, str]]]:
        """Of each frontend: requests, cached blocks and state of the index of every rank."""
        return [
            {
                (row["id"], rank["dp_rank"]): (
                    rank["active_requests"],
                    rank["cached_blocks"],
                    rank["index"],
                )
                for row in frontend.workers()
                for rank in row["ranks"]
            }
            for frontend in (self.near, self.far)
        ]

    def agree(self) -> bool:
        """Without requests: equal views, and no load."""
        near, far = self.views()
        return near == far and all(
            (requests, index) == (0, "current") for requests, _, index in near.values()
        )


@pytest.fixture(scope="module")
def pair(
    workers: DynamoFleet, etcd: list[EtcdServer], nats: list[NatsServer], users: NatsUsers
) -> Iterator[Pair]:
    with ExitStack() as stack:
        to_etcd = [stack.enter_context(Relay(member.port)) for member in etcd]
        to_nats = [stack.enter_context(Relay(server.port)) for server in nats]
        near, far = (
            {
                "ETCD_ENDPOINTS": ",".join(f"http://127.0.0.1:{port}" for port in etcd_ports),
                "NATS_SERVER": ",".join(f"nats://127.0.0.1:{port}" for port in nats_ports),
                **users.nkey,
            }
            for etcd_ports, nats_ports in (
                ([member.port for member in etcd], [server.port for server in nats]),
                ([relay.port for relay in to_etcd], [relay.port for relay in to_nats]),
            )
        )
        frontends = [
            stack.enter_context(our_frontend(workers, *SHARED, environment=environment))
            for environment in (near, far)
        ]
        yield Pair(frontends[0], frontends[1], to_etcd, to_nats)


def codes(frontend: OurFrontend) -> set[str]:
    return {code for code, _ in frontend.conditions()}


def test_one_of_two_frontends_is_cut_off_from_nats(pair: Pair, scores: Scores) -> None:
    """It says what it does not see; afterwards both have the same loads and the same index."""
    wait(pair.near, pair.agree, "equal views before", shown=pair.views)
    fault = "one of two frontends cut off from NATS, 3 s"
    with (
        scores.traffic(fault, pair.far, clients=100) as requests,
        traffic(pair.near) as others,
    ):
        time.sleep(1)
        with ExitStack() as stack:
            for relay in pair.to_nats:
                stack.enter_context(relay.cut())
            wait(pair.far, lambda: "REQUEST_PLANE_LOST" in codes(pair.far), "the condition")
            wait(pair.far, lambda: "STREAM_DISCONNECTED" in codes(pair.far), "the streams")
            time.sleep(2)
        wait(pair.far, lambda: "REQUEST_PLANE_LOST" not in codes(pair.far), "NATS")
        wait(pair.far, lambda: "STREAM_DISCONNECTED" not in codes(pair.far), "the streams")
        # Messages of requests are not sent again. A worker without used blocks ends the old ones,
        # and it reports only changes.
        healed = len(requests.outcomes)
        wait(pair.far, lambda: len(requests.outcomes) >= healed + 40, "requests after the heal")
    began = time.monotonic()
    wait(pair.far, pair.agree, "equal views", shown=pair.views)
    requests.right_s = time.monotonic() - began
    assert not requests.lost, requests.lost[:3]
    assert not others.lost, others.lost[:3]


@contextmanager
def late_worker(workers: DynamoFleet) -> Iterator[Worker]:
    """One more worker; Dynamo's frontend is not asked, as another test may have ended it."""
    worker = workers.start_worker(WorkerPlan("late"), wait=False)
    try:
        workers.wait_until(worker.learn_instance_id, "the new worker's id", seconds=60)
        yield worker
    finally:
        workers.kill("late", signal.SIGTERM)


def test_one_of_two_frontends_does_not_see_a_worker_that_came(
    pair: Pair, workers: DynamoFleet, scores: Scores
) -> None:
    """Half of the workers: it says that its view is old, and has them all after the heal."""
    fault = "one of two frontends cut off from etcd, a worker comes and goes"
    with ExitStack() as life:
        with scores.traffic(fault, pair.far) as requests:
            with ExitStack() as stack:
                for relay in pair.to_etcd:
                    stack.enter_context(relay.cut())
                worker = life.enter_context(late_worker(workers))
                wait(pair.near, lambda: len(pair.near.ready()) == 3, "the new worker")
                assert "DISCOVERY_INTERRUPTED" in codes(pair.far)
                assert len(pair.far.workers()) == 2
            began = time.monotonic()
            wait(pair.far, lambda: worker.instance_id in pair.far.ready(), "the new worker")
            requests.right_s = time.monotonic() - began
        assert not requests.lost, requests.lost[:3]
        wait(pair.far, pair.agree, "equal views", shown=pair.views)
    wait(pair.far, lambda: len(pair.far.workers()) == 2, "the worker to leave")
