"""Three NATS servers and three etcd members, a real Dynamo's workers, and our frontend on them."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.contract.etcd_server import EtcdServer, etcd_cluster
from tests.contract.nats_server import NatsServer, nats_cluster
from tests.dynamo.conftest import dynamo_version
from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.ours import OurFrontend, our_frontend
from tests.planes.traffic import Scores

__all__ = ["dynamo_version"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="write what became of requests: docs/reliability.md"
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes: all tests of the clusters in one, and files stay together."""
    for item in items:
        shares = "workers" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("clusters" if shares else item.path.name))


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
        for member in members:
            member.launch()
        for member in members:
            member.wait_healthy()
        yield members
    finally:
        for member in members:
            member.close()


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    servers = nats_cluster(tmp_path_factory.mktemp("nats"))

    async def start() -> None:
        await asyncio.gather(*(server.start() for server in servers))

    async def end() -> None:
        await asyncio.gather(*(server.kill() for server in servers))

    try:
        asyncio.run(start())
        yield servers
    finally:
        asyncio.run(end())


@pytest.fixture(scope="session")
def workers(etcd: list[EtcdServer], nats: list[NatsServer]) -> Iterator[DynamoFleet]:
    """Two mock workers of Dynamo with its NATS request plane, and its frontend."""
    with DynamoFleet(
        aggregated(2),
        discovery="etcd",
        etcd_endpoints=",".join(member.url for member in etcd),
        event_plane="nats",
        # Dynamo's client takes one address, and learns the others from it.
        nats_server=f"nats://{nats[0].address}",
        environment={"DYN_REQUEST_PLANE": "nats"},
        speedup=0,
    ) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def ours(workers: DynamoFleet, nats: list[NatsServer]) -> Iterator[OurFrontend]:
    servers = ",".join(f"nats://{server.address}" for server in nats)
    with our_frontend(workers, environment={"NATS_SERVER": servers}) as frontend:
        yield frontend
