"""The discovery backends of a live Dynamo, as options and variables name them.

A new one is a row here and a module of its own in ``dynctl.adapters``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CLUSTER: Final = frozenset({"namespace", "all_namespaces", "kube_context", "kubeconfig", "reach"})


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend. ``module`` in ``dynctl.adapters`` has its `BACKEND`, a `BackendPort`.

    ``place`` is the global option with its address and ``variable`` Dynamo's variable for it, where
    it has one; either names the backend. ``reads``: other global options that only this backend
    reads. ``cluster``: it is a Kubernetes cluster, which has the frontends too.
    """

    name: str
    module: str
    place: str | None = None
    variable: str | None = None
    reads: frozenset[str] = frozenset()
    cluster: bool = False

    @property
    def flag(self) -> str:
        """The option of ``place``."""
        return f"--{(self.place or '').replace('_', '-')}"


BACKENDS: Final = {
    backend.name: backend
    for backend in (
        Backend("file", "file", place="file_kv", variable="DYN_FILE_KV"),
        Backend("etcd", "etcd.backend", place="etcd_endpoints", variable="ETCD_ENDPOINTS"),
        Backend("kubernetes", "kubernetes.backend", reads=CLUSTER, cluster=True),
    )
}
#: The memory of a process that serves.
MEMORY: Final = Backend("mem", "memory")
PLACES: Final = tuple(backend.place for backend in BACKENDS.values() if backend.place)
VARIABLES: Final = (
    "DYN_DISCOVERY_BACKEND",
    *(backend.variable for backend in BACKENDS.values() if backend.variable),
)
