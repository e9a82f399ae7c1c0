import asyncio
import os
import time
from pathlib import Path

import pytest

from dynctl.adapters import file as discovery_file
from dynctl.adapters.file import FileDiscovery
from dynctl.adapters.ports import Deleted, DiscoveryEntry, Interrupted, Listed, Put
from dynctl.base.errors import Unreachable
from dynctl.wire.dynamo.discovery import MAX_VALUE_BYTES
from tests.waiting import patience

NAME = "dynamo%2Fbackend%2Fworker%5Fkv%5Fquery%2F5c98b0ce686c762c"
KEY = "v1/instances/dynamo/backend/worker_kv_query/5c98b0ce686c762c"


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "v1" / "instances"
    folder.mkdir(parents=True)
    return folder


def discovery_of(root: Path, clock: Clock) -> FileDiscovery:
    return FileDiscovery(root, poll_s=0.01, clock=clock, monotonic=clock)


async def keys(discovery: FileDiscovery) -> list[str]:
    listed = await discovery.list()
    await discovery.close()
    return [entry.key for entry in listed.entries]


async def test_names_become_logical_keys(bucket: Path, tmp_path: Path, clock: Clock):
    (bucket / NAME).write_bytes(b"{}")
    assert await keys(discovery_of(tmp_path, clock)) == [KEY]


async def test_an_entry_is_gone_when_its_time_is_over_and_its_file_stays(
    bucket: Path, tmp_path: Path, clock: Clock
):
    path = bucket / NAME
    path.write_bytes(b"{}")
    os.utime(path, (clock.now, clock.now))
    discovery = discovery_of(tmp_path, clock)
    changes = discovery.watch()
    assert await anext(changes) == Listed((DiscoveryEntry(KEY, b"{}"),))
    clock.now += 11
    assert await anext(changes) == Deleted(KEY)
    assert path.read_bytes() == b"{}"
    os.utime(path, (clock.now, clock.now))
    assert await anext(changes) == Put(DiscoveryEntry(KEY, b"{}"))
    await changes.aclose()
    await discovery.close()


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_clock_that_is_set_ends_no_entry_and_keeps_none(
    bucket: Path, tmp_path: Path, clock: Clock, jump: float
):
    running = Clock()
    discovery = FileDiscovery(tmp_path, poll_s=0.01, clock=clock, monotonic=running)
    changes = discovery.watch()
    for name in ("kept", "left"):
        (bucket / name).write_bytes(b"{}")
        os.utime(bucket / name, (clock.now, clock.now))
    first = await anext(changes)
    assert isinstance(first, Listed)
    assert len(first.entries) == 2
    clock.now += jump
    (bucket / "new").write_bytes(b"{}")
    os.utime(bucket / "new", (clock.now, clock.now))
    assert await anext(changes) == Put(DiscoveryEntry("v1/instances/new", b"{}"))
    running.now += 9  # both clocks go on; the one that is kept was touched meanwhile
    clock.now += 9
    os.utime(bucket / "kept", (clock.now, clock.now))
    os.utime(bucket / "new", (clock.now, clock.now))
    (bucket / "newer").write_bytes(b"{}")
    os.utime(bucket / "newer", (clock.now, clock.now))
    assert await anext(changes) == Put(DiscoveryEntry("v1/instances/newer", b"{}"))
    running.now += 2
    clock.now += 2
    assert await anext(changes) == Deleted("v1/instances/left")
    os.utime(bucket / "left", (clock.now, clock.now))
    assert await anext(changes) == Put(DiscoveryEntry("v1/instances/left", b"{}"))
    await changes.aclose()
    await discovery.close()


async def test_a_restart_tells_what_is_gone_first(bucket: Path, tmp_path: Path, clock: Clock):
    """And what is new, oldest first, when one look finds all of it."""
    (bucket / "old").write_bytes(b"{}")
    discovery = FileDiscovery(tmp_path, poll_s=0.2, clock=clock, monotonic=clock)
    changes = discovery.watch()
    await anext(changes)
    (bucket / "b").write_bytes(b"1")
    (bucket / "a").write_bytes(b"2")
    os.utime(bucket / "b", (clock.now - 2, clock.now - 2))
    (bucket / "old").unlink()
    assert [await anext(changes) for _ in range(3)] == [
        Deleted("v1/instances/old"),
        Put(DiscoveryEntry("v1/instances/b", b"1")),
        Put(DiscoveryEntry("v1/instances/a", b"2")),
    ]
    await changes.aclose()
    await discovery.close()


async def test_a_time_in_the_future_is_alive(bucket: Path, tmp_path: Path, clock: Clock):
    (bucket / NAME).write_bytes(b"{}")
    os.utime(bucket / NAME, (clock.now + 10_000, clock.now + 10_000))
    assert await keys(discovery_of(tmp_path, clock)) == [KEY]


