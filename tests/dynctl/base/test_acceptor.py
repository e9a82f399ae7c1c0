"""Connections are accepted together, whatever else the event loop does."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop
from aiohttp import web

from dynctl.base import acceptor
from dynctl.base.acceptor import Acceptor
from dynctl.serving.http.connections import Connections

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def connected(stack: ExitStack, clients: int) -> socket.socket:
    """A listening socket with connections that nothing has accepted yet."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
    for _ in range(clients):
        stack.enter_context(socket.create_connection(listener.getsockname()))
    return listener


def run(make_loop: Callable[[], asyncio.AbstractEventLoop], work: Any) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(work)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_burst_of_clients_is_accepted_within_a_few_turns(make_loop) -> None:
    """With one a turn the last of 200 clients would wait for 200 turns of a full process."""

    async def burst() -> None:
        with ExitStack() as stack:
            listener = connected(stack, 200)
            connections = Connections(1000)
            web_runner = web.AppRunner(web.Application())
            await connections.listen(web_runner, listener, access_log=None)
            for _ in range(5):
                await asyncio.sleep(0)
            assert connections.open == 200
            await connections.close()
            await web_runner.cleanup()

    run(make_loop, burst())


@pytest.mark.parametrize("make_loop", LOOPS)
def test_one_turn_has_a_bound(make_loop, monkeypatch) -> None:
    monkeypatch.setattr(acceptor, "MAX_ACCEPTED", 10)

    async def burst() -> None:
        with ExitStack() as stack:
            taken: list[int] = []
            turn = 0

            def take(accepted: socket.socket, _address: Any) -> None:
                stack.enter_context(accepted)
                taken.append(turn)

            accepting = Acceptor(connected(stack, 35), take)
            while len(taken) < 35:
                turn += 1
                await asyncio.sleep(0)
            accepting.close()
            assert max(map(taken.count, taken)) == 10
            assert max(taken) - min(taken) == 3

    run(make_loop, burst())


async def test_it_goes_on_after_the_system_refused(monkeypatch) -> None:
    monkeypatch.setattr(acceptor, "_AGAIN_S", 0.01)
    with ExitStack() as stack:
        listener = connected(stack, 2)
        refused = Refusing(listener)
        all_taken = asyncio.Event()
        taken: list[socket.socket] = []

        def take(accepted: socket.socket, _address: Any) -> None:
            taken.append(stack.enter_context(accepted))
            if len(taken) == 2:
                all_taken.set()

        accepting = Acceptor(refused, take)  # type: ignore[arg-type]
        await all_taken.wait()
        assert refused.refusals == 0
        accepting.close()
        accepting.close()
        assert listener.fileno() == -1


async def test_closing_while_it_pauses_ends_it(monkeypatch) -> None:
    with ExitStack() as stack:
        listener = connected(stack, 1)
        refused = Refusing(listener)
        accepting = Acceptor(refused, lambda *_: None)  # type: ignore[arg-type]
        while refused.refusals:  # noqa: ASYNC110
            await asyncio.sleep(0)
        accepting.close()
        assert listener.fileno() == -1


class Refusing:
    """A listening socket whose first accept finds no free descriptor."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.refusals = 1

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(24, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)
