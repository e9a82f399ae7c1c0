"""`dynctl hits`: of recordings, traces and live routers; what the screen shows, and bad input."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import structs

from dynctl.documents.hits import HitsCause, HitsReport
from dynctl.documents.recording import Arrived, Decided, Finished, Start
from dynctl.documents.recording_file import HEADER, encode_records
from dynctl.health.hits import hits
from dynctl.screens.canvas import Canvas
from dynctl.screens.hits import hits_screen
from dynctl.sources.hits import _with_replays
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.health.recorded_fleet import Prompt, RecordedFleet, chats
from tests.dynctl.health.test_hits import tiered
from tests.dynctl.serving.fleets import chat_body
from tests.dynctl.serving.test_process import all_read
from tests.forks import Program
from tests.waiting import patience, until

FLEET = RecordedFleet(workers=5, config={"router_mode": "round-robin"}, state=True)
CHATS = chats(13, 6)
#: Those of another router.
OTHERS = chats(13, 6, seed=8)
SMALL = ("--generate", "chat", "--limit", 300, "--workers", 3)


def recording(
    path: Path, fleet: RecordedFleet = FLEET, first: float = 0.0, chats: Sequence[Prompt] = CHATS
) -> Path:
    prompts = [one for one in chats if one.at >= first]
    path.write_bytes(encode_records(fleet.records(prompts)))
    return path


def test_the_ladder_of_a_recording(dynctl, tmp_path: Path, monkeypatch):
    recording(tmp_path / "a.dynrec")
    # The page names the file, whose folder may be longer than a line.
    monkeypatch.chdir(tmp_path)
    ran = dynctl("hits", "a.dynrec")
    assert ran.code == 0, ran.err
    assert "78 requests to 5 workers, model tiny" in ran.out
    lines = ran.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert any(line.startswith("all tokens of the prompts") for line in lines)
    first = "reachable, one cache without limit  64.6 %  -35.4  new text "
    assert any(line.startswith(first) for line in lines)
    assert any(line.startswith("as the router expected") and "-" in line for line in lines)
    assert "largest loss you can act on" in lines
    assert any(line.strip() == "--router-mode kv" for line in lines)
    assert "at most +" in ran.out
    assert "if the worker that had most of each prompt had been chosen" in " ".join(ran.out.split())
    report = dynctl("hits", tmp_path / "a.dynrec", "-o", "json").json
    assert (report["kind"], report["largest"][0]["cause"]) == ("HitsReport", "spread")
    assert dynctl("hits", tmp_path / "a.dynrec", "-o", "name").out.splitlines()[0] == "spread"
    rungs = dynctl("hits", tmp_path / "a.dynrec", "-o", "jsonl").out.splitlines()
    assert [json.loads(rung)["rung"] for rung in rungs[:2]] == ["prompt", "reachable"]


def test_generated_requests_have_no_name_of_a_model(dynctl):
    heading = " ".join(dynctl("hits", *SMALL).out.partition("\n\n")[0].split())
    assert heading.startswith("prefix hit rate,")
    assert "300 requests to 3 workers, generated chat simulated" in heading


def replayed(dynctl, command: str) -> list[dict[str, Any]]:
    """The results of a command line that `hits` shows."""
    program, *arguments = shlex.split(command)
    assert program == "dynctl"
    ran = dynctl(*arguments, "-o", "json")
    assert ran.code == 0, ran.err
    results: list[dict[str, Any]] = ran.json["results"]
    return results


def test_the_gain_of_a_cause_is_shown_by_the_replay_that_the_answer_names(dynctl):
    small = (*SMALL, "--total-blocks", 800)
    report = dynctl("hits", *small, "--policy", "round-robin", "-o", "json").json
    rungs = {one["rung"]: one["rate"] for one in report["rungs"]}
    causes = {one["cause"]: one for one in report["largest"]}
    (command,) = causes["spread"]["replay"]
    before, after = replayed(dynctl, command)
    assert before["cache"]["hit_rate"] == pytest.approx(rungs["reused"])
    assert (before["settings"], after["settings"]) == ({"router_mode": "round-robin"}, {})
    assert after["cache"]["hit_rate"] > before["cache"]["hit_rate"]
    small_caches, twice = causes["capacity"]["replay"]
    assert replayed(dynctl, small_caches)[0]["cache"] == before["cache"]
    doubled = replayed(dynctl, twice)[0]
    assert doubled["engine"]["total_blocks"] == 1600
    assert doubled["cache"]["hit_rate"] > before["cache"]["hit_rate"]
    assert command in " ".join(dynctl("hits", *small, "--policy", "round-robin").out.split())


@pytest.mark.parametrize("command", ["hits", "hot"])
def test_a_recording_is_an_argument(dynctl, tmp_path: Path, command: str):
    path = recording(tmp_path / "a.dynrec")
    ran = dynctl(command, "--recording", path)
    assert (ran.code, ran.out) == (2, "")
    assert "expected the recording as the argument FILE" in ran.err


@pytest.mark.parametrize(
    ("config", "cause", "changed"),
    [
        ({"router_mode": "round-robin"}, "spread", "router_mode"),
        ({"router_temperature": 2.0, "prefill_load_scale": 1.5}, "temperature",
         "router_temperature"),
    ],
)  # fmt: skip
def test_the_replay_of_a_recording_has_its_settings_and_one_change(
    dynctl, tmp_path: Path, config: dict[str, Any], cause: str, changed: str
):
    path = recording(tmp_path / "a b.dynrec", RecordedFleet(workers=5, config=config, state=True))
    report = dynctl("hits", path, "-o", "json").json
    (command,) = next(one["replay"] for one in report["largest"] if one["cause"] == cause)
    before, after = replayed(dynctl, command)
    assert (before["policy"], after["policy"]) == ("now", "changed")
    assert len(before["workers"]) == 5
    assert before["settings"] == config
    assert after["settings"] == {name: config[name] for name in config if name != changed}
    assert after["cache"]["hit_rate"] > before["cache"]["hit_rate"]


def test_a_session_that_stays_has_a_replay_in_which_it_moves(dynctl):
    """One loss by a session, of which generated requests have too few."""
    cause = HitsCause("session", "session", "the session stayed", 100, 0.1, 1)
    report = HitsReport("test", 0.0, 1.0, 1, 1000, 3, ["m"], [], [cause])
    policy = "kv,router_session_affinity_ttl_secs=600"
    same = ["dynctl", "replay", "--generate", "chat", "--limit", "60", "--workers", "3"]
    (command,) = _with_replays(report, same, [], policy, None).largest[0].replay
    before, after = replayed(dynctl, command)
    assert before["settings"] == {"router_session_affinity_ttl_secs": 600.0}
    assert after["settings"] == before["settings"] | {
        "router_session_affinity_mode": "soft",
        "router_session_affinity_yield_blocks": 0.0,
    }
    plain = _with_replays(report, ["dynctl"], [], "round-robin", None).largest[0]
    assert plain.replay == []


def test_what_another_router_sent_has_a_replay_with_events_and_one_with_one_router(dynctl):
    def blind(kind: str, policy: str) -> tuple[dict[str, Any], list[str]]:
        given = ("--limit", 200, "--workers", 3, "--policy", policy, "--routers", 4, "-o", "json")
        report = dynctl("hits", "--generate", kind, *given).json
        cause = next(one for one in report["largest"] if one["cause"] == "blind")
        return report, cause["replay"]

    report, (command,) = blind("chat", "approximate")
    before, after = replayed(dynctl, command)
    assert before["routers"] == after["routers"] == 4
    assert before["cache"]["hit_rate"] == pytest.approx(report["rungs"][-1]["rate"])
    assert after["cache"]["hit_rate"] > before["cache"]["hit_rate"]
    commands = blind("batch", "kv")[1]
    several, alone = (replayed(dynctl, one)[0] for one in commands)
    assert (several["routers"], alone["routers"]) == (4, 1)
    assert several["settings"] == alone["settings"] == {}


def test_lower_tiers_that_count_too_little_have_a_replay_with_their_sizes(dynctl, tmp_path: Path):
    path = tmp_path / "a.dynrec"
    weights = {"host_cache_hit_weight": 0.0, "disk_cache_hit_weight": 0.0}
    path.write_bytes(encode_records(tiered(60, 100, **weights)))
    report = dynctl("hits", path, "-o", "json").json
    (command,) = next(one["replay"] for one in report["largest"] if one["cause"] == "tier_weight")
    assert "--host-blocks 60 --disk-blocks 100" in command
    before, after = replayed(dynctl, command)
    assert (before["engine"]["host_blocks"], before["engine"]["disk_blocks"]) == (60, 100)
    assert before["settings"] == weights
    full = {"host_cache_hit_weight": 1.0, "disk_cache_hit_weight": 1.0}
    assert after["settings"] == full
    assert after["cache"]["hit_rate"] > before["cache"]["hit_rate"]


def test_no_replay_is_named_for_what_it_cannot_take(dynctl, tmp_path: Path):
    """A part of a recording, and recordings of several routers."""
    one = recording(tmp_path / "a.dynrec")
    other = recording(tmp_path / "b.dynrec", chats=OTHERS)
    for given in ((one, "--from", "+2s"), (one, other)):
        report = dynctl("hits", *given, "-o", "json").json
        assert report["largest"]
        assert all(cause["replay"] == [] for cause in report["largest"])


def test_groups_and_times(dynctl, tmp_path: Path):
    path = recording(tmp_path / "a.dynrec")
    ran = dynctl("hits", path, "--by", "worker", "--from", "+2s", "--to", "+5s", "-o", "json")
    assert ran.code == 0, ran.err
    assert 0 < ran.json["requests"] < 78
    assert len(ran.json["groups"]) == 5
    table = dynctl("hits", path, "--by", "worker").out
    assert "LARGEST LOSS" in table
    assert "worker-3" in table


def test_the_recordings_of_several_routers_are_one_fleet(dynctl, tmp_path: Path):
    one = recording(tmp_path / "a.dynrec")
    other = recording(tmp_path / "b.dynrec", chats=OTHERS)
    ran = dynctl("hits", one, other, "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["requests"] == 2 * 78
    assert ran.json["workers"] == 5


def test_a_trace_runs_through_a_simulated_fleet(dynctl, tmp_path: Path):
    lines = [
        {"timestamp": i * 500, "input_length": 2048, "output_length": 4, "hash_ids": [1, 2, 3, i]}
        for i in range(10, 40)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(one) + "\n" for one in lines))
    ran = dynctl("hits", trace, "--workers", 3, "--policy", "round-robin", "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["requests"] == 30
    reachable = ran.json["rungs"][1]
    assert (reachable["rung"], reachable["tokens"]) == ("reachable", 29 * 3 * 512)
    assert ran.json["largest"][0]["cause"] == "spread"
    again = dynctl("hits", trace, "--workers", 3, "--policy", "round-robin", "-o", "json")
    assert again.out == ran.out
    kv = dynctl("hits", trace, "--workers", 3, "-o", "json").json
    assert kv["rungs"][-1]["rate"] > ran.json["rungs"][-1]["rate"]


@pytest.mark.parametrize(
    ("policy", "more", "cause"),
    [
        ("round-robin", (), "spread"),
        ("kv", ("--total-blocks", 700), "capacity"),
        ("kv,temperature=5", (), "temperature"),
        ("approximate", ("--routers", 4), "blind"),
    ],
)
def test_a_generated_workload_names_the_cause(dynctl, policy: str, more: tuple, cause: str):
    ran = dynctl("hits", *SMALL, "--policy", policy, *more, "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["largest"][0]["cause"] == cause


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FILE", "--workers", 3], "is a recording: --policy"),
        (["FILE", "TRACE"], "TRACE is not a recording"),
        (["FILE", "--for", "5m"], "--for is for a live router"),
        (["FILE", "--record", "new"], "--record is for a live router"),
        (["--frontend", "http://127.0.0.1:1", "--record", "FILE"], "FILE: the file exists"),
        (
            [
                "--frontend",
                "http://127.0.0.1:1",
                "--frontend",
                "http://127.0.0.1:2",
                "--record",
                "n",
            ],
            "--record n: 2 frontends; a recording is of one",
        ),
        (["FILE", "--by", "color"], "--by color: expected one of model, domain"),
        (["FILE", "--from", "+9h"], "--from +9h: outside the recording"),
        (["FILE", "--from", "+3s", "--to", "+2s"], "--to is not after --from"),
        (["FILE", "FILE"], "FILE: most of its requests are in another of the recordings too"),
        (["FILE", "--generate", "chat"], "expected it or files, not both"),
        (["TRACE", "--from", "+3s"], "--from and --to are for recordings"),
        (["none.dynrec"], "none.dynrec: the file does not exist"),
        (["JUNK"], "not a trace"),
        (["AZURE"], "AZURE: no request has hash_ids"),
        (["--workers", 3], "--workers is for a trace"),
        (["--generate", "chat", "--policy", "no-such"], "--policy no-such"),
        (["--demo"], "no router runs there, so nothing can be recorded"),
    ],
)
def test_bad_input_is_named(dynctl, tmp_path: Path, monkeypatch, arguments: list, said: str):
    monkeypatch.chdir(tmp_path)
    recording(Path("FILE"))
    Path("TRACE").write_text(
        '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    )
    Path("JUNK").write_bytes(b"\x00\x01 junk")
    Path("AZURE").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n"
    )
    ran = dynctl("hits", *arguments)
    assert ran.code == 2, ran.out
    assert said in ran.err


def test_a_damaged_recording_is_refused_or_read_without_the_damage(dynctl, tmp_path: Path):
    path = tmp_path / "a.dynrec"
    whole = encode_records(FLEET.records(CHATS), per_chunk=64)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + b"\xff" * 40 + whole[middle + 40 :])
    assert dynctl("hits", path).code == 2
    ran = dynctl("hits", path, "--skip-bad", "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["left_out"]["gaps in the recording"] >= 1
    path.write_bytes(whole[:-30])
    cut = dynctl("hits", path, "-o", "json")
    assert cut.code == 0, cut.err
    assert cut.json["left_out"] == {"the end of a recording that is cut": 1}


def test_a_recording_without_a_whole_request_is_named(dynctl, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("a.dynrec")
    records = FLEET.records(CHATS)
    first = next(i for i, one in enumerate(records) if isinstance(one, Arrived))
    path.write_bytes(encode_records(records[: first + 1]))
    none = dynctl("hits", path)
    assert (none.code, none.out) == (2, "")
    assert "a.dynrec: no whole request to judge: 1 without a decision" in none.err

    whole = encode_records(records, per_chunk=first)
    path.write_bytes(whole[: len(encode_records(records[:first], per_chunk=first)) + 50])
    cut = dynctl("hits", path)
    assert (cut.code, cut.out) == (2, "")
    words = " ".join(cut.err.split())
    assert "a.dynrec: no whole request to judge: a.dynrec is cut at byte" in words
    path.write_bytes(HEADER)
    assert "no whole request to judge: a.dynrec has no records" in dynctl("hits", path).err
    shown = dynctl("record", "--show", path)
    assert (shown.code, shown.out) == (0, "a.dynrec: the file has no records\n")
    path.write_bytes(whole[:50])
    shown = dynctl("record", "--show", path)
    assert "a.dynrec: the file has no records: the file is cut at byte 18" in shown.out
    ran = dynctl("hits", recording(path), "--from", "+0s", "--to", "+0.5s")
    assert (ran.code, "no whole request to judge" in ran.err) == (2, True)


def test_requests_of_a_dynamo_with_a_prefill_hop_are_not_judged_and_the_reason_is_named(
    dynctl, tmp_path: Path
):
    start = Start(0.0, "dynamo", "test", "1", complete=frozenset({"decisions", "arrivals"}))
    arrived = Arrived(1.0, "r", "tiny", 64, 16, asked={"not_modelled": True})
    decided = Decided(1.0, "r", "tiny", (1, 0), (2, 0))
    path = tmp_path / "a.dynrec"
    path.write_bytes(encode_records([start, arrived, decided, Finished(2.0, "r")]))
    ran = dynctl("hits", path)
    words = " ".join(ran.err.split())
    assert ran.code == 2
    reason = "Dynamo publishes no prompt hashes of requests with a prefill hop"
    assert f"1 without block hashes ({reason})" in words
    assert "record a frontend of dynctl" in words
    # What the frontend counted as cached is all that is known.
    counted = structs.replace(decided, cached_blocks=3.0)
    path.write_bytes(encode_records([start, arrived, counted, Finished(2.0, "r")]))
    ran = dynctl("hits", path, "--by", "model", "-o", "json")
    assert ran.code == 0, ran.err
    rungs = {one["rung"]: one for one in ran.json["rungs"]}
    assert (rungs["expected"]["rate"], ran.json["requests"]) == (0.75, 1)
    assert rungs["best"]["unknown"] == rungs["reachable"]["unknown"] == reason
    assert [one["name"] for one in ran.json["groups"]] == ["tiny"]
    assert "no loss is known" in dynctl("hits", path).out
    # Prompts of one worker have them; what was reused is not published at all.
    records = [start, *FLEET.records(CHATS)[1:]]
    report = hits(one for one in records if not isinstance(one, Finished))
    assert report.requests == len(CHATS)
    reused = report.rung("reused")
    assert reused is not None
    assert "Dynamo does not publish what its engines reused" in reused.unknown


def test_without_a_router_only_running_sources_are_offered(dynctl: Any) -> None:
    ran = dynctl("hits", "--demo")
    assert ran.code == 2
    assert "--frontend http://HOST:PORT" in ran.err
    assert "--view" not in ran.err
    assert "recording for" not in ran.err


def test_without_arguments_files_are_offered_too(dynctl: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("dynctl.sources.named.DEFAULT_FRONTEND", "http://127.0.0.1:9")
    ran = dynctl("hits")
    assert ran.code == 3
    assert (
        "FILE                               a recording (dynctl record FILE) or a trace" in ran.err
    )
    assert "--generate KIND" in ran.err


@pytest.mark.parametrize("width", [64, 80, 200])
def test_the_screen_fits(width: int):
    fleet = RecordedFleet(workers=5, silent=dict.fromkeys(range(5), 1.5), state=True)
    report = hits(fleet.records(CHATS), by="worker")
    text = hits_screen(report, Canvas(width))
    assert all(len(line) <= width for line in text.splitlines()), text
    assert "dynctl explain EVENTS_LOST" in " ".join(text.split())
    assert ("(worker-" in text) == (width == 200)


def test_the_screen_of_nothing_says_why():
    nothing = hits_screen(hits([]), Canvas(80))
    assert "no request to judge\nsend requests while it records, or record for longer" in nothing


def test_a_recording_without_a_request_names_the_next_step(dynctl, tmp_path: Path):
    def noted(kinds: set[str], *more: Any) -> str:
        path = tmp_path / "a.dynrec"
        start = Start(1.0, "frontend", "test", "1", complete=frozenset(kinds))
        path.write_bytes(encode_records([start, *more]))
        return " ".join(dynctl("record", "--show", path).out.split())

    assert "no requests are recorded: send requests while it records" in noted({"decisions"})
    silent = noted({"workers"})
    assert "requests are unknown: no frontend publishes its decisions; start the" in silent
    assert "--router-mode kv --router-replica-sync" in silent
    for one in (Arrived(1.0, "r", "tiny", 64, 16), Decided(1.0, "r", "tiny", (1, 0), None)):
        assert "note" not in noted({"decisions"}, one)


@pytest.mark.parametrize("command", ["hits", "hot"])
def test_a_live_source_without_a_request_names_the_next_step(
    dynctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def run(kinds: set[str], *more: Any) -> Any:
        start = Start(0.0, "dynamo", "test", "1", complete=frozenset(kinds))

        def record(_options: Any, _urls: Any, _seconds: int, path: Path) -> str:
            path.write_bytes(encode_records([start, *more]))
            return "live Dynamo"

        monkeypatch.setattr("dynctl.sources.hits._record_dynamo", record)
        place = ("--discovery", "file", "--file-kv", tmp_path)
        return dynctl(command, "--for", "1s", *place)

    silent = run({"workers"})
    assert (silent.code, silent.out) == (2, "")
    assert "live Dynamo: requests are unknown: no frontend publishes its decisions" in silent.err
    assert "--router-replica-sync" in silent.err
    idle = run({"workers", "decisions"})
    assert idle.code == 1
    assert "send requests while it records, or record for longer: --for 5m" in idle.out
    split = run(
        {"workers", "decisions"},
        Arrived(1.0, "r", "tiny", 64, 16, asked={"not_modelled": True}),
        Decided(1.0, "r", "tiny", (1, 0), (2, 0)),
        Finished(2.0, "r"),
    )
    assert split.code == 2
    assert "no prompt hashes of requests with a prefill hop" in " ".join(split.err.split())


#: The caches never evict.
ROOM = ("--total-blocks", "1000000")


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[dict[str, Any]]:
    """A process, by the record that it prints when it is ready; it is gone afterwards."""
    child = Program([module, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    try:
        async with asyncio.timeout(patience(20)):
            yield json.loads(await asyncio.to_thread(child.stdout.readline))
    finally:
        child.kill()
        child.communicate()


def engine(name: str) -> AbstractAsyncContextManager[dict[str, Any]]:
    words = ("--port", "0", "--name", name, "--speedup-ratio", "10", *ROOM)
    return running("dynctl.simulation.engine", *words)


def frontend(mode: str, *engines: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]]:
    words = ["serve", "frontend", "--announce", "--http-port", "0", "--router-mode", mode]
    for one in engines:
        words += ["--worker", f"{one['url']},name={one['engine']}"]
    return running("dynctl", *words, "--model-path", str(DEMO_MODEL_DIR))


async def _ask(client: aiohttp.ClientSession, url: str, text: str) -> None:
    async with client.post(
        f"{url}/v1/chat/completions", json=chat_body(text, max_tokens=2)
    ) as answer:
        assert answer.status == 200, await answer.text()


async def _indexed(client: aiohttp.ClientSession, url: str) -> int:
    """Blocks in the index of all workers."""
    async with client.get(f"{url}/v1/workers") as answer:
        rows = (await answer.json())["workers"]
    return sum(rank["cached_blocks"] or 0 for row in rows for rank in row["ranks"])


async def _live(mode: str, *engines: dict[str, Any], keep: Path | None = None) -> dict[str, Any]:
    """The report of `hits --for 2s` while three prompts of each conversation are sent in turn."""
    kept = [] if keep is None else ["--record", str(keep)]
    async with (
        aiohttp.ClientSession() as client,
        frontend(mode, *engines) as ready,
    ):
        url = ready["url"]
        await all_read(url)
        judge = Program(
            ["dynctl", "hits", "--frontend", url, "--for", "2s", "-o", "json", *kept],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        reading = asyncio.create_task(asyncio.to_thread(judge.communicate))
        try:
            turn = 0
            async with asyncio.timeout(patience(20)):
                while not reading.done():
                    turn += 1
                    text = " ".join(f"{word} of {mode} {turn}" for word in range(40))
                    before = await _indexed(client, url)
                    await _ask(client, url, text)
                    while await _indexed(client, url) == before:  # noqa: ASYNC110 - HTTP
                        await asyncio.sleep(0.01)
                    for more in range(2):
                        await _ask(client, url, f"{text} and {more}")
            out, err = await reading
        finally:
            judge.kill()
            await reading
    assert judge.returncode == 0, err.decode()
    found: dict[str, Any] = json.loads(out)
    return found


async def test_a_live_frontend_is_judged_while_it_works(dynctl, tmp_path: Path):
    async with engine("a0") as a0, engine("a1") as a1:
        spread = await _live("round-robin", a0, a1, keep=tmp_path / "a.dynrec")
        kv = await _live("kv", a0, a1)
    assert spread["requests"] > 0
    assert spread["largest"][0]["cause"] == "spread", spread
    rates = {one["rung"]: one["rate"] for one in spread["rungs"]}
    assert rates["reused"] < rates["best"] <= rates["reachable"]
    # The recording is kept, so the gain can be simulated on it.
    (command,) = spread["largest"][0]["replay"]
    # Slowly: requests came as fast as this machine answered, simulated engines take their own time.
    slowly = f"{command} --speed 0.01"
    before, after = await asyncio.to_thread(replayed, dynctl, slowly)
    assert before["counts"]["requests"] >= spread["requests"]
    assert after["cache"]["hit_rate"] > before["cache"]["hit_rate"]

    assert all(one["replay"] == [] for one in kv["largest"])
    rates = {one["rung"]: one["rate"] for one in kv["rungs"]}
    assert rates["reused"] > 0.9 * rates["reachable"]
    assert "spread" not in [one["cause"] for one in kv["largest"]]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_and_sigterm_end_the_recordings_of_live_frontends_and_judge_them(
    tmp_path: Path, end: signal.Signals
):
    """A user who has seen enough does not wait for the rest of --for."""
    async with (
        aiohttp.ClientSession() as client,
        engine("a0") as a0,
        frontend("kv", a0) as one,
        frontend("kv", a0) as two,
    ):
        for url in (one["url"], two["url"]):
            await all_read(url)
        judge = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dynctl", "hits", "--for", "10m", "-o", "json"),
            *("--frontend", one["url"], "--frontend", two["url"]),
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await until(lambda: len(_sizes(tmp_path)) == 2)
            for url in (one["url"], two["url"]):
                await _ask(client, url, " ".join(f"word {number}" for number in range(40)))
            # What is recorded is written in chunks: wait for the next of both.
            before = _sizes(tmp_path)
            await until(lambda: all(map(int.__gt__, _sizes(tmp_path), before)))
            judge.send_signal(end)
            async with asyncio.timeout(patience(20)):
                out, err = await judge.communicate()
        finally:
            if judge.returncode is None:
                judge.kill()
                await judge.communicate()
    assert b"recording for 600 s; Ctrl-C ends it" in err
    # Chunks can have begun before the requests: then there is none to judge.
    assert judge.returncode == (0 if json.loads(out)["requests"] else 1), err.decode()
    assert not os.listdir(tmp_path)


def _sizes(folder: Path) -> list[int]:
    """Of the recordings of several frontends, in bytes."""
    return [path.stat().st_size for path in sorted(folder.glob("*/frontend-*"))]


async def test_where_one_of_the_frontends_is_down_the_others_are_not_recorded_first(dynctl: Any):
    async with (
        engine("a0") as a0,
        frontend("kv", a0) as one,
    ):
        async with asyncio.timeout(patience(20)):
            ran = await asyncio.to_thread(
                dynctl, "hits", "--for", "10m", *frontends_of(one["url"], "http://127.0.0.1:9")
            )
    assert (ran.code, ran.out) == (3, "")
    assert "error: http://127.0.0.1:9: " in ran.err


def frontends_of(*urls: str) -> list[str]:
    return [word for url in urls for word in ("--frontend", url)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["t.dynrec"], "t.dynrec: the file exists; a recording is never overwritten"),
        (["folder"], "folder: is a directory; expected a file to write"),
        (["new", "--for", "-3s"], "--for '-3s': expected a duration"),
        (["--show", "folder"], "folder: is a directory; expected a file"),
        (["--show", "none"], "none: the file does not exist"),
    ],
)
def test_record_names_what_it_cannot_use_before_it_starts(
    dynctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.dynrec").write_bytes(b"")
    Path("folder").mkdir()
    ran = dynctl("record", *arguments, "--frontend", "http://127.0.0.1:9")
    assert ran.code == 2, ran.out
    assert said in ran.err
    assert "recording to" not in ran.err


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
@pytest.mark.parametrize(
    "command",
    [
        ["hits", "{}"],
        ["replay", "{}"],
        ["replay", "--generate", "chat", "--policy", "{}"],
        ["record", "--show", "{}"],
        ["workers", "list", "--recording", "{}"],
    ],
    ids=lambda command: command[0],
)
def test_a_pipe_or_a_device_is_refused_and_never_waited_for(
    dynctl, tmp_path: Path, monkeypatch, command: list[str], name: str
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    ran = dynctl(*[one.format(name) for one in command])
    assert (ran.code, ran.out) == (2, "")
    assert f"{name}: is a pipe or a device; expected a file" in ran.err


@pytest.mark.parametrize("width", [64, 80, 200])
def test_hot_prefixes_of_a_recording_on_a_screen(dynctl, tmp_path: Path, monkeypatch, width: int):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    recording(Path("a.dynrec"))
    ran = dynctl("hot", "a.dynrec", "--top", 3)
    assert ran.code == 0, ran.err
    assert "shared prefixes, 3 of 13, 78 requests to 5 workers" in " ".join(ran.out.split())
    assert "TOO MANY COPIES" not in ran.out
    assert all(len(line) <= width for line in ran.out.splitlines())
    report = dynctl("hot", "a.dynrec", "-o", "json").json
    assert report["kind"] == "HotReport"
    assert len(report["prefixes"]) == 13
    names = dynctl("hot", "a.dynrec", "-o", "name").out.split()
    assert names == [row["prefix"] for row in report["prefixes"]]
    assert "A COPY" not in ran.out
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128}
    Path("config.json").write_text(json.dumps({**sizes, "torch_dtype": "bfloat16"}))
    sized = dynctl("hot", "a.dynrec", "--model-path", ".")
    assert ("A COPY" in sized.out) is (width > 80)
    Path("config.json").write_text(json.dumps({**sizes, "sliding_window": 64}))
    unsized = dynctl("hot", "a.dynrec", "--model-path", ".")
    assert (unsized.code, "sliding_window" in unsized.err) == (2, True)
    refused = dynctl("hot", "a.dynrec", "--for", "5m")
    assert (refused.code, "--for is for a live router" in refused.err) == (2, True)
