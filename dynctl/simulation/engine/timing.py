"""How long a simulated engine step and a KV transfer take."""

from collections.abc import Mapping

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.faults import FaultState


class StepTimer:
    """Durations in real seconds: simulated time over the speed-up, times the slow fault."""

    def __init__(self, config: EngineConfig, faults: FaultState) -> None:
        self._config = config
        self._faults = faults

    def step(self, prefill_tokens: int, decodes: int) -> float:
        """One engine step that computes `prefill_tokens` and one token for `decodes` requests.

        Prefill is bound by compute, so it grows with the tokens; a decode step is bound by
        memory bandwidth, so it costs the same for one request as for a batch.
        """
        seconds = prefill_tokens / self._config.prefill_tokens_per_s
        if decodes:
            seconds += self._config.decode_itl_ms / 1e3
        return self._scaled(seconds)

    def kv_transfer(self, blocks: int, puller_domains: Mapping[str, str]) -> float:
        """Sending `blocks` to an engine that lies in `puller_domains` (domain -> value)."""
        config = self._config
        seconds = blocks * config.kv_transfer_ms_per_block / 1e3
        domain = config.kv_transfer_domain
        if domain and puller_domains.get(domain) != config.topology_domains.get(domain):
            seconds *= config.kv_transfer_cross_domain_factor
        return self._scaled(seconds)

    def _scaled(self, seconds: float) -> float:
        return seconds / self._config.speedup_ratio * self._faults.current.slow_factor
