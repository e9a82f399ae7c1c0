"""Small fleets and plans for the tests of the serving room."""

from collections.abc import Mapping, Sequence
from typing import Any

from router_core import (
    BlocksStored,
    KvEvent,
    ModelRuntimeConfig,
    Role,
    Router,
    RouterConfig,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    hash_prompt,
)

MODEL = "tiny"


def worker(
    worker_id: int,
    role: str = "aggregated",
    *,
    name: str | None = None,
    zone: str | None = None,
    model: str = MODEL,
    total: int | None = 75379,
    policy: Mapping[str, Any] | None = None,
) -> Worker:
    domains = {} if zone is None else {"zone": zone}
    return Worker(
        worker_id,
        name or f"{role}-{worker_id}",
        model,
        Role(role),
        runtime_config=ModelRuntimeConfig(
            total_kv_blocks=total,
            max_num_batched_tokens=8192,
            topology_domains=domains,
            **(policy or {}),
        ),
    )


def router(*workers: Worker, **settings: Any) -> Router:
    made = Router(RouterConfig().with_values(settings))
    for one in workers:
        assert made.apply(WorkerUpserted(one), 0.0).ok
    return made


def request(
    tokens: Sequence[int] = range(34), request_id: str = "r1", **fields: Any
) -> RoutingRequest:
    hashes = hash_prompt(tokens, 16).sequence
    return RoutingRequest(request_id, fields.pop("model", MODEL), len(tokens), 16, hashes, **fields)


def store(made: Router, worker_id: int, tokens: Sequence[int]) -> None:
    """The worker caches the complete blocks of ``tokens``."""
    hashed = hash_prompt(tokens, 16)
    event = BlocksStored(None, hashed.sequence, hashed.local)
    applied = made.apply(KvEvent(worker_id, 0, event), 0.0)
    assert applied.ok, applied
