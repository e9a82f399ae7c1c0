"""One demo fleet for all tests of the pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.worlds import Fleet, demo_fleet


@pytest.fixture(scope="package")
def fleet() -> Iterator[Fleet]:
    with demo_fleet() as found:
        yield found
