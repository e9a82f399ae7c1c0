"""``-l zone=zone-a,role!=decode``: which workers a list shows, as kubectl's label selectors."""

from __future__ import annotations

from dataclasses import dataclass

from dynctl.base.errors import UsageProblem
from dynctl.documents.workers import WorkerRow

_FIELDS = ("name", "role", "model", "status")


@dataclass(frozen=True, slots=True)
class Selector:
    """``(key, value, wanted)``: every one must hold; a missing domain equals no value."""

    terms: tuple[tuple[str, str, bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Raises UsageProblem naming the term."""
        terms = []
        for term in filter(None, (part.strip() for part in text.split(","))):
            key, separator, value = term.partition("=")
            excluded = key.endswith("!")
            key = key.rstrip("!").strip()
            if not separator or not key or not value.strip("= "):
                raise UsageProblem(
                    f"--selector {term}: expected KEY=VALUE or KEY!=VALUE",
                    "for example: -l zone=zone-a,role=decode",
                )
            terms.append((key, value.strip("= "), not excluded))
        return cls(tuple(terms))

    def matches(self, row: WorkerRow) -> bool:
        return all((_value(row, key) == value) is wanted for key, value, wanted in self.terms)


def _value(row: WorkerRow, key: str) -> str | None:
    if key in row.domains:
        return row.domains[key]
    return str(getattr(row, key)) if key in _FIELDS else None
