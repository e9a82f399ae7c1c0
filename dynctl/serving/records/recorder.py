"""Records what a router sees and does (:mod:`dynctl.documents.recording`) while it works.

A tap of the service gets every change; hooks get requests. Both note what they get at once, in
memory. A task compresses whole chunks in another thread and gives them to a sink. A sink that is
too slow loses records, never time of the router: what was lost is noted, and the state that follows
makes the recording whole again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

from dynctl import version
from dynctl.base.errors import UsageProblem, file_problem
from dynctl.documents.codec import encode
from dynctl.documents.decisions import Choice, past_decision
from dynctl.documents.fleet_load import Condition
from dynctl.documents.recording import (
    KINDS,
    Arrived,
    Decided,
    Finished,
    Noted,
    RecordingSource,
    Start,
    State,
    Unwrapped,
    moved_snapshot,
)
from dynctl.documents.recording_file import (
    ENCODED_AT_A_TIME,
    HEADER,
    ChunkWriter,
    PlainChunk,
    pack_chunk,
)
from dynctl.health import conditions
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from dynctl.tokenization import ModelTokenizer, TokenizationError
from dynctl.tokenization.segments import SegmentMarks, Segments, segment_marks
from router_core import (
    Applied,
    Captured,
    Change,
    Cleared,
    Decision,
    KvEvent,
    Role,
    RoutingPlan,
    RoutingRequest,
    Worker,
)

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES: Final = 1 << 30
#: Bytes that wait for the sink, before compression; more records are dropped and counted.
MAX_HELD: Final = 64 * 1024 * 1024
#: Seconds between two turns of the task, and the longest that a record waits for its chunk.
_TURN_S: Final = 0.2
_CHUNK_S: Final = 1.0
#: Seconds after which a recording without records has a sign of life.
_QUIET_S: Final = 5.0
_CHUNK_BYTES: Final = 256 * 1024
#: Seconds between two states at least, and how many times as long as a state takes to copy and
#: encode: it costs at most that share of the CPU.
_STATE_S: Final = 60.0
_STATE_SHARE: Final = 500
#: Explanations that are kept in a second; other decisions are explained by routing again.
_DOCUMENTS_A_SECOND: Final = 4
_TENANT_BYTES: Final = 8
#: Recordings of one process at a time: each encodes every record again.
MOST_RECORDINGS: Final = 3
#: Seconds for which the end of a process waits for its recordings.
_CLOSE_S: Final = 2.0
#: Chat templates whose headers a recording finds.
_MOST_TEMPLATES: Final = 64
#: After a full disk: free bytes with which a recording begins again, and seconds between two looks.
_ROOM_BYTES: Final = 16 * 1024 * 1024
_ROOM_S: Final = 2.0

Observed = Arrived | Decided | Finished | Noted


class Sink(Protocol):
    """Takes the bytes of a recording, in order."""

    async def write(self, data: bytes) -> None:
        """Raises OSError where no more can be written."""
        ...


def already_there(path: Path) -> UsageProblem:
    """The refusal to record to a path that exists."""
    what = (
        "is a directory; expected a file to write"
        if path.is_dir()
        else ("the file exists; a recording is never overwritten")
    )
    return UsageProblem(f"{path}: {what}", "remove it, or set another file")


class FileSink:
    """A new file, readable by its owner only. Raises UsageProblem where it cannot be made.

    ``replace_old``: an existing file gets the name ``FILE.old``; else it is an error.
    """

    def __init__(self, path: Path, *, replace_old: bool = False) -> None:
        self.path = path
        if replace_old:
            try:
                with contextlib.suppress(FileNotFoundError):
                    path.replace(old_of(path))
            except OSError as error:
                raise UsageProblem(f"{path}: {file_problem(error, writing=True)}") from None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._size = 0
        try:
            self._file = os.open(path, flags, 0o600)
        except FileExistsError:
            raise already_there(path) from None
        except OSError as error:
            raise UsageProblem(f"{path}: {file_problem(error, writing=True)}") from None

    async def write(self, data: bytes) -> None:
        await asyncio.to_thread(self.write_now, data)

    def write_now(self, data: bytes) -> None:
        """As :meth:`write`, in this thread. Where it fails the file ends before ``data``, and the
        error has its name."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            error.filename = str(self.path)
            raise
        self._size += len(data)

    @property
    def closed(self) -> bool:
        return self._file < 0

    def close(self) -> None:
        """Close the file; further writes raise OSError."""
        if not self.closed:
            os.close(self._file)
            self._file = -1


