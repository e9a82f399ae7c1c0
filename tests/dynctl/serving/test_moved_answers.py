"""Responses that go on with another worker: what is booked, what ends, and what fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dynctl.serving.dynamo.request_plane import PlaneStream
from dynctl.serving.engines.dispatch import Call, Hop
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.flow import RequestFlow
from dynctl.serving.engines.response_stream import ClientBounds
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.service import LocalPlacement, RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import Booked, RouterConfig
from tests.dynctl.serving.routed import request, worker
from tests.waiting import patience

LOST = UpstreamFailure("reset", "it closed the connection")


class Half:
    """One half of a bootstrap pair at an engine: prefill waits for ``end``, decode has output."""

    def __init__(self, *, prefill: bool) -> None:
        self.origin, self.headers = "engine", {"content-type": "text/event-stream"}
        self.prefill, self.closed = prefill, False
        self.began, self.end = asyncio.Event(), asyncio.Event()

    async def read(self, _most: int) -> bytes:
        self.began.set()
        await self.end.wait()
        return b"{}"

    async def readany(self) -> bytes:
        return b'data: {"choices": []}\n\n'

    def close(self) -> None:
        self.closed = True


class Pairs:
    """Sends each half to an engine, and keeps it and its hop."""

    reads_tokens = True

    def __init__(self) -> None:
        self.halves: list[Half] = []
        self.hops: list[Hop] = []

    def read(self, _parsed: Any) -> None: ...

    def prepare(self, call: Call) -> Call:
        return call

    async def move(self, response: Any) -> None:
        """The worker of the answer that began loses it."""
        [move] = [hop.move for hop in self.hops if hop.move is not None]
        await move(response, LOST)

    def pair(self, *_: Any) -> tuple[str, str]:
        return "prefill", "decode"

    async def open(self, hop: Hop) -> Any:
        self.hops.append(hop)
        made = Half(prefill=hop.message == "prefill")
        self.halves.append(made)
        return made

    def moved(self, call: Call, stream: Any) -> Call:
        return replace(call, moving=stream)


class Members:
    """A fleet in which each worker has a place to meet."""

    bootstrap: tuple[str, int] | None = ("127.0.0.1", 9)
    spec = None

    def __init__(self) -> None:
        self.responses: set[Any] = set()

    def by_id(self, _worker_id: int) -> Members:
        return self

    def dispatched(self, _member: Any) -> None: ...

    def answered(self, _worker_id: int) -> None: ...

    def report_failure(self, *_: Any) -> None: ...


async def test_a_pair_that_moves_books_the_new_half_and_ends_the_old_one() -> None:
    """Both halves have the request's id, and the prefill half frees its booking when it ends."""
    service = RoutingService(RouterConfig(), sample=lambda: 0.0, id_prefix="d")
    for number, role in enumerate(("prefill", "prefill", "decode", "decode"), 1):
        assert service.membership.upsert(worker(number, role)).ok
    sent: Any = Pairs()
    fleet: Any = Members()
    flow = RequestFlow(service, LocalPlacement(service), fleet, sent, Limits())
    record = RequestRecord("r1", "r1", "chat_completions", 0.0, 0.0)
    call = Call(request(), "/v1/chat/completions", {}, b"{}", True, {}, record, token_ids=range(34))

    def booked() -> set[str]:
        return {one.stage for one in service.router.load.bookings("r1")}

    async with asyncio.timeout(patience(5)):
        answer = await flow.start(call)
        [first] = [one for one in sent.halves if one.prefill]
        await first.began.wait()
        assert booked() == {"prefill", "decode"}
        await sent.move(answer.response)
        second = [one for one in sent.halves if one.prefill][1]
        await second.began.wait()
        assert (first.closed, second.closed) == (True, False)
        attempts = replace(record, outcome="success").client_response().attempts
        assert [(one.stage, one.problem) for one in attempts] == [
            ("decode", str(LOST)),
            ("prefill", ""),
            ("decode", ""),
        ]
        assert attempts[0].worker != attempts[2].worker
        first.end.set()
        await asyncio.sleep(0)
        assert booked() == {"prefill", "decode"}, "the end of the old half is not that of the new"
        companion = answer.course.companion
        assert companion is not None
        answer.close()
        await asyncio.wait([companion])
        assert second.closed, "a client that leaves stops the half that runs now"
        service.free("r1")
        assert not booked()


class Breaking(Pairs):
    """Engines of which the named half fails when it is opened, as often as ``breaks`` says."""

    def __init__(self, half: str, breaks: int) -> None:
        super().__init__()
        self.half, self.breaks = half, breaks

    async def open(self, hop: Hop) -> Any:
        if hop.message == self.half and self.breaks:
            self.breaks -= 1
            raise LOST
        return await super().open(hop)