async def test_what_is_no_entry_is_skipped(bucket: Path, tmp_path: Path, clock: Clock):
    (bucket / NAME).write_bytes(b"{}")
    (bucket / ".tmp_0123456789abcdef").write_bytes(b"half")
    (bucket / "folder").mkdir()
    os.mkfifo(bucket / "pipe")
    (tmp_path / "elsewhere").write_bytes(b"secret")
    (bucket / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "v1" / "stray").write_bytes(b"{}")
    assert await asyncio.wait_for(keys(discovery_of(tmp_path, clock)), patience(5)) == [KEY]


async def test_a_file_that_we_may_not_read_is_an_entry_without_a_value(
    bucket: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Simulated, since the superuser may read everything."""
    (bucket / NAME).write_bytes(b"{}")
    (bucket / "forbidden").write_bytes(b"{}")
    real_open = os.open

    def guarded(path: str, flags: int, *others: int) -> int:
        if str(path).endswith("forbidden"):
            raise PermissionError(13, "Permission denied")
        return real_open(path, flags, *others)

    monkeypatch.setattr(os, "open", guarded)
    discovery = discovery_of(tmp_path, clock)
    listed = await discovery.list()
    assert {entry.key: entry.value for entry in listed.entries} == {
        KEY: b"{}",
        "v1/instances/forbidden": b"",
    }
    await discovery.close()


async def test_a_value_that_is_too_large_is_cut_behind_the_limit(
    bucket: Path, tmp_path: Path, clock: Clock
):
    with (bucket / NAME).open("wb") as file:
        file.truncate(MAX_VALUE_BYTES * 3)
    discovery = discovery_of(tmp_path, clock)
    [entry] = (await discovery.list()).entries
    assert len(entry.value) == MAX_VALUE_BYTES + 1
    await discovery.close()


async def test_two_names_of_one_key_are_one_steady_entry(
    bucket: Path, tmp_path: Path, clock: Clock
):
    (bucket / "a%2Fb").write_bytes(b"1")
    (bucket / "a%2fb").write_bytes(b"2")
    discovery = discovery_of(tmp_path, clock)
    changes = discovery.watch()
    assert await anext(changes) == Listed((DiscoveryEntry("v1/instances/a/b", b"1"),))
    await asyncio.sleep(0.05)
    (bucket / "c").write_bytes(b"3")
    assert await anext(changes) == Put(DiscoveryEntry("v1/instances/c", b"3"))
    await changes.aclose()
    await discovery.close()


async def test_a_missing_root_names_itself_and_what_sets_it(tmp_path: Path, clock: Clock):
    discovery = discovery_of(tmp_path / "none", clock)
    with pytest.raises(Unreachable) as caught:
        await discovery.list()
    assert str(tmp_path / "none") in caught.value.message
    assert "DYN_FILE_KV" in caught.value.hint
    assert "--file-kv" in caught.value.hint
    await discovery.close()


async def test_a_root_that_is_a_file(tmp_path: Path, clock: Clock):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unreachable, match="is not a directory"):
        await discovery_of(tmp_path / "file", clock).list()


async def test_a_root_where_nothing_is_registered_yet(tmp_path: Path, clock: Clock):
    assert await keys(discovery_of(tmp_path, clock)) == []


async def test_a_root_that_goes_and_comes_back(bucket: Path, tmp_path: Path, clock: Clock):
    (bucket / NAME).write_bytes(b"{}")
    root, away = tmp_path, tmp_path.with_name(tmp_path.name + "-away")
    discovery = discovery_of(root, clock)
    changes = discovery.watch()
    assert await anext(changes) == Listed((DiscoveryEntry(KEY, b"{}"),))
    root.rename(away)
    interrupted = await anext(changes)
    assert isinstance(interrupted, Interrupted)
    assert str(root) in interrupted.reason
    away.rename(root)
    assert await anext(changes) == Listed((DiscoveryEntry(KEY, b"{}"),))
    await changes.aclose()
    await discovery.close()


async def test_too_many_entries_are_refused(
    bucket: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(discovery_file, "MAX_ENTRIES", 2)
    for number in range(3):
        (bucket / str(number)).write_bytes(b"{}")
    discovery = discovery_of(tmp_path, clock)
    with pytest.raises(Unreachable, match="more than 2 entries"):
        await discovery.list()
    await discovery.close()


async def test_unchanged_files_are_not_read_again(
    bucket: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    for number in range(20):
        (bucket / str(number)).write_bytes(b"{}")
    reads: list[str] = []
    real_read = discovery_file._read

    def counted(path: str) -> bytes | None:
        reads.append(path)
        return real_read(path)

    monkeypatch.setattr(discovery_file, "_read", counted)
    discovery = discovery_of(tmp_path, clock)
    changes = discovery.watch()
    await anext(changes)
    await asyncio.sleep(0.05)
    (bucket / "new").write_bytes(b"{}")
    await anext(changes)
    assert len(reads) == 21
    await changes.aclose()
    await discovery.close()
