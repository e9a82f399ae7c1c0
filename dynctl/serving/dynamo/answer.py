"""The OpenAI answer to a request that went to a Dynamo worker, made from the worker's output.

The events of a stream, and the one body of an answer without streaming, are those of a Dynamo 1.6
frontend on the same worker, as observed; ids and times are the caller's.
"""

import struct
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final, NamedTuple

import msgspec

from dynctl.base.decode_errors import RequestError
from dynctl.tokenization.detokenizer import (
    Decoder,
    DynamoDecoder,
    OutputDecoder,
    StopRules,
)
from dynctl.tokenization.dynamo_chat import wants_thinking
from dynctl.tokenization.reasoning import (
    CAN_BE_OFF,
    REASONING_PARSERS,
    ReasoningSplitter,
    TextReasoningSplitter,
)
from dynctl.tokenization.tool_calls import (
    SPACE,
    TOOL_CALL_PARSERS,
    GuidedSplitter,
    Part,
    ToolCallError,
    ToolCallSplitter,
    call_format,
)
from dynctl.tokenization.tool_calls.json_values import read_value
from dynctl.wire.dynamo.engine_output import EngineOutput, EngineUsage, TopLogprob
from dynctl.wire.dynamo.engine_request import EngineRequest
from dynctl.wire.dynamo.openai_options import EngineOptions
from dynctl.wire.dynamo.tool_choice import forced_function, is_forced

DONE: Final = b"data: [DONE]\n\n"
ERROR_STATUS: Final = 500
"""The status of an answer that a worker's error ended before its first byte."""
INVALID_STATUS: Final = 400
"""As ERROR_STATUS, where the worker reports that the request is invalid."""


def error_body(status: int, public: str = "") -> bytes:
    """The body of an answer that a worker's error ended. The reason is for operators: a worker's
    text may have parts of prompts. ``public``: what the worker has for the client of an invalid
    request."""
    invalid = status == INVALID_STATUS
    error = {
        "message": (public or "Invalid request") if invalid else "Internal server error",
        "type": "invalid_request_error" if invalid else "internal_server_error",
        "code": INVALID_STATUS if invalid else ERROR_STATUS,
    }
    return msgspec.json.encode({"error": error})


def error_event(status: int) -> bytes:
    """The event before ``[DONE]`` in a stream that a worker's error ended."""
    return b"data: " + error_body(status) + b"\n\n"


_F32: Final = struct.Struct("<f")
_FINISH: Final = {
    "eos": "stop",
    "stop": "stop",
    "cancelled": "stop",
    "abort": "stop",
    "length": "length",
    "content_filter": "content_filter",
}
#: Tokens of a prompt's end in which the beginning of reasoning is looked for.
_PROMPT_END: Final = 16
#: Parsers whose engines have to write calls in the model's own format, where a call is forced.
_OWN_CONSTRAINT: Final = ("kimi_k2",)
_CANCELLED: Final = ("cancelled", "abort")
_DETAILS: Final = {
    "prompt_tokens_details": ("audio_tokens", "cached_tokens"),
    "completion_tokens_details": (
        "accepted_prediction_tokens",
        "audio_tokens",
        "reasoning_tokens",
        "rejected_prediction_tokens",
    ),
}


class AnswerError(Exception):
    """A worker's output that ends the answer with an error: what the worker did, for a log."""


@dataclass(slots=True)
class _Delta:
    """One piece of one choice, as the client sees it."""

    index: int
    text: str | None
    role: bool = False
    finish: str | None = None
    reasoning: str | None = None
    logprobs: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    nvext: dict[str, Any] | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        content = (self.text, self.role, self.reasoning, self.finish, self.logprobs, self.usage)
        return self.nvext is None and not self.calls and not any(content)


@dataclass(slots=True)
class _Calling:
    """A choice whose text may have calls of tools, and what its next event has to bring along.

    ``finish``: of a piece whose text is held back. ``finished``: an event had a finish reason.
    """

    splitter: ToolCallSplitter
    role: bool = False
    reasoning: str = ""
    nvext: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    finished: bool = False
    calls: int = 0

    def end_with(self, reason: str) -> str:
        """The finish reason that users see."""
        self.finished = True
        return "tool_calls" if self.calls and reason == "stop" else reason

    def collect(self, delta: _Delta) -> None:
        """Keep what is no text of a piece, until an event can bring it along."""
        self.role = self.role or delta.role
        self.reasoning += delta.reasoning or ""
        _join_nvext(self.nvext, delta.nvext)

    def bring(self, delta: _Delta) -> None:
        """Add to an event what was kept for it."""
        delta.role, self.role = self.role, False
        delta.reasoning, self.reasoning = self.reasoning or None, ""
        delta.nvext, self.nvext = self.nvext or None, {}


