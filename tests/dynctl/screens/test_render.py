"""Lists that are watched."""

from __future__ import annotations

import pytest

from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.documents.workers import WorkerList, WorkerRow
from dynctl.screens.render import Listed, show_list


def test_a_watched_list_is_written_each_time_it_changes(capsys):
    names = iter([["a"], ["a"], ["a", "b"], None, ["b"]])

    def read() -> Listed:
        found = next(names)
        if found is None:
            raise Unreachable("the frontend does not answer")
        rows = [WorkerRow(name, 1, "m", "decode") for name in found]
        return WorkerList("here", rows), None

    waits: list[float] = []
    options = GlobalOptions(output=OutputFormat.NAME)
    show_list(options, read, watch=True, sleep=waits.append, limit=5)
    assert capsys.readouterr().out.split() == ["a", "a", "b", "b"]
    assert len(waits) == 4


def test_the_first_reading_of_a_watched_list_has_to_work():
    def read() -> Listed:
        raise Unreachable("the frontend does not answer")

    with pytest.raises(Unreachable):
        show_list(GlobalOptions(), read, watch=True, limit=1)


def test_a_source_that_never_changes_is_not_watched():
    with pytest.raises(UsageProblem, match="never changes"):
        show_list(GlobalOptions(demo=True), lambda: (None, None), watch=True)
