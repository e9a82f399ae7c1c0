"""What works with each version of Dynamo: the rows of docs/compatibility.md.

``make test-dynamo VERSION=1.5.1`` runs this file against that version, and compares with what was
recorded for it; ``ARGS=--record`` writes tests/dynamo/compatibility/VERSION.json instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import nats
import pytest

from dynctl.adapters.nats.durable_events import read_snapshot
from dynctl.wire.dynamo.discovery import EndpointId
from tests.dynamo.fleet import DynamoFleet, aggregated, two_zones
from tests.dynamo.observed import Observed, observing, possible
from tests.dynamo.ours import our_frontend
from tests.dynamo.processes import ProcessGroup
from tests.dynamo.test_attach import Attached
from tests.dynamo.test_check import check
from tests.dynamo.test_component import ROUTER, Routers, asked
from tests.dynamo.test_observe import REPLICA_SYNC, shadowing
from tests.dynamo.test_prediction import HeldLoad, agreed, prompts
from tests.dynamo.test_route import PROMPT, route
from tests.dynamo.versions import LAST_WITH_DURABLE_EVENTS, Row, minor, record, recorded
from tests.waiting import patience, until, until_now

REQUESTS = 40
_STREAM = "namespace-dynamo-component-backend-kv-events"
SERVED_SINCE = (1, 2)
"""Beside older versions nothing of ours has served in the place of Dynamo's processes."""
Hold = Callable[[str, Row], None]


@pytest.fixture
def hold(dynamo_version: str, pytestconfig: pytest.Config, finding: Callable[[str], None]) -> Hold:
    """Compare a row with the recorded one, or write it with ``--record``."""

    def held(name: str, row: Row) -> None:
        finding(f"Dynamo {dynamo_version}, {name}: {row.right} of {row.of} {row.note}".rstrip())
        if pytestconfig.getoption("--record"):
            record(dynamo_version, name, row)
            return
        known = recorded().get(dynamo_version, {}).get(name)
        assert known is not None, f"nothing is recorded for Dynamo {dynamo_version}: ARGS=--record"
        assert row.note == known.note
        assert row.right >= 0.95 * known.right * row.of / known.of

    return held


def model_files(fleet: DynamoFleet, version: str) -> tuple[str, ...]:
    """The flag for the model's directory: cards before 1.4 name files that no component serves."""
    return ("--model-path", str(fleet.model_dir)) if minor(version) < (1, 4) else ()


def test_our_frontend_serves(hold: Hold, dynamo_version: str) -> None:
    """Requests to our frontend, streamed and not, that prefill and decode workers answer."""
    if minor(dynamo_version) < SERVED_SINCE:
        pytest.skip("serve frontend is tested with 1.2 and later")
    with DynamoFleet(two_zones("required"), speedup=0) as fleet:
        with our_frontend(fleet, *model_files(fleet, dynamo_version)) as ours:
            answers = [
                ours.complete(prompt, max_tokens=3, stream=number % 2 == 0)
                for number, prompt in enumerate(prompts(REQUESTS, seed=7)[:20])
            ]
        ends = [
            {
                choice["finish_reason"]
                for part in one.chunks or [one.body]
                for choice in part["choices"]
            }
            for one in answers
            if one.ok
        ]
        hold("served", Row(sum("length" in found for found in ends), 20))


def test_our_processes_take_part(hold: Hold, dynamo_version: str) -> None:
    """Dynamo's frontend serves from engines that `serve attach` registered, `serve observe` shows
    its choices, and Dynamo's client sends requests through `serve router --endpoint`."""
    if minor(dynamo_version) < SERVED_SINCE:
        pytest.skip("processes of ours in the place of Dynamo's are tested with 1.2 and later")
    with DynamoFleet([], frontend_args=REPLICA_SYNC) as fleet:
        group, routers = ProcessGroup(fleet.directory), Routers(fleet)
        try:
            engines = {one: Attached(group, fleet, one) for one in ("a", "b")}
            until_now(lambda: sum(fleet.frontend.worker_counts().values()) == len(engines), 30)
            # The first request registers the events of the frontend's router.
            until_now(lambda: fleet.frontend.complete("first", max_tokens=1).ok, 20)
            url = f"http://127.0.0.1:{fleet.frontend.port}"
            with shadowing("--file-kv", str(fleet.file_kv), "--frontend", url) as shadow:
                asked_for = prompts(REQUESTS, seed=7)[:20]
                answers = [fleet.frontend.complete(one, max_tokens=2) for one in asked_for]
                served = {one.instance_id for one in engines.values()}
                placed = {
                    one.body["id"].removeprefix("cmpl-"): one.placement.decode
                    for one in answers
                    if one.ok and one.placement.decode in served
                }
                until_now(lambda: placed.keys() <= shadow.decisions().keys(), 20)
                rows = shadow.decisions()
                seen = [rows[one]["decode"]["worker_id"] == to for one, to in placed.items()]
            hold("attached", Row(len(placed), 20))
            hold("observed", Row(sum(seen), 20))
            routers.start_ours()
            forwarded = [
                routers.client.ask(f"{ROUTER}.generate", routers.ours, asked([7, 8, number]))
                for number in range(20)
            ]
            ended = [one for one in forwarded if "length" in str(one.get("items", ())[-1:])]
            hold("component", Row(len(ended), 20))
        finally:
            routers.close()
            group.close()


