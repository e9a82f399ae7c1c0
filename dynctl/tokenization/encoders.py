"""Text to token ids: the reference encoder, and faster ones that give the same ids.

The reference is the package ``tokenizers``, which engines use. Two others are faster: ``fastokens``
(for byte-level tokenizers), and the reference with a cache of text between special tokens. One of
these is used only after it gave the reference's ids for all texts of `sample_texts`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from tokenizers import Tokenizer

from dynctl.tokenization.errors import raise_unless_native

#: Which encoder serves: the fastest that is proved equal, fastokens or none, the reference.
Choice = Literal["auto", "fast", "exact"]

#: Bytes that the cache of one model's segments may hold.
CACHE_BYTES: Final = 64 * 1024 * 1024
#: Bytes of a cached segment beside its text and its ids: two objects and their place in a dict.
_ENTRY_BYTES: Final = 200
# The reference's encode_batch_fast skips offsets, which are not used here: 1.4 times as fast at
# 400,000 characters, slower below a few thousand.
_FAST_CHARS: Final = 4_000

#: A text is cut at special tokens of at most this length.
_CUT_CHARS: Final = 64
#: Counts changes of `sample_texts`, so that results of an older check do not count.
_CHECK: Final = 1
_SHORT_TEXTS: Final = 3_000
_LONG_TEXTS: Final = 8
#: Unicode that tokenizers treat in special ways: kinds of space and line ends, controls, marks,
#: joiners, direction, case, widths, numerals, scripts without spaces, private and last code points.
_ODD: Final = (
    " ", "\t", "\n", "\r", "\x0b", "\x0c", "\x00", "\x01", "\x1b", "\x7f", "\x85", "\xa0",
    "\xad", "\u1680", "\u2000", "\u2003", "\u2009", "\u200a", "\u200b", "\u200c", "\u200d",
    "\u2028", "\u2029", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff", "\r\n", "\n\n",
    "\n \n", "   ", "\t\t", " \n", "\r\r\n", "  \xa0 ", "\n\u3000", "'s", "'S", "\u2019s", "'ll",
    "'LL", "'\u0130", "'re", "don't", "I'M", "'\u017f", "e\u0301", "\xe9", "n\u0303", "\u0345",
    "a\u0300\u0301\u0302", "\u212b", "\u1e9b\u0323", "\xdf", "\u0130", "\u0131", "\u01c5",
    "\ufb01", "\u03a3\u03c2", "\u10d0", "\u1c90", "\uab70", "0", "007", "12345678", "1,234.5",
    "\u0663", "\u0967", "\xbd", "\u2167", "\u3007", "\xb2", "\u4e2d\u6587", "\u65e5\u672c\u8a9e",
    "\ud55c\uad6d", "\u1112\u1161\u11ab", "\u0e44\u0e17\u0e22", "\uff21\uff10\uff0c",
    "\u0639\u0631\u0628\u064a", "\u05e2\u05d1", "\u202e", "\u200f", "\u0939\u093f\u0928\u094d",
    "\u1019\u103c", "\u0f56\u0f7c", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1ee\U0001f1f3", "\u2764\ufe0f", "\U0001f44d\U0001f3fd", "\U0001d400", "\ue000",
    "\ufffd", "\ufffe", "\U0010ffff", "\u0600", "\u2581", "\u0120", "\u010a", "_", "__init__",
    "a_b", "->", "!=", "://", "...", "```", "<|", "|>", "</", "[/INST]", "\\n", "\"",
)  # fmt: skip


class Encoder(Protocol):
    """One way to token ids."""

    @property
    def name(self) -> str:
        """What logs call it."""

    @property
    def thread_chars(self) -> int:
        """Characters of a text above which encoding takes so long (a millisecond) that it does not
        belong on an event loop."""

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids as an ``array("I")``. Any exception: the text cannot be encoded."""

    def cache(self) -> Mapping[str, int]:
        """``bytes``, ``hits`` and ``misses`` of its cache; empty without one."""


class ReferenceEncoder:
    """The ``tokenizers`` package."""

    name = "tokenizers"
    thread_chars = 4_000

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        if len(text) < _FAST_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return array("I", encoding.ids)

    def cache(self) -> Mapping[str, int]:
        return {}


