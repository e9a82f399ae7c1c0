"""`dynctl __complete`: what it answers, whom it asks, and that it never keeps anybody waiting."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynctl.cli.completion.live import names
from tests.dynctl.cli.completion.conftest import Fleet
from tests.waiting import patience


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path / "c.toml"))
    return tmp_path / "c.toml"


def complete(*arguments: str, hurried: bool = False) -> subprocess.CompletedProcess[str]:
    """The program; unless it is ``hurried`` it has the time that a busy machine needs."""
    code = (
        "import sys; from dynctl.cli.completion import live; live.LIMIT_S = 15; "
        "live.answer(sys.argv[1:])"
    )
    how = ["-m", "dynctl", "__complete"] if hurried else ["-c", code]
    return subprocess.run(
        [sys.executable, *how, *arguments], capture_output=True, text=True, timeout=patience(60)
    )


@pytest.mark.parametrize(
    ("kind", "prefix", "found"),
    [
        ("model", "", ["org/llama-70b", "org/llama-8b"]),
        ("model", "org/llama-8", ["org/llama-8b"]),
        ("worker", "p", ["prefill-a0", "prefill-b0"]),
        ("domain", "", ["rack", "zone"]),
        ("domain-value", "zone-a,z", ["zone-a,zone-a", "zone-a,zone-b"]),
        ("selector", "z", ["zone="]),
        ("selector", "zone=", ["zone=zone-a", "zone=zone-b"]),
        ("selector", "zone=a,role!=", ["zone=a,role!=decode", "zone=a,role!=prefill"]),
        ("selector", "none=", []),
        ("taint", "", ["topology.zone=zone-a", "topology.zone=zone-b"]),
        ("decision", "", []),
    ],
)
def test_names_by_kind(fleet: Fleet, kind, prefix, found):
    assert names(kind, prefix, ["--frontend", fleet.url]) == found


def test_the_line_selects_the_source(fleet: Fleet, config: Path, monkeypatch):
    config.write_text(f"[contexts.lab]\nfrontend = '{fleet.url}'\ntoken-env = 'LAB'\n")
    monkeypatch.setenv("LAB", "secret")
    for line in (["--context", "lab"], ["route", "hi", "--context=lab", "-n", "x"]):
        assert names("model", "", line)
    assert fleet.asked == [("/v1/workers", "Bearer secret")] * 2
    line = ["--frontend", fleet.url, "--context", "lab", "--token", "'mine'"]
    assert names("model", "", line)
    assert names("model", "", line[:4])
    assert [token for _, token in fleet.asked[2:]] == ["Bearer mine", None]
    assert names("model", "", ["--frontend", fleet.url + "/base/"])
    assert fleet.asked[-1] == ("/base/v1/workers", None)


def test_environment_and_current_context_count(fleet: Fleet, config: Path, monkeypatch):
    config.write_text(f"current = 'lab'\n[contexts.lab]\nfrontend = ['{fleet.url}']\n")
    assert names("model", "")
    monkeypatch.setenv("DYN_FILE_KV", "/nowhere")
    assert names("model", "") == []
    monkeypatch.delenv("DYN_FILE_KV")
    config.unlink()
    monkeypatch.setenv("DYNCTL_FRONTEND", fleet.url)
    assert names("model", "")


@pytest.mark.parametrize(
    "line",
    [
        ["--demo"],
        ["--view", "v.json"],
        ["--discovery", "etcd"],
        ["--file-kv=/d"],
        ["--frontend", "$URL"],
        ["--frontend", "`echo`"],
        ["--frontend"],
        ["--frontend", "ftp://host"],
        ["--frontend", '"two words"x y'],
    ],
)
def test_no_request_is_sent_unless_the_line_specifies_a_dynctl_frontend(fleet, monkeypatch, line):
    monkeypatch.setenv("DYNCTL_FRONTEND", fleet.url)
    if line[0] in ("--discovery", "--file-kv=/d"):
        # Beside planes a frontend is Dynamo's own, and may be asked.
        monkeypatch.delenv("DYNCTL_FRONTEND")
    assert names("model", "", line) == []
    assert fleet.asked == []


def test_contexts_and_kube_contexts(config: Path, tmp_path: Path, monkeypatch):
    config.write_text("[contexts.a]\nunknown = 1\n[contexts.'b c']\n[contexts.ab]\n")
    assert names("context", "a") == ["a", "ab"]
    kube = tmp_path / "kube"
    kube.write_text("contexts: [{name: gke_p_r_c}, {name: arn:aws:eks:r:1:cluster/x}]\n")
    config.unlink()
    assert names("kube-context", "", ["--kubeconfig", str(kube)]) == [
        "arn:aws:eks:r:1:cluster/x",
        "gke_p_r_c",
    ]
    monkeypatch.setenv("KUBECONFIG", str(kube))
    assert names("kube-context", "g") == ["gke_p_r_c"]


def test_names_that_are_more_than_a_word_are_left_out(fleet: Fleet):
    strange = [
        "a b",
        "a\nb",
        "a\tb",
        "a\x1b[31m",
        "",
        "x" * 300,
        "é",
        "-a",
        "=a",
        "~a",
        "!a",
        "a!b",
    ]
    strange += [f"a{sign}b" for sign in "$`;|&<>*?#'\"\\(){}[]^"]
    fleet.body = json.dumps([{"name": name, "model": "m"} for name in (*strange, "ok")]).encode()
    assert names("worker", "", ["--frontend", fleet.url]) == ["ok"]


def test_a_program_that_answers_prints_a_name_a_line(config: Path):
    config.write_text("[contexts.a]\n[contexts.b]\n")
    done = complete("context", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\nb\n", "")


@pytest.mark.parametrize("arguments", [(), ("model",), ("nonsense", "x"), ("context", "", "--x")])
def test_nothing_to_say_is_silence(arguments):
    done = complete(*arguments)
    assert (done.stdout, done.stderr) == ("", "")


def test_completion_does_not_wait_for_an_unreachable_frontend(fleet: Fleet):
    fleet.hang.clear()
    done = complete("model", "", "--frontend", fleet.url, hurried=True)
    assert (done.stdout, done.stderr) == ("", "")
    # Ended by its own alarm, or by the time that the connection had; this test waits for neither.
    assert done.returncode in (0, -signal.SIGALRM)
    assert not fleet.hang.is_set()


def test_completion_does_not_wait_for_a_frontend_without_response():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = complete("model", "", "--frontend", url, hurried=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode in (0, -signal.SIGALRM)


def test_the_alarm_ends_what_python_cannot():
    code = (
        "import time; from dynctl.cli.completion import live; live.watch(); "
        "import ctypes; ctypes.CDLL(None).sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=patience(50))
    assert done.returncode == -signal.SIGALRM


def test_an_ignored_alarm_still_rings():
    code = "trap '' ALRM; exec \"$@\""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        argv = [sys.executable, "-m", "dynctl", "__complete", "model", "", "--frontend", url]
        done = subprocess.run(
            ["sh", "-c", code, "sh", *argv], capture_output=True, timeout=patience(50)
        )
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"{}"),
        (200, b"<html>"),
        (200, b"[1, 2]"),
        (200, b'{"workers": 3}'),
        (200, b'[{"name": 3, "model": "m"}]'),
        (302, b"[]"),
        (200, b"\xff"),
        (200, b"[" * 100_000),
    ],
)
def test_other_servers_are_no_harm(fleet: Fleet, status, body):
    fleet.status, fleet.body = status, body
    done = complete("worker", "", "--frontend", fleet.url)
    assert (done.stdout, done.stderr) == ("", "")


def test_little_is_imported(config: Path, fleet: Fleet):
    config.write_text("[contexts.a]\ntimeout = 1\n")
    heavy = ["typer", "httpx", "aiohttp", "asyncio", "msgspec", "yaml", "rich", "kubernetes"]
    for kind in ("context", "model"):
        code = (
            "import sys; from dynctl.cli.completion import live; live.LIMIT_S = 15; "
            f"found = live.names({kind!r}, '', ['--frontend', {fleet.url!r}]); "
            f"print(bool(found), [m for m in {heavy} if m in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60)
        )
        assert done.stdout == "True []\n", done.stderr
