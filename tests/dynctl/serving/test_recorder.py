"""Recording a frontend while it works: all that it does is there, and routes again the same way."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.base.tasks import end_tasks
from dynctl.documents import recording_file
from dynctl.documents.codec import encode
from dynctl.documents.recording import (
    Arrived,
    Changed,
    Decided,
    Finished,
    Noted,
    Record,
    Start,
    State,
)
from dynctl.documents.recording_file import RecordingFile, read_recording, recording_report
from dynctl.health.conditions import BACKGROUND_TASK_FAILED
from dynctl.health.hits import hits
from dynctl.serving.records import recorder as recorder_module
from dynctl.serving.records.recorder import (
    FileSink,
    Recorder,
    Recordings,
    old_of,
    reports_caches,
)
from dynctl.sources.client import FrontendClient
from dynctl.sources.frontend.recording import stream_recording
from dynctl.sources.recording import replayed
from dynctl.sources.thresholds.canary import announce
from dynctl.sources.thresholds.replicas import Replica
from router_core import Booked, Freed, KvEvent, ThresholdsSet
from tests.dynctl.serving.fleets import WORDS, Site, site, zone
from tests.router_core.fleet import worker
from tests.waiting import until

PROMPTS = [WORDS * 4, WORDS * 8, "another beginning " + WORDS * 6]
SECRETS = ("quick brown", "another beginning", "salt-of-a-tenant", "t0ken", "sk-secret")


async def started(fleet: Site) -> Recorder:
    """The recorder of the frontend, once it gets every change."""
    await until(
        lambda: bool(fleet.frontend.administration.recordings.active and fleet.service.taps)
    )
    return fleet.frontend.administration.recordings.active[0]


async def traffic(fleet: Site, rounds: int = 4) -> None:
    for turn in range(rounds):
        texts = [text + f" question {turn % 2}" for text in PROMPTS]
        answers = await asyncio.gather(
            *(fleet.chat(t, cache_salt="salt-of-a-tenant" if i == 1 else None, max_tokens=40)
              for i, t in enumerate(texts))
        )  # fmt: skip
        assert [status for status, _, _ in answers] == [200] * len(texts)
    await fleet.idle()


def of(kind: type[Any], records: list[Record]) -> list[Any]:
    return [one for one in records if isinstance(one, kind)]


def changes(kind: type[Any], records: list[Record]) -> list[Any]:
    return [one.change for one in of(Changed, records) if isinstance(one.change, kind)]


@pytest.mark.parametrize("split", [False, True], ids=["aggregated", "disaggregated"])
@pytest.mark.seed("dynamo-1.6: operation: recording")
async def test_a_recorded_frontend_routes_again_the_same_way(tmp_path: Path, split: bool):
    path = tmp_path / "r.dynrec"
    engines: list[dict[str, Any]] = [{"name": f"a{i}"} for i in range(3)]
    if split:
        engines = [
            {"name": f"{role}-{z}", "role": role, **zone(z)}
            for role in ("prefill", "decode")
            for z in ("a", "b")
        ]
    async with site(engines, record=path) as fleet:
        await fleet.connected()
        recorder = await started(fleet)
        await traffic(fleet)
        fleet.service.apply(ThresholdsSet("demo", {"active_prefill_tokens_threshold": 10_000}))
        ids = {one.id for one in fleet.frontend.core.memory.recent(100)}
        decisions = [one.plan for one in fleet.frontend.core.memory.recent(100)]
    records = list(read_recording(path))
    assert recorder.lost == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    assert isinstance(records[0], Start)
    assert records[0].source == "frontend"
    assert records[0].block_sizes == {"demo": 16}
    assert isinstance(records[1], State)
    times = [one.at for one in records]
    assert times == sorted(times)
    arrived, decided, finished = (of(kind, records) for kind in (Arrived, Decided, Finished))
    assert {one.id for one in arrived} == ids == {one.id for one in finished}
    assert {one.id for one in decided} == ids
    tenants = {one.tenant for one in arrived}
    assert len(tenants) == 2
    assert "" in tenants
    assert {one.salted for one in arrived if one.tenant} == {True}
    assert all(len(one.hashes) == one.isl_tokens // 16 for one in arrived)
    assert {one.output_limit for one in arrived} == {40}
    by_id = {plan.id: plan for plan in decisions}
    for one in decided:
        plan = by_id[one.id]
        assert one.decode == plan.final.ref
        assert one.prefill == (None if plan.prefill is None else plan.prefill.ref)
        assert one.cached_blocks <= one.best_cached_blocks
    assert all(one.status == 200 and one.outcome == "success" for one in finished)
    # The responses come as a whole, so no time of a first token is known.
    assert all(one.ttft_s is None and one.cached_tokens is not None for one in finished)
    assert changes(KvEvent, records)
    assert len(changes(Booked, records)) == len(arrived) * (2 if split else 1)
    assert len(changes(Freed, records)) >= len(arrived)
    assert changes(ThresholdsSet, records)
    assert isinstance(records[-1], Noted)
    assert (records[-1].kind, records[-1].text) == ("stopped", "the process ended")

    again = replayed(records)
    assert again.differ == []
    assert again.same + sum(again.skipped.values()) == len(changes(Booked, records))
    assert again.same == len(changes(Booked, records))

    data = b"".join(_plain(path))
    for secret in SECRETS:
        assert secret.encode() not in data


async def test_hits_names_the_part_of_a_prompt_that_changed_and_no_file_has_its_text(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.dynrec"
    tool = {"type": "function", "function": {"name": "brown", "parameters": {"type": "object"}}}
    rules, question, more = (f"{name} {WORDS * 3}" for name in ("rules", "question", "more"))

    async def send(fleet: Site, *texts: str, **fields: Any) -> None:
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        body = {"model": "demo", "messages": chat, "max_tokens": 2, **fields}
        status, answer, _ = await fleet.post("/v1/chat/completions", body)
        assert status == 200, answer
        await fleet.followed()

    async with site([{"name": "a0"}], record=path) as fleet:
        await fleet.connected()
        recorder = await started(fleet)
        tokenizer = fleet.service.preparation.tokenizers.of("demo")
        assert tokenizer is not None
        await until(lambda: tokenizer.fingerprint in recorder._segments._marks)
        await send(fleet, rules, question, more, question)
        # The dog and the fox have as many tokens: text behind them stays in its blocks.
        assert len(tokenizer.encode(rules)) == len(tokenizer.encode(rules.replace("fox", "dog", 1)))
        await send(fleet, rules.replace("fox", "dog", 1), question, more, question)
        await send(fleet, rules, question.replace("fox", "dog", 1), more, question)
        await send(fleet, rules, question, tools=[tool])
        await fleet.idle()
        shown = await fleet.get("/v1/decisions")
    records = list(read_recording(path))
    parts = [one.segments for one in of(Arrived, records)]
    assert [kind for kind, _ in parts[0]] == ["system", "user", "assistant", "user", "assistant"]
    assert [kind for kind, _ in parts[-1]] == ["system", "tools", "user", "assistant"]
    assert all(0 <= at < 10_000 for one in parts for _, at in one)
    report = hits(records)
    changed = {cause.cause: cause.segments for cause in report.largest if cause.breaks}
    assert changed["front"]["system"] > 10 * 16
    assert changed["front"].keys() <= {"system", "tools"}
    assert changed["edited"].keys() == {"turn 1 (user)"}
    data = b"".join(_plain(path)) + encode(report) + str(shown).encode()
    for secret in ("quick brown", "lazy dog", "rules", "question", "brown"):
        assert secret.encode() not in data


def _plain(path: Path) -> list[bytes]:
    import zlib

    data = path.read_bytes()
    headers = list(RecordingFile(path).headers())
    payloads = [data[h.end - h.length : h.end] for h in headers]
    hashes = [4 + 8 * int.from_bytes(one[:4], "little") for one in payloads]
    return [
        one[:end] + zlib.decompress(one[end:]) for one, end in zip(payloads, hashes, strict=True)
    ]


async def test_nothing_is_left_of_a_recording_that_ended(tmp_path: Path):
    async with site([{"name": "a0"}]) as fleet:
        before = list(fleet.service.observers)
        assert fleet.service.taps == ()
        sink = FileSink(tmp_path / "r")
        running = asyncio.create_task(fleet.frontend.administration.recordings.record(sink))
        recorder = await started(fleet)
        await traffic(fleet, 1)
        recorder.stop()
        assert (await running).records > 0
        sink.close()
        assert fleet.service.taps == ()
        assert list(fleet.service.observers) == before
        assert fleet.frontend.administration.recordings.active == []


async def test_a_client_streams_a_recording_of_whole_chunks(tmp_path: Path):
    path = tmp_path / "r"
    async with site([{"name": "a0"}], api_token="t0ken") as fleet:
        await fleet.connected()

        def copy(token: str | None, to: Path, seconds: int) -> str:
            return stream_recording(
                fleet.frontend.url, token, to, timeout=10, seconds=seconds, max_bytes=1 << 20
            )

        with pytest.raises(UsageProblem, match=r"/v1/recording needs a token \(401\)$"):
            await asyncio.to_thread(copy, None, tmp_path / "no", 1)
        assert not (tmp_path / "no").exists()
        reading = asyncio.create_task(asyncio.to_thread(copy, "t0ken", path, 2))
        await started(fleet)
        await traffic(fleet, 1)
        assert await reading == ""
        with pytest.raises(UsageProblem, match="the file exists"):
            await asyncio.to_thread(copy, "t0ken", path, 1)
        await until(lambda: fleet.frontend.administration.recordings.active == [])
    records = list(read_recording(path))
    assert isinstance(records[-1], Noted)
    assert records[-1].text == "the recording lasted 2 s, as it was set"
    assert len(of(Finished, records)) == len(PROMPTS)
    assert replayed(records).differ == []
    report = recording_report(path)
    assert report.records["Arrived"] == len(PROMPTS)
    assert report.missing == []


async def test_a_full_disk_ends_a_recording_at_a_whole_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk takes 5,000 bytes: the last write is cut, the next one refused."""
    path, space, real = tmp_path / "r", 5_000, os.write

    def write(file: int, data: bytes) -> int:
        nonlocal space
        if os.readlink(f"/proc/self/fd/{file}") != str(path):
            return real(file, data)
        if space <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(file, bytes(data)[:space])
        space -= done
        return done

    async with site([{"name": "a0"}]) as fleet:
        await fleet.connected()

        def copy() -> str:
            return stream_recording(
                fleet.frontend.url, None, path, timeout=10, seconds=60, max_bytes=1 << 20
            )

        monkeypatch.setattr("dynctl.serving.records.recorder.os.write", write)
        reading = asyncio.create_task(asyncio.to_thread(copy))
        await started(fleet)
        for turn in range(200):
            await fleet.chat(f"{turn} {' '.join(f'word {turn} {i}' for i in range(40))}")
            if reading.done():
                break
        reason = await reading
    assert reason == f"{path}: no space is left on its device; the recording ends there"
    assert 0 < path.stat().st_size <= 5_000
    noted = of(Noted, list(read_recording(path)))
    assert [one for one in noted if one.kind == "cut"] == []