def old_of(path: Path) -> Path:
    """Where a recording goes when the next one of that name begins."""
    return path.with_name(path.name + ".old")


class PromptSegments:
    """The parts of prompts, as far as the headers of their templates are known."""

    def __init__(self) -> None:
        #: By fingerprint: the headers of templates, and tokenizers with templates to read.
        self._marks: dict[str, SegmentMarks] = {}
        self._unread: dict[str, ModelTokenizer] = {}

    def add(self, tokenizer: ModelTokenizer) -> None:
        """Let :meth:`read_templates` read the templates of a tokenizer."""
        if len(self._marks) + len(self._unread) < _MOST_TEMPLATES:
            self._unread[tokenizer.fingerprint] = tokenizer

    async def read_templates(self) -> None:
        """Find the headers of the templates that were added, in a thread."""
        while self._unread:
            fingerprint, tokenizer = self._unread.popitem()
            try:
                self._marks[fingerprint] = await asyncio.to_thread(segment_marks, tokenizer)
            except TokenizationError:
                self._marks[fingerprint] = SegmentMarks({})

    def of(self, tokenizer: ModelTokenizer | None, ids: Sequence[int]) -> Segments:
        """The parts of a prompt; empty where they are not known, or not known yet."""
        if tokenizer is None:
            return ()
        marks = self._marks.get(tokenizer.fingerprint)
        if marks is None:
            self.add(tokenizer)
            return ()
        try:
            return marks.segments(ids)
        except (OverflowError, TypeError, ValueError):
            return ()  # a client sent ids that are out of range


@dataclass(frozen=True, slots=True)
class _Capture:
    """A copy of the router's state that waits to be encoded."""

    at: float
    captured: Captured
    copying_s: float


