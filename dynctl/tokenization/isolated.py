"""The parts of a model that are unknown, in a process of its own, with limits.

Unknown parts: a tokenizer with a part that :mod:`.known_parts` does not list, and a chat template
that :mod:`.known_templates` does not list. The child loads them, renders chats and encodes texts,
one after the other. The kernel ends it when a text takes more CPU or memory than its limits; the
next text gets a new child. The child does not see the environment of its parent, and ends with its
parent.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import IO, Any, Final

import msgspec

from dynctl.tokenization.budget import RenderLimits
from dynctl.tokenization.errors import (
    OverLimit,
    PromptError,
    PromptTooLongError,
    TemplateError,
    TokenizerError,
    raise_unless_native,
)
from dynctl.tokenization.template import CompiledTemplate, ContentShape

#: A message: its kind, and the number of bytes that follow.
_HEAD: Final = struct.Struct("<BI")
_LIMITS: Final = struct.Struct("<ddQQQ")
_LOAD, _PLAIN, _SPECIAL, _RENDER, _CHAT = range(5)
_DONE, _FAILED, _EXCEEDED, _REFUSED = range(4)
_MOST_BYTES: Final = 1 << 30
#: How the child ends without memory; native code aborts then.
_NO_MEMORY: Final = 3
#: Waiting for a text is bounded too: by so many times the seconds of CPU that it may take.
_WALL: Final = 30.0
#: Memory of a child without a tokenizer: four times what a render within its count can hold.
_TEMPLATE_BYTES: Final = 1 << 30
#: Characters of a reason that the child gives.
_REASON_CHARS: Final = 2_000
#: The child imports what its parent imports: -I ignores the working directory and PYTHONPATH.
_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from dynctl.tokenization.isolated import serve; serve()"
)
#: What a model must be able to read within the limits: all ASCII, digits, spaces and some scripts.
_SAMPLES: Final = (
    "",
    "".join(map(chr, range(9, 127))),
    "The quick brown fox jumps over the lazy dog. 1234567890 " * 4,
    "\u00c9t\u00e9 na\u00efve fa\u00e7ade \u6f22\u5b57 \U0001f600\n\tif x_1 >= 0x1F: return [3.14]",
)
_SAMPLE_CHAT: Final = {
    "messages": [{"role": "user", "content": "Hello."}],
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
}


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a child. ``load_s`` and ``text_s``: seconds of CPU to load the parts, and to render
    a chat or encode one text. ``memory_bytes``: of its address space. A text makes at most
    ``tokens_per_byte`` tokens for each of its bytes, and ``few_tokens`` more."""

    load_s: float = 20.0
    text_s: float = 2.0
    memory_bytes: int = 3 << 30
    tokens_per_byte: int = 4
    few_tokens: int = 1024


class UnknownTokenizer(msgspec.Struct, frozen=True):
    """A tokenizer that runs apart. ``content``: of its ``tokenizer.json``; ``origin`` names the
    file in errors; ``part`` is why it runs apart."""

    content: str
    origin: str
    part: str


class UnknownTemplate(msgspec.Struct, frozen=True):
    """A chat template that runs apart. ``origin`` names it in errors."""

    source: str
    origin: str


class UnknownParts(msgspec.Struct, frozen=True):
    """What one child runs. ``templates`` by name; ``output_chars``: of one rendered prompt."""

    tokenizer: UnknownTokenizer | None
    templates: dict[str, UnknownTemplate]
    output_chars: int


class _Loaded(msgspec.Struct, frozen=True):
    """What the child answers when its parts are loaded: shapes of templates by name."""

    shapes: dict[str, tuple[bool, bool]]


class _Refusal(msgspec.Struct, frozen=True):
    """Why the child did not render. ``template``: the name of the template that failed; None: the
    messages are refused. ``chars``: of a prompt that is too long; ``limit``: what was exceeded."""

    reason: str
    template: str | None = None
    chars: int | None = None
    limit: str | None = None


class _Exceeded(Exception):
    """The child ended, or its answer is no answer: it exceeded a limit."""


