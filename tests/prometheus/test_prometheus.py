"""Rules, metrics and the dashboard, tried with Debian's promtool and a real Prometheus."""

import asyncio
import json
import math
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from dynctl.adapters.otlp import collector_url
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig, ReplicaConfig
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import RouterConfig
from tests.docs.grafana_panels import ROWS
from tests.docs.pages import DOCS
from tests.docs.prometheus_rules import METRIC_ALERTS, RECORDED, alert_name, condition_entries
from tests.dynctl.serving.collectors import collector
from tests.dynctl.serving.fleets import SLOW_HEALTH, Site, chat_body, site, zone
from tests.ports import free_port
from tests.waiting import patience, until

pytestmark = pytest.mark.prometheus

RULES = DOCS / "prometheus" / "rules.yaml"
#: Panels of what the fleet of this test does not have, and why.
NO_DATA = {
    "Choices that serve observe compared": "only serve observe has it, beside a live Dynamo",
    "Index incomplete": "the engines' replay sockets heal each gap",
    "Failed background tasks": "no task of a healthy process fails",
}
#: The same for a metric of a panel that has others.
NO_SERIES = {"dynctl_replica_missed_total": "no message between two routers of a host is lost"}
ENGINES = [
    {"name": f"{role}-{place}", "role": role, "speedup_ratio": 2.0, **zone(f"zone-{place}")}
    for place in "ab"
    for role in ("prefill", "decode")
] + [
    {"name": "decode-lost", "role": "decode", **zone("zone-b")},
]
#: Queue, skipped prefill hops and measured prefills: what panels of these features show.
ROUTER = RouterConfig(
    conditional_disagg_enabled=True,
    conditional_disagg_eff_isl_threshold=64,
    router_queue_threshold=0.0001,
    router_prefill_load_model="measured",
)


async def run(*command: str, given: bytes | None = None) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(patience(60)):
        out, _ = await process.communicate(given)
    return process.returncode or 0, out.decode()


async def test_the_rules_are_valid_and_do_what_their_tests_say():
    code, text = await run("promtool", "check", "rules", "--lint-fatal", str(RULES))
    assert code == 0, text
    code, text = await run(
        "promtool", "test", "rules", str(Path(__file__).parent / "rules_test.yaml")
    )
    assert code == 0, text


def test_each_condition_has_an_alert_with_its_page():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    assert set(alerts) == {alert_name(one.code) for one in condition_entries()} | {
        one[0] for one in METRIC_ALERTS
    }
    for entry in condition_entries():
        rule = alerts[alert_name(entry.code)]
        assert rule["labels"]["severity"] in ("critical", "warning")
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert f"\n## {entry.code}\n" in (DOCS.parent / page).read_text()
        assert anchor == entry.code.lower()


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self._client = client

    async def get(self, path: str, **query: str) -> Any:
        async with self._client.get(f"{self.url}/api/v1/{path}", params=query) as answer:
            found = await answer.json()
            assert found["status"] == "success", found
            return found["data"]

    async def values(self, query: str) -> list[float]:
        """The values of a query now, without those that are not numbers."""
        data = await self.get("query", query=query)
        found = [float(one["value"][1]) for one in data["result"]]
        return [value for value in found if not math.isnan(value)]


@asynccontextmanager
async def prometheus(directory: Path, targets: list[str]) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes ``targets`` every second and evaluates the rules."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES.resolve())],
        "scrape_configs": [{"job_name": "dynctl", "static_configs": [{"targets": targets}]}],
    }
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    log = (directory / "log").open("w")
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        stdout=log, stderr=log,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as client:
            found = Prometheus(f"http://127.0.0.1:{port}", client)

            async def up() -> bool:
                with suppress(aiohttp.ClientError, AssertionError):
                    return len(await found.values("up == 1")) == len(targets)
                return False

            async with asyncio.timeout(patience(60)):
                while not await up():
                    assert process.returncode is None, (directory / "log").read_text()
                    await asyncio.sleep(0.1)
            yield found
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
        log.close()


