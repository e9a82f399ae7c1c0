"""One set of tests for every discovery backend: what one does, all do."""

import asyncio
import gc
import os
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from dynctl.adapters.etcd.grpc import Etcd3Discovery
from dynctl.adapters.file import FileDiscovery
from dynctl.adapters.kubernetes.discovery import KubernetesDiscovery
from dynctl.adapters.memory import MemoryDiscovery
from dynctl.adapters.ports import Deleted, Discovery, DiscoveryChange, DiscoveryEntry, Listed, Put
from tests.contract.etcd_server import EtcdServer
from tests.dynctl.adapters.kube_lab import (
    DEFINITION,
    NAMESPACE,
    endpoint,
    endpoint_slice,
    metadata,
    opened,
)
from tests.kube.api_server import ApiServer
from tests.waiting import patience

KEY = "v1/instances/dyn-amo/back_end/generate/f50496f06b4ba43b"
"""An id above 2**63, and characters that the file backend encodes."""
CARD = "v1/mdc/dyn-amo/back_end/generate/f50496f06b4ba43b"
VALUE = '{"instance_id":17655340255331378299,"name":"Ünïcode ✓ \\u0000"}'.encode()


class Backend(Protocol):
    """Somebody else who registers, and what there is to know of the store's untouched state.

    ``owner`` is whom the store takes to have registered a key.
    """

    opaque: bytes
    """The strangest value that the store takes."""

    def put(self, key: str, value: bytes) -> None: ...
    def delete(self, key: str) -> None: ...
    def keep_alive(self, key: str) -> None: ...
    def fingerprint(self) -> object: ...
    def owner(self, key: str) -> str: ...
    def discovery(self) -> Discovery: ...


class _Memory:
    opaque = b"not json \xff"

    def __init__(self) -> None:
        self._discovery = MemoryDiscovery()
        self.put = self._discovery.put
        self.delete = self._discovery.delete
        self._values: dict[str, bytes] = {}

    def keep_alive(self, key: str) -> None:
        self.put(key, VALUE)

    def owner(self, key: str) -> str:
        return ""

    def fingerprint(self) -> object:
        return None

    def discovery(self) -> Discovery:
        return self._discovery


class _Files:
    """As Dynamo does it: a temporary file, renamed."""

    opaque = b"not json \xff"

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir()

    def _path(self, key: str) -> Path:
        version, bucket, rest = key.split("/", 2)
        name = "".join(c if c.isalnum() and c.isascii() else _percent(c) for c in rest)
        return self._root / version / bucket / name

    def put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / ".tmp_0123456789abcdef"
        temporary.write_bytes(value)
        temporary.rename(path)

    def delete(self, key: str) -> None:
        self._path(key).unlink()

    def keep_alive(self, key: str) -> None:
        os.utime(self._path(key))

    def owner(self, key: str) -> str:
        return ""

    def fingerprint(self) -> object:
        found = {}
        for path in sorted(self._root.rglob("*")):
            status = path.stat()
            found[str(path)] = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        return found, self._root.stat().st_mtime_ns

    def discovery(self) -> Discovery:
        return FileDiscovery(self._root, ttl_s=60, poll_s=0.02)


class _Etcd:
    opaque = b"not json \xff"

    def __init__(self, server: EtcdServer) -> None:
        self._server = server
        self.put = server.put
        self.delete = server.delete

    def keep_alive(self, key: str) -> None:
        """A publisher that writes the same again; a lease that is kept alive is not even seen."""
        self._server.put(key, VALUE)

    def owner(self, key: str) -> str:
        return ""

    def fingerprint(self) -> object:
        return self._server.revision(), self._server.leases()

    def discovery(self) -> Discovery:
        return Etcd3Discovery([self._server.url])


_BUCKETS = {"instances": "endpoints", "mdc": "model_cards"}
_WORKERS = 8


