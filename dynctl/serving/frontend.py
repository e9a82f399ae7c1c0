"""``serve frontend``: the HTTP server around the service, its start and its orderly end."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from dynctl.serving import conditions as codes
from dynctl.serving.config import FrontendConfig
from dynctl.serving.control_api import ControlApi
from dynctl.serving.fleet import Fleet
from dynctl.serving.flow import RequestFlow
from dynctl.serving.http_answers import error_answer
from dynctl.serving.inference import Inference
from dynctl.serving.prompts import NOT_MODELLED, PromptTokenizers
from dynctl.serving.refusal import HttpError
from dynctl.serving.service import RoutingService
from dynctl.serving.tokenizer_check import TokenizerCheck
from dynctl.serving.upstream import Upstream
from dynctl.serving.worker_spec import WorkerSpec, parse_worker_spec
from dynctl.serving.workers_file import WorkersFile
from dynctl.tokenization import load_tokenizer

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_EXPIRY_S = 15.0
_CHECK_S = 10.0

Routes = Callable[["Frontend"], Iterable[web.RouteDef]]


class StartError(Exception):
    """The frontend cannot start; the message says what to change."""


class Frontend:
    """A frontend that can be started and stopped on a running event loop.

    ``extra_routes`` add endpoints; they are called once, when the application is built.
    Raises WorkerSpecError, WorkersFileError, TokenizationError or StartError where the
    configuration cannot be used.
    """

    def __init__(self, config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> None:
        self.config = config
        self._specs = _specs(config.workers)
        tokenizer = None
        if config.model_path is not None:
            tokenizer = load_tokenizer(config.model_path)
        self.service = RoutingService(
            config.router,
            PromptTokenizers(tokenizer),
            default_block_size=config.block_size,
        )
        self.upstream = Upstream(config.limits)
        self.fleet = Fleet(self.service, self.upstream, config)
        self.flow = RequestFlow(self.service, self.fleet, self.upstream, config.limits)
        self.inference = Inference(self.service, self.flow, config)
        self.control = ControlApi(self.service, self.fleet, self.inference, config)
        self._extra_routes = tuple(extra_routes)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self.port = config.port

    @property
    def url(self) -> str:
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    # -- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, then learn the fleet; returns when every engine was probed once."""
        listener = _listen(self.config.host, self.config.port)
        self.port = listener.getsockname()[1]
        try:
            self.upstream.start()
            self.fleet.index.start()
            await self._join()
            self._runner = web.AppRunner(
                self.build_app(),
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=1.0,
                max_field_size=self.config.limits.header_bytes,
                max_line_size=self.config.limits.header_bytes,
            )
            await self._runner.setup()
            await web.SockSite(self._runner, listener, backlog=_BACKLOG).start()
        except BaseException:
            listener.close()
            await self.close()
            raise
        self._spawn(self._expire_often(), "expiry")
        self._spawn(self._check_tokenizers(), "tokenizer check")

    async def drain(self) -> None:
        """Refuse new requests and wait until the running ones end, or the drain timeout."""
        self.inference.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.limits.drain_s):
                while self.inference.in_flight:  # noqa: ASYNC110  many places change it
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Stop everything; running requests are cut."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.fleet.close()
        await self.upstream.close()

    def build_app(self) -> web.Application:
        """The application: inference, control endpoints, and what others registered."""
        app = web.Application(client_max_size=self.config.limits.body_bytes)
        routes: list[web.RouteDef] = [
            web.post("/v1/chat/completions", self.inference.chat_completions),
            web.post("/v1/completions", self.inference.completions),
        ]
        controls = self.control.routes()
        for more in self._extra_routes:
            controls += more(self)
        for route in controls:
            routes.append(
                web.RouteDef(route.method, route.path, answering(route.handler), route.kwargs)
            )
        app.add_routes(routes)
        app.router.add_route("*", "/{path:.*}", _unknown_path)
        return app

    # -- inside ----------------------------------------------------------------------------

    async def _join(self) -> None:
        config = self.config
        await asyncio.gather(*(self.fleet.add(spec, "command line") for spec in self._specs))
        if config.workers_file is not None:
            file = WorkersFile(
                config.workers_file, self.fleet, self.service, config.workers_file_poll_s
            )
            await file.load()
            self._spawn(file.run(), "workers file")

    def _spawn(self, work: Any, name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _expire_often(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            self.service.expire()

    async def _check_tokenizers(self) -> None:
        check = TokenizerCheck(self.service, self.fleet)
        while True:
            await check.run()
            await asyncio.sleep(_CHECK_S)

    def log_start(self) -> None:
        """The facts of this start, for the operator's log."""
        router, config = self.service.router, self.config
        roles: dict[str, int] = {}
        for worker in router.registry:
            roles[worker.role.value] = roles.get(worker.role.value, 0) + 1
        fleet = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
        _log.info(
            "serving on %s: router mode %s, preset %s, models %s, workers: %s of %d reachable",
            self.url,
            router.config.router_mode,
            config.preset,
            ", ".join(self.service.models()) or "none",
            fleet,
            len(self.fleet),
        )
        policy = router.config.kv_transfer_domain
        if policy is not None:
            _log.info("KV transfer: %s within %s", router.config.kv_transfer_enforcement, policy)
        by_load = [w.name for w in router.registry if not w.kv_events]
        if by_load:
            _log.info("without KV events, routed by load only: %s", ", ".join(by_load))
        self._log_tokenizer()

    def _log_tokenizer(self) -> None:
        if self.config.model_path is not None:
            _log.info("tokenizer: %s", self.config.model_path)
            return
        told = any(member.facts.engine_id is not None for member in self.fleet)
        if told:
            _log.info("tokenizer: the engines' /tokenize, one more round trip a request")
        else:
            _log.warning(
                "%s (unless an engine answers POST /tokenize); give --model-path DIR", NOT_MODELLED
            )
            for model in self.service.models():
                self.service.set_condition(codes.NO_TOKENIZER, model, NOT_MODELLED)


def answering(
    handler: Any,
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A control handler whose errors are JSON: HttpError as it says, the rest a logged 500."""

    async def answer(http: web.Request) -> web.StreamResponse:
        try:
            result: web.StreamResponse = await handler(http)
            return result
        except HttpError as error:
            return error_answer(error)
        except web.HTTPRequestEntityTooLarge:
            return error_answer(
                HttpError(413, "the body is too large", "invalid_request_error", "body_too_large")
            )
        except (web.HTTPException, asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            _log.exception("%s %s failed", http.method, http.path)
            return error_answer(
                HttpError(500, "internal error; the log has it", "internal_error", 500)
            )

    return answer


def run_frontend(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks."""
    return uvloop.run(serve(config, extra_routes))


async def serve(config: FrontendConfig, extra_routes: Iterable[Routes] = ()) -> int:
    """As :func:`run_frontend`, on a running event loop."""
    frontend = Frontend(config, extra_routes)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await frontend.start()
    try:
        frontend.log_start()
        if config.announce:
            record = {"frontend": frontend.url, "url": frontend.url, "port": frontend.port}
            sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
            sys.stdout.flush()
        await stop.wait()
        _log.info("stopping: %d requests are running", frontend.inference.in_flight)
        await frontend.drain()
    finally:
        await frontend.close()
    return 0


async def _unknown_path(http: web.Request) -> web.Response:
    return error_answer(
        HttpError(
            404, f"no route {http.method} {http.path[:200]}", "not_found_error", "unknown_route"
        )
    )


def _specs(texts: Iterable[str]) -> list[WorkerSpec]:
    specs: dict[str, WorkerSpec] = {}
    for text in texts:
        spec = parse_worker_spec(text)
        if spec.name in specs:
            raise StartError(
                f"--worker {text}: the name {spec.name!r} is used twice; give each its name="
            )
        specs[spec.name] = spec
    return list(specs.values())


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; give another --http-port"
        ) from None
    return listener
