"""Answers from a running dynctl frontend (or standalone router), over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import TimedOut, Unreachable, UsageProblem
from dynctl.base.naming import resolve_worker
from dynctl.documents.codec import Document, decode
from dynctl.documents.config import ConfigDocument
from dynctl.documents.route_result import RouteResult
from dynctl.documents.workers import WorkerRow, decode_worker_rows
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.sources.view import open_view_bytes

if TYPE_CHECKING:
    from dynctl.sources.thresholds.replicas import Replica

#: An answer larger than this is not one of ours.
MAX_ANSWER_BYTES = 512 * 1024 * 1024
_CONNECT_TIMEOUT = 5.0


class FrontendClient:
    """One frontend. ``timeout`` is in seconds, for each answer."""

    def __init__(self, url: str, token: str | None = None, timeout: float = 10.0) -> None:
        self.url = _checked(url)
        self.title = f"frontend {self.url}"
        self.doubts: tuple[str, ...] = ()
        self.timeout = timeout
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    # -- what a Source answers -------------------------------------------------------------

    def route(self, query: RouteQuery) -> RouteResult:
        if query.assignments:
            # What-if is worked out here, on the frontend's state of this moment: a server that
            # serves need not play.
            return open_view_bytes(self.save(), self.url, self.title).route(query)
        if query.model_path is not None:
            raise UsageProblem(
                f"--model-path {query.model_path}: a frontend uses its own tokenizer",
                "leave it out, or use it with --view, --save-view or --set",
            )
        body: dict[str, Any] = {"model": choose_model(query.model, self._models())}
        if query.messages is not None:
            body["messages"] = list(query.messages)
        else:
            body["prompt"] = query.prompt if query.token_ids is None else list(query.token_ids)
        controls = self._controls(query)
        if controls:
            body["nvext"] = controls
        return self._document(self._send("POST", "/v1/route", body), RouteResult)

    def _controls(self, query: RouteQuery) -> dict[str, Any]:
        """The request's constraints and pins, as any client of the frontend would send them."""
        controls: dict[str, Any] = {}
        if query.required or query.preferred:
            controls["routing_constraints"] = {
                "required_taints": list(query.required),
                "preferred_taints": dict(query.preferred),
            }
        pins = (("prefill_worker_id", query.pin_prefill), ("decode_worker_id", query.pin_decode))
        if any(text is not None for _, text in pins):
            workers = [(row.worker_id, row.name) for row in self.workers()]
            for key, text in pins:
                if text is not None:
                    controls[key] = resolve_worker(text, workers)
        return controls

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        try:
            return decode_worker_rows(self._send("GET", "/v1/workers").content)
        except WireError as error:
            self._strange(str(error))

    def thresholds(self) -> dict[str, dict[str, float | int | None]]:
        document = self._json(self._send("GET", "/busy_threshold"))
        rows = document.get("thresholds", [])
        return {row["model"]: _thresholds(row) for row in rows}

    def set_thresholds(
        self, model: str, values: Mapping[str, float | int | None]
    ) -> dict[str, float | int | None]:
        body: dict[str, Any] = {"model": model}
        body |= {name: value for name, value in values.items() if value is not None}
        unset = [name for name, value in values.items() if value is None]
        if unset:
            body["clear"] = unset
        return _thresholds(self._json(self._send("POST", "/busy_threshold", body)))

    def refuse(self, model: str, present: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Ours takes whatever is within bounds, and the person's values are checked before."""

    def nearest(self, values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
        """Off can be had back here: ``values`` as they are."""
        return dict(values)

    @contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """This frontend, whoever's it is."""
        from dynctl.sources.dynamo.replicas import replica_at

        yield [replica_at(self)]

    def judged(self, model: str, values: Mapping[str, float | int | None]) -> list[WorkerRow]:
        from dynctl.sources.thresholds.trial import judged_rows

        return judged_rows(self.workers(), model, self.thresholds().get(model, {}), values)

    def config(self) -> ConfigDocument:
        return self._document(self._send("GET", "/v1/config"), ConfigDocument)

    def decision(self, decision_id: str) -> RouteResult:
        path = f"/v1/decisions/{quote(decision_id, safe='')}"
        return self._document(self._send("GET", path), RouteResult)

    def save(self) -> bytes:
        return self._send("GET", "/v1/view").content

    # -- who is there ----------------------------------------------------------------------

    def answers_as_ours(self, timeout: float) -> bool:
        """Whether a dynctl frontend answers here; other servers on the port are not asked more."""
        try:
            response = self._request("GET", "/v1/config", None, timeout)
        except (httpx.HTTPError, OSError):
            return False
        if response.status_code in (401, 403):
            return "dynctl" in response.text
        try:
            return "settings" in msgspec.json.decode(response.content)
        except (msgspec.DecodeError, TypeError):
            return False

    def version(self) -> str | None:
        """The version that the frontend tells, None where it does not."""
        document = self._json(self._send("GET", "/v1/config"))
        version = document.get("version")
        return version if isinstance(version, str) else None

    # -- inside ----------------------------------------------------------------------------

    def _models(self) -> list[str]:
        rows = self._json(self._send("GET", "/v1/models")).get("data", [])
        return [row["id"] for row in rows]

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        answers: tuple[int, ...] = (200, 201),
    ) -> httpx.Response:
        try:
            response = self._request(method, path, body, self.timeout)
        except httpx.ConnectTimeout:
            raise Unreachable(
                f"{self.url} did not accept a connection within {_CONNECT_TIMEOUT:g} s",
                "is the address right? dynctl version --frontend URL asks who is there",
            ) from None
        except httpx.TimeoutException:
            raise TimedOut(
                f"{self.url}{path} did not answer within {self.timeout:g} s",
                f"try a longer one: --timeout {self.timeout * 3:g}",
            ) from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(
                f"{self.url} does not answer: {reason}",
                "start a frontend: dynctl serve frontend --worker http://HOST:PORT\n"
                "or name another: --frontend http://HOST:PORT",
            ) from None
        if response.status_code in answers:
            return response
        self._refused(response, path)

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> httpx.Response:
        limits = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT))
        # trust_env: a proxy of the machine must not see control calls to a local frontend.
        with httpx.Client(timeout=limits, headers=self._headers, trust_env=False) as client:
            with client.stream(method, self.url + path, json=body) as response:
                size = 0
                parts = []
                for part in response.iter_bytes():
                    size += len(part)
                    if size > MAX_ANSWER_BYTES:
                        raise httpx.TransportError(f"answer over {MAX_ANSWER_BYTES:,} bytes")
                    parts.append(part)
            return httpx.Response(
                response.status_code,
                headers={"content-type": response.headers.get("content-type", "")},
                content=b"".join(parts),
            )

    def _refused(self, response: httpx.Response, path: str) -> NoReturn:
        status = response.status_code
        message = _message(response)
        if status in (401, 403):
            raise UsageProblem(
                f"{self.url}{path} wants a token ({status}): {message}",
                "set DYNCTL_TOKEN, or give --token TOKEN",
            )
        if status == 404 and path == "/v1/view":
            raise UsageProblem(f"{self.url} cannot save views (404): {message}")
        if status == 404 and not message:
            raise UsageProblem(
                f"{self.url}{path}: 404; is that a dynctl frontend?",
                "dynctl version --frontend URL asks who is there",
            )
        if status >= 500:
            raise Unreachable(f"{self.url}{path} failed with {status}: {message}")
        raise UsageProblem(f"{self.url}{path} answered {status}: {message}")

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            document = msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            self._strange(f"not JSON: {error}")
        if not isinstance(document, dict):
            self._strange(f"expected an object, got {type(document).__name__}")
        return document

    def _document(self, response: httpx.Response, form: type[Document]) -> Document:
        try:
            return decode(response.content, form)
        except WireError as error:
            self._strange(str(error))

    def _strange(self, problem: str) -> NoReturn:
        raise Unreachable(
            f"{self.url} answers, but not as a dynctl frontend of this version: {problem}",
            "dynctl version --frontend URL compares the versions",
        )


def _checked(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UsageProblem(
            f"--frontend {url}: expected http://HOST:PORT",
            "for example: --frontend http://127.0.0.1:8000",
        )
    return parts.geturl().rstrip("/")


def _thresholds(row: Mapping[str, Any]) -> dict[str, float | int | None]:
    from router_core import THRESHOLD_SETTINGS

    return {name: row.get(name) for name in THRESHOLD_SETTINGS}


def _message(response: httpx.Response) -> str:
    """The reason that an error answer gives: OpenAI's shape, Dynamo's, or the text itself."""
    try:
        document = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return response.text.strip()[:500]
    if isinstance(document, dict):
        error = document.get("error", document.get("message", document.get("detail", "")))
        if isinstance(error, dict):
            error = error.get("message", "")
        return str(error)
    return str(document)[:500]
