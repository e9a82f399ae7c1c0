"""The HTTP endpoints of one dynctl frontend or standalone router: requests and parsed responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final
from urllib.parse import quote

import httpx
import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, TimedOut, Unreachable, UsageProblem
from dynctl.base.naming import resolve_worker
from dynctl.documents.codec import decode
from dynctl.documents.config import ConfigDocument
from dynctl.documents.decisions import DecisionList, DecisionRow, PastDecision
from dynctl.documents.fleet_load import FleetLoad, LastTest
from dynctl.documents.route_result import RouteResult
from dynctl.documents.thresholds import ModelThresholds, Thresholds, ThresholdValues
from dynctl.documents.workers import WorkerRow, WorkersAnswer, decode_workers
from dynctl.sources.http import (
    WEB_PAGE,
    HttpFrontend,
    error_code,
    error_message,
    json_object,
    read_response,
    threshold_values,
)
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.wire.nvext import SESSION_HEADERS, NvExt

#: A larger response is not from a frontend of ours.
MAX_BYTES: Final = 512 * 1024 * 1024
TOKEN_HINT: Final = "set DYNCTL_TOKEN, or give --token TOKEN"  # noqa: S105  not a token
_REFUSED_HINT: Final = "set the --admin-token of that dynctl serve: DYNCTL_TOKEN, or --token TOKEN"
#: How the 404 of a Dynamo frontend and of engines for an unknown path begins.
_NO_ROUTE: Final = ("route not found", "no route ")
#: What other programs answer to a path that they do not have.
_NOT_OURS: Final = ("", "not found", "404: not found", WEB_PAGE)
_VERSION_HINT: Final = (
    "for a Dynamo add its --discovery; before an engine start a frontend: dynctl serve frontend "
    "--worker URL"
)


#: What to do where no decision has the wanted id.
UNKNOWN_DECISION_HINT: Final = "dynctl why without an ID lists the last decisions"


class AmbiguousDecision(UsageProblem):
    """The ids of several decisions end with the wanted text; the message has them."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "give one of these IDs, or more of its last characters")


class CallerRefused(UsageProblem):
    """The server refuses this caller: 401 or 403."""


class TokenRefused(CallerRefused):
    """The server refuses the token, or a request without one, for no other known reason."""


def refused_caller(address: str, response: httpx.Response) -> CallerRefused:
    """The error of a frontend that refuses the token or the caller (401, 403).

    A dynctl frontend names the reason in a code, and the command line shows its own words for it.
    """
    status, message = response.status_code, error_message(response)
    match error_code(response):
        case "token_needed":
            return CallerRefused(f"{address} needs a token ({status})", TOKEN_HINT)
        case "invalid_token":
            return TokenRefused(f"{address} refuses the token ({status})", _REFUSED_HINT)
        case "not_the_operator":
            # "POST /v1/workers: PROBLEM; WHAT TO DO"
            problem = message.partition(": ")[2] or message
            return CallerRefused(f"{address} refuses this caller ({status}): {problem}")
    shown = f": {message}" if message else ""
    return TokenRefused(f"{address} needs a token ({status}){shown}", TOKEN_HINT)


