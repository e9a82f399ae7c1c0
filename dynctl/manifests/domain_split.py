"""How the workers of one pool stand in the values of its domain, and what is wrong with that.

The same rules hold for replicas that manifests pin and for workers that run: only the counts
come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dynctl.findings.runner import Found, found

_UNEVEN: Final = 1.25
"""Decode per prefill of two domains may differ by this factor."""


@dataclass(frozen=True, slots=True)
class DomainSplit:
    """Workers by value of ``domain``. ``subject``: the pool, as findings name it.

    ``ready``: what is said of workers of which there are none, where not all were counted.
    """

    subject: str
    domain: str
    prefill: Mapping[str, int]
    decode: Mapping[str, int]
    ready: str = ""

    @property
    def name(self) -> str:
        """The subject without its kind."""
        return self.subject.partition(" ")[2]

    @property
    def values(self) -> list[str]:
        return sorted({*self.prefill, *self.decode})

    @property
    def counted(self) -> str:
        """``az-1 2 prefill 4 decode, az-2 2 prefill 0 decode``."""
        return ", ".join(
            f"{value} {self.prefill.get(value, 0)} prefill {self.decode.get(value, 0)} decode"
            for value in self.values
        )


def without_decode(one: DomainSplit) -> Iterator[Found]:
    """Values with prefill and no decode: DYT0901, or DYT0906 where decode may be elsewhere."""
    for value in one.values:
        if one.prefill.get(value) and not one.decode.get(value):
            yield found(
                one.subject,
                domain=one.domain,
                value=value,
                prefill=one.prefill[value],
                ready=one.ready,
            )


def single_decode(one: DomainSplit) -> Iterator[Found]:
    """Values with prefill that one decode worker serves: DYT0902."""
    for value in one.values:
        if one.prefill.get(value) and one.decode.get(value) == 1:
            yield found(one.subject, domain=one.domain, value=value, ready=one.ready)


def without_prefill(one: DomainSplit) -> Iterator[Found]:
    """Values with decode and no prefill: DYT0907."""
    for value in one.values:
        if one.decode.get(value) and not one.prefill.get(value):
            yield found(
                one.subject,
                domain=one.domain,
                value=value,
                decode=one.decode[value],
                ready=one.ready,
            )


def uneven(one: DomainSplit) -> Iterator[Found]:
    """The two values whose ratios of decode to prefill differ most, if too much: DYT0908."""
    both = {
        value: one.decode[value] / one.prefill[value]
        for value in one.values
        if one.prefill.get(value) and one.decode.get(value)
    }
    if len(both) < 2:
        return
    low, high = min(both, key=lambda v: both[v]), max(both, key=lambda v: both[v])
    if both[high] > _UNEVEN * both[low]:
        yield found(
            one.subject,
            low=low,
            high=high,
            least=f"1:{both[low]:.3g}",
            most=f"1:{both[high]:.3g}",
        )
