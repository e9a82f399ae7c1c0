"""The engine's HTTP application: routes, error answers and the small endpoints."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from dynctl import version
from dynctl.base.json_fields import describe
from dynctl.simulation.engine import metrics
from dynctl.simulation.engine.config import EngineConfigError
from dynctl.simulation.engine.engine import Engine
from dynctl.simulation.engine.generate import EngineWentAway, embed, generate
from dynctl.simulation.engine.handoff import PULL_PATH, HandoffKey
from dynctl.simulation.engine.openai_request import (
    ApiError,
    chat_tokens,
    check_model,
    decode_body,
    off_loop_if_long,
    prompt_tokens,
    read_fields,
    request_errors,
    wrong_field,
)
from dynctl.tokenization import PromptError
from dynctl.wire.anthropic import parse_messages_request
from dynctl.wire.json_body import U32, TokenId, without_nulls
from dynctl.wire.nvext import strip_for_engine
from dynctl.wire.openai import Room, parse_chat_request
from router_core import TOPOLOGY_PREFIX

MAX_TAINTS = 256

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(engine: Engine) -> web.Application:
    """The application that serves `engine`, which must be started."""
    api = EngineApi(engine)
    app = web.Application(
        middlewares=[api.error_middleware], client_max_size=engine.config.max_body_bytes
    )
    app.add_routes(
        [
            web.post("/v1/chat/completions", api.chat_completions),
            web.post("/v1/completions", api.completions),
            web.post("/v1/embeddings", api.embeddings),
            web.post("/v1/responses", api.responses),
            web.post("/v1/messages", api.messages),
            web.post("/v1/messages/count_tokens", api.count_tokens),
            web.get("/v1/models", api.models),
            web.get("/version", api.version),
            web.get("/ping", api.health),
            web.post("/ping", api.health),
            web.post("/tokenize", api.tokenize),
            web.post("/detokenize", api.detokenize),
            web.get("/health", api.health),
            web.get("/live", api.live),
            web.get("/metrics", api.metrics),
            web.get("/load", api.load),
            web.post("/reset_prefix_cache", api.reset_prefix_cache),
            web.get("/engine/info", api.info),
            web.get("/engine/faults", api.get_faults),
            web.post("/engine/faults", api.set_faults),
            web.post("/engine/update/model_taints", api.set_taints),
            web.post(PULL_PATH, api.kv_pull),
        ]
    )
    return app


class _TokenizeBody(msgspec.Struct):
    model: str
    prompt: str


class _DetokenizeBody(msgspec.Struct):
    model: str
    tokens: list[TokenId]


class PullBody(msgspec.Struct):
    """The request of a decode engine: the number of missing blocks and their hand-off."""

    num_blocks: U32
    topology_domains: Annotated[dict[str, str], msgspec.Meta(max_length=256)] = {}
    bootstrap_room: Room | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[U32] = []


class EngineApi:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @web.middleware
    async def error_middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Turn every error into a JSON body in OpenAI's shape, except a simulated crash."""
        try:
            return await handler(request)
        except ApiError as error:
            return _error(error, request.path)
        except EngineWentAway:
            # As with a killed process, the connection closes. The returned response is never sent;
            # an exception would log a traceback for an intended failure.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        except web.HTTPRequestEntityTooLarge:
            limit = self._engine.config.max_body_bytes
            return _error(
                ApiError(413, f"the body is larger than {limit} bytes, the limit of this engine"),
                request.path,
            )
        except web.HTTPNotFound:
            return _error(
                ApiError(404, f"no route {request.method} {request.path}", type="NotFoundError")
            )
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            return _error(
                ApiError(405, f"{request.path} does not support {request.method}; use {allowed}")
            )

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        self._refuse_if_unavailable()
        return await generate(self._engine, request, api="chat")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._refuse_if_unavailable()
        return await generate(self._engine, request, api="completions")

    async def responses(self, request: web.Request) -> web.StreamResponse:
        self._refuse_if_unavailable()
        return await generate(self._engine, request, api="responses")

    async def messages(self, request: web.Request) -> web.StreamResponse:
        self._refuse_if_unavailable()
        return await generate(self._engine, request, api="messages")

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        self._refuse_if_unavailable()
        return await embed(self._engine, request)

    async def models(self, _request: web.Request) -> web.Response:
        config = self._engine.config
        names = [(config.model, None), *((name, config.model) for name in config.lora)]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "dynctl",
                "root": name,
                "parent": parent,
                "max_model_len": config.context_length,
            }
            for name, parent in names
        ]
        return _json({"object": "list", "data": cards})

    async def tokenize(self, request: web.Request) -> web.Response:
        tokens = await off_loop_if_long(await request.read(), self._tokenize)
        limit = self._engine.config.context_length
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    def _tokenize(self, raw: bytes) -> list[int]:
        model, tokenizer = self._engine.config.model, self._engine.tokenizer
        body = {"model": model, **without_nulls(strip_for_engine(decode_body(raw)))}
        if "messages" in body:
            with request_errors():
                chat = parse_chat_request(body)
            check_model(chat.model, self._engine.config)
            return chat_tokens(chat, tokenizer)
        prompt = read_fields(body, _TokenizeBody)
        check_model(prompt.model, self._engine.config)
        return prompt_tokens(prompt.prompt, tokenizer)

    async def count_tokens(self, request: web.Request) -> web.Response:
        tokens = await off_loop_if_long(await request.read(), self._messages_tokens)
        return _json({"input_tokens": len(tokens)})

    def _messages_tokens(self, raw: bytes) -> list[int]:
        with request_errors():
            chat = parse_messages_request(without_nulls(strip_for_engine(decode_body(raw))))
        check_model(chat.model, self._engine.config)
        return chat_tokens(chat, self._engine.tokenizer)

    async def version(self, _request: web.Request) -> web.Response:
        return _json({"version": f"dynctl-{version()}"})

    async def detokenize(self, request: web.Request) -> web.Response:
        given_body = decode_body(await request.read())
        body = read_fields(
            {"model": self._engine.config.model, **without_nulls(given_body)}, _DetokenizeBody
        )
        check_model(body.model, self._engine.config)
        try:
            text = self._engine.tokenizer.decode(body.tokens)
        except PromptError:
            raise wrong_field("tokens", "expected token ids of this model's vocabulary") from None
        return _json({"prompt": text})

    async def health(self, _request: web.Request) -> web.Response:
        self._refuse_if_unavailable()
        return _json({"status": "ok", "name": self._engine.config.name})

    async def live(self, _request: web.Request) -> web.Response:
        return _json({"status": "live"})

    async def metrics(self, _request: web.Request) -> web.Response:
        text = metrics.render(self._engine)
        return web.Response(body=text.encode(), headers={"content-type": metrics.CONTENT_TYPE})

    async def load(self, _request: web.Request) -> web.Response:
        return _json(self._engine.load())

    async def info(self, _request: web.Request) -> web.Response:
        return _json(self._engine.info())

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        busy = self._engine.reset_prefix_cache()
        if busy:
            ranks = ", ".join(map(str, busy))
            raise ApiError(
                409,
                f"the cache of rank {ranks} was not cleared: requests or hand-offs hold its KV "
                "blocks; retry when they are done",
                type="ConflictError",
            )
        return _json({"status": "ok"})

    async def get_faults(self, _request: web.Request) -> web.Response:
        return _json(self._engine.faults.as_dict())

    async def set_faults(self, request: web.Request) -> web.Response:
        changes = decode_body(await request.read())
        restart = changes.pop("restart_silently", False)
        if not isinstance(restart, bool):
            raise wrong_field(
                "restart_silently", f"expected true or false, got {describe(restart)}"
            )
        try:
            self._engine.faults.update(changes)
        except EngineConfigError as error:
            raise ApiError(400, str(error)) from None
        if restart:
            await self._engine.restart_silently()
        return _json(self._engine.faults.as_dict())

    async def set_taints(self, request: web.Request) -> web.Response:
        """Replace the worker's own taints, as Dynamo does; topology taints stay."""
        body = decode_body(await request.read())
        taints = body.get("taints")
        if not (isinstance(taints, list) and all(isinstance(t, str) and t for t in taints)):
            return _taints_refused("'taints' must be a JSON array of strings")
        if len(taints) > MAX_TAINTS:
            return _taints_refused(f"at most {MAX_TAINTS} taints, got {len(taints)}")
        for taint in taints:
            if taint.startswith(TOPOLOGY_PREFIX):
                return _taints_refused(f"taint {taint!r} uses reserved prefix {TOPOLOGY_PREFIX!r}")
        self._engine.taints = frozenset(taints)
        return _json({"status": "ok", "taints": sorted(self._engine.taints)})

    async def kv_pull(self, request: web.Request) -> web.Response:
        body = read_fields(decode_body(await request.read()), PullBody)
        return _json(await serve_pull(self._engine, body))

    def _refuse_if_unavailable(self) -> None:
        status = self._engine.faults.current.refuse
        if status:
            raise ApiError(
                status, f"engine {self._engine.config.name} refuses requests (fault refuse)"
            )
        engine = self._engine
        states = (
            ("draining", engine.draining),
            ("restarting", engine.restarting),
            ("stopped by an internal error", engine.failed.is_set()),
        )
        for state, present in states:
            if present:
                raise ApiError(503, f"engine {engine.config.name} is {state}")


