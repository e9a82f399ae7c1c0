"""Golden screens of `check` and `explain`, in files of their own below checks/.

``python -m tests.golden.check_screens`` writes the files; read the diff before you
commit it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynctl.documents.fleet_load import Condition
from dynctl.documents.workers import StreamState
from dynctl.findings.catalogue import catalogue
from dynctl.findings.pages import code_list, page
from dynctl.findings.suppression import Suppressions
from dynctl.health.checks.run import judge
from dynctl.health.facts import CheckFacts, PlaneFacts, Unread
from dynctl.screens.canvas import Canvas
from dynctl.screens.render import draw
from tests.dynctl.health import check_facts as made
from tests.dynctl.health.check_facts import FIRST, SECOND, healthy, ours

HERE = Path(__file__).parent / "checks"
WIDTHS = (80, 200)


def half_dead() -> CheckFacts:
    """A dead prefill worker, a zone without decode, a frontend down and one of another version."""
    entries = made.captured()
    for key in made.cards(entries, "backend"):
        entries[key]["card_json"]["runtime_config"]["topology_domains"]["zone"] = "zone-b"
    made.card(entries, "backend")["kv_cache_block_size"] = 32
    whole = made.planes(entries)
    dead = replace(
        whole.ranks[0],
        state=StreamState(),
        newest=None,
        called_back=None,
        current=False,
        refusal="dynamo.prefill.generate of worker 1a2b at 10.0.0.7:9000 is not reachable: "
        "connection refused",
    )
    other = made.frontend("http://frontend-2:8000", version="2.0.0")
    gone = Unread(
        f"{SECOND} does not answer: connection refused",
        "does the Dynamo frontend run, and is it reachable from here?\n"
        "name another: --frontend http://HOST:PORT, or set DYNCTL_FRONTEND",
    )
    return CheckFacts(
        replace(whole, ranks=(dead, *whole.ranks[1:])),
        (made.frontend(FIRST), made.frontend(SECOND, kind=gone), other),
    )


def many_dead() -> CheckFacts:
    """More findings of one code than a screen shows."""
    whole = made.planes()
    ranks = tuple(
        made.rank(f"prefill/{number:04x}", number + 1, state=StreamState()) for number in range(12)
    )
    return CheckFacts(replace(whole, ranks=ranks))


def dead_fleet() -> CheckFacts:
    """A dynctl frontend whose two aggregated engines are dead."""
    conditions = [
        Condition(
            "MODEL_NOT_SERVED",
            "tiny",
            "0/2 aggregated workers are ready: every request for the model is refused",
            1.0,
            2.0,
        ),
        *(
            Condition(
                "WORKER_UNREACHABLE", name, f"127.0.0.1:{port} refused the connection", 1.0, 2.0
            )
            for name, port in (("a", 8001), ("b", 8002))
        ),
    ]
    return CheckFacts(frontends=(ours(*conditions),))


def nobody_there() -> CheckFacts:
    why = "etcd at 10.0.0.1:2379 did not accept a connection within 3 s"
    hint = "is it up? name another: --etcd-endpoints HOST:2379, or ETCD_ENDPOINTS"
    return CheckFacts(PlaneFacts("etcd 10.0.0.1:2379", "dynamo", Unread(why, hint)))


def screens() -> dict[str, Callable[[int], str]]:
    results: dict[str, Any] = {
        "healthy": judge(healthy()),
        "half-dead": judge(half_dead(), Suppressions(frozenset({"DYR0212"}))),
        "many-dead": judge(many_dead()),
        "frontends-only": judge(replace(healthy(), planes=None)),
        "dead-fleet": judge(dead_fleet()),
        "healthy-fleet": judge(CheckFacts(frontends=(ours(),))),
        "unreachable": judge(nobody_there()),
        "explain": page(catalogue()["DYR0210"]),
        "codes": code_list(),
    }

    def drawer(result: Any) -> Callable[[int], str]:
        return lambda width: draw(result, Canvas(width))

    return {name: drawer(result) for name, result in results.items()}


if __name__ == "__main__":
    for name, drawn in screens().items():
        for width in WIDTHS:
            (HERE / f"{name}-{width}.txt").write_text(drawn(width))
