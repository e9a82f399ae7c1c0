"""Small builders for the router's tests: workers, routers and requests in one line each."""

from __future__ import annotations

from typing import Any

from router_core.changes import Booked, Change, KvEvent, Stage, WorkerUpserted
from router_core.config import RouterConfig
from router_core.events import BlocksStored
from router_core.hashing import hash_prompt
from router_core.router import Router
from router_core.routing_view import RoutingRequest
from router_core.taints import NO_CONSTRAINTS, RoutingConstraints
from router_core.workers import ModelRuntimeConfig, Role, Worker

MODEL = "tiny"


def worker(
    worker_id: int,
    name: str | None = None,
    role: str = "aggregated",
    *,
    zone: str | None = None,
    policy: str | None = None,
    weight: float | None = None,
    can_prefill: bool = True,
    kv_events: bool = True,
    device: str | None = None,
    **runtime: Any,
) -> Worker:
    """A worker with block size 16; ``zone`` also makes it its transfer domain under ``policy``."""
    domains = dict(runtime.pop("topology_domains", {}))
    if zone is not None:
        domains["zone"] = zone
    if policy is not None:
        runtime |= {"kv_transfer_domain": "zone", "kv_transfer_enforcement": policy}
        runtime["kv_transfer_preferred_weight"] = weight
    config = ModelRuntimeConfig(topology_domains=domains, **runtime)
    return Worker(
        worker_id,
        name or f"w{worker_id}",
        MODEL,
        Role(role),
        runtime_config=config,
        can_prefill=can_prefill,
        kv_events=kv_events,
        device=device,
    )


def router(*workers: Worker, **settings: Any) -> Router:
    """A router with the settings and the workers."""
    made = Router(RouterConfig().with_values(settings))
    for one in workers:
        taken = made.apply(WorkerUpserted(one), 0.0)
        assert taken.ok, taken.message
    return made


def request(
    tokens: int,
    name: str = "r1",
    *,
    seed: int = 0,
    constraints: RoutingConstraints = NO_CONSTRAINTS,
    **more: Any,
) -> RoutingRequest:
    """A prompt of ``tokens`` tokens; equal seeds share their prefix."""
    hashes = hash_prompt(prompt(tokens, seed), 16)
    return RoutingRequest(name, MODEL, tokens, 16, hashes.sequence, constraints=constraints, **more)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 1_000_003 + position) % 2**32 for position in range(tokens)]


def stored(worker_id: int, blocks: int, seed: int = 0, dp_rank: int = 0) -> KvEvent:
    """The event by which a worker caches the first ``blocks`` blocks of the seed's prompt."""
    hashes = hash_prompt(prompt(blocks * 16, seed), 16)
    return KvEvent(worker_id, dp_rank, BlocksStored(None, hashes.sequence, hashes.local))


def active(
    worker_id: int,
    name: str,
    *,
    stage: Stage = "aggregated",
    prefill_tokens: int = 0,
    blocks: int = 0,
    dp_rank: int = 0,
) -> Booked:
    """A booking with unshared tokens and blocks."""
    return Booked(name, stage, worker_id, dp_rank, prefill_tokens, (), blocks)


def apply_all(target: Router, *changes: Change, now: float = 1.0) -> None:
    for change in changes:
        taken = target.apply(change, now)
        assert taken.ok, taken.message


def costs(target: Router, wanted: RoutingRequest, stage: str | None = None) -> dict[str, float]:
    """Worker name -> cost on the named hop (the final one unless named)."""
    plan = target.plan(wanted)
    decision = plan.prefill if stage == "prefill" else plan.final
    assert decision is not None
    return {row.worker.name: row.cost for row in decision.rows()}
