"""The conditions in force, and how many lines of a log they may have."""

from dynctl.health.conditions import LINE_S, LINES, Conditions


def test_a_condition_that_changes_without_end_has_a_bounded_number_of_lines() -> None:
    now = 1_000.0
    conditions = Conditions(lambda: now)

    def flood(packets: int) -> int:
        """How many lines a log has of so many packets."""
        return sum(conditions.may_log("MALFORMED_BATCH", "a") for _ in range(packets))

    assert flood(10_000) == LINES
    now += LINE_S
    assert flood(1_000) == 1
    # The end of the condition gives no new lines; other conditions and subjects have their own.
    conditions.set("MALFORMED_BATCH", "a", "x")
    conditions.clear("MALFORMED_BATCH", "a")
    assert flood(1_000) == 0
    assert conditions.may_log("MALFORMED_BATCH", "b")
    assert conditions.may_log("EVENTS_LOST", "a")
    # A clock that is set back by an hour is followed: neither a burst nor an hour of silence.
    now -= 3_600
    assert flood(1_000) == 0
    now += LINE_S
    assert flood(1_000) == 1
    now += 86_400
    assert flood(1_000) == LINES


def test_lines_are_counted_for_a_bounded_number_of_conditions() -> None:
    conditions = Conditions(lambda: 0.0, limit=10)
    assert all(conditions.may_log("EVENTS_LOST", str(number)) for number in range(1_000))
    assert len(conditions._lines) == 10
