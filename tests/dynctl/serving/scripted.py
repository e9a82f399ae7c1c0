"""Our answer to the output that a scripted worker sends, without a server and a network."""

from collections.abc import Sequence
from typing import Any

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.serving.dynamo.answer import (
    DONE,
    ERROR_STATUS,
    AnswerError,
    EngineAnswer,
    error_event,
)
from dynctl.wire.dynamo.engine_output import decode_engine_item
from dynctl.wire.dynamo.request_plane import RawItem


def answered(
    answer: EngineAnswer, chunks: Sequence[Any], *, streamed: bool, raises: bool = False
) -> tuple[int, bytes]:
    """The status and the bytes of the answer; ``raises``: the worker fails after its chunks."""
    sent = b""
    try:
        for chunk in chunks:
            item = decode_engine_item(RawItem(msgspec.json.encode({"data": chunk}), "json"))
            if item.data is not None:
                sent += b"".join(answer.feed(item.data))
        if raises and not answer.stopped:
            raise AnswerError("failed")
    except (AnswerError, WireError):
        if answer.stopped:
            pass  # what follows a stop does not count
        elif streamed:
            return 200, sent + error_event(ERROR_STATUS) + DONE
        else:
            return ERROR_STATUS, b""
    if streamed:
        return 200, sent + b"".join(answer.end())
    return 200, answer.body()
