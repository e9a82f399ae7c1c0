"""Errors of the frontend: OpenAI's body, with what dynctl adds under ``dynctl``.

Fields that are not set are not written.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.route_result import Constraint


class EngineAttempt(msgspec.Struct, frozen=True, gc=False):
    """One request to an engine. ``problem``: why it failed, empty where it did not."""

    worker: str
    stage: str
    problem: str = ""


class FilterCount(msgspec.Struct, frozen=True):
    """Ranks that entered a filter and ranks that it left."""

    filter: str
    entered: int
    left: int


class RefusedRank(msgspec.Struct, frozen=True):
    """One rank that a filter rejected. ``value`` is over or beside ``limit``."""

    worker: str
    worker_id: int
    dp_rank: int
    domains: dict[str, str]
    code: str
    value: str | int | float | None
    limit: str | int | float | None
    message: str


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What dynctl adds to an error.

    ``decision``: its id, for `dynctl why`. ``filter``: the filter that rejected the last rank;
    ``nearest``: the rejected rank that needs the smallest change. ``attempts``: the requests to
    engines that failed. ``policy_class`` of the router queue: ``current`` is at its ``limit``.
    """

    decision: str
    stage: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    filter: str | UnsetType | None = UNSET
    funnel: list[FilterCount] | UnsetType = UNSET
    constraints: list[Constraint] | UnsetType = UNSET
    rejected: list[RefusedRank] | UnsetType = UNSET
    nearest: RefusedRank | UnsetType | None = UNSET
    what_would_admit: str | UnsetType | None = UNSET
    retry_after_s: int | UnsetType | None = UNSET
    notes: list[str] | UnsetType = UNSET
    attempts: list[EngineAttempt] | UnsetType = UNSET
    policy_class: str | UnsetType = UNSET
    limit_kind: str | UnsetType = UNSET
    current: int | UnsetType = UNSET
    limit: int | UnsetType = UNSET


class ErrorRow(msgspec.Struct, frozen=True):
    """OpenAI's error object. ``param``: the field of the request that is wrong. ``served``: the
    endpoints that exist, where the requested one does not."""

    message: str
    type: str
    code: str | int
    param: str | UnsetType = UNSET
    dynctl: ErrorDetails | UnsetType = UNSET
    served: list[str] | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorRow


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an error of the Messages API; ``type`` is ``error``."""

    error: ErrorRow
