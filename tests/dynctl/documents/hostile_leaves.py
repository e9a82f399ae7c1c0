"""Documents in which one leaf has a value that no writer of dynctl gives it."""

import struct
import zlib
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import msgspec

from dynctl.documents import recording_file as r
from dynctl.documents.recording import (
    KINDS,
    Arrived,
    Changed,
    Decided,
    Finished,
    Noted,
    Record,
    Start,
    State,
    moved_snapshot,
)
from router_core import (
    Booked,
    Enqueued,
    KvEvent,
    Router,
    RouterConfig,
    RoutingRequest,
    TransferTable,
    Worker,
    WorkerUpserted,
    read_policy_classes,
)
from router_core.changes import (
    Change,
    ConfigSet,
    Dequeued,
    Expired,
    Freed,
    IndexConnected,
    IndexMarked,
    LoadReported,
    OutputBlock,
    PrefillDone,
    Progressed,
    ThresholdsSet,
    TransferTableSet,
    WorkerAvailability,
    WorkerLost,
)
from router_core.events import BlocksRemoved, BlocksStored, Cleared, WindowStored
from router_core.transfer import Link
from router_core.workers import ModelRuntimeConfig

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**64 - 1,
    2**64, -(2**63) - 1, 10**400, 10**5000, float("nan"), float("inf"), float("-inf"), "", "0",
    "1e-320", "nan", "\ud800", "x" * 200_000, "a\nb\u202e", b"\x00", [], [[]], [0], [1e-320],
    [None, None], {}, {"": 0}, {"slot": 1e-320}, {1: 2},
)  # fmt: skip
"""What stands in for each leaf in turn."""
OTHER_SHAPES: tuple[Any, ...] = (
    None, True, 1, 1e-320, "x", [], [[]], [1e-320], [None, None], {}, {"": 0}, {1: 2},
)  # fmt: skip
"""What stands in for each list and mapping."""

CLASSES = {
    "default_policy_family": "chat",
    "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "any"}],
    "policy_classes": [
        {"name": "c", "policy_family": "chat", "cache_bucket": "any", "quantum": 64},
        {"name": "default", "quantum": 64},
    ],
}
REQUEST = RoutingRequest("probe", "m", 64, 16, (1, 2, 3, 4))


