"""`dynctl check` and `dynctl explain` as command lines, on deployments of which nobody answers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dynctl.cli.conftest import Run
from tests.ports import free_port

CAPTURE = Path(__file__).parents[2] / "captures" / "etcd-disagg-required.json"


def encoded(name: str) -> str:
    """As Dynamo's file backend names its files."""
    return "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"%{byte:02X}"
        for byte in name.encode()
    )


def written(root: Path, entries: dict[str, Any]) -> Path:
    """A file store that holds ``entries``, whose leases do not end while a test runs."""
    for key, value in entries.items():
        version, bucket, name = key.split("/", 2)
        directory = root / version / bucket
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / encoded(name)
        file.write_text(json.dumps(value))
        later = time.time() + 3600
        os.utime(file, (later, later))
    return root


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """The captured two-zone deployment: all is registered, and no process runs any more."""
    text = CAPTURE.read_text()
    values = {key: row["value"] for key, row in json.loads(text).items()}
    # A port of the capture may belong to somebody by now: none of these does.
    nobody = f"127.0.0.1:{free_port()}"

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(one) for key, one in value.items()}
        if isinstance(value, list):
            return [moved(one) for one in value]
        if isinstance(value, str) and "127.0.0.1:" in value:
            head, _, tail = value.partition("127.0.0.1:")
            digits = len(tail) - len(tail.lstrip("0123456789"))
            return head + nobody + tail[digits:]
        return value

    return written(tmp_path / "kv", {key: moved(value) for key, value in values.items()})


def checks(document: Any) -> dict[str, Any]:
    return {check["code"]: check for s in document["sections"] for check in s["checks"]}


def test_a_dead_fleet_is_named_worker_by_worker(dynctl: Run, dead: Path):
    before = {path: path.stat().st_mtime_ns for path in dead.rglob("*")}
    frontend = f"http://127.0.0.1:{free_port()}"
    ran = dynctl("check", "--file-kv", dead, "--frontend", frontend, "--wait", "0.5", "-o", "json")
    assert ran.code == 1
    found = checks(ran.json)
    assert ran.json["kind"] == "CheckReport"
    assert found["DYR0101"]["state"] == found["DYR0102"]["state"] == "pass"
    assert found["DYR0210"]["state"] == "pass"
    assert found["DYR0302"]["state"] == "fail"
    workers = {finding["subject"] for finding in found["DYR0302"]["findings"]}
    assert len(workers) == 2
    assert {finding["subject"] for finding in found["DYR0303"]["findings"]} == workers
    for finding in found["DYR0303"]["findings"]:
        assert "is not reachable" in finding["value"]
    assert found["DYR0103"]["state"] == "fail"
    assert (found["DYR0104"]["state"], found["DYR0104"]["unread"]) == ("skip", True)
    assert (found["DYR0305"]["state"], found["DYR0305"]["unread"]) == ("skip", True)
    assert found["DYR0401"]["findings"][0]["subject"] == frontend
    assert found["DYR0406"]["state"] == "skip"
    # Looking changed nothing.
    assert {path: path.stat().st_mtime_ns for path in dead.rglob("*")} == before


def test_the_formats_say_the_same(dynctl: Run, dead: Path):
    arguments = ("check", "--file-kv", dead, "--wait", "0.2")
    document = dynctl(*arguments, "-o", "yaml")
    assert document.code == 1
    states = {code: check["state"] for code, check in checks(yaml.safe_load(document.out)).items()}
    lines = dynctl(*arguments, "-o", "jsonl").out.splitlines()
    assert {row["code"]: row["state"] for row in map(json.loads, lines)} == states
    table = dynctl(*arguments).out
    for code, state in states.items():
        if state != "skip":
            mark = state.upper() if state in ("fail", "warn") else state
            assert f"{mark} {code} " in table
    names = dynctl(*arguments, "-o", "name").out.split()
    assert names == [code for code, state in states.items() if state in ("fail", "warn")]


def test_a_discovery_that_is_not_there_exits_3_after_the_rest_was_judged(
    dynctl: Run, tmp_path: Path
):
    frontend = f"http://127.0.0.1:{free_port()}"
    ran = dynctl("check", "--file-kv", tmp_path / "none", "--frontend", frontend)
    assert ran.code == 3
    assert "FAIL DYR0101" in ran.out
    assert str(tmp_path / "none") in ran.out
    assert "--file-kv DIR or DYN_FILE_KV" in ran.out
    assert "FAIL DYR0401" in ran.out
    assert ran.err == ""


def test_an_etcd_that_is_not_there_exits_3(dynctl: Run):
    address = f"127.0.0.1:{free_port()}"
    ran = dynctl("check", "--etcd-endpoints", address)
    assert ran.code == 3
    assert address in ran.out


def test_a_wrong_namespace_lists_the_existing_ones(dynctl: Run, dead: Path):
    ran = dynctl("check", "--file-kv", dead, "--dyn-namespace", "prod")
    assert ran.code == 1
    assert "FAIL DYR0102" in ran.out
    assert "registered: dynamo" in ran.out
    assert "--dyn-namespace dynamo" in ran.out


def test_a_suppressed_check_does_not_fail(dynctl: Run, tmp_path: Path):
    root = written(tmp_path / "kv", {"v1/novelties/dynamo/x": {"type": "Novelty"}})
    arguments = ("check", "--file-kv", root)
    assert dynctl(*arguments).code == 1
    assert dynctl(*arguments, "--suppress", "dyr0102").code == 0
    assert dynctl(*arguments, "--suppress", "DYR0102", "--fail-on", "warn").code == 1
    both = ("--suppress", "DYR0102", "--suppress", "DYR0202")
    assert dynctl(*arguments, *both, "--fail-on", "warn").code == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--suppress", "DYR0999"), "unknown code"),
        (("--fail-on", "never"), "expected one of fail, skip, warn"),
        (("--demo",), "running deployment"),
        (("--view", "x.json"), "running deployment"),
        (("--discovery", "zookeeper"), "unknown discovery backend"),
    ],
)
def test_what_cannot_be_used_is_named(dynctl: Run, arguments: tuple[str, ...], problem: str):
    ran = dynctl("check", *arguments)
    assert ran.code == 2
    assert problem in ran.err
    assert ran.out == ""


# -- explain ---------------------------------------------------------------------------------------


def test_a_code_is_explained_offline(dynctl: Run):
    ran = dynctl("explain", "dyr0309")
    assert ran.code == 0
    assert "PYTHONHASHSEED=0" in ran.out
    assert dynctl("explain", "DYR0309", "-o", "json").json["level"] == "warn"


def test_all_codes_are_listed(dynctl: Run):
    ran = dynctl("explain", "-o", "name")
    assert ran.code == 0
    codes = ran.out.split()
    assert {"DYR0101", "DYT0102"} <= set(codes)
    rows = dynctl("explain").out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == codes


def test_an_unknown_code_exits_2_and_names_those_near(dynctl: Run):
    ran = dynctl("explain", "DYR309")
    assert ran.code == 2
    assert "DYR309: unknown code" in ran.err
    assert "dynctl explain DYR0309" in ran.err
