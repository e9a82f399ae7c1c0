"""`dynctl test`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import trial_groups
from dynctl.cli.shared_options import FailOn, Suppress, expect_level, seconds

if TYPE_CHECKING:
    from dynctl.documents.workers import WorkerRow

_REQUESTS = 200


def prove(
    options: GlobalOptions,
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="The server. [default: the frontend of the options]"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP",
            autocompletion=trial_groups,
            help="Only this group (repeatable): names, tokens, streams, reuse, index, isolation,"
            " topology, load, limits, change, restart.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model to test. [default: the first listed]")
    ] = None,
    model_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Tokenizer directory to compare token counts with."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="Nreq",
            help="Send at most N requests. [default: 200req, and those of --restart]",
        ),
    ] = None,
    duration: Annotated[
        float,
        typer.Option(
            "--for", metavar="DURATION", parser=seconds(10.0, 3600.0), help="Longest time in all."
        ),
    ] = 120.0,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Variable with the API key of the server.")
    ] = "OPENAI_API_KEY",
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Seed of the prompts. [default: random]")
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="Also lower a threshold and cordon a worker of a dynctl frontend for a moment.",
        ),
    ] = False,
    restart: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="With --allow-changes: restart a worker that another one can replace, by this"
            " command with {worker}, {host} or {port}: docker restart {worker}.",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            parser=seconds(),
            metavar="DURATION",
            help="Repeat the test until no check fails, at most this long: 5m.",
        ),
    ] = None,
    fail_on: FailOn = "fail",
    suppress: Suppress = None,
) -> int:
    """Test an OpenAI server by requests, from the names of models to the limits of bodies.

    The server may be a frontend of any router, a gateway or one engine. With --discovery, the
    workers' domains are those of a live Dynamo. The requests have the user
    dynctl-test and random prompts, and change nothing but the contents of caches. What
    --allow-changes changes is put back; after a kill, the next test with it does so. Exit code 0:
    no check failed, 1: a check failed, 3: the server does not answer.
    """
    import asyncio
    import os

    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.base.signals import sigterm_like_ctrl_c
    from dynctl.experiments.changes import RestartCommand
    from dynctl.experiments.trial import TrialOptions, announcement, run_until_passed
    from dynctl.findings.catalogue import all_codes
    from dynctl.findings.suppression import Suppressions
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit, talk
    from dynctl.sources.named import token

    expect_level(fail_on)
    if restart is not None and not allow_changes:
        raise UsageProblem(f"--restart {restart}: changes are not allowed", "--allow-changes")
    if options.offline is not None:
        raise UsageProblem(f"test {options.offline}: nothing is running there", "specify the URL")
    wanted = TrialOptions(
        url=_url(options, url),
        key=os.environ.get(api_key_env) or None,
        token=token(options),
        model=model,
        only=tuple(only or ()),
        requests=_requests(budget, restarts=restart is not None),
        duration=duration,
        timeout=max(options.timeout, 30.0) if "timeout" not in options.given else options.timeout,
        seed=seed,
        model_path=model_path,
        suppressed=Suppressions.parse(suppress or (), all_codes()),
        changes=allow_changes,
        restart=None if restart is None else RestartCommand.parse(restart),
        wait=wait,
        workers=_discovered_workers(options),
    )
    talk(announcement(wanted))
    with sigterm_like_ctrl_c(), progress(options) as bar:
        report = asyncio.run(
            run_until_passed(wanted, lambda report: report.passes(fail_on), bar.pulse)
        )
    emit(report, options)
    return ExitCode.YES if report.passes(fail_on) else ExitCode.NO


def _url(options: GlobalOptions, url: str | None) -> str:
    """The server: the argument, else the only frontend that options, variable or context name."""
    from dynctl.base.errors import UsageProblem
    from dynctl.sources.http import frontend_url
    from dynctl.sources.named import DEFAULT_FRONTEND, frontends

    if url is not None and options.frontend:
        raise UsageProblem(
            f"URL {url} and --frontend {options.frontend[0]}: two servers", "specify one of them"
        )
    named = [url] if url is not None else list(frontends(options))
    if len(named) > 1:
        raise UsageProblem(
            f"{len(named)} frontends: a test is of one server", "specify it: dynctl test URL"
        )
    return (
        frontend_url(named[0], "--frontend " if url is None else "") if named else DEFAULT_FRONTEND
    )


def _discovered_workers(options: GlobalOptions) -> "Callable[[], Sequence[WorkerRow]] | None":
    """The workers of a live Dynamo, where options or context name its discovery."""
    from dynctl.settings.contexts.precedence import in_context
    from dynctl.sources.connect import connect

    if not in_context(options).planes:
        return None
    return lambda: connect(options).workers(index=False)


def _requests(budget: str | None, *, restarts: bool) -> int:
    from dynctl.base.errors import UsageProblem
    from dynctl.experiments.groups.restart import RESTART

    if budget is None:
        return _REQUESTS + RESTART.requests * restarts
    number = budget.removesuffix("req")
    if not number.isdecimal() or not 1 <= int(number) <= 100_000:
        raise UsageProblem(
            f"--budget {budget}: expected 1 to 100,000 requests", "for example: --budget 200req"
        )
    return int(number)
