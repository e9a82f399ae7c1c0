"""A client's request: the parsed body with the controls of its headers."""

from typing import Final, Literal

from aiohttp import web

from dynctl.serving.engines.dispatch import EMBEDDINGS_PATH
from dynctl.wire.nvext import PIN_HEADERS, REQUEST_ID_HEADER
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    apply_headers,
    parse_chat_request,
    parse_completion_request,
    parse_embedding_request,
)

_OWN_HEADERS = (*PIN_HEADERS, REQUEST_ID_HEADER)


Endpoint = Literal["chat_completions", "completions", "embeddings"]
"""The inference endpoints, by their names in metrics."""

PATHS: Final[dict[Endpoint, str]] = {
    "chat_completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": EMBEDDINGS_PATH,
}


def parse_request(
    raw: bytes, http: web.Request, limit: int, endpoint: Endpoint
) -> ChatRequest | CompletionRequest:
    """The request of an endpoint, an EmbeddingRequest for embeddings. Raises RequestError."""
    # Most requests have none of our headers, and searching them is cheaper than applying them.
    own = any(name in http.headers for name in _OWN_HEADERS)
    if endpoint == "chat_completions":
        messages = parse_chat_request(raw, max_bytes=limit)
        return apply_headers(messages, http.headers) if own else messages
    parse = parse_embedding_request if endpoint == "embeddings" else parse_completion_request
    completion: CompletionRequest = parse(raw, max_bytes=limit)
    return apply_headers(completion, http.headers) if own else completion
