"""Seeded workloads: agents, chats, questions about documents, and batch jobs.

Sessions arrive at random (a Poisson process); their turns follow each other after the time for the
answer and a pause. Arrivals do not wait for the fleet: a slow fleet gets the same load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from heapq import heappop, heappush
from random import Random
from struct import Struct
from typing import Any, Final, cast

from xxhash import xxh3_64_intdigest

from dynctl.base.errors import UsageProblem
from dynctl.wire.traces import TraceRequest

#: Spread of lengths: the sigma of a log-normal distribution (0.6: p90 is 1.8 times the mean).
_SIGMA: Final = 0.6
#: Assumed seconds per output token between the turns of a session.
_READING_S: Final = 0.02


def _value(default: Any, help: str, minimum: float = 0, maximum: float = math.inf) -> Any:
    return field(default=default, metadata={"help": help, "min": minimum, "max": maximum})


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of a generated trace. Lengths are means in tokens, times are in seconds."""

    kind: str
    requests: int = _value(5_000, "requests in total", 1, 100_000_000)
    rate: float = _value(8.0, "requests per second outside bursts", 1e-3, 1e6)
    prompts: int = _value(20, "different system prompts", 1, 1_000_000)
    prompt_tokens: int = _value(600, "tokens of a system prompt", 0, 1_000_000)
    skew: float = _value(1.0, "how unequally prompts and documents are used (Zipf)", 0, 10)
    turns: float = _value(1.0, "turns of a session", 1, 1_000)
    turn_tokens: int = _value(100, "new input tokens of a turn", 1, 1_000_000)
    output_tokens: int = _value(200, "output tokens", 1, 1_000_000)
    think_s: float = _value(10.0, "pause before the next turn", 0, 86_400)
    documents: int = _value(0, "documents to choose from", 0, 10_000_000)
    document_tokens: int = _value(800, "tokens of a document", 1, 1_000_000)
    documents_each: int = _value(0, "documents in a prompt, in any order", 0, 1_000)
    together: int = _value(1, "sessions that arrive at once with one system prompt", 1, 1_000_000)
    tenants: int = _value(1, "tenants, which share no cache", 1, 1_000_000)
    burst: float = _value(1.0, "factor of the rate in a burst", 1, 1_000)
    burst_s: float = _value(10.0, "length of a burst", 0.1, 86_400)
    burst_every_s: float = _value(60.0, "time from burst to burst", 0.1, 86_400)
    longest_tokens: int = _value(100_000, "input at which a session ends", 1, 10_000_000)
    zones: tuple[tuple[str, float], ...] = _value((), "zone:weight,.. where requests come from")

    def parameters(self) -> dict[str, Any]:
        """The parameters for a document."""
        return asdict(self) | {"zones": dict(self.zones)}


#: What each kind changes of the defaults.
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "agentic": {
        "prompts": 8, "prompt_tokens": 4_000, "turns": 20.0, "turn_tokens": 600,
        "output_tokens": 150, "think_s": 2.0,
    },
    "chat": {"turns": 5.0, "turn_tokens": 120, "output_tokens": 250, "think_s": 20.0},
    "rag": {
        "prompts": 1, "prompt_tokens": 300, "documents": 2_000, "documents_each": 4,
        "turn_tokens": 40,
    },
    "batch": {
        "prompts": 50, "prompt_tokens": 1_500, "turn_tokens": 400, "output_tokens": 60,
        "together": 200, "skew": 0.0,
    },
}  # fmt: skip

SUMMARIES: Final = {
    "agentic": "long tool prompts, many turns with short pauses",
    "chat": "short shared prompts, some turns, long pauses",
    "rag": "documents in any order behind one prompt, single turns",
    "batch": "jobs of many requests at once with one long prompt each",
}


def parameters() -> Iterator[tuple[str, str]]:
    """Name and meaning of every parameter."""
    for option in fields(Workload):
        if option.metadata:
            yield option.name, option.metadata["help"]


def workload(kind: str, given: Sequence[str] = ()) -> Workload:
    """The workload of a kind with changes such as ``rate=20``; raises UsageProblem."""
    if kind not in KINDS:
        raise UsageProblem(f"--generate {kind}: expected one of {', '.join(KINDS)}")
    chosen: Any = Workload(kind, **KINDS[kind])
    known = {option.name: option for option in fields(Workload) if option.metadata}
    for text in given:
        name, equals, raw = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in known:
            raise UsageProblem(
                f"--workload {text}: expected NAME=VALUE with a name of {', '.join(known)}"
            )
        limits = known[name].metadata
        if name == "zones":
            value: Any = _zones(text, raw)
        else:
            value = _number(text, raw, type(known[name].default), limits["min"], limits["max"])
        chosen = replace(chosen, **{name: value})
    if chosen.documents_each and not chosen.documents:
        raise UsageProblem(
            f"--workload documents_each={chosen.documents_each}: there are no documents; "
            "set documents=N too"
        )
    return cast(Workload, chosen)


def _number(text: str, raw: str, kind: type, low: float, high: float) -> float:
    try:
        value = kind(raw)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise UsageProblem(f"--workload {text}: expected {expected}") from None
    if not low <= value <= high:
        raise UsageProblem(f"--workload {text}: expected {low:g} to {high:,.0f}")
    return cast(float, value)


def _zones(text: str, raw: str) -> tuple[tuple[str, float], ...]:
    shares: dict[str, float] = {}
    for part in filter(None, (share.strip() for share in raw.split(","))):
        name, _, weight = part.partition(":")
        if not name or name in shares or len(shares) == 1_000:
            raise UsageProblem(f"--workload {text}: {part!r}; expected different names of zones")
        shares[name] = _number(text, weight or "1", float, 1e-6, 1e6)
    return tuple(shares.items())


