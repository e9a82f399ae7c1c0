"""The comparison behind the pages' tests: what may differ, and what is found out."""

from __future__ import annotations

import pytest

from tests.docs.comparing import difference, exchange
from tests.docs.pages import File, pages, scenes

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
def test_what_is_printed_may_be_shown_so(shown: list[str]) -> None:
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
def test_what_is_not_printed_or_not_there_is_found_out(shown: list[str]) -> None:
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
