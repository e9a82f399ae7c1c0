"""The scripts in real shells: TAB is pressed, and the line or what the shell offers is read."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dynctl.cli.completion.conftest import ROOT, Fleet
from tests.dynctl.cli.completion.terminal import Terminal
from tests.waiting import patience

#: Ctrl-T writes the line down.
BASH = """\
bind 'set bell-style none' 'set completion-query-items 0' 'set page-completions off'
bind 'set enable-bracketed-paste off'
source {script}
note() {{ printf '%s\\n' "$READLINE_LINE" > {out}/new; mv {out}/new {out}/line; }}
bind -x '"\\C-t": note'
PS1='rea''dy> '
"""
ZSH = """\
unsetopt beep prompt_sp prompt_cr
autoload -Uz compinit; compinit -u -D; source {script}
note() {{ print -r -- "$BUFFER" > {out}/new; mv {out}/new {out}/line }}
zle -N note
bindkey -e
bindkey '^T' note
bindkey '^U' kill-whole-line
PS1='rea''dy> '
"""
FOUND = ZSH.replace("autoload", "fpath=({folder} $fpath); autoload").replace(
    "; source {script}", ""
)
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "dynctl.bash", BASH),
    "zsh": (["zsh", "-f", "-i"], "_dynctl", ZSH),
    "zsh, found in its path": (["zsh", "-f", "-i"], "_dynctl", FOUND),
}

Press = Callable[[str], str]
HOSTILE = (
    b'{"workers": [{"name": "x$(touch ran)", "model": "m"}, {"name": "x`touch ran`", "model": "m"},'
    b' {"name": "x;touch ran", "model": "m"}, {"name": "x\\"); touch ran; (\\"", "model": "m"},'
    b' {"name": "x\'; touch ran; \'", "model": "m"}, {"name": "x\\ntouch ran", "model": "m"},'
    b' {"name": "x\\u001b[31m", "model": "m"}, {"name": "x-safe", "model": "m"}]}'
)


@pytest.fixture(params=SHELLS)
def press(
    request: pytest.FixtureRequest, tmp_path: Path, environment: dict[str, str]
) -> Iterator[Press]:
    """``press("dynctl wo")``: types that and TAB in bash and in zsh, returns the line."""
    argv, script, text = SHELLS[request.param]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    setup = tmp_path / "setup"
    folder = ROOT / "completions"
    setup.write_text(text.format(script=folder / script, folder=folder, out=tmp_path))
    terminal = Terminal(argv, environment, tmp_path)
    terminal.send(f"source {setup}\n")

    def pressed(line: str) -> str:
        terminal.send(f"\x15{line}\t\x14")
        return terminal.wait_for_file(tmp_path / "line").rstrip("\n")

    try:
        terminal.wait_for("ready> ")
        yield pressed
    finally:
        terminal.close()


def test_commands_options_and_words(press: Press) -> None:
    assert press("dynctl wor") == "dynctl workers "
    assert press("dynctl workers sh") == "dynctl workers show "
    assert press("dynctl --demo -o json workers li") == "dynctl --demo -o json workers list "
    assert press("dynctl workers list --no-h") == "dynctl workers list --no-headers "
    assert press("dynctl workers list -o ya") == "dynctl workers list -o yaml "
    assert press("dynctl explain DYT0903") == "dynctl explain DYT0903 "
    assert press("dynctl serve --router-mod") == "dynctl serve --router-mode "
    assert press("dynctl decisions --refu") == "dynctl decisions --refused "
    assert press("dynctl completion z") == "dynctl completion zsh "
    assert press("dynctl -n workers workers li") == "dynctl -n workers workers list "


def test_live_names_come_from_the_frontend_of_the_line(press: Press, fleet: Fleet) -> None:
    line = f"dynctl --frontend {fleet.url} workers show prefill-b"
    assert press(line) == line + "0 "
    line = f"dynctl route --frontend '{fleet.url}' hi --model org/llama-7"
    assert press(line) == line + "0b "
    line = f"dynctl workers list --frontend {fleet.url} -l zone=zone-a"
    assert press(line) == line + " "
    fleet.body = b'{"decisions": [{"id": "0193-ab"}]}'
    line = f"dynctl why --frontend {fleet.url} 01"
    assert press(line) == line + "93-ab "
    assert fleet.asked[-1][0] == "/v1/decisions?limit=100"


def test_contexts_and_paths(press: Press, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[contexts.prod]\ntimeout = 1\n")
    (tmp_path / "view.json").touch()
    assert press("dynctl check --context pr") == "dynctl check --context prod "
    assert press("dynctl context use pr") == "dynctl context use prod "
    assert press("dynctl route --view vi") == "dynctl route --view view.json "


def test_names_that_a_shell_would_run_are_never_offered(
    press: Press, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.body = HOSTILE
    line = f"dynctl workers show --frontend {fleet.url} x"
    assert press(line) == line + "-safe "
    press("dynctl workers show --frontend $(touch${IFS}ran) x")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("press", ["bash"], indirect=True)
def test_bash_joins_what_readline_splits(press: Press, fleet: Fleet, tmp_path: Path) -> None:
    """At = and : readline begins another word, and with an @."""
    line = f"dynctl workers list --frontend {fleet.url} -l "
    assert press(line + "rack=r:b") == line + "rack=r:b "
    assert press(line + "zone=zone-a,mod") == line + "zone=zone-a,model=org/llama-"
    assert press(line + "zone!=zone-b") == line + "zone!=zone-b "
    assert press("dynctl workers list --output=y") == "dynctl workers list --output=yaml "
    line = f'dynctl route --frontend="{fleet.url}" --model=org/llama-7'
    assert press(line) == line + "0b "
    (tmp_path / "c.toml").write_text("[contexts.'lab@one']\n")
    assert press("dynctl check --context lab@o") == "dynctl check --context lab@one "


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(tmp_path: Path, environment: dict[str, str], fleet: Fleet) -> None:
    script = ROOT / "completions" / "dynctl.fish"

    def offered(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", "source $argv[1]; complete -C $argv[2]", script, line],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patience(60),
        )
        assert done.stderr == ""
        return [word.partition("\t")[0] for word in done.stdout.splitlines()]

    assert "workers" in offered("dynctl wor")
    assert set(offered("dynctl workers list -o js")) >= {"json", "jsonl"}
    assert "--output=yaml" in offered("dynctl workers list --output=y")
    assert "--router-mode" in offered("dynctl serve --router-mod")
    line = f"dynctl workers show --frontend {fleet.url} "
    assert set(offered(line)) == {"decode-a0", "decode-b0", "prefill-a0", "prefill-b0"}
    fleet.body = HOSTILE
    assert offered(line) == ["x-safe"]
    assert not (tmp_path / "ran").exists()
