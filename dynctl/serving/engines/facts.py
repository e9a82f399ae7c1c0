"""Facts about an engine and its load, read over HTTP, and the Worker built from them and its spec.

Where an engine reports them is a matter of its kind (:mod:`dynctl.wire.engine_kinds`): in a
description of itself, else in the OpenAI API and its metrics.

What an engine reports about itself is right: it replaces a typed value that differs, and
:func:`contradictions` names the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynctl.adapters.zmq.kv_event_source import EndpointError, KvEventSource, dialable_endpoint
from dynctl.base.json_fields import mapping, sequence
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError
from dynctl.serving.routing.config import DEFAULT_BLOCK_SIZE
from dynctl.wire.engine_kinds.facts import (
    WILDCARD,
    EngineFacts,
    facts_from_gauges,
    facts_from_models,
)
from dynctl.wire.engine_kinds.kind import EngineKind
from dynctl.wire.engine_kinds.load import LoadReading
from dynctl.wire.engine_kinds.table import KINDS, METRIC_NAMES
from dynctl.wire.engine_metrics import EngineGauges, read_engine_metrics
from router_core import LoadReported, ModelRuntimeConfig, Role, Worker, WorkerError

#: LoRA adapters of one engine; more are not routed.
_MAX_ADAPTERS = 256


def build_worker(
    spec: WorkerSpec, facts: EngineFacts, *, model: str | None, block_size: int | None
) -> Worker:
    """The worker to register: the engine's values, else those of the spec, else the defaults.

    Model and role are the spec's if it has them: they say what the worker is used for. Raises
    WorkerSpecError where the model is unknown or the values contradict each other.
    """
    served = spec.model or facts.model or model
    if served is None:
        raise WorkerSpecError(
            f"worker {spec.name}: its model is unknown; give model=, or let {spec.url}/v1/models "
            "answer"
        )
    # A typed name that the engine does not have is the only one for routing.
    names = facts.models if served in facts.models else ()
    try:
        role = spec.role or (Role(facts.role) if facts.role else Role.AGGREGATED)
        can_prefill = facts.can_prefill if spec.can_prefill is None else spec.can_prefill
        return Worker(
            worker_id=spec.worker_id,
            name=spec.name,
            model=served,
            role=role,
            block_size=facts.block_size or spec.block_size or block_size or DEFAULT_BLOCK_SIZE,
            runtime_config=ModelRuntimeConfig.from_dict(_runtime_values(spec, facts)),
            can_prefill=True if can_prefill is None else can_prefill,
            kv_events=bool(_chosen(spec.kv_events, facts.kv_events)),
            endpoint=spec.url,
            device=spec.device,
            aliases=tuple(name for name in names if name != served),
            adapters=facts.adapters[:_MAX_ADAPTERS],
        )
    except (WorkerError, ValueError, TypeError) as error:
        raise WorkerSpecError(f"worker {spec.name}: {error}") from None


def _runtime_values(spec: WorkerSpec, facts: EngineFacts) -> dict[str, Any]:
    """The values of the worker's runtime config: the engine's, else those of the spec."""
    reported = dict(facts.runtime_config)
    domains = {**mapping(reported.get("topology_domains")), **spec.domains}
    values: dict[str, Any] = {
        **reported,
        "topology_domains": domains,
        "taints": [*sequence(reported.get("taints")), *spec.taints],
        "data_parallel_size": facts.dp or spec.dp or 1,
        "total_kv_blocks": facts.total_blocks or spec.total_blocks,
        "max_num_batched_tokens": facts.max_num_batched_tokens or spec.max_num_batched_tokens,
        "context_length": reported.get("context_length") or facts.context_length,
    }
    if facts.start_rank is not None:
        values["data_parallel_start_rank"] = facts.start_rank
    return values


def contradictions(
    spec: WorkerSpec,
    facts: EngineFacts,
    *,
    model: str | None = None,
    block_size: int | None = None,
) -> str | None:
    """What the user has typed and the engine reports differently, as one sentence; None if
    nothing. ``model`` and ``block_size``: those for workers that report none."""
    found = [
        f"{typed} is set and the engine reports {reported}"
        for typed, value, reported in (
            (f"block-size={spec.block_size}", spec.block_size, facts.block_size),
            (
                f"--kv-cache-block-size {block_size}",
                None if spec.block_size is not None else block_size,
                facts.block_size,
            ),
            (
                f"--model-name {model}",
                None if spec.model is not None else model,
                None if model in facts.models else facts.model,
            ),
            (f"dp={spec.dp}", spec.dp, facts.dp),
            (f"total-blocks={spec.total_blocks}", spec.total_blocks, facts.total_blocks),
            (
                f"max-num-batched-tokens={spec.max_num_batched_tokens}",
                spec.max_num_batched_tokens,
                facts.max_num_batched_tokens,
            ),
        )
        if value is not None and reported is not None and value != reported
    ]
    message = f"{', '.join(found)}: the engine's value is used" if found else ""
    if spec.model is not None and facts.models and spec.model not in facts.models:
        names = ", ".join(facts.models[:4])
        unserved = (
            f"model={spec.model} is set and the engine serves {names}: requests for "
            f"{spec.model} go to the engine under that name"
        )
        message = f"{message}; {unserved}" if message else unserved
    return message or None


def event_sources(spec: WorkerSpec, facts: EngineFacts, worker: Worker) -> list[KvEventSource]:
    """The KV-event streams to follow, one for each data-parallel rank; raises WorkerSpecError."""
    endpoint = _chosen(spec.kv_events, facts.kv_events)
    if not endpoint:
        return []
    replay = _chosen(spec.replay, facts.replay)
    start = worker.runtime_config.data_parallel_start_rank
    try:
        return [
            KvEventSource(
                worker_id=worker.worker_id,
                endpoint=dialable_endpoint(endpoint, spec.host, rank - start),
                block_size=worker.block_size,
                dp_rank=rank,
                replay=dialable_endpoint(replay, spec.host, rank - start) if replay else None,
                host=spec.host,
                topic=facts.topic.encode() if spec.kv_events is None else b"",
                expects_pairs=worker.runtime_config.enable_eagle,
            )
            for rank in worker.ranks
        ]
    except EndpointError as error:
        raise WorkerSpecError(f"worker {spec.name}: {error}") from None


def bootstrap_address(spec: WorkerSpec, facts: EngineFacts) -> tuple[str, int] | None:
    """The bootstrap address of a prefill engine, if it has one."""
    address = spec.bootstrap or facts.bootstrap
    if not address:
        return None
    host, _, port = address.rpartition(":")
    return (spec.host if host in WILDCARD else host), int(port)


def _chosen(specified: str | None, found: str | None) -> str | None:
    return found if specified is None else specified


class EngineReader:
    """Reads facts and load of engines; ``timeout_s`` for each response.

    Missing and invalid responses count as "not reported"; nothing is raised for them.
    """

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s

    async def facts(self, spec: WorkerSpec) -> EngineFacts:
        """The facts that the engine reports."""
        for kind in KINDS:
            facts = await self._described(spec, kind, first=True)
            if facts is not None and facts.kind == kind.name:
                return facts
        models = await self._read_object(f"{spec.url}/v1/models")
        facts = facts_from_models(models) if models is not None else EngineFacts()
        facts = facts_from_gauges(await self._gauges(spec.url)).or_else(facts)
        if facts.block_size is not None:
            return facts
        for kind in KINDS:
            description = await self._described(spec, kind, first=False)
            if description is not None:
                facts = description.or_else(facts)
            if facts.kind == kind.name:
                break
        return facts

    async def _described(
        self, spec: WorkerSpec, kind: EngineKind, *, first: bool
    ) -> EngineFacts | None:
        """The facts in the engine's description of itself, if it has one like those of a kind."""
        description = kind.description
        if description is None or description.first is not first:
            return None
        for path in description.paths:
            answer = await self._read_object(f"{spec.url}{path}")
            if answer is not None:
                return description.read(answer, spec.host)
        return None

    async def load(self, url: str, worker: Worker, kind: EngineKind) -> LoadReading:
        """The load of an engine, from its own report or from its metrics."""
        if kind.load is not None:
            answer = await self._read_object(f"{url}{kind.load.path}")
            return LoadReading() if answer is None else kind.load.read(answer, worker.worker_id)
        gauges = await self._gauges(url)
        total = worker.runtime_config.total_kv_blocks
        reports = tuple(
            LoadReported(worker.worker_id, rank, kv_used_blocks=used)
            for rank, gauge in gauges.items()
            if rank in worker.ranks and (used := gauge.used_blocks(total)) is not None
        )
        waiting = {
            rank: gauge.waiting for rank, gauge in gauges.items() if gauge.waiting is not None
        }
        return LoadReading(reports, waiting, bool(gauges))

    async def _gauges(self, url: str) -> Mapping[int, EngineGauges]:
        try:
            status, body = await self._upstream.get(f"{url}/metrics", self._timeout_s)
        except UpstreamFailure:
            return {}
        return read_engine_metrics(body, METRIC_NAMES) if status == 200 else {}

    async def _read_object(self, url: str) -> dict[str, Any] | None:
        try:
            status, body = await self._upstream.get(url, self._timeout_s)
            answer = msgspec.json.decode(body) if status == 200 else None
        except (UpstreamFailure, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None
