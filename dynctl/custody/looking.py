"""One `topology verify` from what the person named to its report; looked at again with --wait."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynctl.connect import frontends
from dynctl.connect.cluster import namespaces_of, open_cluster
from dynctl.connect.cluster_frontends import reach_of
from dynctl.connect.planes import backend, namespace, open_planes
from dynctl.contexts.settling import in_context
from dynctl.custody.against import lint_against
from dynctl.custody.facts import Registry, VerifyFacts
from dynctl.custody.gathering import Wanted, gather
from dynctl.custody.joining import Custody, custody
from dynctl.custody.mount import read_mount
from dynctl.custody.result import VerifyReport
from dynctl.custody.routers import Routers, look
from dynctl.custody.sampling import Sampling
from dynctl.custody.verify import verify
from dynctl.errors import Unreachable, UsageProblem
from dynctl.findings.catalogue import catalogue
from dynctl.findings.results import Report
from dynctl.findings.suppression import Suppressions
from dynctl.observing.deployment import Registrations
from dynctl.observing.facts import Unread
from dynctl.options import GlobalOptions
from dynctl.ports import Cluster
from dynctl.topology.graphs import GRAPH
from dynctl.topology.manifests import Manifest

#: Between two looks with --wait.
AGAIN_S: Final = 5.0


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
    """Gather and judge, again and again while ``wait`` lasts and something fails.

    Raises UsageProblem for options that cannot be used, Unreachable where nothing can be read.
    """
    suppressed = Suppressions.parse(asked.suppress, catalogue())
    read = _reader(options, asked)
    deadline = None if asked.wait is None else time.monotonic() + asked.wait
    while True:
        report = verify(read(), suppressed)
        if deadline is None or report.passes(asked.fail_on):
            return report
        left = deadline - time.monotonic()
        if left <= 0:
            return report
        _talk(f"{report.summary.failed} failed; looking again for {left:,.0f} s")
        time.sleep(min(AGAIN_S, left))


def custody_of_cluster(options: GlobalOptions, graphs: tuple[str, ...] = ()) -> Custody:
    """What runs in the cluster that the options name, joined; no pod is read closely."""
    cluster = open_cluster(options)
    try:
        where = namespaces_of(options, cluster)
        return custody(gather(cluster, Wanted(where, graphs, Sampling.NONE, Sampling.NONE)))
    finally:
        cluster.close()


def linted_against(
    options: GlobalOptions, manifests: Sequence[Manifest], context: str, suppressed: Suppressions
) -> Report:
    """What lint says of manifests, and what the cluster of a kubeconfig's context says to them.

    ``context`` ``.`` is the current one. Raises UsageProblem or Unreachable.
    """
    if context != ".":
        options = replace(options, kube_context=context)
    cluster = open_cluster(options)
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
    # By flag alone: what a context says of a cluster is no contradiction to --path.
    flags = (options.kube_context, options.kubeconfig, options.namespace, *asked.graphs)
    options = in_context(options)
    routers = Routers(
        frontends(options), reach_of(options.reach), min(options.timeout, 10.0), asked.probe
    )
    named = backend(options)
    registry = named is not None and named[0] != "kubernetes"
    kubernetes = (options.kube_context, options.kubeconfig, options.namespace, *asked.graphs)
    if asked.path is not None:
        if any(one is not None for one in flags):
            raise UsageProblem("--path judges one mount; leave out what names a cluster")
        domain = asked.domain or os.environ.get("DYN_KV_TRANSFER_DOMAIN", "")
        path = asked.path
        return lambda: VerifyFacts(mount=read_mount(path, domain))
    if asked.domain is not None:
        raise UsageProblem(f"--domain {asked.domain}: goes with --path DIR")
    clustered = not registry or options.all_namespaces or any(one is not None for one in kubernetes)
    exec_, logs = _sampling("--exec", asked.exec), _sampling("--logs", asked.logs)

    def read() -> VerifyFacts:
        facts = VerifyFacts(registry=_registered(options) if registry else None)
        if not clustered:
            return _with_routers(routers, facts, None)
        cluster = open_cluster(options)
        try:
            wanted = Wanted(namespaces_of(options, cluster), asked.graphs, exec_, logs)
            return _with_routers(routers, gather(cluster, wanted, facts), cluster)
        finally:
            cluster.close()

    return read


def _with_routers(routers: Routers, facts: VerifyFacts, cluster: Cluster | None) -> VerifyFacts:
    views, probe = look(routers, custody(facts), cluster)
    return replace(facts, routers=views, probe=probe)


def _registered(options: GlobalOptions) -> Registry:
    """What is registered in etcd or files; one look. Raises Unreachable."""

    async def read() -> Registry:
        planes = open_planes(options)
        try:
            registrations = Registrations()
            registrations.apply(await planes.discovery.list())
            return Registry(planes.title, registrations.deployment(namespace(options)))
        except Unreachable as error:
            if options.kube_context is None and options.namespace is None:
                raise
            return Registry(planes.title, Unread(error.message, error.hint))
        finally:
            await planes.discovery.close()
            await planes.close()

    return asyncio.run(read())


def _sampling(flag: str, name: str) -> Sampling:
    try:
        return Sampling(name)
    except ValueError:
        known = ", ".join(Sampling)
        raise UsageProblem(f"{flag} {name}: expected one of {known}") from None
