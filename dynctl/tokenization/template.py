"""Render messages to prompt text with a model's chat template."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError

from dynctl.tokenization.budget import Budget, BudgetHolder, RenderLimits, WorkLimitError
from dynctl.tokenization.errors import (
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


class ChatTemplate:
    """One compiled template. Thread-safe; not trusted (see :mod:`dynctl.tokenization.sandbox`).

    ``trusted``: its operator trusts it. It runs in the same sandbox without a meter: only the
    length of the prompt is bounded, and that after each piece of it.

    ``origin`` is its name in errors (a file name). ``variables`` are available in every render
    (``bos_token`` and others). ``now`` is the time for ``strftime_now``, ``clock`` that for the
    time limit. Raises :class:`TemplateError` if the source does not compile. ``heavy`` becomes true
    after a render that should not run on an event loop. ``takes_parts``: it iterates over the parts
    of a content; ``wraps_strings``: it supports parts only.
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
    ) -> None:
        self.source = source
        self.origin = origin
        self.limits = limits or RenderLimits()
        self.heavy = False
        self.trusted = trusted
        self._variables = dict(variables or {})
        self._clock = clock
        self._budget = BudgetHolder()
        self._environment = (
            TrustedEnvironment(now) if trusted else ChatEnvironment(self._budget, now)
        )
        if len(source) > self.limits.template_chars:
            raise TemplateError(
                origin, f"{len(source)} characters, the limit is {self.limits.template_chars}"
            )
        try:
            with self._budget.use(Budget(self.limits, clock)):
                tree = self._environment.parse(source)
                self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateError(origin, f"line {error.lineno}: {error.message}") from error
        except (JinjaError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise TemplateError(origin, f"does not compile: {_kind(error)}") from error
        self.takes_parts, tests_string = _content_shape(tree)
        self.wraps_strings = self.takes_parts and not tests_string

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        join_results: bool = True,
    ) -> str:
        """The prompt text.

        ``join_results``: results of tools are strings for every template, as in vLLM; False: they
        follow the rules of the other messages, as in Dynamo.
        ``template_kwargs`` are variables of the template (``enable_thinking``, ...); they cannot
        replace messages, tools or add_generation_prompt. Raises :class:`PromptError` for an error
        of the request (the template refuses the messages, an image for a template of text),
        :class:`TemplateError` for an error of the template.
        """
        extra = dict(template_kwargs or {})
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise PromptError(
                f"chat_template_kwargs cannot set {', '.join(taken)}; use the request's own field",
                field="chat_template_kwargs",
            )
        variables = {
            **self._variables,
            **extra,
            "messages": [
                self._prepared(i, message, join_results) for i, message in enumerate(messages)
            ],
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        chunks: list[str] = []
        length = 0
        budget = Budget(self.limits, self._clock)
        began = self._clock()
        try:
            with self._budget.use(budget):
                for chunk in self._template.generate(variables):
                    length += len(chunk)
                    if length > self.limits.output_chars:
                        raise PromptTooLongError(length, self.limits.output_chars)
                    chunks.append(chunk)
        except RejectedByTemplate as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        except WorkLimitError as error:
            raise TemplateError(self.origin, f"stopped, {error}") from error
        except SecurityError as error:
            raise TemplateError(self.origin, f"not allowed: {error}") from error
        except (JinjaError, RecursionError, MemoryError) as error:
            raise TemplateError(self.origin, _kind(error)) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            # Python's own message may quote prompt text, so only the kind of error is shown.
            raise TemplateError(
                self.origin,
                f"{type(error).__name__} while rendering these messages; "
                "the template expects other messages, tools or arguments",
            ) from error
        except (ArithmeticError, AssertionError, LookupError, RuntimeError) as error:
            raise TemplateError(self.origin, type(error).__name__) from error
        finally:
            heavy = budget.operations > _HEAVY_OPERATIONS
            if self.trusted:  # nothing is counted
                heavy = self._clock() - began > _HEAVY_S
            self.heavy = self.heavy or heavy
        return "".join(chunks)

    def _prepared(self, index: int, message: Message, join_results: bool) -> dict[str, Any]:
        """The message as vLLM and SGLang pass it to a template.

        Text parts become one string, joined by newlines, unless the template iterates over parts;
        strings become parts if the template supports parts only. With ``join_results`` a result of
        a tool is always a string. Content null (a turn of tool calls) is empty. Arguments of tool
        calls, which are JSON text in OpenAI's format, become mappings.
        """
        prepared = dict(message)
        content = prepared.get("content")
        field = f"messages[{index}].content"
        result = join_results and prepared.get("role") == "tool"
        if content is None and "content" in prepared:
            prepared["content"] = [] if self.takes_parts and not result else ""
        elif isinstance(content, str):
            if self.wraps_strings and not result:
                prepared["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list | tuple):
            if not self.takes_parts or (result and all(map(_is_text, content))):
                prepared["content"] = "\n".join(
                    _text_of(part, f"{field}[{i}]") for i, part in enumerate(content)
                )
        elif content is not None:
            raise PromptError(
                f"{field} is {type(content).__name__}; expected text or a list of parts",
                field=field,
            )
        calls = prepared.get("tool_calls")
        if isinstance(calls, list | tuple):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return prepared


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


def _content_shape(tree: nodes.Template) -> tuple[bool, bool]:
    """(loops over the parts of a message's content, tests whether the content is a string).

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
    return loops, tests


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
