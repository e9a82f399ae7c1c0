"""Never the wrong fleet: places without effect are errors, and a fleet that no option names is
changed only after a question."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynctl.documents.workers import WorkerRow
from dynctl.simulation.demo.fleet import DemoFleet
from dynctl.sources.frontend.source import substitutes
from tests.forks import forked_demos
from tests.ports import free_port

#: Every option that names a place and no source of dynctl's, as typed; a context: see the tests.
BESIDES = {
    "--namespace": ["-n", "prod"],
    "--all-namespaces": ["-A"],
    "--kube-context": ["--kube-context", "gke"],
    "--kubeconfig": ["--kubeconfig", "/tmp/none"],
    "--dyn-namespace": ["--dyn-namespace", "prod"],
    "--nats-server": ["--nats-server", "nats://127.0.0.1:1"],
}
#: Every command that reads or changes a fleet.
COMMANDS = [
    "route hi",
    "workers list",
    "workers show decode-a0",
    "workers cordon decode-a0",
    "workers uncordon decode-a0",
    "workers drain decode-a0",
    "workers add http://127.0.0.1:1",
    "workers remove decode-a0",
    "topology show",
    "top --once",
    "decisions list",
    "decisions tail --limit 1",
    "events tail --limit 1",
    "thresholds get",
    "thresholds set demo --active-prefill-tokens 500",
    "thresholds set demo --active-prefill-tokens 500 --yes",
    "thresholds watch --limit 1",
    "check",
    "why --last",
    "hits --for 1s",
    "hits --predicted --for 1",
    "record FILE --for 1s",
    "version",
    "config show",
]
CHANGES = [
    ["thresholds", "set", "demo", "--active-prefill-tokens", "500"],
    ["workers", "cordon", "decode-a0"],
    ["workers", "uncordon", "decode-a0"],
    ["workers", "drain", "decode-a0", "--wait", "1"],
]


class Guard:
    """A port on which any connection is a failure."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def untouched(self) -> bool:
        try:
            self.socket.accept()
        except BlockingIOError:
            return True
        return False


def at_default(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for module in ("dynctl.sources.named", "dynctl.sources.dynamo.check_facts"):
        monkeypatch.setattr(f"{module}.DEFAULT_FRONTEND", url)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    found = Guard()
    at_default(monkeypatch, found.url)
    with found.socket:
        yield found


@pytest.fixture(scope="module")
def demo() -> Iterator[DemoFleet]:
    with forked_demos(), DemoFleet(port=free_port()) as fleet:
        yield fleet


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("line", "flag"),
    [(line, "--namespace") for line in COMMANDS]
    + [(line, flag) for line in COMMANDS[:4] for flag in BESIDES],
)
def test_a_place_never_leads_to_the_default_address(
    dynctl: Any, guard: Guard, line: str, flag: str, tmp_path: Path
) -> None:
    words = line.replace("FILE", str(tmp_path / "r.dynrec")).split()
    ran = dynctl(*words, *BESIDES[flag])
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {flag}")
    assert "names a place, and has no effect" in flat(ran.err)
    if line != "version":
        assert "counts with --discovery" in flat(ran.err)
    assert guard.untouched()


@pytest.mark.parametrize(
    "words",
    [[flag, *words[1:]] for flag, words in BESIDES.items()]
    + [["--frontend", "http://127.0.0.1:1"], ["--discovery", "etcd"], ["--context", "prod"]],
    ids=lambda words: words[0],
)
def test_a_demo_is_on_this_host_wherever_an_option_points(dynctl: Any, words: list[str]) -> None:
    ran = dynctl("demo", *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {words[0]}")
    assert "has no effect on demo: it runs a fleet of its own" in flat(ran.err)
    assert "or remove it" not in ran.err


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("chosen", ["flag", "variable", "current"])
def test_a_context_that_names_no_source_never_leads_to_the_default_address(
    dynctl: Any,
    guard: Guard,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    chosen: str,
    tmp_path: Path,
) -> None:
    assert dynctl("context", "add", "prod", "-n", "prod").code == 0
    words = line.replace("FILE", str(tmp_path / "r.dynrec")).split()
    if chosen == "flag":
        words += ["--context", "prod"]
    elif chosen == "variable":
        monkeypatch.setenv("DYNCTL_CONTEXT", "prod")
    else:
        assert dynctl("context", "use", "prod").code == 0
    ran = dynctl(*words)
    assert guard.untouched()
    if line in ("version", "config show"):  # they work without a fleet
        return
    assert (ran.code, ran.out) == (2, "")
    if line.startswith("events tail"):  # it reads no frontend
        return
    assert "context" in ran.err
    assert "names no source" in flat(ran.err) or "has no effect" in flat(ran.err)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--frontend http://127.0.0.1:1 -n prod", "with --frontend"),
        ("--demo -n prod", "with --demo"),
        ("--discovery etcd -n prod", "with discovery backend etcd"),
        ("--discovery file --etcd-endpoints 127.0.0.1:1", "with discovery backend file"),
        ("--discovery kubernetes --file-kv /tmp", "with discovery backend kubernetes"),
        ("--file-kv /tmp --etcd-endpoints 127.0.0.1:1", "with discovery backend file"),
        ("--demo --context lab", "with --demo"),
        ("--frontend http://127.0.0.1:1 --context lab", "with --frontend"),
        ("--discovery etcd --context lab", "with discovery backend etcd"),
    ],
)
def test_a_place_has_an_effect_on_the_source_or_is_an_error(
    dynctl: Any, line: str, named: str
) -> None:
    assert dynctl("context", "add", "lab", "--frontend", "http://127.0.0.1:2").code == 0
    ran = dynctl("workers", "list", *line.split())
    assert (ran.code, ran.out) == (2, "")
    assert f"names a place, and has no effect {named}" in flat(ran.err)


