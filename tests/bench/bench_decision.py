"""From a prompt's tokens to a Decision, beside Dynamo's SelectionService in its own process.

The fleet has 16 workers and prompts of 512 tokens, then 1,024 workers and 8,192. Four documents of
half a prompt's length are cached by eight workers each; every prompt is a document and as much new
text, never the same twice; as many requests as workers are booked. The peer learns the caches from
KV events over ZMQ, as it would from engines; both are queried beforehand for the caches.

Figures are CPU time of the process with all its threads. Ours is hashing the list of tokens, then
`Router.plan`, with and without memory of hashed prompts. The peer is called as its Python binding
offers it: a coroutine that takes a dict with the list.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import zmq

from router_core import (
    BlockHashes,
    BlocksStored,
    Booked,
    Freed,
    KvEvent,
    ModelRuntimeConfig,
    PromptHasher,
    Router,
    RouterConfig,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    hash_prompt,
)
from router_core import local_block_hashes as local_hashes
from tests.bench import decision_workload as workload
from tests.bench.harness import (
    Options,
    Peer,
    Row,
    alternate,
    measure,
    peer_or_none,
    row,
)

SIZES = ((16, 512, "4x", 100), (1024, 8192, "4x", 20))
_BLOCK = workload.BLOCK


def engine_names(tokens: list[int]) -> list[int]:
    """What engines call the blocks: the same in all of them."""
    return [value ^ 0x9E3779B97F4A7C15 for value in hash_prompt(tokens, _BLOCK).sequence]


def fleet(router: Router, workers: int, *, kv_events: bool = True) -> Router:
    """The router with its workers."""
    card = ModelRuntimeConfig(
        total_kv_blocks=workload.TOTAL_KV_BLOCKS,
        max_num_batched_tokens=workload.MAX_BATCHED_TOKENS,
    )
    for number in range(workers):
        worker = Worker(
            number + 1, f"w{number}", workload.MODEL, runtime_config=card, kv_events=kv_events
        )
        assert router.apply(WorkerUpserted(worker), 0.0).ok
    return router


def build(workers: int, tokens: int) -> Router:
    """Our router with the workload's fleet, caches and load."""
    router = fleet(Router(RouterConfig()), workers)
    for number, text in enumerate(workload.documents(tokens)):
        stored = BlocksStored(None, engine_names(text), local_hashes(text, _BLOCK))
        for holder in workload.holders(number, workers):
            assert router.apply(KvEvent(holder + 1, 0, stored), 0.0).ok
    for number, prompt in enumerate(workload.prompts(tokens, workers, 1)):
        request = request_of(prompt, hash_prompt(prompt, _BLOCK).sequence, f"booked-{number}")
        plan = router.plan(request, samples=(number / workers, 0.0))
        assert plan.decode is not None
        assert router.apply(router.booking(plan.decode, request), 0.0).ok
    return router


def request_of(prompt: list[int], hashes: list[int], name: str) -> RoutingRequest:
    return RoutingRequest(name, workload.MODEL, len(prompt), _BLOCK, hashes)


class Publishers:
    """ZMQ sockets of the workers that cache something, and a silent one for all the others."""

    def __init__(self, workers: int, tokens: int) -> None:
        self._texts = workload.documents(tokens)
        self._held = {n: held for n in range(workers) if (held := workload.held(n, workers))}
        self._context = zmq.Context()
        self._sockets = {n: self._context.socket(zmq.PUB) for n in (*self._held, -1)}
        self.endpoints = {
            str(n): f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            for n, socket in self._sockets.items()
        }
        self._sequence = 0

    def publish(self) -> None:
        """Say once what every holder has; a subscriber that is not there yet misses it."""
        for number, held in self._held.items():
            events = [
                ["BlockStored", engine_names(text), None, text, _BLOCK, None]
                for text in (self._texts[document] for document in held)
            ]
            batch = msgspec.msgpack.encode([0.0, events, 0])
            sequence = self._sequence.to_bytes(8, "big")
            self._sockets[number].send_multipart([b"", sequence, batch])
        self._sequence += 1

    def close(self) -> None:
        self._context.destroy(linger=0)


def teach(peer: Peer, workers: int, tokens: int) -> Publishers:
    """Build the peer's fleet, and see that it knows of every cache what ours knows."""
    publishers = Publishers(workers, tokens)
    silent = publishers.endpoints["-1"]
    endpoints = publishers.endpoints
    peer.ask("register", workers=workers, tokens=tokens, publishers=endpoints, silent=silent)
    blocks = tokens // 2 // _BLOCK
    expected = {
        str(number): {str(holder + 1): blocks for holder in workload.holders(number, workers)}
        for number in range(workload.DOCUMENTS)
    }
    for _ in range(100):
        publishers.publish()
        time.sleep(0.1)
        if peer.ask("overlaps") == expected:
            break
    else:
        raise RuntimeError("the peer did not take the published KV events within 10 s")
    peer.ask("book", count=workers, seed=1)
    return publishers


