"""One `topology verify` from what the person named to its report; looked at again with --wait."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynctl.adapters.ports import Cluster
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.worker_environment import names_a_file
from dynctl.documents.verify import VerifyReport
from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import Report, State
from dynctl.findings.suppression import Suppressions
from dynctl.health.deployment import Deployment, Registrations
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import GRAPH
from dynctl.settings.contexts.precedence import in_context
from dynctl.sources import frontends
from dynctl.sources.dynamo.planes import backend, namespace, open_planes
from dynctl.sources.kubernetes import namespaces_of, open_cluster, reach_of
from dynctl.verify.checks.run import verify
from dynctl.verify.cluster_lint import lint_against
from dynctl.verify.facts import Registry, VerifyFacts
from dynctl.verify.gather.cluster import Wanted, gather
from dynctl.verify.gather.pods import Sampling, read_mount
from dynctl.verify.gather.routers import Routers, look
from dynctl.verify.join import JoinedFacts, join

#: Between two looks with --wait.
AGAIN_S: Final = 5.0
_MOST_CODES: Final = 5
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
"""Of a graph, whose pods carry it as the value of a label."""
_LOOKS_AT: Final = """verify looks at one of
-n NAMESPACE, -A, --kube-context NAME   a cluster (of the kubeconfig, if nothing is said)
--discovery etcd, --discovery file      what workers registered elsewhere
--path DIR                              the mount of one worker, from inside"""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What `topology verify` takes beside the global options. ``wait`` is in seconds."""

    graphs: tuple[str, ...] = ()
    exec: str = "sample"
    logs: str = "sample"
    probe: int = 0
    path: Path | None = None
    domain: str | None = None
    suppress: tuple[str, ...] = ()
    fail_on: str = "fail"
    wait: float | None = None


def verified(options: GlobalOptions, asked: VerifyOptions) -> VerifyReport:
    """Gather and judge, again and again while ``wait`` lasts and something fails or is not there.

    Raises UsageProblem for options that cannot be used, Unreachable where nothing can be read.
    """
    suppressed = Suppressions.parse(asked.suppress, catalogue())
    read = _reader(options, asked)
    deadline = None if asked.wait is None else time.monotonic() + asked.wait
    while True:
        left = 0.0 if deadline is None else deadline - time.monotonic()
        try:
            report = verify(read(), suppressed)
        except Unreachable as error:
            if left <= 0:
                raise
            told = error.message
        else:
            if left <= 0 or report.passes(asked.fail_on):
                return report
            told = _failing(report, asked.fail_on)
        _talk(f"{told}; looking again, {left:,.0f} s left")
        time.sleep(min(AGAIN_S, left))


def _failing(report: Report, fail_on: str) -> str:
    """``2 failed (DYT0404, DYT0802)``, and what warns where that counts too."""
    told = []
    for noun, state in (("failed", State.FAIL), ("warn", State.WARN)):
        codes = [check.code for check in report.checks if check.state is state]
        if codes and fail_on in (State.WARN, state):
            more = ", .." if codes[_MOST_CODES:] else ""
            told.append(f"{len(codes):,} {noun} ({', '.join(codes[:_MOST_CODES])}{more})")
    if fail_on == State.WARN and report.summary.unread:
        told.append(f"{report.summary.unread:,} could not be read")
    return ", ".join(told)


def joined_cluster(options: GlobalOptions, graphs: tuple[str, ...] = ()) -> JoinedFacts:
    """What runs in the cluster that the options name, joined; no pod is read closely."""
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
    """What lint says of manifests, and what the cluster of a kubeconfig's context says to them.

    ``context`` ``.`` is the current one. Raises UsageProblem or Unreachable.
    """
    if context != ".":
        options = replace(options, kube_context=context)
    try:
        cluster = open_cluster(options)
    except UsageProblem as problem:
        said = problem.message.replace("--kube-context", "--against", 1)
        raise UsageProblem(said, problem.hint.replace("--kube-context", "--against")) from None
    try:
        home = namespaces_of(options, cluster) or cluster.namespace
        spaces = {one.namespace or home for one in manifests if one.kind == GRAPH}
        where = spaces.pop() if len(spaces) == 1 else None
        wanted = Wanted(where, (), Sampling.NONE, Sampling.NONE, optional=True)
        return lint_against(manifests, gather(cluster, wanted), home, suppressed)
    finally:
        cluster.close()


def _talk(message: str) -> None:
    sys.stderr.write(message + "\n")


