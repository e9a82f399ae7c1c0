"""The script in a real, interactive zsh: TAB is pressed, and the line is looked at."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dynctl.cli.completion.conftest import ROOT, Fleet, Program
from tests.dynctl.cli.completion.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")

#: Ctrl-T writes down the line, Ctrl-U forgets it.
SETUP = """\
unsetopt beep prompt_sp prompt_cr
{load}
note() {{ print -r -- "$BUFFER" > {out}/new; mv {out}/new {out}/line }}
zle -N note
bindkey -e
bindkey '^T' note
bindkey '^U' kill-whole-line
PS1='rea''dy> '
"""
SOURCED = "autoload -Uz compinit; compinit -u -D; source {script}"
FOUND = "fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -D"

Press = Callable[[str], str]


@pytest.fixture(params=["sourced", "found"])
def press(request, tmp_path: Path, program: Program) -> Iterator[Press]:
    """``press("dynctl wo")``: types that and TAB, returns the line."""
    folder = ROOT / "completions"
    load = (SOURCED if request.param == "sourced" else FOUND).format(
        script=folder / "_dynctl", folder=folder
    )
    setup = tmp_path / "setup"
    setup.write_text(SETUP.format(load=load, out=tmp_path))
    terminal = Terminal(["zsh", "-f", "-i"], program.env, tmp_path)
    terminal.send(f"source {setup}\n")

    def pressed(line: str) -> str:
        terminal.send(f"\x15{line}\t\x14")
        return terminal.wait_for_file(tmp_path / "line").rstrip("\n")

    try:
        terminal.wait_for("ready> ")
        yield pressed
    finally:
        terminal.close()


def test_what_is_known_is_completed_without_starting_anything(press: Press, program: Program):
    assert press("dynctl wor") == "dynctl workers "
    assert press("dynctl workers sh") == "dynctl workers show "
    assert press("dynctl --demo -o json workers li") == "dynctl --demo -o json workers list "
    assert press("dynctl workers list --no-h") == "dynctl workers list --no-headers "
    assert press("dynctl workers list -o ya") == "dynctl workers list -o yaml "
    assert press("dynctl workers list --output=ya") == "dynctl workers list --output=yaml "
    assert press("dynctl explain DYT0903") == "dynctl explain DYT0903 "
    assert press("dynctl serve --router-mod").rstrip() == "dynctl serve --router-mode"
    assert press("dynctl completion z") == "dynctl completion zsh "
    assert program.calls == []


def test_nothing_is_offered_where_nothing_is_known(press: Press, program: Program):
    for line in ("dynctl route hel", "dynctl route -- --ex", "dynctl --frontend htt"):
        assert press(line) == line
    assert program.calls == []


def test_live_names_come_from_the_frontend_of_the_line(press: Press, fleet: Fleet):
    line = f"dynctl --frontend {fleet.url} workers show prefill-b"
    assert press(line) == line + "0 "
    line = f"dynctl route --frontend {fleet.url} hi --model=org/llama-7"
    assert press(line) == line + "0b "
    line = f"dynctl workers list --frontend {fleet.url} -l zo"
    assert press(line) == line + "ne="
    assert press(line + "ne=zone-a") == line + "ne=zone-a "


def test_contexts_and_paths(press: Press, tmp_path: Path):
    (tmp_path / "c.toml").write_text("[contexts.prod]\ntimeout = 1\n")
    (tmp_path / "view.json").touch()
    (tmp_path / "folder").mkdir()
    assert press("dynctl check --context pr") == "dynctl check --context prod "
    assert press("dynctl route --view vi") == "dynctl route --view view.json "
    assert press("dynctl check --file-kv fol") == "dynctl check --file-kv folder/"
