"""Predicted against reported cached tokens: one comparison a request, one line a scenario."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from tests.vllm.stack import BLOCK, Engine, Frontend
from tests.vllm.traffic import mixed
from tests.waiting import patience, until_now

_EVENT_LAG_S = 0.3  # from the end of a request to its blocks in the index, on an idle machine

AIM = 0.99


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. ``predicted`` is from the Decision that was made before the answer, ``reported``
    is ``usage.prompt_tokens_details.cached_tokens`` of the answer; both in tokens.

    ``tokens`` is the router's count of the prompt's tokens, ``prompt_tokens`` the engine's.
    ``began`` and ``ended`` bound the request on this process's monotonic clock.
    """

    body: Mapping[str, Any]
    worker: str
    rank: int
    predicted: int
    reported: int
    tokens: int
    prompt_tokens: int
    began: float
    ended: float

    @property
    def equal(self) -> bool:
        return self.predicted == self.reported and self.tokens == self.prompt_tokens


@dataclass(slots=True)
class Rate:
    """The outcomes of one scenario.

    ``explain`` names the known cause of an unequal outcome, or None.
    """

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    causes: dict[str, int] = field(default_factory=dict)
    unexplained: list[Outcome] = field(default_factory=list)

    def judge(self, explain: Callable[[Outcome], str | None] = lambda _: None) -> None:
        """Sort the unequal outcomes into causes and unexplained ones."""
        self.causes.clear()
        self.unexplained.clear()
        for outcome in self.outcomes:
            if not outcome.equal:
                cause = explain(outcome)
                if cause is None:
                    self.unexplained.append(outcome)
                else:
                    self.causes[cause] = self.causes.get(cause, 0) + 1

    @property
    def equal(self) -> int:
        return sum(outcome.equal for outcome in self.outcomes)

    @property
    def reused(self) -> int:
        """Requests of which the engine reused anything: a scenario without any shows nothing."""
        return sum(outcome.reported > 0 for outcome in self.outcomes)

    def line(self) -> str:
        total = len(self.outcomes)
        share = 100 * self.equal / total if total else 0.0
        parts = [f"{self.equal} of {total} equal ({share:.1f} %), {self.reused} with reuse"]
        parts += [f"{count} {cause}" for cause, count in sorted(self.causes.items())]
        if self.unexplained:
            parts.append(f"{len(self.unexplained)} unexplained")
        return f"{self.name}: {'; '.join(parts)}"

    def details(self) -> str:
        """The line, and the numbers of unexplained outcomes."""
        return "\n".join(
            [
                self.line(),
                *(
                    f"  {o.worker}/{o.rank}: predicted {o.predicted}, reported {o.reported}; "
                    f"tokens {o.tokens}, engine {o.prompt_tokens}; {str(o.body)[:160]}"
                    for o in self.unexplained[:10]
                ),
            ]
        )


class Prediction(NamedTuple):
    """What a Decision says about its winner: ``predicted`` tokens of ``tokens`` are cached."""

    worker: str
    rank: int
    predicted: int
    tokens: int


def decided(frontend: Frontend, answer: httpx.Response, hop: str = "decode") -> Prediction:
    """The decision that was made for ``answer``, on the given hop."""
    result = frontend.http.get(f"/v1/decisions/{answer.headers['x-dynctl-decision']}").json()
    made = result[hop]
    worker, rank = made["winner"]["worker"], made["winner"]["dp_rank"]
    rows = {(row["worker"], row["dp_rank"]): row for row in made["candidates"]}
    blocks = rows[worker, rank]["overlap_blocks"]
    return Prediction(worker, rank, blocks * result["block_size"], result["tokens"])


