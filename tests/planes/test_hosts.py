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

from dynctl.serving.engines.worker_spec import parse_worker_spec
from tests.contract.etcd_server import EtcdServer
from tests.dynamo.client import Answer, FrontendClient, InFlight
from tests.dynamo.fleet import TINY_MODEL, DynamoFleet
from tests.dynamo.ours import FOREIGN, OurFrontend, frontend_of, wait
from tests.dynamo.processes import Process, ProcessGroup
from tests.dynamo.test_attach import registered_id, workers
from tests.planes.relay import Relay
from tests.planes.traffic import Outcome, Scores, Traffic
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
    process: Process

    @property
    def instance_id(self) -> int:
        return registered_id(self.process)

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
    clean = clean_environment()
    port, events = free_port(), free_port()
    engine = [*inside(name), "engine", "--name", name, "--model", "tiny", "--port", str(port)]
    engine += ["--model-path", str(TINY_MODEL), "--kv-events", f"tcp://127.0.0.1:{events}"]
    group.start(f"engine-{name}", [*engine, "--speedup-ratio", "4"], clean)
    attach = [*inside(name), "attach", "--engine", f"http://127.0.0.1:{port}", "--host", address]
    attach += ["--model-path", str(TINY_MODEL), "--system-port", str(free_port())]
    environment = {**clean, **fleet.environment}
    return Host(name, address, group.start(f"sidecar-{name}", attach, environment))


def inside(name: str) -> list[str]:
    """The beginning of a command in a namespace."""
    return ["ip", "netns", "exec", name, sys.executable, "-m", "dynctl", "serve"]


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}


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


def test_answers_under_way_at_a_host_that_vanishes_for_good(place: Place, scores: Scores) -> None:
    """They go on at the other worker within seconds, and not after the idle timeout."""
    gone = place.hosts[0]
    wait(place.ours, lambda: len(used_by(place.fleet.frontend)) == 2, "both workers at Dynamo's")
    with ExitStack() as stack:
        ours = [begun(place.ours, number) for number in range(8)]
        wait(place.ours, lambda: len(running(place)) == 2, "requests at both workers")
        theirs = [begun(place.fleet.frontend, number) for number in range(8, 16)]
        for flight in (*ours, *theirs):
            flight.wait_first()
        stack.enter_context(gone.vanished())
        place.etcd.revoke(gone.instance_id)
        answers, beside = outcomes(ours), outcomes(theirs, 30)
    fault = "answers under way, and the host of a worker vanishes for good (slowest: next token)"
    scores.add(fault, answers, beside)
    assert not answers.lost, answers.lost[:3]
    assert answers.slowest < 8
    wait(place.ours, lambda: len(place.ours.ready()) == 2, "both workers")


def used_by(frontend: FrontendClient) -> set[int | None]:
    """The workers that get some short requests."""
    prompts = (f"{number} " + "stones south north " * 8 for number in range(100, 104))
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda prompt: frontend.complete(prompt, max_tokens=20), prompts)
        return {answer.placement.decode for answer in answers}


def begun(frontend: FrontendClient, number: int) -> InFlight:
    """A streamed answer that takes some seconds."""
    prompt = f"{number} " + "rivers stones north south " * 8
    return frontend.begin(prompt, max_tokens=600, timeout=patience(100))


def outcomes(flights: list[InFlight], within_s: float | None = None) -> Traffic:
    """What became of streamed answers. ``seconds`` of each: the longest time without a token."""
    within_s = patience(60) if within_s is None else within_s
    result, until = Traffic(), time.monotonic() + within_s
    for flight in flights:
        while not flight.done and time.monotonic() < until:
            time.sleep(0.05)
        ended = flight.done
        if not ended:
            flight.disconnect()
        complete = ended and finish_of(flight.result()) == "length"
        pause = flight.longest_pause_s if ended else within_s
        result.outcomes.append(Outcome(200 if complete else 0, 0.0, pause))
    return result


