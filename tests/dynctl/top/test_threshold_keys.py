"""Thresholds from the dashboard: tried, their effect shown, confirmed, set."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from dynctl.base.errors import UsageProblem
from dynctl.documents.snapshot import Part
from dynctl.top.thresholds import ThresholdScreen
from tests.dynctl.top.conftest import TEXT, TYPED, Shown, settled
from tests.dynctl.top.fleet import StillSource, snapshot
from tests.dynctl.top.golden import screen_text


def field_value(pilot: Pilot[int]) -> str:
    """The text of the field that has the focus."""
    assert isinstance(pilot.app.screen.focused, Input)
    return pilot.app.screen.focused.value


async def test_thresholds_are_set_after_the_effect_is_shown_and_y_is_pressed(shown: Shown):
    source = StillSource()
    async with shown(source, size=(100, 30)) as pilot:
        await pilot.press("t", "down", *["backspace"] * 5, *"20000", "enter")
        await settled(pilot)
        text = screen_text(pilot.app)
        assert "prefill tokens    10,000 -> 20,000" in text
        assert "prefill-b1 rank 0: under every threshold" in text
        assert source.requests == []
        await pilot.press("y")
        await settled(pilot)
        assert not isinstance(pilot.app.screen, ThresholdScreen)
        assert source.requests == [("set", "tiny", {"active_prefill_tokens_threshold": 20_000})]
        assert "tiny: set prefill tokens 20000" in screen_text(pilot.app)


async def test_nothing_is_set_without_a_y(shown: Shown):
    source = StillSource()
    async with shown(source) as pilot:
        await pilot.press("t", "down", "backspace", "enter")
        await settled(pilot)
        await pilot.press("escape")
        await pilot.press("y")  # typed into the field, where it sets nothing
        assert pilot.app.screen.focused.value == "y"  # type: ignore[union-attr]
        await pilot.press("escape", "escape")
        assert source.requests == []
        assert not isinstance(pilot.app.screen, ThresholdScreen)


async def test_a_changed_value_must_be_tried_again(shown: Shown):
    source = StillSource()
    async with shown(source) as pilot:
        await pilot.press("t", "down", "backspace", "enter")
        await settled(pilot)
        await pilot.press("escape", "down", "1", "up", "up", "y")
        assert source.requests == []


async def test_readonly_tries_and_never_sets(shown: Shown):
    source = StillSource()
    async with shown(source, readonly=True) as pilot:
        assert "readonly" in screen_text(pilot.app)
        await pilot.press("t", "down", "backspace", "enter")
        await settled(pilot)
        assert "values can be tried, not set" in screen_text(pilot.app)
        await pilot.press("y")
        await settled(pilot)
        assert source.requests == []


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["x"], "active_prefill_tokens_threshold: expected"),
        (["backspace"] * 5 + ["minus", "1"], "active_prefill_tokens_threshold: "),
        ([], "no change: these are the current values"),
        (["ctrl+u", *"none"], "prefill tokens    10,000 -> off"),
    ],
)
async def test_typed_values_are_checked(shown: Shown, typed: list[str], said: str):
    async with shown(size=(100, 30)) as pilot:
        await pilot.press("t", "down", *typed, "enter")
        await settled(pilot)
        assert said in screen_text(pilot.app)


async def test_an_error_is_whole_on_80_columns_and_leaves_with_the_next_key(shown: Shown):
    async with shown(size=(80, 24)) as pilot:
        await pilot.press("t", "down", *"0.0333", "enter")
        await settled(pilot)
        words = " ".join(screen_text(pilot.app).split())
        assert "expected a whole number, got '0.0333'" in words
        await pilot.press("1")
        await settled(pilot)
        assert "expected a whole number" not in screen_text(pilot.app)


async def test_a_refusal_of_the_frontend_is_shown(shown: Shown):
    source = StillSource()

    async def refuse(model: str, values: Any) -> Any:
        raise UsageProblem("thresholds live in the frontends", "--frontend http://HOST:8000")

    source.set_thresholds = refuse  # type: ignore[method-assign]
    async with shown(source, size=(100, 30)) as pilot:
        await pilot.press("t", "down", "backspace", "enter")
        await settled(pilot)
        await pilot.press("y")
        await settled(pilot)
        text = screen_text(pilot.app)
        assert "thresholds live in the frontends\n--frontend http://HOST:8000" in text


async def test_page_keys_change_the_model(shown: Shown):
    source = StillSource()
    other = {"other": {"active_decode_blocks_threshold": 0.5}, **source.shown.thresholds}
    source.shown = msgspec.structs.replace(source.shown, thresholds=other)
    async with shown(source) as pilot:
        await pilot.press("t")
        assert "thresholds of other, 0 workers  1 of 2" in screen_text(pilot.app)
        await pilot.press("pagedown")
        assert "thresholds of tiny, 6 workers  2 of 2" in screen_text(pilot.app)
        await pilot.press("pageup", "pageup")
        assert "thresholds of tiny, 6 workers  2 of 2" in screen_text(pilot.app)


async def test_typing_replaces_the_value_of_a_field(shown: Shown):
    async with shown() as pilot:
        await pilot.press("t", *"100")
        assert field_value(pilot) == "100"
        await pilot.press("down", *"2000", "up", "up", *"0.5", "down", "down")
        assert field_value(pilot) == "2000"
        await pilot.press("3")
        assert field_value(pilot) == "3"


async def test_typing_replaces_the_value_after_a_change_of_the_model(shown: Shown):
    source = StillSource()
    other = {"other": {"active_decode_blocks_threshold": 0.5}, **source.shown.thresholds}
    source.shown = msgspec.structs.replace(source.shown, thresholds=other)
    async with shown(source) as pilot:
        await pilot.press("t", "pagedown", *"100")
        assert field_value(pilot) == "100"


async def test_typing_replaces_the_value_after_the_effect_was_shown(shown: Shown):
    async with shown() as pilot:
        await pilot.press("t", *"0.5", "enter")
        await settled(pilot)
        await pilot.press("escape", *"0.7")
        assert field_value(pilot) == "0.7"


async def test_keys_of_the_panels_are_text_in_the_form(shown: Shown):
    async with shown() as pilot:
        await pilot.press("t", *TYPED)
        assert isinstance(pilot.app.screen, ThresholdScreen)
        assert field_value(pilot) == TEXT


async def test_a_value_is_edited_at_the_cursor(shown: Shown):
    async with shown(size=(100, 30)) as pilot:
        await pilot.press("t", "down", "home", "delete", "2", "right", "5", "enter")
        await settled(pilot)
        assert "prefill tokens    10,000 -> 205,000" in screen_text(pilot.app)


async def test_unknown_thresholds(shown: Shown):
    parts = {"thresholds": Part("", unknown="none was named", provide="--frontend URL")}
    source = StillSource(snapshot(thresholds={}, parts=parts))
    async with shown(source) as pilot:
        await pilot.press("t")
        assert "thresholds are unknown: none was named" in screen_text(pilot.app)