def test_one_component(hold: Hold, dynamo_version: str) -> None:
    """Workers, caches read as they change and afterwards, the text of a chat, and `check`."""

    async def predicted() -> tuple[int, int]:
        async with observing(fleet) as seen:
            # A worker registers its event source after its card.
            await until(lambda: not seen.observer.deployment.problems, 20)
            found = len(seen.observer.deployment.workers)
            hits, _ = await agreed(fleet, seen, prompts(REQUESTS, seed=7))
            assert not seen.observer.not_current()
        return found, hits

    async def later() -> int:
        async with observing(fleet) as seen:
            hits, certain = await agreed(fleet, seen, prompts(REQUESTS, seed=7)[-10:])
            assert certain == 10, "all of these prompts are cached"
        return hits

    with DynamoFleet(aggregated(3), blocks=4096, speedup=0) as fleet:
        workers, hits = asyncio.run(predicted())
        hold("workers", Row(workers, 3))
        hold("one component", Row(hits, REQUESTS))
        hold("caches read later", Row(asyncio.run(later()), 10))
        first = fleet.frontend.chat(PROMPT)
        found = route(fleet, *model_files(fleet, dynamo_version))
        hold("tokens of a chat", Row(int(found["tokens"] == first.prompt_tokens), 1))
        _, checked = check(fleet)
        assert checked["DYR0501"]["state"] == "pass", checked["DYR0501"]
        wrong = sorted(code for code, one in checked.items() if one["state"] in ("warn", "fail"))
        hold("check", Row(len(checked) - len(wrong), len(checked), ", ".join(wrong)))


def test_over_nats(hold: Hold) -> None:
    """Events and requests over NATS: what is cached is requested from the workers there too."""

    async def predicted() -> tuple[int, int]:
        asked = prompts(REQUESTS, seed=7)[:20]
        async with observing(fleet) as seen:
            first, _ = await agreed(fleet, seen, asked)
        async with observing(fleet) as seen:
            planes = {item.instance.transport for item in seen.observer.deployment.workers}
            assert planes == {"nats_tcp"}
            later, certain = await agreed(fleet, seen, asked[-10:])
            assert certain == 10, "all of these prompts are cached"
            assert not seen.observer.not_current()
        return first, later

    nats = {"DYN_REQUEST_PLANE": "nats"}
    with DynamoFleet(
        aggregated(3), blocks=4096, speedup=0, event_plane="nats", environment=nats
    ) as fleet:
        first, later = asyncio.run(predicted())
    hold("over NATS", Row(first + later, 30))


def test_two_zones(hold: Hold) -> None:
    async def predicted() -> tuple[int, bool]:
        async with observing(fleet) as seen:
            hits, _ = await agreed(fleet, seen, prompts(REQUESTS, seed=7))
            return hits, all(item.worker.domains for item in seen.observer.deployment.workers)

    with DynamoFleet(two_zones("required", prefill=2), blocks=4096, speedup=0) as fleet:
        hits, domains = asyncio.run(predicted())
    hold("two zones", Row(hits, REQUESTS, "" if domains else "workers publish no topology"))


def test_under_load(hold: Hold, dynamo_version: str) -> None:
    """Load as the frontends report it to each other."""
    if minor(dynamo_version) < (1, 3):
        pytest.skip("a worker that holds requests needs the Python interface of Dynamo 1.3")
    flying, asked = 16, prompts(36, seed=16)

    async def predicted() -> int:
        hits = 0
        async with observing(fleet) as seen:
            load = HeldLoad(fleet, seed=flying)
            for number, tokens in enumerate(asked):
                # What was sent and ended is known; first tokens show by nothing but their events.
                await until(lambda: len(seen.router.load) == len(load.running))
                await seen.quiet(0.2)
                expected = possible(seen.predict(tokens))
                where = await asyncio.to_thread(load.begin, tokens)
                if number >= flying:
                    hits += (where, where) in expected
                    await asyncio.to_thread(load.end_one)
                await asyncio.to_thread(load.move)
            await asyncio.to_thread(load.end)
        return hits

    flags = ("--router-replica-sync",)
    with DynamoFleet(aggregated(3, kind="held"), blocks=8192, frontend_args=flags) as fleet:
        hits = asyncio.run(predicted())
    hold("under load", Row(hits, len(asked) - flying))


