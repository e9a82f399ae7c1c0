"""Where the parts of a chat begin in its token ids: system, tools, documents, and each turn.

The headers of a template are found once, by rendering chats whose texts are known. In a prompt they
are then searched as bytes, so no request is rendered again. A header counts only if it has a
special token: text between two of those always has the same token ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from dynctl.tokenization.errors import TokenizationError
from dynctl.tokenization.model import ModelTokenizer

#: Parts of a prompt that are named; the last one has what follows.
MOST_SEGMENTS: Final = 256
#: Tokens of a header without special tokens (tools, documents) that are searched.
_PLAIN_TOKENS: Final = 8
_LEAST_PLAIN: Final = 4
_WIDTH: Final = array("I").itemsize
_WORDS: Final = ("quartz", "violin", "harbor", "meadow", "copper")
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "walnut",
        "description": "walnut",
        "parameters": {"type": "object", "properties": {}},
    },
}
_DOCUMENT: Final = {"title": "walnut", "text": "walnut"}

Segments = tuple[tuple[str, int], ...]


class SegmentMarks:
    """The headers of a template: kind of a part -> its token ids.

    Kinds are the roles of messages, ``tools`` and ``documents``.
    """

    def __init__(self, marks: Mapping[str, Sequence[int]]) -> None:
        self.marks = {kind: tuple(ids) for kind, ids in marks.items()}
        #: By its first token: a prompt is searched once for each of them.
        self._patterns: dict[bytes, list[tuple[bytes, str]]] = {}
        for kind, ids in self.marks.items():
            pattern = array("I", ids).tobytes()
            self._patterns.setdefault(pattern[:_WIDTH], []).append((pattern, kind))

    def segments(self, ids: Sequence[int]) -> Segments:
        """The parts of a prompt in their order: kind, and the token at which it begins."""
        flat = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
        data = flat.tobytes()
        starts: list[tuple[int, str]] = []
        for first, patterns in self._patterns.items():
            starts += islice(_starts(data, first, patterns), MOST_SEGMENTS)
        return tuple((kind, at) for at, kind in sorted(starts)[:MOST_SEGMENTS])


def _starts(
    data: bytes, first: bytes, patterns: Sequence[tuple[bytes, str]]
) -> Iterator[tuple[int, str]]:
    """The tokens at which one of the patterns begins, all of which begin with ``first``."""
    at = data.find(first)
    while at >= 0:
        if at % _WIDTH:
            at = data.find(first, at + 1)
            continue
        for pattern, kind in patterns:
            if data.startswith(pattern, at):
                yield at // _WIDTH, kind
                break
        at = data.find(first, at + _WIDTH)


def segment_marks(tokenizer: ModelTokenizer) -> SegmentMarks:
    """The headers of a model's template, except those that look like text.

    Renders a few short chats, so it does not belong on an event loop.
    """
    system, user, reply, question, answer = _WORDS
    plain = _rendered(tokenizer, [("user", user), ("assistant", reply), ("user", question)])
    whole = _rendered(
        tokenizer,
        [
            ("system", system),
            ("user", user),
            ("assistant", reply),
            ("user", question),
            ("assistant", answer),
        ],
    )
    headers = {
        "system": _before(whole, "", system),
        "user": _common_end(
            _before(plain, "", user),
            _before(plain, reply, question),
            _before(whole, reply, question),
        ),
        "assistant": _common_start([_before(whole, user, reply), _before(whole, question, answer)]),
        "tool": _tool_header(tokenizer),
    }
    marks = {kind: _special_part(tokenizer, text) for kind, text in headers.items()}
    for kind, options in (("tools", {"tools": [_TOOL]}), ("documents", {"documents": [_DOCUMENT]})):
        marks[kind] = _plain_part(tokenizer, _inserted(tokenizer, options))
    several = [ids for ids in marks.values() if ids]
    known = {kind: ids for kind, ids in marks.items() if ids and several.count(ids) == 1}
    return SegmentMarks(_proved(tokenizer, known, whole))


def _proved(
    tokenizer: ModelTokenizer, marks: Mapping[str, Sequence[int]], text: str
) -> dict[str, Sequence[int]]:
    """Those of the headers that are in a chat as often as it has parts of their kind. ``text``: of
    two turns with a system prompt, without tools."""
    ids = tokenizer.encode(text) if text else []
    counts = {"system": 1, "user": 2, "assistant": 2}
    proved: dict[str, Sequence[int]] = {}
    for kind, mark in marks.items():
        if len(SegmentMarks({kind: mark}).segments(ids)) == counts.get(kind, 0):
            proved[kind] = mark
    return proved


def _rendered(tokenizer: ModelTokenizer, chat: Sequence[tuple[str, str]], **options: Any) -> str:
    """The text of a chat; empty where the template refuses it."""
    messages = [{"role": role, "content": content} for role, content in chat]
    return _text_of(tokenizer, messages, **options)


def _text_of(
    tokenizer: ModelTokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
) -> str:
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=False, **options)
    except TokenizationError:
        return ""


def _before(text: str, after: str, word: str) -> str:
    """What a template writes between two contents."""
    begin = text.find(after) + len(after)
    end = text.find(word, begin)
    return text[begin:end] if after in text and end >= 0 else ""


def _common_start(texts: Sequence[str]) -> str:
    """The characters with which all texts begin."""
    shortest = min(texts, key=len)
    for place, character in enumerate(shortest):
        if any(text[place] != character for text in texts):
            return shortest[:place]
    return shortest


def _common_end(*texts: str) -> str:
    known = [text[::-1] for text in texts if text]
    return _common_start(known)[::-1] if known else ""


def _tool_header(tokenizer: ModelTokenizer) -> str:
    """What a template writes before the result of a tool."""
    call = {"id": "call00000", "type": "function", "function": {"name": "walnut", "arguments": {}}}
    user, reply, result, *_ = _WORDS
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": reply, "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "call00000", "name": "walnut"},
    ]
    text = _text_of(tokenizer, messages)
    header = _before(text, reply, result)
    # Behind the call, which is in front of it.
    return header[header.rfind("walnut") + len("walnut") :] if "walnut" in header else header


def _inserted(tokenizer: ModelTokenizer, options: Mapping[str, Any]) -> str:
    """What a template writes in front of the first tool or document."""
    chat = [("system", _WORDS[0]), ("user", _WORDS[1])]
    without, with_it = _rendered(tokenizer, chat), _rendered(tokenizer, chat, **options)
    begin = len(_common_start([without, with_it]))
    end = with_it.find("walnut", begin)
    return with_it[begin : with_it.rfind("{", begin, end)] if "{" in with_it[begin:end] else ""


def _special_part(tokenizer: ModelTokenizer, header: str) -> tuple[int, ...]:
    """The token ids of a header from a special token on, without white space at its end: from the
    last one that a role follows, else from the first one."""
    ids = tokenizer.encode(header) if header else []
    while ids and not tokenizer.decode(ids[-1:], skip_special_tokens=False).strip():
        del ids[-1]
    specials = [place for place, token in enumerate(ids) if _is_special(tokenizer, token)]
    named = [place for place in specials if place + 1 < len(ids) and place + 1 not in specials]
    starts = [*named[-1:], *specials, len(ids)]
    return tuple(ids[starts[0] :])


def _is_special(tokenizer: ModelTokenizer, token: int) -> bool:
    shown = tokenizer.decode([token], skip_special_tokens=False)
    return bool(shown) and not tokenizer.decode([token], skip_special_tokens=True)


def _plain_part(tokenizer: ModelTokenizer, header: str) -> tuple[int, ...]:
    """Token ids inside a header without special tokens: those at its ends depend on the text that
    is around it."""
    inner = tokenizer.encode(header)[1:-1] if header else []
    while inner and not tokenizer.decode(inner[:1]).strip():
        del inner[0]  # a line's end is everywhere
    return tuple(inner[:_PLAIN_TOKENS]) if len(inner) >= _LEAST_PLAIN else ()
