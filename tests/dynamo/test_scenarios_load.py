"""Situations in which load, settings or a cache decide: predicted, or declared as a doubt before.

Each request is predicted by what `dynctl route` does, then sent. A prediction may be wrong only if
its answer named the doubt that explains it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import UNSET

from dynctl.adapters.dynamo.request_plane import TcpRequestPlane
from dynctl.base.options import GlobalOptions
from dynctl.documents.config import ConfigDocument
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import SavedView
from dynctl.sources.dynamo.router_state import take_load, take_settings
from dynctl.sources.dynamo.source import DynamoSource
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.frontend_metrics import read_frontend_metrics
from dynctl.wire.dynamo.recovery import recovery_query
from tests.dynamo.client import Answer, InFlight
from tests.dynamo.fleet import DynamoFleet, Frontend, Worker, aggregated
from tests.dynamo.held import State
from tests.dynamo.observed import Observed, observing, possible, stored_events
from tests.waiting import patience

Finding = Callable[[str], None]
OVERLOADED = 529


@dataclass
class Score:
    """Requests of one scenario: predicted; not, but with the doubt named before; silently wrong."""

    name: str
    doubt: str
    right: int = 0
    declared: int = 0
    wrong: list[str] = field(default_factory=list)
    named: int = 0

    def count(self, expected: RouteResult, answer: Answer) -> None:
        """Count one request by its answer."""
        if answer.ok:
            placed = (answer.placement.prefill, answer.placement.decode)
            right = expected.ok and placed in possible(expected)
        else:
            right = answer.status == OVERLOADED and not expected.ok
        self.judge(expected, right=right)

    def judge(self, expected: RouteResult, *, right: bool) -> None:
        mattering = [one.code for one in expected.doubts if one.matters]
        self.named += self.doubt in mattering
        if right:
            self.right += 1
        elif self.doubt in mattering and not expected.certain:
            self.declared += 1
        else:
            self.wrong.append(f"{mattering}, {expected.decode}")

    def report(self, finding: Finding) -> None:
        total = self.right + self.declared + len(self.wrong)
        text = f"{self.name}: {self.right} of {total} right"
        if self.doubt:
            text += f", {self.declared} declared ({self.doubt} with {self.named})"
        finding(text + f", {len(self.wrong)} silently wrong")
        assert not self.wrong, self.wrong[0]


def route(
    fleet: DynamoFleet, tokens: Sequence[int], *frontends: Frontend, **more: Any
) -> RouteResult:
    """What `dynctl route --tokens` answers with these frontends, looking only once."""
    options = GlobalOptions(discovery="file", file_kv=fleet.file_kv)
    source = DynamoSource(options, tuple(one.url for one in frontends))
    return source.route(RouteQuery(token_ids=list(tokens), **more))


async def routed(seen: Observed, tokens: Sequence[int], *frontends: Frontend) -> RouteResult:
    """The same by an observer that has followed the fleet before."""
    await seen.quiet()
    pages = [await asyncio.to_thread(one.get, "/metrics") for one in frontends]
    metrics = [read_frontend_metrics(text.encode()) for _, text in pages]
    thresholds = {
        one.model: {name: value for name, value in one.thresholds().items() if name != "model"}
        for one in frontends[:1]
    }
    _, doubts = take_load(seen.observer, metrics)
    assumptions, unknown = take_settings(seen.observer, thresholds, metrics)
    view = SavedView(
        seen.router, 0.0, "dynamo-1.6", assumptions=tuple(assumptions), doubts=(*doubts, *unknown)
    )
    return ViewSource(view, "test").route(RouteQuery(token_ids=list(tokens)))


def gauges(frontend: Frontend) -> list[int]:
    """The prefill tokens that a frontend counts, by worker."""
    metrics = read_frontend_metrics(frontend.get("/metrics")[1].encode())
    return [load.active_prefill_tokens for load in metrics.rank_loads.values()]


def booked(frontend: Frontend) -> list[int]:
    """The decode blocks and prefill tokens that a frontend counts, by worker."""
    metrics = read_frontend_metrics(frontend.get("/metrics")[1].encode())
    return [
        load.active_decode_blocks + load.active_prefill_tokens
        for load in metrics.rank_loads.values()
    ]


def queued(frontend: Frontend) -> int:
    """The requests without a first token that a frontend has."""
    _, text = frontend.get("/metrics")
    rows = [
        line for line in text.splitlines() if line.startswith("dynamo_frontend_queued_requests")
    ]
    return sum(int(float(row.rsplit(" ", 1)[1])) for row in rows)


def logit(frontend: Frontend, since: int) -> float | None:
    """The cost in the first `Selected worker` line after ``since`` lines of the log."""
    lines = frontend.log_lines("Selected worker", since)
    return float(lines[0].partition("logit=")[2].split()[0]) if lines else None


def cost(result: RouteResult) -> float:
    assert result.decode is not None
    return min(row.cost for row in result.decode.candidates)


def config(several: Several, frontend: Frontend) -> ConfigDocument:
    options = GlobalOptions(discovery="file", file_kv=several.fleet.file_kv)
    return DynamoSource(options, (frontend.url,)).config()


def prompt(chance: random.Random, blocks: int, more: int = 5) -> list[int]:
    return [chance.randrange(3, 300) for _ in range(16 * blocks + more)]


def codes(result: RouteResult) -> list[str]:
    return [one.code for one in result.doubts if one.matters]


FRONTENDS = {
    "plain": (),
    "queue": ("--router-queue-threshold", "1.0"),
    "approximate": ("--no-router-kv-events", "--router-ttl-secs", "2"),
    "no credit": ("--router-kv-overlap-score-credit", "0"),
    "requests count": ("--router-decode-active-request-weight", "4"),
    "round-robin": ("--router-mode", "round-robin"),
    "sessions": ("--router-session-affinity-ttl-secs", "60"),
}


@dataclass
class Several:
    """Two workers that hold requests, and a frontend for each way to start one."""

    fleet: DynamoFleet
    chance: random.Random

    def __getitem__(self, name: str) -> Frontend:
        return self.fleet.frontends[list(FRONTENDS).index(name)]

    @property
    def workers(self) -> list[Worker]:
        return list(self.fleet.workers.values())

    def hold(self, *, prefill: bool = False, decode: bool = False) -> None:
        for worker in self.workers:
            worker.held.hold(prefill=prefill, decode=decode)

    def arrived(self, count: int, *states: State) -> None:
        self.fleet.wait_until(
            lambda: sum(len(one.held.requests(*states)) for one in self.workers) == count,
            f"{count} requests in {states}",
        )

    def seen(self) -> int:
        """Requests that have arrived at the workers so far."""
        return sum(len(one.held.requests()) for one in self.workers)

    def pinned(self, frontend: Frontend, tokens: Sequence[int], worker: Worker) -> InFlight:
        """Send a request that stays with one worker."""
        nvext = {"backend_instance_id": worker.instance_id}
        return frontend.begin(list(tokens), max_tokens=2, nvext=nvext)

    def cached(self, worker: Worker, tokens: Sequence[int], medium: str, first: int = 0) -> None:
        """Blocks in a tier of a worker; returns when the frontends that follow events have them."""
        following = [self[name] for name in ("plain", "queue", "requests count", "sessions")]
        before = [stored_events(one) for one in following]
        worker.held.store_in(medium, tokens, first)
        self.fleet.wait_until(
            lambda: all(
                stored_events(one) > count for one, count in zip(following, before, strict=True)
            ),
            "the stored blocks to be known",
        )

    def admitted(self, frontend: Frontend, expected: bool) -> None:
        """Returns when each worker gets the requests of a frontend, or none of them does."""
        pins = [{"backend_instance_id": worker.instance_id} for worker in self.workers]
        self.fleet.wait_until(
            lambda: all(
                frontend.complete(prompt(self.chance, 2), nvext=pin).ok is expected for pin in pins
            ),
            "the reports to act",
        )

    def idle(self, frontend: Frontend) -> None:
        """Returns when a frontend has nothing on its books: a request is on them for a moment after
        its answer, which a prediction from its metrics would see and its own next choice not."""
        self.fleet.wait_until(lambda: not any(booked(frontend)), "its requests to be off its books")

    def released(self) -> None:
        self.hold()
        for worker in self.workers:
            worker.held.release()


@pytest.fixture(scope="module")
def several() -> Iterator[Several]:
    plans = aggregated(2, kind="held", args=("--max-batched-tokens", "100", "--tiers"))
    with DynamoFleet(plans, frontends=tuple(FRONTENDS.values()), blocks=100) as fleet:
        yield Several(fleet, random.Random(9))


def test_workers_refused_for_their_reports(several: Several, finding: Finding) -> None:
    plain, score = several["plain"], Score("refused by reported load", "")
    once = Score("refused by reported load, looking once", "DYR0742")
    raised = Score("a threshold raised after the reports", "DYR0746")

    async def run() -> None:
        async with observing(several.fleet) as seen:
            plain.thresholds(active_decode_blocks_threshold=0.5)
            for number, load in enumerate((60, 40, 61, 49)):
                for worker in several.workers:
                    worker.held.report_load(load, load)
                tokens = prompt(several.chance, 4)

                several.admitted(plain, load <= 50)
                expected = await routed(seen, tokens, plain)
                alone = await asyncio.to_thread(route, several.fleet, tokens, plain)
                answer = await asyncio.to_thread(plain.complete, tokens)
                assert (answer.status == OVERLOADED) is (load > 50), (number, answer)
                assert "DYR0742" not in codes(expected)
                score.count(expected, answer)
                once.count(alone, answer)
            # A raised threshold does not free a worker: only its next report does.
            for worker in several.workers:
                worker.held.report_load(63, 63)
            several.admitted(plain, False)
            await seen.quiet()
            plain.thresholds(active_decode_blocks_threshold=0.9)
            tokens = prompt(several.chance, 4)
            expected = await routed(seen, tokens, plain)
            raised.count(expected, await asyncio.to_thread(plain.complete, tokens))
            for worker in several.workers:
                worker.held.report_load(3, 3)
            plain.thresholds(active_decode_blocks_threshold=1.0)
            several.admitted(plain, True)

    asyncio.run(run())
    score.report(finding)
    once.report(finding)
    raised.report(finding)
    assert (once.named, raised.declared) == (4, 1)


def test_workers_refused_for_the_frontends_own_load(several: Several, finding: Finding) -> None:
    plain, score = several["plain"], Score("refused by the frontend's own load", "DYR0742")
    several.hold(prefill=True)
    plain.thresholds(active_prefill_tokens_threshold=50)
    before = sum(len(one.held.requests()) for one in several.workers)
    running = []
    for number in (1, 2):
        running.append(plain.begin(prompt(several.chance, 4)))
        several.arrived(before + number)
        # What refuses a worker is the frontend's count, which follows the request.
        several.fleet.wait_until(
            lambda number=number: sum(tokens > 50 for tokens in gauges(plain)) == number,  # type: ignore[misc]
            "the request to be counted",
        )
    tokens = prompt(several.chance, 4)
    expected = route(several.fleet, tokens, plain)
    score.count(expected, plain.complete(tokens))
    assert expected.decode is not None
    assert expected.decode.outcome == "all_busy"
    several.released()
    assert all(one.result().ok for one in running)
    # With the old threshold: a raised one does not free a worker.
    several.idle(plain)
    plain.thresholds(active_prefill_tokens_threshold=1_000_000)
    score.report(finding)
    assert score.right == 1


def test_a_prompt_that_is_decoding_elsewhere(several: Several, finding: Finding) -> None:
    """Its blocks cost nothing there; sums of blocks cannot show that."""
    plain, score = several["plain"], Score("load from sums, prompt decoding elsewhere", "DYR0715")
    several.hold(decode=True)
    for _ in range(4):
        tokens, seen = prompt(several.chance, 4), several.seen()
        first, second = several.workers
        running = [several.pinned(plain, tokens, first)]
        running.append(several.pinned(plain, prompt(several.chance, 1), second))
        several.arrived(seen + 2)
        several.fleet.wait_until(lambda: gauges(plain) == [0, 0], "first tokens")
        expected = route(several.fleet, tokens, plain)
        flight = plain.begin(tokens)
        several.arrived(seen + 3)
        for worker in several.workers:
            worker.held.release()
        score.count(expected, flight.result())
        assert all(one.result().ok for one in running)
        several.idle(plain)
    several.released()
    score.report(finding)
    assert score.declared == 4


def test_a_request_that_waits_in_the_queue(several: Several, finding: Finding) -> None:
    queue, score = several["queue"], Score("queue threshold reached", "DYR0711")
    seen = several.seen()
    several.hold(prefill=True)
    running = [several.pinned(queue, prompt(several.chance, 8), one) for one in several.workers]
    several.arrived(seen + 2)
    several.fleet.wait_until(
        lambda: sum(tokens > 100 for tokens in gauges(queue)) == 2, "both to be counted"
    )
    tokens = prompt(several.chance, 4)
    expected = route(several.fleet, tokens, queue)
    # What the frontend is started with is not in its metrics; given, it is followed.
    given = route(several.fleet, tokens, queue, assignments=("router_queue_threshold=1.0",))
    assert given.decode is not None
    assert given.decode.queue is not UNSET
    assert given.decode.queue.waits
    assert given.decode.queue.ahead is None
    assert not given.certain
    assert "DYR0713" in {one.code for one in given.doubts if one.matters}
    flight = queue.begin(tokens)
    several.fleet.wait_until(lambda: queued(queue) >= 3, "the request to be received")
    held = several.seen() == seen + 2 and not flight.done
    score.judge(expected, right=not held)
    assert held
    assert "wait in the queue" in next(
        one.effect for one in expected.doubts if one.code == "DYR0711"
    )
    several.released()
    assert flight.result().ok
    assert all(one.result().ok for one in running)
    several.idle(queue)
    free = route(several.fleet, tokens, queue, assignments=("router_queue_threshold=1.0",))
    assert free.decode is not None
    assert free.decode.queue is not UNSET
    assert not free.decode.queue.waits
    score.report(finding)


def test_approximate_mode_and_its_lifetime(several: Several, finding: Finding) -> None:
    approximate, score = several["approximate"], Score("approximate mode", "DYR0718")
    for number in range(6):
        tokens = prompt(several.chance, 6)
        cached = several.workers[number % 2]
        several.cached(cached, tokens, "GPU")
        expected = route(several.fleet, tokens, approximate)
        score.count(expected, approximate.complete(tokens))
    score.report(finding)
    assert score.named == 6


def test_blocks_in_lower_tiers_are_credited(several: Several, finding: Finding) -> None:
    plain, score, exact = several["plain"], Score("host and disk tiers", ""), 0

    async def run() -> int:
        same = 0
        async with observing(several.fleet) as seen:
            for _ in range(16):
                tokens = prompt(several.chance, 8)
                for worker in several.workers:
                    device = several.chance.randrange(4)
                    host = several.chance.randrange(device + 1, 6)
                    several.cached(worker, tokens[: 16 * host], "CPU", device)
                    several.cached(worker, tokens, "DISK", host)
                    if device:
                        several.cached(worker, tokens[: 16 * device], "GPU")
                await seen.quiet(0.15)
                expected = await routed(seen, tokens, plain)
                line = len(plain.process.lines())
                score.count(expected, await asyncio.to_thread(plain.complete, tokens))
                same += logit(plain, line) == pytest.approx(cost(expected), abs=1e-3)
        return same

    exact = asyncio.run(run())
    score.report(finding)
    finding(f"host and disk tiers: {exact} of 16 costs are Dynamo's")
    assert (score.right, exact) == (16, 16)


def test_settings_that_only_the_frontend_knows(several: Several, finding: Finding) -> None:
    without, score = several["no credit"], Score("overlap credit 0, seen in the metrics", "")
    several.hold(decode=True)
    for _ in range(6):
        tokens, seen = prompt(several.chance, 6), several.seen()
        cached = several.workers[several.chance.randrange(2)]
        several.cached(cached, tokens, "GPU")
        running = several.pinned(without, prompt(several.chance, 1), cached)
        several.arrived(seen + 1)
        expected = route(several.fleet, tokens, without)
        flight = without.begin(tokens)
        several.arrived(seen + 2)
        for worker in several.workers:
            worker.held.release()
        assert running.result().ok
        score.count(expected, flight.result())
        several.idle(without)
    several.released()
    score.report(finding)
    settings = {row.name: row for row in config(several, without).settings}
    assert settings["overlap_score_credit"].value == 0.0
    assert settings["router_mode"].value == "kv"
    unknown = {name for name, row in settings.items() if not row.known}
    assert {"router_temperature", "decode_active_request_weight"} <= unknown
    finding(f"settings of a frontend: {len(settings) - len(unknown)} known, {len(unknown)} unknown")


def test_a_weight_of_active_requests(several: Several, finding: Finding) -> None:
    counted, score = several["requests count"], Score("decode_active_request_weight", "DYR0711")
    several.hold(decode=True)
    seen = several.seen()
    cached, tokens = several.workers[0], prompt(several.chance, 6)
    several.cached(cached, tokens[: 16 * 4], "GPU")
    running = several.pinned(counted, prompt(several.chance, 1), cached)
    several.arrived(seen + 1)
    several.fleet.wait_until(lambda: not any(gauges(counted)), "its first token")
    expected = route(several.fleet, tokens, counted)
    flight = counted.begin(tokens)
    several.arrived(seen + 2)
    several.released()
    assert running.result().ok
    score.count(expected, flight.result())
    score.report(finding)
    assert score.declared == 1
    effect = next(each.effect for each in expected.doubts if each.code == "DYR0711")
    assert "decode_active_request_weight" in effect


def test_a_frontend_without_kv_routing(several: Several, finding: Finding) -> None:
    score = Score("frontend with round-robin", "DYR0716")
    for _ in range(8):
        tokens = prompt(several.chance, 6)
        several.cached(several.workers[0], tokens, "GPU")
        expected = route(several.fleet, tokens, several["round-robin"])
        score.count(expected, several["round-robin"].complete(tokens))
    score.report(finding)
    assert score.named == 8


def test_a_session_that_has_a_worker(several: Several, finding: Finding) -> None:
    sessions, score = several["sessions"], Score("a session with a worker", "DYR0745")
    for number in range(4):
        headers = {"x-session-id": f"session-{number}"}
        first = sessions.complete(prompt(several.chance, 2), headers=headers).placement.decode
        home = several.fleet.worker_of(first)
        other = next(one for one in several.workers if one is not home)
        tokens = prompt(several.chance, 6)
        several.cached(other, tokens, "GPU")
        expected = route(several.fleet, tokens, sessions, in_session=True)
        answer = sessions.complete(tokens, headers=headers)
        assert answer.placement.decode == first, "the session keeps its worker"
        score.count(expected, answer)
        assert "DYR0745" not in codes(route(several.fleet, tokens, sessions))
    score.report(finding)
    assert score.declared == 4


def test_128_requests_to_a_worker_at_once(several: Several, finding: Finding) -> None:
    async def run() -> int:
        async with observing(several.fleet) as seen:
            source = seen.observer.deployment.workers[0].sources[0]
            assert source.recovery is not None
            planes = TcpRequestPlane()
            body = recovery_query(source.worker_id, source.dp_rank, None)

            async def ask() -> bool:
                assert source.recovery is not None
                answer = planes.ask(source.recovery, body, timeout=patience(20), max_bytes=1 << 24)
                return bool([item async for item in answer])

            try:
                return sum(await asyncio.gather(*(ask() for _ in range(128))))
            finally:
                await planes.close()

    answered = asyncio.run(run())
    finding(f"requests to a worker at once: {answered} of 128 answered")
    assert answered == 128
