"""The frontends of a live Dynamo: how they are reached, and what they export.

They are named, or those of the Kubernetes cluster. A command reads them once and fails if a named
one does not answer; in a cluster a frontend without an answer becomes a doubt. `top` polls them;
`check` reads all facts of each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dynctl.adapters.dynamo.planes import in_cluster, namespace
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.config import ConfigDocument
from dynctl.documents.doubts import Doubt, Varies, doubt
from dynctl.documents.fleet_load import FleetLoad
from dynctl.documents.models import ModelReadiness
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.health.facts import FrontendFacts, Unread
from dynctl.serving.dynamo.frontend_traffic import FrontendTraffic
from dynctl.settings.contexts.tokens import bearer_token
from dynctl.sources.client import FrontendClient
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.frontend_pods import (
    OUT_OF_REACH,
    Reached,
    cluster_ways,
    silence_texts,
)
from dynctl.sources.dynamo.router_state import unknown_thresholds
from dynctl.sources.http import async_client, read_response
from dynctl.sources.thresholds.replicas import set_on_all
from dynctl.wire.dynamo.frontend_metrics import (
    FrontendMetrics,
    read_frontend_metrics,
    read_request_totals,
)

#: Metrics are read at most this often, and waited for at most READ_S.
METRICS_S: Final = 1.0
READ_S: Final = 3.0
#: Limit of each response that `check` reads.
_CHECK_S: Final = 5.0
#: Thresholds change seldom and are read at most this often.
THRESHOLDS_S: Final = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FrontendReports:
    """What the frontends export. ``thresholds``: by model. ``doubts``: what is not read.

    ``ready``: model -> its readiness, for each frontend in ``metrics`` where it was read.
    """

    metrics: list[FrontendMetrics]
    thresholds: Mapping[str, Thresholds]
    doubts: tuple[Doubt, ...] = ()
    ready: tuple[Mapping[str, ModelReadiness], ...] = ()


@dataclass(frozen=True, slots=True)
class ReachedFrontends:
    """Frontends that can be reached. ``cluster``: how, in a cluster; None: they were named."""

    frontends: list[DynamoFrontend]
    cluster: Reached | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Their URLs, or the names of their pods."""
        if self.cluster is not None:
            return self.cluster.names
        return tuple(frontend.url for frontend in self.frontends)

    @property
    def groups(self) -> tuple[str, ...]:
        """The graph of each pod; empty texts where they were named."""
        if self.cluster is not None:
            return self.cluster.graphs
        return ("",) * len(self.frontends)

    @property
    def workers_reachable(self) -> bool:
        """Whether requests to workers, and their events, get through from here."""
        return self.cluster is None or self.cluster.direct

    def unread(self) -> tuple[str, ...]:
        """Sentences about frontends of the cluster that are not read."""
        if self.cluster is None:
            return ()
        if self.cluster.refused:
            return (f"the cluster's frontends are unknown: {self.cluster.refused}",)
        sentences = silence_texts(self.cluster.silent)
        if self.cluster.beyond:
            sentences.append(f"{self.cluster.beyond:,} more frontends of the cluster are not read")
        return tuple(sentences)

    def expect_all(self) -> None:
        """Raise Unreachable where a frontend of the cluster is not reached: a change must arrive
        at all of them."""
        if self.cluster is not None and self.cluster.silent:
            raise Unreachable(
                "; ".join(silence_texts(self.cluster.silent)),
                "start the kubelet of the node again, or delete the node",
            )

    def doubts(self) -> list[Doubt]:
        """What is unknown because frontends or workers cannot be reached."""
        doubts = [_load_unknown(why) for why in self.unread()]
        if not self.workers_reachable:
            varies = Varies(overlap=True)
            doubts.append(doubt("DYR0705", varies=varies, workers="all workers", why=OUT_OF_REACH))
        return doubts

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        """Set on every frontend, or on none: thresholds live in these processes."""
        self.expect_all()
        if not self.frontends:
            raise no_frontend()
        return set_on_all(self.frontends, model, values)

    def read(self, models: Sequence[str] = ()) -> FrontendReports:
        """Read load from every frontend, and thresholds from the first that answers.

        ``models``: whose readiness is read too. Raises Unreachable or TimedOut where a named one
        does not answer.
        """
        metrics: list[FrontendMetrics] = []
        doubts: list[Doubt] = []
        answering: list[DynamoFrontend] = []
        for name, frontend in zip(self.names, self.frontends, strict=True):
            try:
                metrics.append(frontend.metrics())
                answering.append(frontend)
            except Unreachable as error:
                if self.cluster is None:
                    raise
                problem = with_name(error.message, frontend.url, name).rstrip(".")
                doubts.append(_load_unknown(f"{problem}; its load is unknown"))
        thresholds: Mapping[str, Thresholds] = {}
        try:
            thresholds = answering[0].thresholds() if answering else {}
        except Unreachable as error:
            # Dynamo before 1.0 has no such path, and a gateway may not pass it on.
            doubts.append(unknown_thresholds(error.message.rstrip(".")))
        ready = tuple(_readiness(polled, models) for polled in answering)
        return FrontendReports(metrics, thresholds, tuple(doubts), ready)


