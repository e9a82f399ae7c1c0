"""`dynctl replay`: policies on a trace, a recording or a generated workload, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base.errors import ExitCode, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.option_groups import only_given, with_options
from dynctl.cli.shared_options import FailOn, expect_level, read_as, seconds
from dynctl.simulation.engine.config import timed_options

if TYPE_CHECKING:
    from dynctl.documents.replay import ReplayReport, ReplayResult
    from dynctl.simulation.replay.fleet import (
        Objective,
        ReplayPolicy,
        SimulatedFleet,
        SimulatedSync,
    )
    from dynctl.simulation.replay.fleets import FleetSource
    from dynctl.simulation.replay.inputs import TraceInput
    from dynctl.wire.traces import TraceRequest

_INPUT = "Requests"
_FLEET = "Fleet"
_ENGINE = "Engine (as serve engine)"
_ROUTERS = "Routers"
_ANSWER = "Answer"
_IN_TURN = (
    "the decode worker gets a request when its prefill has ended; whether these workers start "
    "together, as SGLang's do with a bootstrap address, is not known: --bootstrap simulates that"
)
_ONE_MOMENT = (
    "the workers are those of the recording at one moment: that they join, leave or are "
    "unavailable is not replayed"
)

Trace = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE",
        help="Mooncake JSON lines, Azure CSV (both plain or .gz), or a recording.",
        show_default=False,
    ),
]
Generate = Annotated[
    str | None,
    typer.Option(
        "--generate",
        metavar="agentic|chat|rag|batch",
        help="Generate requests instead.",
        rich_help_panel=_INPUT,
    ),
]
Workload = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="NAME=VALUE",
        help="Parameter of --generate (repeatable): requests, rate, prompts, prompt_tokens, skew, "
        "turns, turn_tokens, output_tokens, think_s, documents, document_tokens, documents_each, "
        "together, tenants, burst, burst_s, burst_every_s, longest_tokens, zones.",
        rich_help_panel=_INPUT,
    ),
]
TraceBlock = Annotated[
    int | None,
    typer.Option(
        "--trace-block-size",
        metavar="N",
        min=1,
        max=65_536,
        help="Tokens of a hash id, or of a generated block. [default: 512; generated: 16]",
        rich_help_panel=_INPUT,
    ),
]
Speed = Annotated[
    float,
    typer.Option(
        metavar="X", min=0.001, max=1000, help="Multiply the rate.", rich_help_panel=_INPUT
    ),
]
Spread = Annotated[
    bool,
    typer.Option(
        "--spread", help="Spread requests of one time evenly until the next time.",
        rich_help_panel=_INPUT,
    ),
]  # fmt: skip
Limit = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Only the first N requests.", rich_help_panel=_INPUT
    ),
]  # fmt: skip
Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only requests of this model.", rich_help_panel=_INPUT),
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad", help="Leave bad lines out and count them.", rich_help_panel=_INPUT
    ),
]  # fmt: skip
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="[LABEL:]NAME|FILE[,SETTING=VALUE]",
        help="round-robin, random, least-loaded, power-of-two, approximate, kv, kv-tuned, "
        "best-pair, a preset, or a YAML or TOML file of settings (repeatable). "
        "[default: round-robin and kv]",
        rich_help_panel=_ROUTERS,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=2000,
        help="Aggregated workers. [default: those of the recording, else 8]",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
Zones = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,..", help="Spread --workers over these zones.", rich_help_panel=_FLEET
    ),
]
Capacity = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VALUE:prefill=N,decode=N",
        help="Workers in one domain value (repeatable).",
        rich_help_panel=_FLEET,
    ),
]
Manifest = Annotated[
    list[str] | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="The replicas of a manifest; - reads stdin.",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
Domain = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Domain of --capacity and --file. [default: zone]",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
Ranks = Annotated[
    int,
    typer.Option(
        "--data-parallel-size", metavar="N", min=1, max=64, help="Ranks of a worker.",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
Bootstrap = Annotated[
    bool | None,
    typer.Option(
        "--bootstrap/--no-bootstrap",
        help="Prefill and decode worker get a request at once, as with SGLang's bootstrap address. "
        "[default: as recorded, else no]",
        show_default=False,
        rich_help_panel=_FLEET,
    ),
]
Enforcement = Annotated[
    str | None,
    typer.Option(
        metavar="none|preferred|required|fallback",
        help="KV transfer policy of the workers.",
        rich_help_panel=_FLEET,
    ),
]
Weight = Annotated[
    float | None,
    typer.Option(
        "--preferred-weight", metavar="X", min=0, max=1,
        help="Weight of --enforcement preferred. [default: 0.85]", rich_help_panel=_FLEET,
    ),
]  # fmt: skip
BlockBytes = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=1 << 40, help="Bytes of a KV block; 0: unknown.",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
EventsDelay = Annotated[
    float,
    typer.Option(
        "--events-delay-ms", metavar="DURATION", parser=seconds(0.0, 3600.0, unit="ms"),
        help="Time from a cache event to the router, ms.", rich_help_panel=_FLEET,
    ),
]  # fmt: skip
EventsLoss = Annotated[
    float,
    typer.Option(
        metavar="X", min=0, max=1, help="Share of KV event batches that are lost.",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
Lose = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLACE@TIME[..TIME]",
        help="Lose a zone or a worker, until a time: zone-a@60s, 3@10s..40s (repeatable).",
        rich_help_panel=_FLEET,
    ),
]
MigrationLimit = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=1000,
        help="How often a request with output goes on with another worker after its own is lost.",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
MigrationTokens = Annotated[
    int | None,
    typer.Option(
        "--migration-max-seq-len", metavar="TOKENS", min=1, max=1 << 31,
        help="Prompts with more tokens do not go on elsewhere. [default: no limit]",
        rich_help_panel=_FLEET,
    ),
]  # fmt: skip
Routers = Annotated[
    int,
    typer.Option(metavar="N", min=1, max=64, help="Routers.", rich_help_panel=_ROUTERS),
]
Sync = Annotated[
    bool,
    typer.Option(
        "--sync/--no-sync", help="Routers share their bookings.", rich_help_panel=_ROUTERS
    ),
]
SyncDelay = Annotated[
    float,
    typer.Option(
        "--sync-delay-ms", metavar="DURATION", parser=seconds(0.0, 60.0, unit="ms"),
        help="Time of a booking to the other routers, ms.", rich_help_panel=_ROUTERS,
    ),
]  # fmt: skip
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=2**63, help="First seed: random choices, generated requests.",
        rich_help_panel=_ROUTERS,
    ),
]  # fmt: skip
Seeds = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=50, help="Simulate N seeds; 95 % intervals from 2 on.",
        rich_help_panel=_ROUTERS,
    ),
]  # fmt: skip
TtftLimit = Annotated[
    float | None,
    typer.Option(
        "--ttft-limit", metavar="DURATION", parser=seconds(0.0),
        help="Goodput: longest TTFT. [default: 2s]", rich_help_panel=_ANSWER,
    ),
]  # fmt: skip
ItlLimit = Annotated[
    float | None,
    typer.Option(
        "--itl-limit-ms", metavar="DURATION", parser=seconds(0.0, unit="ms"),
        help="Goodput: longest inter-token latency, ms. [default: none]", rich_help_panel=_ANSWER,
    ),
]  # fmt: skip
Loads = Annotated[
    str | None,
    typer.Option(
        metavar="X,..", help="Multiples of the rate to simulate, such as 0.5,1,1.5,2,3.",
        rich_help_panel=_ANSWER,
    ),
]  # fmt: skip
MaxRegress = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT",
        help="Exit code 1 if a policy is worse than the first by more, for example 2%.",
        rich_help_panel=_ANSWER,
    ),
]
Search = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=2, max=500,
        help="Tune the numeric settings of the one --policy with N simulations.",
        rich_help_panel=_ANSWER,
    ),
]  # fmt: skip


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


@with_options(engine=_ENGINE_FLAGS)
def replay(
    options: GlobalOptions,
    *,
    trace: Trace = None,
    generate: Generate = None,
    workload: Workload = None,
    trace_block_size: TraceBlock = None,
    speed: Speed = 1.0,
    spread: Spread = False,
    limit: Limit = None,
    model: Model = None,
    skip_bad: SkipBad = False,
    policy: Policies = None,
    routers: Routers = 1,
    sync: Sync = True,
    sync_delay_ms: SyncDelay = 1.0,
    seed: Seed = 1,
    seeds: Seeds = 1,
    workers: Workers = None,
    zones: Zones = None,
    capacity: Capacity = None,
    file: Manifest = None,
    domain: Domain = None,
    data_parallel_size: Ranks = 1,
    bootstrap: Bootstrap = None,
    enforcement: Enforcement = None,
    preferred_weight: Weight = None,
    block_bytes: BlockBytes = 0,
    events_delay_ms: EventsDelay = 0.0,
    events_loss: EventsLoss = 0.0,
    lose: Lose = None,
    migration_limit: MigrationLimit = 0,
    migration_max_seq_len: MigrationTokens = None,
    ttft_limit: TtftLimit = None,
    itl_limit_ms: ItlLimit = None,
    loads: Loads = None,
    max_regress: MaxRegress = None,
    fail_on: FailOn = "fail",
    search: Search = None,
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
    from dataclasses import replace

    from dynctl.screens.render import emit, talk
    from dynctl.simulation.replay.fleet import Objective, SimulatedSync
    from dynctl.simulation.replay.fleets import simulated_fleet
    from dynctl.simulation.replay.inputs import DEFAULT_BLOCK, TraceInput, speeds_of
    from dynctl.simulation.replay.policies import policies as named_policies
    from dynctl.simulation.replay.workloads import workload as named_workload

    expect_level(fail_on)
    modes = ("none", "preferred", "required", "fallback")
    if enforcement is not None and enforcement not in modes:
        raise UsageProblem(f"--enforcement {enforcement}: expected {', '.join(modes)}")
    if (trace is None) == (generate is None):
        raise UsageProblem(
            "expected a trace or --generate KIND" + ("" if trace is None else ", not both"),
            "dynctl replay trace.jsonl, or dynctl replay --generate chat",
        )
    if workload and generate is None:
        raise UsageProblem(f"--workload {workload[0]}: only with --generate KIND")
    allowed = None if max_regress is None else _percent(max_regress)
    factors = None if loads is None else speeds_of(loads)
    given = TraceInput(
        path=trace,
        workload=None if generate is None else named_workload(generate, workload or ()),
        block_size=trace_block_size,
        limit=limit,
        speed=speed,
        model=model,
        skip_bad=skip_bad,
        spread=spread,
    )
    source, live = _fleet(
        options, workers, zones, capacity, file, domain, data_parallel_size, model, trace
    )  # fmt: skip
    if generate is not None and trace_block_size is None:
        given.block_size = engine.get("block_size", source.card.get("block_size", DEFAULT_BLOCK))
    first = given.first()
    unnamed = live is None and workers is None and not (zones or capacity or file)
    if (
        (unnamed or _repeats(options, trace))
        and given.path is not None
        and given.format == "recording"
    ):
        from dynctl.simulation.replay.recorded import fleet_of_recording

        recorded = fleet_of_recording(
            given.path, model or first.model or None, limit=limit, skip_bad=skip_bad
        )
        if recorded is None:
            note = "the recording has no workers: the fleet is the default one"
            source = replace(source, notes=(*source.notes, note))
        else:
            source = recorded
    fleet = simulated_fleet(
        source,
        engine,
        block_size=min(first.block_size, 4096),
        enforcement=enforcement,
        weight=preferred_weight,
        lose=lose or (),
        bootstrap=bootstrap,
        migration_limit=migration_limit,
        migration_max_tokens=migration_max_seq_len,
        events_delay_s=events_delay_ms / 1000,
        events_loss=events_loss,
        block_bytes=block_bytes,
    )
    chosen, warnings = named_policies(policy or ([] if live else ["round-robin", "kv"]))
    if not policy and live is not None:
        chosen = [live, *named_policies(["round-robin"])[0]]
    for warning in warnings:
        talk(f"warning: {warning}")
    if allowed is not None and len(chosen) < 2:
        raise UsageProblem("--max-regress compares policies; expected at least two --policy")
    if search is not None and (len(chosen) != 1 or allowed is not None or factors is not None):
        raise UsageProblem(
            "--search tunes one policy: give one --policy, without --max-regress and --loads"
        )
    report = _report(
        given,
        source,
        fleet,
        chosen,
        first=first,
        seeds=range(seed, seed + seeds),
        routers=routers,
        sync=SimulatedSync("delayed" if sync else "none", sync_delay_ms / 1000),
        objective=Objective(
            2.0 if ttft_limit is None else ttft_limit,
            None if itl_limit_ms is None else itl_limit_ms / 1000,
        ),
        allowed=allowed,
        factors=factors,
        tries=search,
        assumed={name: getattr(fleet.engine, name) for name in source.assumed_options(engine)},
        pairs_unknown=bootstrap is None and source.published and not source.shows_pairs,
    )
    emit(report, options)
    failing = {"regressed"} | ({"unknown"} if fail_on == "warn" else set())
    for change in report.changes:
        for one in change.changes:
            if one.verdict in failing:
                talk(f"{change.policy}: {one.verdict}: {one.text}")
    bad = any(change.verdict in failing for change in report.changes)
    return ExitCode.NO if bad else ExitCode.YES


def _percent(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1000:
        raise UsageProblem(f"--max-regress {text}: expected a percentage such as 2%")
    return value / 100


def _fleet(
    options: GlobalOptions,
    workers: int | None,
    zones: str | None,
    capacity: list[str] | None,
    files: list[str] | None,
    domain: str | None,
    ranks: int,
    model: str | None,
    trace: Path | None,
) -> tuple[FleetSource, ReplayPolicy | None]:
    """The workers, and the policy of a live router where it is known. Raises UsageProblem.

    The workers of a recording that is replayed with its own settings are not read here.
    """
    from dataclasses import replace

    from dynctl.base.options import SOURCES
    from dynctl.simulation.replay.fleets import fleet_of_count, fleet_of_live, fleet_of_places

    live = bool(options.given & (SOURCES | {"context"}))
    by_count = workers is not None or zones is not None
    if by_count + bool(capacity) + bool(files) + live > 1:
        raise UsageProblem(
            "--workers (with --zones), --capacity, --file and a deployment (--demo, --view, "
            "--frontend, --discovery) are different fleets; specify only one"
        )
    if capacity:
        from dynctl.planning.planned_fleet import fleet_of_flags

        return fleet_of_places(fleet_of_flags(capacity, domain), ranks), None
    if files:
        from dynctl.manifests.files import read_manifests
        from dynctl.planning.planned_fleet import fleet_of_manifests

        named = ", ".join(files[:3]) + (" and more" if len(files) > 3 else "")
        return fleet_of_places(
            fleet_of_manifests(read_manifests(files), named, domain), ranks
        ), None
    if live:
        from dynctl.sources.connect import connect

        seen = connect(options)
        if _repeats(options, trace):
            return fleet_of_count(8, (), ranks), _live_policy(seen)
        found = fleet_of_live(seen.title, seen.workers(), model)
        if options.recording is not None:
            found = replace(found, notes=(*found.notes, _ONE_MOMENT))
        return found, _live_policy(seen)
    names = [one.strip() for one in (zones or "").split(",") if one.strip()]
    return fleet_of_count(8 if workers is None else workers, names, ranks), None


def _repeats(options: GlobalOptions, trace: Path | None) -> bool:
    """Whether a recording is replayed on itself, not on its workers at one moment."""
    own = options.recording
    return (
        own is not None
        and trace is not None
        and options.at is None
        and own.exists()
        and trace.exists()
        and own.samefile(trace)
    )


def _live_policy(seen: Any) -> ReplayPolicy:
    from dynctl.planning.prefill_load import prefill_model
    from dynctl.screens.render import talk
    from dynctl.simulation.replay.fleet import ReplayPolicy
    from router_core import SETTINGS, RouterConfig

    values = {row.name: row.value for row in seen.config().settings if row.known}
    known = {name: value for name, value in values.items() if name in SETTINGS}
    config = RouterConfig().with_values(known)
    try:
        prefill_model(config)
    except UsageProblem as error:
        talk(f"warning: policy live: {error.message}; the load of its prefills does not fall here")
        config = config.with_values({"router_prefill_load_model": "none"})
    return ReplayPolicy("live", config)


def _report(
    given: TraceInput,
    source: FleetSource,
    fleet: SimulatedFleet,
    chosen: list[ReplayPolicy],
    *,
    first: TraceRequest,
    seeds: range,
    routers: int,
    sync: SimulatedSync,
    objective: Objective,
    allowed: float | None,
    factors: tuple[float, ...] | None,
    tries: int | None,
    assumed: dict[str, Any],
    pairs_unknown: bool,
) -> ReplayReport:
    """Simulate what the answer needs. Raises UsageProblem."""
    from dynctl.documents.replay import ReplayReport, ReplayTrace, RunMetrics
    from dynctl.screens.replay import Progress
    from dynctl.simulation.replay import comparison
    from dynctl.simulation.replay.simulation import ReplayError, simulate
    from router_core import Role

    total = given.limit or (given.workload.requests if given.workload is not None else None)
    progress = Progress(total)

    def run(policy: ReplayPolicy, seed: int, load: float) -> ReplayResult:
        progress.about = policy.name + (f", seed {seed}" if len(seeds) > 1 else "")
        if load != 1:
            progress.about += f", load x{load:g}"
        requests: Iterator[Any] = progress.following(given.requests(seed, load))
        where = fleet.faster(given.speed * load)
        return simulate(
            requests, where, policy, seed, routers=routers, sync=sync, objective=objective
        )

    results: list[ReplayResult] = []
    try:
        if tries is not None:
            points = comparison.search(run, chosen[0], tries, seeds[0])
            results = [run(chosen[0], seeds[0], 1.0)]
        else:
            points = []
            results = [run(policy, seed, 1.0) for policy in chosen for seed in seeds]
        curve = [] if factors is None else comparison.loads(run, chosen, factors, seeds[0])
    except ReplayError as error:
        raise UsageProblem(str(error)) from None
    finally:
        progress.clear()
    notes = [*source.notes, *given.notes]
    if pairs_unknown and any(one.role is Role.PREFILL for one in fleet.workers):
        notes.append(_IN_TURN)
    notes += dict.fromkeys(note for result in results for note in result.notes)
    notes += [f"skipped {problem}" for problem in given.skipped.problems]
    return ReplayReport(
        trace=ReplayTrace(
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
        ),
        fleet=_described(source, fleet),
        seeds=list(seeds),
        results=results,
        summaries=comparison.summaries(results),
        metrics=[
            RunMetrics(result.policy, result.seed, comparison.values(result)) for result in results
        ],
        changes=[] if allowed is None else comparison.changes(results, allowed),
        loads=curve,
        search=points,
        notes=notes,
        assumed=assumed,
    )


def _described(source: FleetSource, fleet: SimulatedFleet) -> str:
    """``8 aggregated workers in zone-a, zone-b (--workers)``."""
    from collections import Counter

    roles = Counter(one.role.value for one in fleet.workers)
    text = " and ".join(f"{count:,} {role}" for role, count in sorted(roles.items()))
    text += " worker" if len(fleet.workers) == 1 else " workers"
    if source.places:
        text += f" in {', '.join(source.places[:6])}" + (", .." if len(source.places) > 6 else "")
    if any(one.bootstrap for one in fleet.workers):
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
        count = len({one.worker_id for one in fleet.changes if one.what == what})
        parts += [f"{count:,} {word}"] if count else []
    return ", ".join(parts)
