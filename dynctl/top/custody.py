"""Where a worker's topology came from, link by link, as far as somebody can tell from here.

A registered card tells its own part: card, taint, router. What comes before it (node, pod, file)
only a cluster knows, which is asked when a person opens one worker, and never unasked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dynctl.base.options import GlobalOptions
from dynctl.documents.verify import LINK_NAMES, Cell, CellState, CustodyRow
from dynctl.documents.workers import WorkerRow
from router_core import TOPOLOGY_PREFIX

NO_CLUSTER: Final = "no cluster was named"
NOT_IN_CLUSTER: Final = "the cluster has no pod of that name"

ReadChain = Callable[[WorkerRow], CustodyRow]
"""Asks the cluster, beside the event loop. Raises DynctlError."""


def transfer_domain(worker: WorkerRow) -> str | None:
    """The domain that the worker's chain is about: that of its policy, else its first one."""
    own = worker.runtime_config.get("kv_transfer_domain")
    if isinstance(own, str):
        return own
    return "zone" if "zone" in worker.domains else next(iter(worker.domains), None)


def registered_chain(worker: WorkerRow, why: str = NO_CLUSTER) -> CustodyRow:
    """The links that a card tells. ``why``: why the ones before it are not known."""
    domain = transfer_domain(worker)
    unknown = Cell(CellState.UNKNOWN, why=why)
    value = worker.domains.get(domain) if domain is not None else None
    card = Cell(CellState.MISSING) if value is None else Cell(CellState.SAME, value)
    taint = _taint(worker, domain)
    if taint == value:
        cell = Cell(CellState.NONE) if taint is None else Cell(CellState.SAME, taint)
    else:
        cell = Cell(CellState.MISSING if taint is None else CellState.DIFFERS, taint)
    # Who tells of the worker is a router that has registered it with these taints.
    router = Cell(CellState.NONE) if taint is None else Cell(CellState.SAME, taint)
    cells = (unknown, unknown, unknown, card, cell, router)
    broken = (CellState.DIFFERS, CellState.MISSING)
    names = zip(LINK_NAMES, cells, strict=True)
    return CustodyRow(
        worker.name,
        "",
        "",
        "",
        worker.role,
        domain,
        *cells,
        first_break=next((name for name, one in names if one.state in broken), None),
    )


def cluster_chain(options: GlobalOptions) -> ReadChain:
    """Reads the chain of one worker in the cluster that the options name."""

    def read(worker: WorkerRow) -> CustodyRow:
        from dynctl.verify.run import VerifyOptions, verified

        report = verified(options, VerifyOptions(exec="none", logs="none"))
        found = next((row for row in report.chain if row.worker == worker.name), None)
        return registered_chain(worker, NOT_IN_CLUSTER) if found is None else found

    return read


def chain_reader(options: GlobalOptions) -> ReadChain:
    """The fullest chain that the options allow."""
    from dynctl.sources.dynamo.planes import backend

    named = backend(options)
    kubernetes = (options.kube_context, options.kubeconfig, options.namespace)
    if any(one is not None for one in kubernetes) or (named or ("",))[0] == "kubernetes":
        return cluster_chain(options)
    return registered_chain


def _taint(worker: WorkerRow, domain: str | None) -> str | None:
    start = f"{TOPOLOGY_PREFIX}{domain}="
    found = (taint for taint in worker.taints if domain and taint.startswith(start))
    return next((taint[len(start) :] for taint in found), None)
