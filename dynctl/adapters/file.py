"""Dynamo's file backend: ``ROOT/v1/BUCKET/NAME``, one file for each entry.

NAME is the rest of the key with every byte that is not a letter or a digit percent-encoded. The
content is the value. A publisher keeps its entry alive by touching the file; one whose mtime is
older than the time to live counts as deleted, and a Dynamo process deletes it later.
:class:`FileDiscovery` never changes a store, not even an mtime; :class:`FileRegistrar` changes only
the files of its own leases.
"""

import asyncio
import errno
import os
import secrets
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

from dynctl.adapters.ports import (
    BackendPort,
    Deleted,
    Discovery,
    DiscoveryChange,
    DiscoveryEntry,
    Interrupted,
    Listed,
    Put,
)
from dynctl.base.errors import Unreachable, UsageProblem, file_problem
from dynctl.base.options import GlobalOptions
from dynctl.base.tasks import end_tasks
from dynctl.settings.contexts.precedence import in_context
from dynctl.wire.dynamo.discovery import MAX_VALUE_BYTES, PREFIX

TTL_S: Final = 10.0
"""Dynamo's time to live."""
MAX_ENTRIES: Final = 100_000
MAX_BYTES: Final = 256 * 1024 * 1024
"""The sum of all values of one scan."""

_HINT: Final = "Set Dynamo's directory: --file-kv DIR or DYN_FILE_KV."
_GONE_ERRORS: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP})
_OUR_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that are not caused by the file."""


class FileDiscovery:
    """Follows a file store by polling it every ``poll_s`` seconds.

    ``ttl_s`` is Dynamo's time to live. The first scan measures it by the file system's clock
    against ``clock`` (seconds since the epoch), as there is nothing else. Later ones by
    ``monotonic``, from the change of a file's time on, so that a clock that is set ends no worker
    and keeps none. The files are read in a separate thread, because a shared disk may be slow.
    """

    def __init__(
        self,
        root: Path,
        ttl_s: float = TTL_S,
        *,
        poll_s: float = 0.5,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._ttl_s = ttl_s
        self._poll_s = poll_s
        self._clock = clock
        self._monotonic = monotonic
        self._thread: ThreadPoolExecutor | None = None
        self._closed = asyncio.Event()

    @property
    def title(self) -> str:
        return f"file {self._root}"

    async def list(self) -> Listed:
        """Raises Unreachable with the directory if it cannot be read."""
        try:
            return Listed((await self._scan(_Store())).put)
        except _Unreadable as error:
            raise Unreachable(str(error), _HINT) from error

    async def watch(self) -> AsyncGenerator[DiscoveryChange, None]:
        store: _Store | None = None
        interrupted = False
        while not self._closed.is_set():
            try:
                scan = await self._scan(store or _Store())
            except _Unreadable as error:
                store = None
                if not interrupted:
                    interrupted = True
                    yield Interrupted(str(error))
            else:
                if store is None:
                    interrupted = False
                    yield Listed(scan.put)
                else:
                    for key in scan.gone:
                        yield Deleted(key)
                    for entry in scan.put:
                        yield Put(entry)
                store = scan.store
            try:
                await asyncio.wait_for(self._closed.wait(), self._poll_s)
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Ends every watch, and the thread."""
        self._closed.set()
        if self._thread is not None:
            # Without waiting: a scan may hang on a dead network disk.
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _scan(self, store: "_Store") -> "_Found":
        if self._closed.is_set():
            raise _Unreadable("the reader of the file store is closed")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynctl-file-discovery")
        now = _Now(self._clock(), self._monotonic(), self._ttl_s)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _scan, self._root, store, now)