def _readiness(frontend: DynamoFrontend, models: Sequence[str]) -> dict[str, ModelReadiness]:
    """The models whose readiness the frontend reports."""
    readiness = {}
    for model in models:
        with suppress(DynctlError):
            readiness[model] = frontend.ready(model)
    return readiness


def _load_unknown(why: str) -> Doubt:
    return doubt("DYR0710", varies=Varies(load="more"), why=why)


@contextmanager
def reached_frontends(options: GlobalOptions, urls: Sequence[str]) -> Iterator[ReachedFrontends]:
    """The frontends that were named; without any, those of the Kubernetes cluster.

    Raises UsageProblem or Unreachable.
    """
    if urls or not in_cluster(options):
        yield ReachedFrontends([DynamoFrontend(url, options.timeout) for url in urls])
        return
    with cluster_ways(options, namespace(options)) as cluster:
        frontends = [DynamoFrontend(url, options.timeout) for url in cluster.urls]
        yield ReachedFrontends(frontends, cluster)


def no_frontend() -> UsageProblem:
    return UsageProblem(
        "the frontends have the busy thresholds, and no frontend is set",
        "specify every replica: --frontend http://HOST:8000",
    )


def with_name(text: str, url: str, name: str) -> str:
    """``text`` with ``name`` in place of ``url``: the address of a port-forward is closed when
    users read the text."""
    return text.replace(url, name)


# -- polled frontends ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Polled:
    """One polled frontend. ``problem``: why the last reading of its metrics failed."""

    url: str
    name: str
    metrics: FrontendMetrics | None = None
    problem: str = ""
    thresholds: dict[str, Thresholds] | Unread = field(
        default_factory=lambda: Unread("not read yet")
    )


