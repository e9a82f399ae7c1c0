"""`dynctl check`: the general doctor."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import FailOn, expect_level


def check(
    options: GlobalOptions,
    fail_on: FailOn = "fail",
    suppress: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE[=SUBJECT]",
            help="Leave a check out, or a finding (repeatable): --suppress DYR0212.",
        ),
    ] = None,
) -> int:
    """Check a live deployment: planes, workers, events, frontends, versions.

    Name its discovery backend, every frontend, or both. Nothing is written there. Exit code 0
    when nothing failed, 1 when a check did, 3 when discovery cannot be reached.
    """
    from dynctl.base.errors import ExitCode
    from dynctl.findings.catalogue import catalogue
    from dynctl.findings.suppression import Suppressions
    from dynctl.health.checks.run import judge
    from dynctl.screens.render import emit
    from dynctl.sources.dynamo.check_facts import gather

    expect_level(fail_on)
    suppressed = Suppressions.parse(suppress or (), catalogue())
    facts = gather(options)
    report = judge(facts, suppressed)
    emit(report, options)
    if facts.planes is not None and facts.planes.unreachable is not None:
        return ExitCode.UNREACHABLE
    return ExitCode.YES if report.passes(fail_on) else ExitCode.NO
