"""The parts of a replay alone: the agenda, the engines, and what they report."""

from typing import Any

import pytest

from dynctl.documents.recording import Changed
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.model import RankBusy
from dynctl.simulation.replay.agenda import LATER, STEP, TRAVEL, Agenda
from dynctl.simulation.replay.engines import Engines
from dynctl.simulation.replay.fleet import (
    Objective,
    ReplayPolicy,
    SimulatedFleet,
    SimulatedSync,
    SimulatedWorker,
)
from dynctl.simulation.replay.journal import Journal
from dynctl.simulation.replay.metrics import Ceiling
from dynctl.simulation.replay.rank import VirtualRequest
from dynctl.simulation.replay.reports import EventReports
from dynctl.simulation.replay.requests import local_hashes
from dynctl.simulation.replay.result import Measures
from dynctl.simulation.replay.routers import ReplayRouters
from dynctl.simulation.replay.state import NotedRequest
from dynctl.wire.traces import TraceRequest
from router_core import IndexMarked, KvEvent, RouterConfig

MS = 1_000_000
ENGINE = EngineConfig(
    block_size=4,
    total_blocks=64,
    max_waiting=1,
    max_num_seqs=1,
    prefill_tokens_per_s=1000.0,
    decode_itl_ms=10.0,
)
WORKERS = (SimulatedWorker(1), SimulatedWorker(2))


def test_the_agenda_goes_by_time_then_order_then_place_then_what_was_added_first():
    agenda, done = Agenda(), []

    def act(what):
        done.append((agenda.now, what))
        if what == "first":
            agenda.schedule(agenda.now, act, "added while it runs", LATER)

    agenda.schedule(5, act, "fault", LATER)
    agenda.schedule(5, act, "arrival", TRAVEL)
    agenda.schedule(5, act, "step of rank 1", STEP, 1)
    agenda.schedule(5, act, "step of rank 0", STEP, 0)
    agenda.schedule(5, act, "second arrival", TRAVEL)
    agenda.schedule(2, act, "first")
    agenda.schedule(9, act, "last")
    agenda.run_until(7)
    assert agenda.now == 7
    agenda.run_out()
    assert [what for _, what in done] == [
        "first",
        "added while it runs",
        "step of rank 0",
        "step of rank 1",
        "arrival",
        "second arrival",
        "fault",
        "last",
    ]
    assert [when for when, _ in done] == [2, 2, 5, 5, 5, 5, 5, 9]


class Noted:
    """A user of engines that notes what it hears."""

    def __init__(self, agenda):
        self.agenda = agenda
        self.heard = []

    def note_progress(self, rank, generation):
        self.heard.append((self.agenda.now, rank.key, generation.number, generation.produced))

    def pulls(self, rank, generation, missing):
        raise AssertionError("nothing is pulled")

    def step_ended(self):
        self.heard.append("step ended")


def engines(agenda, events=True):
    made = Engines(ENGINE, WORKERS, agenda, leaps=True, events=events)
    made.users = Noted(agenda)
    return made


def generation(rank, number, tokens, output):
    made = NotedRequest(
        max_tokens=output,
        prompt_tokens=tokens,
        hashes=[number * 100 + n for n in range(tokens // 4)],
        local=[number * 100 + n for n in range(tokens // 4)],
        number=number,
    )
    made.news = rank.news
    return made


def test_engines_report_the_first_and_the_last_token_at_the_end_of_their_steps():
    agenda = Agenda()
    made = engines(agenda)
    rank = made.ranks[2, 0]
    made.submit(rank, generation(rank, 7, 8, 3))
    made.submit(rank, generation(rank, 8, 4, 1))
    with pytest.raises(RankBusy):
        made.submit(rank, generation(rank, 9, 4, 1))
    agenda.run_out()
    assert made.users.heard == [
        (8 * MS, (2, 0), 7, 1),
        "step ended",
        (28 * MS, (2, 0), 7, 3),
        "step ended",
        (32 * MS, (2, 0), 8, 1),
        "step ended",
    ]
    assert rank.peak == 3
    assert made.in_order[0].peak == 0


def test_a_rank_that_is_lost_gives_its_requests_back_and_starts_with_an_empty_cache():
    agenda = Agenda()
    made = engines(agenda)
    rank = made.ranks[1, 0]
    sent: list[VirtualRequest] = [generation(rank, number, 8, 3) for number in (1, 2)]
    for one in sent:
        made.submit(rank, one)
    agenda.run_until(18 * MS)
    assert rank.engine.cache.cached_blocks == 2
    assert made.lose(rank) == sent
    assert rank.engine.cache.cached_blocks == 0
    assert (rank.alive, rank.lost_requests, rank.busy_ns) == (False, 2, 18 * MS)
    agenda.run_out()
    assert len(made.users.heard) == 2  # the first token of the first request, and nothing later


def reported(delay_s=0.0, loss=0.0):
    """(agenda, engines, changes of the routers): one router that sees the events of engines."""
    agenda = Agenda()
    changes: list[Any] = []
    fleet = SimulatedFleet(WORKERS, ENGINE, events_delay_s=delay_s, events_loss=loss)
    journal = Journal(agenda, fleet.model, changes.append)
    routers = ReplayRouters(
        fleet,
        ReplayPolicy("kv", RouterConfig()),
        ENGINE,
        SimulatedSync(),
        1,
        agenda=agenda,
        journal=journal,
        measures=Measures(Objective(), Ceiling()),
        draw=lambda: 0.0,
    )
    for worker in WORKERS:
        routers.register(worker)
    made = engines(agenda)
    reports = EventReports(fleet, 1, agenda, routers, None)
    made.publish = reports.publish
    changes.clear()
    return agenda, made, changes, reports, routers


def test_events_arrive_after_their_delay_and_are_in_the_index_then():
    agenda, made, changes, _, routers = reported(delay_s=0.003)
    rank = made.ranks[1, 0]
    made.submit(rank, generation(rank, 1, 8, 1))
    agenda.run_out()
    assert [(type(one), one.at) for one in changes] == [(Changed, 0.011)]
    assert isinstance(changes[0].change, KvEvent)
    index = routers.frontends[0].router.index
    assert [index.block_count(slot) for slot in (0, 1)] == [2, 0]


def test_after_a_lost_batch_the_routers_learn_how_many_are_missing():
    agenda, made, changes, reports, _ = reported(loss=0.5)
    draws = iter([0.1, 0.2, 0.9])
    reports._draw = lambda: next(draws)
    rank = made.ranks[1, 0]
    for number in (1, 2, 3):
        made.submit(rank, generation(rank, number, 8, 1))
        agenda.run_out()
    marked, event = (one.change for one in changes)
    assert marked == IndexMarked(1, 0, "gapped", 2)
    assert isinstance(event, KvEvent)


def test_blocks_of_a_trace_have_the_names_of_the_engines_blocks():
    asked = TraceRequest(0.0, "r", 22, 1, (5, 6, 7), 8)
    assert local_hashes(asked, 8) == [5, 6]
    assert local_hashes(asked, 4) == [10, 11, 12, 13, 14]
    assert local_hashes(asked, 16) == [6]
