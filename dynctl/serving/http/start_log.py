"""What a frontend or router logs at its start: its configuration, and what it lacks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from dynctl.serving.http.core import ProcessCore
from dynctl.serving.http.keys import ApiKeys
from dynctl.serving.http.start import LOOPBACK
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.transfer_file import FLAG as TRANSFER_FLAG
from router_core import Router

_log = logging.getLogger(__name__)


def log_start(core: ProcessCore, *, tokenizes: bool) -> None:
    """Log the configuration of a frontend or router that begins to serve. ``tokenizes``: prompts
    become token ids here, or at the engines."""
    service, config = core.service, core.config
    router = service.router
    _log_workers(core)
    if service.prefill_model is not None:
        for text in service.prefill_model.describe():
            _log.info("%s", text)
    _log_access(config)
    if core.keys.required:
        _log.info("inference needs an API key; valid keys: %d", len(core.keys))
        _log_isolation(core.keys)
    if config.unix_socket is not None:
        _log.info("operators: %s", config.unix_socket)
    _log_transfer(router, core.routing.size_unknown)
    _log_queue(router, service.models())
    silent = [worker.name for worker in router.registry if not worker.kv_events]
    if silent and core.routing.link is None:
        _log.info("without KV events, cache estimated from requests: %s", ", ".join(silent))
    if tokenizes and config.dynamo is None:
        _log_tokenizer(core)


def _log_workers(core: ProcessCore) -> None:
    config, registry = core.config, core.service.router.registry
    roles = Counter(worker.role.value for worker in registry)
    fleet = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    _log.info(
        "serving on %s: router mode %s, preset %s, models %s, workers: %s of %d reachable",
        core.address.url,
        core.service.router.config.router_mode,
        config.preset,
        ", ".join(core.service.models()) or "none",
        fleet,
        len(core.fleet),
    )
    pool = None if config.picker is None else config.picker.pool
    sources = (config.workers, config.workers_file, config.router_url, config.dynamo, pool)
    services = (config.select_service_port, config.slot_tracker_port)
    if not any(sources) and services == (None, None):
        _log.warning(
            "no workers are configured: every request is refused; set --worker URL%s or "
            "--workers-file FILE, or use Dynamo's discovery",
            "" if config.picker is None else ", --pool NAME",
        )


def _log_access(config: FrontendConfig) -> None:
    """Log what other hosts can do."""
    if config.host in LOOPBACK:
        return
    if config.api_token is None:
        _log.warning(
            "%s is reachable from other hosts: they get inference only; writes and routing "
            "details answer 403 until --admin-token is set",
            config.host,
        )
    elif config.tls_cert is None:
        _log.info(
            "%s is reachable from other hosts without TLS: tokens, keys and prompts travel as "
            "plain text; set --tls-cert and --tls-key, or end TLS in front of this process",
            config.host,
        )


def _log_transfer(router: Router, size_unknown: str | None) -> None:
    policy = router.config.kv_transfer_domain
    if policy is not None:
        _log.info("KV transfer: %s within %s", router.config.kv_transfer_enforcement, policy)
    if router.transfer is not None and router.config.router_kv_transfer_weight:
        levels = ", ".join(router.transfer.names)
        _log.info("KV transfer costs by distance: levels %s", levels)
        if size_unknown is not None:
            _log.warning(
                "KV transfer costs nothing: %s; set bytes_per_token in the file of %s",
                size_unknown, TRANSFER_FLAG,
            )  # fmt: skip


def _log_isolation(keys: ApiKeys) -> None:
    """Log which keys share cached blocks, and what keeps those of the others apart."""
    isolated = keys.isolated
    shared = len(keys) - isolated
    if isolated:
        _log.info(
            "isolated API keys: %d: their requests have a cache_salt of their own, which vLLM, "
            "SGLang and Dynamo's engines with vLLM or SGLang hash; an engine that ignores it "
            "shares its cache among them, and dynctl cannot see that without KV events",
            isolated,
        )
    if shared > 1:
        _log.info(
            "%d API keys share cached prefixes: a client can learn from times and cached tokens "
            "whether another one sent a prompt; --isolate-keys keeps them apart",
            shared,
        )


def _log_queue(router: Router, models: Sequence[str]) -> None:
    if router.view().queue is None:
        return
    for model in models or ("",):
        for policy in router.policy_classes.table(model, router.config).classes:
            limits = []
            if policy.prefill_busy_threshold is not None:
                limits.append(f"{policy.prefill_busy_threshold:,} tokens")
            if policy.prefill_busy_threshold_frac is not None:
                limits.append(f"{policy.prefill_busy_threshold_frac:g} x max_num_batched_tokens")
            _log.info(
                "router queue: model %s, class %s, %s, quantum %d, requests wait above %s",
                model or "any", policy.name, policy.queue_policy, policy.quantum,
                " or ".join(limits) or "no load",
            )  # fmt: skip
    unknown = [
        worker.name
        for worker in router.registry
        if not worker.runtime_config.max_num_batched_tokens
    ]
    if unknown:
        _log.warning(
            "max_num_batched_tokens is unknown (%s): 10,000,000 is used, so that requests "
            "hardly ever wait; add max-num-batched-tokens=N to --worker", ", ".join(unknown),
        )  # fmt: skip


def _log_tokenizer(core: ProcessCore) -> None:
    tokenizer = core.routing.tokenizer
    if tokenizer is not None:
        _log.info("tokenizer: %s (%s)", core.config.model_path, tokenizer.encoder.name)
        return
    # The condition NO_TOKENIZER follows where each engine was tried and none has the endpoint.
    _log.info(
        "tokenizer: the engines' /tokenize, where they have it: one more round trip per request; "
        "set --model-path DIR to tokenize here"
    )
