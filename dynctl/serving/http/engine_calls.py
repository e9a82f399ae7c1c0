"""Small requests that any engine of a model can answer: they are passed on as they are.

``/tokenize``, ``/detokenize``, ``/v1/messages/count_tokens`` and ``/version`` have no prompt to
route by, so the engines take turns.
"""

from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from dynctl.serving.engines.failures import UpstreamFailure, engine_reason
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.http.auth import Handler, is_operator
from dynctl.serving.http.bodies import bodies_of
from dynctl.serving.http.inference import Inference
from dynctl.serving.http.inference_requests import RequestReader
from dynctl.serving.http.json_responses import bad_request, decoded
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.refusal import HttpError
from dynctl.serving.routing.service import RoutingService
from router_core import Worker

#: Seconds that an engine has to answer.
TIMEOUT_S: Final = 30.0
#: Engines that are tried.
_MOST_TRIES: Final = 3
#: The answers of an engine that does not have the endpoint.
_MISSING: Final = (404, 405, 501)
_POSTS: Final = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


class EngineCalls:
    """Passes small requests on to engines."""

    def __init__(
        self,
        service: RoutingService,
        inference: Inference,
        reader: RequestReader,
        upstream: Upstream,
        config: FrontendConfig,
    ) -> None:
        self._service = service
        self._inference = inference
        self._reader = reader
        self._upstream = upstream
        self._config = config
        self._turn = 0

    def routes(self, keyed: Callable[[Handler], Handler]) -> list[web.RouteDef]:
        """The endpoints, for clients with a key."""
        posts = [web.post(path, keyed(self._post)) for path in _POSTS]
        return [*posts, web.get("/version", keyed(self._version))]

    async def _post(self, http: web.Request) -> web.Response:
        self._inference.refuse_while_draining()
        with bodies_of(http).of(http) as body:
            raw = await body.read(http, self._config.limits.body_bytes)
            fields = await decoded(http, raw)
            if not isinstance(fields, dict):
                raise bad_request("the body is not a JSON object", code="wrong_type")
            model = fields.get("model")
            if model is not None and not isinstance(model, str):
                raise bad_request("model: expected a string", param="model", code="wrong_type")
            with self._inference.place():
                return await self._pass_on(http, raw, self._workers(model or ""))

    async def _version(self, http: web.Request) -> web.Response:
        """The version of an engine; with ``?model=`` of one that serves the model."""
        self._inference.refuse_while_draining()
        with self._inference.place():
            workers = self._workers(http.query.get("model", ""), any_model=True)
            return await self._pass_on(http, None, workers)

    async def _pass_on(
        self, http: web.Request, raw: bytes | None, workers: list[Worker]
    ) -> web.Response:
        path = http.path
        problem = "no engine of the model is reachable"
        missing = False
        for worker in workers[:_MOST_TRIES]:
            url = f"{worker.endpoint}{path}"
            try:
                status, body = await self._upstream.pass_on(http.method, url, raw, TIMEOUT_S)
            except UpstreamFailure as failure:
                problem = str(failure)
                continue
            if status in _MISSING and not _names_model(body):
                missing = True
                continue
            if status >= 500:
                problem = f"{worker.name} returned status {status}"
                continue
            if status >= 400 and not _is_json(body):
                reason = engine_reason(body)
                text = f"the engine returned status {status} without a reason"
                text = text if reason is None else reason.message
                raise HttpError(status, f"{path}: {text}", "upstream_error", status)
            return web.Response(
                status=status, body=body, headers={"content-type": "application/json"}
            )
        if missing:
            raise HttpError(
                501, f"{path}: the engines do not serve it", "not_supported", "not_supported"
            )
        error = HttpError(
            503, f"{path}: {problem}", "service_unavailable", 503,
            headers={"retry-after": "1"}, public=f"{path}: no engine responded",
        )  # fmt: skip
        raise error if is_operator(http, self._config.api_token) else error.for_client()

    def _workers(self, model: str, *, any_model: bool = False) -> list[Worker]:
        """The workers that can answer: reachable ones first, another one first each time."""
        service = self._service
        name = model or ("" if any_model else self._reader.only_model())
        base = service.served.base_model(name) if name else None
        if name and base is None:
            raise self._reader.unknown_model(name).for_client()
        workers = [
            worker
            for worker in service.router.registry
            if base is None or (worker.model == base and name in worker.served_names)
        ]
        web_ones = [worker for worker in workers if (worker.endpoint or "").startswith("http")]
        if workers and not web_ones:
            raise HttpError(
                501, "the workers of a Dynamo deployment have no HTTP endpoints of their own",
                "not_supported", "not_supported",
            )  # fmt: skip
        self._turn += 1
        start = self._turn % max(1, len(web_ones))
        return sorted(web_ones[start:] + web_ones[:start], key=self._is_away)

    def _is_away(self, worker: Worker) -> bool:
        return self._service.router.registry.unavailable_reason(worker.worker_id) is not None


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _names_model(body: bytes) -> bool:
    """Whether a 404 is about the model, not the path."""
    return b"model" in body
