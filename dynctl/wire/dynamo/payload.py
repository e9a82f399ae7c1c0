"""Bounds for msgpack from a network, and errors with a path and without values."""

from typing import Any, Final

import msgspec
from msgspec import Struct

from dynctl.base.decode_errors import WireError

_SHOWN: Final = 64  # characters of a foreign name: it reaches logs and tables


class PayloadLimits(Struct, frozen=True):
    """Bounds of one message; a message beyond them is refused as a whole.

    The defaults are about a hundred times the events of one step of a large engine.
    """

    payload_bytes: int = 32 * 1024 * 1024
    events: int = 65_536
    blocks: int = 1024 * 1024


DEFAULT_LIMITS: Final = PayloadLimits()


def bound_payload(payload: bytes, limits: PayloadLimits) -> None:
    """Raise ``WireError`` if the payload is too long."""
    if len(payload) > limits.payload_bytes:
        raise WireError(
            "payload", f"{len(payload)} bytes, expected at most {limits.payload_bytes} bytes"
        )


def kind_name(data: Any) -> str:
    """The name of a variant on the wire: ``"Free"``, or the key of ``{"AddRequest": {..}}``."""
    name = next(iter(data), None) if isinstance(data, dict) else data
    return name[:_SHOWN] if isinstance(name, str) else "(unnamed)"


class reading:
    """Context manager that turns errors of decoding untrusted bytes into a WireError with a path.

    A class because a generator would cost a microsecond on every message.
    """

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        if isinstance(error, msgspec.ValidationError):
            problem, _, path = str(error).partition(" - at `$")
            raise WireError(self._where + path.rstrip("`"), problem) from None
        if isinstance(error, msgspec.DecodeError):
            raise WireError(self._where, f"not msgpack: {error}") from None
        if isinstance(error, RecursionError | MemoryError):
            raise WireError(self._where, "nested too deeply") from None
        if isinstance(error, UnicodeError | TypeError | ValueError | OverflowError):
            raise WireError(self._where, "not msgpack that Dynamo could have written") from None
