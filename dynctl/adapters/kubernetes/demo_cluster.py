"""A simulated cluster, healthy or with one trouble: for learning the tool without a cluster.

``demo_cluster.json`` has a deployment over two zones: objects, files, logs, and what its frontend
answers. A trouble is a merge patch (RFC 7386) of that document. Nothing changes, and no request
leaves this host.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import msgspec

from dynctl.adapters.kubernetes.following import place_of
from dynctl.adapters.ports import AccessReview, ClusterEvent, ClusterRefusal
from dynctl.base.errors import UsageProblem
from dynctl.wire.kubernetes.names import MOUNT_PATH

PREFIX: Final = "demo:"
"""Of the names under which ``--kube-context`` knows the simulated clusters."""
HEALTHY: Final = "healthy"

_NAMESPACE: Final = "prod"
_WATCH_S: Final = 240.0
_TERM: Final = re.compile(r"([^,\s=]+)(?:=([^,]*)| in \(([^)]*)\))?")
"""A term of a selector: ``KEY``, ``KEY=VALUE`` or ``KEY in (A,B)``."""


def demo_contexts() -> list[str]:
    """The names of the simulated clusters: ``demo:healthy``, then one for each trouble."""
    return [PREFIX + name for name in (HEALTHY, *_document()["troubles"])]


def demo_cluster(context: str) -> DemoCluster:
    """The cluster of a context that begins with :data:`PREFIX`. Raises UsageProblem."""
    document = _document()
    name = context.removeprefix(PREFIX)
    if name != HEALTHY and name not in document["troubles"]:
        known = ", ".join(demo_contexts())
        raise UsageProblem(
            f"--kube-context {context}: unknown simulated cluster", f"known: {known}"
        )
    patch = document["troubles"].get(name, {})
    return DemoCluster(context, _merge_patch(document["healthy"], patch))


class DemoCluster:
    """A :class:`dynctl.adapters.ports.Cluster`. ``state``: the document of the cluster.

    ``paths``: path -> object, of what is no list. ``objects``: ``PLURAL/NAMESPACE/NAME`` -> object.
    ``files``: pod -> file -> text, below the topology mount. ``logs``: pod -> text, and
    ``POD/previous``. ``frontend``: path -> what the frontends answer. ``denied``:
    ``USER VERB RESOURCE``. ``silent``: nodes whose kubelet does not run.
    """

    def __init__(self, context: str, state: Mapping[str, Any]) -> None:
        self.title = f"{context} (simulated, nothing runs)"
        self.namespace = _NAMESPACE
        self.now: float = state["now"]
        self._state = state
        self._closed = threading.Event()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        if path in self._state["paths"]:
            body: Mapping[str, Any] = self._state["paths"][path]
            return body
        return self._object(*place_of(path))

    def pages(
        self, path: str, query: Mapping[str, str] | None = None, *, page: int = 500
    ) -> Iterator[Mapping[str, Any]]:
        plural, namespace, _ = place_of(path)
        if plural not in self._state["plurals"]:
            raise ClusterRefusal(404, "NotFound", f"the simulated cluster has no {plural}")
        inside = f"{plural}/{namespace}/" if namespace else f"{plural}/"
        items = [
            body
            for key, body in self._state["objects"].items()
            if key.startswith(inside) and _is_selected(body, query or {})
        ]
        for start in range(0, max(1, len(items)), page):
            yield {"metadata": {"resourceVersion": "1"}, "items": items[start : start + page]}

    def watch(
        self, path: str, resource_version: str, query: Mapping[str, str] | None = None
    ) -> Iterator[ClusterEvent]:
        self._closed.wait(_WATCH_S)
        return iter(())

    def allowed(
        self, question: AccessReview, *, user: str | None = None, groups: tuple[str, ...] = ()
    ) -> bool:
        return f"{user} {question.verb} {question.resource}" not in self._state["denied"]

    def read_file(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> bytes:
        files = self._files(namespace, pod)
        directory, _, name = path.rpartition("/")
        if directory != MOUNT_PATH or name not in files:
            raise FileNotFoundError(path)
        content: str = files[name]
        return content.encode()

    def file_names(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> tuple[str, ...]:
        files = self._files(namespace, pod)
        if path != MOUNT_PATH:
            raise FileNotFoundError(path)
        return tuple(files)

    def log_lines(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        previous: bool = False,
        last: int | None = None,
        max_bytes: int = 1 << 20,
    ) -> Iterator[str]:
        self._expect_kubelet(namespace, pod)
        text: str = self._state["logs"].get(f"{pod}/previous" if previous else pod, "")
        lines = text.splitlines()
        return iter(lines if last is None else lines[-last:])

    @contextmanager
    def forward(self, namespace: str, pod: str, port: int) -> Iterator[str]:
        self._expect_kubelet(namespace, pod)
        server = _FrontendServer(self._state["frontend"])
        # How often it looks for its end, in seconds.
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def close(self) -> None:
        self._closed.set()

    def _object(self, plural: str, namespace: str, name: str) -> Mapping[str, Any]:
        body: Mapping[str, Any] | None = self._state["objects"].get(f"{plural}/{namespace}/{name}")
        if body is None:
            raise ClusterRefusal(404, "NotFound", f'{plural} "{name}" not found')
        return body

    def _expect_kubelet(self, namespace: str, pod: str) -> None:
        """Raise ClusterRefusal as an API server does, where the pod's node does not respond."""
        node = self._object("pods", namespace, pod)["spec"].get("nodeName", "")
        if node in self._state["silent"]:
            reason = f"error dialing backend: dial tcp {node}:10250: connect: connection refused"
            raise ClusterRefusal(500, "InternalError", reason)

    def _files(self, namespace: str, pod: str) -> Mapping[str, str]:
        self._expect_kubelet(namespace, pod)
        files: Mapping[str, str] = self._state["files"].get(pod, {})
        return files


class _FrontendServer(HTTPServer):
    """Answers GET on a free port of loopback, one request after another, with the texts and
    documents of ``answers``."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        super().__init__(("127.0.0.1", 0), _FrontendAnswer)


class _FrontendAnswer(BaseHTTPRequestHandler):
    server: _FrontendServer
    timeout = 10

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path)
        if answer is None:
            self._reply(404, {"message": f"Route not found: GET {self.path}", "code": 404})
        else:
            self._reply(200, answer)

    def do_POST(self) -> None:
        self._reply(501, {"message": "a simulated frontend serves and changes nothing"})

    def _reply(self, status: int, answer: Any) -> None:
        is_text = isinstance(answer, str)
        body = answer.encode() if is_text else msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests of this process are not logged."""


@cache
def _document() -> dict[str, Any]:
    data = Path(__file__).with_name("demo_cluster.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, Any])


def _is_selected(body: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    """Whether an object has the labels and the fields that the parameters of a list select."""
    labels = body["metadata"].get("labels", {})
    for key, value, several in _TERM.findall(query.get("labelSelector", "")):
        wanted = several.split(",") if several else [value]
        if key not in labels or (wanted != [""] and labels[key] not in wanted):
            return False
    for path, value, _ in _TERM.findall(query.get("fieldSelector", "")):
        field: Any = body
        for part in path.split("."):
            field = field.get(part, {})
        if field != value:
            return False
    return True


def _merge_patch(value: Any, patch: Any) -> Any:
    """RFC 7386; ``value`` stays as it is."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for key, part in patch.items():
        if part is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_patch(merged.get(key), part)
    return merged
