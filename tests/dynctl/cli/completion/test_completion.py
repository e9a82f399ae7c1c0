"""Live names, and what TAB never does: wait, fail, ask others, or hand a shell a command to run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from dynctl.cli import completion
from dynctl.cli.app import program
from dynctl.cli.completion import SHELLS, assignments, names_of, policies, words_of
from dynctl.cli.given_options import options_of_line
from dynctl.cli.table import COMMANDS
from router_core import SETTINGS
from tests.commands import all_commands
from tests.docs.cli_page import find_command
from tests.dynctl.cli.completion.conftest import ROOT, Fleet
from tests.waiting import patience

FILES = {"bash": "dynctl.bash", "zsh": "_dynctl", "fish": "dynctl.fish"}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path / "c.toml"))
    return tmp_path / "c.toml"


def line(*words: str) -> typer.Context:
    """The parser's context for the words of a line that is still typed."""
    root: Any = program(["route", *words])
    context: Any = root.make_context("dynctl", [*words, "route"], resilient_parsing=True)
    inner = root.commands["route"]
    found: typer.Context = inner.make_context("route", [], parent=context, resilient_parsing=True)
    return found


def names(kind: str, prefix: str, *words: str) -> list[str]:
    return names_of(kind)(line(*words), prefix)


def tab(*words: str, shell: str = "bash", code: str = "") -> subprocess.CompletedProcess[str]:
    """The program as a script of Typer starts it; the last word is unfinished."""
    patient = "from dynctl.cli import completion; completion.LIMIT_S = 15; "
    typed = {
        "COMP_WORDS": "\n".join(("dynctl", *words)),
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": " ".join(("dynctl", *words)),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_DYNCTL_COMPLETE": f"complete_{shell}",
    }
    return subprocess.run(
        [sys.executable, "-c", (code or patient) + "from dynctl.__main__ import main; main()"],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env={**os.environ, **typed},
    )


@pytest.mark.parametrize(
    ("kind", "prefix", "found"),
    [
        ("model", "", ["org/llama-70b", "org/llama-8b"]),
        ("model", "org/llama-8", ["org/llama-8b"]),
        ("worker", "p", ["prefill-a0", "prefill-b0"]),
        ("domain", "", ["rack", "zone"]),
        ("domain-value", "zone-a,z", ["zone-a,zone-a", "zone-a,zone-b"]),
        ("selector", "z", ["zone=zone-a", "zone=zone-b"]),
        ("selector", "zone=a,role!=", ["zone=a,role!=decode", "zone=a,role!=prefill"]),
        ("selector", "none=", []),
        ("load", "load.prefill-a0.p", ["load.prefill-a0.prefill_tokens=+1"]),
        ("taint", "", ["topology.zone=zone-a", "topology.zone=zone-b"]),
    ],
)
def test_names_by_kind(fleet: Fleet, kind: str, prefix: str, found: list[str]) -> None:
    assert names(kind, prefix, "--frontend", fleet.url) == found


