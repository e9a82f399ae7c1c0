"""Canary requests: small marked chats to an OpenAI server, with a bound on everything they take."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar
from urllib.parse import quote

import httpx

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, network_reason
from dynctl.base.json_fields import mapping
from dynctl.base.json_reader import read_json
from dynctl.documents.codec import decode
from dynctl.documents.decisions import PastDecision
from dynctl.sources.http import (
    async_client,
    error_message,
    frontend_url,
    json_object,
    read_response,
    tls_hint,
)

T = TypeVar("T")
MOST_AT_ONCE: Final = 4
"""Requests in flight at a time."""
_CHECK_ADDRESS: Final = "check the address and the port"
_LARGEST_REPLY: Final = 4 * 1024 * 1024
_LARGEST_METRICS: Final = 32 * 1024 * 1024
_USER: Final = "dynctl-test"
_DONE: Final = "[DONE]"
_DECISION: Final = "x-dynctl-decision"
#: Fields of the delta of an event that have output.
_OUTPUT: Final = ("content", "reasoning", "reasoning_content", "tool_calls")


class BudgetSpent(Exception):
    """The next request would be over the budget. ``option``: sets it."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(slots=True)
class CanaryBudget:
    """Bounds of a whole test, and what it has spent. ``seconds``: of the monotonic clock.

    ``requests`` counts every request with a body; lists of models and metrics are free.
    """

    requests: int
    generated_tokens: int
    ends_at: float
    sent: int = 0
    generated: int = 0
    prompt_tokens: int = 0

    def take(self, tokens: int) -> None:
        """Count one request of at most ``tokens`` generated tokens. Raises BudgetSpent."""
        if self.sent >= self.requests:
            raise BudgetSpent(f"the budget of {self.requests:,} requests is spent", "--budget")
        if self.generated + tokens > self.generated_tokens:
            raise BudgetSpent(
                f"the budget of {self.generated_tokens:,} generated tokens is spent", "--budget"
            )
        if time.monotonic() > self.ends_at:
            raise BudgetSpent("the time of this test is over", "--for")
        self.sent += 1
        self.generated += tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one canary.

    ``status`` 0: no HTTP response, ``problem`` says why; else ``problem`` is the message of an
    error response, or what is wrong with an answer of status 200: an error in it, a stream that was
    cut. Token counts are those of ``usage``, None where it does not have them.
    ``prefill`` and ``decode``: the ids of the workers that the router names, None without;
    ``decode_rank``: the data-parallel rank of the latter, 0 where it has no others. The
    count of cached tokens may be that of the decode worker, but not from a dynctl frontend.
    ``events``: seconds from the request to each event of a stream with choices. ``texts``: how many
    of them have output. ``disorder``: what is wrong with their order, empty if nothing. ``done``:
    the stream ended with ``[DONE]``. ``seconds``: to the end of the response. ``decision``: the id
    that a dynctl frontend gives. ``hint``: what to do where there is no response.
    """

    status: int
    problem: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prefill: int | None = None
    decode: int | None = None
    decode_rank: int = 0
    events: tuple[float, ...] = ()
    texts: int = 0
    disorder: str = ""
    done: bool = False
    seconds: float = 0.0
    decision: str = ""
    hint: str = _CHECK_ADDRESS

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.problem

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The workers that the router names."""
        return self.prefill, self.decode

    def __str__(self) -> str:
        """For findings: ``503 no worker is ready`` or ``no response: connection refused``."""
        if self.status == 0:
            return f"no response: {self.problem}"
        return f"{self.status} {self.problem}".rstrip()


