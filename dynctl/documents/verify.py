"""The answer of `topology verify`: its checks, and the topology chain of every worker."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from dynctl.documents.codec import field_values
from dynctl.findings.report import SCHEMA, CheckResult, Report

LINK_NAMES: Final = ("node", "pod label", "file", "card", "taint", "router")
"""The links of a chain, in order."""


class CellState(StrEnum):
    """A link compared with the links before it.

    ``same``: it has the value of the nearest earlier link with a value, or is the first with a
    value. ``differs``: it has another value. ``missing``: it has no value, but the nearest known
    link before it has one, or no earlier link is known. ``none``: neither it nor the known link
    before it has a value. ``unknown``: it could not be read.
    """

    SAME = "same"
    DIFFERS = "differs"
    MISSING = "missing"
    NONE = "none"
    UNKNOWN = "unknown"


class ChainCell(msgspec.Struct, frozen=True):
    """One link of one worker. ``why``: why it is unknown, empty otherwise."""

    state: CellState
    value: str | None = None
    why: str = ""


class CustodyRow(msgspec.Struct, frozen=True):
    """One worker and its transfer domain, link by link.

    ``graph`` is ``namespace/name``; it and ``namespace`` are empty without Kubernetes.
    ``first_break``: the first link that differs or misses its value, one of LINK_NAMES.
    ``codes``: of the findings about this worker, first the one that names its first break.
    """

    worker: str
    namespace: str
    graph: str
    component: str
    role: str | None
    domain: str | None
    node: ChainCell
    label: ChainCell
    file: ChainCell
    card: ChainCell
    taint: ChainCell
    router: ChainCell
    first_break: str | None = None
    codes: list[str] = []

    @property
    def cells(self) -> dict[str, ChainCell]:
        """The links in their order."""
        each = (self.node, self.label, self.file, self.card, self.taint, self.router)
        return dict(zip(LINK_NAMES, each, strict=True))


class VerifyReport(Report, frozen=True):
    """A report with one row for every worker that has a transfer domain or a finding."""

    chain: list[CustodyRow] = msgspec.field(default_factory=list)
    kind: str = "VerifyReport"


class CheckLine(CheckResult, frozen=True, tag_field="kind", tag="Check"):
    """One check as a line of ``-o jsonl``."""


class CustodyLine(CustodyRow, frozen=True, tag_field="kind", tag="CustodyRow"):
    """One worker as a line of ``-o jsonl``."""


def report_lines(report: VerifyReport) -> Iterator[CheckLine | CustodyLine]:
    """The checks, then the workers."""
    for check in report.checks:
        yield CheckLine(**field_values(check))
    for row in report.chain:
        yield CustodyLine(**field_values(row))


class PlannedRequest(msgspec.Struct, frozen=True):
    """One kind of request that verify sends, and how often.

    ``request``: get, list, access review, exec, log, port-forward or http. ``namespace`` is empty
    for all. ``pods``: how many pods it enters; ``names`` are the first ones.
    """

    request: str
    what: str
    namespace: str
    count: int
    pods: int
    names: list[str]


class VerifyPlan(msgspec.Struct, frozen=True):
    """What verify would ask a cluster, before it does."""

    cluster: str
    requests: list[PlannedRequest]
    kind: str = "TopologyVerifyPlan"
    schema: int = SCHEMA
