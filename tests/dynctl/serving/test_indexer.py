"""`serve indexer`: registrations, answers, snapshots and who may change it."""

from __future__ import annotations

import asyncio
import functools
import os
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq.asyncio
from msgspec.structs import replace

from dynctl.documents.index_dump import RegisteredRank
from dynctl.health import conditions as codes
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.index_snapshot import NAME, REFUSED, SnapshotDirectory
from dynctl.serving.services.indexer import (
    QUERY,
    QUERY_BY_HASH,
    REGISTER,
    UNREGISTER,
    IndexerConfig,
    IndexerProcess,
)
from dynctl.wire.vllm_events import BlockStored
from tests.contract.zmq_publisher import ScriptedPublisher, batch
from tests.waiting import patience, until

BLOCK, MODEL = 2, "m"


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[IndexerProcess]:
    process = IndexerProcess(IndexerConfig(port=0, **settings))
    await process.start()
    try:
        yield process
    finally:
        await process.close()


@asynccontextmanager
async def publisher(**settings: Any) -> AsyncIterator[ScriptedPublisher]:
    context = zmq.asyncio.Context()
    made = ScriptedPublisher(context, **settings)
    try:
        yield made
    finally:
        await made.die()
        context.destroy(0)


async def call(
    process: IndexerProcess, method: str, path: str, body: Any = None, token: str | None = None
) -> tuple[int, Any]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, process.url + path, json=body) as response,
    ):
        return response.status, await response.json(content_type=None)


def held(process: IndexerProcess, instance_id: int = 1) -> int:
    """Blocks of the engine."""
    partition = process.index.partitions.get((MODEL, "default"))
    if partition is None or (instance_id, 0) not in partition.slots:
        return 0
    return partition.rank_size((instance_id, 0))


def engine(source: ScriptedPublisher) -> RegisteredRank:
    return RegisteredRank(1, 0, MODEL, "default", BLOCK, source.endpoint, source.replay_endpoint)


def block(number: int, name: int | None = None) -> BlockStored:
    """A prompt of one block."""
    return BlockStored((name or 1000 + number,), None, (number, number), BLOCK)


async def fill(source: ScriptedPublisher, process: IndexerProcess, numbers: range) -> None:
    for number in numbers:
        await source.send(number, batch(number, block(number), dp_rank=0))
    await until(lambda: held(process) == numbers.stop)


@pytest.mark.seed("router-guide: events: standalone indexer")
async def test_a_query_names_the_engines_that_hold_the_prompt() -> None:
    async with publisher() as source, running() as process:
        body = {"instance_id": 1, "endpoint": source.endpoint, "model_name": MODEL, "block_size": 2}
        assert await call(process, "POST", "/register", body) == (201, {"status": "ok"})
        await source.subscribed()
        stored = BlockStored((11, 12), None, (1, 2, 3, 4), BLOCK)
        await source.send(0, batch(0, stored, dp_rank=0))
        await until(lambda: held(process) == 2)
        asked = {"model_name": MODEL, "token_ids": [1, 2, 3, 4, 5, 6]}
        row = {"longest_matched": 4, "gpu": 4, "dp": {"0": 4}, "cpu": 4, "disk": 4}
        expected = {"scores": {"1": {"0": 4}}, "frequencies": [], "instances": {"1": row}}
        assert await call(process, "POST", "/query", asked) == (200, expected)
        status, dump = await call(process, "GET", "/dump")
        (event,) = dump["m:default"]["events"]
        assert (status, event["worker_id"], dump["m:default"]["block_size"]) == (200, 1, BLOCK)
        assert len(event["event"]["data"]["stored"]["blocks"]) == 2
        assert await call(process, "POST", "/unregister", {"instance_id": 1, "model_name": MODEL})
        assert (await call(process, "POST", "/query", asked))[0] == 404


async def test_changes_need_the_token_and_questions_do_not() -> None:
    async with running(token="secret-1") as process:
        body = {
            "instance_id": 1,
            "endpoint": "tcp://127.0.0.1:9",
            "model_name": "m",
            "block_size": 2,
        }
        for path in ("/register", "/unregister", "/register_peer"):
            assert (await call(process, "POST", path, body))[0] == 401
        assert (await call(process, "POST", "/register", body, "secret-1"))[0] == 201
        assert (await call(process, "GET", "/workers"))[0] == 200
        assert (await call(process, "POST", "/query", {"model_name": "m", "token_ids": []}))[
            0
        ] == 200
        assert (await call(process, "GET", "/v1/index"))[0] == 401


