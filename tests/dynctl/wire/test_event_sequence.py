"""The place of a batch in its stream, against a model that remembers everything."""

from hypothesis import given
from hypothesis import strategies as st

from dynctl.wire.event_sequence import EventSequence, Place


def place(sequence, seq, *, digest=None, ts=None, reconnected=False):
    return sequence.place(seq, seq * 7 if digest is None else digest, ts, reconnected=reconnected)


def after(*seqs):
    sequence = EventSequence()
    for seq in seqs:
        sequence.advance(seq, seq * 7, float(seq))
    return sequence


def test_a_stream_starts_at_zero():
    assert place(EventSequence(), 0) is Place.NEXT
    assert place(EventSequence(), 1) is Place.GAP
    assert EventSequence().expected == 0


def test_known_number():
    assert place(after(0, 1), 1) is Place.DUPLICATE
    assert place(after(0, 1), 0) is Place.DUPLICATE
    assert place(after(0, 1), 0, digest=99) is Place.RESTART
    assert place(after(0, 1), 0, digest=99, ts=-5.0) is Place.RESTART


def test_number_that_was_skipped():
    assert after().advance(3, 21, 3.0) == 3
    assert place(after(0, 3), 1, ts=1.0) is Place.LATE
    assert place(after(0, 3), 1, ts=3.5) is Place.RESTART
    assert place(after(0, 3), 1) is Place.LATE
    assert place(after(0, 3), 1, ts=1.0, reconnected=True) is Place.RESTART


def test_number_older_than_memory():
    sequence = after(*range(2000))
    assert place(sequence, 1990) is Place.DUPLICATE
    assert place(sequence, 0, ts=0.0) is Place.LATE
    assert place(sequence, 0, ts=1e9) is Place.RESTART


def test_memory_is_bounded():
    sequence = after(*range(0, 20_000, 7))
    assert len(sequence._digests) <= 256


def test_last():
    sequence = after(0, 1)
    assert sequence.is_last(1, 7)
    assert not sequence.is_last(1, 8)
    assert not sequence.is_last(0, 0)
    sequence.reset()
    assert not sequence.is_last(1, 7)
    assert place(sequence, 0) is Place.NEXT


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=200))
def test_lives_of_an_engine(steps):
    """Batches of successive processes, some skipped or repeated: nothing is applied twice, every
    restart that shows itself by a known number is seen, and no duplicate is taken for one."""
    sequence = EventSequence()
    life = 0
    seen: dict[int, int] = {}
    for restart, seq in steps:
        if restart and seq in seen:
            life += 1
        digest, ts = hash((life, seq)), 1000.0 * life + seq
        verdict = sequence.place(seq, digest, ts, reconnected=False)
        if seq in seen:
            assert verdict is (Place.DUPLICATE if seen[seq] == life else Place.RESTART)
        elif seen and seq < max(seen):
            assert verdict is (Place.LATE if set(seen.values()) == {life} else Place.RESTART)
        else:
            assert verdict is (Place.NEXT if seq == max(seen, default=-1) + 1 else Place.GAP)
        if verdict is Place.RESTART:
            sequence.reset()
            seen = {}
        if verdict in (Place.NEXT, Place.GAP, Place.RESTART):
            skipped = sequence.advance(seq, digest, ts)
            assert skipped == seq - max(seen, default=-1) - 1
            seen[seq] = life
