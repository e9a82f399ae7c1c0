"""Facts about an engine and its load, read over HTTP, and the Worker built from them and its spec.

Simulated engines report both in JSON of their own. For vLLM and SGLang model, length and adapters
come from the OpenAI API; the load, and vLLM's block size, blocks and ranks, from the metrics;
SGLang's from its ``/server_info`` (as 0.5.23 answers).

What an engine reports about itself is right: it replaces a typed value that differs, and
:func:`contradictions` names the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import msgspec

from dynctl.adapters.zmq.kv_event_source import EndpointError, KvEventSource, dialable_endpoint
from dynctl.base.json_fields import mapping, sequence
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.upstream import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError
from dynctl.serving.routing.config import DEFAULT_BLOCK_SIZE
from dynctl.wire.engine_metrics import EngineGauges, read_engine_metrics
from router_core import LoadReported, ModelRuntimeConfig, Role, Worker, WorkerError

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
_WILDCARD = frozenset({"*", "0.0.0.0", "[::]", "::"})  # noqa: S104 - recognised, never bound
#: Sums of the numbers of many engines stay below 64 bits.
_COUNT_MAX: Final = 2**40
#: SGLang's description of itself: the present path, then that of older releases.
_SERVER_INFO = ("/server_info", "/get_server_info")
_MOST_PORT = 65535
#: LoRA adapters of one engine; more are not routed.
_MAX_ADAPTERS = 256
#: Algorithms of speculative decoding with which SGLang caches pairs of tokens.
_EAGLE = frozenset({"EAGLE", "EAGLE3", "NEXTN"})


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that an engine reports over HTTP; empty where it reports nothing.

    ``models`` are all names of its model, the first is ``model``. ``dp`` counts data-parallel
    ranks, from ``start_rank`` on. ``total_blocks`` are those of each rank. ``engine_id`` changes
    with every restart of the process, where the engine has one. ``adapters`` are the names of LoRA
    adapters that it serves. ``sglang``: it is SGLang, by its description of itself.
    """

    model: str | None = None
    models: tuple[str, ...] = ()
    role: str | None = None
    can_prefill: bool | None = None
    block_size: int | None = None
    dp: int | None = None
    start_rank: int | None = None
    total_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    runtime_config: Mapping[str, Any] = field(default_factory=dict)
    kv_events: str | None = None
    replay: str | None = None
    topic: str = ""
    bootstrap: str | None = None
    engine_id: str | None = None
    context_length: int | None = None
    adapters: tuple[str, ...] = ()
    sglang: bool | None = None

    def or_else(self, other: EngineFacts) -> EngineFacts:
        """These facts, with those of ``other`` where nothing is reported."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        reported = {name: value for name, value in own.items() if value not in (None, "", (), {})}
        return replace(other, **reported)


def facts_from_info(info: Mapping[str, Any], host: str) -> EngineFacts:
    """The facts in a simulated engine's ``GET /engine/info``; fields of a wrong type are left out.

    KV-event endpoints count only on ``host``, the worker's own: an engine must not make the
    frontend connect to another host.
    """
    rows = info.get("kv_events")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    config = info.get("runtime_config")
    config = config if isinstance(config, dict) else {}
    model = _text(info.get("model"))
    return EngineFacts(
        model=model,
        models=() if model is None else (model,),
        role=_text(info.get("role")),
        can_prefill=info.get("can_prefill") if isinstance(info.get("can_prefill"), bool) else None,
        block_size=_count(info.get("block_size")),
        dp=_count(info.get("data_parallel_size")),
        total_blocks=_count(config.get("total_kv_blocks")),
        max_num_batched_tokens=_count(config.get("max_num_batched_tokens")),
        runtime_config=config,
        kv_events=_own(first.get("endpoint"), host),
        replay=_own(first.get("replay"), host),
        topic=_text(first.get("topic")) or "",
        engine_id=_text(info.get("engine_id")),
        adapters=_texts(info.get("lora")),
    )


def facts_from_models(answer: Mapping[str, Any]) -> EngineFacts:
    """The facts in an OpenAI ``GET /v1/models``: the model with all its names, its length if
    reported, and its LoRA adapters (vLLM: the rows with a parent)."""
    rows = answer.get("data")
    rows = [row for row in rows[:1024] if isinstance(row, dict)] if isinstance(rows, list) else []
    adapters = [row for row in rows if _text(row.get("parent")) not in (None, row.get("id"))]
    bases = [row for row in rows if row not in adapters]
    names = _texts([row.get("id") for row in bases])
    return EngineFacts(
        model=names[0] if names else None,
        models=names,
        context_length=_count(bases[0].get("max_model_len")) if bases else None,
        adapters=_texts([row.get("id") for row in adapters]) if names else (),
    )


def facts_from_gauges(gauges: Mapping[int, EngineGauges]) -> EngineFacts:
    """The facts in an engine's metrics (vLLM): block size, blocks of a rank, and the ranks.

    Where ranks differ in their blocks, the smallest number counts. Ranks count only if labels name
    them and they have no gap.
    """
    ranks = sorted(rank for rank, gauge in gauges.items() if gauge.labelled)
    whole = bool(ranks) and ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    totals = [gauge.total_blocks for gauge in gauges.values() if gauge.total_blocks]
    sizes = {gauge.block_size for gauge in gauges.values() if gauge.block_size}
    return EngineFacts(
        block_size=sizes.pop() if len(sizes) == 1 else None,
        dp=len(ranks) if whole else None,
        start_rank=ranks[0] if whole else None,
        total_blocks=min(totals) if totals else None,
    )


def facts_from_server_info(info: Mapping[str, Any], host: str) -> EngineFacts:
    """The facts in SGLang's ``GET /server_info`` (older releases: ``/get_server_info``).

    ``page_size`` is its block size. With EAGLE it caches pairs of tokens. Endpoints count only on
    ``host``, as in :func:`facts_from_info`.
    """
    algorithm = _text(info.get("speculative_algorithm")) or ""
    page, tokens = _count(info.get("page_size")), _count(info.get("max_total_num_tokens"))
    events = info.get("kv_events_config")
    try:
        events = msgspec.json.decode(events) if isinstance(events, str) else events
    except (msgspec.DecodeError, RecursionError):
        events = None
    events = events if isinstance(events, dict) and events.get("publisher") == "zmq" else {}
    mode = info.get("disaggregation_mode")
    role = mode if mode in ("prefill", "decode") else None
    port = _count(info.get("disaggregation_bootstrap_port"))
    bootstrap = f"*:{port}" if port and port <= _MOST_PORT and role == "prefill" else None
    return EngineFacts(
        role=role,
        # Its decode engines refuse a request that has no prefill engine.
        can_prefill=False if role == "decode" else None,
        block_size=page,
        dp=_count(info.get("dp_size")),
        total_blocks=tokens // page or None if page and tokens else None,
        max_num_batched_tokens=_count(info.get("max_prefill_tokens")),
        runtime_config={"enable_eagle": True} if algorithm.upper() in _EAGLE else {},
        kv_events=_own(events.get("endpoint"), host),
        replay=_own(events.get("replay_endpoint"), host),
        topic=_text(events.get("topic")) or "",
        bootstrap=bootstrap,
        sglang=True if page else None,
    )


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
    try:
        role = spec.role or (Role(facts.role) if facts.role else Role.AGGREGATED)
        can_prefill = facts.can_prefill if spec.can_prefill is None else spec.can_prefill
        return Worker(
            worker_id=spec.worker_id,
            name=spec.name,
            model=served,
            role=role,
            block_size=facts.block_size or spec.block_size or block_size or DEFAULT_BLOCK_SIZE,
            runtime_config=ModelRuntimeConfig.from_dict(values),
            can_prefill=True if can_prefill is None else can_prefill,
            kv_events=bool(_chosen(spec.kv_events, facts.kv_events)),
            endpoint=spec.url,
            device=spec.device,
            aliases=tuple(name for name in names if name != served),
            adapters=facts.adapters[:_MAX_ADAPTERS],
        )
    except (WorkerError, ValueError, TypeError) as error:
        raise WorkerSpecError(f"worker {spec.name}: {error}") from None


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
    """The bootstrap address of a prefill engine (SGLang), if it has one."""
    address = spec.bootstrap or facts.bootstrap
    if not address:
        return None
    host, _, port = address.rpartition(":")
    return (spec.host if host in _WILDCARD else host), int(port)


def load_report(worker_id: int, row: object) -> LoadReported | None:
    """A rank's load from a row of ``GET /load``; None for an invalid row."""
    if not isinstance(row, dict):
        return None

    rank = count_of(row, "dp_rank")
    if rank is None:
        return None
    return LoadReported(
        worker_id,
        rank,
        active_decode_blocks=count_of(row, "active_decode_blocks"),
        kv_used_blocks=count_of(row, "kv_used_blocks"),
        active_prefill_tokens=count_of(row, "active_prefill_tokens"),
    )


