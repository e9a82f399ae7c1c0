"""The prefill load of a response that comes as a whole ends when its prompt is computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynctl.serving.routing.service import RoutingService
from dynctl.serving.routing.unseen_prefills import UnseenPrefills
from dynctl.wire.prometheus_text import read_samples
from router_core import (
    BlocksStored,
    IndexConnected,
    KvEvent,
    RoutingRequest,
    local_block_hashes,
    sequence_hashes,
)
from tests.dynctl.adapters.dynamo_endpoint import Fault
from tests.dynctl.serving.fleets import WORDS, Site, chat_body, site, until
from tests.dynctl.serving.gateways import gateway
from tests.dynctl.serving.test_dynamo_fleet import site as planes
from tests.dynctl.serving.test_remote import several
from tests.router_core.fleet import worker

LONG = WORDS * 20
#: Prefill is quick, and the generation takes as long as a test may.
SLOW = {"decode_itl_ms": 300.0, "speedup_ratio": 1.0, "prefill_tokens_per_s": 50_000.0}


class Fleet:
    """A service with two workers of one model, and a clock that a test moves."""

    def __init__(self, *, kv_events: bool = True) -> None:
        self.now = 0.0
        self.service = RoutingService(clock=lambda: self.now, sample=lambda: 0.0, id_prefix="t")
        for number in (1, 2):
            self.service.membership.upsert(worker(number, kv_events=kv_events))

    @property
    def ends(self) -> UnseenPrefills:
        return self.service.unseen_prefills

    def booked(self, name: str, tokens: Sequence[int], *, streams: bool = False) -> int:
        """Book a request on the first worker; its prefill tokens there."""
        local = local_block_hashes(tokens, 16)
        request = RoutingRequest(
            name, "tiny", len(tokens), 16, tuple(sequence_hashes(local)),
            local_hashes=tuple(local), allowed_worker_ids=frozenset({1}), streams=streams,
        )  # fmt: skip
        decision = self.service.plan(request).final
        assert self.service.apply(self.service.router.booking(decision, request)).ok
        self.ends.begin(decision, request)
        return self.prefill()

    def measured(self, tokens: int, seconds: float, worker_id: int = 1) -> None:
        request = RoutingRequest(
            "m", "tiny", tokens, 16, overlap_modelled=False,
            allowed_worker_ids=frozenset({worker_id}),
        )  # fmt: skip
        self.ends.measured(self.service.plan(request).final, seconds)

    def prefill(self) -> int:
        return self.service.router.load.prefill_tokens[0]

    def stored(self, tokens: Sequence[int], worker_id: int = 1, after: int = 0) -> None:
        """The worker reports the complete blocks of a prompt, from a block on."""
        local = local_block_hashes(tokens, 16)
        names = sequence_hashes(local)
        event = BlocksStored(names[after - 1] if after else None, names[after:], local[after:])
        assert self.service.apply(KvEvent(worker_id, 0, event)).ok

    async def passed(self, seconds: float) -> None:
        """So much time is over, and the timer has noticed it."""
        self.now += seconds
        self.ends._set_timer()
        await asyncio.sleep(0.005)


async def test_prefill_ends_with_the_event_of_the_last_block_on_that_worker() -> None:
    fleet = Fleet()
    prompt = range(100)
    assert fleet.booked("r", prompt) == 100
    fleet.stored(prompt, worker_id=2)
    fleet.stored(prompt[:64])
    assert fleet.prefill() == 100
    fleet.stored(prompt, after=4)
    assert fleet.prefill() == 0
    assert not fleet.ends.running


async def test_an_equal_block_of_another_prompt_ends_nothing() -> None:
    fleet = Fleet()
    fleet.booked("r", range(48))
    fleet.stored([*range(200, 232), *range(32, 48)])
    assert fleet.prefill() == 48
    fleet.stored(range(48))
    assert fleet.prefill() == 0


async def test_without_events_prefill_ends_after_what_streamed_prompts_of_the_worker_took() -> None:
    fleet = Fleet(kv_events=False)
    for _ in range(40):
        fleet.measured(936, 1.0)  # a millisecond a token, with what each prefill takes
        fleet.measured(936, 9.0, worker_id=2)
    assert fleet.booked("r", range(436)) == 436
    await fleet.passed(0.45)
    assert fleet.prefill() == 436
    await fleet.passed(0.1)
    assert fleet.prefill() == 0


async def test_an_estimate_counts_the_prompts_before_it_and_is_bounded() -> None:
    fleet = Fleet(kv_events=False)
    fleet.measured(936, 1.0)
    fleet.booked("before", range(1_000), streams=True)
    fleet.booked("r", range(5_000, 5_936))
    await fleet.passed(1.9)
    assert fleet.prefill() == 1_936
    await fleet.passed(0.2)
    assert fleet.prefill() == 1_000, "the first one streams, so its first output ends it"
    fleet.measured(936, 1e9)
    assert fleet.booked("s", range(9_000, 9_100)) == 1_100
    await fleet.passed(60.1)
    assert fleet.prefill() == 1_000


async def test_where_nothing_is_measured_a_prefill_is_not_the_whole_generation() -> None:
    fleet = Fleet(kv_events=False)
    fleet.booked("r", range(1_500))
    await fleet.passed(1.0)
    assert fleet.prefill() == 0


async def test_events_that_do_not_come_are_not_waited_for_again() -> None:
    """As those of an engine without prefix caching, or with another tokenizer."""
    fleet = Fleet()
    fleet.booked("r", range(100))
    await fleet.passed(5.0)
    assert fleet.prefill() == 100
    await fleet.passed(6.0)
    assert fleet.prefill() == 0
    fleet.booked("s", range(200, 300))
    await fleet.passed(1.0)
    assert fleet.prefill() == 0


@pytest.mark.parametrize("lost", [True, False])
async def test_a_prompt_that_no_event_can_show_is_estimated(lost: bool) -> None:
    """Its blocks are stored already, or events of the worker cannot be received."""
    fleet = Fleet()
    if lost:
        fleet.service.apply(IndexConnected(1, 0, False))
    else:
        fleet.stored(range(100))
    fleet.booked("r", range(100))
    await fleet.passed(1.0)
    assert fleet.prefill() == 0


async def test_requests_that_end_leave_nothing_behind() -> None:
    fleet = Fleet()
    for number in range(1_000):
        fleet.booked(str(number), range(1_000 * number, 1_000 * number + 40))
        if number % 2:
            fleet.service.free(str(number))
        else:
            fleet.service.prefill_done(str(number))
        assert len(fleet.ends._agenda) < 100
    assert not fleet.ends.running
    assert not fleet.ends._awaited
    assert fleet.prefill() == 0


# -- at a frontend ---------------------------------------------------------------------------


@asynccontextmanager
async def slow(*engines: dict[str, Any], **settings: Any) -> AsyncIterator[Site]:
    async with site([{**SLOW, **one} for one in engines], **settings) as fleet:
        await fleet.connected()
        yield fleet


async def generating(fleet: Site, task: asyncio.Task[Any]) -> None:
    """Until no prompt is being computed, while the request still runs."""
    await until(lambda: any(row[0] for row in fleet.load().values()))
    await until(lambda: not any(row[1] for row in fleet.load().values()))
    # The last report of an engine may be of the time when it computed the prompt.
    await until(lambda: not fleet.service.router.busy.busy_ranks)
    assert not task.done()


async def ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def first_tokens(fleet: Site) -> int:
    """Samples in the histogram of the time to the first token."""
    _, text = await fleet.get("/metrics")
    name = "dynamo_frontend_time_to_first_token_seconds_count"
    rows = read_samples(text, frozenset({name}), max_bytes=len(text))
    return sum(int(float(row.value)) for row in rows)


@pytest.mark.parametrize("kv_events", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_long_generation_does_not_keep_an_engine_busy_with_its_prompt(
    kv_events: bool, path: str
) -> None:
    engine = {"name": "a"} | ({} if kv_events else {"kv_events": "", "replay": ""})
    values = {"active_prefill_tokens_threshold": 100}
    async with slow(engine) as fleet:
        fleet.service.configure(values)
        body = chat_body(LONG, max_tokens=100)
        task = asyncio.create_task(fleet.post(path, body))
        await generating(fleet, task)
        other = asyncio.create_task(fleet.chat("next", max_tokens=1))
        status, answer, _ = await other
        assert status == 200, answer
        await ended(task)
        await fleet.idle()


async def test_a_request_in_the_queue_waits_for_the_prompt_before_it_alone() -> None:
    async with slow({"name": "a", "max_num_batched_tokens": 100}) as fleet:
        fleet.service.configure({"router_queue_threshold": 0.5})
        task = asyncio.create_task(fleet.chat(LONG, max_tokens=100))
        await until(lambda: any(row[1] for row in fleet.load().values()))
        status, _, _ = await fleet.chat("next", max_tokens=1)
        assert status == 200
        assert not task.done()
        await ended(task)


async def test_the_time_of_a_first_token_that_is_not_seen_is_no_sample() -> None:
    timing = {"nvext": {"extra_fields": ["timing"]}}
    async with site([{"name": "a"}]) as fleet:
        status, answer, _ = await fleet.chat("x", max_tokens=3, **timing)
        assert status == 200
        assert "ttft_ms" not in answer["nvext"]["timing"]
        assert await first_tokens(fleet) == 0
        _, text = await fleet.get("/metrics")
        assert b'dynamo_frontend_output_tokens_total{model="demo"} 3' in text
        assert b"worker_last_time_to_first_token_seconds{" not in text
        await fleet.stream("x", max_tokens=3)
        assert await first_tokens(fleet) == 1


async def test_a_failed_attempt_is_no_prefill_that_runs() -> None:
    async with slow({"name": "a"}, {"name": "b"}) as fleet:
        for running in fleet.engines.values():
            running.engine.faults.update({"refuse": 500})
        status, _, _ = await fleet.chat(LONG)
        assert status == 500
        assert not fleet.service.unseen_prefills.running
        await fleet.idle()


async def test_the_router_of_several_frontends_ends_prefills_by_the_events_that_it_has() -> None:
    async with several(({"name": "a0", **SLOW},), frontends=2) as fleet:
        service = fleet.router.service
        task = asyncio.create_task(fleet.frontends[0].chat(LONG, max_tokens=100))
        await until(lambda: any(row[0] for row in fleet.load().values()))
        await until(lambda: not any(row[1] for row in fleet.load().values()))
        assert not service.unseen_prefills.running
        assert not service.unseen_prefills._silent, "an event ended it"
        assert not task.done()
        await ended(task)
        await until(lambda: fleet.booked() == 0)
        _, text = await fleet.frontends[1].get("/metrics")
        assert b"time_to_first_token_seconds_count 1" not in text


async def test_a_gateway_ends_prefills_likewise() -> None:
    async with gateway(({"name": "a"},)) as found:
        await found.connected()
        stream = found.request()
        await stream.ask(chat_body(LONG))
        await stream.answer()
        assert found.load()["a"][1] > 0
        status, _, _ = await found.engine_chat("a", LONG)  # as the gateway sends it there
        assert status == 200
        await until(lambda: found.load()["a"][:2] == (1, 0))
        await stream.response()
        await stream.answer()
        await stream.body(b'{"choices":[]}', kind="response_body", end=True)
        await stream.answer()
        assert await first_tokens(found) == 0
        assert found.load()["a"] == (0, 0, 0)


async def test_workers_of_dynamo_show_the_first_token_of_a_response_that_comes_as_a_whole(
    tmp_path: Path,
) -> None:
    (tmp_path / "v1").mkdir()
    async with planes(tmp_path, Fault.STALLS) as made:  # after its first output
        service = made.frontend.service
        task = asyncio.create_task(made.ask(prompt="x " * 200))
        load = service.router.load
        await until(lambda: any(load.requests) and not any(load.prefill_tokens))
        assert not task.done()
        assert not service.unseen_prefills.running
        await ended(task)
    async with planes(tmp_path, Fault.NONE) as made:
        status, _ = await made.ask()
        assert status == 200
        async with made.client.get(f"{made.frontend.url}/metrics") as response:
            text = await response.text()
        assert 'time_to_first_token_seconds_count{model="demo"} 1' in text
