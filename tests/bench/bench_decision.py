"""From a prompt's tokens to a Decision, beside Dynamo's SelectionService in its own process.

    python -m tests.bench.bench_decision [--peer-python PATH] [--smoke]

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
    PolicyClass,
    PolicyTable,
    PromptHasher,
    Router,
    RouterConfig,
    RouterQueue,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    hash_prompt,
)
from router_core import local_block_hashes as local_hashes
from tests.bench import decision_workload as workload
from tests.bench.harness import (
    Peer,
    Row,
    alternate,
    bench_parser,
    cpu,
    peer_or_none,
    print_table,
    row,
)

SIZES = ((16, 512, "4x", 100), (1024, 8192, "2.5x", 20))
_BLOCK = workload.BLOCK
#: Requests in the router queue: its bound by default.
_WAITING = 4096
#: Different prompts that are booked in turn.
_BOOKINGS = 20


def engine_names(tokens: list[int]) -> list[int]:
    """What engines call the blocks: the same in all of them."""
    return [value ^ 0x9E3779B97F4A7C15 for value in hash_prompt(tokens, _BLOCK).sequence]


def build(workers: int, tokens: int) -> Router:
    """Our router with the workload's fleet, caches and load."""
    router = Router(RouterConfig())
    for number in range(workers):
        card = ModelRuntimeConfig(
            total_kv_blocks=workload.TOTAL_KV_BLOCKS,
            max_num_batched_tokens=workload.MAX_BATCHED_TOKENS,
        )
        worker = Worker(number + 1, f"w{number}", workload.MODEL, runtime_config=card)
        assert router.apply(WorkerUpserted(worker), 0.0).ok
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
    peer.ask(
        "build", workers=workers, tokens=tokens, publishers=publishers.endpoints, silent=silent
    )
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

    return cpu(decide, 1, inner=inner)


def splits(router: Router, tokens: int) -> tuple[float, float]:
    """Nanoseconds of hashing one prompt, and of planning it when hashed."""
    (prompt,) = workload.prompts(tokens, 1, 7)
    hashes = hash_prompt(prompt, _BLOCK).sequence
    request = request_of(prompt, hashes, "r")
    hashing = cpu(partial(hash_prompt, prompt, _BLOCK), 5, inner=20)
    planning = cpu(partial(router.plan, request, samples=(0.5, 0.5)), 5, inner=20)
    return hashing, planning


def queue_rows(router: Router, tokens: int, name: str) -> list[Row]:
    """The router queue: a plan while no request waits, one where the request would, and a turn."""
    (prompt,) = workload.prompts(tokens, 1, 7)
    request = request_of(prompt, hash_prompt(prompt, _BLOCK).sequence, "r")
    rows = []
    for threshold, what in ((1e6, "has room"), (0.0, "would wait")):
        view = router.view(router.config.with_values({"router_queue_threshold": threshold}))
        plan = partial(router.plan, request, samples=(0.5, 0.5), view=view)
        assert plan().waits is (threshold == 0)
        taken = cpu(plan, 5, inner=20) / 1000
        rows.append(row(f"{name}: plan with the queue on, the request {what}", "us", taken))
    table = PolicyTable(tuple(PolicyClass(f"c{n}", quantum=512) for n in range(8)))
    queue = RouterQueue()

    def enter(number: int) -> None:
        queue.add(
            str(number), workload.MODEL, table.classes[number % 8], float(number),
            isl_tokens=100 + number % 977, cached_tokens=0, arrived_at=float(number),
        )  # fmt: skip

    for number in range(_WAITING):
        enter(number)
    numbers = itertools.count(_WAITING)

    def turn() -> None:
        enter(next(numbers))
        found = queue.next(workload.MODEL, table, lambda _: True)
        assert found is not None
        queue.take(found.entry.request_id, found.credits, found.cursor)

    taken = cpu(turn, 5, inner=200) / 1000
    return [*rows, row(f"{name}: enter the queue and a turn, {_WAITING:,} waiting", "us", taken)]


