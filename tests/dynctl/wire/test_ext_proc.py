"""ext_proc's messages: equal to those of Envoy's own stubs, and any bytes are read or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.wire.envoy import ext_proc, health
from dynctl.wire.envoy.ext_proc import BodyMode, ExtProcError, Modes, Processing
from dynctl.wire.envoy.schema import message

#: Written by tests/envoy/golden.py.
MESSAGES = json.loads((Path(__file__).parent / "ext_proc_messages.json").read_text())
ENDPOINT = "10.0.0.1:8000"
FULL = BodyMode.FULL_DUPLEX_STREAMED
REQUESTS = {
    "request headers": Processing(
        "request_headers",
        {":path": "/v1/chat/completions", ":method": "POST", "x-twice": "a", "x-text": "c"},
        modes=Modes(FULL, FULL),
    ),
    "request headers, all of the request": Processing(
        "request_headers",
        {":path": "/"},
        end=True,
        modes=Modes(BodyMode.STREAMED, BodyMode.NONE, eager=True),
    ),
    "subset as a list": Processing("request_headers", {}, subset=(ENDPOINT, "10.0.0.2:8000")),
    "subset as a text": Processing("request_headers", {}, subset=(ENDPOINT, "10.0.0.2:8000")),
    "empty subset": Processing("request_headers", {}, subset=()),
    "observability": Processing("request_headers", {}, observes=True),
    "request body": Processing("request_body", {}, b"piece"),
    "end of the request body": Processing("request_body", {}, end=True),
    "request trailers": Processing("request_trailers", {}, end=True),
    "response headers": Processing("response_headers", {":status": "200"}),
    "response body": Processing("response_body", {}, b"data: x\n\n", end=True),
    "response trailers": Processing("response_trailers", {}, end=True),
}


def _choice(kind: Any) -> bytes:
    given = {ext_proc.DESTINATION: ENDPOINT}
    removed = [ext_proc.PREFILLER]
    return ext_proc.headers_answer(kind, given, remove=removed, reroute=True, endpoint=ENDPOINT)


def _piece(kind: Any) -> bytes:
    (found,) = ext_proc.streamed_answers(kind, b"piece", end=True)
    return found


ANSWERS: dict[str, Callable[[], bytes]] = {
    "choice": lambda: _choice("request_headers"),
    "choice with a buffered body": lambda: _choice("request_body"),
    "headers pass": lambda: ext_proc.headers_answer("response_headers"),
    "body passes": lambda: ext_proc.body_answer("response_body"),
    "piece of the request": lambda: _piece("request_body"),
    "piece of the response": lambda: _piece("response_body"),
    "trailers pass": lambda: ext_proc.trailers_answer("response_trailers"),
    "refusal": lambda: ext_proc.immediate_answer(503, {"retry-after": "1"}, b"{}", "dynctl_503"),
}


@pytest.mark.parametrize("name", MESSAGES["requests"])
def test_requests_of_a_gateway(name: str) -> None:
    assert ext_proc.decode(bytes.fromhex(MESSAGES["requests"][name])) == REQUESTS[name]


@pytest.mark.parametrize("name", MESSAGES["answers"])
def test_answers(name: str) -> None:
    assert ANSWERS[name]().hex() == MESSAGES["answers"][name]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = ext_proc.decode(data)
    except ExtProcError as error:
        assert str(error)  # noqa: PT017
    else:
        assert isinstance(found, Processing)


@given(st.data())
def test_cut_messages_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytes.fromhex(data.draw(st.sampled_from(sorted(MESSAGES["requests"].values()))))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        ext_proc.decode(cut)
    except ExtProcError as error:
        assert str(error)  # noqa: PT017


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


_LONG = ext_proc.MOST_BESIDE_BODY + 1
_SUBSET = _field(1, b"envoy.lb.subset_hint")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (_field(2, _field(1, _field(1, b"") * (_LONG // 2))), "beside its body"),
        (_field(3, _field(1, _field(1, _field(3, b"x" * _LONG)))), "beside its body"),
        (_field(4, _field(1, b"x") + _field(9, b"y" * _LONG)), "beside its body"),
        (_field(8, _field(1, b"") * _LONG), "beside its body"),
        (_field(4, b"\x98\x06\x01" * _LONG), "more than 64 fields"),
        (_field(4, b"") * _LONG, "more than 64 fields"),
        (_field(4, b"{" * _LONG), "not a ProcessingRequest"),
        (_field(4, b"")[:-1] + _varint(_LONG) + b"x" * (_LONG - 9), "not a ProcessingRequest"),
        (b"\xff" * _LONG, "not a ProcessingRequest"),
        (_field(2, _field(1, _field(1, b"") * 1001)), "1,001 headers; at most 1,000"),
        (_field(7, b"") + _field(8, _field(1, b"") * 1001) + _field(2, b""), "1,001 entries"),
        (
            _field(2, b"") + _field(8, _field(1, _SUBSET + _field(2, _field(1, b"") * 1001))),
            "1,001 entries",
        ),
    ],
)
def test_what_costs_too_much_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ExtProcError, match=problem):
        ext_proc.decode(data)


def test_a_large_message_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ext_proc, "_REQUEST", None)
    with pytest.raises(ExtProcError, match="beside its body"):
        ext_proc.decode(_field(2, _field(1, _field(1, b"") * _LONG)))


@pytest.mark.parametrize("text", [True, False])
def test_a_subset_has_a_bound(text: bool) -> None:
    request = message("ProcessingRequest")()
    request.request_headers.SetInParent()
    entry = request.metadata_context.filter_metadata.add(key=ext_proc.SUBSET_METADATA)
    value = entry.value.fields.add(key=ext_proc.SUBSET_KEY).value
    if text:
        value.string_value = "," * 10_000
    else:
        for _ in range(10_001):
            value.list_value.values.add()
    with pytest.raises(ExtProcError, match="a subset of 10,001 endpoints; at most 10,000"):
        ext_proc.decode(request.SerializeToString())


@given(st.integers(0, 3), st.integers(0, 1 << 20), st.booleans())
def test_a_large_body_is_read_with_what_is_beside_it(kind: int, size: int, end: bool) -> None:
    request = message("ProcessingRequest")()
    name = ("request_body", "response_body")[kind % 2]
    getattr(request, name).body, getattr(request, name).end_of_stream = b"x" * size, end
    if kind > 1:
        request.metadata_context.filter_metadata.add(key="x")
    assert ext_proc.decode(request.SerializeToString()) == Processing(
        "request_body" if kind % 2 == 0 else "response_body", {}, b"x" * size, end
    )


@pytest.mark.parametrize("mode", [-1, 6, 99])
def test_an_unknown_body_mode_is_refused(mode: int) -> None:
    request = message("ProcessingRequest")()
    request.request_headers.SetInParent()
    request.protocol_config.request_body_mode = mode
    with pytest.raises(ExtProcError, match=f"unknown body mode {mode} or 0"):
        ext_proc.decode(request.SerializeToString())


@given(st.binary(max_size=200_000), st.booleans())
def test_a_body_is_cut_into_pieces_that_a_gateway_takes(body: bytes, end: bool) -> None:
    answer = message("ProcessingResponse")
    pieces = [
        answer.FromString(one).response_body.response.body_mutation.streamed_response
        for one in ext_proc.streamed_answers("response_body", body, end=end)
    ]
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) <= ext_proc.MOST_BODY for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [end]


def test_health() -> None:
    assert health.service_of(message("HealthCheckRequest")(service="x").SerializeToString()) == "x"
    assert health.service_of(b"") == ""
    assert health.status_message(health.Serving.SERVING) == b"\x08\x01"
    with pytest.raises(ValueError, match="not a HealthCheckRequest"):
        health.service_of(b"\xff")
