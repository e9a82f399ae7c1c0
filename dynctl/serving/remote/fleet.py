"""The fleet of a frontend whose router is another process: a copy of the router's.

While the router responds it alone judges the engines, by its probes and by the failures that
frontends report. Without it this process probes them and ejects those that fail its requests.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial

from dynctl.documents.frontends import Answered, Failed, FleetCard, FleetCards
from dynctl.health import conditions as codes
from dynctl.serving.engines.ejection import Ejection
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.fleet import Fleet, Member
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec
from dynctl.serving.remote.link import RouterLink
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.service import RoutingService
from router_core import Worker, WorkerError

_log = logging.getLogger(__name__)

SOURCE = "router"


class MirroredFleet(Fleet):
    """The workers that a `RouterLink` reports."""

    def __init__(
        self,
        service: RoutingService,
        upstream: Upstream,
        config: FrontendConfig,
        link: RouterLink,
    ) -> None:
        super().__init__(service, upstream, config)
        self._link = link

    async def take(self, fleet: FleetCards, joined: bool) -> None:
        """Add, change and remove workers so that they are those of the router. ``joined``: what
        this process found out by itself meanwhile counts no more."""
        names: set[str] = set()
        for card in fleet.cards[: self._config.limits.workers]:
            try:
                worker = Worker.from_dict(card.worker)
            except WorkerError as error:
                _log.warning("a worker of the router is not valid: %s", error)
                continue
            if worker.endpoint is None:
                continue
            names.add(worker.name)
            await self._take(card, replace(worker, kv_events=False), joined)
        for member in self:
            if member.spec.name not in names:
                await self.remove(member.spec.name)

    async def _take(self, card: FleetCard, worker: Worker, joined: bool) -> None:
        endpoint = worker.endpoint or ""
        member = self._members.get(worker.name)
        if member is not None and (
            member.spec.url != endpoint or member.spec.worker_id != worker.worker_id
        ):
            await self.remove(worker.name)
            member = None
        if member is None:
            spec = WorkerSpec(
                endpoint, worker.name, forward_authorization=card.forward_authorization
            )
            if spec.worker_id != worker.worker_id:
                _log.warning("worker %s of the router has another id than its name", worker.name)
                return
            member = Member(spec, SOURCE, ejection=Ejection(self._config.health.ejection))
            member.probed = joined = True
            self._members[worker.name] = self._by_id[worker.worker_id] = member
            member.task = self._service.tasks.start(
                "health probe", partial(self._watch, member), worker.name
            )
        if member.worker != worker:
            applied = self._service.membership.upsert(worker)
            if not applied.ok:
                _log.warning("worker %s of the router: %s", worker.name, applied.message)
                return
            member.worker = worker
            self._regroup(member, worker)
        self._upstream.authorize(endpoint, self._key(card))
        member.bootstrap = card.bootstrap
        member.facts = replace(member.facts, kind=card.kind)
        self._note_kind(member)
        if joined:
            member.ejection = Ejection(self._config.health.ejection)
            self._service.conditions.forget(worker.name)
        member.problem, member.doubt = card.reason, False
        member.failures, member.gone = 0, False
        self._show(member)

    def _key(self, card: FleetCard) -> str | None:
        """The key of the engine. Only the router of the same command may name a variable: another
        one could have the environment of this process sent to any address."""
        if self._config.metrics_url is not None and card.key_env is not None:
            return os.environ.get(card.key_env)
        return self._config.engine_api_key if card.given else None

    # -- while the router responds, it judges ------------------------------------------------

    def dispatched(self, member: Member) -> None:
        if not self._link.up:
            super().dispatched(member)

    def answered(self, worker_id: int) -> None:
        if self._link.up:
            self._link.report(Answered(worker_id))
        else:
            super().answered(worker_id)

    def report_failure(
        self, worker_id: int, failure: UpstreamFailure, sent_at: float | None = None
    ) -> None:
        if not self._link.up:
            super().report_failure(worker_id, failure, sent_at)
            return
        member = self.by_id(worker_id)
        if member is None or not failure.of_engine:
            return
        self._service.engine_failures[member.spec.name, failure.kind] += 1
        ago_s = None if sent_at is None else self._service.clock() - sent_at
        self._link.report(Failed(worker_id, failure.kind, str(failure), failure.status, ago_s))

    async def _probe(self, member: Member) -> None:
        if not self._alone() or member.worker is None:
            return
        health = self._config.health
        try:
            status, _ = await self._upstream.get(member.spec.url + health.path, health.timeout_s)
        except UpstreamFailure as failure:
            member.failures += 1
            gone = failure.kind == "refused"
            if self._alone() and (gone or member.failures >= health.failures):
                self._eject(member, str(failure), gone=False, doubt=not gone)
            return
        if self._alone() and (status < 400 or status in (404, 405)):
            member.failures = 0
            if member.problem is not None:
                member.problem, member.doubt = None, False
                self._service.clear_condition(codes.WORKER_UNREACHABLE, member.spec.name)
                self._show(member)

    def _alone(self) -> bool:
        return not self._link.up
