"""`dynctl thresholds get`, `set` and `watch`."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.cli.completion import names_of
from dynctl.cli.option_groups import only_given, with_options
from dynctl.cli.shared_options import Duration, Limit, Watch, Yes, seconds

if TYPE_CHECKING:
    from dynctl.documents.thresholds import (
        ModelThresholds,
        RankEffect,
        ReplicaChange,
        ThresholdChange,
    )
    from dynctl.sources.thresholds.canary import RevertCondition
    from dynctl.sources.thresholds.change import ChangedThresholds
    from dynctl.sources.thresholds.replicas import Outcome, ThresholdReading

_Values = Mapping[str, float | int | None]


def get_thresholds(
    options: GlobalOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=names_of("model"),
            help="Only this model.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="Also show each rank: signal, limit, latch, age, effect (also -o wide).",
        ),
    ] = False,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Find out with one dry run per worker which workers a Dynamo frontend refuses.",
        ),
    ] = False,
    workers: Annotated[bool, typer.Option("--workers", hidden=True)] = False,
    watch: Watch = False,
) -> int:
    """Show the current busy thresholds, one row per replica and model.

    Exit code 1: replicas have different thresholds, 3: a replica does not answer.
    """
    from dynctl.base.errors import ExitCode
    from dynctl.cli.threshold_list import threshold_list
    from dynctl.screens.render import Listed, show_list, write_doubts
    from dynctl.sources.connect import connect

    source = connect(options)
    agree, silent = True, False
    doubts: tuple[str, ...] = ()
    wanted = ranks or workers or ask or options.output is OutputFormat.WIDE
    with source.replicas() as replicas:

        def read() -> Listed:
            nonlocal agree, silent, doubts
            result, silent = threshold_list(source.title, replicas, model, signals=wanted, ask=ask)
            agree, doubts = result.agree, source.doubts
            return result, None

        show_list(options, read, watch=watch)
    write_doubts(doubts)
    if not agree:
        return ExitCode.NO
    return ExitCode.UNREACHABLE if silent else ExitCode.YES


#: Setting -> the flag that errors name.
_FLAGS: Final = {
    "active_decode_blocks_threshold": "--active-decode-blocks",
    "active_prefill_tokens_threshold": "--active-prefill-tokens",
    "active_prefill_tokens_threshold_frac": "--active-prefill-tokens-frac",
}
_THRESHOLDS: Final = only_given(
    {
        "active_decode_blocks_threshold": Annotated[
            str | None,
            typer.Option(
                "--active-decode-blocks",
                "--active-decode-blocks-threshold",
                metavar="0..1|off",
                help="Busy above this fraction of a rank's KV blocks.",
            ),
        ],
        "active_prefill_tokens_threshold": Annotated[
            str | None,
            typer.Option(
                "--active-prefill-tokens",
                "--active-prefill-tokens-threshold",
                metavar="N|off",
                help="Busy above this many active prefill tokens.",
            ),
        ],
        "active_prefill_tokens_threshold_frac": Annotated[
            str | None,
            typer.Option(
                "--active-prefill-tokens-frac",
                "--active-prefill-tokens-threshold-frac",
                metavar="X|off",
                help="Busy above this multiple of max_num_batched_tokens.",
            ),
        ],
    }
)


@with_options(thresholds=_THRESHOLDS)
def set_thresholds(
    options: GlobalOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=names_of("model"),
            help="Model; required if there are several.",
        ),
    ] = None,
    *,
    thresholds: dict[str, str],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which ranks would change; set nothing.")
    ] = False,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="If a replica fails, keep the thresholds of the other replicas."
        ),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            parser=seconds(),
            metavar="DURATION",
            help="Wait until the thresholds are in effect on every replica, at most this long: "
            "30s.",
        ),
    ] = None,
    canary: Annotated[
        float | None,
        typer.Option(
            parser=seconds(),
            metavar="DURATION",
            help="Set the thresholds on trial for this long: 10m. The old values return if a "
            "--revert-if comes true or cannot be measured.",
        ),
    ] = None,
    revert_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="What ends a --canary: refused, errors, hits, ttft_pNN or itl_pNN, then > or < "
            "and a limit: 'refused>1%', 'ttft_p99>2s'. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    min_requests: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=1_000_000,
            help="Requests that a condition of a --canary needs before it is believed.",
        ),
    ] = 50,
    yes: Yes = False,
) -> int:
    """Set busy thresholds on every replica. `off` disables one; the others keep their values.

    Shows the values before and after, and which ranks become busy or calm. Each replica is read
    back; if one fails, the others get their old values back. Exit code 1: replicas have different
    thresholds, or a canary set the old values back, 4: --wait timed out.
    """
    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.cli.confirmation import confirm_change
    from dynctl.cli.threshold_list import models_of
    from dynctl.documents.thresholds import ThresholdChange
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit, talk
    from dynctl.sources.connect import connect
    from dynctl.sources.query import choose_model
    from dynctl.sources.thresholds.change import change_thresholds
    from dynctl.sources.thresholds.replicas import read_all

    values = _values(thresholds)
    if canary is not None and (partial or dry_run):
        flag = "--partial" if partial else "--dry-run"
        raise UsageProblem(f"--canary with {flag}: expected one of them")
    conditions = _conditions(canary, revert_if or [])
    if not dry_run:
        confirm_change(options, "thresholds set", yes=yes)
    source = connect(options)
    with contextlib.ExitStack() as stack:
        replicas = stack.enter_context(source.replicas())
        unreached = source.doubts
        readings = read_all(replicas)
        chosen = choose_model(model, models_of(readings))
        readings = _deployment(readings, chosen)
        if unreached and not partial and not dry_run:
            raise UsageProblem(
                f"some replicas cannot be set: {'; '.join(unreached)}",
                "set the others: --partial",
            )
        ranks, notes = _effects(readings, chosen, values, must=dry_run)
        before = next(
            reading.thresholds[chosen] for reading in readings if chosen in reading.thresholds
        )
        if dry_run:
            tried = ThresholdChange(
                source=source.title,
                before=_model_thresholds(chosen, before),
                after=_model_thresholds(chosen, {**before, **values}),
                applied=False,
                ranks=ranks,
                replicas=_dry_run_changes(readings, chosen, values),
                notes=notes,
            )
            emit(tried, options)
            return ExitCode.YES
        replicas = [reading.replica for reading in readings]
        watcher = None
        if canary is not None:
            from dynctl.sources.thresholds.canary import Canary

            ended = stack.enter_context(_ending_is_noted())
            watcher = Canary(
                replicas, chosen, values, conditions, canary, least=min_requests, ended=ended
            )
            watcher.begin()
            limits = ", ".join(condition.text for condition in conditions)
            watcher.announce(f"canary {canary:g} s; revert if {limits}", wait_s=wait or 0.0)
        bar = stack.enter_context(progress(options))
        if wait is not None or canary is not None:
            bar.pulse("waiting for the replicas" if canary is None else f"canary of {canary:g} s")
        changed = change_thresholds(
            replicas, chosen, values, partial=partial, wait_s=wait, canary=watcher, say=talk
        )
    emit(_change(changed, source.title, chosen, before, ranks, notes), options)
    return _exit_code(changed, partial=partial)


def _change(
    changed: "ChangedThresholds",
    title: str,
    model: str,
    before: _Values,
    ranks: "list[RankEffect]",
    notes: list[str],
) -> "ThresholdChange":
    """What was set, on which replicas, with which effects."""
    from dynctl.documents.thresholds import ThresholdChange

    outcomes = changed.result.outcomes
    after = next(
        (outcome.after for outcome in outcomes if outcome.state == "set" and outcome.after), before
    )
    return ThresholdChange(
        source=title,
        before=_model_thresholds(model, before),
        after=_model_thresholds(model, after),
        applied=changed.set,
        ranks=ranks if changed.set else [],
        replicas=[_replica_change(outcome, model) for outcome in outcomes],
        agree=changed.agree,
        waited=changed.waited,
        canary=changed.verdict,
        notes=notes,
    )


def _model_thresholds(model: str, values: _Values) -> "ModelThresholds":
    from dynctl.documents.thresholds import ModelThresholds

    fields: dict[str, Any] = dict(values)
    return ModelThresholds(model, **fields)


def _conditions(canary: float | None, texts: Sequence[str]) -> "list[RevertCondition]":
    """The conditions of a canary; raises UsageProblem."""
    from dynctl.base.errors import UsageProblem
    from dynctl.sources.thresholds.canary import read_conditions

    if canary is not None:
        return read_conditions(texts)
    if texts:
        raise UsageProblem(
            f"--revert-if {texts[0]!r} without --canary",
            "say how long to watch: --canary 10m",
        )
    return []


def _deployment(readings: "Sequence[ThresholdReading]", model: str) -> "list[ThresholdReading]":
    """The replicas of the one deployment that serves the model; raises UsageProblem."""
    from dynctl.base.errors import UsageProblem
    from dynctl.sources.thresholds.replicas import serving

    groups = serving(readings, model)
    if len(groups) > 1:
        raise UsageProblem(
            f"{model} is served by {len(groups)} deployments: {', '.join(groups)}",
            "choose one: --dyn-namespace NAME",
        )
    return next(iter(groups.values()))


def _replica_change(outcome: "Outcome", model: str) -> "ReplicaChange":
    from dynctl.documents.thresholds import ReplicaChange

    before, after = outcome.before, outcome.after
    return ReplicaChange(
        outcome.replica.name,
        outcome.state,
        None if before is None else _model_thresholds(model, before),
        None if after is None else _model_thresholds(model, after),
        "" if outcome.error is None else outcome.error.message,
    )


def _exit_code(changed: "ChangedThresholds", *, partial: bool) -> int:
    """Show what a change left open; raises TimedOut."""
    from dynctl.base.errors import ExitCode, TimedOut, exit_code_of
    from dynctl.base.terminal import printable
    from dynctl.screens.render import talk
    from dynctl.sources.thresholds.replicas import failure

    result, waited, verdict = changed.result, changed.waited, changed.verdict
    if verdict is not None and not verdict.kept:
        for outcome in result.outcomes:
            if outcome.state != "set back":
                name = outcome.replica.name
                talk(f"{name} is not set back: dynctl thresholds get shows its values")
        return ExitCode.INTERRUPTED if verdict.state == "interrupted" else ExitCode.NO
    if not result.ok and result.error is not None:
        error = failure(result, partial=partial)
        talk(f"error: {error.message}")
        for line in error.hint.splitlines():
            talk(f"  {line}")
        return ExitCode.NO if not changed.agree else exit_code_of(error) or ExitCode.NO
    if not changed.agree:
        talk("the replicas have different thresholds: dynctl thresholds get")
        return ExitCode.NO
    if waited is not None and not waited.acts:
        raise TimedOut(
            f"the thresholds are stored, but after {waited.seconds:.1f} s not in effect on every "
            "replica",
            "\n".join(map(printable, waited.pending)),
        )
    return ExitCode.YES


@contextlib.contextmanager
def _ending_is_noted() -> "Iterator[threading.Event]":
    """An event that Ctrl-C, SIGTERM and the end of the terminal set, in place of what they do: a
    canary that is ended sets back what it set, and setting is never ended halfway."""
    ended = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda *_: ended.set())
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _values(texts: Mapping[str, str]) -> dict[str, float | int | None]:
    """The given thresholds, validated. Raises UsageProblem."""
    from dynctl.base.errors import UsageProblem
    from router_core import SETTINGS, ConfigError

    values: dict[str, float | int | None] = {}
    for name, text in texts.items():
        try:
            # As `thresholds get` and the form of `top` show it.
            values[name] = SETTINGS[name].parse("none" if text.strip() == "off" else text)
        except ConfigError as error:
            raise UsageProblem(f"{_FLAGS[name]}: {str(error).removeprefix(name + ': ')}") from None
    if not values:
        raise UsageProblem(
            f"no threshold specified; expected at least one of {', '.join(_FLAGS.values())}",
            "for example: dynctl thresholds set --active-decode-blocks 0.85 --dry-run",
        )
    return values


def _effects(
    readings: "Sequence[ThresholdReading]", model: str, values: _Values, *, must: bool
) -> "tuple[list[RankEffect], list[str]]":
    """The effect on each rank by the load that each replica counts. ``must``: raise the error if
    no replica's workers are known."""
    from dynctl.base.errors import DynctlError
    from dynctl.documents.thresholds import rank_effects
    from dynctl.screens.numbers import plural
    from dynctl.sources.thresholds.effects import judged_rows

    effects: list[RankEffect] = []
    notes: list[str] = []
    errors = []
    for reading in readings:
        if reading.error is not None or model not in reading.thresholds:
            continue
        present, name = reading.thresholds[model], reading.replica.name
        try:
            rows = [row for row in reading.replica.workers() if row.model == model]
        except DynctlError as error:
            errors.append(error)
            notes.append(f"{name}: workers unknown: {error.message}")
            continue
        if reading.replica.probe is not None:
            silent = sum(rank.load_age_s is None for row in rows for rank in row.ranks)
            if silent:
                why = reading.replica.probe.no_report_reason()
                notes.append(f"{name}: reports of {plural(silent, 'rank')} unknown: {why}")
        after = judged_rows(rows, model, present, values)
        before = (
            judged_rows(rows, model, present, {}) if reading.replica.probe is not None else rows
        )
        effects += rank_effects(before, after, name)
    if must and errors and not effects:
        raise errors[0]
    return effects, notes


