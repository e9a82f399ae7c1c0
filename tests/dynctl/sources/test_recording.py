"""A recording as a source: the router of any moment in it, and the decisions that it made."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.errors import UsageProblem
from dynctl.documents.decisions import PastDecision
from dynctl.documents.recording import (
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
from dynctl.documents.recording_file import (
    HEADER,
    MAGIC,
    RecordingFile,
    encode_records,
    read_recording,
)
from dynctl.serving.records.recorder import arrived, decided
from dynctl.sources.recording import (
    RecordedFleet,
    RecordedMoment,
    moment,
    replayed,
    time_text,
)
from router_core import (
    BlocksStored,
    Booked,
    Change,
    Freed,
    KvEvent,
    LoadReported,
    Router,
    RoutingRequest,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
    hash_prompt,
)
from tests.dynctl.cli.conftest import dynctl as dynctl
from tests.router_core.fleet import prompt, stored, worker
from tests.router_core.fleet import request as asked

BEGAN = 1_790_000_000.0  # 2026-09-21T14:13:20Z
IDS = [f"decision-{i}" for i in range(12)]


def made(tmp: Path, *, per_chunk: int = 6, complete: bool = True) -> tuple[Path, list[Router]]:
    """A recording of twelve requests, one a second, and the router after each of them."""
    router, states = Router(exact_reuse=True), []
    records: list[Record] = []
    kinds = frozenset({"arrivals", "decisions", "loads", "workers", "topology"})
    kinds |= {"kv_events"} if complete else set()
    records.append(
        Start(BEGAN, "frontend", "r", "0.1.0", {}, {"tiny": 16}, exact_reuse=True, complete=kinds)
    )

    def apply(change: Change, at: float) -> None:
        assert router.apply(change, at).ok
        records.append(Changed(at, change))

    for number in (1, 2, 3):
        router.apply(WorkerUpserted(worker(number, zone="ab"[number % 2])), BEGAN)
    records.append(State(BEGAN, router.snapshot()))
    for i, name in enumerate(IDS):
        at = BEGAN + i + 1
        if i == 6:
            records.append(State(at - 0.5, router.snapshot()))
            records.append(Noted(at - 0.5, "began", "w2", "WORKER_UNREACHABLE", "no response"))
            apply(WorkerAvailability(2, "no response"), at - 0.5)
        if i == 9:
            records.append(Noted(at - 0.5, "ended", "w2", "WORKER_UNREACHABLE", "no response"))
            apply(WorkerAvailability(2, None), at - 0.5)
        request = asked(130, name, seed=i % 3)
        plan = router.plan(request)
        records.append(arrived(at, request))
        booking = router.booking(plan.final, request)
        records.append(Changed(at, booking))
        assert router.apply(booking, at).ok
        records.append(decided(at, plan))
        event = stored(booking.worker_id, 8, i % 3)
        router.apply(event, at + 0.1)
        records.append(Changed(at + 0.1, event))
        apply(LoadReported(booking.worker_id, 0, kv_used_blocks=10 + i), at + 0.2)
        if i > 3:
            apply(Freed(IDS[i - 3]), at + 0.3)
        states.append(Router.restore(router.snapshot()))
    path = tmp / "r.dynrec"
    path.write_bytes(encode_records(records, per_chunk))
    return path, states


def plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def test_the_router_of_each_moment_is_that_of_the_process(tmp_path: Path) -> None:
    path, states = made(tmp_path)
    for i, expected in enumerate(states):
        source = RecordedMoment(path, f"+{i + 1.4}s")
        mine, theirs = source.router.snapshot(), expected.snapshot()
        for one in (mine, theirs):
            one.pop("rotation")
        assert plain(mine) == plain(theirs)


def kept(worker_id: int, seed: int, parts: list[tuple[str, int]]) -> list[KvEvent]:
    """The events by which a worker has the first blocks of a prompt in ``parts`` (tier, blocks).

    Its names of blocks are not their hashes.
    """
    hashes, events, start = hash_prompt(prompt(200, seed), 16), [], 0
    for tier, count in parts:
        names = [(one + worker_id) % 2**64 for one in hashes.sequence]
        block = BlocksStored(
            names[start - 1] if start else None,
            tuple(names[start : start + count]),
            tuple(hashes.local[start : start + count]),
            tier=tier,
        )
        events += [KvEvent(worker_id, 0, block)] if count else []
        start += count
    return events


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.permutations(["device", "host_pinned", "disk"]),
                  st.lists(st.integers(0, 4), min_size=3, max_size=3)),
        min_size=3, max_size=3,
    ),
    st.booleans(),
)  # fmt: skip
def test_the_blocks_of_a_prompt_below_the_device_follow_from_the_events(held, exact: bool) -> None:
    router = Router(exact_reuse=exact)
    for number, (seed, tiers, counts) in enumerate(held, 1):
        router.apply(WorkerUpserted(worker(number)), 0.0)
        for event in kept(number, seed, list(zip(tiers, counts, strict=True))):
            router.apply(event, 0.0)
    whole = RoutingRequest.from_tokens("r", "tiny", prompt(200), 16)
    local = local_hashes_below(router, whole.sequence_hashes)
    found = router.plan(replace(whole, local_hashes=local)).first
    expected = router.plan(whole).first
    assert found.costs == expected.costs
    assert found.inputs == expected.inputs
    assert all(one in (-1, real) for one, real in zip(local, whole.local_hashes, strict=True))


def test_a_decision_for_blocks_below_the_device_is_explained_as_it_was(tmp_path: Path) -> None:
    """w2 has five blocks on its device, w1 two, and eight more in host memory: w1 is chosen."""
    router = Router(exact_reuse=True)
    kinds = frozenset({"arrivals", "decisions", "kv_events", "loads", "workers", "topology"})
    records: list[Record] = [
        Start(BEGAN, "frontend", "r", "0.1.0", {}, {"tiny": 16}, exact_reuse=True, complete=kinds),
        State(BEGAN, router.snapshot()),
    ]
    changes: list[Change] = [WorkerUpserted(worker(number)) for number in (1, 2, 3)]
    changes += kept(1, 0, [("device", 2), ("host_pinned", 8)]) + kept(2, 0, [("device", 5)])
    for change in changes:
        assert router.apply(change, BEGAN).ok
        records.append(Changed(BEGAN, change))
    request = RoutingRequest.from_tokens("r", "tiny", prompt(200), 16)
    plan = router.plan(request)
    assert plan.final.ref is not None
    assert plan.final.ref.worker_id == 1
    records += [
        arrived(BEGAN + 1, request),
        Changed(BEGAN + 1, router.booking(plan.final, request)),
    ]
    records.append(decided(BEGAN + 1, plan))
    path = tmp_path / "tiers.dynrec"
    path.write_bytes(encode_records(records))
    result = RecordedMoment(path, None).decision(None)
    assert not any("host memory" in one.what for one in result.doubts)
    [note] = [one for one in result.assumptions if "routing again" in one]
    assert note == "explained by routing again on the recorded state; the choice is the same"


def test_a_decision_is_explained_as_it_was(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    choices = {one.id: one for one in read_recording(path) if isinstance(one, Decided)}
    source = RecordedMoment(path, None)
    for name in IDS:
        result = source.decision(name)
        assert result.id == name
        assert result.winner.decode is not None
        ref = (result.winner.decode.worker_id, result.winner.decode.dp_rank)
        assert any("the choice is the same" in text for text in result.assumptions) == (
            ref == choices[name].decode
        )
    assert source.decision(None).id == IDS[-1]
    assert source.decision("sion-7").id == IDS[7]
    assert RecordedMoment(path, "+5s").decision(None).id == IDS[4]
    with pytest.raises(UsageProblem, match="it has no decision 'decision-9' up to then") as unknown:
        RecordedMoment(path, "+5s").decision("decision-9")
    assert unknown.value.hint == "dynctl why without an ID lists the last decisions"
    with pytest.raises(UsageProblem, match="matches several decisions") as several:
        source.decision("1")
    assert several.value.message.endswith(": decision-11, decision-1")
    assert several.value.hint == "give one of these IDs, or more of its last characters"
    with pytest.raises(UsageProblem, match=r"decision-2, \.\.$"):
        source.decision("")


def test_a_kept_document_is_the_explanation(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    records = list(read_recording(path))
    document = RecordedMoment(path, None).decision(IDS[2])
    fields = {name: getattr(document, name) for name in document.__struct_fields__}
    past = PastDecision(**fields | {"at": BEGAN + 3})
    data = msgspec.json.encode(past)
    records = [
        msgspec.structs.replace(one, document=data)
        if isinstance(one, Decided) and one.id == IDS[2]
        else one
        for one in records
    ]
    path.write_bytes(encode_records(records))
    assert plain(RecordedMoment(path, None).decision(IDS[2])) == plain(past)


def test_what_a_client_got_is_known_from_its_end_on(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    records = list(read_recording(path))
    start = records[0]
    assert isinstance(start, Start)
    records[0] = msgspec.structs.replace(start, complete=start.complete | {"outcomes"})
    ended = Finished(
        BEGAN + 4.5, IDS[2], 200, "upstream_error", 130, None, 7, 0.1, None, None,
        "cut", "the connection was lost", 1.5, (("w1", "aggregated", "lost"),), 7,
    )  # fmt: skip
    older = Finished(BEGAN + 4.5, IDS[1], 200, "success", 130)
    at = next(i for i, one in enumerate(records) if one.at > BEGAN + 4.5)
    records[at:at] = [ended, older]
    path.write_bytes(encode_records(records))

    def response(moment: str, decision: str) -> Any:
        return plain(RecordedMoment(path, moment).decision(decision))["response"]

    assert response("+4.4s", IDS[2])["state"] == "running"
    found = response("+5s", IDS[2])
    assert (found["state"], found["status"], found["error"]) == (
        *("cut", 200), "the connection was lost",
    )  # fmt: skip
    assert (found["output_tokens"], found["output_events"]) == (None, 7)
    assert found["attempts"] == [{"worker": "w1", "stage": "aggregated", "problem": "lost"}]
    assert response("+5s", IDS[1])["state"] == "unknown"  # as older releases wrote it
    assert response("+5s", IDS[3])["state"] == "running"


def test_the_decisions_replay(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    found = replayed(read_recording(path))
    assert (found.same, found.differ, found.skipped) == (len(IDS), [], {})
    # Another choice is seen: of the requests with cached blocks, one went to another worker.
    records: list[Record] = []
    for one in read_recording(path):
        if isinstance(one, Changed) and isinstance(one.change, Booked):
            booked = one.change
            if booked.request_id == IDS[4]:
                other = 1 if booked.worker_id != 1 else 3
                one = Changed(one.at, replace(booked, worker_id=other))
        records.append(one)
    found = replayed(records)
    assert IDS[4] in [name for name, _, _ in found.differ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("+90s", 90),
        ("+1.5m", 90),
        ("+500ms", 0.5),
        ("-30s", 270),
        ("14:14:50", 90),
        ("14:14", 40),
        ("2026-09-21T14:14:50Z", 90),
        ("2026-09-21T16:14:50+02:00", 90),
        ("2026-09-21T14:14:50", 90),
        ("14:13:19.5", 0),
        ("14:18:20.9", 300),
    ],
)
def test_forms_of_a_time(text: str, seconds: float) -> None:
    assert moment(text, BEGAN, BEGAN + 300) == BEGAN + seconds


def test_a_time_of_the_next_day() -> None:
    midnight = 1_790_035_200.0  # 2026-09-22T00:00:00Z
    assert moment("00:00:30", midnight - 60, midnight + 60) == midnight + 30


@pytest.mark.parametrize("text", ["+400s", "-400s", "13:00", "2025-01-01T00:00:00Z"])
def test_a_time_outside_names_the_range(text: str) -> None:
    with pytest.raises(UsageProblem) as raised:
        moment(text, BEGAN, BEGAN + 300)
    assert "from 2026-09-21T14:13:20.000Z to 2026-09-21T14:18:20.000Z" in raised.value.message


@pytest.mark.parametrize("text", ["", "noon", "25:00", "14:60", "+", "+9x", "14:13:61", "99"])
def test_another_form_is_named(text: str) -> None:
    with pytest.raises(UsageProblem, match="not a time"):
        moment(text, BEGAN, BEGAN + 300)


def test_what_a_recording_lacks_is_a_doubt(tmp_path: Path) -> None:
    path, _ = made(tmp_path, complete=False)
    (doubt,) = RecordedMoment(path, None).view.doubts
    assert (doubt.code, "KV events" in doubt.what) == ("DYR0764", True)
    # With a prefill hop no option of a Dynamo publishes the prompts' hashes.
    assert doubt.resolve.startswith("record a frontend of dynctl, which has all of it;")
    assert "a Dynamo's choices: --router-replica-sync" in doubt.resolve
    records = [*read_recording(path), Noted(BEGAN + 100, "dropped", "recording", "", "7 records")]
    path.write_bytes(encode_records(records))
    assert len(RecordedMoment(path, None).view.doubts) == 2


def test_bad_files_are_named(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    cut = RecordedMoment(path, None)
    assert "is cut at byte" in cut.doubts[0]
    path.write_bytes(whole[:18])
    with pytest.raises(UsageProblem, match="it has no records yet"):
        RecordedMoment(path, None)
    path.write_bytes(b"[1]")
    with pytest.raises(UsageProblem, match="is not a recording"):
        RecordedMoment(path, None)
    with pytest.raises(UsageProblem, match="none: the file does not exist"):
        RecordedMoment(tmp_path / "none", None)
    path.write_bytes(encode_records([State(BEGAN, {"schema": 9})]))
    with pytest.raises(UsageProblem, match="snapshot schema"):
        RecordedMoment(path, None)
    path.write_bytes(encode_records([Changed(BEGAN, WorkerLost(1))]))
    with pytest.raises(UsageProblem, match="no state of the router before"):
        RecordedMoment(path, None)


def test_the_first_moment_is_that_of_the_first_state(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    records = list(RecordingFile(path))
    state = next(one for one in records if isinstance(one, State))
    start = next(one for one in records if isinstance(one, Start))
    begins: list[Record] = [msgspec.structs.replace(start, at=state.at - 0.02), state]
    path.write_bytes(encode_records(begins))
    assert RecordedMoment(path, "+0s").at == state.at
    path.write_bytes(encode_records([msgspec.structs.replace(start, at=state.at - 9.0), state]))
    with pytest.raises(UsageProblem, match="no state of the router before"):
        RecordedMoment(path, "+0s")


async def test_top_plays_a_recording(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    still = RecordedFleet(RecordedMoment(path, "+7s"))
    first = await still.snapshot()
    assert [one.id for one in first.decisions] == IDS[6::-1]
    assert {one.blocks for one in first.decisions} == {130 // 16}
    assert [one.code for one in first.alerts] == ["WORKER_UNREACHABLE"]
    assert {row.name: row.status for row in first.workers}["w2"] == "unavailable"
    assert first.at == BEGAN + 7
    assert plain(await still.snapshot()) == plain(first)

    played = RecordedFleet(RecordedMoment(path, "+7s"), speed=1000.0)
    await played.snapshot()
    await asyncio.sleep(0.05)
    last = await played.snapshot()
    assert len(last.decisions) == len(IDS)
    assert last.alerts == ()
    assert last.problem == "the recording ends here"


def test_a_request_is_as_it_was() -> None:
    request = RoutingRequest("r", "m", 40, 16, (1, 2), salted=True, lora_name="l", priority=3)
    assert request_of(arrived(5.0, request)) == RoutingRequest(
        "r", "m", 40, 16, (1, 2), salted=True, lora_name="l", priority=3, arrived_at=5.0
    )
    assert isinstance(arrived(5.0, request), Arrived)


COMMANDS = [
    ("workers", "list"),
    ("topology", "show"),
    ("top", "--once"),
    ("why", "--last"),
    ("why", "decision-3"),
    ("route", "--tokens", "TOKENS"),
    ("config", "show"),
    ("thresholds", "get"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_answer_from_a_moment(dynctl: Any, tmp_path: Path, command: Any) -> None:
    path, _ = made(tmp_path)
    (tmp_path / "tokens").write_text(str(list(range(40))))
    command = [str(tmp_path / "tokens") if word == "TOKENS" else word for word in command]
    ran = dynctl(*command, "--recording", str(path), "--at", "+6s")
    assert (ran.code, "Traceback" in ran.err) == (0, False), ran.err
    assert ran.out
    again = dynctl(*command, "--recording", str(path), "--at", "+6s", "-o", "json")
    assert again.code == 0, again.err
    msgspec.json.decode(again.out)


def test_commands_name_what_is_wrong_with_the_time(dynctl: Any, tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    ran = dynctl("workers", "list", "--at", "+6s", "--demo")
    assert (ran.code, "--at +6s: a moment of which recording?" in ran.err) == (2, True)
    for command in ("workers list", "check", "hits", "events tail", "top --once"):
        ran = dynctl(*command.split(), "--at", "+6s")
        assert ran.code == 2
        assert ran.err.startswith("error: --at +6s: a moment of which recording?\n"), command
    ran = dynctl("workers", "list", "--recording", str(path), "--at", "+600s")
    assert ran.code == 2
    assert f"outside the recording, which is from {time_text(BEGAN)} to" in ran.err
    ran = dynctl("workers", "list", "--recording", str(path), "--view", str(path))
    assert (ran.code, "--view and --recording: two sources" in ran.err) == (2, True)
    ran = dynctl("top", "--once", "--speed", "2", "--demo")
    assert (ran.code, "--demo is not a recording" in ran.err) == (2, True)


#: What a file has that is not a recording, and what every command that reads one names.
NOT_RECORDINGS = {
    "newer": (MAGIC + b"\x02\x00", "a recording of schema 2; this dynctl reads up to 1"),
    "cut in its header": (HEADER[:10], "cut at byte 10, within its header of 18 bytes"),
    "cut behind its mark": (HEADER[:17], "cut at byte 17, within its header of 18 bytes"),
    "empty": (b"", "is not a recording|the trace is empty"),
    "another kind": (b"\x89PNG\r\n\x1a\n" + bytes(64), "is not a recording|not a trace"),
    "a folder": (None, "is a directory; expected a file"),
    "not readable": (HEADER, "no permission to read it"),
}


@pytest.mark.parametrize("name", NOT_RECORDINGS)
def test_every_reader_names_a_file_that_it_cannot_read(
    dynctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("TOKENS").write_text("[1, 2]")
    content, named = NOT_RECORDINGS[name]
    path = Path("a.dynrec")
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    if name == "not readable":
        # The superuser may read every file.
        opened = Path.open

        def refused(self: Path, *arguments: Any, **more: Any) -> Any:
            if self.name == path.name:
                raise PermissionError(13, "Permission denied", str(self))
            return opened(self, *arguments, **more)

        monkeypatch.setattr(Path, "open", refused)
    of_moments = [(*command, "--recording", "a.dynrec") for command in COMMANDS]
    for command in [
        ("hits", "a.dynrec"),
        ("replay", "a.dynrec"),
        ("record", "--show", "a.dynrec"),
        *of_moments,
    ]:
        ran = dynctl(*command)
        words = " ".join(ran.err.split())
        assert (ran.code, ran.out) == (2, ""), (command, words)
        assert words.startswith("error: "), (command, words)
        assert "a.dynrec" in words, (command, words)
        assert re.search(named, words), (command, words)


def test_the_explanation_of_a_prompt_without_hashes_names_why(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    records = [
        msgspec.structs.replace(one, hashes=(), asked={"not_modelled": True})
        if isinstance(one, Arrived)
        else msgspec.structs.replace(one, source="dynamo")
        if isinstance(one, Start)
        else one
        for one in read_recording(path)
    ]
    path.write_bytes(encode_records(records))
    result = RecordedMoment(path, None).decision(IDS[3])
    why = "Dynamo publishes no prompt hashes of requests with a prefill hop"
    assert f"cache overlap not modelled: {why}" in result.assumptions
    assert any(one.code == "DYR0764" and why in one.what for one in result.doubts)
    assert any("is unknown without the prompt's hashes" in one for one in result.assumptions)
    assert not result.certain


def test_record_shows_a_file(dynctl: Any, tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    ran = dynctl("record", "--show", str(path))
    assert ran.code == 0, ran.err
    assert "12 requests, 12 decisions" in ran.out
    assert "a router can start at 2 moments" in ran.out
    assert dynctl("record", "--demo").code == 2
    assert "expected a FILE" in dynctl("record", "--show").err
    assert dynctl("record", str(path), "--for", "soon").code == 2
    assert "Traceback" not in dynctl("record", "--show", str(tmp_path)).err


def test_the_view_of_a_moment_is_one_of_a_file(tmp_path: Path) -> None:
    """So a directory that a recording names is not followed."""
    path, _ = made(tmp_path)
    assert RecordedMoment(path, None).view_now().from_file
