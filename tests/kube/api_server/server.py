"""The server itself: one background thread with its own event loop, a port, users, kubeconfigs."""

import asyncio
import email.utils
import logging
import shutil
import ssl
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import yaml
from aiohttp import web
from multidict import CIMultiDict, MultiDict

from tests.kube.api_server import faults as fault_kinds
from tests.kube.api_server.bodies import refusal
from tests.kube.api_server.certificates import make_certificates
from tests.kube.api_server.direct import DirectStore
from tests.kube.api_server.faults import Faults
from tests.kube.api_server.handlers import Handlers
from tests.kube.api_server.rbac import ADMIN, ANONYMOUS, Authorizer, User, user_of
from tests.kube.api_server.routing import NoSuchPath
from tests.kube.api_server.status import StatusError, unauthorized
from tests.kube.api_server.storage import Storage
from tests.kube.api_server.store import Converter, Store
from tests.kube.api_server.watching import Bell

ADMIN_TOKEN = "admin"
_LOG = logging.getLogger(__name__)
_REQUESTS_KEPT = 20_000


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it was answered. ``status`` is HTTP's; 0 where the connection was dropped.

    ``query`` holds the last value of each parameter; ``user`` is the authenticated name.
    """

    method: str
    path: str
    query: Mapping[str, str]
    user: str
    content_type: str
    status: int


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What the handlers read of a request, for one that comes from this process."""

    method: str
    path: str
    query: MultiDict[str]
    headers: CIMultiDict[str]
    body: bytes
    transport: None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "application/octet-stream")

    async def read(self) -> bytes:
        return self.body


Kept = tuple[Storage, dict[str, User], dict[tuple[str, str, str, bool], str]]