async def serve_pull(engine: Engine, body: PullBody) -> dict[str, Any]:
    """POST /engine/kv/pull on a prefill engine: wait the simulated time, then free the blocks.

    `{"num_blocks", "topology_domains"?, "bootstrap_room"}` or `{"num_blocks", "remote_engine_id",
    "remote_request_id"?, "remote_block_ids"?}`. Raises ApiError 404 if the engine does not have the
    blocks (any more), 409 if another engine pulls them.
    """
    if body.num_blocks > engine.config.total_blocks:
        raise wrong_field("num_blocks", f"this engine has {engine.config.total_blocks} blocks")
    key, wait = _key(engine, body)
    held = await engine.held.expect(key, wait) if key is not None else None
    if held is None:
        raise ApiError(
            404,
            f"engine {engine.config.name} holds no KV blocks for this hand-off: it was pulled "
            "before, it timed out, or the engine restarted",
            type="KvLostError",
        )
    if held.pulling:
        raise ApiError(409, "another engine is pulling these KV blocks", type="ConflictError")
    held.pulling = True
    pulled = False
    try:
        await asyncio.sleep(engine.timer.kv_transfer(body.num_blocks, body.topology_domains))
        pulled = not held.gone.is_set()
    finally:
        # If a puller disconnects, the blocks stay available for the next one.
        held.pulling = False
        if pulled:
            engine.held.release(held, pulled=True)
    if not pulled:
        raise ApiError(404, "the KV blocks were lost during the transfer", type="KvLostError")
    return {"status": "ok", "num_blocks": body.num_blocks}


def _key(engine: Engine, body: PullBody) -> tuple[HandoffKey | None, bool]:
    """The hand-off's key, and whether to wait for it."""
    if body.bootstrap_room is not None:
        return body.bootstrap_room, True
    if body.remote_engine_id is None:
        raise wrong_field("remote_engine_id", "is required without a bootstrap_room")
    if body.remote_engine_id != engine.engine_id:
        return None, False  # another engine, or an earlier one at this address
    if body.remote_request_id is not None:
        return body.remote_request_id, False
    return engine.held.find_by_blocks(body.remote_block_ids), False


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(error: ApiError, path: str = "") -> web.Response:
    body = error.body()
    if path.startswith("/v1/messages"):
        kind = error.type if error.status < 500 else "api_error"
        message = {"type": kind, "message": str(error)}
        body = msgspec.json.encode({"type": "error", "error": message})
    response = web.Response(status=error.status, body=body, content_type="application/json")
    if error.status in (429, 503):
        response.headers["Retry-After"] = "1"
    return response


def _taints_refused(problem: str) -> web.Response:
    body = {
        "error": "Handler error",
        "message": f"Python callback failed: ValueError: {problem}",
    }
    response = _json(body)
    response.set_status(500)
    return response