def count_of(row: Mapping[str, Any], key: str) -> int | None:
    """A whole number of an engine's response; None if missing or invalid."""
    value = row.get(key)
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COUNT_MAX
    return value if good else None


def _chosen(specified: str | None, found: str | None) -> str | None:
    return found if specified is None else specified


def _own(endpoint: object, host: str) -> str | None:
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    name = endpoint[len("tcp://") :].rpartition(":")[0]
    local = name in _LOOPBACK and host in _LOOPBACK
    return endpoint if name == host or name in _WILDCARD or local else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(values: object) -> tuple[str, ...]:
    found = values if isinstance(values, list) else []
    return tuple(dict.fromkeys(v for v in found[:1024] if isinstance(v, str) and 0 < len(v) <= 256))


def _count(value: object) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _COUNT_MAX
    return value if good else None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class LoadReading:
    """One reading. ``waiting``: rank -> requests that wait there. ``reported``: whether the engine
    reports any load."""

    reports: tuple[LoadReported, ...] = ()
    waiting: Mapping[int, int] = field(default_factory=dict)
    reported: bool = False


class EngineReader:
    """Reads facts and load of engines; ``timeout_s`` for each response.

    Missing and invalid responses count as "not reported"; nothing is raised for them.
    """

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s

    async def facts(self, spec: WorkerSpec) -> EngineFacts:
        """The facts that the engine reports."""
        info = await self._read_object(f"{spec.url}/engine/info")
        if info is not None and info.get("simulated") is True:
            return facts_from_info(info, spec.host)
        models = await self._read_object(f"{spec.url}/v1/models")
        facts = facts_from_models(models) if models is not None else EngineFacts()
        gauges = await self._gauges(spec.url)
        facts = facts_from_gauges(gauges).or_else(facts)
        if facts.block_size is not None:
            return facts
        for path in _SERVER_INFO:
            info = await self._read_object(f"{spec.url}{path}")
            if info is not None:
                return facts_from_server_info(info, spec.host).or_else(facts)
        return facts

    async def simulated_load(self, url: str, worker: Worker) -> LoadReading:
        """The load of a simulated engine."""
        load = await self._read_object(f"{url}/load")
        rows = load.get("ranks") if load is not None else None
        reports, waiting = [], {}
        for row in rows if isinstance(rows, list) else ():
            report = load_report(worker.worker_id, row)
            if report is not None:
                reports.append(report)
                waits = count_of(row, "waiting")
                if waits is not None:
                    waiting[report.dp_rank] = waits
        return LoadReading(tuple(reports), waiting, bool(reports))

    async def load(self, url: str, worker: Worker) -> LoadReading:
        """The load of any other engine, from its metrics."""
        gauges = await self._gauges(url)
        total = worker.runtime_config.total_kv_blocks
        reports = tuple(
            LoadReported(worker.worker_id, rank, kv_used_blocks=used)
            for rank, gauge in gauges.items()
            if rank in worker.ranks and (used := gauge.used_blocks(total)) is not None
        )
        waiting = {rank: one.waiting for rank, one in gauges.items() if one.waiting is not None}
        return LoadReading(reports, waiting, bool(gauges))

    async def _gauges(self, url: str) -> Mapping[int, EngineGauges]:
        try:
            status, body = await self._upstream.get(f"{url}/metrics", self._timeout_s)
        except UpstreamFailure:
            return {}
        return read_engine_metrics(body) if status == 200 else {}

    async def _read_object(self, url: str) -> dict[str, Any] | None:
        try:
            status, body = await self._upstream.get(url, self._timeout_s)
            answer = msgspec.json.decode(body) if status == 200 else None
        except (UpstreamFailure, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None
