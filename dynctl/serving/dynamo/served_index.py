"""``kv_indexer_query``: this router's index for other routers, and another router's for this one.

With ``--serve-indexer`` a process registers the endpoint in each component of its workers. With
``--use-remote-indexer`` it follows no KV events: before each decision it asks such an endpoint how
much of the prompt each worker has. Only the prompt's hashes are sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final

import msgspec

from dynctl.adapters.dynamo.registration import Registration
from dynctl.adapters.dynamo.request_server import ErrorItem, PlaneRequest, RequestServer
from dynctl.adapters.ports import Registrar, RequestPlaneError
from dynctl.base.decode_errors import WireError
from dynctl.health import conditions as codes
from dynctl.serving.dynamo.observer import Observer
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.dynamo.discovery import EndpointId, encode_entry
from router_core import BlockHashes, BlocksRemoved, KvEvent, RoutingRequest, sequence_hashes

_log = logging.getLogger(__name__)

INDEXER: Final = "kv_indexer_query"
#: Hashes of one question to the index.
MAX_HASHES: Final = 1_000_000
#: Seconds for an answer, and between a failure and the next question.
ANSWER_S: Final = 0.5
PAUSE_S: Final = 1.0
_LOOK_S: Final = 0.25


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``kv_indexer_query``."""

    model_name: str
    block_hashes: list[int]
    device_only: bool | None = None


class IndexQueries:
    """Answers which ranks hold the start of a prompt, by its local hashes."""

    def __init__(self, service: RoutingService) -> None:
        self._service = service

    async def answer(self, plane: PlaneRequest) -> AsyncIterator[object]:
        """One item: the answer's variant, as Dynamo's served indexer."""
        try:
            question = msgspec.convert(plane.body, Question, strict=True)
        except msgspec.ValidationError as error:
            raise ErrorItem(f"invalid request: {error}", "InvalidArgument") from None
        if len(question.block_hashes) > MAX_HASHES:
            yield {"Error": f"{len(question.block_hashes):,} hashes; expected {MAX_HASHES:,}"}
            return
        if not all(0 <= block_hash < 2**64 for block_hash in question.block_hashes):
            yield {"Error": "a hash is not a u64"}
            return
        router, name = self._service.router, question.model_name
        mask = router.registry.model(name)
        if not mask:
            yield {"Error": f"served indexer model {name[:200]} is not registered"}
            return
        hashes = sequence_hashes(question.block_hashes)
        held = router.index.find_matches(hashes, mask).items()
        scores = [[router.registry.ref(slot)._asdict(), blocks] for slot, blocks in held]
        yield {"TieredScores": {"device": {"scores": scores, "frequencies": []}, "lower_tier": []}}


class PlaneProcess:
    """Endpoints of this process on Dynamo's request plane, registered while they can serve.

    ``endpoints``: those of now. Nothing is registered before :meth:`start`.
    """

    def __init__(
        self,
        service: RoutingService,
        registrar: Registrar,
        host: str,
        endpoints: Callable[[], Iterable[EndpointId]],
    ) -> None:
        self.server = RequestServer(host)
        self._service = service
        self._endpoints = endpoints
        self._subject = f"endpoints in {registrar.title}"
        self._registration = Registration(registrar, self._entries, self._report)

    async def start(self) -> None:
        """Listen and register. Raises OSError and Unreachable."""
        await self.server.start()
        await self._registration.start()
        self._service.tasks.start("registration of endpoints", self._follow)

    @property
    def instance_id(self) -> int | None:
        """The id under which the endpoints are registered now."""
        return self._registration.instance_id

    async def drain(self, seconds: float) -> None:
        """Deregister at once, then let the running requests end."""
        await self._registration.withdraw()
        await self.server.drain(seconds, "the router is shutting down")

    async def close(self) -> None:
        """Leaves no entry, connection or task."""
        await self._registration.close()
        await self.server.close()

    def _entries(self, instance_id: int) -> Iterator[tuple[str, bytes]]:
        for endpoint in self._endpoints():
            yield encode_entry(self.server.instance(endpoint, instance_id))

    async def _follow(self) -> None:
        before: set[EndpointId] = set()
        while True:
            now = set(self._endpoints())
            if now != before:
                before = now
                self._registration.update()
            await asyncio.sleep(_LOOK_S)

    def _report(self, problem: str | None) -> None:
        if problem is None:
            self._service.clear_condition(codes.DISCOVERY_INTERRUPTED, self._subject)
        else:
            text = f"{problem}; Dynamo's processes may not find this router"
            self._service.set_condition(codes.DISCOVERY_INTERRUPTED, self._subject, text)


