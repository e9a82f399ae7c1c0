"""The rows of the chain of custody: one row for each worker, with the value at every link. Pure.

The checks report faults; a row shows where a worker's chain breaks first, so that a consequence of
a fault is not mistaken for a second fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dynctl.documents.verify import LINK_NAMES, CellState, ChainCell, CustodyRow
from dynctl.findings.report import Report
from dynctl.verify.chain import WorkerChain
from dynctl.verify.join import JoinedFacts

_NODE: Final = "node"
_CARD: Final = "card"
_NAMING: Final[Mapping[str, tuple[str, ...]]] = {
    _NODE: ("DYT0205", "DYT02"),
    "pod label": ("DYT0403", "DYT0404", "DYT04"),
    "file": ("DYT0503", "DYT0504", "DYT05"),
    # A worker that is not registered has no card either.
    _CARD: ("DYT0802", "DYT0801", "DYT07", "DYT06", "DYT08"),
    "taint": ("DYT0804", "DYT08"),
    "router": ("DYT0904", "DYT09"),
}
"""Link -> prefixes of the codes that explain a break there, the most exact first."""


def custody_rows(joined: JoinedFacts, report: Report) -> list[CustodyRow]:
    """One row for each worker; workers without a policy only if they have a finding."""
    codes = _codes_by_subject(report)
    rows = (_row(worker, codes) for worker in joined.workers)
    return [row for row in rows if row.domain is not None or row.codes]


def _row(worker: WorkerChain, codes: Mapping[str, Sequence[str]]) -> CustodyRow:
    policy, chain = worker.policy, worker.chain
    if chain is not None:
        cells = [
            ChainCell(compared.state, compared.value, chain[compared.link].unknown)
            for compared in chain.compare_links()
        ]
    else:
        why = "no KV transfer policy" if policy is None else "the label of its domain is unknown"
        cells = [ChainCell(CellState.UNKNOWN, why=why)] * len(LINK_NAMES)
    broken = (CellState.DIFFERS, CellState.MISSING)
    first = next((n for n, c in zip(LINK_NAMES, cells, strict=True) if c.state in broken), None)
    node, label, file, card, taint, router = cells
    return CustodyRow(
        worker.name,
        worker.pod.namespace if worker.pod is not None else "",
        worker.graph,
        worker.component,
        worker.role,
        None if policy is None else policy.domain,
        node,
        label,
        file,
        card,
        taint,
        router,
        first_break=first,
        codes=_codes(worker, node, first, codes),
    )


def _codes(
    worker: WorkerChain, node: ChainCell, first: str | None, by_subject: Mapping[str, Sequence[str]]
) -> list[str]:
    codes = [*by_subject.get(worker.subject, ())]
    if worker.pod is not None and (first == _NODE or node.value == ""):
        # Such a fault is a finding about the node, for all its pods.
        codes += by_subject.get(f"Node {worker.pod.node}", ())
    if worker.pod is not None and first == _CARD:
        # A worker without permission to register has no card: a finding about its account.
        account = worker.pod.service_account or "default"
        codes += by_subject.get(f"ServiceAccount {account}.{worker.pod.namespace}", ())
    naming = () if first is None else _NAMING[first]

    def rank(code: str) -> int:
        starts = (place for place, start in enumerate(naming) if code.startswith(start))
        return next(starts, len(naming))

    return sorted(dict.fromkeys(codes), key=rank)


def _codes_by_subject(report: Report) -> Mapping[str, Sequence[str]]:
    """``Kind name.namespace`` -> codes, in the order of the checks.

    Further words of a subject (a container, a file) belong to the same object.
    """
    codes: dict[str, list[str]] = defaultdict(list)
    for check in report.checks:
        for subject in _objects(finding.subject for finding in check.findings):
            codes[subject].append(check.code)
    return codes


def _objects(subjects: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(" ".join(subject.split()[:2]).rstrip(":,") for subject in subjects)