class ApiServer:
    """A Kubernetes API server on 127.0.0.1, real enough for kubectl and the official client.

    ``clock`` gives the seconds since the epoch that rule timestamps, ages and the Date header.
    Without ``rbac`` everything is allowed; with it a bearer token identifies the user
    (``add_user``, ``add_service_account``; the token ``admin`` is in system:masters).
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        tls: bool = False,
        rbac: bool = False,
    ) -> None:
        core = Store(clock)
        self._clock = clock
        self._tls = tls
        self._rbac = rbac
        self._users: dict[str, User] = {ADMIN_TOKEN: ADMIN}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._folder: Path | None = None
        self._context: ssl.SSLContext | None = None
        self._core = core
        self.faults = Faults()
        self._handlers = Handlers(core, Authorizer(core.storage, enabled=rbac), self.faults)
        self.store = DirectStore(core)
        self.requests: list[Request] = []
        self.exec_files = self._handlers.exec_files
        self.logs = self._handlers.logs
        self.forwards = self._handlers.forwards
        self.convert: dict[str, Converter] = core.converters
        """CRD name -> (object, wanted apiVersion) -> the object in it; the stand-in for a
        conversion webhook. Without one only ``apiVersion`` is rewritten."""
        self.ca: Path | None = None
        self.url = ""

    # -- life --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._tls:
            self._folder = Path(tempfile.mkdtemp(prefix="kube-tls-"))
            self._context, self.ca = make_certificates(self._folder)
        self._thread = threading.Thread(target=self._run, name="kube-api-server", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            self._thread.join()
            raise RuntimeError("the API server did not start") from self._problem
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, as leaving the ``with`` does; once is enough and twice does no harm."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(timeout=20)
            if self._thread.is_alive():
                raise RuntimeError("the API server's thread did not end")
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as problem:
            self._problem = problem
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        bell = self._handlers.bell = Bell(self._loop, self._core.storage)
        self.faults.on_cut = bell.ring_from_any_thread
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.2, handler_cancellation=True
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._context)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"
            self._ready.set()
            await self._stop.wait()
        finally:
            self._handlers.stop()
            await runner.cleanup()

    # -- moments -----------------------------------------------------------------------------------

    def kept(self) -> Kept:
        """The objects with their past, users and logs as they are now."""
        storage = Storage()
        self._core.storage.copy_to(storage)
        return storage, dict(self._users), dict(self.logs)

    def begin(self, kept: Kept) -> None:
        """Begin with these; the same definitions must be there."""
        storage, users, logs = kept
        storage.copy_to(self._core.storage)
        self._users |= users
        self.logs.update(logs)

    # -- people ------------------------------------------------------------------------------------

    def add_user(self, token: str, user: str, groups: Sequence[str] = ()) -> None:
        self._users[token] = user_of(user, tuple(groups))

    def add_service_account(self, token: str, namespace: str, name: str) -> None:
        self.add_user(token, f"system:serviceaccount:{namespace}:{name}")

    def kubeconfig(
        self,
        path: Path,
        *,
        token: str | None = None,
        namespace: str = "default",
        context: str = "test",
        extra_contexts: Sequence[str] = (),
    ) -> Path:
        """Write one whose current context is ``context``; the extra ones lead to the same place.

        ``token`` None is the administrator's. kubectl and client-go send no token without TLS.
        """
        cluster: dict[str, Any] = {"server": self.url}
        if self.ca is not None:
            cluster["certificate-authority-data"] = b64encode(self.ca.read_bytes()).decode()
        contexts = [
            {"name": name, "context": {"cluster": "test", "user": "test", "namespace": namespace}}
            for name in (context, *extra_contexts)
        ]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token or ADMIN_TOKEN}}],
            "contexts": contexts,
            "current-context": context,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def _user(self, request: web.Request) -> User:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and token.strip() in self._users:
            return self._users[token.strip()]
        if not self._rbac:
            return ADMIN
        if kind:
            raise unauthorized()
        return ANONYMOUS

    def answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> tuple[int, bytes]:
        """Answer a request of this process, like one over HTTP: status and body.

        Not for streams, nor for requests that a fault delays.
        """
        request = LocalRequest(method, path, MultiDict(query), CIMultiDict(headers), body)
        steps = self._answer(cast(web.Request, request))
        try:
            steps.send(None)
        except StopIteration as done:
            response: web.Response = done.value
            assert isinstance(response.body, bytes)
            return response.status, response.body
        steps.close()
        raise RuntimeError(f"{method} {path} cannot be answered without a connection")

    # -- requests ----------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        user = ANONYMOUS
        recorded = False

        def record(status: int) -> None:
            nonlocal recorded
            if not recorded:
                recorded = True
                self._remember(request, user, status)

        response: web.StreamResponse
        try:
            fault = self.faults.take(
                request.path,
                request.method,
                *(fault_kinds.ANSWER, fault_kinds.HANG, fault_kinds.DELAY),
            )
            if fault is not None:
                await self._misbehave(request, fault, record)
            user = self._user(request)
            response = await self._handlers.respond(request, user, record)
        except NoSuchPath as absent:
            response = web.Response(status=404, text=f"{absent.message}\n")
        except StatusError as error:
            response = refusal(error)
        except ConnectionError:
            raise
        except Exception as fault:
            # Of ours, or a body of a shape that only the real server's types would refuse.
            _LOG.exception("%s %s", request.method, request.path)
            result = f"Internal error occurred: {type(fault).__name__}: {fault}"
            response = refusal(StatusError(500, "InternalError", result, {}))
        if not response.prepared:
            response.headers["Date"] = email.utils.formatdate(self._clock(), usegmt=True)
        record(response.status)
        return response

    async def _misbehave(
        self, request: web.Request, fault: fault_kinds.Fault, record: Callable[[int], None]
    ) -> None:
        if fault.kind == fault_kinds.ANSWER:
            raise fault.refusal()
        if self._stop is not None:
            try:
                async with asyncio.timeout(fault.seconds):
                    await self._stop.wait()
            except TimeoutError:
                pass
        if fault.kind == fault_kinds.HANG:
            record(0)
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError

    def _remember(self, request: web.Request, user: User, status: int) -> None:
        if len(self.requests) >= _REQUESTS_KEPT:
            del self.requests[: _REQUESTS_KEPT // 2]
        self.requests.append(
            Request(
                method=request.method,
                path=request.path,
                query=dict(request.query),
                user=user.name,
                content_type=request.headers.get("Content-Type", ""),
                status=status,
            )
        )
