"""GET /metrics: Prometheus text, with vLLM's names for metrics of the same meaning.

Written by hand: for a dozen numbers, an engine process needs no client library.
"""

from dynctl.simulation.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(engine: Engine) -> str:
    """The metrics as text, one sample for each rank (label `engine`, as in vLLM)."""
    config = engine.config
    schedulers = [rank.scheduler for rank in engine.ranks]
    series: list[tuple[str, str, str, list[float]]] = [
        (
            "vllm:num_requests_running",
            "gauge",
            "Requests in the running batch.",
            [len(s.running) for s in schedulers],
        ),
        (
            "vllm:num_requests_waiting",
            "gauge",
            "Requests waiting to be scheduled.",
            [len(s.waiting) for s in schedulers],
        ),
        (
            "vllm:kv_cache_usage_perc",
            "gauge",
            "KV blocks held by requests, 1 = all of them.",
            [s.cache.held_blocks / s.cache.total_blocks for s in schedulers],
        ),
        (
            "vllm:prefix_cache_queries_total",
            "counter",
            "Prompt tokens looked up in the prefix cache.",
            [s.queries for s in schedulers],
        ),
        (
            "vllm:prefix_cache_hits_total",
            "counter",
            "Prompt tokens found in the prefix cache.",
            [s.hits for s in schedulers],
        ),
        (
            "vllm:external_prefix_cache_hits_total",
            "counter",
            "Prompt tokens loaded from host memory or disk.",
            [s.lower_hits for s in schedulers],
        ),
        (
            "vllm:num_preemptions_total",
            "counter",
            "Requests preempted because no KV blocks were free.",
            [s.preemptions for s in schedulers],
        ),
        (
            "vllm:prompt_tokens_total",
            "counter",
            "Prompt tokens accepted.",
            [s.prompt_tokens for s in schedulers],
        ),
        (
            "vllm:generation_tokens_total",
            "counter",
            "Tokens generated.",
            [s.generation_tokens for s in schedulers],
        ),
        (
            "dynctl_engine_active_prefill_tokens",
            "gauge",
            "Prompt tokens accepted and not computed yet.",
            [s.active_prefill_tokens for s in schedulers],
        ),
    ]
    lines: list[str] = []
    model = _escape(config.model)
    for name, kind, help_text, values in series:
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{engine="{rank}",model_name="{model}"}} {_number(value)}'
            for rank, value in enumerate(values)
        ]
    lines += [
        "# HELP vllm:cache_config_info Settings of the KV cache.",
        "# TYPE vllm:cache_config_info gauge",
    ]
    lines += [
        f'vllm:cache_config_info{{block_size="{config.block_size}",enable_prefix_caching="True",'
        f'engine="{rank}",num_gpu_blocks="{config.total_blocks}"}} 1'
        for rank in range(len(schedulers))
    ]
    lines += [
        "# HELP dynctl_engine_held_handoffs Prefills whose KV blocks wait to be pulled.",
        "# TYPE dynctl_engine_held_handoffs gauge",
        f"dynctl_engine_held_handoffs {len(engine.held)}",
        "# HELP dynctl_engine_expired_handoffs_total Hand-offs freed without a pull.",
        "# TYPE dynctl_engine_expired_handoffs_total counter",
        f"dynctl_engine_expired_handoffs_total {engine.held.expired}",
    ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
