"""`dynctl topology verify` that repeats (--wait) and sends live requests (--probe)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.terminal import say
from dynctl.verify import verification
from tests.kube import deployment, objects
from tests.kube.actors import Simulation, living, simulation
from tests.kube.actors.frontend_view import View
from tests.kube.command_line import Ran, Run
from tests.kube.objects import ZONE
from tests.waiting import patience

VERIFY = ("topology", "verify")
DECODE = "my-llm-decode-a-0"
FRONTEND = ("prod", "my-llm-frontend-0")
CHATS = 'chats "dynctl topology probe N" of one token each to Qwen/Qwen3-0.6B at Pod'


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks again after a moment, so that no test waits for long."""
    monkeypatch.setattr(verification, "AGAIN_S", 0.1)


def named(sim: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By $KUBECONFIG, for a viewer."""
    monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "kubeconfig")))


def relabel(sim: Simulation) -> None:
    sim.edit("Pod", DECODE, {"metadata": {"labels": {ZONE: "us-east-1z"}}})
    sim.settle()
    sim.advance(600)


class Meanwhile:
    """Does something in another thread once the command has said something on stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
        self.problem: BaseException | None = None
        said = threading.Event()
        before = say

        def talk(message: str) -> None:
            before(message)
            said.set()

        def act() -> None:
            try:
                if said.wait(patience(30)):
                    change()
            except BaseException as problem:
                self.problem = problem

        monkeypatch.setattr(verification, "advise", talk)
        self._thread = threading.Thread(target=act)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        assert self.problem is None


# -- --wait ----------------------------------------------------------------------------------------


def test_it_waits_until_what_failed_is_mended(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    with living() as sim:
        named(sim, tmp_path, monkeypatch)
        relabel(sim)

        def mend() -> None:
            sim.recreate(DECODE)
            sim.settle()
            sim.advance(600)

        with Meanwhile(monkeypatch, mend):
            ran = dynctl(*VERIFY, "--wait", "60s", "-o", "json")

    assert ran.code == 0
    assert ran.json["summary"]["failed"] == 0
    first, *_ = ran.err.splitlines()
    assert first.startswith("2 failed (DYT0404, DYT0802); checking again, ")
    assert first.endswith(" s left")


def test_it_waits_for_a_graph_that_is_applied_later(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    with simulation() as sim:
        named(sim, tmp_path, monkeypatch)
        zones = ("us-east-1a", "us-east-1b")
        parts = deployment.components(zones, prefill=1, decode=2)

        def arrive() -> None:
            sim.apply(*deployment.nodes(zones, 1))
            sim.apply(objects.graph("prod", "my-llm", parts, policy=deployment.policy()))
            sim.settle()
            sim.advance(600)

        sim.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "prod"}})
        with Meanwhile(monkeypatch, arrive):
            ran = dynctl(*VERIFY, "--wait", "60s", "-o", "json")

    assert ran.code == 0
    assert len(ran.json["chain"]) == 6
    assert ran.err.startswith("no DynamoGraphDeployment in namespace prod of test")


