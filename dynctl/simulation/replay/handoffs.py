"""Hand-offs of a replay: KV blocks go from prefill to decode workers, and take their time."""

from __future__ import annotations

from collections.abc import Callable

from dynctl.simulation.engine.model import transfer_seconds
from dynctl.simulation.engine.prefix_cache import (
    BlockTable,
)
from dynctl.simulation.replay.agenda import LATER, Agenda
from dynctl.simulation.replay.engines import Engines
from dynctl.simulation.replay.fleet import SimulatedFleet
from dynctl.simulation.replay.rank import NS, VirtualRank, VirtualRequest
from dynctl.simulation.replay.result import Measures
from dynctl.simulation.replay.state import Handoff, LiveRequest, ReplayRank


class Handoffs:
    """The hand-offs under way.

    ``failed`` is called for a request whose blocks were lost, if engines do not recompute.
    """

    failed: Callable[[LiveRequest, ReplayRank, str], None]

    def __init__(
        self, fleet: SimulatedFleet, engines: Engines, agenda: Agenda, measures: Measures
    ) -> None:
        self._config = engines.config
        self._engines = engines
        self._agenda = agenda
        self._measures = measures
        #: A transfer between two values of this domain takes longer.
        self._link = fleet.link_domain or engines.config.kv_transfer_domain or ""

    def hold(self, rank: ReplayRank, table: BlockTable) -> Handoff:
        """Keep the blocks of a finished prefill until they are pulled, or for the hold timeout."""
        held = Handoff(rank, table)
        hold = round(self._config.kv_hold_timeout_s * NS)
        self._agenda.at(self._agenda.now + hold, self.free, held, LATER)
        return held

    def pull(self, rank: ReplayRank, generation: VirtualRequest, missing: int) -> None:
        """Load the ``missing`` blocks of a request into a decode worker."""
        live: LiveRequest = generation.owner
        held, now = live.held, self._agenda.now
        if held is None or held.gone:
            self._agenda.at(now, self._loaded, (rank, rank.engine, generation, None))
            return
        source, target = held.rank.worker.domains, rank.worker.domains
        seconds = transfer_seconds(self._config, missing, source, target, self._link)
        crosses = self._link != "" and source.get(self._link) != target.get(self._link)
        self._measures.moved(missing, crosses)
        arrival = now + round(seconds * NS)
        self._agenda.at(arrival, self._loaded, (rank, rank.engine, generation, held))

    def _loaded(self, what: tuple[ReplayRank, VirtualRank, VirtualRequest, Handoff | None]) -> None:
        rank, engine, generation, held = what
        live: LiveRequest = generation.owner
        if rank.engine is not engine or live.generation is not generation:
            return
        if held is not None and not held.gone:
            self.free(held)
            live.held = None
            engine.loaded(generation)
        else:
            generation.loading = False
            if self._config.kv_load_failure_policy == "fail" or not self._config.can_prefill:
                engine.end(generation)
                self.failed(live, rank, "kv_lost")
        self._engines.wake(rank)

    def free(self, held: Handoff) -> None:
        """Free the blocks of a hand-off; no effect the second time."""
        if held.freed:
            return
        held.freed = True
        rank = held.rank
        rank.engine.release(held.table)
        if rank.engine.waiting and rank.alive:
            self._engines.wake(rank)
