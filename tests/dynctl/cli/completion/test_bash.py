"""The script in a real, interactive bash: TAB is pressed, and the line is looked at."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dynctl.cli.completion.conftest import ROOT, Fleet, Program
from tests.dynctl.cli.completion.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

#: The commands of `dynctl workers`, in the order of its help.
WORKERS = ["list", "show", "cordon", "uncordon", "drain", "add", "remove"]

#: Ctrl-T writes down the line and what was offered, Ctrl-U forgets both.
SETUP = """\
bind 'set bell-style none' 'set completion-query-items 0' 'set page-completions off'
bind 'set enable-bracketed-paste off'
source {script}
spy() {{ _dynctl; printf '%s\\n' "${{COMPREPLY[@]}}" > {out}/offered; }}
complete -F spy dynctl
note() {{
    printf '%s\\n' "$READLINE_LINE" > {out}/new
    cat {out}/offered >> {out}/new 2>/dev/null
    rm -f {out}/offered
    mv {out}/new {out}/line
}}
bind -x '"\\C-t": note'
{more}
PS1='rea''dy> '
"""


@dataclass(frozen=True)
class Completed:
    """``line`` as it stands after one TAB, and what was offered."""

    line: str
    offered: list[str]


Press = Callable[..., Completed]


@pytest.fixture
def press(tmp_path: Path, program: Program) -> Iterator[Press]:
    """``press("dynctl wo")``: types that and TAB."""
    terminals = []

    def shell(more: str) -> Terminal:
        terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], program.env, tmp_path)
        terminals.append(terminal)
        script = ROOT / "completions" / "dynctl.bash"
        setup = tmp_path / "setup"
        setup.write_text(SETUP.format(script=script, out=tmp_path, more=more))
        terminal.send(f"source {setup}\n")
        terminal.wait_for("ready> ")
        return terminal

    def pressed(line: str, after: str = "", more: str = "") -> Completed:
        if more or not terminals:
            shell(more)
        # Ctrl-B steps back over what is to stand after the cursor.
        terminals[-1].send(f"\x15{line}{after}{chr(2) * len(after)}\t\x14")
        first, *rest = terminals[-1].wait_for_file(tmp_path / "line").splitlines()
        return Completed(first, [one for one in rest if one])

    yield pressed
    for terminal in terminals:
        terminal.close()


def test_what_is_known_is_completed_without_starting_anything(press: Press, program: Program):
    assert press("dynctl wor").line == "dynctl workers "
    assert press("dynctl workers ").offered == WORKERS
    assert press("dynctl workers sh").line == "dynctl workers show "
    assert press("dynctl --demo -o json workers li").line == "dynctl --demo -o json workers list "
    assert press("dynctl workers list --no-h").line == "dynctl workers list --no-headers "
    assert press("dynctl workers list -o js").offered == ["json", "jsonl"]
    assert press("dynctl decisions --ref").line == "dynctl decisions --refused "
    assert press("dynctl workers list --output=y").line == "dynctl workers list --output=yaml "
    assert press("dynctl explain DYT0903").line == "dynctl explain DYT0903 "
    assert len(press("dynctl explain DYR0").offered) > 9
    assert press("dynctl serve --router-m").offered == ["--router-mode", "--router-max-tree-size"]
    assert press("dynctl serve frontend --router-mode ro").line.endswith(
        "--router-mode round-robin "
    )
    assert press("dynctl topology render --kind ClusterTopologyB").line.endswith("Binding ")
    assert press("dynctl completion z").line == "dynctl completion zsh "
    assert "--context" in press("dynctl --c").offered
    assert program.calls == []


def test_nothing_is_offered_where_nothing_is_known(press: Press, program: Program):
    for line in (
        "dynctl route hel",
        "dynctl route -- --ex",
        "dynctl workers list extra wor",
        "dynctl --frontend htt",
        "dynctl nonsense wor",
        "dynctl workers list --no-such=x",
        "dynctl why 12",
    ):
        assert press(line) == Completed(line, [])
    assert program.calls == []


def test_option_values_are_not_taken_for_commands(press: Press):
    assert press("dynctl -n workers top").offered == ["topology", "top"]
    assert press("dynctl --dyn-namespace=workers wor").line.endswith(" workers ")
    assert press("dynctl -n workers workers li").line == "dynctl -n workers workers list "


def test_the_word_at_the_cursor_is_completed_whatever_follows(press: Press):
    assert press("dynctl wor", after=" list").line == "dynctl workers list"


def test_live_names_come_from_the_frontend_of_the_line(
    press: Press, program: Program, fleet: Fleet
):
    line = f"dynctl --frontend {fleet.url} workers show "
    assert press(line).offered == ["decode-a0", "decode-b0", "prefill-a0", "prefill-b0"]
    assert press(line + "prefill-b").line == line + "prefill-b0 "
    assert program.calls[-1] == [
        "__complete", "worker", "prefill-b", "--frontend", fleet.url, "workers", "show",
    ]  # fmt: skip
    line = f"dynctl route --frontend='{fleet.url}' hi --model org/llama-7"
    assert press(line).line == line + "0b "
    line = f'dynctl route --frontend="{fleet.url}" --model=org/llama-7'
    assert press(line).line == line + "0b "


def test_names_are_joined_where_readline_splits_words(press: Press, fleet: Fleet):
    """At = and : readline begins another word; a selector has both."""
    line = f"dynctl workers list --frontend {fleet.url} -l "
    assert press(line + "zo").line == line + "zone="
    assert press(line + "zone=").offered == ["zone-a", "zone-b"]
    assert press(line + "zone=zone-a").line == line + "zone=zone-a "
    assert press(line + "rack=r:").offered == ["a", "b"]
    assert press(line + "rack=r:b").line == line + "rack=r:b "
    assert press(line + "zone=zone-a,mod").line == line + "zone=zone-a,model="
    line = f"dynctl workers list --frontend {fleet.url} --selector=zone!="
    assert press(line + "zone-b").line == line + "zone-b "


def test_contexts_are_completed_from_the_file(press: Press, tmp_path: Path):
    (tmp_path / "c.toml").write_text("[contexts.prod]\ntimeout = 1\n[contexts.'lab@1']\n")
    assert press("dynctl check --context pr").line == "dynctl check --context prod "
    assert press("dynctl context use lab").line == "dynctl context use lab@1 "
    assert press("dynctl context use lab@").line == "dynctl context use lab@1 "
    assert press("dynctl context use lab@1").line == "dynctl context use lab@1 "


def test_paths_are_readline_s_own(press: Press, tmp_path: Path):
    (tmp_path / "a view.json").touch()
    (tmp_path / "folder").mkdir()
    assert press("dynctl route --view a").line == "dynctl route --view a\\ view.json "
    assert press("dynctl route --view=a").line == "dynctl route --view=a\\ view.json "
    assert press("dynctl check --file-kv fol").line == "dynctl check --file-kv folder/"
    assert press("dynctl check --file-kv a").line == "dynctl check --file-kv a"


def test_names_that_a_shell_would_run_are_never_offered(press: Press, fleet: Fleet, tmp_path: Path):
    fleet.body = (
        b'{"workers": [{"name": "x$(touch ran)", "model": "m"}, {"name": "x`touch ran`",'
        b' "model": "m"}, {"name": "x;touch ran", "model": "m"}, {"name": "x\\ny", "model": "m"},'
        b' {"name": "x-safe", "model": "m"}]}'
    )
    line = f"dynctl workers show --frontend {fleet.url} x"
    assert press(line).line == line + "-safe "
    assert not (tmp_path / "ran").exists()
    assert press("dynctl workers show --frontend $(touch${IFS}ran) x").offered == []
    assert not (tmp_path / "ran").exists()


def test_a_shell_with_other_settings(press: Press, fleet: Fleet):
    more = "COMP_WORDBREAKS=' '; IFS=:; set -u; set -f; alias d=dynctl; complete -F spy d"
    assert press("dynctl workers ", more=more).offered == WORKERS
    line = f"dynctl workers list --frontend {fleet.url} --selector=zone=zone-"
    assert press(line).offered == ["--selector=zone=zone-a", "--selector=zone=zone-b"]
    line = f"d workers show --frontend {fleet.url} prefill-a"
    assert press(line).line == line + "0 "