def _reader(options: GlobalOptions, asked: VerifyOptions) -> Callable[[], VerifyFacts]:
    """What gathers the facts that the options name, as often as it is called."""
    _check(options, asked)
    options = in_context(options)
    routers = Routers(
        frontends(options), reach_of(options.reach), min(options.timeout, 10.0), asked.probe, _talk
    )
    named = backend(options)
    registry = named is not None and named[0] != "kubernetes"
    kubernetes = (options.kube_context, options.kubeconfig, options.namespace, *asked.graphs)
    if asked.path is not None:
        domain = asked.domain or os.environ.get("DYN_KV_TRANSFER_DOMAIN", "").strip()
        path = asked.path
        return lambda: VerifyFacts(mount=read_mount(path, domain))
    clustered = not registry or options.all_namespaces or any(one is not None for one in kubernetes)
    exec_, logs = _sampling("--exec", asked.exec), _sampling("--logs", asked.logs)

    def read() -> VerifyFacts:
        facts = VerifyFacts(registry=_registered(options, clustered) if registry else None)
        if not clustered:
            return _with_routers(routers, facts, None)
        cluster = open_cluster(options)
        try:
            wanted = Wanted(namespaces_of(options, cluster), asked.graphs, exec_, logs)
            return _with_routers(routers, gather(cluster, wanted, facts), cluster)
        finally:
            cluster.close()

    return read


def _check(options: GlobalOptions, asked: VerifyOptions) -> None:
    """Raise UsageProblem for what contradicts itself. By flag alone: what a context says of a
    cluster is no contradiction to --path."""
    for flag, given in (("--demo", options.demo), ("--view", options.view is not None)):
        if given:
            raise UsageProblem(f"{flag}: that is no deployment whose topology can break", _LOOKS_AT)
    _check_names(asked.graphs)
    if asked.path is None:
        if asked.domain is not None:
            raise UsageProblem(f"--domain {asked.domain}: goes with --path DIR")
        return
    beside = {
        "-n": options.namespace,
        "-A": options.all_namespaces,
        "--kube-context": options.kube_context,
        "--kubeconfig": options.kubeconfig,
        "--discovery": options.discovery,
        "--frontend": options.frontend,
        "--dgd": asked.graphs,
        "--probe": asked.probe,
    }
    wrong = [flag for flag, value in beside.items() if value]
    if wrong:
        raise UsageProblem(f"--path judges one mount alone; leave out {', '.join(wrong)}")
    if asked.domain is not None and not names_a_file(asked.domain):
        raise UsageProblem(
            f"--domain {asked.domain!r}: expected the plain name of a file in the directory",
            "for example: dynctl topology verify --path DIR --domain zone",
        )


def _check_names(graphs: Sequence[str]) -> None:
    for name in graphs:
        if not _NAME.fullmatch(name):
            raise UsageProblem(
                f"--dgd {name!r}: no name of a {GRAPH}, expected 1 to 63 of a-z, 0-9, - and ."
            )


def _with_routers(routers: Routers, facts: VerifyFacts, cluster: Cluster | None) -> VerifyFacts:
    views, probe = look(routers, join(facts), cluster)
    return replace(facts, routers=views, probe=probe)


def _registered(options: GlobalOptions, clustered: bool) -> Registry:
    """What is registered in etcd or files; one look.

    Raises Unreachable where it cannot be read or is nothing, and no cluster is looked at beside.
    """

    async def read() -> Registry:
        planes = open_planes(options)
        try:
            registrations = Registrations()
            registrations.apply(await planes.discovery.list())
            deployment = registrations.deployment(namespace(options))
            if not clustered and not deployment.workers:
                raise _nobody(planes.title, deployment, namespace(options))
            return Registry(planes.title, deployment)
        except Unreachable as error:
            if not clustered:
                raise
            return Registry(planes.title, Unread(error.message, error.hint))
        finally:
            await planes.discovery.close()
            await planes.close()

    return asyncio.run(read())


def _nobody(title: str, deployment: Deployment, wanted: str | None) -> Unreachable:
    others = [name for name in deployment.namespaces if name != wanted]
    where = "" if wanted is None else f" in Dynamo namespace {wanted}"
    hint = f"there are: {', '.join(others)}; --dyn-namespace NAME, or '*' for all" if others else ""
    return Unreachable(
        f"{title}: no worker is registered{where}", hint or "dynctl check tells more"
    )


def _sampling(flag: str, name: str) -> Sampling:
    try:
        return Sampling(name)
    except ValueError:
        known = ", ".join(Sampling)
        raise UsageProblem(f"{flag} {name}: expected one of {known}") from None
