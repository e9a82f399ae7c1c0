"""Engine: the ranks of one simulated engine, its hand-offs, its load and info reports."""

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial

import zmq

from dynctl.base.tasks import Supervisor, end_tasks
from dynctl.documents.engine import (
    Bootstrap,
    EngineInfo,
    EngineLoad,
    EngineRankLoad,
    EventEndpoints,
    engine_load,
)
from dynctl.simulation.engine.cache_events import CacheEvent
from dynctl.simulation.engine.config import EngineConfig, EngineConfigError
from dynctl.simulation.engine.faults import FaultState
from dynctl.simulation.engine.handoff import HeldKvTable, KvPuller
from dynctl.simulation.engine.kv_publisher import KvEventPublisher, bind_publishers
from dynctl.simulation.engine.openai_request import Generate
from dynctl.simulation.engine.output_plan import OutputPlan, Vocabulary
from dynctl.simulation.engine.prefix_cache import root_hash
from dynctl.simulation.engine.scheduler import RankScheduler, ScheduledRequest, StepTimer
from dynctl.tokenization import ModelTokenizer
from router_core import ModelRuntimeConfig, Role


class EngineRestarted(Exception):
    """The engine lost all requests in a simulated restart; their connections close."""


@dataclass
class SimulatedRank:
    """One data-parallel rank: a scheduler over its cache, and its event publisher if any."""

    dp_rank: int
    scheduler: RankScheduler
    publisher: KvEventPublisher | None

    @property
    def active_requests(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def load(self) -> EngineRankLoad:
        scheduler = self.scheduler
        return EngineRankLoad(
            dp_rank=self.dp_rank,
            active_prefill_tokens=scheduler.active_prefill_tokens,
            active_decode_blocks=sum(
                len(request.table.blocks) for request in scheduler.running if request.table
            ),
            kv_used_blocks=scheduler.cache.held_blocks,
            kv_cached_blocks=scheduler.cache.cached_blocks,
            kv_total_blocks=scheduler.cache.total_blocks,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )


class Engine:
    """Create inside a running event loop, `start`, and `close` when done."""

    def __init__(self, config: EngineConfig, tokenizer: ModelTokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.engine_id = _new_engine_id(config.name)
        self.port = config.port
        self.draining = False
        self.restarting = False
        self.faults = FaultState(config.faults)
        self.taints: frozenset[str] = frozenset()
        self.timer = StepTimer(config, self.faults)
        self.held = HeldKvTable(config.kv_hold_timeout_s)
        self.puller = KvPuller(config.topology_domains, config.kv_hold_timeout_s)
        self._vocabulary = Vocabulary(tokenizer)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            publishers = bind_publishers(config, self._context, self.faults)
        except EngineConfigError:
            self._context.destroy(linger=0)
            raise
        self.ranks = [
            self._rank(rank, publishers[rank] if publishers else None)
            for rank in range(config.data_parallel_size)
        ]
        self._publishers = publishers
        #: Set when a scheduler failed; the engine serves no request after that.
        self.failed = asyncio.Event()
        self._tasks = Supervisor(self._task_failed)
        self._replays: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the schedulers and the replay sockets."""
        for rank in self.ranks:
            # A scheduler's state is unknown after a failure, so it is not restarted.
            self._tasks.start(
                "scheduler", rank.scheduler.run, f"rank {rank.dp_rank}", restart=False
            )
        self._serve_replays()

    async def close(self) -> None:
        await self._tasks.close()
        self.held.forget_all()
        for rank in self.ranks:
            rank.scheduler.end_all(EngineRestarted("the engine stops"))
        await self.puller.close()
        for publisher in self._publishers:
            publisher.close()
        self._context.destroy(linger=0)

    @property
    def active_requests(self) -> int:
        """Requests running or waiting, and hand-offs not pulled yet."""
        return sum(rank.active_requests for rank in self.ranks) + len(self.held)

    @property
    def reachable_host(self) -> str:
        """The host of this engine's URL and hand-offs."""
        return self.config.reachable(self.config.host)

    def choose_rank(self, wanted: int | None) -> SimulatedRank:
        """The wanted rank, else the one with the fewest requests (lowest number on a tie)."""
        if wanted is not None:
            return self.ranks[wanted]
        return min(self.ranks, key=lambda rank: rank.active_requests)

    def admit(self, rank: SimulatedRank, generate: Generate, request_id: str) -> ScheduledRequest:
        """Queue a generation on `rank`. Raises RankBusy."""
        remote = generate.remote_kv
        request = ScheduledRequest(
            id=request_id,
            tokens=list(generate.prompt),
            max_tokens=generate.max_tokens,
            finish_as=generate.finish_as,
            plan=OutputPlan(
                self._vocabulary, generate.prompt, self.config.seed, follows_text=not generate.chat
            ),
            root=root_hash(generate.lora, generate.cache_salt),
            lora=generate.lora,
            salt=generate.cache_salt,
            load_kv=partial(self.puller.pull, remote) if remote is not None else None,
            keep_kv=generate.hold_for_pull or generate.room is not None,
        )
        rank.scheduler.submit(request)
        return request

    def reset_prefix_cache(self) -> list[int]:
        """Clear the idle ranks and publish it; returns the ranks whose blocks are in use."""
        return [rank.dp_rank for rank in self.ranks if not rank.scheduler.clear_cache()]

    async def restart_silently(self) -> None:
        """Simulate a crash and a restart at the same addresses.

        Requests end, the cache is empty, sequences start at 0, and no event is published. New
        requests are refused meanwhile.
        """
        if self.restarting:
            return
        self.restarting = True
        try:
            self.engine_id = _new_engine_id(self.config.name)
            self.held.forget_all()
            for rank in self.ranks:
                rank.scheduler.reset(EngineRestarted("the engine restarted"))
            await end_tasks(self._replays)
            for publisher in self._publishers:
                await publisher.restart()
            self._serve_replays()
        finally:
            self.restarting = False

    def _serve_replays(self) -> None:
        self._replays = [
            self._tasks.start("replay socket", publisher.serve_replay, f"rank {publisher.dp_rank}")
            for publisher in self._publishers
        ]

    def _task_failed(self, name: str, message: str) -> None:
        if name.startswith("scheduler"):
            self.failed.set()
            for rank in self.ranks:
                rank.scheduler.end_all(EngineRestarted(f"internal error in {name}: {message}"))

    def runtime_config(self) -> ModelRuntimeConfig:
        """The runtime config that this engine publishes, with its topology and taints."""
        config = self.config
        return ModelRuntimeConfig(
            total_kv_blocks=config.total_blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            context_length=config.context_length,
            data_parallel_size=config.data_parallel_size,
            taints=self.taints,
            topology_domains=config.topology_domains,
            kv_transfer_domain=config.kv_transfer_domain,
            kv_transfer_enforcement=config.kv_transfer_enforcement,
            kv_transfer_preferred_weight=config.kv_transfer_preferred_weight,
        )

    def info(self) -> EngineInfo:
        """The body of GET /engine/info."""
        config = self.config
        bootstrap = Bootstrap(self.reachable_host, self.port)
        return EngineInfo(
            name=config.name,
            engine_id=self.engine_id,
            model=config.model,
            lora=list(config.lora),
            role=config.role.value,
            can_prefill=config.can_prefill or config.role is not Role.DECODE,
            simulated=True,
            block_size=config.block_size,
            data_parallel_size=config.data_parallel_size,
            runtime_config=self.runtime_config().to_dict(),
            kv_events=[
                EventEndpoints(
                    dp_rank=publisher.dp_rank,
                    endpoint=publisher.endpoints.endpoint,
                    replay=publisher.endpoints.replay or None,
                    topic=config.kv_events_topic,
                    next_seq=publisher.next_seq,
                )
                for publisher in self._publishers
            ],
            bootstrap=bootstrap if config.role is Role.PREFILL else None,
        )

    def load(self) -> EngineLoad:
        """The body of GET /load: totals over the ranks, then each rank."""
        return engine_load([rank.load() for rank in self.ranks], held_handoffs=len(self.held))

    def _rank(self, dp_rank: int, publisher: KvEventPublisher | None) -> SimulatedRank:
        def publish(events: list[CacheEvent]) -> None:
            if publisher is not None:
                publisher.publish(events)

        return SimulatedRank(dp_rank, RankScheduler(self.config, self.timer, publish), publisher)


def _new_engine_id(name: str) -> str:
    return f"{name}-{secrets.token_hex(8)}"
