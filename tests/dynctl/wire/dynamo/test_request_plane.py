"""The request plane's bytes, compared with those of a real worker."""

import json
import struct
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.request_plane import (
    MAX_HEADER_BYTES,
    MAX_REPLY_BYTES,
    PREFIX_BYTES,
    Address,
    AnswerDecoder,
    Begun,
    Completed,
    Frame,
    FrameDecoder,
    RawItem,
    RequestDecoder,
    RequestRefused,
    Sentinel,
    decode_body,
    decode_reply,
    encode_control,
    encode_end,
    encode_frame,
    encode_handshake,
    encode_item,
    encode_prologue,
    encode_reply,
    encode_request,
    format_host_port,
    parse_address,
    parse_handshake,
    parse_host_port,
    parse_payload,
    printable,
)
from tests.dynctl.wire.dynamo.request_plane_captures import exchanges

EXCHANGES = exchanges()
ANSWERED = {what: exchange for what, exchange in EXCHANGES.items() if exchange.answer is not None}
LIMIT = 1_000_000


def steps_of(answer: bytes, codec: str, cuts: list[int], max_bytes: int = LIMIT) -> list[Any]:
    """The subject, then every step with its item decoded, fed in pieces cut at ``cuts``."""
    places = sorted({0, len(answer), *(cut % (len(answer) + 1) for cut in cuts)})
    pieces = [answer[a:b] for a, b in pairwise(places)]
    frames = FrameDecoder()
    seen: list[Any] = []
    decoder: AnswerDecoder | None = None
    for piece in pieces:
        frames.feed(piece)
        if decoder is None:
            frame = frames.next_frame(4096)
            if frame is None:
                continue
            seen.append(parse_handshake(frame))
            decoder = AnswerDecoder(codec, max_bytes, frames)
        while (step := decoder.next_step()) is not None:
            seen.append(step.decode() if isinstance(step, RawItem) else step)
    return seen


# -- addresses -------------------------------------------------------------------------------------


def test_address_is_split_at_the_first_slash() -> None:
    read = parse_address("10.0.0.7:4000/2040a1fd555013b9/dynamo/prefill/generate")
    assert read == Address("10.0.0.7", 4000, "2040a1fd555013b9/dynamo/prefill/generate")


def test_address_of_ipv6_loses_its_brackets_and_gets_them_back() -> None:
    read = parse_address("[fd00::7]:4000/a/b/c/d")
    assert read == Address("fd00::7", 4000, "a/b/c/d")
    assert format_host_port(read.host, read.port) == "[fd00::7]:4000"


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:80", "host:80/", ":80/a", "host/a", "host:x/a", "host:0/a",
     "host:65536/a", "host:\u0661/a", "host:999999999999/a"],
)  # fmt: skip
def test_an_invalid_address_is_named(address: str) -> None:
    with pytest.raises(WireError, match="expected HOST:PORT/PATH"):
        parse_address(address)


# -- the question ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", EXCHANGES)
def test_request_is_one_that_a_real_worker_accepted(what: str) -> None:
    exchange = EXCHANGES[what]
    path, headers, control, _ = read_request(exchange.request)
    info = json.loads(control["connection_info"]["info"])
    written = encode_request(
        path,
        headers["request-id"],
        exchange.body,
        call_home=info["address"],
        subject=info["subject"],
        codec=exchange.codec,
    )
    assert written == exchange.request


def test_request_has_the_fields_that_dynamos_own_router_sends() -> None:
    written = encode_request(
        "id/ns/c/e", "r", {"worker_id": 2**64 - 1}, call_home="h:1", subject="s", codec="msgpack"
    )
    path, headers, control, body = read_request(written)
    assert path == "id/ns/c/e"
    assert headers == {"request-id": "r", "x-endpoint-path": "id/ns/c/e"}
    info = json.loads(control["connection_info"].pop("info"))
    assert info == {"address": "h:1", "subject": "s", "context": "r", "stream_type": "response"}
    assert control == {
        "id": "r",
        "request_type": "single_in",
        "response_type": "many_out",
        "payload_codec": "msgpack",
        "connection_info": {"transport": "tcp_server"},
    }
    assert msgspec.msgpack.decode(body) == {"worker_id": 2**64 - 1}


def read_request(written: bytes) -> tuple[str, Any, Any, bytes]:
    """An independent reading of a question: path, headers, control header, body."""
    [length] = struct.unpack_from(">H", written)
    path, rest = written[2 : 2 + length].decode(), written[2 + length :]
    [length] = struct.unpack_from(">H", rest)
    headers, rest = json.loads(rest[2 : 2 + length]), rest[2 + length :]
    [length] = struct.unpack_from(">I", rest)
    payload = rest[4:]
    assert len(payload) == length
    header_length, body_length, checksum = struct.unpack_from(">QQQ", payload)
    assert (checksum, len(payload)) == (0, 24 + header_length + body_length)
    control = json.loads(payload[24 : 24 + header_length])
    return path, headers, control, payload[24 + header_length :]


