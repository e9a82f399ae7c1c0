"""Deadlines of tests: they follow the machine, in a container too."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import waiting
from tests.waiting import cores, patience, quotas, slowdown, until_now


def test_a_deadline_is_never_short():
    assert slowdown() >= 1
    assert patience(2) >= 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the waiting functions; sleeping moves it on."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(waiting, "_SET", 1.0)
    return now


def load(monkeypatch: pytest.MonkeyPatch, per_core: float) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (per_core * cores(), 0.0, 0.0))


def test_what_does_not_come_fails_at_its_deadline(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    load(monkeypatch, 8)
    with pytest.raises(TimeoutError, match="waited 16 s"):
        until_now(lambda: False, 2)


def test_a_machine_that_is_busy_only_now_waits_longer(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    load(monkeypatch, 0)

    def condition() -> bool:
        if clock[0] > 9:
            load(monkeypatch, 8)
        return clock[0] > 15

    until_now(condition, 2)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, []),
        ({"cpu.max": "max 100000\n"}, []),
        ({"cpu.max": "150000 100000\n"}, [2]),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, []),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, [4]),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path: Path, files: dict[str, str], found: list[int]):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quotas(tmp_path) == found
