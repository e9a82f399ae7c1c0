"""The cluster that the options name, and URLs of its frontend pods that work from here.

A pod's address is valid only in the cluster's network; elsewhere it may belong to another host. So
it is used if a Dynamo frontend answers there. The API server's port-forward works from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal

from dynctl.adapters.kubernetes.from_options import namespaces_of, open_cluster
from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import DynctlError, TimedOut, Unreachable, UsageProblem, single_line
from dynctl.base.json_fields import mapping, sequence
from dynctl.base.options import GlobalOptions
from dynctl.base.terminal import printable
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.wire.kubernetes.forbidden import lacking
from dynctl.wire.kubernetes.names import (
    COMPONENT_TYPE_LABEL,
    DYNAMO_NAMESPACE_LABEL,
    GRAPH_LABEL,
)
from dynctl.wire.kubernetes.objects import Pod, pod

Reach = Literal["auto", "direct", "port-forward"]
REACHES: Final[tuple[Reach, ...]] = ("auto", "direct", "port-forward")
MOST_FRONTENDS: Final = 16
#: Thresholds live in each frontend, so all of them are reached, up to this many.
_MOST_WAYS: Final = 64
_DEFAULT_PORT: Final = 8000
OUT_OF_REACH: Final = "not reachable from here (it needs the cluster's own network)"
"""Used for values from the workers' own addresses, where only the API server is reachable."""
#: Lines and bytes of the end of a pod's log.
LOG_LINES: Final = 200
_LOG_BYTES: Final = 256 * 1024
_LOG_LINE: Final = 2000
_POD_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
#: What API servers report if they cannot connect to a kubelet.
_NOT_CONNECTED: Final = ("error dialing backend", "dial tcp")
_NONE_SILENT: Final[Mapping[str, str]] = MappingProxyType({})
#: Seconds for a pod's address to answer before port-forward is used.
_DIRECT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Reached:
    """Frontend pods with their URLs. ``direct``: at the pods' own addresses, so that workers are
    reachable as well.

    ``names``: the pods of ``urls``; ``graphs``, ``spaces``: their graphs and Dynamo namespaces,
    empty where a pod has no label.
    ``refused``: why the frontends are unknown. ``beyond``: number of further frontends.
    ``silent``: pod -> why it is not reached, of those whose node does not respond.
    """

    urls: list[str]
    direct: bool
    refused: str = ""
    names: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    beyond: int = 0
    silent: Mapping[str, str] = field(default_factory=dict)

    @property
    def unread(self) -> str:
        """Why no frontend is reached; empty where one is."""
        return self.refused or ("" if self.urls else "; ".join(silence_texts(self.silent)))


def silence_texts(silent: Mapping[str, str]) -> list[str]:
    """A sentence for each pod of a node that does not respond."""
    return [f"Pod {pod}: {silence}" for pod, silence in silent.items()]


def reach_of(name: str) -> Reach:
    """The way that ``--reach`` names. Raises UsageProblem."""
    if name not in REACHES:
        raise UsageProblem(f"--reach {name}: expected one of {', '.join(REACHES)}")
    return name


def frontend_pods(cluster: Cluster, namespace: str | None) -> list[Pod]:
    """The ready frontend pods of a namespace (None: of all), by name. Raises ClusterRefusal."""
    inner = "" if namespace is None else f"/namespaces/{namespace}"
    pods: list[Pod] = []
    query = {"labelSelector": f"{COMPONENT_TYPE_LABEL}=frontend"}
    for page in cluster.pages(f"/api/v1{inner}/pods", query):
        read = (pod(mapping(item)) for item in sequence(page.get("items")))
        pods += [candidate for candidate in read if candidate.ready and not candidate.deleting]
    return sorted(pods, key=lambda candidate: (candidate.namespace, candidate.name))


def pod_log(options: GlobalOptions, name: str) -> list[str]:
    """The last lines of the log of a worker's pod, after a line that names it.

    Raises UsageProblem without one such pod, Unreachable where the log is not readable.
    """
    if not _POD_NAME.fullmatch(name):
        raise UsageProblem(f"not read: {single_line(name, 80)!r} is not the name of a pod")
    cluster = open_cluster(options)
    try:
        namespace = namespaces_of(options, cluster)
        inner = "" if namespace is None else f"/namespaces/{namespace}"
        query = {"fieldSelector": f"metadata.name={name}"}
        named = [
            pod(mapping(item))
            for page in cluster.pages(f"/api/v1{inner}/pods", query)
            for item in sequence(page.get("items"))
        ]
        where = "any namespace" if namespace is None else f"namespace {namespace}"
        if not named:
            raise UsageProblem(f"not read: no pod {name} in {where}", "name another: -n NAMESPACE")
        if len(named) > 1:
            spaces = ", ".join(sorted(target.namespace for target in named)[:8])
            raise UsageProblem(f"not read: pods {name} in {spaces}", "name one: -n NAMESPACE")
        (target,) = named
        if target.main is None:
            raise UsageProblem(f"not read: pod {name} has no container named main")
        container = target.main.name
        lines = _last_lines(cluster, target, container)
    except ClusterRefusal as refusal:
        why = lacking(refusal.message) or single_line(refusal.message)
        raise Unreachable(f"not read: {why}") from None
    finally:
        cluster.close()
    which = f"the last {len(lines)} lines" if lines else "no lines yet"
    return [
        f"pod {name}, container {container}: {which}",
        *(printable(line[:_LOG_LINE].expandtabs(4)) for line in lines),
    ]


