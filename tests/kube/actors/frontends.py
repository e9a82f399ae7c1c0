"""The frontends of simulated pods: what they know of the workers, served over HTTP.

A frontend knows a worker once a ready endpoint in a slice and its metadata are there, and routes by
the taints as Dynamo's router does. Only what verify asks for is served.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dynctl.wire.kubernetes.names import GRAPH_LABEL
from tests.kube.actors.acting import Hands
from tests.kube.api_server import ApiServer
from tests.kube.deployment import env_of, is_worker
from tests.kube.objects import Json, key_of
from tests.kube.objects.discovery import MODEL
from tests.kube.objects.pods import FRONTEND_PORT


@dataclass(frozen=True, slots=True)
class Known:
    """One worker as a router knows it."""

    number: int
    role: str
    taints: frozenset[str]
    domain: str
    required: bool

    @property
    def value(self) -> str:
        """The taint by which it is tied to others; empty where it has none."""
        start = f"dynamo.topology/{self.domain}="
        return next((one for one in self.taints if one.startswith(start)), "")


@dataclass(slots=True)
class View:
    """What one frontend knows. ``kv`` False: another router mode, which names no workers."""

    workers: tuple[Known, ...] = ()
    kv: bool = True
    turns: itertools.count[int] = field(default_factory=itertools.count)

    def metrics(self) -> str:
        lines = [f'dynamo_frontend_model_ready{{model="{MODEL}"}} {int(bool(self.workers))}']
        if self.kv:
            lines += [
                "dynamo_component_router_worker_registered"
                f'{{dp_rank="0",router_worker_id="{one.number}",worker_type="{one.role}"}} 1'
                for one in self.workers
            ]
        return "".join(f"{line}\n" for line in lines)

    def choose(self) -> tuple[int, Json]:
        """Status and body of a chat: prefill workers in turn, a decode worker of the domain."""
        turn = next(self.turns)
        prefills = [one for one in self.workers if one.role == "prefill"]
        decodes = [one for one in self.workers if one.role == "decode"]
        prefill = prefills[turn % len(prefills)] if prefills else None
        if self.kv and prefill is not None and prefill.required:
            decodes = [one for one in decodes if prefill.value and prefill.value in one.taints]
        if prefill is None or not decodes:
            message = "Failed to generate completions"
            return 500, {"message": message, "type": "Internal Server Error", "code": 500}
        decode = decodes[turn % len(decodes)]
        served = {"prefill_worker_id": prefill.number, "decode_worker_id": decode.number}
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}}
        return 200, {
            "object": "chat.completion",
            "model": MODEL,
            "choices": [choice],
            "nvext": {"worker_id": served},
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, view: View) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.view = view
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.server_address[1])

    def end(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        view = self.server.view
        answers: Mapping[str, Callable[[], tuple[int, str]]] = {
            "/metrics": lambda: (200, view.metrics()),
            "/health": lambda: (200, '{"status": "healthy"}'),
            "/v1/models": lambda: (200, json.dumps(_models(view))),
        }
        unknown = {"message": f"Route not found: GET {self.path}"}
        status, text = answers.get(self.path, lambda: (404, json.dumps(unknown)))()
        self._answer(status, text)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.server.view.choose()
        self._answer(status, json.dumps(body))

    def _answer(self, status: int, text: str) -> None:
        data = text.encode()
        kind = "text/plain" if self.path == "/metrics" else "application/json"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def _models(view: View) -> Json:
    rows = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "nvidia"}]
    return {"object": "list", "data": rows if view.workers else []}


class Frontends:
    """``misses``: frontend pod -> names of worker pods that it never hears of."""

    def __init__(self, hands: Hands, server: ApiServer) -> None:
        self.misses: dict[str, set[str]] = {}
        self.views: dict[tuple[str, str], View] = {}
        self._servers: dict[tuple[str, str], _Server] = {}
        self._hands, self._api = hands, server

    def due(self) -> float | None:
        return None

    def step(self) -> bool:
        pods = [
            pod
            for pod in self._hands.list("Pod")
            if GRAPH_LABEL in pod["metadata"].get("labels", {})
            and not is_worker(pod)
            and pod["status"].get("podIP")
        ]
        ready = {
            (one["metadata"]["namespace"], end["targetRef"]["name"], end["targetRef"].get("uid"))
            for one in (self._hands.list("EndpointSlice") if pods else ())
            for end in one.get("endpoints", ())
            if end["conditions"].get("ready")
        }
        told = self._hands.list("DynamoWorkerMetadata") if pods else []
        did = self._drop({key_of(pod) for pod in pods})
        for pod in pods:
            key = key_of(pod)
            space = f"{key[0]}-{pod['metadata']['labels'][GRAPH_LABEL]}"
            known = tuple(
                worker
                for body in told
                if _endpoint_of(body) in ready
                and body["metadata"]["name"] not in self.misses.get(key[1], ())
                for worker in _known(body, space)
            )
            view = self.views.get(key)
            if view is None:
                view = self.views[key] = View()
                self._servers[key] = _Server(view)
                self._api.forwards[(*key, FRONTEND_PORT)] = self._servers[key].address
            kv = env_of(pod).get("DYN_ROUTER_MODE") == "kv"
            if (view.workers, view.kv) != (known, kv):
                view.workers, view.kv = known, kv
                did = True
        return did

    def _drop(self, there: set[tuple[str, str]]) -> bool:
        gone = self._servers.keys() - there
        for key in gone:
            self._servers.pop(key).end()
            del self.views[key]
            self._api.forwards.pop((*key, FRONTEND_PORT), None)
        return bool(gone)

    def close(self) -> None:
        """End every server."""
        self._drop(set())


def _endpoint_of(body: Json) -> tuple[str, str, str | None]:
    owner = (body["metadata"].get("ownerReferences") or [{}])[0]
    return body["metadata"]["namespace"], owner.get("name", ""), owner.get("uid")


def _known(body: Json, space: str) -> list[Known]:
    """The workers of one object, of the runtime namespaces that begin with ``space``."""
    found = []
    for card in body["spec"]["data"].get("model_cards", {}).values():
        config = card["card_json"]["runtime_config"]
        if card["namespace"].startswith(space):
            found.append(
                Known(
                    card["instance_id"],
                    card["card_json"]["worker_type"],
                    frozenset(config.get("taints") or ()),
                    config.get("kv_transfer_domain") or "",
                    config.get("kv_transfer_enforcement") == "required",
                )
            )
    return found
