"""Screens of `topology verify`: whole, broken at every link, large, and hardly read.

Made of chains and findings by hand, with texts of their own: here the drawing is held, not the
words of the codes. ``python -m tests.golden.verify_screens`` writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from dynctl.documents.verify import VerifyReport
from dynctl.findings.catalogue import parse
from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome, run
from dynctl.screens.canvas import Canvas
from dynctl.screens.render import draw
from dynctl.verify.chain import LINKS, ChainLink, DomainChain, WorkerChain
from dynctl.verify.chain_rows import custody_rows
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.graph_policy import GraphPolicy
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.wire.kubernetes.objects import Pod
from router_core import Role

HERE = Path(__file__).parent / "verify"
WIDTHS = (80, 200)
CODES = parse(b"""
[DYT0102]
level = "warn"
title = "graph has a KV transfer policy"
template = "none"
expected = "spec.experimental.kvTransferPolicy"
cause = "Without a policy all decode workers are equally near."
fix = "add one: dynctl topology render"
example = { subject = "DynamoGraphDeployment my-llm.prod" }

[DYT0205]
level = "fail"
title = "nodes with workers have the topology label"
template = "no label topology.kubernetes.io/zone"
expected = "the zone of the node"
cause = "The operator copies the label when a pod is scheduled. Without it the pod exits."
fix = "kubectl label node {node} topology.kubernetes.io/zone=ZONE, then delete its worker pods"
example = { subject = "Node gpu-x-1", node = "gpu-x-1" }

[DYT0303]
level = "fail"
title = "operator has the permissions for topology"
template = "no"
expected = "yes"
cause = "It copies labels."
fix = "grant it"
example = { subject = "ServiceAccount operator.dynamo-system" }

[DYT0403]
level = "fail"
title = "worker pods have the topology label"
template = "no label topology.kubernetes.io/zone since it was scheduled"
expected = "the label of its node"
cause = "The operator copies it once, right after scheduling, if it may read nodes and patch pods."
fix = "kubectl delete pod {pod} -n {namespace}"
example = { subject = "Pod a.prod", pod = "a", namespace = "prod" }

[DYT0404]
level = "fail"
title = "pod label matches the node label"
template = "zone is {value}, its node {node} has {expected}"
expected = "{expected}"
cause = "The operator copied it before the node label changed, and does not correct it."
fix = "kubectl delete pod {pod} -n {namespace}"

[DYT0404.example]
subject = "Pod a.prod"
value = "us-east-1a"
node = "gpu-b-1"
expected = "us-east-1b"
pod = "a"
namespace = "prod"

[DYT0501]
level = "warn"
title = "worker containers have the variables of the policy"
template = "DYN_KV_TRANSFER_DOMAIN is not set"
expected = "DYN_KV_TRANSFER_DOMAIN=zone"
cause = "The pod is older than the policy."
fix = "restart the component"
example = { subject = "Pod a.prod" }

[DYT0801]
level = "fail"
title = "model cards have the topology"
template = "its card has no topology_domains"
expected = "zone={expected}"
cause = "The engine publishes what it read at its start; this one read nothing."
fix = "kubectl delete pod {pod} -n {namespace}"
example = { subject = "Pod a.prod", expected = "us-east-1a", pod = "a", namespace = "prod" }
""")
POLICY = GraphPolicy("zone", "required", None, "topology.kubernetes.io/zone", "", {})
NOTHING = ChainLink()
"""Known to be without a value."""


FIELDS = ("node", "label", "file", "card", "taint", "router")
"""How tests call the links, in their order."""


def worker(
    name: str,
    zone: str | None = "us-east-1a",
    *,
    role: Role = Role.DECODE,
    namespace: str = "prod",
    graph: str = "my-llm",
    node: str = "gpu-a-0",
) -> WorkerChain:
    """A worker whose every link has ``zone``."""
    pod = Pod(namespace, name, name, {}, {}, node=node)
    chain = DomainChain("zone", dict.fromkeys(LINKS, ChainLink(zone)))
    component = "PrefillWorker" if role == "prefill" else "DecodeWorker"
    return WorkerChain(
        f"{namespace}/{graph}", component, role, "card", POLICY, pod, chains={"zone": chain}
    )


def changed(one: WorkerChain, **links: ChainLink) -> WorkerChain:
    """The worker with other links, by the names of :data:`FIELDS`."""
    named = dict(zip(FIELDS, LINKS, strict=True))
    told = {**one.chains["zone"].links, **{named[field]: link for field, link in links.items()}}
    return replace(one, chains={"zone": DomainChain("zone", told)})


def joined(*workers: WorkerChain) -> JoinedFacts:
    """One graph a name that workers have."""
    names = dict.fromkeys(one.graph for one in workers)
    graphs = (
        VerifiedGraph(name, None, POLICY, workers=tuple(w for w in workers if w.graph == name))
        for name in names
    )
    return JoinedFacts(VerifyFacts(), tuple(graphs))


def reported(joined: JoinedFacts, **outcomes: Outcome) -> VerifyReport:
    """The report of a few checks, by their codes; those that are not given pass."""
    sections: dict[str, list[Check[JoinedFacts]]] = {}
    for code, entry in CODES.items():
        check = Check(code, _judge(outcomes.get(code, outcome((), summary="all of them"))))
        sections.setdefault(entry.section, []).append(check)
    report = run(
        list(sections.items()),
        joined,
        CODES,
        sources=["prod (https://kubernetes.example:6443), prod: my-llm"],
        not_checked=["the KV transfer itself (NIXL, RDMA)"],
    )
    rows = custody_rows(joined, report)
    return VerifyReport(
        report.sources, report.sections, report.summary, report.not_checked, chain=rows
    )


def _judge(outcome: Outcome) -> Callable[[JoinedFacts], Outcome]:
    return lambda _: outcome


def about(one: WorkerChain, **arguments: str) -> Found:
    """A finding about a worker's pod, which its fix deletes."""
    return found(one.subject, pod=one.name, namespace="prod", **arguments)