def ask(
    frontend: Frontend,
    body: Mapping[str, Any],
    *,
    hop: str = "decode",
    reused: Callable[[], int] | None = None,
    settle: bool = True,
) -> Outcome:
    """Send a body, as a chat or a completion, and read the decision that was made about it.

    ``reused`` counts the tokens that engines have reused so far; what it grows by is then compared,
    instead of what the answer reports. ``settle``: until the frontend has the events of the blocks
    that the engine computed, which follow its answer. At a hand-off those of the prefill engine
    count: the decode engine publishes too.
    """
    before = reused() if reused else 0
    blocks = frontend.cached_blocks() if hop == "prefill" else {}
    stored = frontend.index_events("stored") if settle else 0
    began = time.monotonic()
    answer = frontend.send(body)
    ended = time.monotonic()
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or {}
    made = decided(frontend, answer, hop)
    whole = usage["prompt_tokens"] // BLOCK * BLOCK
    reported = reused() - before if reused else details.get("cached_tokens") or 0

    # The last block of a prompt that was reused entirely is computed again, and is not a new one.
    new = reported < (usage["prompt_tokens"] - 1) // BLOCK * BLOCK

    def arrived() -> bool:
        if hop == "prefill" and new:
            place = made.worker, made.rank
            return frontend.cached_blocks()[place] > blocks.get(place, 0)
        return frontend.index_events("stored") > stored

    known = reported if hop == "prefill" else details.get("cached_tokens") or 0
    if settle and whole > known:
        # Not asserted: lost events show as a wrong prediction of a later request.
        with contextlib.suppress(TimeoutError):
            until_now(arrived, 3)
    return Outcome(
        body=body,
        worker=made.worker,
        rank=made.rank,
        predicted=made.predicted,
        reported=reported,
        tokens=made.tokens,
        prompt_tokens=usage["prompt_tokens"],
        began=began,
        ended=ended,
    )


def ask_all(
    frontend: Frontend, bodies: Iterable[Mapping[str, Any]], at_once: int = 1
) -> list[Outcome]:
    """Send every body, ``at_once`` at a time; in the order of the bodies.

    One at a time, each is predicted when the index has the events of those before.
    """
    if at_once == 1:
        return [ask(frontend, body) for body in bodies]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda body: ask(frontend, body, settle=False), bodies))


def asked_as(frontend: Frontend, path: str, body: dict[str, Any]) -> Outcome:
    """The outcome of a request of any API."""
    stored = frontend.index_events("stored")
    answer = frontend.http.post(path, json=body)
    assert answer.status_code == 200, answer.text[:500]
    usage = answer.json()["usage"]
    read = usage.get("cache_read_input_tokens") or 0
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    reported = details.get("cached_tokens") or read
    tokens = usage.get("prompt_tokens") or usage["input_tokens"] + read
    made = decided(frontend, answer)
    if tokens // BLOCK * BLOCK > reported:
        with contextlib.suppress(TimeoutError):
            until_now(lambda: frontend.index_events("stored") > stored, 3)
    return Outcome(
        body=body,
        worker=made.worker,
        rank=made.rank,
        predicted=made.predicted,
        reported=reported,
        tokens=made.tokens,
        prompt_tokens=tokens,
        began=0.0,
        ended=0.0,
    )


def on(outcomes: list[Outcome], worker: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.worker == worker]


def pinned(frontend: Frontend, worker: str, count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Bodies that only ``worker`` may serve."""
    pin = {"nvext": {"backend_instance_id": frontend.worker_id(worker)}}
    return [{**body, **pin} for body in mixed(count, seed)]


def computed_meanwhile(
    outcomes: Sequence[Outcome], engine: Engine, at_once: int = 8
) -> Callable[[Outcome], str | None]:
    """Explains reuse of what another request computed around the time of the prediction.

    That request must share as many leading tokens as the engine reused. It was in flight together
    with this one, was one of the last ``at_once`` to end before, or ended within the time that
    events take on this machine, so that they may have been on their way.
    """
    ids: dict[int, list[int]] = {}
    by_end = sorted(outcomes, key=lambda outcome: outcome.ended)

    def shares(outcome: Outcome, other: Outcome) -> bool:
        for one in (outcome, other):
            if id(one) not in ids:
                ids[id(one)] = engine.token_ids(one.body)
        count = outcome.reported
        return ids[id(other)][:count] == ids[id(outcome)][:count]

    def explain(outcome: Outcome) -> str | None:
        if outcome.reported <= outcome.predicted or outcome.tokens != outcome.prompt_tokens:
            return None
        beside = [
            other
            for other in outcomes
            if other is not outcome and other.began < outcome.ended and outcome.began < other.ended
        ]
        if any(shares(outcome, other) for other in beside):
            return "reused what a request beside it computed"
        ended = [other for other in by_end if other.ended <= outcome.began]
        late = outcome.began - patience(_EVENT_LAG_S)
        before = [*ended[-at_once:], *(other for other in ended if other.ended >= late)]
        if any(shares(outcome, other) for other in before):
            return "predicted before the events of a request that had just ended"
        return None

    return explain
