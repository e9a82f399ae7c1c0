"""Run `topology verify`: from the options to the report, repeatedly with --wait."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynctl.adapters.dynamo.planes import backend, in_cluster, namespace, open_planes
from dynctl.adapters.kubernetes.from_options import namespaces_of, open_cluster
from dynctl.adapters.ports import Cluster
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.terminal import advise
from dynctl.base.worker_environment import names_a_file
from dynctl.documents.verify import PlannedRequest, VerifyPlan, VerifyReport
from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import Report, State
from dynctl.findings.suppression import Suppressions
from dynctl.health.deployment import Deployment, Registrations
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import GRAPH
from dynctl.settings.contexts.precedence import in_context
from dynctl.sources.dynamo.frontend_pods import reach_of
from dynctl.sources.named import frontends
from dynctl.verify.checks.all import verify
from dynctl.verify.cluster_facts import Registry, VerifyFacts
from dynctl.verify.cluster_lint import lint_report
from dynctl.verify.gather.cluster import Wanted, gather
from dynctl.verify.gather.pods import Sampling, read_mount
from dynctl.verify.gather.routers import Routers, read_routers
from dynctl.verify.join import JoinedFacts, join
from dynctl.verify.rehearsal import RehearsedCluster

#: Seconds between two runs with --wait.
AGAIN_S: Final = 5.0
_MOST_CODES: Final = 5
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
"""The name of a graph, which is also the value of a label of its pods."""
_SOURCES: Final = """verify reads one of
-n NAMESPACE, -A, --kube-context NAME   a cluster (default: the current context of the kubeconfig)
--discovery etcd, --discovery file      workers in another discovery backend
--path DIR                              the topology mount of one worker, inside its container"""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `topology verify` besides the global ones. ``wait`` is in seconds."""

    graphs: tuple[str, ...] = ()
    exec: str = "auto"
    logs: str = "auto"
    probe: int = 0
    path: Path | None = None
    domain: str | None = None
    suppress: tuple[str, ...] = ()
    fail_on: str = "fail"
    wait: float | None = None


def run_verify(options: GlobalOptions, wanted: VerifyOptions) -> VerifyReport:
    """Gather facts and run the checks; repeat for ``wait`` seconds while a check fails.

    Raises UsageProblem for invalid options, Unreachable if the cluster or registry is not readable.
    """
    suppressed = Suppressions.parse(wanted.suppress, catalogue())
    read = _reader(options, wanted)
    deadline = None if wanted.wait is None else time.monotonic() + wanted.wait
    while True:
        left = 0.0 if deadline is None else deadline - time.monotonic()
        try:
            report = verify(read(), suppressed)
        except Unreachable as error:
            if left <= 0:
                raise
            problem = error.message
        else:
            if left <= 0 or report.passes(wanted.fail_on):
                return report
            problem = _failing(report, wanted.fail_on)
        advise(f"{problem}; checking again, {left:,.0f} s left")
        time.sleep(min(AGAIN_S, left))


def plan_verify(options: GlobalOptions, wanted: VerifyOptions) -> VerifyPlan:
    """What :func:`run_verify` would ask the cluster. Lists are read; no pod is entered.

    Raises UsageProblem where no cluster is read, Unreachable if it is not readable.
    """
    _check(options, wanted)
    options = in_context(options)
    if wanted.path is not None or not _reads_cluster(options, wanted):
        raise UsageProblem("--plan: is for a cluster, and these options read none", _SOURCES)
    urls = frontends(options)
    cluster = RehearsedCluster(open_cluster(options))
    try:
        scope = Wanted(
            namespaces_of(options, cluster),
            wanted.graphs,
            _sampling("--exec", wanted.exec),
            _sampling("--logs", wanted.logs),
        )
        facts = gather(cluster, scope)
        if not urls:
            _with_routers(Routers(reach="port-forward"), facts, cluster)
        asked = [PlannedRequest("http", "metrics", "", 1, 0, [url]) for url in urls]
        return VerifyPlan(cluster.title, [*cluster.requests, *asked])
    finally:
        cluster.close()


def _failing(report: Report, fail_on: str) -> str:
    """``2 failed (DYT0404, DYT0802)``, with what else reaches the level ``fail_on``."""
    parts = []
    for noun, state in (("failed", State.FAIL), ("warn", State.WARN)):
        codes = [check.code for check in report.checks if check.state is state]
        if codes and fail_on in (State.WARN, state):
            more = ", .." if codes[_MOST_CODES:] else ""
            parts.append(f"{len(codes):,} {noun} ({', '.join(codes[:_MOST_CODES])}{more})")
    if fail_on != State.FAIL and report.summary.unread:
        parts.append(f"{report.summary.unread:,} could not be read")
    return ", ".join(parts)


def joined_cluster(options: GlobalOptions, graphs: tuple[str, ...] = ()) -> JoinedFacts:
    """The joined facts of a cluster, without files and logs of pods."""
    _check_names(graphs)
    cluster = open_cluster(options)
    try:
        where = namespaces_of(options, cluster)
        return join(gather(cluster, Wanted(where, graphs, Sampling.NONE, Sampling.NONE)))
    finally:
        cluster.close()


