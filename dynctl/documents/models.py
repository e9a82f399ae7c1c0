"""Models of a frontend and their readiness: answers in Dynamo's format.

dynctl's frontend writes them, and dynctl reads them from Dynamo's frontends.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.fleet_load import Condition


class ModelRow(msgspec.Struct, frozen=True):
    """One model. ``parent``: the base model of an adapter. ``context_window``: 0 where unknown.

    ``max_model_len`` is vLLM's name for the same number of tokens; absent where unknown.
    """

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "dynctl"
    context_window: int | None = 0
    parent: str | UnsetType | None = UNSET
    max_model_len: int | UnsetType | None = UNSET


class ModelList(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/models``."""

    object: str = "list"
    data: list[ModelRow] = []


class WorkerTypeReadiness(msgspec.Struct, frozen=True):
    """The workers of one type. ``needs``: alternatives of other worker types that it needs."""

    workers: int
    needs: list[list[str]] = []


class NamespaceReadiness(msgspec.Struct, frozen=True):
    """The workers of one namespace by type."""

    ready: bool
    worker_types: dict[str, WorkerTypeReadiness] = {}
    present: list[str] = []
    missing_worker_types: list[str] = []
    reason: str | UnsetType | None = UNSET


class ModelReadiness(msgspec.Struct, frozen=True):
    """Whether a model can be served: ``GET /v1/models/{model}/ready``.

    Workers that the frontend rejects (their router config differs) are not counted.
    """

    model: str
    ready: bool
    namespaces: dict[str, NamespaceReadiness] = {}
    reason: str | UnsetType | None = UNSET

    @property
    def missing(self) -> list[str]:
        """The missing worker types of all namespaces."""
        return sorted(
            {
                kind
                for namespace in self.namespaces.values()
                for kind in namespace.missing_worker_types
            }
        )

    def workers(self, namespace: str, kind: str) -> int:
        """The number of workers of one type in one namespace."""
        readiness = self.namespaces.get(namespace)
        row = None if readiness is None else readiness.worker_types.get(kind)
        return 0 if row is None else row.workers


class Readiness(msgspec.Struct, frozen=True):
    """The answer of ``GET /ready``: ready when at least one model can be served."""

    ready: bool
    models: list[ModelReadiness]
    reason: str | UnsetType = UNSET


class EngineHealth(msgspec.Struct, frozen=True):
    """One engine. ``problem``: why it cannot serve requests, None where it can."""

    name: str
    endpoint: str
    problem: str | None


class Health(msgspec.Struct, frozen=True):
    """The answer of ``GET /health``.

    ``status``: healthy, degraded (a condition holds), unhealthy (no model can be served), or
    draining.
    """

    status: str
    instances: list[EngineHealth]
    conditions: list[Condition]
