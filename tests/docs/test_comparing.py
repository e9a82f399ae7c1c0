"""The comparison behind the pages' tests, and how shown outputs are refreshed."""

from __future__ import annotations

import pytest

from tests.docs.comparing import difference, exchange
from tests.docs.pages import File, pages, scenes
from tests.docs.refresh import refreshed

PRINTED = "first\n\n  second  line 3.2 s\nthird on 127.0.0.1:40123\nlast\n"


@pytest.mark.parametrize(
    "shown",
    [
        ["first", "", "  second  line 9 s", "third on 127.0.0.1:50000", "last"],
        ["first", "...", "last"],
        ["...", "third on 127.0.0.1:50000", "..."],
        ["first", "...", "  second line ...", "...", "last"],
        ["..."],
    ],
)
def test_output_matches_what_is_shown(shown: list[str]) -> None:
    assert difference(shown, PRINTED) is None


@pytest.mark.parametrize(
    "shown",
    [
        ["first", "last"],
        ["first", "", "  second  line 9 s", "third on 127.0.0.1:50000"],
        ["...", "third on 127.0.0.1:50000"],
        ["second  line 9 s", "..."],
        ["...", "last", "...", "first", "..."],
        ["first", "...", "lost", "...", "last"],
        ["...", "first", "last", "..."],
    ],
)
def test_what_is_not_printed_or_elsewhere_differs(shown: list[str]) -> None:
    assert difference(shown, PRINTED) is not None


def test_ports_are_those_of_the_page_and_names_may_be_exchanged() -> None:
    assert difference(["on 8000"], "on 4711\n", {"4711": "8000"}) is None
    assert difference(["on 8000"], "on 4711\n") is not None
    names = {"a": "b", "b": "a", "zone-a": "zone-b", "zone-b": "zone-a"}
    assert exchange("a in zone-a, not b", names) == "b in zone-b, not a"


def test_the_pages_have_commands_that_show_something() -> None:
    found = [scene for path in pages() for scene in scenes(path)]
    commands = [command for scene in found for command in scene.commands]
    assert len(commands) > 100
    assert sum(command.shown is not None for command in commands) > 80
    assert any(isinstance(step, File) for scene in found for step in scene.steps)


REPORT = """\
pass DYT0101 graph has a policy
pass DYT0102 policy has a domain
FAIL DYT0404 copied label matches the node
     Pod b-0.prod and 2 more: zone is us-east-1b, node gpu-b-0 has us-east-1c
       fix       kubectl delete pod b-0 -n prod
       more      dynctl explain DYT0404
pass DYT0405 label was copied in time
chain of custody: zone
WORKER  NODE  LABEL
b-0     ok    ok

3 passed, 0 warnings, 1 failed in 0.9 s
"""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        # The same output: times as the page has them.
        (
            ["...", "b-0     ok    ok", "", "3 passed, 0 warnings, 1 failed in 0.2 s"],
            ["...", "b-0     ok    ok", "", "3 passed, 0 warnings, 1 failed in 0.2 s"],
        ),
        # Changed words, a line more inside a part, a changed end.
        (
            [
                "...",
                "FAIL DYT0404 the copied label is what the node says now",
                "     Pod b-0.prod and 2 more: zone is us-east-1b, node gpu-b-0 says us-east-1c",
                "       more      dynctl explain DYT0404",
                "...",
                "chain of custody: zone",
                "...",
                "2 passed, 0 warnings, 1 failed, 7 odd in 0.2 s",
            ],
            [
                "...",
                *REPORT.splitlines()[2:6],
                "...",
                "chain of custody: zone",
                "...",
                "3 passed, 0 warnings, 1 failed in 0.9 s",
            ],
        ),
        # Elisions inside a line stay.
        (
            ["pass DYT0101 the graph has some policy", "pass ... domain", "..."],
            ["pass DYT0101 graph has a policy", "pass ... domain", "..."],
        ),
        # Too little in common: for a person.
        (["...", "WARN something else entirely", "..."], None),
    ],
)
def test_shown_outputs_are_refreshed(shown: list[str], expected: list[str] | None) -> None:
    assert refreshed(shown, REPORT.splitlines()) == expected


def test_an_output_without_elisions_is_replaced_as_a_whole() -> None:
    assert refreshed(["old in 0.2 s"], ["old in 0.9 s", "new"]) == ["old in 0.2 s", "new"]


def test_a_refreshed_part_ends_with_the_whole_sentence() -> None:
    full = "     the first line of a sentence that goes on until it is wrapped at eighty"
    printed = [full, "     columns of the terminal", "next"]
    shown = ["     the first line of a sentence that goes on until it is wrapped here", "..."]
    assert refreshed(shown, printed) == [full, "     columns of the terminal", "..."]