class FileRegistrar:
    """Registers in a file store; leases have random ids below 2**63.

    Files are touched every third of ``ttl_s``. A lease is lost when one of its files is missing:
    another process deletes what was not touched in time.
    """

    def __init__(self, root: Path, ttl_s: float = TTL_S) -> None:
        self._root = root
        self._ttl_s = ttl_s
        self._leases: set[FileLease] = set()

    @property
    def title(self) -> str:
        return f"file {self._root}"

    def create(self) -> None:
        """Make the store's directory, as Dynamo does. Raises Unreachable."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._root, error) from error

    async def grant(self, instance_id: int | None = None) -> "FileLease":
        await asyncio.to_thread(self.create)
        lease_id = instance_id or secrets.randbits(63) | 1
        lease = FileLease(lease_id, self._root, self._ttl_s, self._leases.discard)
        self._leases.add(lease)
        return lease

    async def close(self) -> None:
        await asyncio.gather(*(lease.close() for lease in self._leases))


class FileLease:
    """The files of one instance, with what keeps them alive."""

    def __init__(
        self, id: int, root: Path, ttl_s: float, ended: "Callable[[FileLease], None]"
    ) -> None:
        self.id = id
        self.lost = asyncio.Event()
        self.trouble = ""
        self._root = root
        self._pause_s = ttl_s / 3
        self._ended = ended
        self._paths: dict[str, Path] = {}
        self._turn = asyncio.Lock()
        self._closed = False
        self._keeping = asyncio.create_task(self._keep(), name="file-lease")

    async def put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{key}: {len(value):,} bytes are over {MAX_VALUE_BYTES:,}")
        path = self._root / file_of(key)
        async with self._turn:
            if self._closed or self.lost.is_set():
                raise Unreachable(f"the lease {self.id:x} in {self._root} ended")
            try:
                await asyncio.to_thread(_write, path, value)
            except OSError as error:
                raise _unwritable(path, error) from error
            self._paths[key] = path

    async def delete(self, key: str) -> None:
        async with self._turn:
            path = self._paths.pop(key, None)
            if path is not None:
                try:
                    await asyncio.to_thread(path.unlink, missing_ok=True)
                except OSError as error:
                    raise _unwritable(path, error) from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await end_tasks([self._keeping])
        async with self._turn:
            paths = list(self._paths.values())
            self._paths.clear()
            await asyncio.to_thread(_remove, paths)
        self._ended(self)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            async with self._turn:
                paths = list(self._paths.values())
                try:
                    await asyncio.to_thread(_touch, paths)
                except FileNotFoundError:
                    await asyncio.to_thread(_remove, paths)
                    self._paths.clear()
                    self.lost.set()
                    return
                except OSError as error:
                    self.trouble = _unwritable(self._root, error).message
                else:
                    self.trouble = ""


def file_of(key: str) -> Path:
    """The place of an entry below the store's directory."""
    version, bucket, rest = key.split("/", 2)
    name = "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"%{byte:02X}"
        for byte in rest.encode()
    )
    return Path(version, bucket, name)


