"""The HTTP endpoints of one Dynamo frontend: models, metrics, busy thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NoReturn
from urllib.parse import quote

import httpx
import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.documents.models import ModelReadiness
from dynctl.documents.thresholds import ModelThresholds, Thresholds, ThresholdValues
from dynctl.sources.http import HttpFrontend, error_message, json_object, threshold_values
from dynctl.wire.dynamo.discovery import INSTANCES, Instance, Malformed, parse_entry
from dynctl.wire.dynamo.frontend_metrics import MAX_BYTES, FrontendMetrics, read_frontend_metrics
from router_core import THRESHOLD_SETTINGS

Kind = Literal["dynamo", "dynctl", "other"]

#: Values in place of off: no load is above them. Comparisons are strict, and the prefill limits are
#: far beyond what a rank can hold.
NEVER_BUSY: Final[dict[str, float | int]] = {
    "active_decode_blocks_threshold": 1.0,
    "active_prefill_tokens_threshold": 1_000_000_000_000,
    "active_prefill_tokens_threshold_frac": 1_000_000,
}


@dataclass(frozen=True, slots=True)
class FrontendHealth:
    """The instances that a frontend found in discovery.

    ``status`` stays "healthy" with no worker and no model, as seen on Dynamo 1.6.1.
    """

    status: str
    endpoints: tuple[str, ...] = ()
    instances: tuple[Instance, ...] = ()
    malformed: tuple[Malformed, ...] = ()


class DynamoFrontend(HttpFrontend):
    """One frontend. ``timeout``: seconds for each whole response.

    Methods raise Unreachable (no response, or not a Dynamo frontend), TimedOut, or UsageProblem
    where the frontend refuses the request.
    """

    max_bytes: ClassVar[int] = MAX_BYTES
    described: ClassVar[str] = "a Dynamo frontend does"
    unexpected_hint: ClassVar[str] = (
        "check that it is a Dynamo frontend: /openapi.json has its name and version"
    )
    unreachable_hint: ClassVar[str] = (
        "does the Dynamo frontend run, and is it reachable from here?\n"
        "name another: --frontend http://HOST:PORT, or set DYNCTL_FRONTEND"
    )

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        super().__init__(url, timeout)
        self.title = f"Dynamo frontend {self.url}"

    # -- identity --------------------------------------------------------------------------

    def identify(self) -> Kind:
        """The kind of frontend that answers. Raises Unreachable or TimedOut.

        dynctl has /v1/config; Dynamo answers an unknown path with a document of its own, and has
        its name in /openapi.json.
        """
        response = self.exchange("GET", "/v1/config")
        document = json_object(response)
        if response.status_code == 200 and "settings" in document:
            return "dynctl"
        if response.status_code in (401, 403):
            # A gateway in front of a Dynamo frontend may guard it too.
            return "dynctl" if "dynctl" in response.text else "other"
        if document.get("message") == "Route not found: GET /v1/config":
            return "dynamo"
        return "dynamo" if self.openapi_version() is not None else "other"

    def openapi_version(self) -> str | None:
        """Dynamo's version; None where the frontend does not export it."""
        response = self.exchange("GET", "/openapi.json")
        info = json_object(response).get("info")
        if response.status_code != 200 or not isinstance(info, dict):
            return None
        title, version = info.get("title"), info.get("version")
        if isinstance(title, str) and "Dynamo" in title and isinstance(version, str):
            return version
        return None

    # -- models and metrics -----------------------------------------------------------------

    def health(self) -> FrontendHealth:
        """The instances in discovery, as this frontend reads it."""
        # Its status is 503 while it is not healthy.
        response = self.send("GET", "/health", answers=(200, 503))
        read = self.document(response, _HealthJson)
        entries = [parse_entry(f"{INSTANCES}health", bytes(raw)) for raw in read.instances]
        return FrontendHealth(
            status=read.status,
            endpoints=tuple(read.endpoints),
            instances=tuple(e for e in entries if isinstance(e, Instance)),
            malformed=tuple(e for e in entries if isinstance(e, Malformed)),
        )

    def ready(self, model: str) -> ModelReadiness:
        """Whether ``model`` can be served; raises UsageProblem for a model that is not there."""
        path = f"/v1/models/{quote(model, safe='')}/ready"
        # 503: a worker type of the model is missing; /v1/models does not list the model then.
        response = self.send("GET", path, answers=(200, 404, 503))
        if response.status_code == 404:
            if error_message(response).startswith("Route not found"):
                self.unexpected("it does not report readiness; Dynamo 1.3 does", path)
            served = self.models()
            if model in served:
                self.unexpected(f"it serves {model} and does not report its readiness", path)
            self._no_model(model, served)
        return self.document(response, ModelReadiness)

    def metrics(self) -> FrontendMetrics:
        try:
            return read_frontend_metrics(self.send("GET", "/metrics").content)
        except WireError as error:
            self.unexpected(str(error), "/metrics")

    # -- busy thresholds -------------------------------------------------------------------

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        """Set some thresholds of ``model`` on this frontend; returns all that are in force.

        Raises UsageProblem for None where a threshold is set: Dynamo ignores null and cannot
        switch a threshold off. Raising a threshold does not free a worker at once: Dynamo decides
        again when a rank reports a new value.
        """
        _refuse_unknown(values)
        present = self.thresholds()
        if model not in present:
            self._no_model(model, list(present))
        self.check_values(model, present[model], values)
        wanted = {name: value for name, value in values.items() if value is not None}
        if not wanted:
            return present[model]
        path = "/busy_threshold"
        response = self.send("POST", path, {"model": model, **wanted})
        after = threshold_values(self.document(response, ModelThresholds))
        kept = next((name for name, value in wanted.items() if after[name] != value), None)
        if kept is not None:
            self.unexpected(f"{kept} is {after[kept]} after setting {wanted[kept]}", path)
        return after

    def check_values(self, model: str, present: ThresholdValues, values: ThresholdValues) -> None:
        """Raise UsageProblem where ``values`` cannot replace ``present``."""
        _refuse_unknown(values)
        for name, value in values.items():
            if value is None and present[name] is not None:
                raise UsageProblem(
                    f"{model}: {name} is {present[name]:g} on {self.url}, and a Dynamo "
                    "frontend cannot switch a threshold off while it runs",
                    f"set it so high that no rank is above it: {NEVER_BUSY[name]}\n"
                    "or restart the frontend without it",
                )

    def settable_values(self, values: ThresholdValues) -> Thresholds:
        """``values`` with NEVER_BUSY in place of off."""
        return {k: NEVER_BUSY[k] if value is None else value for k, value in values.items()}

    # -- a request -------------------------------------------------------------------------

    def chat(
        self, model: str, message: str, nvext: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Send a chat request for one output token; returns status and document of any response.

        ``nvext`` is Dynamo's extension of the request. In a response with status 200 its
        ``worker_id`` names the workers that served the request.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": 1,
            "nvext": {"extra_fields": ["worker_id"], **(nvext or {})},
        }
        response = self.exchange("POST", "/v1/chat/completions", body)
        return response.status_code, json_object(response)

    # -- inside ----------------------------------------------------------------------------

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        answers: tuple[int, ...] = (200,),
    ) -> httpx.Response:
        response = self.exchange(method, path, body)
        if response.status_code in answers:
            return response
        status, message = response.status_code, error_message(response)
        problem = f"{self.url}{path} answered {status}{': ' + message if message else ''}"
        if status in (401, 403):
            raise UsageProblem(
                problem,
                "a gateway in front of the frontend needs credentials; name the frontend itself",
            )
        if status in (400, 409, 422):
            raise UsageProblem(problem)
        if status == 404 and method == "POST":
            raise UsageProblem(problem)
        raise Unreachable(problem, self.unexpected_hint)

    def _no_model(self, model: str, present: list[str]) -> NoReturn:
        raise UsageProblem(
            f"{self.url} serves no model {model}",
            f"it serves {', '.join(sorted(present))}" if present else "it serves none now",
        )


# -- responses -------------------------------------------------------------------------------------


class _HealthJson(msgspec.Struct):
    status: str
    endpoints: list[str] = []
    instances: list[msgspec.Raw] = []


def _refuse_unknown(values: ThresholdValues) -> None:
    """Raise UsageProblem for an unknown threshold: Dynamo answers 200 to it and does nothing."""
    unknown = sorted(set(values) - set(THRESHOLD_SETTINGS))
    if unknown:
        raise UsageProblem(
            f"{unknown[0]}: no such threshold; expected {', '.join(THRESHOLD_SETTINGS)}"
        )
