"""What the dashboard of docs/grafana shows: rows, panels and their queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_FILTER: Final = 'instance=~"$instance"'
_MODEL: Final = f'model=~"$model",{_FILTER}'
_DOMAIN: Final = f'domain="$domain",{_FILTER}'


@dataclass(frozen=True, slots=True)
class Query:
    """``legend`` names a line by its labels, ``{{status}}``."""

    text: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """``unit`` as Grafana calls it; ``kind`` timeseries, stat or table."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    says: str = ""
    kind: str = "timeseries"
    width: int = 8


def _rate(metric: str, labels: str, by: str = "") -> str:
    total = f"sum by ({by}) " if by else "sum"
    return f"{total}(rate({metric}{{{labels}}}[$__rate_interval]))"


def _quantiles(metric: str, labels: str, *shares: float) -> tuple[Query, ...]:
    inside = _rate(f"{metric}_bucket", labels, "le")
    return tuple(
        Query(f"histogram_quantile({share}, {inside})", f"p{100 * share:g}") for share in shares
    )


def _mean(metric: str, labels: str, legend: str) -> Query:
    top, bottom = (_rate(f"{metric}_{part}", labels) for part in ("sum", "count"))
    return Query(f"{top} / {bottom}", legend)


def _domain_sum(metric: str, labels: str = "") -> str:
    inside = ",".join(text for text in (labels, _DOMAIN) if text)
    return f"sum by (value, role) ({metric}{{{inside}}})"


_BY_DOMAIN: Final = "{{value}} {{role}}"
_BY_WORKER: Final = "{{worker}} {{dp_rank}}"
_KV: Final = "dynamo_component_router_kv"

