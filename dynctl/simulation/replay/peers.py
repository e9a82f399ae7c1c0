"""What several routers know of each other's choices: counted at each choice of a first worker."""

from __future__ import annotations

from typing import Final

from dynctl.documents.replay import ReplayPeers
from dynctl.simulation.replay.rank import NS
from router_core import Booked, Freed, PrefillDone

#: A rank: worker id and number.
Key = tuple[int, int]
#: Prefill tokens that a booking adds to a rank, or takes from it.
Step = tuple[Key, int]

_NEVER: Final = -1


class Peers:
    """Compares what each of ``count`` routers counts with the bookings of all.

    ``window_ns``: choices of two routers are near each other if at most this time is between them.
    """

    def __init__(self, count: int, window_ns: int) -> None:
        self._window = window_ns
        self._choices = self._near = self._same = 0
        self._counted = self._low = self._high = 0
        #: Prefill tokens that all bookings have on all ranks, and of each request.
        self._booked = 0
        self._own: dict[str | int, Step] = {}
        #: Of each router: by how much more prefill tokens are booked on a rank than it counts.
        self._unseen: list[dict[Key, int]] = [{} for _ in range(count)]
        #: The last time at which each router chose any rank (None) or a rank.
        self._chosen: dict[Key | None, list[int]] = {}
        self._count = count

    def apply_change(
        self, router: int, change: Booked | PrefillDone | Freed, now: int
    ) -> Step | None:
        """A router's own booking begins or ends at ``now`` (ns). Returns what it does to the
        prefill load, None where that is nothing."""
        if isinstance(change, Booked):
            if change.stage == "decode":
                return None
            key = (change.worker_id, change.dp_rank)
            return self.book(router, change.request_id, key, change.prefill_tokens, now)
        if isinstance(change, Freed) and change.stage == "decode":
            return None
        return self.end(router, change.request_id)

    def book(self, router: int, request: str | int, key: Key, tokens: int, now: int) -> Step:
        """A router chooses a rank for a request, which has ``tokens`` to compute there."""
        self._choose(router, key, now)
        step = self._own[request] = (key, tokens)
        self._apply(router, step)
        return step

    def end(self, router: int, request: str | int) -> Step | None:
        """The prefill of a request ended; no effect the second time."""
        booked = self._own.pop(request, None)
        if booked is None:
            return None
        step = (booked[0], -booked[1])
        self._apply(router, step)
        return step

    def learn(self, router: int, step: Step | None) -> None:
        """A router sees what another one's booking did to the prefill load, if anything."""
        if step is not None:
            self._differ(self._unseen[router], step[0], -step[1])

    def result(self) -> ReplayPeers:
        """What was counted."""
        return ReplayPeers(
            self._window / NS,
            self._choices,
            self._near / max(1, self._choices),
            self._same / self._near if self._near else None,
            self._low / self._counted if self._counted else None,
            self._high / self._counted if self._counted else None,
        )

    def _choose(self, router: int, key: Key, now: int) -> None:
        self._choices += 1
        near = self._note_choice(None, router, now)
        self._near += near
        self._same += self._note_choice(key, router, now) and near
        self._counted += self._booked
        for unseen in self._unseen[router].values():
            if unseen > 0:
                self._low += unseen
            else:
                self._high -= unseen

    def _note_choice(self, key: Key | None, router: int, now: int) -> bool:
        """Whether another router chose the rank within the window; notes this choice."""
        times = self._chosen.get(key)
        if times is None:
            times = self._chosen[key] = [_NEVER] * self._count
        first = now - self._window
        near = any(
            at >= first for other, at in enumerate(times) if at != _NEVER and other != router
        )
        times[router] = now
        return near

    def _apply(self, router: int, step: Step) -> None:
        key, tokens = step
        self._booked += tokens
        for other, unseen in enumerate(self._unseen):
            if other != router:
                self._differ(unseen, key, tokens)

    @staticmethod
    def _differ(unseen: dict[Key, int], key: Key, tokens: int) -> None:
        left = unseen.get(key, 0) + tokens
        if left:
            unseen[key] = left
        else:
            unseen.pop(key, None)