#: What learns from bookings: name, settings, whether the workers have KV events.
_LEARNING: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("KV events", {}, True),
    ("approximate, ttl", {"use_kv_events": False}, False),
    (
        "approximate, lru",
        {"use_kv_events": False, "router_approximate_cache_policy": "lru"},
        False,
    ),
    ("KV events and predictions", {"router_predicted_ttl_secs": 60.0}, True),
)


def learned_rows(workers: int, tokens: int, name: str) -> list[Row]:
    """A plan, and a booking with its end, by where cached blocks are known from. All learned the
    documents by bookings; the first row of each is the router that learns nothing."""
    rows = []
    (prompt,) = workload.prompts(tokens, 1, 7)
    hashes = [hash_prompt(one, _BLOCK).sequence for one in workload.prompts(tokens, _BOOKINGS, 9)]
    for kind, settings, events in _LEARNING:
        router = Router(RouterConfig().with_values(settings), learns=True)
        for number in range(workers):
            card = ModelRuntimeConfig(total_kv_blocks=workload.TOTAL_KV_BLOCKS)
            worker = Worker(
                number + 1, f"w{number}", workload.MODEL, runtime_config=card, kv_events=events
            )
            assert router.apply(WorkerUpserted(worker), 0.0).ok
        for number, text in enumerate(workload.documents(tokens)):
            known = hash_prompt(text, _BLOCK).sequence
            for holder in workload.holders(number, workers):
                one = f"{number} on {holder}"
                booked = Booked(one, "aggregated", holder + 1, 0, prompt_hashes=known)
                assert router.apply(booked, 0.0).ok
                router.apply(Freed(one), 0.0)
        request = request_of(prompt, hash_prompt(prompt, _BLOCK).sequence, "r")
        planning = partial(router.plan, request, samples=(0.5, 0.5))
        found = max(row.overlap_blocks for row in planning().final.rows())
        assert found == (0 if kind == "KV events" else tokens // 2 // _BLOCK)
        rows.append(row(f"{name}, {kind}: plan", "us", cpu(planning, 5, inner=20) / 1000))
        turns = itertools.count()

        def book(router: Router = router, turns: Iterator[int] = turns) -> None:
            number = next(turns)
            asked = hashes[number % _BOOKINGS]
            holder = number % workers + 1
            booked = Booked(
                str(number), "aggregated", holder, 0, sequence_hashes=asked, prompt_hashes=asked
            )
            assert router.apply(booked, float(number)).ok
            router.apply(Freed(str(number)), float(number))

        taken = cpu(book, 3, inner=_BOOKINGS) / 1000
        rows.append(row(f"{name}, {kind}: book and free", "us", taken))
    return rows


def run(
    peer: Peer | None, workers: int, tokens: int, aim: str, inner: int, turns: int
) -> list[Row]:
    """Rows of one fleet and prompt length."""
    router = build(workers, tokens)
    found = router.index.find_matches(
        hash_prompt(workload.prompts(tokens, 1, 3)[0], _BLOCK).sequence
    )
    assert {depth for _, depth in found.items()} == {tokens // 2 // _BLOCK}
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
        taken = [value / 1000 for value in alternate(sides, turns)]
    finally:
        if publishers is not None:
            publishers.close()
    hashing, planning = (value / 1000 for value in splits(router, tokens))
    name = f"{workers:,} workers, {tokens:,} tokens"
    theirs = taken[2] if peer is not None else None
    return [
        row(f"{name}: tokens -> Decision", "us", taken[0], theirs, aim),
        row(f"{name}: same, half the prompt seen before", "us", taken[1], theirs, aim),
        row(f"{name}: of which hashing", "us", hashing),
        row(f"{name}: of which plan (match, cost, pick)", "us", planning),
        *queue_rows(router, tokens, name),
        *learned_rows(workers, tokens, name),
    ]


def main() -> None:
    parser = bench_parser(__doc__)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for workers, tokens, aim, inner in SIZES:
        inner, turns = (2, 1) if arguments.smoke else (inner, 9)
        with peer_or_none(arguments.peer_python, "peer_select.py") as peer:
            rows += run(peer, workers, tokens, aim, inner, turns)
    print_table("decision", rows)


if __name__ == "__main__":
    main()