EventReader = Callable[[Reply], Awaitable[bool]]
"""Gets what came so far at each event of a stream; True: the rest is not read."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a dynctl frontend's router expected of a request: ``worker`` reuses ``tokens``; None
    with the reason in ``unknown`` where the router could not know its cached blocks."""

    worker: str
    tokens: int | None
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """One canary. ``turns``: texts of user, assistant, user, ... in their order.

    ``tokens``: the most that it may generate. ``exactly``: ask the engine to generate that many.
    ``fields``: further fields of the body. ``workers``: ask a dynctl or Dynamo frontend to name
    the workers that it chose.
    """

    model: str
    turns: tuple[str, ...]
    tokens: int = 1
    stream: bool = False
    exactly: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    workers: bool = False

    def body(self) -> dict[str, Any]:
        """The body of the request."""
        roles = ("user", "assistant")
        messages = [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(self.turns)
        ]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "user": _USER}
        body |= {"max_tokens": self.tokens, "temperature": 0}
        if self.exactly:
            body |= {"min_tokens": self.tokens, "ignore_eos": True}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.workers:
            body["nvext"] = {"extra_fields": ["worker_id"]}
        body.update(self.fields)
        return body


class HeldStream:
    """A stream that runs while other requests are sent.

    ``reply``: what came so far; None before the first event. ``task``: reads it to its end.
    """

    def __init__(self, read: Callable[[EventReader], Coroutine[Any, Any, Reply]]) -> None:
        self.reply: Reply | None = None
        self._began = asyncio.Event()
        self.task = asyncio.create_task(read(self._note))
        self.task.add_done_callback(lambda _: self._began.set())

    async def begin(self) -> None:
        """Wait for its first event, or its end."""
        await self._began.wait()

    @property
    def running(self) -> bool:
        """Whether it began and did not end."""
        return self.reply is not None and not self.task.done()

    async def close(self) -> None:
        """End it, if it still runs."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _note(self, reply: Reply) -> bool:
        self.reply = reply
        self._began.set()
        return False


class CanaryClient:
    """An OpenAI server that gets canaries. ``timeout``: seconds for each whole response.

    ``key`` is that of a client, ``token`` that of an operator, for what only operators may read.

    Use it as an asynchronous context manager.
    """

    def __init__(
        self, url: str, timeout: float, budget: CanaryBudget, key: str | None, token: str | None
    ) -> None:
        self.url = frontend_url(url)
        self.budget = budget
        self.has_key = key is not None
        self._timeout = timeout
        self._client = async_client(key)
        self._operator = async_client(token)
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)

    async def __aenter__(self) -> CanaryClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        await self._operator.aclose()

    async def models(self) -> tuple[Reply, list[dict[str, Any]]]:
        """The rows of ``GET /v1/models``; none where the reply is an error or has none."""
        reply, response = await self._read("GET", "/v1/models", None, _LARGEST_REPLY)
        rows = json_object(response).get("data") if response is not None else None
        if not reply.answered or not isinstance(rows, list):
            return replace(reply, problem=reply.problem or "no list of models"), []
        named = [row for row in rows if isinstance(row, dict) and row.get("id")]
        return reply if named else replace(reply, problem="an empty list of models"), named

    async def metrics(self) -> str | None:
        """The text of ``GET /metrics``; None where there is none."""
        reply, response = await self._read("GET", "/metrics", None, _LARGEST_METRICS)
        return response.text if reply.answered and response is not None else None

    async def token_count(self, chat: Chat) -> int | None:
        """The count of ``POST /tokenize`` (vLLM, SGLang, dynctl); None where there is none."""
        body = {"model": chat.model, "messages": chat.body()["messages"]}
        reply, response = await self._read(
            "POST", "/tokenize", json.dumps(body).encode(), _LARGEST_REPLY
        )
        count = json_object(response).get("count") if response is not None else None
        return count if reply.answered and isinstance(count, int) else None

    async def expectation(self, reply: Reply) -> Expectation | None:
        """What the router expected of the worker that computes the prompt; None where the server
        does not show its decisions."""
        decision = await self.decision(reply)
        hop = None if decision is None else decision.prefill or decision.decode
        if decision is None or hop is None:
            return None
        winner = hop.winner
        for row in hop.candidates:
            if winner is not None and (row.worker_id, row.dp_rank) == (
                winner.worker_id,
                winner.dp_rank,
            ):
                if not hop.overlap_modelled:
                    return Expectation(row.worker, None, ", ".join(hop.notes))
                return Expectation(row.worker, row.usable_blocks * decision.block_size)
        return None

    async def decision(self, reply: Reply) -> PastDecision | None:
        """The decision about a request; None where the server does not show it."""
        if not reply.decision:
            return None
        path = f"{self.url}/v1/decisions/{quote(reply.decision, safe='')}"
        try:
            status, content = await read_response(
                self._operator, path, _LARGEST_REPLY, self._timeout
            )
            return decode(content, PastDecision) if status == 200 else None
        except (DynctlError, WireError):
            return None

    async def chat(self, chat: Chat) -> Reply:
        """Send a canary and read its whole reply. Raises BudgetSpent."""
        self.budget.take(chat.tokens)
        async with self._at_once:
            if chat.stream:
                reply = await self._stream(chat)
            else:
                data = json.dumps(chat.body()).encode()
                reply, response = await self._read(
                    "POST", "/v1/chat/completions", data, _LARGEST_REPLY
                )
                if reply.answered and response is not None:
                    reply = _read_answer(reply, response)
        self.budget.prompt_tokens += reply.prompt_tokens or 0
        return reply

    async def chats(self, *chats: Chat) -> list[Reply]:
        """Send canaries, several at a time. Raises BudgetSpent."""
        return list(await asyncio.gather(*(self.chat(chat) for chat in chats)))

    async def send_body(self, data: bytes, key: str | None = None) -> Reply:
        """Send ``data`` as the body of a chat, whatever it is. ``key``: in place of the own one."""
        self.budget.take(1)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with self._at_once:
            reply, _ = await self._read(
                "POST", "/v1/chat/completions", data, _LARGEST_REPLY, headers
            )
        return reply

    async def cancel_stream(self, chat: Chat, meanwhile: Callable[[], Awaitable[T]]) -> T | None:
        """Start a stream, and close its connection after ``meanwhile``, which begins at the first
        event; its result, or None where no event came."""
        self.budget.take(chat.tokens)
        seen: list[T] = []

        async def stop(_: Reply) -> bool:
            seen.append(await meanwhile())
            return True

        async with self._at_once:
            await self._stream(chat, stop)
        return seen[0] if seen else None

    async def hold_stream(self, chat: Chat) -> HeldStream:
        """A stream that goes on while others are sent; returned at its first event, or its end. It
        is one of the requests at a time until it ends; its caller closes it. Raises BudgetSpent."""
        self.budget.take(chat.tokens)

        async def read(note: EventReader) -> Reply:
            async with self._at_once:
                return await self._stream(chat, note)

        held = HeldStream(read)
        await held.begin()
        return held

    async def _read(
        self,
        method: str,
        path: str,
        data: bytes | None,
        limit: int,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Reply, httpx.Response | None]:
        started = time.monotonic()
        sent = {"content-type": "application/json", **(headers or {})} if data else {}
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream(
                    method, self.url + path, content=data, headers=sent
                ) as response,
            ):
                content = b"".join([part async for part in _bounded(response, limit)])
        except TimeoutError:
            return Reply(0, f"no response within {self._timeout:g} s"), None
        except httpx.HTTPError as error:
            hint = tls_hint(self.url, error) or _CHECK_ADDRESS
            return Reply(0, network_reason(error), hint=hint), None
        whole = httpx.Response(response.status_code, content=content)
        seconds = time.monotonic() - started
        if whole.status_code != 200:
            return Reply(whole.status_code, error_message(whole), seconds=seconds), whole
        decision = response.headers.get(_DECISION, "")
        return Reply(200, seconds=seconds, decision=decision), whole

    async def _stream(self, chat: Chat, at_event: EventReader | None = None) -> Reply:
        """``at_event``: gets what came so far at each event; True: the rest is not read."""
        started = time.monotonic()
        stream = _StreamReader(started)
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream(
                    "POST", self.url + "/v1/chat/completions", json=chat.body()
                ) as response,
            ):
                if response.status_code != 200:
                    content = b"".join([part async for part in _bounded(response, _LARGEST_REPLY)])
                    error = httpx.Response(response.status_code, content=content)
                    return Reply(response.status_code, error_message(error))
                stream.begin(response)
                async for text in _events(response):
                    if not stream.take(text) or at_event is None:
                        continue
                    if await at_event(stream.reply()):
                        break
        except TimeoutError:
            stream.fail(f"the stream did not end within {self._timeout:g} s")
        except httpx.HTTPError as error:
            stream.fail(network_reason(error))
        return stream.reply()


class _StreamReader:
    """Makes the reply of a stream from its events. ``started``: of the request."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._reply = Reply(0)
        self._events: list[float] = []
        self._texts = 0
        self._ids: set[str] = set()
        self._finished = False
        self._disorder = ""

    def begin(self, response: httpx.Response) -> None:
        """Note that the head of the response came."""
        content_type = response.headers.get("content-type", "").partition(";")[0]
        is_stream = content_type in ("text/event-stream", "")
        problem = "" if is_stream else f"{content_type} instead of a stream"
        decision = response.headers.get(_DECISION, "")
        self._reply = replace(self._reply, status=200, problem=problem, decision=decision)

    def take(self, text: str) -> bool:
        """Take the data of an event; returns whether it has choices."""
        if self._reply.done:
            self._disorder = self._disorder or "an event after [DONE]"
        if text == _DONE:
            self._reply = replace(self._reply, done=True)
            return False
        event = _json(text)
        error = event.get("error") or (event if event.get("object") == "error" else None)
        if error:
            message = mapping(error).get("message") or error
            self.fail(f"an error in the stream: {str(message)[:200]}")
        self._reply = _with_fields(self._reply, event)
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices:
            return False
        self._events.append(time.monotonic() - self._started)
        self._take_choice(mapping(choices[0]), str(event.get("id", "")))
        return True

    def fail(self, problem: str) -> None:
        """Note why the answer is not whole; the first problem stays."""
        self._reply = replace(self._reply, problem=self._reply.problem or problem)

    def reply(self) -> Reply:
        """The reply, when the stream has ended."""
        if not self._events and self._reply.status == 200:
            self.fail("a stream without output")
        return replace(
            self._reply,
            events=tuple(self._events),
            texts=self._texts,
            disorder=self._disorder,
            seconds=time.monotonic() - self._started,
        )

    def _take_choice(self, choice: Mapping[str, Any], answer_id: str) -> None:
        delta = mapping(choice.get("delta"))
        self._ids.add(answer_id)
        if len(self._ids) > 1:
            self._disorder = self._disorder or "events of another answer"
        if any(delta.get(name) for name in _OUTPUT):
            self._texts += 1
            if self._finished:
                self._disorder = self._disorder or "text after the event with finish_reason"
        self._finished = self._finished or bool(choice.get("finish_reason"))


