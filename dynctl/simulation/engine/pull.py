"""The prefill side of a KV transfer: POST /engine/kv/pull."""

import asyncio
from typing import Any

from dynctl.simulation.engine.engine import Engine
from dynctl.simulation.engine.handoff import HandoffKey
from dynctl.simulation.engine.openai_request import ApiError, Fields

_MAX_DOMAINS = 256


async def serve_pull(engine: Engine, body: Fields) -> dict[str, Any]:
    """Take the simulated transfer time, then free the blocks.

    `{"num_blocks", "topology_domains"?, "bootstrap_room"}` or `{"num_blocks", "remote_engine_id",
    "remote_request_id"?, "remote_block_ids"?}`. ApiError 404: the blocks are not (or no longer)
    here; 409: another engine pulls them.
    """
    blocks = body.integer("num_blocks", 0, engine.config.total_blocks)
    if blocks is None:
        raise body.fail("num_blocks", "how many blocks the puller lacks")
    domains = _domains(body)
    key, wait = _key(engine, body)
    held = await engine.held.expect(key, wait) if key is not None else None
    if held is None:
        raise ApiError(
            404,
            f"engine {engine.config.name} holds no KV blocks for this hand-off: it was pulled "
            "before, timed out, or the engine restarted",
            type="KvLostError",
        )
    if held.pulling:
        raise ApiError(409, "another engine is pulling these KV blocks", type="ConflictError")
    held.pulling = True
    pulled = False
    try:
        await asyncio.sleep(engine.timer.kv_transfer(blocks, domains))
        pulled = not held.gone.is_set()
    finally:
        # A puller that hangs up half way must not lose the blocks for the one after it.
        held.pulling = False
        if pulled:
            engine.held.release(held, pulled=True)
    if not pulled:
        raise ApiError(404, "the KV blocks were lost during the transfer", type="KvLostError")
    return {"status": "ok", "num_blocks": blocks}


def _key(engine: Engine, body: Fields) -> tuple[HandoffKey | None, bool]:
    room = body.integer("bootstrap_room", 0, 2**63 - 1)
    if room is not None:
        return room, True
    engine_id = body.text("remote_engine_id")
    if engine_id is None:
        raise body.fail("remote_engine_id", "this engine's id, or a bootstrap_room")
    if engine_id != engine.engine_id:
        return None, False  # an engine that lived here before, or another one's address
    request_id = body.text("remote_request_id")
    if request_id is not None:
        return request_id, False
    return engine.held.find_by_blocks(body.token_ids("remote_block_ids")), False


def _domains(body: Fields) -> dict[str, str]:
    raw = body.plain.get("topology_domains")
    if raw is None:
        return {}
    if not (
        isinstance(raw, dict)
        and len(raw) <= _MAX_DOMAINS
        and all(isinstance(value, str) for value in raw.values())
    ):
        raise body.fail("topology_domains", "an object of domain to value, both strings")
    return raw
