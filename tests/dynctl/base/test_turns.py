"""Long work runs in one thread; its owners take turns, and a caller that leaves passes its turn."""

import asyncio
import threading

import pytest

from dynctl.base.turns import Turns
from tests.waiting import patience


async def test_owners_take_turns_whatever_each_has_waiting():
    turns, gate, order = Turns("work"), threading.Event(), []

    def work(name: str):
        return lambda: order.append(name)

    async with asyncio.timeout(patience(5)), asyncio.TaskGroup() as group:
        group.create_task(turns.run("a", gate.wait))
        await asyncio.sleep(0)
        for name in ("a1", "a2", "a3", "b1", "b2"):
            group.create_task(turns.run(name[0], work(name)))
        await asyncio.sleep(0)
        gate.set()
    assert order == ["a1", "b1", "a2", "b2", "a3"]


async def test_work_is_in_a_thread_of_its_own_one_after_the_other():
    turns = Turns("work")
    threads = await asyncio.gather(*(turns.run("a", threading.get_ident) for _ in range(4)))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_an_exception_is_that_of_the_call_and_the_next_one_has_its_turn():
    turns = Turns("work")
    with pytest.raises(ZeroDivisionError):
        await turns.run("a", lambda: 1 // 0)
    assert await turns.run("a", lambda: 1) == 1


async def test_a_caller_that_leaves_holds_up_no_other():
    turns, gate = Turns("work"), threading.Event()
    first = asyncio.create_task(turns.run("a", gate.wait))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(turns.run("a", lambda: None)) for _ in range(2)]
    last = asyncio.create_task(turns.run("b", lambda: "done"))
    await asyncio.sleep(0)
    for task in (*waiting, first):
        task.cancel()
    await asyncio.gather(first, *waiting, return_exceptions=True)
    gate.set()
    async with asyncio.timeout(patience(5)):
        assert await last == "done"


async def test_a_caller_that_leaves_as_it_gets_its_turn_passes_it_on():
    turns = Turns("work")
    await turns._turn("a")
    leaving = asyncio.create_task(turns._turn("b"))
    staying = asyncio.create_task(turns._turn("c"))
    await asyncio.sleep(0)
    turns._pass_on()
    leaving.cancel()
    async with asyncio.timeout(patience(5)):
        await staying
