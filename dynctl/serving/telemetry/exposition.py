"""Counters, histograms and gauges in the Prometheus text format, with cheap updates.

A histogram row here is a list of numbers and a bisection (0.3 us), and a scrape of 8,000 samples
takes 10 ms where the client library's registry takes 190 ms of the event loop (measured); for a
proxy of streams both matter. Tests read the output with the client library's own parser.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dynctl.base.terminal import escaped

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: A label's value of these characters is written as it is.
_PLAIN = re.compile(r"[A-Za-z0-9_.:/ -]*")

Kind = Literal["counter", "gauge", "histogram"]
LabelValues = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name and the labels of its samples.

    ``constant`` labels have the same value in every sample of a process. ``bounds`` are the upper
    edges of a histogram's buckets, ascending, without +Inf.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    constant: Mapping[str, str] | None = None
    bounds: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return (*self.labels, *(self.constant or ()))

    def header(self) -> str:
        text = self.help.replace("\\", "\\\\").replace("\n", "\\n")
        return f"# HELP {self.name} {text}\n# TYPE {self.name} {self.kind}\n"

    def pairs(self, values: LabelValues) -> str:
        """``a="1",b="2"``, constant labels last."""
        named = [
            f'{name}="{escape(value)}"' for name, value in zip(self.labels, values, strict=True)
        ]
        named += [f'{name}="{escape(value)}"' for name, value in (self.constant or {}).items()]
        return ",".join(named)


class Counter:
    """Numbers by label values; only ever grows. What counts often adds to ``rows`` itself."""

    __slots__ = ("family", "rows")

    def __init__(self, family: Family) -> None:
        self.family = family
        self.rows: defaultdict[LabelValues, float] = defaultdict(int)

    def inc(self, values: LabelValues = (), by: float = 1) -> None:
        self.rows[values] += by

    def text(self) -> str:
        return samples(self.family, self.rows.items())


Observation: TypeAlias = "tuple[Histogram, float, LabelValues]"
"""A value of a histogram, with the values of its labels."""


class Histogram:
    """Observations in buckets by label values."""

    __slots__ = ("_bounds", "family", "rows")

    def __init__(self, family: Family) -> None:
        self.family = family
        self._bounds = family.bounds
        #: label values -> [observations per bucket (not cumulative), the last is +Inf ..., sum]
        self.rows: dict[LabelValues, list[float]] = {}
        if not family.labels:
            self._row(())

    def observe(self, value: float, values: LabelValues = (), times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        row = self.rows.get(values)
        if row is None:
            row = self._row(values)
        row[bisect_left(self._bounds, value)] += times
        row[-1] += value * times

    @staticmethod
    def observe_each(*observations: Observation) -> None:
        """Count one value in each of some histograms, in less time than with a call for each."""
        for histogram, value, values in observations:
            row = histogram.rows.get(values)
            if row is None:
                row = histogram._row(values)
            row[bisect_left(histogram._bounds, value)] += 1
            row[-1] += value

    def text(self) -> str:
        family, lines = self.family, [self.family.header()]
        edges = [*(number(bound) for bound in self._bounds), "+Inf"]
        for values, row in self.rows.items():
            pairs = family.pairs(values)
            prefix = f"{family.name}_bucket{{{pairs}{',' if pairs else ''}le="
            total = 0.0
            for edge, count in zip(edges, row, strict=False):
                total += count
                lines.append(f'{prefix}"{edge}"}} {number(total)}\n')
            braces = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{family.name}_sum{braces} {number(row[-1])}\n")
            lines.append(f"{family.name}_count{braces} {number(total)}\n")
        return "".join(lines)

    def _row(self, values: LabelValues) -> list[float]:
        row = self.rows[values] = [0] * (len(self._bounds) + 2)
        return row


def samples(family: Family, rows: Iterable[tuple[LabelValues, float]]) -> str:
    """A counter's or gauge's text: header and one line for each row."""
    lines = [family.header()]
    for values, value in rows:
        pairs = family.pairs(values)
        lines.append(
            f"{family.name}{{{pairs}}} {number(value)}\n"
            if pairs
            else f"{family.name} {number(value)}\n"
        )
    return "".join(lines)


def number(value: float) -> str:
    """A sample's value in the Prometheus format: ``3``, ``0.25``, ``+Inf``."""
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if value != value:
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def escape(value: str) -> str:
    """A label's value between quotes, on one line and without unsafe characters.

    A line break is the format's own escape; other unsafe characters are escaped by their number.
    """
    if _PLAIN.fullmatch(value):
        return value
    lines = [escaped(line, reversible=True) for line in value.split("\n")]
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
