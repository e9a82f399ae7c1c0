"""A frontend on Dynamo's planes with workers that misbehave, and entries that cannot be served."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from grpc import aio  # type: ignore[import-untyped]

from dynctl.adapters.otlp import collector_url
from dynctl.base.options import GlobalOptions
from dynctl.serving.epp.process import GatewayPart, build_picker
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import DynamoConfig, FrontendConfig, Limits, PickerConfig
from dynctl.serving.routing.preparation import Prepared
from dynctl.serving.routing.prompts import Prompt
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from dynctl.wire.envoy import ext_proc
from router_core import IndexMarked, Pin, RouterConfig, hash_prompt
from tests.dynctl.adapters.dynamo_endpoint import FakeEndpoint, Fault, fake_endpoint
from tests.dynctl.serving.collectors import collector
from tests.dynctl.serving.gateways import Stream, set_headers
from tests.waiting import until

TOKENS = load_tokenizer(DEMO_MODEL_DIR).encode(" the network carries")


class Site:
    """A file store with the entries of workers, and a frontend that serves them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workers: list[FakeEndpoint] = []
        self.frontend: ServingProcess
        self.client: aiohttp.ClientSession

    def put(self, bucket: str, key: str, value: Mapping[str, Any] | bytes) -> Path:
        name = "".join(c if c.isalnum() else quote(c, safe="") for c in key)
        for raw, coded in ((".", "%2E"), ("-", "%2D"), ("_", "%5F")):
            name = name.replace(raw, coded)
        path = self.root / "v1" / bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        return path

    async def keep(self) -> None:
        """Renew the entries, as workers do: on a busy machine a test is longer than they live."""
        while True:
            for path in self.root.glob("v1/*/*"):
                with suppress(FileNotFoundError):
                    os.utime(path)
            await asyncio.sleep(1)

    def register(
        self, number: int, endpoint: FakeEndpoint, namespace: str = "dynamo", **card: Any
    ) -> list[Path]:
        """A worker whose requests go to ``endpoint``; its entries."""
        key = f"{namespace}/backend/generate/{number:x}"
        at = {"namespace": namespace, "component": "backend", "endpoint": "generate"}
        address = f"127.0.0.1:{endpoint.port}/{number:x}/{namespace}/backend/generate"
        instance = {
            "type": "Endpoint", **at, "instance_id": number,
            "transport": {"tcp": address}, "request_plane_codec": endpoint.codec,
        }  # fmt: skip
        body = {
            "display_name": "demo", "kv_cache_block_size": 16, "worker_type": "aggregated",
            "model_type": "Chat | Completions", "needs": [], "runtime_config": {}, **card,
        }  # fmt: skip
        model = {"type": "Model", **at, "instance_id": number, "card_json": body}
        return [self.put("instances", key, instance), self.put("mdc", key, model)]

    def leave(self) -> None:
        """All workers deregister."""
        for path in self.root.glob("v1/*/*"):
            path.unlink()

    async def ask(self, headers: Mapping[str, str] = {}, **fields: Any) -> tuple[int, str]:
        body = {"model": "demo", "prompt": "x", "max_tokens": 8, **fields}
        url = f"{self.frontend.url}/v1/completions"
        async with self.client.post(url, json=body, headers=headers) as response:
            return response.status, await response.text()

    def conditions(self) -> dict[tuple[str, str], str]:
        return {(c.code, c.subject): c.message for c in self.frontend.service.conditions}

    def ready(self) -> int:
        return sum(member.reason is None for member in self.frontend.fleet)


def output(body: Any) -> Sequence[Any]:
    """The tokens of an answer, one in each item, from where the prompt of a request ends."""
    left = body["stop_conditions"]["max_tokens"]
    ids = [TOKENS[n % len(TOKENS)] for n in range(left)]
    items: list[Any] = [{"data": {"token_ids": [one]}} for one in ids]
    return [*items, {"data": {"token_ids": [], "finish_reason": "length"}}]


