"""The filter behind ``/``: which rows a panel shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from dynctl.documents.snapshot import stale_reason
from dynctl.documents.workers import WorkerRow

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Words that a row must contain, and words that it must not contain, in any case.

    ``zone=zone-a decode !busy``: ``!`` before a word excludes; ``!`` alone inverts the filter.
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

    def keeps(self, words: str) -> bool:
        """Whether a row with these words, in lower case, is shown."""
        found = all(word in words for word in self.wanted)
        found = found and not any(word in words for word in self.unwanted)
        return found is not self.inverse

    def rows(self, rows: Iterable[Row], words: Callable[[Row], str]) -> list[Row]:
        """The rows that the filter keeps."""
        if not self:
            return list(rows)
        return [row for row in rows if self.keeps(words(row).lower())]


def worker_words(worker: WorkerRow, every_s: float | None = None) -> str:
    """The words of a worker that a filter can match."""
    state = "busy" if worker.busy and worker.status == "ready" else ""
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
