"""Percentiles within their stated error, and a ceiling within its stated memory."""

import math

from hypothesis import given
from hypothesis import strategies as st

from dynctl.simulation.replay.metrics import RELATIVE_ERROR, Ceiling, Distribution

values = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=200)


@given(values, st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_within_its_stated_error(column, share):
    found = Distribution()
    for value in column:
        found.add(value)
    exact = sorted(column)[max(1, math.ceil(share * len(column))) - 1]
    estimate = found.quantile(share)
    assert abs(estimate - exact) <= exact * (RELATIVE_ERROR + 1e-9)
    assert found.spread().max == max(column)


def test_a_distribution_does_not_grow_with_its_values():
    found = Distribution()
    for number in range(20_000):
        found.add(1 + number / 20_000)
    assert found.count == 20_000
    assert len(found._buckets) < 700, "from 1 to 2 by 0.1 %"
    assert Distribution().spread().p50 is None


@given(st.floats(1e-6, 1e6), st.integers(1, 50))
def test_equal_values_have_themselves_as_percentiles(value, number):
    found = Distribution()
    for _ in range(number):
        found.add(value)
    spread = found.spread()
    assert (spread.p50, spread.p90, spread.p99) == (value, value, value)


@given(st.floats(1e-3, 1e3))
def test_a_small_difference_stays_small(value):
    """`--max-regress 1%` sees no difference of 1 % where there is one of 0.02 %."""
    medians = []
    for factor in (1.0, 1.0002):
        found = Distribution()
        for one in (0.5, 1, 1, 1, 2):
            found.add(one * value * factor)
        medians.append(found.quantile(0.5) or 0.0)
    assert abs(medians[1] / medians[0] - 1) < 0.0013


prompts = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=30)


def chained(prompt):
    """Names of blocks that stand for all blocks in front of them too."""
    return [hash(tuple(prompt[: n + 1])) for n in range(len(prompt))]


@given(prompts)
def test_the_ceiling_counts_leading_blocks_that_any_prompt_had(trace):
    ceiling, seen = Ceiling(), set()
    for prompt in trace:
        blocks = chained(prompt)
        expected = 0
        for block in blocks:
            if block not in seen:
                break
            expected += 1
        assert ceiling.see(blocks, len(blocks)) == expected
        seen.update(blocks)
    assert ceiling.exact


@given(prompts, st.integers(1, 20))
def test_a_ceiling_with_little_memory_is_a_lower_bound_and_remembers_the_last_blocks(trace, most):
    small, whole = Ceiling(most), Ceiling()
    for prompt in trace:
        blocks = chained(prompt)
        found, true = small.see(blocks, len(blocks)), whole.see(blocks, len(blocks))
        assert found <= true
        if small.exact:
            assert found == true
        assert len(small._new) + len(small._old) <= most + 2 * 8