def _dry_run_changes(
    readings: "Sequence[ThresholdReading]", model: str, values: _Values
) -> "list[ReplicaChange]":
    """What a dry run answers for each replica."""
    from dynctl.base.errors import UsageProblem
    from dynctl.documents.thresholds import ReplicaChange

    changes = []
    for reading in readings:
        replica, present = reading.replica, reading.thresholds.get(model)
        if present is None:
            why = "it does not serve the model" if reading.error is None else reading.error.message
            changes.append(ReplicaChange(replica.name, "failed", problem=why))
            continue
        problem = ""
        try:
            replica.holder.check_values(model, present, values)
        except UsageProblem as error:
            problem = error.message
        changes.append(
            ReplicaChange(
                replica.name,
                "tried",
                _model_thresholds(model, present),
                _model_thresholds(model, {**present, **values}),
                problem,
            )
        )
    return changes


def watch_thresholds(
    options: GlobalOptions,
    rate: Annotated[
        float,
        typer.Option(metavar="DURATION", parser=seconds(0.1, 3600.0), help="Refresh interval."),
    ] = 1.0,
    limit: Limit = None,
    duration: Duration = None,
) -> int:
    """Show changes: thresholds, ranks that turn busy or calm, replicas that differ.

    Reads every replica and sets nothing. A Dynamo frontend does not report busy ranks: they are
    derived from the load that it counts and from workers' load reports.
    """
    import asyncio
    from contextlib import ExitStack

    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.screens.numbers import plural
    from dynctl.screens.render import talk, write_doubts
    from dynctl.screens.streaming import ThresholdStream
    from dynctl.sources.connect import connect
    from dynctl.sources.thresholds.watch import ThresholdWatch

    if options.offline:
        raise UsageProblem(
            f"{options.offline}: it never changes; specify --frontend or --discovery to watch"
        )

    async def watch() -> None:
        stream = ThresholdStream(options, limit=limit)
        source = connect(options)
        with ExitStack() as stack:
            replicas = stack.enter_context(source.replicas())
            watching = stack.enter_context(ThresholdWatch(replicas, rate, stream.put))
            ranks = [rank for state in watching.first for rank in state.ranks.items()]
            busy = {key for key, state in ranks if state.busy}
            write_doubts(source.doubts)
            talk(
                f"watching {plural(len(replicas), 'replica')}: "
                f"{plural(len(dict(ranks)), 'rank')}, {len(busy):,} busy"
            )
            await stream.show(duration)

    asyncio.run(watch())
    return ExitCode.YES
