"""The parts of a client's request that routing uses: the parsed body, its prompt, its pins."""

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


def prompt_of(parsed: ChatRequest | CompletionRequest) -> tuple[Prompt, str | None]:
    """The prompt to tokenize, and why it cannot be tokenized here, if so."""
    token_data = parsed.nvext.token_data
    if token_data is not None:
        return Prompt(token_ids=token_data), None
    if isinstance(parsed, CompletionRequest):
        first = parsed.prompts[0]
        if isinstance(first, str):
            return Prompt(text=first), None
        return Prompt(token_ids=first), None
    reason = None
    if not parsed.text_only:
        reason = "cache overlap not modelled: the prompt has more than text"
    elif parsed.chat_template is not None:
        reason = "cache overlap not modelled: the request has its own chat template"
    elif parsed.continue_final_message:
        reason = "cache overlap not modelled: the final message is continued"
    prompt = Prompt(
        messages=parsed.messages,
        tools=parsed.tools,
        documents=parsed.documents,
        add_generation_prompt=parsed.add_generation_prompt,
        template_kwargs=parsed.template_args or None,
    )
    return prompt, reason


def pin_of(worker_id: int | None, dp_rank: int | None) -> Pin | None:
    return None if worker_id is None else Pin(worker_id, dp_rank)


def first_given(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