@asynccontextmanager
async def site(tmp_path: Path, *faults: Fault, **dynamo: Any) -> AsyncIterator[Site]:
    """A frontend and one worker for each fault; ``made.workers`` are their endpoints."""
    made = Site(tmp_path)
    async with AsyncExitStack() as stack:
        made.workers = [
            await stack.enter_async_context(fake_endpoint(output, fault=fault)) for fault in faults
        ]
        for number, endpoint in enumerate(made.workers):
            made.register(0xA0 + number, endpoint)
        planes = GlobalOptions(discovery="file", file_kv=tmp_path, context_applied=True)
        limits = Limits(**dynamo.pop("limits", {}))
        picker, otlp = dynamo.pop("picker", None), dynamo.pop("otlp_endpoint", None)
        router = RouterConfig().with_values(dynamo.pop("router", {}))
        access = dynamo.pop("access", {})
        made.frontend = (build_frontend if picker is None else build_picker)(
            FrontendConfig(
                port=0,
                router=router,
                picker=picker,
                otlp_endpoint=otlp,
                model_path=dynamo.pop("model_path", DEMO_MODEL_DIR),
                dynamo=DynamoConfig(planes, None, tmp_path / "cache", **dynamo),
                limits=limits,
                **access,
            )
        )
        stack.callback(asyncio.create_task(made.keep()).cancel)
        await made.frontend.start()
        stack.push_async_callback(made.frontend.close)
        made.client = await stack.enter_async_context(aiohttp.ClientSession())
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "v1").mkdir()
    return tmp_path


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.seed("router-guide: deployments: registered workers")
async def test_hundreds_at_once(store: Path, stream: bool) -> None:
    async with site(store, Fault.NONE, Fault.NONE) as made:
        answers = await asyncio.gather(*(made.ask(stream=stream) for _ in range(300)))
        assert {status for status, _ in answers} == {200}
        assert all("carries" in text.replace('"}', "") or stream for _, text in answers)
        frontend = made.frontend
        assert not frontend.service.router.load.bookings("")
        await until(lambda: not list(frontend.service.router.load))