def full_router() -> Router:
    """A router with a value in every part of its snapshot."""
    config = RouterConfig().with_values(
        {
            "router_session_affinity_ttl_secs": 60.0,
            "router_queue_threshold": 1.0,
            "router_prefill_load_model": "measured",
            "router_predicted_ttl_secs": 5.0,
            "router_approximate_cache_policy": "lru",
            "router_kv_transfer_weight": 1.0,
        }
    )
    router = Router(
        config, exact_reuse=True, learns=True, policy_classes=read_policy_classes(CLASSES)
    )
    card = ModelRuntimeConfig(
        total_kv_blocks=100,
        max_num_batched_tokens=64,
        data_parallel_size=2,
        topology_domains={"zone": "a"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement="preferred",
        kv_transfer_preferred_weight=0.5,
    )
    workers = (
        Worker(
            1, "w1", "m", runtime_config=card, aliases=("n",), adapters=("l",), worker_sets=("s",)
        ),
        Worker(
            2, "w2", "m", runtime_config=ModelRuntimeConfig(total_kv_blocks=100), kv_events=False
        ),
        Worker(3, "w3", "m", kv_events=False, device="cpu", endpoint="http://127.0.0.1:1"),
    )
    changes: tuple[Change, ...] = (
        *map(WorkerUpserted, workers),
        WorkerAvailability(3, "no response"),
        KvEvent(1, 0, BlocksStored(None, (11, 12), (21, 22), counted=True)),
        KvEvent(1, 0, BlocksStored(None, (11,), (21,), counted=True)),
        KvEvent(1, 0, WindowStored(1, (12,), 1)),
        KvEvent(1, 0, BlocksStored(12, (13,), (23,), tier="host_pinned")),
        KvEvent(1, 1, BlocksStored(None, (31, 32, 33), (21, 22, 23))),
        KvEvent(1, 1, BlocksRemoved((32,))),
        LoadReported(1, 0, kv_used_blocks=3, active_prefill_tokens=1, active_decode_blocks=2),
        ThresholdsSet("m", {"active_prefill_tokens_threshold": 1_000}),
        TransferTableSet(TransferTable((("zone", Link(0.001, 1e9)),), Link(0.1, 1e8), 1e4)),
        *(
            Booked(
                f"r{worker_id}", "aggregated", worker_id, 0, 64, (1, 2, 3, 4), 1, (1, 2, 3, 4),
                predicted_s=2.0, session=f"s{worker_id}", chains=(4,),
            )
            for worker_id in (1, 2, 3)
        ),
        OutputBlock("r1", 0.5),
        Enqueued("q", "m", "default", 32, 0, 103.0, lane=(1, None)),
        Enqueued("p", "m", "default", 32, 0, 103.0, lane="n"),
        IndexMarked(1, 1, "gapped", 2),
        IndexConnected(1, 1, False, True),
    )  # fmt: skip
    for place, change in enumerate(changes):
        applied = router.apply(change, 100.0 + place / 8)
        assert applied.ok, (change, applied)
    return router


def places(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value of plain data, lists and mappings too."""
    yield path
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield from places(value, (*path, name))
    elif isinstance(plain, (list, tuple)):
        for place, value in enumerate(plain):
            yield from places(value, (*path, place))


def replaced(plain: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of plain data with another value at a path."""
    if not path:
        return value
    made = list(plain) if isinstance(plain, tuple) else copy(plain)
    made[path[0]] = replaced(plain[path[0]], path[1:], value)
    return made


def at(plain: Any, path: tuple[Any, ...]) -> Any:
    """The value of plain data at a path."""
    for step in path:
        plain = plain[step]
    return plain


# -- recordings --------------------------------------------------------------------------------

BEGAN = 1_700_000_000.0
Ext = msgspec.msgpack.Ext
#: What MessagePack can carry of HOSTILE, and columns of hashes that no writer makes.
HOSTILE_PACKED: tuple[Any, ...] = (
    *(
        one
        for one in HOSTILE
        if one not in ("\ud800", {1: 2})
        and (not isinstance(one, int) or -(2**63) <= one < 2**64)
    ),
    *(Ext(3, text) for text in (b"1e-320", b"nan", b"-5", b"9" * 6_000, b"9" * 300, b"1")),
    *(Ext(2, r._PLACE.pack(first, count)) for first, count in ((0, 1), (2**31, 2**31))),
    Ext(77, b"x"),
)  # fmt: skip


def full_records() -> list[Record]:
    """A recording with every kind of record and of change."""
    hashes = (1, 2, 3, 4)
    changes: list[Change] = [
        WorkerUpserted(Worker(4, "w4", "m")),
        KvEvent(4, 0, BlocksStored(None, (1, 2), (1, 2), counted=True)),
        KvEvent(4, 0, BlocksStored(2, (5,), (6,), tier="disk")),
        KvEvent(4, 0, WindowStored(1, (2,), 1, 1)),
        KvEvent(4, 0, BlocksRemoved((1,))),
        LoadReported(4, 0, 1, 2, 3),
        ThresholdsSet("m", {"active_prefill_tokens_threshold": 5}),
        ConfigSet({"router_temperature": 0.5}),
        IndexMarked(4, 0, "gapped", 1),
        IndexConnected(4, 0, False, True),
        TransferTableSet(TransferTable((("zone", Link(0.1, 1e9)),), Link(0.1, 1e8), 1e4)),
        Booked("a", "aggregated", 4, 0, 64, hashes, 1, hashes, 2.0, False, "s", (4,)),
        Progressed("a"),
        PrefillDone("a"),
        OutputBlock("a", 0.5),
        Enqueued("b", "m", "default", 32, 0, BEGAN + 205.0, 1, 1, (4, 0)),
        Dequeued("b", (("default", 1),), "default"),
        Freed("a", None, True),
        WorkerAvailability(4, "no response"),
        KvEvent(4, 0, Cleared()),
        WorkerLost(4),
        Expired(),
        WorkerUpserted(Worker(4, "w4", "m")),
    ]
    asked = {
        "allowed": [1, 4], "required": ["x"], "preferred": {"y": 0.5}, "pin_prefill": [4, 0],
        "strict_priority": 1,
    }  # fmt: skip
    at = BEGAN + 204.0
    return [
        Start(
            BEGAN + 100, "frontend", "r", "1", {"router_mode": "kv"}, {"m": 16}, True, True,
            frozenset(KINDS),
        ),
        State(BEGAN + 101, moved_snapshot(full_router().snapshot(), BEGAN)),
        Arrived(at, "a", "m", 64, 16, hashes, asked=asked, output_limit=5, session="s"),
        *(Changed(at, change) for change in changes[:12]),
        Decided(at, "a", "m", None, (4, 0), 0.0, 0.0, 2.0, None, why="load"),
        *(Changed(at + 1, change) for change in changes[12:]),
        Finished(
            at + 2, "a", 200, "success", 64, 16, 5, 0.1, 0.1, 0.1, "complete", "", 1.0,
            (("w4", "aggregated", "x"),), 3,
        ),
        Noted(at + 3, "stopped", "recording", text="end"),
    ]  # fmt: skip


class PackedRecords:
    """A recording of one chunk as its MessagePack rows, to write it with another value in one."""

    def __init__(self, records: list[Record]) -> None:
        chunk = r.encode_records(records)[len(r.HEADER) :]
        payload = chunk[r._CHUNK.size :]
        (count,) = r._HASHES.unpack_from(payload)
        begin = r._HASHES.size + struct.calcsize("<Q") * count
        self._hashes = payload[:begin]
        self._first, self._last = records[0].at, records[-1].at
        self.rows: list[Any] = msgspec.msgpack.decode(zlib.decompress(payload[begin:]))

    def write(self, rows: Any, path: Path) -> None:
        """A file with these rows and right checksums."""
        body = msgspec.msgpack.encode(rows)
        payload = self._hashes + zlib.compress(body, 1)
        head = r._CHUNK.pack(
            r._MARK, 1, len(rows) if isinstance(rows, list) else 1, self._first, self._last,
            len(payload), len(body), zlib.crc32(payload),
        )  # fmt: skip
        path.write_bytes(r.HEADER + head + payload)
