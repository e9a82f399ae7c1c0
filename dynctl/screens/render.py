"""The only writer to stdout: a result in one of nine formats. A new screen is added to _SCREENS.

Tables fit the terminal; the other formats have raw values. Without a terminal a list is as wide as
necessary, so that a pipe never sees a shortened name.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any, Final, TypeAlias

import msgspec

from dynctl.base.errors import DynctlError, ReaderLeft, UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.base.terminal import (
    UNSAFE,
    advise,
    printable,
    printable_json,
    printable_lines,
    printable_value,
)
from dynctl.documents.audit import AuditReport
from dynctl.documents.bundle import BundleReport
from dynctl.documents.client import Versions
from dynctl.documents.config import ConfigReport
from dynctl.documents.contexts import ContextChange, ContextDetail, ContextList
from dynctl.documents.demo import ClusterTrouble, ClusterTroubles, DemoEnd, DemoStep
from dynctl.documents.hits import HitsReport
from dynctl.documents.hot import HotReport
from dynctl.documents.prompt_parts import PromptParts
from dynctl.documents.recording import RecordingReport
from dynctl.documents.replay import ReplayReport
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import DecisionReport
from dynctl.documents.thresholds import ThresholdChange, ThresholdList
from dynctl.documents.topology import (
    NO_DOMAIN,
    TopologyPlan,
    TopologyShow,
    TopologySync,
    TopologyValue,
)
from dynctl.documents.trial import TrialReport
from dynctl.documents.verify import VerifyPlan, VerifyReport, report_lines
from dynctl.documents.workers import CordonChange, WorkerChange, WorkerDetail, WorkerList
from dynctl.findings.report import CodeList, CodePage, Report, Runbook, State
from dynctl.screens import (
    audit,
    bundle,
    checks,
    config,
    contexts,
    decisions,
    demo,
    hits,
    hot,
    plan,
    prompt_parts,
    recording,
    replay,
    route,
    thresholds,
    topology,
    verify,
    workers,
)
from dynctl.screens.canvas import Canvas

#: Canvas's own codes: bold, faint, and the color of a check's mark.
_OWN_CODE: Final = re.compile(
    r"(\x1b\[[012]m|\x1b\[3[123]m(?=(?:\x1b\[1m)?(?:pass|WARN|FAIL)\x1b))"
)


def emit(
    result: Any, options: GlobalOptions, *, screen: Callable[[Any, Canvas], str] | None = None
) -> None:
    """Write ``result`` in the format of the options; ``screen`` replaces its usual table."""
    _write(render_result(result, options, screen=screen))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderLeft from None


def render_result(
    result: Any, options: GlobalOptions, *, screen: Callable[[Any, Canvas], str] | None = None
) -> str:
    """What :func:`emit` writes."""
    output = options.output
    if output is OutputFormat.JSON:
        text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
        text = printable_json(text)
    elif output is OutputFormat.JSONL:
        text = "".join(
            msgspec.json.encode(i).decode() + "\n" for i in screen_of(result).rows(result)
        )
        text = printable_json(text)
    elif output is OutputFormat.YAML:
        text = yaml_text(result)
    elif output is OutputFormat.NAME:
        # One name a line, whatever it contains.
        text = "".join(printable(name) + "\n" for name in screen_of(result).names(result))
    elif output is OutputFormat.JUNIT:
        text = printable_lines(_junit(_plain(result)))
    elif output is OutputFormat.CSV:
        text = printable_lines(_csv(_plain(result)))
    elif output is OutputFormat.PROMETHEUS:
        text = _prometheus(result)
    else:
        draw_table = screen or draw
        text = _printable_text(draw_table(_plain(result), Canvas.from_options(options)))
    return text


#: Seconds between two readings of a list that is watched.
WATCH_S: Final = 2.0
#: Cursor to the top left, and the rest of the screen cleared.
_HOME: Final = "\x1b[H\x1b[J"


Listed: TypeAlias = tuple[Any, Callable[[Any, Canvas], str] | None]
"""A list, and the screen that replaces its usual one."""


def show_list(
    options: GlobalOptions,
    read: Callable[[], Listed],
    *,
    watch: bool,
    sleep: Callable[[float], None] = time.sleep,
    limit: int | None = None,
) -> None:
    """Show what ``read`` returns; with ``watch`` again and again until Ctrl-C: in place on a
    terminal, else each time it changes.

    While it is watched, a reading that fails is shown in place of the list; the first one raises.
    ``limit``: readings. Raises UsageProblem for a source that never changes, and ReaderLeft when
    the reader of stdout leaves.
    """
    if not watch:
        result, screen = read()
        emit(result, options, screen=screen)
        return
    if options.demo or options.view is not None:
        flag = "--demo" if options.demo else "--view"
        raise UsageProblem(f"--watch {flag}: it never changes; specify --frontend or --discovery")
    shown = ""
    for turn in count() if limit is None else range(limit):
        if turn:
            sleep(WATCH_S)
        text = _reading(options, read, shown if turn else None)
        if text != shown:
            _write(_before_list(options, shown) + text)
            shown = text


def _reading(options: GlobalOptions, read: Callable[[], Listed], before: str | None) -> str:
    """What one reading of a watched list shows. ``before``: what the last one showed, None: there
    was none, and a failure is raised."""
    try:
        result, screen = read()
        return render_result(result, options, screen=screen)
    except DynctlError as error:
        if before is None:
            raise
        return f"{printable(error.message)}\n" if _is_table(options) else before


def _before_list(options: GlobalOptions, shown: str) -> str:
    """What separates a reading from the one before it."""
    if not _is_table(options):
        return ""
    if sys.stdout.isatty():
        return _HOME
    return "\n" if shown else ""


def _is_table(options: GlobalOptions) -> bool:
    return options.output in (OutputFormat.TABLE, OutputFormat.WIDE)


def _printable_text(text: str) -> str:
    """``text`` without unsafe characters, but with the canvas's codes."""
    # Every second piece is a code.
    pieces = _OWN_CODE.split(text)
    pieces[::2] = map(printable_lines, pieces[::2])
    return "".join(pieces)


