"""What a replay reads: a trace, a recording or a generated workload, as often as necessary."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem, named_in_errors, open_regular
from dynctl.documents.recording import Arrived, Finished, Noted
from dynctl.documents.recording_file import MAGIC, RecordingFile
from dynctl.simulation.replay.workloads import Workload, generate
from dynctl.wire.traces import SkippedLines, TraceRequest, read_trace, trace_format

#: Tokens of a block where neither the trace nor the user specifies them.
DEFAULT_BLOCK: Final = 16
#: Requests of a recording that wait for the length of an earlier one's output.
_MOST_WAITING: Final = 50_000
#: Requests of one time that `spread` keeps until the next time is known.
_MOST_TOGETHER: Final = 100_000


@dataclass(slots=True)
class TraceInput:
    """A source of requests. Each call of `requests` starts at the beginning.

    ``path`` or ``workload``. ``block_size``: tokens of an id of a trace, or of a generated block.
    ``speed`` divides the times between requests. ``model``: only its requests. ``spread``: requests
    of one time come evenly until the next time.
    """

    path: Path | None = None
    workload: Workload | None = None
    block_size: int | None = None
    limit: int | None = None
    speed: float = 1.0
    model: str | None = None
    skip_bad: bool = False
    spread: bool = False
    skipped: SkippedLines = field(default_factory=SkippedLines)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.path) if self.workload is None else f"generated {self.workload.kind}"

    @property
    def format(self) -> str:
        """A :data:`TraceFormat`, ``recording`` or the kind of workload. Raises WireError."""
        if self.workload is not None:
            return self.workload.kind
        assert self.path is not None
        if is_recording(self.path):
            return "recording"
        return trace_format(self.path) or "unknown"

    def first(self) -> TraceRequest:
        """The first request; raises WireError where there is none."""
        for request in self.requests(0):
            return request
        of_model = "" if self.model is None else f" of model {self.model}"
        raise WireError(self.name, f"no request{of_model}; expected at least one")

    def requests(self, seed: int, speed: float = 1.0) -> Iterator[TraceRequest]:
        """The requests, the first at second 0. ``seed``: of a generated workload. ``speed``
        multiplies that of the input. Raises WireError while it reads."""
        self.skipped = SkippedLines()
        self.notes = []
        speed *= self.speed
        start: float | None = None
        model = self.model
        requests = islice(self._source(seed), self.limit)
        for request in _spread(requests, self.name) if self.spread else requests:
            if start is None:
                start = request.at
            if self.model is None and request.model != model:
                if model is not None:
                    raise UsageProblem(
                        f"{self.name}: requests of {model or '(no model)'} and of "
                        f"{request.model or '(no model)'}; a replay simulates one model",
                        "choose it with --model NAME",
                    )
                model = request.model
            if start == 0.0 and speed == 1.0:
                yield request
                continue
            yield _at_time(request, max(0.0, request.at - start) / speed)

    def _source(self, seed: int) -> Iterator[TraceRequest]:
        skipped = self.skipped if self.skip_bad else None
        if self.workload is not None:
            return generate(self.workload, seed, self.block_size or DEFAULT_BLOCK)
        assert self.path is not None
        requests: Iterator[TraceRequest]
        if is_recording(self.path):
            requests = self._recorded_requests(self.path)
        else:
            requests = read_trace(self.path, block_size=self.block_size, skipped=skipped)
        if self.model is None:
            return requests
        return (request for request in requests if request.model == self.model)

    def _recorded_requests(self, path: Path) -> Iterator[TraceRequest]:
        """The requests of a recording in order of arrival."""
        unknown = 0
        for arrived, output_tokens in self._arrivals_and_outputs(path):
            unknown += output_tokens is None
            yield _request(arrived, output_tokens)
        if unknown:
            self._note(
                f"{unknown:,} requests have no output length in the recording; their limit, or 1 "
                "token, is in its place"
            )

    def _arrivals_and_outputs(self, path: Path) -> Iterator[tuple[Arrived, int | None]]:
        """The length of an output is known when the request ends, so requests wait for it, a
        bounded number of them."""
        waiting: deque[Arrived] = deque()
        outputs: dict[str, int | None] = {}
        running: set[str] = set()
        records = RecordingFile(path, skip_bad=self.skip_bad)
        for record in records:
            if type(record) is Arrived:
                waiting.append(record)
                running.add(record.id)
            elif type(record) is Finished:
                if record.id in running:
                    outputs[record.id] = record.output_tokens
            elif type(record) is Noted:
                if record.kind == "skipped":
                    self.skipped.add(record.text)
                elif record.kind in ("cut", "dropped"):
                    self._note(record.text)
            while waiting and (waiting[0].id in outputs or len(waiting) > _MOST_WAITING):
                arrived = waiting.popleft()
                running.discard(arrived.id)
                yield arrived, outputs.pop(arrived.id, None)
        for arrived in waiting:
            yield arrived, outputs.get(arrived.id)

    def _note(self, text: str) -> None:
        if len(self.notes) < 20 and text not in self.notes:
            self.notes.append(text)


def _spread(requests: Iterable[TraceRequest], name: str) -> Iterator[TraceRequest]:
    """Requests that have one time, evenly from then until the next time.

    Those of the last time have the distance of the ones before them. Raises UsageProblem.
    """
    distance = 0.0
    last: list[TraceRequest] = []
    for request in requests:
        if last and request.at > last[0].at:
            distance = request.at - last[0].at
            yield from _apart(last, distance)
            last = []
        last.append(request)
        if len(last) > _MOST_TOGETHER:
            raise UsageProblem(
                f"--spread: more than {_MOST_TOGETHER:,} requests of {name} have the time "
                f"{request.at:g} s; expected fewer",
                "leave --spread out, or take a part of the requests: --limit N",
            )
    yield from _apart(last, distance)


def _apart(requests: Sequence[TraceRequest], distance: float) -> Iterator[TraceRequest]:
    for number, request in enumerate(requests):
        yield (
            _at_time(request, request.at + distance * number / len(requests)) if number else request
        )


def _at_time(request: TraceRequest, at: float) -> TraceRequest:
    """The same request at another time."""
    return TraceRequest(
        at,
        *(
            request.id,
            request.input_tokens,
            request.output_tokens,
            request.hash_ids,
            request.block_size,
        ),
        *(request.model, request.tenant, request.session, request.priority, request.zone),
    )


def is_recording(path: Path) -> bool:
    """Whether a file starts as a recording, or is cut within its header. Raises OSError."""
    with named_in_errors(path), open_regular(path) as file:
        head = file.read(len(MAGIC))
    return bool(head) and MAGIC.startswith(head)


def _request(arrived: Arrived, output_tokens: int | None) -> TraceRequest:
    return TraceRequest(
        arrived.at,
        arrived.id,
        max(1, arrived.isl_tokens),
        max(1, output_tokens or arrived.output_limit or 1),
        arrived.hashes,
        arrived.block_size,
        arrived.model,
        arrived.tenant,
        arrived.session,
        arrived.priority,
    )


def speeds_of(text: str) -> tuple[float, ...]:
    """``0.5,1,2`` as factors of the rate, ascending; raises UsageProblem."""
    factors: list[float] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0.001 <= value <= 1_000:
            raise UsageProblem(f"--loads {text}: {part.strip()!r}; expected 0.001 to 1,000")
        factors.append(value)
    if len(factors) > 20:
        raise UsageProblem(f"--loads {text}: {len(factors)} values; expected at most 20")
    return tuple(sorted(set(factors)))
