"""The etcd client against real servers that die, want a password, or speak TLS."""

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from dynctl.adapters.etcd import discovery as discovery_etcd
from dynctl.adapters.etcd.grpc import Etcd3Discovery
from dynctl.adapters.etcd.registration import registrar_of
from dynctl.adapters.ports import Deleted, DiscoveryChange, DiscoveryEntry, Interrupted, Listed, Put
from dynctl.base.errors import AccessDenied, Unreachable, UsageProblem
from tests.contract.certificates import Authority, own_certificate
from tests.contract.etcd_server import EtcdServer
from tests.ports import free_port
from tests.waiting import patience

ENTRY = DiscoveryEntry("v1/instances/ns/c/e/1", b"{}")


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with closing(EtcdServer(tmp_path_factory.mktemp("etcd"))) as server:
        server.start()
        yield server


@pytest.fixture
def server(module_server: EtcdServer) -> EtcdServer:
    module_server.clear()
    module_server.put(ENTRY.key, ENTRY.value)
    return module_server


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with closing(EtcdServer(tmp_path_factory.mktemp("etcd-auth"))) as server:
        server.start()
        server.put(ENTRY.key, ENTRY.value)
        server.put("secret", b"not for the reader")
        server.require_password("observer", "s3cret-p4ss")
        yield server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return own_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def tls_server(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]
) -> Iterator[EtcdServer]:
    with closing(EtcdServer(tmp_path_factory.mktemp("etcd-tls"), certificate)) as server:
        server.start()
        server.put(ENTRY.key, ENTRY.value)
        yield server


async def following(changes: AsyncGenerator[DiscoveryChange, None]) -> DiscoveryChange:
    return await asyncio.wait_for(anext(changes), patience(10))


async def test_a_killed_etcd_is_an_interruption_and_then_a_new_list(server: EtcdServer):
    discovery = Etcd3Discovery([server.url])
    changes = discovery.watch()
    assert await following(changes) == Listed((ENTRY,))
    server.kill()
    interrupted = await following(changes)
    assert isinstance(interrupted, Interrupted)
    assert str(server.port) in interrupted.reason
    back = asyncio.ensure_future(following(changes))
    before = time.process_time()
    await asyncio.sleep(2)
    used = time.process_time() - before
    assert not back.done()
    assert used < 0.6, f"{used:.2f} s of CPU in 2 s without etcd"
    server.start()
    assert await back == Listed((ENTRY,))
    server.put("v1/mdc/x", b"1")
    assert await following(changes) == Put(DiscoveryEntry("v1/mdc/x", b"1"))
    await changes.aclose()
    await discovery.close()


async def test_a_frozen_etcd_is_an_interruption(server: EtcdServer):
    """gRPC's pings find it in 15 s, where the connection itself stays."""
    changes = Etcd3Discovery([server.url]).watch()
    assert isinstance(await following(changes), Listed)
    with server.frozen():
        change = await asyncio.wait_for(anext(changes), patience(30))
        assert isinstance(change, Interrupted), change
    while isinstance(change, Interrupted):
        change = await following(changes)
    assert change == Listed((ENTRY,))
    await changes.aclose()


async def test_what_happened_meanwhile_is_in_the_new_list(server: EtcdServer):
    discovery = Etcd3Discovery([server.url])
    changes = discovery.watch()
    assert await following(changes) == Listed((ENTRY,))
    server.kill()
    assert isinstance(await following(changes), Interrupted)
    server.start()
    server.delete(ENTRY.key)
    server.put("v1/mdc/y", b"1")
    seen = [await following(changes)]
    while seen[-1] != Put(DiscoveryEntry("v1/mdc/y", b"1")) and not _lists(seen[-1], "v1/mdc/y"):
        seen.append(await following(changes))
    assert isinstance(seen[0], Listed)
    await discovery.close()
    await changes.aclose()


def _lists(change: DiscoveryChange, key: str) -> bool:
    return isinstance(change, Listed) and key in [entry.key for entry in change.entries]


async def test_an_etcd_that_is_not_there_yet(tmp_path: Path):
    with closing(EtcdServer(tmp_path)) as server:
        discovery = Etcd3Discovery([server.url])
        changes = discovery.watch()
        assert isinstance(await following(changes), Interrupted)
        server.start()
        assert await following(changes) == Listed(())
        await changes.aclose()
        await discovery.close()


