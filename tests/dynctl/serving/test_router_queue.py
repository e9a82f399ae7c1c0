"""Requests in the router queue: they wait, are admitted in order, leave, and are turned away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient

from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig, Limits
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.services.router_server import build_router
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import (
    BlocksStored,
    Booked,
    ConfigSet,
    Freed,
    KvEvent,
    RouterConfig,
    RoutingPlan,
    WorkerLost,
)
from tests.dynctl.serving.fleets import QUICK_HEALTH, WORDS, Site, chat_body, site, until
from tests.dynctl.serving.routed import request, worker
from tests.dynctl.serving.test_router_service import TOKENS, routing

#: Requests wait while every worker has any active prefill token.
ANY_LOAD = {"router_queue_threshold": 0.0}


@asynccontextmanager
async def queueing(
    *engines: dict[str, Any], limits: Limits | None = None, **settings: Any
) -> AsyncIterator[Site]:
    """One engine (or those given) behind a frontend whose queue waits on any load."""
    config = RouterConfig().with_values({**ANY_LOAD, **settings})
    started = engines or ({"name": "a"},)
    async with site(started, router=config, limits=limits or Limits(drain_s=2.0)) as found:
        await found.connected()
        yield found


def hold(found: Site, *names: str) -> None:
    """Book prefill load on workers, as another request would."""
    for worker_ in list(found.service.router.registry):
        if not names or worker_.name in names:
            booked = Booked(
                f"load-{worker_.name}", "aggregated", worker_.worker_id, 0, prefill_tokens=500
            )
            assert found.service.apply(booked).ok


def release(found: Site, name: str = "a") -> None:
    found.service.apply(Freed(f"load-{name}"))


def sent(found: Site, text: str, **fields: Any) -> "asyncio.Task[tuple[int, Any, Any]]":
    return asyncio.create_task(found.chat(text, max_tokens=4, **fields))


async def waiting(found: Site, count: int) -> None:
    await until(lambda: len(found.service.router.queue) == count, 10)


@pytest.mark.seed("dynamo-1.6: router queue: waiting")
async def test_a_request_waits_until_a_worker_has_room() -> None:
    async with queueing() as found:
        hold(found)
        task = sent(found, "hello", nvext={"extra_fields": ["timing"]})
        await waiting(found, 1)
        _, metrics = await found.get("/metrics")
        pending = 'router_queue_pending_requests{model="demo",policy_class="default"'
        assert f'{pending},worker_type="decode"}} 1\n'.encode() in metrics
        _, fleet = await found.get("/v1/fleet")
        assert fleet["queue"] == 1
        assert not task.done()
        release(found)
        status, body, headers = await task
        assert status == 200
        assert (headers["x-dynctl-queue-class"], headers["x-dynctl-queue-ahead"]) == (
            "default",
            "0",
        )
        assert float(headers["x-dynctl-queue-wait-ms"]) >= 0
        assert body["nvext"]["timing"]["router_queue_depth"] == 0
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        queue = decision["decode"]["queue"]
        assert (queue["waits"], queue["all_busy"], queue["nearest"]) == (False, True, "a")
        assert (queue["needs"], queue["backlog"]) == (500, 0)
        assert queue["waited_s"] > 0
        await found.idle()
        _, metrics = await found.get("/metrics")
        assert f'{pending},worker_type="decode"}} 0\n'.encode() in metrics
        wait = 'dynctl_router_queue_wait_seconds_count{model="demo",policy_class="default"} 1'
        assert wait.encode() in metrics
        assert not found.service.admission.waiting


async def test_without_load_no_request_waits_and_no_header_is_sent() -> None:
    async with queueing() as found:
        status, _, headers = await found.chat("hello", max_tokens=2)
        assert status == 200
        assert not [name for name in headers if name.lower().startswith("x-dynctl-queue")]
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert decision["decode"]["queue"]["waits"] is False
        assert "waited_s" not in decision or decision["decode"]["queue"]["waited_s"] is None


async def test_with_the_queue_off_decisions_do_not_mention_it() -> None:
    async with queueing(router_queue_threshold=None) as found:
        hold(found)
        status, _, headers = await found.chat("hello", max_tokens=2)
        assert status == 200
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert "queue" not in decision["decode"]
        _, fleet = await found.get("/v1/fleet")
        assert "queue" not in fleet


@pytest.mark.seed("dynamo-1.6: router queue: priorities")
async def test_priority_and_strict_priority_of_agent_hints_decide_the_order() -> None:
    async with queueing() as found:
        order: list[str] = []

        class Order(ServiceObserver):
            def on_decision(self, plan: Any, request: Any, record: Any) -> None:
                order.append(record.request_id)

        found.service.observers.append(Order())
        hold(found)
        tasks = []
        hints = {
            "plain": {},
            "raised": {"priority": 600},
            "strict": {"strict_priority": 1},
            "lowered": {"priority": -600},
        }
        for count, (name, hint) in enumerate(hints.items(), start=1):
            body = chat_body(f"{name} {WORDS}", max_tokens=2, nvext={"agent_hints": hint})
            headers = {"x-request-id": name}
            tasks.append(
                asyncio.create_task(found.post("/v1/chat/completions", body, headers=headers))
            )
            await waiting(found, count)
        release(found)
        assert {(await task)[0] for task in tasks} == {200}
        assert order == ["strict", "raised", "plain", "lowered"]


@pytest.mark.seed("dynamo-1.6: router queue: clients that leave")
async def test_a_client_that_leaves_leaves_the_queue() -> None:
    async with queueing() as found:
        hold(found)
        stays = sent(found, "stays")
        await waiting(found, 1)
        body = chat_body("leaves", max_tokens=2)
        with contextlib.suppress(TimeoutError):
            await found.client.post(
                found.url("/v1/chat/completions"),
                json=body,
                timeout=aiohttp.ClientTimeout(total=0.2),
            )
        await waiting(found, 1)
        (left,) = found.service.router.queue
        assert left.request_id in found.service.admission.waiting
        # History knows it: no engine got the request.
        _, listed = await found.get("/v1/decisions?outcome=cancelled")
        (row,) = listed["decisions"]
        assert (row["response"]["status"], row["response"]["attempts"]) == (499, [])
        release(found)
        assert (await stays)[0] == 200
        await found.idle()
        assert found.service.router.rotation == {("demo", "aggregated"): 2}  # load and "stays"


@pytest.mark.seed("dynamo-1.6: router queue: limits")
async def test_a_full_queue_answers_529_and_names_the_limit() -> None:
    async with queueing(router_queue_max_requests=1) as found:
        hold(found)
        task = sent(found, "first")
        await waiting(found, 1)
        status, body, headers = await found.chat("second")
        assert (status, headers["retry-after"]) == (529, "1")
        assert body["error"]["code"] == "RouterQueueLimitExceeded"
        assert body["error"]["type"] == "overloaded"
        assert body["error"]["message"] == ("1 request waits in the router queue, the limit is 1")
        details = body["error"]["dynctl"]
        found_limit = {key: details[key] for key in ("policy_class", "limit_kind", "current")}
        assert found_limit == {
            "policy_class": "default", "limit_kind": "total_requests", "current": 1,
        }  # fmt: skip
        assert details["outcome"] == "queue_full"
        assert "--router-queue-max-requests" in details["what_would_admit"]
        _, decision = await found.get(f"/v1/decisions/{details['decision']}")
        assert decision["decode"]["queue"]["refused"]["limit"] == 1
        _, metrics = await found.get("/metrics")
        assert b'reason="total_request_limit",worker_type="decode"} 1\n' in metrics
        assert b'error_type="overload"' in metrics
        release(found)
        assert (await task)[0] == 200


@pytest.mark.seed("dynamo-1.6: router queue: limits")
async def test_a_wait_has_a_limit() -> None:
    async with queueing(router_queue_max_wait_secs=0.05) as found:
        hold(found)
        status, body, _ = await found.chat("hello")
        assert (status, body["error"]["dynctl"]["outcome"]) == (529, "queue_timeout")
        assert (
            "in the class default of the router queue, the limit is 0 s"
            in (body["error"]["message"])
        )
        assert len(found.service.router.queue) == 0
        assert found.load()["a"][0] == 1


async def test_settings_and_fleet_changes_admit_and_refuse_the_waiting() -> None:
    async with queueing({"name": "a"}, {"name": "b"}) as found:
        hold(found)
        task = sent(found, "hello")
        await waiting(found, 1)
        found.service.apply(ConfigSet({"router_queue_threshold": None}))
        assert (await task)[0] == 200
        found.service.apply(ConfigSet(ANY_LOAD))
        gone = sent(found, "again")
        await waiting(found, 1)
        for one in list(found.service.router.registry):
            found.service.apply(WorkerLost(one.worker_id))
        status, body, _ = await gone
        assert (status, body["error"]["dynctl"]["outcome"]) == (503, "no_workers")


@pytest.mark.seed("dynamo-1.6: router queue: waiting")
async def test_a_worker_that_joins_admits_the_waiting() -> None:
    async with queueing({"name": "a"}, {"name": "b"}) as found:
        free = found.service.membership.find("b")
        assert free is not None
        found.service.membership.set_available(free.worker_id, "not yet")
        hold(found, "a")
        task = sent(found, "hello")
        await waiting(found, 1)
        found.service.membership.set_available(free.worker_id, None)
        status, _, headers = await task
        assert status == 200
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert decision["winner"]["decode"]["worker"] == "b"


@pytest.mark.seed("dynamo-1.6: router queue: dry runs")
async def test_a_dry_run_does_not_wait_and_says_that_the_request_would() -> None:
    async with queueing() as found:
        hold(found)
        task = sent(found, "waits")
        await waiting(found, 1)
        status, result, _ = await found.post("/v1/route", chat_body("hello"))
        queue = result["decode"]["queue"]
        assert (status, queue["waits"], queue["backlog"], queue["ahead"]) == (200, True, 1, 1)
        (doubt,) = [one for one in result["doubts"] if one["code"] == "DYR0713"]
        assert doubt["matters"]
        assert not result["certain"]
        assert len(found.service.router.queue) == 1
        release(found)
        assert (await task)[0] == 200


async def test_shutdown_serves_the_waiting() -> None:
    async with queueing(limits=Limits(drain_s=60.0)) as found:
        hold(found)
        task = sent(found, "hello")
        await waiting(found, 1)
        drained = asyncio.create_task(found.frontend.drain())
        await until(lambda: found.service.draining)
        assert (await found.chat("late"))[0] == 503
        release(found)
        assert (await task)[0] == 200
        await drained


async def test_the_end_of_the_process_ends_the_waiting() -> None:
    async with queueing(limits=Limits(drain_s=0.05)) as found:
        hold(found)
        task = sent(found, "hello")
        await waiting(found, 1)
        await found.frontend.drain()
        await found.frontend.close()
        with pytest.raises(aiohttp.ClientError):
            await task
        await waiting(found, 0)
        assert not found.service.admission.waiting


async def test_a_retry_after_a_failed_engine_does_not_wait_again() -> None:
    async with queueing({"name": "a"}, {"name": "b"}, router_queue_threshold=0.0) as found:
        hold(found)
        task = sent(found, "hello")
        await waiting(found, 1)
        behind = sent(found, "behind")
        await waiting(found, 2)
        await found.engines["a"].close()
        release(found, "a")  # admitted to a, which refuses; b has load, so nothing else has room
        status, _, headers = await task
        assert status == 200
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert decision["winner"]["decode"]["worker"] == "b"
        assert decision["attempts"] == 2
        release(found, "b")
        assert (await behind)[0] == 200


async def test_the_prefill_hop_waits_in_a_disaggregated_fleet() -> None:
    engines = ({"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"})
    async with queueing(*engines) as found:
        prefill = found.service.membership.find("p")
        assert prefill is not None
        load = Booked("load", "prefill", prefill.worker_id, 0, prefill_tokens=500)
        assert found.service.apply(load).ok
        task = sent(found, "hello")
        await waiting(found, 1)
        found.service.apply(Freed("load"))
        status, _, headers = await task
        assert status == 200
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert decision["prefill"]["queue"]["waited_s"] > 0
        assert "queue" not in decision["decode"]
        await found.idle()


@pytest.mark.seed("dynamo-1.6: router queue: priorities")
async def test_a_priority_without_a_queue_says_that_it_has_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hints = {"nvext": {"agent_hints": {"priority": 5, "strict_priority": 1}}}
    async with site([{"name": "a"}]) as found:
        await found.chat("x", max_tokens=1, **hints)
        status, _, headers = await found.chat("x", max_tokens=1, **hints)
        assert status == 200
        assert headers["x-dynctl-queue-unused"] == "priority, strict_priority"
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        (note,) = decision["decode"]["notes"]
        assert note == (
            "priority, strict_priority: no effect on routing, the router queue is off (it needs "
            "router_queue_threshold, in mode kv)"
        )
        status, answer, _ = await found.post("/v1/route", chat_body("x", **hints))
        assert answer["decode"]["notes"] == [note]
        assert caplog.text.count("which has no effect") == 1
        status, _, headers = await found.chat("x", max_tokens=1)
        assert "x-dynctl-queue-unused" not in headers
        found.service.configure({"router_queue_threshold": 1.0})
        status, _, headers = await found.chat("x", max_tokens=1, **hints)
        assert "x-dynctl-queue-unused" not in headers


async def test_under_load_every_request_is_served_once_while_an_engine_has_room() -> None:
    """A burst on two slow engines: the queue takes what exceeds the threshold of all of them."""
    slow = {"prefill_tokens_per_s": 20_000.0, "max_num_batched_tokens": 200, "speedup_ratio": 5.0}
    engines = [{"name": name, **slow} for name in ("a", "b")]
    least: list[int] = []
    async with queueing(*engines, router_queue_threshold=1.0, router_queue_policy="wspt") as found:

        class Watch(ServiceObserver):
            def on_hop(self, decision: Any, request: Any, record: Any) -> None:
                least.append(min(decision.inputs.prefill_tokens))

        found.service.observers.append(Watch())
        texts = [f"{number} {WORDS * (1 + number % 7)}" for number in range(60)]
        hold(found)
        tasks = [sent(found, text) for text in texts]
        await waiting(found, 60)
        release(found, "a")
        release(found, "b")
        answers = [await task for task in tasks]
        assert {status for status, *_ in answers} == {200}
        assert all("x-dynctl-queue-class" in headers for *_, headers in answers)
        assert len(least) == 60
        assert max(least) <= 200
        await found.idle()
        assert len(found.service.router.queue) == 0
        assert found.service.router.rotation == {("demo", "aggregated"): 62}  # two were held


POLICY = """
default_policy_family: standard
uncached_isl_buckets:
  - {min_tokens: 0, bucket: all}
