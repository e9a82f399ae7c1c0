"""Decisions of an aggregated fleet without their explanation, for simulations.

`LeanRouter` chooses, books and frees as :class:`router_core.Router` does, to the last bit of each
cost, in a fraction of the time: it keeps no Decision, and what decisions read is in plain dicts and
lists. It knows a part of the settings (`LeanRouter.supports`), and one fixed set of ranks whose
cache events are complete: no rank holds a block without the blocks before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from router_core.config import RouterConfig
from router_core.cost import (
    CostInputs,
    CostParameters,
    better_of_two,
    draw_two,
    pick,
    total_costs,
)
from router_core.terms import kv_terms
from router_core.workers import WorkerWithDpRank

_MODES = ("kv", "round-robin", "random", "least-loaded", "power-of-two")
#: Settings that a LeanRouter follows; all others must have their defaults.
_FOLLOWED = (
    *("router_mode", "router_temperature", "overlap_score_credit", "overlap_score_credit_decay"),
    *("prefill_load_scale", "decode_active_request_weight", "router_track_active_blocks"),
    *("router_assume_kv_reuse", "router_track_prefill_tokens"),
    *("host_cache_hit_weight", "disk_cache_hit_weight"),
    # These have no effect on requests without prefill hop, faults or a full queue.
    "router_on_degraded",
    *("overload_status_code", "router_pair_selection", "decode_capacity_guard"),
    *("router_taints_in_all_modes", "router_queue_policy", "router_queue_max_requests"),
    *("router_queue_max_wait_secs", "router_ttl_secs", "router_max_tree_size"),
    *("router_prune_target_ratio", "router_approximate_cache_policy", "router_replica_sync"),
)


#: Inputs that a LeanRouter has, then those that it never needs: they come with settings that it
#: does not follow, or only explain a decision. With any other it does not decide as a Router.
_INPUTS = frozenset(
    {
        *("isl_tokens", "block_size", "prompt_blocks", "overlap_blocks", "prefill_tokens"),
        *("active_blocks", "shared_blocks", "active_requests", "host_blocks", "disk_blocks"),
        *("multipliers", "following", "added"),
        *("trust", "indexed_blocks", "booked_tokens", "predicted_blocks"),
    }
)
_PARAMETERS = frozenset(
    {
        *("prefill_load_scale", "overlap_score_credit", "overlap_score_credit_decay"),
        *("decode_active_request_weight", "track_prefill_tokens", "track_active_blocks"),
        *("assume_kv_reuse", "host_cache_hit_weight", "disk_cache_hit_weight"),
        "weights",
    }
)


class LeanIndex:
    """The blocks that each rank holds, by its position. Routers may share it.

    ``holdings[position]``: a mapping with the hashes of the rank's blocks. It may be the engine's
    own, where its events take no time; else `store` and `remove` keep it. Engines report each copy
    of a block, and later the removal of each.
    ``lower[position]``: gives the blocks in host memory and on disk with which the rank continues
    a prefix, of which it has so many blocks; empty where ranks have no such tiers.
    """

    __slots__ = ("_own", "holdings", "lower")

    def __init__(
        self,
        count: int,
        holdings: Sequence[Mapping[int, int]] | None = None,
        lower: Sequence[Callable[[Sequence[int], int], tuple[int, int]]] = (),
    ) -> None:
        self.lower = lower
        self._own: list[dict[int, int]] = [{} for _ in range(count)]
        self.holdings: Sequence[Mapping[int, int]] = self._own if holdings is None else holdings

    def store(self, rank: int, hashes: Sequence[int]) -> None:
        """A rank holds blocks, each behind the one before it."""
        copies = self._own[rank]
        for block in hashes:
            copies[block] = copies.get(block, 0) + 1

    def remove(self, rank: int, hashes: Sequence[int]) -> None:
        """A rank reused blocks that held these."""
        copies = self._own[rank]
        for block in hashes:
            left = copies.get(block, 0) - 1
            if left > 0:
                copies[block] = left
            else:
                copies.pop(block, None)


class LeanBooking:
    """A request on a rank, until it is freed."""

    __slots__ = ("anonymous", "hashes", "prefill_tokens", "rank")

    def __init__(
        self, rank: int, prefill_tokens: int, hashes: Sequence[int], anonymous: int
    ) -> None:
        self.rank = rank
        self.prefill_tokens = prefill_tokens
        self.hashes = hashes
        self.anonymous = anonymous


class LeanRouter:
    """A router of the ranks ``refs``, all of one model, in order of their registration."""

    def __init__(
        self,
        config: RouterConfig,
        refs: Sequence[WorkerWithDpRank],
        block_size: int,
        index: LeanIndex,
    ) -> None:
        if not self.supports(config):
            raise ValueError("these settings need a Router")
        if not refs or block_size < 1:
            raise ValueError(
                f"expected at least one rank and one token per block, got {len(refs)} ranks and "
                f"blocks of {block_size} tokens"
            )
        self._index = index
        self._mode = config.router_mode
        self._temperature = config.router_temperature
        self._parameters = parameters = CostParameters.for_stage(config, "aggregated")
        self._plain = (
            parameters.track_prefill_tokens
            and parameters.track_active_blocks
            and parameters.assume_kv_reuse
            and not parameters.decode_active_request_weight
            and not parameters.overlap_score_credit_decay
        )
        self._block_size = block_size
        self._cycle = sorted(range(len(refs)), key=refs.__getitem__)
        self._turn = 0
        count = len(refs)
        self._count = count
        self.prefill_tokens = [0] * count
        self.requests = [0] * count
        self._anonymous = [0] * count
        #: Of each rank: block -> running requests that hold it.
        self._held: list[dict[int, int]] = [{} for _ in range(count)]

    @staticmethod
    def supports(config: RouterConfig) -> bool:
        """Whether a LeanRouter decides as a Router with this configuration."""
        inputs = {column.name for column in fields(CostInputs)}
        parameters = {parameter.name for parameter in fields(CostParameters)}
        if not (inputs <= _INPUTS and parameters <= _PARAMETERS):
            return False
        if CostParameters.for_stage(config, "aggregated").weights:
            return False  # terms with columns that it does not read
        default = RouterConfig()
        return config.router_mode in _MODES and all(
            getattr(config, setting.name) == getattr(default, setting.name)
            for setting in fields(config)
            if setting.name not in _FOLLOWED
        )

    def overlaps(self, hashes: Sequence[int], limit: int) -> dict[int, int]:
        """Leading blocks of a prompt, at most ``limit``, that each rank holds; without zeros."""
        depths: dict[int, int] = {}
        limit = min(limit, len(hashes))
        if not limit:
            return depths
        first = hashes[0]
        for rank, holding in enumerate(self._index.holdings):
            if first not in holding:
                continue
            # A rank that holds a block holds those in front of it: bisect where it ends.
            low, high = 1, limit
            if limit > 1 and hashes[1] not in holding:
                high = 1
            while low < high:
                middle = (low + high) // 2
                if hashes[middle] in holding:
                    low = middle + 1
                else:
                    high = middle
            depths[rank] = low
        return depths

    def choose(
        self,
        hashes: Sequence[int],
        isl_tokens: int,
        sample: float,
        among: Sequence[int] | None = None,
    ) -> tuple[int, float]:
        """(position of the rank, leading blocks that it holds) for a prompt.

        Blocks in lower tiers count by their weights. ``among``: positions of the ranks that may be
        chosen, at least one, ascending; None: all.
        """
        limit = max(0, isl_tokens - 1) // self._block_size
        overlaps = self.overlaps(hashes, limit)
        lower = self._lower(hashes[:limit], overlaps) if self._index.lower else None
        if among is not None:
            rank = self._choose_among(hashes, isl_tokens, sample, overlaps, among, lower)
        elif (mode := self._mode) == "kv":
            costs = self._costs(hashes, isl_tokens, overlaps, lower)
            rank = pick(costs, self._temperature, sample)
        elif mode == "round-robin":
            rank = self._cycle[self._turn % self._count]
        elif mode == "random":
            rank = int(sample * self._count)
        elif mode == "power-of-two" and self._count > 1:
            rank = better_of_two(self.requests, draw_two(self._count, sample))
        else:
            rank = pick(self.requests, 0.0, sample)
        cached: float = overlaps.get(rank, 0)
        if lower is not None:
            parameters, (host, disk) = self._parameters, lower
            cached += parameters.host_cache_hit_weight * host[rank]
            cached += parameters.disk_cache_hit_weight * disk[rank]
        return rank, cached

    def _lower(
        self, hashes: Sequence[int], overlaps: Mapping[int, int]
    ) -> tuple[list[int], list[int]]:
        """Blocks in host memory and on disk behind those that each rank holds."""
        tiers = [
            below(hashes, overlaps.get(rank, 0)) for rank, below in enumerate(self._index.lower)
        ]
        return [host for host, _ in tiers], [disk for _, disk in tiers]

    def _choose_among(
        self,
        hashes: Sequence[int],
        isl_tokens: int,
        sample: float,
        overlaps: dict[int, int],
        among: Sequence[int],
        lower: tuple[list[int], list[int]] | None,
    ) -> int:
        count, mode = len(among), self._mode
        if mode == "kv":
            costs = self._all_terms(hashes, isl_tokens, overlaps, among, lower)
            return among[pick(costs, self._temperature, sample)]
        if mode == "round-robin":
            return [rank for rank in self._cycle if rank in among][self._turn % count]
        if mode == "random":
            return among[int(sample * count)]
        requests = [self.requests[rank] for rank in among]
        if mode == "power-of-two" and count > 1:
            return among[better_of_two(requests, draw_two(count, sample))]
        return among[pick(requests, 0.0, sample)]

    def _costs(
        self,
        hashes: Sequence[int],
        isl_tokens: int,
        overlaps: dict[int, int],
        lower: tuple[list[int], list[int]] | None = None,
    ) -> list[float]:
        if not self._plain or lower is not None:
            return self._all_terms(hashes, isl_tokens, overlaps, range(self._count), lower)
        size, parameters = self._block_size, self._parameters
        blocks = isl_tokens // size
        costs = [(tokens + isl_tokens) / size for tokens in self.prefill_tokens]
        credit = parameters.overlap_score_credit
        if credit:
            for rank, overlap in overlaps.items():
                left = costs[rank] - credit * overlap
                costs[rank] = left if left > 0 else 0.0
        scale = parameters.prefill_load_scale
        if scale != 1.0:
            costs = [cost * scale for cost in costs]
        anonymous = self._anonymous
        first = hashes[0] if hashes else None
        for rank, blocks_of in enumerate(self._held):
            more = len(blocks_of) + anonymous[rank] + blocks
            if first in blocks_of:
                more -= _leading(hashes, blocks_of)
            costs[rank] += more
        return costs

    def _all_terms(
        self,
        hashes: Sequence[int],
        isl_tokens: int,
        overlaps: dict[int, int],
        ranks: Sequence[int],
        lower: tuple[list[int], list[int]] | None,
    ) -> list[float]:
        parameters = self._parameters
        shared = None
        if parameters.track_active_blocks and parameters.assume_kv_reuse:
            shared = [_leading(hashes, self._held[rank]) for rank in ranks]
        inputs = CostInputs(
            isl_tokens,
            self._block_size,
            isl_tokens // self._block_size,
            [overlaps.get(rank, 0) for rank in ranks],
            [self.prefill_tokens[rank] for rank in ranks],
            [len(self._held[rank]) + self._anonymous[rank] for rank in ranks],
            shared,
            [self.requests[rank] for rank in ranks],
            host_blocks=None if lower is None else [lower[0][rank] for rank in ranks],
            disk_blocks=None if lower is None else [lower[1][rank] for rank in ranks],
        )
        return total_costs(kv_terms(inputs, parameters), None, len(ranks))

    # -- bookings --------------------------------------------------------------------------

    def book(self, rank: int, hashes: Sequence[int], isl_tokens: int, cached: float) -> LeanBooking:
        """Count a request on a rank that holds ``cached`` of its blocks, as `choose` gives them."""
        parameters, size = self._parameters, self._block_size
        tokens = 0
        if parameters.track_prefill_tokens:
            tokens = max(0, isl_tokens - int(cached * size + 0.5))
            self.prefill_tokens[rank] += tokens
        self.requests[rank] += 1
        self._turn += 1
        anonymous = 0
        if not parameters.track_active_blocks:
            hashes = ()
        elif not (parameters.assume_kv_reuse and hashes):
            hashes, anonymous = (), isl_tokens // size
            self._anonymous[rank] += anonymous
        if hashes:
            held = self._held[rank]
            shared = _leading(hashes, held) if hashes[0] in held else 0
            for block in hashes[:shared]:
                held[block] += 1
            held.update(dict.fromkeys(hashes[shared:], 1))
        return LeanBooking(rank, tokens, hashes, anonymous)

    def prefill_done(self, booking: LeanBooking) -> None:
        """The prompt of a booked request is computed."""
        self.prefill_tokens[booking.rank] -= booking.prefill_tokens
        booking.prefill_tokens = 0

    def free(self, booking: LeanBooking) -> None:
        """The request ended."""
        rank = booking.rank
        self.prefill_tokens[rank] -= booking.prefill_tokens
        self.requests[rank] -= 1
        self._anonymous[rank] -= booking.anonymous
        held = self._held[rank]
        for block in booking.hashes:
            more = held[block]
            if more == 1:
                del held[block]
            else:
                held[block] = more - 1


def _leading(hashes: Sequence[int], held: dict[int, int]) -> int:
    for count, block in enumerate(hashes):
        if block not in held:
            return count
    return len(hashes)