async def test_a_recording_of_a_process_goes_on_when_its_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, full, real = tmp_path / "r", True, os.write

    def write(file: int, data: bytes) -> int:
        if full and os.readlink(f"/proc/self/fd/{file}") == str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr("dynctl.serving.records.recorder.os.write", write)
    monkeypatch.setattr("dynctl.serving.records.recorder._ROOM_S", 0.01)
    async with site([{"name": "a0"}]) as fleet:
        await fleet.connected()
        conditions = fleet.frontend.service.conditions
        recordings = fleet.frontend.administration.recordings
        running = asyncio.create_task(recordings.keep_file(FileSink(path), max_bytes=1 << 20))
        named = (BACKGROUND_TASK_FAILED, str(path))
        await until(lambda: named in {(one.code, one.subject) for one in conditions})
        full = False
        header = len(recording_file.HEADER)
        await until(lambda: path.exists() and path.stat().st_size > header)
        assert named not in {(one.code, one.subject) for one in conditions}
        await end_tasks([running])
    assert list(read_recording(path))


async def test_the_steps_of_a_canary_are_in_the_recording(tmp_path: Path, caplog):
    path = tmp_path / "r"
    caplog.set_level("INFO", logger="dynctl.serving.routing.service")
    async with site([{"name": "a0"}]) as fleet:
        await fleet.connected()
        sink = FileSink(path)
        running = asyncio.create_task(fleet.frontend.administration.recordings.record(sink))
        recorder = await started(fleet)
        client = FrontendClient(fleet.frontend.url, None)
        replica = Replica("one", client)
        [model] = await asyncio.to_thread(client.models)
        name = "active_prefill_tokens_threshold"
        for value, text in ((5_000, "canary 600 s; revert if refused>1%"), (9_000, "é" * 900)):
            announce([replica], text)
            after = await asyncio.to_thread(client.set_thresholds, model, {name: value})
            assert after[name] == value
        recorder.stop()
        await running
        sink.close()
    notes = [one for one in of(Noted, list(read_recording(path))) if one.kind == "canary"]
    texts = [(one.subject, one.text) for one in notes]
    assert texts == [(model, "canary 600 s; revert if refused>1%"), (model, "?" * 200)]
    assert f"canary of {model}: canary 600 s; revert if refused>1%" in caplog.text


