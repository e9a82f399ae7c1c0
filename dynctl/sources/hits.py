"""`hits`: the records of files, of a simulated trace, or of the next minutes of a live router."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from pathlib import Path
from typing import Any, Final

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import Unreachable, UsageProblem, file_problem
from dynctl.base.options import GlobalOptions
from dynctl.base.signals import sigterm_like_ctrl_c
from dynctl.documents.doubts import doubt
from dynctl.documents.hits import HitsCause, HitsReport, best_trial
from dynctl.documents.hot import HotReport
from dynctl.documents.recording import (
    NO_DECISIONS,
    NO_PROMPT_HASHES,
    PUBLISH_DECISIONS,
    Record,
    Start,
)
from dynctl.documents.recording_file import RecordingFile
from dynctl.health.hits import Ladder, Window
from dynctl.health.hits.hot import HotPrefixes
from dynctl.health.hits.trials import changes
from dynctl.simulation.replay.inputs import DEFAULT_BLOCK, TraceInput, is_recording
from dynctl.sources.recording import moment
from router_core import SETTINGS, TIERS, RouterConfig

#: Recordings that are judged together: those of the routers of one fleet.
MOST_FILES: Final = 16
#: Doubts about a ladder that are about prefixes too.
_OF_PREFIXES: Final = ("DYR0767", "DYR0768")
#: A live recording may have this size; longer ones are for `dynctl record`.
_MOST_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """How a trace is run: the policy (as `replay --policy`), workers, blocks of each, routers.

    ``generate``: the kind of a generated workload, in place of a file.
    """

    generate: str | None = None
    policy: str = "kv"
    workers: int = 8
    total_blocks: int | None = None
    routers: int = 1
    limit: int | None = None
    seed: int = 1


@dataclass(frozen=True, slots=True)
class HitsQuery:
    """What is judged: groups (one of ``documents.hits.BY`` or empty), times, damaged chunks.

    ``hot`` counts the prefixes of the requests.
    """

    by: str = ""
    start: str | None = None
    end: str | None = None
    skip_bad: bool = False
    hot: HotPrefixes | None = None

    @property
    def windowed(self) -> bool:
        return self.start is not None or self.end is not None


def of_files(files: Sequence[Path], query: HitsQuery, trace: SimulatedTrace | None) -> HitsReport:
    """The ladder of recordings of one fleet, or of one trace. Raises UsageProblem.

    ``trace``: how a trace is run; None where no such option was given.
    """
    if len(files) > MOST_FILES:
        raise UsageProblem(f"{len(files)} files; expected at most {MOST_FILES}")
    try:
        recordings = [is_recording(path) for path in files]
        if all(recordings):
            if trace is not None:
                raise UsageProblem(
                    f"{files[0]} is a recording: --policy, --workers, --total-blocks, --routers, "
                    "--limit and --seed are for a trace",
                    f"dynctl replay {files[0]} simulates the requests of a recording",
                )
            opened = [RecordingFile(path, skip_bad=query.skip_bad) for path in files]
            report = _of_recordings(opened, query)
            if not report.requests:
                raise _nothing_to_judge(report, opened)
            return report
        if len(files) > 1:
            raise UsageProblem(
                f"{len(files)} files, and {files[recordings.index(False)]} is not a recording; "
                "expected recordings of the routers of one fleet, or one trace"
            )
        return of_trace(files[0], query, trace or SimulatedTrace())
    except WireError as error:
        raise UsageProblem(str(error)) from None
    except OSError as error:
        raise UsageProblem(f"{error.filename}: {file_problem(error)}") from None


_FILE_WAYS: Final = """
or, without a running router:
FILE                               a recording (dynctl record FILE) or a trace
--generate KIND                    agentic, chat, rag or batch, simulated"""


def of_live(
    options: GlobalOptions, seconds: int, query: HitsQuery, keep: Path | None = None
) -> HitsReport:
    """The ladder of the next ``seconds`` of the routers of the options.

    ``keep``: the file in which the recording of one router stays. Raises UsageProblem, Unreachable.
    """
    if query.windowed:
        raise UsageProblem("--from and --to are for files; a live router is judged with --for")
    if options.recording is not None:
        raise UsageProblem(
            f"--recording {options.recording}: expected the recording as the argument FILE",
            f"write {options.recording} without --recording",
        )
    from dynctl.base.terminal import advise
    from dynctl.serving.records.recorder import already_there
    from dynctl.sources.connect import recorded
    from dynctl.sources.named import RUNNING_WAYS

    origin, urls, token = recorded(options, RUNNING_WAYS + _FILE_WAYS)
    if keep is not None:
        if keep.exists():
            raise already_there(keep)
        if origin == "--frontend" and len(urls) != 1:
            raise UsageProblem(f"--record {keep}: {len(urls)} frontends; a recording is of one")
    advise(f"recording for {seconds:,} s; Ctrl-C ends it, and judges what came until then")
    with sigterm_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="dynctl-hits-") as folder:
        if origin == "--frontend":
            paths = [Path(folder) / f"frontend-{number}" for number in range(len(urls))]
            paths = paths if keep is None else [keep]
            _stream(options, urls, token, seconds, paths)
            title = ", ".join(urls)
        else:
            paths = [keep or Path(folder) / "live"]
            title = _record_dynamo(options, urls, seconds, paths[0])
        with sigterm_like_ctrl_c():  # the loop of an observer leaves SIGTERM without a handler
            report = _of_recordings([RecordingFile(path) for path in paths], query)
            if not report.requests:
                _expect_requests_known(msgspec.structs.replace(report, source=title), paths)
    if keep is not None:
        return msgspec.structs.replace(report, source=f"{title}, kept in {keep}")
    # What was recorded is gone when the command ends, so nothing can be replayed.
    largest = [msgspec.structs.replace(cause, replay=[]) for cause in report.largest]
    return msgspec.structs.replace(report, source=title, largest=largest)


def _stream(
    options: GlobalOptions,
    urls: Sequence[str],
    token: str | None,
    seconds: int,
    paths: Sequence[Path],
) -> None:
    """Record all frontends at the same time, each in its file, until Ctrl-C ends them."""
    from dynctl.sources.frontend.recording import stream_recordings

    if len(urls) > MOST_FILES:
        raise UsageProblem(f"{len(urls)} frontends; expected at most {MOST_FILES}")
    ends = stream_recordings(
        list(zip(urls, paths, strict=True)),
        token,
        timeout=options.timeout,
        seconds=seconds,
        max_bytes=_MOST_BYTES,
    )
    for problem in ends:
        if problem:
            raise Unreachable(problem)


def _record_dynamo(options: GlobalOptions, urls: Sequence[str], seconds: int, path: Path) -> str:
    from dynctl.adapters.dynamo.planes import namespace, open_planes
    from dynctl.serving.routing.config import FrontendConfig, Limits
    from dynctl.serving.services.observe_server import Observed, record_deployment
    from dynctl.sources.dynamo.beside import BesideDynamo

    beside = BesideDynamo(options, tuple(urls), None, None)
    record_deployment(
        FrontendConfig(decision_memory_bytes=0, limits=Limits(drain_s=0.0)),
        path,
        Observed(lambda: open_planes(options), namespace(options), beside),
        max_bytes=_MOST_BYTES,
        seconds=seconds,
    )
    return "live Dynamo"


def _of_recordings(opened: Sequence[RecordingFile], query: HitsQuery) -> HitsReport:
    ladder = Ladder(by=query.by, window=_window(opened, query), hot=query.hot)
    streams = [_numbered_records(recording, number) for number, recording in enumerate(opened)]
    for _, number, record in merge(*streams, key=lambda item: item[0]):
        ladder.take(record, number)
    again = ladder.twice_read()
    if again is not None:
        raise UsageProblem(
            f"{opened[again].path}: most of its requests are in another of the recordings too, so "
            "they would count twice",
            "give one recording of each router",
        )
    report = ladder.report(", ".join(str(file.path) for file in opened))
    router = ladder.router
    if router is None or len(opened) != 1 or len(report.models) != 1 or query.windowed:
        return report  # a replay has one router's requests, all of them, of one model
    sizes = {worker.runtime_config.total_kv_blocks for worker in router.registry}
    command = ["dynctl", "replay", str(opened[0].path), "--model", report.models[0]]
    command += ["--skip-bad"] * query.skip_bad
    below = ladder.tier_blocks()
    # Host memory is the first place below the device.
    flags = ("--host-blocks", "--disk-blocks")
    for tier, flag in zip(dict.fromkeys(TIERS.values()), flags, strict=True):
        command += [flag, str(below[tier])] if tier in below else []
    size = sizes.pop() if len(sizes) == 1 else None
    return _with_replays(report, command, [], _policy_of(router.config), size)


def _policy_of(config: RouterConfig) -> str:
    """A policy of `replay` with these settings, of which those that a replay reads differ from the
    defaults."""
    from dynctl.simulation.replay.policies import BUILT_IN

    mode = str(config.router_mode)
    plain = RouterConfig(router_mode=config.router_mode)
    parts = [mode if mode in BUILT_IN else f"kv,router_mode={mode}"]
    for name in SETTINGS:
        value = getattr(config, name)
        if value != getattr(plain, name):
            parts.append(f"{name}={'none' if value is None else value}")
    return ",".join(parts)


def _changes(cause: HitsCause, config: RouterConfig) -> dict[str, Any]:
    """The settings that would change a cause, where a replay simulates their effect.

    The best of those that were tried on the recorded choices; nothing where none of them helps.
    """
    if cause.cause == "blind":
        # Routers share bookings, not prompts: what others sent is in the events of the engines.
        return {} if config.use_kv_events else {"use_kv_events": True}
    if cause.tried:
        best = best_trial(cause.trials)
        return {} if best is None else best.settings
    return dict(next(iter(changes(cause.cause, config)), ()))


def bytes_per_token(model_path: Path) -> float:
    """Bytes of the KV cache of a token of the model in a directory. Raises UsageProblem where its
    config.json does not show them."""
    from dynctl.tokenization import TokenizerError, read_model_config
    from dynctl.wire.model_config import UnknownSize, kv_bytes_per_token

    try:
        return kv_bytes_per_token(read_model_config(model_path))
    except (TokenizerError, UnknownSize) as error:
        raise UsageProblem(
            f"--model-path {model_path}: the size of the KV cache is unknown: {error}",
            "leave the option out: the command then shows no sizes",
        ) from None


def hot_report(report: HitsReport, prefixes: HotPrefixes) -> HotReport:
    """The prefixes of the requests of a report, which were counted while it was made."""
    doubts = [known for known in report.doubts if known.code in _OF_PREFIXES]
    if prefixes.left_out:
        doubts.append(doubt("DYR0768", what=f"blocks of prefixes ({prefixes.left_out:,})"))
    return HotReport(
        report.source,
        report.start,
        report.end,
        prefixes.requests,
        prefixes.prompt_tokens,
        report.workers,
        report.models,
        prefixes.shared,
        prefixes.prefixes,
        doubts,
    )


def _with_replays(
    report: HitsReport,
    command: Sequence[str],
    sized: Sequence[str],
    policy: str,
    total_blocks: int | None,
    routers: int = 1,
) -> HitsReport:
    """The report whose largest causes have the command lines of `replay` that show their gain.

    ``sized``: the option of ``command`` that sets the blocks of a rank, if it has one; these are
    ``total_blocks``, None where it is unknown. ``policy``: as after `--policy`. ``routers`` that
    share no bookings; a router that sees all requests is the change where they do not see each
    other's.
    """
    from dynctl.simulation.replay.policies import policies

    def same(text: str, config: RouterConfig | None = None) -> RouterConfig | None:
        # What cannot be written as a policy gets no command, rather than one of other settings.
        try:
            found = policies([text])[0][0].config
        except UsageProblem:
            return None
        return found if config in (None, found) else None

    config = same(policy)
    if config is None:
        return report
    several = ["--routers", str(routers), "--no-sync"] if routers > 1 else []
    plain = policy.partition(":")[2] if same(f"now:{policy}") is None else policy

    def lines_of(cause: HitsCause) -> list[list[str]]:
        if cause.cause == "capacity" and total_blocks is not None:
            twice = ["--total-blocks", str(2 * total_blocks)]
            return [[*several, *blocks, "--policy", policy] for blocks in (sized, twice)]
        if cause.cause == "blind" and several and config.use_kv_events:
            routers_of = (several, ["--routers", "1"])
            return [[*number, *sized, "--policy", policy] for number in routers_of]
        changed = _changes(cause, config)
        if not changed:
            return []
        text = ",".join([plain, *(f"{name}={value}" for name, value in changed.items())])
        if same(f"changed:{text}", replace(config, **changed)) is None:
            return []
        return [[*several, *sized, "--policy", f"now:{plain}", "--policy", f"changed:{text}"]]

    largest = []
    for cause in report.largest:
        lines = lines_of(cause)
        replays = [shlex.join([*command, *rest]) for rest in lines]
        largest.append(msgspec.structs.replace(cause, replay=replays))
    return msgspec.structs.replace(report, largest=largest)


def _nothing_to_judge(report: HitsReport, opened: Sequence[RecordingFile]) -> UsageProblem:
    """What the recordings lack."""
    reasons = [f"{n:,} {reason}" for reason, n in report.skipped.items()]
    reasons += [
        f"{file.path} is cut at byte {file.cut:,}" for file in opened if file.cut is not None
    ]
    reasons += [
        f"{file.path} has no records" for file in opened if next(file.headers(), None) is None
    ]
    hint = "expected requests with their decisions: dynctl record --show FILE counts what it has"
    if any(NO_PROMPT_HASHES in reason for reason in report.skipped):
        hint = "record a frontend of dynctl, or a Dynamo whose workers compute prompt and answer"
    return UsageProblem(
        f"{report.source}: no whole request to judge{': ' if reasons else ''}{', '.join(reasons)}",
        hint,
    )


def _expect_requests_known(report: HitsReport, paths: Sequence[Path]) -> None:
    """Raise UsageProblem where requests are missing because the source does not publish them."""
    opened = [RecordingFile(path) for path in paths]
    if any(NO_PROMPT_HASHES in reason for reason in report.skipped):
        raise _nothing_to_judge(report, opened)
    starts = (next(iter(file), None) for file in opened)
    if any(isinstance(start, Start) and "decisions" not in start.complete for start in starts):
        raise UsageProblem(
            f"{report.source}: requests are unknown: {NO_DECISIONS}", PUBLISH_DECISIONS
        )


def _numbered_records(records: RecordingFile, number: int) -> Iterator[tuple[float, int, Record]]:
    for record in records:
        yield record.at, number, record


def _window(opened: Sequence[RecordingFile], query: HitsQuery) -> Window:
    if not query.windowed:
        return Window()
    spans = [(header.first, header.last) for file in opened for header in file.headers()]
    if not spans:
        raise UsageProblem(f"{opened[0].path}: the recording has no records")
    first, last = min(one for one, _ in spans), max(one for _, one in spans)
    window = Window()
    start, end = window.start, window.end
    if query.start is not None:
        start = moment(query.start, first, last, "--from")
    if query.end is not None:
        end = moment(query.end, first, last, "--to")
    if end <= start:
        raise UsageProblem(f"--from {query.start} --to {query.end}: --to is not after --from")
    return Window(start, end)


def of_trace(path: Path | None, query: HitsQuery, trace: SimulatedTrace) -> HitsReport:
    """The ladder of a simulated fleet that serves a trace, or a generated workload (``path`` None).

    Raises UsageProblem, and WireError for a bad line.
    """
    from dynctl.simulation.replay.fleets import fleet_of_count, simulated_fleet
    from dynctl.simulation.replay.policies import policies
    from dynctl.simulation.replay.simulation import ReplayError, simulate
    from dynctl.simulation.replay.workloads import workload

    if query.windowed:
        raise UsageProblem("--from and --to are for recordings; --limit N ends a trace")
    kind = trace.generate
    given = TraceInput(
        path=path,
        workload=None if kind is None else workload(kind),
        block_size=None if kind is None else DEFAULT_BLOCK,
        limit=trace.limit,
        skip_bad=query.skip_bad,
    )
    engine = {} if trace.total_blocks is None else {"total_blocks": trace.total_blocks}
    fleet = simulated_fleet(
        fleet_of_count(trace.workers, (), 1),
        engine,
        block_size=min(given.first().block_size, 4096),
    )
    if not any(request.hash_ids for request in given.requests(trace.seed)):
        raise UsageProblem(
            f"{given.name}: no request has hash_ids, so what their prompts share is unknown",
            "expected a trace of Mooncake or Bailian, or a recording; dynctl replay also takes "
            "this one",
        )
    policy = policies([trace.policy])[0][0]
    ladder = Ladder(by=query.by, hot=query.hot)
    try:
        simulate(
            given.requests(trace.seed),
            fleet,
            policy,
            trace.seed,
            routers=trace.routers,
            records=ladder.take,
        )
    except ReplayError as error:
        raise UsageProblem(str(error)) from None
    report = ladder.report(f"{given.name} simulated with policy {policy.name}")
    command = ["dynctl", "replay"]
    command += ["--generate", kind] if kind is not None else [str(path)]
    command += ["--workers", str(trace.workers), "--seed", str(trace.seed)]
    if trace.limit is not None:
        command += ["--limit", str(trace.limit)]
    command += ["--skip-bad"] * query.skip_bad
    sized = [] if trace.total_blocks is None else ["--total-blocks", str(trace.total_blocks)]
    blocks = fleet.engine.total_blocks
    return _with_replays(report, command, sized, trace.policy, blocks, trace.routers)
