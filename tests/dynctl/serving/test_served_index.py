"""`kv_indexer_query`: what is answered, and a decision without an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.dynamo.request_server import ErrorItem, PlaneRequest
from dynctl.adapters.ports import RequestPlaneError
from dynctl.base.options import GlobalOptions
from dynctl.health import conditions as codes
from dynctl.health.deployment import Deployment, RegisteredWorker
from dynctl.serving.dynamo.served_index import PAUSE_S, IndexQueries, RemoteIndex
from dynctl.serving.http.dynamo_part import DynamoPart
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import DynamoConfig, FrontendConfig
from dynctl.serving.routing.service import RoutingService
from dynctl.settings.router_settings import resolve
from dynctl.wire.dynamo.discovery import EndpointId, instance_of
from router_core import (
    BlocksStored,
    KvEvent,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    hash_prompt,
    local_block_hashes,
)

AT = EndpointId("dynamo", "backend", "kv_indexer_query")
TOKENS = list(range(8))


def service(**settings: Any) -> RoutingService:
    made = RoutingService(**settings)
    made.apply(WorkerUpserted(Worker(7, "w", "m", block_size=4)))
    return made


async def answer(made: RoutingService, body: Any) -> Any:
    request = PlaneRequest(AT, 1, "r", {}, body)
    (item,) = [one async for one in IndexQueries(made).answer(request)]
    return item


@pytest.mark.seed("router-guide: arguments: --serve-indexer")
async def test_the_ranks_that_hold_the_prompt_are_answered() -> None:
    made, found = service(), hash_prompt(TOKENS, 4)
    made.apply(KvEvent(7, 0, BlocksStored(None, found.sequence, found.local)))
    hashes = list(local_block_hashes(TOKENS, 4))
    item = await answer(made, {"model_name": "m", "block_hashes": [*hashes, 5]})
    scores = [[{"worker_id": 7, "dp_rank": 0}, 2]]
    expected = {"device": {"scores": scores, "frequencies": []}, "lower_tier": []}
    assert item == {"TieredScores": expected}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"model_name": "other", "block_hashes": []}, "model other is not registered"),
        ({"model_name": "m", "block_hashes": [-1]}, "not a u64"),
    ],
)
async def test_a_question_without_an_answer_has_a_reason(body: Any, error: str) -> None:
    assert error in (await answer(service(), body))["Error"]


@pytest.mark.parametrize("body", [[], {"model_name": 5}, {"block_hashes": ["x"]}, None])
async def test_another_body_is_an_error(body: Any) -> None:
    with pytest.raises(ErrorItem, match="invalid request"):
        await answer(service(), body)


class Followed:
    """An observer whose indexer answers what a test wants."""

    def __init__(self, made: RoutingService, indexers: tuple[Any, ...]) -> None:
        endpoint = AT._replace(name="generate")
        worker = made.router.registry.get(7)
        assert worker is not None
        item = RegisteredWorker(
            worker,
            None,  # type: ignore[arg-type]
            instance_of(endpoint, 7, "127.0.0.1:1"),
            sources={0: None},  # type: ignore[dict-item]
        )
        self.deployment = Deployment(workers=(item,), indexers=indexers)
        self.held: int | None = 0
        self.asked = 0
        self._made = made

    async def query_indexer(self, indexer: Any, model: str, hashes: Any, workers: Any) -> bool:
        self.asked += 1
        if self.held is None:
            raise RequestPlaneError("the connection was refused")
        if self.held:
            stored = BlocksStored(None, hashes.sequence[: self.held], hashes.local[: self.held])
            self._made.apply(KvEvent(7, 0, stored))
        return False


@pytest.mark.seed("router-guide: arguments: --use-remote-indexer")
async def test_each_decision_has_the_index_of_its_prompt() -> None:
    """What was evicted meanwhile does not stay; a failure is a condition, and a pause."""
    now = [0.0]
    made = service(clock=lambda: now[0])
    followed = Followed(made, (instance_of(AT, 3, "127.0.0.1:2"),))
    remote = RemoteIndex(made, followed, lambda: None)  # type: ignore[arg-type]
    found = hash_prompt(TOKENS, 4)
    request = RoutingRequest("r", "m", 8, 4, tuple(found.sequence), local_hashes=tuple(found.local))

    def held() -> int:
        return sum(blocks for _, blocks in made.router.index.find_matches(found.sequence).items())

    for blocks in (2, 1, 0):
        followed.held = blocks
        await remote.ask(request)
        assert held() == blocks
    followed.held = None
    await remote.ask(request)
    assert made.conditions.get(codes.INDEXER_LOST, "m") is not None
    asked = followed.asked
    await remote.ask(request)
    assert followed.asked == asked
    now[0] += PAUSE_S + 0.1
    followed.held = 2
    await remote.ask(request)
    assert held() == 2
    assert made.conditions.get(codes.INDEXER_LOST, "m") is None


async def test_its_own_index_is_not_asked() -> None:
    made = service()
    followed = Followed(made, (instance_of(AT, 3, "127.0.0.1:2"),))
    remote = RemoteIndex(made, followed, lambda: 3)  # type: ignore[arg-type]
    found = hash_prompt(TOKENS, 4)
    await remote.ask(
        RoutingRequest("r", "m", 8, 4, tuple(found.sequence), local_hashes=tuple(found.local))
    )
    assert followed.asked == 0
    condition = made.conditions.get(codes.INDEXER_LOST, "m")
    assert condition is not None
    assert "--serve-indexer" in condition.message


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("flag", ["--serve-indexer", "--use-remote-indexer"])
@pytest.mark.seed("router-guide: arguments: --serve-indexer")
@pytest.mark.seed("router-guide: arguments: --use-remote-indexer")
async def test_a_frontend_serves_or_queries_an_index_with_its_flag_alone(
    flag: str, given: bool, tmp_path: Path
) -> None:
    planes = GlobalOptions(discovery="file", file_kv=tmp_path, context_applied=True)
    router = resolve({flag: given}, {}).config
    dynamo = DynamoConfig(planes, None, tmp_path / "models")
    frontend = build_frontend(FrontendConfig(port=0, router=router, dynamo=dynamo))
    await frontend.start()
    try:
        assert (frontend.part(DynamoPart).registered is not None) is (
            given and flag == "--serve-indexer"
        )
        queries = given and flag == "--use-remote-indexer"
        assert (frontend.service.ask_index is not None) is queries
    finally:
        await frontend.close()
