"""Handle one request: routing, authorization, then the verb."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from tests.kube.api_server import discovery, listing, rbac, streams, watching
from tests.kube.api_server.bodies import answer, body_of, list_of, require_json
from tests.kube.api_server.conformance import Writer
from tests.kube.api_server.faults import EXPIRE_CONTINUE, EXPIRE_WATCH, STOPPED_KUBELET, Faults
from tests.kube.api_server.parameters import flag
from tests.kube.api_server.rbac import Attributes, Authorizer, User
from tests.kube.api_server.routing import NoSuchPath, Target, target_of
from tests.kube.api_server.status import (
    Cause,
    StatusError,
    bad_request,
    conflict,
    invalid,
    method_not_allowed,
)
from tests.kube.api_server.store import Store, copied
from tests.kube.api_server.streams import Files

Json = dict[str, Any]

PATCH_KINDS = {
    "application/json-patch+json": "json",
    "application/merge-patch+json": "merge",
    "application/strategic-merge-patch+json": "strategic",
    "application/apply-patch+yaml": "apply",
}


class Handlers:
    """``exec_files``, ``logs`` and ``forwards`` are the tables that ApiServer documents."""

    def __init__(self, store: Store, authorizer: Authorizer, faults: Faults) -> None:
        self._store = store
        self._authorizer = authorizer
        self._faults = faults
        self._stopping = False
        self.bell: watching.Bell | None = None
        self.exec_files: dict[tuple[str, str, str], Files] = {}
        self.logs: dict[tuple[str, str, str, bool], str] = {}
        self.forwards: dict[tuple[str, str, int], tuple[str, int]] = {}

    def stop(self) -> None:
        """End the watches; called in the server's loop."""
        self._stopping = True
        if self.bell is not None:
            self.bell.ring()

    async def respond(
        self, request: web.Request, user: User, began: Callable[[int], None]
    ) -> web.StreamResponse:
        """``began`` gets the status of a response whose headers this handler sends."""
        path = request.path
        if path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        found = discovery.document(self._store.registry, path)
        if found is not None:
            wanted = Attributes(verb="get", path=path)
            self._authorizer.demand(user, None, wanted)
            return answer(found)
        try:
            target = target_of(self._store.registry, path)
        except NoSuchPath:
            self._authorizer.demand(user, None, Attributes(verb="get", path=path))
            raise
        attributes = target.attributes(request.method, request.query)
        self._authorizer.demand(user, target.resource, attributes)
        if target.resource.group == "authorization.k8s.io":
            return await self._review(request, target, user)
        if target.subresource in ("exec", "log", "portforward", "binding"):
            return await self._kubelet(request, target, user, began)
        require_json(request)
        if request.method in ("GET", "HEAD"):
            if attributes.verb == "watch":
                return await self._watch(request, target, began)
            return self._read(request, target)
        return await self._write(request, target)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, request: web.Request, target: Target) -> web.Response:
        resource, version = target.resource, target.version
        if target.name:
            return answer(self._store.read(resource, version, target.place))
        token = request.query.get("continue")
        expire = token and self._faults.take(request.path, request.method, EXPIRE_CONTINUE)
        metadata, bodies = listing.page(
            self._store.storage, resource, target.namespace, request.query, expire=bool(expire)
        )
        shown = [self._store.shown(resource, body, version) for body in bodies]
        return answer(list_of(target, shown, metadata))

    async def _watch(
        self, request: web.Request, target: Target, began: Callable[[int], None]
    ) -> web.StreamResponse:
        query = dict(request.query)
        if target.name:
            query["fieldSelector"] = f"metadata.name={target.name}"
        assert self.bell is not None
        expire = self._faults.take(request.path, request.method, EXPIRE_WATCH) is not None
        cuts = self._faults.watches_cut
        events = watching.events(
            self._store.storage,
            target.resource,
            target.version,
            target.namespace,
            query,
            self.bell,
            lambda: self._stopping or self._faults.watches_cut != cuts,
            expire=expire,
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        began(200)
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # Who has read enough just goes away.
            async with contextlib.aclosing(events):
                async for kind, body in events:
                    if kind not in ("ERROR", "BOOKMARK"):
                        body = self._store.shown(target.resource, body, target.version)
                    await response.write(
                        msgspec.json.encode({"type": kind, "object": body}) + b"\n"
                    )
        if self._faults.watches_cut != cuts and request.transport is not None:
            request.transport.abort()
        return response

    # -- writing -----------------------------------------------------------------------------------

    def _writer(self, request: web.Request, target: Target, warnings: list[str]) -> Writer:
        query = request.query
        agent = request.headers.get("User-Agent", "unknown").split("/")[0].split()
        strictness = query.get("fieldValidation") or "Warn"
        if strictness not in ("Ignore", "Warn", "Strict"):
            cause = Cause(
                "fieldValidation",
                "FieldValueNotSupported",
                f'Unsupported value: "{strictness}": supported values: "Ignore", "Strict", "Warn"',
            )
            raise invalid("CreateOptions", "", [cause], "meta.k8s.io")
        return Writer(
            manager=query.get("fieldManager") or (agent[0] if agent else "unknown"),
            subresource=target.subresource,
            strictness=strictness,
            dry_run=query.get("dryRun") == "All",
            force=flag(query, "force"),
            patching=request.method == "PATCH",
            warnings=warnings,
        )

    async def _write(self, request: web.Request, target: Target) -> web.Response:
        warnings: list[str] = []
        writer = self._writer(request, target, warnings)
        resource, version = target.resource, target.version
        status = 200
        if resource.namespaced and not target.namespace:
            raise method_not_allowed()
        if request.method == "POST":
            body = await body_of(request)
            result = self._store.write_new(resource, version, target.namespace, body, writer)
            status = 201
        elif request.method == "PUT":
            body = await body_of(request)
            result = self._store.write_over(resource, version, target.place, body, writer)
        elif request.method == "PATCH":
            result, status = await self._patch(request, target, writer)
        else:
            return await self._delete(request, target)
        headers = {
            "Warning": ", ".join(f"299 - {msgspec.json.encode(w).decode()}" for w in warnings)
        }
        return answer(result, status, headers if warnings else None)

    async def _patch(
        self, request: web.Request, target: Target, writer: Writer
    ) -> tuple[Json, int]:
        resource, version = target.resource, target.version
        accepted = [
            media
            for media, kind in PATCH_KINDS.items()
            if kind != "strategic" or not resource.custom
        ]
        patch = await body_of(request, accepted)
        kind = PATCH_KINDS[request.content_type]
        if kind == "apply":
            if not request.query.get("fieldManager"):
                cause = Cause(
                    "fieldManager",
                    "FieldValueRequired",
                    "Required value: is required for apply patch",
                )
                raise invalid("PatchOptions", "", [cause], "meta.k8s.io")
            result, created = self._store.apply(resource, version, target.place, patch, writer)
            return result, 201 if created else 200
        return self._store.patch(resource, version, target.place, kind, patch, writer), 200

    async def _delete(self, request: web.Request, target: Target) -> web.Response:
        options = await body_of(request) or {}
        policy = request.query.get("propagationPolicy")
        if policy:
            options = options | {"propagationPolicy": policy}
        resource = target.resource
        last = self._store.delete(resource, target.version, target.place, options)
        if resource.kind == "Pod" or "deletionTimestamp" in last["metadata"]:
            return answer(last)
        details = {"name": target.name, "kind": resource.plural, "uid": last["metadata"]["uid"]}
        if resource.group:
            details["group"] = resource.group
        return answer(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Success",
                "details": details,
            }
        )

    # -- everything else ---------------------------------------------------------------------------

    async def _review(self, request: web.Request, target: Target, user: User) -> web.Response:
        body = await body_of(request) or {}
        spec = body.get("spec") or {}
        asked_in = (spec.get("resourceAttributes") or {}).get("namespace", "")
        if target.resource.namespaced and asked_in != target.namespace:
            raise bad_request(
                "spec.resourceAttributes.namespace must match the namespace of the request"
            )
        myself = user if target.resource.kind == "SelfSubjectAccessReview" else None
        return answer(rbac.review(self._authorizer, body, myself), 201)

    async def _kubelet(
        self,
        request: web.Request,
        target: Target,
        user: User,
        began: Callable[[int], None],
    ) -> web.StreamResponse:
        namespace, name = target.place
        if target.subresource == "binding":
            return await self._bind(request, target)
        if target.subresource != "log":
            # Since 1.35 a WebSocket's GET needs "create" as well, before only "get".
            creating = Attributes(
                "create", "", "pods", target.subresource, name=name, namespace=namespace
            )
            self._authorizer.demand(user, target.resource, creating)
        pod = self._store.read(target.resource, "v1", target.place)
        node = pod["spec"].get("nodeName", "")
        fault = self._faults.take(node, request.method, STOPPED_KUBELET) if node else None
        if fault is not None:
            await asyncio.sleep(fault.seconds)
            message = "error dialing backend: dial tcp 192.0.2.7:10250: connect: connection refused"
            raise StatusError(500, "InternalError", message, {})
        if target.subresource == "log":
            text = streams.log_text(self.logs, pod, request.query)
            return web.Response(text=text, content_type="text/plain")
        if target.subresource == "exec":
            container = streams.container_of(pod, request.query.get("container"))
            streams.demand_running(pod, container)
            streams.demand_websocket(request)
            began(101)
            return await streams.serve_exec(
                request, self.exec_files.get((namespace, name, container))
            )
        wanted = [p for text in request.query.getall("ports", []) for p in text.split(",")]
        if not wanted or not all(port.isdecimal() for port in wanted):
            raise bad_request("at least one port must be specified for port-forward")
        ports = [int(port) for port in wanted]
        streams.demand_websocket(request)
        began(101)
        targets = {port: self.forwards.get((namespace, name, port)) for port in ports}
        return await streams.serve_forward(request, targets)

    async def _bind(self, request: web.Request, target: Target) -> web.Response:
        body = await body_of(request) or {}
        node: str = (body.get("target") or {}).get("name", "")
        if not node:
            cause = Cause("target.name", "FieldValueRequired", "Required value")
            raise invalid("Binding", target.name, [cause])
        store, resource = self._store, target.resource
        with store.storage.lock:
            pod = copied(store.read(resource, "v1", target.place))
            if pod["spec"].get("nodeName"):
                result = (
                    f'pod {target.name} is already assigned to node "{pod["spec"]["nodeName"]}"'
                )
                raise conflict(resource, target.name, result)
            pod["spec"]["nodeName"] = node
            conditions = pod.setdefault("status", {}).setdefault("conditions", [])
            conditions[:] = [c for c in conditions if c.get("type") != "PodScheduled"]
            conditions.append(
                {
                    "type": "PodScheduled",
                    "status": "True",
                    "lastTransitionTime": store.timestamp(),
                }
            )
            manager = self._writer(request, target, []).manager
            writer = Writer(manager, subresource="", trusted=True)
            store.write_over(resource, "v1", target.place, pod, writer)
        return answer(
            {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}, 201
        )