async def test_a_recording_ends_at_its_limit_and_says_so(tmp_path: Path):
    path = tmp_path / "r"
    async with site([{"name": "a0"}]) as fleet:
        sink = FileSink(path)
        running = asyncio.create_task(
            fleet.frontend.administration.recordings.record(sink, max_bytes=6_000)
        )
        await started(fleet)
        while not running.done():
            await traffic(fleet, 1)
        assert (await running).full
        sink.close()
    *_, last = read_recording(path)
    assert isinstance(last, Noted)
    assert last.kind == "dropped"
    assert "it reached its limit of 6,000 bytes" in last.text
    assert path.stat().st_size < 8_000


async def test_a_full_file_of_a_process_becomes_the_old_one(tmp_path: Path):
    path = tmp_path / "r"
    path.write_text("of an earlier process")
    async with site([{"name": "a0"}], record=path, record_bytes=6_000) as fleet:
        assert old_of(path).read_text() == "of an earlier process"
        while old_of(path).read_bytes()[:6] != b"dynctl":
            await traffic(fleet, 1)
        await started(fleet)
    for one in (old_of(path), path):
        assert isinstance(next(read_recording(one)), Start)


async def test_a_slow_sink_loses_records_and_never_time(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_HELD", 4_000)
    monkeypatch.setattr(recorder_module, "_CHUNK_BYTES", 1_000)
    monkeypatch.setattr(recorder_module, "ENCODED_AT_A_TIME", 8)
    release = asyncio.Event()

    class Slow:
        data = b""

        async def write(self, data: bytes) -> None:
            if len(self.data) > 100:
                await release.wait()
            self.data += data

    async with site([{"name": f"a{i}"} for i in range(2)]) as fleet:
        await fleet.connected()
        slow = Slow()
        running = asyncio.create_task(fleet.frontend.administration.recordings.record(slow))
        recorder = await started(fleet)
        await until(lambda: len(slow.data) > 100)
        await traffic(fleet, 6)  # while the sink takes nothing
        release.set()
        await until(lambda: recorder.lost > 0)
        await traffic(fleet, 1)
        recorder.stop()
        await running
    path = tmp_path / "r"
    path.write_bytes(slow.data)
    records = list(read_recording(path))
    *_, lost = [one for one in of(Noted, records) if one.kind == "dropped"]
    assert "records are missing" in lost.text
    after = records[records.index(lost) + 1 :]
    assert isinstance(after[0], State)
    assert replayed(after).differ == []


async def test_only_a_few_recordings_run_at_a_time(tmp_path: Path):
    async with site([{"name": "a0"}]) as fleet:
        recordings: Recordings = fleet.frontend.administration.recordings
        sinks = [FileSink(tmp_path / str(i)) for i in range(recorder_module.MOST_RECORDINGS)]
        tasks = [asyncio.create_task(recordings.record(one)) for one in sinks]
        await until(lambda: len(recordings.active) == len(sinks))
        status, body = await fleet.get("/v1/recording")
        assert status == 429
        assert "recordings run already" in body["error"]["message"]
        for query in ("seconds=0", "max_bytes=5", "seconds=x", "other=1"):
            assert (await fleet.get(f"/v1/recording?{query}"))[0] == 400
        await recordings.close()
        await asyncio.gather(*tasks)
        for sink in sinks:
            sink.close()


async def test_a_sink_that_fails_ends_the_recording_of_a_process(tmp_path: Path, monkeypatch):
    async def full(self: FileSink, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSink, "write", full)
    async with site([{"name": "a0"}], record=tmp_path / "r") as fleet:
        await until(
            lambda: any("no space is left" in one.message for one in fleet.service.conditions)
        )
        assert fleet.service.taps == ()
        assert (await fleet.chat())[0] == 200
        # It stays after the task has ended.
        await until(lambda: not fleet.frontend.administration.recordings.active)
        assert any("recording to" in one.message for one in fleet.service.conditions)


async def test_a_recording_that_failed_goes_on_in_a_new_file(tmp_path: Path, monkeypatch):
    path, failures = tmp_path / "r", [OverflowError("int too big to convert")]
    encoded = recorder_module.Recorder._encode_chunk

    async def fail_once(self, item):
        if failures:
            raise failures.pop()
        return await encoded(self, item)

    monkeypatch.setattr(recorder_module.Recorder, "_encode_chunk", fail_once)
    async with site([{"name": "a0"}], record=path) as fleet:
        await until(lambda: fleet.service.tasks.failures["recording"] == 1)
        assert any("int too big" in one.message for one in fleet.service.conditions)
        await until(lambda: bool(fleet.frontend.administration.recordings.active), seconds=10)
        await traffic(fleet, 1)
    assert old_of(path).exists()
    assert of(Finished, list(read_recording(path)))


def test_workers_that_only_decode_need_no_kv_events():
    prefill, silent = worker(1, role="prefill"), worker(2, role="prefill", kv_events=False)
    decode = worker(3, role="decode", kv_events=False)
    assert reports_caches([prefill, decode])
    assert not reports_caches([prefill, silent, decode])
    assert not reports_caches([worker(4, kv_events=False)])
    assert not reports_caches([decode])  # a model without others
