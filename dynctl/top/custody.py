"""The chain of custody of one worker's topology.

A registered card shows the links card, taint and router. The links before it (node, pod, file)
come from the cluster, which is read only when a user opens a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dynctl.base.options import GlobalOptions
from dynctl.documents.verify import LINK_NAMES, CellState, ChainCell, CustodyRow
from dynctl.documents.workers import WorkerRow
from router_core import TOPOLOGY_PREFIX

NO_CLUSTER: Final = "no cluster specified"
NOT_IN_CLUSTER: Final = "the cluster has no pod with this name"

ReadChain = Callable[[WorkerRow], CustodyRow]
"""Reads the chain of a worker; runs in a thread. Raises DynctlError."""


def transfer_domain(worker: WorkerRow) -> str | None:
    """The domain of the worker's chain: the one of its policy, else zone, else its first."""
    own = worker.runtime_config.get("kv_transfer_domain")
    if isinstance(own, str):
        return own
    return "zone" if "zone" in worker.domains else next(iter(worker.domains), None)


def registered_chain(worker: WorkerRow, why: str = NO_CLUSTER) -> CustodyRow:
    """The chain as far as the card shows it. ``why``: why the links before it are unknown."""
    domain = transfer_domain(worker)
    unknown = ChainCell(CellState.UNKNOWN, why=why)
    value = worker.domains.get(domain) if domain is not None else None
    card = ChainCell(CellState.MISSING) if value is None else ChainCell(CellState.SAME, value)
    taint = _taint(worker, domain)
    if taint == value:
        cell = ChainCell(CellState.NONE) if taint is None else ChainCell(CellState.SAME, taint)
    else:
        cell = ChainCell(CellState.MISSING if taint is None else CellState.DIFFERS, taint)
    # The source of the worker is a router that registered it with these taints.
    router = ChainCell(CellState.NONE) if taint is None else ChainCell(CellState.SAME, taint)
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
    """A reader of chains in the cluster that the options specify."""

    def read(worker: WorkerRow) -> CustodyRow:
        from dynctl.verify.verification import VerifyOptions, run_verify

        report = run_verify(options, VerifyOptions(exec="none", logs="none"))
        found = next((row for row in report.chain if row.worker == worker.name), None)
        return registered_chain(worker, NOT_IN_CLUSTER) if found is None else found

    return read


def chain_reader(options: GlobalOptions) -> ReadChain:
    """The reader of the most complete chain that the options allow."""
    return cluster_chain(options) if names_cluster(options) else registered_chain


def names_cluster(options: GlobalOptions) -> bool:
    """Whether the options name a Kubernetes cluster."""
    from dynctl.adapters.dynamo.planes import in_cluster

    kubernetes = (options.kube_context, options.kubeconfig, options.namespace)
    return any(one is not None for one in kubernetes) or in_cluster(options)


def _taint(worker: WorkerRow, domain: str | None) -> str | None:
    start = f"{TOPOLOGY_PREFIX}{domain}="
    found = (taint for taint in worker.taints if domain and taint.startswith(start))
    return next((taint[len(start) :] for taint in found), None)
