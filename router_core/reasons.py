"""Why a worker or a request was not taken: values that filters and the router queue give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a filter rejected a rank: the rule's ``code`` and the two values compared.

    Codes of the built-in filters are stable: other tools match on them.
    """

    code: str
    value: str | int | float | None
    limit: str | int | float | None
    message: str


LimitKind = Literal["requests", "raw_isl_tokens", "cached_tokens", "total_requests", "wait_seconds"]


@dataclass(frozen=True, slots=True)
class QueueFull:
    """Why a request may not wait (any more): ``current`` of its class is at its ``limit``."""

    policy_class: str
    limit_kind: LimitKind
    current: int
    limit: int

    @property
    def message(self) -> str:
        """One sentence."""
        if self.limit_kind == "wait_seconds":
            return (
                f"waited {self.current:,} s in the class {self.policy_class} of the router queue, "
                f"the limit is {self.limit:,} s"
            )
        single = self.current == 1
        what = {
            "raw_isl_tokens": "prompt token" if single else "prompt tokens",
            "cached_tokens": "cached prompt token" if single else "cached prompt tokens",
        }.get(self.limit_kind, "request" if single else "requests")
        where = f"in the class {self.policy_class} of the router queue, its limit"
        if self.limit_kind == "total_requests":
            where = "in the router queue, the limit"
        return f"{self.current:,} {what} {'waits' if single else 'wait'} {where} is {self.limit:,}"