class FrontendClient(HttpFrontend):
    """One frontend. Methods raise Unreachable, TimedOut, or UsageProblem for a refused request."""

    max_bytes: ClassVar[int] = MAX_BYTES
    described: ClassVar[str] = "a dynctl frontend of this version"
    unexpected_hint: ClassVar[str] = "dynctl version --frontend URL compares the versions"
    unreachable_hint: ClassVar[str] = (
        "start a frontend: dynctl serve frontend --worker http://HOST:PORT\n"
        "or name another: --frontend http://HOST:PORT"
    )

    def __init__(self, url: str, token: str | None = None, timeout: float = 10.0) -> None:
        super().__init__(url, timeout, token)
        self.title = f"frontend {self.url}"
        self.has_token = bool(token)

    def answers_as_ours(self, timeout: float) -> bool:
        """Whether a dynctl frontend answers here. Raises TimedOut where it is not known: a server
        accepts the connection and does not answer within ``timeout`` seconds."""
        try:
            response = self.exchange("GET", "/v1/config", timeout=timeout)
        except TimedOut:
            raise
        except (DynctlError, OSError):
            return False
        if response.status_code in (401, 403):
            return "dynctl" in response.text
        return "settings" in json_object(response)

    def version(self) -> str | None:
        """The frontend's version, None where it does not report one."""
        document = json_object(self.send("GET", "/v1/config"))
        if not document:
            self.unexpected("expected a JSON object")
        version = document.get("version")
        return version if isinstance(version, str) else None

    def route(self, query: RouteQuery) -> RouteResult:
        """A dry run on the frontend, which has no ``--set`` and its own tokenizer."""
        if query.model_path is not None:
            raise UsageProblem(
                f"--model-path {query.model_path}: a frontend uses its own tokenizer",
                "leave it out, or use it with --view, --save-view or --set",
            )
        wanted = query.lora or query.wanted
        served = self.model_rows()
        # An adapter is routed only when it is named.
        names = [row.id for row in served if wanted is not None or not row.parent]
        asked = query.request(choose_model(wanted, names))
        body = dict(asked.body)
        controls = self._controls(query, asked.nvext, body.get("nvext"))
        if controls:
            body["nvext"] = controls
        headers = None if query.session_id is None else {SESSION_HEADERS[0]: query.session_id}
        return self.document(self.send("POST", "/v1/route", body, headers), RouteResult)

    def token_ids(self, query: RouteQuery) -> list[int] | None:
        """The prompt's token ids from an engine of the model; None where no engine has them, or
        where the query is a whole body, whose tools a tokenizer renders."""
        if query.body is not None:
            return None
        named = query.lora or query.wanted
        body = query.request_body() | ({} if named is None else {"model": named})
        body.pop("cache_salt", None)
        try:
            ids = json_object(self.send("POST", "/tokenize", body)).get("tokens")
        except DynctlError:
            return None
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            return None
        return ids or None

    def workers(self) -> list[WorkerRow]:
        return self.workers_and_replicas().workers

    def workers_and_replicas(self) -> WorkersAnswer:
        """The workers, and the other routers whose requests count in their load."""
        try:
            return decode_workers(self.send("GET", "/v1/workers").content)
        except WireError as error:
            self.unexpected(str(error))

    def cordon(self, worker: str, *, cordoned: bool) -> WorkerRow:
        """Take a worker out of routing, or put it back; its row afterwards."""
        verb = "cordon" if cordoned else "uncordon"
        path = f"/v1/workers/{quote(worker, safe='')}/{verb}"
        return self.document(self.send("POST", path, {}), WorkerRow)

    def lift_cordon(self, worker: str) -> None:
        """Give a worker requests again, one that left at its return. Nothing without a cordon."""
        path = f"/v1/workers/{quote(worker, safe='')}/uncordon"
        response = self.exchange("POST", path, {})
        if response.status_code != 404:
            self._expected(response, path)

    def add_worker(self, body: Mapping[str, Any]) -> WorkerRow:
        """Register a worker, or replace the one with its name; its row after the first probe."""
        return self.document(self.send("POST", "/v1/workers", body), WorkerRow)

    def remove_worker(self, worker: str) -> None:
        """Take a worker out of the fleet; its running requests go on."""
        self.send("DELETE", f"/v1/workers/{quote(worker, safe='')}")

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        body: dict[str, Any] = {"model": model}
        body |= {name: value for name, value in values.items() if value is not None}
        off = [name for name, value in values.items() if value is None]
        if off:
            body["clear"] = off
        response = self.send("POST", "/busy_threshold", body)
        return threshold_values(self.document(response, ModelThresholds))

    def check_values(self, model: str, present: ThresholdValues, values: ThresholdValues) -> None:
        """Accept every value: the command checks the bounds, and the frontend again."""

    def settable_values(self, values: ThresholdValues) -> Thresholds:
        """``values`` as they are: a dynctl frontend can switch a threshold off again."""
        return dict(values)

    def config(self) -> ConfigDocument:
        return self.document(self.send("GET", "/v1/config"), ConfigDocument)

    def recent_decisions(self, limit: int) -> list[DecisionRow]:
        """The last decisions, newest first."""
        response = self.send("GET", f"/v1/decisions?limit={limit}")
        return self.document(response, DecisionList).decisions

    def decision(self, decision_id: str) -> RouteResult:
        """A decision by its id, or by the id's last characters if they are unique."""
        path = f"/v1/decisions/{quote(decision_id, safe='')}"
        return self.document(self.send("GET", path), PastDecision)

    def fleet(self, cards: str | None = None) -> FleetLoad:
        """The load of the fleet and the conditions of its evaluation. ``cards``: the set that is
        known already."""
        path = "/v1/fleet" if cards is None else f"/v1/fleet?cards={quote(cards, safe='')}"
        return self.document(self.send("GET", path), FleetLoad)

    def report_test(self, result: LastTest) -> None:
        """Let the frontend keep the result of a test."""
        self.send("POST", "/v1/test", msgspec.to_builtins(result))

    def save(self) -> bytes:
        """The router's state as a view file."""
        return self.send("GET", "/v1/view").content

    # -- inside ----------------------------------------------------------------------------

    def _controls(
        self, query: RouteQuery, nvext: NvExt, given: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The request's constraints and pins, as any client of the frontend sends them.

        ``nvext``, from ``given``: those of the body; the command line adds constraints and replaces
        pins.
        """
        controls: dict[str, Any] = dict(given or {})
        if query.required or query.preferred:
            taints = nvext.routing_constraints
            controls["routing_constraints"] = {
                "required_taints": [*(taints.required_taints or ()), *query.required],
                "preferred_taints": {**(taints.preferred_taints or {}), **query.preferred},
            }
        pins = (("prefill_worker_id", query.pin_prefill), ("decode_worker_id", query.pin_decode))
        if any(text is not None for _, text in pins):
            workers = [(row.worker_id, row.name) for row in self.workers()]
            for key, text in pins:
                if text is not None:
                    controls[key] = resolve_worker(text, workers)
        return controls

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        return self._expected(self.exchange(method, path, body, headers=headers), path)

    def _expected(self, response: httpx.Response, path: str) -> httpx.Response:
        """A response with what was asked for; raises DynctlError for others."""
        status = response.status_code
        if status in (200, 201):
            return response
        message = error_message(response)
        if status in (401, 403):
            raise refused_caller(f"{self.url}{path}", response)
        if status == 404 and path == "/v1/view":
            raise UsageProblem(f"{self.url} cannot save views (404): {message}")
        if path.startswith("/v1/decisions/") and status in (400, 404) and message:
            raise _unknown_decision(f"{self.url}: {message}", error_code(response))
        plain = message.lower()
        if status == 404 and (plain in _NOT_OURS or plain.startswith(_NO_ROUTE)):
            raise UsageProblem(f"{self.url}{path}: 404, not a dynctl frontend", _VERSION_HINT)
        if status == 501:
            raise UsageProblem(f"{self.url}: {message}")
        if status >= 500:
            raise Unreachable(f"{self.url}{path} failed with {status}: {message}")
        raise UsageProblem(f"{self.url}{path} answered {status}: {message}")


def _unknown_decision(problem: str, code: str) -> UsageProblem:
    """The error for an id with which a frontend has no decision, or several; ``code``: its own."""
    if code == "ambiguous_decision":
        return AmbiguousDecision(problem)
    return UsageProblem(problem, UNKNOWN_DECISION_HINT if code == "unknown_decision" else "")


class AsyncFrontendClient:
    """What is read of one frontend again and again. ``timeout``: seconds for each response, not
    counting the time that the frontend waits for the next decision. Raises DynctlError or
    WireError."""

    def __init__(self, client: httpx.AsyncClient, url: str, timeout: float) -> None:
        self.name = url
        self._client = client
        self._timeout = timeout

    async def fleet(self, cards: str | None) -> FleetLoad:
        query = {} if cards is None else {"cards": cards}
        return decode(await self._get("/v1/fleet", query), FleetLoad)

    async def decisions(
        self,
        since: int,
        limit: int,
        wait: int,
        process: str = "",
        ends: int | None = None,
        filters: Mapping[str, str | int] = {"preferences": 1},
    ) -> DecisionList:
        query = {"since": since, "limit": limit, "wait": wait, **filters}
        if process:
            query["process"] = process
        query |= {} if ends is None else {"ends": ends}
        return decode(await self._get("/v1/decisions", query, wait), DecisionList)

    async def config(self) -> ConfigDocument:
        return decode(await self._get("/v1/config", {}), ConfigDocument)

    async def _get(self, path: str, query: Mapping[str, str | int], wait: int = 0) -> bytes:
        status, body = await read_response(
            self._client, self.name + path, MAX_BYTES, self._timeout, query, wait
        )
        if status in (401, 403):
            raise refused_caller(path, httpx.Response(status, content=body))
        if status == 404:
            raise UsageProblem(f"no {path}: an older dynctl, or not dynctl", _VERSION_HINT)
        if status != 200:
            raise Unreachable(f"{path} answered {status}")
        return body