def test_variables_name_the_source_in_the_error(
    dynctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNCTL_FRONTEND", "http://127.0.0.1:1")
    ran = dynctl("workers", "list", "-n", "prod")
    assert (ran.code, "has no effect with DYNCTL_FRONTEND" in flat(ran.err)) == (2, True)
    monkeypatch.delenv("DYNCTL_FRONTEND")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "etcd")
    ran = dynctl("workers", "list", "-n", "prod")
    assert (ran.code, "has no effect with discovery backend etcd" in flat(ran.err)) == (2, True)


def test_a_context_with_a_source_is_named_in_the_error(dynctl: Any) -> None:
    assert dynctl("context", "add", "lab", "--frontend", "http://127.0.0.1:1").code == 0
    assert dynctl("context", "use", "lab").code == 0
    ran = dynctl("workers", "list", "-n", "prod")
    assert (ran.code, "has no effect with context lab" in flat(ran.err)) == (2, True)


def test_variables_of_a_shell_that_the_source_does_not_read_break_no_command(
    dynctl: Any, demo: DemoFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_default(monkeypatch, demo.url)
    for name in ("DYN_NAMESPACE", "KUBECONFIG", "NATS_SERVER"):
        monkeypatch.setenv(name, "/tmp/none")
    assert dynctl("workers", "list").code == 0
    assert dynctl("workers", "list", "--frontend", demo.url).code == 0
    monkeypatch.setenv("ETCD_ENDPOINTS", "127.0.0.1:1")
    assert dynctl("workers", "list", "--frontend", demo.url).code == 0


@pytest.mark.parametrize("words", CHANGES, ids=lambda words: words[1])
def test_a_change_of_a_fleet_that_nobody_named_needs_yes(
    dynctl: Any, demo: DemoFleet, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    at_default(monkeypatch, demo.url)
    before = demo_state(dynctl, demo)
    ran = dynctl(*words)
    assert (ran.code, ran.out) == (2, "")
    error = flat(ran.err)
    for part in (demo.url, "1 model (demo", "6 workers (", "--yes", "--frontend"):
        assert part in error, part
    assert demo_state(dynctl, demo) == before
    ran = dynctl(*words, "--yes")
    assert ran.code == 0
    assert demo.url in ran.err
    assert dynctl(*words, "--frontend", demo.url).err.count("6 workers") == 0
    restore(dynctl, demo)


@pytest.mark.parametrize("way", ["variable", "context"])
def test_a_fleet_that_a_variable_or_a_context_names_is_changed_at_once(
    dynctl: Any, demo: DemoFleet, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "variable":
        monkeypatch.setenv("DYNCTL_FRONTEND", demo.url)
    else:
        assert dynctl("context", "add", "lab", "--frontend", demo.url).code == 0
        assert dynctl("context", "use", "lab").code == 0
    assert dynctl("workers", "cordon", "decode-a0").code == 0
    restore(dynctl, demo)


def test_a_dry_run_asks_nothing(
    dynctl: Any, demo: DemoFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_default(monkeypatch, demo.url)
    for words in CHANGES:
        if words[1] != "drain":
            assert dynctl(*words, "--dry-run").code == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("\n", 2), ("n\n", 2)])
def test_a_terminal_is_asked(
    dynctl: Any, demo: DemoFleet, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    at_default(monkeypatch, demo.url)

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    ran = dynctl("workers", "cordon", "decode-a0", "-o", "json")
    assert ran.code == code
    asked = flat(ran.err)
    assert demo.url in asked
    assert "6 workers (" in asked
    assert "Change this fleet? [y/N]" in asked
    if code:
        assert "nothing is changed" in asked
    else:
        assert json.loads(ran.out)["cordoned"] is True
    restore(dynctl, demo)


def test_a_change_waits_no_longer_than_the_timeout(
    dynctl: Any, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts connections and answers nothing."""
    ran = dynctl("workers", "cordon", "a", "--yes", "--timeout", "0.2")
    assert ran.code == 4
    at_default(monkeypatch, f"http://127.0.0.1:{free_port()}")
    ran = dynctl("workers", "cordon", "a", "--yes", "--timeout", "0.2")
    assert ran.code == 3


def demo_state(dynctl: Any, demo: DemoFleet) -> Any:
    rows = dynctl("workers", "list", "--frontend", demo.url, "-o", "json").json["workers"]
    thresholds = dynctl("thresholds", "get", "--frontend", demo.url, "-o", "json").json
    return [row.get("cordoned") for row in rows], thresholds


def restore(dynctl: Any, demo: DemoFleet) -> None:
    assert dynctl("workers", "uncordon", "decode-a0", "--frontend", demo.url).code == 0
    words = ("--active-prefill-tokens", "off", "--frontend", demo.url)
    assert dynctl("thresholds", "set", "demo", *words).code == 0


def test_a_worker_is_added_and_removed(dynctl: Any, demo: DemoFleet) -> None:
    rows = dynctl("workers", "list", "--frontend", demo.url, "-o", "json").json["workers"]
    url = next(row["endpoint"] for row in rows if row["name"] == "decode-a0")
    ran = dynctl("workers", "add", f"{url}/,name=decode-a9", "--frontend", demo.url, "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert f"{url}/ is the engine of worker decode-a0; a second worker" in flat(ran.err)
    # Under another name of this host the engine is not recognized.
    spec = f"{url.replace('127.0.0.1', 'localhost')},name=decode-a9,zone=zone-a,role=decode"
    ran = dynctl("workers", "add", spec, "--frontend", demo.url)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "decode-a9 is added: decode with zone=zone-a, ready\n"
        "undo: dynctl workers remove decode-a9\n"
    )
    ran = dynctl("workers", "add", spec, "--frontend", demo.url, "--dry-run")
    assert ran.out == "decode-a9 would be replaced\n"
    ran = dynctl("workers", "add", spec, "--frontend", demo.url)
    assert ran.out == "decode-a9 is replaced: decode with zone=zone-a, ready\n"
    ran = dynctl("workers", "remove", "e-a9", "--frontend", demo.url, "--dry-run", "-o", "json")
    assert (ran.json["kind"], ran.json["change"]) == ("WorkerChange", "removed")
    assert (ran.json["worker"], ran.json["applied"]) == ("decode-a9", False)
    assert dynctl("workers", "remove", "e-a9", "--frontend", demo.url, "-o", "name").out == (
        "decode-a9\n"
    )
    ran = dynctl("workers", "remove", "decode-a9", "--frontend", demo.url)
    assert (ran.code, ran.out, "decode-a9" in ran.err) == (2, "", True)


def test_a_worker_that_does_not_answer_yet_is_added_without_a_role(
    dynctl: Any, demo: DemoFleet
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ran = dynctl("workers", "add", f"{url},name=late", "--frontend", demo.url)
    assert flat(ran.out) == (
        f"late is added: role unknown, state unknown ({url} refused the connection) "
        "undo: dynctl workers remove late"
    )
    ran = dynctl("workers", "remove", "late", "--frontend", demo.url)
    assert ran.out == (
        "late is removed; no request is running there\n0 other workers take new requests\n"
    )


@pytest.mark.parametrize(
    ("domains", "names"),
    [
        ({}, ["a", "b", "c"]),
        ({"zone": "z1"}, ["a", "b"]),
        ({"zone": "z1", "rack": "r1"}, ["a", "b"]),
        ({"zone": "z9"}, []),
    ],
)
def test_other_workers_are_those_of_the_domain_that_the_sentence_names(
    domains: dict[str, str], names: list[str]
) -> None:
    def row(name: str, place: dict[str, str], status: str = "ready") -> WorkerRow:
        return WorkerRow(
            name, hash(name), "m", "decode", 16, True, False, "", status=status, domains=place
        )

    rows = [
        row("a", {"zone": "z1"}),
        row("b", {"zone": "z1", "rack": "r2"}),
        row("c", {"zone": "z2"}),
        row("d", {"zone": "z1"}, "unavailable"),
    ]
    worker = row("x", domains)
    assert [one.name for one in substitutes(worker, [worker, *rows])] == names


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("decode-a9", "url is 'decode-a9'; expected http://HOST:PORT"),
        ("http://127.0.0.1:1,role=both", "role is"),
        ("http://127.0.0.1:1,rol=decode", "did you mean role?"),
        ("http://user:secret@127.0.0.1:1", "url must not have credentials"),
    ],
)
def test_a_worker_that_is_not_one_is_named(
    dynctl: Any, guard: Guard, spec: str, named: str
) -> None:
    ran = dynctl("workers", "add", spec, "--yes")
    assert (ran.code, named in flat(ran.err), "secret" in ran.err) == (2, True, False)
    assert guard.untouched()
