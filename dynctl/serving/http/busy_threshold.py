"""``/busy_threshold`` in the format of Dynamo's frontend, with two additions.

Bodies, statuses and messages are those captured from Dynamo 1.6.1. Different on purpose: a model
without workers is a 404 when read too (Dynamo: a row of nulls), ``"clear": [names]`` unsets
thresholds (Dynamo: not possible), and a change takes effect at once, in both directions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from dynctl.base.decode_errors import WireError
from dynctl.base.json_reader import read_json
from dynctl.documents.thresholds import BusyThresholdList, ModelThresholds
from dynctl.serving.http.bodies import bodies_of
from dynctl.serving.http.json_responses import json_response
from dynctl.serving.routing.service import RoutingService
from router_core import SETTINGS, THRESHOLD_SETTINGS, ConfigError, ThresholdsSet

PATH = "/busy_threshold"
#: The response header with the names of ignored fields: Dynamo ignores them silently.
IGNORED_HEADER = "x-dynctl-ignored"
#: A request header: why a command sets the values, such as a step of a canary. Dynamo ignores it.
NOTE_HEADER = "x-dynctl-note"
MAX_NOTE = 200
#: A request header: ``NAME SECONDS``, the canary that sets the values and for how long it watches
#: them; 0 ends it.
CANARY_HEADER = "x-dynctl-canary"
_CANARY = re.compile(r"([0-9a-f]{1,32}) ([0-9]{1,6})")
MAX_BODY = 64 * 1024

_INTEGER = "active_prefill_tokens_threshold"
_FRACTION = "active_decode_blocks_threshold"
_U64 = 2**64
#: Of a model; each is of other thresholds.
_MOST_CANARIES = len(THRESHOLD_SETTINGS)
_INTO = "Failed to deserialize the JSON body into the target type: "


class BadBody(ValueError):
    """The body is not a valid request; ``status`` and text are those of Dynamo's response."""

    def __init__(self, status: int, message: str, *, plain: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.plain = plain

    def response(self) -> web.Response:
        if self.plain:
            return web.Response(status=self.status, text=str(self))
        return json_response({"error": str(self)}, self.status)


@dataclass(frozen=True, slots=True)
class _Canary:
    """A canary of some thresholds of a model; ``until``: by the clock of the service."""

    name: str
    thresholds: frozenset[str]
    until: float


class BusyThresholds:
    """The two handlers. Values that a canary watches stay free for every other change: it sees
    one, and ends. Only a second canary of the same thresholds is refused, as it would set them back
    to values that the first one has not proven."""

    def __init__(self, service: RoutingService) -> None:
        self._service = service
        #: Model -> its canaries.
        self._canaries: dict[str, list[_Canary]] = {}

    async def get(self, request: web.Request) -> web.Response:
        """One row for each model that is served."""
        return json_response(
            BusyThresholdList([self._row(model) for model in self._service.models()])
        )

    async def post(self, request: web.Request) -> web.Response:
        """Set, unset or read the thresholds of one model; responds with its row."""
        with bodies_of(request).of(request) as body:
            raw = await body.read(request, MAX_BODY)
        try:
            model, values, ignored = read_body(request.content_type, raw)
        except BadBody as bad:
            return bad.response()
        if model not in self._service.models():
            return json_response(
                {"error": self._not_found_message(model, writes=bool(values))}, 404
            )
        refused = self._canary_refusal(model, values, request.headers.get(CANARY_HEADER, ""))
        if refused:
            return json_response({"error": refused}, 409)
        if values:
            applied = self._service.apply(ThresholdsSet(model, values))
            if not applied.ok:
                return json_response({"error": applied.message}, 400)
            note = request.headers.get(NOTE_HEADER, "")[:MAX_NOTE]
            if note:
                self._service.note("canary", model, _printable(note))
        answer = json_response(self._row(model))
        if ignored:
            answer.headers[IGNORED_HEADER] = ", ".join(ignored)
        return answer

    def _canary_refusal(self, model: str, values: Collection[str], header: str) -> str:
        """Note what the header says of a canary; why it may not set the values, or nothing."""
        given = _CANARY.fullmatch(header)
        if given is None:
            return ""
        now, name, seconds = self._service.clock(), given[1], int(given[2])
        canaries = [canary for canary in self._canaries.get(model, ()) if canary.until > now]
        for canary in canaries:
            common = canary.thresholds & set(values)
            if common and canary.name != name and seconds:
                return (
                    f"a canary of {min(common)} of {model} runs for another "
                    f"{canary.until - now:.0f} s; wait for its end, or end it with Ctrl-C"
                )
        canaries = [canary for canary in canaries if canary.name != name]
        if seconds:
            canaries.append(_Canary(name, frozenset(values), now + seconds))
        self._canaries = {**self._canaries, model: canaries[-_MOST_CANARIES:]}
        return ""

    def _row(self, model: str) -> ModelThresholds:
        held = self._service.router.busy.thresholds(model)
        return ModelThresholds(
            model,
            held.active_decode_blocks_threshold,
            held.active_prefill_tokens_threshold,
            held.active_prefill_tokens_threshold_frac,
        )

    def _not_found_message(self, model: str, *, writes: bool) -> str:
        base = self._service.served.base_model(model)
        if base is not None:
            return (
                f"Model '{model}' not found. It is another name of '{base}': thresholds are those "
                "of the model."
            )
        if writes:
            return f"Model '{model}' not found. Thresholds can only be set for discovered models."
        known = ", ".join(self._service.models()) or "none"
        return f"Model '{model}' not found. Discovered models: {known}"


def read_body(
    content_type: str, body: bytes
) -> tuple[str, dict[str, float | int | None], list[str]]:
    """``(model, values to set (None: to unset), names of ignored fields)``; raises BadBody."""
    if content_type != "application/json":
        raise BadBody(415, "Expected request with `Content-Type: application/json`", plain=True)
    try:
        fields = read_json(body, "body")
    except WireError as error:
        raise BadBody(
            400, f"Failed to parse the request body as JSON: {error.problem}", plain=True
        ) from None
    if not isinstance(fields, dict):
        raise BadBody(422, f"{_INTO}invalid type: {_serde(fields)}, expected an object")
    model = fields.get("model")
    if "model" not in fields:
        raise BadBody(422, f"{_INTO}missing field `model`{_at(body, len(body))}")
    if not isinstance(model, str):
        raise BadBody(422, f"{_INTO}model: invalid type: {_serde(model)}, expected a string")
    values: dict[str, float | int | None] = {}
    for name in THRESHOLD_SETTINGS:
        value = fields.get(name)
        if value is not None:
            values[name] = _threshold(name, value, body)
    for name in _names_to_clear(fields.get("clear")):
        if name in values:
            raise BadBody(400, f"{name} is both set and in clear; use one of them")
        values[name] = None
    known = {"model", "clear", *THRESHOLD_SETTINGS}
    ignored = [name[:64] for name in fields if name not in known][:16]
    return model, values, [_header_safe(name) for name in ignored]


def _threshold(name: str, value: Any, body: bytes) -> float | int:
    expected = "u64" if name == _INTEGER else "f64"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (expected == "u64" and isinstance(value, float)):
        where = _where(name, value, body)
        text = f"{name}: invalid type: {_serde(value)}, expected {expected}{where}"
        raise BadBody(422, _INTO + text)
    if name == _INTEGER:
        if not 0 <= value < _U64:
            where = _where(name, value, body)
            text = f"{name}: invalid value: integer `{value}`, expected u64{where}"
            raise BadBody(422, _INTO + text)
        return int(value)
    try:
        fraction = float(value)
    except OverflowError:
        fraction = math.inf
    if name == _FRACTION and not 0.0 <= fraction <= 1.0:
        raise BadBody(400, f"{name} must be between 0.0 and 1.0, got {_short(value)}")
    if not (math.isfinite(fraction) and fraction >= 0.0):
        raise BadBody(
            400,
            f"{name} must be a finite value greater than or equal to 0.0, got {_short(value)}",
        )
    try:
        SETTINGS[name].check(fraction)
    except ConfigError as error:
        raise BadBody(400, str(error)) from None
    return fraction


def _names_to_clear(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadBody(422, f"{_INTO}clear: expected an array of names of thresholds")
    for name in value:
        if name not in THRESHOLD_SETTINGS:
            expected = ", ".join(THRESHOLD_SETTINGS)
            raise BadBody(400, f"clear: no threshold {name[:64]!r}; expected one of {expected}")
    return value


def _serde(value: Any) -> str:
    """A value in the words of serde's errors."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{_short(value)}`"
        case float():
            return f"floating point `{value}`"
        case str():
            start = value[
                :64
            ]  # serde does not escape; what is not printable is, as it may be shown
            return f"string {json.dumps(start, ensure_ascii=not start.isprintable())}"
        case list():
            return "sequence"
        case _:
            return "map"


def _where(name: str, value: Any, body: bytes) -> str:
    """`` at line 1 column 52``, the end of the value; empty if it is not a plain value."""
    pattern = rb'"' + name.encode() + rb'"\s*:\s*("(?:[^"\\]|\\.)*"|[^\s,}\]\[{"]+)'
    matches = list(re.finditer(pattern, body))
    return _at(body, matches[-1].end()) if matches else ""


def _at(body: bytes, end: int) -> str:
    before = body[:end]
    line = before.count(b"\n") + 1
    column = end - (before.rfind(b"\n") + 1)
    return f" at line {line} column {column}"


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text


def _header_safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name)


def _printable(note: str) -> str:
    return re.sub(r"[^ -~]", "?", note)
