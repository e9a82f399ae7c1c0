"""The tables agree with the commands, and the files with the tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dynctl.base.options import formats_of
from dynctl.cli.app import build_app
from dynctl.cli.commands.completion import SHELLS
from dynctl.cli.completion import values as meanings
from dynctl.cli.completion.live import names
from dynctl.cli.completion.tree import Tree, brief, read_tree
from dynctl.cli.completion.values import Kind, Meaning, meaning
from tests.dynctl.cli.completion.conftest import ROOT
from tests.waiting import patience

FILES = {"bash": "dynctl.bash", "zsh": "_dynctl", "fish": "dynctl.fish"}


@pytest.fixture(scope="module")
def tree() -> Tree:
    return read_tree(typer.main.get_command(build_app()))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_files_are_what_the_commands_make_of_them(dynctl_script, shell: str):
    path = ROOT / "completions" / FILES[shell]
    assert path.read_text() == dynctl_script(shell), (
        f"commands have changed: dynctl completion {shell} > completions/{FILES[shell]}"
    )


def test_output_offers_the_formats_that_the_command_has(tree: Tree):
    offered = {
        command.path: flag.value.words
        for command in tree.commands
        for flag in command.flags
        if "--output" in flag.names and flag.value is not None
    }
    assert {path: formats_of(path) for path in offered} == offered
    assert "junit" in offered["check"]
    assert "junit" not in offered["workers list"]


@pytest.mark.parametrize(
    ("path", "name", "text"),
    [
        ("serve frontend", "--router-policy-config", "file"),
        ("serve router", "--ais-model-path", "folder"),
        ("serve attach", "--request-plane", "words:tcp nats"),
        ("replay", "--generate", "words:agentic chat rag batch"),
        ("hits", "--by", "words:model domain tenant hour worker"),
        ("decisions list", "--worker", "live:worker"),
    ],
)
def test_values_that_are_known_are_offered(tree: Tree, path: str, name: str, text: str):
    command = next(one for one in tree.commands if one.path == path)
    flag = next(one for one in command.flags if name in one.names)
    assert flag.value is not None
    assert flag.value.text == text


def test_commands_about_one_worker_offer_the_workers(tree: Tree):
    for path in ("show", "cordon", "drain", "uncordon", "remove"):
        command = next(one for one in tree.commands if one.path == f"workers {path}")
        assert [one.text for one in command.arguments] == ["live:worker"]


def test_help_pages_name_values_and_not_types():
    text = (ROOT / "docs" / "cli.md").read_text()
    assert not re.findall(r"--[a-z-]+ (?:FLOAT|INT|STR|INTEGER)`", text)


@pytest.fixture
def dynctl_script():
    def script(shell: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dynctl", "completion", shell],
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=True,
        )
        return done.stdout

    return script


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_every_file(tree: Tree, shell: str):
    text = (ROOT / "completions" / FILES[shell]).read_text()
    for command in tree.commands:
        assert f"'{command.path}'" in text
        for flag in command.flags:
            assert all(name in text for name in flag.names)


def test_the_tables_name_only_what_there_is(tree: Tree):
    options = {name for one in tree.commands for flag in one.flags for name in flag.names}
    paths = {one.path for one in tree.commands}
    at = {*meanings._LIVE_AT, *meanings._NEW, *meanings.known_words()}
    assert {path for path, _ in at} - {""} <= paths
    assert {name for _, name in at if name.startswith("--")} | set(meanings._LIVE) <= options


def test_no_option_is_a_switch_here_and_takes_a_value_there(tree: Tree):
    found: dict[str, set[bool]] = {}
    for one in tree.commands:
        for flag in one.flags:
            for name in flag.names:
                found.setdefault(name, set()).add(flag.value is None)
    assert [name for name, kinds in found.items() if len(kinds) > 1] == []


def test_every_live_kind_returns_names(tree: Tree, fleet):
    kinds = {value.live for _, _, value in tree.meanings() if value.kind is Kind.LIVE}
    kinds |= {one.live for command in tree.commands for one in command.arguments if one.live}
    for kind in kinds - {"context", "kube-context"}:
        assert names(kind, "", ["--frontend", fleet.url])
    assert kinds > {"context", "kube-context"}


@pytest.mark.parametrize(
    ("path", "flags", "metavar", "said"),
    [
        ("route", ("--model",), "NAME", "live:model"),
        ("serve engine", ("--model",), "MODEL", "free"),
        ("workers show", (), "ID", "live:worker"),
        ("why", (), "ID", "free"),
        ("context add", (), "NAME", "free"),
        ("context use", (), "[NAME]", "live:context"),
        ("context use", ("--namespace", "-n"), "NAME", "free"),
        ("x", ("--a",), "off|winner|all", "words:off winner all"),
        ("x", ("--a",), "0..1|none", "words:none"),
        ("x", ("--a",), "FILE|-", "file"),
        ("x", ("--a",), "DIR", "folder"),
        ("x", ("--a",), None, "free"),
    ],
)
def test_what_a_value_means(path, flags, metavar, said):
    assert meaning(path, flags, metavar).text == said


def test_retired_codes_are_not_offered():
    from dynctl.findings.catalogue import all_codes

    found = meaning("explain", (), "[CODE]")
    codes = all_codes()
    current = (c for c in codes if not codes[c].retired)
    assert found == Meaning(Kind.WORDS, tuple(current))


def test_a_summary_is_one_short_sentence():
    assert brief("Ask a frontend (repeatable: replicas). Default: $X.") == (
        "Ask a frontend (repeatable: replicas)"
    )
    assert brief("Give up after this long. [default: 10]") == "Give up after this long"
    assert brief(None) == ""
    assert len(brief("word " * 50)) <= 72


def test_words_of_the_scripts_need_no_quotes(tree: Tree):
    for command in tree.commands:
        values = [flag.value for flag in command.flags if flag.value is not None]
        for value in (*values, *command.arguments):
            assert all(re.fullmatch(r"[\w.-]+", word) for word in value.words)


def test_the_folder_holds_these_files_and_no_other():
    assert sorted(path.name for path in Path(ROOT / "completions").iterdir()) == sorted(
        FILES.values()
    )
