"""`dynctl topology lint`: what is wrong with manifests, before they reach a cluster."""

from typing import Annotated

import typer

from dynctl.options import GlobalOptions


def lint_topology(
    options: GlobalOptions,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Manifests, YAML or JSON; - is stdin (repeatable).",
        ),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="More files.")] = None,
    fail_on: Annotated[
        str,
        typer.Option(metavar="LEVEL", help="What makes the exit code 1: fail, or warn too."),
    ] = "fail",
    suppress: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Leave a check out (repeatable): --suppress DYT0111."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="KUBE_CONTEXT", help="Not yet: check against a cluster too."),
    ] = None,
) -> int:
    """Check graph manifests: what Kubernetes would refuse, and what nobody checks.

    Reads DynamoGraphDeployments (v1alpha1, v1beta1) and Grove topologies. No cluster is asked.
    """
    from dynctl.errors import ExitCode, UsageProblem
    from dynctl.findings.catalogue import catalogue
    from dynctl.topology.lint import lint
    from dynctl.topology.manifests import read_manifests
    from dynctl.views.render import emit

    files = [*(file or ()), *(more or ())]
    if against is not None:
        raise UsageProblem(
            f"--against {against}: not read yet", "lint checks files alone; leave --against out"
        )
    if not files:
        raise UsageProblem(
            "no file to check", "for example: dynctl topology lint -f deploy.yaml -f topology.yaml"
        )
    if fail_on not in ("fail", "warn"):
        raise UsageProblem(f"--fail-on {fail_on}: expected fail or warn")
    codes = catalogue()
    suppressed = {code.upper() for code in suppress or ()}
    for code in sorted(suppressed - set(codes)):
        near = ", ".join(codes.near(code))
        raise UsageProblem(
            f"--suppress {code}: no such code",
            f"near it: {near}" if near else "dynctl explain lists all",
        )
    report = lint(read_manifests(files), suppressed)
    emit(report, options)
    return ExitCode.YES if report.passes(fail_on) else ExitCode.NO