@pytest.mark.parametrize(("path", "codec"), [("p", "protobuf"), ("p" * 70_000, "json")])
def test_request_that_cannot_be_written_is_refused(path: str, codec: str) -> None:
    with pytest.raises(WireError):
        encode_request(path, "r", {}, call_home="h:1", subject="s", codec=codec)


def test_reply_is_empty_or_a_refusal() -> None:
    assert decode_reply(EXCHANGES["TreeDump"].reply) == ""
    refused = decode_reply(EXCHANGES["unknown endpoint"].reply)
    assert refused is not None
    assert refused.startswith("Server unavailable: unknown endpoint ")


def test_reply_waits_for_all_of_it_and_has_a_bound() -> None:
    whole = EXCHANGES["unknown endpoint"].reply
    assert all(decode_reply(whole[:n]) is None for n in range(len(whole)))
    with pytest.raises(WireError, match="over the limit"):
        decode_reply(struct.pack(">I", MAX_REPLY_BYTES + 1))


def test_control_is_a_header_alone() -> None:
    assert encode_control("kill") == struct.pack(">QQQ", 6, 0, 0) + b'"kill"'


# -- the answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ANSWERED)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_captured_answers_read_the_same_in_any_pieces(what: str, cuts: list[int]) -> None:
    exchange = ANSWERED[what]
    assert exchange.answer is not None
    subject, begun, item, *rest = steps_of(exchange.answer, exchange.codec, cuts)
    assert subject == "00000000-0000-4000-8000-000000000002"
    assert begun == Begun()
    assert list(item) == [
        {"json TreeDump": "TreeDump"}.get(what, "Error" if "wrong" in what else what)
    ]
    assert rest == [Completed(), Sentinel()]


def test_a_large_item_is_cut_out_and_is_the_same_as_a_small_one() -> None:
    item = {"Events": {"events": list(range(60_000)), "last_event_id": 7}}
    for codec, encoder in (("msgpack", msgspec.msgpack), ("json", msgspec.json)):
        document = encoder.encode({"data": item, "complete_final": False})
        other_order = encoder.encode({"complete_final": False, "data": item})
        decoder = AnswerDecoder(codec, 2 * LIMIT)
        decoder.feed(encode_frame(b'{"error":null}') + encode_frame(body=document))
        decoder.feed(encode_frame(body=other_order) + encode_frame(body=document))
        assert decoder.next_step() == Begun()
        for _ in range(3):
            step = decoder.next_step()
            assert isinstance(step, RawItem)
            assert step.decode() == item
        assert decoder.next_step() is None
        assert not decoder.midway


def test_items_of_every_size_around_the_copied_one() -> None:
    decoder = AnswerDecoder("msgpack", 10_000_000)
    decoder.feed(encode_frame(b'{"error":null}'))
    assert decoder.next_step() == Begun()
    for size in (0, 1, 32_000, 32_743, 32_744, 32_768, 33_000, 200_000):
        wrapped = msgspec.msgpack.encode({"data": b"x" * size, "complete_final": False})
        decoder.feed(encode_frame(body=wrapped)[:-1])
        assert decoder.next_step() is None
        assert decoder.midway
        decoder.feed(wrapped[-1:])
        step = decoder.next_step()
        assert isinstance(step, RawItem)
        assert step.decode() == b"x" * size


@pytest.mark.parametrize(
    ("error", "text"),
    [('"no such\\nthing"', "no such\N{REPLACEMENT CHARACTER}thing"), ('{"a":1}', '{"a":1}')],
)
def test_a_prologue_with_an_error_is_a_refusal(error: str, text: str) -> None:
    decoder = AnswerDecoder("msgpack", LIMIT)
    decoder.feed(encode_frame(b'{"error":' + error.encode() + b"}"))
    assert decoder.next_step() == RequestRefused(text)


OK = encode_frame(b'{"error":null}')


