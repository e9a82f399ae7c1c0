"""Token ids of a request's prompt: from the model's tokenizer, else from an engine."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynctl.tokenization import ModelTokenizer

#: Estimated characters per token without a tokenizer: for load only, never for overlap.
CHARS_PER_TOKEN = 4

NOT_MODELLED = "cache overlap not modelled: no tokenizer"

Source = Literal["client", "model", "engine", "estimate"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The parts of a request that become tokens: exactly one of the first three is set."""

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] | None = None

    def to_tokenize_body(self, model: str) -> dict[str, Any]:
        """The body of an engine's ``POST /tokenize`` (vLLM's format)."""
        body: dict[str, Any] = {"model": model}
        if self.messages is None:
            return body | {"prompt": self.text or ""}
        body["messages"] = self.messages
        body["add_generation_prompt"] = self.add_generation_prompt
        if self.tools:
            body["tools"] = self.tools
        if self.template_kwargs:
            body["chat_template_kwargs"] = self.template_kwargs
        return body


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """``ids`` is None without a tokenizer; ``count`` is then an estimate."""

    ids: Sequence[int] | None
    count: int
    source: Source


EngineTokenize = Callable[[str, Prompt], Awaitable[Sequence[int] | None]]


class PromptTokenizers:
    """Tokenizers by model, with an engine's ``/tokenize`` as fallback.

    ``default`` is for models without one of their own. ``engine`` returns None if no engine
    of the model has the endpoint.
    """

    def __init__(
        self,
        default: ModelTokenizer | None = None,
        by_model: Mapping[str, ModelTokenizer] | None = None,
    ) -> None:
        self._default = default
        self._by_model = dict(by_model or {})
        self.engine: EngineTokenize | None = None

    def of(self, model: str) -> ModelTokenizer | None:
        return self._by_model.get(model, self._default)

    async def tokenize(self, model: str, prompt: Prompt) -> PromptTokens:
        """The prompt's tokens. Raises PromptError or TemplateError if the prompt is invalid."""
        if prompt.token_ids is not None:
            return PromptTokens(prompt.token_ids, len(prompt.token_ids), "client")
        tokenizer = self.of(model)
        if tokenizer is not None:
            if prompt.messages is not None:
                ids = await tokenizer.encode_chat_async(
                    prompt.messages,
                    tools=prompt.tools,
                    documents=prompt.documents,
                    add_generation_prompt=prompt.add_generation_prompt,
                    template_kwargs=prompt.template_kwargs,
                )
            else:
                ids = await tokenizer.encode_prompt_async(prompt.text or "")
            return PromptTokens(ids, len(ids), "model")
        if self.engine is not None:
            from_engine = await self.engine(model, prompt)
            if from_engine is not None:
                return PromptTokens(from_engine, len(from_engine), "engine")
        return PromptTokens(None, estimate_tokens(prompt), "estimate")


def estimate_tokens(prompt: Prompt) -> int:
    """An estimated length for load accounting only, from the characters of the text."""
    chars = len(prompt.text or "")
    for message in prompt.messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, Mapping) else part
            chars += len(text) if isinstance(text, str) else 0
    return max(1, chars // CHARS_PER_TOKEN)