def served_index(
    service: RoutingService, observer: Observer, registrar: Registrar, host: str
) -> PlaneProcess:
    """``kv_indexer_query`` of each component whose workers this process follows."""
    queries = IndexQueries(service)
    serving: set[EndpointId] = set()

    def endpoints() -> list[EndpointId]:
        published = {
            item.instance.endpoint._replace(name=INDEXER)
            for item in observer.deployment.workers
            if item.sources
        }
        for endpoint in published - serving:
            process.server.serve(endpoint, queries.answer)
            serving.add(endpoint)
        return sorted(published)

    process = PlaneProcess(service, registrar, host, endpoints)
    return process


class RemoteIndex:
    """Reads the part of the index that one decision needs from a served one. ``own``: the instance
    id of this process, whose index is not asked."""

    def __init__(
        self, service: RoutingService, observer: Observer, own: Callable[[], int | None]
    ) -> None:
        self._service = service
        self._observer = observer
        self._own = own
        self._silent_until = float("-inf")

    async def ask(self, request: RoutingRequest) -> None:
        """Make the index of the request's prompt that of a served indexer; without an answer the
        decision uses what is known."""
        now = self._service.clock()
        if now < self._silent_until or not request.local_hashes:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._ask(request)
        except TimeoutError:
            self._note_failure(f"no answer within {ANSWER_S:g} s")
        except (RequestPlaneError, WireError) as error:
            self._note_failure(str(error))
        else:
            self._service.clear_condition(codes.INDEXER_LOST, request.model)

    async def _ask(self, request: RoutingRequest) -> None:
        deployment, own = self._observer.deployment, self._own()
        workers = [worker for worker in deployment.workers if worker.worker.model == request.model]
        components = {worker.instance.endpoint[:2] for worker in workers if worker.sources}
        asked = False
        for component in sorted(components):
            indexers = [
                indexer
                for indexer in deployment.indexers
                if indexer.endpoint[:2] == component and indexer.instance_id != own
            ]
            if not indexers:
                continue
            members = [
                worker.worker for worker in workers if worker.instance.endpoint[:2] == component
            ]
            hashes = BlockHashes(
                request.block_size, list(request.local_hashes), list(request.sequence_hashes)
            )
            self._forget(request, [member.worker_id for member in members])
            await self._observer.query_indexer(indexers[0], request.model, hashes, members)
            asked = True
        if components and not asked:
            names = ", ".join(map(".".join, sorted(components)))
            raise RequestPlaneError(
                f"no {INDEXER} of {names} is registered: "
                "start a router or frontend with --serve-indexer"
            )

    def _forget(self, request: RoutingRequest, worker_ids: Iterable[int]) -> None:
        """Forget what was known of the prompt, so that what was evicted does not stay."""
        router = self._service.router
        mask = router.registry.mask_of(worker_ids)
        for slot, blocks in router.index.find_matches(request.sequence_hashes, mask).items():
            ref = router.registry.ref(slot)
            names = tuple(reversed(request.sequence_hashes[:blocks]))
            self._service.apply(KvEvent(ref.worker_id, ref.dp_rank, BlocksRemoved(names)))

    def _note_failure(self, problem: str) -> None:
        self._silent_until = self._service.clock() + PAUSE_S
        for model in self._service.models():
            self._service.set_condition(
                codes.INDEXER_LOST, model, f"{problem}; caches count as they were last read"
            )
