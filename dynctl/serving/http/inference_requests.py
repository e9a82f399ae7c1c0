"""A client's request: the parsed body with the controls of its headers."""

from aiohttp import web

from dynctl.wire.nvext import PIN_HEADERS, REQUEST_ID_HEADER
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    apply_headers,
    parse_chat_request,
    parse_completion_request,
)

_OWN_HEADERS = (*PIN_HEADERS, REQUEST_ID_HEADER)


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
