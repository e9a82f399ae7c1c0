"""`dynctl replay`: policies side by side, a verdict for CI, a search, loads, and bad input."""

import csv
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynctl.cli.commands import replay
from dynctl.documents.recording import Arrived, Changed, Record, Start, State
from dynctl.documents.recording_file import encode_records
from router_core import (
    Booked,
    Freed,
    ModelRuntimeConfig,
    Router,
    RouterConfig,
    Worker,
    WorkerLost,
    WorkerUpserted,
)
from tests.dynctl.cli.conftest import Run
from tests.dynctl.health.recorded_fleet import RecordedFleet, chats
from tests.waiting import patience, until_now

CHAT = ("replay", "--generate", "chat", "--trace-block-size", "64")
SMALL = (*CHAT, "--workload", "requests=120")


def test_policies_side_by_side_in_every_format(dynctl: Run, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = dynctl(*SMALL)
    assert (table.code, table.err) == (0, "")
    assert all(len(line) <= 80 for line in table.out.splitlines())
    for text in (
        "8 aggregated workers",
        "prefill 20,000 tokens/s",
        "seed 1",
        "rate 8",
        "kv against",
    ):
        assert text in table.out
    report = dynctl(*SMALL, "-o", "json").json
    assert [one["policy"] for one in report["results"]] == ["round-robin", "kv"]
    rates = [one["cache"]["hit_rate"] for one in report["results"]]
    assert 0 < rates[0] < rates[1] <= report["results"][0]["cache"]["ceiling"]
    rows = list(csv.DictReader(io.StringIO(dynctl(*SMALL, "-o", "csv").out)))
    assert [float(one["hit_rate"]) for one in rows] == rates
    assert dynctl(*SMALL, "-o", "name").out.split() == ["round-robin", "kv"]


@pytest.mark.parametrize(("path", "model"), [("/nowhere", "none"), (None, "measured")])
def test_a_live_policy_whose_model_is_not_here_is_simulated_without_its_prefill_load_model(
    capsys: pytest.CaptureFixture[str], path: str | None, model: str
) -> None:
    values = {"router_prefill_load_model": "measured", "prefill_load_scale": 2.0}
    if path is not None:
        values |= {"ais_system": "h200_sxm", "ais_model_path": path}
    settings = [SimpleNamespace(name=n, value=value, known=True) for n, value in values.items()]
    seen = SimpleNamespace(config=lambda: SimpleNamespace(settings=settings))
    config = replay._live_policy(seen).config
    assert (config.router_prefill_load_model, config.prefill_load_scale) == (model, 2.0)
    warning = " ".join(capsys.readouterr().err.split())
    assert ("policy live: --ais-model-path /nowhere" in warning) == (path is not None)


def test_a_migration_limit_moves_requests_of_a_lost_zone_and_shows_how_many(dynctl: Run) -> None:
    lossy = (*SMALL, "--workers", "4", "--zones", "a,b", "--lose", "a@5s", "--policy", "kv")
    failed = dynctl(*lossy, "-o", "json").json
    counts = failed["results"][0]["counts"]
    assert counts["failed"] > counts["moves"] == 0
    assert any("--migration-limit" in note for note in failed["notes"])
    shown = dynctl(*lossy, "--migration-limit", "2").out
    assert "MOVED" in shown
    assert "FAILED" not in shown
    moved = dynctl(*lossy, "--migration-limit", "2", "-o", "json").json["results"][0]["counts"]
    assert (moved["moves"], moved["failed"]) == (counts["failed"], 0)
    short = dynctl(*lossy, "--migration-limit", "2", "--migration-max-seq-len", "1", "-o", "json")
    assert short.json["results"][0]["counts"] == counts


def test_several_routers_show_what_they_know_of_each_other(dynctl: Run) -> None:
    burst = (*SMALL, "--workload", "together=12", "--routers", "3", "--policy", "kv")
    shown = " ".join(dynctl(*burst, "--sync-delay-ms", "2.5").out.split())
    assert "of the choices came at most 2.5 ms after one of another router" in shown
    assert "of the prefill load too little" in shown
    report = dynctl(*burst, "--sync-delay-ms", "0", "-o", "json").json
    (peers,) = (one["peers"] for one in report["results"])
    assert (peers["window_s"], peers["load_low_share"], peers["load_high_share"]) == (0, 0, 0)
    assert 0 < peers["same_share"] < 1
    (row,) = csv.DictReader(io.StringIO(dynctl(*burst, "--no-sync", "-o", "csv").out))
    assert float(row["near_share"]) == peers["near_share"]
    assert 0.5 < float(row["load_low_share"]) < 0.8
    alone = dynctl(*SMALL, "-o", "json").json["results"][0]
    assert alone["peers"] is None
    assert "another router" not in dynctl(*SMALL).out


def test_requests_that_arrive_at_once_can_be_spread(dynctl: Run, tmp_path: Path) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {3000 * (number // 30)}, "input_length": 500, "output_length": 9, '
            f'"hash_ids": [{number}]}}\n'
            for number in range(120)
        )
    )
    given = ("replay", trace, "--routers", "3", "--policy", "kv")
    spread, together = dynctl(*given, "--spread"), dynctl(*given)
    assert "spread until" in " ".join(spread.out.split())
    assert "0 % of the choices came at most 1 ms after" in " ".join(spread.out.split())
    assert "spread until" not in " ".join(together.out.split())
    reports = [dynctl(*given, *more, "-o", "json").json for more in ((), ("--spread",))]
    assert [one["trace"]["spread"] for one in reports] == [False, True]
    before, after = (one["results"][0]["ttft_s"]["p90"] for one in reports)
    assert after < before


def test_the_same_seed_gives_the_same_bytes(dynctl: Run) -> None:
    policies = ("--policy", "random", "--policy", "kv,router_temperature=0.5")
    first = dynctl(*SMALL, *policies, "-o", "json", "--seed", "7")
    assert first.out == dynctl(*SMALL, *policies, "-o", "json", "--seed", "7").out
    assert first.out != dynctl(*SMALL, *policies, "-o", "json", "--seed", "8").out


def test_a_regression_fails_with_its_reason(dynctl: Run) -> None:
    seeds = ("--seeds", "3", "--max-regress", "2%")
    ran = dynctl(*SMALL, "--policy", "kv", "--policy", "random", *seeds)
    assert ran.code == 1
    assert "random: regressed: hit rate is" in ran.err
    assert "which excludes 0" in ran.err
    assert dynctl(*SMALL, "--policy", "kv", "--policy", "same:kv", *seeds).code == 0


def test_an_interval_with_the_limit_is_unknown(dynctl: Run) -> None:
    pair = (*SMALL, "--policy", "random", "--policy", "power-of-two", "--seeds", "2")
    report = dynctl(*pair, "--max-regress", "1%", "-o", "json").json
    unknown = [one for one in report["changes"][0]["changes"] if one["low"] <= 0.01 < one["high"]]
    assert unknown
    assert {one["verdict"] for one in unknown} == {"unknown"}
    assert all("which includes the limit: use more seeds" in one["text"] for one in unknown)
    regressed = any(one["verdict"] == "regressed" for one in report["changes"][0]["changes"])
    assert dynctl(*pair, "--max-regress", "1%").code == regressed
    assert dynctl(*pair, "--max-regress", "1%", "--fail-on", "warn").code == 1


def test_a_search_is_bounded_and_shows_its_front(dynctl: Run) -> None:
    report = dynctl(*SMALL, "--policy", "kv", "--search", "5", "-o", "json").json
    assert len(report["search"]) == 5
    front = [one for one in report["search"] if one["front"]]
    assert front
    for one in report["search"]:
        assert not any(
            other["ttft_p90_s"] < one["ttft_p90_s"]
            and other["output_tokens_per_s"] > one["output_tokens_per_s"]
            for other in report["search"]
            if one["front"]
        )
    assert {} in [one["settings"] for one in report["search"]]
    assert dynctl(*SMALL, "--policy", "random", "--search", "5").code == 2
    assert dynctl(*SMALL, "--search", "5").code == 2


def test_loads_are_rows_to_plot(dynctl: Run) -> None:
    loads = dynctl(*SMALL, "--loads", "1,4", "-o", "json").json["loads"]
    assert [(one["policy"], one["load"]) for one in loads] == [
        ("round-robin", 1.0), ("round-robin", 4.0), ("kv", 1.0), ("kv", 4.0),
    ]  # fmt: skip
    ran = dynctl(*SMALL, "--loads", "1,4", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert ran.code == 0
    for name in ("load", "requests_per_s", "ttft_p90_s", "goodput_per_s"):
        assert [float(row[name]) for row in rows] == [one[name] for one in loads]


def test_a_limit_shows_how_many_of_the_generated_requests_run(dynctl: Run) -> None:
    assert ", requests 40 of 120, " in " ".join(dynctl(*SMALL, "--limit", "40").out.split())
    assert ", requests 120, " in " ".join(dynctl(*SMALL).out.split())


@pytest.mark.parametrize(
    ("fleet", "workers", "shown"),
    [
        (("--workers", "4", "--zones", "a,b"), 4, "4 aggregated workers in a, b"),
        (
            ("--capacity", "a:prefill=1,decode=2", "--enforcement", "required"),
            3,
            "2 decode and 1 prefill workers in a, KV transfer required",
        ),
        (("--workers", "2", "--zones", "a,b", "--lose", "a@2s..4s"), 2, "loses a at 2 s until 4 s"),
        (("--demo",), 6, "(demo fleet)"),
    ],
)
def test_fleets(dynctl: Run, fleet: tuple[str, ...], workers: int, shown: str) -> None:
    report = dynctl(*SMALL, *fleet, "-o", "json").json
    assert len(report["results"][0]["workers"]) == workers
    assert shown in report["fleet"]


def test_the_fleet_of_a_manifest(dynctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(
        """apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: llm}
spec:
  services:
    Prefill: {componentType: worker, subComponentType: prefill, replicas: 1}
    Decode: {componentType: worker, subComponentType: decode, replicas: 2}
"""
    )
    report = dynctl(*SMALL, "-f", path, "-o", "json").json
    assert report["fleet"].startswith("2 decode and 1 prefill workers")


def test_a_trace_without_hashes_has_no_hit_rate(dynctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\nbad\n")
    ran = dynctl("replay", path, "--block-size", "16")
    assert ran.code == 2
    assert f"{path}: line 3: 1 columns" in ran.err
    assert "--skip-bad leaves such lines out" in " ".join(ran.err.split())
    ran = dynctl("replay", path, "--block-size", "16", "--skip-bad")
    assert ran.code == 0
    assert "1 bad line skipped" in " ".join(ran.out.split())
    assert "hit rates are unknown: the trace has no hashes" in " ".join(ran.out.split())
    assert "counts as none" not in ran.out  # beside HITS unknown


def test_a_recording_without_hashes_is_not_advised_to_be_recorded(
    dynctl: Run, tmp_path: Path
) -> None:
    path = tmp_path / "r.dynrec"
    records = [
        msgspec.structs.replace(record, hashes=()) if isinstance(record, Arrived) else record
        for record in RecordedFleet(workers=2, state=True).records(chats(3, 2))
    ]
    path.write_bytes(encode_records(records))
    shown = " ".join(dynctl("replay", path).out.split())
    assert "unknown: the recording has no hashes of blocks; its router had no tokenizer" in shown


def test_a_short_trace_has_a_length(dynctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {at}, "input_length": 8, "output_length": 1, "hash_ids": [1]}}\n'
            for at in (0, 400)
        )
    )
    assert ", 2 requests, 0.4 s" in " ".join(dynctl("replay", path).out.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "expected a trace or --generate KIND"),
        (("a", "--generate", "chat"), "not both"),
        (("missing.jsonl",), "missing.jsonl: the file does not exist"),
        (("-",), "-: standard input is not supported here; expected a file"),
        (("--generate", "chat", "--workers", "2", "--demo"), "different fleets"),
        (("--generate", "chat", "--capacity", "a:prefill=2"), "no decode workers"),
        (("--generate", "chat", "--lose", "a"), "--lose a: expected PLACE@TIME"),
        (("--generate", "chat", "--zones", "a", "--lose", "b@1s"), "expected a"),
        (("--generate", "chat", "--zones", "a", "--lose", "a@9s..1s"), "is not after"),
        (("--generate", "chat", "--enforcement", "maybe"), "--enforcement maybe: expected none"),
        (("--generate", "chat", "--max-regress", "much"), "--max-regress much: expected a"),
        (("--generate", "chat", "--block-size", "0"), "--block-size is 0; expected 1..4096"),
        (("--generate", "chat", "--workers", "0"), "--workers '0': expected at least 1"),
        (("trace", "--workload", "rate=1"), "only with --generate KIND"),
        (("--generate", "chat", "--capacity", "a:prefill=9999,decode=1"), "expected at most 2,000"),
    ],
)  # fmt: skip
def test_bad_usage_is_named(dynctl: Run, arguments: tuple[str, ...], problem: str) -> None:
    ran = dynctl("replay", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert problem in ran.err


def test_an_interrupted_replay_ends_cleanly() -> None:
    command = [sys.executable, "-m", "dynctl", *CHAT, "--workload", "requests=100000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until_now(lambda: cpu_seconds(process.pid) > 2, 20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=patience(60))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in out + err


def cpu_seconds(pid: int) -> float:
    """What a process has computed: it starts within the first second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_recording_is_replayed_on_its_own_fleet(dynctl: Run, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.dynrec"
    fleet = RecordedFleet(workers=5, state=True, zones=("a", "b"), blocks=900)
    path.write_bytes(encode_records(fleet.records(chats(13, 6))))
    own = dynctl("replay", path, "-o", "json").json
    assert own["fleet"] == "5 aggregated workers in a, b (recording a.dynrec)"
    assert len(own["results"][0]["workers"]) == 5
    engine = own["results"][0]["engine"]
    assert (engine["block_size"], engine["total_blocks"]) == (16, 900)
    assert own["assumed"] == {
        "max_num_seqs": 256,
        "max_waiting": 4096,
        "prefill_tokens_per_s": 20_000.0,
        "decode_itl_ms": 10.0,
    }
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(dynctl("replay", path, "--decode-itl-ms", "5").out.split())
    assert "5 aggregated workers in a, b (recording a.dynrec)" in shown
    assert "prefill_tokens_per_s 20,000: the workers do not publish them" in shown
    assert "decode_itl_ms 10" not in shown
    assert dynctl("replay", path, "--total-blocks", "700", "-o", "json").json["results"][0][
        "engine"
    ]["total_blocks"] == 700  # fmt: skip


def test_flags_overrule_the_fleet_of_a_recording(dynctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.dynrec"
    path.write_bytes(encode_records(RecordedFleet(workers=5, state=True).records(chats(13, 6))))
    chosen = dynctl("replay", path, "--workers", 2, "-o", "json").json
    assert (chosen["fleet"], chosen["assumed"]) == ("2 aggregated workers", {})
    recorded = dynctl("replay", path, "--recording", path, "-o", "json").json
    assert len(recorded["results"][0]["workers"]) == 5
    assert [one["policy"] for one in recorded["results"]] == ["live", "round-robin"]


@pytest.mark.parametrize("decoders", [2, 0])
@pytest.mark.parametrize("booked", [True, False])
def test_a_recorded_fleet_whose_bookings_do_not_show_its_pairs_has_a_note(
    dynctl: Run, tmp_path: Path, decoders: int, booked: bool
) -> None:
    path = tmp_path / "a.dynrec"
    recorded = RecordedFleet(workers=3, decoders=decoders, state=True, zones=("a", "b"))
    records = [
        one
        for one in recorded.records(chats(13, 2))
        if booked or not (isinstance(one, Changed) and isinstance(one.change, Booked | Freed))
    ]
    path.write_bytes(encode_records(records))
    in_turn = dynctl("replay", path, "-o", "json").json
    unknown = bool(decoders) and not booked
    assert any("bootstrap" in note for note in in_turn["notes"]) == unknown
    assert "start together" not in in_turn["fleet"]
    if not decoders:
        refused = dynctl("replay", path, "--bootstrap")
        assert (refused.code, refused.out) == (2, "")
        assert "no prefill workers" in refused.err
        return
    pairs = dynctl("replay", path, "--bootstrap", "-o", "json").json
    assert "start together" in pairs["fleet"]
    assert not any("bootstrap" in note for note in pairs["notes"])
    assert any(note.startswith("pairs:") for note in pairs["notes"])
    transfers = [one["results"][0]["transfers"]["transfers"] for one in (in_turn, pairs)]
    assert transfers[0] == transfers[1] > 0


def test_a_recording_on_itself_has_the_changes_of_its_fleet_and_a_moment_has_none(
    dynctl: Run, tmp_path: Path
) -> None:
    """Two workers; one leaves and another joins between the first and the last request."""
    config = {"router_mode": "round-robin"}

    def card(number: int) -> Worker:
        size = ModelRuntimeConfig(total_kv_blocks=900)
        return Worker(number, f"w{number}", "m", block_size=16, runtime_config=size)

    def requests(*times: float) -> list[Record]:
        return [Arrived(at, f"r{at}", "m", 40, 16, (1, 2)) for at in times]

    records: list[Record] = [
        Start(100.0, "frontend", "f", "1", settings=config),
        State(100.0, Router(RouterConfig(router_mode="round-robin")).snapshot()),
        Changed(100.0, WorkerUpserted(card(1))),
        Changed(100.0, WorkerUpserted(card(2))),
        *requests(100.0, 110.0),
        Changed(115.0, WorkerLost(1)),
        Changed(115.0, WorkerUpserted(card(3))),
        *requests(120.0, 130.0),
    ]
    path, other = tmp_path / "a.dynrec", tmp_path / "b.dynrec"
    for one in (path, other):
        one.write_bytes(encode_records(records))

    def replayed(*given: object) -> tuple[dict[str, int], int, list[int], bool]:
        ran = dynctl("replay", path, *given, "-o", "json")
        assert ran.code == 0, ran.err
        report = ran.json
        first = report["results"][0]
        noted = any("at one moment" in note for note in report["notes"])
        shares = sorted(one["requests"] for one in first["workers"])
        return first["fleet"]["changes"], first["cache"]["cached_tokens"], shares, noted

    itself = replayed("--recording", path)
    assert itself == ({"joins": 1, "leaves": 1}, 32, [1, 1, 2], False)
    assert itself == replayed("--policy", "round-robin")
    (tmp_path / "linked").symlink_to(path)
    assert replayed("--recording", tmp_path / "linked") == itself
    still: Any = ({}, 64, [2, 2], True)
    assert replayed("--recording", other) == still
    assert replayed("--recording", path, "--at", "+30s") == still