ROWS: Final[Sequence[tuple[str, tuple[Panel, ...]]]] = (
    (
        "Requests",
        (
            Panel(
                "Requests by outcome",
                (
                    Query(
                        _rate("dynamo_frontend_requests_total", _MODEL, "status, error_type"),
                        "{{status}} {{error_type}}",
                    ),
                ),
                "reqps",
            ),
            Panel(
                "In flight",
                (
                    Query(f"sum(dynamo_frontend_inflight_requests{{{_MODEL}}})", "in flight"),
                    Query(f"sum(dynamo_frontend_queued_requests{{{_MODEL}}})", "no token yet"),
                ),
            ),
            Panel(
                "Output",
                (
                    Query(
                        _rate("dynamo_frontend_output_tokens_total", _MODEL, "model"), "{{model}}"
                    ),
                ),
                "short",
                "Tokens a second.",
            ),
            Panel(
                "Time to first token",
                _quantiles("dynamo_frontend_time_to_first_token_seconds", _MODEL, 0.5, 0.95, 0.99),
                "s",
            ),
            Panel(
                "Between tokens",
                _quantiles("dynamo_frontend_inter_token_latency_seconds", _MODEL, 0.5, 0.95, 0.99),
                "s",
            ),
            Panel(
                "Prompt length",
                _quantiles("dynamo_frontend_input_sequence_tokens", _MODEL, 0.5, 0.95),
                "short",
                "Tokens.",
            ),
        ),
    ),
    (
        "Decisions",
        (
            Panel(
                "Decisions by outcome",
                (
                    Query(
                        _rate("dynctl_decisions_total", _FILTER, "stage, outcome"),
                        "{{stage}} {{outcome}}",
                    ),
                ),
                "reqps",
                "selected, or why a request was refused and on which hop. dynctl why ID explains "
                "one.",
            ),
            Panel(
                "Refused: all workers busy",
                (
                    Query(
                        _rate("dynamo_frontend_model_rejection_total", _MODEL, "model"),
                        "{{model}}",
                    ),
                ),
                "reqps",
                "Above 0: dynctl thresholds get, dynctl workers list.",
            ),
            Panel(
                "Time to decide",
                _quantiles("dynamo_router_overhead_total_ms", _FILTER, 0.5, 0.99),
                "ms",
            ),
        ),
    ),
    (
        "Domains: $domain",
        (
            Panel(
                "Workers ready",
                (Query(_domain_sum("dynctl_domain_workers_ready"), _BY_DOMAIN),),
                says="Decode at 0 where prefill is not: required refuses what is prefilled there.",
            ),
            Panel(
                "Workers not ready",
                (
                    Query(
                        f"{_domain_sum('dynctl_domain_workers')} - "
                        f"{_domain_sum('dynctl_domain_workers_ready')}",
                        _BY_DOMAIN,
                    ),
                ),
            ),
            Panel(
                "Workers busy",
                (Query(_domain_sum("dynctl_domain_workers_busy"), _BY_DOMAIN),),
                says="Over a busy threshold.",
            ),
            Panel(
                "KV blocks in use",
                (
                    Query(
                        f"{_domain_sum('dynctl_domain_active_decode_blocks')} / "
                        f"{_domain_sum('dynctl_domain_total_kv_blocks')}",
                        _BY_DOMAIN,
                    ),
                ),
                "percentunit",
                "Blocks of running requests, of those that the workers have.",
            ),
            Panel(
                "Prompt tokens that wait",
                (Query(_domain_sum("dynctl_domain_active_prefill_tokens"), _BY_DOMAIN),),
            ),
            Panel(
                "Requests in flight",
                (Query(_domain_sum("dynctl_domain_active_requests"), _BY_DOMAIN),),
            ),
            Panel(
                "Choices",
                (
                    Query(
                        _rate("dynctl_domain_decisions_total", _DOMAIN, "value, role"), _BY_DOMAIN
                    ),
                ),
                "reqps",
                width=12,
            ),
            Panel(
                "Hand-offs that left the domain",
                (
                    Query(
                        _rate(
                            "dynctl_domain_transfers_total",
                            f'transfer="crossing",{_DOMAIN}',
                            "value",
                        )
                        + " / "
                        + _rate("dynctl_domain_transfers_total", _DOMAIN, "value"),
                        "from {{value}}",
                    ),
                ),
                "percentunit",
                "0 under required. Under preferred: how often staying cost too much.",
                width=12,
            ),
        ),
    ),
    (
        "Caches",
        (
            Panel(
                "Prompt found in the chosen worker's cache",
                (_mean(f"{_KV}_hit_rate", _FILTER, "share of blocks"),),
                "percentunit",
            ),
            Panel(
                "Cached tokens: chosen and best",
                (
                    Query(_rate(f"{_KV}_selected_cached_prefix_tokens_total", _MODEL), "chosen"),
                    Query(
                        _rate(f"{_KV}_best_eligible_cached_prefix_tokens_total", _MODEL),
                        "best eligible",
                    ),
                ),
                says="Tokens a second. Apart: load outweighs the cache.",
            ),
            Panel(
                "Chosen with less cache than another",
                (
                    Query(
                        _rate("dynamo_component_router_non_max_overlap_selections_total", _FILTER),
                        "choices",
                    ),
                ),
                "reqps",
            ),
            Panel(
                "Blocks in the index",
                (
                    Query(
                        f"sum by (worker, dp_rank) (dynctl_worker_cached_blocks{{{_FILTER}}})",
                        _BY_WORKER,
                    ),
                ),
            ),
            Panel(
                "Index incomplete",
                (
                    Query(
                        f"sum by (worker, dp_rank) (dynctl_worker_index_missing{{{_FILTER}}}) > 0",
                        _BY_WORKER,
                    ),
                ),
                says="KV events were lost and not healed.",
            ),
            Panel(
                "KV events",
                (
                    Query(
                        _rate(
                            "dynamo_component_kv_cache_events_applied",
                            _FILTER,
                            "event_type, status",
                        ),
                        "{{event_type}} {{status}}",
                    ),
                ),
                "cps",
            ),
        ),
    ),
    (
        "Workers",
        (
            Panel(
                "Decode blocks",
                (
                    Query(
                        "sum by (worker_id, dp_rank) "
                        f"(dynamo_frontend_worker_active_decode_blocks{{{_FILTER}}})",
                        "{{worker_id}} {{dp_rank}}",
                    ),
                ),
            ),
            Panel(
                "Waiting prompt tokens",
                (
                    Query(
                        "sum by (worker_id, dp_rank) "
                        f"(dynamo_frontend_worker_active_prefill_tokens{{{_FILTER}}})",
                        "{{worker_id}} {{dp_rank}}",
                    ),
                ),
            ),
            Panel(
                "Ejected",
                (Query(f"dynctl_worker_ready{{{_FILTER}}} == 0", "{{worker}} {{role}}"),),
                says="Workers that do not respond to their probe, and those whose requests fail.",
            ),
            Panel(
                "Predicted and reused tokens",
                (
                    Query(
                        _rate("dynctl_worker_predicted_cached_tokens_total", _FILTER, "worker"),
                        "{{worker}} predicted",
                    ),
                    Query(
                        _rate("dynctl_worker_reported_cached_tokens_total", _FILTER, "worker"),
                        "{{worker}} reused",
                    ),
                ),
                says="Prompt tokens a second; apart: a wrong index (dynctl hits --predicted).",
            ),
            Panel(
                "Mean prefill, predicted and measured",
                tuple(
                    Query(
                        _rate(f"dynctl_prefill_{kind}_seconds_total", _FILTER, "model, role")
                        + " / "
                        + _rate("dynctl_prefills_predicted_total", _FILTER, "model, role"),
                        "{{model}} {{role}} " + kind,
                    )
                    for kind in ("predicted", "measured")
                ),
                "s",
                says="Only with a prefill load model.",
            ),
            Panel(
                "Prefill hops left out and kept",
                (
                    Query(
                        _rate("dynctl_conditional_disagg_total", _FILTER, "bypassed, reason"),
                        "left out {{bypassed}}: {{reason}}",
                    ),
                ),
                says="Only with conditional disaggregation.",
            ),
            Panel(
                "Time in the router queue",
                _quantiles("dynctl_router_queue_wait_seconds", _FILTER, 0.5, 0.99),
                "s",
            ),
            Panel(
                "Other routers of replica sync",
                (
                    Query(f"dynctl_replica_up{{{_FILTER}}}", "{{instance}} hears {{replica}}"),
                    Query(f"dynctl_replica_requests{{{_FILTER}}}", "requests of {{replica}}"),
                ),
            ),
            Panel(
                "Events of replica sync",
                (
                    Query(
                        _rate("dynctl_replica_events_total", _FILTER, "direction"), "{{direction}}"
                    ),
                    Query(
                        _rate("dynctl_replica_missed_total", _FILTER, "reason"),
                        "missed: {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Choices that serve observe compared",
                (Query(_rate("dynctl_observed_choices_total", _FILTER, "verdict"), "{{verdict}}"),),
            ),
            Panel(
                "Predictions",
                (
                    Query(
                        _rate("dynctl_worker_predictions_total", _FILTER, "worker, result"),
                        "{{worker}} {{result}}",
                    ),
                ),
            ),
            Panel(
                "Failed requests of engines",
                (
                    Query(
                        _rate("dynctl_engine_failures_total", _FILTER, "worker, kind"),
                        "{{worker}} {{kind}}",
                    ),
                ),
                says="Requests that an engine failed; most are answered by another engine.",
            ),
        ),
    ),
    (
        "The frontend itself",
        (
            Panel(
                "Conditions in force",
                (Query(f"sum by (code) (dynctl_condition{{{_FILTER}}})", "{{code}}"),),
                says="dynctl top lists them with what to do.",
            ),
            Panel(
                "Failed background tasks",
                (
                    Query(
                        _rate("dynctl_background_task_failures_total", _FILTER, "task"),
                        "{{task}}",
                    ),
                ),
                says="A failed task restarts by itself; the log has the traceback.",
            ),
            Panel(
                "Event loop",
                (
                    *_quantiles("dynamo_frontend_event_loop_delay_seconds", _FILTER, 0.99),
                    *(
                        Query(query.text, f"tokenize {query.legend}")
                        for query in _quantiles("dynamo_frontend_tokenize_seconds", _FILTER, 0.99)
                    ),
                ),
                "s",
            ),
            Panel(
                "Excused probes",
                (Query(_rate("dynctl_probes_excused_total", _FILTER, "instance"), "{{instance}}"),),
                says="Probes that failed while the frontend's own event loop was late.",
            ),
            Panel(
                "Spans for the collector",
                (Query(_rate("dynctl_trace_spans_total", _FILTER, "result"), "{{result}}"),),
                says="Only with --otlp-endpoint. Failed and dropped spans are lost.",
            ),
            Panel(
                "Tokenizer cache",
                (
                    Query(
                        f"sum by (instance) (dynctl_tokenizer_cache_bytes{{{_FILTER}}})",
                        "{{instance}}",
                    ),
                ),
                "bytes",
                says="Text between special tokens that earlier prompts had, with its token ids.",
            ),
            Panel(
                "Texts found in the tokenizer cache",
                (Query(_rate("dynctl_tokenizer_cache_total", _FILTER, "result"), "{{result}}"),),
            ),
            Panel(
                "Kept decisions",
                (Query(f"sum by (instance) (dynctl_decision_memory_plans{{{_FILTER}}})", "kept"),),
            ),
            Panel(
                "Memory of decisions",
                (
                    Query(
                        f"sum by (instance) (dynctl_decision_memory_bytes{{{_FILTER}}})",
                        "{{instance}}",
                    ),
                ),
                "bytes",
            ),
        ),
    ),
)
