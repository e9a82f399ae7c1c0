"""A client's request: the parsed body with the controls of its headers."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from dynctl.serving.engines.apis import Endpoint
from dynctl.wire.anthropic import parse_messages_request
from dynctl.wire.json_body import decode_object
from dynctl.wire.nvext import PIN_HEADERS, REQUEST_ID_HEADER
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    apply_headers,
    parse_chat_request,
    parse_completion_request,
    parse_embedding_request,
)
from dynctl.wire.responses import parse_responses_request

_OWN_HEADERS = (*PIN_HEADERS, REQUEST_ID_HEADER)
_PARSE: Final[dict[Endpoint, Callable[..., Any]]] = {
    "chat_completions": parse_chat_request,
    "completions": parse_completion_request,
    "embeddings": parse_embedding_request,
    "responses": parse_responses_request,
    "anthropic_messages": parse_messages_request,
}


def parse_request(
    raw: bytes, headers: Mapping[str, str], limit: int, endpoint: Endpoint
) -> ChatRequest | CompletionRequest:
    """The request of an endpoint, by its type. Raises RequestError."""
    # Most requests have none of our headers, and searching them is cheaper than applying them.
    own = any(name in headers for name in _OWN_HEADERS)
    parsed: ChatRequest | CompletionRequest = _PARSE[endpoint](decode_object(raw, limit))
    if not own:
        return parsed
    if isinstance(parsed, ChatRequest):
        return apply_headers(parsed, headers)
    return apply_headers(parsed, headers)
