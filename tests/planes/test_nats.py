"""The request plane over a NATS cluster whose servers die, stop, and come back."""

from __future__ import annotations

import asyncio
import time

from tests.contract.nats_server import NatsServer
from tests.dynamo.fleet import DynamoFleet
from tests.dynamo.ours import OurFrontend, wait
from tests.planes.traffic import Scores


def ejected(ours: OurFrontend) -> list[str]:
    return [subject for code, subject in ours.conditions() if code == "WORKER_EJECTED"]


def test_the_server_of_all_clients_is_silent(
    ours: OurFrontend, workers: DynamoFleet, nats: list[NatsServer], scores: Scores
) -> None:
    """Dynamo's workers do not notice it, and get what was sent to them when it continues."""
    fault = "a NATS server of three stopped, 7 s"
    with scores.traffic(fault, ours, workers.frontend, rate=10, clients=120) as requests:
        time.sleep(1)
        with nats[0].frozen():
            time.sleep(7)
            assert not ejected(ours)
        time.sleep(2)
    assert not requests.lost, (requests.lost[:3], ours.process.tail(20))
    assert not ejected(ours)


def test_a_server_is_killed_and_another_one_takes_over(
    ours: OurFrontend, workers: DynamoFleet, nats: list[NatsServer], scores: Scores
) -> None:
    for server in nats:
        with scores.traffic("each NATS server killed in turn", ours, workers.frontend) as requests:
            time.sleep(1)
            asyncio.run(server.kill())
            time.sleep(2)
            asyncio.run(server.start())
        assert not requests.lost, (requests.lost[:3], ours.process.tail(20))
        assert requests.slowest < 8  # and not the 10 s that a worker has to accept a request
    assert not ejected(ours)


def test_all_servers_are_gone_for_a_while(
    ours: OurFrontend, workers: DynamoFleet, nats: list[NatsServer], scores: Scores
) -> None:
    """Requests wait for them and then for the workers, and no worker is to blame."""
    seen: set[str] = set()
    fault = "all NATS servers gone for 6 s"
    with scores.traffic(fault, ours, workers.frontend, clients=200) as requests:
        time.sleep(1)
        for server in nats:
            asyncio.run(server.kill())
        wait(ours, lambda: ("REQUEST_PLANE_LOST", "NATS") in ours.conditions(), "NATS lost")
        time.sleep(6)
        for server in nats:
            asyncio.run(server.start())
        for _ in range(16):
            seen.update(ejected(ours))
            time.sleep(0.5)
    assert not requests.lost, requests.lost[-3:]
    assert not seen
