"""The embedded demo fleet: six workers in two zones, and the one prompt that is cached.

`--demo` shows it at rest, with some load; `top --demo` lets it run. No process and no network: a
router of ours decides on the state that a frontend would have.
"""

from __future__ import annotations

from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.documents.route_result import RouteResult
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
    preset,
)

TITLE: Final = "demo fleet"
MODEL: Final = "demo"
PRESET: Final = "dynamo-1.6"
PROMPT: Final = "Explain KV cache reuse in distributed serving."
BLOCK: Final = 16
TOTAL_BLOCKS: Final = 4096
#: Requests that a decode engine runs at a time.
SEATS: Final = 24
THRESHOLDS: Final = {
    "active_prefill_tokens_threshold": 12_000,
    "active_decode_blocks_threshold": 0.85,
}
_WORKERS: Final = (
    ("prefill", "a", 0), ("decode", "a", 0), ("prefill", "b", 0),
    ("decode", "b", 0), ("prefill", "b", 1), ("decode", "b", 1),
)  # fmt: skip
#: Load of the fleet at rest: worker -> (prefill tokens, decode blocks). So costs differ.
_LOAD: Final = {
    "prefill-b0": (16, 0),
    "prefill-b1": (640, 0),
    "decode-a0": (0, 10),
    "decode-b0": (0, 4),
}
_NOW: Final = 100.0


class DemoSource(ViewSource):
    """The demo fleet at rest, the same every time."""

    def __init__(self) -> None:
        router = Router(demo_config())
        for change, at in _changes():
            applied = router.apply(change, at)
            if not applied.ok:
                raise RuntimeError(f"demo fleet: {applied.message}")
        super().__init__(demo_view(router, _NOW), TITLE)

    def decision(self, decision_id: str | None) -> RouteResult:
        wanted = "the last decision" if decision_id is None else decision_id
        raise UsageProblem(
            f"{wanted} cannot be looked up: each command with --demo starts the demo fleet again, "
            "and its decisions end with that command",
            "dynctl top --demo explains each decision that it lists (Enter); for a fleet that goes "
            "on: dynctl demo --keep --load",
        )


def demo_config() -> RouterConfig:
    """The router settings of the demo fleet."""
    return preset(PRESET).with_values(THRESHOLDS)


def demo_view(router: Router, now: float) -> SavedView:
    """A router of the demo fleet as a view."""
    return SavedView(
        router,
        now=now,
        preset=PRESET,
        model_paths={MODEL: str(DEMO_MODEL_DIR)},
        assumptions=("the embedded demo fleet: nothing is running",),
        source=TITLE,
    )


def demo_workers() -> list[Worker]:
    """The six workers; the first one, prefill-a0, has the prompt in its cache."""
    return [demo_worker(*one, number) for number, one in enumerate(_WORKERS, 1)]


def demo_worker(role: str, zone: str, index: int, number: int) -> Worker:
    """One worker of a zone; prefill workers require a decode worker of their zone."""
    prefill = role == "prefill"
    card = ModelRuntimeConfig(
        total_kv_blocks=TOTAL_BLOCKS,
        max_num_batched_tokens=8192,
        max_num_seqs=SEATS,
        topology_domains={"zone": f"zone-{zone}", "rack": f"rack-{zone}{index // 2}"},
        kv_transfer_domain="zone" if prefill else None,
        kv_transfer_enforcement="required" if prefill else None,
    )
    # Ids as long as real ones, so that names and suffixes are useful here too.
    worker_id = 0xD1C0_0000_0000_0000 + number * 0x1_2345_6789
    name = f"{role}-{zone}{index}"
    return Worker(worker_id, name, MODEL, Role(role), BLOCK, card, can_prefill=prefill)


def cached_prompt(worker: Worker) -> KvEvent:
    """The event by which ``worker`` stored the full blocks of PROMPT."""
    messages = [{"role": "user", "content": PROMPT}]
    tokens = load_tokenizer(DEMO_MODEL_DIR).encode_chat(messages)
    hashes = hash_prompt(tokens, BLOCK)
    count = max(1, len(hashes) - 1)
    stored = BlocksStored(
        parent_hash=None,
        block_hashes=tuple(hashes.sequence[:count]),
        local_hashes=tuple(hashes.local[:count]),
    )
    return KvEvent(worker.worker_id, 0, stored)


def _changes() -> list[tuple[Change, float]]:
    workers = demo_workers()
    changes: list[tuple[Change, float]] = [(WorkerUpserted(worker), 0.0) for worker in workers]
    changes.append((cached_prompt(workers[0]), _NOW - 0.3))
    named = {worker.name: worker for worker in workers}
    for number, (name, (tokens, blocks)) in enumerate(_LOAD.items()):
        worker = named[name]
        stage: Stage = "prefill" if worker.role is Role.PREFILL else "decode"
        booked = Booked(
            f"running-{number}", stage, worker.worker_id, 0, tokens, anonymous_blocks=blocks
        )
        changes.append((booked, _NOW - 1.0))
    for worker in workers:
        changes.append((LoadReported(worker.worker_id, 0, kv_used_blocks=40), _NOW - 0.1))
    return changes
