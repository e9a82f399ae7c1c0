"""Durations and sizes: every text is read as its value, all others are refused; percentages."""

import ast
import re
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.quantities import duration, duration_text, percent, size

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20", 20), ("20s", 20), (" 2m ", 120), ("1h", 3600), ("1.5m", 90), ("250ms", 0.25), ("0", 0)],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


def test_a_number_alone_has_the_unit_of_its_option() -> None:
    assert duration("20", "ms") == pytest.approx(0.02)
    assert duration("2s", "ms") == 2


@pytest.mark.parametrize(
    "text", ["", "soon", "-3s", "3 s", "1d", "1e3", "nan", "inf", "1h30m", "s", "1.s", "9" * 10]
)
def test_no_duration(text: str) -> None:
    assert duration(text) is None


@given(st.integers(0, 86_400))
def test_the_text_of_a_duration_is_read_as_its_value(seconds: int) -> None:
    assert duration(duration_text(seconds)) == seconds
    assert duration(duration_text(seconds / 1000)) == pytest.approx(seconds / 1000, rel=1e-4)


def test_a_duration_has_the_largest_unit_that_divides_it() -> None:
    assert [duration_text(s) for s in (86_400, 3600, 90, 300, 0.001, 0, 0.2)] == [
        *("24h", "1h", "90s", "5m", "1ms", "0s", "0.2s"),
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("100", 100), ("100B", 100), ("1KiB", 1024), ("64MiB", 64 << 20), ("1.5Gi", 3 << 29),
     ("2 mib", 2 << 20), ("1TiB", 1 << 40)],
)  # fmt: skip
def test_a_size(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "big", "-1", "1MB", "1k", "nan", "1 0", "MiB", "9" * 16])
def test_no_size(text: str) -> None:
    assert size(text) is None


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [(0.444, 0, "44 %"), (0.004, 1, "0.4 %"), (1, 0, "100 %"), (0.983, None, "98.3 %"),
     (0.05, None, "5 %"), (12.5, 0, "1,250 %"), (-0.0, 0, "0 %")],
)  # fmt: skip
def test_a_share_in_percent(share: float, digits: int | None, text: str) -> None:
    assert percent(share, digits) == text


def test_a_change_in_percent_has_a_sign() -> None:
    found = [percent(change, signed=True) for change in (0.021, -0.5, -0.001)]
    assert found == ["+2 %", "-50 %", "+0 %"]


def test_percentages_are_written_by_this_formatter_alone() -> None:
    own = {"dynctl/base/quantities.py", "router_core/conditional_disagg.py"}
    found = {
        str(path.relative_to(ROOT))
        for package in ("dynctl", "router_core")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr) and _writes_percent(node)
    }
    assert found == own


def _writes_percent(text: ast.JoinedStr) -> bool:
    """Whether an f-string has a value with the format ``%``, or a number followed by the sign."""
    for value, after in zip_longest(text.values, text.values[1:]):
        if not isinstance(value, ast.FormattedValue):
            continue
        form = "" if value.format_spec is None else ast.unparse(value.format_spec)
        if form.strip("f'\"").endswith("%"):
            return True
        if isinstance(after, ast.Constant) and re.match(r" ?%($|[ ,.;)])", str(after.value)):
            return True
    return False
