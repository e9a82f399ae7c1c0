"""A recording of a live Dynamo: of its shadow router and of `dynctl record`, routed again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from dynctl.documents.hits import UNEXPLAINED
from dynctl.documents.recording import Arrived, Decided, Finished, Start
from dynctl.documents.recording_file import read_recording, recording_report
from dynctl.sources.recording import RecordedMoment, replayed
from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.test_observe import REPLICA_SYNC, _clean, ask, register_events, shadowing
from tests.waiting import patience, until_now

#: Choices that may differ: those made from events that arrived here in another order.
_RACES = 2


def test_a_recording_of_a_live_dynamo_routes_again_as_it_did(
    tmp_path: Path, finding: Callable[[str], None]
) -> None:
    observed, recorded = tmp_path / "observed.dynrec", tmp_path / "recorded.dynrec"
    with DynamoFleet(aggregated(3), frontend_args=REPLICA_SYNC, speedup=0) as fleet:
        register_events(fleet.frontend)
        url = f"http://127.0.0.1:{fleet.frontend.port}"
        source = ("--file-kv", str(fleet.file_kv), "--frontend", url)
        command = [sys.executable, "-m", "dynctl", "record", str(recorded), *source, "-o", "json"]
        alone = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_clean()
        )
        try:
            # The file has its first chunk once everything is followed.
            until_now(lambda: recorded.exists() and recorded.stat().st_size > 100, 30.0)
            with shadowing(*source, "--record", str(observed)) as shadow:
                ids: list[str] = []
                answers = []
                questions = [
                    *((n,) for n in range(12)),
                    *((n, n + 1, n + 2) for n in (12, 15, 18, 21)),
                ]
                for numbers in questions:
                    asked = shadow.asked(fleet, *numbers)
                    answers += asked
                    ids += [answer.body["id"].removeprefix("chatcmpl-") for answer in asked]
                    # One that is behind reads a burst, in another order than the frontend had.
                    until_now(partial(_has, recorded, list(ids)), 20.0)
                until_now(shadow.idle)
                rows = shadow.decisions()
                live_right = sum(bool(rows[one]["observed"]["as_predicted"]) for one in ids)
            until_now(lambda: _has(recorded, ids), 20.0)
            alone.send_signal(signal.SIGINT)
            out, err = alone.communicate(timeout=patience(20))
            assert alone.returncode == 0, err
            assert '"kind": "RecordingReport"' in out
        finally:
            alone.kill()
            alone.wait()

    for path, kind in ((observed, "observe"), (recorded, "dynamo")):
        records = list(read_recording(path))
        start = records[0]
        assert isinstance(start, Start)
        assert start.source == kind
        assert {"arrivals", "decisions", "kv_events", "loads"} <= start.complete
        assert "outcomes" not in start.complete
        decided = {one.id: one for one in records if isinstance(one, Decided)}
        arrived = {one.id: one for one in records if isinstance(one, Arrived)}
        finished = {one.id for one in records if isinstance(one, Finished)}
        for name, answer in zip(ids, answers, strict=True):
            chosen = decided[name].decode
            assert chosen is not None
            assert chosen[0] == answer.placement.decode
            assert arrived[name].hashes
        assert len(finished & set(ids)) >= len(ids) - 1
        again = replayed(records)
        finding(
            f"record ({kind}): {again.same} of {again.same + len(again.differ)} choices are the "
            f"same on the recorded state; {sum(again.skipped.values())} were not compared"
        )
        differ = [name for name, _, _ in again.differ if name in ids]
        assert len(differ) <= max(_RACES, len(ids) - live_right)
        assert recording_report(path).records["KvEvent"] > 0
        moment = RecordedMoment(path, None)
        assert len(moment.workers()) == 3
        assert moment.decision(ids[0]).id == ids[0]
    assert live_right >= len(ids) - _RACES


def test_hits_of_a_live_dynamo(finding: Callable[[str], None]) -> None:
    with DynamoFleet(aggregated(2), frontend_args=REPLICA_SYNC, speedup=0) as fleet:
        register_events(fleet.frontend)
        command = [sys.executable, "-m", "dynctl", "hits", "--for", "3s", "-o", "json"]
        judging = subprocess.Popen(
            [*command, "--file-kv", str(fleet.file_kv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_clean(),
        )
        try:
            # It judges the requests that come while it follows the fleet.
            asked = 0
            until = time.monotonic() + patience(30)
            while judging.poll() is None and time.monotonic() < until:
                ask(fleet, asked)
                asked += 1
            out, err = judging.communicate(timeout=patience(10))
        finally:
            judging.kill()
            judging.wait()
    assert judging.returncode == 0, err
    report = json.loads(out)
    rungs = {one["rung"]: one for one in report["rungs"]}
    finding(f"hits: {report['requests']} requests, expected {rungs['expected']['rate']}")
    assert report["models"] == [fleet.model]
    assert report["workers"] == 2
    assert report["capacity_blocks"] == 2 * 512
    assert 0 < report["requests"] <= asked
    # The prompts of a topic are equal but for their last blocks.
    assert rungs["reachable"]["rate"] >= rungs["expected"]["rate"] > 0
    assert rungs["reused"]["unknown"].startswith("Dynamo does not publish what its engines reused")
    # Events of the last requests may come after the end.
    causes = [one for rung in rungs.values() for one in rung.get("causes", ())]
    assert sum(one["share"] for one in causes if one["cause"] == UNEXPLAINED) < 0.05


def _has(path: Path, ids: Collection[str]) -> bool:
    """Whether the ends of these requests are recorded."""
    time.sleep(0.2)  # reading the file is work
    ended = {one.id for one in read_recording(path) if isinstance(one, Finished)}
    return ended >= set(ids)