def running(place: Place | PlainPlace) -> list[int]:
    """The numbers of requests of the workers that have some."""
    counts = [rank["active_requests"] for row in place.ours.workers() for rank in row["ranks"]]
    return [count for count in counts if count]


def finish_of(answer: Answer) -> str:
    """Why an answer ended; empty: it did not."""
    choices = [choice for chunk in answer.chunks for choice in chunk.get("choices", ())]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return str(reasons[-1]) if reasons else ""


@dataclass
class PlainPlace:
    """Engines on the hosts, requested over HTTP."""

    ours: OurFrontend
    hosts: list[Host]


@pytest.fixture(scope="module")
def plain(
    addresses: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlainPlace]:
    directory = tmp_path_factory.mktemp("plain")
    group = ProcessGroup(directory)
    try:
        hosts, specs = [], []
        for name, address in addresses.items():
            port, events = free_port(), free_port()
            engine = ["engine", "--name", name, "--model", "tiny", "--port", str(port)]
            engine += ["--host", address, "--kv-events", f"tcp://{address}:{events}"]
            engine += ["--model-path", str(TINY_MODEL), "--speedup-ratio", "4"]
            process = group.start(f"plain-{name}", [*inside(name), *engine], clean_environment())
            hosts.append(Host(name, address, process))
            specs.append(f"http://{address}:{port},name={name},kv-events=tcp://{address}:{events}")
        expected = {parse_worker_spec(spec).worker_id for spec in specs}
        options = [word for spec in specs for word in ("--worker", spec)]
        with frontend_of(directory, "tiny", expected, options, {}) as ours:
            yield PlainPlace(ours, hosts)
    finally:
        group.close()


def test_the_host_of_a_plain_engine_vanishes_and_returns(plain: PlainPlace, scores: Scores) -> None:
    fault = "engines over HTTP: the host of one vanishes for 12 s"
    with scores.traffic(fault, plain.ours, clients=200) as requests:
        time.sleep(1)
        with plain.hosts[0].vanished():
            time.sleep(12)
        began = time.monotonic()
        wait(plain.ours, lambda: len(plain.ours.ready()) == 2, "both engines")
        requests.right_s = time.monotonic() - began
    assert not requests.lost, requests.lost[:3]
    assert requests.slowest < 8


def test_streams_of_a_plain_engine_whose_host_vanishes_for_a_while(
    plain: PlainPlace, scores: Scores
) -> None:
    """No other engine can go on with them: they wait for the host."""
    streams = [begun(plain.ours, number) for number in range(8)]
    for stream in streams:
        stream.wait_first()
    with plain.hosts[0].vanished():
        time.sleep(7)
    answers = outcomes(streams)
    fault = "engines over HTTP: streams, and the host of one vanishes for 7 s (slowest: next token)"
    scores.add(fault, answers)
    assert not answers.lost, answers.lost[:3]
    wait(plain.ours, lambda: len(plain.ours.ready()) == 2, "both engines")


def test_whole_answers_of_a_plain_engine_whose_host_vanishes(
    plain: PlainPlace, scores: Scores
) -> None:
    """Nothing of them was sent to the clients: the other engine makes them again."""
    answers = Traffic()

    def ask(number: int) -> None:
        prompt, at = f"{number} " + "stones rivers north south " * 8, time.monotonic()
        answer = plain.ours.complete(prompt, max_tokens=300, timeout=100)
        answers.outcomes.append(Outcome(answer.status, at, time.monotonic() - at))

    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            pool.submit(ask, number)
        wait(plain.ours, lambda: len(running(plain)) == 2, "requests at both engines")
        with plain.hosts[0].vanished():
            wait(plain.ours, lambda: len(answers.outcomes) == 8, "all answers", 60)
    fault = "engines over HTTP: whole answers under way, and the host of one vanishes for good"
    scores.add(fault, answers)
    assert not answers.lost, answers.lost[:3]
    wait(plain.ours, lambda: len(plain.ours.ready()) == 2, "both engines")