class Parsers(NamedTuple):
    """Names of the parsers that an answer needs, None for none.

    ``forced``: the request forces a call, whose JSON the engine writes without marks. ``by_text``:
    what they find depends on the text alone, not on its cut into tokens; else they find what
    Dynamo's find.
    """

    reasoning: str | None = None
    tool_calls: str | None = None
    forced: bool = False
    by_text: bool = False


@dataclass(slots=True)
class _WholeChoice:
    """The whole of one choice, for an answer without streaming."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    logprobs: dict[str, Any] | None = None


NO_PARSERS: Final = Parsers()


def _random_call_id() -> str:
    return f"call-{uuid.uuid4()}"


class EngineAnswer:
    """The answer to one request; its methods take outputs in the worker's order.

    ``created``: seconds since 1970; ``request_id`` is the part of the answer's id after
    ``chatcmpl-`` or ``cmpl-``. For a stream :meth:`feed` and :meth:`end` return its events, if any;
    without streaming :meth:`body` is the answer.

    ``token_ids``: what was generated so far, of a request for one choice. ``stopped``: rules of the
    request have ended the answer: the worker can stop, and what it still sends does not count.

    ``parsers``: what :func:`parsers_of` has found for the request. ``new_call_id`` names a call of
    a tool.
    """

    def __init__(
        self,
        options: EngineOptions,
        request: EngineRequest,
        decoder: Decoder,
        *,
        request_id: str,
        created: int,
        parsers: Parsers = NO_PARSERS,
        new_call_id: Callable[[], str] = _random_call_id,
    ) -> None:
        self.stopped = False
        self.token_ids: list[int] = []
        self._options = options
        self._decoder = decoder
        skip = request.output_options.skip_special_tokens
        self._skip = True if skip is None else skip
        rules = _rules(request)
        self._choices = {
            index: OutputDecoder(
                DynamoDecoder(decoder, request.token_ids, skip_special_tokens=self._skip), rules
            )
            for index in range(options.choices)
        }
        self._ended: set[int] = set()
        self._begun: set[int] = set()
        self._splitters = self._reasoning_splitters(request, parsers)
        #: Whether the answer begins inside thoughts that no parser separates; None: one does.
        self._thinking: bool | None = None
        if parsers.by_text and parsers.tool_calls is not None and not self._splitters:
            self._thinking = self._prompt_begins_reasoning(request)
        self._parsers = parsers
        self._new_call_id = new_call_id
        self._calling: list[_Calling] = []
        if parsers.forced or parsers.tool_calls is not None:
            self._calling = [_Calling(self._call_splitter()) for _ in range(options.choices)]
        self._reasoning_tokens = 0
        # Choices that have had reasoning since their last text: pieces without text count too.
        self._reasoned: dict[int, bool] = {}
        self._finished = False
        # A cancelled choice may be one of a worker that fails: what follows decides.
        self._held: EngineOutput | None = None
        self._usage: dict[str, Any] = {}
        self._prompt_tokens = len(request.token_ids)
        self._output_tokens = 0
        self._id = f"{'chatcmpl' if options.chat else 'cmpl'}-{request_id}"
        self._created = created
        self._usage_in_each = options.continuous_usage and options.include_usage and options.stream
        self._wants_ids = options.nvext.wants("completion_token_ids")
        self._wants_reason = options.nvext.wants("stop_reason")
        self._whole: dict[int, _WholeChoice] = {}
        self._nvext: dict[str, Any] = {}
        self._before, self._after = self._frame()
        self._plain = self._plain_frame()
        self._preamble = self._annotations(request.token_ids, request_id) if options.stream else ()

    @property
    def usage(self) -> dict[str, Any]:
        """``usage`` as of now, in OpenAI's form."""
        total = self._prompt_tokens + self._output_tokens
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": total,
            **self._usage,
        }
        if self._splitters:
            details = {"reasoning_tokens": self._reasoning_tokens}
            usage["completion_tokens_details"] = details | usage.get(
                "completion_tokens_details", {}
            )
        return usage

    def feed(self, output: EngineOutput) -> tuple[bytes, ...]:
        """The events that an output completes.

        Raises AnswerError for an output that is an error or that no request has; then the answer is
        over, and a stream ends with :func:`error_event` and ``DONE``.
        """
        if self.stopped:
            return ()
        if output.finish_reason is None and self._held is None and not self._preamble:
            return self._output(output)
        held, self._held = self._held, None
        before, self._preamble = self._preamble, ()
        if held is not None:
            before += self._output(held)
        if output.finish_reason in _CANCELLED:
            self._held = output
            return before
        return before + self._output(output)

    def end(self) -> tuple[bytes, ...]:
        """The last events of a stream: the worker has sent everything, or ``stopped`` is set."""
        return (*self._preamble, *self._rest(), *self._usage_event(), DONE)

    def body(self) -> bytes:
        """The whole answer of a request that is not streamed; as :meth:`end`, once."""
        self._rest()
        self._calls_in_whole_text()
        chat = self._options.chat
        choices = [
            _whole_chat(index, choice) if chat else _whole_completion(index, choice)
            for index, choice in sorted(self._whole.items())
        ]
        body: dict[str, Any] = {"id": self._id, "choices": choices, **self._head()}
        if not chat:
            body["system_fingerprint"] = None
        body["object"] = "chat.completion" if chat else "text_completion"
        if self._finished or not chat:
            body["usage"] = self.usage if self._finished else None
        if self._nvext:
            body["nvext"] = self._nvext
        return msgspec.json.encode(body)

    def _rest(self) -> tuple[bytes, ...]:
        """What was held back until the end."""
        held, self._held = self._held, None
        events = () if held is None or self.stopped else self._output(held)
        nothing = EngineOutput(token_ids=[])
        for index, choice in self._choices.items():
            text = "" if index in self._ended else choice.flush()
            if text or (self._splitters and self._splitters[index].holding):
                events += self._delta(index, text, "stop", nothing, (), None, hidden=False)
        return events + self._last_calls()

    def _usage_event(self) -> tuple[bytes, ...]:
        if self._finished and self._options.include_usage:
            return (self._event(b"", self.usage, None),)
        return ()

    # -- one output --------------------------------------------------------------------------------

    def _output(self, output: EngineOutput) -> tuple[bytes, ...]:
        index = output.index or 0
        choice = self._choices.get(index)
        if choice is None:
            raise AnswerError(f"sent choice {index}, and {len(self._choices)} were requested")
        if index in self._ended:
            return ()
        finish = None if output.finish_reason is None else _finish_of(output)
        reason, hidden, ids = output.stop_reason, False, output.token_ids
        text: str | None = output.text
        if text is None:
            decoded = choice.feed(ids)
            text = decoded.text
            if decoded.stopped:
                reason = decoded.cause if decoded.cause is not None else reason
                hidden, ids = decoded.hidden, ids[: decoded.used]
                self._stop(index, finish)
                finish = "stop"
            elif finish is not None:
                text += choice.flush()
            text = text or None
        elif finish is not None:
            text = choice.flush() + text
        plain, more = self._plain, finish is not None or output.completion_usage is not None
        if plain is None or more or index not in self._begun:
            return self._delta(index, text, finish, output, ids, reason, hidden=hidden)
        self.token_ids += ids
        self._output_tokens += len(ids)
        before, after = plain
        return (before + msgspec.json.encode(text) + after,) if text else ()

    def _stop(self, index: int, finish: str | None) -> None:
        """A rule has ended a choice, and with the last one the answer."""
        if finish is not None:
            return  # the worker has ended it at the same time
        self._ended.add(index)
        self.stopped = len(self._ended) == len(self._choices)

    def _delta(
        self,
        index: int,
        text: str | None,
        finish: str | None,
        output: EngineOutput,
        ids: Sequence[int],
        reason: str | int | None,
        *,
        hidden: bool,
    ) -> tuple[bytes, ...]:
        self.token_ids += ids
        self._output_tokens += len(ids)
        if output.completion_usage is not None:
            self._take_usage(output.completion_usage)
        role = index not in self._begun and self._takes_role(index)
        delta = _Delta(index, text, role, finish)
        if self._splitters:
            self._separate_reasoning(self._splitters[index], delta, len(ids))
        if finish is not None:
            self._finished = True
        if self._options.logprobs and output.log_probs is not None:
            delta.logprobs = self._logprobs(output, ids, hidden=hidden)
        if self._usage_in_each:
            delta.usage = self.usage
        if self._wants_reason and reason is not None:
            delta.nvext = {"stop_reason": reason}
        if self._wants_ids:
            delta.nvext = {**(delta.nvext or {}), "completion_token_ids": list(ids)}
        return self._look_for_calls(delta) if self._calling else self._show(delta)

    # -- calls of tools ----------------------------------------------------------------------------

    def _call_splitter(self) -> ToolCallSplitter:
        name, options = self._parsers.tool_calls, self._options
        form = None if name is None else call_format(name, options.tools)
        if self._parsers.forced:
            function = forced_function(options.tool_choice)
            return GuidedSplitter(form, function, by_text=self._parsers.by_text)
        assert form is not None
        return ToolCallSplitter(form, by_text=self._parsers.by_text, thinking=self._thinking)

    def _look_for_calls(self, delta: _Delta) -> tuple[bytes, ...]:
        """The events of a piece in which calls are looked for."""
        state = self._calling[delta.index]
        state.collect(delta)
        if delta.text is None:
            shown = self._pieces_without_text(state, delta)
        else:
            shown = self._pieces_of_text(state, delta)
        if not shown:
            return ()
        state.bring(shown[0])
        for piece in shown:
            piece.usage = delta.usage
        if delta.finish is not None and (delta.text is None or not state.splitter.holding):
            shown[-1].finish = state.end_with(delta.finish)
        return tuple(event for piece in shown for event in self._show(piece))

    def _pieces_without_text(self, state: _Calling, delta: _Delta) -> list[_Delta]:
        if delta.finish is not None:
            state.finish = delta.finish
        if state.splitter.holding and not (delta.role or delta.reasoning):
            return []
        return [_Delta(delta.index, None)]

    def _pieces_of_text(self, state: _Calling, delta: _Delta) -> list[_Delta]:
        called = state.splitter.calls > 0
        state.finish = delta.finish
        parts = self._feed(state, delta)
        pieces = [self._delta_of_part(state, delta.index, part) for part in parts]
        if delta.finish is None:
            return pieces
        pieces = _without_blanks(pieces, called=called)
        if not pieces and not state.splitter.holding:
            return [_Delta(delta.index, None)]
        return pieces

    def _feed(self, state: _Calling, delta: _Delta) -> list[Part]:
        try:
            return state.splitter.feed(delta.text or "")
        except ToolCallError as error:
            raise AnswerError(str(error)) from error

    def _delta_of_part(self, state: _Calling, index: int, part: Part) -> _Delta:
        calls = [
            self._call_json(number, call.id, call.name, call.arguments)
            for number, call in enumerate(part.calls, state.calls)
        ]
        for piece in part.pieces:
            if piece.name is None:
                function = {"arguments": piece.arguments}
                calls.append({"index": piece.number, "function": function})
            else:
                calls.append(self._call_json(piece.number, piece.id, piece.name, piece.arguments))
        state.calls += len(calls)
        return _Delta(index, part.text, calls=calls)

    def _call_json(
        self, number: int, call_id: str | None, name: str, arguments: str
    ) -> dict[str, Any]:
        return {
            "index": number,
            "id": call_id or self._new_call_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _last_calls(self) -> tuple[bytes, ...]:
        """What was held back for calls, in one event; and that calls end their choices."""
        shown = []
        # Dynamo's usage event makes it end the choices with calls before what was held back.
        events = self._end_calls() if self._finished and self._options.include_usage else ()
        for index, state in enumerate(self._calling):
            try:
                part = state.splitter.end()
            except ToolCallError as error:
                raise AnswerError(str(error)) from error
            if part is not None:
                delta = self._delta_of_part(state, index, part)
                state.bring(delta)
                if state.finish is not None:
                    delta.finish = state.end_with(state.finish)
                shown.append(delta)
        return events + self._show(*shown) + self._end_calls() + self._last_nvext()

    def _last_nvext(self) -> tuple[bytes, ...]:
        """The rest of ``nvext`` where nothing is left that could bring it along."""
        rest: dict[str, Any] = {}
        for state in self._calling:
            _join_nvext(rest, state.nvext)
        if not rest or not self._options.stream:
            _join_nvext(self._nvext, rest)
            return ()
        return (self._event(b"", None, rest),)

    def _calls_in_whole_text(self) -> None:
        """Calls that only the whole of an answer shows."""
        # A stream that is read by its text alone has found the same.
        parses = self._parsers.tool_calls is not None and (
            self._parsers.forced or not self._parsers.by_text
        )
        for index, state in enumerate(self._calling):
            choice = self._whole.get(index)
            if choice is None:
                continue
            if choice.calls:
                if choice.finish == "length" and not _has_json(choice.calls[-1]):
                    choice.calls.pop()
            elif parses:
                self._find_calls(index, state, choice)

    def _find_calls(self, index: int, state: _Calling, choice: _WholeChoice) -> None:
        text = "".join(choice.text)
        part = self._calls_in(text)
        if part is not None:
            shown = self._delta_of_part(state, index, part)
            choice.text, choice.calls = [shown.text or ""], shown.calls
            choice.finish = state.end_with(choice.finish or "stop")
        elif choice.finish == "length":
            choice.text = [state.splitter.cut_text(text)]

    def _calls_in(self, text: str) -> Part | None:
        """The calls in the whole of an answer, None without one."""
        # Dynamo does not know the types of arguments here.
        form = call_format(self._parsers.tool_calls or "", ())
        if self._parsers.forced and not any(mark in text for mark in form.starts):
            return None
        try:
            parsed = form.parse(text, final=True)
        except ToolCallError as error:
            raise AnswerError(str(error)) from error
        function = forced_function(self._options.tool_choice)
        calls = tuple(call for call in parsed.calls if function in (None, call.name))
        return Part(parsed.text, calls) if calls else None

    def _end_calls(self) -> tuple[bytes, ...]:
        """A finish reason for each choice that has calls and none."""
        events: tuple[bytes, ...] = ()
        for index, state in enumerate(self._calling):
            if state.calls and not state.finished:
                delta = _Delta(index, None, finish=state.end_with("stop"))
                state.bring(delta)
                events += self._show(delta)
        return events

    # -- reasoning and usage -----------------------------------------------------------------------

    def _reasoning_splitters(
        self, request: EngineRequest, parsers: Parsers
    ) -> Sequence[ReasoningSplitter]:
        """A splitter for each choice; none where no parser reads the answer."""
        if parsers.reasoning is None or not _parses_reasoning(self._options, parsers.reasoning):
            return ()
        inside = REASONING_PARSERS[parsers.reasoning]
        prompted = self._prompt_begins_reasoning(request)
        kind = TextReasoningSplitter if parsers.by_text else ReasoningSplitter
        return [kind(inside=inside, prompted=prompted) for _ in range(self._options.choices)]

    def _prompt_begins_reasoning(self, request: EngineRequest) -> bool:
        end = self._decoder.decode(request.token_ids[-_PROMPT_END:], False)
        return end.rstrip().endswith("<think>")

    def _separate_reasoning(self, splitter: ReasoningSplitter, delta: _Delta, tokens: int) -> None:
        """Separate the reasoning in a piece; its tokens count as a whole."""
        before = self._reasoned.get(delta.index, False)
        answer, reasoning = splitter.feed(delta.text or "")
        reasons = bool(reasoning or (before and not answer))
        if reasons:
            self._reasoning_tokens += tokens
        self._reasoned[delta.index] = reasons
        if delta.finish is not None:
            # The last piece brings along what was held back.
            answer_end, reasoning_end = splitter.end()
            answer, reasoning = answer + answer_end, reasoning + reasoning_end
        delta.text, delta.reasoning = answer or None, reasoning or None

    def _take_usage(self, usage: EngineUsage) -> None:
        self._prompt_tokens = usage.prompt_tokens
        for name in ("prompt_tokens_details", "completion_tokens_details"):
            details = getattr(usage, name)
            if details is not None:
                values = msgspec.to_builtins(details)
                # Dynamo writes nulls for a completion, and leaves them out for a chat.
                self._usage[name] = {
                    key: values.get(key)
                    for key in _DETAILS[name]
                    if not self._options.chat or values.get(key) is not None
                }

    def _takes_role(self, index: int) -> bool:
        """Begin a choice: whether its first piece names the role, as in a chat."""
        self._begun.add(index)
        return self._options.chat

    # -- logprobs ----------------------------------------------------------------------------------

    def _logprobs(
        self, output: EngineOutput, ids: Sequence[int], *, hidden: bool
    ) -> dict[str, Any]:
        """``hidden``: the last token is not part of the text."""
        known: Sequence[str | None] = [None] * len(ids)
        if output.text is not None:
            known = output.tokens or []
        texts = [self._token(*pair) for pair in zip(ids, known, strict=False)]
        if hidden and not self._options.token_names:
            texts[-1] = ""
        numbers = [_short(number) for number in (output.log_probs or ())][: len(texts)]
        tokens = list(zip(ids, texts, numbers, strict=False))
        if self._options.chat:
            return self._chat_logprobs(tokens, output.top_logprobs)
        return {
            "tokens": texts,
            "token_logprobs": numbers,
            "top_logprobs": [
                {name: _f32(value) for name, value in self._tops(*token, top)}
                | {token[1]: _f32(token[2])}
                for token, top in zip(tokens, output.top_logprobs or (), strict=False)
            ],
            "text_offset": [],
        }

    def _chat_logprobs(
        self,
        tokens: Sequence[tuple[int, str, float | None]],
        tops: Sequence[Sequence[TopLogprob]] | None,
    ) -> dict[str, Any]:
        content = []
        # Without alternatives every token is listed, else those that have some.
        for token, top in zip(tokens, repeat(()) if tops is None else tops, strict=False):
            token_id, text, number = token
            others = self._tops(*token, top) if self._options.alternatives != 0 else ()
            content.append(
                {
                    "token": text,
                    "logprob": number,
                    "token_id": token_id,
                    "bytes": _bytes(text),
                    "top_logprobs": [
                        {"token": name, "logprob": _short(value), "bytes": _bytes(name)}
                        for name, value in others
                    ],
                }
            )
        return {"content": content, "refusal": None}

    def _tops(
        self, token_id: int, text: str, number: float | None, top: Sequence[TopLogprob]
    ) -> list[tuple[str, float | None]]:
        """The likeliest tokens, with the chosen one at the end if it is not one of them."""
        likeliest: list[tuple[str, float | None]] = [
            (self._token(other.token_id, other.token), other.logprob) for other in top
        ]
        if all(other.token_id != token_id for other in top):
            likeliest.append((text, number))
        return likeliest

    def _token(self, token_id: int, text: str | None) -> str:
        if self._options.token_names:
            return f"token_id:{token_id}"
        return self._decoder.decode([token_id], self._skip) if text is None else text

    # -- what the client sees ----------------------------------------------------------------------

    def _annotations(self, prompt: Sequence[int], request_id: str) -> tuple[bytes, ...]:
        """The events before the first output, which ``nvext.annotations`` ask for."""
        if not self._options.nvext.annotations:
            return ()
        ids = msgspec.json.encode(list(prompt)).decode()
        values = {"request_id": request_id, "token_ids": ids}
        return tuple(
            f"event: {name}\n: ".encode() + msgspec.json.encode(value) + b"\n\n"
            for name, value in values.items()
            if name in self._options.nvext.annotations
        )

    def _frame(self) -> tuple[bytes, bytes]:
        """The bytes of an event before and after its choices."""
        encode = msgspec.json.encode
        kind = "chat.completion.chunk" if self._options.chat else "text_completion"
        fingerprint = {} if self._options.chat else {"system_fingerprint": None}
        after = encode({**self._head(), **fingerprint, "object": kind})
        return b'data: {"id":' + encode(self._id) + b',"choices":[', b"]," + after[1:-1]

    def _plain_frame(self) -> tuple[bytes, bytes] | None:
        """The bytes around the text of an event that has nothing else, as most events; None where
        the request asks for more than text."""
        options = self._options
        more = (
            options.logprobs
            or self._splitters
            or self._calling
            or self._wants_ids
            or self._wants_reason
            or self._usage_in_each
        )
        if more or options.choices != 1 or not options.stream:
            return None
        if not options.chat:
            end = b',"index":0}' + self._after + b',"usage":null}\n\n'
            return self._before + b'{"text":', end
        before = self._before + b'{"index":0,"delta":{"content":'
        after = b'},"finish_reason":null,"logprobs":null}' + self._after + b"}\n\n"
        return before, after

    def _head(self) -> dict[str, Any]:
        return {"created": self._created, "model": self._options.model}

    def _show(self, *deltas: _Delta) -> tuple[bytes, ...]:
        """One event for pieces of different choices."""
        if not self._options.stream:
            for delta in deltas:
                self._keep_delta(delta)
            return ()
        if all(delta.empty for delta in deltas):
            return ()
        choices = b",".join(msgspec.json.encode(self._choice_json(delta)) for delta in deltas)
        nvext: dict[str, Any] = {}
        for delta in deltas:
            if delta.nvext:
                _join_nvext(nvext, delta.nvext)
        return (self._event(choices, deltas[0].usage, nvext or None),)

    def _choice_json(self, delta: _Delta) -> dict[str, Any]:
        if not self._options.chat:
            choice: dict[str, Any] = {"text": delta.text or "", "index": delta.index}
            if delta.logprobs is not None:
                choice["logprobs"] = delta.logprobs
            if delta.finish is not None:
                choice["finish_reason"] = delta.finish
            return choice
        shown: dict[str, Any] = {} if delta.text is None else {"content": delta.text}
        if delta.role:
            shown["role"] = "assistant"
        if delta.reasoning is not None:
            shown["reasoning_content"] = delta.reasoning
        if delta.calls:
            shown["tool_calls"] = delta.calls
        return {
            "index": delta.index,
            "delta": shown,
            "finish_reason": delta.finish,
            "logprobs": delta.logprobs,
        }

    def _event(
        self, choice: bytes, usage: Mapping[str, Any] | None, nvext: Mapping[str, Any] | None
    ) -> bytes:
        encode = msgspec.json.encode
        parts = [self._before, choice, self._after]
        if usage is not None or not self._options.chat:
            parts.append(b',"usage":' + encode(usage))
        if nvext is not None:
            parts.append(b',"nvext":' + encode(nvext))
        parts.append(b"}\n\n")
        return b"".join(parts)

    def _keep_delta(self, delta: _Delta) -> None:
        choice = self._whole.setdefault(delta.index, _WholeChoice())
        if delta.text:
            choice.text.append(delta.text)
        if delta.reasoning:
            choice.reasoning.append(delta.reasoning)
        for call in delta.calls:
            _keep_call(choice.calls, call)
        choice.finish = delta.finish or choice.finish
        if delta.logprobs is not None:
            choice.logprobs = _join_logprobs(choice.logprobs, delta.logprobs)
        _join_nvext(self._nvext, delta.nvext)


def parsers_of(
    options: EngineOptions, runtime: Mapping[str, Any], *, by_text: bool = False
) -> Parsers:
    """The parsers that the model's card asks for; ``runtime``: its runtime_config. ``by_text`` as
    of :class:`Parsers`.

    Raises RequestError (501) for a parser that is not supported, where it would read the answer.
    """
    if not options.chat:
        return NO_PARSERS
    tools = None
    if options.tools and options.tool_choice != "none":
        tools = _supported_parser(runtime, "tool_call_parser", TOOL_CALL_PARSERS, "tools")
    if tools is not None and options.logprobs:
        raise _not_supported("logprobs", f"logprobs with tool_call_parser {tools} is not supported")
    forced = bool(options.tools) and is_forced(options.tool_choice)
    if forced:
        _check_forced_call(options, runtime, tools)
    reasoning = _supported_parser(runtime, "reasoning_parser", REASONING_PARSERS, "messages")
    return Parsers(reasoning, tools, forced, by_text)


def _supported_parser(
    runtime: Mapping[str, Any], key: str, supported: Collection[str], field: str
) -> str | None:
    """The parser under a key of the card; ``field``: the request's, that it would be needed for."""
    name = str(runtime.get(key) or "") or None
    if name is not None and name not in supported:
        problem = f"{key} {name} of the model is not supported; supported: {', '.join(supported)}"
        raise _not_supported(field, problem)
    return name


def _check_forced_call(
    options: EngineOptions, runtime: Mapping[str, Any], tools: str | None
) -> None:
    if tools in _OWN_CONSTRAINT:
        problem = f"a forced tool_choice with tool_call_parser {tools} is not supported"
        raise _not_supported("tool_choice", problem)
    if runtime.get("structural_tag_mode") == "on":
        problem = "a forced tool_choice with structural_tag_mode on is not supported"
        raise _not_supported("tool_choice", problem)
    if options.logprobs:
        raise _not_supported("logprobs", "logprobs with a forced tool_choice is not supported")


def _not_supported(field: str, problem: str) -> RequestError:
    return RequestError(501, "unsupported", field, problem)


def _finish_of(output: EngineOutput) -> str:
    """OpenAI's finish reason of a last output. Raises AnswerError for one that is an error."""
    if output.error is not None:
        raise AnswerError("reported an error")
    return _FINISH[str(output.finish_reason)]


def _parses_reasoning(options: EngineOptions, parser: str) -> bool:
    """Whether this parser of the card reads the answer."""
    if not options.chat:
        return False
    args = options.template_args
    wanted = wants_thinking(
        args, reasoning_effort=options.reasoning_effort, thinking=options.thinking
    )
    if wanted is None and args.get("thinking_mode") == "chat":
        wanted = False
    return wanted is not False or parser not in CAN_BE_OFF


def _rules(request: EngineRequest) -> StopRules:
    stop = request.stop_conditions
    requested = frozenset(stop.stop_token_ids or ())
    return StopRules(
        strings=tuple(stop.stop or ()),
        keep_string=bool(request.sampling_options.include_stop_str_in_output),
        hidden_ids=requested | frozenset(stop.stop_token_ids_hidden or ()),
        requested_ids=requested,
        visible_ids=frozenset(stop.stop_token_ids_visible or ()),
        min_tokens=stop.min_tokens or 0,
    )


def _whole_chat(index: int, choice: _WholeChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "".join(choice.text) or None, "refusal": None}
    message["role"] = "assistant"
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message["tool_calls"] = [
            {name: call[name] for name in ("id", "type", "function")} for call in choice.calls
        ]
    return {
        "index": index,
        "message": message,
        "finish_reason": choice.finish,
        "logprobs": choice.logprobs,
    }


def _whole_completion(index: int, choice: _WholeChoice) -> dict[str, Any]:
    whole: dict[str, Any] = {"text": "".join(choice.text), "index": index}
    if choice.logprobs is not None:
        whole["logprobs"] = choice.logprobs
    if choice.finish is not None:
        whole["finish_reason"] = choice.finish
    return whole


def _join_logprobs(before: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    if before is None:
        return dict(more)
    return {
        name: before[name] + value if isinstance(value, list) else value
        for name, value in more.items()
    }


def _without_blanks(deltas: Iterable[_Delta], *, called: bool) -> list[_Delta]:
    """The last pieces of a choice without blank ones after calls."""
    kept = []
    for delta in deltas:
        if delta.calls or not called or (delta.text or "").strip(SPACE):
            kept.append(delta)
        called = called or bool(delta.calls)
    return kept


def _keep_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Keep a call, or a piece of one that is kept already."""
    if "id" in call:
        calls.append(call)
        calls.sort(key=lambda call: int(call["index"]))
        return
    for kept in calls:
        if kept["index"] == call["index"]:
            kept["function"]["arguments"] += call["function"]["arguments"]


def _has_json(call: Mapping[str, Any]) -> bool:
    """Whether the arguments of a call are JSON, which some formats do not require."""
    try:
        read_value(call["function"]["arguments"])
    except ValueError:
        return False
    return True


def _join_nvext(before: dict[str, Any], more: Mapping[str, Any] | None) -> None:
    for name, value in (more or {}).items():
        both = name == "completion_token_ids" and name in before
        before[name] = before[name] + value if both else value


def _bytes(text: str) -> list[int] | None:
    return list(text.encode()) if text else None


def _f32(number: float | None) -> float | None:
    """The number in 32 bits, as Dynamo keeps it; None if it is out of their range."""
    if number is None:
        return None
    try:
        rounded: float = _F32.unpack(_F32.pack(number))[0]
    except OverflowError:
        return None
    return rounded


def _short(number: float | None) -> float | None:
    """The number in 32 bits with the fewest digits that name it, as Dynamo writes it."""
    exact = _f32(number)
    if exact is None or exact != exact:
        return None
    packed = _F32.pack(exact)
    for digits in range(6, 9):
        short = float(f"{exact:.{digits}g}")
        if _F32.pack(short) == packed:
            return short
    return float(f"{exact:.9g}")
