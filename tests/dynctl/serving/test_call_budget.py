"""How many Python functions of ours a request, an event and a scrape call: budgets that go down.

The numbers are the same on any machine, unlike times. A change that needs more raises the number
in ``call-budget.toml``, with the reason; one that needs fewer lowers it.
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import msgspec
import pytest

from dynctl.base.tasks import Supervisor
from dynctl.documents.decisions import ClientResponse
from dynctl.documents.frontends import (
    PROTOCOL,
    Answered,
    Ended,
    Exchange,
    FirstOutput,
    Join,
    Report,
    ToPlace,
    sent_request,
)
from dynctl.serving.engines.facts import EngineReader
from dynctl.simulation.engine.cache_events import CacheStored
from dynctl.wire.engine_kinds.vllm.kind import VLLM
from router_core import Applied
from tests.dynctl.adapters.dynamo_endpoint import Fault
from tests.dynctl.serving.fleets import SLOW_HEALTH, Site, chat_body, site
from tests.dynctl.serving.gateways import gateway
from tests.dynctl.serving.routed import request
from tests.dynctl.serving.test_dynamo_fleet import site as dynamo_site
from tests.dynctl.serving.test_remote import several
from tests.waiting import patience

BUDGET: Final = Path(__file__).with_name("call-budget.toml")
_ROOT: Final = Path(__file__).parents[3]
ROOMS: Final = (f"{_ROOT}/dynctl/", f"{_ROOT}/router_core/")
#: The engines are in this process, and no part of the cost: neither what they call.
_ENGINES: Final = f"{ROOMS[0]}simulation/"
#: Of KV events, which wake their readers beside a request.
_SOCKETS: Final = f"{ROOMS[0]}adapters/zmq/"
#: Comprehensions are calls in some versions of Python and not in others.
_INLINE: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>"})
#: Tokens of a block of these engines.
BLOCK: Final = 16
_WARM: Final = 8
_ROUNDS: Final = 12
#: Share above the budget that fails, and below it that asks for a lower one.
_MARGIN: Final = 0.03


class Calls:
    """Calls of functions of ours, and the files that they are in.

    Without those of the engines, and without those of KV events and of background tasks, which run
    by the clock, unless ``background``.
    """

    def __init__(self, *, background: bool = False) -> None:
        self.count = 0
        self.background = background
        self.files: set[str] = set()
        self._ours: dict[CodeType, bool] = {}

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            file = code.co_filename
            ours = self._ours[code] = (
                file.startswith(ROOMS)
                and not file.startswith(_ENGINES)
                and code.co_name not in _INLINE
            )
        if not ours or _called_from(_ENGINES, frame):
            return
        if self.background or not (_in_background() or _called_from(_SOCKETS, frame)):
            self.count += 1
            self.files.add(code.co_filename)


def _called_from(folder: str, frame: FrameType) -> bool:
    """Whether the function is in the folder, or was called from there: an engine tokenizes its own
    prompt, for example."""
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith(folder):
            return True
        caller = caller.f_back
    return False


def _in_background() -> bool:
    task = asyncio.current_task()
    coroutine = None if task is None else task.get_coro()
    return getattr(coroutine, "__qualname__", "") == Supervisor._supervise.__qualname__


@contextmanager
def counted(*, background: bool = False) -> Iterator[Calls]:
    calls = Calls(background=background)
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def fewest(request: Callable[[int], Awaitable[object]]) -> Calls:
    """The calls of the cheapest of some requests: what runs beside them counts in the others."""
    for number in range(_WARM):
        await request(number)
    rounds = []
    for number in range(_WARM, _WARM + _ROUNDS):
        with counted() as calls:
            await request(number)
        rounds.append(calls)
    return min(rounds, key=lambda calls: calls.count)


def text(number: int) -> str:
    return f"{number:04d} " + "the quick brown fox jumps over the lazy dog " * 10


async def chats(found: Site, **fields: Any) -> Calls:
    url = found.url("/v1/chat/completions")

    async def chat(number: int) -> None:
        body = chat_body(text(number), max_tokens=32, **fields)
        async with found.client.post(url, json=body) as answer:
            assert answer.status == 200
            assert await answer.read()

    return await fewest(chat)


def within(row: str, calls: Calls) -> None:
    rows = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    budget, files = rows[row]["calls"], rows[row]["files"]
    shown = f"{row}: {calls.count} calls in {len(calls.files)} files, budget {budget} in {files}"
    assert calls.count <= budget * (1 + _MARGIN), f"{shown}; what made it dearer?"
    assert calls.count >= budget * (1 - 2 * _MARGIN), f"{shown}: lower the budget in {BUDGET.name}"
    assert len(calls.files) <= files, shown


ENGINES: Final = [{"name": name, "speedup_ratio": 1e4} for name in "ab"]
POOLS: Final = [
    {"name": name, "role": role, "speedup_ratio": 1e4}
    for name, role in (("p", "prefill"), ("d", "decode"))
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_aggregated_request(stream: bool) -> None:
    async with site(ENGINES, health=SLOW_HEALTH) as found:
        within("streamed" if stream else "whole", await chats(found, stream=stream))


async def test_a_request_on_two_hops() -> None:
    async with site(POOLS, health=SLOW_HEALTH) as found:
        within("prefill and decode", await chats(found, stream=True))


async def test_a_request_to_a_worker_of_a_dynamo(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    async with dynamo_site(tmp_path, Fault.NONE) as found:
        url = f"{found.frontend.url}/v1/completions"

        async def ask(number: int) -> None:
            prompt = text(number)
            body = {"model": "demo", "prompt": prompt, "max_tokens": 32, "stream": True}
            async with found.client.post(url, json=body) as answer:
                assert answer.status == 200
                assert await answer.read()

        within("worker of a Dynamo", await fewest(ask))


async def test_a_pick_for_a_gateway() -> None:
    async with gateway(ENGINES, health=SLOW_HEALTH) as found:

        async def pick(number: int) -> None:
            stream = found.request()
            assert await stream.ask(chat_body(text(number), max_tokens=8))

        within("pick", await fewest(pick))


async def test_a_decision_for_a_frontend_process() -> None:
    """One message to a router process: a request to place, and the reports of the one before."""
    async with several(ENGINES, frontends=0) as found:
        router, client = found.router, found.client
        base = f"{router.url}/v1/frontends"
        (worker, *_) = router.service.router.registry

        async def send(action: str, message: msgspec.Struct) -> Any:
            body, kind = msgspec.json.encode(message), {"content-type": "application/json"}
            async with client.post(f"{base}/{action}", data=body, headers=kind) as answer:
                assert answer.status == 200
                return await answer.json()

        lease = (await send("f/join", Join(PROTOCOL)))["lease"]
        success = ClientResponse("complete", 200, "", 0.01, 0.05, 140, None, 32)

        async def exchange(number: int) -> None:
            before = f"r{number - 1}"
            reports: list[Report] = [
                Answered(worker.worker_id),
                FirstOutput(before, 0),
                Ended(before, 0, output_tokens=32, response=success),
            ]
            tokens = range(140 * number, 140 * (number + 1))
            wanted = request(tokens, f"r{number}", model=worker.model, chained=True)
            wanted = replace(wanted, local_hashes=wanted.sequence_hashes)
            places = [ToPlace(sent_request(wanted))]
            answer = await send("exchange", Exchange(lease, number + 1, reports, places))
            assert answer["answers"][0]["placement"]["booked"] == ["aggregated"]
            assert found.booked() == 1

        within("decision for a frontend process", await fewest(exchange))


async def test_a_batch_of_kv_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the message of an engine, one batch with a run of 8 blocks, to the index."""
    async with site(ENGINES, health=SLOW_HEALTH) as found:
        await found.connected()
        publisher = found.engines["a"].engine.ranks[0].publisher
        assert publisher is not None
        index = found.frontend.fleet.index
        applied: list[Applied] = []
        apply = index._apply
        monkeypatch.setattr(index, "_apply", lambda change: applied.append(apply(change)))
        rounds = []
        for number in range(_WARM + _ROUNDS):
            hashes = tuple(range(8 * number + 1, 8 * number + 9))
            publisher.publish([CacheStored(None, hashes, (number,) * 8 * BLOCK, None)])
            applied.clear()
            with counted(background=True) as calls:
                while not applied:  # noqa: ASYNC110  no call of ours
                    await asyncio.sleep(0)
            # Outside: it may take one more turn of the index, which has nothing to do.
            await index.drained()
            assert len(applied) == 1
            rounds.append(calls)
        within("batch of KV events", min(rounds[_WARM:], key=lambda calls: calls.count))


async def test_a_scrape_of_a_worker() -> None:
    """The load of a worker from the metrics of its engine."""
    async with site(ENGINES, health=SLOW_HEALTH) as found:
        (worker, *_) = found.service.router.registry
        reader = EngineReader(found.frontend.fleet._upstream, timeout_s=patience(2.0))

        async def scrape(number: int) -> None:
            reading = await reader.load(found.engines[worker.name].url, worker, VLLM)
            assert reading.waiting

        within("scrape of a worker", await fewest(scrape))
