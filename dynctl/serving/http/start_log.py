"""What a frontend or router logs at its start: its configuration, and what it lacks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.http.keys import ApiKeys
from dynctl.serving.http.start import LOOPBACK
from dynctl.serving.remote.routing import RouterLink
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.replicas import ReplicaSync
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.routing.transfer_file import FLAG as TRANSFER_FLAG
from dynctl.tokenization import ModelTokenizer
from router_core import Router

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A frontend or router that begins to serve at ``url``.

    ``tokenizes``: prompts become token ids here, with ``tokenizer`` or at the engines.
    ``size_unknown``: why the bytes of a token's KV cache are not known; None where they are.
    """

    url: str
    config: FrontendConfig
    service: RoutingService
    fleet: Fleet
    keys: ApiKeys
    replicas: ReplicaSync | None
    link: RouterLink | None
    tokenizes: bool
    tokenizer: ModelTokenizer | None
    size_unknown: str | None


def log_start(started: Started) -> None:
    """Log the configuration of this start."""
    router, config = started.service.router, started.config
    roles: dict[str, int] = {}
    for worker in router.registry:
        roles[worker.role.value] = roles.get(worker.role.value, 0) + 1
    fleet = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    _log.info(
        "serving on %s: router mode %s, preset %s, models %s, workers: %s of %d reachable",
        started.url,
        router.config.router_mode,
        config.preset,
        ", ".join(started.service.models()) or "none",
        fleet,
        len(started.fleet),
    )
    pool = None if config.picker is None else config.picker.pool
    given = (config.workers, config.workers_file, config.router_url, config.dynamo, pool)
    services = (config.select_service_port, config.slot_tracker_port)
    if not any(given) and services == (None, None):
        _log.warning(
            "no workers are configured: every request is refused; set --worker URL%s or "
            "--workers-file FILE, or use Dynamo's discovery",
            "" if config.picker is None else ", --pool NAME",
        )
    model = started.service.prefill_model
    for text in () if model is None else model.describe():
        _log.info("%s", text)
    if config.host not in LOOPBACK and config.api_token is None:
        _log.warning(
            "%s is reachable from other hosts: they get inference only; writes and routing "
            "details answer 403 until --admin-token is set",
            config.host,
        )
    elif config.host not in LOOPBACK and config.tls_cert is None:
        _log.info(
            "%s is reachable from other hosts without TLS: tokens, keys and prompts travel as "
            "plain text; set --tls-cert and --tls-key, or end TLS in front of this process",
            config.host,
        )
    if started.keys.required:
        _log.info("inference needs an API key; valid keys: %d", len(started.keys))
        _log_isolation(started.keys)
    if config.unix_socket is not None:
        _log.info("operators: %s", config.unix_socket)
    if started.replicas is not None:
        others = ", ".join(started.replicas.plane.addresses)
        _log.info(
            "replica sync: %s%s",
            started.replicas.plane.title,
            f", with {others}" if others else "",
        )
    if started.link is not None:
        _log.info("router: %s", started.link.url)
        if config.router_token is not None and started.link.exposed:
            _log.warning(
                "--router-token and the hashes of requests go to %s without TLS: use https",
                started.link.url,
            )
    policy = router.config.kv_transfer_domain
    if policy is not None:
        _log.info("KV transfer: %s within %s", router.config.kv_transfer_enforcement, policy)
    if router.transfer is not None and router.config.router_kv_transfer_weight:
        levels = ", ".join(router.transfer.names)
        _log.info("KV transfer costs by distance: levels %s", levels)
        if started.size_unknown is not None:
            _log.warning(
                "KV transfer costs nothing: %s; set bytes_per_token in the file of %s",
                started.size_unknown, TRANSFER_FLAG,
            )  # fmt: skip
    _log_queue(router, started.service.models())
    silent = [w.name for w in router.registry if not w.kv_events]
    if silent and started.link is None:
        _log.info("without KV events, cache estimated from requests: %s", ", ".join(silent))
    if started.tokenizes and config.dynamo is None:
        _log_tokenizer(started)


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
        for one in router.policy_classes.table(model, router.config).classes:
            limits = []
            if one.prefill_busy_threshold is not None:
                limits.append(f"{one.prefill_busy_threshold:,} tokens")
            if one.prefill_busy_threshold_frac is not None:
                limits.append(f"{one.prefill_busy_threshold_frac:g} x max_num_batched_tokens")
            _log.info(
                "router queue: model %s, class %s, %s, quantum %d, requests wait above %s",
                model or "any", one.name, one.queue_policy, one.quantum,
                " or ".join(limits) or "no load",
            )  # fmt: skip
    unknown = [w.name for w in router.registry if not w.runtime_config.max_num_batched_tokens]
    if unknown:
        _log.warning(
            "max_num_batched_tokens is unknown (%s): 10,000,000 is used, so that requests "
            "hardly ever wait; add max-num-batched-tokens=N to --worker", ", ".join(unknown),
        )  # fmt: skip


def _log_tokenizer(started: Started) -> None:
    if started.tokenizer is not None:
        _log.info("tokenizer: %s (%s)", started.config.model_path, started.tokenizer.encoder.name)
        return
    # The condition NO_TOKENIZER follows where each engine was tried and none has the endpoint.
    _log.info(
        "tokenizer: the engines' /tokenize, where they have it: one more round trip per request; "
        "set --model-path DIR to tokenize here"
    )
