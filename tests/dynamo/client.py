"""Talks to a Dynamo frontend: requests, dry runs, requests held in flight, thresholds, metrics.

Synchronous on purpose: a fleet outlives the event loop of one test. An asyncio test calls
``await asyncio.to_thread(frontend.chat, ...)`` so that its own tasks go on meanwhile.
"""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dynctl.wire.traces import TraceRequest
from tests.waiting import patience

DRY_RUN = "query_instance_id:"
"""Dynamo needs the colon: without it the request really runs."""

Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, Any]]


def tokens_of(request: TraceRequest) -> list[int]:
    """Token ids of the tiny model in which equal blocks of a trace are equal."""
    found: list[int] = []
    for one in request.hash_ids:
        draw = random.Random(one)
        found += [draw.randrange(300) for _ in range(request.block_size)]
    draw = random.Random(request.id)
    missing = request.input_tokens - len(found)
    return found[: request.input_tokens] + [draw.randrange(300) for _ in range(missing)]


@dataclass(frozen=True, slots=True)
class Placement:
    """Who served a request, as ``nvext.worker_id`` says. Aggregated: both ids are the same."""

    prefill: int | None
    decode: int | None
    prefill_rank: int | None = None
    decode_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. ``body`` is the JSON of a unary one; ``chunks`` the events of a stream.

    ``request_id`` is as Dynamo logs it (without ``chatcmpl-``). ``token_ids`` are the prompt's,
    from a dry run alone.
    """

    status: int
    body: Mapping[str, Any]
    chunks: tuple[Mapping[str, Any], ...] = ()
    nvext: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def placement(self) -> Placement:
        reported = self.nvext.get("worker_id")
        if not isinstance(reported, Mapping):
            raise AssertionError(f"no nvext.worker_id in the answer: {self.status} {self.body}")
        return Placement(
            reported.get("prefill_worker_id"),
            reported.get("decode_worker_id"),
            reported.get("prefill_dp_rank"),
            reported.get("decode_dp_rank"),
        )

    @property
    def token_ids(self) -> list[int]:
        return list(self.nvext["token_ids"])

    @property
    def timing(self) -> Mapping[str, Any]:
        reported: Mapping[str, Any] = self.nvext.get("timing", {})
        return reported

    @property
    def request_id(self) -> str:
        first = self.chunks[0] if self.chunks else self.body
        return str(first.get("id", "")).removeprefix("chatcmpl-").removeprefix("cmpl-")

    @property
    def prompt_tokens(self) -> int | None:
        usage = self.body.get("usage") or {}
        count = usage.get("prompt_tokens")
        return count if isinstance(count, int) else None


class FrontendClient:
    """One frontend. Every method may be called from any thread; each uses a connection of its own.

    ``nvext`` is merged into what a method sends; ``fields`` are further fields of the body
    (``tools=...``). ``max_tokens``: what is generated at most.
    """

    def __init__(self, port: int, model: str = "tiny", host: str = "127.0.0.1") -> None:
        self.host, self.port, self.model = host, port, model

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int = 1,
        stream: bool = False,
        nvext: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30,
        **fields: Any,
    ) -> Answer:
        """/v1/chat/completions; a string is one user message."""
        body = self._chat_body(messages, max_tokens, nvext, fields)
        return self._ask("/v1/chat/completions", body, stream, headers, timeout)

    def complete(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 1,
        stream: bool = False,
        nvext: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30,
        **fields: Any,
    ) -> Answer:
        """/v1/completions; the prompt is a text or token ids."""
        body = self._completion_body(prompt, max_tokens, nvext, fields)
        return self._ask("/v1/completions", body, stream, headers, timeout)

    def dry_run(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        nvext: Mapping[str, Any] | None = None,
        timeout: float = 30,
        **fields: Any,
    ) -> Answer:
        """What Dynamo would do, nothing booked; ``token_ids`` and ``placement`` are in the answer.

        In a disaggregated fleet it selects a decode worker alone, without topology.
        """
        asked = {"annotations": [DRY_RUN], **(nvext or {})}
        if messages is not None:
            return self.chat(messages, nvext=asked, timeout=timeout, **fields)
        if prompt is None:
            raise TypeError("dry_run needs a prompt or messages")
        return self.complete(prompt, nvext=asked, timeout=timeout, **fields)

    def send(self, body: Mapping[str, Any], *, timeout: float = 30) -> Answer:
        """A whole body of a client; the placement is asked for beside what it asks for."""
        nvext = {"extra_fields": ["worker_id"], **(body.get("nvext") or {})}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        whole = {"model": self.model, "max_tokens": 1, **body, "nvext": nvext}
        return self._ask(path, whole, False, None, timeout)

    def begin(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        max_tokens: int = 2,
        nvext: Mapping[str, Any] | None = None,
        timeout: float = 120,
        **fields: Any,
    ) -> "InFlight":
        """Send a streamed request and come back at once; see :class:`InFlight`."""
        if messages is not None:
            body = self._chat_body(messages, max_tokens, nvext, fields)
            return InFlight(self, "/v1/chat/completions", body, timeout)
        if prompt is None:
            raise TypeError("begin needs a prompt or messages")
        body = self._completion_body(prompt, max_tokens, nvext, fields)
        return InFlight(self, "/v1/completions", body, timeout)

    def get(self, path: str, *, timeout: float = 10) -> tuple[int, str]:
        """Any path: status and text (``/metrics``, ``/health``, ``/v1/models/tiny/ready``)."""
        return self._raw("GET", path, None, timeout)

    def thresholds(self, **values: float) -> dict[str, Any]:
        """POST /busy_threshold for this model; without values only reads."""
        status, text = self._raw("POST", "/busy_threshold", {"model": self.model, **values}, 10)
        if status != 200:
            raise AssertionError(f"/busy_threshold answered {status}: {text[:500]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def worker_counts(self) -> dict[str, int]:
        """Workers by type, as /v1/models/MODEL/ready counts them; empty while it does not know."""
        try:
            status, text = self.get(f"/v1/models/{self.model}/ready", timeout=3)
        except OSError:
            return {}
        if status == 404:
            return self._counts_before_1_3()
        if status not in (200, 503):
            return {}
        counts: dict[str, int] = {}
        for namespace in (json.loads(text).get("namespaces") or {}).values():
            for kind, row in namespace.get("worker_types", {}).items():
                counts[kind] = counts.get(kind, 0) + row["workers"]
        return counts

    def accepts(self) -> bool:
        """Whether the model is ready, which is later than its workers are counted; True before 1.3,
        which does not say it."""
        try:
            status, _ = self.get(f"/v1/models/{self.model}/ready", timeout=3)
        except OSError:
            return False
        return status in (200, 404)

    # -- how ---------------------------------------------------------------------------------------

    def _counts_before_1_3(self) -> dict[str, int]:
        """Workers by type, from /health, once the model is listed."""
        try:
            _, models = self.get("/v1/models", timeout=3)
            _, health = self.get("/health", timeout=3)
        except OSError:
            return {}
        if self.model not in [one["id"] for one in json.loads(models)["data"]]:
            return {}
        served = [one for one in json.loads(health)["instances"] if one["endpoint"] == "generate"]
        prefill = sum(one["component"] == "prefill" for one in served)
        others = "decode" if prefill else "aggregated"
        counts = {"prefill": prefill, others: len(served) - prefill}
        return {kind: number for kind, number in counts.items() if number}

    def _chat_body(
        self,
        messages: Messages,
        max_tokens: int,
        nvext: Mapping[str, Any] | None,
        fields: Mapping[str, Any],
    ) -> dict[str, Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return {**self._common(max_tokens, nvext), "messages": list(messages), **fields}

    def _completion_body(
        self,
        prompt: Prompt,
        max_tokens: int,
        nvext: Mapping[str, Any] | None,
        fields: Mapping[str, Any],
    ) -> dict[str, Any]:
        given = prompt if isinstance(prompt, str) else list(prompt)
        return {**self._common(max_tokens, nvext), "prompt": given, **fields}

    def _common(self, max_tokens: int, nvext: Mapping[str, Any] | None) -> dict[str, Any]:
        asked = {"extra_fields": ["worker_id", "timing"], **(nvext or {})}
        return {"model": self.model, "max_tokens": max_tokens, "nvext": asked}

    def _ask(
        self,
        path: str,
        body: Mapping[str, Any],
        stream: bool,
        headers: Mapping[str, str] | None,
        timeout: float,
    ) -> Answer:
        if not stream:
            status, text = self._raw("POST", path, body, timeout, headers)
            return _unary(status, text)
        flight = InFlight(self, path, body, timeout, headers)
        return flight.result(timeout)

    def _raw(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=patience(timeout))
        try:
            connection.request(method, path, *_encoded(body, headers))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


class InFlight:
    """A streamed request that a thread reads.

    ``wait_first(timeout)`` returns at the first event of the stream; ``result(timeout)`` at its
    end; ``disconnect()`` closes the connection, as a client that leaves does. ``longest_pause_s``:
    between two lines of the stream.
    """

    def __init__(
        self,
        client: FrontendClient,
        path: str,
        body: Mapping[str, Any],
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = http.client.HTTPConnection(
            client.host, client.port, timeout=patience(timeout)
        )
        self._connection.connect()
        self._socket = self._connection.sock
        self._first = threading.Event()
        self._status = 0
        self._chunks: list[Mapping[str, Any]] = []
        self._text = ""
        self._error: Exception | None = None
        self._left = False
        self.longest_pause_s = 0.0
        encoded = _encoded({**body, "stream": True}, headers)
        self._connection.request("POST", path, *encoded)
        self._thread = threading.Thread(target=self._read, name="in-flight", daemon=True)
        self._thread.start()

    def wait_first(self, timeout: float = 30) -> None:
        if not self._first.wait(patience(timeout)):
            raise AssertionError(f"no event of the stream within {timeout:g} s")

    def result(self, timeout: float = 60) -> Answer:
        self._thread.join(patience(timeout))
        if self._thread.is_alive():
            raise AssertionError(f"the stream did not end within {timeout:g} s")
        if self._error is not None and not self._left:
            raise AssertionError(f"the stream broke: {self._error}") from self._error
        if self._status != 200:
            return _unary(self._status, self._text)
        extra: dict[str, Any] = {}
        for chunk in self._chunks:
            extra |= chunk.get("nvext") or {}
        last = self._chunks[-1] if self._chunks else {}
        return Answer(200, last, tuple(self._chunks), extra)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def disconnect(self) -> None:
        self._left = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(patience(10))

    def _read(self) -> None:
        try:
            response = self._connection.getresponse()
            self._status = response.status
            if response.status != 200:
                self._text = response.read().decode()
                return
            read_at = time.monotonic()
            for line in response:
                before, read_at = read_at, time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, read_at - before)
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    self._chunks.append(json.loads(line[5:]))
                    self._first.set()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._error = error
        finally:
            self._first.set()
            self._connection.close()


def _encoded(
    body: Mapping[str, Any] | None, headers: Mapping[str, str] | None
) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, dict(headers or {})
    return json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}


def _unary(status: int, text: str) -> Answer:
    try:
        body = json.loads(text)
    except ValueError:
        body = {"text": text}
    if not isinstance(body, dict):
        body = {"value": body}
    return Answer(status, body, (), body.get("nvext") or {})