async def test_a_restart_continues_after_the_snapshot(tmp_path: Path) -> None:
    """What came meanwhile is read from the replay socket, and nothing that the snapshot has."""
    async with publisher(replay=True) as source:
        settings: dict[str, Any] = {"snapshot": tmp_path, "engines": (engine(source),)}
        async with running(**settings) as process:
            await source.subscribed()
            await fill(source, process, range(6))
        source.keep(6, batch(6, block(6), dp_rank=0))
        for old in range(5):
            del source.kept[old]
        source.asked.clear()
        # Registrations are in the snapshot too.
        async with running(snapshot=tmp_path) as process:
            await until(lambda: held(process) == 7)
            assert source.asked
            assert min(source.asked) >= 5
            assert [one.code for one in process.index.conditions] == []


async def test_another_process_of_the_engine_begins_empty(tmp_path: Path) -> None:
    async with publisher(replay=True) as source:
        settings: dict[str, Any] = {"snapshot": tmp_path, "engines": (engine(source),)}
        async with running(**settings) as process:
            await source.subscribed()
            await fill(source, process, range(6))
        source.kept.clear()
        for number in range(8):
            source.keep(number, batch(number, block(100 + number), life=1, dp_rank=0))
        async with running(**settings) as process:
            await until(lambda: held(process) == 8)
            partition = process.index.partitions[MODEL, "default"]
            stored = [event.event for event in partition.events()]
            assert {name for one in stored for name in one.block_hashes} == set(  # type: ignore[union-attr]
                range(1100, 1108)
            )


async def test_without_a_replay_socket_a_gap_after_the_restart_ends_the_old_index(
    tmp_path: Path,
) -> None:
    async with publisher() as source:
        settings: dict[str, Any] = {"snapshot": tmp_path, "engines": (engine(source),)}
        async with running(**settings) as process:
            await source.subscribed()
            await fill(source, process, range(6))
        async with running(**settings) as process:
            await until(lambda: held(process) == 6)
            async with asyncio.timeout(patience(10)):
                # A subscription reaches its publisher late; a batch that is sent again is nothing.
                while held(process) != 1:
                    await source.send(9, batch(9, block(9), dp_rank=0))
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("damage", ["flipped", "cut", "foreign", "empty"])
async def test_a_damaged_snapshot_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    async with publisher() as source:
        async with running(snapshot=tmp_path, engines=(engine(source),)) as process:
            await source.subscribed()
            await fill(source, process, range(4))
        file = tmp_path / NAME
        data = bytearray(file.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 1
        elif damage == "cut":
            del data[-5:]
        else:
            data = bytearray(b"" if damage == "empty" else b"something else, and long enough")
        file.write_bytes(data)
        async with running(snapshot=tmp_path) as process:
            assert process.index.registered() == []
            (condition,) = process.index.conditions
            assert condition.code == codes.SNAPSHOT_REFUSED
            assert str(file) in condition.message
            status, _ = await call(process, "GET", "/workers")
            assert status == 200
            assert (tmp_path / REFUSED).read_bytes() == data
            metrics = process.metrics.text()
        assert f'dynctl_condition{{code="SNAPSHOT_REFUSED",subject="{tmp_path}"}} 1' in metrics


async def test_a_snapshot_is_for_its_owner(tmp_path: Path) -> None:
    """Its hashes confirm a prompt that a reader guesses."""
    before = os.umask(0)
    try:
        async with publisher() as source:
            settings: dict[str, Any] = {"snapshot": tmp_path / "s", "engines": (engine(source),)}
            async with running(**settings) as process:
                await source.subscribed()
                await fill(source, process, range(3))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "s" / NAME).stat().st_mode) == 0o600


