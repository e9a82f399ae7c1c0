"""Durations and sizes: every text is read as its value, all others are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.quantities import duration, duration_text, size


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
