"""The table of verify: who stands on a line of their own, and what a line has room for."""

from __future__ import annotations

import json

import pytest

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.documents.verify import VerifyReport
from dynctl.findings.report import Finding
from dynctl.findings.runner import found, outcome
from dynctl.screens import render as screens
from dynctl.screens.canvas import Canvas
from dynctl.screens.checks import alike, fixes
from dynctl.screens.render import emit
from dynctl.verify.chain import ChainLink, WorkerChain
from tests.golden.verify_screens import (
    FIELDS,
    NOTHING,
    broken,
    changed,
    drawn,
    fleet,
    joined,
    reported,
    worker,
)


def chain_of(report: VerifyReport, canvas: Canvas = Canvas()) -> list[str]:  # noqa: B008
    """The lines of the table and its legend, without the titles."""
    lines = drawn(report, canvas).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("chain of custody")) + 2
    return lines[start : lines.index("", start)]


def table_of(*workers: WorkerChain, canvas: Canvas = Canvas()) -> list[list[str]]:  # noqa: B008
    """The words of each line below the headings, and of the legend."""
    return [line.split() for line in chain_of(reported(joined(*workers)), canvas)[1:]]


def test_workers_with_nothing_to_say_share_a_line_without_a_legend():
    assert table_of(*fleet()) == [["16", "workers", *["ok"] * 6]]
    assert table_of(worker("a")) == [["a", *["ok"] * 6]]


def test_workers_with_broken_chains_are_first_then_those_with_findings():
    odd = changed(worker("z"), label=ChainLink("us-east-1c"))
    noted = worker("y")
    report = reported(joined(*fleet(), noted, odd), DYT0501=outcome([found(noted.subject)]))
    assert [line.split()[0] for line in chain_of(report)[1:4]] == ["z", "y", "16"]


def test_only_what_is_new_is_marked():
    [line, *_] = table_of(changed(worker("a", "west"), node=ChainLink("east")))
    assert line == ["a", "east", "!=west", ".", ".", ".", ".", "-"]
    [line, *_] = table_of(changed(worker("a", "west"), node=NOTHING))
    assert line == ["a", "(none)", "west", ".", ".", ".", ".", "-"]
    [line, *_] = table_of(
        changed(
            worker("a", "west"),
            node=ChainLink("east"),
            card=ChainLink("north"),
            taint=NOTHING,
            router=NOTHING,
        )
    )
    assert line == ["a", "east", "!=west", ".", "!=north", "(none)", ".", "-"]


def test_an_empty_value_can_be_seen():
    dark = dict.fromkeys(("file", "card", "taint", "router"), NOTHING)
    [line, *_] = table_of(changed(worker("a", ""), **dark))
    assert line == ["a", '""', "ok", "(none)", ".", ".", ".", "-"]
    [line, *_] = table_of(changed(worker("a"), label=ChainLink("")))
    assert line[1:3] == ["us-east-1a", '!=""']


def test_what_is_not_known_is_never_ok():
    untold = ChainLink(unknown="no permission")
    for field in FIELDS:
        line, legend = table_of(changed(worker("a"), **{field: untold}))
        assert line[1 + FIELDS.index(field)] == "?"
        assert line.count("ok") == len(FIELDS) - 1
        name = "pod label" if field == "label" else field
        assert " ".join(legend) == f"?: unknown: {name} (no permission)"


def test_reasons_of_the_unknown_are_few():
    workers = [changed(worker(f"a-{n}"), file=ChainLink(unknown=f"reason {n}")) for n in range(9)]
    *_, legend = chain_of(reported(joined(*workers)))
    assert legend.endswith("file of 1 worker (reason 3); and 5 more")


def test_some_workers_of_a_large_group_are_named():
    dark = [changed(worker(f"a-{n:03}"), label=NOTHING) for n in range(50)]
    lines = table_of(*dark)
    assert [line[0] for line in lines[:4]] == ["a-000", "a-001", "a-002", "47"]
    assert lines[3][1:3] == ["more", "us-east-1a"]
    # Where one would be left, it is named too.
    assert [line[0] for line in table_of(*dark[:4])[:4]] == ["a-000", "a-001", "a-002", "a-003"]


def test_not_more_lines_are_shown_than_a_person_reads():
    odd = [changed(worker(f"a-{n}"), label=ChainLink(f"zone-{n}")) for n in range(100)]
    report = reported(joined(*odd, *fleet()))
    lines = chain_of(report)
    assert sum(line.startswith("a-") for line in lines) == 40
    assert any(line.startswith("16 more") for line in lines)
    assert "and 60 more workers with a difference (-o wide shows all)" in lines
    wide = chain_of(report, Canvas(wide=True))
    assert sum(line.startswith(("a-", "my-llm-")) for line in wide) == 116


def test_wide_shows_every_value_where_there_is_room():
    wide = table_of(*fleet()[:2], canvas=Canvas(wide=True))
    assert wide[0] == ["my-llm-prefill-0", "PrefillWorker", "prefill", *["us-east-1a"] * 6]
    narrow = table_of(*fleet()[:2], canvas=Canvas(80, wide=True))
    assert narrow[0][-6:] == ["us-east-1a", *["ok"] * 5]


