"""Lines onto stdout: a reader that is slow, and one that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Iterator
from typing import TextIO

import pytest

from dynctl.base.errors import ReaderLeft
from dynctl.screens.streaming import LiveOutput
from tests.waiting import patience

Pipe = tuple[int, TextIO]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    yield reading, stream
    for close in (stream.close, lambda: os.close(reading)):
        with contextlib.suppress(OSError):
            close()


async def test_a_slow_reader_does_not_stop_the_loop(pipe: Pipe):
    reading, stream = pipe
    text = "x" * (1 << 20)
    with LiveOutput(stream) as output:
        writing = asyncio.create_task(output.write(text))
        for _ in range(10):
            await asyncio.sleep(0)  # would hang if writing blocked
        assert not writing.done()
        got = 0
        while got < len(text):
            got += len(await asyncio.to_thread(os.read, reading, 1 << 16))
        await writing


async def test_a_write_that_waits_can_be_given_up(pipe: Pipe):
    with LiveOutput(pipe[1]) as output:
        writing = asyncio.create_task(output.write("x" * (1 << 20)))
        await asyncio.sleep(0.01)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing


async def test_a_reader_that_leaves_is_noticed_without_a_write(pipe: Pipe):
    reading, stream = pipe
    with LiveOutput(stream) as output:
        leaving = asyncio.create_task(output.reader_left())
        await asyncio.sleep(0.01)
        assert not leaving.done()
        os.close(reading)
        async with asyncio.timeout(patience(5)):
            with pytest.raises(ReaderLeft):
                await leaving


async def test_a_reader_that_leaves_is_noticed_by_a_write(pipe: Pipe):
    reading, stream = pipe
    with LiveOutput(stream) as output:
        os.close(reading)
        with pytest.raises(ReaderLeft):
            await output.write("x")


async def test_files_and_streams_without_a_descriptor_are_written_to(tmp_path):
    with (tmp_path / "out").open("w") as file, LiveOutput(file) as output:
        await output.write("a\n" * 5000)
    assert (tmp_path / "out").read_text() == "a\n" * 5000
    text = io.StringIO()
    with LiveOutput(text) as output:
        await output.write("b\n")
    assert text.getvalue() == "b\n"
