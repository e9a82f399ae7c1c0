"""The screen of checks where there is little room, and where strangers' texts stand in it."""

from __future__ import annotations

import re

import msgspec
import pytest

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.findings.report import CheckResult, Finding, Report, Section, State, summarize
from dynctl.screens.canvas import Canvas, Color
from dynctl.screens.checks import Alike, check_report
from dynctl.screens.numbers import opening
from dynctl.screens.render import emit
from dynctl.screens.route import ExplainScreen
from dynctl.sources.demo.fleet import DemoSource
from dynctl.sources.query import RouteQuery


def checked(*checks: CheckResult) -> Report:
    sections = [Section("pods", list(checks))]
    return Report(["here"], sections, summarize(sections))


def check(code: str, state: State, message: str = "", *findings: Finding) -> CheckResult:
    return CheckResult(code, "pods", "a claim that holds", state, message, findings=list(findings))


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("12 of 12 pods", 13, "12 of 12 pods"),
        ("4 of 12 pods; the rest: not asked for (--exec all)", 30, "4 of 12 pods .."),
        ("a 2 prefill 4 decode, b 2 prefill 4 decode", 36, "a 2 prefill 4 decode .."),
        ("us-east-1a 2, us-east-1b 2 (topology.io/zone)", 38, "us-east-1a 2, us-east-1b 2 .."),
        ("worker logs of now", 14, "worker logs .."),
        ("my-llm-k8s-service-discovery", 16, "my-llm-..scovery"),
        ("four", 2, "fo"),
    ],
)
def test_a_message_is_cut_at_its_end_between_its_parts(text: str, width: int, shown: str):
    assert opening(text, width) == shown
    assert len(shown) <= width


def test_a_long_source_is_folded():
    source = "http://127.0.0.1:8000, model a: 71 requests, 17,402 prompt tokens, 9.8 s"
    report = msgspec.structs.replace(checked(), sources=[source])
    first, second, *_ = check_report(report, Canvas(64)).splitlines()
    assert len(first) <= 64
    assert f"{first} {second.strip()}" == source


@pytest.mark.parametrize("width", range(64, 121))
def test_a_passing_check_is_one_line_that_fits(width: int):
    message = "4 of 12 pods; the rest: not asked for (--exec all)"
    lines = check_report(checked(check("DYT0503", State.PASS, message)), Canvas(width)).splitlines()
    [line] = [one for one in lines if one.startswith("pass")]

    assert len(line) <= width
    assert line.removeprefix("pass DYT0503 a claim that holds: ").startswith("4 of 12 pods")


def test_three_skipped_in_a_row_are_a_range():
    why = "there is no worker pod"
    skipped = [check(f"DYT040{number}", State.SKIP, why) for number in (1, 2, 3, 5, 6)]
    between = check("DYT0404", State.PASS)
    report = checked(*skipped[:3], between, *skipped[3:])

    assert f"skip DYT0401..DYT0403, DYT0405, DYT0406: {why}\n" in check_report(report, Canvas(80))


@pytest.mark.parametrize("output", [OutputFormat.TABLE, OutputFormat.WIDE])
def test_what_a_stranger_wrote_moves_no_cursor(
    output: OutputFormat, capsys: pytest.CaptureFixture[str]
):
    value = "zone is \x1b[2J\x1b[31mred\x07 and \u202edesrever\u202c, the file says \x9b1m"
    report = checked(check("DYT0504", State.FAIL, "", Finding("Pod p.prod", value, "x", "y")))

    emit(report, GlobalOptions(output=output))

    assert "zone is ?[2J?[31mred? and ?desrever?, the file says ?1m" in capsys.readouterr().out


def test_what_a_stranger_wrote_is_whole_for_programs(capsys: pytest.CaptureFixture[str]):
    finding = Finding("Pod p.prod", "zone is \x1b[31mred", "x", "y")

    emit(
        checked(check("DYT0504", State.FAIL, "", finding)), GlobalOptions(output=OutputFormat.JSON)
    )

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"zone is \u001b[31mred" in out


def test_colors_only_repeat_the_words():
    finding = Finding("pod a", "x", "y", "do z")
    report = checked(
        check("DYT0503", State.PASS, "all"),
        check("DYT0504", State.WARN, "", finding),
        check("DYT0505", State.FAIL, "", finding),
    )
    plain = check_report(report, Canvas(80))
    colored = check_report(report, Canvas(80, color=True))
    assert re.sub(r"\x1b\[\d+m", "", colored) == plain
    for mark in ("\x1b[32mpass", "\x1b[33m\x1b[1mWARN", "\x1b[31m\x1b[1mFAIL"):
        assert mark in colored
    assert "\x1b" not in plain


def test_own_colors_reach_the_terminal(capsys: pytest.CaptureFixture[str]):
    def screen(_: object, canvas: Canvas) -> str:
        return Canvas(color=True).paint("FAIL", Color.RED) + "\x1b[5m\n"

    emit(None, GlobalOptions(), screen=screen)
    assert capsys.readouterr().out == "\x1b[31mFAIL\x1b[0m?[5m\n"


def test_bars_have_blocks_where_the_terminal_draws_them():
    result = DemoSource().route(RouteQuery(prompt="hi"))
    plain, blocks = (
        ExplainScreen()(result, Canvas(120, unicode=unicode)) for unicode in (False, True)
    )
    assert "#pre =dec" in plain
    assert "█pre ▒dec" in blocks
    assert blocks.translate(str.maketrans("█▒░", "#=+")) == plain


@pytest.mark.parametrize(
    ("subject", "value", "shown"),
    [
        ("a", "the engine restarted", "a: the engine restarted"),
        ("engine", "the engine restarted", "engine: the engine restarted"),
        ("w1", "3 batches of w12 are lost", "w1: 3 batches of w12 are lost"),
        ("w1", "3 batches of w1 are lost", "3 batches of w1 are lost"),
        ("http://h:80", "http://h:80/v1 answered 500", "http://h:80/v1 answered 500"),
    ],
)
def test_a_finding_names_its_subject(subject: str, value: str, shown: str):
    assert Alike(Finding(subject, value, "-", "-")).text == shown
