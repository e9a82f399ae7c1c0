"""The API keys of clients: which ones are valid, how much each may use, and what it may do.

Only digests are kept. A file of keys has one a line, then its name, limits and rights where they
differ from the flags', for example::

    # for the batch jobs
    sk-4f0c.. name=batch requests-per-minute=600 concurrency=20
    sk-77e1.. name=acme isolate=yes details=no
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynctl.base.errors import file_problem
from dynctl.base.files import read_file
from dynctl.serving.routing.refusal import HttpError
from dynctl.wire.directions import DIRECTIONS

_log = logging.getLogger(__name__)

MOST_KEYS: Final = 100_000
_FILE_BYTES: Final = 16 << 20
_MOST: Final = 1_000_000
#: Shorter keys can be guessed.
SHORTEST_KEY: Final = 16
_LIMITS: Final = ("requests-per-minute", "concurrency")
_RIGHTS: Final = ("isolate", "details", "client-fields")
_YES_NO: Final = {"yes": True, "no": False}
#: Bytes of a cache salt, which is in hexadecimal: engines limit characters (vLLM: 128).
_SALT_BYTES: Final = 16


class KeysError(ValueError):
    """A key or a file of keys that is invalid. The message never has a key."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; 0: none."""

    requests_per_minute: int = 0
    concurrency: int = 0


@dataclass(frozen=True, slots=True)
class ClientRights:
    """What a client may do and see.

    ``fields``: the fields of `dynctl.wire.directions.DIRECTIONS` that it may send. ``isolated``:
    its prompts share cached blocks with those of no other key. ``details``: its answers may show
    workers, queue, and what was cached.
    """

    fields: frozenset[str] = frozenset()
    isolated: bool = False
    details: bool = True


@dataclass(slots=True)
class ApiKey:
    """One valid key and what it uses now. ``credit``: requests that it may start at once.
    ``secret``: derived from the key; the same in every process and after each start."""

    name: str
    digest: bytes
    secret: bytes = field(repr=False)
    limits: KeyLimits
    rights: ClientRights
    credit: float = 0.0
    at: float = 0.0
    running: int = 0
    short: bool = False

    def become(self, key: ApiKey) -> None:
        """Take name, limits and rights of ``key``, the same key in a changed file. What runs goes
        on to count, and a changed file is no new allowance."""
        self.name, self.limits, self.rights = key.name, key.limits, key.rights
        self.credit = min(self.credit, key.credit)

    def cache_salt(self, own: str | None) -> str:
        """The salt that keeps the cached blocks of this key apart; ``own``: the one that its client
        sent, which keeps them apart from each other."""
        text = (own or "").encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self.secret, digest_size=_SALT_BYTES).hexdigest()