async def test_an_unfinished_snapshot_leaves_the_old_one(tmp_path: Path) -> None:
    async with publisher() as source:
        settings: dict[str, Any] = {"snapshot": tmp_path, "engines": (engine(source),)}
        async with running(**settings) as process:
            await source.subscribed()
            await fill(source, process, range(4))
        before = (tmp_path / NAME).read_bytes()

        def fails() -> Any:
            yield b"a part"
            raise OSError(28, "No space left on device")

        with pytest.raises(ValueError, match="no space is left"):
            await SnapshotDirectory(tmp_path).save(fails())
        assert os.listdir(tmp_path) == [NAME]
        assert (tmp_path / NAME).read_bytes() == before


async def test_a_directory_that_cannot_be_written_is_a_condition(tmp_path: Path) -> None:
    async with publisher() as source:
        (tmp_path / "file").write_text("not a directory")
        settings = {"snapshot": tmp_path / "file", "snapshot_interval_s": 0.05}
        async with running(engines=(engine(source),), **settings) as process:

            def reported() -> dict[str, str]:
                return {one.code: one.message for one in process.index.conditions}

            # From the start on, before there is anything to write.
            problem = f"{tmp_path / 'file'}: is a file; expected a directory"
            assert reported() == {codes.SNAPSHOT_NOT_WRITTEN: problem}
            (tmp_path / "file").unlink()
            (tmp_path / "file").mkdir()
            await source.subscribed()
            await fill(source, process, range(2))
            await until(lambda: not reported())


async def test_the_largest_rank_starts_again_above_the_bound() -> None:
    async with publisher() as source, running(engines=(engine(source),)) as process:
        process.index._most_blocks = 5_000
        await source.subscribed()
        names = tuple(range(1, 5_001))
        many = BlockStored(names, None, tuple(n % 97 for n in range(10_000)), BLOCK)
        other = BlockStored(
            tuple(range(5_001, 10_001)), None, tuple(n % 89 for n in range(10_000)), BLOCK
        )
        await source.send(0, batch(0, many, dp_rank=0))
        await source.send(1, batch(1, other, dp_rank=0))

        def dropped() -> bool:
            return any(one.code == codes.INDEX_OVER_LIMIT for one in process.index.conditions)

        await until(dropped)
        await until(lambda: held(process) < 5_000)


async def test_an_indexer_takes_the_index_of_its_peer() -> None:
    async with publisher() as source, running(engines=(engine(source),)) as first:
        await source.subscribed()
        await fill(source, first, range(5))
        async with running(engines=(engine(source),), peers=(first.url,)) as second:
            await until(lambda: held(second) == 5)
            async with asyncio.timeout(patience(10)):
                while not held(second) == held(first) == 6:
                    await source.send(5, batch(5, block(5), dp_rank=0))
                    await asyncio.sleep(0.01)


async def test_an_engine_that_leaves_takes_its_ranks_and_no_others() -> None:
    async with publisher() as source, running() as process:
        body = {"endpoint": source.endpoint, "model_name": MODEL, "block_size": 2}
        for instance in (1, 2):
            await call(process, "POST", "/register", {**body, "instance_id": instance})
        partition = process.index.partitions[MODEL, "default"]
        # A second subscription to one topic is not announced: the block is sent until both have it.
        async with asyncio.timeout(patience(10)):
            while set(partition.slots) != {(1, 0), (2, 0)}:
                await source.send(0, batch(0, block(0), dp_rank=0))
                await asyncio.sleep(0.01)
        gone = {"instance_id": 1, "model_name": MODEL, "routing_group": "default"}
        assert (await call(process, "POST", "/unregister", gone))[0] == 200
        assert set(partition.slots) == {(2, 0)}
        await until(lambda: partition.index.entry_count == 1)
        assert process.index.partitions[MODEL, "default"] is partition


async def test_a_rank_can_leave_alone() -> None:
    async with publisher() as source, running() as process:
        body = {"instance_id": 1, "endpoint": source.endpoint, "model_name": MODEL, "block_size": 2}
        await call(process, "POST", "/register", body)
        await call(process, "POST", "/register", {**body, "dp_rank": 1})
        await source.subscribed()
        await asyncio.gather(
            source.send(0, batch(0, block(0), dp_rank=0)),
            source.send(1, batch(1, block(1), dp_rank=1)),
        )
        partition = process.index.partitions[MODEL, "default"]
        await until(lambda: set(partition.slots) == {(1, 0), (1, 1)})
        gone = {"instance_id": 1, "model_name": MODEL, "routing_group": "default", "dp_rank": 1}
        assert (await call(process, "POST", "/unregister", gone))[0] == 200
        assert set(partition.slots) == {(1, 0)}
        assert [one.dp_rank for one in process.index.registered()] == [0]


