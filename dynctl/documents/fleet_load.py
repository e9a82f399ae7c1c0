"""``GET /v1/fleet``: the load of a fleet, small enough to be read every second.

Cards change seldom and are most of a worker's row, so they are sent once: the answer names its set
of cards, and a client that sends that name with its next request receives the load alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dynctl.base.decode_errors import WireError
from dynctl.documents.audit import AuditRow
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.workers import RankRow, WorkerRow

SCHEMA = 1


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of one :class:`WorkerRow` that change often."""

    worker_id: int
    ranks: list[RankRow] = []
    status: str = "ready"
    reason: str | None = None
    busy: bool = False


class Transfer(msgspec.Struct, frozen=True):
    """KV cache hand-offs from one value of a domain, counted since the source started.

    ``local`` stayed in the value, ``crossing`` went to another value.
    """

    domain: str
    value: str
    local: int = 0
    crossing: int = 0


class Traffic(msgspec.Struct, frozen=True):
    """What clients of a process got, counted since it started.

    ``requests`` ended; of these ``refused`` by the router (no worker, all busy, queue full) and
    ``errors`` failed in another way; ``clients`` were cancelled by the client or not valid, and no
    share counts them. ``ttft``: requests by their time to the first token, one number for each
    upper edge of ``ttft_edges`` (seconds) and one for all above. ``prompt_tokens`` were placed, and
    ``cached_tokens`` of them were expected in the caches of the chosen workers.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    ttft_edges: tuple[float, ...] = ()
    ttft: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    clients: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Both together; of different edges, those of the first count."""
        ttft = self.ttft or other.ttft
        if self.ttft and other.ttft and other.ttft_edges == self.ttft_edges:
            ttft = tuple(a + b for a, b in zip(self.ttft, other.ttft, strict=True))
        return Traffic(
            self.requests + other.requests,
            self.errors + other.errors,
            self.refused + other.refused,
            self.ttft_edges or other.ttft_edges,
            ttft,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.clients + other.clients,
        )


#: Values of ``error_type`` of requests that the router refused, and of those that the client ended
#: or got wrong.
_REFUSED: Final = frozenset({"overload", "unavailable"})
_CLIENTS: Final = frozenset({"cancelled", "validation", "not_found"})


def ended_requests(ended: Mapping[str, float]) -> Traffic:
    """Requests by ``error_type`` (empty for a success), as every share here counts them."""
    number = sum(ended.values())
    refused = sum(count for kind, count in ended.items() if kind in _REFUSED)
    clients = sum(count for kind, count in ended.items() if kind in _CLIENTS)
    errors = number - ended.get("", 0.0) - refused - clients
    return Traffic(int(number), int(errors), int(refused), clients=int(clients))


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests of some seconds: ended per second, the time to the first token (seconds; median and
    99th percentile, interpolated in its bucket), and shares 0..1 of cached prompt tokens, failed
    and refused requests. None where there were none."""

    per_second: float
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    hits: float | None = None
    errors: float | None = None
    refused: float | None = None


def rates_between(before: Traffic, now: Traffic, seconds: float) -> Rates:
    """The rates of the requests between two readings, ``seconds`` apart."""
    ended = now.requests - before.requests
    judged = ended - (now.clients - before.clients)
    times = now.ttft
    if before.ttft and before.ttft_edges == now.ttft_edges:
        times = tuple(a - b for a, b in zip(now.ttft, before.ttft, strict=True))
    return Rates(
        ended / seconds,
        quantile(now.ttft_edges, times, 0.5),
        quantile(now.ttft_edges, times, 0.99),
        _share(now.cached_tokens - before.cached_tokens, now.prompt_tokens - before.prompt_tokens),
        _share(now.errors - before.errors, judged),
        _share(now.refused - before.refused, judged),
    )


def _share(part: int, whole: int) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


def quantile(edges: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` (0..1) of the observations are; ``counts``: one for each
    upper edge and one above. Interpolated in its bucket, as PromQL's ``histogram_quantile`` does.
    None without observations; above the last edge, that edge."""
    total = sum(counts)
    if total <= 0 or not edges:
        return None
    wanted, below = share * total, 0.0
    for place, count in enumerate(counts[: len(edges)]):
        if count and below + count >= wanted:
            low = edges[place - 1] if place else 0.0
            return low + (edges[place] - low) * (wanted - below) / count
        below += count
    return edges[-1]


class Condition(msgspec.Struct, frozen=True):
    """One named condition in force. ``subject`` is a worker's name, a model or a file.

    ``since`` and ``seen`` are wall-clock seconds of the first and the last report; ``count`` is
    the number of reports.
    """

    code: str
    subject: str
    message: str
    since: float
    seen: float
    count: int = 1


class LastTest(msgspec.Struct, frozen=True):
    """The result of a whole `dynctl test` of a frontend: its checks by their state.

    ``at``: when the frontend got it, in seconds of its wall clock.
    """

    passed: Annotated[int, Meta(ge=0)]
    warnings: Annotated[int, Meta(ge=0)]
    failed: Annotated[int, Meta(ge=0)]
    skipped: Annotated[int, Meta(ge=0)]
    model: Annotated[str, Meta(max_length=256)]
    at: float = 0.0


class FleetLoad(msgspec.Struct, frozen=True):
    """One reading of a router. ``at``: its wall clock, in seconds.

    ``cards`` names the set of cards; ``workers`` are their rows without ranks, None where the
    request named the same set. ``probe_s``: seconds between two readings of an engine's load,
    None where workers report theirs when it changes.
    ``in_flight``: requests of the frontend that have not ended. ``recorded``: decisions since it
    started, which is also the value of ``GET /v1/decisions?since=`` for the next reading.
    ``replicas``: the other routers whose load counts here too; absent without replica sync.
    ``audit``: what was predicted for each worker and what happened; ``compares`` and ``skipped``
    as in :class:`AuditReport`. ``queue``: requests that wait in the router queue; absent where it
    is off. ``process``: another one after a restart, from which all counts begin at 0 again.
    ``tested``: the last test that was reported to the process; absent without one.
    """

    at: float
    version: str
    cards: str
    loads: list[WorkerLoad]
    workers: list[WorkerRow] | None = None
    conditions: list[Condition] = []
    transfers: list[Transfer] = []
    thresholds: dict[str, dict[str, float | int | None]] = {}
    probe_s: float | None = 1.0
    in_flight: int = 0
    recorded: int = 0
    queue: int | UnsetType = UNSET
    audit: list[AuditRow] = []
    compares: str = "reuse"
    skipped: dict[str, int] = {}
    replicas: list[ReplicaRow] | UnsetType = UNSET
    #: The requests of the process's own clients; absent where it has none.
    traffic: Traffic | UnsetType = UNSET
    process: str = ""
    tested: LastTest | UnsetType = UNSET
    kind: str = "FleetLoad"
    schema: int = SCHEMA


def joined_rows(cards: Sequence[WorkerRow], loads: Sequence[WorkerLoad]) -> list[WorkerRow]:
    """Cards with their load. Both must have the same workers in the same order, else WireError.

    A worker without ranks in ``loads`` has none in the result.
    """
    if len(cards) != len(loads):
        raise WireError("fleet load", f"{len(loads)} loads for {len(cards)} workers")
    rows = []
    for card, load in zip(cards, loads, strict=True):
        if card.worker_id != load.worker_id:
            raise WireError(
                "fleet load", f"the load of {load.worker_id} where {card.worker_id} was expected"
            )
        rows.append(
            msgspec.structs.replace(
                card, status=load.status, reason=load.reason, busy=load.busy, ranks=load.ranks
            )
        )
    return rows