def test_the_line_selects_the_source(
    fleet: Fleet, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(f"[contexts.lab]\nfrontend = '{fleet.url}'\ntoken-env = 'LAB'\n")
    monkeypatch.setenv("LAB", "secret")
    assert names("model", "", "--context", "lab")
    assert fleet.asked == [("/v1/workers", "Bearer secret")]
    assert names("model", "", "--frontend", fleet.url, "--context", "lab", "--token", "mine")
    assert names("model", "", "--frontend", fleet.url + "/base/")
    assert fleet.asked[1:] == [("/v1/workers", "Bearer mine"), ("/base/v1/workers", None)]
    config.write_text(f"current = 'lab'\n[contexts.lab]\nfrontend = ['{fleet.url}']\n")
    assert names("model", "")
    config.unlink()
    monkeypatch.setenv("DYNCTL_FRONTEND", fleet.url)
    assert names("model", "")


def test_options_stand_before_and_after_the_command() -> None:
    root: Any = program(["workers", "list"])
    context: Any = root.make_context(
        "dynctl", ["--frontend", "http://a", "workers"], resilient_parsing=True
    )
    for name, words in (
        ("workers", ["-n", "x", "list"]),
        ("list", ["--frontend", "http://b", "--timeout", "2m"]),
    ):
        inner = context.command.commands[name]
        context = inner.make_context(name, words, parent=context, resilient_parsing=True)
    options = options_of_line(context)
    assert options.frontend == ("http://a", "http://b")
    assert (options.namespace, options.timeout) == ("x", 120.0)
    assert options.given == {"frontend", "namespace", "timeout"}


@pytest.mark.parametrize(
    "words",
    [
        ["--demo"],
        ["--view", "v.json"],
        ["--discovery", "etcd"],
        ["--file-kv=/d"],
        ["--frontend", "$URL"],
        ["--frontend", "`echo`"],
        ["--frontend", "ftp://host"],
    ],
)
def test_no_request_is_sent_unless_the_line_specifies_a_dynctl_frontend(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    if words[0] not in ("--discovery", "--file-kv=/d"):
        # Beside planes a frontend is Dynamo's own, and may be asked.
        monkeypatch.setenv("DYNCTL_FRONTEND", fleet.url)
    assert names("model", "", *words) == []
    assert fleet.asked == []


def test_contexts_and_kube_contexts(config: Path, tmp_path: Path) -> None:
    config.write_text("[contexts.a]\nunknown = 1\n[contexts.'b c']\n[contexts.ab]\n")
    assert names("context", "a") == ["a", "ab"]
    config.unlink()
    kube = tmp_path / "kube"
    kube.write_text("contexts: [{name: gke_p_r_c}, {name: arn:aws:eks:r:1:cluster/x}]\n")
    assert names("kube-context", "", "--kubeconfig", str(kube)) == [
        "arn:aws:eks:r:1:cluster/x",
        "gke_p_r_c",
    ]


def test_names_that_are_more_than_a_word_are_left_out(fleet: Fleet) -> None:
    strange = ["a b", "a\nb", "a\tb", "a\x1b[31m", "", "x" * 300, "é", "-a", "=a", "~a", "!a"]
    strange += [f"a{sign}b" for sign in "!$`;|&<>*?#'\"\\(){}[]^"]
    fleet.body = json.dumps([{"name": name, "model": "m"} for name in (*strange, "ok")]).encode()
    assert names("worker", "", "--frontend", fleet.url) == ["ok"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"{}"),
        (200, b"<html>"),
        (200, b"[1, 2]"),
        (200, b'{"workers": 3}'),
        (200, b'[{"name": 3}]'),
        (302, b"[]"),
        (200, b"\xff"),
        (200, b"[" * 100_000),
        (200, b'{"workers": []}' + b" " * (5 << 20)),
    ],
)
def test_other_servers_are_no_harm(fleet: Fleet, status: int, body: bytes) -> None:
    fleet.status, fleet.body = status, body
    assert names("worker", "", "--frontend", fleet.url) == []


def test_a_silent_source_completes_nothing_in_its_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.hang.clear()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url in (fleet.url, f"http://127.0.0.1:{silent.getsockname()[1]}"):
            done = tab("workers", "show", "--frontend", url, "p", code="pass; ")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not fleet.hang.is_set()
    monkeypatch.setattr(completion, "LIMIT_S", 0.05)
    monkeypatch.setattr(completion, "_names", lambda *_: time.sleep(patience(30)))
    assert names("worker", "") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_a_broken_line_is_silence(shell: str) -> None:
    for words in (
        ["nonsense", "-"],
        ["--no-such", "x"],
        ["route", "'open", ""],
        ["--timeout", "x"],
    ):
        done = tab(*words, shell=shell)
        assert done.stderr == ""
        assert "Traceback" not in done.stdout
    done = tab("wor", shell="tcsh")
    assert (done.stdout, done.stderr) == ("", "")


def test_no_secret_of_the_line_is_printed(fleet: Fleet) -> None:
    for shell in SHELLS:
        done = tab(
            "--token", "hunter2", "workers", "show", "--frontend", fleet.url, "", shell=shell
        )
        assert "prefill-a0" in done.stdout
        assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_the_files_are_what_typer_prints(dynctl: Any, shell: str) -> None:
    path = ROOT / "completions" / FILES[shell]
    assert path.read_text() == dynctl("completion", shell).out, "run make completions"
    assert {one.name for one in path.parent.iterdir()} == set(FILES.values())


