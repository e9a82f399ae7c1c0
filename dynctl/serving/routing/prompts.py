"""The prompts of a request and their token ids: from the model's tokenizer or an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dynctl.base.turns import Apart
from dynctl.wire.engine_kinds.kind import AS_TOKENIZERS, EngineKind
from dynctl.wire.engine_kinds.table import OTHER
from dynctl.wire.openai import ChatRequest, CompletionRequest
from router_core import quick_init

if TYPE_CHECKING:
    from dynctl.tokenization import ModelTokenizer

#: Estimated characters per token without a tokenizer: for load only, never for overlap.
CHARS_PER_TOKEN = 4

NOT_MODELLED = "cache overlap not modelled: no tokenizer"
_READ_DIFFERENTLY = (
    "cache overlap not modelled: tools, calls of tools and parts of messages are read in another "
    "way by each kind of engine"
)
_PLAIN_FIELDS = frozenset({"role", "content", "name"})
#: Prompts of a batch that engines are asked to tokenize, one round trip each.
_MOST_REMOTE_PROMPTS = 64
#: Characters of a batch after which other requests have their turn, and what each prompt counts
#: beside its own.
_BETWEEN_CHARS = 4 * 1024
_PROMPT_CHARS = 256

Source = Literal["client", "model", "engine", "estimate"]


@quick_init
@dataclass(frozen=True, slots=True)
class Prompt:
    """The parts of a request that become tokens: exactly one of the first three is set.

    ``add_special_tokens`` None: as engines do, for a text and not for a chat. ``keep``: tokens that
    are left of a longer prompt; ``cut`` is the side that loses the others, None: the left one, and
    special tokens that the tokenizer adds there stay. ``unread_tokens``: an estimate of what is no
    text. ``request``: the chat as the client wrote it, for engines that read its tools in their own
    way.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] | None = None
    chat_template: str | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    keep: int | None = None
    cut: Literal["left", "right"] | None = None
    unread_tokens: int = 0
    request: ChatRequest | None = field(default=None, repr=False)

    @property
    def engine_only(self) -> str | None:
        """Why only an engine can tokenize it, None if a tokenizer here can."""
        if self.messages is None:
            return None
        if self.chat_template is not None:
            return "cache overlap not modelled: the request has its own chat template"
        if self.continue_final_message:
            return "cache overlap not modelled: the final message is continued"
        if self.add_special_tokens:
            return "cache overlap not modelled: special tokens are added to the chat"
        return None

    def is_plain(self, tokenizer: ModelTokenizer) -> bool:
        """Whether every engine makes the same tokens of it: no chat, or a chat of texts alone.

        Kinds of engines differ in the fields of tools and of their calls, in how they join parts,
        and in what they do with texts where a template knows parts only.
        """
        if self.messages is None:
            return True
        if self.tools or self.documents or tokenizer.template_for(with_tools=False).wraps_strings:
            return False
        return all(
            message.keys() <= _PLAIN_FIELDS and isinstance(message.get("content"), str)
            for message in self.messages
        )

    def to_tokenize_body(self, model: str, kind: EngineKind = OTHER) -> dict[str, Any]:
        """The body of an engine's ``POST /tokenize`` (vLLM's format, which others take too)."""
        body: dict[str, Any] = {"model": model}
        if self.add_special_tokens is not None:
            body["add_special_tokens"] = self.add_special_tokens
        if self.messages is None:
            return body | {"prompt": self.text or ""}
        body["messages"] = self.messages
        body["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            body["continue_final_message"] = True
        if self.chat_template is not None:
            body["chat_template"] = self.chat_template
        if self.tools:
            body["tools"] = self._tools_for(kind)
        arguments = dict(self.template_kwargs or {})
        if self.documents:
            arguments["documents"] = self.documents
        if arguments:
            body["chat_template_kwargs"] = arguments
        return body

    def _tools_for(self, kind: EngineKind) -> Sequence[Mapping[str, Any]] | None:
        """The tools as an engine of this kind takes them."""
        if self.request is None:
            return self.tools
        return kind.own_tools(self.request) or _given_tools(self.request) or self.tools

    def shortened(self, ids: Sequence[int], added: int | None = 0) -> Sequence[int] | None:
        """The tokens that are left of ``ids``. ``added``: special tokens at their start that stay;
        None, and then the result is None, where that is unknown and tokens must go."""
        if self.keep is None or len(ids) <= self.keep:
            return ids
        if self.cut == "right":
            return ids[: self.keep]
        if self.cut == "left" or self.messages is not None or self.text is None:
            added = 0
        if added is None:
            return None
        added = min(added, self.keep)
        return [*ids[:added], *ids[len(ids) - self.keep + added :]]


def dynamo_chat(tokenizer: ModelTokenizer, chat: ChatRequest) -> list[int]:
    """The token ids of a chat as Dynamo's frontend reads its body. Raises PromptError or
    TemplateError. ``functions``, which Dynamo refuses with another status, are not read."""
    from dynctl.tokenization import PromptError, encode_as_dynamo

    body = chat.body
    for name in ("chat_template", "documents"):
        if body.get(name) is not None:
            raise PromptError(f"{name}: a Dynamo frontend refuses this field; leave it out")
    for i, message in enumerate(body["messages"]):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict):
                field = f"messages[{i}].content[{j}]"
                raise PromptError(f"{field}: expected an object, got a string", field=field)
    given = {**(body.get("chat_template_args") or {}), **(body.get("chat_template_kwargs") or {})}
    return encode_as_dynamo(
        tokenizer,
        body["messages"],
        body.get("tools"),
        tool_choice=body.get("tool_choice"),
        template_args=given,
        reasoning_effort=body.get("reasoning_effort"),
        thinking=body.get("thinking"),
        add_generation_prompt=body.get("add_generation_prompt"),
        continue_final_message=chat.continue_final_message,
    )


