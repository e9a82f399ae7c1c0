"""What a query names: the model."""

from __future__ import annotations

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.sources.query import choose_model


def test_without_a_model_the_error_leads_to_workers_that_do_not_answer():
    # Workers that are registered and have never answered have no model yet.
    with pytest.raises(UsageProblem, match="or none has answered yet") as error:
        choose_model(None, [])
    assert "dynctl workers list" in (error.value.hint or "")