class Recorder(ServiceObserver):
    """One recording of a service. Create it on the event loop; then await :meth:`run`.

    ``complete``: those of ``recording.KINDS`` that the source gives. ``max_bytes`` bounds the
    recording, ``seconds`` its length (None: until :meth:`stop`).
    """

    def __init__(
        self,
        service: RoutingService,
        sink: Sink,
        *,
        source: RecordingSource,
        router: str,
        complete: frozenset[str],
        max_bytes: int = DEFAULT_MAX_BYTES,
        seconds: float | None = None,
    ) -> None:
        self._service = service
        self._sink = sink
        self._source: RecordingSource = source
        self._router = router
        self._complete = complete
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._offset = service.wall() - service.clock()
        #: What waits for the sink, in order, and its bytes; what comes next is in the writer.
        self._waiting: deque[PlainChunk | _Capture] = deque()
        self._held = 0
        self._writer = ChunkWriter(self._offset)
        self._stop = asyncio.Event()
        self._why = ""
        #: Whether it ended because it reached ``max_bytes``.
        self.full = False
        self._dropped = 0
        self._documents = self._second = 0
        self._state_at = self._begun = service.clock()
        self._state_every = _STATE_S
        self._segments = PromptSegments()
        #: Bytes and records that the sink has, and records that were lost.
        self.bytes = self.records = self.lost = 0

    # -- life ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Record until the end; leaves no hook behind. Raises OSError where the sink fails."""
        service = self._service
        try:
            self._attach()
            await self._write(HEADER)
            deadline = None if self._seconds is None else self._begun + self._seconds
            sent = service.clock()
            await self._segments.read_templates()
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TURN_S):
                        await self._stop.wait()
                await self._segments.read_templates()
                now = service.clock()
                if now - sent >= _QUIET_S:
                    # A reader of the stream sees that it lives, and the file how far it reaches.
                    self._append(Noted(self._now(), "quiet", "recording"))
                if len(self._writer) and now - sent >= _CHUNK_S:
                    self._close_chunk()
                    sent = now
                await self._send()
                self._keep_state(now)
                if deadline is not None and now >= deadline:
                    self.stop(f"the recording lasted {self._seconds:g} s, as it was set")
        finally:
            self._detach()
        if not self.full:  # its last record has the reason
            self._append(Noted(self._now(), "stopped", "recording", "", self._why))
            self._close_chunk()
            await self._send()

    def stop(self, why: str = "it was stopped") -> None:
        """End the recording; :meth:`run` writes what is left."""
        self._why = self._why or why
        self._stop.set()

    def _attach(self) -> None:
        """From here on nothing is missed: state and hooks begin in one step."""
        service, config = self._service, self._service.router.config
        sizes = {model: service.served.block_size(model) for model in service.models()}
        settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
        loaded = {model: service.preparation.tokenizers.of(model) for model in service.models()}
        start = Start(
            self._now(),
            self._source,
            self._router,
            version(),
            settings,
            sizes,
            service.router.index.exact,
            service.router.learns,
            self._complete,
            {
                model: str(tokenizer.directory)
                for model, tokenizer in loaded.items()
                if tokenizer is not None
            },
            {
                model: tokenizer.fingerprint
                for model, tokenizer in loaded.items()
                if tokenizer is not None
            },
        )
        for tokenizer in loaded.values():
            if tokenizer is not None:
                self._segments.add(tokenizer)
        self._append(start)
        self._capture()
        service.add_tap(self._record_change)
        service.observers.append(self)

    def _detach(self) -> None:
        service = self._service
        service.remove_tap(self._record_change)
        if self in service.observers:
            service.observers.remove(self)

    def _now(self) -> float:
        # One offset for the whole recording: its times never go back.
        return self._service.clock() + self._offset

    # -- what happens ----------------------------------------------------------------------

    def _record_change(self, change: Change, now: float, applied: Applied) -> None:
        # This runs for every change of the router, so it is `_note` once more.
        noted = self._writer.noted
        noted.append((now + self._offset, change))
        if len(noted) >= ENCODED_AT_A_TIME:
            self._encode_noted()
        if not applied.ok and applied.code == "over_limit" and isinstance(change, KvEvent):
            # A router that replays has no bound, so it is told what the bound did.
            self._note(now + self._offset, replace(change, event=Cleared()))

    def add(self, record: Observed) -> None:
        """Add what was seen of other routers. Its time is now."""
        self._append(record)

    def now(self) -> float:
        """The time of a record that is added now."""
        return self._now()

    def _append(self, record: Unwrapped) -> None:
        self._note(record.at, record)

    def _note(self, at: float, value: Change | Unwrapped) -> None:
        noted = self._writer.noted
        noted.append((at, value))
        if len(noted) >= ENCODED_AT_A_TIME:
            self._encode_noted()

    def _encode_noted(self) -> None:
        """Encode what was noted, or drop it where the sink is too slow."""
        writer = self._writer
        if self._held > MAX_HELD:
            self._dropped += len(writer.noted)
            writer.noted.clear()
            return
        writer.encode_noted()
        if writer.size >= _CHUNK_BYTES:
            self._close_chunk()

    def _close_chunk(self) -> None:
        if len(self._writer):
            chunk = self._writer.take()
            self._held += chunk.size
            self._waiting.append(chunk)

    def on_prepared(
        self, request: RoutingRequest, record: RequestRecord, ids: Sequence[int]
    ) -> None:
        at = self._now()
        segments: Segments = ()
        if ids and not request.more_hashes:
            tokenizers = self._service.preparation.tokenizers
            segments = self._segments.of(tokenizers.of(request.model, request.worker_set), ids)
        noted = arrived(
            at, request, tenant=record.tenant, limit=record.output_limit, segments=segments
        )
        self._note(at, noted)

    def on_decision(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> None:
        at = self._now()
        self._note(at, decided(at, plan, self._document(plan, at)))

    def on_finished(self, record: RequestRecord) -> None:
        first, last, output = record.first_token_at, record.finished_at, record.output_tokens
        response = record.client_response()
        itl = None
        if first is not None and last is not None and output > 1:
            itl = (last - first) / (output - 1)
        self._append(
            Finished(
                self._now(),
                record.decision_id,
                record.status or None,
                record.outcome,
                record.prompt_tokens if record.prompt_tokens is not None else record.isl_tokens,
                record.cached_tokens,
                output if record.answered else None,
                None if first is None else first - record.received_at,
                itl,
                record.queued_s,
                response.state,
                response.error,
                response.duration_s,
                tuple(
                    (attempt.worker, attempt.stage, attempt.problem)
                    for attempt in response.attempts
                ),
                response.output_events,
            )
        )

    def on_condition(self, condition: Condition, cleared: bool) -> None:
        kind = "ended" if cleared else "began"
        self._append(Noted(self._now(), kind, condition.subject, condition.code, condition.message))

    def on_note(self, kind: str, subject: str, text: str) -> None:
        self._append(Noted(self._now(), kind, subject, "", text))

    def _document(self, plan: RoutingPlan, at: float) -> bytes:
        """The explanation of a refusal and of an unusual plan; others are routed again."""
        if plan.ok and not plan.relaxed:
            return b""
        if int(at) != self._second:
            self._second, self._documents = int(at), 0
        self._documents += 1
        if self._documents > _DOCUMENTS_A_SECOND:
            return b""
        return encode(past_decision(plan, at=at, whole=True))

    # -- chunks ----------------------------------------------------------------------------

    def _capture(self) -> None:
        began = time.perf_counter()
        captured = self._service.router.capture()
        took = time.perf_counter() - began
        at = self._now()
        self._close_chunk()
        self._waiting.append(_Capture(at, captured, took))
        for condition in self._service.conditions:
            self._append(Noted(at, "holds", condition.subject, condition.code, condition.message))
        self._state_at = self._service.clock()

    def _keep_state(self, now: float) -> None:
        """Note what was lost, and add a state: after a loss, and now and then."""
        # Not written: a value that the file has no form for, such as an integer over 64 bits.
        self._dropped, self._writer.lost = self._dropped + self._writer.lost, 0
        if self._dropped and self._held < MAX_HELD // 2:
            text = f"{self._dropped:,} records are missing: they could not be written in time"
            self.lost += self._dropped
            self._dropped = 0
            self._append(Noted(self._now(), "dropped", "recording", "", text))
            self._capture()
        elif now - self._state_at >= self._state_every:
            self._capture()

    async def _send(self) -> None:
        """Give the sink what waits now."""
        for _ in range(len(self._waiting)):
            item = self._waiting.popleft()
            if isinstance(item, _Capture):
                item = await self._encode_chunk(item)
            else:
                self._held -= item.size
            data = await asyncio.to_thread(pack_chunk, item)
            if self.bytes + len(data) > self._max_bytes and self.records:
                await self._end_full(item)
                return
            await self._write(data)
            self.records += item.records

    async def _encode_chunk(self, item: _Capture) -> PlainChunk:
        """A chunk with a state alone: a reader that starts there reads nothing before it."""
        began = time.perf_counter()

        def work() -> PlainChunk:
            writer = ChunkWriter()
            snapshot = moved_snapshot(item.captured.document(), self._offset)
            writer.add(State(item.at, snapshot))
            return writer.take()

        chunk = await asyncio.to_thread(work)
        took = time.perf_counter() - began + item.copying_s
        self._state_every = max(_STATE_S, _STATE_SHARE * took)
        return chunk

    async def _end_full(self, left: PlainChunk) -> None:
        self.full = True
        self.stop(f"it reached its limit of {self._max_bytes:,} bytes")
        note = f"{self._why}; {left.records:,} records and all later ones are missing"
        writer = ChunkWriter()
        writer.add(Noted(left.first, "dropped", "recording", "", note))
        await self._write(pack_chunk(writer.take()))
        self.records += 1
        self._waiting.clear()

    async def _write(self, data: bytes) -> None:
        await self._sink.write(data)
        self.bytes += len(data)


class Recordings:
    """The recordings of one process that run now, at most :data:`MOST_RECORDINGS`.

    ``source``: as for :class:`Recorder`. ``router`` names the process; ``complete``
    gives the kinds of records that it has at the moment.
    """

    def __init__(
        self,
        service: RoutingService,
        *,
        source: RecordingSource = "frontend",
        router: Callable[[], str] = str,
        complete: Callable[[], frozenset[str]] | None = None,
    ) -> None:
        self._service = service
        self.source: RecordingSource = source
        self._router = router
        self._complete = complete or self._of_service
        self.active: list[Recorder] = []

    def add(self, make: Callable[[float], Observed]) -> None:
        """Add a record of other routers to all recordings; ``make`` gets its time."""
        for recorder in self.active:
            recorder.add(make(recorder.now()))

    async def record(
        self,
        sink: Sink,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        seconds: float | None = None,
        on_start: Callable[[Recorder], None] = lambda recorder: None,
    ) -> Recorder:
        """Record until the end; returns the recorder with its counts. Raises OSError where the
        sink fails, and RecordingsFull."""
        if len(self.active) >= MOST_RECORDINGS:
            raise RecordingsFull(f"{len(self.active)} recordings run already, the maximum")
        recorder = Recorder(
            self._service,
            sink,
            source=self.source,
            router=self._router(),
            complete=self._complete(),
            max_bytes=max_bytes,
            seconds=seconds,
        )
        self.active.append(recorder)
        on_start(recorder)
        try:
            await recorder.run()
        finally:
            self.active.remove(recorder)
        return recorder

    async def keep_file(self, sink: FileSink, *, max_bytes: int) -> None:
        """Record to files until the process ends: a full one gets the name ``FILE.old``.

        After a failure of the recording itself, a call with the same sink goes on in a new file;
        after a full disk it goes on once the disk has room.
        """
        # Not the name of the task, whose condition ends with it.
        subject = str(sink.path)
        while True:
            try:
                if sink.closed:
                    sink = FileSink(sink.path, replace_old=True)
                    self._service.clear_condition(conditions.BACKGROUND_TASK_FAILED, subject)
                try:
                    recorder = await self.record(sink, max_bytes=max_bytes)
                finally:
                    sink.close()
                if not recorder.full:
                    return
            except (OSError, UsageProblem, RecordingsFull) as error:
                full = isinstance(error, OSError) and error.errno == errno.ENOSPC
                text = file_problem(error, writing=True) if isinstance(error, OSError) else error
                message = f"recording to {sink.path} ended: {text}"
                self._service.set_condition(conditions.BACKGROUND_TASK_FAILED, subject, message)
                if not full:
                    return
                await _wait_for_room(sink.path, min(max_bytes, _ROOM_BYTES))

    async def close(self, why: str = "the process ended") -> None:
        """End all recordings, and wait a moment until each is complete."""
        for recorder in self.active:
            recorder.stop(why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self.active:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    def _of_service(self) -> frozenset[str]:
        """All kinds, but no KV events where a worker that computes prompts reports none."""
        known = reports_caches(self._service.router.registry)
        return frozenset(KINDS) - (frozenset() if known else {"kv_events"})


def reports_caches(workers: Iterable[Worker]) -> bool:
    """Whether each worker that computes prompts reports KV events.

    Workers that only decode need not: prompts reuse nothing there, unless a model has no others.
    """
    known = list(workers)
    others = {worker.model for worker in known if worker.role is not Role.DECODE}
    silent = (worker for worker in known if not worker.kv_events)
    return not any(
        worker.role is not Role.DECODE or worker.model not in others for worker in silent
    )


async def _wait_for_room(path: Path, size: int) -> None:
    """Return when the disk of a file has so many free bytes; a file without content is removed."""

    def has_room() -> bool:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == 0:
                path.unlink()  # else it would replace the file before it
        return shutil.disk_usage(path.parent).free >= size

    while True:
        await asyncio.sleep(_ROOM_S)
        if await asyncio.to_thread(has_room):
            return


class RecordingsFull(Exception):
    """As many recordings run as may."""


# -- records of values of the router -----------------------------------------------------------


def tenant_of(secret: bytes, cache_salt: str | None) -> str:
    """A keyed digest of a cache salt; empty without one. Equal salts of one process are equal."""
    if not cache_salt:
        return ""
    salt = cache_salt.encode("utf-8", "surrogateescape")
    return blake2b(salt, key=secret[:64], digest_size=_TENANT_BYTES).hexdigest()


def arrived(
    at: float,
    request: RoutingRequest,
    *,
    tenant: str = "",
    limit: int | None = None,
    segments: Segments = (),
) -> Arrived:
    """The record of a request; of a batch, the hashes of all its prompts."""
    return Arrived(
        at,
        request.id,
        request.model,
        request.isl_tokens,
        request.block_size,
        request.all_hashes,  # type: ignore[arg-type]  # encoded as a column
        request.salted,
        tenant,
        request.lora_name or "",
        "" if request.session is None else request.session.key,
        request.priority,
        limit,
        _options(request),
        segments=segments,
    )


def _options(request: RoutingRequest) -> dict[str, object]:
    """What else decides where the request may go (``Arrived.asked``)."""
    options: dict[str, object] = {}
    items = request.constraints.items
    if items:
        required = [item.taint for item in items if item.kind == "required"]
        preferred = {item.taint: item.weight for item in items if item.kind == "preferred"}
        options |= {"required": required} if required else {}
        options |= {"preferred": preferred} if preferred else {}
    for name in ("pin_prefill", "pin_decode"):
        pin = getattr(request, name)
        if pin is not None:
            options[name] = [pin.worker_id, pin.dp_rank]
    if request.allowed_worker_ids is not None:
        options["allowed"] = sorted(request.allowed_worker_ids)
    if request.served_name is not None:
        options["served_name"] = request.served_name
    if request.policy_class is not None:
        options["policy_class"] = request.policy_class
    if request.strict_priority:
        options["strict_priority"] = request.strict_priority
    if not request.overlap_modelled:
        options["not_modelled"] = True
    return options


def decided(at: float, plan: RoutingPlan, document: bytes = b"") -> Decided:
    """The record of a plan, or of a refusal."""
    final, first = plan.final, plan.first
    refusal = plan.refusal
    prefill = None if plan.prefill is None else plan.prefill.ref
    decode = None if plan.decode is None else plan.decode.ref
    cached = best = cost = margin = None
    why = ""
    if first.winner is not None:
        cost, margin = first.costs[first.winner], first.margin
        if first.overlap_modelled and first.credits_overlap:
            cached = float(first.overlap_blocks(first.winner))
            inputs = first.inputs
            best = cached if inputs is None else float(inputs.most_overlap)
        why = _why(first, cached, best)
    return Decided(
        at,
        plan.id,
        plan.model,
        None if prefill is None else (prefill.worker_id, prefill.dp_rank),
        None if decode is None else (decode.worker_id, decode.dp_rank),
        cached,
        best,
        cost,
        margin,
        "selected" if refusal is None else refusal.outcome,
        "",
        why if refusal is None else final.summary(),
        (),
        document,
    )


def observed(at: float, request_id: str, choice: Choice, predicted: Decision | None) -> Decided:
    """The record of another router's choice; ``predicted``: what this one computed before."""
    cached = best = cost = margin = None
    hop = choice.decode
    if predicted is not None and hop is not None:
        ref = (hop.worker.worker_id, hop.dp_rank)
        at_ref = next((i for i, one in enumerate(predicted.refs) if tuple(one) == ref), None)
        if at_ref is not None:
            cost = predicted.costs[at_ref]
            others = [cost for i, cost in enumerate(predicted.costs) if i != at_ref]
            margin = min(others) - cost if others else None
            if choice.prefill is None and predicted.inputs is not None:
                cached = float(predicted.overlap_blocks(at_ref))
                best = float(predicted.inputs.most_overlap)
    if choice.cached_blocks is not None:
        cached = float(choice.cached_blocks)
    outcome, message = choice.refused or ("selected", "")
    prefill = choice.prefill
    return Decided(
        at,
        request_id or "-",
        choice.model,
        None if prefill is None else (prefill.worker.worker_id, prefill.dp_rank),
        None if hop is None else (hop.worker.worker_id, hop.dp_rank),
        cached,
        best,
        cost if choice.cost is None else choice.cost,
        margin,
        outcome,
        "",
        message,
    )


def _why(decision: Decision, cached: float | None, best: float | None) -> str:
    """In a word, what was for the winner. `decisions.short_reason` compares all parts of the costs,
    which takes longer than the rest of a record."""
    if decision.session_kept:
        return "session"
    if len(decision.costs) == 1:
        return "only one"
    if decision.mode != "kv":
        return decision.mode
    return "cache" if cached and cached == best else "load"