def prompts_of(
    parsed: ChatRequest | CompletionRequest, context_length: int | None = None
) -> tuple[list[Prompt], str | None]:
    """The prompts to tokenize, and why no tokenizer and no engine can do so, if so.

    ``context_length``: of the model, in tokens, for ``truncate_prompt_tokens: -1``.
    """
    keep = parsed.truncate_prompt_tokens
    if keep == -1:
        # As in vLLM: with a bounded output one token of context is left for it.
        reserve = 1 if parsed.max_tokens else 0
        keep = None if context_length is None else max(0, context_length - reserve)
    special, cut = parsed.add_special_tokens, parsed.truncation_side
    token_data = parsed.nvext.token_data
    if token_data is not None:
        return [Prompt(token_ids=token_data, add_special_tokens=special, keep=keep, cut=cut)], None
    if isinstance(parsed, CompletionRequest):
        prompts = [
            Prompt(text=prompt, add_special_tokens=special, keep=keep, cut=cut)
            if isinstance(prompt, str)
            else Prompt(token_ids=prompt, add_special_tokens=special, keep=keep, cut=cut)
            for prompt in parsed.prompts
        ]
        if parsed.unread_tokens:
            prompts[0] = replace(prompts[0], unread_tokens=parsed.unread_tokens)
        return prompts, parsed.not_modelled
    reason = parsed.not_modelled
    if not parsed.text_only:
        reason = "cache overlap not modelled: the prompt has more than text"
    prompt = Prompt(
        messages=parsed.messages,
        tools=parsed.tools,
        documents=parsed.documents,
        add_generation_prompt=parsed.add_generation_prompt,
        template_kwargs=parsed.template_args or None,
        chat_template=parsed.chat_template,
        continue_final_message=parsed.continue_final_message,
        request=parsed if parsed.tools else None,
        add_special_tokens=special,
        keep=keep,
        cut=cut,
    )
    return [prompt], reason


def cache_key_problem(
    parsed: ChatRequest | CompletionRequest, kinds: Iterable[EngineKind]
) -> str | None:
    """Why the reuse of a request by engines of these kinds is not known: a field of the client is
    part of their cache keys."""
    for kind in kinds:
        for name in kind.cache_keys:
            if parsed.body.get(name) is not None:
                return f"cache overlap not modelled: {name} is part of {kind.label}'s cache keys"
    return None


