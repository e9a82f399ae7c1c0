"""The request plane over a NATS cluster whose servers die, stop, and come back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack

from tests.contract.nats_accounts import NatsUsers
from tests.contract.nats_server import NatsServer
from tests.dynamo.fleet import DynamoFleet
from tests.dynamo.ours import FOREIGN, OurFrontend, wait
from tests.planes.traffic import Scores
from tests.waiting import patience


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


def planes_of(workers: DynamoFleet, nats: list[NatsServer], user: dict[str, str]) -> dict[str, str]:
    """The variables of a command that reads the planes as this user of NATS."""
    addresses = ",".join(f"nats://{server.address}" for server in nats)
    names = ("DYN_DISCOVERY_BACKEND", "DYN_REQUEST_PLANE", "ETCD_ENDPOINTS")
    return {name: workers.environment[name] for name in names} | {"NATS_SERVER": addresses} | user


def command_output(planes: Mapping[str, str], *words: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", *words],
        capture_output=True,
        text=True,
        timeout=patience(90),
        env={**clean, **planes},
    )
    return done.returncode, " ".join(f"{done.stdout} {done.stderr}".split())


def test_a_user_of_nats_that_may_only_read(
    workers: DynamoFleet, nats: list[NatsServer], users: NatsUsers
) -> None:
    """Commands show what they read, and name the permission that they need for the rest."""
    planes = planes_of(workers, nats, users.reader)
    code, text = command_output(planes, "workers", "list")
    assert (code, text.count("needs a permission of NATS: to publish to")) == (0, 2), text
    code, text = command_output(planes, "events", "tail", "--duration", "1s")
    assert (code, "following 2 publishers of KV events" in text) == (0, True), text
    code, text = command_output(planes, "check")
    assert code == 1
    assert "FAIL DYR0303" in text
    assert text.count("needs a permission of NATS: to publish to") == 2, text


def test_commands_while_all_servers_are_silent(
    ours: OurFrontend, workers: DynamoFleet, nats: list[NatsServer], users: NatsUsers
) -> None:
    """Each names what it could not read, and none fails or waits for ever."""
    planes = planes_of(workers, nats, users.nkey)
    with ExitStack() as stack:
        for server in nats:
            stack.enter_context(server.frozen())
        wait(ours, lambda: ("REQUEST_PLANE_LOST", "NATS") in ours.conditions(), "NATS lost")
        status, health = ours.get("/health")
        assert status == 200
        assert json.loads(health)["status"] == "degraded"
        frontend = ("--frontend", ours.url)
        code, text = command_output({}, "check", *frontend)
        assert code == 1
        assert "FAIL REQUEST_PLANE_LOST" in text
        assert command_output({}, "workers", "list", *frontend)[1].count("disconnected") == 2
        code, text = command_output({}, "route", "hello there", *frontend)
        assert (code, "index current for 0 of 2 workers" in text) == (0, True), text
        assert "REQUEST_PLANE_LOST" in command_output({}, "top", "--once", *frontend)[1]
        code, text = command_output(planes, "workers", "list")
        assert (code, "recovery has not started yet" in text) == (0, True), text
        code, text = command_output(planes, "route", "hello there")
        assert (code, "caches of these workers unknown" in text) == (0, True), text
        code, text = command_output(planes, "events", "tail", "--duration", "10s")
        assert (code, "cannot reach NATS" in text) == (0, True), text
    wait(ours, lambda: not ours.conditions(), "the end of all conditions")
