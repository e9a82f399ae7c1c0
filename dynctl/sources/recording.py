"""A recording as a source: the router of a moment in it, rebuilt from a state and its changes."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem, file_problem, single_line
from dynctl.base.quantities import DURATION, in_seconds
from dynctl.documents.codec import decode, field_values
from dynctl.documents.decisions import (
    RESPONSE_STATES,
    RUNNING,
    UNKNOWN_RESPONSE,
    ClientResponse,
    PastDecision,
    ResponseState,
)
from dynctl.documents.doubts import Doubt, doubt
from dynctl.documents.errors import EngineAttempt
from dynctl.documents.recording import (
    NO_PROMPT_HASHES,
    OF_DYNAMO,
    Arrived,
    Changed,
    Decided,
    Finished,
    Noted,
    Record,
    Start,
    State,
    local_hashes_below,
    request_of,
)
from dynctl.documents.recording_file import ChunkHeader, RecordingFile
from dynctl.documents.route_of_plan import NOT_MODELLED, route_result
from dynctl.documents.route_result import Ref, RouteResult
from dynctl.documents.snapshot import Alert, DecisionLine, Header, Part, Snapshot
from dynctl.documents.view import SavedView
from dynctl.documents.workers import WorkerRow
from dynctl.sources.alerts import condition_alert
from dynctl.sources.client import UNKNOWN_DECISION_HINT, AmbiguousDecision
from dynctl.sources.source import (
    LiveSource,
    Source,
)
from dynctl.sources.view import ViewSource
from router_core import (
    Booked,
    Role,
    Router,
    RoutingPlan,
    SnapshotError,
)

#: Decisions that are kept for `top`.
KEPT: Final = 500
#: Requests whose arrival is kept until they are decided; older ones are forgotten.
_MOST_OPEN: Final = 20_000
_MATCHES: Final = 10
#: Chunks before a state whose decisions are read for `top`.
_CHUNKS_BACK: Final = 60
#: Costs that differ by rounding: sums in another order.
_SAME_COST: Final = 1e-6
#: A recording begins some milliseconds before its first state: a moment between them is the state.
_BEGINNING_S: Final = 1.0
_OFFSET: Final = re.compile(rf"([+-]){DURATION}")
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d{1,6})?))?")
_FORMS: Final = (
    "expected a time as 2026-11-22T12:04:31Z, 12:04:31 (of the recording's first day, UTC), +90s "
    "from its start or -30s from its end"
)


def time_text(at: float) -> str:
    """A time as `--at` reads it."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_DAY_S: Final = 86400