async def test_the_next_member_is_asked_when_the_first_is_dead(server: EtcdServer):
    discovery = Etcd3Discovery([f"127.0.0.1:{free_port()}", server.url])
    assert await discovery.list() == Listed((ENTRY,))
    changes = discovery.watch()
    assert await following(changes) == Listed((ENTRY,))
    await changes.aclose()
    await discovery.close()


async def test_the_next_member_is_asked_when_the_first_is_silent(server: EtcdServer):
    """One that accepts and says nothing takes its share of the time and no more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        discovery = Etcd3Discovery([f"127.0.0.1:{silent.getsockname()[1]}", server.url])
        assert await asyncio.wait_for(discovery.list(), patience(5)) == Listed((ENTRY,))
        await discovery.close()


async def test_a_watch_moves_to_another_member(server: EtcdServer, tmp_path: Path):
    with closing(EtcdServer(tmp_path)) as other:
        other.start()
        discovery = Etcd3Discovery([other.url, server.url])
        changes = discovery.watch()
        assert await following(changes) == Listed(())
        other.kill()
        assert isinstance(await following(changes), Interrupted)
        assert await following(changes) == Listed((ENTRY,))
        await changes.aclose()
        await discovery.close()


@pytest.mark.seed("smart-routing-guide-0.9: infrastructure: ETCD_ENDPOINTS")
async def test_unreachable_names_every_member_and_what_it_said():
    ports = [free_port(), free_port()]
    discovery = Etcd3Discovery([f"http://127.0.0.1:{port}" for port in ports])
    with pytest.raises(Unreachable) as caught:
        await asyncio.wait_for(discovery.list(), patience(5))
    for port in ports:
        assert f"127.0.0.1:{port}: " in caught.value.message
    assert caught.value.message.count("connection refused") == 2
    assert "ETCD_ENDPOINTS" in caught.value.hint
    await discovery.close()


async def test_a_frozen_etcd_is_named_in_plain_words(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(discovery_etcd, "REACH_S", 1.0)
    discovery = Etcd3Discovery([server.url])
    try:
        assert isinstance(await discovery.list(), Listed)
        with server.frozen(), pytest.raises(Unreachable, match="no response in") as caught:
            await asyncio.wait_for(discovery.list(), patience(30))
        assert "Exceeded" not in caught.value.message
    finally:
        await discovery.close()


async def test_silence_is_unreachable_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery_etcd, "REACH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        discovery = Etcd3Discovery([f"127.0.0.1:{silent.getsockname()[1]}"])
        with pytest.raises(Unreachable):
            await asyncio.wait_for(discovery.list(), patience(5))
        await discovery.close()


async def test_a_server_that_is_no_etcd():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        discovery = Etcd3Discovery([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        with pytest.raises(Unreachable):
            await asyncio.wait_for(discovery.list(), patience(5))
        await discovery.close()


async def test_a_compacted_history_is_listed_again(server: EtcdServer):
    """Compaction between the list and the watch, which the test brings about by asking for a
    revision that is gone."""
    discovery = Etcd3Discovery([server.url])
    for number in range(3):
        server.put(ENTRY.key, b"%d" % number)
    server.post("/v3/kv/compaction", revision=str(server.revision()), physical=True)
    session = discovery.connect(discovery.access.endpoints[0])
    await session.open(4)
    watch = session.watch(b"v1/", b"v10", 1)
    with pytest.raises(discovery_etcd.EtcdCompacted):
        await asyncio.wait_for(anext(watch), patience(10))
    with pytest.raises(discovery_etcd.EtcdCompacted):
        await session.page(b"v1/", b"v10", 10, 1, 4)
    await session.close()
    await discovery.close()


async def test_pages_are_of_one_revision(server: EtcdServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery_etcd, "PAGE", 7)
    server.clear()
    keys = [f"v1/instances/ns/c/e/{number:03}" for number in range(50)]
    for key in keys:
        server.put(key, b"{}")
    discovery = Etcd3Discovery([server.url])
    assert [entry.key for entry in (await discovery.list()).entries] == keys
    await discovery.close()


async def test_too_many_entries_are_refused(server: EtcdServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery_etcd, "MAX_ENTRIES", 3)
    for number in range(4):
        server.put(f"v1/mdc/{number}", b"{}")
    discovery = Etcd3Discovery([server.url])
    with pytest.raises(Unreachable, match="more than 3 entries"):
        await discovery.list()
    await discovery.close()


async def test_only_keys_of_the_prefix_are_seen(server: EtcdServer):
    for key in ("v0/x", "v1", "v10/x", "v2/x"):
        server.put(key, b"{}")
    discovery = Etcd3Discovery([server.url])
    changes = discovery.watch()
    assert await following(changes) == Listed((ENTRY,))
    server.put("v10/y", b"{}")
    server.delete(ENTRY.key)
    assert await following(changes) == Deleted(ENTRY.key)
    await changes.aclose()
    await discovery.close()


async def test_an_entry_goes_when_its_lease_ends(server: EtcdServer):
    lease = int(server.post("/v3/lease/grant", TTL="60")["ID"])
    server.put("v1/mdc/leased", b"{}", lease)
    discovery = Etcd3Discovery([server.url])
    changes = discovery.watch()
    assert len(cast(Listed, await following(changes)).entries) == 2
    server.post("/v3/lease/revoke", ID=str(lease))
    assert await following(changes) == Deleted("v1/mdc/leased")
    await changes.aclose()
    await discovery.close()


async def test_user_and_password(locked_server: EtcdServer):
    discovery = Etcd3Discovery([locked_server.url], user="observer", password="s3cret-p4ss")
    changes = discovery.watch()
    assert await following(changes) == Listed((ENTRY,))
    locked_server.put("v1/mdc/auth", b"{}")
    assert await following(changes) == Put(DiscoveryEntry("v1/mdc/auth", b"{}"))
    locked_server.delete("v1/mdc/auth")
    assert await following(changes) == Deleted("v1/mdc/auth")
    assert "s3cret" not in discovery.title
    assert "observer" not in discovery.title
    await changes.aclose()
    await discovery.close()


@pytest.mark.parametrize(
    "credentials",
    [{}, {"user": "observer", "password": "wrong-p4ss"}, {"user": "who", "password": "wrong-p4ss"}],
    ids=["none", "wrong", "unknown"],
)
async def test_a_refused_reader_is_told_which_variables(
    locked_server: EtcdServer, credentials: dict[str, Any]
):
    discovery = Etcd3Discovery([locked_server.url], **credentials)
    with pytest.raises(Unreachable) as caught:
        await discovery.list()
    assert "ETCD_AUTH_USERNAME" in caught.value.hint
    assert "wrong-p4ss" not in caught.value.message + caught.value.hint
    await discovery.close()


async def test_what_the_user_may_not_read(locked_server: EtcdServer):
    discovery = Etcd3Discovery(
        [locked_server.url], user="observer", password="s3cret-p4ss", prefix=b"secret"
    )
    with pytest.raises(Unreachable, match="permission denied") as caught:
        await discovery.list()
    assert "ETCD_AUTH_USERNAME" in caught.value.hint
    await discovery.close()


async def test_credentials_for_an_etcd_that_wants_none(server: EtcdServer):
    discovery = Etcd3Discovery([server.url], user="observer", password="s3cret-p4ss")
    assert await discovery.list() == Listed((ENTRY,))
    await discovery.close()


@pytest.mark.parametrize("as_text", [False, True], ids=["paths", "pem"])
async def test_tls_with_a_client_certificate(
    tls_server: EtcdServer, certificate: tuple[Path, Path], as_text: bool
):
    cert, key = (path.read_text() if as_text else str(path) for path in certificate)
    discovery = Etcd3Discovery(
        [tls_server.url.removeprefix("https://")], ca=cert, cert=cert, key=key
    )
    assert discovery.title.startswith("etcd https://127.0.0.1:")
    changes = discovery.watch()
    assert await following(changes) == Listed((ENTRY,))
    tls_server.put("v1/mdc/tls", b"{}")
    assert await following(changes) == Put(DiscoveryEntry("v1/mdc/tls", b"{}"))
    tls_server.delete("v1/mdc/tls")
    await changes.aclose()
    await discovery.close()


async def test_a_server_that_we_do_not_trust(tls_server: EtcdServer):
    discovery = Etcd3Discovery([tls_server.url])
    with pytest.raises(Unreachable) as caught:
        await asyncio.wait_for(discovery.list(), patience(5))
    assert "ETCD_AUTH_CA" in caught.value.hint
    await discovery.close()


async def test_certificates_are_read_again_for_each_connection(tmp_path: Path):
    """Also where all of them are replaced: of the authority, of the server and of the client."""
    for folder in ("first", "second", "used"):
        (tmp_path / folder).mkdir()
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    used = tmp_path / "used"

    def mount(authority: Authority) -> None:
        certificate, key = authority.issue("client")
        for source, name in ((authority.file, "ca"), (certificate, "cert"), (key, "key")):
            shutil.copy(source, used / name)

    mount(first)
    with closing(EtcdServer(tmp_path / "etcd", first.issue("server"), first.file)) as server:
        await asyncio.to_thread(server.start)
        server.put(ENTRY.key, ENTRY.value)
        ca, cert, key = (str(used / name) for name in ("ca", "cert", "key"))
        discovery = Etcd3Discovery([server.url], ca=ca, cert=cert, key=key)
        changes = discovery.watch()
        assert await following(changes) == Listed((ENTRY,))
        server.kill()
        server.use(second.issue("server"), second.file)
        await asyncio.to_thread(server.start)
        assert isinstance(await following(changes), Interrupted)
        with pytest.raises(Unreachable, match="its certificate is not trusted: ") as caught:
            await discovery.list()
        assert f"ETCD_AUTH_CA ({ca})" in caught.value.hint
        (used / "key").unlink()
        with pytest.raises(Unreachable, match=f"ETCD_AUTH_CLIENT_KEY: cannot read {key}"):
            await discovery.list()
        mount(second)
        assert await following(changes) == Listed((ENTRY,))
        await changes.aclose()
        await discovery.close()


@pytest.mark.parametrize("client", ["none", "expired", "foreign"])
async def test_a_client_certificate_that_the_server_refuses(tmp_path: Path, client: str):
    authority = Authority(tmp_path)
    given: dict[str, Any] = {}
    if client != "none":
        issuer = authority if client == "expired" else Authority(tmp_path, "other")
        paths = issuer.issue("client", expired=client == "expired")
        given = dict(zip(("cert", "key"), map(str, paths), strict=True))
    with closing(
        EtcdServer(tmp_path / "etcd", authority.issue("server"), authority.file)
    ) as server:
        await asyncio.to_thread(server.start)
        discovery = Etcd3Discovery([server.url], ca=str(authority.file), **given)
        with pytest.raises(Unreachable, match="does not accept the client certificate") as caught:
            await discovery.list()
        assert given.get("cert", "(not set)") in caught.value.hint
        await discovery.close()


async def test_an_expired_certificate_of_the_server(tmp_path: Path):
    authority = Authority(tmp_path)
    expired, good = authority.issue("expired", expired=True), authority.issue("good")
    with closing(EtcdServer(tmp_path / "etcd", good, authority.file)) as server:
        await asyncio.to_thread(server.start)
        # It reads its files again for each connection.
        for source, target in zip(expired, good, strict=True):
            shutil.copy(source, target)
        discovery = Etcd3Discovery([server.url], ca=str(authority.file))
        with pytest.raises(Unreachable, match="not trusted: certificate has expired"):
            await discovery.list()
        await discovery.close()


async def test_a_user_that_may_only_read_cannot_register(locked_server: EtcdServer):
    discovery = Etcd3Discovery([locked_server.url], user="observer", password="s3cret-p4ss")
    lease = await registrar_of(discovery).grant()
    with pytest.raises(AccessDenied, match=f"must not write {ENTRY.key}: .*permission") as caught:
        await lease.put(ENTRY.key, b"other")
    assert "grant-permission" in caught.value.hint
    await lease.close()
    await discovery.close()


def test_certificates_that_are_none(tmp_path: Path):
    with pytest.raises(UsageProblem, match="ETCD_AUTH_CA: cannot read"):
        Etcd3Discovery(["https://127.0.0.1"], ca=str(tmp_path / "none.pem"))
    odd = tmp_path / "odd.pem"
    odd.write_text("hello")
    with pytest.raises(UsageProblem, match="not a PEM file"):
        Etcd3Discovery(["https://127.0.0.1"], ca=str(odd))
    with pytest.raises(UsageProblem, match="must be set together"):
        Etcd3Discovery(["https://127.0.0.1"], cert=str(odd))
