"""All checks of `topology verify` in their order, on joined facts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.documents.verify import VerifyReport
from dynctl.findings.catalogue import SECTIONS, catalogue
from dynctl.findings.runner import Check, run
from dynctl.findings.suppression import Suppressions
from dynctl.health.deployment import Deployment
from dynctl.health.facts import Unread
from dynctl.verify.chain_rows import custody_rows
from dynctl.verify.checks.access import ACCESS_CHECKS
from dynctl.verify.checks.capacity import CAPACITY_CHECKS
from dynctl.verify.checks.cards import CARD_CHECKS
from dynctl.verify.checks.discovery import DISCOVERY_CHECKS
from dynctl.verify.checks.files import FILE_CHECKS
from dynctl.verify.checks.graphs import LIVE_GRAPH_CHECKS
from dynctl.verify.checks.nodes import NODE_CHECKS
from dynctl.verify.checks.operators import OPERATOR_CHECKS
from dynctl.verify.checks.pods import POD_CHECKS
from dynctl.verify.checks.starts import START_CHECKS
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.join import JoinedFacts, join

VERIFY_SECTIONS: Final[Sequence[tuple[str, Sequence[Check[JoinedFacts]]]]] = (
    (SECTIONS["DYT00"], ACCESS_CHECKS),
    (SECTIONS["DYT01"], LIVE_GRAPH_CHECKS),
    (SECTIONS["DYT02"], NODE_CHECKS),
    (SECTIONS["DYT03"], OPERATOR_CHECKS),
    (SECTIONS["DYT04"], POD_CHECKS),
    (SECTIONS["DYT05"], FILE_CHECKS),
    (SECTIONS["DYT06"], START_CHECKS),
    (SECTIONS["DYT07"], DISCOVERY_CHECKS),
    (SECTIONS["DYT08"], CARD_CHECKS),
    (SECTIONS["DYT09"], CAPACITY_CHECKS),
)
#: What can be judged without a cluster, and on a mount alone.
_REGISTERED: Final = (SECTIONS["DYT08"], SECTIONS["DYT09"])
_MOUNTED: Final = (SECTIONS["DYT05"],)
NOT_CHECKED: Final = (
    "the KV transfer itself (NIXL, RDMA)",
    "the network between domains",
)
NO_SUPPRESSIONS: Final = Suppressions()


def verify(facts: VerifyFacts, suppressed: Suppressions = NO_SUPPRESSIONS) -> VerifyReport:
    """The report on what was gathered, with one row a worker."""
    joined = join(facts)
    report = run(
        [section for section in VERIFY_SECTIONS if _applies(section[0], facts)],
        joined,
        catalogue(),
        sources=_sources(joined),
        suppressed=suppressed,
        not_checked=NOT_CHECKED,
    )
    return VerifyReport(
        report.sources,
        report.sections,
        report.summary,
        report.not_checked,
        chain=custody_rows(joined, report),
    )


def _applies(section: str, facts: VerifyFacts) -> bool:
    if facts.cluster is not None:
        return True
    mounted = facts.mount is not None and section in _MOUNTED
    return mounted or (facts.registry is not None and section in _REGISTERED)


def _count_text(deployment: Deployment | Unread) -> str:
    if isinstance(deployment, Unread):
        return "not read"
    return f"{len(deployment.workers):,} workers"


def _sources(joined: JoinedFacts) -> list[str]:
    facts = joined.facts
    sources = []
    if facts.cluster is not None:
        where = ", ".join(facts.cluster.namespaces) or "all namespaces"
        names = [graph.name for graph in joined.graphs]
        more = f" and {len(names) - 5} more" if names[5:] else ""
        sources.append(
            f"{facts.cluster.title}, {where}: {', '.join(names[:5]) or 'no graph'}{more}"
        )
    if facts.registry is not None:
        deployment = facts.registry.deployment
        sources.append(f"{facts.registry.title}: {_count_text(deployment)}")
    if facts.mount is not None:
        sources.append(f"mount {facts.mount.path}")
    sources += [f"frontend {router.name}" for router in facts.routers]
    return sources
