"""`dynctl replay`: policies on a trace, a recording or a generated workload, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base.errors import ExitCode, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import policies
from dynctl.cli.option_groups import fields_of, only_given, with_options
from dynctl.cli.shared_options import one_choice, read_as, seconds
from dynctl.simulation.engine.config import timed_options

if TYPE_CHECKING:
    from dynctl.documents.replay import ReplayReport, ReplayResult, ReplayTrace, SearchPoint
    from dynctl.screens.progress import ProgressBar
    from dynctl.simulation.replay.fleet import (
        Objective,
        ReplayPolicy,
        SimulatedFleet,
        SimulatedSync,
    )
    from dynctl.simulation.replay.fleets import FleetSource
    from dynctl.simulation.replay.inputs import TraceInput
    from dynctl.wire.traces import TraceRequest

#: Aggregated workers where nothing describes a fleet.
_WORKERS = 8
_ENGINE = "Engine (as serve engine)"
_IN_TURN = (
    "the decode worker gets a request when its prefill has ended; whether these workers start "
    "together, as SGLang's do with a bootstrap address, is not known: --bootstrap simulates that"
)
_ONE_MOMENT = (
    "the workers are those of the recording at one moment: that they join, leave or are "
    "unavailable is not replayed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What is replayed."""

    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake or Bailian JSON lines, Azure CSV (plain or .gz), or a recording.",
            show_default=False,
        ),
    ] = None
    generate: Annotated[
        str | None,
        typer.Option(metavar="agentic|chat|rag|batch", help="Generate requests instead."),
    ] = None
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Parameter of --generate (repeatable): requests, rate, prompts, prompt_tokens, "
            "skew, turns, turn_tokens, output_tokens, think_s, documents, document_tokens, "
            "documents_each, together, tenants, burst, burst_s, burst_every_s, longest_tokens, "
            "zones.",
        ),
    ] = None
    trace_block_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=65_536,
            help="Tokens of a hash id, or of a generated block. "
            "[default: 512; Bailian, generated: 16]",
        ),
    ] = None
    speed: Annotated[
        float, typer.Option(metavar="X", min=0.001, max=1000, help="Multiply the rate.")
    ] = 1.0
    spread: Annotated[
        bool,
        typer.Option("--spread", help="Spread requests of one time evenly until the next time."),
    ] = False
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N requests.")
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only requests of this model.")
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad lines out and count them.")
    ] = False

    def trace_input(self) -> TraceInput:
        """The source of requests; raises UsageProblem."""
        from dynctl.simulation.replay.inputs import TraceInput
        from dynctl.simulation.replay.workloads import workload

        if (self.trace is None) == (self.generate is None):
            raise UsageProblem(
                "expected a trace or --generate KIND"
                + ("" if self.trace is None else ", not both"),
                "dynctl replay trace.jsonl, or dynctl replay --generate chat",
            )
        if self.workload and self.generate is None:
            raise UsageProblem(f"--workload {self.workload[0]}: only with --generate KIND")
        return TraceInput(
            path=self.trace,
            workload=None
            if self.generate is None
            else workload(self.generate, self.workload or ()),
            block_size=self.trace_block_size,
            limit=self.limit,
            speed=self.speed,
            model=self.model,
            skip_bad=self.skip_bad,
            spread=self.spread,
        )

    def is_own_fleet(self, options: GlobalOptions) -> bool:
        """Whether a recording is replayed on itself, not on its workers at one moment."""
        own = options.recording
        return (
            own is not None
            and self.trace is not None
            and options.at is None
            and own.exists()
            and self.trace.exists()
            and own.samefile(self.trace)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The routers, and the policies that are compared."""

    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LABEL:]NAME|FILE[,SETTING=VALUE]",
            autocompletion=policies,
            help="round-robin, random, least-loaded, power-of-two, approximate, kv, kv-tuned, "
            "best-pair, a preset, or a YAML or TOML file of settings (repeatable). "
            "[default: round-robin and kv]",
        ),
    ] = None
    routers: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Routers.")] = 1
    sync: Annotated[
        bool, typer.Option("--sync/--no-sync", help="Routers share their bookings.")
    ] = True
    sync_delay_ms: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=seconds(0.0, 60.0, unit="ms"),
            help="Time of a booking to the other routers, ms.",
        ),
    ] = 1.0
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=2**63, help="First seed: random choices, generated requests."
        ),
    ] = 1
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=50, help="Simulate N seeds; 95 % intervals from 2 on."
        ),
    ] = 1

    def chosen(self, live: ReplayPolicy | None) -> list[ReplayPolicy]:
        """The policies; ``live``: that of the deployment. Warnings about them go to stderr."""
        from dynctl.screens.render import talk
        from dynctl.simulation.replay.policies import policies

        if live is None:
            policy, warnings = policies(self.policy or ["round-robin", "kv"])
        else:
            policy, warnings = policies(self.policy or ["round-robin"])
            policy = policy if self.policy else [live, *policy]
        for warning in warnings:
            talk(f"warning: {warning}")
        return policy

    @property
    def replica_sync(self) -> SimulatedSync:
        """How the routers share their bookings."""
        from dynctl.simulation.replay.fleet import SimulatedSync

        return SimulatedSync("delayed" if self.sync else "none", self.sync_delay_ms / 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The simulated workers."""

    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=2000,
            help="Aggregated workers. [default: those of the recording, else 8]",
        ),
    ] = None
    zones: Annotated[
        str | None, typer.Option(metavar="NAME,..", help="Spread --workers over these zones.")
    ] = None
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VALUE:prefill=N,decode=N", help="Workers in one domain value (repeatable)."
        ),
    ] = None
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="The replicas of a manifest; - reads stdin."
        ),
    ] = None
    domain: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Domain of --capacity and --file. [default: zone]"),
    ] = None
    data_parallel_size: Annotated[
        int, typer.Option(metavar="N", min=1, max=64, help="Ranks of a worker.")
    ] = 1
    bootstrap: Annotated[
        bool | None,
        typer.Option(
            "--bootstrap/--no-bootstrap",
            help="Prefill and decode worker get a request at once, as with SGLang's bootstrap "
            "address. [default: as recorded, else no]",
            show_default=False,
        ),
    ] = None
    enforcement: Annotated[
        str | None,
        typer.Option(
            metavar="none|preferred|required|fallback", help="KV transfer policy of the workers."
        ),
    ] = None
    preferred_weight: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, max=1, help="Weight of --enforcement preferred. [default: 0.85]"
        ),
    ] = None
    block_bytes: Annotated[
        int, typer.Option(metavar="N", min=0, max=1 << 40, help="Bytes of a KV block; 0: unknown.")
    ] = 0
    events_delay_ms: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=seconds(0.0, 3600.0, unit="ms"),
            help="Time from a cache event to the router, ms.",
        ),
    ] = 0.0
    events_loss: Annotated[
        float,
        typer.Option(metavar="X", min=0, max=1, help="Share of KV event batches that are lost."),
    ] = 0.0
    lose: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE@TIME[..TIME]",
            help="Lose a zone or a worker, until a time: zone-a@60s, 3@10s..40s (repeatable).",
        ),
    ] = None
    migration_limit: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=1000,
            help="How often a request with output goes on with another worker after its own is "
            "lost.",
        ),
    ] = 0
    migration_max_seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            max=1 << 31,
            help="Prompts with more tokens do not go on elsewhere. [default: no limit]",
        ),
    ] = None

    def expect_enforcement(self) -> None:
        """Raise UsageProblem for an unknown KV transfer policy."""
        modes = ("none", "preferred", "required", "fallback")
        if self.enforcement is not None and self.enforcement not in modes:
            raise UsageProblem(f"--enforcement {self.enforcement}: expected {', '.join(modes)}")

    @property
    def is_specified(self) -> bool:
        """Whether the options describe workers."""
        return self.workers is not None or bool(self.zones or self.capacity or self.file)

    def source(
        self, options: GlobalOptions, requests: RequestOptions
    ) -> tuple[FleetSource, ReplayPolicy | None]:
        """The workers, and the policy of a live router where it is known. Raises UsageProblem.

        The workers of a recording that is replayed with its own settings are not read here.
        """
        from dynctl.base.options import SOURCES
        from dynctl.simulation.replay.fleets import fleet_of_count, fleet_of_places

        live = bool(options.given & (SOURCES | {"context"}))
        by_count = self.workers is not None or self.zones is not None
        if by_count + bool(self.capacity) + bool(self.file) + live > 1:
            raise UsageProblem(
                "--workers (with --zones), --capacity, --file and a deployment (--demo, --view, "
                "--frontend, --discovery) are different fleets; specify only one"
            )
        ranks = self.data_parallel_size
        if self.capacity:
            from dynctl.planning.planned_fleet import fleet_of_flags

            return fleet_of_places(fleet_of_flags(self.capacity, self.domain), ranks), None
        if self.file:
            from dynctl.planning.planned_fleet import fleet_of_files

            return fleet_of_places(fleet_of_files(self.file, self.domain), ranks), None
        if live:
            return self._live_source(options, requests)
        zones = [zone.strip() for zone in (self.zones or "").split(",") if zone.strip()]
        return fleet_of_count(
            _WORKERS if self.workers is None else self.workers, zones, ranks
        ), None

    def _live_source(
        self, options: GlobalOptions, requests: RequestOptions
    ) -> tuple[FleetSource, ReplayPolicy | None]:
        """The workers of a deployment and its policy."""
        from dynctl.simulation.replay.fleets import fleet_of_count, fleet_of_live
        from dynctl.sources.connect import connect

        deployment = connect(options)
        if requests.is_own_fleet(options):
            return fleet_of_count(_WORKERS, (), self.data_parallel_size), _live_policy(deployment)
        source = fleet_of_live(deployment.title, deployment.workers(), requests.model)
        if options.recording is not None:
            source = replace(source, notes=(*source.notes, _ONE_MOMENT))
        return source, _live_policy(deployment)

    def simulated(
        self, source: FleetSource, engine: dict[str, Any], block_size: int
    ) -> SimulatedFleet:
        """The workers with their engines; raises UsageProblem."""
        from dynctl.simulation.replay.fleets import simulated_fleet

        return simulated_fleet(
            source,
            engine,
            block_size=min(block_size, 4096),
            enforcement=self.enforcement,
            weight=self.preferred_weight,
            lose=self.lose or (),
            bootstrap=self.bootstrap,
            migration_limit=self.migration_limit,
            migration_max_tokens=self.migration_max_seq_len,
            events_delay_s=self.events_delay_ms / 1000,
            events_loss=self.events_loss,
            block_bytes=self.block_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What the answer has, and what makes it fail."""

    ttft_limit: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION", parser=seconds(0.0), help="Goodput: longest TTFT. [default: 2s]"
        ),
    ] = None
    itl_limit_ms: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=seconds(0.0, unit="ms"),
            help="Goodput: longest inter-token latency, ms. [default: none]",
        ),
    ] = None
    loads: Annotated[
        str | None,
        typer.Option(
            metavar="X,..", help="Multiples of the rate to simulate, such as 0.5,1,1.5,2,3."
        ),
    ] = None
    max_regress: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit code 1 if a policy is worse than the first by more, for example 2%.",
        ),
    ] = None
    fail_on: Annotated[
        str, typer.Option(metavar="fail|warn", help="Level for exit code 1; warn: both levels.")
    ] = "fail"
    search: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            max=500,
            help="Tune the numeric settings of the one --policy with N simulations.",
        ),
    ] = None

    def expect_valid(self) -> None:
        """Raise UsageProblem for values that are not valid."""
        one_choice("--fail-on", self.fail_on, ("fail", "warn"))
        _ = self.allowed, self.factors

    @property
    def objective(self) -> Objective:
        """The limits of goodput."""
        from dynctl.simulation.replay.fleet import Objective

        return Objective(
            2.0 if self.ttft_limit is None else self.ttft_limit,
            None if self.itl_limit_ms is None else self.itl_limit_ms / 1000,
        )

    @property
    def allowed(self) -> float | None:
        """The largest regression, as a share; raises UsageProblem."""
        if self.max_regress is None:
            return None
        try:
            percent = float(self.max_regress.strip().removesuffix("%"))
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 1000:
            raise UsageProblem(
                f"--max-regress {self.max_regress}: expected a percentage such as 2%"
            )
        return percent / 100

    @property
    def factors(self) -> tuple[float, ...] | None:
        """The multiples of the rate; raises UsageProblem."""
        from dynctl.simulation.replay.inputs import speeds_of

        return None if self.loads is None else speeds_of(self.loads)

    def expect_policies(self, count: int) -> None:
        """Raise UsageProblem for options that need another number of policies."""
        if self.max_regress is not None and count < 2:
            raise UsageProblem("--max-regress compares policies; expected at least two --policy")
        alone = count == 1 and self.max_regress is None and self.loads is None
        if self.search is not None and not alone:
            raise UsageProblem(
                "--search tunes one policy: give one --policy, without --max-regress and --loads"
            )


_TIMED = {
    option.field: Annotated[
        option.type | None,
        typer.Option(
            option.flag,
            **read_as(option, "N" if option.type is int else "X"),
            help=f"{option.help} [default: "
            + ("as the trace]" if option.field == "block_size" else f"{option.default}]"),
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ]
    for option in timed_options()
}
_ENGINE_FLAGS = only_given(
    {f"engine_{field}": annotation for field, annotation in _TIMED.items()},
    {f"engine_{field}": field for field in _TIMED},
)


@with_options(
    requests=fields_of(RequestOptions, panel="Requests"),
    routers=fields_of(RouterOptions, panel="Routers"),
    fleet=fields_of(FleetOptions, panel="Fleet"),
    answer=fields_of(AnswerOptions, panel="Answer"),
    engine=_ENGINE_FLAGS,
)
def replay(
    options: GlobalOptions,
    *,
    requests: RequestOptions,
    routers: RouterOptions,
    fleet: FleetOptions,
    answer: AnswerOptions,
    engine: dict[str, Any],
) -> int:
    """Replay requests through simulated routers and engines, one policy beside the other.

    The router is the one of serve frontend, the engines are those of serve engine, in virtual time:
    the same input and seed give the same answer. The fleet comes from --workers, --capacity,
    manifests (-f) or a live deployment (--frontend, --discovery, --demo, --view, --recording); else
    a recording is replayed on its own fleet, and other requests on 8 workers. TRACE --recording
    TRACE replays a recording on its own fleet with its own settings.

    Exit code 1: a policy regressed by more than --max-regress; with --fail-on warn also where an
    interval includes that limit.
    """
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit, talk
    from dynctl.simulation.replay.inputs import DEFAULT_BLOCK

    answer.expect_valid()
    fleet.expect_enforcement()
    given = requests.trace_input()
    source, live = fleet.source(options, requests)
    if requests.generate is not None and requests.trace_block_size is None:
        given.block_size = engine.get("block_size", source.card.get("block_size", DEFAULT_BLOCK))
    first = given.first()
    if (live is None and not fleet.is_specified) or requests.is_own_fleet(options):
        source = _recorded_fleet(source, given, requests.model or first.model)
    simulated = fleet.simulated(source, engine, first.block_size)
    policies = routers.chosen(live)
    answer.expect_policies(len(policies))
    with progress(options) as bar:
        simulation = _Simulation(given, first, source, simulated, policies, routers, answer, bar)
        report = simulation.report(engine, pairs_known=fleet.bootstrap is not None)
    emit(report, options)
    failing = {"regressed"} | ({"unknown"} if answer.fail_on == "warn" else set())
    for policy in report.changes:
        for change in policy.changes:
            if change.verdict in failing:
                talk(f"{policy.policy}: {change.verdict}: {change.text}")
    return (
        ExitCode.NO if any(policy.verdict in failing for policy in report.changes) else ExitCode.YES
    )


def _recorded_fleet(source: FleetSource, given: TraceInput, model: str | None) -> FleetSource:
    """The fleet of a recording that is replayed; ``source`` where there is none."""
    from dynctl.simulation.replay.recorded import fleet_of_recording

    if given.path is None or given.format != "recording":
        return source
    recorded = fleet_of_recording(
        given.path, model or None, limit=given.limit, skip_bad=given.skip_bad
    )
    note = "the recording has no workers: the fleet is the default one"
    return recorded or replace(source, notes=(*source.notes, note))


def _live_policy(deployment: Any) -> ReplayPolicy:
    from dynctl.planning.prefill_load import prefill_model
    from dynctl.screens.render import talk
    from dynctl.simulation.replay.fleet import ReplayPolicy
    from router_core import SETTINGS, RouterConfig

    values = {row.name: row.value for row in deployment.config().settings if row.known}
    known = {name: value for name, value in values.items() if name in SETTINGS}
    config = RouterConfig().with_values(known)
    try:
        prefill_model(config)
    except UsageProblem as error:
        talk(f"warning: policy live: {error.message}; the load of its prefills does not fall here")
        config = config.with_values({"router_prefill_load_model": "none"})
    return ReplayPolicy("live", config)


@dataclass(frozen=True, slots=True)
class _Simulation:
    """Requests, fleet and policies, ready to run. ``first``: the first request."""

    given: TraceInput
    first: TraceRequest
    source: FleetSource
    fleet: SimulatedFleet
    policies: list[ReplayPolicy]
    routers: RouterOptions
    answer: AnswerOptions
    bar: ProgressBar

    def report(self, engine: dict[str, Any], *, pairs_known: bool) -> ReplayReport:
        """Simulate what the answer needs. Raises UsageProblem.

        ``engine``: its given options; ``pairs_known``: options have whether prefill and decode
        worker start together.
        """
        from dynctl.documents.replay import ReplayReport, RunMetrics
        from dynctl.simulation.replay import comparison
        from dynctl.simulation.replay.simulation import ReplayError

        answer, policies = self.answer, self.policies
        allowed, factors = answer.allowed, answer.factors
        seeds = range(self.routers.seed, self.routers.seed + self.routers.seeds)
        points: list[SearchPoint] = []
        try:
            if answer.search is not None:
                points = comparison.search(self._run, policies[0], answer.search, seeds[0])
                results = [self._run(policies[0], seeds[0], 1.0)]
            else:
                results = [self._run(policy, seed, 1.0) for policy in policies for seed in seeds]
            curve = comparison.loads(self._run, policies, factors or (), seeds[0])
        except ReplayError as error:
            raise UsageProblem(str(error)) from None
        return ReplayReport(
            trace=_described_trace(self.given, self.first),
            fleet=_described_fleet(self.source, self.fleet),
            seeds=list(seeds),
            results=results,
            summaries=comparison.summaries(results),
            metrics=[
                RunMetrics(result.policy, result.seed, comparison.values(result))
                for result in results
            ],
            changes=[] if allowed is None else comparison.changes(results, allowed),
            loads=curve,
            search=points,
            notes=self._notes(results, pairs_known),
            assumed={
                name: getattr(self.fleet.engine, name)
                for name in self.source.assumed_options(engine)
            },
        )

    def _run(self, policy: ReplayPolicy, seed: int, load: float) -> ReplayResult:
        """One simulation."""
        from dynctl.simulation.replay.simulation import simulate

        given, routers = self.given, self.routers
        about = policy.name + (f", seed {seed}" if routers.seeds > 1 else "")
        about += "" if load == 1 else f", load x{load:g}"
        total = given.limit or (given.workload.requests if given.workload is not None else None)
        return simulate(
            self.bar.following(given.requests(seed, load), about, total, "requests"),
            self.fleet.faster(given.speed * load),
            policy,
            seed,
            routers=routers.routers,
            sync=routers.replica_sync,
            objective=self.answer.objective,
        )

    def _notes(self, results: list[ReplayResult], pairs_known: bool) -> list[str]:
        """What a reader of the numbers has to know."""
        from router_core import Role

        source = self.source
        notes = [*source.notes, *self.given.notes]
        pairs_unknown = not pairs_known and source.published and not source.shows_pairs
        if pairs_unknown and any(worker.role is Role.PREFILL for worker in self.fleet.workers):
            notes.append(_IN_TURN)
        notes += dict.fromkeys(note for result in results for note in result.notes)
        return notes + [f"skipped {problem}" for problem in self.given.skipped.problems]


def _described_trace(given: TraceInput, first: TraceRequest) -> ReplayTrace:
    from dynctl.documents.replay import ReplayTrace

    return ReplayTrace(
        given.name,
        given.format,
        first.block_size,
        bool(first.hash_ids),
        given.speed,
        given.limit,
        {} if given.workload is None else given.workload.parameters(),
        given.skipped.count,
        list(given.skipped.problems),
        given.spread,
    )


def _described_fleet(source: FleetSource, fleet: SimulatedFleet) -> str:
    """``8 aggregated workers in zone-a, zone-b (--workers)``."""
    from collections import Counter

    roles = Counter(worker.role.value for worker in fleet.workers)
    text = " and ".join(f"{count:,} {role}" for role, count in sorted(roles.items()))
    text += " worker" if len(fleet.workers) == 1 else " workers"
    if source.places:
        text += f" in {', '.join(source.places[:6])}" + (", .." if len(source.places) > 6 else "")
    if any(worker.bootstrap for worker in fleet.workers):
        text += ", prefill and decode start together"
    if fleet.engine.kv_transfer_enforcement is not None:
        text += f", KV transfer {fleet.engine.kv_transfer_enforcement}"
    for loss in fleet.losses:
        text += f", loses {loss.value or f'worker {loss.worker_id}'} at {loss.at:g} s"
        text += "" if loss.until is None else f" until {loss.until:g} s"
    if fleet.changes:
        text += f", as recorded {_changes(fleet)}"
    if not source.source.startswith("--"):
        text += f" ({source.source})"
    return text


def _changes(fleet: SimulatedFleet) -> str:
    """``1 joined, 1 left, 2 unavailable for a time``: how many workers, each once."""
    words = {"joins": "joined", "leaves": "left", "unavailable": "unavailable for a time"}
    parts = []
    for what, word in words.items():
        count = len({change.worker_id for change in fleet.changes if change.what == what})
        parts += [f"{count:,} {word}"] if count else []
    return ", ".join(parts)
