"""`dynctl context ..`, `--context` and `$DYNCTL_CONTEXT`, as a person uses them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.sources.connect import connect_live
from dynctl.sources.dynamo.live import LiveDynamo
from tests.http_servers import Exchange, HttpServer
from tests.waiting import patience


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "c.toml"
    monkeypatch.setenv("DYNCTL_CONFIG", str(path))
    return path


@pytest.fixture
def frontend() -> Iterator[tuple[str, list[str | None]]]:
    """Where something tells a version as our frontends do, and the tokens that it was sent."""
    tokens: list[str | None] = []

    def respond(exchange: Exchange) -> None:
        tokens.append(exchange.headers.get("authorization"))
        exchange.reply(json.dumps({"settings": [], "preset": None, "version": "9.9"}).encode())

    with HttpServer(respond) as server:
        yield server.url, tokens


def test_endpoints_are_typed_once(dynctl, monkeypatch, frontend):
    url, tokens = frontend
    monkeypatch.setenv("LAB_TOKEN", "secret")
    assert dynctl("context", "add", "lab", "--frontend", url, "--token-env", "LAB_TOKEN").code == 0
    assert url not in dynctl("version").out
    assert f"{url} dynctl 9.9" in " ".join(dynctl("version", "--context", "lab").out.split())
    assert tokens == ["Bearer secret"]
    assert dynctl("context", "use", "lab").out == "lab is the current context\n"
    assert url in dynctl("version").out
    assert "http://127.0.0.1:1 " in dynctl("version", "--frontend", "http://127.0.0.1:1").out
    assert tokens == ["Bearer secret"] * 2
    dynctl("context", "use", "--none")
    assert url not in dynctl("version").out
    monkeypatch.setenv("DYNCTL_CONTEXT", "lab")
    assert url in dynctl("version").out


def test_add_takes_the_line_as_it_is_and_nothing_else(dynctl, monkeypatch, config, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NATS_SERVER", "nats://env:4222")
    ran = dynctl(
        "--timeout", "2.5", "context", "add", "x", "--file-kv", "store", "-A", "--reach", "direct",
        "-o", "json", "--no-color",
    )  # fmt: skip
    assert (ran.code, ran.json["done"], ran.json["name"]) == (0, "added", "x")
    lines = config.read_text().splitlines()
    assert lines[lines.index("[contexts.x]") + 1 :] == [
        f'file-kv = "{tmp_path}/store"',
        "all-namespaces = true",
        'reach = "direct"',
        "timeout = 2.5",
    ]


def test_add_replaces_only_with_force(dynctl):
    dynctl("context", "add", "x", "--timeout", "1", "-n", "team")
    ran = dynctl("context", "add", "x", "--timeout", "2")
    assert (ran.code, ran.out) == (2, "")
    assert "the context exists already" in ran.err
    assert "--force" in ran.err
    assert dynctl("context", "add", "x", "--timeout", "2", "--force").out.startswith("replaced")
    rows = dynctl("context", "list", "-o", "json").json["contexts"]
    assert rows == [{"name": "x", "current": False, "values": {"timeout": 2.0}}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "no option to save, expected at least one"),
        (["--token", "hunter2"], "--token: cannot be kept in a context"),
        (["--demo"], "--demo: cannot be kept"),
        (["--view", "v.json"], "--view: cannot be kept"),
        (["--wait", "3"], "--wait: cannot be kept"),
        (["--context", "y"], "--context: cannot be kept"),
        (["--discovery", "zoo"], "--discovery: expected one of file, etcd, kubernetes; got 'zoo'"),
        (["-n", "a", "-A"], "--namespace and all-namespaces: expected one"),
        (["--frontend", "http://u:hunter2@h"], "--frontend: expected an address without a login"),
    ],
)
def test_what_a_context_cannot_keep(dynctl, config, line, said):
    ran = dynctl("context", "add", "x", *line)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "hunter2" not in ran.err
    assert not config.exists()


def test_list_marks_the_current_one(dynctl, monkeypatch):
    assert "has no contexts" in dynctl("context", "list").out
    dynctl("context", "add", "b", "--frontend", "http://b:1")
    dynctl("context", "add", "a", "--discovery", "kubernetes", "--kube-context", "k")
    dynctl("context", "use", "b")
    out = dynctl("context", "list").out
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["a", "discovery", "kubernetes", "kube-context", "k"],
        ["*", "b", "frontend", "http://b:1"],
    ]
    assert dynctl("context", "list", "-o", "name").out == "a\nb\n"
    monkeypatch.setenv("DYNCTL_CONTEXT", "a")
    ran = dynctl("context", "list")
    assert "*  a" in ran.out
    assert ran.err == "note: a is current because of $DYNCTL_CONTEXT\n"
    assert "$DYNCTL_CONTEXT=a overrides it in this shell" in dynctl("context", "use", "b").err


def test_show_has_the_source_of_each_value(dynctl, monkeypatch):
    dynctl("context", "add", "x", "--frontend", "http://x:1", "--timeout", "3", "-n", "team")
    dynctl("context", "use", "x")
    monkeypatch.setenv("DYNCTL_FRONTEND", "http://e:1")
    ran = dynctl("context", "show", "--timeout", "4", "-o", "json")
    found = {row["name"]: row for row in ran.json["values"]}
    assert ran.json["name"] == "x"
    assert ran.json["chosen_by"] == "current"
    assert (found["frontend"]["value"], found["frontend"]["source"]) == (
        "http://e:1",
        "env DYNCTL_FRONTEND",
    )
    assert found["frontend"]["unused"] == ["http://x:1"]
    assert (found["timeout"]["value"], found["timeout"]["source"]) == (4.0, "flag --timeout")
    assert (found["namespace"]["value"], found["namespace"]["source"]) == ("team", "context x")
    assert (found["reach"]["value"], found["reach"]["source"]) == (None, "default")
    screen = dynctl("context", "show").out
    assert "note: frontend http://x:1 of the context is not used: env DYNCTL_FRONTEND" in screen
    by_name = dynctl("context", "show", "x", "-o", "json").json
    assert by_name["chosen_by"] == "argument"
    assert by_name["values"][0]["source"] == "context x"


def test_show_without_any_context(dynctl):
    ran = dynctl("context", "show")
    assert ran.code == 0
    assert ran.out.startswith("no context ")
    assert dynctl("context", "show", "-o", "name").out == ""
    named = dynctl("context", "show", "-o", "name")
    assert (named.code, named.out, named.err) == (0, "", "note: no context is current\n")


def test_remove_and_unknown_names(dynctl):
    for name in ("a", "b"):
        dynctl("context", "add", name, "--timeout", "1")
    dynctl("context", "use", "a")
    assert dynctl("context", "remove", "a").out == "removed context a; no context is current now\n"
    dynctl("context", "add", "c", "--timeout", "1")
    assert dynctl("context", "remove", "c").out == "removed context c\n"
    for command in ("use", "show", "remove"):
        ran = dynctl("context", command, "a")
        assert (ran.code, ran.out) == (2, "")
        assert "unknown context" in ran.err
        assert "known: b" in ran.err
    assert dynctl("context", "use").code == 2


def test_a_kube_context_is_not_a_context(dynctl, tmp_path, monkeypatch):
    kube = tmp_path / "kube"
    kube.write_text("contexts: [{name: gke, context: {}}]\n")
    monkeypatch.setenv("KUBECONFIG", str(kube))
    for line in (("workers", "list", "--context", "gke"), ("context", "use", "gke")):
        ran = dynctl(*line)
        assert ran.code == 2
        assert "--context names a dynctl context; did you mean --kube-context gke?" in ran.err


def test_recognising_a_kube_context_loads_no_client(tmp_path, monkeypatch):
    kube = tmp_path / "kube"
    kube.write_text("contexts: [{name: gke, context: {}}]\n")
    monkeypatch.setenv("KUBECONFIG", str(kube))
    code = (
        "import sys; from dynctl.cli.app import run; run(['check', '--context', 'gke']); "
        "print('kubernetes' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60)
    )
    assert "did you mean --kube-context gke?" in done.stderr
    assert done.stdout == "False\n"


def test_a_broken_file_stops_only_who_needs_it(dynctl, config):
    config.parent.mkdir()
    config.write_text("[contexts.a]\nfrontnd = 'x'\n")
    for line in (("workers", "list"), ("context", "list"), ("context", "add", "b", "-A")):
        ran = dynctl(*line)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: {config}: contexts.a.frontnd: unknown key; did you mean")
    for offline in ("explain DYR0101", "version --client", "workers list --demo"):
        assert dynctl(*offline.split()).code == 0


def test_config_show_queries_the_router_of_a_context_only_on_request(dynctl, frontend):
    url, _ = frontend
    dynctl("context", "add", "lab", "--frontend", url)
    dynctl("context", "use", "lab")
    assert "of this command" in dynctl("config", "show", "-o", "json").json["source"]
    remote = dynctl("config", "show", "--context", "lab", "-o", "json").json
    assert url in remote["source"]


def test_a_context_does_not_contradict_a_flag_of_the_command(dynctl):
    dynctl("context", "add", "lab", "--frontend", "http://127.0.0.1:1", "-n", "team")
    dynctl("context", "use", "lab")
    ran = dynctl("topology", "plan", "--capacity", "a:prefill=1,decode=1")
    assert (ran.code, ran.err) == (0, "")


def test_top_and_events_use_the_context(dynctl, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    dynctl("context", "add", "lab", "--file-kv", str(store), "--timeout", "7")
    ran = dynctl("events", "tail", "--duration", "0.2", "--context", "lab")
    assert (ran.code, ran.err.count("no discovery backend")) == (0, 0), ran.err
    options = GlobalOptions(context="lab", given=frozenset({"context"}))
    assert isinstance(connect_live(options), LiveDynamo)


def test_every_global_option_is_saved_or_refused():
    from dataclasses import fields

    from dynctl.cli.commands.context import _HOW, _NEVER
    from dynctl.settings.contexts.keys import KEYS

    internal = {"given", "context_applied", "environment_sources"}
    known = {key.field for key in KEYS.values()} | set(_NEVER) | _HOW | internal
    assert {field.name for field in fields(GlobalOptions)} - known == set()
