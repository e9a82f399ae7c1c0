"""Three hosts: network namespaces, joined by a bridge. A host vanishes: no packet of it arrives.

Our frontend, Dynamo's and etcd on one host; an engine with `dynctl serve attach` on each of the
others. Skipped without the right to make namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.contract.etcd_server import EtcdServer
from tests.dynamo.client import Answer
from tests.dynamo.fleet import TINY_MODEL, DynamoFleet
from tests.dynamo.ours import FOREIGN, OurFrontend, frontend_of, wait
from tests.dynamo.processes import Process, ProcessGroup
from tests.dynamo.test_attach import registered_id, workers
from tests.planes.relay import Relay
from tests.planes.traffic import Scores
from tests.ports import free_port
from tests.waiting import patience

#: Each run has names and a network of its own.
RUN = os.getpid()
BRIDGE = f"dyt-{RUN}"
NETWORK = f"10.213.{RUN % 250}"
OWN = f"{NETWORK}.1"
#: Answers under way go on at another worker.
GO_ON = ("--migration-limit", "3")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Host:
    """A namespace with one worker."""

    name: str
    address: str
    sidecar: Process

    @property
    def instance_id(self) -> int:
        return registered_id(self.sidecar)

    @contextmanager
    def vanished(self) -> Iterator[None]:
        """Nothing that is sent from this host leaves it."""
        route = ("-n", self.name, "route")
        ip(*route, "add", "blackhole", f"{OWN}/32")
        try:
            yield
        finally:
            ip(*route, "del", "blackhole", f"{OWN}/32")


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Namespace -> its address."""
    hosts = {f"{BRIDGE}-{number}": f"{NETWORK}.{number}" for number in (2, 3)}
    with ExitStack() as stack:
        try:
            ip("link", "add", BRIDGE, "type", "bridge")
            stack.callback(ip, "link", "del", BRIDGE)
            ip("address", "add", f"{OWN}/24", "dev", BRIDGE)
            ip("link", "set", BRIDGE, "up")
            for number, (name, address) in enumerate(hosts.items()):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                near, far = f"dn{number}-{RUN}", f"df{number}-{RUN}"
                ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
                ip("link", "set", near, "master", BRIDGE, "up")
                ip("-n", name, "address", "add", f"{address}/24", "dev", far)
                ip("-n", name, "link", "set", far, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no right to make network namespaces: {error}")
        yield hosts


@dataclass
class Place:
    etcd: EtcdServer
    fleet: DynamoFleet
    hosts: list[Host]
    ours: OurFrontend


@pytest.fixture(scope="module")
def place(addresses: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    etcd = EtcdServer(tmp_path_factory.mktemp("hosts") / "etcd")
    with ExitStack() as stack:
        stack.callback(etcd.close)
        etcd.start()
        relay = stack.enter_context(Relay(etcd.port, OWN))
        fleet = stack.enter_context(
            DynamoFleet(
                [],
                discovery="etcd",
                etcd_endpoints=f"http://{OWN}:{relay.port}",
                frontend_args=GO_ON,
                environment={"DYN_TCP_RESPONSE_STREAM_HOST": OWN, "DYN_TCP_RPC_HOST": OWN},
            )
        )
        group = ProcessGroup(fleet.directory)
        stack.callback(group.close)
        hosts = [start_host(group, fleet, name, where) for name, where in addresses.items()]
        workers(fleet, 2)
        expected = {host.instance_id for host in hosts}
        ours = stack.enter_context(
            frontend_of(fleet.directory, "tiny", expected, GO_ON, fleet.environment)
        )
        yield Place(etcd, fleet, hosts, ours)


def start_host(group: ProcessGroup, fleet: DynamoFleet, name: str, address: str) -> Host:
    """An engine and its sidecar in a namespace."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    inside = ["ip", "netns", "exec", name, sys.executable, "-m", "dynctl", "serve"]
    port, events = free_port(), free_port()
    engine = [*inside, "engine", "--name", name, "--model", "tiny", "--port", str(port)]
    engine += ["--model-path", str(TINY_MODEL), "--kv-events", f"tcp://127.0.0.1:{events}"]
    group.start(f"engine-{name}", [*engine, "--speedup-ratio", "4"], clean)
    attach = [*inside, "attach", "--engine", f"http://127.0.0.1:{port}", "--host", address]
    attach += ["--model-path", str(TINY_MODEL), "--system-port", str(free_port())]
    environment = {**clean, **fleet.environment}
    return Host(name, address, group.start(f"sidecar-{name}", attach, environment))


def test_the_host_of_a_worker_vanishes_and_returns(place: Place, scores: Scores) -> None:
    known = place.hosts[0].instance_id
    fault = "the host of a worker vanishes for 12 s: no packet of it arrives"
    with scores.traffic(fault, place.ours, place.fleet.frontend, clients=200) as requests:
        time.sleep(1)
        with place.hosts[0].vanished():
            gone = time.monotonic()
            time.sleep(12)
            assert place.hosts[1].instance_id in place.ours.ready()
        began = time.monotonic()
        wait(place.ours, lambda: len(place.ours.ready()) == 2, "both workers")
        requests.right_s = time.monotonic() - began
    assert not requests.lost, requests.lost[:3]
    new = [outcome.seconds for outcome in requests.outcomes if gone + 0.5 < outcome.at < began]
    assert len(new) > 20
    assert max(new) < 8  # and not the 10 s that a worker has to accept a request
    assert place.hosts[0].instance_id == known


def test_answers_under_way_at_a_host_that_vanishes_for_good(place: Place) -> None:
    """They go on at the other worker within 20 s, and not after the idle timeout."""
    gone = place.hosts[0]

    def answer(number: int) -> Answer:
        prompt = f"{number} " + "rivers stones north south " * 8
        return place.ours.complete(prompt, max_tokens=600, stream=True, timeout=patience(100))

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(answer, number) for number in range(8)]
        wait(place.ours, lambda: len(running(place)) == 2, "requests at both workers")
        began = time.monotonic()
        with gone.vanished():
            place.etcd.revoke(gone.instance_id)
            answers = [each.result() for each in asked]
            took = time.monotonic() - began
            assert [each.status for each in answers] == [200] * 8
            assert {finish_of(each) for each in answers} == {"length"}
            assert took < patience(40)
    wait(place.ours, lambda: len(place.ours.ready()) == 2, "both workers")


def running(place: Place) -> list[int]:
    """The numbers of requests of the workers that have some."""
    counts = [rank["active_requests"] for row in place.ours.workers() for rank in row["ranks"]]
    return [count for count in counts if count]


def finish_of(answer: Answer) -> str:
    """Why an answer ended."""
    choices = [choice for chunk in answer.chunks for choice in chunk.get("choices", ())]
    return str(
        next(reason for choice in reversed(choices) if (reason := choice.get("finish_reason")))
    )
