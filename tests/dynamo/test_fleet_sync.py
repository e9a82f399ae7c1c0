"""Our frontend and a Dynamo frontend with replica sync, side by side: each counts the other's load.

Workers hold their requests, so that load stays until it is compared.
"""

from __future__ import annotations

import re
import threading
from typing import Any, Literal

import httpx
import pytest

from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.ours import our_frontend
from tests.waiting import patience, until_now

#: Prompts of several blocks that share none.
WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot")


def prompt(number: int, words: int = 60) -> str:
    return " ".join([WORDS[number % len(WORDS)]] * words) + f" {number}"


class Ours:
    """A dynctl frontend on the planes of the fleet."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, text: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": text, "max_tokens": 2}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=patience(60))

    def load(self) -> dict[int, tuple[int, int]]:
        """Worker id -> (requests, decode blocks)."""
        rows = httpx.get(self.url + "/v1/workers", timeout=patience(10)).json()["workers"]
        return {
            row["worker_id"]: (rank["active_requests"], rank["active_decode_blocks"])
            for row in rows
            for rank in row["ranks"]
        }

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(
            self.url + "/v1/workers", timeout=patience(10)
        ).json()["replicas"]
        return found

    def last(self) -> int:
        """The worker of the last decision."""
        rows = httpx.get(self.url + "/v1/decisions?limit=1", timeout=patience(10)).json()
        worker: int = rows["decisions"][0]["decode"]["worker_id"]
        return worker


def gauges(fleet: DynamoFleet) -> dict[int, int]:
    """Worker id -> the decode blocks that Dynamo's frontend counts."""
    _, text = fleet.frontend.get("/metrics")
    pattern = r'dynamo_frontend_worker_active_decode_blocks\{[^}]*worker_id="(\d+)"[^}]*\} (\d+)'
    return {int(worker): int(blocks) for worker, blocks in re.findall(pattern, text)}


@pytest.mark.seed("dynamo-1.6: replica sync: load is shared")
@pytest.mark.parametrize("plane", ["zmq", "nats"])
def test_load_is_seen_on_both_sides(plane: Literal["zmq", "nats"]) -> None:
    with DynamoFleet(
        aggregated(2, kind="held"),
        frontend_args=("--router-replica-sync",),
        event_plane=plane,
    ) as fleet:
        holds = [worker.held for worker in fleet.workers.values()]
        until_now(lambda: fleet.frontend.complete("The first request", max_tokens=1).ok, 20.0)
        with our_frontend(fleet, "--router-replica-sync") as served:
            frontend = Ours(served.url)
            until_now(lambda: frontend.complete("ours").status_code == 200, 20.0)
            for hold in holds:
                hold.hold(decode=True)

            # Ours first: Dynamo's frontend sees it, and takes the other worker.
            running = [_in_thread(lambda: frontend.complete(prompt(0)))]
            until_now(lambda: any(blocks > 3 for blocks in gauges(fleet).values()), 20.0)
            first = next(worker for worker, blocks in gauges(fleet).items() if blocks > 3)
            assert frontend.load()[first][0] == 1
            running.append(_in_thread(lambda: fleet.frontend.complete(prompt(1), max_tokens=2)))

            # Theirs: ours sees it there, and the next ones of both spread.
            other = next(one for one in frontend.load() if one != first)
            until_now(lambda: frontend.load()[other][0] == 1, 20.0)
            assert frontend.load()[other][1] > 3
            until_now(
                lambda: (
                    [one["state"] for one in frontend.replicas() if one["requests"]] == ["in step"]
                )
            )
            until_now(
                lambda: gauges(fleet) == {w: n for w, (_, n) in frontend.load().items()}, 20.0
            )

            # A long one of theirs on one worker moves ours to the other, which has less.
            long = prompt(2, 240)
            running.append(_in_thread(lambda: fleet.frontend.complete(long, max_tokens=2)))
            until_now(lambda: sum(n for n, _ in frontend.load().values()) == 3, 20.0)
            lighter = min(frontend.load().items(), key=lambda one: one[1][1])[0]
            running.append(_in_thread(lambda: frontend.complete(prompt(3))))
            until_now(lambda: frontend.load()[lighter][0] == 2, 20.0)
            assert frontend.last() == lighter

            for hold in holds:
                hold.hold()
                hold.release()
            for thread in running:
                thread.join(patience(30))
                assert not thread.is_alive()
            # What ended ends on both sides.
            until_now(lambda: set(frontend.load().values()) == {(0, 0)}, 20.0)
            until_now(lambda: set(gauges(fleet).values()) == {0}, 20.0)
            channels = _channels(fleet)
            assert channels

        # Our channel is gone with the process.
        assert len(_channels(fleet)) < len(channels)


def _channels(fleet: DynamoFleet) -> set[str]:
    directory = fleet.file_kv / "v1" / "event_channels"
    return {one.name for one in directory.iterdir() if "active%5Fsequences" in one.name}


def _in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread
