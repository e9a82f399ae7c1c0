"""A tokenizer with unknown parts (:mod:`.known_parts`) in a process of its own, with limits.

The child loads ``tokenizer.json`` and encodes texts, one after the other. The kernel ends it when a
text takes more CPU or memory than its limits; the next text gets a new child. The child does not
see the environment of its parent, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import IO, Final

from dynctl.tokenization.errors import PromptError, TokenizerError, raise_unless_native

#: A message: its kind, and the number of bytes that follow.
_HEAD: Final = struct.Struct("<BI")
_LIMITS: Final = struct.Struct("<ddQQQ")
_LOAD, _PLAIN, _SPECIAL = range(3)
_DONE, _FAILED, _EXCEEDED = range(3)
_MOST_BYTES: Final = 1 << 30
#: How the child ends without memory; native code aborts then.
_NO_MEMORY: Final = 3
#: Waiting for a text is bounded too: by so many times the seconds of CPU that it may take.
_WALL: Final = 30.0
#: The child imports what its parent imports: -I ignores the working directory and PYTHONPATH.
_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from dynctl.tokenization.isolated import serve; serve()"
)


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a child. ``load_s`` and ``text_s``: seconds of CPU to load the tokenizer, and to
    encode one text. ``memory_bytes``: of its address space. A text makes at most
    ``tokens_per_byte`` tokens for each of its bytes, and ``few_tokens`` more."""

    load_s: float = 20.0
    text_s: float = 2.0
    memory_bytes: int = 3 << 30
    tokens_per_byte: int = 4
    few_tokens: int = 1024


class _Exceeded(Exception):
    """The child ended, or its answer is no answer: it exceeded a limit."""


class IsolatedEncoder:
    """Encodes as the package ``tokenizers`` does, in a child process. Thread-safe.

    ``origin`` names the file in errors, ``part`` is why it runs apart. The first child starts here:
    raises TokenizerError for a file that is not a tokenizer, or exceeds a limit.
    """

    name = "tokenizers in a process of its own"
    #: Every text waits for the child, so none belongs on an event loop.
    thread_chars = 0

    def __init__(
        self, tokenizer_json: str, origin: str, part: str, limits: ChildLimits | None = None
    ) -> None:
        self.part = part
        self._json = tokenizer_json.encode("utf-8", "surrogatepass")
        self._origin = origin
        self._limits = limits or ChildLimits()
        self._lock = threading.Lock()
        try:
            self._child: _Child | None = self._started()
        except _Exceeded as problem:
            raise TokenizerError(f"{origin} is refused ({part}): loading it {problem}") from None
        except ValueError as error:
            raise TokenizerError(f"{origin} is not a tokenizer: {error}") from None

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids; raises PromptError for a text that exceeds a limit, and ValueError."""
        data = text.encode()
        with self._lock:
            try:
                child = self._child or self._started()
                self._child = child
                ids = child.ask(_SPECIAL if add_special_tokens else _PLAIN, data)
            except _Exceeded as problem:
                self._child = None
                raise PromptError(
                    f"the prompt of {len(text):,} characters is refused: tokenizing it with the "
                    f"model's {self.part} {problem}",
                    field="prompt",
                ) from None
        return array("I", ids)

    def cache(self) -> Mapping[str, int]:
        return {}

    def _started(self) -> _Child:
        """A child that has loaded the tokenizer."""
        child = _Child(self._limits)
        child.ask(_LOAD, self._json)
        return child


class _Child:
    """One process. It ends with this object."""

    def __init__(self, limits: ChildLimits) -> None:
        self._limits = limits
        paths = [path or os.getcwd() for path in sys.path]
        process = subprocess.Popen(  # noqa: S603 - this Python and a constant program
            [sys.executable, "-I", "-c", _PROGRAM, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # traces of panics
            env={"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout
        self._end = weakref.finalize(self, _end, process)
        with contextlib.suppress(OSError):
            self._to.write(_LIMITS.pack(*astuple(limits)))

    def ask(self, kind: int, data: bytes) -> bytes:
        """The answer of the child. Raises ValueError with its reason, and _Exceeded."""
        try:
            self._to.write(_HEAD.pack(kind, len(data)) + data)
            self._to.flush()
            answer = _read(self._from)
        except OSError:
            answer = None
        if answer is None:
            raise _Exceeded(self._reason(kind))
        result, body = answer
        if result == _FAILED:
            raise ValueError(body.decode("utf-8", "replace"))
        if result == _EXCEEDED:
            self._end()
            raise _Exceeded(body.decode("utf-8", "replace"))
        return body

    def _reason(self, kind: int) -> str:
        """Why the child ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self._end()
        seconds = self._limits.load_s if kind == _LOAD else self._limits.text_s
        if code == -signal.SIGPROF:
            return f"takes more than {seconds:g} s of CPU"
        if code == -signal.SIGALRM:
            return f"takes more than {_WALL * seconds:g} s"
        if code in (_NO_MEMORY, -signal.SIGABRT):
            return f"takes more than {self._limits.memory_bytes >> 20:,} MiB of memory"
        return f"ended its process (code {code})"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait()


def _read(stream: IO[bytes]) -> tuple[int, bytes] | None:
    """Kind and body of the next message, None at the end."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack(head)
    if length > _MOST_BYTES:
        return None
    body = stream.read(length)
    return (kind, body) if len(body) == length else None


# -- in the child ------------------------------------------------------------------------------


def serve() -> None:
    """Answer the messages of the parent until it ends. Runs in a process of its own."""
    given = sys.stdin.buffer.read(_LIMITS.size)
    if len(given) < _LIMITS.size:
        return
    load_s, text_s, memory, per_byte, few = _LIMITS.unpack(given)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with contextlib.suppress(OSError):
        os.nice(5)
    tokenizer = None
    while (message := _read(sys.stdin.buffer)) is not None:
        kind, data = message
        # Counts the CPU time of all threads; the kernel's default for its signal ends the process.
        seconds = load_s if kind == _LOAD else text_s
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)
        try:
            if tokenizer is None:
                tokenizer = _Loaded(data)
                _answer(_DONE, b"")
                continue
            ids = tokenizer.encode(data, special=kind == _SPECIAL)
        except BaseException as error:
            raise_unless_native(error)
            if isinstance(error, MemoryError):
                sys.exit(_NO_MEMORY)
            text = f"{type(error).__name__}: {error}"[:300]
            _answer(_FAILED, text.encode("utf-8", "replace"))
            continue
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        most = per_byte * len(data) + few
        if len(ids) > most:
            text = f"makes {len(ids):,} tokens of {len(data):,} bytes, more than {most:,}"
            _answer(_EXCEEDED, text.encode())
        else:
            _answer(_DONE, ids.tobytes())


class _Loaded:
    """The tokenizer in the child."""

    def __init__(self, tokenizer_json: bytes) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8", "surrogatepass"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, data: bytes, *, special: bool) -> array[int]:
        encoding = self._tokenizer.encode(data.decode(), add_special_tokens=special)
        return array("I", encoding.ids)


def _answer(kind: int, body: bytes) -> None:
    sys.stdout.buffer.write(_HEAD.pack(kind, len(body)) + body)
    sys.stdout.buffer.flush()
