"""`dynctl top` as a command: one frame in every format, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dynctl.cli.app import run
from dynctl.screens.canvas import Canvas
from dynctl.sources.demo.fleet import DemoSource
from dynctl.sources.domains import DomainBoard
from dynctl.top.once import frame_of, top_frame
from tests.dynctl.cli.test_check import CAPTURE, written
from tests.dynctl.top.fleet import meter, snapshot
from tests.golden.fleets import stranded_zones
from tests.waiting import patience

ROOT = Path(__file__).parents[3]


def dynctl(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_one_frame_has_all_four_parts(capsys: pytest.CaptureFixture[str]):
    code, out, err = dynctl(capsys, "top", "--demo", "--once")
    assert (code, err) == (0, "")
    parts = (
        "domains by zone",
        "workers (6)",
        "decisions (last 10 of 577 since start)",
        "alerts (1)",
    )
    lines = out.splitlines()
    places = [lines.index(part) for part in parts]
    assert places == sorted(places)
    assert out.isascii()
    assert "\x1b" not in out


def test_one_frame_for_programs(capsys: pytest.CaptureFixture[str]):
    code, out, _ = dynctl(capsys, "top", "--demo", "--once", "-o", "json")
    frame = json.loads(out)
    assert (code, frame["kind"], frame["schema"]) == (0, "TopFrame", 1)
    assert len(frame["snapshot"]["workers"]) == 6
    assert frame["snapshot"]["told"]["load"]["source"] == "demo fleet"
    assert frame["snapshot"]["told"]["queue"]["unknown"]
    assert [row["capacity"]["value"] for row in frame["domains"]["rows"]] == [
        "zone-a", "zone-b",
    ]  # fmt: skip
    assert frame["alerts"][0]["code"] == "DYT0902"


def test_an_output_format_prints_one_frame(capsys: pytest.CaptureFixture[str]):
    code, out, _ = dynctl(capsys, "top", "--demo", "-o", "yaml", "--domain", "rack")
    frame = yaml.safe_load(out)
    assert (code, frame["domains"]["domain"]) == (0, "rack")


def test_a_saved_view_is_shown_as_one_frame(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "view.json"
    file.write_bytes(DemoSource().save())
    code, out, _ = dynctl(capsys, "top", "--once", "--view", file)
    assert code == 0
    assert "workers (6)" in out
    assert "unknown: a saved view keeps no decisions" in out
    assert "router queue ?" in out


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        (
            ["--demo", "--once", "--domain", "row"],
            2,
            "--domain row: no worker publishes this domain",
        ),
        (["--demo"], 2, "top needs a terminal that supports cursor movement"),
        (["--demo", "--frontend", "http://127.0.0.1:1"], 2, "two sources are set"),
        (["--demo", "--once", "--frontend-log", "x"], 2, "--demo does not need a log"),
        (["--once", "--frontend", "http://127.0.0.1:1"], 3, "no frontend reports its fleet"),
        (["--once", "--file-kv", "x", "--frontend-log", "nowhere"], 2, "the file does not exist"),
        (["--demo", "--rate", "0"], 2, "--rate"),
    ],
)
def test_invalid_options_are_refused(capsys, line: list[str], code: int, error: str):
    got, out, err = dynctl(capsys, "top", *line)
    assert (got, out) == (code, "")
    assert error in err
    assert "Traceback" not in err


def test_help_and_one_frame_do_not_import_textual():
    code = (
        "import sys\n"
        "from dynctl.cli.app import run\n"
        "assert run(['top', '--demo', '--once']) == 0\n"
        "sys.stderr.write(str('textual' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patience(60)
    )
    assert (done.returncode, done.stderr) == (0, "False")


@pytest.mark.parametrize("width", [64, 80, 120, 200])
def test_a_frame_fits_its_terminal_and_needs_no_more_than_ascii(width: int):
    source = stranded_zones()
    shown = snapshot(source, meters=(meter(2.1),), problem="http://x does not answer")
    text = top_frame(frame_of(shown), Canvas(width))
    assert text.isascii()
    assert all(len(line) <= width for line in text.splitlines())
    assert "NOT CURRENT  as of 12:04:31: http://x does not answer" in text
    assert "REFUSED" in text
    assert "STRANDED" in text


def test_a_frame_shows_the_same_numbers_as_the_lists():
    from dynctl.documents.workers import WorkerList
    from dynctl.screens.render import draw

    source = stranded_zones()
    shown = snapshot(source)
    text = top_frame(frame_of(shown), Canvas(None, wide=True))
    listed = draw(WorkerList("x", list(shown.workers)), Canvas(None, wide=True))
    topology = draw(DomainBoard().view(shown).shown, Canvas(None, wide=True))
    for name in ("prefill-b0", "decode-b0", "prefill-d1"):
        row = next(line.split() for line in listed.splitlines() if line.startswith(name))
        mine = next(line.split() for line in text.splitlines() if line.startswith(name))
        assert set(row) <= set(mine)
    for value in ("zone-b", "zone-c"):
        row = next(line.split() for line in topology.splitlines() if line.startswith(value))
        mine = next(line.split() for line in text.splitlines() if line.startswith(value))
        assert set(row) <= set(mine)


def test_a_log_without_decisions_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The log of a worker, or one without the level info, is not a frontend without requests."""
    entries = json.loads(CAPTURE.read_text())
    kv = written(tmp_path / "kv", {key: row["value"] for key, row in entries.items()})
    log = tmp_path / "worker.log"
    log.write_text("starting\n")
    source = ("--file-kv", kv, "--frontend-log", log)
    for command in (("top", "--once"), ("decisions",)):
        code, out, _ = dynctl(capsys, *command, *source)
        assert code == 0
        assert "no decisions yet" in out
        assert "(no `Selected worker` line yet: DYN_LOG=info)" in " ".join(out.split())


@pytest.mark.parametrize("width", [80, 200])
def test_no_two_columns_of_a_table_have_one_heading(width: int):
    text = top_frame(frame_of(snapshot(stranded_zones())), Canvas(width))
    for heading in (line for line in text.splitlines() if line[:5] in ("ZONE ", "NAME ")):
        names = [one for one in re.split(r"  +", heading) if one]
        assert len(names) == len(set(names)), heading
