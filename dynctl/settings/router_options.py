"""How the command line and the environment name each router setting, and its help text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterOption:
    """The help text, flags and environment variables of one router setting.

    ``flags`` and ``env`` list the current name first; the others are deprecated names that still
    work and warn. ``metavar``: how help pages name the value, where its type does not suffice.
    """

    help: str
    flags: tuple[str, ...]
    env: tuple[str, ...]
    metavar: str = ""

    @property
    def variable(self) -> str:
        """The current environment variable; empty for a setting without one."""
        return self.env[0] if self.env else ""

    @property
    def names(self) -> str:
        """The current flag, and the variable where there is one, for messages."""
        return " or ".join(filter(None, (self.flags[0], self.variable)))


def _option(help: str, *names: str, metavar: str = "") -> RouterOption:
    flags = tuple(name for name in names if name.startswith("--"))
    return RouterOption(help, flags, tuple(name for name in names if name not in flags), metavar)


#: Setting -> its option; the same names and order as ``router_core.SETTINGS``.
ROUTER_OPTIONS: dict[str, RouterOption] = {
    "router_mode": _option("rule that chooses the worker", "--router-mode", "DYN_ROUTER_MODE"),
    "overlap_score_credit": _option(
        "blocks of prefill credited per cached block",
        "--router-kv-overlap-score-credit",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    ),
    "overlap_score_credit_decay": _option(
        "how fast the credit falls on workers with more active prefill than the least loaded",
        "--router-kv-overlap-score-credit-decay",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    ),
    "prefill_load_scale": _option(
        "weight of prefill blocks in the cost (0.9: the overlap score weight, of which 0 ends the "
        "cache credit too); at 0 a worker's load is its blocks, not its number of requests",
        "--router-prefill-load-scale",
        "--router-kv-overlap-score-weight",
        "--kv-overlap-score-weight",
        "DYN_ROUTER_PREFILL_LOAD_SCALE",
        "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        "DYN_KV_OVERLAP_SCORE_WEIGHT",
    ),
    "decode_active_request_weight": _option(
        "cost in blocks of each active request of a worker",
        "--router-decode-active-request-weight",
        "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
    ),
    "router_temperature": _option(
        "0 picks the lowest cost; above 0 samples, the higher the more evenly: of two workers the "
        "cheaper gets 73 % at 1, 52 % at 10",
        "--router-temperature",
        "DYN_ROUTER_TEMPERATURE",
    ),
    "router_track_active_blocks": _option(
        "count the blocks of running requests as decode load",
        "--router-track-active-blocks",
        "--track-active-blocks",
        "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
    ),
    "router_track_output_blocks": _option(
        "also count the blocks that generation adds",
        "--router-track-output-blocks",
        "--track-output-blocks",
        "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
    ),
    "router_assume_kv_reuse": _option(
        "count a prompt block that running requests share once per worker",
        "--router-assume-kv-reuse",
        "--assume-kv-reuse",
        "DYN_ROUTER_ASSUME_KV_REUSE",
    ),
    "router_track_prefill_tokens": _option(
        "count prompt tokens that wait for their first output token as prefill load",
        "--router-track-prefill-tokens",
        "DYN_ROUTER_TRACK_PREFILL_TOKENS",
    ),
    "active_decode_blocks_threshold": _option(
        "a rank is busy above this fraction of its KV blocks",
        "--active-decode-blocks-threshold",
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
    ),
    "active_prefill_tokens_threshold": _option(
        "a rank is busy above this many active prefill tokens",
        "--active-prefill-tokens-threshold",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
    ),
    "active_prefill_tokens_threshold_frac": _option(
        "a rank is busy above this multiple of its max_num_batched_tokens (may exceed 1)",
        "--active-prefill-tokens-threshold-frac",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
    ),
    "kv_transfer_domain": _option(
        "topology domain of the router's own KV-transfer policy (for workers that publish none)",
        "--router-kv-transfer-topology-level",
        "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL",
        metavar="NAME",
    ),
    "kv_transfer_enforcement": _option(
        "required never crosses the domain, preferred makes crossing cost more, "
        "fallback crosses only when the domain has no decode worker",
        "--kv-transfer-enforcement",
        "DYN_ROUTER_KV_TRANSFER_ENFORCEMENT",
    ),
    "kv_transfer_preferred_weight": _option(
        "weight of the preference, 0 to 1",
        "--kv-transfer-preferred-weight",
        "DYN_ROUTER_KV_TRANSFER_PREFERRED_WEIGHT",
    ),
    "decode_capacity_guard": _option(
        "choose only prefill workers whose domain has an eligible decode worker",
        "--router-decode-capacity-guard",
        "DYN_ROUTER_DECODE_CAPACITY_GUARD",
    ),
    "router_pair_selection": _option(
        "greedy chooses the best prefill worker and then decode, best the pair with the lowest sum",
        "--router-pair-selection",
        "DYN_ROUTER_PAIR_SELECTION",
    ),
    "router_kv_transfer_weight": _option(
        "cost in blocks of a second of KV transfer between prefill and decode worker",
        "--router-kv-transfer-weight",
        "DYN_ROUTER_KV_TRANSFER_WEIGHT",
    ),
    "router_kv_transfer_qos": _option(
        "YAML file with latency and bandwidth of each topology level",
        "--router-kv-transfer-qos",
        "DYN_ROUTER_KV_TRANSFER_QOS",
        metavar="FILE",
    ),
    "router_own_domains": _option(
        "the frontend's own topology domains (zone=a,rack=r1): the latency from there counts on "
        "the first hop",
        "--router-own-domains",
        "DYN_ROUTER_OWN_DOMAINS",
        metavar="NAME=VALUE,..",
    ),
    "conditional_disagg_enabled": _option(
        "conditional disaggregation: a decode worker that has enough of a prompt cached prefills "
        "the rest by itself",
        "--router-conditional-disagg",
        "DYN_ROUTER_CONDITIONAL_DISAGG",
    ),
    "conditional_disagg_policy": _option(
        "what leaves out the prefill hop: isl-bounding (a short rest of the prompt), prefill-load "
        "(a busy prefill worker), isl-or-load (either)",
        "--router-bypass-policy",
        "DYN_ROUTER_BYPASS_POLICY",
    ),
    "conditional_disagg_eff_isl_threshold": _option(
        "the decode worker prefills fewer prompt tokens than this by itself",
        "--router-bypass-eff-isl-threshold",
        "DYN_ROUTER_BYPASS_EFF_ISL_THRESHOLD",
    ),
    "conditional_disagg_eff_isl_ratio_threshold": _option(
        "the decode worker prefills less than this fraction of a prompt by itself",
        "--router-bypass-eff-isl-ratio-threshold",
        "DYN_ROUTER_BYPASS_EFF_ISL_RATIO_THRESHOLD",
    ),
    "conditional_disagg_prefill_busy_threshold": _option(
        "a prefill worker is busy above this multiple of its max_num_batched_tokens "
        "(none: the queue threshold)",
        "--router-bypass-prefill-busy-threshold",
        "DYN_ROUTER_BYPASS_PREFILL_BUSY_THRESHOLD",
    ),
    "conditional_disagg_decode_busy_threshold": _option(
        "keep the prefill hop where the decode worker would have more active blocks than this "
        "fraction of its KV blocks",
        "--router-bypass-decode-busy-threshold",
        "DYN_ROUTER_BYPASS_DECODE_BUSY_THRESHOLD",
    ),
    "conditional_disagg_require_can_prefill": _option(
        "leave out the prefill hop only for decode workers that can prefill (Dynamo does not look)",
        "--router-bypass-require-can-prefill",
        "DYN_ROUTER_BYPASS_REQUIRE_CAN_PREFILL",
    ),
    "router_taints_in_all_modes": _option(
        "apply taints and KV-transfer policies in modes other than kv too (off: as in Dynamo 1.6)",
        "--router-taints-in-all-modes",
        "DYN_ROUTER_TAINTS_IN_ALL_MODES",
    ),
    "router_on_degraded": _option(
        "what cached blocks count for while a worker's index is incomplete: discount (half), "
        "approximate (what this router sent there), load-only (nothing) or full",
        "--router-on-degraded",
        "DYN_ROUTER_ON_DEGRADED",
    ),
    "router_session_affinity_ttl_secs": _option(
        "session affinity: seconds after the last request of a session (x-dynamo-session-id, "
        "x-session-id) for which its worker answers the next",
        "--router-session-affinity-ttl-secs",
        "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
    ),
    "router_session_affinity_mode": _option(
        "session affinity: keep the worker while it is eligible (hard), or until it costs more "
        "than the yield blocks above the best (soft)",
        "--router-session-affinity-mode",
        "DYN_ROUTER_SESSION_AFFINITY_MODE",
    ),
    "router_session_affinity_yield_blocks": _option(
        "soft session affinity: blocks by which the session's worker may cost more than the best",
        "--router-session-affinity-yield-blocks",
        "DYN_ROUTER_SESSION_AFFINITY_YIELD_BLOCKS",
    ),
    "active_request_expiry_secs": _option(
        "seconds without progress after which a booking expires",
        "--router-active-request-expiry-secs",
        "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
    ),
    "overload_status_code": _option(
        "HTTP status when every eligible worker is busy",
        "--http-overload-status-code",
        "DYN_HTTP_OVERLOAD_STATUS_CODE",
    ),
    "use_kv_events": _option(
        "index what workers cache from their KV events (off: estimate it from routed requests)",
        "--router-kv-events",
        "--kv-events",
        "DYN_ROUTER_USE_KV_EVENTS",
        "DYN_KV_EVENTS",
    ),
    "router_approximate_cache_policy": _option(
        "approximate mode: forget what was not routed for the TTL (ttl), or what was in use least "
        "recently once a worker has more blocks than it declares (lru)",
        "--router-approximate-cache-policy",
        "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
    ),
    "router_ttl_secs": _option(
        "approximate mode: seconds for which a routed prefix counts as cached",
        "--router-ttl-secs",
        "--router-ttl",
        "DYN_ROUTER_TTL_SECS",
        "DYN_ROUTER_TTL",
    ),
    "router_max_tree_size": _option(
        "approximate mode: blocks kept before pruning (none: 1,048,576)",
        "--router-max-tree-size",
        "DYN_ROUTER_MAX_TREE_SIZE",
    ),
    "router_prune_target_ratio": _option(
        "approximate mode: fraction of the blocks kept by pruning",
        "--router-prune-target-ratio",
        "DYN_ROUTER_PRUNE_TARGET_RATIO",
    ),
    "router_queue_threshold": _option(
        "requests wait while every worker holds more active prefill tokens than this multiple of "
        "its max_num_batched_tokens",
        "--router-queue-threshold",
        "DYN_ROUTER_QUEUE_THRESHOLD",
    ),
    "router_queue_policy": _option(
        "order of the router queue", "--router-queue-policy", "DYN_ROUTER_QUEUE_POLICY"
    ),
    "router_policy_config": _option(
        "YAML file with the policy classes of the router queue",
        "--router-policy-config",
        "DYN_ROUTER_POLICY_CONFIG",
        metavar="FILE",
    ),
    "router_queue_max_requests": _option(
        "requests that may wait in the router queue; others are refused",
        "--router-queue-max-requests",
        "DYN_ROUTER_QUEUE_MAX_REQUESTS",
    ),
    "router_queue_max_wait_secs": _option(
        "seconds that a request may wait in the router queue before it is refused",
        "--router-queue-max-wait-secs",
        "DYN_ROUTER_QUEUE_MAX_WAIT_SECS",
    ),
    "host_cache_hit_weight": _option(
        "credit of a block cached in host memory",
        "--router-host-cache-hit-weight",
        "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
    ),
    "disk_cache_hit_weight": _option(
        "credit of a block cached on disk",
        "--router-disk-cache-hit-weight",
        "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
    ),
    "router_replica_sync": _option(
        "share active-request state between router replicas",
        "--router-replica-sync",
        "DYN_ROUTER_REPLICA_SYNC",
    ),
    "router_predicted_ttl_secs": _option(
        "seconds for which a routed prefix counts as cached before its events arrive",
        "--router-predicted-ttl-secs",
        "DYN_ROUTER_PREDICTED_TTL_SECS",
    ),
    "router_prefill_load_model": _option(
        "how active prefill tokens fall with time: ais or aic (by an estimate for the "
        "accelerator), measured (as earlier prefills did), or not at all",
        "--router-prefill-load-model",
        "DYN_ROUTER_PREFILL_LOAD_MODEL",
    ),
    "ais_backend": _option(
        "prefill load model: the engine (the estimate is the same for each)",
        "--ais-backend",
        "--aic-backend",
        "DYN_AIS_BACKEND",
        "DYN_AIC_BACKEND",
    ),
    "ais_backend_version": _option(
        "prefill load model: the backend's version",
        "--ais-backend-version",
        "--aic-backend-version",
        "DYN_AIS_BACKEND_VERSION",
        "DYN_AIC_BACKEND_VERSION",
    ),
    "ais_system": _option(
        "prefill load model: the accelerator, for example h200_sxm",
        "--ais-system",
        "--aic-system",
        "DYN_AIS_SYSTEM",
        "DYN_AIC_SYSTEM",
        metavar="NAME",
    ),
    "ais_model_path": _option(
        "prefill load model: directory of the model, with its config.json",
        "--ais-model-path",
        "--aic-model-path",
        "DYN_AIS_MODEL_PATH",
        "DYN_AIC_MODEL_PATH",
        metavar="DIR",
    ),
    "ais_tp_size": _option(
        "prefill load model: accelerators that share the model (none: 1)",
        "--ais-tp-size",
        "--aic-tp-size",
        "DYN_AIS_TP_SIZE",
        "DYN_AIC_TP_SIZE",
    ),
    "encoder_cuda_to_cpu_ratio": _option(
        "throughput of a non-CPU worker relative to a CPU worker; CPU workers' share is rounded "
        "down: with one worker of each and ratio 8, the 9th running request is the first there",
        "--encoder-cuda-to-cpu-ratio",
        "DYN_ENCODER_CUDA_TO_CPU_RATIO",
    ),
    "serve_indexer": _option(
        "serve this router's index to other routers", "--serve-indexer", "DYN_SERVE_INDEXER"
    ),
    "use_remote_indexer": _option(
        "query a served indexer instead of keeping an index",
        "--use-remote-indexer",
        "DYN_USE_REMOTE_INDEXER",
    ),
    "router_durable_kv_events": _option(
        "read KV events from JetStream (deprecated in Dynamo)",
        "--router-durable-kv-events",
        "DYN_ROUTER_DURABLE_KV_EVENTS",
    ),
    "router_reset_states": _option(
        "remove KV events and snapshot from JetStream at start, for all routers",
        "--router-reset-states",
        "DYN_ROUTER_RESET_STATES",
    ),
}
