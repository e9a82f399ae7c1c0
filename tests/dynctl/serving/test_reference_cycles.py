"""Requests leave no reference cycles.

What is in a cycle stays until a full garbage collection, and those are rare in a process that
serves: a cycle that refers to a request keeps its body, its plan and its record for hours.
"""

import gc
from collections import Counter

import pytest

from tests.dynctl.serving.fleets import WORDS, chat_body, site, zone

ROUNDS = 4


def fleets():
    pair = [
        {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
        for z in "ab"
        for role in ("prefill", "decode")
    ]
    return {"aggregated": [{"name": "one"}, {"name": "two"}], "disaggregated": pair}


async def answered(fleet):
    status, _, _ = await fleet.chat(WORDS * 4, max_tokens=5)
    assert status == 200


async def streamed(fleet):
    status, events, _ = await fleet.stream(WORDS * 4, max_tokens=5)
    assert (status, events[-1]) == (200, "[DONE]")


async def refused(fleet):
    status, _, _ = await fleet.chat(WORDS, nvext={"routing_constraints": {"required": ["gpu=no"]}})
    assert status >= 400


async def invalid(fleet):
    status, _, _ = await fleet.post("/v1/chat/completions", {"model": "demo", "messages": 3})
    assert status == 400


async def other_apis(fleet):
    for path, body in (
        ("/v1/responses", {"model": "demo", "input": WORDS, "max_output_tokens": 4}),
        ("/v1/messages", {**chat_body(WORDS), "max_tokens": 4}),
        ("/v1/completions", {"model": "demo", "prompt": WORDS, "max_tokens": 4}),
    ):
        status, found, _ = await fleet.post(path, body)
        assert status == 200, found


async def left(fleet):
    """The client leaves in the middle of its stream."""
    body = chat_body(WORDS, stream=True, max_tokens=64)
    async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
        await answer.content.readany()
        answer.close()


@pytest.mark.parametrize("kind", fleets())
@pytest.mark.parametrize("request_of", [answered, streamed, refused, invalid, other_apis, left])
async def test_requests_leave_no_cycles(kind, request_of):
    async with site(fleets()[kind]) as fleet:
        await request_of(fleet)  # the first of a kind makes what all others use
        await fleet.idle()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(ROUNDS):
                await request_of(fleet)
            await fleet.idle()
            gc.collect()
            found = Counter(
                f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    ours = {name: count for name, count in found.items() if name.startswith(("dynctl", "router_"))}
    assert not [name for name, count in ours.items() if count >= ROUNDS], found
