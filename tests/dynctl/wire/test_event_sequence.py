"""The verdicts on a publisher's messages, against models that remember everything."""

from hypothesis import given
from hypothesis import strategies as st

from dynctl.wire.event_sequence import EventSequence, Verdict


def judge(sequence, number, *, digest=None, timestamp=None, reconnected=False):
    digest = number * 7 if digest is None else digest
    return sequence.judge(number, digest, timestamp, reconnected=reconnected)


def after(*numbers, **settings):
    sequence = EventSequence(**settings)
    for number in numbers:
        sequence.advance(number, number * 7, float(number))
    return sequence


def test_a_sequence_starts_at_its_first_number():
    assert judge(EventSequence(), 0) is Verdict.NEXT
    assert judge(EventSequence(), 1) is Verdict.GAP
    assert EventSequence().next_number == 0
    assert EventSequence(first=1).judge(1) is Verdict.NEXT
    assert EventSequence(first=1).missing_before(4) == 3


def test_a_late_reader_begins_with_any_number_but_sees_a_new_process_from_its_start():
    sequence = EventSequence(late_join=True)
    assert judge(sequence, 7) is Verdict.NEXT
    assert sequence.advance(7, 49, 7.0) == 0
    assert judge(sequence, 9) is Verdict.GAP
    sequence.reset()
    assert judge(sequence, 2) is Verdict.GAP
    assert sequence.advance(2) == 2


def test_a_known_number():
    assert judge(after(0, 1), 1) is Verdict.DUPLICATE
    assert judge(after(0, 1), 0) is Verdict.DUPLICATE
    assert judge(after(0, 1), 0, digest=99) is Verdict.RESTART
    assert judge(after(0, 1), 0, digest=99, timestamp=-5.0) is Verdict.RESTART


def test_a_number_that_was_skipped():
    assert after().advance(3, 21, 3.0) == 3
    assert judge(after(0, 3), 1, timestamp=1.0) is Verdict.LATE
    assert judge(after(0, 3), 1, timestamp=3.5) is Verdict.RESTART
    assert judge(after(0, 3), 1) is Verdict.LATE
    assert judge(after(0, 3), 1, timestamp=1.0, reconnected=True) is Verdict.RESTART


def test_a_number_older_than_the_memory():
    sequence = after(*range(2000))
    assert judge(sequence, 1990) is Verdict.DUPLICATE
    assert judge(sequence, 0, timestamp=0.0) is Verdict.LATE
    assert judge(sequence, 0, timestamp=1e9) is Verdict.RESTART


def test_the_memory_is_bounded():
    sequence = after(*range(0, 20_000, 7))
    assert len(sequence._digests) <= 256


def test_the_last_message():
    sequence = after(0, 1)
    assert (sequence.last, sequence.last_digest) == (1, 7)
    sequence.reset()
    assert (sequence.last, sequence.last_digest) == (None, None)
    assert judge(sequence, 0) is Verdict.NEXT


def test_after_a_lost_connection_the_expected_number_is_unproven():
    assert EventSequence().judge(0, reconnected=True) is Verdict.NEXT
    assert EventSequence(late_join=True).judge(7, reconnected=True) is Verdict.NEXT
    sequence = after(0, 1)
    assert sequence.judge(2, reconnected=True) is Verdict.UNPROVEN
    assert sequence.judge(2) is Verdict.NEXT
    assert sequence.judge(3, reconnected=True) is Verdict.GAP
    assert sequence.judge(1, 8, reconnected=True) is Verdict.RESTART
    sequence.join()
    assert sequence.judge(2, reconnected=True) is Verdict.NEXT


def test_late_numbers_in_ascending_order_are_a_restart():
    sequence = after(1000, restart_run=3)
    assert [judge(sequence, n) for n in (4, 5, 8, 9, 10)] == [
        *[Verdict.LATE] * 4,
        Verdict.RESTART,
    ]
    sequence = after(1000, restart_run=3)
    verdicts = [judge(sequence, 4), judge(sequence, 5)]
    sequence.advance(1001)
    assert {*verdicts, judge(sequence, 6), judge(sequence, 7)} == {Verdict.LATE}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=200))
def test_successive_processes(steps):
    """Messages of successive processes, some skipped or repeated: nothing is applied twice, every
    restart that shows itself by a known number is seen, and no duplicate is taken for one."""
    sequence = EventSequence()
    life = 0
    seen: dict[int, int] = {}
    for restart, number in steps:
        if restart and number in seen:
            life += 1
        digest, timestamp = hash((life, number)), 1000.0 * life + number
        verdict = sequence.judge(number, digest, timestamp)
        if number in seen:
            assert verdict is (Verdict.DUPLICATE if seen[number] == life else Verdict.RESTART)
        elif seen and number < max(seen):
            assert verdict is (Verdict.LATE if set(seen.values()) == {life} else Verdict.RESTART)
        else:
            next_one = number == max(seen, default=-1) + 1
            assert verdict is (Verdict.NEXT if next_one else Verdict.GAP)
        if verdict is Verdict.RESTART:
            sequence.reset()
            seen = {}
        if verdict in (Verdict.NEXT, Verdict.GAP, Verdict.RESTART):
            missing = number - max(seen, default=-1) - 1
            assert sequence.missing_before(number) == missing
            assert sequence.advance(number, digest, timestamp) == missing
            seen[number] = life


@given(st.booleans(), st.integers(0, 3), st.lists(st.integers(0, 50), max_size=100))
def test_numbers_alone(late_join, first, numbers):
    """Without digests and timestamps: each number is counted once, as applied, missing or late."""
    sequence = EventSequence(first, late_join=late_join)
    applied: list[int] = []
    missing = 0
    for number in numbers:
        verdict = sequence.judge(number)
        start = number if late_join and not applied else first
        expected = applied[-1] + 1 if applied else start
        if number < expected:
            assert verdict is Verdict.LATE
            continue
        assert verdict is (Verdict.NEXT if number == expected else Verdict.GAP)
        missing += sequence.advance(number)
        applied.append(number)
    if applied:
        begin = applied[0] if late_join else first
        assert len(applied) + missing == applied[-1] - begin + 1
