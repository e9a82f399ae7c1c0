"""The parts of a client's request that routing uses: the parsed body, its prompt, its pins."""

from typing import Any

from aiohttp import web

from dynctl.serving.prompts import Prompt
from dynctl.wire.nvext import PREFILL_HEADER, REQUEST_ID_HEADER, WORKER_HEADER
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    apply_headers,
    parse_chat_request,
    parse_completion_request,
)
from router_core import Pin

_OWN_HEADERS = (WORKER_HEADER, PREFILL_HEADER, REQUEST_ID_HEADER)


def parse_request(
    raw: bytes, http: web.Request, limit: int, *, chat: bool
) -> ChatRequest | CompletionRequest:
    # Most requests have none of our headers, and searching them is cheaper than applying them.
    own = any(name in http.headers for name in _OWN_HEADERS)
    if chat:
        messages = parse_chat_request(raw, max_bytes=limit)
        return apply_headers(messages, http.headers) if own else messages
    completion = parse_completion_request(raw, max_bytes=limit)
    return apply_headers(completion, http.headers) if own else completion


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
    common: dict[str, Any] = {
        "add_special_tokens": parsed.add_special_tokens,
        "keep": keep,
        "cut": parsed.truncation_side,
    }
    token_data = parsed.nvext.token_data
    if token_data is not None:
        return [Prompt(token_ids=token_data, **common)], None
    if isinstance(parsed, CompletionRequest):
        return [
            Prompt(text=one, **common) if isinstance(one, str) else Prompt(token_ids=one, **common)
            for one in parsed.prompts
        ], None
    reason = None
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
        **common,
    )
    return [prompt], reason


def pin_of(worker_id: int | None, dp_rank: int | None) -> Pin | None:
    return None if worker_id is None else Pin(worker_id, dp_rank)


def first_given(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