def _given_tools(parsed: ChatRequest) -> list[Mapping[str, Any]] | None:
    """The tools of a chat as they came; those of other APIs have another form."""
    tools = parsed.body.get("tools")
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    ):
        return None
    return tools


@quick_init
@dataclass(frozen=True, slots=True)
class PromptTokens:
    """``ids`` None: not tokenized; ``count`` is then an estimate, and ``note`` the reason."""

    ids: Sequence[int] | None
    count: int
    source: Source
    note: str | None = None


EngineTokenize = Callable[[str, Prompt], Awaitable[Sequence[int] | None]]


class PromptTokenizers:
    """Tokenizers by model, with an engine's ``/tokenize`` as fallback.

    ``default`` is for models without one of their own. ``engine`` returns None if no engine
    of the model has the endpoint. ``kinds``: the kinds of a model's engines, empty where all read
    chats as the tokenizers here do. Engines that read a chat in another way are asked about it;
    where a model has several kinds, such a chat is not modelled.
    """

    def __init__(
        self,
        default: ModelTokenizer | None = None,
        by_model: Mapping[str, ModelTokenizer] | None = None,
    ) -> None:
        self._default = default
        self._by_model = dict(by_model or {})
        self._by_set: dict[tuple[str, str], ModelTokenizer] = {}
        self.engine: EngineTokenize | None = None
        self.kinds: Callable[[str], Set[EngineKind]] = lambda _: frozenset()

    def ask_engines(
        self, tokenize: EngineTokenize | None, kinds: Callable[[str], Set[EngineKind]] | None = None
    ) -> None:
        """Use engines as the fallback from now on; None: not. ``kinds``: those of a model."""
        self.engine = tokenize
        self.kinds = kinds or self.kinds

    def set(self, model: str, tokenizer: ModelTokenizer) -> None:
        """Use another tokenizer for a model from now on."""
        self._by_model[model] = tokenizer

    def set_by_set(self, tokenizers: Mapping[tuple[str, str], ModelTokenizer]) -> None:
        """The tokenizers of worker sets, by model and set; those of before are forgotten."""
        self._by_set = dict(tokenizers)

    def of(self, model: str, worker_set: str | None = None) -> ModelTokenizer | None:
        """The tokenizer of a model. Worker sets of one model may have different ones: then it is
        that of the set, or None while it is not here."""
        if worker_set is not None and self._default is None:
            return self._by_set.get((model, worker_set))
        return self._by_model.get(model, self._default)

    async def tokenize(
        self,
        model: str,
        prompt: Prompt,
        worker_set: str | None = None,
        apart: Apart | None = None,
    ) -> PromptTokens:
        """The prompt's tokens. Raises PromptError or TemplateError if the prompt is invalid.
        ``apart``: renders a large chat."""
        note = NOT_MODELLED
        if prompt.token_ids is not None:
            return _tokens(prompt.shortened(prompt.token_ids), "client")
        tokenizer = self.of(model, worker_set)
        ask = self.engine is not None
        if tokenizer is not None:
            why = prompt.engine_only
            kinds = self.kinds(model) if why is None else frozenset()
            if kinds and _read_differently(kinds) and not prompt.is_plain(tokenizer):
                why, ask = _READ_DIFFERENTLY, ask and len(kinds) == 1
            if why is None:
                return _tokens(await _encode_here(tokenizer, prompt, apart), "model")
            note = why
        if ask and self.engine is not None:
            from_engine = await self.engine(model, prompt)
            if from_engine is not None:
                specials = 0 if prompt.add_special_tokens is False else None
                ids = prompt.shortened(from_engine, specials)
                if ids is not None:
                    return _tokens(ids, "engine")
                note = "cache overlap not modelled: the prompt is truncated; set --model-path DIR"
        return PromptTokens(None, estimate_tokens(prompt), "estimate", note)

    async def tokenize_batch(
        self,
        model: str,
        prompts: Sequence[Prompt],
        worker_set: str | None = None,
        apart: Apart | None = None,
    ) -> list[PromptTokens]:
        """The tokens of each prompt; if one cannot be tokenized, no prompt has ids."""
        here = self.of(model, worker_set) is not None
        remote = not here and any(prompt.token_ids is None for prompt in prompts)
        if remote and len(prompts) > _MOST_REMOTE_PROMPTS:
            note = (
                f"cache overlap not modelled: a batch of more than {_MOST_REMOTE_PROMPTS} texts "
                "needs --model-path DIR"
            )
            return [PromptTokens(None, estimate_tokens(p), "estimate", note) for p in prompts]
        tokenized = []
        chars = 0
        for prompt in prompts:
            tokenized.append(await self.tokenize(model, prompt, worker_set, apart))
            chars += _PROMPT_CHARS + len(prompt.text or "")
            if chars > _BETWEEN_CHARS:
                chars = 0
                await asyncio.sleep(0)
        missing = next((tokens for tokens in tokenized if tokens.ids is None), None)
        if missing is None:
            return tokenized
        if len(tokenized) == 1:
            return tokenized
        return [replace(tokens, ids=None, note=missing.note) for tokens in tokenized]


