"""Prefill and decode on different engines: vLLM's hand-off, SGLang's, and topology."""

from typing import Any

from tests.dynctl.serving.fleets import WORDS, site, text_of, zone

IDS = {"extra_fields": ["worker_id", "timing"]}


def two_zones():
    return [
        {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
        for z in "ab"
        for role in ("prefill", "decode")
    ]


def names(fleet, worker_id):
    registry = fleet.service.router.registry
    return (
        registry.get(worker_id["prefill_worker_id"]).name,
        registry.get(worker_id["decode_worker_id"]).name,
    )


async def test_prefill_hands_its_blocks_to_decode_in_the_same_zone():
    async with site(two_zones()) as fleet:
        for i in range(4):
            status, body, _ = await fleet.chat(f"{i} {WORDS * 4}", max_tokens=5, nvext=IDS)
            assert status == 200, body
            assert body["usage"]["completion_tokens"] == 5
            prefill, decode = names(fleet, body["nvext"]["worker_id"])
            assert prefill.split("-")[1] == decode.split("-")[1]
        await fleet.idle()
        ran = [e for n, e in fleet.engines.items() if n.startswith("prefill")]
        assert all(len(engine.engine.held) == 0 for engine in ran)  # the blocks were pulled


async def test_a_disaggregated_stream():
    async with site(two_zones()) as fleet:
        status, events, _ = await fleet.stream(WORDS * 4, max_tokens=5)
        assert status == 200
        assert events[-1] == "[DONE]"
        assert text_of(events)
        await fleet.idle()


async def test_bootstrap_engines_get_both_halves_at_once():
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill", "data_parallel_size": 2},
        {"name": "d0", "role": "decode"},
    ]
    async with site(engines, specs={"p0": ",bootstrap={address}"}) as fleet:
        for i in range(4):
            status, events, _ = await fleet.stream(f"{i} {WORDS * 4}", max_tokens=5)
            assert status == 200, events
            assert events[-1] == "[DONE]"
            assert text_of(events)
        await fleet.idle()
