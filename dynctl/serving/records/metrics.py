"""The metrics of ``/metrics``: counters updated by requests, gauges computed on a scrape.

A request must not spend more than a few microseconds here; everything that can be computed from the
router's state is computed on a scrape.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Final, NamedTuple

from aiohttp import web

from dynctl.base.tasks import SLICE
from dynctl.documents.audit import AuditRow
from dynctl.documents.decisions import Choice
from dynctl.documents.fleet_load import Traffic, ended_requests
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.records.domain_metrics import DomainCounters, domain_gauges
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.exposition import (
    CONTENT_TYPE,
    Counter,
    Histogram,
    LabelValues,
    Observation,
    samples,
)
from dynctl.serving.telemetry.metric_families import families
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import Decision, RoutingPlan, RoutingRequest, Worker, WorkerWithDpRank

UNKNOWN_MODEL = "unknown_model"
#: Result code of an applied KV event -> Dynamo's name.
EVENT_STATUS = {
    "ok": "ok",
    "unknown_parent": "parent_block_not_found",
    "awaits_parent": "parent_block_not_found",
    "ignored_tier": "unsupported_residency_domain",
    "hash_conflict": "invalid_block",
    "columns_differ": "invalid_block",
    "not_a_hash": "invalid_block",
}
#: Counters that other parts keep; they are read on a scrape.
COUNTED_ELSEWHERE = frozenset(
    {
        "dynamo_component_kv_cache_events_applied",
        "dynctl_background_task_failures_total",
        "dynctl_engine_failures_total",
        "dynctl_prefill_measured_seconds_total",
        "dynctl_prefill_predicted_seconds_total",
        "dynctl_prefills_predicted_total",
        "dynctl_probes_excused_total",
        "dynctl_replica_events_total",
        "dynctl_replica_missed_total",
        "dynctl_tokenizer_cache_total",
        "dynctl_trace_spans_total",
        "dynctl_worker_predictions_total",
        "dynctl_worker_predicted_cached_tokens_total",
        "dynctl_worker_reported_cached_tokens_total",
        "dynamo_frontend_router_queue_backpressure_total",
    }
)
#: Kind of a limit of the router queue -> Dynamo's reason; it has no name for the last two.
BACKPRESSURE = {
    "requests": "request_limit",
    "raw_isl_tokens": "raw_isl_token_limit",
    "cached_tokens": "cached_token_limit",
    "total_requests": "total_request_limit",
    "wait_seconds": "wait_limit",
}
#: Outcomes of plans that are refused because of load.
OVERLOADS = ("all_busy", "queue_full", "queue_timeout")
#: Seconds of writing after which a scrape yields to the event loop.
SLICE_S = 0.0005
#: Longest drift of the canary that is not a stall.
STALL_S = 0.005
CANARY_S = 0.010


#: Dynamo's name of a role or hop: aggregated workers are ``decode`` there.
_WORKER_TYPES: Final = {"prefill": "prefill", "decode": "decode", "aggregated": "decode"}
#: Labels of requests by whether they stream, and of what only the hop of the prompt has.
_KINDS = ("unary", "stream")
_PREFILL = ("prefill",)


class _Counters(NamedTuple):
    """The counters that each request adds to, so that none is looked up by its name."""

    started: Counter
    ended: Counter
    hops: Counter
    routed: Counter
    decisions: Counter
    output_tokens: Counter
    cached_best: Counter
    cached_selected: Counter
    not_the_best: Counter


#: Their names, in the order of the fields.
_COUNTED = (
    "dynamo_frontend_requests_started_total",
    "dynamo_frontend_requests_total",
    "dynamo_component_router_requests_started_total",
    "dynamo_component_router_requests_total",
    "dynctl_decisions_total",
    "dynamo_frontend_output_tokens_total",
    "dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total",
    "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
    "dynamo_component_router_non_max_overlap_selections_total",
)


class _Histograms(NamedTuple):
    """The histograms of each request. ``prompt`` has a label for the hop; ``prompt_of_client`` does
    not."""

    first_token: Histogram
    gap: Histogram
    duration: Histogram
    tokenize: Histogram
    prompt_of_client: Histogram
    cached: Histogram
    output: Histogram
    prompt: Histogram
    hit_rate: Histogram
    blocks_lost: Histogram
    route_ms: Histogram


_SEEN = (
    "dynamo_frontend_time_to_first_token_seconds",
    "dynamo_frontend_inter_token_latency_seconds",
    "dynamo_frontend_request_duration_seconds",
    "dynamo_frontend_tokenize_seconds",
    "dynamo_frontend_input_sequence_tokens",
    "dynamo_frontend_cached_tokens",
    "dynamo_frontend_output_sequence_tokens",
    "dynamo_component_router_input_sequence_tokens",
    "dynamo_component_router_kv_hit_rate",
    "dynamo_component_router_overlap_blocks_lost",
    "dynamo_router_overhead_total_ms",
)


class Metrics(ServiceObserver):
    """The metrics of one process.

    ``router_id`` (u64) identifies the router among others.
    """

    def __init__(
        self,
        service: RoutingService,
        *,
        router_id: int,
        memory: DecisionMemory | None = None,
        audit: Callable[[], list[AuditRow]] = list,
        tokenizer_cache: Callable[[], Mapping[str, int]] = dict,
        namespace: str = "dynamo",
        component: str = "backend",
    ) -> None:
        self._service = service
        self._memory = memory
        self._audit = audit
        self._tokenizer_cache = tokenizer_cache
        self.families = families(router_id=router_id, namespace=namespace, component=component)
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, family in self.families.items():
            if family.kind == "histogram":
                self._histograms[name] = Histogram(family)
            elif family.kind == "counter" and name not in COUNTED_ELSEWHERE:
                self._counters[name] = Counter(family)
        self._counted = _Counters(*[self._counters[name] for name in _COUNTED])
        self._seen = _Histograms(*[self._histograms[name] for name in _SEEN])
        self._open: dict[str, RequestRecord] = {}
        self._disconnected = 0
        self._last_isl: dict[tuple[WorkerWithDpRank, str], float] = {}
        self._last_ttft: dict[tuple[WorkerWithDpRank, str], float] = {}
        self._last_itl: dict[tuple[WorkerWithDpRank, str], float] = {}
        self._domains = DomainCounters(
            self._counters["dynctl_domain_decisions_total"],
            self._counters["dynctl_domain_transfers_total"],
        )
        self._counters["dynamo_frontend_event_loop_stall_total"].inc((), 0)
        for name in ("router_requests_started_total", "router_requests_total"):
            self._counters[f"dynamo_component_{name}"].inc((), 0)

    # -- what happened ---------------------------------------------------------------------

    def on_received(self, record: RequestRecord) -> None:
        """A request arrived. If this hook was not called, the next one calls it."""
        if record.decision_id in self._open:
            return
        self._open[record.decision_id] = record
        labels = (record.endpoint, self._model(record), _KINDS[record.stream])
        self._counted.started.rows[labels] += 1

    def on_hop(self, decision: Decision, request: RoutingRequest, record: RequestRecord) -> None:
        if record.decision_id not in self._open:
            self.on_received(record)
        winner = decision.winner
        if winner is None:
            return
        counts, stage, seen = self._counted, decision.stage, self._seen
        counts.hops.rows[()] += 1
        labels = (decision.model, stage)
        self._last_isl[decision.refs[winner], _WORKER_TYPES[stage]] = decision.isl_tokens
        worker = decision.workers[winner]
        if worker.runtime_config.topology_domains:
            self._domains.chosen(worker)
        prompt = (seen.prompt, decision.isl_tokens, labels)
        inputs = decision.inputs
        if stage == "decode" or inputs is None or not decision.overlap_modelled:
            Histogram.observe_each(prompt)
            return
        best, mine = inputs.most_overlap, inputs.overlap_blocks[winner]
        size = decision.block_size
        blocks = -(-decision.isl_tokens // size)
        counts.cached_best.rows[labels] += best * size
        counts.cached_selected.rows[labels] += mine * size
        counts.not_the_best.rows[_PREFILL] += mine < best
        Histogram.observe_each(
            prompt,
            (seen.hit_rate, mine / blocks if blocks else 0.0, ()),
            (seen.blocks_lost, best - mine, _PREFILL),
        )

    def on_decision(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> None:
        if record.decision_id not in self._open:
            self.on_received(record)
        final = plan.refusal or plan.decode or plan.prefill
        if final is None:
            return
        self._counted.decisions.rows[final.stage, final.outcome] += 1
        if plan.bypass is not None:
            verdict = (str(plan.bypass.bypassed).lower(), plan.bypass.reason)
            self._counters["dynctl_conditional_disagg_total"].inc(verdict)
        if final.outcome in OVERLOADS:
            labels = (record.endpoint, self._model(record))
            self._counters["dynamo_frontend_model_rejection_total"].inc(labels)
        if record.route_s:
            self._seen.route_ms.observe(1000 * record.route_s)
        if plan.prefill is not None:
            self._domains.plan(plan)

    def on_choice(self, choice: Choice, verdict: str) -> None:
        """A Dynamo frontend chose, as `serve observe` saw it."""
        self._counters["dynctl_observed_choices_total"].inc((choice.source, verdict))
        for rank in (choice.prefill, choice.decode):
            if rank is not None:
                self._domains.chosen(rank.worker)
        if choice.prefill is not None and choice.decode is not None:
            self._domains.transfer(choice.prefill.worker, choice.decode.worker)

    def on_first_token(self, record: RequestRecord) -> None:
        if record.first_token_at is None:
            return
        waited, plan = record.first_token_at - record.received_at, record.plan
        hop = None if plan is None else plan.prefill or plan.decode
        # The model is known where a worker was chosen.
        chosen = hop is not None and hop.winner is not None
        model = record.model if chosen else self._model(record)
        self._seen.first_token.observe(waited, (model,))
        if hop is not None and hop.winner is not None:
            self._last_ttft[hop.refs[hop.winner], _WORKER_TYPES[hop.stage]] = waited

    def on_finished(self, record: RequestRecord) -> None:
        if self._open.pop(record.decision_id, None) is None:
            self.on_received(record)
            del self._open[record.decision_id]
        counts, seen, plan = self._counted, self._seen, record.plan
        routed = plan is not None and plan.refusal is None
        # The model is known where there is a plan.
        name = record.model if routed else self._model(record)
        model = (name,)
        error = "" if record.outcome == "success" else error_type(record)
        kind, status = _KINDS[record.stream], "error" if error else "success"
        counts.ended.rows[record.endpoint, name, kind, status, error] += 1
        if record.outcome == "cancelled":
            self._disconnected += 1
        if routed:
            counts.routed.rows[()] += 1
        if record.queued_s is not None and plan is not None:
            queue = plan.first.queue
            labels = (plan.model, queue.policy_class if queue is not None else "")
            self._histograms["dynctl_router_queue_wait_seconds"].observe(record.queued_s, labels)
        ended = record.finished_at if record.finished_at is not None else self._service.clock()
        observations: list[Observation] = [(seen.duration, ended - record.received_at, model)]
        if record.tokenize_s:
            observations.append((seen.tokenize, record.tokenize_s, ()))
        if plan is not None and record.answered:
            observations += self._observe_answer(record, plan, model, ended)
        Histogram.observe_each(*observations)

    def _observe_answer(
        self, record: RequestRecord, plan: RoutingPlan, model: tuple[str], ended: float
    ) -> list[Observation]:
        """Count the tokens of an answered request; returns what is to be observed of its prompt."""
        seen, tokens = self._seen, record.output_tokens
        observations: list[Observation] = [
            (seen.prompt_of_client, record.isl_tokens, model),
            (seen.output, tokens, model),
        ]
        hop = plan.prefill or plan.decode
        if hop is not None and hop.overlap_modelled:
            observations.append((seen.cached, hop.cached_tokens, model))
        self._counted.output_tokens.rows[model] += tokens
        if record.first_token_at is not None and tokens > 1 and record.output_events > 1:
            # The mean, once for each gap: the chunks of a stream are not timed one by one.
            mean = (ended - record.first_token_at) / (tokens - 1)
            seen.gap.observe(mean, model, tokens - 1)
            final = plan.final
            if final.winner is not None:
                self._last_itl[final.refs[final.winner], _WORKER_TYPES[final.stage]] = mean
        return observations

    async def watch_event_loop(self) -> None:
        """The canary: sleeps 10 ms repeatedly and records the delay of its wake-ups."""
        delay = self._histograms["dynamo_frontend_event_loop_delay_seconds"]
        stalls = self._counters["dynamo_frontend_event_loop_stall_total"]
        while True:
            asleep = time.perf_counter()
            await asyncio.sleep(CANARY_S)
            late = max(0.0, time.perf_counter() - asleep - CANARY_S)
            delay.observe(late)
            if late > STALL_S:
                stalls.inc()
                self._service.loop_was_late(late)

    # -- reading ---------------------------------------------------------------------

    def transfers(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(domain, value) -> hand-offs within it, and out of it."""
        return self._domains.transfers()

    def traffic(self) -> Traffic:
        """What clients got since the start."""
        ended: dict[str, float] = defaultdict(float)
        for labels, number in self._counters["dynamo_frontend_requests_total"].rows.items():
            ended[labels[-1]] += number
        totals = ended_requests(ended)
        times = self._histograms["dynamo_frontend_time_to_first_token_seconds"]
        rows = [row[:-1] for row in times.rows.values()]
        prompts = self._histograms["dynamo_component_router_input_sequence_tokens"].rows
        cached = self._counters["dynamo_component_router_kv_selected_cached_prefix_tokens_total"]
        return Traffic(
            totals.requests,
            totals.errors,
            totals.refused,
            times.family.bounds,
            tuple(int(sum(column)) for column in zip(*rows, strict=True)),
            int(sum(row[-1] for labels, row in prompts.items() if labels[1] != "decode")),
            int(sum(cached.rows.values())),
            totals.clients,
        )

    async def handle(self, request: web.Request) -> web.Response:
        """``GET /metrics``. Written in slices, so that streams do not wait for a scrape."""
        await self._service.refresh_health(1.0)
        parts, began = [], time.perf_counter()
        for part in self.parts():
            parts.append(part.encode())
            if time.perf_counter() - began > SLICE_S:
                await asyncio.sleep(0)
                began = time.perf_counter()
        return web.Response(body=b"".join(parts), headers={"Content-Type": CONTENT_TYPE})

    def render(self) -> str:
        """The whole exposition."""
        return "".join(self.parts())

    def parts(self) -> Iterator[str]:
        """The text of each family, in any order; that of many samples in pieces."""
        self._service.advance()
        # A list: a family may get its first sample between two slices.
        written: list[Counter | Histogram] = [*self._counters.values()]
        written += self._histograms.values()
        for text in written:
            yield text.text()
        yield from self._request_gauges()
        yield from self._model_gauges()
        yield from self._worker_gauges()
        yield from self._queue()
        domains = yield from domain_gauges(self._service.router)
        for name, rows in domains.items():
            yield self._text(name, rows.items())

    def _replica_samples(self) -> Iterator[str]:
        sharing = self._service.sharing
        rows = [] if sharing is None else sharing.rows()
        up = [((row.name,), float(row.state == "in step")) for row in rows]
        yield self._text("dynctl_replica_up", up)
        held = [((row.name,), float(row.requests)) for row in rows]
        yield self._text("dynctl_replica_requests", held)
        events = {} if sharing is None else sharing.events
        yield self._text("dynctl_replica_events_total", events.items())
        missed = {} if sharing is None else sharing.missed
        by_reason = [((reason,), count) for reason, count in missed.items()]
        yield self._text("dynctl_replica_missed_total", by_reason)

    def _pieces(self, name: str, rows: Iterable[tuple[LabelValues, float]]) -> Iterator[str]:
        """The text of a family with a sample for each worker. The rows do not change meanwhile.

        They are made in slices too: a thousand tuples at once are ten garbage collections.
        """
        left = iter(rows)
        yield self._text(name, ())
        header = len(self.families[name].header())
        while part := list(islice(left, SLICE)):
            yield self._text(name, part)[header:]

    def _text(self, name: str, rows: Iterable[tuple[LabelValues, float]]) -> str:
        return samples(self.families[name], rows)

    def _request_gauges(self) -> Iterator[str]:
        models = self._service.models()
        active = Tally({(model,): 0 for model in models})
        queued = Tally(active)
        for record in self._open.values():
            model = (self._model(record),)
            active[model] += 1
            queued[model] += record.first_token_at is None
        for name in ("active_requests", "inflight_requests"):
            yield self._text(f"dynamo_frontend_{name}", active.items())
        yield self._text("dynamo_frontend_queued_requests", queued.items())
        yield self._text("dynamo_frontend_disconnected_clients", [((), self._disconnected)])
        uptime = self._service.clock() - self._service.started_at
        yield self._text("dynamo_component_uptime_seconds", [((), uptime)])
        events: Tally[LabelValues] = Tally()
        for (kind, code), count in self._service.kv_events.items():
            events[kind, EVENT_STATUS.get(code, "block_not_found")] += count
        yield self._text("dynamo_component_kv_cache_events_applied", events.items())
        failures = {(task,): n for task, n in self._service.tasks.failures.items()}
        yield self._text("dynctl_background_task_failures_total", failures.items())
        excused: list[tuple[LabelValues, float]] = [((), self._service.probes_excused)]
        yield self._text("dynctl_probes_excused_total", excused)
        yield from self._replica_samples()
        failed = list(self._service.engine_failures.items())
        yield from self._pieces("dynctl_engine_failures_total", failed)
        self._service.health(1.0)
        each = {(condition.code, condition.subject): 1.0 for condition in self._service.conditions}
        yield from self._pieces("dynctl_condition", each.items())
        if self._memory is not None:
            yield self._text("dynctl_decision_memory_bytes", [((), self._memory.size)])
            yield self._text("dynctl_decision_memory_plans", [((), len(self._memory))])
        traces = self._service.traces
        spans = {} if traces is None else traces.export.counts()
        yield self._text(
            "dynctl_trace_spans_total", [((name,), number) for name, number in spans.items()]
        )
        cache = self._tokenizer_cache()
        yield self._text("dynctl_tokenizer_cache_bytes", [((), cache.get("bytes", 0))])
        lookups = {("hit",): cache.get("hits", 0), ("miss",): cache.get("misses", 0)}
        yield self._text("dynctl_tokenizer_cache_total", lookups.items())

    def _model_gauges(self) -> Iterator[str]:
        registry = self._service.router.registry
        first: dict[str, Worker] = {}
        for worker in registry:
            first.setdefault(worker.model, worker)
        served = {
            model_health.model
            for model_health in self._service.health(1.0).models
            if not model_health.missing
        }
        ready = {(model,): float(model in served) for model in first}
        yield self._text("dynamo_frontend_model_ready", ready.items())
        fields: tuple[tuple[str, Callable[[Worker], int | None]], ...] = (
            ("context_length", lambda w: w.runtime_config.context_length),
            ("kv_cache_block_size", lambda w: w.block_size),
            ("total_kv_blocks", lambda w: w.runtime_config.total_kv_blocks),
            ("max_num_batched_tokens", lambda w: w.runtime_config.max_num_batched_tokens),
            ("max_num_seqs", lambda w: w.runtime_config.max_num_seqs),
        )
        for name, read in fields:
            rows = {(model,): float(read(worker) or 0) for model, worker in first.items()}
            yield self._text(f"dynamo_frontend_model_{name}", rows.items())

    def _worker_gauges(self) -> Iterator[str]:
        router = self._service.router
        registry, load, fresh = router.registry, router.load, router.freshness
        # All that changes is read before the first piece: workers may be lost between two.
        workers = list(registry)
        names = [str(rank) for worker in workers for rank in worker.ranks]
        holders = [worker for worker in workers for _ in worker.ranks]
        slots = [slot for worker in workers for slot in registry.slots(worker.worker_id)]
        decode = [load.decode_blocks[slot] for slot in slots]
        prefill = [load.prefill_tokens[slot] for slot in slots]
        cached = [router.cached_blocks(slot) for slot in slots]
        missing = [float(fresh[slot].index_state == "gapped") for slot in slots]
        ready = [float(registry.unavailable_reason(worker.worker_id) is None) for worker in workers]
        yield ""

        def each(values: Iterable[float]) -> Iterator[tuple[LabelValues, float]]:
            for worker, rank, value in zip(holders, names, values, strict=False):
                yield (str(worker.worker_id), rank, _WORKER_TYPES[worker.role]), value

        def each_by_name(values: Sequence[float]) -> Iterator[tuple[LabelValues, float]]:
            for worker, rank, value in zip(holders, names, values, strict=True):
                yield (worker.name, rank, worker.role.value), value

        name = "dynamo_frontend_worker_active_{}"
        yield from self._pieces(name.format("decode_blocks"), each(decode))
        yield from self._pieces(name.format("prefill_tokens"), each(prefill))
        yield from self._pieces("dynamo_component_router_worker_registered", each(repeat(1.0)))
        yield from self._pieces("dynctl_worker_cached_blocks", each_by_name(cached))
        yield from self._pieces("dynctl_worker_index_missing", each_by_name(missing))
        ready_rows = (
            ((worker.name, str(worker.worker_id), worker.role.value), value)
            for worker, value in zip(workers, ready, strict=True)
        )
        yield from self._pieces("dynctl_worker_ready", ready_rows)
        yield from self._predictions()
        times = self._service.prefill_times.rows
        for place, name in enumerate(
            ("prefills_predicted", "prefill_predicted_seconds", "prefill_measured_seconds")
        ):
            yield self._text(f"dynctl_{name}_total", [(k, row[place]) for k, row in times.items()])
        yield from self._last_values()

    def _last_values(self) -> Iterator[str]:
        """Of the last request of each worker; of workers that are gone no longer."""
        for name, last in (
            ("input_sequence_tokens", self._last_isl),
            ("time_to_first_token_seconds", self._last_ttft),
            ("inter_token_latency_seconds", self._last_itl),
        ):
            for key in [
                k for k in last if self._service.router.registry.get(k[0].worker_id) is None
            ]:
                del last[key]
            rows = (
                ((str(ref.worker_id), str(ref.dp_rank), kind), value)
                for (ref, kind), value in zip([*last], [*last.values()], strict=True)
            )
            yield from self._pieces(f"dynamo_frontend_worker_last_{name}", rows)

    def _queue(self) -> Iterator[str]:
        """What waits in the router queue; the classes of a model with none are 0."""
        router, admission = self._service.router, self._service.admission
        pending: dict[str, dict[LabelValues, float]] = {
            name: {} for name in ("requests", "isl_tokens", "cached_tokens")
        }
        for model in self._service.models():
            kind = _WORKER_TYPES[router.stages(model)[0]]
            for policy in router.policy_classes.table(model, router.config).classes:
                stats = router.queue.stats(model, policy.name)
                for name, rows in pending.items():
                    rows[model, policy.name, kind] = getattr(stats, name)
        for name, rows in pending.items():
            yield self._text(f"dynamo_frontend_router_queue_pending_{name}", rows.items())
        refused: Tally[LabelValues] = Tally()
        for (model, policy_class, stage, limit), count in admission.turned_away.items():
            refused[model, policy_class, BACKPRESSURE[limit], _WORKER_TYPES[stage]] += count
        yield self._text("dynamo_frontend_router_queue_backpressure_total", refused.items())

    def _predictions(self) -> Iterator[str]:
        rows = self._audit()
        compared: dict[LabelValues, float] = {}
        for row in rows:
            compared[row.worker, row.role, "hit"] = row.hits
            compared[row.worker, row.role, "miss"] = row.requests - row.hits
        yield from self._pieces("dynctl_worker_predictions_total", compared.items())
        for name in ("predicted", "reported"):
            values = {(row.worker, row.role): getattr(row, f"{name}_tokens") for row in rows}
            yield from self._pieces(f"dynctl_worker_{name}_cached_tokens_total", values.items())

    def _model(self, record: RequestRecord) -> str:
        # Clients choose the name: an unknown one must not create a series.
        if record.plan is not None and record.plan.refusal is None:
            return record.model
        known = self._service.router.registry.model(record.model)
        return record.model if known else UNKNOWN_MODEL


def error_type(record: RequestRecord) -> str:
    """Dynamo's ``error_type`` of a finished request; empty for a success."""
    match record.outcome:
        case "success":
            return ""
        case "cancelled":
            return "cancelled"
        case "client_error":
            return "not_found" if record.status == 404 else "validation"
        case "refused":
            final = None if record.plan is None else record.plan.final
            overload = final is not None and final.outcome in OVERLOADS
            return "overload" if overload else "unavailable"
        case _:
            return "internal"
