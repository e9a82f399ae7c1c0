"""`dynctl topology lint`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import names_of
from dynctl.cli.shared_options import FailOn, Suppress, expect_level


def lint_topology(
    options: GlobalOptions,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Manifest in YAML or JSON; - reads stdin (repeatable).",
        ),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Manifests.")] = None,
    fail_on: FailOn = "fail",
    suppress: Suppress = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="KUBE_CONTEXT",
            autocompletion=names_of("kube-context"),
            help="Also compare with this cluster: node labels, Grove topology, running graphs; "
            ". is the current context.",
        ),
    ] = None,
) -> int:
    """Check graph manifests for errors that Kubernetes refuses and for errors that it accepts.

    Reads DynamoGraphDeployments (v1alpha1, v1beta1) and Grove topologies. Reads a cluster only
    with --against.
    """
    from dynctl.base.errors import UsageProblem

    files = [*(file or ()), *(more or ())]
    if not files:
        raise UsageProblem(
            "no manifest specified",
            "for example: dynctl topology lint -f deploy.yaml -f topology.yaml",
        )
    expect_level(fail_on)
    return lint_files(options, files, fail_on, suppress, against)


def lint_files(
    options: GlobalOptions,
    files: Sequence[str],
    fail_on: str,
    suppress: Sequence[str] | None,
    against: str | None = None,
) -> int:
    """Check manifests, print the report and return the exit code."""
    from dynctl.base.errors import ExitCode
    from dynctl.findings.catalogue import catalogue
    from dynctl.findings.suppression import Suppressions
    from dynctl.manifests.files import read_manifests
    from dynctl.manifests.lint.run import lint
    from dynctl.screens.render import emit

    suppressed = Suppressions.parse(suppress or (), catalogue())
    manifests = read_manifests(files)
    if against is None:
        report = lint(manifests, suppressed)
    else:
        from dynctl.verify.verification import lint_with_cluster

        report = lint_with_cluster(options, manifests, against, suppressed)
    emit(report, options)
    return ExitCode.YES if report.passes(fail_on) else ExitCode.NO