def moment(text: str, first: float, last: float, flag: str = "--at") -> float:
    """The wall-clock seconds of ``flag``; raises UsageProblem for another form, and for a time
    outside the recording, which it names."""
    given = text.strip()
    offset, clock = _OFFSET.fullmatch(given), _CLOCK.fullmatch(given)
    if offset is not None:
        seconds = in_seconds(offset[2], offset[3])
        at = first + seconds if offset[1] == "+" else last - seconds
    elif clock is not None:
        day = datetime.fromtimestamp(first, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        since_midnight = _seconds_of_day(int(clock[1]), int(clock[2]), float(clock[3] or 0))
        if since_midnight is None:
            raise UsageProblem(f"{flag} {text}: not a time of a day", _FORMS)
        at = day.timestamp() + since_midnight
        if at < first and at + _DAY_S <= last:
            at += _DAY_S  # the recording passes midnight
    else:
        try:
            parsed = datetime.fromisoformat(given)
        except ValueError:
            raise UsageProblem(f"{flag} {text[:64]}: not a time", _FORMS) from None
        at = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    # A time with whole seconds or milliseconds may be just before the first record.
    if first - 1 < at < first:
        at = first
    if last < at <= last + 1:
        at = last
    if not first <= at <= last:
        raise UsageProblem(
            f"{flag} {text}: outside the recording, which is from {time_text(first)} to "
            f"{time_text(last)}",
            _FORMS,
        )
    return at


def _seconds_of_day(hours: int, minutes: int, seconds: float) -> float | None:
    """Seconds since midnight; None for no time of a day."""
    if hours > 23 or minutes > 59 or seconds >= 60:
        return None
    return hours * 3600 + minutes * 60 + seconds


def unreadable(path: Path, error: OSError, option: str = "") -> UsageProblem:
    """The problem of a recording that cannot be opened or read."""
    hint = "make one: dynctl record FILE --frontend URL"
    return UsageProblem(f"{option}{path}: {file_problem(error)}", hint)


class Playback:
    """The router of a recording, moved forward record by record.

    ``start``: the first record, which describes the recording; ``router``: None before the first
    state. ``decisions``: the last ones; ``conditions``: those that hold now, since when.
    ``lost``: what is known to be missing since the last state.
    """

    def __init__(self) -> None:
        self.start: Start | None = None
        self.router: Router | None = None
        self.now = 0.0
        self.decisions: deque[Decided] = deque(maxlen=KEPT)
        #: Full prompt blocks of the last requests by id, and whether they are an estimate.
        self.blocks: dict[str, tuple[int, bool]] = {}
        #: What their clients got, of the last ones that ended.
        self.responses: dict[str, ClientResponse] = {}
        self.conditions: dict[tuple[str, str], Noted] = {}
        self.lost = ""

    def take(self, record: Record) -> None:
        """Apply one record. Raises SnapshotError for a state that no router can have."""
        self.now = max(self.now, record.at)
        if isinstance(record, Changed):
            if self.router is not None:
                self.router.apply(record.change, record.at)
        elif isinstance(record, State):
            profile = None if self.router is None else self.router.profile
            self.router, self.lost = Router.restore(record.snapshot, profile), ""
        elif isinstance(record, Start):
            self.start = record
        elif isinstance(record, Decided):
            self.decisions.append(record)
        elif isinstance(record, Arrived):
            self._take_request(record)
        elif isinstance(record, Finished):
            self._take_end(record)
        elif isinstance(record, Noted):
            self._note(record)

    def _take_request(self, record: Arrived) -> None:
        of_dynamo = self.start is not None and self.start.source in OF_DYNAMO
        estimated = bool(record.asked.get("not_modelled")) and not of_dynamo
        self.blocks[record.id] = (record.isl_tokens // max(1, record.block_size), estimated)
        while len(self.blocks) > 2 * KEPT:
            del self.blocks[next(iter(self.blocks))]

    def _take_end(self, record: Finished) -> None:
        self.responses[record.id] = response_of(record)
        while len(self.responses) > 2 * KEPT:
            del self.responses[next(iter(self.responses))]

    def response(self, decided: Decided) -> ClientResponse:
        """What the client of a decision got, as far as the recording has been played."""
        found = self.responses.get(decided.id)
        if found is not None:
            return found
        recorded = self.start is not None and "outcomes" in self.start.complete
        return RUNNING if recorded and not self.lost else UNKNOWN_RESPONSE

    def _note(self, note: Noted) -> None:
        key = (note.code, note.subject)
        if note.kind in ("began", "holds"):
            first = self.conditions.get(key)
            at = note.at if first is None else first.at
            self.conditions[key] = msgspec.structs.replace(note, at=at)
        elif note.kind == "ended":
            self.conditions.pop(key, None)
        elif note.kind in ("dropped", "skipped"):
            self.lost = note.text


def response_of(end: Finished) -> ClientResponse:
    """The response that the record of a request's end shows; unknown where an older dynctl wrote
    it."""
    if end.state not in RESPONSE_STATES:
        return ClientResponse("unknown", end.status)
    return ClientResponse(
        cast(ResponseState, end.state),
        end.status,
        end.error,
        end.ttft_s,
        end.duration_s,
        end.prompt_tokens,
        end.cached_tokens,
        end.output_tokens if end.output_events is None else None,
        end.output_events,
        tuple(EngineAttempt(*attempt) for attempt in end.attempts),
    )


class RecordedMoment(ViewSource):
    """A router at one moment of a recording. Answers repeat byte for byte.

    ``at``: a time as :func:`moment` reads it; None: the end. Raises UsageProblem.
    """

    def __init__(self, path: Path, at: str | None) -> None:
        self.path = path
        try:
            self.file = RecordingFile(path)
            self._headers = list(self.file.headers())
            if not self._headers:
                raise UsageProblem(f"--recording {path}: it has no records yet")
            self.first = self._headers[0].first
            self.last = max(header.last for header in self._headers)
            self.at = self.last if at is None else moment(at, self.first, self.last)
            self.playback = self._play()
            if self.playback.router is None and (begins := self._first_state()) is not None:
                self.at = begins
                self.playback = self._play()
        except WireError as error:
            raise UsageProblem(f"--recording {error}") from None
        except SnapshotError as error:
            raise UsageProblem(f"--recording {path}: {single_line(str(error))}") from None
        except OSError as error:
            raise unreadable(path, error, "--recording ") from None
        self.title = f"recording {path.name} at {time_text(self.at)}"
        super().__init__(self.view_now(), self.title)
        if self.file.cut is not None:
            self.doubts = (f"the file is cut at byte {self.file.cut:,}; what follows is missing",)

    def view_now(self) -> SavedView:
        """The view at the moment that the playback has reached."""
        played, start = self.playback, self.playback.start
        if played.router is None:
            raise UsageProblem(
                f"--recording {self.path}: no state of the router before {time_text(self.at)}"
            )
        source = "unknown" if start is None else start.source
        played.router.advance(self.at)
        return SavedView(
            router=played.router,
            now=self.at,
            model_paths={} if start is None else start.model_paths,
            tokenizers={} if start is None else start.tokenizers,
            source=self.title,
            chats="dynamo" if source in ("observe", "dynamo") else "plain",
            doubts=tuple(self._doubts()),
            from_file=True,
        )

    def decision(self, decision_id: str | None) -> RouteResult:
        """A decision of the recording, explained: as it was kept, or by routing again on the state
        that the router had. Decisions after ``--at`` are not found."""
        try:
            return self._decision(decision_id)
        except (WireError, SnapshotError) as error:
            raise UsageProblem(f"--recording {self.path}: {single_line(str(error))}") from None

    def records_after(self) -> Iterator[Record]:
        """What follows the moment, in order."""
        for header in self._headers:
            if header.last > self.at:
                for record in self.file.records(header):
                    if record.at > self.at:
                        yield record

    # -- inside ----------------------------------------------------------------------------

    def _doubts(self) -> Iterator[Doubt]:
        start, lost = self.playback.start, self.playback.lost
        caches = "KV events of every worker that computes prompts"
        for kind, name in (("kv_events", caches), ("loads", "load reports")):
            if start is not None and kind not in start.complete:
                yield doubt("DYR0764", missing=name)
        if lost:
            yield doubt("DYR0764", missing=f"all records ({lost})")

    def _places(self) -> list[int]:
        """The numbers of the chunks from which the router may be rebuilt, the last one first: its
        state may be after the moment."""
        headers = enumerate(self._headers)
        return [i for i, one in headers if one.starts and one.first <= self.at][::-1]

    def _play(self) -> Playback:
        played = Playback()
        for place in self._places():
            played = Playback()
            for record in self._until(self._headers[place:]):
                played.take(record)
            if played.router is not None:
                self._before_state(played, self._headers[:place])
                break
        played.now = self.at
        return played

    def _first_state(self) -> float | None:
        """When the first state of a router was, where the recording began just before it."""
        for header in self._headers:
            if header.first > self.first + _BEGINNING_S:
                break
            for record in self.file.records(header) if header.starts else ():
                if isinstance(record, State):
                    return record.at if record.at <= self.first + _BEGINNING_S else None
        return None

    def _until(self, headers: Iterable[ChunkHeader]) -> Iterator[Record]:
        """The records of these chunks up to the moment."""
        for header in headers:
            if header.first > self.at:
                return
            for record in self.file.records(header):
                if record.at > self.at:
                    return
                yield record

    def _before_state(self, played: Playback, headers: Sequence[ChunkHeader]) -> None:
        """Add what the recording says about itself, and the decisions before the state."""
        if not headers:
            return
        first = self.file.records(headers[0])
        played.start = next((one for one in first if isinstance(one, Start)), played.start)
        for header in reversed(headers[-_CHUNKS_BACK:]):
            found = []
            for record in self.file.records(header):
                if isinstance(record, Arrived | Finished):
                    played.take(record)
                elif isinstance(record, Decided):
                    found.append(record)
            room = KEPT - len(played.decisions)
            played.decisions.extendleft(reversed(found[-room:] if room else []))

    def _decision(self, wanted: str | None) -> RouteResult:
        decided = self._find(wanted)
        response = self._response(decided)
        if decided.document:
            kept = decode(decided.document, PastDecision)
            return msgspec.structs.replace(kept, response=response)
        playback, arrived = self._router_before(decided)
        router = playback.router
        if arrived is None or router is None:
            return self._bare(decided, "its request is not in the recording")
        request = request_of(arrived)
        start = self.playback.start
        of_dynamo = start is not None and start.source in OF_DYNAMO
        why = NO_PROMPT_HASHES if of_dynamo else "the router had no tokens of the prompt"
        if not request.overlap_modelled:
            request = replace(request, notes=(f"{NOT_MODELLED}: {why}",))
        if router.tiers.mask and request.sequence_hashes:
            local = local_hashes_below(router, request.sequence_hashes)
            request = replace(request, local_hashes=local)
        router.advance(decided.at)
        again = router.plan(request, detail=True)
        doubts = list(self._doubts())
        if not request.overlap_modelled:
            doubts.append(doubt("DYR0764", missing=f"the hashes of this prompt ({why})"))
        result = route_result(
            router,
            request,
            again,
            now=decided.at,
            preset=None,
            assumptions=request.notes,
            doubts=doubts,
        )
        if of_dynamo:
            # Its events have the number of tokens, also without their hashes.
            result = msgspec.structs.replace(result, tokens_estimated=False)
        note = _explained(decided, again, self._names(decided, router), request.overlap_modelled)
        fields = field_values(result) | {"assumptions": [*result.assumptions, note]}
        return PastDecision(**fields, at=decided.at, whole=True, response=response)

    def _response(self, decided: Decided) -> ClientResponse:
        """What the client got, up to the moment; of a request that ended before it was decided for
        the last time, that is what the first records say."""
        for header in self._headers:
            if header.last < decided.at or header.first > self.at:
                continue
            for record in self.file.records(header):
                if isinstance(record, Finished) and record.id == decided.id:
                    return response_of(record) if record.at <= self.at else RUNNING
        return self.playback.response(decided)

    def _bare(self, decided: Decided, why: str) -> RouteResult:
        raise UsageProblem(
            f"{self.title}: decision {decided.id} of {time_text(decided.at)} chose "
            f"{self._names(decided, self.router)}, and cannot be explained: {why}"
        )

    def _names(self, decided: Decided, router: Router) -> str:
        names = []
        for ref in (decided.prefill, decided.decode):
            worker = None if ref is None else router.registry.get(ref[0])
            if ref is not None:
                names.append(worker.name if worker is not None else f"{ref[0]:x}")
        return " then ".join(names) or decided.outcome

    def _find(self, wanted: str | None) -> Decided:
        """The last decision with this id, or with this end of its id."""
        last: dict[str, Decided] = {}
        for header in reversed(self._headers):
            if header.first > self.at:
                continue
            for record in reversed(self.file.records(header)):
                if not isinstance(record, Decided) or record.at > self.at:
                    continue
                if wanted is None or record.id == wanted:
                    return record
                if record.id.endswith(wanted):
                    last.setdefault(record.id, record)
        if len(last) > 1:
            ids = ", ".join(list(last)[:_MATCHES]) + (", .." if len(last) > _MATCHES else "")
            raise AmbiguousDecision(f"{wanted!r} matches several decisions: {ids}")
        if not last:
            shown = "decision" if wanted is None else f"decision {wanted[:64]!r}"
            counted = "dynctl record --show FILE counts what it has"
            raise UsageProblem(
                f"{self.title}: it has no {shown} up to then",
                counted if wanted is None else UNKNOWN_DECISION_HINT,
            )
        return next(iter(last.values()))

    def _router_before(self, decided: Decided) -> tuple[Playback, Arrived | None]:
        """The router just before a decision was booked, and its request."""
        starts = [i for i, h in enumerate(self._headers) if h.starts and h.first <= decided.at]
        # The request may have arrived before the last state, if it waited.
        for place in reversed(starts):
            played, arrived = Playback(), None
            for record in self._records(self._headers[place:]):
                if isinstance(record, Arrived) and record.id == decided.id:
                    arrived = record
                booked = isinstance(record, Changed) and isinstance(record.change, Booked)
                mine = booked and record.change.request_id == decided.id  # type: ignore[union-attr]
                if arrived is not None and (mine or record == decided):
                    return played, arrived
                if record.at > decided.at:
                    break
                played.take(record)
        return Playback(), None

    def _records(self, headers: Iterable[ChunkHeader]) -> Iterator[Record]:
        for header in headers:
            yield from self.file.records(header)


def _explained(decided: Decided, again: RoutingPlan, names: str, modelled: bool) -> str:
    """How an answer was made of a decision that is routed again. ``names``: its workers;
    ``modelled``: the hashes of its prompt are known."""
    chosen = [
        None if hop is None or hop.ref is None else tuple(hop.ref)
        for hop in (again.prefill, again.decode)
    ]
    if not modelled:
        return (
            "explained by routing again on the recorded state; whether the choice is the same "
            f"is unknown without the prompt's hashes: the recorded one is {names}"
        )
    if chosen == [decided.prefill, decided.decode]:
        return "explained by routing again on the recorded state; the choice is the same"
    return (
        "explained by routing again on the recorded state, which chooses otherwise: the "
        f"recorded choice is {names} (a tie, or a draw)"
    )


class RecordedFleet(LiveSource):
    """The snapshots of `top`: one picture, or the recording from a moment on.

    ``speed``: recorded seconds in a second; 0: the picture stands still.
    """

    def __init__(self, source: RecordedMoment, speed: float = 0.0) -> None:
        super().__init__(source, source.title)
        self._moment = source
        self._speed = speed
        self._began: float | None = None
        self._from = source.at
        self._rest = source.records_after()
        self._next: Record | None = None

    @property
    def past(self) -> str:
        return f"recording, {self._speed:g}x" if self._speed else "recording"

    async def snapshot(self) -> Snapshot:
        source = self._moment
        problem = ""
        try:
            self._forward()
        except (WireError, SnapshotError) as error:
            problem = single_line(str(error))
            self._speed = 0.0
        source.view = source.view_now()
        played = source.playback
        rows = tuple(source.workers())
        settings = source.config().values
        here = Part(source.title, source.at)
        known = ("workers", "load", "index", "thresholds", "settings")
        parts = dict.fromkeys((*known, "decisions", "queue"), here)
        if played.start is not None and "decisions" not in played.start.complete:
            parts["decisions"] = Part(
                source.title,
                unknown="the recorded source published no decisions",
                provide="start Dynamo's frontends with --router-replica-sync",
            )
        for part in ("waiting", "transfers"):
            parts[part] = Part(source.title, unknown="not in a recording")
        if self._speed and source.at >= source.last:
            problem = "the recording ends here"
        return Snapshot(
            at=source.at,
            source=source.title,
            header=Header(
                models=tuple(sorted({row.model for row in rows})),
                mode=settings["router_mode"],
                version=None if played.start is None else played.start.version,
                queue=len(source.router.queue) or None,
                recorded=len(played.decisions),
            ),
            workers=rows,
            decisions=tuple(_lines(played, source.router, source.title)),
            alerts=tuple(self._alerts(played)),
            thresholds=source.thresholds(),
            settings=settings,
            parts=parts,
            problem=problem,
        )

    async def read_index(self, worker: WorkerRow | None) -> str:
        raise UsageProblem("a recording is in the past: no more caches can be read")

    def present(self) -> Source:
        return self._moment

    def _alerts(self, played: Playback) -> Iterator[Alert]:
        for note in played.conditions.values():
            yield condition_alert(note.code, note.subject, note.text, note.at)

    def _forward(self) -> None:
        """Apply what the recording has up to the moment that is shown now."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        source = self._moment
        to = min(source.last, self._from + (now - self._began) * self._speed)
        if to <= source.at:
            return
        while True:
            record = self._next or next(self._rest, None)
            self._next = None
            if record is None:
                break
            if record.at > to:
                self._next = record
                break
            source.playback.take(record)
        source.at = source.playback.now = to


def _lines(played: Playback, router: Router, source: str) -> Iterator[DecisionLine]:
    """The last decisions, newest first; several of one request are its attempts."""
    seen: set[str] = set()
    for decision in reversed(played.decisions):
        line = _line(
            decision,
            router,
            source,
            played.blocks.get(decision.id, (None, False)),
            played.response(decision),
        )
        if decision.id in seen:
            workers = {ref.worker for ref in (line.prefill, line.decode) if ref is not None}
            earlier = line.response.of_earlier(workers)
            line = msgspec.structs.replace(line, response=earlier)
        seen.add(decision.id)
        yield line


def _line(
    decided: Decided,
    router: Router,
    source: str,
    prompt: tuple[int | None, bool],
    response: ClientResponse,
) -> DecisionLine:
    """``prompt``: its full blocks, None where unknown, and whether they are an estimate."""
    blocks, estimated = prompt

    def ref(pair: tuple[int, int] | None) -> tuple[Ref | None, dict[str, str]]:
        if pair is None:
            return None, {}
        worker = router.registry.get(pair[0])
        if worker is None:
            return Ref(f"{pair[0]:x}", *pair), {}
        return Ref(worker.name, *pair), dict(worker.domains)

    prefill, prefill_domains = ref(decided.prefill)
    decode, domains = ref(decided.decode)
    final = None if decided.decode is None else router.registry.get(decided.decode[0])
    stage = "prefill" if final is None else final.role.value
    refused = decided.outcome != "selected"
    return DecisionLine(
        id=decided.id,
        at=decided.at,
        source=source,
        model=decided.model,
        outcome=decided.outcome,
        stage="decode" if final is not None and final.role is Role.DECODE else stage,
        prefill=prefill,
        decode=decode,
        prefill_domains=prefill_domains,
        domains=domains,
        blocks=blocks,
        cached_blocks=None if decided.cached_blocks is None else int(decided.cached_blocks),
        margin=decided.margin,
        cost=decided.cost,
        message=decided.why if refused else None,
        tokens_estimated=estimated,
        response=response,
    )


# -- replaying decisions -----------------------------------------------------------------------


class Replayed(msgspec.Struct, frozen=True):
    """Decisions of a recording against those of a router on the recorded state.

    ``same``: the recorded worker is chosen, or costs as little as the one that is. ``differ``:
    (id, recorded, cheapest). ``skipped``: reason -> how many were not compared.
    """

    same: int = 0
    differ: list[tuple[str, str, str]] = []
    skipped: dict[str, int] = {}


def replayed(records: Iterable[Record]) -> Replayed:
    """Route each recorded request again at the moment when it was booked."""
    played = Playback()
    open_requests: dict[str, Arrived] = {}
    plans: dict[str, dict[str, Any]] = {}
    same, differ, skipped = 0, [], Counter[str]()
    for record in records:
        router = played.router
        if isinstance(record, Arrived):
            open_requests[record.id] = record
            while len(open_requests) > _MOST_OPEN:
                oldest = next(iter(open_requests))
                del open_requests[oldest]
                plans.pop(oldest, None)
        elif isinstance(record, Changed) and isinstance(record.change, Booked):
            booked = record.change
            arrived = open_requests.get(booked.request_id)
            if arrived is None or router is None:
                skipped["its request is not in the recording"] += 1
            elif booked.stage in plans.get(booked.request_id, {}):
                skipped["a retry"] += 1
            elif arrived.asked.get("not_modelled") and booked.stage != "decode":
                skipped["its prompt is not in the recording"] += 1
            else:
                verdict = _again(router, arrived, booked, record.at, plans)
                if verdict is None:
                    same += 1
                elif isinstance(verdict, str):
                    skipped[verdict] += 1
                else:
                    differ.append((booked.request_id, *verdict))
        played.take(record)
    return Replayed(same, differ, dict(skipped))


def _again(
    router: Router, arrived: Arrived, booked: Booked, at: float, plans: dict[str, dict[str, Any]]
) -> tuple[str, str] | str | None:
    """None: the same choice; why it cannot be compared; (recorded, cheapest)."""
    router.advance(at)
    request = request_of(arrived)
    ref = (booked.worker_id, booked.dp_rank)
    earlier = plans.setdefault(booked.request_id, {})
    prefill = earlier.get("prefill")
    if booked.stage == "decode":
        if prefill is None:
            return "the prefill worker of the request is unknown"
        decision = router.continue_plan(request, prefill).decode
    else:
        plan = router.plan(request)
        decision = plan.prefill if booked.stage == "prefill" else plan.final
    if decision is None or decision.stage != booked.stage:
        return "the stages are others"
    earlier[booked.stage] = decision
    if ref not in [tuple(ref) for ref in decision.refs]:
        return f"{ref[0]:x}", "not a candidate"
    position = [tuple(ref) for ref in decision.refs].index(ref)
    if booked.stage == "prefill":
        earlier["prefill"] = replace(decision, winner=position)
    if decision.temperature > 0:
        return "drawn at a temperature"
    low = min(decision.costs[i] for i in decision.group)
    if decision.costs[position] <= low + _SAME_COST:
        return None
    cheapest = decision.worker
    return decision.workers[position].name, "" if cheapest is None else cheapest.name
