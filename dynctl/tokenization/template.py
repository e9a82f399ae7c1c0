"""Render messages to prompt text with a model's chat template."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError

from dynctl.tokenization.budget import Budget, BudgetHolder, RenderLimits, WorkLimitError
from dynctl.tokenization.errors import (
    OverLimit,
    PromptError,
    PromptTooLongError,
    TemplateError,
    UnsupportedContentError,
)
from dynctl.tokenization.sandbox import ChatEnvironment, RejectedByTemplate, TrustedEnvironment

Message = Mapping[str, Any]
# A render of this many operations takes about 20 ms.
_HEAVY_OPERATIONS = 20_000
_HEAVY_S = 0.02
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


def _utc_now() -> datetime:
    return datetime.now(UTC)


class TemplateProgram(Protocol):
    """What runs a template: this process, or another one."""

    @property
    def heavy(self) -> bool:
        """Whether a render should not run on an event loop."""

    @property
    def shape(self) -> "ContentShape":
        """How the template reads the content of a message."""

    def run(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises TemplateError, and PromptError for messages that it refuses."""


class ContentShape(NamedTuple):
    """How a template reads a message's content. ``takes_parts``: it iterates over the parts;
    ``tests_strings``: it tests whether the content is a string."""

    takes_parts: bool
    tests_strings: bool


class CompiledTemplate:
    """A template that runs in this process. Thread-safe.

    Raises :class:`TemplateError` if the source does not compile. Parameters as in
    :class:`ChatTemplate`. ``heavy`` becomes true after a render that took long.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str,
        limits: RenderLimits,
        now: Callable[[], datetime] = _utc_now,
        clock: Callable[[], float] = time.monotonic,
        trusted: bool = False,
    ) -> None:
        self.heavy = False
        self._origin = origin
        self._limits = limits
        self._trusted = trusted
        self._clock = clock
        self._budget = BudgetHolder()
        environment = TrustedEnvironment(now) if trusted else ChatEnvironment(self._budget, now)
        if len(source) > limits.template_chars:
            raise TemplateError(
                origin, f"{len(source)} characters, the limit is {limits.template_chars}"
            )
        try:
            with self._budget.use(Budget(limits, clock)):
                tree = environment.parse(source)
                self.shape = _content_shape(tree)  # before the compiler, which may change it
                self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise TemplateError(origin, f"line {error.lineno}: {error.message}") from error
        except (JinjaError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise TemplateError(origin, f"does not compile: {_kind(error)}") from error

    def run(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises TemplateError, and PromptError for messages that it refuses."""
        chunks: list[str] = []
        length = 0
        limits = self._limits
        budget = Budget(limits, self._clock)
        began = self._clock()
        try:
            with self._budget.use(budget):
                for chunk in self._template.generate(variables):
                    length += len(chunk)
                    if length > limits.output_chars:
                        raise PromptTooLongError(length, limits.output_chars)
                    chunks.append(chunk)
        except RejectedByTemplate as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        except WorkLimitError as error:
            stopped = TemplateError(self._origin, f"stopped, {error}")
            stopped.over_limit = OverLimit(self._origin, f"rendering a chat takes {error}")
            raise stopped from error
        except SecurityError as error:
            raise TemplateError(self._origin, f"not allowed: {error}") from error
        except (JinjaError, RecursionError, MemoryError) as error:
            raise TemplateError(self._origin, _kind(error)) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            # Python's own message may quote prompt text, so only the kind of error is shown.
            raise TemplateError(
                self._origin,
                f"{type(error).__name__} while rendering these messages; "
                "the template expects other messages, tools or arguments",
            ) from error
        except (ArithmeticError, AssertionError, LookupError, RuntimeError) as error:
            raise TemplateError(self._origin, type(error).__name__) from error
        finally:
            heavy = budget.operations > _HEAVY_OPERATIONS
            if self._trusted:  # nothing is counted
                heavy = self._clock() - began > _HEAVY_S
            self.heavy = self.heavy or heavy
        return "".join(chunks)


