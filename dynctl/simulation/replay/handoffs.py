"""Hand-offs of a replay: KV blocks go from prefill to decode workers, and take their time.

Either the decode worker gets a request when its prefill has ended, or both get it at once and meet
(a bootstrap pair): then the decode worker waits, with its own blocks held, for those of the
prefill, and the prefill worker is done when they were pulled.
"""

from __future__ import annotations

from typing import Protocol

from dynctl.simulation.engine.model import transfer_seconds
from dynctl.simulation.engine.prefix_cache import BlockTable
from dynctl.simulation.replay.agenda import LATER, Agenda
from dynctl.simulation.replay.engines import Engines
from dynctl.simulation.replay.fleet import SimulatedFleet
from dynctl.simulation.replay.rank import NS, VirtualRank, VirtualRequest
from dynctl.simulation.replay.result import Measures
from dynctl.simulation.replay.state import LiveRequest, Pull, ReplayRank, VirtualHandoff


class HandoffUsers(Protocol):
    """What follows from hand-offs."""

    def failed_hop(self, live: LiveRequest, rank: ReplayRank, reason: str) -> None:
        """An engine does not go on with a request."""

    def end_pull(self, live: LiveRequest) -> None:
        """The blocks of a pair's prefill were pulled."""


class Handoffs:
    """The hand-offs under way. ``users``: set it before the first one."""

    users: HandoffUsers

    def __init__(
        self, fleet: SimulatedFleet, engines: Engines, agenda: Agenda, measures: Measures
    ) -> None:
        self._config = engines.config
        self._engines = engines
        self._agenda = agenda
        self._measures = measures
        self._limit = round(engines.config.kv_hold_timeout_s * NS)
        #: A transfer between two values of this domain takes longer.
        self._link = fleet.link_domain or engines.config.kv_transfer_domain or ""
        #: Those of pairs, oldest first.
        self._pairs: dict[VirtualHandoff, None] = {}

    def hold(
        self, rank: ReplayRank, table: BlockTable, pair: LiveRequest | None = None
    ) -> VirtualHandoff:
        """Keep the blocks of a finished prefill until they are pulled, or for the hold timeout.

        ``pair``: the request whose decode worker has it already.
        """
        held = VirtualHandoff(rank, table, pair)
        self._agenda.schedule(self._agenda.now + self._limit, self._expire, held, LATER)
        if pair is not None:
            self._pairs[held] = None
        return held

    def meet(self, live: LiveRequest) -> None:
        """The prefill of a pair has ended: its decode worker pulls the blocks if it waits."""
        pull, live.pull = live.pull, None
        if pull is not None and live.generation is pull.generation:
            self.pull(pull.rank, pull.generation, pull.missing)

    def give_up(self, live: LiveRequest) -> None:
        """The prefill of a pair has failed: its decode worker does not wait for the blocks."""
        pull, live.pull = live.pull, None
        if pull is not None:
            self._end_load((pull.rank, pull.engine, pull.generation, None))

    def pull(self, rank: ReplayRank, generation: VirtualRequest, missing: int) -> None:
        """Load the ``missing`` blocks of a request into a decode worker."""
        live: LiveRequest = generation.owner
        held, now = live.held, self._agenda.now
        if held is None and live.companion is not None and not live.companion.ended:
            live.pull = Pull(rank, rank.engine, generation, missing)
            self._agenda.schedule(now + self._limit, self._waited_too_long, live.pull, LATER)
            return
        if held is None or held.is_lost:
            self._agenda.schedule(now, self._end_load, (rank, rank.engine, generation, None))
            return
        source, target = held.rank.worker.domains, rank.worker.domains
        seconds = transfer_seconds(self._config, missing, source, target, self._link)
        crosses = self._link != "" and source.get(self._link) != target.get(self._link)
        self._measures.count_handoff(missing, crosses)
        held.pulling = True
        arrival = now + round(seconds * NS)
        self._agenda.schedule(arrival, self._end_load, (rank, rank.engine, generation, held))

    def _waited_too_long(self, pull: Pull) -> None:
        live: LiveRequest = pull.generation.owner
        if live.pull is pull:
            self.give_up(live)

    def _end_load(
        self, what: tuple[ReplayRank, VirtualRank, VirtualRequest, VirtualHandoff | None]
    ) -> None:
        rank, engine, generation, held = what
        live: LiveRequest = generation.owner
        if held is not None:
            held.pulling = False
        if rank.engine is not engine or live.generation is not generation:
            return
        if held is not None and not held.is_lost:
            self.free(held)
            live.held = None
            engine.take_pulled(generation)
            if held.pair is not None:
                self.users.end_pull(live)
        else:
            generation.loading = False
            if self._config.kv_load_failure_policy == "fail" or not self._config.can_prefill:
                engine.end(generation)
                self.users.failed_hop(live, rank, "kv_lost")
        self._engines.wake(rank)

    def _expire(self, held: VirtualHandoff) -> None:
        if held.freed:
            return
        if held.pulling:  # a running transfer keeps its blocks
            self._agenda.schedule(self._agenda.now + self._limit, self._expire, held, LATER)
            return
        self.free(held)
        if held.pair is not None:
            self.users.failed_hop(held.pair, held.rank, "kv_lost")

    def lost_pairs(self, rank: ReplayRank) -> list[VirtualHandoff]:
        """The hand-offs of pairs whose blocks a rank held, which was lost."""
        return [held for held in self._pairs if held.rank is rank]

    def free(self, held: VirtualHandoff) -> None:
        """Free the blocks of a hand-off; no effect the second time."""
        if held.freed:
            return
        held.freed = True
        self._pairs.pop(held, None)
        rank = held.rank
        rank.engine.release(held.table)
        if rank.engine.waiting and rank.alive:
            self._engines.wake(rank)