async def _bounded(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """The parts of a body; raises httpx.HTTPError above ``limit`` bytes."""
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > limit:
            raise httpx.TransportError(f"the response is over {limit:,} bytes")
        yield part


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event, when its line is complete."""
    rest = b""
    async for part in _bounded(response, _LARGEST_REPLY):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode(errors="replace")


def _json(text: str) -> Mapping[str, Any]:
    """A JSON object; empty where it is something else."""
    try:
        return mapping(read_json(text.encode(), "event"))
    except WireError:
        return {}


def _read_answer(reply: Reply, response: httpx.Response) -> Reply:
    """``reply`` with what a whole answer of status 200 has: an error, or counts and workers."""
    document = json_object(response)
    if document.get("choices"):
        return _with_fields(reply, document)
    return replace(reply, problem=error_message(response) or "an answer without choices")


def _with_fields(reply: Reply, document: Mapping[str, Any]) -> Reply:
    """``reply`` with the counts and workers of a response or an event, if it has any."""
    usage = mapping(document.get("usage"))
    if usage:
        details = mapping(usage.get("prompt_tokens_details"))
        reply = replace(
            reply,
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(details.get("cached_tokens")),
        )
    workers = mapping(mapping(document.get("nvext")).get("worker_id"))
    if workers:
        reply = replace(
            reply,
            prefill=_count(workers.get("prefill_worker_id")),
            decode=_count(workers.get("decode_worker_id")),
            decode_rank=_count(workers.get("decode_dp_rank")) or 0,
        )
    return reply


def _count(value: object) -> int | None:
    counts = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if counts and isinstance(value, int) else None
