"""The only writer to stdout: a result in one of eight formats. A new screen is added to _SCREENS.

Tables fit the terminal; the other formats have raw values. Without a terminal a list is as wide as
necessary, so that a pipe never sees a shortened name.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable
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
from dynctl.documents.demo import DemoEnd, DemoStep
from dynctl.documents.hits import HitsReport
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
from dynctl.documents.verify import VerifyReport, report_lines
from dynctl.documents.workers import CordonChange, WorkerChange, WorkerDetail, WorkerList
from dynctl.findings.report import CodeList, CodePage, Report, State
from dynctl.screens import (
    audit,
    bundle,
    checks,
    config,
    contexts,
    decisions,
    demo,
    hits,
    plan,
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
    text = rendered(result, options, screen=screen)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderLeft from None


def rendered(
    result: Any, options: GlobalOptions, *, screen: Callable[[Any, Canvas], str] | None = None
) -> str:
    """What :func:`emit` writes."""
    output = options.output
    if output is OutputFormat.JSON:
        text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
        text = printable_json(text)
    elif output is OutputFormat.JSONL:
        text = "".join(msgspec.json.encode(i).decode() + "\n" for i in items(result))
        text = printable_json(text)
    elif output is OutputFormat.YAML:
        text = yaml_text(result)
    elif output is OutputFormat.NAME:
        # One name a line, whatever it contains.
        text = "".join(printable(name) + "\n" for name in names(result))
    elif output is OutputFormat.JUNIT:
        text = printable_lines(_junit(_plain(result)))
    elif output is OutputFormat.CSV:
        text = printable_lines(_csv(_plain(result)))
    else:
        draw_table = screen or draw
        text = _shown(draw_table(_plain(result), Canvas.of(options)))
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
    in_table = options.output in (OutputFormat.TABLE, OutputFormat.WIDE)
    in_place = sys.stdout.isatty() and in_table
    shown, turn = "", 0
    while limit is None or turn < limit:
        if turn:
            sleep(WATCH_S)
        try:
            result, screen = read()
            text = rendered(result, options, screen=screen)
        except DynctlError as error:
            if not turn:
                raise
            text = f"{printable(error.message)}\n" if in_table else shown
        turn += 1
        if text == shown:
            continue
        gap = "\n" if shown and in_table else ""
        try:
            sys.stdout.write((_HOME if in_place else gap) + text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise ReaderLeft from None
        shown = text


def _shown(text: str) -> str:
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


def talk(message: str) -> None:
    """Write a sentence for the user to stderr; the terminal's width wraps it."""
    advise(message)


def doubted(doubts: Iterable[str]) -> None:
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

    def dumped(*, unicode: bool) -> str:
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

    text = dumped(unicode=True)
    return text if printable_lines(text) == text else dumped(unicode=False)


_SCREENS: dict[type, Any] = {
    RouteResult: route.route_short,
    WorkerList: workers.worker_list,
    WorkerDetail: workers.worker_detail,
    CordonChange: workers.cordon_change,
    WorkerChange: workers.worker_change,
    TopologyShow: topology.topology_show,
    TopologySync: topology.topology_sync,
    TopologyPlan: plan.topology_plan,
    TopologyValue: topology.topology_value,
    ThresholdList: thresholds.threshold_list,
    ThresholdChange: thresholds.threshold_change,
    ConfigReport: config.config_report,
    ContextList: contexts.context_list,
    ContextDetail: contexts.context_detail,
    ContextChange: contexts.context_change,
    Versions: config.versions,
    BundleReport: bundle.bundle_report,
    RecordingReport: recording.recording_report,
    Report: checks.check_report,
    VerifyReport: verify.verify_report,
    CodePage: checks.code_page,
    CodeList: checks.code_list,
    AuditReport: audit.audit_screen,
    HitsReport: hits.hits_screen,
    DecisionReport: decisions.decision_report,
    ReplayReport: replay.replay_report,
    DemoStep: demo.demo_step,
    DemoEnd: demo.demo_end,
}


def draw(result: Any, canvas: Canvas) -> str:
    """The screen of a result."""
    return str(_SCREENS[type(result)](result, canvas))


def items(result: Any) -> Iterable[Any]:
    """The lines of jsonl: the items of a list, else the whole result."""
    if isinstance(result, WorkerList):
        return result.workers
    if isinstance(result, DecisionReport):
        return result.decisions
    if isinstance(result, TopologyShow | TopologyPlan | TopologySync):
        return result.rows
    if isinstance(result, ThresholdList):
        return result.thresholds
    if isinstance(result, ConfigReport):
        return result.settings
    if isinstance(result, ContextList):
        return result.contexts
    if isinstance(result, ContextDetail):
        return result.values
    if isinstance(result, VerifyReport):
        return report_lines(result)
    if isinstance(result, Report):
        return result.checks
    if isinstance(result, CodeList):
        return result.codes
    if isinstance(result, AuditReport):
        return result.workers
    if isinstance(result, HitsReport):
        return result.rungs
    if isinstance(result, ReplayReport):
        return result.results
    return [result]


def names(result: Any) -> list[str]:
    """The lines of ``-o name``."""
    if isinstance(result, RouteResult):
        refs = (result.winner.prefill, result.winner.decode)
        return [ref.worker for ref in refs if ref is not None]
    if isinstance(result, WorkerList):
        return [worker.name for worker in result.workers]
    if isinstance(result, WorkerDetail):
        return [result.worker.name]
    if isinstance(result, CordonChange | WorkerChange):
        return [result.worker]
    if isinstance(result, DecisionReport):
        return [line.id for line in result.decisions]
    if isinstance(result, TopologyShow | TopologyPlan):
        return [NO_DOMAIN if row.value is None else row.value for row in result.rows]
    if isinstance(result, TopologySync):
        return [*dict.fromkeys(f"{row.namespace}/{row.pod}" for row in result.rows)]
    if isinstance(result, TopologyValue):
        return [result.value]
    if isinstance(result, ThresholdList):
        return sorted({one.model for one in result.thresholds if one.model is not None})
    if isinstance(result, ThresholdChange):
        return [result.after.model]
    if isinstance(result, ConfigReport):
        return [setting.name for setting in result.settings]
    if isinstance(result, ContextList):
        return [row.name for row in result.contexts]
    if isinstance(result, ContextDetail | ContextChange):
        return [] if result.name is None else [result.name]
    if isinstance(result, BundleReport):
        return [result.path]
    if isinstance(result, RecordingReport):
        return [result.file]
    if isinstance(result, Report):
        return [check.code for check in result.checks if check.state in (State.FAIL, State.WARN)]
    if isinstance(result, AuditReport):
        return [row.worker for row in result.workers]
    if isinstance(result, HitsReport):
        return [one.cause for one in result.largest]
    if isinstance(result, ReplayReport):
        return [row.policy for row in result.summaries]
    if isinstance(result, CodeList | CodePage):
        return [page.code for page in getattr(result, "codes", [result])]
    return [result.client] if isinstance(result, Versions) else []