def _read_differently(kinds: Set[EngineKind]) -> bool:
    """Whether a kind reads chats in another way than the tokenizers here."""
    return any(kind.chat_reading != AS_TOKENIZERS for kind in kinds)


async def _encode_here(
    tokenizer: ModelTokenizer, prompt: Prompt, apart: Apart | None
) -> Sequence[int] | None:
    """Token ids by a tokenizer here."""
    if prompt.messages is not None:
        ids = await tokenizer.encode_chat_async(
            prompt.messages,
            tools=prompt.tools,
            documents=prompt.documents,
            add_generation_prompt=prompt.add_generation_prompt,
            template_kwargs=prompt.template_kwargs,
            apart=apart,
        )
        return ids if prompt.keep is None else prompt.shortened(ids)
    special = prompt.add_special_tokens is not False
    ids = await tokenizer.encode_prompt_async(prompt.text or "", add_special_tokens=special)
    if not _keeps_special(prompt):
        return prompt.shortened(ids)
    return _shortened_text(prompt, ids, await tokenizer.encode_prompt_async(""))


def encode(tokenizer: ModelTokenizer, prompt: Prompt) -> Sequence[int] | None:
    """Token ids as :class:`PromptTokenizers` finds them, outside an event loop; None where only an
    engine can tokenize the prompt. Raises PromptError or TemplateError."""
    if prompt.token_ids is not None:
        return prompt.shortened(prompt.token_ids)
    if prompt.engine_only is not None:
        return None
    if prompt.messages is None:
        special = prompt.add_special_tokens is not False
        ids = tokenizer.encode(prompt.text or "", add_special_tokens=special)
        if not _keeps_special(prompt):
            return prompt.shortened(ids)
        return _shortened_text(prompt, ids, tokenizer.encode_prompt(""))
    ids = tokenizer.encode_chat(
        prompt.messages,
        tools=prompt.tools,
        documents=prompt.documents,
        add_generation_prompt=prompt.add_generation_prompt,
        template_kwargs=prompt.template_kwargs,
    )
    return prompt.shortened(ids)


def _keeps_special(prompt: Prompt) -> bool:
    """Whether special tokens at the start of a text stay when it is shortened."""
    return prompt.keep is not None and prompt.add_special_tokens is not False


def _shortened_text(
    prompt: Prompt, ids: Sequence[int], added: Sequence[int]
) -> Sequence[int] | None:
    """The tokens that are left of a text. ``added``: the special tokens of an empty text."""
    begins = list(ids[: len(added)]) == list(added)
    return prompt.shortened(ids, len(added) if begins else 0)


def _tokens(ids: Sequence[int] | None, source: Source) -> PromptTokens:
    return PromptTokens(ids, len(ids or ()), source)


def estimate_tokens(prompt: Prompt) -> int:
    """An estimated length for load accounting only, from the characters of the text."""
    if prompt.token_ids is not None:
        return len(prompt.shortened(prompt.token_ids) or ())
    chars = len(prompt.text or "") + prompt.unread_tokens * CHARS_PER_TOKEN
    for message in prompt.messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            if isinstance(part, Mapping):
                part = part.get("text")
            if isinstance(part, str):
                chars += len(part)
    tokens = max(1, chars // CHARS_PER_TOKEN)
    return tokens if prompt.keep is None else min(tokens, prompt.keep)
