"""GET /metrics: Prometheus text, with vLLM's names for metrics of the same meaning.

Written by hand: for a dozen numbers, an engine process needs no client library.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Final

from dynctl.simulation.engine.engine import Engine
from dynctl.simulation.engine.scheduler import RankScheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


#: Name, kind, help and value of each metric of a rank.
_SERIES: Final[tuple[tuple[str, str, str, Callable[[RankScheduler], float]], ...]] = (
    (
        "vllm:num_requests_running",
        "gauge",
        "Requests in the running batch.",
        lambda rank: len(rank.running),
    ),
    (
        "vllm:num_requests_waiting",
        "gauge",
        "Requests waiting to be scheduled.",
        lambda rank: len(rank.waiting),
    ),
    (
        "vllm:kv_cache_usage_perc",
        "gauge",
        "KV blocks held by requests, 1 = all of them.",
        lambda rank: rank.cache.held_blocks / rank.cache.total_blocks,
    ),
    (
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        attrgetter("queries"),
    ),
    (
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache.",
        attrgetter("hits"),
    ),
    (
        "vllm:external_prefix_cache_hits_total",
        "counter",
        "Prompt tokens loaded from host memory or disk.",
        attrgetter("lower_hits"),
    ),
    (
        "vllm:num_preemptions_total",
        "counter",
        "Requests preempted because no KV blocks were free.",
        attrgetter("preemptions"),
    ),
    (
        "vllm:prompt_tokens_total",
        "counter",
        "Prompt tokens accepted.",
        attrgetter("prompt_tokens"),
    ),
    (
        "vllm:generation_tokens_total",
        "counter",
        "Tokens generated.",
        attrgetter("generation_tokens"),
    ),
    (
        "dynctl_engine_active_prefill_tokens",
        "gauge",
        "Prompt tokens accepted and not computed yet.",
        attrgetter("active_prefill_tokens"),
    ),
)


def render(engine: Engine) -> str:
    """The metrics as text, one sample for each rank (label `engine`, as in vLLM)."""
    config = engine.config
    schedulers = [rank.scheduler for rank in engine.ranks]
    lines: list[str] = []
    model = _escape(config.model)
    for name, kind, help_text, value_of in _SERIES:
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{engine="{rank}",model_name="{model}"}} {_number(value_of(scheduler))}'
            for rank, scheduler in enumerate(schedulers)
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