async def test_a_publisher_of_junk_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with publisher() as junk, publisher() as good:
        other = replace(engine(good), worker_id=2)
        async with running(engines=(engine(junk), other)) as process:
            await junk.subscribed()
            await good.subscribed()
            await good.send(0, batch(0, block(0), dp_rank=0))
            await until(lambda: held(process, 2) == 1)
            caplog.set_level("WARNING", "dynctl.serving.routing.standalone_index")

            def reported(count: int) -> bool:
                found = process.index.conditions.get("MALFORMED_BATCH", "instance 1 rank 0")
                return found is not None and found.count == count

            sent = 1_000
            for number in range(sent):
                text = b"junk %d" % number
                await junk.raw(b"", number.to_bytes(8, "big"), b"\xc1" + text)
                await junk.raw(text)
                if number % 100 == 99:  # a publisher drops what does not fit into its queue
                    await until(functools.partial(reported, number + 1))
            lines = [one.getMessage().split()[0] for one in caplog.records]
            assert 0 < lines.count("MALFORMED_BATCH") < sent // 5
            assert len(lines) < sent // 2
            # The other engine is followed as before.
            await good.send(1, batch(1, block(1), dp_rank=0))
            await until(lambda: held(process, 2) == 2)


async def test_idle_connections_keep_no_query_out() -> None:
    async with running(limits=Limits(peer_connections=8)) as process:
        idle = [await asyncio.open_connection("127.0.0.1", process.port) for _ in range(200)]
        try:
            status, _ = await call(process, "GET", "/workers")
            assert status == 200
            open_now = [one for one, _ in idle if not one.at_eof() and one.exception() is None]
            assert len(open_now) <= 8
        finally:
            for _, writer in idle:
                writer.close()


async def test_dumps_that_are_not_read_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dump is as large as the index, and every client may request one."""
    monkeypatch.setattr(
        "dynctl.serving.services.indexer._written_dump", lambda _: b"1" * (32 << 20)
    )
    async with running(dump_s=patience(1.0)) as process, AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        # Three quarters of four; each keeps its connection, and reads no more than its head.
        unread = [
            await stack.enter_async_context(session.get(process.url + "/dump")) for _ in "123"
        ]
        assert [answer.status for answer in unread] == [200, 200, 200]
        status, body = await call(process, "GET", "/dump")
        assert (status, body["error"]["code"]) == (503, "index_busy")
        await until(lambda: not process.dumps)
        with pytest.raises(aiohttp.ClientPayloadError):  # cut in the middle
            await unread[0].read()
        async with session.get(process.url + "/dump") as answer:
            assert len(await answer.read()) == 32 << 20


async def test_registrations_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynctl.serving.services.indexer.descriptors", lambda: 256 + 3 * 2)
    async with running() as process:
        body = {"model_name": MODEL, "block_size": BLOCK, "endpoint": "tcp://127.0.0.1:9"}
        answers = [
            await call(process, "POST", "/register", {**body, "instance_id": number})
            for number in (1, 2, 3)
        ]
        assert [status for status, _ in answers] == [201, 201, 409]
        assert "2 ranks are registered, the maximum" in str(answers[2][1])
        assert (
            await call(process, "POST", "/unregister", {"instance_id": 1, "model_name": MODEL})
        )[0] == 200
        assert (await call(process, "POST", "/register", {**body, "instance_id": 3}))[0] == 201


@pytest.mark.parametrize("path", ["/register", "/unregister", "/query", "/query_by_hash"])
async def test_a_whole_number_of_any_size_is_refused_by_name(path: str) -> None:
    shape = {
        "/register": REGISTER,
        "/unregister": UNREGISTER,
        "/query": QUERY,
        "/query_by_hash": QUERY_BY_HASH,
    }[path]
    async with running() as process, aiohttp.ClientSession() as session:
        for name in shape.fields:
            for value in (10**401, -(10**401), [10**401]):
                async with session.post(process.url + path, json={name: value}) as response:
                    assert 400 <= response.status < 500, (name, value)
                    assert name in await response.text()
