"""The API keys of clients: which ones are valid, and how much each may use.

Only digests are kept. A file of keys has one a line, then its name and limits where they differ
from the flags', for example::

    # for the batch jobs
    sk-4f0c.. name=batch requests-per-minute=600 concurrency=20
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynctl.base.errors import file_problem
from dynctl.base.files import read_file
from dynctl.serving.routing.refusal import HttpError

_log = logging.getLogger(__name__)

MOST_KEYS: Final = 100_000
_FILE_BYTES: Final = 16 << 20
_MOST: Final = 1_000_000
#: Shorter keys can be guessed.
SHORTEST_KEY: Final = 16
_LIMITS: Final = ("requests-per-minute", "concurrency")


class KeysError(ValueError):
    """A key or a file of keys that is invalid. The message never has a key."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; 0: none."""

    requests_per_minute: int = 0
    concurrency: int = 0


@dataclass(slots=True)
class ApiKey:
    """One valid key and what it uses now. ``credit``: requests that it may start at once."""

    name: str
    digest: bytes
    limits: KeyLimits
    credit: float = 0.0
    at: float = 0.0
    running: int = 0
    short: bool = False

    def become(self, key: ApiKey) -> None:
        """Take the name and the limits of ``key``, the same key in a changed file. What runs goes
        on to count, and a changed file is no new allowance."""
        self.name, self.limits = key.name, key.limits
        self.credit = min(self.credit, key.credit)


class ApiKeys:
    """The valid keys. ``given``: those of the command line; ``file``: read with :meth:`load`."""

    def __init__(
        self,
        given: Iterable[str] = (),
        file: Path | None = None,
        limits: KeyLimits | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._file = file
        self._loaded = False
        self._limits = limits or KeyLimits()
        self._clock = clock
        # A digest under a secret of this process: comparing it shows nothing about a key.
        self._secret = secrets.token_bytes(32)
        self._seen: tuple[int, ...] | None = None
        self._loaded = False
        self._given = self._keys((key, f"key {at}", self._limits) for at, key in _numbered(given))
        self._valid = dict(self._given)

    def __len__(self) -> int:
        return len(self._valid)

    @property
    def short_names(self) -> list[str]:
        """The names of the valid keys with fewer than `SHORTEST_KEY` characters."""
        return sorted(key.name for key in self._valid.values() if key.short)

    @property
    def required(self) -> bool:
        """Whether clients need a key. A file without keys admits no client."""
        return bool(self._given) or self._file is not None

    def find(self, offered: bytes) -> ApiKey | None:
        """The valid key that these bytes are."""
        digest = self._digest(offered)
        found = self._valid.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    @contextmanager
    def use(self, key: ApiKey) -> Iterator[None]:
        """One request of ``key``; raises HttpError 429 over one of its limits."""
        self._admit(key)
        key.running += 1
        try:
            yield
        finally:
            key.running -= 1

    def load(self) -> bool:
        """Read the file if it changed; whether it did. Raises KeysError, and keeps the old keys."""
        if self._file is None:
            return False
        try:
            stat = self._file.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return False
            self._seen = seen
            # The event loop must not wait for a pipe; before it runs, one may be read.
            text = read_file(self._file, _FILE_BYTES, pipe=not self._loaded)
        except OSError as error:
            self._seen = None
            raise KeysError(f"{self._file}: {file_problem(error)}") from None
        if len(text) > _FILE_BYTES:
            raise KeysError(f"{self._file}: larger than {_FILE_BYTES >> 20} MiB")
        if self._loaded:
            self._check_whole(text)
        read = self._keys(_lines(text, str(self._file), self._limits))
        for digest, key in read.items():
            old = self._valid.get(digest)
            if old is not None and digest not in self._given:
                # Running requests hold the old object and count down in it, so it stays.
                old.become(key)
                read[digest] = old
        self._valid = {**read, **self._given}
        self._loaded = True
        return True

    def _check_whole(self, text: bytes) -> None:
        """Raise KeysError for a file that another process may be writing: cut inside a line, the
        beginning of a key would be a valid key; cut at the first byte, no client would have one.
        """
        if not text:
            raise KeysError(
                f"{self._file}: empty; to admit no client, write a line with a comment (#)"
            )
        if not text.endswith((b"\n", b"\r")):
            raise KeysError(
                f"{self._file}: the last line has no line break, so it may be cut; add one"
            )

    async def watch(self, poll_s: float = 1.0) -> None:
        """Load the file again whenever it changes. A file with an error changes nothing."""
        problem = ""
        while True:
            await asyncio.sleep(poll_s)
            try:
                if self.load():
                    _log.info("keys of %s loaded again; valid keys: %d", self._file, len(self))
                    problem = ""
            except KeysError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("the keys stay as they are: %s", problem)

    # -- inside ----------------------------------------------------------------------------

    def _admit(self, key: ApiKey) -> None:
        limits = key.limits
        if limits.concurrency and key.running >= limits.concurrency:
            raise _over(f"{limits.concurrency} requests of this key are running, its maximum", 1)
        if not limits.requests_per_minute:
            return
        now, most = self._clock(), limits.requests_per_minute
        key.credit = min(most, key.credit + (now - key.at) * most / 60)
        key.at = now
        if key.credit < 1:
            wait = math.ceil((1 - key.credit) * 60 / most)
            raise _over(f"this key may start {most} requests per minute", wait)
        key.credit -= 1

    def _keys(self, rows: Iterable[tuple[str, str, KeyLimits]]) -> dict[bytes, ApiKey]:
        found: dict[bytes, ApiKey] = {}
        now = self._clock()
        for text, name, limits in rows:
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise KeysError(
                    f"{name}: expected printable ASCII without spaces; "
                    "make one with: openssl rand -hex 32"
                )
            digest = self._digest(text.encode())
            if digest in found:
                raise KeysError(f"{name}: the same key as {found[digest].name}")
            credit, short = float(limits.requests_per_minute), len(text) < SHORTEST_KEY
            found[digest] = ApiKey(name, digest, limits, credit, now, short=short)
            if len(found) > MOST_KEYS:
                raise KeysError(f"{name}: more than {MOST_KEYS:,} keys")
        return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def _numbered(given: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((at, key) for at, key in enumerate(given, 1))


def _lines(text: bytes, where: str, limits: KeyLimits) -> Iterator[tuple[str, str, KeyLimits]]:
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError as error:
        raise KeysError(f"{where}: not UTF-8 at byte {error.start}") from None
    for number, line in enumerate(lines, 1):
        key, *rest = line.split() or ("#",)
        if key.startswith("#"):
            continue
        at = f"{where} line {number}"
        fields = _fields(rest, at)
        yield (
            key,
            fields.get("name", at),
            KeyLimits(
                _limit(fields, "requests-per-minute", limits.requests_per_minute, at),
                _limit(fields, "concurrency", limits.concurrency, at),
            ),
        )


def _fields(words: list[str], at: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("name", *_LIMITS):
            # The word may be a part of a key, so it is not quoted.
            raise KeysError(f"{at}: after the key expected name=, {'= or '.join(_LIMITS)}=")
        found[name] = value
    return found


def _limit(fields: Mapping[str, str], name: str, default: int, at: str) -> int:
    text = fields.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and int(text) <= _MOST):
        raise KeysError(f"{at}: {name}: expected 0 to {_MOST}")
    return int(text)


def _over(problem: str, wait_s: int) -> HttpError:
    return HttpError(
        429, f"{problem}; try again in {wait_s} s", "rate_limit_error", "rate_limit_exceeded",
        headers={"retry-after": str(wait_s)},
    )  # fmt: skip