def _write(path: Path, value: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp_{secrets.token_hex(8)}"
    try:
        temporary.write_bytes(value)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _touch(paths: list[Path]) -> None:
    for path in paths:
        os.utime(path)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _unwritable(path: Path, error: OSError) -> Unreachable:
    return Unreachable(f"cannot write {path}: {file_problem(error, writing=True)}", _HINT)


class _Unreadable(Exception):
    """The store as a whole cannot be read; the message has the directory."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The properties that identify an unchanged file, without its content.

    A keep-alive changes the mtime, so the digest decides whether the entry changed.
    """

    mtime_ns: int
    inode: int
    size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Store:
    """The result of a scan that the next one needs. Immutable, so that a scan whose task was
    cancelled loses nothing. ``kept``: path -> mtime, and since when it is the same, in monotonic
    seconds, without what had passed before the first scan."""

    seen: dict[str, _Seen] = field(default_factory=dict)
    kept: dict[str, tuple[int, float]] = field(default_factory=dict)


class _Now(NamedTuple):
    """The time of a scan, in seconds since the epoch and monotonic, and the time to live."""

    wall: float
    monotonic: float
    ttl_s: float

    def since(self, mtime: float, first: bool) -> float:
        """When a file with a new time was touched, in monotonic seconds."""
        # Of a file that is touched while it is followed the clock need not be right.
        return self.monotonic - (max(0.0, self.wall - mtime) if first else 0.0)


@dataclass(frozen=True, slots=True)
class _Found:
    store: _Store
    put: tuple[DiscoveryEntry, ...]
    """New or changed, oldest first."""
    gone: tuple[str, ...]


def _scan(root: Path, before: _Store, now: _Now) -> _Found:
    """Read new and changed entries since ``before``."""
    seen: dict[str, _Seen] = {}
    kept: dict[str, tuple[int, float]] = {}
    put: list[tuple[int, DiscoveryEntry]] = []
    read_bytes = 0
    for key, path, status in _files(root):
        mtime, since = before.kept.get(path, (None, 0.0))
        if mtime != status.st_mtime_ns:
            # A time in the future (a clock that runs ahead) is alive, as it is to Dynamo.
            since = now.since(status.st_mtime, first=mtime is None)
        kept[path] = (status.st_mtime_ns, since)
        if now.monotonic - since > now.ttl_s or key in seen:
            continue
        if len(seen) >= MAX_ENTRIES:
            raise _Unreadable(f"{root} has more than {MAX_ENTRIES:,} entries")
        known = before.seen.get(key)
        marks = (status.st_mtime_ns, status.st_ino, status.st_size)
        if known is not None and (known.mtime_ns, known.inode, known.size) == marks:
            seen[key] = known
            continue
        value = _read(path)
        if value is None:
            continue
        read_bytes += len(value)
        if read_bytes > MAX_BYTES:
            raise _Unreadable(f"{root} has more than {MAX_BYTES:,} bytes of entries")
        digest = blake2b(value, digest_size=16).digest()
        seen[key] = _Seen(*marks, digest)
        if known is None or known.digest != digest:
            put.append((status.st_mtime_ns, DiscoveryEntry(key, value)))
    put.sort(key=lambda found: found[0])
    gone = tuple(key for key in before.seen if key not in seen)
    return _Found(_Store(seen, kept), tuple(entry for _, entry in put), gone)


def _files(root: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Logical key, path and status of every file that can be an entry."""
    try:
        if not stat.S_ISDIR(root.stat().st_mode):
            raise _Unreadable(f"{root} is not a directory")
        os.scandir(root).close()
    except OSError as error:
        raise _Unreadable(
            f"cannot read the directory {root}: {file_problem(error, 'directory')}"
        ) from error
    version = root / PREFIX.rstrip("/")
    for bucket in _scandir(version):
        if not _is_hidden(bucket) and bucket.is_dir(follow_symlinks=False):
            for file in _scandir(version / bucket.name):
                if _is_hidden(file):
                    continue
                try:
                    status = file.stat(follow_symlinks=False)
                except OSError:
                    continue
                # Not a link to another place, nor a pipe that would block.
                if stat.S_ISREG(status.st_mode):
                    name = unquote(file.name, errors="backslashreplace")
                    yield f"{PREFIX}{bucket.name}/{name}", file.path, status


def _is_hidden(entry: os.DirEntry[str]) -> bool:
    """A ``.tmp_*`` file is an entry that is still being written."""
    return entry.name.startswith(".")


def _scandir(path: Path) -> list[os.DirEntry[str]]:
    """The entries, sorted so that two names of one key have a fixed order; empty if missing."""
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if error.errno in _GONE_ERRORS:
            return []
        raise _Unreadable(
            f"cannot read the directory {path}: {file_problem(error, 'directory')}"
        ) from error


def _read(path: str) -> bytes | None:
    """The content; None if the file was deleted meanwhile. A file without read permission gives an
    empty value, a too large one is cut just above the limit; the reader of entries reports both."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(MAX_VALUE_BYTES + 1)
    except OSError as error:
        if error.errno in _OUR_ERRORS:
            raise _Unreadable(f"cannot read {path}: {file_problem(error)}") from error
        return None if error.errno in _GONE_ERRORS else b""


def _open_registrar(options: GlobalOptions, discovery: Discovery) -> FileRegistrar:
    registrar = FileRegistrar(_file_root(options))
    registrar.create()
    return registrar


def _file_root(options: GlobalOptions) -> Path:
    directory = in_context(options).file_kv or os.environ.get("DYN_FILE_KV")
    if directory:
        return Path(directory)
    # Dynamo's own default is below the temporary directory, where every user can make it first.
    default = Path(tempfile.gettempdir()) / "dynamo_store_kv"
    _expect_own(default)
    return default


def _expect_own(directory: Path) -> None:
    """Raise UsageProblem for a directory of another user than this one and root."""
    try:
        owner = directory.lstat().st_uid
    except OSError:
        return
    if owner not in (os.getuid(), 0):
        raise UsageProblem(
            f"{directory}: belongs to user {owner}, who could register any worker; expected one of "
            f"user {os.getuid()}",
            f"to read it all the same: --file-kv {directory}",
        )


BACKEND: Final = BackendPort(lambda options: FileDiscovery(_file_root(options)), _open_registrar)