policy_classes:
  - {name: std, policy_family: standard, cache_bucket: all, quantum: 1,
     prefill_busy_threshold: 0, request_queue_limit_per_worker: 1}
  - {name: fast, policy_family: fast, cache_bucket: all, quantum: 4}
"""


@pytest.mark.seed("dynamo-1.6: router queue: policy classes")
async def test_policy_classes_have_their_own_thresholds_and_limits(tmp_path: Any) -> None:
    file = tmp_path / "classes.yaml"
    file.write_text(POLICY)
    config: dict[str, Any] = {"router_policy_config": str(file), "router_queue_threshold": None}
    async with queueing({"name": "a"}, **config) as found:
        hold(found)
        task = sent(found, "first")
        await waiting(found, 1)
        status, body, _ = await found.chat("second")
        assert (status, body["error"]["dynctl"]["limit_kind"]) == (529, "requests")
        assert body["error"]["message"] == (
            "1 request waits in the class std of the router queue, its limit is 1"
        )
        body = chat_body("third", max_tokens=2)
        fast = {"x-dynamo-meta-policy-class": "fast"}
        status, *_ = await found.post("/v1/chat/completions", body, headers=fast)
        assert status == 200
        _, metrics = await found.get("/metrics")
        assert b'policy_class="std",worker_type="decode"} 1\n' in metrics
        assert b'policy_class="fast",worker_type="decode"} 0\n' in metrics
        release(found)
        assert (await task)[0] == 200


def test_a_frontend_with_a_wrong_policy_file_does_not_start(tmp_path: Any) -> None:
    file = tmp_path / "classes.yaml"
    file.write_text("policy_classes: []")
    router = RouterConfig(router_policy_config=str(file))
    with pytest.raises(Exception, match=r"--router-policy-config .*classes.yaml: default_policy"):
        build_frontend(
            FrontendConfig(router=router, model_path=DEMO_MODEL_DIR, health=QUICK_HEALTH)
        )


@pytest.mark.seed("dynamo-1.6: router queue: overlap refresh")
async def test_the_caches_of_the_moment_of_admission_decide() -> None:
    engines = ({"name": "a"}, {"name": "b"})
    async with queueing(*engines) as found:
        hold(found)
        text = f"long {WORDS * 8}"
        task = sent(found, text)
        await waiting(found, 1)
        (entry,) = found.service.router.queue
        assert entry.cached_tokens == 0
        other = found.service.membership.find("b")
        assert other is not None
        request = found.service.admission.waiting[entry.request_id].request
        stored = BlocksStored(None, request.sequence_hashes, request.local_hashes)
        assert found.service.apply(KvEvent(other.worker_id, 0, stored)).ok
        # The load of a ends first, but both have room when the turn is given out.
        release(found, "a")
        release(found, "b")
        status, _, headers = await task
        assert status == 200
        _, decision = await found.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert decision["winner"]["decode"]["worker"] == "b"


# -- the router alone ----------------------------------------------------------------------


async def select(client: TestClient[Any, Any], name: str, **more: Any) -> tuple[int, Any]:
    body = {"token_ids": TOKENS, "request_id": name, **more}
    async with client.post("/v1/select_and_book", json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.seed("dynamo-1.6: router queue: standalone router")
async def test_select_and_book_waits_and_books_by_its_turn() -> None:
    async with routing(worker(1), **ANY_LOAD) as (client, service, api, clock):
        assert (await select(client, "first"))[0] == 201
        tasks = [asyncio.create_task(select(client, "second"))]
        await until(lambda: "second" in service.router.queue)
        status, body = await select(client, "second")
        assert (status, body["error"]["code"]) == (409, "duplicate_request")
        tasks.append(asyncio.create_task(select(client, "third", strict_priority=2)))
        await until(lambda: "third" in service.router.queue)
        async with client.post("/v1/select", json={"token_ids": TOKENS}) as answer:
            dry = await answer.json()
        assert (dry["queue"]["waits"], dry["queue"]["ahead"]) == (True, 2)
        clock.now += 2.5
        assert (await client.post("/v1/bookings/first/first_token")).status == 200
        status, body = await tasks[1]
        assert (status, body["booked"]) == (201, ["aggregated"])
        assert body["queue"]["waited_s"] == 2.5
        assert not tasks[0].done()
        assert (await client.delete("/v1/bookings/third")).status == 200
        assert (await tasks[0])[0] == 201
        assert len(api) == 2


async def test_a_client_of_select_and_book_that_leaves_books_nothing() -> None:
    async with routing(worker(1), **ANY_LOAD) as (client, service, api, _):
        await select(client, "first")
        task = asyncio.create_task(select(client, "second"))
        await until(lambda: "second" in service.router.queue)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "second" not in service.router.queue)
        await client.delete("/v1/bookings/first")
        assert len(api) == 0
        assert not service.router.load.bookings("second")


async def test_a_router_that_stops_serves_the_waiting() -> None:
    config = RouterConfig().with_values(ANY_LOAD)
    router = build_router(FrontendConfig(port=0, router=config, limits=Limits(drain_s=60.0)))
    await router.start()
    try:
        assert router.service.membership.upsert(worker(1)).ok
        async with aiohttp.ClientSession(router.url) as client:

            async def book(name: str) -> tuple[int, Any]:
                body = {"token_ids": TOKENS, "request_id": name}
                async with client.post("/v1/select_and_book", json=body) as answer:
                    return answer.status, await answer.json()

            assert (await book("first"))[0] == 201
            task = asyncio.create_task(book("second"))
            await until(lambda: "second" in router.service.router.queue)
            drained = asyncio.create_task(router.drain())
            await until(lambda: router.service.draining)
            assert (await book("late"))[0] == 503
            await client.delete("/v1/bookings/first")
            assert (await task)[0] == 201
            await drained
    finally:
        await router.close()


async def test_select_and_book_is_turned_away_by_a_full_queue() -> None:
    full = {**ANY_LOAD, "router_queue_max_requests": 0}
    async with routing(worker(1), **full) as (client, service, api, _):
        await select(client, "first")
        status, body = await select(client, "second")
        assert (status, body["error"]["code"]) == (529, "RouterQueueLimitExceeded")
        assert len(api) == 1
        assert not service.router.load.bookings("second")


async def test_a_pool_of_prefill_workers_has_a_queue() -> None:
    async with routing(worker(1, "prefill"), **ANY_LOAD) as (client, service, api, _):
        assert (await select(client, "first", hops="prefill"))[0] == 201
        task = asyncio.create_task(select(client, "second", hops="prefill"))
        await until(lambda: "second" in service.router.queue)
        await client.delete("/v1/bookings/first")
        status, body = await task
        assert (status, body["booked"]) == (201, ["prefill"])
        assert body["queue"]["waited_s"] is not None
        assert len(api) == 1


class Turn:
    """A service with one worker that is busy, and a request that waits."""

    def __init__(self) -> None:
        self.service = RoutingService(RouterConfig().with_values(ANY_LOAD), id_prefix="d")
        assert self.service.membership.upsert(worker(1)).ok
        assert self.service.apply(Booked("load", "aggregated", 1, 0, prefill_tokens=500)).ok
        self.task: asyncio.Task[RoutingPlan]

    async def wait(self) -> None:
        asked = request(request_id="r1")
        record = RequestRecord("r1", "r1", "chat_completions", 0.0, 0.0)
        plan = self.service.plan(asked)
        self.task = asyncio.create_task(self.service.admission.wait(plan, asked, record))
        await until(lambda: "r1" in self.service.router.queue)

    def give_turns(self) -> None:
        """As the event loop does after the load is gone, and before the request notices."""
        self.service.apply(Freed("load"))
        self.service.admission._turns()

    @property
    def booked(self) -> bool:
        return bool(self.service.router.load.bookings("r1"))

    def assert_nothing_left(self) -> None:
        assert not self.booked
        assert not self.service.admission.waiting
        assert len(self.service.router.queue) == 0


async def test_a_client_that_leaves_as_its_turn_comes_leaves_no_booking() -> None:
    one = Turn()
    await one.wait()
    one.give_turns()
    assert one.booked
    one.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one.task
    one.assert_nothing_left()


async def test_a_turn_that_comes_as_its_client_leaves_books_nothing() -> None:
    one = Turn()
    await one.wait()
    one.task.cancel()
    one.give_turns()
    assert not one.booked
    with pytest.raises(asyncio.CancelledError):
        await one.task
    one.assert_nothing_left()


async def test_a_turn_at_the_last_moment_of_the_wait_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, timeout = Turn(), asyncio.timeout
    longest = one.service.router.config.router_queue_max_wait_secs
    limits: list[asyncio.Timeout] = []

    def kept(seconds: float | None) -> asyncio.Timeout:
        made = timeout(seconds)
        if seconds == longest:
            limits.append(made)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "timeout", kept)
        await one.wait()
    [limit] = limits
    limit.reschedule(asyncio.get_running_loop().time() - 1)
    one.give_turns()
    plan = await one.task
    assert limit.expired()
    assert plan.ok
    assert one.booked, "the caller frees it"
    one.service.free("r1")
    one.assert_nothing_left()
