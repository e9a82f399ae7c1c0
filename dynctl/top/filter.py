"""What the person typed behind ``/``: which rows stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from dynctl.documents.snapshot import stale_reason
from dynctl.documents.workers import WorkerRow

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Words that must all be in a row, and words that must not. Case does not matter.

    ``zone=zone-a decode !busy``: a word after ``!`` excludes; ``!`` alone turns all around.
    """

    text: str = ""
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    inverse: bool = False

    @classmethod
    def parse(cls, text: str) -> RowFilter:
        words = text.replace(",", " ").split()
        inverse = "!" in words
        unwanted = [word[1:].lower() for word in words if word.startswith("!") and word != "!"]
        wanted = [word.lower() for word in words if not word.startswith("!")]
        return cls(" ".join(words), tuple(wanted), tuple(unwanted), inverse)

    def __bool__(self) -> bool:
        return bool(self.wanted or self.unwanted)

    def keeps(self, said: str) -> bool:
        """Whether a row that says this stays; ``said`` is in lower case."""
        found = all(word in said for word in self.wanted)
        found = found and not any(word in said for word in self.unwanted)
        return found is not self.inverse

    def rows(self, rows: Iterable[Row], says: Callable[[Row], str]) -> list[Row]:
        """The rows that stay."""
        if not self:
            return list(rows)
        return [row for row in rows if self.keeps(says(row).lower())]


def worker_says(worker: WorkerRow, every_s: float | None = None) -> str:
    """All that a filter may look for in a worker."""
    state = "gone" if worker.status != "ready" else "busy" if worker.busy else "ready"
    stale = stale_reason(worker, every_s)
    parts = [
        worker.name,
        f"role={worker.role}",
        f"model={worker.model}",
        f"status={worker.status} {state}{' stale' if stale else ''}",
        *(f"{name}={value}" for name, value in worker.domains.items()),
        *worker.taints,
        f"{worker.worker_id:016x}",
        worker.endpoint or "",
        worker.reason or "",
        *(why for rank in worker.ranks for why in rank.busy_reasons),
    ]
    return " ".join(parts)
