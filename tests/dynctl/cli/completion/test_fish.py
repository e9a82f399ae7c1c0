"""The script in a real fish, which tells by itself what it would offer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dynctl.cli.completion.conftest import ROOT, Fleet, Program
from tests.waiting import patience

pytestmark = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")

Offer = Callable[[str], list[str]]


@pytest.fixture
def offered(tmp_path: Path, program: Program) -> Offer:
    """``offered("dynctl wo")``: the words, without what is said about them."""
    script = ROOT / "completions" / "dynctl.fish"

    def asks(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", "source $argv[1]; complete -C $argv[2]", script, line],
            env=program.env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patience(60),
        )
        assert done.stderr == ""
        return [one.partition("\t")[0] for one in done.stdout.splitlines()]

    return asks


def test_what_is_known_is_completed_without_starting_anything(offered: Offer, program: Program):
    assert "workers" in offered("dynctl wor")
    assert set(offered("dynctl workers ")) == {
        *("list", "show", "cordon", "uncordon", "drain", "add", "remove")
    }
    assert "list" in offered("dynctl --demo -o json workers li")
    assert "--no-headers" in offered("dynctl workers list --no-h")
    assert set(offered("dynctl workers list -o js")) >= {"json", "jsonl"}
    assert "--output=yaml" in offered("dynctl workers list --output=y")
    assert "DYT0903" in offered("dynctl explain DYT09")
    assert "--router-mode" in offered("dynctl serve --router-mod")
    assert "zsh" in offered("dynctl completion z")
    assert program.calls == []


def test_nothing_is_offered_where_nothing_is_known(offered: Offer, program: Program):
    for line in ("dynctl route hel", "dynctl route -- --ex", "dynctl --frontend htt"):
        assert offered(line) == []
    assert program.calls == []


def test_live_names_come_from_the_frontend_of_the_line(offered: Offer, fleet: Fleet):
    line = f"dynctl --frontend {fleet.url} workers show "
    assert set(offered(line)) == {"decode-a0", "decode-b0", "prefill-a0", "prefill-b0"}
    assert "--model=org/llama-70b" in offered(
        f"dynctl route --frontend {fleet.url} hi --model=org/llama-7"
    )
    line = f"dynctl workers list --frontend {fleet.url} -l zone="
    assert set(offered(line)) == {"zone=zone-a", "zone=zone-b"}


def test_contexts_and_paths(offered: Offer, tmp_path: Path):
    (tmp_path / "c.toml").write_text("[contexts.prod]\ntimeout = 1\n")
    (tmp_path / "view.json").touch()
    (tmp_path / "folder").mkdir()
    assert offered("dynctl check --context pr") == ["prod"]
    assert "view.json" in offered("dynctl route --view vi")
    assert "folder/" in offered("dynctl check --file-kv fol")
