"""The named conditions of a fleet: problems in force, each with a stable code."""

from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from dynctl.documents.fleet_load import Condition

MAX_CONDITIONS = 640

POLICY_CONFLICT = "POLICY_CONFLICT"
TOKENIZER_DIFFERS = "TOKENIZER_DIFFERS"
NO_TOKENIZER = "NO_TOKENIZER"
BLOCK_SIZE_MISMATCH = "BLOCK_SIZE_MISMATCH"
CAPACITY_UNKNOWN = "CAPACITY_UNKNOWN"
DISCOVERY_INTERRUPTED = "DISCOVERY_INTERRUPTED"
EVENTS_LOST = "EVENTS_LOST"
EVENTS_OVERFLOW = "EVENTS_OVERFLOW"
ENGINE_RESTARTED = "ENGINE_RESTARTED"
ENGINE_TOKENIZERS_DIFFER = "ENGINE_TOKENIZERS_DIFFER"
WORKER_UNREACHABLE = "WORKER_UNREACHABLE"
WORKER_CORDONED = "WORKER_CORDONED"
WORKER_REJECTED = "WORKER_REJECTED"
TRACES_NOT_EXPORTED = "TRACES_NOT_EXPORTED"
TRANSFER_CROSSED = "TRANSFER_CROSSED"
WORKERS_FILE_INVALID = "WORKERS_FILE_INVALID"
BACKGROUND_TASK_FAILED = "BACKGROUND_TASK_FAILED"
LEVEL_NOT_PUBLISHED = "LEVEL_NOT_PUBLISHED"
LOAD_OVERDUE = "LOAD_OVERDUE"
MODEL_FILES_INVALID = "MODEL_FILES_INVALID"
MODEL_FILE_OVER_LIMIT = "MODEL_FILE_OVER_LIMIT"
MODEL_NOT_SERVED = "MODEL_NOT_SERVED"
NO_WORKERS = "NO_WORKERS"
REPLICA_BEHIND = "REPLICA_BEHIND"
REPLICA_OVER_LIMIT = "REPLICA_OVER_LIMIT"
REPLICA_SILENT = "REPLICA_SILENT"
REPLICA_WORKERS_DIFFER = "REPLICA_WORKERS_DIFFER"
SPEC_DIFFERS_FROM_ENGINE = "SPEC_DIFFERS_FROM_ENGINE"
INDEX_OVER_LIMIT = "INDEX_OVER_LIMIT"
INDEXER_LOST = "INDEXER_LOST"
STREAM_DISCONNECTED = "STREAM_DISCONNECTED"
TOO_FEW_WELL = "TOO_FEW_WELL"
WORKER_EJECTED = "WORKER_EJECTED"
WORKERS_BUSY = "WORKERS_BUSY"
ROUTER_LOST = "ROUTER_LOST"
SNAPSHOT_NOT_WRITTEN = "SNAPSHOT_NOT_WRITTEN"
SNAPSHOT_REFUSED = "SNAPSHOT_REFUSED"
PROCESS_RESTARTED = "PROCESS_RESTARTED"
REGISTRATION_INTERRUPTED = "REGISTRATION_INTERRUPTED"
REQUEST_PLANE_LOST = "REQUEST_PLANE_LOST"
ENGINE_ALREADY_ATTACHED = "ENGINE_ALREADY_ATTACHED"
ENGINE_NOT_READY = "ENGINE_NOT_READY"
LEASE_LOST = "LEASE_LOST"
MODEL_FILES_DIFFER = "MODEL_FILES_DIFFER"

#: Conditions that make the index or the load of a worker (or of a model) doubtful.
INDEX_OR_LOAD: Final = frozenset(
    {
        "BLOCKS_NOT_LISTED",
        BLOCK_SIZE_MISMATCH,
        ENGINE_TOKENIZERS_DIFFER,
        ENGINE_RESTARTED,
        EVENTS_LOST,
        EVENTS_OVERFLOW,
        "EXTRA_KEYS_NOT_MODELLED",
        "FOREIGN_PUBLISHER",
        "GROUP_IGNORED",
        INDEX_OVER_LIMIT,
        LOAD_OVERDUE,
        "MALFORMED_BATCH",
        "MALFORMED_MESSAGE",
        "REPLAY_UNAVAILABLE",
        STREAM_DISCONNECTED,
        "TIER_NOT_DESCRIBED",
        TOKENIZER_DIFFERS,
        "TOKEN_IDS_TOO_SHORT",
        "UNKNOWN_ADAPTER",
        "UNKNOWN_EVENT",
        "UNKNOWN_MEDIUM",
    }
)
#: Those that name what the index does not model; it is complete otherwise.
NOT_MODELLED: Final = frozenset(
    {
        "BLOCKS_NOT_LISTED",
        "EXTRA_KEYS_NOT_MODELLED",
        "GROUP_IGNORED",
        "TIER_NOT_DESCRIBED",
        "UNKNOWN_ADAPTER",
        "UNKNOWN_EVENT",
        "UNKNOWN_MEDIUM",
    }
)
INCIDENTS: Final = frozenset(
    {ENGINE_RESTARTED, MODEL_FILE_OVER_LIMIT, PROCESS_RESTARTED, TRANSFER_CROSSED}
)
"""Conditions without an end of their own: they end INCIDENT_S after their last report."""
INCIDENT_S: Final = 600.0

#: Lines about one condition that a log has at once, and seconds until it has one more.
LINES: Final = 20
LINE_S: Final = 10.0


class Conditions:
    """The conditions in force, one per (code, subject); above ``limit`` the oldest are dropped."""

    def __init__(self, wall: Callable[[], float], limit: int = MAX_CONDITIONS) -> None:
        self._wall = wall
        self._limit = limit
        self._held: dict[tuple[str, str], Condition] = {}
        #: Lines that a log may still have, and when that was counted. Kept when a condition ends.
        self._lines: dict[tuple[str, str], tuple[float, float]] = {}

    def __iter__(self) -> Iterator[Condition]:
        return iter(tuple(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, code: str, subject: str) -> Condition | None:
        return self._held.get((code, subject))

    def set(self, code: str, subject: str, message: str) -> Condition | None:
        """Report a condition; returns it if it is new or its message changed."""
        now = self._wall()
        known = self._held.get((code, subject))
        if known is not None:
            later = replace(known, message=message, seen=now, count=known.count + 1)
            self._held[code, subject] = later
            return later if message != known.message else None
        while len(self._held) >= self._limit:
            del self._held[next(iter(self._held))]
        fresh = self._held[code, subject] = Condition(code, subject, message, now, now)
        return fresh

    def clear(self, code: str, subject: str) -> Condition | None:
        """End a condition; returns it, None if it was not in force."""
        return self._held.pop((code, subject), None)

    def forget(self, subject: str) -> None:
        """Drop every condition of a removed subject."""
        for key in [key for key in self._held if key[1] == subject]:
            del self._held[key]

    def may_log(self, code: str, subject: str) -> bool:
        """Whether a log may have one more line about a condition, which is counted.

        A peer that causes another message with each of its packets, or that lets a condition end
        and begin all the time, gets :data:`LINES` lines at once and then one each :data:`LINE_S`.
        """
        key, now = (code, subject), self._wall()
        left, since = self._lines.pop(key, (float(LINES), now))
        # A clock that was set back gives nothing, and is followed.
        left = min(float(LINES), left + max(0.0, now - since) / LINE_S)
        while len(self._lines) >= self._limit:
            del self._lines[next(iter(self._lines))]
        self._lines[key] = (left - 1 if left >= 1 else left, now)
        return left >= 1
