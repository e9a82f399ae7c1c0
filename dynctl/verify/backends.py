"""Where a pod looks for others and registers: its discovery backend, as the pod itself tells."""

from __future__ import annotations

from typing import Final

from dynctl.verify.injection import engine
from dynctl.wire.kubernetes.names import DISCOVERY_BACKEND_LABEL
from dynctl.wire.kubernetes.objects import Pod

BACKEND_ENV: Final = "DYN_DISCOVERY_BACKEND"
KUBERNETES: Final = "kubernetes"


def backend_of(pod: Pod) -> str:
    """Its discovery backend, as its variable says, else its label; empty where neither tells."""
    main = engine(pod) or pod.main
    told = None if main is None else main.env.get(BACKEND_ENV)
    return (told or pod.labels.get(DISCOVERY_BACKEND_LABEL, "")).strip().lower()


def registered_elsewhere(pod: Pod) -> str:
    """Where to look for what it registers, if not in Kubernetes; else empty."""
    backend = backend_of(pod)
    return "" if backend in (KUBERNETES, "") else f"registered in {backend}: --discovery {backend}"
