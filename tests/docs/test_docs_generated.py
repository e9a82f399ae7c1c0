"""What is made of the code is what the code makes now."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynctl.cli.table import COMMANDS
from dynctl.health.checks.frontends import KNOWN_VERSIONS
from dynctl.settings.router_options import ROUTER_OPTIONS
from router_core import SETTINGS
from tests.docs.generated import FILES
from tests.docs.pages import DOCS, name_of
from tests.docs.reliability_page import load_part
from tests.docs.seeds_page import items, proofs
from tests.docs.tables import table
from tests.dynamo.versions import minor, recorded


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_made_file_is_as_it_is_made_now(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path](), "run make docs"


def test_a_soak_run_is_on_the_page_with_its_numbers() -> None:
    result = {
        "minutes": 60.0, "cores": 2, "rate": {"aimed": 200.0, "reached": 180.5},
        "kinds": {"stream": 8, "whole response": 2}, "outcomes": {"answer": 9, "error event": 1},
        "slowest_s": 8.1, "faults": [{"kind": "engine killed"}, {"kind": "engine killed"}],
        "quiet": [{"loads_s": 0.1, "index_s": 0.4}, {"loads_s": 0.2, "index_s": None}],
        "memory_growth": {"bytes_an_hour": 1_200_000, "error": 90_000},
        "problems": ["minute 12: index right never; expected 2 s"],
    }  # fmt: skip
    part = load_part(result)
    for line in (
        "| 60 minutes, 2 cores | |",
        "| requests | 10, 180.5 a second (200 aimed) |",
        "| became | 0 lost, 9 answer, 1 error event |",
        "| index right after | 0.4 s, at most 0.4 s; 1 times not |",
        "| memory of the frontend that is never restarted | +1.2 MB an hour (standard error 0.1) |",
        "| verdict | **fails**: minute 12: index right never; expected 2 s |",
        "Faults: 2 engine killed.",
    ):
        assert f"\n{line}\n" in part


def test_every_command_and_every_option_is_on_the_page() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"\n## dynctl {command}\n" in page
    for option in ROUTER_OPTIONS.values():
        assert f"`{option.flags[0]}" in page


def test_every_item_that_was_asked_for_has_a_test_or_a_reason() -> None:
    listed = dict(items())
    assert set(proofs()) - set(listed) == set(), "tests name items that tests/docs/seeds.toml lacks"
    without = [name for name in listed if name not in proofs() and not listed[name].get("differs")]
    assert without == []


def test_a_version_is_known_if_and_only_if_it_is_on_the_page() -> None:
    tried = {".".join(map(str, minor(version))) for version in recorded()}
    assert tried == set(KNOWN_VERSIONS)


def test_recommended_settings_are_settings_with_these_defaults() -> None:
    from dynctl.screens.config import setting_text

    shown = table(DOCS / "operations" / "tuning.md", "recommended", "tuning")
    assert len(shown) == 5
    for name, default, *values, _ in shown:
        assert setting_text(SETTINGS[name].default) == default
        for cell in values:
            for text in cell.split(" to "):
                SETTINGS[name].parse(text)