def _plain(result: Any) -> Any:
    """The result without escape sequences in its texts: on the screen they would pass for the
    canvas's own."""
    try:
        return printable_value(result)
    except (msgspec.MsgspecError, TypeError, ValueError):
        return result  # not a document; _shown still cleans its screen


def _junit(result: Any) -> str:
    from dynctl.findings.report import Report
    from dynctl.screens.junit import junit

    if not isinstance(result, Report):
        raise UsageProblem(
            "-o junit: this command runs no checks; only checks have a junit format",
            "-o json",
        )
    return junit(result)


def _csv(result: Any) -> str:
    if not isinstance(result, ReplayReport):
        raise UsageProblem(
            "-o csv: this command has no table of numbers; only replay has a csv format",
            "-o json",
        )
    return replay.replay_csv(result)


def _prometheus(result: Any) -> str:
    from dynctl.screens.prometheus import prometheus_text

    if not isinstance(result, TrialReport):
        raise UsageProblem(
            "-o prometheus: this command makes no tests; only test has a prometheus format",
            "-o json",
        )
    return prometheus_text(result)


def talk(message: str) -> None:
    """Write a sentence for the user to stderr; the terminal's width wraps it."""
    advise(message)


def write_doubts(doubts: Iterable[str]) -> None:
    """Write what is unknown about the workers of an answer to stderr."""
    for doubt in doubts:
        talk(f"note: {doubt}")


def yaml_text(result: Any) -> str:
    """``result`` as one YAML document, keys in their own order."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Texts with line breaks and other unsafe characters stay on their line, escaped."""

        def represent_str(self, data: str) -> Any:
            style = '"' if UNSAFE.search(data) else None
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, Dumper.represent_str)
    plain = msgspec.to_builtins(result)

    def dump(*, unicode: bool) -> str:
        return str(
            yaml.dump(
                plain,
                Dumper=Dumper,
                default_flow_style=False,
                sort_keys=False,
                allow_unicode=unicode,
                width=math.inf,
            )
        )

    text = dump(unicode=True)
    return text if printable_lines(text) == text else dump(unicode=False)


@dataclass(frozen=True, slots=True)
class Screen:
    """How a document is shown: as a table, as the lines of jsonl (``rows``), and as the lines of
    ``-o name`` (``names``)."""

    table: Callable[[Any, Canvas], str]
    names: Callable[[Any], Iterable[str]] = lambda result: ()
    rows: Callable[[Any], Iterable[Any]] = lambda result: [result]


def _route_workers(result: RouteResult) -> Iterable[str]:
    refs = (result.winner.prefill, result.winner.decode)
    return (ref.worker for ref in refs if ref is not None)


def _domain_names(result: TopologyShow | TopologyPlan) -> Iterable[str]:
    return (NO_DOMAIN if row.value is None else row.value for row in result.rows)


def _context_name(result: ContextDetail | ContextChange) -> Iterable[str]:
    return () if result.name is None else (result.name,)