def _last_lines(cluster: Cluster, target: Pod, container: str) -> list[str]:
    """Raises ClusterRefusal, or Unreachable with the node if that does not respond."""
    try:
        return list(
            cluster.log_lines(
                target.namespace, target.name, container, last=LOG_LINES, max_bytes=_LOG_BYTES
            )
        )
    except (ClusterRefusal, Unreachable) as problem:
        silence = why_silent(cluster, target.node, "log", problem)
        if not silence:
            raise
        raise Unreachable(f"not read: {silence}") from None


def frontend_port(pod: Pod) -> int:
    """Where a frontend pod serves HTTP: its variable, else its port called http, else 8000."""
    main = pod.main
    if main is None:
        return _DEFAULT_PORT
    port = main.env.get("DYN_HTTP_PORT") or ""
    if port.isdecimal() and 0 < int(port) < 65536:
        return int(port)
    return main.ports.get("http") or next(iter(main.ports.values()), 0) or _DEFAULT_PORT


@contextmanager
def cluster_ways(options: GlobalOptions, dynamo_namespace: str | None) -> Iterator[Reached]:
    """The frontends of the cluster that the options name, reachable while the context is open.

    ``dynamo_namespace``: only frontends of this Dynamo namespace; None: of all.

    Raises UsageProblem, or Unreachable where the API server does not answer.
    """
    way = reach_of(options.reach)
    cluster = open_cluster(options)
    with ExitStack() as stack:
        stack.callback(cluster.close)
        try:
            pods = frontend_pods(cluster, namespaces_of(options, cluster))
            if dynamo_namespace is not None:
                label, wanted = DYNAMO_NAMESPACE_LABEL, dynamo_namespace
                pods = [
                    candidate for candidate in pods if candidate.labels.get(label, wanted) == wanted
                ]
            ways = stack.enter_context(reached(cluster, pods[:_MOST_WAYS], way))
            ways = replace(ways, beyond=max(0, len(pods) - _MOST_WAYS))
        except ClusterRefusal as refusal:
            ways = Reached(
                [], direct=way == "direct", refused=lacking(refusal.message) or refusal.message
            )
        yield ways


@contextmanager
def reached(cluster: Cluster, pods: Sequence[Pod], reach: Reach) -> Iterator[Reached]:
    """A URL for each pod, valid while the context is open. Raises ClusterRefusal or Unreachable.

    ``auto`` uses for all pods what works for the first one. A node that does not respond is asked
    once: its pods are ``silent``.
    """
    direct = reach == "direct" or (reach == "auto" and bool(pods) and _answers(pods[0]))
    if direct:
        yield _reached(pods, [_address(target) for target in pods], direct=True)
        return
    with ExitStack() as open_ways:
        urls, open_pods = [], []
        silent_nodes: dict[str, str] = {}
        silent = {}
        for target in pods:
            if target.node not in silent_nodes:
                try:
                    way = cluster.forward(target.namespace, target.name, frontend_port(target))
                    urls.append(f"http://{open_ways.enter_context(way)}")
                    open_pods.append(target)
                    continue
                except (ClusterRefusal, Unreachable) as problem:
                    silence = why_silent(cluster, target.node, "port-forward", problem)
                    if not silence:
                        raise
                    silent_nodes[target.node] = silence
            silent[f"{target.name}.{target.namespace}"] = silent_nodes[target.node]
        yield _reached(open_pods, urls, direct=False, silent=silent)


def _reached(
    pods: Sequence[Pod], urls: list[str], *, direct: bool, silent: Mapping[str, str] = _NONE_SILENT
) -> Reached:
    return Reached(
        urls,
        direct=direct,
        names=tuple(f"{target.name}.{target.namespace}" for target in pods),
        graphs=tuple(_graph(target) for target in pods),
        spaces=tuple(target.labels.get(DYNAMO_NAMESPACE_LABEL, "") for target in pods),
        silent=silent,
    )


def why_silent(
    cluster: Cluster, node: str, request: str, problem: ClusterRefusal | DynctlError
) -> str:
    """That a node does not respond to a request, which the API server passes on to its kubelet;
    empty if something else may be at fault."""
    if not node:
        return ""
    reason = ""
    if isinstance(problem, ClusterRefusal):
        if any(words in problem.message for words in _NOT_CONNECTED):
            reason = problem.message
    elif isinstance(problem, TimedOut) and _responds(cluster):
        reason = f"{problem.message.rpartition(': ')[2]}; the API server responds"
    return f"node {node} does not respond to {request} ({reason})" if reason else ""


def _responds(cluster: Cluster) -> bool:
    """Whether the API server itself responds."""
    try:
        cluster.get("/version")
    except ClusterRefusal:
        return True
    except Unreachable:
        return False
    return True


def _graph(pod: Pod) -> str:
    name = pod.labels.get(GRAPH_LABEL)
    return f"{name}.{pod.namespace}" if name else ""


def _address(pod: Pod) -> str:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return f"http://{host}:{frontend_port(pod)}"


def _answers(pod: Pod) -> bool:
    """Whether a Dynamo frontend answers at the pod's own address."""
    if not pod.ip:
        return False
    try:
        return DynamoFrontend(_address(pod), _DIRECT_S).identify() == "dynamo"
    except DynctlError:
        return False
