"""The fleets behind the golden screens: built change by change, the same every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynctl.documents.view import SavedView
from dynctl.sources.view import ViewSource
from dynctl.tokenization import DEMO_MODEL_DIR
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
    Worker,
    WorkerUpserted,
    hash_prompt,
)

NOW = 100.0
MODEL = "tiny"
#: 36 tokens: two full blocks of 16, as in the guides' logs.
TOKENS = list(range(1, 37))


def worker(
    name: str,
    role: str,
    number: int,
    *,
    zone: str | None = None,
    enforcement: str | None = None,
    weight: float | None = None,
    ranks: int = 1,
    kv_events: bool = True,
    extra: Mapping[str, str] | None = None,
    taints: frozenset[str] = frozenset(),
) -> Worker:
    """A worker whose id has 19 digits, as real ones have."""
    domains = ({"zone": zone} if zone else {}) | dict(extra or {})
    card = ModelRuntimeConfig(
        total_kv_blocks=4096,
        max_num_batched_tokens=8192,
        data_parallel_size=ranks,
        topology_domains=domains,
        taints=taints,
        kv_transfer_domain="zone" if enforcement else None,
        kv_transfer_enforcement=enforcement,
        kv_transfer_preferred_weight=weight,
    )
    return Worker(
        1_000_000_007 * 3_000_000_000 + number,
        name,
        MODEL,
        Role(role),
        16,
        card,
        can_prefill=role != "decode",
        kv_events=kv_events,
    )


def stored(to: Worker, blocks: int, rank: int = 0) -> KvEvent:
    """The first ``blocks`` of TOKENS are cached there."""
    hashes = hash_prompt(TOKENS, 16)
    event = BlocksStored(None, tuple(hashes.sequence[:blocks]), tuple(hashes.local[:blocks]))
    return KvEvent(to.worker_id, rank, event)


def load(to: Worker, *, prefill: int = 0, decode: int = 0, rank: int = 0) -> list[Change]:
    """Work in progress, and a fresh report of the worker's own."""
    stage = "prefill" if to.role is Role.PREFILL else "decode"
    booked = Booked(
        f"running-{to.name}-{rank}",
        stage,  # type: ignore[arg-type]
        to.worker_id,
        rank,
        prefill,
        anonymous_blocks=decode,
    )
    return [booked, LoadReported(to.worker_id, rank, kv_used_blocks=decode)]


def view(
    workers: Sequence[Worker],
    changes: Sequence[Change] = (),
    config: Mapping[str, object] | None = None,
) -> ViewSource:
    router = Router(RouterConfig().with_values(dict(config or {})))
    for one in workers:
        assert router.apply(WorkerUpserted(one), NOW - 10).ok
    for change in changes:
        applied = router.apply(change, NOW - (0.3 if isinstance(change, KvEvent) else 0.1))
        assert applied.ok, applied
    saved = SavedView(
        router,
        now=NOW,
        preset="dynamo-1.6",
        model_paths={MODEL: str(DEMO_MODEL_DIR)},
        source="this router",
    )
    return ViewSource(saved, "test view")


def two_zones(
    enforcement: str | None = "required", weight: float | None = None, **config: object
) -> ViewSource:
    """The fleet of the sketch: three prefill and three decode workers, zone-a small and warm."""
    prefill = {"enforcement": enforcement, "weight": weight}
    pa = worker("prefill-a0", "prefill", 1, zone="zone-a", **prefill)  # type: ignore[arg-type]
    pb0 = worker("prefill-b0", "prefill", 2, zone="zone-b", **prefill)  # type: ignore[arg-type]
    pb1 = worker("prefill-b1", "prefill", 3, zone="zone-b", **prefill)  # type: ignore[arg-type]
    da = worker("decode-a0", "decode", 4, zone="zone-a")
    db0 = worker("decode-b0", "decode", 5, zone="zone-b")
    db1 = worker("decode-b1", "decode", 6, zone="zone-b")
    changes = [
        stored(pa, 1),
        *load(pb1, prefill=10_240),
        *load(da, decode=10),
        *load(db0, decode=4),
        *load(db1, decode=5),
    ]
    return view(
        [pa, pb0, pb1, da, db0, db1],
        changes,
        {"active_prefill_tokens_threshold": 10_000, **config},
    )


def stranded_zones(**config: object) -> ViewSource:
    """Four zones: healthy, its only decode worker busy, without decode, and one of two policies."""
    named = [
        worker("prefill-a0", "prefill", 1, zone="zone-a", enforcement="required"),
        worker("decode-a0", "decode", 2, zone="zone-a"),
        worker("prefill-b0", "prefill", 3, zone="zone-b", enforcement="required"),
        worker("decode-b0", "decode", 4, zone="zone-b"),
        worker("prefill-c0", "prefill", 5, zone="zone-c", enforcement="required"),
        worker("prefill-c1", "prefill", 6, zone="zone-c", enforcement="required"),
        worker("prefill-d0", "prefill", 7, zone="zone-d", enforcement="required"),
        worker("prefill-d1", "prefill", 8, zone="zone-d", enforcement="preferred", weight=0.85),
        worker("decode-x0", "decode", 9),
    ]
    changes = [*load(named[3], decode=4000), *load(named[0], prefill=512)]
    return view(named, changes, {"active_decode_blocks_threshold": 0.9, **config})


def settings(source: ViewSource) -> dict[str, object]:
    """A source's router settings by name, as `topology show` reads them."""
    return source.config().values