def fleet() -> list[WorkerChain]:
    """Six prefill and ten decode workers in two zones."""
    counts: tuple[tuple[Role, int], ...] = ((Role.PREFILL, 6), (Role.DECODE, 10))
    return [
        worker(f"my-llm-{role}-{number}", f"us-east-1{'ab'[number % 2]}", role=role)
        for role, count in counts
        for number in range(count)
    ]


def healthy() -> VerifyReport:
    return reported(joined(*fleet()))


def broken() -> VerifyReport:
    """A stale label, a card without topology, a node without its label, and nine old pods."""
    stale = worker("my-llm-decode-70", "us-east-1c", node="gpu-b-7")
    stale = changed(stale, node=ChainLink("us-east-1b"))
    cardless = changed(worker("my-llm-decode-80"), card=NOTHING, taint=NOTHING, router=NOTHING)
    dark = worker("my-llm-decode-90", None, node="gpu-x-1")
    fresh = changed(worker("my-llm-decode-10"), router=NOTHING)
    old = fleet()[:9]
    others = [changed(one, file=ChainLink(unknown="not read")) for one in fleet()[9:]]
    follower = ChainLink(unknown="a further rank registers nothing")
    rank = changed(worker("my-llm-decode-0-wkr"), card=follower, taint=follower, router=follower)
    facts = joined(*old, *others, stale, cardless, dark, fresh, rank)
    return reported(
        facts,
        DYT0205=outcome([found("Node gpu-x-1", node="gpu-x-1")]),
        DYT0303=Skipped("no permission to read ClusterRoles (DYT0004)", unread=True),
        DYT0404=outcome(
            [about(stale, value="us-east-1c", expected="us-east-1b", node="gpu-b-7")],
            ["my-llm-decode-11: not scheduled"],
        ),
        DYT0501=outcome([found(one.subject) for one in [*old, stale]]),
        DYT0801=outcome([about(cardless, expected="us-east-1a")]),
    )


def no_labels() -> VerifyReport:
    """An operator that may not patch pods: every one of 120 workers breaks at its label."""
    names = [f"my-llm-0-decodeworker-5f7d9c8b6-{number:05d}" for number in range(120)]
    untold = ChainLink(unknown="not asked")
    dark = [
        changed(
            worker(name), label=NOTHING, file=NOTHING, card=NOTHING, taint=NOTHING, router=untold
        )
        for name in names
    ]
    return reported(joined(*dark), DYT0403=outcome([about(one) for one in dark]))


def hardly_read() -> VerifyReport:
    """Two namespaces; nodes and pods' files are refused, and some workers are of no known level."""
    refused = ChainLink(unknown="no permission to list nodes (DYT0004)", unread=True)
    unread = ChainLink(unknown="no permission to exec (DYT0004)", unread=True)
    whole = [
        changed(
            worker(f"llm-{number}", namespace=namespace, graph="llm"), node=refused, file=unread
        )
        for namespace in ("prod", "test")
        for number in range(3)
    ]
    lost = changed(
        worker("llm-9", namespace="test", graph="llm"),
        node=refused,
        file=unread,
        card=NOTHING,
        taint=NOTHING,
        router=NOTHING,
    )
    levelless = replace(whole[0], chains={}, pod=Pod("prod", "llm-8", "", {}, {}))
    reason = Skipped("nodes: no permission to list nodes (DYT0004)", unread=True)
    return reported(joined(*whole, lost, levelless), DYT0205=reason, DYT0404=reason)


RESULTS: Mapping[str, Callable[[], VerifyReport]] = {
    "healthy": healthy,
    "broken": broken,
    "no-labels": no_labels,
    "hardly-read": hardly_read,
}


def drawn(report: VerifyReport, canvas: Canvas) -> str:
    with patch("dynctl.screens.checks.all_codes", lambda: CODES):
        return draw(report, canvas)


def screens() -> dict[str, Callable[[int], str]]:
    def drawer(report: VerifyReport, wide: bool = False) -> Callable[[int], str]:
        return lambda width: drawn(report, Canvas(width, wide))

    found = {name: drawer(make()) for name, make in RESULTS.items()}
    return {**found, "broken-wide": drawer(broken(), wide=True)}


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, on in screens().items():
        for width in WIDTHS:
            (HERE / f"{name}-{width}.txt").write_text(on(width))