@pytest.mark.parametrize(
    ("path", "flag", "kind"),
    [
        ("workers show", "ID", "worker"),
        ("workers drain", "ID", "worker"),
        ("decisions tail", "--worker", "worker"),
        ("events tail", "--worker", "worker"),
        ("route", "--pin-decode", "worker"),
        ("route", "--require-taint", "taint"),
        ("route", "--model", "model"),
        ("thresholds set", "MODEL", "model"),
        ("workers list", "--selector", "selector"),
        ("topology plan", "--over", "domain-value"),
        ("topology show", "--domain", "domain"),
        ("topology lint", "--against", "kube-context"),
        ("context use", "NAME", "context"),
        ("why", "ID", "decision"),
        ("check", "--suppress", "DYT0903"),
        ("explain", "CODE", "DYT0903"),
        ("topology verify", "--fail-on", "warn"),
        ("serve attach", "--request-plane", "nats"),
        ("replay", "--generate", "rag"),
        ("replay", "--policy", "best-pair"),
        ("hits", "--policy", "dynamo-0.9"),
        ("test", "--only", "isolation"),
        ("replay", "--output", "csv"),
        ("topology render", "--kind", "ClusterTopology"),
        ("config show", "--preset", "dynamo-0.9"),
        ("check", "--discovery", "etcd"),
    ],
)
def test_values_that_are_known_are_offered(
    monkeypatch: pytest.MonkeyPatch, path: str, flag: str, kind: str
) -> None:
    monkeypatch.setattr(completion, "_names", lambda kind, *_: [kind])
    command = find_command(all_commands(), path)
    context = typer.Context(command, info_name=f"dynctl {path}")
    kinds = "option" if flag.startswith("-") else "argument"
    (parameter,) = [
        one
        for one in command.params
        if one.param_type_name == kinds and flag in (*one.opts, one.metavar)
    ]
    offered = [item.value for item in parameter.shell_complete(context, "")]
    assert kind in offered
    assert all(re.fullmatch(r"[\w.-]+", word) for word in offered)


def test_settings_are_offered_with_values_that_they_take(fleet: Fleet) -> None:
    context = line("--frontend", fleet.url)
    offered = assignments(context, "")
    assert {"router_mode=kv", "use_kv_events=false", "router_temperature=0.0"} <= {*offered}
    assert "load.prefill-a0.decode_blocks=+1" in offered
    for name, _, value in (word.partition("=") for word in offered):
        if not name.startswith("load."):
            SETTINGS[name].parse(value)
    assert "now:kv,router_mode=round-robin" in policies(context, "now:kv,router_m")
    assert "now:kv-tuned" in policies(context, "now:k")


def test_new_names_are_free() -> None:
    root = all_commands()
    for path, flag in (
        ("serve engine", "--model"),
        ("context add", "NAME"),
        ("workers add", "URL"),
    ):
        command = find_command(root, path)
        found = [one for one in command.params if flag in (*one.opts, one.metavar or "")]
        context = typer.Context(command, info_name=f"dynctl {path}")
        assert [one.shell_complete(context, "") for one in found[:1]] == [[]], path


def test_words_of_a_metavar() -> None:
    def listed(metavar: str | None) -> list[str]:
        words = words_of(metavar)
        return [] if words is None else words(typer.Context(program([])), "")

    assert listed("off|winner|all") == ["off", "winner", "all"]
    assert listed("0..1|off") == ["off"]
    for metavar in (
        "FILE|-",
        "NAME",
        "N",
        None,
        "[LABEL:]NAME|FILE[,SETTING=VALUE]",
        "FILE|FORMAT",
    ):
        assert listed(metavar) == []


def test_a_command_of_every_row_completes_its_options() -> None:
    for path in ("workers list", "serve frontend", "topology verify"):
        assert path in COMMANDS
        offered = tab(*path.split(), "--o").stdout.split()
        assert "--output" in offered