def test_it_waits_for_a_server_that_comes_back(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    with living() as sim:
        named(sim, tmp_path, monkeypatch)
        sim.server.faults.answer("/version", 503, times=2)
        ran = dynctl(*VERIFY, "--wait", "60s", "-o", "json")

    assert ran.code == 0
    assert len(ran.err.splitlines()) == 2
    assert "(HTTP 503); checking again, " in ran.err


def test_the_last_look_is_the_answer(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    with living() as sim:
        named(sim, tmp_path, monkeypatch)
        relabel(sim)
        red = dynctl(*VERIFY, "--wait", "300ms", "-o", "json")
        gone = dynctl(*VERIFY, "--wait", "300ms", "--dgd", "other")

    assert red.code == 1
    assert red.reported == {"DYT0404", "DYT0802"}
    assert gone.code == 3
    assert gone.err.splitlines()[-2].startswith("error: no DynamoGraphDeployment other in")


def test_warnings_are_waited_for_where_they_fail(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    with living() as sim:
        named(sim, tmp_path, monkeypatch)
        sim.forbid("list", "events")
        strict = dynctl(*VERIFY, "--wait", "300ms", "--fail-on", "warn")
        easy = dynctl(*VERIFY, "--wait", "300ms")

    assert (strict.code, easy.code) == (1, 0)
    assert strict.err.startswith("1 warn (DYT0004), 1 could not be read; checking again, ")
    assert easy.err == ""


# -- --probe ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Simulation]:
    """Nothing but the frontend's answers to chats changes."""
    with living() as sim:
        yield sim


@pytest.fixture
def view(served: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[View]:
    named(served, tmp_path, monkeypatch)
    view = served.frontends.views[FRONTEND]
    view.requests.clear()
    yield view
    view.chat = None


def chats(view: View) -> int:
    return view.requests.count("POST /v1/chat/completions")


def crossing(view: View) -> Callable[[], tuple[int, Any]]:
    """Prefill in us-east-1a, decode in us-east-1b, however required that is not."""
    prefill = next(one for one in view.workers if one.role == "prefill" and one.value[-2:] == "1a")
    decode = next(one for one in view.workers if one.role == "decode" and one.value[-2:] == "1b")
    return lambda: (200, view.served_by(prefill, decode))


def probed(dynctl: Run, number: int = 2) -> Ran:
    return dynctl(*VERIFY, "--probe", number, "-o", "json")


def test_no_requests_are_sent_without_probe(view: View, dynctl: Run) -> None:
    ran = dynctl(*VERIFY, "-o", "json")

    assert (ran.code, ran.err) == (0, "")
    assert ran.checks["DYT0905"]["message"] == "no live requests sent (use --probe)"
    assert view.requests
    assert not [line for line in view.requests if line.startswith("POST")]


def test_a_probe_announces_and_sends_its_requests(view: View, dynctl: Run) -> None:
    ran = probed(dynctl)

    assert ran.code == 0
    assert ran.err == f"probe: 2 {CHATS} my-llm-frontend-0.prod\n"
    assert chats(view) == 2
    assert (
        ran.checks["DYT0905"] | {"state": "pass", "message": "2 requests"}
        == (ran.checks["DYT0905"])
    )


def test_requests_that_leave_a_required_domain_are_found(view: View, dynctl: Run) -> None:
    view.chat = crossing(view)
    ran = probed(dynctl)

    assert ran.code == 1
    assert ran.reported == {"DYT0905"}
    assert ran.values("DYT0905") == {
        "Pod my-llm-frontend-0.prod": "2 of 2 requests: prefill by my-llm-prefill-a-0 in "
        "us-east-1a, decode by my-llm-decode-b-0 in us-east-1b"
    }


def test_requests_that_fail_are_found(view: View, dynctl: Run) -> None:
    answers = iter([(200, view.choose()[1]), (500, {"message": "Failed to generate completions"})])
    view.chat = lambda: next(answers)
    ran = probed(dynctl)

    assert ran.code == 1
    assert [*ran.values("DYT0905").values()] == [
        "1 of 2 requests: HTTP 500 Failed to generate completions"
    ]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, {"choices": []}, "the response does not name the workers that served it"),
        (200, {"nvext": None}, "the response does not name the workers that served it"),
        (
            200,
            {"nvext": {"worker_id": [1]}},
            "the response does not name the workers that served it",
        ),
        (200, [], "the response does not name the workers that served it"),
        (
            200,
            {"nvext": {"worker_id": {"prefill_worker_id": 1, "decode_worker_id": 2}}},
            "an unregistered worker served a request",
        ),
        (429, {"message": "slow down"}, "HTTP 429 slow down"),
    ],
)
def test_incomplete_responses_are_unread(
    view: View, dynctl: Run, status: int, body: Any, says: str
) -> None:
    view.chat = lambda: (status, body)
    ran = probed(dynctl)

    assert ran.code == 0
    result = ran.checks["DYT0905"]
    assert (result["state"], result["unread"]) == ("skip", True)
    assert result["message"] == f"Pod my-llm-frontend-0.prod: {says}"


def test_preferred_may_cross(dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with living(enforcement="preferred") as sim:
        named(sim, tmp_path, monkeypatch)
        view = sim.frontends.views[FRONTEND]
        view.chat = crossing(view)
        ran = probed(dynctl)

    assert ran.code == 0
    assert ran.checks["DYT0905"]["state"] == "pass"


# -- --frontend ------------------------------------------------------------------------------------


def test_a_frontend_may_be_named_instead_of_found(
    served: Simulation, view: View, dynctl: Run
) -> None:
    host, port = served.server.forwards[(*FRONTEND, 8000)]
    url = f"http://{host}:{port}"
    served.server.requests.clear()
    ran = dynctl(*VERIFY, "--frontend", url, "-o", "json")
    forwards = [one for one in served.server.requests if one.path.endswith("/portforward")]

    assert ran.code == 0
    assert ran.json["sources"][1:] == [f"frontend {url}"]
    assert ran.checks["DYT0904"]["message"] == "12 of 12 workers"
    assert forwards == []


def test_a_frontend_that_does_not_answer_is_not_known(view: View, dynctl: Run) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    ran = dynctl(*VERIFY, "--frontend", url, "-o", "json")

    assert ran.code == 0
    result = ran.checks["DYT0904"]
    assert (result["state"], result["unread"]) == ("skip", True)
    assert result["message"].startswith(f"{url} does not answer")
    assert {row["router"]["state"] for row in ran.json["chain"]} == {"unknown"}