class FastEncoder:
    """The ``fastokens`` package. Raises ImportError without it, ValueError for a tokenizer that it
    does not support."""

    name = "fastokens"
    thread_chars = 100_000

    def __init__(self, tokenizer_json: str, cache_bytes: int = CACHE_BYTES) -> None:
        # The package itself patches other libraries on request; only its native part is used.
        from fastokens._native import (  # type: ignore[import-untyped]
            Tokenizer as Native,
        )

        self._tokenizer = Native.from_json_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.enable_segment_cache(cache_bytes)

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        ids = array("I")
        flat, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens)
        ids.frombytes(flat)
        if sys.byteorder != "little":
            ids.byteswap()
        return ids

    def cache(self) -> Mapping[str, int]:
        stats = self._tokenizer.segment_cache_stats() or {}
        return {name: stats.get(name, 0) for name in ("bytes", "hits", "misses")}


class SegmentEncoder:
    """The reference, with a bounded cache of the text between special tokens.

    Tokenizers cut a text at special tokens first and encode each part alone, so that parts of
    earlier chats need not be encoded again. Cut only at tokens whose place no other token changes
    (see `atomic_tokens`). Thread-safe.
    """

    name = "tokenizers with a segment cache"
    thread_chars = 8_000

    def __init__(
        self, reference: ReferenceEncoder, atomic: Mapping[str, int], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._reference = reference
        self._special = {text: array("I", [id]).tobytes() for text, id in atomic.items()}
        by_length = sorted(atomic, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, by_length))})").split
        # Two generations: a hit in the older one is copied to the recent one, and a full recent one
        # becomes the older one. So each may hold half of the bytes.
        self._most = cache_bytes // 2
        self._recent: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}
        self._recent_bytes = self._older_bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        parts = self._cut(text)
        if add_special_tokens or len(parts) == 1:
            return self._reference.encode(text, add_special_tokens=add_special_tokens)
        ids = array("I")
        special = self._special
        ids.frombytes(b"".join([special.get(part) or self._part(part) for part in parts if part]))
        return ids

    def _part(self, text: str) -> bytes:
        ids = self._recent.get(text)
        if ids is not None:
            self._hits += 1
            return ids
        ids = self._older.get(text)
        if ids is None:
            self._misses += 1
            ids = self._reference.encode(text, add_special_tokens=False).tobytes()
        else:
            self._hits += 1
        size = _ENTRY_BYTES + sys.getsizeof(text) + len(ids)
        if size <= self._most // 8:
            with self._lock:
                if self._recent_bytes + size > self._most:
                    self._older, self._older_bytes = self._recent, self._recent_bytes
                    self._recent, self._recent_bytes = {}, 0
                self._recent[text] = ids
                self._recent_bytes += size
        return ids

    def cache(self) -> Mapping[str, int]:
        size = self._recent_bytes + self._older_bytes
        return {"bytes": size, "hits": self._hits, "misses": self._misses}


def atomic_tokens(tokenizer_json: str) -> dict[str, int]:
    """Added tokens at which a text may be cut before it is encoded: text -> id.

    They are special, are matched before normalization, take no white space with them, and neither
    contain nor overlap another added token.
    """
    added = json.loads(tokenizer_json).get("added_tokens") or []
    rows = [row for row in added if isinstance(row, dict) and row.get("content")]
    texts = {str(row["content"])[: _CUT_CHARS + 1] for row in rows}
    begins = set().union(*map(_beginnings, texts))
    ends = set().union(*map(_endings, texts))
    together = "\0".join(texts)
    atomic = {}
    for row in filter(_is_plain_special, rows):
        text = str(row["content"])
        overlaps = _endings(text) & begins or _beginnings(text) & ends
        if together.count(text) == 1 and not _parts(text) & texts and not overlaps:
            atomic[text] = int(row["id"])
    return atomic


def _is_plain_special(row: Mapping[str, Any]) -> bool:
    """Whether an added token is special, short, and matched as it is written."""
    changes = any(row.get(key) for key in ("normalized", "lstrip", "rstrip", "single_word"))
    return bool(row.get("special")) and not changes and len(row["content"]) <= _CUT_CHARS


def _beginnings(text: str) -> set[str]:
    return {text[:n] for n in range(1, len(text))}


def _endings(text: str) -> set[str]:
    return {text[-n:] for n in range(1, len(text))}


def _parts(text: str) -> set[str]:
    """All proper parts of a text."""
    size = len(text)
    return {text[i:j] for i in range(size) for j in range(i + 1, size + 1)} - {text}