class ApiKeys:
    """The valid keys. ``given``: those of the command line; ``file``: read with :meth:`load`."""

    def __init__(
        self,
        given: Iterable[str] = (),
        file: Path | None = None,
        limits: KeyLimits | None = None,
        rights: ClientRights | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._file = file
        self._loaded = False
        self._limits = limits or KeyLimits()
        self._rights = rights or ClientRights()
        self._clock = clock
        # A digest under a secret of this process: comparing it shows nothing about a key.
        self._secret = secrets.token_bytes(32)
        self._seen: tuple[int, ...] | None = None
        self._loaded = False
        self._given = self._keys(
            (key, f"key {at}", self._limits, self._rights) for at, key in _number_keys(given)
        )
        self._valid = dict(self._given)

    def __len__(self) -> int:
        return len(self._valid)

    @property
    def short_names(self) -> list[str]:
        """The names of the valid keys with fewer than `SHORTEST_KEY` characters."""
        return sorted(key.name for key in self._valid.values() if key.short)

    @property
    def isolated(self) -> int:
        """Valid keys that share cached blocks with no other key."""
        return sum(key.rights.isolated for key in self._valid.values())

    @property
    def required(self) -> bool:
        """Whether clients need a key. A file without keys admits no client."""
        return bool(self._given) or self._file is not None

    def find(self, offered: bytes) -> ApiKey | None:
        """The valid key that these bytes are."""
        digest = self._digest(offered)
        known = self._valid.get(digest)
        return known if known is not None and hmac.compare_digest(known.digest, digest) else None

    def use(self, key: ApiKey) -> AbstractContextManager[None]:
        """One request of ``key``; entering raises HttpError 429 over one of its limits."""
        return _Use(self, key)

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
        read = self._keys(_lines(text, str(self._file), self._limits, self._rights))
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

    def admit(self, key: ApiKey) -> None:
        """Count a request that begins; raises HttpError 429 over one of the key's limits."""
        limits = key.limits
        if limits.concurrency and key.running >= limits.concurrency:
            raise _over_limit(
                f"{limits.concurrency} requests of this key are running, its maximum", 1
            )
        if not limits.requests_per_minute:
            return
        now, most = self._clock(), limits.requests_per_minute
        key.credit = min(most, key.credit + (now - key.at) * most / 60)
        key.at = now
        if key.credit < 1:
            wait = math.ceil((1 - key.credit) * 60 / most)
            raise _over_limit(f"this key may start {most} requests per minute", wait)
        key.credit -= 1

    # -- inside ----------------------------------------------------------------------------

    def _keys(
        self, rows: Iterable[tuple[str, str, KeyLimits, ClientRights]]
    ) -> dict[bytes, ApiKey]:
        keys: dict[bytes, ApiKey] = {}
        now = self._clock()
        for text, name, limits, rights in rows:
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise KeysError(
                    f"{name}: expected printable ASCII without spaces; "
                    "make one with: openssl rand -hex 32"
                )
            digest = self._digest(text.encode())
            if digest in keys:
                raise KeysError(f"{name}: the same key as {keys[digest].name}")
            credit, short = float(limits.requests_per_minute), len(text) < SHORTEST_KEY
            keys[digest] = ApiKey(
                name, digest, _secret(text), limits, rights, credit, now, short=short
            )
            if len(keys) > MOST_KEYS:
                raise KeysError(f"{name}: more than {MOST_KEYS:,} keys")
        return keys

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


class _Use:
    """See :meth:`ApiKeys.use`. It is entered for each request: a generator costs twice as much."""

    __slots__ = ("_key", "_keys")

    def __init__(self, keys: ApiKeys, key: ApiKey) -> None:
        self._keys = keys
        self._key = key

    def __enter__(self) -> None:
        limits = self._key.limits
        if limits.concurrency or limits.requests_per_minute:
            self._keys.admit(self._key)
        self._key.running += 1

    def __exit__(self, *_: object) -> None:
        self._key.running -= 1


def _number_keys(given: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((at, key) for at, key in enumerate(given, 1))


def _secret(key: str) -> bytes:
    """What cache salts of a key are derived from. It shows nothing about a key that is random."""
    return hashlib.blake2b(key.encode(), digest_size=32, person=b"dynctl salt").digest()


def _lines(
    text: bytes, where: str, limits: KeyLimits, rights: ClientRights
) -> Iterator[tuple[str, str, KeyLimits, ClientRights]]:
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
            ClientRights(
                _client_fields(fields, rights.fields, at),
                _yes(fields, "isolate", rights.isolated, at),
                _yes(fields, "details", rights.details, at),
            ),
        )


def _fields(words: list[str], at: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("name", *_LIMITS, *_RIGHTS):
            # The word may be a part of a key, so it is not quoted.
            known = "=, ".join(("name", *_LIMITS, *_RIGHTS))
            raise KeysError(f"{at}: after the key expected {known}=")
        fields[name] = value
    return fields


def _limit(fields: Mapping[str, str], name: str, default: int, at: str) -> int:
    text = fields.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and int(text) <= _MOST):
        raise KeysError(f"{at}: {name}: expected 0 to {_MOST}")
    return int(text)


def _yes(fields: Mapping[str, str], name: str, default: bool, at: str) -> bool:
    text = fields.get(name)
    if text is None:
        return default
    if text not in _YES_NO:
        raise KeysError(f"{at}: {name}: expected yes or no")
    return _YES_NO[text]


def _client_fields(fields: Mapping[str, str], default: frozenset[str], at: str) -> frozenset[str]:
    text = fields.get("client-fields")
    if text is None:
        return default
    named = frozenset(filter(None, text.split(",")))
    if not named <= DIRECTIONS.keys():
        # As in the message above, what is in the line is not quoted.
        raise KeysError(
            f"{at}: client-fields: expected names with commas, of {', '.join(DIRECTIONS)}"
        )
    return named


def _over_limit(problem: str, wait_s: int) -> HttpError:
    return HttpError(
        429, f"{problem}; try again in {wait_s} s", "rate_limit_error", "rate_limit_exceeded",
        headers={"retry-after": str(wait_s)},
    )  # fmt: skip