def _pods(result: TopologySync) -> Iterable[str]:
    return dict.fromkeys(f"{row.namespace}/{row.pod}" for row in result.rows)


def _models(result: ThresholdList) -> Iterable[str]:
    return sorted({row.model for row in result.thresholds if row.model is not None})


def _failing_codes(report: Report) -> Iterable[str]:
    return (check.code for check in report.checks if check.state in (State.FAIL, State.WARN))


#: A new document is added here.
_SCREENS: dict[type, Screen] = {
    RouteResult: Screen(route.route_short, _route_workers),
    WorkerList: Screen(
        workers.worker_list, lambda r: (row.name for row in r.workers), attrgetter("workers")
    ),
    WorkerDetail: Screen(workers.worker_detail, lambda r: (r.worker.name,)),
    CordonChange: Screen(workers.cordon_change, lambda r: (r.worker,)),
    WorkerChange: Screen(workers.worker_change, lambda r: (r.worker,)),
    TopologyShow: Screen(topology.topology_show, _domain_names, attrgetter("rows")),
    TopologyPlan: Screen(plan.topology_plan, _domain_names, attrgetter("rows")),
    TopologySync: Screen(topology.topology_sync, _pods, attrgetter("rows")),
    TopologyValue: Screen(topology.topology_value, lambda r: (r.value,)),
    ThresholdList: Screen(thresholds.threshold_list, _models, attrgetter("thresholds")),
    ThresholdChange: Screen(thresholds.threshold_change, lambda r: (r.after.model,)),
    ConfigReport: Screen(
        config.config_report, lambda r: (row.name for row in r.settings), attrgetter("settings")
    ),
    ContextList: Screen(
        contexts.context_list, lambda r: (row.name for row in r.contexts), attrgetter("contexts")
    ),
    ContextDetail: Screen(contexts.context_detail, _context_name, attrgetter("values")),
    ContextChange: Screen(contexts.context_change, _context_name),
    Versions: Screen(config.versions, lambda r: (r.client,)),
    BundleReport: Screen(bundle.bundle_report, lambda r: (r.path,)),
    RecordingReport: Screen(recording.recording_report, lambda r: (r.file,)),
    Report: Screen(checks.check_report, _failing_codes, attrgetter("checks")),
    VerifyPlan: Screen(verify.verify_plan, rows=attrgetter("requests")),
    TrialReport: Screen(checks.check_report, _failing_codes, attrgetter("checks")),
    VerifyReport: Screen(verify.verify_report, _failing_codes, report_lines),
    CodePage: Screen(checks.code_page, lambda r: (r.code,)),
    Runbook: Screen(checks.runbook, rows=attrgetter("errors")),
    CodeList: Screen(
        checks.code_list, lambda r: (page.code for page in r.codes), attrgetter("codes")
    ),
    AuditReport: Screen(
        audit.audit_screen, lambda r: (row.worker for row in r.workers), attrgetter("workers")
    ),
    HitsReport: Screen(
        hits.hits_screen, lambda r: (loss.cause for loss in r.largest), attrgetter("rungs")
    ),
    HotReport: Screen(
        hot.hot_screen, lambda r: (p.prefix for p in r.prefixes), attrgetter("prefixes")
    ),
    PromptParts: Screen(
        prompt_parts.prompt_parts_screen,
        lambda r: (row.name for row in r.parts),
        attrgetter("parts"),
    ),
    DecisionReport: Screen(
        decisions.decision_report,
        lambda r: (line.id for line in r.decisions),
        attrgetter("decisions"),
    ),
    ReplayReport: Screen(
        replay.replay_report, lambda r: (row.policy for row in r.summaries), attrgetter("results")
    ),
    DemoStep: Screen(demo.demo_step),
    ClusterTrouble: Screen(demo.cluster_trouble, lambda r: [r.name]),
    ClusterTroubles: Screen(demo.cluster_troubles, lambda r: [row.name for row in r.troubles]),
    DemoEnd: Screen(demo.demo_end),
}


#: A document whose command draws its table.
_DRAWN_BY_ITS_COMMAND: Final = Screen(lambda result, canvas: str(result))


def screen_of(result: Any) -> Screen:
    """The screen of a document; also of one that extends it, as a past decision extends a
    RouteResult."""
    kinds = type(result).__mro__
    return next((_SCREENS[kind] for kind in kinds if kind in _SCREENS), _DRAWN_BY_ITS_COMMAND)


def draw(result: Any, canvas: Canvas) -> str:
    """The table of a result."""
    return screen_of(result).table(result, canvas)
