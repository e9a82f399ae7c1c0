"""One set of tests for every registrar: entries live as long as their lease."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynctl.adapters.dynamo.registration import Registration
from dynctl.adapters.etcd.grpc import Etcd3Discovery
from dynctl.adapters.etcd.registration import registrar_of
from dynctl.adapters.file import FileDiscovery, FileRegistrar
from dynctl.adapters.memory import MemoryDiscovery
from dynctl.adapters.ports import Discovery, Lease, Registrar
from dynctl.base.errors import Unreachable
from tests.contract.etcd_server import EtcdServer
from tests.memory_planes import MemoryLease, MemoryRegistrar
from tests.waiting import patience, slowdown, until

KEY = "v1/instances/dyn-amo/back_end/generate/f50496f06b4ba43b"
CARD = "v1/mdc/dyn-amo/back_end/generate/f50496f06b4ba43b"
#: Kept every third of it: a process that stands still for two seconds loses no lease.
TTL_S = 4


@dataclass
class Rig:
    registrar: Registrar
    discovery: Discovery
    server: EtcdServer | None = None
    root: Path | None = None

    async def entries(self) -> dict[str, bytes]:
        return {entry.key: entry.value for entry in (await self.discovery.list()).entries}

    async def lose(self, lease: Lease) -> None:
        """The plane drops the lease, as it does when its holder was suspended."""
        if isinstance(lease, MemoryLease):
            lease.expire()
        elif self.server is not None:
            self.server.post("/v3/lease/revoke", ID=str(lease.id))
        else:
            assert self.root is not None
            for path in self.root.rglob("*%2F*"):
                path.unlink()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.close()


@pytest.fixture(params=["memory", "file", "etcd"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    if request.param == "memory":
        memory = MemoryDiscovery()
        made = Rig(MemoryRegistrar(memory), memory)
    elif request.param == "file":
        root = tmp_path / "store"
        made = Rig(FileRegistrar(root, ttl_s=TTL_S), FileDiscovery(root), root=root)
    else:
        server: EtcdServer = request.getfixturevalue("etcd")
        server.clear()
        discovery = Etcd3Discovery([server.url])
        registrar = registrar_of(discovery, ttl_s=TTL_S)
        made = Rig(registrar, discovery, server)
    yield made
    await made.registrar.close()
    await made.discovery.close()


async def test_entries_are_listed_until_the_lease_is_closed(rig: Rig):
    lease = await rig.registrar.grant()
    assert 0 < lease.id < 2**63
    await lease.put(KEY, b"\xff1")
    await lease.put(CARD, "{} ✓".encode())
    assert await rig.entries() == {KEY: b"\xff1", CARD: "{} ✓".encode()}
    await lease.put(KEY, b"2")
    await lease.delete(CARD)
    assert await rig.entries() == {KEY: b"2"}
    await lease.close()
    assert await rig.entries() == {}
    await lease.close()  # twice is no error


async def test_the_registrar_closes_what_is_open_and_leases_are_apart(rig: Rig):
    first, second = await rig.registrar.grant(), await rig.registrar.grant()
    assert first.id != second.id
    await first.put(KEY, b"1")
    await second.put(CARD, b"2")
    await first.close()
    assert await rig.entries() == {CARD: b"2"}
    await rig.registrar.close()
    assert await rig.entries() == {}
    if rig.server is not None:
        assert rig.server.leases() == 0


async def test_a_lease_outlives_its_time_to_live_while_it_is_kept(rig: Rig):
    lease = await rig.registrar.grant()
    await lease.put(KEY, b"1")
    for _ in range(3):
        await asyncio.sleep(TTL_S * 0.4)
        if rig.root is not None:
            rig.discovery = FileDiscovery(rig.root, ttl_s=TTL_S * slowdown())
        assert await rig.entries() == {KEY: b"1"}
    assert not lease.lost.is_set()
    assert lease.trouble == ""


async def test_a_lease_that_the_plane_drops_is_noticed(rig: Rig):
    lease = await rig.registrar.grant()
    await lease.put(KEY, b"1")
    await rig.lose(lease)
    async with asyncio.timeout(patience(10)):
        await lease.lost.wait()
    assert await rig.entries() == {}
    with pytest.raises(Unreachable, match="lease"):
        await lease.put(KEY, b"1")


async def test_a_lost_lease_is_reported_and_registered_again_under_its_id(rig: Rig):
    reported: list[str | None] = []
    registration = Registration(
        rig.registrar,
        lambda id: [(f"v1/instances/ns/c/e/{id:x}", b"%d" % id)],
        reported.append,
    )
    first = await registration.start()
    assert registration.instance_id == first
    assert await rig.entries() == {f"v1/instances/ns/c/e/{first:x}": b"%d" % first}
    lease = registration._lease
    assert lease is not None
    await rig.lose(lease)
    await until(lambda: registration.losses == 1 and registration.instance_id is not None)
    assert registration.instance_id == first
    assert await rig.entries() == {f"v1/instances/ns/c/e/{first:x}": b"%d" % first}
    await until(lambda: registration.problem is None)
    assert any(f"{first:x} was lost" in (problem or "") for problem in reported)
    assert reported[-1] is None
    await registration.withdraw()
    assert await rig.entries() == {}


async def test_changed_entries_are_written_and_dropped_ones_removed(rig: Rig):
    current = {KEY: b"1", CARD: b"2"}
    registration = Registration(rig.registrar, lambda id: current.items())
    await registration.start()
    assert await rig.entries() == current
    current = {KEY: b"3"}
    registration.update()
    async with asyncio.timeout(patience(10)):
        while await rig.entries() != {KEY: b"3"}:  # noqa: ASYNC110 - the plane has no event
            await asyncio.sleep(0.02)
    first = registration.instance_id
    await registration.withdraw()
    assert await registration.start() != first
    assert await rig.entries() == current
    await registration.close()
    assert await rig.entries() == {}


async def test_an_etcd_that_is_gone_for_a_while_does_not_lose_the_lease(tmp_path: Path):
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    discovery = Etcd3Discovery([server.url])
    registrar = registrar_of(discovery, ttl_s=TTL_S)
    registration = Registration(registrar, lambda id: [(KEY, b"1")])
    try:
        first = await registration.start()
        server.kill()
        await until(lambda: registration.problem is not None, 20)
        assert "etcd is not reachable" in (registration.problem or "")
        await asyncio.to_thread(server.start)
        await until(lambda: registration.problem is None, 20)
        assert registration.instance_id == first
        assert [entry.key for entry in (await discovery.list()).entries] == [KEY]
    finally:
        await registration.close()
        await discovery.close()
        server.close()


async def test_an_id_that_another_lease_has_is_not_taken(etcd: EtcdServer):
    discovery = Etcd3Discovery([etcd.url])
    first, second = (registrar_of(discovery, ttl_s=TTL_S) for _ in range(2))
    lease = await first.grant()
    other = await second.grant(lease.id)
    assert other.id != lease.id
    await first.close()
    await second.close()
    await discovery.close()


async def test_entries_that_a_restored_etcd_lacks_are_written_again(tmp_path: Path):
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    discovery = Etcd3Discovery([server.url])
    registration = Registration(
        registrar_of(discovery, ttl_s=TTL_S), lambda id: [(KEY, b"1"), (CARD, b"2")]
    )
    try:
        await registration.start()
        server.kill()
        await asyncio.to_thread(server.start)
        server.delete(KEY)
        server.put(CARD, b"older", lease=registration.instance_id or 0)
        async with asyncio.timeout(patience(10)):
            while True:
                entries = (await discovery.list()).entries
                if {entry.key: entry.value for entry in entries} == {KEY: b"1", CARD: b"2"}:
                    break
        assert registration.losses == 0
    finally:
        await registration.close()
        await discovery.close()
        server.close()


async def test_nothing_is_registered_where_etcd_does_not_answer():
    discovery = Etcd3Discovery(["http://127.0.0.1:1"])
    registrar = registrar_of(discovery)
    registration = Registration(registrar, lambda id: [(KEY, b"1")])
    with pytest.raises(Unreachable, match=r"etcd is not reachable at 127\.0\.0\.1:1"):
        await registration.start()
    assert registration.instance_id is None
    await registration.close()
    await discovery.close()


async def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    registrar = FileRegistrar(blocked / "store")
    with pytest.raises(Unreachable, match=f"cannot write {blocked}/store"):
        await registrar.grant()
    await registrar.close()
