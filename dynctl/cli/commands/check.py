"""`dynctl check`."""

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import FailOn, Suppress, expect_level


def check(
    options: GlobalOptions,
    fail_on: FailOn = "fail",
    suppress: Suppress = None,
) -> int:
    """Check a live deployment: planes, workers, events, frontends, fleet, versions.

    Specify its discovery backend, every frontend, or both. The checks only read. Exit code 0: no
    check failed, 1: a check failed, 3: discovery is not reachable.
    """
    from dynctl.base.errors import ExitCode
    from dynctl.findings.catalogue import all_codes
    from dynctl.findings.suppression import Suppressions
    from dynctl.health.checks.run import judge
    from dynctl.screens.render import emit
    from dynctl.sources.dynamo.check_facts import gather

    expect_level(fail_on)
    suppressed = Suppressions.parse(suppress or (), all_codes())
    facts = gather(options)
    report = judge(facts, suppressed)
    emit(report, options)
    if facts.planes is not None and facts.planes.unreachable is not None:
        return ExitCode.UNREACHABLE
    return ExitCode.YES if report.passes(fail_on) else ExitCode.NO