def faster(
    tokenizer_json: str,
    reference: ReferenceEncoder,
    choice: Choice,
    *,
    cache: Path | None = None,
) -> tuple[Encoder | None, list[str]]:
    """The fastest encoder that gives the reference's ids, None if none does; and why faster ones
    are not used.

    ``choice`` "fast": fastokens only. ``cache``: a directory that keeps results of checks, each by
    the checksum of the tokenizer and the versions of the packages.
    """
    reasons: list[str] = []
    candidates: list[Encoder] = []
    if choice == "exact":
        return None, reasons
    try:
        candidates.append(FastEncoder(tokenizer_json))
    except ImportError:
        reasons.append("the package fastokens is not installed")
    except BaseException as error:  # the Rust side raises plain exceptions, or panics
        raise_unless_native(error)
        reasons.append(f"fastokens does not support this tokenizer: {_brief(error)}")
    if choice == "auto" and (atomic := atomic_tokens(tokenizer_json)):
        candidates.append(SegmentEncoder(reference, atomic))
    for encoder in candidates:
        key = _key(tokenizer_json, encoder.name)
        reason = _kept_result(cache, key)
        if reason is None:
            try:
                texts = sample_texts(tokenizer_json, reference)
                reason = difference(encoder, reference, texts)
            except BaseException as error:  # the texts are decoded by the tokenizer too
                raise_unless_native(error)
                reason = f"the check failed: {_brief(error)}"
            _keep(cache, key, reason)
        if not reason:
            # The first text compiles the pattern that cuts words, which takes 10 ms.
            encoder.encode("The first text.", add_special_tokens=False)
            return encoder, reasons
        reasons.append(f"{encoder.name}: {reason}")
    return None, reasons


def difference(encoder: Encoder, reference: Encoder, texts: Iterable[str]) -> str:
    """Where two encoders differ on these texts; empty if they do not."""
    count = different = 0
    for text in texts:
        for special in (False, True) if count % 4 == 0 else (False,):
            try:
                ids = encoder.encode(text, add_special_tokens=special)
                expected = reference.encode(text, add_special_tokens=special)
            except BaseException as error:
                raise_unless_native(error)
                return f"fails on a text of the check: {_brief(error)}"
            if ids != expected:
                different += 1
        count += 1
    return f"other ids for {different} of {count} texts of the check" if different else ""


def sample_texts(
    tokenizer_json: str,
    reference: ReferenceEncoder,
    *,
    seed: int = _CHECK,
    count: int = _SHORT_TEXTS,
) -> Iterator[str]:
    """Texts for the comparison of encoders, the same for the same tokenizer and ``seed``: runs of
    the model's own vocabulary, added tokens and odd Unicode; ``count`` short ones and some long."""
    draw = random.Random(seed)
    tokenizer = reference._tokenizer
    size = max(1, tokenizer.get_vocab_size())
    added = [
        str(row["content"])
        for row in json.loads(tokenizer_json).get("added_tokens") or []
        if isinstance(row, dict) and row.get("content")
    ]

    def piece() -> str:
        kind = draw.random()
        if kind < 0.62:
            ids = [draw.randrange(size) for _ in range(draw.randint(1, 4))]
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        if kind < 0.88 or not added:
            return str(draw.choice(_ODD))
        if kind < 0.94:
            return draw.choice(added)
        return chr(draw.randrange(0x2FFFF)).encode("utf-8", "ignore").decode("utf-8")

    yield ""
    yield from _ODD
    yield from added[:500]
    for _ in range(count):
        yield draw.choice(("", " ", "")).join(piece() for _ in range(draw.randint(1, 12)))
    for _ in range(_LONG_TEXTS):
        yield "".join(piece() for _ in range(1_000))


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where results of checks are kept: below ``XDG_CACHE_HOME``, else ``~/.cache``."""
    base = environ.get("XDG_CACHE_HOME") or (
        os.path.join(environ["HOME"], ".cache") if environ.get("HOME") else ""
    )
    return Path(base) / "dynctl" / "tokenizers" if os.path.isabs(base) else None


def _key(tokenizer_json: str, name: str) -> str:
    parts: list[Any] = [_CHECK, name, _version("fastokens"), _version("tokenizers")]
    digest = hashlib.sha256(json.dumps(parts).encode())
    digest.update(tokenizer_json.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _kept_result(directory: Path | None, key: str) -> str | None:
    """The kept result of a check, None without one."""
    if directory is None:
        return None
    try:
        kept = json.loads((directory / key).read_bytes()[:4096])
    except (OSError, ValueError):
        return None
    reason = kept.get("difference") if isinstance(kept, dict) else None
    return reason if isinstance(reason, str) else None


def _keep(directory: Path | None, key: str, reason: str) -> None:
    """Keep a result; where that is impossible, the next start checks again."""
    if directory is None:
        return
    part = directory / f".{key}.{os.getpid()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(json.dumps({"difference": reason}), encoding="utf-8")
        part.replace(directory / key)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
