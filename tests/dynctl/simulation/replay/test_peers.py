"""What several routers know of each other, computed by hand."""

from dynctl.simulation.replay.peers import Peers
from router_core import Booked, Freed, PrefillDone

MS = 1_000_000
ONE, TWO = (1, 0), (2, 0)


def booked(request, key, tokens, stage="aggregated"):
    return Booked(request, stage, key[0], key[1], prefill_tokens=tokens)


def test_choices_and_loads_of_two_routers_are_those_computed_by_hand():
    """Two routers whose bookings take 2 ms. At each choice: what is booked, and what is counted.

    0 ms, router 0, rank 1, 100 tokens: nothing is booked.
    1 ms, router 1, rank 1, 60 tokens: 100 are booked, it counts 0: 100 too little. Another router
    chose the same rank 1 ms before.
    2 ms, router 0, rank 2, 30 tokens: 160 are booked. Before it, router 1 has seen the 100; router
    0 has not seen the 60 of router 1: 60 too little. Another router chose rank 1, not 2, 1 ms ago.
    3 ms: the prefill of the first ends; router 1 counts it until 5 ms. Router 0 sees the 60.
    4 ms, router 1, rank 2, 10 tokens: 90 are booked. It counts 100 of the first too much; the 30
    of router 0 it has seen. Router 0 chose rank 2 at 2 ms: within 2 ms.
    8 ms, router 0, rank 2, 5 tokens: 100 are booked, all seen. No choice of the other is near.

    Booked over all choices: 0 + 100 + 160 + 90 + 100 = 450; too little 160, too much 100.
    """
    peers = Peers(2, 2 * MS)
    first = peers.apply_change(0, booked("a", ONE, 100), 0)
    second = peers.apply_change(1, booked("b", ONE, 60), 1 * MS)
    peers.learn(1, first)
    third = peers.apply_change(0, booked("c", TWO, 30), 2 * MS)
    peers.learn(0, second)
    ended = peers.apply_change(0, PrefillDone("a"), 3 * MS)
    peers.learn(1, third)
    fourth = peers.apply_change(1, booked("d", TWO, 10), 4 * MS)
    peers.learn(1, ended)
    peers.learn(0, fourth)
    peers.apply_change(0, booked("e", TWO, 5), 8 * MS)
    found = peers.result()
    assert (found.window_s, found.choices) == (0.002, 5)
    assert found.near_share == 3 / 5
    assert found.same_share == 2 / 3
    assert found.load_low_share == 160 / 450
    assert found.load_high_share == 100 / 450


def test_a_decode_hop_is_not_a_choice_and_a_prefill_ends_once():
    peers = Peers(2, 0)
    assert peers.apply_change(0, booked("a", ONE, 40, "prefill"), 0) == (ONE, 40)
    assert peers.apply_change(0, Freed("a", "prefill"), 5) == (ONE, -40)
    assert peers.apply_change(0, booked("a", TWO, 0, "decode"), 5) is None
    assert peers.apply_change(0, Freed("a", "decode"), 6) is None
    assert peers.apply_change(0, PrefillDone("a"), 6) is None
    assert peers.apply_change(0, Freed("a"), 9) is None
    found = peers.result()
    assert (found.choices, found.near_share, found.same_share) == (1, 0.0, None)
    assert (found.load_low_share, found.load_high_share) == (None, None)


def test_memory_is_that_of_ranks_and_of_requests_whose_prefill_runs():
    peers = Peers(3, 0)
    for number in range(1_000):
        key = (number % 5, 0)
        began = peers.book(number % 3, number, key, 10, number)
        ended = peers.end(number % 3, number)
        for step in (began, ended):
            for other in range(3):
                if other != number % 3:
                    peers.learn(other, step)
    assert not peers._own
    assert peers._unseen == [{}, {}, {}]
    assert len(peers._chosen) == 5 + 1
