"""The pictures of the documentation show what the screens show now."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.docs.screens import HERE, SCREENS, words


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("name", SCREENS)
def test_a_picture_shows_what_the_screen_shows(name: str) -> None:
    drawn = (HERE / f"{name}.svg").read_text(encoding="utf-8")

    assert words(drawn) == words(SCREENS[name]()), "run make docs"
    assert not re.search(r"url\([\"']?http", drawn), "a picture fetches nothing"


def test_no_picture_is_left_over() -> None:
    assert {path.stem for path in HERE.iterdir()} == set(SCREENS)
