"""What `serve observe` reads beside the planes: frontends, their log, tokenizers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, Final

from dynctl.adapters.dynamo.planes import namespace
from dynctl.base.options import GlobalOptions
from dynctl.base.tasks import Supervisor
from dynctl.documents.doubts import Doubt, distinct
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import SavedView
from dynctl.serving.dynamo.observer import PRESET, Observer
from dynctl.serving.dynamo.shadow import Finding, Reading
from dynctl.sources.dry_run import DryRun
from dynctl.sources.dynamo.accepted_cards import take_versions
from dynctl.sources.dynamo.frontends import PolledFrontends, ReachedFrontends, reached_frontends
from dynctl.sources.dynamo.log_tail import LogTail
from dynctl.sources.dynamo.router_state import (
    index_doubts,
    known_settings,
    registration_doubts,
    take_load,
    take_settings,
)
from dynctl.sources.dynamo.snapshot import dynamo_alerts
from dynctl.sources.dynamo.source import model_tokenizer
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.tokenization import load_tokenizer
from dynctl.wire.dynamo.frontend_log import RefusedLine, SelectedLine, read_line

_TOKENIZERS: Final = 4


class BesideDynamo:
    """``urls``: Dynamo frontends; in Kubernetes those of the cluster, unless some were named.

    ``log``: the log of one of them, or ``-``. ``model_path``: tokenizer of dry runs; without it
    that of the workers is fetched.
    """

    def __init__(
        self,
        options: GlobalOptions,
        urls: tuple[str, ...] = (),
        log: str | None = None,
        model_path: str | None = None,
    ) -> None:
        self._options = options
        self._urls = urls
        self._log_name = log
        self._model_path = model_path
        self._ways = ExitStack()
        self._reached = ReachedFrontends([])
        self._polled: PolledFrontends | None = None
        self._log: LogTail | None = None
        self._tasks = Supervisor()
        self._settings_of: object = None
        self._settings: list[Doubt] = []
        #: Tokenizers that dry runs used, by directory.
        self._load = lru_cache(maxsize=_TOKENIZERS)(load_tokenizer)

    @property
    def workers_reachable(self) -> bool:
        return self._reached.workers_reachable

    @property
    def frontends(self) -> tuple[str, ...]:
        return self._reached.names

    async def open(self, take_line: Callable[[SelectedLine | RefusedLine], None]) -> None:
        def take(text: str) -> None:
            read = read_line(text)
            if read is not None:
                take_line(read)

        self._reached = await asyncio.to_thread(
            self._ways.enter_context, reached_frontends(self._options, self._urls)
        )
        urls = [frontend.url for frontend in self._reached.frontends]
        self._polled = PolledFrontends(urls, self._options.timeout, names=self._reached.names)
        if self._log_name is not None:
            self._log = LogTail(self._log_name, take)
            self._tasks.start("frontend log", self._log.run)

    async def close(self) -> None:
        await self._tasks.close()
        if self._log is not None:
            self._log.close()
        if self._polled is not None:
            await self._polled.close()
        await asyncio.to_thread(self._ways.close)

    async def read(self, observer: Observer, title: str, *, findings: bool) -> Reading:
        polled = self._open_frontends()
        await polled.read()
        metrics = polled.metrics()
        load, doubts = take_load(observer, metrics)
        doubts += [*registration_doubts(observer), *self._reached.doubts(), *polled.doubts()]
        doubts += take_versions(observer, metrics, [{}] * len(metrics))
        doubts += index_doubts(observer)
        deployment = observer.deployment
        if (deployment.workers, polled.thresholds) != self._settings_of:
            # Work for every worker, so only when a card or a threshold changed.
            self._settings_of = (deployment.workers, dict(polled.thresholds))
            self._settings = take_settings(observer, polled.thresholds, metrics)[1]
        known = known_settings(observer, polled.thresholds, metrics)
        found = None
        if findings:
            scope = namespace(self._options)
            alerts = dynamo_alerts(title, scope, deployment, polled.facts())
            found = tuple(Finding(alert.code, alert.subject, alert.message) for alert in alerts)
        return Reading(
            title=title,
            load=load,
            doubts=tuple(distinct([*doubts, *self._settings])),
            origins={name: source for name, (_, source) in known.items()},
            findings=found,
            traffic=polled.traffic.total,
        )

    async def route(
        self, observer: Observer, reading: Reading, body: Mapping[str, Any]
    ) -> RouteResult:
        query = RouteQuery(body=body, model_path=self._model_path)
        origins = None if reading.origins is None else dict(reading.origins)
        view = SavedView(
            observer.router,
            time.monotonic(),
            PRESET,
            await self._tokenizers(observer, query),
            source=reading.load,
            chats="dynamo",
            doubts=reading.doubts,
            origins=origins,
        )
        return DryRun(view, query, self._load).route()

    # -- inside ----------------------------------------------------------------------------

    def _open_frontends(self) -> PolledFrontends:
        if self._polled is None:
            raise RuntimeError("open() was not called")
        return self._polled

    async def _tokenizers(self, observer: Observer, query: RouteQuery) -> dict[str, str]:
        """Model -> the directory of its tokenizer, loaded; empty where the body has token ids."""
        body = query.body or {}
        prompt = body.get("prompt")
        ids = isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)
        if ids and "messages" not in body:
            return {}
        deployment = observer.deployment
        model = choose_model(query.wanted, deployment.models, deployment.served_names)
        path = self._model_path
        if path is None:
            path = await model_tokenizer(deployment, model, self._options.timeout)
        await asyncio.to_thread(self._load, path)
        return {model: path}
