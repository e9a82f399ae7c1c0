"""The embedded demo fleet as a view: six workers in two zones, some load, a warm cache.

Nothing runs; the router decides on the same kind of state that a live frontend has. What a person
learns here holds for `dynctl demo` and for a fleet of their own.
"""

from __future__ import annotations

from dynctl.documents.view import SavedView
from dynctl.sources.view import ViewSource
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from router_core import (
    BlocksStored,
    Booked,
    Change,
    KvEvent,
    LoadReported,
    ModelRuntimeConfig,
    Role,
    Router,
    RouterConfig,
    Stage,
    Worker,
    WorkerUpserted,
    hash_prompt,
)

MODEL = "demo"
PROMPT = "Explain KV cache reuse in distributed serving."
_ZONES = ("zone-a", "zone-b")
_NOW = 100.0


def demo_source() -> ViewSource:
    """A new view of the demo fleet, the same every time."""
    router = Router(RouterConfig())
    for change, at in _history():
        applied = router.apply(change, at)
        if not applied.ok:
            raise RuntimeError(f"demo fleet: {applied.message}")
    view = SavedView(
        router,
        now=_NOW,
        preset="dynamo-1.6",
        model_paths={MODEL: str(DEMO_MODEL_DIR)},
        assumptions=("the embedded demo fleet: nothing is running",),
        source="demo fleet",
    )
    return ViewSource(view, "demo fleet")


def _history() -> list[tuple[Change, float]]:
    changes: list[tuple[Change, float]] = []
    workers: list[Worker] = []
    for zone in _ZONES:
        for role in (Role.PREFILL, Role.DECODE):
            workers.append(_worker(role, zone, len(workers) + 1, 0))
    workers.append(_worker(Role.PREFILL, "zone-b", 5, 1))
    workers.append(_worker(Role.DECODE, "zone-b", 6, 1))
    for worker in workers:
        changes.append((WorkerUpserted(worker), 0.0))
    changes.append((_stored(workers[0]), _NOW - 0.3))
    # Some work in progress, so that costs differ and a second zone is worth a thought.
    for number, (worker, tokens, blocks) in enumerate(
        [(workers[2], 16, 0), (workers[4], 640, 0), (workers[1], 0, 10), (workers[3], 0, 4)]
    ):
        stage: Stage = "prefill" if worker.role is Role.PREFILL else "decode"
        booked = Booked(
            f"running-{number}", stage, worker.worker_id, 0, tokens, anonymous_blocks=blocks
        )
        changes.append((booked, _NOW - 1.0))
    for worker in workers:
        changes.append((LoadReported(worker.worker_id, 0, kv_used_blocks=40), _NOW - 0.1))
    return changes


def _worker(role: Role, zone: str, number: int, index: int) -> Worker:
    name = f"{role.value}-{zone[-1]}{index}"
    card = ModelRuntimeConfig(
        total_kv_blocks=4096,
        max_num_batched_tokens=8192,
        topology_domains={"zone": zone},
        kv_transfer_domain="zone" if role is Role.PREFILL else None,
        kv_transfer_enforcement="required" if role is Role.PREFILL else None,
    )
    # Ids as long as real ones, so that names and suffixes earn their keep here too.
    worker_id = 0xD1C0_0000_0000_0000 + number * 0x1_2345_6789
    return Worker(worker_id, name, MODEL, role, 16, card, can_prefill=role is Role.PREFILL)


def _stored(worker: Worker) -> KvEvent:
    """What a worker stored when it served the demo's first prompt: its complete first blocks."""
    messages = [{"role": "user", "content": PROMPT}]
    tokens = load_tokenizer(DEMO_MODEL_DIR).encode_chat(messages)
    hashes = hash_prompt(tokens, 16)
    count = max(1, len(hashes) - 1)
    stored = BlocksStored(
        parent_hash=None,
        block_hashes=tuple(hashes.sequence[:count]),
        local_hashes=tuple(hashes.local[:count]),
    )
    return KvEvent(worker.worker_id, 0, stored)
