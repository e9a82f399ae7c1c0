"""How workers are named on the command line."""

from __future__ import annotations

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.base.naming import in_numeric_order, resolve_worker

WORKERS = [
    (17655340255331378299, "my-llm-decode-7c9f"),
    (17655340255331378300, "my-llm-decode-81aa"),
    (10, "ab"),
    (0xAB, "ten"),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my-llm-decode-7c9f", 17655340255331378299),
        ("17655340255331378299", 17655340255331378299),
        (f"{17655340255331378299:x}", 17655340255331378299),
        (f"0x{17655340255331378300:X}", 17655340255331378300),
        ("7c9f", 17655340255331378299),
        (f"{17655340255331378300:x}"[-6:], 17655340255331378300),
        (" ten ", 0xAB),
        ("10", 10),
        # A whole name wins over an id, and both over the end of another.
        ("ab", 10),
    ],
)
def test_name_decimal_hex_and_unique_end(text: str, expected: int):
    assert resolve_worker(text, WORKERS) == expected


def test_ambiguous_ends_list_the_workers():
    workers = [(1, "pool-decode-0"), (2, "pool-b-decode-0"), (3, "other")]
    with pytest.raises(UsageProblem) as caught:
        resolve_worker("decode-0", workers)
    assert "ambiguous: 2 workers end in it" in caught.value.message
    assert caught.value.hint.splitlines() == [
        "pool-decode-0  (0000000000000001)",
        "pool-b-decode-0  (0000000000000002)",
    ]


@pytest.mark.parametrize("text", ["nobody", "", "0", "x7"])
def test_unknown_names_list_what_there_is(text: str):
    with pytest.raises(UsageProblem) as caught:
        resolve_worker(text, WORKERS)
    assert "my-llm-decode-7c9f" in caught.value.hint


def test_a_long_list_is_cut_and_no_workers_is_said():
    with pytest.raises(UsageProblem) as caught:
        resolve_worker("x", [(n, f"worker-{n}") for n in range(100)])
    assert caught.value.hint.splitlines()[-1] == "and 92 more: dynctl workers list"
    with pytest.raises(UsageProblem, match="no worker is registered"):
        resolve_worker("x", [])


def test_numbers_in_names_sort_as_numbers() -> None:
    names = ["a-10", "a-9", "b", "a", "", "10", "9x", "a-9b", "a-09"]
    expected = ["", "9x", "10", "a", "a-9", "a-09", "a-9b", "a-10", "b"]
    assert sorted(names, key=in_numeric_order) == expected