@pytest.mark.parametrize(
    "fault",
    [
        Fault.CLOSES_BEFORE_ACK,
        Fault.REFUSES,
        Fault.LONG_REFUSAL,
        Fault.ERROR_PROLOGUE,
        Fault.NO_PROLOGUE,
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_that_fails_before_its_output_costs_no_request(
    store: Path, fault: Fault, stream: bool
) -> None:
    async with site(store, fault, Fault.NONE) as made:
        answers = [await made.ask(stream=stream) for _ in range(6)]
        assert [status for status, _ in answers] == [200] * 6


@pytest.mark.parametrize(
    "fault",
    [Fault.CLOSES_IN_THE_MIDDLE, Fault.HALF_A_FRAME, Fault.SENTINEL_IN_THE_MIDDLE],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_that_breaks_goes_on_elsewhere(
    store: Path, fault: Fault, stream: bool
) -> None:
    async with site(store, fault, Fault.NONE, migration_limit=1) as made:
        [broken, good] = made.workers
        lengths: set[int] = set()
        for _ in range(60):  # at a tie either worker is chosen
            status, text = await made.ask(stream=stream)
            assert (status, "error" in text) == (200, False)
            if not stream:
                assert json.loads(text)["usage"]["completion_tokens"] == 8
            lengths = {len(question.body["token_ids"]) for question in good.questions}
            if len(lengths) > 1:
                break
        assert broken.questions
        assert len(lengths) == 2  # the prompt, and the prompt with the first token of the answer


async def test_a_response_that_only_lacks_its_end_is_complete(store: Path) -> None:
    async with site(store, Fault.CLOSES_IN_THE_MIDDLE, migration_limit=1) as made:
        status, text = await made.ask(max_tokens=1)
        answer = json.loads(text)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        assert answer["usage"]["completion_tokens"] == 1


async def test_without_migration_a_stream_ends_as_dynamos(store: Path) -> None:
    async with site(store, Fault.CLOSES_IN_THE_MIDDLE) as made:
        status, text = await made.ask(stream=True)
        assert status == 200
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == 500


async def test_a_worker_that_stalls_is_given_up(store: Path) -> None:
    limits = {"idle_s": 0.3, "first_byte_s": 0.3}
    async with site(store, Fault.STALLS, limits=limits) as made:
        status, _ = await made.ask()
        assert status == 504
        [worker] = made.workers
        await until(lambda: "kill" in worker.controls)


async def test_a_client_that_leaves_stops_the_worker(store: Path) -> None:
    async with site(store, Fault.STALLS) as made:
        asking = asyncio.create_task(made.ask(stream=True))
        [worker] = made.workers
        await until(lambda: worker.questions)
        asking.cancel()
        await until(lambda: "kill" in worker.controls)


async def test_an_index_that_was_dropped_is_read_again(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(store, Fault.NONE) as made:
        fleet: Any = made.frontend.fleet
        service = made.frontend.service
        [worker] = service.router.registry
        read: list[int] = []
        monkeypatch.setattr(fleet.observer, "read_again", read.append)
        member = fleet.by_id(worker.worker_id)

        def dropped() -> list[int]:
            # Each time: entries that are renewed mark the index of this worker, which has none.
            service.apply(IndexMarked(worker.worker_id, 0, "over_limit"))
            member.probe_now.set()
            return read

        await until(dropped)
        assert read[0] == worker.worker_id


async def test_without_kv_events_caches_are_estimated_as_those_of_engines(store: Path) -> None:
    """The approximate mode of Dynamo: a prompt returns to the worker that had it."""
    settings = {"use_kv_events": False}
    async with site(store, Fault.NONE, Fault.NONE, Fault.NONE, router=settings) as made:
        router, served = made.frontend.service.router, set()
        assert {row.state for row in router.freshness.values()} == {"estimated"}
        for _ in range(8):
            assert (await made.ask(prompt="a prompt of several blocks " * 20))[0] == 200
            served |= {s for s in router.freshness if router.cached_blocks(s)}
        assert len(served) == 1


async def test_what_cannot_be_served_is_a_condition(store: Path) -> None:
    async with site(store, Fault.NONE) as made:
        [worker] = made.workers
        bad = made.put("mdc", "dynamo/backend/generate/b0", b"{not json")
        await until(lambda: any(code == "WORKER_REJECTED" for code, _ in made.conditions()))
        assert (await made.ask())[0] == 200
        bad.unlink()
        await until(lambda: not any(code == "WORKER_REJECTED" for code, _ in made.conditions()))
        # Another version of the card: not served beside those that were there first.
        other = made.register(0xC0, worker, architectural_max_context_length=77)
        await until(lambda: len(made.frontend.fleet) == 2)
        await until(lambda: made.ready() == 1)
        assert any(code == "WORKER_REJECTED" for code, _ in made.conditions())
        for path in other:
            path.unlink()
        await until(lambda: len(made.frontend.fleet) == 1)
        assert (await made.ask())[0] == 200


async def test_an_adapter_is_routed_by_its_base_model_and_goes_when_its_card_goes(
    store: Path,
) -> None:
    async with site(store, Fault.NONE, Fault.NONE) as made:
        key = "dynamo/backend/generate/a0"
        body = json.loads((store / "v1" / "mdc" / key.replace("/", "%2F")).read_text())
        body["card_json"] |= {"display_name": "law", "lora": {"name": "law"}}
        card = made.put("mdc", f"{key}/law", body | {"model_suffix": "law"})
        service = made.frontend.service
        await until(lambda: "law" in service.served.adapters)
        assert service.served.base_model("law") == "demo"
        for _ in range(4):  # the other worker does not have it
            status, answer = await made.ask(model="law", nvext={"extra_fields": ["worker_id"]})
            assert status == 200, answer
            found = json.loads(answer)
            assert found["model"] == "law"
            assert found["nvext"]["worker_id"]["decode_worker_id"] == 0xA0
        card.unlink()
        await until(lambda: service.served.base_model("law") is None)
        assert (await made.ask(model="law"))[0] == 404
        assert (await made.ask())[0] == 200


async def test_a_model_whose_last_worker_left_is_awaited(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(store, Fault.NONE) as made:
        assert (await made.ask())[0] == 200
        made.leave()
        service = made.frontend.service
        await until(lambda: not service.models())
        url = f"{made.frontend.url}/v1/completions"
        body = {"model": "demo", "prompt": "x"}
        async with made.client.post(url, json=body) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            problem = (await response.json())["error"]
        assert problem["code"] == "model_has_no_worker"
        assert "the last one left 0 s ago" in problem["message"]
        assert (await made.ask(model="never"))[0] == 404
        clock = service.clock
        monkeypatch.setattr(service, "clock", lambda: clock() + 61)
        assert (await made.ask())[0] == 404
        monkeypatch.undo()
        made.register(0xA1, made.workers[0])
        await until(lambda: service.models())
        assert (await made.ask())[0] == 200


async def test_a_tokenizer_stays_while_its_model_has_no_worker(store: Path) -> None:
    from blake3 import blake3

    raw = (DEMO_MODEL_DIR / "tokenizer.json").read_bytes()
    source = store / "tokenizer.json"
    source.write_bytes(raw)
    file = {
        "path": str(source), "checksum": "blake3:" + blake3(raw).hexdigest(), "size": len(raw)
    }  # fmt: skip
    async with fake_endpoint(output) as endpoint, site(store, model_path=None) as made:
        made.register(0xA0, endpoint, tokenizer={"hf_tokenizer_json": file})
        await until(lambda: made.ready() == 1)
        made.leave()
        await until(lambda: not made.frontend.service.models())
        source.unlink()
        shutil.rmtree(store / "cache")
        made.register(0xA1, endpoint, tokenizer={"hf_tokenizer_json": file})
        await until(lambda: made.ready() == 1)
        assert (await made.ask())[0] == 200


async def test_a_model_whose_files_are_not_those_of_its_card_gets_no_requests(
    store: Path,
) -> None:
    source = DEMO_MODEL_DIR / "tokenizer.json"
    file = {"path": str(source), "checksum": "blake3:" + "0" * 64, "size": source.stat().st_size}
    async with (
        fake_endpoint(output) as endpoint,
        site(store, model_path=None) as made,
    ):
        made.register(0xA0, endpoint, tokenizer={"hf_tokenizer_json": file})
        await until(lambda: ("MODEL_FILES_INVALID", "demo") in made.conditions())
        assert made.ready() == 0
        status, _ = await made.ask()
        assert status == 503
        from blake3 import blake3

        file["checksum"] = "blake3:" + blake3(source.read_bytes()).hexdigest()
        made.register(0xA0, endpoint, tokenizer={"hf_tokenizer_json": file})
        await until(lambda: made.ready() == 1)
        assert ("MODEL_FILES_INVALID", "demo") not in made.conditions()
        assert (await made.ask())[0] == 200


@pytest.mark.parametrize("kind", ["tokenizer", "template"])
async def test_a_model_whose_files_cost_too_much_at_load_is_refused_by_file_and_limit(
    store: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    from blake3 import blake3

    folder = tmp_path_factory.mktemp("model")
    tokenizer, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    content = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())
    template = "{{ messages[0].content }}"
    if kind == "tokenizer":
        old = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 10}
        content["normalizer"] = {"type": "Sequence", "normalizers": [old] * 10}
    else:
        template = "{{ (['a' * 8000] * 400000) | sort | length }}"
    tokenizer.write_text(json.dumps(content))
    config.write_text(json.dumps({"chat_template": template}))

    def file(path: Path) -> dict[str, Any]:
        checksum = "blake3:" + blake3(path.read_bytes()).hexdigest()
        return {"path": str(path), "checksum": checksum, "size": path.stat().st_size}

    async with (
        fake_endpoint(output) as endpoint,
        site(store, Fault.NONE, model_path=None) as made,
    ):
        made.register(
            0xB0,
            endpoint,
            "other",
            display_name="costly",
            tokenizer={"hf_tokenizer_json": file(tokenizer)},
            prompt_formatter={"hf_tokenizer_config_json": file(config)},
        )
        await until(lambda: ("MODEL_FILES_INVALID", "costly") in made.conditions(), 60)
        message = made.conditions()["MODEL_FILES_INVALID", "costly"]
        name = "tokenizer.json" if kind == "tokenizer" else "tokenizer_config.json"
        assert name in message
        assert "is refused: of a" in message
        assert "more than" in message
        assert (await made.ask(model="costly"))[0] == 503


async def test_workers_of_discovery_are_not_added_over_http(store: Path) -> None:
    async with site(store, Fault.NONE) as made:
        url = f"{made.frontend.url}/v1/workers"
        async with made.client.post(url, json={"url": "http://127.0.0.1:1"}) as response:
            assert response.status in (400, 403)
        assert len(made.frontend.fleet) == 1


# -- traces ----------------------------------------------------------------------------------------

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CAPTURED = {
    "x-request-id": "my-id",
    "x-endpoint-path": "6fb3d8f454c856ca/dynamo/backend/generate",
    "request-id": "d115bf60-ff81-4897-a64c-c767cceb1e80",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-0fce6e7651b3e9b4-01",
    "x-frontend-send-ts-ns": "1795394171553153455",
}
"""What a frontend of Dynamo 1.6.1 with DYN_LOGGING_JSONL sent to a worker for a request with the
parent above, a tracestate and this x-request-id. Without tracing it sent neither."""


async def test_a_traced_request_goes_on_as_from_dynamos_frontend(store: Path) -> None:
    given = {"traceparent": PARENT, "tracestate": "a=b", "x-request-id": "my-id"}

    async def sent(made: Site, headers: Mapping[str, str]) -> dict[str, str]:
        assert (await made.ask(headers=headers))[0] == 200
        found: dict[str, str] = made.workers[0].questions[-1].headers
        return found

    async with (
        collector() as spans,
        site(store, Fault.NONE, otlp_endpoint=collector_url(spans.url)) as made,
    ):
        found = await sent(made, given)
        assert found.keys() == CAPTURED.keys() - {"x-frontend-send-ts-ns"}
        assert found["x-request-id"] == CAPTURED["x-request-id"]
        trace, span = found["traceparent"].split("-")[1:3]
        assert trace == CAPTURED["traceparent"].split("-")[1]
        assert span not in PARENT
        assert found["traceparent"][-2:] == "01"
        # A caller that does not record its trace: the worker does not record it either.
        unrecorded = await sent(made, {"traceparent": f"{PARENT[:-2]}00"})
        assert unrecorded["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert unrecorded["traceparent"].endswith("-00")
        # Without a valid parent a trace begins here; without an id of the client there is none.
        begun = await sent(made, {"traceparent": "junk"})
        assert begun["traceparent"].endswith("-01")
        assert "x-request-id" not in begun
    async with site(store, Fault.NONE) as made:
        assert (await sent(made, given)).keys() == {"request-id", "x-endpoint-path"}


# -- hashes ----------------------------------------------------------------------------------------


async def test_prompts_are_hashed_as_dynamos_workers_hash_them(store: Path) -> None:
    """Speculative workers complete a block with the token behind it; a salt is in each block."""
    prompt = list(range(40))
    async with site(store, Fault.NONE) as made:
        service = made.frontend.service

        async def hashes(salt: str | None = None) -> Sequence[int]:
            prepared = await service.preparation.prepare(
                "demo", Prompt(token_ids=prompt), cache_salt=salt
            )
            return prepared.request.local_hashes

        assert await hashes("one") == hash_prompt(prompt, 16, cache_namespace="one").local
        fast = made.register(0xB0, made.workers[0], "v2", runtime_config={"enable_eagle": True})
        await until(lambda: made.ready() == 2)
        assert await hashes() == hash_prompt(prompt, 16, is_eagle=True).local
        prompt = prompt[:32]
        assert len(await hashes()) == 1
        for path in fast:
            path.unlink()
        await until(lambda: len(made.frontend.fleet) == 1)
        assert len(await hashes()) == 2
        nvext = {"cache_salt": "two", "extra_fields": ["timing"]}
        assert (await made.ask(prompt=prompt, cache_salt="one", nvext=nvext))[0] == 200
        sent = made.workers[0].questions[-1].body["routing"]
        assert sent["cache_salt"] == "two"


async def test_an_isolated_key_has_its_salt_in_hashes_and_in_requests(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and hashes get one salt, whichever of the two fields the client fills."""
    keys = "sk-first-0123456789", "sk-second-012345678"
    async with site(store, Fault.NONE, access={"api_keys": keys, "isolate_keys": True}) as made:
        service = made.frontend.service
        hashed: list[str | None] = []
        used: list[str | None] = []
        fills: list[dict[str, Any]] = [{}, {"cache_salt": "one"}, {"nvext": {"cache_salt": "one"}}]
        prepare = service.preparation.prepare

        async def noted(*given: Any, **fields: Any) -> Prepared:
            hashed.append(fields["cache_salt"])
            return await prepare(*given, **fields)

        monkeypatch.setattr(service.preparation, "prepare", noted)
        for fields in fills:
            for key in keys:
                headers = {"authorization": f"Bearer {key}"}
                assert (await made.ask(headers, **fields))[0] == 200
                sent = made.workers[0].questions[-1].body
                used.append(sent["routing"]["cache_salt"])
                assert sent["extra_args"]["nvext"]["cache_salt"] == used[-1]
        assert hashed == used
        assert used[2:4] == used[4:6]
        assert len(set(used)) == 4
        assert not {"one", None} & set(used)


# -- worker sets -----------------------------------------------------------------------------------


async def test_a_worker_set_is_drawn_by_its_available_workers(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(store, Fault.NONE) as made:
        entries = made.register(0xB0, made.workers[0], "v2", kv_cache_block_size=32)
        entries += made.register(0xB1, made.workers[0], "v2", kv_cache_block_size=32)
        service = made.frontend.service
        await until(lambda: made.ready() == 3)
        assert not made.conditions()  # block sizes may differ between sets
        sample = iter((0.0, 0.32, 0.34, 0.99) * 2)
        monkeypatch.setattr(service.served, "_sample", lambda: next(sample))
        drawn = [service.served.draw_worker_set("demo") for _ in range(4)]
        assert drawn == ["dynamo/backend", "dynamo/backend", "v2/backend", "v2/backend"]
        sizes = [service.served.block_size("demo", one) for one in drawn[1:3]]
        assert sizes == [16, 32]
        # A pin decides; a set without an available worker is not drawn.
        pinned = [service.served.draw_worker_set("demo", pins=[Pin(one)]) for one in (0xA0, 0xB0)]
        assert pinned == ["dynamo/backend", "v2/backend"]
        service.membership.set_available(0xA0, "it is tested")
        monkeypatch.setattr(service.served, "_sample", lambda: 0.0)
        assert service.served.draw_worker_set("demo") == "v2/backend"
        service.membership.set_available(0xA0, None)
        # A dry run shows the most likely set, and what is drawn.
        token = made.frontend.config.api_token
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        url = f"{made.frontend.url}/v1/route"
        async with made.client.post(
            url, json={"model": "demo", "prompt": "x"}, headers=headers
        ) as it:
            result = await it.json()
        assert result["worker_set"] == "v2/backend"
        [found] = [one for one in result["doubts"] if one["code"] == "DYR0722"]
        assert "dynamo/backend 33 %, v2/backend 67 %" in json.dumps(found)
        # One set is a pool again.
        for entry in entries:
            entry.unlink()
        await until(lambda: len(made.frontend.fleet) == 1)
        assert service.served.draw_worker_set("demo") is None


# -- an endpoint picker ----------------------------------------------------------------------------


async def test_a_picker_names_the_frontend_beside_each_worker(store: Path) -> None:
    picker = PickerConfig(port=0, health_port=0, tls=False, dynamo_frontend=("", 8321))
    async with site(store, Fault.NONE, picker=picker) as made:
        instance, _ = made.register(0xB0, made.workers[0])
        entry = json.loads(instance.read_text())
        entry["transport"] = {"nats_tcp": "dynamo_backend.generate-b0"}
        instance.write_text(json.dumps(entry))
        await until(lambda: len(made.frontend.fleet) == 2)
        await until(lambda: ("WORKER_REJECTED", "backend/00b0") in made.conditions())
        assert "without an IP address" in made.conditions()["WORKER_REJECTED", "backend/00b0"]
        port = made.frontend.part(GatewayPart).picker_port
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(4):
                plain = {"request_serializer": None, "response_deserializer": None}
                stream = Stream(channel.stream_stream(ext_proc.PROCESS, **plain)())
                body = {"model": "demo", "prompt": "x", "max_tokens": 8}
                chosen = set_headers(await stream.ask(body, path="/v1/completions"))
                assert chosen[ext_proc.DESTINATION] == "127.0.0.1:8321"
                assert chosen[ext_proc.WORKER_ID] == str(0xA0)
                stream.call.cancel()
            await until(lambda: not list(made.frontend.service.router.load))
