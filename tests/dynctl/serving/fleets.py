"""A frontend before engines of ours, all in this process, for tests of the serving room."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig, HealthConfig, Limits
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import RunningEngine, start_engine
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from dynctl.web.routes import page_routes
from tests.waiting import patience

TOKENIZER = load_tokenizer(DEMO_MODEL_DIR)
QUICK_HEALTH = HealthConfig(interval_s=0.1, timeout_s=patience(1.0))
#: For tests in which requests find out, not probes.
SLOW_HEALTH = HealthConfig(interval_s=60.0, timeout_s=patience(2.0))
WORDS = "the quick brown fox jumps over the lazy dog near the river bank at dawn "


def frontend_with_page(config: FrontendConfig) -> ServingProcess:
    """A frontend with the web page, as those of the command line."""
    return build_frontend(config, extra_routes=(page_routes,))


class Site:
    """A running frontend and the engines behind it."""

    def __init__(self, frontend: ServingProcess, client: aiohttp.ClientSession) -> None:
        self.frontend = frontend
        self.client = client
        self.engines: dict[str, RunningEngine] = {}

    @property
    def service(self):
        return self.frontend.service

    def url(self, path: str) -> str:
        return self.frontend.url + path

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        async with self.client.post(self.url(path), json=body, **kwargs) as answer:
            raw = await answer.read()
            return answer.status, _decoded(raw), answer.headers

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.client.get(self.url(path), **kwargs) as answer:
            return answer.status, _decoded(await answer.read())

    async def chat(self, text: str = "hello", **fields: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/chat/completions", chat_body(text, **fields))

    async def stream(self, text: str = "hello", **fields: Any) -> tuple[int, list[Any], Any]:
        """Status, the events of the stream decoded ([DONE] as it is), the headers."""
        body = chat_body(text, stream=True, **fields)
        async with self.client.post(self.url("/v1/chat/completions"), json=body) as answer:
            raw = await answer.read()
            if answer.status != 200:
                return answer.status, [_decoded(raw)], answer.headers
            return answer.status, events_of(raw), answer.headers

    def load(self) -> dict[str, tuple[int, int, int]]:
        """Worker name -> active requests, prefill tokens, decode blocks over its ranks."""
        found = {}
        load = self.service.router.load
        for worker in self.service.router.registry:
            slots = self.service.router.registry.slots(worker.worker_id)
            found[worker.name] = (
                sum(load.requests[s] for s in slots),
                sum(load.prefill_tokens[s] for s in slots),
                sum(load.decode_blocks[s] for s in slots),
            )
        return found

    async def connected(self) -> None:
        """Until every KV event stream is connected: what is published before is lost."""
        streams = self.frontend.fleet.index.all_states
        await until(lambda: all(state.connected for state in streams().values()))

    async def followed(self) -> None:
        """Until the index has applied every event that the engines have published."""
        index, registry = self.frontend.fleet.index, self.service.router.registry

        def read() -> bool:
            for name, running in self.engines.items():
                worker = registry.by_name(name)
                states = {} if worker is None else index.states(worker.worker_id)
                for rank in running.engine.ranks:
                    if rank.publisher is None or not rank.publisher.next_seq:
                        continue
                    state = states.get(rank.publisher.dp_rank)
                    if state is None or state.last_seq != rank.publisher.next_seq - 1:
                        return False
            return True

        await until(read)
        await index.drained()

    async def idle(self) -> None:
        """Until no request is booked any more."""
        await until(lambda: all(row == (0, 0, 0) for row in self.load().values()))


@asynccontextmanager
async def site(
    engines: Sequence[Mapping[str, Any]],
    *,
    specs: dict[str, str] | None = None,
    config: FrontendConfig | None = None,
    kind: Callable[[FrontendConfig], ServingProcess] = build_frontend,
    unread: bool = False,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Start engines (their settings), and a frontend that knows them.

    ``specs``: engine name -> what is appended to its worker spec; ``{address}`` is its own.
    ``unread``: some engines do not answer their first probes; the others are waited for.
    """
    async with AsyncExitStack() as stack:
        started: dict[str, RunningEngine] = {}
        for given in engines:
            engine = await start_engine(EngineConfig(**{**QUICK_ENGINE, **given}), TOKENIZER)
            stack.push_async_callback(engine.close)
            started[given["name"]] = engine
        workers = tuple(
            f"{engine.url},name={name}" + _filled((specs or {}).get(name, ""), engine)
            for name, engine in started.items()
        )
        values = {
            "port": 0,
            "workers": workers,
            "model_path": DEMO_MODEL_DIR,
            "health": QUICK_HEALTH,
            "limits": Limits(drain_s=2.0),
            **settings,
        }
        frontend = kind(config or FrontendConfig(**values))
        await frontend.start()
        stack.push_async_callback(frontend.close)
        client = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(20)))
        )
        found = Site(frontend, client)
        found.engines = started
        if not unread:
            await until(lambda: all(member.worker for member in frontend.fleet))
        yield found


QUICK_ENGINE: dict[str, Any] = {"speedup_ratio": 50.0, "default_output_tokens": 8}


def _filled(spec: str, engine: RunningEngine) -> str:
    return spec.replace("{address}", engine.url.removeprefix("http://"))


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}


def zone(name: str, **more: Any) -> dict[str, Any]:
    return {
        "topology_domains": {"zone": name},
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": "required",
        **more,
    }


def events_of(raw: bytes) -> list[Any]:
    """The data of a stream's events."""
    found: list[Any] = []
    for event in raw.split(b"\n\n"):
        if event.startswith(b"data: "):
            data = event[len(b"data: ") :]
            found.append("[DONE]" if data == b"[DONE]" else msgspec.json.decode(data))
    return found


def text_of(events: list[Any]) -> str:
    """The text that a chat stream made."""
    return "".join(
        event["choices"][0]["delta"].get("content") or ""
        for event in events
        if isinstance(event, dict) and event.get("choices")
    )


async def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a state that other tasks bring about."""
    async with asyncio.timeout(patience(seconds)):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw
