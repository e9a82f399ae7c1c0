"""The rows of the chain of custody: the first break of each worker and its codes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import msgspec
import pytest

from dynctl.documents.verify import LINK_NAMES, CellState, CustodyRow, VerifyReport
from dynctl.findings.report import CheckResult, Finding, Report, Section, State, summarize
from dynctl.verify.chain import LINKS, ChainLink, DomainChain, WorkerChain
from dynctl.verify.chain_rows import custody_rows
from dynctl.verify.cluster_facts import VerifyFacts
from dynctl.verify.graph_policy import GraphPolicy
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.wire.kubernetes.objects import Pod
from router_core import Role

POLICY = GraphPolicy("zone", "required", None, "topology.kubernetes.io/zone", "", {})
UNKNOWN = ChainLink(unknown="not read")
MARKS = {
    CellState.SAME: "=",
    CellState.DIFFERS: "!",
    CellState.MISSING: "0",
    CellState.NONE: ".",
    CellState.UNKNOWN: "?",
}


def links(letters: str) -> list[ChainLink]:
    """A link a letter: ``-`` has no value, ``?`` is not known, others are their value."""
    special = {"-": ChainLink(), "?": UNKNOWN}
    return [special.get(letter, ChainLink(letter)) for letter in letters]


def worker(letters: str = "aaaaaa", name: str = "decode-0") -> WorkerChain:
    chain = DomainChain("zone", dict(zip(LINKS, links(letters), strict=True)))
    pod = Pod("prod", name, "", {}, {}, node="gpu-1")
    return WorkerChain(
        "prod/llm", "Decode", Role.DECODE, "card", POLICY, pod, chains={"zone": chain}
    )


def joined(*workers: WorkerChain) -> JoinedFacts:
    graph = VerifiedGraph("prod/llm", None, POLICY, workers=workers)
    return JoinedFacts(VerifyFacts(), (graph,))


def report(**subjects: str) -> Report:
    """Failed checks by their codes, each with findings about subjects, separated by ``|``."""
    checks = [
        CheckResult(
            code, "", "", State.FAIL, findings=[Finding(s, "", "", "") for s in result.split("|")]
        )
        for code, result in subjects.items()
    ]
    sections = [Section("all", checks)]
    return Report([], sections, summarize(sections))


def row(letters: str, **subjects: str) -> CustodyRow:
    [result] = custody_rows(joined(worker(letters)), report(**subjects))
    return result


@pytest.mark.parametrize(
    ("letters", "states", "first"),
    [
        ("aaaaaa", "======", None),
        ("bAAAAA", "=!====", "pod label"),
        ("a-----", "=0....", "pod label"),
        ("------", "0.....", "node"),
        ("aaa---", "===0..", "card"),
        ("aaaaa-", "=====0", "router"),
        # The node lost its label after the pod was labelled.
        ("-aaaaa", "0=====", "node"),
        # The pod's label was removed; what was read before is still there.
        ("a-aaaa", "=0====", "pod label"),
        ("a-bbbb", "=0!===", "pod label"),
        ("abcaaa", "=!!!==", "pod label"),
        ("a?aa?a", "=?==?=", None),
        ("a?b???", "=?!???", "file"),
        ("?aaaaa", "?=====", None),
        ("???aaa", "???===", None),
        # Nothing is at the first link that is known: it is not known to follow from anything.
        ("???---", "???0..", "card"),
        ("-?----", "0?....", "node"),
        ("??????", "??????", None),
    ],
)
def test_states_and_the_first_break(letters: str, states: str, first: str | None):
    result = row(letters)
    assert "".join(MARKS[cell.state] for cell in result.cells.values()) == states
    assert result.first_break == first
    values = [link.value for link in links(letters)]
    assert [cell.value for cell in result.cells.values()] == values


def test_every_break_of_a_chain_is_one_of_its_row():
    for letters in map("".join, product("ab-?", repeat=len(LINKS))):
        chain = worker(letters).chains["zone"]
        cells = row(letters).cells
        for one in chain.breaks():
            state = CellState.MISSING if one.value is None else CellState.DIFFERS
            assert cells[one.link].state is state, (letters, one)
        first_break = next(chain.breaks(), None)
        if first_break is not None:
            first = row(letters).first_break
            before = [*LINKS].index(first_break.link)
            assert first is not None
            assert [*LINKS].index(first) <= before, letters  # type: ignore[arg-type]


def test_the_links_are_called_as_in_the_chain():
    assert tuple(LINKS) == LINK_NAMES
    assert list(row("aaaaaa").cells) == list(LINKS)


def test_an_unknown_link_has_its_reason():
    assert row("a?aaaa").label.why == "not read"
    assert row("a?aaaa").node.why == ""


@pytest.mark.parametrize(
    ("letters", "subjects", "codes"),
    [
        ("aaaaaa", {"DYT0501": "Pod decode-1.prod|Pod decode-0.test|Node gpu-1"}, []),
        ("aaaaaa", {"DYT0501": "Pod decode-0.prod"}, ["DYT0501"]),
        ("aaaaaa", {"DYT0501": "Pod decode-0.prod: main|Pod decode-0.prod: other"}, ["DYT0501"]),
        # First what is said of the first break, then in the order of the checks.
        (
            "abbbbb",
            {
                "DYT0402": "Pod decode-0.prod",
                "DYT0404": "Pod decode-0.prod",
                "DYT0205": "Node gpu-1",
                "DYT0501": "Pod decode-0.prod",
            },
            ["DYT0404", "DYT0402", "DYT0501"],
        ),
        (
            "aaa---",
            {"DYT0501": "Pod decode-0.prod", "DYT0704": "Pod decode-0.prod"},
            ["DYT0704", "DYT0501"],
        ),
        # Who may not register has no card; its account is at fault, and no other.
        ("aaa---", {"DYT0703": "ServiceAccount default.prod"}, ["DYT0703"]),
        ("aaa---", {"DYT0703": "ServiceAccount default.test"}, []),
        ("aaaaaa", {"DYT0703": "ServiceAccount default.prod"}, []),
        ("------", {"DYT0205": "Node gpu-0|Node gpu-1"}, ["DYT0205"]),
        ("------", {"DYT0205": "Node gpu-0"}, []),
    ],
)
def test_codes_of_a_worker(letters: str, subjects: dict[str, str], codes: list[str]):
    assert row(letters, **subjects).codes == codes


def test_an_empty_node_label_is_in_the_rows_of_its_workers():
    chain = DomainChain(
        "zone",
        {**dict.fromkeys(LINKS, ChainLink()), LINKS[0]: ChainLink(""), LINKS[1]: ChainLink("")},
    )
    whole = joined(replace(worker(), chains={"zone": chain}))
    [result] = custody_rows(whole, report(DYT0207="Node gpu-1"))
    assert (result.first_break, result.codes) == ("file", ["DYT0207"])


def test_a_worker_without_a_policy_has_a_row_if_it_has_a_finding():
    ungoverned = replace(worker(), policy=None, chains={})
    other = replace(worker(name="decode-1"), policy=None, chains={})
    rows = custody_rows(joined(ungoverned, other), report(DYT0805="Pod decode-1.prod"))
    assert [(one.worker, one.domain, one.codes) for one in rows] == [
        ("decode-1", None, ["DYT0805"])
    ]
    assert {cell.why for cell in rows[0].cells.values()} == {"no KV transfer policy"}


def test_a_domain_whose_label_is_not_known_is_unknown_throughout():
    [result] = custody_rows(joined(replace(worker(), chains={})), report())
    assert {cell.state for cell in result.cells.values()} == {CellState.UNKNOWN}
    assert result.first_break is None
    assert result.domain == "zone"


def test_a_registered_worker_without_a_pod_has_a_row():
    loose = replace(worker("???aa-"), pod=None, graph="")
    whole = replace(joined(), loose=(loose,))
    [result] = custody_rows(whole, report(DYT0904="Worker ?"))
    assert (result.worker, result.namespace, result.graph) == ("?", "", "")
    assert (result.first_break, result.codes) == ("router", ["DYT0904"])


def test_the_report_is_a_contract():
    rows = custody_rows(joined(worker("ab----")), report(DYT0404="Pod decode-0.prod"))
    plain = msgspec.to_builtins(VerifyReport([], [], summarize([]), chain=rows))
    assert (plain["kind"], plain["schema"]) == ("VerifyReport", 1)
    [result] = plain["chain"]
    assert result == {
        "worker": "decode-0",
        "namespace": "prod",
        "graph": "prod/llm",
        "component": "Decode",
        "role": "decode",
        "domain": "zone",
        "node": {"state": "same", "value": "a", "why": ""},
        "label": {"state": "differs", "value": "b", "why": ""},
        "file": {"state": "missing", "value": None, "why": ""},
        "card": {"state": "none", "value": None, "why": ""},
        "taint": {"state": "none", "value": None, "why": ""},
        "router": {"state": "none", "value": None, "why": ""},
        "first_break": "pod label",
        "codes": ["DYT0404"],
    }
