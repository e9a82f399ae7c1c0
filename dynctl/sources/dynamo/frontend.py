"""A Dynamo frontend over HTTP: what it serves, how loaded it is, its busy thresholds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import TimedOut, Unreachable, UsageProblem
from dynctl.sources.frontend.client import _checked as checked_url
from dynctl.wire.dynamo.discovery import INSTANCES, Instance, Malformed, parse_entry
from dynctl.wire.dynamo.frontend_metrics import MAX_BYTES, FrontendMetrics, read_frontend_metrics
from router_core import THRESHOLD_SETTINGS

MAX_ANSWER_BYTES: Final = MAX_BYTES
_CONNECT_TIMEOUT: Final = 5.0

Kind = Literal["dynamo", "dynctl", "other"]
Values = dict[str, float | int | None]

#: What to set instead of switching a threshold off: nothing is above it. Comparisons are strict,
#: and the prefill limits are far beyond what a rank can hold.
NEVER_BUSY: Final[dict[str, float | int]] = {
    "active_decode_blocks_threshold": 1.0,
    "active_prefill_tokens_threshold": 1_000_000_000_000,
    "active_prefill_tokens_threshold_frac": 1_000_000,
}


@dataclass(frozen=True, slots=True)
class FrontendHealth:
    """What a frontend has found in discovery.

    ``status`` stays "healthy" with no worker and no model, as seen on Dynamo 1.6.1.
    """

    status: str
    endpoints: tuple[str, ...] = ()
    instances: tuple[Instance, ...] = ()
    malformed: tuple[Malformed, ...] = ()


@dataclass(frozen=True, slots=True)
class NamespaceReadiness:
    """Workers of one namespace by type; ``needs`` as in a card: alternatives of worker types."""

    ready: bool
    workers: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModelReadiness:
    """Whether a model can be served, and which worker types lack. Workers that the frontend
    rejected (another router config than the first one's) are not counted."""

    model: str
    ready: bool
    reason: str = ""
    namespaces: Mapping[str, NamespaceReadiness] = field(default_factory=dict)


class DynamoFrontend:
    """One frontend. ``timeout`` is in seconds, for each whole answer.

    Methods raise Unreachable (nobody there, or no Dynamo frontend), TimedOut, or UsageProblem
    where the frontend refuses what was asked.
    """

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self.url = checked_url(url)
        self.title = f"Dynamo frontend {self.url}"
        self._timeout = timeout

    # -- who is there ----------------------------------------------------------------------

    def identify(self) -> Kind:
        """Whose frontend answers. Raises Unreachable or TimedOut where nobody does.

        dynctl has /v1/config; Dynamo answers a path that it lacks in a shape of its own, and
        tells its name in /openapi.json.
        """
        response = self._exchange("GET", "/v1/config")
        document = _document(response)
        if response.status_code == 200 and "settings" in document:
            return "dynctl"
        if response.status_code in (401, 403):
            # A gateway in front of a Dynamo frontend may guard it too.
            return "dynctl" if "dynctl" in response.text else "other"
        if document.get("message") == "Route not found: GET /v1/config":
            return "dynamo"
        return "dynamo" if self.openapi_version() is not None else "other"

    def openapi_version(self) -> str | None:
        """Dynamo's version; None where it is not told."""
        response = self._exchange("GET", "/openapi.json")
        info = _document(response).get("info")
        if response.status_code != 200 or not isinstance(info, dict):
            return None
        title, version = info.get("title"), info.get("version")
        if isinstance(title, str) and "Dynamo" in title and isinstance(version, str):
            return version
        return None

    # -- what is served --------------------------------------------------------------------

    def health(self) -> FrontendHealth:
        """The instances in discovery as this frontend sees it."""
        # 503 is its answer while it is not healthy.
        response = self._send("GET", "/health", answers=(200, 503))
        read = self._decode(response, _HealthJson)
        entries = [parse_entry(f"{INSTANCES}health", bytes(raw)) for raw in read.instances]
        return FrontendHealth(
            status=read.status,
            endpoints=tuple(read.endpoints),
            instances=tuple(e for e in entries if isinstance(e, Instance)),
            malformed=tuple(e for e in entries if isinstance(e, Malformed)),
        )

    def models(self) -> list[str]:
        return [row.id for row in self._decode(self._send("GET", "/v1/models"), _ModelsJson).data]

    def ready(self, model: str) -> ModelReadiness:
        """How many workers serve ``model``; raises UsageProblem where the frontend lacks it."""
        path = f"/v1/models/{quote(model, safe='')}/ready"
        # 503 is its answer for a model that lacks a worker type; /v1/models does not list it then.
        response = self._send("GET", path, answers=(200, 404, 503))
        if response.status_code == 404:
            if _message(response).startswith("Route not found"):
                self._strange(path, "it does not tell readiness; Dynamo 1.6 does")
            self._no_model(model, self.models())
        read = self._decode(response, _ReadyJson)
        namespaces = {
            name: NamespaceReadiness(
                ready=space.ready,
                workers={kind: row.workers for kind, row in space.worker_types.items()},
                needs={
                    kind: tuple(tuple(group) for group in row.needs)
                    for kind, row in space.worker_types.items()
                },
                missing=tuple(space.missing_worker_types),
                reason=space.reason or "",
            )
            for name, space in read.namespaces.items()
        }
        return ModelReadiness(read.model, read.ready, read.reason or "", namespaces)

    def metrics(self) -> FrontendMetrics:
        try:
            return read_frontend_metrics(self._send("GET", "/metrics").content)
        except WireError as error:
            self._strange("/metrics", str(error))

    # -- busy thresholds -------------------------------------------------------------------

    def thresholds(self) -> dict[str, Values]:
        """Model -> its thresholds by our names, for every model that can be served now."""
        read = self._decode(self._send("GET", "/busy_threshold"), _ThresholdsJson)
        return {row.model: _values(row) for row in read.thresholds}

    def set_thresholds(self, model: str, values: Mapping[str, float | int | None]) -> Values:
        """Set some thresholds of ``model`` on this frontend; returns all that are in force.

        Raises UsageProblem for None where a threshold is set: Dynamo takes a null as "leave it"
        and has no way to switch one off. Raising a threshold does not free a worker at once:
        Dynamo judges a rank again when it reports a new value.
        """
        _refuse_unknown(values)
        present = self.thresholds()
        if model not in present:
            self._no_model(model, list(present))
        self.refuse(model, present[model], values)
        asked = {name: value for name, value in values.items() if value is not None}
        if not asked:
            return present[model]
        response = self._send("POST", "/busy_threshold", {"model": model, **asked})
        after = _values(self._decode(response, _ThresholdRowJson))
        kept = next((name for name, value in asked.items() if after[name] != value), None)
        if kept is not None:
            self._strange("/busy_threshold", f"{kept} is {after[kept]} after setting {asked[kept]}")
        return after

    def refuse(self, model: str, present: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Raises UsageProblem where ``values`` cannot be set over ``present``."""
        _refuse_unknown(values)
        for name, value in values.items():
            if value is None and present[name] is not None:
                raise UsageProblem(
                    f"{model}: {name} is {present[name]:g} on {self.url}, and a Dynamo "
                    "frontend cannot switch a threshold off while it runs",
                    f"set it so high that no rank is above it: {NEVER_BUSY[name]}\n"
                    "or restart the frontend without it",
                )

    def nearest(self, values: Mapping[str, float | int | None]) -> Values:
        """``values`` as far as they can be had back: what nothing is above stands for off."""
        return {k: NEVER_BUSY[k] if value is None else value for k, value in values.items()}

    # -- a request -------------------------------------------------------------------------

    def chat(
        self, model: str, message: str, nvext: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Really send a chat of one answer token; status and document, whatever they are.

        ``nvext`` is Dynamo's extension of the request. That of a 200 names the workers that served
        it in ``worker_id``.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": 1,
            "nvext": {"extra_fields": ["worker_id"], **(nvext or {})},
        }
        response = self._exchange("POST", "/v1/chat/completions", body)
        return response.status_code, _document(response)

    # -- inside ----------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        answers: tuple[int, ...] = (200,),
    ) -> httpx.Response:
        response = self._exchange(method, path, body)
        if response.status_code in answers:
            return response
        status, message = response.status_code, _message(response)
        told = f"{self.url}{path} answered {status}{': ' + message if message else ''}"
        if status in (401, 403):
            raise UsageProblem(
                told, "something in front of the frontend wants credentials; name its own address"
            )
        if status in (400, 409, 422):
            raise UsageProblem(told)
        if status == 404 and method == "POST":
            raise UsageProblem(told)
        raise Unreachable(told, _WHO)

    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        try:
            return self._request(method, path, body)
        except httpx.ConnectTimeout:
            raise Unreachable(
                f"{self.url} did not accept a connection within "
                f"{min(self._timeout, _CONNECT_TIMEOUT):g} s",
                "is the address right? name another: --frontend http://HOST:PORT",
            ) from None
        except httpx.TimeoutException:
            raise TimedOut(
                f"{self.url}{path} did not answer within {self._timeout:g} s",
                f"try a longer one: --timeout {self._timeout * 3:g}",
            ) from None
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{self.url} does not answer: {str(error) or type(error).__name__}",
                "does the Dynamo frontend run, and is it reachable from here?\n"
                "name another: --frontend http://HOST:PORT, or set DYNCTL_FRONTEND",
            ) from None

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        limits = httpx.Timeout(self._timeout, connect=min(self._timeout, _CONNECT_TIMEOUT))
        deadline = time.monotonic() + self._timeout
        # trust_env: a proxy of the machine must not see control calls to a local frontend.
        with httpx.Client(timeout=limits, trust_env=False) as client:
            with client.stream(method, self.url + path, json=body) as response:
                size = 0
                parts = []
                for part in response.iter_bytes():
                    size += len(part)
                    if size > MAX_ANSWER_BYTES:
                        raise httpx.TransportError(f"answer over {MAX_ANSWER_BYTES:,} bytes")
                    # httpx bounds each read; a server that drips must not hold us.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the answer did not end in time")
                    parts.append(part)
            return httpx.Response(
                response.status_code,
                headers={"content-type": response.headers.get("content-type", "")},
                content=b"".join(parts),
            )

    def _decode(self, response: httpx.Response, kind: type[_Json]) -> _Json:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._strange("", str(error))

    def _strange(self, path: str, problem: str) -> NoReturn:
        raise Unreachable(
            f"{self.url}{path} answers, but not as a Dynamo frontend does: {problem}", _WHO
        )

    def _no_model(self, model: str, present: list[str]) -> NoReturn:
        raise UsageProblem(
            f"{self.url} serves no model {model}",
            f"it serves {', '.join(sorted(present))}" if present else "it serves none now",
        )


_WHO: Final = "is that a Dynamo frontend? /openapi.json tells its name and version"


# -- the answers -----------------------------------------------------------------------------------


class _HealthJson(msgspec.Struct):
    status: str
    endpoints: list[str] = []
    instances: list[msgspec.Raw] = []


class _ModelJson(msgspec.Struct):
    id: str


class _ModelsJson(msgspec.Struct):
    data: list[_ModelJson]


class _WorkerTypeJson(msgspec.Struct):
    workers: int
    needs: list[list[str]] = []


class _NamespaceJson(msgspec.Struct):
    ready: bool
    worker_types: dict[str, _WorkerTypeJson] = {}
    missing_worker_types: list[str] = []
    reason: str | None = None


class _ReadyJson(msgspec.Struct):
    model: str
    ready: bool
    namespaces: dict[str, _NamespaceJson] = {}
    reason: str | None = None


class _ThresholdRowJson(msgspec.Struct):
    model: str
    active_decode_blocks_threshold: float | int | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | int | None = None


class _ThresholdsJson(msgspec.Struct):
    thresholds: list[_ThresholdRowJson]


_Json = TypeVar("_Json", bound=msgspec.Struct)


def _values(row: _ThresholdRowJson) -> Values:
    return {name: getattr(row, name) for name in THRESHOLD_SETTINGS}


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    """Dynamo would answer 200 and do nothing. Raises UsageProblem."""
    unknown = sorted(set(values) - set(THRESHOLD_SETTINGS))
    if unknown:
        raise UsageProblem(
            f"{unknown[0]}: no such threshold; expected {', '.join(THRESHOLD_SETTINGS)}"
        )


def _document(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; empty where it is not one."""
    try:
        document = msgspec.json.decode(response.content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _message(response: httpx.Response) -> str:
    """The reason that an error answer gives: ``error``, ``message``, or plain text."""
    document = _document(response)
    for key in ("error", "message"):
        if isinstance(document.get(key), str):
            return str(document[key])[:500]
    return "" if document else response.text.strip()[:500]