class _Kubernetes:
    """A few workers whose pods are ready; what is registered is spread over their metadata."""

    opaque = b'[null,{"deep":[1.5]},"\xc3\xbc"]'
    """Values lie in an object of the API, so they are JSON."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        pods = [f"w-{number}" for number in range(_WORKERS)]
        server.store.create(DEFINITION)
        server.store.create(endpoint_slice("workers", [endpoint(pod, pod) for pod in pods]))
        for pod in pods:
            server.store.create(metadata(pod, {}, uid=pod))

    def _set(self, key: str, value: object) -> None:
        _, bucket, rest = key.split("/", 2)
        self._patch(key, {"spec": {"data": {_BUCKETS[bucket]: {rest: value}}}})

    def _patch(self, key: str, patch: dict[str, object]) -> None:
        name = self.owner(key)
        self._server.store.patch_merge("dynamoworkermetadatas", name, patch, NAMESPACE)

    def owner(self, key: str) -> str:
        return f"w-{zlib.crc32(key.encode()) % _WORKERS}"

    def put(self, key: str, value: bytes) -> None:
        self._set(key, msgspec.json.decode(value))

    def delete(self, key: str) -> None:
        self._set(key, None)

    def keep_alive(self, key: str) -> None:
        """Another revision of the object with the same data in it."""
        revision = str(self._server.store.revision)
        self._patch(key, {"metadata": {"annotations": {"touched": revision}}})

    def fingerprint(self) -> object:
        return self._server.store.revision

    def discovery(self) -> Discovery:
        return KubernetesDiscovery(opened(self._server, self._folder), NAMESPACE, debounce_s=0.02)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture(params=["memory", "file", "etcd", "kubernetes"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "kubernetes":
        return _Kubernetes(request.getfixturevalue("api_server"), tmp_path)
    if request.param == "memory":
        return _Memory()
    if request.param == "file":
        return _Files(tmp_path / "store")
    server: EtcdServer = request.getfixturevalue("etcd")
    server.clear()
    return _Etcd(server)


@asynccontextmanager
async def watched(discovery: Discovery) -> AsyncIterator[Callable[[], Awaitable[DiscoveryChange]]]:
    """The next change, on demand; bounded, so that a missing one fails instead of hanging."""
    changes = discovery.watch()

    async def following() -> DiscoveryChange:
        return await asyncio.wait_for(anext(changes), patience(10))

    try:
        yield following
    finally:
        await changes.aclose()
        await discovery.close()


def put(backend: Backend, key: str, value: bytes) -> Put:
    return Put(DiscoveryEntry(key, value, backend.owner(key)))


def as_dict(listed: object) -> dict[str, bytes]:
    assert isinstance(listed, Listed)
    found = {entry.key: entry.value for entry in listed.entries}
    assert len(found) == len(listed.entries)
    return found


async def test_an_empty_store_is_an_empty_list(backend: Backend):
    discovery = backend.discovery()
    assert await discovery.list() == Listed(())
    await discovery.close()


async def test_lists_keys_and_values_as_they_were_registered(backend: Backend):
    backend.put(KEY, VALUE)
    backend.put(CARD, backend.opaque)
    discovery = backend.discovery()
    assert as_dict(await discovery.list()) == {KEY: VALUE, CARD: backend.opaque}
    assert as_dict(await discovery.list()) == {KEY: VALUE, CARD: backend.opaque}
    await discovery.close()


async def test_the_title_names_the_backend(backend: Backend):
    discovery = backend.discovery()
    assert discovery.title.split()[0] in ("memory", "file", "etcd", "kubernetes")
    await discovery.close()


async def test_watch_begins_with_a_list_and_then_gives_changes_in_order(backend: Backend):
    backend.put(KEY, b"1")
    async with watched(backend.discovery()) as following:
        assert as_dict(await following()) == {KEY: b"1"}
        backend.put(CARD, b"{}")
        assert await following() == put(backend, CARD, b"{}")
        backend.put(KEY, b"2")
        assert await following() == put(backend, KEY, b"2")
        backend.delete(KEY)
        assert await following() == Deleted(KEY)
        backend.put(KEY, b"3")
        assert await following() == put(backend, KEY, b"3")


async def test_a_keep_alive_is_no_change(backend: Backend):
    backend.put(KEY, VALUE)
    async with watched(backend.discovery()) as following:
        assert as_dict(await following()) == {KEY: VALUE}
        for _ in range(5):
            backend.keep_alive(KEY)
            await asyncio.sleep(0.05)
        backend.put(CARD, b"{}")
        assert await following() == put(backend, CARD, b"{}")


async def test_two_readers_see_the_same(backend: Backend):
    discovery = backend.discovery()
    first, second = discovery.watch(), discovery.watch()
    assert await anext(first) == await anext(second) == Listed(())
    backend.put(KEY, VALUE)
    assert await anext(first) == await anext(second) == put(backend, KEY, VALUE)
    await first.aclose()
    backend.delete(KEY)
    assert await anext(second) == Deleted(KEY)
    await second.aclose()
    await discovery.close()


async def test_a_thousand_entries(backend: Backend):
    expected = {f"v1/instances/ns/c/e/{number:x}": b"%d" % number for number in range(1000)}
    for key, value in expected.items():
        backend.put(key, value)
    async with watched(backend.discovery()) as following:
        assert as_dict(await following()) == expected
        for key in list(expected)[:300]:
            backend.put(key, b'"new"')
        seen = [await following() for _ in range(300)]
        assert {change.entry.key for change in seen if isinstance(change, Put)} == set(
            list(expected)[:300]
        )


async def test_entries_of_a_megabyte(backend: Backend):
    expected = {
        f"v1/mdc/ns/c/e/{number}": b'"%s"' % (b"%d" % number * 1_000_000) for number in range(8)
    }
    for key, value in expected.items():
        backend.put(key, value)
    discovery = backend.discovery()
    assert as_dict(await discovery.list()) == expected
    await discovery.close()


async def test_observing_writes_nothing(backend: Backend):
    backend.put(KEY, VALUE)
    before = backend.fingerprint()
    discovery = backend.discovery()
    await discovery.list()
    async with watched(discovery) as following:
        await following()
        await asyncio.sleep(0.2)
    assert backend.fingerprint() == before


async def test_close_ends_a_watch_that_waits(backend: Backend):
    discovery = backend.discovery()
    changes = discovery.watch()
    assert await anext(changes) == Listed(())
    waiting = asyncio.ensure_future(_rest(changes))
    await asyncio.sleep(0.05)
    await discovery.close()
    assert await asyncio.wait_for(waiting, patience(10)) == []


@pytest.mark.parametrize("ending", ["aclose", "cancel", "close"])
async def test_nothing_is_left_behind(backend: Backend, ending: str):
    await _warm_up(backend)
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    threads, sockets, tasks = set(threading.enumerate()), _sockets(), asyncio.all_tasks()
    discovery = backend.discovery()
    await discovery.list()
    changes = discovery.watch()
    assert await anext(changes) == Listed(())
    if ending == "cancel":
        await _cancel_a_reader(changes)
    elif ending == "aclose":
        await changes.aclose()
    await discovery.close()
    await changes.aclose()

    def left() -> object:
        return (
            {thread for thread in threading.enumerate() if thread not in threads},
            _sockets() - sockets,
            asyncio.all_tasks() - tasks,
        )

    for _ in range(250):
        if left() == (set(), set(), set()):
            break
        await asyncio.sleep(0.02)
    assert left() == (set(), set(), set())
    gc.collect()
    assert complaints == []


async def _rest(changes: AsyncIterator[DiscoveryChange]) -> list[DiscoveryChange]:
    return [change async for change in changes]


async def _cancel_a_reader(changes: AsyncIterator[DiscoveryChange]) -> None:
    """In a function of its own, so that nothing of the cancelled task is alive afterwards."""
    waiting = asyncio.ensure_future(_rest(changes))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def _warm_up(backend: Backend) -> None:
    """What a library keeps for the whole process is there from its first use."""
    if isinstance(backend, _Etcd | _Kubernetes):
        discovery = backend.discovery()
        await discovery.list()
        await discovery.close()


def _sockets() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