class ChatOptions(TypedDict, total=False):
    """The keywords of :meth:`ChatTemplate.variables`."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any] | None
    join_results: bool


class ChatTemplate:
    """A chat template: prepares messages for it, and renders them. Thread-safe.

    ``program`` runs it; without one it is compiled and runs in this process, where the sandbox
    (:mod:`dynctl.tokenization.sandbox`) keeps it from Python, files and endless work.
    ``trusted``: its operator trusts it. It runs in the same sandbox without a meter: only the
    length of the prompt is bounded, and that after each piece of it.

    ``origin`` is its name in errors (a file name). ``variables`` are available in every render
    (``bos_token`` and others). ``now`` is the time for ``strftime_now``, ``clock`` that for the
    time limit. Raises :class:`TemplateError` if the source does not compile. ``takes_parts``: it
    iterates over the parts of a content; ``wraps_strings``: it supports parts only.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str = "chat template",
        variables: Mapping[str, Any] | None = None,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = _utc_now,
        clock: Callable[[], float] = time.monotonic,
        trusted: bool = False,
        program: TemplateProgram | None = None,
    ) -> None:
        self.source = source
        self.origin = origin
        self._variables = dict(variables or {})
        self.program: TemplateProgram = program or CompiledTemplate(
            source,
            origin=origin,
            limits=limits or RenderLimits(),
            now=now,
            clock=clock,
            trusted=trusted,
        )
        shape = self.program.shape
        self.takes_parts = shape.takes_parts
        self.wraps_strings = shape.takes_parts and not shape.tests_strings

    @property
    def heavy(self) -> bool:
        """Whether a render should not run on an event loop."""
        return self.program.heavy

    def render(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """The prompt text. Parameters and errors as :meth:`variables`.

        Raises :class:`PromptError` for an error of the request (the template refuses the messages),
        :class:`TemplateError` for an error of the template.
        """
        return self.program.run(self.variables(messages, **options))

    def variables(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        join_results: bool = True,
    ) -> dict[str, Any]:
        """The variables of a render.

        ``join_results``: results of tools are strings for every template, as in vLLM; False: they
        follow the rules of the other messages, as in Dynamo.
        ``template_kwargs`` are variables of the template (``enable_thinking``, ...); they cannot
        replace messages, tools or add_generation_prompt. Raises :class:`PromptError` for an error
        of the request (an image for a template of text).
        """
        extra = dict(template_kwargs or {})
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise PromptError(
                f"chat_template_kwargs cannot set {', '.join(taken)}; use the request's own field",
                field="chat_template_kwargs",
            )
        return {
            **self._variables,
            **extra,
            "messages": [
                self._prepare_message(i, message, join_results)
                for i, message in enumerate(messages)
            ],
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _prepare_message(self, index: int, message: Message, join_results: bool) -> dict[str, Any]:
        """The message as vLLM and SGLang pass it to a template.

        Text parts become one string, joined by newlines, unless the template iterates over parts;
        strings become parts if the template supports parts only. With ``join_results`` a result of
        a tool is always a string. Content null (a turn of tool calls) is empty. Arguments of tool
        calls, which are JSON text in OpenAI's format, become mappings.
        """
        prepared = dict(message)
        if "content" in prepared:
            is_result = join_results and prepared.get("role") == "tool"
            field = f"messages[{index}].content"
            prepared["content"] = self._prepare_content(prepared["content"], field, is_result)
        calls = prepared.get("tool_calls")
        if isinstance(calls, list | tuple):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return prepared

    def _prepare_content(self, content: Any, field: str, is_result: bool) -> Any:
        if content is None:
            return [] if self.takes_parts and not is_result else ""
        if isinstance(content, str):
            wraps = self.wraps_strings and not is_result
            return [{"type": "text", "text": content}] if wraps else content
        if not isinstance(content, list | tuple):
            raise PromptError(
                f"{field} is {type(content).__name__}; expected text or a list of parts",
                field=field,
            )
        if self.takes_parts and not (is_result and all(map(_is_text, content))):
            return content
        return "\n".join(_text_of(part, f"{field}[{i}]") for i, part in enumerate(content))


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _text_of(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        text = part.get("text")
        if kind in ("text", "input_text", "output_text") and isinstance(text, str):
            return text
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            return str(part["refusal"])
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise UnsupportedContentError(
                f"{field} has type {str(kind)[:40]!r}; the model's template supports text only",
                field=field,
            )
    raise PromptError(
        f'{field} is not a text part; expected {{"type": "text", "text": "..."}}', field=field
    )


def _with_parsed_arguments(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return call
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}


def _content_shape(tree: nodes.Template) -> ContentShape:
    """How a template reads a message's content.

    A heuristic on the syntax: a ``for`` over ``message.content``, ``message['content']`` or a
    variable that was set from it; filters and slices are ignored.
    """
    names: set[str] = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = any(
        test.name in ("string", "iterable", "sequence") and _is_content(test.node, names)
        for test in tree.find_all(nodes.Test)
    )
    return ContentShape(loops, tests)


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
    return False


def _kind(error: BaseException) -> str:
    if isinstance(error, JinjaError) and error.message:
        return error.message[:300]
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return type(error).__name__
