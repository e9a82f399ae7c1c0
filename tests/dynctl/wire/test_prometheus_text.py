"""The Prometheus text format: samples, errors, bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dynctl.base.decode_errors import WireError
from dynctl.wire.prometheus_text import read_samples

CAPTURES = Path(__file__).parents[2] / "captures"


def rows(text: str, name: str = "m") -> list[tuple[dict[str, str], str]]:
    return [
        (s.labels, s.value)
        for s in read_samples(text.encode(), frozenset({name}), max_bytes=1 << 20)
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("m 1", ({}, "1")),
        ("m{} 1", ({}, "1")),
        ("  m  1  1395066363000 ", ({}, "1")),
        ("m\t1\t-5", ({}, "1")),
        ('m{a="b"}1', ({"a": "b"}, "1")),
        ('m {a="b",} 1', ({"a": "b"}, "1")),
        ('m{ a = "b" , c = "d" } 1', ({"a": "b", "c": "d"}, "1")),
        ('m{a="x} 2,y=\\"z\\""} 1', ({"a": 'x} 2,y="z"'}, "1")),
        (r'm{a="C:\\n\n\t"} 1', ({"a": "C:\\n\n\\t"}, "1")),
        ('m{a="é"} +Inf', ({"a": "é"}, "+Inf")),
    ],
)
def test_a_row(line, expected):
    assert rows(f"# HELP m {line}\n\n{line}\nmore{{broken 1\n") == [expected]


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "{a} 1",
        "m",
        "m{a=b} 1",
        'm{a="b} 1',
        'm{a="b" c="d"} 1',
        'm{a="b",,} 1',
        'm{a="b"}',
        "m one",
        "m 1_0",
        "m 1 2 3",
        "m ١",
    ],
)
def test_invalid_lines(line):
    with pytest.raises(WireError, match="metrics line 2"):
        rows(f"ok 1\n{line}\n")


def test_not_text():
    with pytest.raises(WireError, match="not UTF-8 at byte 2"):
        list(read_samples(b"m \xff", frozenset({"m"}), max_bytes=9))


_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


@given(labels=st.dictionaries(_NAMES, st.text(st.characters(codec="utf-8")), max_size=3))
def test_round_trip_of_labels(labels):
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    assert rows(f"m{{{inside}}} 1\n") == [(labels, "1")]


@pytest.mark.parametrize("name", ["agg", "disagg"])
def test_captures_read_as_another_parser_reads_them(name):
    text = (CAPTURES / f"metrics-frontend-{name}.txt").read_text()
    names = {line.split("{")[0].split(" ")[0] for line in text.split("\n")} - {"", "#"}
    # The other parser ends the name of every counter with _total.
    other = [
        (sample.name.removesuffix("_total"), sorted(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    read = [
        (sample.name.removesuffix("_total"), sorted(sample.labels.items()), float(sample.value))
        for sample in read_samples(text.encode(), frozenset(names), max_bytes=1 << 20)
    ]
    assert len(read) > 700
    assert sorted(read) == sorted(other)


def test_a_reader_that_is_not_strict_skips_bad_lines():
    body = b"<html>\nm\nm{a=b} 1\n\xff\nm one\nm 2"
    read = read_samples(body, frozenset({"m"}), max_bytes=1 << 20, strict=False)
    assert [sample.value for sample in read] == ["2"]
    assert not list(read_samples(body, frozenset({"m"}), max_bytes=9, strict=False))
