"""The core of every serving process: the router, its fleet, and how requests reach the workers."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dynctl.adapters.otlp import SpanExport
from dynctl.planning.prefill_load import prefill_model
from dynctl.serving.engines.dispatch import Dispatch, HttpDispatch
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.engines.flow import RequestFlow
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.http.auth import A, R, checked_token, keyed
from dynctl.serving.http.connections import Certificate, CertificateError
from dynctl.serving.http.inference import Inference
from dynctl.serving.http.inference_requests import RequestReader
from dynctl.serving.http.keys import SHORTEST_KEY, ApiKeys, ClientRights, KeyLimits, KeysError
from dynctl.serving.http.start import Address, StartError
from dynctl.serving.records.audit import ReuseAudit
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.remote.link import RouterLink
from dynctl.serving.remote.placement import RemoteRequests
from dynctl.serving.routing.config import (
    DEFAULT_BLOCK_SIZE,
    INDEX_BYTES_PER_BLOCK,
    FrontendConfig,
)
from dynctl.serving.routing.prompts import PromptTokenizers
from dynctl.serving.routing.service import LocalPlacement, Placement, RoutingService
from dynctl.serving.routing.transfer_file import configured_table
from dynctl.settings.policy_file import policy_classes
from dynctl.tokenization import ModelTokenizer, load_tokenizer
from router_core import NO_CLASSES, IndexBound, Router, TransferTableSet

#: Short keys that the warning about them names.
_NAMED_KEYS: Final = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The router of a process, before it has workers.

    ``requests``: those that the router process decides; None: this one does. ``size_unknown``: why
    the bytes of a token's KV cache are not known; None where they are.
    """

    config: FrontendConfig
    service: RoutingService
    upstream: Upstream
    tokenizer: ModelTokenizer | None
    requests: RemoteRequests | None
    router_id: int
    size_unknown: str | None

    @property
    def link(self) -> RouterLink | None:
        return None if self.requests is None else self.requests.link

    def tokenizer_cache(self) -> Mapping[str, int]:
        """Counts of the tokenizer's cache; empty without a tokenizer here."""
        return {} if self.tokenizer is None else self.tokenizer.encoder.cache()


def build_routing(
    config: FrontendConfig, *, router: Router | None = None, serves_pools: bool = False
) -> Routing:
    """``router``: in place of one that the configuration describes. ``serves_pools``: a pool of one
    role is served.

    Raises TokenizationError or StartError if the configuration is invalid.
    """
    try:
        checked_token(config.api_token)
    except ValueError as error:
        raise StartError(str(error)) from None
    tokenizer = None
    if config.model_path is not None:
        tokenizer = load_tokenizer(config.model_path, trust_template=config.trust_template)
    tokenizers = PromptTokenizers(tokenizer)
    router_id = random.getrandbits(64)
    export = None
    if config.otlp_endpoint is not None:
        instance = config.process or f"{router_id:016x}"
        export = SpanExport(config.otlp_endpoint, config.otlp_sample_ratio, instance)
    requests = None
    if config.router_url is not None:
        name = f"{random.getrandbits(40):010x}"
        requests = RemoteRequests(RouterLink(config.router_url, config.router_token, name))
    decides = requests is None
    router = router or Router(
        config.router,
        exact_reuse=True,
        learns=decides,  # else the router process has the index
        policy_classes=policy_classes(config.router) if decides else NO_CLASSES,
    )
    service = RoutingService(
        tokenizers=tokenizers,
        default_block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        prefill_model=prefill_model(config.router, config.origins) if decides else None,
        router=router,
        export=export,
        serves_pools=serves_pools,
        reports=requests,
        salts_each_block=config.dynamo is not None,
    )
    table, size_unknown = configured_table(config.router, config.model_path)
    if table is not None:
        service.apply(TransferTableSet(table))
    service.router.bound_index(IndexBound(config.index_memory_bytes // INDEX_BYTES_PER_BLOCK))
    return Routing(
        config=config,
        service=service,
        upstream=Upstream(config.limits),
        tokenizer=tokenizer,
        requests=requests,
        router_id=router_id,
        size_unknown=size_unknown,
    )


class ProcessCore:
    """The parts that work for every request. ``dispatch`` and ``placement``: over HTTP, and by the
    router of this process, unless they are given.

    Raises StartError for API keys or a certificate that cannot be read.
    """

    def __init__(
        self,
        routing: Routing,
        fleet: Fleet,
        dispatch: Dispatch | None = None,
        placement: Placement | None = None,
    ) -> None:
        config, service = routing.config, routing.service
        dispatch = dispatch or HttpDispatch(routing.upstream, fleet)
        self.routing = routing
        self.config = config
        self.service = service
        self.upstream = routing.upstream
        self.fleet = fleet
        self.keys = _read_keys(config, service)
        self.placement = placement or LocalPlacement(service)
        self.flow = RequestFlow(service, self.placement, fleet, dispatch, config.limits)
        self.reader = RequestReader(service, config)
        self.inference = Inference(
            service, self.placement, self.flow, self.reader, config, self.keys
        )
        requests = routing.requests
        self.memory = DecisionMemory(
            config.decision_memory_bytes,
            elsewhere=None if requests is None else requests.decided_elsewhere,
        )
        self.audit = ReuseAudit(service.router)
        self.certificate = _read_certificate(config)
        self.address = Address(
            config.host, config.port, share=config.share_port, tls=self.certificate is not None
        )

    def open(self) -> None:
        """Begin to reach engines and to read their caches."""
        self.upstream.start()
        self.fleet.index.start()

    def keyed(
        self, handler: Callable[[R], Awaitable[A]], *, json: bool = True
    ) -> Callable[[R], Awaitable[A]]:
        """The handler of clients, which need an API key where there are any. ``json`` False: it
        gets requests that are JSON."""
        return keyed(handler, self.keys, self.config.api_token, json=json)

    async def speed_up(self) -> None:
        """Choose the encoder of the tokenizer, while the engines are probed."""
        tokenizer, wanted = self.routing.tokenizer, self.config.tokenizer
        if tokenizer is not None and wanted != "exact":
            for reason in await asyncio.to_thread(tokenizer.speed_up, wanted):
                _log.info("tokenizer: %s", reason)


def _read_keys(config: FrontendConfig, service: RoutingService) -> ApiKeys:
    limits = KeyLimits(config.key_requests_per_minute, config.key_concurrency)
    rights = ClientRights(config.client_fields, config.isolate_keys, config.key_details)
    try:
        keys = ApiKeys(config.api_keys, config.api_key_file, limits, rights, clock=service.clock)
        keys.load()
    except KeysError as error:
        raise StartError(f"API keys: {error}") from None
    short = keys.short_names
    if short:
        _log.warning(
            "API keys with fewer than %d characters can be guessed: %s%s; make one with: "
            "openssl rand -hex 32",
            SHORTEST_KEY,
            ", ".join(short[:_NAMED_KEYS]),
            f" and {len(short) - _NAMED_KEYS:,} more" if short[_NAMED_KEYS:] else "",
        )
    return keys


def _read_certificate(config: FrontendConfig) -> Certificate | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificate = Certificate(config.tls_cert, config.tls_key)
    try:
        certificate.load()
    except CertificateError as error:
        raise StartError(f"--tls-cert, --tls-key: {error}") from None
    return certificate
