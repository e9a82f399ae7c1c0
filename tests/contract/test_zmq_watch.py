"""Waiting for messages on plain ZMQ sockets, whose descriptors show changes only."""

import asyncio
import contextlib
import os
from collections import Counter

import pytest
import zmq
import zmq.asyncio

from dynctl.adapters.zmq.context import (
    ReadySockets,
    SocketWatch,
    close_context,
    new_context,
    readable,
)
from tests.waiting import patience, until


@pytest.fixture
async def pair():
    context = new_context()
    sender, receiver = zmq.Socket(context, zmq.PAIR), zmq.Socket(context, zmq.PAIR)
    sender.bind("inproc://pair")
    receiver.connect("inproc://pair")
    yield sender, receiver
    sender.close(linger=0)
    receiver.close(linger=0)
    close_context(context)


async def test_a_message_ends_the_wait_once_it_arrives(pair):
    sender, receiver = pair
    watch = SocketWatch(receiver)
    waiting = asyncio.create_task(watch.wait(patience(30)))
    await asyncio.sleep(0)
    sender.send(b"1")
    assert await waiting
    assert receiver.recv(zmq.NOBLOCK) == b"1"
    assert not await watch.wait(0.001)
    watch.close()


async def test_messages_that_came_while_nothing_waited_end_the_next_wait_at_once(pair):
    sender, receiver = pair
    watch = SocketWatch(receiver)
    for number in range(3):
        sender.send(b"%d" % number)
    await until(lambda: readable(receiver))
    for number in range(3):
        # Only the first of them made the descriptor ready.
        assert await watch.wait(None)
        assert receiver.recv(zmq.NOBLOCK) == b"%d" % number
    assert not await watch.wait(0.001)
    watch.close()


async def test_a_message_that_is_not_read_does_not_keep_the_loop_busy(pair):
    sender, receiver = pair
    called = 0
    watch = SocketWatch(receiver)
    loop = asyncio.get_running_loop()
    inner = watch._note_change

    def counted(socket):
        nonlocal called
        called += 1
        inner(socket)

    loop.add_reader(receiver.FD, counted, receiver)
    assert not readable(receiver)  # only then does ZMQ signal the next message
    sender.send(b"1")
    await until(lambda: called > 0)
    before = called
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert called - before <= 2
    assert await watch.wait(None)
    watch.close()


async def test_a_wait_can_be_cancelled_and_a_closed_watch_leaves_no_reader(pair):
    _, receiver = pair
    watch = SocketWatch(receiver)
    waiting = asyncio.create_task(watch.wait(None))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert not await watch.wait(0.001)
    watch.close()
    assert not asyncio.get_running_loop().remove_reader(receiver.FD)


@contextlib.contextmanager
def pipes(number):
    """Pipes with a byte in each: the ends to read, and all of them closed at the end."""
    opened = [os.pipe() for _ in range(number)]
    try:
        for _, write in opened:
            os.write(write, b"1")
        yield [read for read, _ in opened]
    finally:
        for ends in opened:
            for descriptor in ends:
                os.close(descriptor)


async def test_one_turn_wakes_few_of_many_ready_sockets_and_each_has_its_turn():
    turn, called = 0, []
    ready = ReadySockets()
    with pipes(100) as descriptors:
        for descriptor in descriptors:
            # Nothing is read, so that all of them stay ready.
            ready.add_reader(descriptor, lambda one: called.append((turn, one)), descriptor)
        while len(called) < 200:
            await asyncio.sleep(0)
            turn += 1
        for descriptor in descriptors:
            assert ready.remove_reader(descriptor)
    assert max(Counter(turn for turn, _ in called).values()) == 16
    assert sorted(one for _, one in called[:100]) == descriptors
    assert sorted(one for _, one in called[100:200]) == descriptors


async def test_a_reader_that_another_removed_is_not_called():
    called = []
    ready = ReadySockets()
    with pipes(2) as descriptors:
        first, second = descriptors
        other = {first: second, second: first}

        def call(descriptor):
            called.append(descriptor)
            ready.remove_reader(other[descriptor])

        for descriptor in descriptors:
            ready.add_reader(descriptor, call, descriptor)
        await until(lambda: len(called) > 2)
        assert len(set(called)) == 1
        assert not ready.remove_reader(other[called[0]])
        assert ready.remove_reader(called[0])


async def test_a_watch_of_ready_sockets_ends_its_wait_and_leaves_no_reader(pair):
    sender, receiver = pair
    ready = ReadySockets()
    watch = SocketWatch(receiver, readers=ready)
    waiting = asyncio.create_task(watch.wait(patience(30)))
    await asyncio.sleep(0)
    sender.send(b"1")
    assert await waiting
    assert receiver.recv(zmq.NOBLOCK) == b"1"
    watch.close()
    assert not ready.remove_reader(receiver.FD)
    assert not asyncio.get_running_loop().remove_reader(receiver.FD)