def test_durable_events(hold: Hold, dynamo_version: str) -> None:
    """KV events in a stream of NATS JetStream: those from before, and those that come."""
    if minor(dynamo_version) > LAST_WITH_DURABLE_EVENTS:
        pytest.skip("the option --durable-kv-events does not exist any more")

    async def predicted() -> tuple[int, int, bool]:
        asked = prompts(REQUESTS, seed=7)[:20]
        async with observing(fleet) as seen:
            await until_read(seen)
            # No worker has shown yet that it publishes.
            assert len(seen.observer.problems) == 3
            first, _ = await agreed(fleet, seen, asked)
        async with observing(fleet) as seen:
            await until_read(seen)
            states = seen.observer.stream_states().values()
            unheard = [one for one in states if one.last_seq is None]
            assert len(seen.observer.problems) == len(unheard) < 3
            later, certain = await agreed(fleet, seen, asked[-10:])
            assert certain == 10, "all of these prompts are cached"
            assert not seen.observer.not_current()
        return first, later, bool(unheard)

    async def until_read(seen: Observed) -> None:
        async with asyncio.timeout(patience(10)):
            while seen.observer.not_current():  # noqa: ASYNC110  a connection of its own
                await asyncio.sleep(0.05)

    with DynamoFleet(
        aggregated(3),
        blocks=4096,
        speedup=0,
        event_plane="nats",
        frontend_args=("--router-durable-kv-events",),
        worker_args=("--durable-kv-events",),
    ) as fleet:
        first, later, silent = asyncio.run(predicted())
        found = route(fleet, "--model-path", str(fleet.model_dir))
        doubts = {one["code"] for one in found["doubts"]}
        assert ("DYR0790" in doubts) == silent
        assert "DYR0705" not in doubts
    hold("durable KV events", Row(first + later, 30))


def test_a_frontend_of_ours_takes_part_in_durable_events(dynamo_version: str) -> None:
    """Its consumer stays, it removes what all have read, and Dynamo begins with its snapshot."""
    if minor(dynamo_version) != LAST_WITH_DURABLE_EVENTS:
        pytest.skip("the form of the last version with --durable-kv-events")
    with DynamoFleet(
        aggregated(2),
        speedup=0,
        event_plane="nats",
        frontend_args=("--router-durable-kv-events",),
        worker_args=("--durable-kv-events",),
    ) as fleet:
        environment = {"DYN_ROUTER_SNAPSHOT_THRESHOLD": "20"}
        flags = ("--router-durable-kv-events", "--model-path", str(fleet.model_dir))
        with our_frontend(fleet, *flags, environment=environment) as served:
            for number in range(24):
                text = f"Topic {number}: " + "words and more words again. " * 8
                assert fleet.frontend.chat(text, max_tokens=2).ok
            snapshot = "Successfully downloaded stable snapshot"
            until_now(lambda: asyncio.run(_stored(fleet)), 30.0)
            messages, consumers = asyncio.run(_streamed(fleet))
            assert (messages, len(consumers)) == (0, 2)
            later = fleet.start_frontend()
            assert later.log_lines(snapshot), later.process.tail()
            assert len(asyncio.run(_streamed(fleet))[1]) == 3, "ours is no orphan"
            rows = served.workers()
            assert {rank["index"] for row in rows for rank in row["ranks"]} == {"current"}
        assert len(asyncio.run(_streamed(fleet))[1]) == 2


async def _streamed(fleet: DynamoFleet) -> tuple[int, list[str]]:
    """The messages of the stream, and the names of its consumers."""
    client = await nats.connect(fleet.environment["NATS_SERVER"])
    try:
        js = client.jetstream()
        info = await js.stream_info(_STREAM)
        return info.state.messages, [one.name for one in await js.consumers_info(_STREAM)]
    finally:
        await client.close()


async def _stored(fleet: DynamoFleet) -> bool:
    """Whether a snapshot is stored, and nothing is left in the stream."""
    client = await nats.connect(fleet.environment["NATS_SERVER"])
    try:
        scope = EndpointId("dynamo", "backend", "generate")
        found = await read_snapshot(client.jetstream(), scope)
        left = (await client.jetstream().stream_info(_STREAM)).state.messages
        return found is not None and not left
    finally:
        await client.close()