def decisions(
    router: Router, hashing: Callable[[list[int]], BlockHashes], tokens: int, inner: int, seed: int
) -> float:
    """Nanoseconds a decision, prompts new each time."""
    prompts = iter(workload.prompts(tokens, 2 * inner, seed))

    def decide() -> None:
        prompt = next(prompts)
        plan = router.plan(request_of(prompt, hashing(prompt).sequence, "r"), samples=(0.5, 0.5))
        assert plan.decode is not None

    return measure(decide, 1, inner=inner).value


def queue_rows(router: Router, tokens: int, name: str, inner: int) -> Iterator[Row]:
    """The router queue: a plan without it, with room, and where the request would wait."""
    (prompt,) = workload.prompts(tokens, 1, 7)
    request = request_of(prompt, hash_prompt(prompt, _BLOCK).sequence, "r")
    plain = measure(partial(router.plan, request, samples=(0.5, 0.5)), 5, inner=inner) / 1000
    yield row(f"{name}, a plan", "us", plain)
    for threshold, what in ((1e6, "with room"), (0.0, "without room")):
        view = router.view(router.config.with_values({"router_queue_threshold": threshold}))
        plan = partial(router.plan, request, samples=(0.5, 0.5), view=view)
        assert plan().waits is (threshold == 0)
        taken = measure(plan, 5, inner=inner) / 1000
        yield row(f"{name}, a plan, router queue {what}", "us", taken)


#: Where cached blocks are known from, other than from KV events.
_LEARNING: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("approximate caches", {"use_kv_events": False}, False),
    ("KV events and predictions", {"router_predicted_ttl_secs": 60.0}, True),
)


def learned_rows(workers: int, tokens: int, name: str, inner: int) -> Iterator[Row]:
    """A plan of routers that learned the documents by bookings."""
    (prompt,) = workload.prompts(tokens, 1, 7)
    for kind, settings, events in _LEARNING:
        learning = Router(RouterConfig().with_values(settings), learns=True)
        router = fleet(learning, workers, kv_events=events)
        for number, text in enumerate(workload.documents(tokens)):
            known = hash_prompt(text, _BLOCK).sequence
            for holder in workload.holders(number, workers):
                name_of = f"{number} on {holder}"
                booked = Booked(name_of, "aggregated", holder + 1, 0, prompt_hashes=known)
                assert router.apply(booked, 0.0).ok
                router.apply(Freed(name_of), 0.0)
        request = request_of(prompt, hash_prompt(prompt, _BLOCK).sequence, "r")
        planning = partial(router.plan, request, samples=(0.5, 0.5))
        overlap = max(row.overlap_blocks for row in planning().final.rows())
        assert overlap == tokens // 2 // _BLOCK
        yield row(f"{name}, a plan with {kind}", "us", measure(planning, 5, inner=inner) / 1000)


def measured(
    peer: Peer | None, workers: int, tokens: int, aim: str, inner: int, turns: int
) -> Iterator[Row]:
    """Rows of one fleet and prompt length."""
    router = build(workers, tokens)
    (prompt,) = workload.prompts(tokens, 1, 3)
    matches = router.index.find_matches(hash_prompt(prompt, _BLOCK).sequence)
    assert {depth for _, depth in matches.items()} == {tokens // 2 // _BLOCK}
    publishers = teach(peer, workers, tokens) if peer is not None else None
    seeds = itertools.count(100)
    plain = partial(hash_prompt, block_size=_BLOCK)
    remembering = PromptHasher(_BLOCK).hash_prompt
    sides: list[Callable[[], float]] = [
        lambda: decisions(router, plain, tokens, inner, next(seeds)),
        lambda: decisions(router, remembering, tokens, inner, next(seeds)),
    ]
    if peer is not None:
        sides.append(lambda: float(peer.ask("select", inner=inner, seed=next(seeds))))
    try:
        taken = [side / 1000 for side in alternate(sides, turns)]
    finally:
        if publishers is not None:
            publishers.close()
    name = f"{workers:,} workers, {tokens:,} tokens"
    theirs = taken[2] if peer is not None else None
    yield row(f"{name} -> Decision", "us", taken[0], theirs, aim)
    yield row(f"{name}, half seen before -> Decision", "us", taken[1], theirs, aim)
    yield from queue_rows(router, tokens, name, inner)
    yield from learned_rows(workers, tokens, name, inner)


def rows(options: Options) -> Iterator[Row]:
    for workers, tokens, aim, most in SIZES:
        inner, turns = (2, 1) if options.smoke else (most, 9)
        with peer_or_none(options, "select") as peer:
            yield from measured(peer, workers, tokens, aim, inner, turns)
