"""`dynctl test --restart`: a worker is restarted by a command of the user."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dynctl.base.errors import UsageProblem
from dynctl.cli.app import run
from dynctl.documents.trial import TrialReport
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.changes import RestartCommand
from dynctl.experiments.groups.restart import RESTART, Belief, RestartedWorker
from dynctl.experiments.trial import TrialOptions, announcement
from dynctl.findings.report import State
from dynctl.findings.runner import Wrong
from dynctl.simulation.engine.config import Faults
from dynctl.simulation.engine.process import start_engine
from tests.dynctl.experiments.faulty_proxy import Body, Fault, error, faulty_proxy
from tests.dynctl.experiments.trials import journals, messages, result_of, states, wrong
from tests.dynctl.serving.fleets import TOKENIZER, Site, site
from tests.waiting import patience

#: Asks the test to restart a worker, and waits for its answer.
ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], b'').read()"
ENGINES = [
    {"name": name, "kv_events": "tcp://127.0.0.1:0", "speedup_ratio": 2.0} for name in ("e0", "e1")
]


class Restarts:
    """Restarts engines of a site: what ``between`` awaits happens while one is away, and
    ``changed`` are settings of the new one."""

    def __init__(self, fleet: Site, **changed: Any) -> None:
        self.fleet = fleet
        self.names: list[str] = []
        self.away = False
        self.changed = changed
        self.between: Callable[[], Awaitable[Any]] = lambda: asyncio.sleep(0)

    async def restart(self, name: str) -> None:
        old = self.fleet.engines[name]
        self.names.append(name)
        self.away = True
        await old.close()
        await self.between()
        config = replace(old.engine.config, port=old.engine.port, **self.changed)
        self.fleet.engines[name] = await start_engine(config, TOKENIZER)
        self.away = False

    async def close(self) -> None:
        """End those that were restarted."""
        for name in set(self.names):
            await self.fleet.engines[name].close()


@asynccontextmanager
async def listening(handle: Callable[[str], Awaitable[Any]]) -> AsyncIterator[RestartCommand]:
    """A command that has ``handle`` called with the worker's name, and waits for its end."""

    async def answer(http: web.Request) -> web.Response:
        await handle(http.match_info["name"])
        return web.Response()

    app = web.Application()
    app.router.add_post("/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        url = f"http://127.0.0.1:{port}/{{worker}}"
        yield RestartCommand((sys.executable, "-c", ASK, url))
    finally:
        await runner.cleanup()


async def restarted(
    fleet: Site, restarts: Restarts, state: Path, *, url: str = "", **options: Any
) -> TrialReport:
    try:
        async with listening(restarts.restart) as command:
            return await result_of(
                url or fleet.frontend.url,
                **{"only": ("restart",), "changes": True, **options},
                restart=command,
                state=state,
            )
    finally:
        await restarts.close()


async def test_a_restarted_worker_is_known_again(tmp_path: Path):
    async with site(ENGINES) as fleet:
        restarts = Restarts(fleet)
        restarts.between = lambda: asyncio.sleep(0.5)
        report = await restarted(fleet, restarts, tmp_path)
        assert not fleet.service.membership.cordoned
    assert states(report) == dict.fromkeys(("DYE1101", "DYE1102", "DYE1103"), State.PASS), messages(
        report
    )
    assert len(restarts.names) == 1
    assert not journals(tmp_path)
    assert not report.not_checked


async def test_a_worker_that_stays_away_is_found(tmp_path: Path):
    async with site(ENGINES) as fleet:
        async with listening(lambda name: fleet.engines[name].close()) as command:
            report = await result_of(
                fleet.frontend.url,
                only=("restart",),
                changes=True,
                restart=command,
                state=tmp_path,
                duration=10 + patience(3),
            )
        assert not fleet.service.membership.cordoned
    assert wrong(report) == {"DYE1102"}
    assert states(report)["DYE1103"] is State.SKIP


class LosesWhileAway(Fault):
    """Requests fail while a worker restarts."""

    def __init__(self, restarts: Restarts) -> None:
        super().__init__()
        self.restarts = restarts

    def request(self, body: Body) -> web.Response | None:
        return error(502, "connection refused") if self.restarts.away else None


async def test_requests_that_are_lost_meanwhile_are_found(tmp_path: Path):
    async with site(ENGINES) as fleet:
        restarts = Restarts(fleet)
        restarts.between = lambda: asyncio.sleep(1)
        async with faulty_proxy(fleet.frontend.url, LosesWhileAway(restarts)) as url:
            report = await restarted(fleet, restarts, tmp_path, url=url)
    assert wrong(report) == {"DYE1101"}
    assert "502 connection refused" in report.checks[0].findings[0].value


async def test_an_old_cache_that_the_router_still_expects_is_found(tmp_path: Path):
    """An engine without events after its restart."""
    async with site(ENGINES) as fleet:
        restarts = Restarts(fleet, faults=Faults(stop_publishing=True))
        report = await restarted(fleet, restarts, tmp_path)
    assert wrong(report) == {"DYE1103"}, messages(report)
    assert "of a prompt from before the restart" in report.checks[2].findings[0].value


def test_a_new_cache_that_the_router_does_not_learn_is_found():
    row = WorkerRow(name="e0", worker_id=1, model="m", role="aggregated")
    facts = RestartedWorker(row, back=True, gone=True, old=[Belief(0, 0)])
    facts.new += [Belief(0, 432)]
    (learned,) = (each for each in RESTART.checks if each.code == "DYE1103")
    outcome = learned.judge(facts)
    assert isinstance(outcome, Wrong)
    assert outcome.found[0].arguments["prompt"] == "a new prompt"


async def test_a_command_that_restarts_nothing_proves_nothing(tmp_path: Path):
    async with site(ENGINES) as fleet, listening(lambda name: asyncio.sleep(0)) as command:
        report = await result_of(
            fleet.frontend.url, only=("restart",), changes=True, restart=command, state=tmp_path
        )
    assert not wrong(report)
    assert states(report)["DYE1102"] is State.SKIP
    assert "nothing shows that" in messages(report)["DYE1102"]


async def test_a_command_that_fails_is_named_and_the_cordon_is_lifted(tmp_path: Path):
    async with site(ENGINES) as fleet:
        for words, problem in (
            (("sh", "-c", "echo no such container >&2; exit 4", "{worker}"), "no such container"),
            (("/no/such/program", "{worker}"), "/no/such/program: the program does not exist"),
            ((str(tmp_path), "{worker}"), f"{tmp_path}: no permission to run it"),
            (("sleep", "600", "{worker}"), "exit code 1"),
        ):
            report = await result_of(
                fleet.frontend.url,
                only=("restart",),
                changes=True,
                restart=RestartCommand(words),
                state=tmp_path,
            )
            assert set(states(report).values()) == {State.SKIP}
            assert problem in messages(report)["DYE1101"]
        assert not fleet.service.membership.cordoned


async def test_a_command_that_does_not_end_is_ended(tmp_path: Path):
    row = WorkerRow(name="600", worker_id=1, model="m", role="aggregated")
    said = await RestartCommand(("sleep", "{worker}")).run(row, 0.1)
    assert said == "it did not end within 0 s"


async def test_a_server_that_the_command_leaves_running_is_not_waited_for(tmp_path: Path):
    """It holds the command's output for as long as it lives."""
    script = '(until test -e "$0/end"; do sleep 0.1; done) & echo started; exit 3'
    row = WorkerRow(name="w", worker_id=1, model="m", role="aggregated")
    said = await RestartCommand(("sh", "-c", script, str(tmp_path), "{worker}")).run(row, 600)
    (tmp_path / "end").touch()
    assert said == "exit code 3: started"


async def test_without_a_command_nothing_is_restarted(tmp_path: Path):
    async with site(ENGINES) as fleet:
        report = await result_of(
            fleet.frontend.url, changes=True, state=tmp_path, only=("restart",)
        )
        whole = await result_of(fleet.frontend.url, changes=True, state=tmp_path)
    assert set(states(report).values()) == {State.SKIP}
    assert "--restart COMMAND" in messages(report)["DYE1101"]
    assert "DYE1101" not in states(whole)
    assert whole.not_checked == ["restarts of workers: --allow-changes --restart COMMAND"]


def test_the_announcement_has_the_command():
    wanted = TrialOptions(
        "http://a", changes=True, restart=RestartCommand.parse("restart {worker}")
    )
    assert "a worker is restarted: restart" in announcement(wanted)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("docker restart", "does not say which worker"),
        ("docker restart {name}", "unknown {name}"),
        ("docker restart '{worker}", "No closing quotation"),
        ("docker restart {worker", "expected '}'"),
        ("docker restart {}", "unknown {}"),
        ("docker restart {worker.name}", "unknown {worker.name}"),
        ("", "does not say which worker"),
    ],
)
def test_a_command_that_is_not_one_is_refused(text: str, problem: str):
    with pytest.raises(UsageProblem, match="--restart") as raised:
        RestartCommand.parse(text)
    assert problem in raised.value.message


def test_the_words_of_a_command_name_the_worker():
    row = WorkerRow(
        name="a b", worker_id=1, model="m", role="aggregated", endpoint="http://[::1]:8000"
    )
    command = RestartCommand.parse("kubectl delete pod --field-selector status.podIP={host}")
    assert command.of(row)[-1] == "status.podIP=::1"
    assert RestartCommand.parse("x '{worker}:{port}' {{}}").of(row) == ["x", "a b:8000", "{}"]
    with pytest.raises(UsageProblem, match="the host of worker a b is unknown"):
        command.of(WorkerRow(name="a b", worker_id=1, model="m", role="aggregated"))


def test_a_restart_needs_the_right_to_change(capsys: pytest.CaptureFixture[str]):
    assert run(["test", "http://127.0.0.1:9", "--restart", "docker restart {worker}"]) == 2
    assert "--allow-changes" in capsys.readouterr().err
