"""The frontends of simulated pods: their workers, served over HTTP.

A frontend has a worker once its ready endpoint in a slice and its metadata exist, and routes by
the taints as Dynamo's router does.
"""

from __future__ import annotations

from dynctl.wire.kubernetes.names import GRAPH_LABEL
from tests.http_servers import Exchange, HttpServer
from tests.kube.actors.acting import Hands
from tests.kube.actors.frontend_view import Known, View
from tests.kube.api_server import ApiServer
from tests.kube.deployment import env_of, is_worker
from tests.kube.objects import Json, key_of
from tests.kube.objects.pods import FRONTEND_PORT


class _Server(HttpServer):
    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_port

    def respond(self, exchange: Exchange) -> None:
        kind = exchange.headers.get("Content-Type") or ""
        answer = self.view.answer(exchange.command, exchange.path, exchange.body, kind)
        headers = {"Content-Type": answer.kind} if answer.kind else {}
        exchange.reply(answer.body.encode(), answer.status, **headers)


class Frontends:
    """``misses``: frontend pod -> names of worker pods that it never hears of."""

    def __init__(self, hands: Hands, server: ApiServer) -> None:
        self.misses: dict[str, set[str]] = {}
        self.views: dict[tuple[str, str], View] = {}
        self._servers: dict[tuple[str, str], _Server] = {}
        self._hands, self._api = hands, server

    def address(self, namespace: str, pod: str) -> tuple[str, int]:
        """Host and port of a frontend."""
        return self._servers[namespace, pod].address

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
        result = self._hands.list("DynamoWorkerMetadata") if pods else []
        did = self._drop({key_of(pod) for pod in pods})
        for pod in pods:
            key = key_of(pod)
            space = f"{key[0]}-{pod['metadata']['labels'][GRAPH_LABEL]}"
            known = tuple(
                worker
                for body in result
                if _endpoint_of(body) in ready
                and body["metadata"]["name"] not in self.misses.get(key[1], ())
                for worker in _known(body, space)
            )
            view = self.views.get(key)
            if view is None:
                view = self.views[key] = View()
                self._servers[key] = _Server(view).start()
                self._api.forwards[(*key, FRONTEND_PORT)] = self._servers[key].address
            kv = env_of(pod).get("DYN_ROUTER_MODE") == "kv"
            if (view.workers, view.kv) != (known, kv):
                view.workers, view.kv = known, kv
                did = True
        return did

    def _drop(self, there: set[tuple[str, str]]) -> bool:
        gone = self._servers.keys() - there
        for key in gone:
            self._servers.pop(key).close()
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
                    card["namespace"],
                )
            )
    return found
