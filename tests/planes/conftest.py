"""Three NATS servers and three etcd members, a real Dynamo's workers, and our frontend on them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.contract.etcd_server import EtcdServer, etcd_cluster, start_members
from tests.contract.nats_accounts import NatsUsers
from tests.contract.nats_server import NatsServer, kill_all, nats_cluster, start_all
from tests.dynamo.conftest import dynamo_version
from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.ours import OurFrontend, our_frontend
from tests.planes.traffic import Scores

__all__ = ["dynamo_version"]

_OF_CLUSTERS: Final = ("test_etcd.py", "test_links.py", "test_nats.py", "test_partition.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="write what became of requests: docs/reliability.md"
    )


class _TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """With several processes: the files of the clusters in one of them."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "clusters" if Path(file).name in _OF_CLUSTERS else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _TogetherScheduling(config, log)


@pytest.fixture(scope="session")
def scores(pytestconfig: pytest.Config) -> Iterator[Scores]:
    found = Scores()
    yield found
    if pytestconfig.getoption("--record"):
        found.write()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdServer]]:
    members = etcd_cluster(tmp_path_factory.mktemp("etcd"))
    try:
        start_members(members)
        yield members
    finally:
        for member in members:
            member.close()


@pytest.fixture(scope="session")
def users() -> NatsUsers:
    """Dynamo's processes connect to NATS with a password, ours with an nkey."""
    return NatsUsers()


@pytest.fixture(scope="session")
def nats(users: NatsUsers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    servers = nats_cluster(tmp_path_factory.mktemp("nats"), users.config)

    try:
        asyncio.run(start_all(servers))
        yield servers
    finally:
        asyncio.run(kill_all(servers))


@pytest.fixture(scope="session")
def workers(
    etcd: list[EtcdServer], nats: list[NatsServer], users: NatsUsers
) -> Iterator[DynamoFleet]:
    """Two mock workers of Dynamo with its NATS request plane, and its frontend."""
    with DynamoFleet(
        aggregated(2),
        discovery="etcd",
        etcd_endpoints=",".join(member.url for member in etcd),
        event_plane="nats",
        # Dynamo's client takes one address, and learns the others from it.
        nats_server=f"nats://{nats[0].address}",
        environment={"DYN_REQUEST_PLANE": "nats", **users.password},
        # Without delays a request may end within the millisecond for which a worker gathers what
        # it reports: that it is idle again would never be said.
        speedup=10,
    ) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def ours(workers: DynamoFleet, nats: list[NatsServer], users: NatsUsers) -> Iterator[OurFrontend]:
    servers = ",".join(f"nats://{server.address}" for server in nats)
    with our_frontend(workers, environment={"NATS_SERVER": servers, **users.nkey}) as frontend:
        yield frontend