async def test_a_move_that_fails_first_keeps_the_time_of_the_first_output() -> None:
    service = RoutingService(RouterConfig(), sample=lambda: 0.0, id_prefix="d")
    for number, role in enumerate(("prefill", "decode", "decode", "decode"), 1):
        assert service.membership.upsert(worker(number, role)).ok
    sent: Any = Breaking("decode", 0)
    fleet: Any = Members()
    flow = RequestFlow(service, LocalPlacement(service), fleet, sent, Limits())
    record = RequestRecord("r1", "r1", "chat_completions", 0.0, 0.0)
    call = Call(request(), "/v1/chat/completions", {}, b"{}", True, {}, record, token_ids=range(34))
    async with asyncio.timeout(patience(5)):
        answer = await flow.start(call)
        record.first_token_at = 1.5  # the client has output
        sent.breaks = 1
        await sent.move(answer.response)
        assert (sent.breaks, record.first_token_at) == (0, 1.5)
        assert [stage for _, stage, _ in record.attempts] == ["decode", "decode"]
        answer.close()
        for half in sent.halves:
            half.end.set()
        companion = answer.course.companion
        assert companion is not None
        await asyncio.wait([companion])


async def test_a_pair_whose_prefill_failed_computed_no_block_of_its_decode_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = RoutingService(RouterConfig(), sample=lambda: 0.0, id_prefix="d")
    for number, role in enumerate(("prefill", "prefill", "decode"), 1):
        assert service.membership.upsert(worker(number, role)).ok
    freed: list[tuple[Any, bool]] = []
    free = service.free

    def noted(request_id: str, stage: Any = None, *, computed: bool = True) -> Any:
        freed.append((stage, computed))
        return free(request_id, stage, computed=computed)

    monkeypatch.setattr(service, "free", noted)
    sent: Any = Breaking("prefill", 1)
    fleet: Any = Members()
    flow = RequestFlow(service, LocalPlacement(service), fleet, sent, Limits())
    record = RequestRecord("r1", "r1", "chat_completions", 0.0, 0.0)
    call = Call(request(), "/v1/chat/completions", {}, b"{}", True, {}, record, token_ids=range(34))
    async with asyncio.timeout(patience(5)):
        answer = await flow.start(call)
        assert freed[:2] == [("prefill", False), (None, False)]
        answer.close()
        for half in sent.halves:
            half.end.set()
        if answer.course.companion is not None:
            await asyncio.wait([answer.course.companion])


async def test_a_response_that_cannot_go_on_for_a_fault_of_ours_ends_with_the_workers_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Link:
        keep = False

        def __getattr__(self, _name: str) -> Any:
            return lambda *_, **__: None

    class Answer:
        token_ids = (1, 2, 3)
        stopped = False

    async def broken(*_: Any) -> None:
        raise LookupError("a fault")

    link: Any = Link()
    answer: Any = Answer()
    stream = PlaneStream(link, "w1", ClientBounds(), answer, None, streams=True)
    stream.begin(None, broken, moves=1, most_tokens=None)
    stream.lost(link)
    async with asyncio.timeout(patience(5)):
        with pytest.raises(UpstreamFailure, match="w1 closed the connection during its response"):
            await stream.readany()
    assert "w1: the response cannot go on with another worker" in caplog.text
    stream.close()


async def test_a_request_whose_zone_lost_decode_during_prefill_goes_to_another_zone() -> None:
    """Once, and not to another prefill worker of the same zone, however cheap that is."""
    settings = {"decode_capacity_guard": False, "router_track_prefill_tokens": True}
    service = RoutingService(
        RouterConfig().with_values(settings), sample=lambda: 0.0, id_prefix="d"
    )
    required = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}
    for number, zone in enumerate("aab", 1):
        prefill = worker(number, "prefill", zone=zone, policy=required)
        assert service.membership.upsert(prefill).ok
    for number, zone in enumerate("ab", 4):
        assert service.membership.upsert(worker(number, "decode", zone=zone)).ok
    far = Booked("load", "prefill", 3, 0, prefill_tokens=9_000)
    assert service.apply(far).ok

    class HandsOver(Pairs):
        """While the first prefill runs, the decode worker of its zone leaves."""

        tried: list[str]

        def prefill(self, *_: Any) -> str:
            return "prefill"

        def handed_over(self, *_: Any) -> None:
            service.membership.remove(4)

        def decode(self, *_: Any) -> str:
            return "decode"

        async def open(self, hop: Hop) -> Any:
            self.tried.append(hop.worker.name)
            made = Half(prefill=hop.message == "prefill")
            made.end.set()
            return made

    class Apart(Members):
        bootstrap = None

    sent: Any = HandsOver()
    sent.tried = []
    fleet: Any = Apart()
    record = RequestRecord("r1", "r1", "chat_completions", 0.0, 0.0)
    call = Call(request(), "/v1/chat/completions", {}, b"{}", True, {}, record, token_ids=range(34))
    answer = await RequestFlow(service, LocalPlacement(service), fleet, sent, Limits()).start(call)
    assert sent.tried == ["prefill-1", "prefill-3", "decode-5"]
    assert {one.stage for one in service.router.load.bookings("r1")} == {"decode"}
    answer.close()
