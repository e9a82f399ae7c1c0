"""Which parts of a ``tokenizer.json`` may run in this process.

A tokenizer is a program: its normalizers can make ten characters of one, and its patterns can take
the square of a text's length. The parts below cost time and memory in proportion to the text; a
tokenizer with any other part runs in a process of its own (:mod:`.isolated`).

What put a pattern on the list: published models have it, and of 40 kinds of text (runs of letters,
digits, spaces, line ends, marks, quotes, emoji, CJK and mixtures) none of 300,000 characters took
more than 2 us for a character, or 3 times as long for each as one of 10,000 (tokenizers 0.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

#: Patterns of published models' pre-tokenizers.
PATTERNS: Final = frozenset(
    (
        # GPT-2, and what follows it.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3, GPT-4 (cl100k).
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2, 2.5 and 3.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # GPT-4o and gpt-oss (o200k).
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Mistral's Tekken.
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # DeepSeek V3 and R1: three splits one after the other.
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        # Digits one by one.
        r"\p{N}",
        r"\d",
    )
)
_NORMALIZERS: Final = frozenset(
    "NFC NFD NFKC NFKD Lowercase Strip StripAccents BertNormalizer Nmt ByteLevel".split()
)
_PRE_TOKENIZERS: Final = frozenset(
    "ByteLevel Whitespace WhitespaceSplit BertPreTokenizer Metaspace Digits Punctuation "
    "CharDelimiterSplit UnicodeScripts".split()
)
_POST_PROCESSORS: Final = frozenset(
    "TemplateProcessing ByteLevel BertProcessing RobertaProcessing".split()
)
_DECODERS: Final = frozenset(
    "ByteLevel Metaspace WordPiece BPEDecoder ByteFallback Fuse Strip".split()
)
_MODELS: Final = frozenset("BPE WordPiece Unigram WordLevel".split())
#: Bytes that all replacements of a tokenizer may make of one byte.
_GROWTH: Final = 8.0
#: Parts of a sequence, special tokens around a prompt, bytes of a prepended text.
_FEW: Final = 64
_WORD_CHARS: Final = 1_000


def unknown_part(tokenizer: Mapping[str, Any]) -> str | None:
    """The first part with which a text may cost more than its length, None without one.

    ``tokenizer``: the content of a ``tokenizer.json``. The decoder is not judged here.
    """
    return next(_unknown(tokenizer), None)


def unknown_decoder(tokenizer: Mapping[str, Any]) -> str | None:
    """As :func:`unknown_part`, of the decoder."""
    return next(_each(tokenizer.get("decoder"), "decoder", "decoders", _decoder), None)


def _unknown(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    growth = [1.0]

    def normalizer(part: Mapping[str, Any]) -> bool:
        if _type(part) == "Prepend":
            return _short(part.get("prepend"))
        if _type(part) != "Replace":
            return _type(part) in _NORMALIZERS
        old, new = _literal(part), part.get("content")
        if not old or not isinstance(new, str):
            return False
        growth[0] *= max(
            1.0, len(new.encode("utf-8", "replace")) / len(old.encode("utf-8", "replace"))
        )
        return growth[0] <= _GROWTH

    yield from _each(tokenizer.get("normalizer"), "normalizer", "normalizers", normalizer)
    yield from _each(
        tokenizer.get("pre_tokenizer"), "pre-tokenizer", "pretokenizers", _pre_tokenizer
    )
    yield from _each(
        tokenizer.get("post_processor"), "post-processor", "processors", _post_processor
    )
    plain = tokenizer.get("normalizer") is None
    rows = tokenizer.get("added_tokens")
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, Mapping) or not _added_token(row, plain=plain):
            yield f"added token {_content(row)!r} that takes white space with it"
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or not _model(model):
        yield f"model {_name(model)}"


def _each(
    part: Any, kind: str, inner: str, known: Callable[[Mapping[str, Any]], bool]
) -> Iterator[str]:
    """The unknown parts of a part, which may be a sequence."""
    if part is None:
        return
    if isinstance(part, Mapping) and _type(part) == "Sequence":
        parts = part.get(inner)
        if not isinstance(parts, list) or len(parts) > _FEW:
            yield f"{kind} Sequence of more than {_FEW} parts"
            return
        for part in parts:
            if isinstance(part, Mapping) and part.get("type") == "Sequence":
                yield f"{kind} Sequence inside a Sequence"
            else:
                yield from _each(part, kind, inner, known)
    elif not isinstance(part, Mapping) or not known(part):
        yield f"{kind} {_name(part)}"


def _pre_tokenizer(part: Mapping[str, Any]) -> bool:
    if _type(part) != "Split":
        return _type(part) in _PRE_TOKENIZERS
    pattern = part.get("pattern")
    return bool(_literal(part)) or (
        isinstance(pattern, Mapping) and str(pattern.get("Regex")) in PATTERNS
    )


def _post_processor(part: Mapping[str, Any]) -> bool:
    size = sum(len(rows) for rows in part.values() if isinstance(rows, list | dict))
    return _type(part) in _POST_PROCESSORS and size <= _FEW


def _added_token(row: Mapping[str, Any], *, plain: bool) -> bool:
    """Whether a token is found in a time that is proportional to the text.

    One that takes the white space around it reads all of that at each place. If it is white space
    itself, or a normalizer makes it so (``plain``: there is none), it has a place at each character
    of a run of spaces, and the whole takes the square of its length.
    """
    if not row.get("lstrip") and not row.get("rstrip"):
        return True
    content = _content(row)
    return bool(content) and content == content.strip() and (plain or not row.get("normalized"))


def _content(row: Any) -> str:
    content = row.get("content") if isinstance(row, Mapping) else None
    return content[:_FEW] if isinstance(content, str) else ""


def _decoder(part: Mapping[str, Any]) -> bool:
    if _type(part) != "Replace":
        return _type(part) in _DECODERS
    return bool(_literal(part)) and _short(part.get("content"))


def _model(model: Mapping[str, Any]) -> bool:
    # Files of older versions have no type.
    known = "type" not in model or _type(model) in _MODELS
    longest = model.get("max_input_chars_per_word", 0)
    return known and isinstance(longest, int) and longest <= _WORD_CHARS


def _type(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _literal(part: Mapping[str, Any]) -> str:
    pattern = part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    return text if isinstance(text, str) else ""


def _short(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _FEW


def _name(part: Any) -> str:
    if not isinstance(part, Mapping):
        return "of an unknown form"
    pattern = part.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    name = str(part.get("type", "without a type"))[:40]
    return f"{name} with the pattern {regex[:80]!r}" if isinstance(regex, str) else name