def test_namespaces_are_shown_if_there_are_several():
    one, other = worker("a"), worker("a", namespace="test")
    assert table_of(one, other, canvas=Canvas(wide=True))[1][0] == "a.test"
    assert table_of(one, one, canvas=Canvas(wide=True))[1][0] == "a"


def test_without_workers_there_is_no_table():
    assert "chain of custody" not in drawn(reported(joined()), Canvas(80))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("width", range(64, 141, 4))
def test_no_line_is_wider_than_the_terminal_whatever_breaks(width: int, wide: bool):
    value = "a-zone-with-the-longest-name-that-a-label-can-have-which-is-63"
    names = [f"my-llm-0-decodeworker-5f7d9c8b6-{n:05}" for n in range(6)]
    odd = [
        changed(worker(name, value), **{field: ChainLink(f"{value}{n}")})
        for n, (name, field) in enumerate(zip(names, FIELDS, strict=True))
    ]
    gone = [
        changed(worker(f"{name}-x", value), **{field: NOTHING})
        for name, field in zip(names, FIELDS, strict=True)
    ]
    lines = chain_of(reported(joined(*odd, *gone)), Canvas(width, wide=wide))
    assert len(lines) > len(odd) + len(gone)
    assert all(len(line) <= width for line in lines)


def test_a_bold_mark_adds_weight_and_nothing_else():
    report = broken()
    plain, coloured = drawn(report, Canvas(90)), drawn(report, Canvas(90, color=True))
    assert "\x1b[1m!=us-east-1c\x1b[0m" in coloured
    assert "\x1b[1m(none)\x1b[0m" in coloured
    for code in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain


# -- other formats ---------------------------------------------------------------------------------


def test_a_line_of_jsonl_has_its_kind(capsys: pytest.CaptureFixture[str]):
    report = broken()
    emit(report, GlobalOptions(output=OutputFormat.JSONL))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["Check"] * len(report.checks) + ["CustodyRow"] * len(report.chain)
    assert lines[0]["code"] == "DYT0102"
    assert lines[-1]["worker"] == report.chain[-1].worker


def test_names_are_the_codes_that_were_found():
    assert list(screens.screen_of(broken()).names(broken())) == [
        "DYT0205",
        "DYT0404",
        "DYT0501",
        "DYT0801",
    ]


# -- findings alike --------------------------------------------------------------------------------


def pods(*names: str, value: str = "unset", fix: str = "kubectl delete pod {} -n prod") -> list:
    return [Finding(f"Pod {name}.prod", value, "set", fix.format(name)) for name in names]


def test_similar_findings_are_combined():
    [told] = alike(pods("a", "b", "c", fix="restart"))
    assert (told.text, told.fix) == ("Pod a.prod and 2 more: unset", "restart")
    [told] = alike(pods("a", "b", "c"))
    assert told.fix == "kubectl delete pod a -n prod\nand the same for 2 more (-o wide shows all)"


def test_two_similar_findings_stay_separate():
    assert [one.text for one in alike(pods("a", "b"))] == [
        "Pod a.prod: unset",
        "Pod b.prod: unset",
    ]


def test_findings_that_differ_in_more_than_their_subject_are_not_combined():
    assert len(alike([*pods("a", "b", value="x"), *pods("c", "d", value="y")])) == 4
    told = alike([pods("a", fix="one")[0], pods("b", fix="two")[0], *pods("c", fix="three")])
    assert len(told) == 3
    # A value may be called as its subject is.
    values = [Finding(f"Node {name}", f"zone is {name}", "", "") for name in ("a", "b", "c")]
    assert len(alike(values)) == 3


def test_a_value_that_names_its_subject_is_not_headed_by_it():
    findings = [
        Finding(f"Pod {name}.prod", f"Pod {name}.prod is late", "", "") for name in ("a", "b", "c")
    ]
    assert [one.text for one in alike(findings)] == ["Pod a.prod is late (and 2 similar)"]
    assert alike(findings[:1])[0].text == "Pod a.prod is late"


def test_others_keep_their_places():
    findings = [*pods("x", value="odd"), *pods("a", "b", "c"), *pods("y", value="strange")]
    assert [one.count for one in alike(findings)] == [1, 3, 1]


def test_similar_fixes_are_combined():
    done = "kubectl delete pod {} -n prod"
    told = alike(pods("a", "b", "c", "d", fix=done)) + alike(
        pods("e", "f", "g", value="other", fix=done)
    )
    shown = [*told, *alike(pods("h", value="third", fix=done))]
    assert fixes(shown) == [
        "kubectl delete pod a -n prod\nand the same for 7 more (-o wide shows all)"
    ]
    assert fixes(shown[:2]) == [one.fix for one in shown[:2]]
    assert fixes(alike(pods("x", fix="wait") + pods("y", value="z", fix="wait"))) == ["wait"]


def test_rules_of_resources_are_all_shown():
    found = [
        Finding(f"Resource {name}", f"list is denied: {name}", "allowed", f'allow: ["{name}"]')
        for name in ("nodes", "pods", "events")
    ]
    assert fixes(alike(found)) == [one.fix for one in found]
