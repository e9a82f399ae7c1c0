"""The links of one frontend: cut, reset, slow, or open in one direction only; and its own stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.contract.etcd_server import EtcdServer
from tests.contract.nats_accounts import NatsUsers
from tests.contract.nats_server import NatsServer
from tests.dynamo.fleet import DynamoFleet
from tests.dynamo.ours import OurFrontend, our_frontend, wait
from tests.planes.relay import Link, Relay
from tests.planes.traffic import Scores


@pytest.fixture(scope="module")
def relays(
    etcd: list[EtcdServer], nats: list[NatsServer]
) -> Iterator[tuple[list[Relay], list[Relay]]]:
    """To the members of etcd, and to the servers of NATS."""
    with ExitStack() as stack:
        yield (
            [stack.enter_context(Relay(member.port)) for member in etcd],
            [stack.enter_context(Relay(server.port)) for server in nats],
        )


@pytest.fixture(scope="module")
def beyond(
    workers: DynamoFleet, relays: tuple[list[Relay], list[Relay]], users: NatsUsers
) -> Iterator[OurFrontend]:
    """A frontend that reaches all servers through relays."""
    to_etcd, to_nats = relays
    environment = {
        "ETCD_ENDPOINTS": ",".join(f"http://127.0.0.1:{relay.port}" for relay in to_etcd),
        "NATS_SERVER": ",".join(f"nats://127.0.0.1:{relay.port}" for relay in to_nats),
        **users.nkey,
    }
    with our_frontend(workers, environment=environment) as frontend:
        yield frontend


def codes(frontend: OurFrontend) -> set[str]:
    return {code for code, _ in frontend.conditions()}


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        (Link(dropped="to"), "link to a NATS server: nothing arrives there, 4 s"),
        (Link(dropped="from"), "link to a NATS server: nothing arrives here, 4 s"),
        (Link(delay_s=0.3), "link to a NATS server: 0.3 s longer"),
        (Link(bytes_a_second=4_000), "link to a NATS server: 4 kB a second"),
    ],
    ids=["nothing-arrives-there", "nothing-arrives-here", "slow", "narrow"],
)
def test_the_link_to_one_nats_server_is_bad(
    beyond: OurFrontend,
    relays: tuple[list[Relay], list[Relay]],
    link: Link,
    fault: str,
    scores: Scores,
) -> None:
    """Another server is there: no request fails, and no worker is to blame."""
    used = relays[1]
    sending = scores.traffic(fault, beyond, rate=10, clients=60)
    with sending as requests, ExitStack() as stack:
        time.sleep(0.5)
        stack.enter_context(used[0].with_link(link))
        time.sleep(4)
    assert not requests.lost, requests.lost[:3]
    assert requests.slowest < 8  # and not the 10 s that a worker has to accept a request
    assert "WORKER_EJECTED" not in codes(beyond)
    used[1].reset()  # back to the first one
    used[2].reset()


def test_the_links_to_nats_are_reset_again_and_again(
    beyond: OurFrontend, relays: tuple[list[Relay], list[Relay]], scores: Scores
) -> None:
    fault = "all links to NATS reset six times in 2.4 s"
    with scores.traffic(fault, beyond) as requests:
        for _ in range(6):
            time.sleep(0.4)
            for relay in relays[1]:
                relay.reset()
    assert not requests.lost, requests.lost[:3]
    assert "WORKER_EJECTED" not in codes(beyond)


def test_the_links_to_all_members_of_etcd_are_cut(
    beyond: OurFrontend,
    workers: DynamoFleet,
    relays: tuple[list[Relay], list[Relay]],
    scores: Scores,
) -> None:
    sending = scores.traffic("all links to etcd cut, 3 s", beyond)
    with sending as requests, ExitStack() as stack:
        for relay in relays[0]:
            stack.enter_context(relay.cut())
        wait(beyond, lambda: "DISCOVERY_INTERRUPTED" in codes(beyond), "the condition")
        time.sleep(2)
        assert len(beyond.ready()) == len(workers.workers)
    assert not requests.lost, requests.lost[:3]
    wait(beyond, lambda: "DISCOVERY_INTERRUPTED" not in codes(beyond), "discovery to be read")
    assert len(beyond.ready()) == len(workers.workers)


def test_a_frontend_that_is_stopped_blames_no_worker(beyond: OurFrontend, scores: Scores) -> None:
    """What waited meanwhile is answered late; all connections are as before."""
    fault = "the frontend itself stopped, 12 s"
    with scores.traffic(fault, beyond, rate=10, clients=200) as requests:
        time.sleep(1)
        beyond.process.kill(signal.SIGSTOP)
        time.sleep(12)  # longer than a worker has to accept a request
        beyond.process.kill(signal.SIGCONT)
        for _ in range(6):
            time.sleep(0.5)
            assert "WORKER_EJECTED" not in codes(beyond)
    assert not requests.lost, requests.lost[:3]
