"""Streams of ext_proc messages to an endpoint picker: valid, broken, out of order, huge.

A stream is drawn from a grammar: the messages of one HTTP request in the order of a gateway, then
faults in their order, values and bytes. They go to the picker as its gRPC server would deliver
them, so that one core tries thousands of streams a minute.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dynctl.serving.epp.exchange import Exchange
from dynctl.serving.epp.grpc_server import Code
from dynctl.serving.epp.process import GatewayPart, build_picker
from dynctl.serving.routing.config import Limits, PickerConfig
from dynctl.wire.envoy import ext_proc
from dynctl.wire.envoy.schema import DecodeError, message
from dynctl.wire.nvext import READ_HEADERS
from tests.dynctl.serving.fleets import site
from tests.fuzz.decoders import targets
from tests.fuzz.mutator import Message, Mutator

GATEWAY: Final = "gateway"
#: CPU of one message: a body of 16 MiB that is parsed costs most.
_MOST_CPU_S: Final = 2.0
_BOUNDED_S: Final = 60.0
_MOST_DEFECTS: Final = 10
_LIMITS: Final = Limits(body_bytes=1 << 20, all_bodies_bytes=4 << 20, in_flight=64)
_HUGE: Final = 0.01
_REQUEST: Final = message("ProcessingRequest")
_RESPONSE: Final = message("ProcessingResponse")
#: Path -> the decoder whose seeds are its bodies.
_APIS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
_PATHS: Final = (*_APIS, "/v1/models", "/v1/audio/speech", "", "/" + "x" * 70_000, "/v1/\udcff?a=b")
_NAMES: Final = (
    *sorted(READ_HEADERS),
    *ext_proc.OWN_HEADERS,
    *(":path", ":method", ":status", "content-type", "content-length", ext_proc.MODEL_NAME),
    *("x-other", "", "X-Upper", "x" * 3000, "\U0001f600"),
)
_VALUES: Final = (
    *("", "0", "1", "-1", "200", "500", "demo", "application/json", "text/event-stream"),
    *("9" * 20, "9" * 5000, str(2**64), "1e400", "nan", "²", "٣٤٥"),
    *("x" * 20_000, "\U0001f600" * 300, "\x1b]0;t\x07\u202e\x00", "a\r\nb: c"),
)
_RAW: Final = (b"\xff\xfe", b"\xed\xa0\x80", b"\xf0\x9f", b"\x00" * 40)
_KINDS: Final = (
    *("request_headers", "request_body", "request_trailers"),
    *("response_headers", "response_body", "response_trailers"),
)


@dataclass
class Outcomes:
    """How streams ended, and what was not handled."""

    messages: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Grammar:
    """Draws streams; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        by_name = {one.name: one for one in targets()}
        self._bodies = {
            name: (by_name[name].seeds(), Mutator(by_name[name].seeds(), seed))
            for name in _APIS.values()
        }
        self._bytes = Mutator([(self._headers().SerializeToString(),)], seed)

    def stream(self) -> list[bytes]:
        """The messages of one stream, in the order in which they are sent."""
        choose = self._choose
        messages = self._in_order()
        if choose.random() < 0.3:
            self._disorder(messages)
        sent = [one.SerializeToString() for one in messages]
        for place in range(len(sent)):
            if choose.random() < 0.02:
                sent[place] = self._broken(sent[place])
        if choose.random() < _HUGE:
            sent.insert(choose.randrange(len(sent) + 1), self._huge())
        return sent

    def _in_order(self) -> list[Any]:
        choose = self._choose
        path = choose.choice(_PATHS) if choose.random() < 0.3 else choose.choice(list(_APIS))
        messages = [self._headers(path)]
        body = self._body(_APIS.get(path, "chat"))
        pieces = choose.choice((1, 1, 1, 2, 5, 40))
        size = max(1, -(-len(body) // pieces))
        cut = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        messages += [self._piece("request_body", piece) for piece in cut]
        if choose.random() < 0.2:
            messages.append(self._part("request_trailers"))
        else:
            messages[-1].request_body.end_of_stream = True
        messages.append(self._response())
        for _ in range(choose.choice((0, 1, 1, 3, 20))):
            event = choose.choice((b"data: {}\n\n", b"", b'{"usage":{"prompt_tokens":1e400}}'))
            messages.append(self._piece("response_body", event))
        if choose.random() < 0.7:
            messages.append(self._piece("response_body", b"data: [DONE]\n\n"))
            messages[-1].response_body.end_of_stream = True
        elif choose.random() < 0.5:
            messages.append(self._part("response_trailers"))
        return messages[: choose.randrange(1, len(messages) + 1)] if self._odd() else messages

    def _odd(self) -> bool:
        return self._choose.random() < 0.2

    def _disorder(self, messages: list[Any]) -> None:
        choose = self._choose
        place = choose.randrange(len(messages))
        match choose.randrange(5):
            case 0:
                del messages[place]
            case 1:
                messages.insert(place, messages[choose.randrange(len(messages))])
            case 2:
                choose.shuffle(messages)
            case 3:
                messages.insert(place, self._part(choose.choice(_KINDS)))
            case _:
                messages[place].MergeFrom(self._part(choose.choice(_KINDS)))

    def _headers(self, path: str = "/v1/chat/completions") -> Any:
        choose = self._choose
        found = _REQUEST()
        found.request_headers.SetInParent()
        headers = found.request_headers.headers.headers
        raw = path.encode("utf-8", "surrogateescape")
        headers.add(key=":path", raw_value=raw)
        headers.add(key=":method", raw_value=b"POST")
        if self._odd():
            self._add(headers, choose.choice((1, 1, 3, 30, 900)))
        found.request_headers.end_of_stream = choose.random() < 0.05
        if choose.random() < 0.8:
            config = found.protocol_config
            mode = choose.choice((ext_proc.BodyMode.FULL_DUPLEX_STREAMED, 0, 1, 2, 3))
            config.request_body_mode = mode if choose.random() < 0.95 else choose.choice((5, 6, -1))
            config.response_body_mode = choose.choice((0, 1, 2, 4, 4, 4))
            config.send_body_without_waiting_for_header_response = choose.random() < 0.5
        if self._odd():
            self._metadata(found.metadata_context)
        found.observability_mode = choose.random() < 0.01
        return found

    def _add(self, headers: Any, count: int) -> None:
        choose = self._choose
        for _ in range(count):
            one = headers.add(key=choose.choice(_NAMES))
            if choose.random() < 0.2:
                one.value = choose.choice(_VALUES)
            if choose.random() < 0.9:
                one.raw_value = (
                    choose.choice(_RAW)
                    if choose.random() < 0.1
                    else choose.choice(_VALUES).encode("utf-8", "surrogateescape")
                )

    def _metadata(self, metadata: Any) -> None:
        choose = self._choose
        for _ in range(choose.choice((1, 1, 2, 30))):
            key = choose.choice((ext_proc.SUBSET_METADATA, "envoy.lb", "", "x" * 3000))
            entry = metadata.filter_metadata.add(key=key)
            for _ in range(choose.choice((0, 1, 1, 3))):
                name = choose.choice((ext_proc.SUBSET_KEY, "other", ""))
                value = entry.value.fields.add(key=name).value
                match choose.randrange(5):
                    case 0:
                        value.number_value = choose.choice((0.0, 1e308, float("nan")))
                    case 1:
                        value.string_value = ",".join(self._endpoints())
                    case 2:
                        value.list_value.SetInParent()
                        for text in self._endpoints():
                            value.list_value.values.add(string_value=text)
                    case 3:
                        for _ in range(choose.choice((1, 40, 90))):
                            value = value.list_value.values.add()
                    case _:
                        value.struct_value.SetInParent()

    def _endpoints(self) -> list[str]:
        choose = self._choose
        known = (
            "127.0.0.1",
            "10.9.9.9:1",
            "[::1]:80",
            "",
            " ",
            ":",
            "x" * 500,
            "\U0001f600",
            "]:[",
        )
        return [choose.choice(known) for _ in range(choose.choice((0, 1, 2, 50, 2000)))]

    def _body(self, name: str) -> bytes:
        choose = self._choose
        seeds, mutants = self._bodies[name]
        if choose.random() < 0.5:
            return self._for_demo(choose.choice(seeds))
        if choose.random() < 0.1:
            return choose.choice((b"", b"[" * 100_000, b'{"model":' + b"9" * 5000 + b"}", b"\xff"))
        return next(mutants)[0]

    def _for_demo(self, seed: Message) -> bytes:
        """A valid body for the model that is served."""
        value = msgspec.json.decode(seed[0])
        return msgspec.json.encode({**value, "model": "demo"})

    def _piece(self, kind: str, data: bytes) -> Any:
        found = _REQUEST()
        part = getattr(found, kind)
        part.body = data
        part.end_of_stream_without_message = self._choose.random() < 0.01
        return found

    def _response(self) -> Any:
        choose = self._choose
        found = _REQUEST()
        headers = found.response_headers.headers.headers
        status = choose.choice(_VALUES) if self._odd() else choose.choice(("200", "404", "503"))
        headers.add(key=":status", raw_value=status.encode("utf-8", "surrogateescape"))
        if self._odd():
            self._add(headers, 3)
        found.response_headers.end_of_stream = choose.random() < 0.1
        return found

    def _part(self, kind: str) -> Any:
        found = _REQUEST()
        getattr(found, kind).SetInParent()
        return found

    def _broken(self, data: bytes) -> bytes:
        choose = self._choose
        match choose.randrange(5):
            case 0:
                return data[: choose.randrange(len(data) + 1)]
            case 1:
                return choose.randbytes(choose.randrange(200))
            case 2:  # a field that is unknown, of any wire type
                return data + bytes([choose.randrange(256)]) + choose.randbytes(9)
            case 3:
                return data + data
            case _:
                self._bytes.keep((data[:4096],))
                return next(self._bytes)[0]

    def _huge(self) -> bytes:
        """A message of 0.2 to 2 MiB that consists of the smallest parts, or of one."""
        choose = self._choose
        count = 1 << choose.choice((17, 18, 19))
        found = _REQUEST()
        match choose.randrange(6):
            case 0:
                return field_of(2, field_of(1, b"\x0a\x00" * count))
            case 1:
                return field_of(4, b"\x98\x06\x01" * count)
            case 2:
                return field_of(8, b"\x0a\x00" * count)
            case 3:
                return field_of(4, b"") * count
            case 4:
                found.request_headers.headers.headers.add(
                    key="x-other", raw_value="\U0001f600".encode() * (count // 4)
                )
            case _:
                found.request_body.body = b"x" * 4 * count
        return bytes(found.SerializeToString())


def field_of(number: int, content: bytes) -> bytes:
    """A field of protobuf with a length."""
    size, left = bytearray(), len(content)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([number << 3 | 2, *size, left]) + content


class _Call:
    """What an exchange sends, as its server takes it."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.end: Code | None = None
        self.exchange: Exchange | None = None

    def send(self, data: bytes) -> None:
        if self.end is None:
            self.answers.append(data)

    def finish(self, code: Code = Code.OK, message: str = "") -> None:
        assert isinstance(message, str)
        if self.end is None:
            self.end = code
            if self.exchange is not None:
                self.exchange.on_closed()


async def fuzz_gateway(streams: int, seed: int) -> Outcomes:
    """Send streams to a picker; afterwards nothing is held and a request is routed."""
    outcomes, grammar = Outcomes(), Grammar(seed)
    options = PickerConfig(port=0, health_port=0, tls=False)
    engines = [{"name": "a"}, {"name": "b"}]
    async with site(engines, kind=build_picker, picker=options, limits=_LIMITS) as found:
        picker = found.frontend.part(GatewayPart).picker
        running: list[_Call] = []
        for number in range(streams):
            call = await _stream(picker, grammar.stream(), outcomes, f"stream {number}")
            running.append(call)
            if len(running) > 20:  # some stay open beside others
                _close(running.pop(number % len(running)))
            if len(outcomes.defects) >= _MOST_DEFECTS:
                return outcomes
        for call in running:
            _close(call)
        await found.idle()
        async with asyncio.timeout(_BOUNDED_S):
            while found.frontend.core.inference.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if picker.held or len(picker):
            outcomes.defects.append(f"{picker.held} bytes and {len(picker)} streams are left")
        plain = Grammar(seed)._headers()
        plain.Clear()
        plain.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
        plain.request_headers.end_of_stream = True
        last = await _stream(picker, [plain.SerializeToString()], outcomes, "the last stream")
        _close(last)
        if ext_proc.DESTINATION.encode() not in b"".join(last.answers):
            outcomes.defects.append("after all of them a request is not routed")
    return outcomes


async def _stream(picker: Any, sent: list[bytes], outcomes: Outcomes, name: str) -> _Call:
    call = _Call()
    exchange = call.exchange = picker.begin(call)
    for data in sent:
        if call.end is not None:
            break
        outcomes.messages += 1
        started = time.process_time()
        try:
            exchange.on_message(data)
        except Exception as error:  # each is a defect
            outcomes.defects.append(f"{name}: {type(error).__name__}: {error}: {data[:300].hex()}")
            break
        taken = time.process_time() - started
        outcomes.slowest_s = max(outcomes.slowest_s, taken)
        if taken > _MOST_CPU_S:
            outcomes.defects.append(f"{name}: {taken:.1f} s of CPU: {data[:300].hex()}")
        async with asyncio.timeout(_BOUNDED_S):
            # As a gateway waits for the choice.
            while exchange._task is not None:  # noqa: ASYNC110
                await asyncio.sleep(0)
    outcomes.ends[_outcome(call, outcomes, name)] += 1
    return call


def _close(call: _Call) -> None:
    if call.end is None and call.exchange is not None:
        call.end = Code.CANCELLED
        call.exchange.on_closed()
    call.exchange = None


def _outcome(call: _Call, outcomes: Outcomes, name: str) -> str:
    """How the stream stands after its last message."""
    status = 0
    for data in call.answers:
        try:
            answer = _RESPONSE.FromString(data)
        except DecodeError:
            outcomes.defects.append(f"{name}: an answer is not a ProcessingResponse")
            continue
        status = answer.immediate_response.status.code or status
    if status == 500:
        outcomes.defects.append(f"{name}: answered with 500")
    if call.end is not None:
        return call.end.name.lower()
    return str(status) if status else "routed" if call.answers else "open"