class PolledFrontends:
    """Frontends that are read again and again. ``timeout``: seconds for a reading of thresholds.

    ``names``: of ``urls``, for messages; empty: the URLs. A port-forward has another address each
    time.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        wall: Callable[[], float] = time.time,
        names: Sequence[str] = (),
    ) -> None:
        self._timeout = timeout
        self._wall = wall
        self._all = [_Polled(*names) for names in zip(urls, names or urls, strict=True)]
        self._client = async_client()
        self._metrics_at = 0.0
        self._thresholds_at = 0.0
        self.thresholds: dict[str, Thresholds] = {}
        #: The requests of their clients since the first reading.
        self.traffic = FrontendTraffic()

    async def close(self) -> None:
        await self._client.aclose()

    async def read(self) -> None:
        """Read what is due. Never raises: :meth:`metrics` has only frontends that answered."""
        now = self._wall()
        if self._all and abs(now - self._metrics_at) >= METRICS_S:
            self._metrics_at = now
            await asyncio.gather(*(self._read_metrics(polled) for polled in self._all))
        if self._all and abs(now - self._thresholds_at) >= THRESHOLDS_S:
            self._thresholds_at = now
            await asyncio.gather(*(self._read_thresholds(polled) for polled in self._all))
            read = [
                polled.thresholds
                for polled in self._all
                if not isinstance(polled.thresholds, Unread)
            ]
            self.thresholds = read[0] if read else {}

    def thresholds_changed(self) -> None:
        """Read the thresholds again at the next reading."""
        self._thresholds_at = 0.0

    def metrics(self) -> list[FrontendMetrics]:
        """Of the frontends that answered the last time."""
        return [
            polled.metrics
            for polled in self._all
            if polled.metrics is not None and not polled.problem
        ]

    def doubts(self) -> list[Doubt]:
        """The frontends that did not answer the last time: their load is unknown."""
        failed = [polled for polled in self._all if polled.problem]
        return [
            _load_unknown(f"{polled.name}: {polled.problem}; its load is unknown")
            for polled in failed
        ]

    @property
    def problem(self) -> str:
        """Why no frontend can be read; empty where one can."""
        failed = [f"{polled.name}: {polled.problem}" for polled in self._all if polled.problem]
        return "; ".join(failed) if len(failed) == len(self._all) else ""

    def facts(self) -> tuple[FrontendFacts, ...]:
        """The facts for the health checks."""
        return tuple(
            FrontendFacts(polled.name, Unread(polled.problem))
            if polled.problem
            else FrontendFacts(
                polled.name,
                "dynamo",
                version=Unread("not read"),
                models=Unread("not read"),
                metrics=polled.metrics or Unread("not read yet"),
                thresholds=polled.thresholds,
            )
            for polled in self._all
        )

    async def _read_metrics(self, polled: _Polled) -> None:
        limit = min(READ_S, self._timeout)
        try:
            status, body = await read_response(
                self._client, f"{polled.url}/metrics", DynamoFrontend.max_bytes, limit
            )
            if status != 200:
                polled.problem = f"/metrics answered {status}"
                return
            polled.metrics = read_frontend_metrics(body)
            self.traffic.take(polled.url, read_request_totals(body))
            polled.problem = ""
        except DynctlError as error:
            polled.problem = with_name(error.message, polled.url, polled.name)
        except WireError as error:
            polled.problem = str(error)
        finally:
            if polled.problem:
                self.traffic.lost(polled.url)

    async def _read_thresholds(self, polled: _Polled) -> None:
        frontend = DynamoFrontend(polled.url, min(READ_S, self._timeout))
        try:
            polled.thresholds = await asyncio.to_thread(frontend.thresholds)
        except DynctlError as error:
            polled.thresholds = Unread(error.message, error.hint)


# -- facts of one frontend -------------------------------------------------------------------------


def frontend_facts(url: str, options: GlobalOptions, models: tuple[str, ...]) -> FrontendFacts:
    """The facts of one frontend for `check`; each reading may fail on its own. ``models``: models
    whose readiness is read even if the frontend does not list them."""
    frontend = DynamoFrontend(url, min(options.timeout, _CHECK_S))
    try:
        kind = frontend.identify()
    except DynctlError as error:
        return FrontendFacts(frontend.url, Unread(error.message, error.hint))
    if kind == "dynctl":
        return _dynctl_facts(frontend.url, options)
    if kind == "other":
        return FrontendFacts(frontend.url, kind)
    served = _read(lambda: tuple(sorted(frontend.models())))
    metrics = _read(frontend.metrics)
    known = set(models) | set(() if isinstance(served, Unread) else served)
    if not isinstance(metrics, Unread):
        known |= {name for name, facts in metrics.models.items() if facts.ready is not None}
    return FrontendFacts(
        frontend.url,
        kind,
        version=_read(frontend.openapi_version),
        models=served,
        metrics=metrics,
        ready={model: _model_ready(frontend, model) for model in sorted(known)},
        thresholds=_read(frontend.thresholds),
    )


def _model_ready(frontend: DynamoFrontend, model: str) -> ModelReadiness | Unread:
    try:
        return frontend.ready(model)
    except UsageProblem as error:
        return ModelReadiness(model, False, reason=f"the model is unknown there; {error.hint}")
    except DynctlError as error:
        return Unread(error.message, error.hint)


def _dynctl_facts(url: str, options: GlobalOptions) -> FrontendFacts:
    client = FrontendClient(url, bearer_token(options), min(options.timeout, _CHECK_S))
    thresholds = _read(client.thresholds)
    if isinstance(thresholds, Unread):
        models: tuple[str, ...] | Unread = thresholds
    else:
        models = tuple(sorted(thresholds))
    config, fleet = _read(client.config), _read(client.fleet)
    return FrontendFacts(
        url,
        "dynctl",
        version=_read(client.version),
        mode=None if isinstance(config, Unread) else _mode(config),
        models=models,
        thresholds=thresholds,
        conditions=fleet if isinstance(fleet, Unread) else tuple(fleet.conditions),
        requires_domain=_requires_domain(config, fleet),
    )


def _requires_domain(config: ConfigDocument | Unread, fleet: FleetLoad | Unread) -> bool | None:
    """Whether the policy of a prefill worker, its own or the router's, requires a domain."""
    if isinstance(config, Unread) or isinstance(fleet, Unread) or fleet.workers is None:
        return None
    for row in fleet.workers:
        own = row.runtime_config
        policy = own if own.get("kv_transfer_domain") else config.values
        required = policy.get("kv_transfer_enforcement") in (None, "required")
        if row.role == "prefill" and policy.get("kv_transfer_domain") and required:
            return True
    return False


def _mode(document: ConfigDocument) -> str | None:
    mode = document.values.get("router_mode")
    return mode if isinstance(mode, str) else None


def _read(reading: Callable[[], _T]) -> _T | Unread:
    try:
        return reading()
    except DynctlError as error:
        return Unread(error.message, error.hint)