@asynccontextmanager
async def live_fleet() -> AsyncIterator[tuple[Site, list[str]]]:
    """Two frontends that share their load, under load, with an engine that fails requests."""
    async with collector() as spans:
        replicas = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        settings: dict[str, Any] = {
            "router": ROUTER,
            "otlp_endpoint": collector_url(spans.url),
            "replicas": ReplicaConfig(bind=replicas[0], peers=(replicas[1],)),
        }
        async with site(ENGINES, health=SLOW_HEALTH, **settings) as fleet:
            other = build_frontend(
                FrontendConfig(
                    port=0,
                    workers=fleet.frontend.config.workers,
                    model_path=DEMO_MODEL_DIR,
                    health=SLOW_HEALTH,
                    # Its queue has no room: what would wait is refused.
                    router=ROUTER.with_values({"router_queue_max_requests": 0}),
                    replicas=ReplicaConfig(bind=replicas[1], peers=(replicas[0],)),
                )
            )
            await other.start()
            await fleet.connected()
            fleet.engines["decode-lost"].engine.faults.update({"refuse": 500})
            load = [asyncio.create_task(_user(fleet, number)) for number in range(8)]
            load.append(asyncio.create_task(_refused(fleet, other.url)))
            try:
                yield fleet, [one.url.removeprefix("http://") for one in (fleet.frontend, other)]
            finally:
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)
                await other.close()


async def _user(fleet: Site, number: int) -> None:
    """Chats with a shared beginning, some too short for a prefill hop."""
    turn = 0
    while True:
        turn += 1
        stem = "Answer with care and cite the page that says so. " * (12 if turn % 3 else 0)
        with suppress(aiohttp.ClientError):
            await fleet.stream(f"{stem} question {turn} of user {number}", max_tokens=8)


async def _refused(fleet: Site, other: str) -> None:
    """Requests that no worker may take, because of a taint or of the load."""
    url = f"{other}/v1/chat/completions"
    while True:
        # At once, so that the prompt of the first is still computed when the others arrive.
        await asyncio.gather(*(_long_prompt(fleet, url) for _ in range(6)))
        nowhere = {"routing_constraints": {"required_taints": ["nowhere"]}}
        await fleet.post("/v1/chat/completions", chat_body("hello", nvext=nowhere))
        await asyncio.sleep(0.2)


async def _long_prompt(fleet: Site, url: str) -> None:
    body = chat_body("please " * 400, stream=True, max_tokens=1)
    async with fleet.client.post(url, json=body) as answer:
        await answer.read()


def of_this_test(query: str) -> str:
    """A panel's query with the values of its variables."""
    for name, value in (("$__rate_interval", "20s"), ("$domain", "zone"), ("$instance", ".*")):
        query = query.replace(name, value)
    return query.replace("$model", ".*")


async def all_rules_work(found: Prometheus) -> bool:
    groups = (await found.get("rules"))["groups"]
    return all(rule["health"] == "ok" for group in groups for rule in group["rules"])


async def active_alert(found: Prometheus, name: str) -> bool:
    alerts = (await found.get("alerts"))["alerts"]
    return name in {one["labels"]["alertname"] for one in alerts}


async def holds(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait for it: a scrape that takes longer than its second leaves a hole in the series."""
    async with asyncio.timeout(patience(20)):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_every_panel_shows_data_of_a_live_fleet(tmp_path):
    async with live_fleet() as (_, targets), prometheus(tmp_path, targets) as found:
        waiting = {
            (panel.title, query.text)
            for _, panels in ROWS
            for panel in panels
            if panel.title not in NO_DATA
            for query in panel.queries
            if not any(name in query.text for name in NO_SERIES)
        }
        with suppress(TimeoutError):
            async with asyncio.timeout(patience(45)):
                while waiting:
                    for title, query in sorted(waiting):
                        if await found.values(of_this_test(query)):
                            waiting.discard((title, query))
                    await asyncio.sleep(0.5)
        assert sorted(title for title, _ in waiting) == []
        assert {panel.title for _, panels in ROWS for panel in panels} >= set(NO_DATA)

        # The rules are evaluated without an error, and recorded values have numbers.
        await holds(lambda: all_rules_work(found))
        for name in RECORDED:
            if "errors" in name:
                continue  # a series of its own, with the first error
            await holds(lambda: found.values(name))  # noqa: B023
        # A condition becomes an alert: pending, until it held long enough.
        await holds(lambda: active_alert(found, "DynctlWorkerEjected"))


async def test_metrics_are_clean_but_for_dynamos_names():
    async with live_fleet() as (fleet, _):
        await until(lambda: fleet.service.engine_failures, 20)
        async with fleet.client.get(fleet.url("/metrics")) as answer:
            text = await answer.read()
    _, out = await run("promtool", "check", "metrics", given=text)
    ours = [line for line in out.splitlines() if line and not line.startswith("dynamo_")]
    assert ours == []


def test_the_tools_are_those_of_debian():
    for name in ("promtool", "prometheus"):
        assert shutil.which(name), f"{name}: make test-prometheus installs it"
    assert json.loads((DOCS / "grafana" / "dynctl.json").read_text())["panels"]