@dataclass(slots=True)
class _WorkloadSession:
    number: int
    prompt: int
    tenant: int
    zone: str
    left: int
    tokens: int
    shared: int
    prefixes: tuple[tuple[int, int], ...] = ()


def generate(workload: Workload, seed: int, block_size: int) -> Iterator[TraceRequest]:
    """The requests of a workload in order of time; the same arguments give the same requests.

    Blocks have ``block_size`` tokens; only full ones have an id. Memory grows with the sessions
    that run at one time, not with the requests.
    """
    return _Generator(workload, seed, block_size).requests()


class _Generator:
    def __init__(self, workload: Workload, seed: int, block_size: int) -> None:
        self._workload = workload
        # One source of randomness each, so that a change of rate leaves the prompts as they are.
        self._times, self._content = Random(f"times {seed}"), Random(f"content {seed}")
        self._block_size = block_size
        self._seed = seed
        self._prompts = _Zipf(workload.prompts, workload.skew)
        self._documents = _Zipf(max(1, workload.documents), workload.skew)
        self._session = 0

    def requests(self) -> Iterator[TraceRequest]:
        workload = self._workload
        waiting: list[tuple[float, int, _WorkloadSession]] = []
        start, sent = self._next_start(0.0), 0
        while sent < workload.requests:
            while not waiting or start <= waiting[0][0]:
                prompt = self._prompts.draw(self._content.random())
                for _ in range(workload.together):
                    session = self._new_session(prompt)
                    heappush(waiting, (start, session.number, session))
                start = self._next_start(start)
            at, number, session = heappop(waiting)
            output = self._length(workload.output_tokens)
            request = self._request(at, sent, session, output)
            sent += 1
            yield request
            session.left -= 1
            session.tokens += output + self._length(workload.turn_tokens)
            if session.left and session.tokens <= workload.longest_tokens:
                pause = self._content.expovariate(1.0) * workload.think_s
                heappush(waiting, (at + output * _READING_S + pause, number, session))

    def _next_start(self, now: float) -> float:
        """When the next session (or the next job) starts."""
        workload = self._workload
        mean = workload.turns * workload.together / workload.rate
        need = self._times.expovariate(1.0) * mean
        while True:  # time passes faster in a burst
            phase = now % workload.burst_every_s
            bursting = workload.burst > 1 and phase < workload.burst_s
            speed = workload.burst if bursting else 1.0
            end = workload.burst_s if bursting else workload.burst_every_s
            left = max(end - phase, 1e-9) if workload.burst > 1 else math.inf
            if need <= left * speed:
                return now + need / speed
            need -= left * speed
            now += left

    def _new_session(self, prompt: int) -> _WorkloadSession:
        workload, content = self._workload, self._content
        self._session += 1
        tenant = content.randrange(workload.tenants)
        zone = ""
        if workload.zones:
            names, weights = zip(*workload.zones, strict=True)
            zone = content.choices(names, weights)[0]
        left = 1
        if workload.turns > 1:  # geometric with this mean
            stop = 1.0 / workload.turns
            left += int(math.log(1.0 - content.random()) / math.log(1.0 - stop))
        shared = workload.prompt_tokens
        prefixes = [(_mix(self._seed, tenant, prompt), shared)]
        for _ in range(workload.documents_each):
            document = self._documents.draw(content.random())
            shared += self._document_length(document)
            prefixes.append((_mix(prefixes[-1][0], document, 1), shared))
        tokens = shared + self._length(workload.turn_tokens)
        return _WorkloadSession(
            self._session, prompt, tenant, zone, left, tokens, shared, tuple(prefixes)
        )  # fmt: skip

    def _request(
        self, at: float, sent: int, session: _WorkloadSession, output: int
    ) -> TraceRequest:
        size = self._block_size
        ids: list[int] = []
        # A block belongs to the shortest shared prefix that holds it whole, else to the session.
        for name, end in session.prefixes:
            ids.extend(range(name + len(ids), name + end // size))
        own = _mix(self._seed, session.number, 2)
        ids.extend(range(own + len(ids), own + session.tokens // size))
        workload = self._workload
        return TraceRequest(
            round(at, 6),
            f"{workload.kind}-{sent}",
            session.tokens,
            output,
            tuple(ids),
            size,
            tenant=f"tenant-{session.tenant}" if workload.tenants > 1 else "",
            session=f"session-{session.number}",
            zone=session.zone,
        )

    def _length(self, mean: int) -> int:
        drawn = self._content.lognormvariate(-_SIGMA * _SIGMA / 2, _SIGMA)
        return max(1, min(round(mean * drawn), 20 * mean))

    def _document_length(self, document: int) -> int:
        """The same for one document each time: half to one and a half of the mean."""
        share = _mix(self._seed, document, 3) / 2**62
        return max(1, round(self._workload.document_tokens * (0.5 + share)))


class _Zipf:
    """Numbers 0..count-1, the one at rank r as often as 1 / r ** skew."""

    def __init__(self, count: int, skew: float) -> None:
        self._count = count
        self._skew = skew

    def draw(self, sample: float) -> int:
        """The number at ``sample`` (0 to 1) of the continuous distribution with these weights."""
        top = self._count + 1.0
        if abs(self._skew - 1.0) < 1e-9:
            value = top**sample
        else:
            power = 1.0 - self._skew
            value = (1.0 + sample * (top**power - 1.0)) ** (1.0 / power)
        return min(self._count - 1, int(value) - 1)


_THREE = Struct("<3Q")


def _mix(first: int, second: int, third: int) -> int:
    """A number below 2**62 that stands for three others; room for block indexes above it."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    return xxh3_64_intdigest(_THREE.pack(first & mask, second & mask, third)) >> 2
