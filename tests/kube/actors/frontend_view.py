"""One simulated frontend and its HTTP responses, like a frontend of Dynamo 1.6.1.

Only the addresses that dynctl asks are there. Statuses and bodies are those of the captures
(tests/captures/http-frontend*, http-busy-threshold.txt, metrics-frontend-disagg.txt).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from tests.kube.objects import Json
from tests.kube.objects.discovery import MODEL

VERSION: Final = "1.6.1"
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
_THRESHOLDS: Final = (
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
)
_NEEDS: Final = {"prefill": [["decode"]], "decode": [["prefill"]]}
_FACTS: Final = {
    "context_length": 0,
    "kv_cache_block_size": 16,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "migration_limit": 0,
    "total_kv_blocks": 8192,
}


@dataclass(frozen=True, slots=True)
class Known:
    """One worker in a router. ``namespace`` is Dynamo's."""

    number: int
    role: str
    taints: frozenset[str]
    domain: str
    required: bool
    namespace: str = "dynamo"

    @property
    def value(self) -> str:
        """The taint by which it is tied to others; empty where it has none."""
        start = f"dynamo.topology/{self.domain}="
        return next((one for one in self.taints if one.startswith(start)), "")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    body: str = ""
    kind: str = JSON


@dataclass(slots=True)
class View:
    """``kv`` False: another router mode, which lists no workers. ``requests``: every request, as
    ``METHOD path``. ``chat``: what a chat is answered with instead of by :meth:`choose`."""

    workers: tuple[Known, ...] = ()
    kv: bool = True
    model: str = MODEL
    turns: itertools.count[int] = field(default_factory=itertools.count)
    thresholds: dict[str, float | int | None] = field(
        default_factory=lambda: dict.fromkeys(_THRESHOLDS)
    )
    requests: list[str] = field(default_factory=list)
    chat: Callable[[], tuple[int, Any]] | None = None

    def answer(self, method: str, path: str, body: bytes = b"", kind: str = JSON) -> Answer:
        """To one request; ``kind`` is the Content-Type of its body."""
        self.requests.append(f"{method} {path}")
        if path == "/busy_threshold":
            return self._busy(method, body, kind)
        if method == "POST" and path == "/v1/chat/completions":
            return _json(*(self.chat or self.choose)())
        if method != "GET":
            return _absent(method, path)
        if path == "/metrics":
            return Answer(200, self.metrics(), "text/plain; version=0.0.4")
        ready, model = path.endswith("/ready"), path.removeprefix("/v1/models/")
        if ready and path.startswith("/v1/models/"):
            return self._ready(unquote(model.removesuffix("/ready")))
        documents: Mapping[str, Callable[[], Json]] = {
            "/health": lambda: {"status": "healthy", "endpoints": [], "instances": []},
            "/live": lambda: {"status": "live", "message": "Service is live"},
            "/openapi.json": _openapi,
            "/v1/models": self._models,
        }
        return _json(200, documents[path]()) if path in documents else _absent(method, path)

    # -- what it serves ----------------------------------------------------------------------------

    def _models(self) -> Json:
        row = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "nvidia",
            "context_window": 0,
        }
        return {"object": "list", "data": [row] if self.workers else []}

    def _ready(self, model: str) -> Answer:
        if model != self.model or not self.workers:
            return _json(404, {"message": "Model not found", "type": "Not Found", "code": 404})
        spaces = {
            space: self._space(space) for space in sorted({w.namespace for w in self.workers})
        }
        ready = any(one["ready"] for one in spaces.values())
        why = {} if ready else {"reason": "no namespace has all required worker types live"}
        result = {"model": model, "ready": ready, **why, "namespaces": spaces}
        return _json(200 if ready else 503, result)

    def _space(self, namespace: str) -> Json:
        roles = [one.role for one in self.workers if one.namespace == namespace]
        present = sorted(set(roles))
        wanted = {kind for role in present for group in _NEEDS.get(role, ()) for kind in group}
        missing = sorted(wanted - set(present))
        why = {"reason": f"missing worker types: {', '.join(missing)}"} if missing else {}
        types = {
            role: {"workers": roles.count(role), "needs": _NEEDS.get(role, [])} for role in present
        }
        return {
            "ready": not missing,
            **why,
            "worker_types": types,
            "present": present,
            "missing_worker_types": missing,
        }

    def metrics(self) -> str:
        return "".join(f"{line}\n" for line in self._rows())

    def _rows(self) -> Iterator[str]:
        model = f'model="{self.model}"'
        yield f"dynamo_frontend_model_ready{{{model}}} {int(bool(self.workers))}"
        for name, value in _FACTS.items() if self.workers else ():
            yield f"dynamo_frontend_model_{name}{{{model}}} {value}"
        if not self.kv:
            return
        for space in sorted({one.namespace for one in self.workers if one.role == "prefill"}):
            yield (
                f"dynamo_component_router_kv_event_source_mismatch_workers{{{model},"
                f'target_component="prefill",target_endpoint="generate",target_namespace="{space}"'
                ',worker_type="prefill"} 0'
            )
        for one in self.workers:
            yield (
                "dynamo_component_router_worker_registered"
                f'{{dp_rank="0",router_worker_id="{one.number}",worker_type="{one.role}"}} 1'
            )

    # -- what it does ------------------------------------------------------------------------------

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
        return 200, self.served_by(prefill, decodes[turn % len(decodes)])

    def served_by(self, prefill: Known, decode: Known) -> Json:
        """The body of a chat that these two served."""
        served = {"prefill_worker_id": prefill.number, "decode_worker_id": decode.number}
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}}
        return {
            "object": "chat.completion",
            "model": self.model,
            "choices": [choice],
            "nvext": {"worker_id": served},
        }

    # -- busy thresholds ---------------------------------------------------------------------------

    def _busy(self, method: str, body: bytes, kind: str) -> Answer:
        if method == "GET":
            row = {"model": self.model, **self.thresholds}
            return _json(200, {"thresholds": [row] if self.workers else []})
        if method != "POST":
            return Answer(405, kind="")
        if kind != JSON:
            return Answer(415, "Expected request with `Content-Type: application/json`", TEXT)
        try:
            result = json.loads(body)
        except ValueError as error:
            return Answer(400, f"Failed to parse the request body as JSON: {error}", TEXT)
        problem = _problem(result)
        if problem:
            unread = "Failed to deserialize the JSON body into the target type"
            return _json(422, {"error": f"{unread}: {problem}"})
        given = {name: result[name] for name in _THRESHOLDS if result.get(name) is not None}
        for name, value in given.items():
            says = _out_of_range(name, value)
            if says:
                return _json(400, {"error": f"{name} must be {says}, got {value}"})
        if result["model"] != self.model or not self.workers:
            if given:
                says = f"Model '{result['model']}' not found. Thresholds can only be set for"
                return _json(404, {"error": f"{says} discovered models."})
            return _json(200, {"model": result["model"], **dict.fromkeys(_THRESHOLDS)})
        self.thresholds |= given
        return _json(200, {"model": self.model, **self.thresholds})


def _problem(result: Any) -> str:
    """What Dynamo's own types refuse; its words for it are another parser's."""
    if not isinstance(result, dict) or "model" not in result:
        return "missing field `model`"
    name = "active_prefill_tokens_threshold"
    value = result.get(name)
    if value is not None and (not isinstance(value, int) or value < 0):
        return f"{name}: invalid value: {value}, expected u64"
    return ""


def _out_of_range(name: str, value: float) -> str:
    if name == "active_decode_blocks_threshold" and not 0 <= value <= 1:
        return "between 0.0 and 1.0"
    if name == "active_prefill_tokens_threshold_frac" and value < 0:
        return "a finite value greater than or equal to 0.0"
    return ""


def _json(status: int, body: Any) -> Answer:
    return Answer(status, json.dumps(body, separators=(",", ":")))


def _absent(method: str, path: str) -> Answer:
    message = f"Route not found: {method} {path}"
    return _json(404, {"message": message, "type": "Not Found", "code": 404})


def _openapi() -> Json:
    info = {"title": "NVIDIA Dynamo OpenAI Frontend", "version": VERSION}
    return {"openapi": "3.1.0", "info": info, "paths": {}}