@pytest.mark.parametrize(
    "answer",
    [
        encode_frame(b"{}"),
        encode_frame(b"[]"),
        encode_frame(body=b"\xc0"),
        encode_frame(),
        OK + encode_frame(),
        OK + encode_frame(b'"other"'),
        OK + encode_frame(b"{", b""),
        OK + encode_frame(b"1", b"\xc0"),
        OK + encode_frame(body=b"\xc1"),
        OK + encode_frame(body=msgspec.msgpack.encode([1])),
        OK + encode_frame(body=msgspec.msgpack.encode({"complete_final": False})),
        OK + encode_frame(body=msgspec.msgpack.encode({"complete_final": 1})),
    ],
)
def test_an_invalid_answer_is_a_wire_error(answer: bytes) -> None:
    decoder = AnswerDecoder("msgpack", LIMIT)
    decoder.feed(answer)
    with pytest.raises(WireError):
        list(iter(decoder.next_step, None))


def test_the_bound_holds_for_all_frames_together_and_before_they_arrive() -> None:
    item = encode_frame(body=msgspec.msgpack.encode({"data": "x" * 50, "complete_final": False}))
    decoder = AnswerDecoder("msgpack", len(OK) + 2 * len(item))
    decoder.feed(OK + item + item + item[:PREFIX_BYTES])
    assert [type(decoder.next_step()) for _ in range(3)] == [Begun, RawItem, RawItem]
    with pytest.raises(WireError, match="over the limit of 0 left of"):
        decoder.next_step()


@pytest.mark.parametrize(
    ("header", "body", "problem"),
    [
        (MAX_HEADER_BYTES + 1, 0, "a header of 65,537 bytes"),
        (0, 2**63, "over the limit of 1,000"),
        (2**64 - 1, 2**64 - 1, "a header of"),
        (100, 877, "1,001 bytes, over the limit of 1,000"),
    ],
)
def test_a_frame_is_refused_by_the_size_in_its_header(header: int, body: int, problem: str) -> None:
    frames = FrameDecoder()
    frames.feed(struct.pack(">QQQ", header, body, 0))
    with pytest.raises(WireError, match=problem):
        frames.next_frame(1000)


@given(st.binary(max_size=300))
def test_junk_is_never_anything_but_a_wire_error(junk: bytes) -> None:
    decoder = AnswerDecoder("msgpack", 1000)
    decoder.feed(OK + junk)
    try:
        while decoder.next_step() is not None:
            pass
    except WireError:
        pass


@pytest.mark.parametrize(
    "header",
    [b"", b"x", b"{}", b'{"subject":1}', b'{"subject":"s","stream_type":"request"}', b"[" * 5000],
)
def test_a_handshake_that_names_no_subject_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        parse_handshake(Frame(header, b""))


def test_text_of_a_peer_is_cut_and_made_printable() -> None:
    assert printable("a\x1b[31m\n") == "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    assert len(printable("x" * 10_000)) == 303


@pytest.mark.parametrize(("codec", "document"), [("json", b"{"), ("msgpack", b"\xc1")])
def test_an_item_that_cannot_be_decoded_is_a_wire_error(codec: str, document: bytes) -> None:
    with pytest.raises(WireError):
        RawItem(document, codec).decode()


# -- as a server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", EXCHANGES)
@given(cut=st.integers(1, 400))
def test_a_server_reads_the_captured_requests(what: str, cut: int) -> None:
    exchange = EXCHANGES[what]
    decoder = RequestDecoder(LIMIT)
    found = []
    twice = exchange.request * 2
    for at in range(0, len(twice), cut):
        decoder.feed(twice[at : at + cut])
        while (request := decoder.next_request()) is not None:
            found.append(request)
    first, second = found
    assert first == second
    assert not decoder.midway
    assert first.headers["x-endpoint-path"] == first.path
    asked = parse_payload(first.payload)
    assert asked.request_id == first.headers["request-id"]
    assert asked.codec == exchange.codec
    assert parse_host_port(asked.call_home)[0] == "127.0.0.1"
    assert decode_body(asked.body, asked.codec) == exchange.body


@pytest.mark.parametrize("what", ANSWERED)
def test_a_servers_answer_is_the_captured_one_byte_for_byte(what: str) -> None:
    exchange = ANSWERED[what]
    assert exchange.answer is not None
    subject, begun, *steps = steps_of(exchange.answer, exchange.codec, [])
    if not isinstance(begun, Begun):
        pytest.skip("a refusal")
    items = [step for step in steps if not isinstance(step, (Completed, Sentinel))]
    written = encode_handshake(subject) + encode_prologue()
    written += b"".join(encode_item(item, exchange.codec) for item in items)
    assert written + encode_end(exchange.codec) == exchange.answer
    assert encode_reply() == exchange.reply


@given(st.binary(max_size=300))
def test_no_bytes_break_the_servers_reader(data: bytes) -> None:
    decoder = RequestDecoder(1000)
    decoder.feed(data)
    try:
        while (request := decoder.next_request()) is not None:
            parse_payload(request.payload)
    except WireError:
        pass
