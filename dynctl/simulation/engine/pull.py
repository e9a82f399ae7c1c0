"""The prefill side of a KV transfer: POST /engine/kv/pull."""

import asyncio
from typing import Annotated, Any

from msgspec import Meta, Struct

from dynctl.simulation.engine.engine import Engine
from dynctl.simulation.engine.handoff import HandoffKey
from dynctl.simulation.engine.openai_request import ApiError, wrong_field
from dynctl.wire.json_body import U32
from dynctl.wire.openai import Room


class PullBody(Struct):
    """What a decode engine sends: how many blocks it lacks, and which hand-off they are of."""

    num_blocks: U32
    topology_domains: Annotated[dict[str, str], Meta(max_length=256)] = {}
    bootstrap_room: Room | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[U32] = []


async def serve_pull(engine: Engine, body: PullBody) -> dict[str, Any]:
    """Take the simulated transfer time, then free the blocks.

    `{"num_blocks", "topology_domains"?, "bootstrap_room"}` or `{"num_blocks", "remote_engine_id",
    "remote_request_id"?, "remote_block_ids"?}`. ApiError 404: the blocks are not (or no longer)
    here; 409: another engine pulls them.
    """
    if body.num_blocks > engine.config.total_blocks:
        raise wrong_field("num_blocks", f"this engine has {engine.config.total_blocks} blocks")
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
        await asyncio.sleep(engine.timer.kv_transfer(body.num_blocks, body.topology_domains))
        pulled = not held.gone.is_set()
    finally:
        # A puller that hangs up half way must not lose the blocks for the one after it.
        held.pulling = False
        if pulled:
            engine.held.release(held, pulled=True)
    if not pulled:
        raise ApiError(404, "the KV blocks were lost during the transfer", type="KvLostError")
    return {"status": "ok", "num_blocks": body.num_blocks}


def _key(engine: Engine, body: PullBody) -> tuple[HandoffKey | None, bool]:
    """The hand-off's key, and whether to wait for it."""
    if body.bootstrap_room is not None:
        return body.bootstrap_room, True
    if body.remote_engine_id is None:
        raise wrong_field("remote_engine_id", "is required without a bootstrap_room")
    if body.remote_engine_id != engine.engine_id:
        return None, False  # another engine, or an earlier one at this address
    if body.remote_request_id is not None:
        return body.remote_request_id, False
    return engine.held.find_by_blocks(body.remote_block_ids), False
