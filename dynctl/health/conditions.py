"""Named conditions: what is wrong with the fleet now, each with a stable code and since when."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

MAX_CONDITIONS = 512

POLICY_CONFLICT = "POLICY_CONFLICT"
TOKENIZER_DIFFERS = "TOKENIZER_DIFFERS"
NO_TOKENIZER = "NO_TOKENIZER"
BLOCK_SIZE_MISMATCH = "BLOCK_SIZE_MISMATCH"
EVENTS_LOST = "EVENTS_LOST"
ENGINE_RESTARTED = "ENGINE_RESTARTED"
WORKER_UNREACHABLE = "WORKER_UNREACHABLE"
WORKER_REJECTED = "WORKER_REJECTED"
TRANSFER_CROSSED = "TRANSFER_CROSSED"
WORKERS_FILE_INVALID = "WORKERS_FILE_INVALID"


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing an operator should know. ``subject`` is a worker's name, a model or a file.

    ``since`` and ``seen`` are wall-clock seconds of the first and the last report; ``count`` is
    how often it was reported.
    """

    code: str
    subject: str
    message: str
    since: float
    seen: float
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Conditions:
    """The conditions in force, one a (code, subject); the oldest leave when there are too many."""

    def __init__(self, wall: Callable[[], float], limit: int = MAX_CONDITIONS) -> None:
        self._wall = wall
        self._limit = limit
        self._held: dict[tuple[str, str], Condition] = {}

    def __iter__(self) -> Iterator[Condition]:
        return iter(tuple(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, code: str, subject: str) -> Condition | None:
        return self._held.get((code, subject))

    def set(self, code: str, subject: str, message: str) -> Condition | None:
        """Report a condition; returns it when it is new or says something else than before."""
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
        """It is over; returns what was in force."""
        return self._held.pop((code, subject), None)

    def forget(self, subject: str) -> None:
        """Drop everything about a subject that is gone."""
        for key in [key for key in self._held if key[1] == subject]:
            del self._held[key]
