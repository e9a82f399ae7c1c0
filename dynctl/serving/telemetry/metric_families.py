"""The metrics of a frontend, with Dynamo's names wherever the meaning is Dynamo's.

Names, types, help texts, labels and bucket edges of the first part are those of Dynamo 1.6.1's
frontend, so that its dashboards work unchanged; a test compares them with its captured output.
Dynamo has no equivalent of the ``dynctl_`` part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dynctl.serving.telemetry.exposition import Family, Kind

_LATENCY_FIRST = (
    0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480,
)  # fmt: skip
_LATENCY_INTER = (
    0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69, 1.2, 2.3, 4.1,
    7.4, 13, 24, 44, 80,
)  # fmt: skip
_DURATION = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
_INPUT = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
_OUTPUT = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
_LOOP = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENIZE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
_WAIT = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_HIT_RATE = tuple(0.05 * i for i in range(21))
_BLOCKS_LOST = tuple(0.25 * 2**i for i in range(16))

_MODEL = ("model",)
_REQUEST = ("endpoint", "model", "request_type")
_RANK = ("worker_id", "dp_rank", "worker_type")
_CLASS = ("model", "policy_class", "worker_type")
_DOMAIN = ("domain", "value", "role")

#: (name after ``dynamo_frontend_``, type, help, labels, bucket edges)
_FRONTEND: tuple[tuple[str, Kind, str, tuple[str, ...], tuple[float, ...]], ...] = (
    ("active_requests", "gauge", "Number of requests currently being handled by the frontend, "
     "from HTTP handler entry to response completion", _MODEL, ()),
    ("inflight_requests", "gauge", "Number of inflight requests", _MODEL, ()),
    ("queued_requests", "gauge", "Number of requests in HTTP processing queue", _MODEL, ()),
    ("disconnected_clients", "gauge", "Number of disconnected clients", (), ()),
    ("requests_started_total", "counter", "Total number of LLM requests accepted by the frontend "
     "handler", _REQUEST, ()),
    ("requests_total", "counter", "Total number of LLM requests processed",
     (*_REQUEST, "status", "error_type"), ()),
    ("model_rejection_total", "counter", "Total number of requests rejected because every worker "
     "was busy", ("endpoint", "model"), ()),
    ("router_queue_backpressure_total", "counter", "Total number of router scheduler queue "
     "backpressure rejections", ("model", "policy_class", "reason", "worker_type"), ()),
    ("router_queue_pending_requests", "gauge", "Number of requests pending in the router scheduler "
     "queue", _CLASS, ()),
    ("router_queue_pending_isl_tokens", "gauge", "Sum of isl_tokens for requests pending in the "
     "router scheduler queue", _CLASS, ()),
    ("router_queue_pending_cached_tokens", "gauge", "Estimated cached tokens for requests pending "
     "in the router scheduler queue", _CLASS, ()),
    ("request_duration_seconds", "histogram", "Duration of LLM requests", _MODEL, _DURATION),
    ("time_to_first_token_seconds", "histogram", "Time to first token in seconds", _MODEL,
     _LATENCY_FIRST),
    ("inter_token_latency_seconds", "histogram", "Inter-token latency in seconds", _MODEL,
     _LATENCY_INTER),
    ("input_sequence_tokens", "histogram", "Input sequence length in tokens", _MODEL, _INPUT),
    ("output_sequence_tokens", "histogram", "Output sequence length in tokens", _MODEL, _OUTPUT),
    ("cached_tokens", "histogram", "Number of cached tokens (prefix cache hits) per request",
     _MODEL, _INPUT),
    ("output_tokens_total", "counter", "Total number of output tokens generated (updates in "
     "real-time)", _MODEL, ()),
    ("tokenize_seconds", "histogram", "Tokenization time in preprocessor (seconds)", (), _TOKENIZE),
    ("event_loop_delay_seconds", "histogram", "Event loop delay canary: drift from 10ms sleep "
     "(seconds)", (), _LOOP),
    ("event_loop_stall_total", "counter", "Number of event loop stalls (delay > 5ms)", (), ()),
    ("model_ready", "gauge", "Whether the frontend can route at least one inference request for "
     "the model (1 = ready, 0 = not ready)", _MODEL, ()),
    ("model_context_length", "gauge", "Maximum context length in tokens for a worker serving the "
     "model", _MODEL, ()),
    ("model_kv_cache_block_size", "gauge", "KV cache block size in tokens for a worker serving the "
     "model", _MODEL, ()),
    ("model_total_kv_blocks", "gauge", "Total KV cache blocks available for a worker serving the "
     "model", _MODEL, ()),
    ("model_max_num_batched_tokens", "gauge", "Maximum number of batched tokens for a worker "
     "serving the model", _MODEL, ()),
    ("model_max_num_seqs", "gauge", "Maximum number of sequences for a worker serving the model",
     _MODEL, ()),
    ("worker_active_decode_blocks", "gauge", "Active KV cache decode blocks per worker", _RANK, ()),
    ("worker_active_prefill_tokens", "gauge", "Active prefill tokens queued per worker", _RANK, ()),
    ("worker_last_input_sequence_tokens", "gauge", "Last observed input sequence tokens per worker",
     _RANK, ()),
    ("worker_last_time_to_first_token_seconds", "gauge", "Last observed time to first token per "
     "worker (seconds)", _RANK, ()),
    ("worker_last_inter_token_latency_seconds", "gauge", "Last observed inter-token latency per "
     "worker (seconds)", _RANK, ()),
)  # fmt: skip

#: (name after ``dynamo_component_``, type, help, labels, bucket edges, has router_id)
_COMPONENT: tuple[tuple[str, Kind, str, tuple[str, ...], tuple[float, ...], bool], ...] = (
    ("kv_cache_events_applied", "counter", "Total number of KV cache events applied to index",
     ("event_type", "status"), (), False),
    ("router_requests_started_total", "counter", "Total number of requests admitted by the router "
     "scheduler", (), (), True),
    ("router_requests_total", "counter", "Total number of requests processed by the router", (),
     (), True),
    ("router_kv_hit_rate", "histogram", "Predicted KV cache hit rate at routing time (0.0-1.0)",
     (), _HIT_RATE, True),
    ("router_kv_best_eligible_cached_prefix_tokens_total", "counter", "Raw cached prefix tokens on "
     "the best eligible worker at selection time", ("model", "phase"), (), True),
    ("router_kv_selected_cached_prefix_tokens_total", "counter", "Raw cached prefix tokens on the "
     "selected worker and DP rank", ("model", "phase"), (), True),
    ("router_non_max_overlap_selections_total", "counter", "Total admitted prefill scheduler "
     "selections with less KV cache overlap than another eligible worker", ("worker_type",), (),
     True),
    ("router_overlap_blocks_lost", "histogram", "Difference in effective KV cache overlap between "
     "the highest-overlap eligible prefill worker and selected worker", ("worker_type",),
     _BLOCKS_LOST, True),
    ("router_input_sequence_tokens", "histogram", "Input sequence length in tokens observed at the "
     "router", ("model", "phase"), _INPUT, True),
    ("router_worker_registered", "gauge", "Whether the router currently has this worker/dp_rank "
     "registered (1 = registered)", ("router_worker_id", "dp_rank", "worker_type"), (), False),
)  # fmt: skip

_OWN: tuple[tuple[str, Kind, str, tuple[str, ...]], ...] = (
    ("router_queue_wait_seconds", "histogram", "Time in the router queue of the requests that "
     "waited there and were admitted", ("model", "policy_class")),
    ("decisions_total", "counter", "Routing plans by their outcome and the hop that decided it",
     ("stage", "outcome")),
    ("observed_choices_total", "counter", "Choices of a live Dynamo's frontends that serve observe "
     "saw: as_predicted, differs, not_predicted, refused", ("source", "verdict")),
    ("conditional_disagg_total", "counter", "Verdicts of conditional disaggregation: whether the "
     "prefill hop was left out, and why", ("bypassed", "reason")),
    ("worker_ready", "gauge", "1 = the worker responds to its probe, 0 = it is ejected",
     ("worker", "worker_id", "role")),
    ("worker_cached_blocks", "gauge", "Blocks in a rank's index (estimated without KV events)",
     ("worker", "dp_rank", "role")),
    ("worker_index_missing", "gauge", "1 = KV events of the rank were lost and not recovered",
     ("worker", "dp_rank", "role")),
    ("worker_predictions_total", "counter", "Requests whose engine reported its reused prompt "
     "tokens: predicted to the block (hit) or not (miss)", ("worker", "role", "result")),
    ("worker_predicted_cached_tokens_total", "counter", "Of these requests, prompt tokens that the "
     "router expected to be cached", ("worker", "role")),
    ("worker_reported_cached_tokens_total", "counter", "Of these requests, prompt tokens that the "
     "engine reused", ("worker", "role")),
    ("prefills_predicted_total", "counter", "Prefills that were measured, and whose duration the "
     "prefill load model had predicted", ("model", "role")),
    ("prefill_predicted_seconds_total", "counter", "Of these prefills, their predicted duration",
     ("model", "role")),
    ("prefill_measured_seconds_total", "counter", "Of these prefills, their duration: to the first "
     "output, from dispatch or from the first output before it on that rank", ("model", "role")),
    ("condition", "gauge", "1 = the condition holds for the subject", ("code", "subject")),
    ("background_task_failures_total", "counter", "Failures of background tasks, which restart by "
     "themselves", ("task",)),
    ("engine_failures_total", "counter", "Requests that an engine failed: refused, connect, reset, "
     "vanished (its host does not respond), timeout, status, protocol (not the answer of an "
     "engine), ejected", ("worker", "kind")),
    ("probes_excused_total", "counter", "Failed probes that did not count, because the frontend's "
     "own event loop was late", ()),
    ("replica_up", "gauge", "1 = another router of replica sync is heard, and its load is complete",
     ("replica",)),
    ("replica_requests", "gauge", "Requests of another router that count as load here",
     ("replica",)),
    ("replica_events_total", "counter", "Load events sent to other routers or received from them: "
     "add, prefill_done, free", ("direction", "event")),
    ("replica_missed_total", "counter", "Load events without effect: lost (messages that never "
     "arrived), dropped (own queue full), malformed, unknown_worker, early_free (before its add), "
     "too_many (over a bound), unknown_kind", ("reason",)),
    ("decision_memory_bytes", "gauge", "Estimated bytes of the decisions kept", ()),
    ("decision_memory_plans", "gauge", "Plans kept in the decision memory", ()),
    ("tokenizer_cache_bytes", "gauge", "Bytes of text and token ids that the tokenizer keeps", ()),
    ("tokenizer_cache_total", "counter", "Texts looked up in the tokenizer's cache",
     ("result",)),
    ("trace_spans_total", "counter", "Spans for the collector of --otlp-endpoint: exported, failed "
     "(not taken), dropped (too many waited)", ("result",)),
    ("domain_workers", "gauge", "Workers that publish the domain value", _DOMAIN),
    ("domain_workers_ready", "gauge", "Of them, workers that respond to their probe", _DOMAIN),
    ("domain_workers_busy", "gauge", "Of them, workers over a busy threshold", _DOMAIN),
    ("domain_active_requests", "gauge", "Requests in flight on them through this router", _DOMAIN),
    ("domain_active_prefill_tokens", "gauge", "Prompt tokens waiting on them for their first "
     "output", _DOMAIN),
    ("domain_active_decode_blocks", "gauge", "KV blocks of running requests on them", _DOMAIN),
    ("domain_total_kv_blocks", "gauge", "KV blocks of all their ranks, if published",
     _DOMAIN),
    ("domain_decisions_total", "counter", "Hops that chose a worker of the domain value", _DOMAIN),
    ("domain_transfers_total", "counter", "Prefill to decode hand-offs that left the prefill "
     "worker's domain value (crossing) or stayed in it (local)", ("domain", "value", "transfer")),
)  # fmt: skip


def families(
    *, router_id: int, namespace: str = "dynamo", component: str = "backend"
) -> Mapping[str, Family]:
    """Every family by its full name. ``router_id`` (u64) is this process among the routers."""
    families = list(_families(router_id, namespace, component))
    return {family.name: family for family in families}


def _families(router_id: int, namespace: str, component: str) -> Iterator[Family]:
    router = {"router_id": str(router_id)}
    # Dynamo labels a process's own counts with its id, in hex, as worker_id.
    process = {
        "dynamo_component": component,
        "dynamo_namespace": namespace,
        "worker_id": f"{router_id:x}",
    }
    for name, kind, text, labels, bounds in _FRONTEND:
        yield Family(f"dynamo_frontend_{name}", kind, text, labels, None, bounds)
    # Its parts (hashing, matching, scheduling) are not timed separately here.
    overhead = "Total routing overhead per request in milliseconds"
    edges = _tripling(0.01, 17)
    yield Family("dynamo_router_overhead_total_ms", "histogram", overhead, (), router, edges)
    for name, kind, text, labels, bounds, has_router in _COMPONENT:
        constant = {**process, **router} if has_router else process
        yield Family(f"dynamo_component_{name}", kind, text, labels, constant, bounds)
    uptime = "Total uptime of the DistributedRuntime in seconds"
    hex_id = {"worker_id": process["worker_id"]}
    yield Family("dynamo_component_uptime_seconds", "gauge", uptime, (), hex_id)
    for name, kind, text, labels in _OWN:
        bounds = _WAIT if kind == "histogram" else ()
        yield Family(f"dynctl_{name}", kind, text, labels, None, bounds)


def _tripling(first: float, count: int) -> tuple[float, ...]:
    # By repeated multiplication, since queries compare the edges as text.
    edges = [first]
    while len(edges) < count:
        edges.append(edges[-1] * 3)
    return tuple(edges)