class _Refused(Exception):
    """The child did not render, for a reason of the template or of the messages."""

    def __init__(self, refusal: _Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class IsolatedParts:
    """The unknown parts of a model in a child process. Thread-safe.

    The first child starts here, loads the parts and reads some samples. ``shapes``: of the
    templates. Raises TokenizerError or TemplateError for parts that cannot be loaded, or that
    exceed a limit meanwhile.
    """

    def __init__(self, parts: UnknownParts, limits: ChildLimits | None = None) -> None:
        self._parts = parts
        small = parts.tokenizer is None
        self._limits = limits or ChildLimits(memory_bytes=_TEMPLATE_BYTES if small else 3 << 30)
        self._lock = threading.Lock()
        self._data = _wire(parts)
        self._child: _PartsProcess | None = None
        self.shapes: dict[str, ContentShape] = {}
        self._child = self._first()
        self._check()

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids; raises PromptError for a text that exceeds a limit, and ValueError."""
        data = text.encode()
        try:
            with self._running() as child:
                ids = child.ask(_SPECIAL if add_special_tokens else _PLAIN, data)
        except _Exceeded as problem:
            raise self._text_error(f"the prompt of {len(text):,} characters", problem) from None
        return array("I", ids)

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """The text of a chat. ``name``: of the template. Errors as of a template."""
        data = _chat_bytes(name, variables)
        try:
            with self._running() as child:
                return child.ask(_RENDER, data).decode("utf-8", "surrogatepass")
        except _Exceeded as problem:
            raise self._template_error(name, problem) from None
        except _Refused as problem:
            raise self._refusal(problem.refusal) from None

    def encode_chat(self, name: str, variables: Mapping[str, Any]) -> array[int]:
        """The token ids of a chat, in one exchange. Errors as :meth:`render`, :meth:`encode`."""
        data = _chat_bytes(name, variables)
        rendered = False
        try:
            with self._running() as child:
                child.ask(_CHAT, data)
                rendered = True
                ids = child.answer(_CHAT)
        except _Exceeded as problem:
            if rendered:
                raise self._text_error("the prompt", problem) from None
            raise self._template_error(name, problem) from None
        except _Refused as problem:
            raise self._refusal(problem.refusal) from None
        return array("I", ids)

    # -- inside ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(self) -> Iterator[_PartsProcess]:
        """The child, or a new one. It is given up where it exceeds a limit."""
        with self._lock:
            if self._child is None:
                self._child, _ = self._load_parts(_PartsProcess(self._limits))
            try:
                yield self._child
            except _Exceeded:
                self._child = None
                raise

    def _first(self) -> _PartsProcess:
        """The first child, with the errors of parts that cannot be loaded."""
        child = _PartsProcess(self._limits)
        try:
            _, loaded = self._load_parts(child)
        except _Exceeded as problem:
            if child.loads_templates:
                origin = next(iter(self._parts.templates.values())).origin
                raise TemplateError(origin, f"is refused: loading it {problem}") from None
            refused = f"is refused ({self._part}): loading it {problem}"
            raise self._tokenizer_error(refused) from None
        except _Refused as problem:
            raise self._refusal(problem.refusal) from None
        except ValueError as error:
            raise self._tokenizer_error(f"is not a tokenizer: {error}") from None
        self.shapes = {name: ContentShape(*shape) for name, shape in loaded.shapes.items()}
        return child

    def _load_parts(self, child: _PartsProcess) -> tuple[_PartsProcess, _Loaded]:
        """The child when it has loaded the parts, and its answer."""
        child.ask(_LOAD, self._data)
        child.loads_templates = True
        return child, msgspec.json.decode(child.answer(_LOAD), type=_Loaded)

    def _check(self) -> None:
        """Read the samples: a model that cannot do that within the limits is refused."""
        if self._parts.tokenizer is not None:
            for text in _SAMPLES:
                try:
                    self.encode(text, add_special_tokens=True)
                except PromptError as error:
                    limit = "" if error.over_limit is None else error.over_limit.limit
                    raise self._tokenizer_error(
                        f"is refused: of a text of the check, {limit}"
                    ) from None
                except ValueError:
                    continue  # a broken model fails for each request that needs this
        for name in self._parts.templates:
            try:
                self.render(name, _SAMPLE_CHAT)
            except TemplateError as error:
                if error.over_limit is not None:
                    limit = error.over_limit.limit
                    raise TemplateError(
                        error.origin, f"is refused: of a chat of one word, {limit}"
                    ) from None
            except PromptError:
                continue  # it wants other messages

    @property
    def _part(self) -> str:
        return "" if self._parts.tokenizer is None else self._parts.tokenizer.part

    def _tokenizer_error(self, problem: str) -> TokenizerError:
        tokenizer = self._parts.tokenizer
        origin = "the process of the chat template" if tokenizer is None else tokenizer.origin
        return TokenizerError(f"{origin} {problem}")

    def _text_error(self, text: str, problem: _Exceeded) -> PromptError:
        tokenizer = self._parts.tokenizer
        assert tokenizer is not None
        error = PromptError(
            f"{text} is refused: tokenizing it with the model's {tokenizer.part} {problem}",
            field="prompt",
        )
        limit = f"tokenizing with its {tokenizer.part} {problem}"
        error.over_limit = OverLimit(tokenizer.origin, limit)
        return error

    def _template_error(self, name: str, problem: _Exceeded) -> TemplateError:
        origin = self._parts.templates[name].origin
        error = TemplateError(origin, f"stopped, rendering these messages {problem}")
        error.over_limit = OverLimit(origin, f"rendering a chat {problem}")
        return error

    def _refusal(self, refusal: _Refusal) -> PromptError | TemplateError:
        if refusal.chars is not None:
            return PromptTooLongError(refusal.chars, self._parts.output_chars)
        if refusal.template is None:
            return PromptError(refusal.reason)
        origin = self._parts.templates[refusal.template].origin
        error = TemplateError(origin, refusal.reason)
        if refusal.limit is not None:
            error.over_limit = OverLimit(origin, refusal.limit)
        return error


class IsolatedEncoder:
    """The tokenizer of :class:`IsolatedParts`, as the package ``tokenizers`` encodes."""

    name = "tokenizers in a process of its own"
    #: Every text waits for the child, so none belongs on an event loop.
    thread_chars = 0

    def __init__(self, parts: IsolatedParts) -> None:
        self.encode = parts.encode

    def cache(self) -> Mapping[str, int]:
        return {}


class IsolatedTemplate:
    """A template of :class:`IsolatedParts`, as :class:`.template.TemplateProgram`."""

    #: Every render waits for the child.
    heavy = True

    def __init__(self, parts: IsolatedParts, name: str) -> None:
        self.shape = parts.shapes[name]
        self.run = partial(parts.render, name)
        self.encode_chat = partial(parts.encode_chat, name)


def _wire(parts: UnknownParts) -> bytes:
    """The parts as bytes: half characters in files are possible, which JSON cannot have."""
    return marshal.dumps(msgspec.to_builtins(parts))


def _chat_bytes(name: str, variables: Mapping[str, Any]) -> bytes:
    try:
        return marshal.dumps((name, dict(variables)))
    except ValueError:
        raise PromptError(
            "the messages are nested too deeply, or have values that JSON cannot have"
        ) from None


class _PartsProcess:
    """One process. It ends with this object. ``loads_templates``: it has loaded the tokenizer."""

    def __init__(self, limits: ChildLimits) -> None:
        self.loads_templates = False
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
        """The answer of the child. Raises ValueError with its reason, _Refused and _Exceeded."""
        # A child that ended is seen by the missing answer.
        with contextlib.suppress(OSError):
            self._to.write(_HEAD.pack(kind, len(data)) + data)
            self._to.flush()
        return self.answer(kind)

    def answer(self, kind: int) -> bytes:
        """The next answer of the child to a message of a kind. Errors as :meth:`ask`."""
        try:
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
        if result == _REFUSED:
            raise _Refused(msgspec.json.decode(body, type=_Refusal))
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
    served: _ServedParts | None = None
    while (message := _read(sys.stdin.buffer)) is not None:
        kind, data = message
        with _cpu_limit(load_s if kind == _LOAD else text_s):
            try:
                if served is None:
                    served = _load(data, load_s, per_byte, few)
                    continue
                text = served.text_of(kind, data)
            except BaseException as error:
                _answer(*_failure(error))
                continue
        if kind == _RENDER:
            _answer(_DONE, text.encode("utf-8", "surrogatepass"))
            continue
        if kind == _CHAT:
            _answer(_DONE, b"")
        with _cpu_limit(text_s):
            try:
                answer = served.encode_text(text, special=kind == _SPECIAL)
            except BaseException as error:
                answer = _failure(error)
        _answer(*answer)


def _load(data: bytes, seconds: float, per_byte: int, few: int) -> _ServedParts:
    """The parts, with an answer for the tokenizer and one for the templates."""
    served = _ServedParts(data, per_byte, few)
    _answer(_DONE, b"")
    with _cpu_limit(seconds):
        shapes = served.compile_templates()
    _answer(_DONE, msgspec.json.encode(_Loaded(shapes)))
    return served


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end this process after so many seconds of CPU."""
    # Counts the CPU time of all threads; the kernel's default for its signal ends the process.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _failure(error: BaseException) -> tuple[int, bytes]:
    """The answer for an error of the parts. Ends the process where memory ran out."""
    raise_unless_native(error)
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
        sys.exit(_NO_MEMORY)
    if isinstance(error, PromptTooLongError):
        refusal = _Refusal("", chars=error.chars)
    elif isinstance(error, PromptError):
        refusal = _Refusal(_short_reason(error))
    elif isinstance(error, TemplateError):
        over = error.over_limit
        limit = None if over is None else over.limit
        refusal = _Refusal(error.reason[:_REASON_CHARS], template=error.origin, limit=limit)
    else:
        text = f"{type(error).__name__}: {error}"[:300]
        return _FAILED, text.encode("utf-8", "replace")
    return _REFUSED, msgspec.json.encode(refusal)


def _short_reason(error: BaseException) -> str:
    """The text of an error, without half characters."""
    return str(error)[:_REASON_CHARS].encode("utf-8", "replace").decode()


class _ServedParts:
    """The parts in the child."""

    def __init__(self, data: bytes, per_byte: int, few: int) -> None:
        parts = msgspec.convert(marshal.loads(data), UnknownParts)  # noqa: S302 - of the parent
        self._per_byte, self._few = per_byte, few
        self._tokenizer = None
        if parts.tokenizer is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(parts.tokenizer.content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self._parts = parts
        self._templates: dict[str, CompiledTemplate] = {}

    def compile_templates(self) -> dict[str, tuple[bool, bool]]:
        """Compile the templates; their shapes by name."""
        limits = RenderLimits(output_chars=self._parts.output_chars)
        # The name is the origin of errors here; the parent has the file.
        self._templates = {
            name: CompiledTemplate(
                # CPU time: on a busy machine the child waits, and that is not the template's work.
                template.source,
                origin=name,
                limits=limits,
                clock=time.process_time,
            )
            for name, template in self._parts.templates.items()
        }
        return {name: (*template.shape,) for name, template in self._templates.items()}

    def text_of(self, kind: int, data: bytes) -> str:
        """The text of a message: what it has, or the rendered chat."""
        if kind in (_PLAIN, _SPECIAL):
            return data.decode()
        name, variables = marshal.loads(data)  # noqa: S302 - of the parent
        return self._templates[name].run(variables)

    def encode_text(self, text: str, *, special: bool) -> tuple[int, bytes]:
        """The answer with the token ids of a text."""
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        size = len(text.encode())
        most = self._per_byte * size + self._few
        if len(ids) > most:
            problem = f"makes {len(ids):,} tokens of {size:,} bytes, more than {most:,}"
            return _EXCEEDED, problem.encode()
        return _DONE, array("I", ids).tobytes()


def _answer(kind: int, body: bytes) -> None:
    sys.stdout.buffer.write(_HEAD.pack(kind, len(body)) + body)
    sys.stdout.buffer.flush()
