"""vLLM. Its rules hold for other servers with an OpenAI API too.

The names of metrics are those of 0.6 to 0.32 (``vllm:cache_config_info`` as observed with 0.32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynctl.wire.engine_kinds.kind import EngineKind
from dynctl.wire.engine_metrics import MetricNames

if TYPE_CHECKING:
    from dynctl.wire.engine_kinds.tokens import TokenApi


def _token_api() -> TokenApi:
    from dynctl.wire.engine_kinds.vllm.tokens import API

    return API


VLLM: Final = EngineKind(
    name="vllm",
    label="vLLM",
    as_vllm=True,
    metrics=MetricNames(
        waiting=("vllm:num_requests_waiting",),
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        cache_config=("vllm:cache_config_info",),
    ),
    directions={
        "kv_transfer_params": "it chooses the address from which an engine fetches KV blocks",
        "ec_transfer_params": "it chooses the address from which an engine fetches embeddings",
    },
    # It keeps kv_transfer_params among its vllm_xargs; sampling_params are of its API for tokens.
    carriers=(("vllm_xargs",), ("sampling_params", "extra_args")),
    direction_headers={
        "x-data-parallel-rank": "data_parallel_rank",
        "x-vllm-priority": "priority",
    },
    token_api=_token_api,
)