def lint_with_cluster(
    options: GlobalOptions, manifests: Sequence[Manifest], context: str, suppressed: Suppressions
) -> Report:
    """The report of lint on manifests, with the checks that compare them with a cluster.

    ``context``: of the kubeconfig, ``.`` for the current one. Raises UsageProblem or Unreachable.
    """
    if context != ".":
        options = replace(options, kube_context=context)
    try:
        cluster = open_cluster(options)
    except UsageProblem as problem:
        message = problem.message.replace("--kube-context", "--against", 1)
        raise UsageProblem(message, problem.hint.replace("--kube-context", "--against")) from None
    try:
        home = namespaces_of(options, cluster) or cluster.namespace
        spaces = {manifest.namespace or home for manifest in manifests if manifest.kind == GRAPH}
        where = spaces.pop() if len(spaces) == 1 else None
        wanted = Wanted(where, (), Sampling.NONE, Sampling.NONE, optional=True)
        return lint_report(manifests, gather(cluster, wanted), home, suppressed)
    finally:
        cluster.close()


def _reader(options: GlobalOptions, wanted: VerifyOptions) -> Callable[[], VerifyFacts]:
    """A function that gathers the facts for the options, at every call."""
    _check(options, wanted)
    options = in_context(options)
    routers = Routers(
        frontends(options),
        reach_of(options.reach),
        min(options.timeout, 10.0),
        wanted.probe,
        advise,
    )
    registry = _reads_registry(options)
    if wanted.path is not None:
        domain = wanted.domain or os.environ.get("DYN_KV_TRANSFER_DOMAIN", "").strip()
        path = wanted.path
        return lambda: VerifyFacts(mount=read_mount(path, domain))
    clustered = _reads_cluster(options, wanted)
    exec_, logs = _sampling("--exec", wanted.exec), _sampling("--logs", wanted.logs)

    def read() -> VerifyFacts:
        facts = VerifyFacts(registry=_read_registry(options, clustered) if registry else None)
        if not clustered:
            return _with_routers(routers, facts, None)
        cluster = open_cluster(options)
        try:
            scope = Wanted(namespaces_of(options, cluster), wanted.graphs, exec_, logs)
            return _with_routers(routers, gather(cluster, scope, facts), cluster)
        finally:
            cluster.close()

    return read


def _reads_registry(options: GlobalOptions) -> bool:
    return backend(options) is not None and not in_cluster(options)


def _reads_cluster(options: GlobalOptions, wanted: VerifyOptions) -> bool:
    kubernetes = (options.kube_context, options.kubeconfig, options.namespace, *wanted.graphs)
    named = options.all_namespaces or any(given is not None for given in kubernetes)
    return named or not _reads_registry(options)


def _check(options: GlobalOptions, wanted: VerifyOptions) -> None:
    """Raise UsageProblem for options that contradict each other.

    Only command-line flags count: a context with a cluster does not contradict --path.
    """
    if options.offline:
        raise UsageProblem(
            f"{options.offline}: this deployment has no topology pipeline to verify", _SOURCES
        )
    _check_names(wanted.graphs)
    if wanted.path is None:
        if wanted.domain is not None:
            raise UsageProblem(f"--domain {wanted.domain}: only with --path DIR")
        return
    excluded = {
        "-n": options.namespace,
        "-A": options.all_namespaces,
        "--kube-context": options.kube_context,
        "--kubeconfig": options.kubeconfig,
        "--discovery": options.discovery,
        "--frontend": options.frontend,
        "--dgd": wanted.graphs,
        "--probe": wanted.probe,
    }
    wrong = [flag for flag, value in excluded.items() if value]
    if wrong:
        raise UsageProblem(f"--path reads only one mount; remove {', '.join(wrong)}")
    if wanted.domain is not None and not names_a_file(wanted.domain):
        raise UsageProblem(
            f"--domain {wanted.domain!r}: expected the name of a file in the directory",
            "for example: dynctl topology verify --path DIR --domain zone",
        )


def _check_names(graphs: Sequence[str]) -> None:
    for name in graphs:
        if not _NAME.fullmatch(name):
            raise UsageProblem(
                f"--dgd {name!r}: invalid name of a {GRAPH}, expected 1 to 63 of a-z, 0-9, - and ."
            )


def _with_routers(routers: Routers, facts: VerifyFacts, cluster: Cluster | None) -> VerifyFacts:
    views, probe = read_routers(routers, join(facts), cluster)
    return replace(facts, routers=views, probe=probe)


def _read_registry(options: GlobalOptions, clustered: bool) -> Registry:
    """The workers that are registered now in etcd or files.

    Raises Unreachable if they are not readable or there are none, and no cluster is read as well.
    """

    async def read() -> Registry:
        planes = open_planes(options)
        try:
            registrations = Registrations()
            registrations.apply(await planes.discovery.list())
            deployment = registrations.deployment(namespace(options))
            if not clustered and not deployment.workers:
                raise _no_workers(planes.title, deployment, namespace(options))
            return Registry(planes.title, deployment)
        except Unreachable as error:
            if not clustered:
                raise
            return Registry(planes.title, Unread(error.message, error.hint))
        finally:
            await planes.discovery.close()
            await planes.close()

    return asyncio.run(read())


def _no_workers(title: str, deployment: Deployment, wanted: str | None) -> Unreachable:
    others = [name for name in deployment.namespaces if name != wanted]
    where = "" if wanted is None else f" in Dynamo namespace {wanted}"
    hint = f"other namespaces: {', '.join(others)}; --dyn-namespace NAME, or '*' for all"
    return Unreachable(
        f"{title}: no worker is registered{where}", hint if others else "dynctl check shows details"
    )


def _sampling(flag: str, name: str) -> Sampling:
    try:
        return Sampling(name)
    except ValueError:
        known = ", ".join(Sampling)
        raise UsageProblem(f"{flag} {name}: expected one of {known}") from None
