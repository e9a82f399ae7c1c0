"""Decode token ids to text incrementally, and stop where a request says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


#: The ids of a prompt's end that are decoded with the output: enough for any decoder's context.
_PROMPT_CONTEXT: Final = 5
#: Ids that may wait for the rest of a character. Dynamo has no bound; a worker that sends invalid
#: bytes for ever would cost it the square of their number.
_MOST_WAITING: Final = 1024


class DynamoDecoder:
    """Decodes one sequence incrementally, with the pieces that Dynamo 1.6 shows.

    A piece is shown when its text ends with a whole character, so invalid bytes wait for the next
    valid character, and appear before it as U+FFFD. ``prompt`` is the context of the first piece.
    """

    def __init__(
        self, decoder: Decoder, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        # The ids of the last piece, and those that were not shown yet.
        self._window = list(prompt[-_PROMPT_CONTEXT:])
        self._shown = len(self._window)
        self._before = decoder.decode(self._window, skip_special_tokens) if self._window else ""

    def step(self, token_id: int) -> str | None:
        """The text that this id completes, None if there is none yet."""
        window, before = self._window, self._before
        window.append(token_id)
        text = self._decoder.decode(window, self._skip)
        if text.endswith(_REPLACEMENT) and len(window) - self._shown < _MOST_WAITING:
            return None
        new = text[len(before) :] if text.startswith(before) else self._since(text)
        if not new:
            return None
        del window[: self._shown]  # as _show, which would be a call for each token
        self._shown = len(window)
        self._before = self._decoder.decode(window, self._skip)
        return new

    def flush(self) -> str:
        """What waits for the rest of a character, as U+FFFD."""
        if len(self._window) == self._shown:
            return ""
        new = self._since(self._decoder.decode(self._window, self._skip))
        self._show()
        return new

    def _since(self, text: str) -> str:
        if text.startswith(self._before):
            return text[len(self._before) :]
        # The prompt ended inside a character, so its text has changed: lengths count in bytes.
        return text.encode()[len(self._before.encode()) :].decode(errors="ignore")

    def _show(self) -> None:
        del self._window[: self._shown]
        self._shown = len(self._window)
        self._before = self._decoder.decode(self._window, self._skip)


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends an output, beside the engine.

    ``hidden_ids`` end it and are not part of its text; ``requested_ids`` are those of them that the
    request names. ``visible_ids`` are part of it. ``strings`` end it, and are part of the text with
    ``keep_string``. The first ``min_tokens`` tokens do not count.
    """

    strings: tuple[str, ...] = ()
    keep_string: bool = False
    hidden_ids: frozenset[int] = frozenset()
    requested_ids: frozenset[int] = frozenset()
    visible_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


class DecodedOutput(msgspec.Struct, gc=False):
    """The text of new ids. ``used``: how many of them count; the rest follows a stop.

    ``stopped``: a rule ended the output; ``cause`` is the string or id that the request named.
    ``hidden``: the last id that counts is not part of the text.
    """

    text: str
    used: int
    stopped: bool = False
    cause: str | int | None = None
    hidden: bool = False


class OutputDecoder:
    """The text of one choice, up to where its rules stop it, as Dynamo 1.6 shows it.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stream: DynamoDecoder, rules: StopRules) -> None:
        self._stream = stream
        self._rules = rules
        #: Ids that may end the output.
        self._stop_ids = rules.hidden_ids | rules.visible_ids
        self._tokens = 0
        self._longest = max(map(len, rules.strings), default=0)
        # The last characters, in which a stop string is looked for, and how many are held back.
        self._recent = ""
        self._held = 0

    def feed(self, token_ids: Sequence[int]) -> DecodedOutput:
        """Decode ids that follow the ones before, also after a stop."""
        text = ""
        if not self._rules.strings and self._stop_ids.isdisjoint(token_ids):
            # No rule can end it here, as in nearly all outputs.
            self._tokens += len(token_ids)
            for token_id in token_ids:
                text += self._stream.step(token_id) or ""
            return DecodedOutput(text, len(token_ids))
        for used, token_id in enumerate(token_ids, 1):
            piece, stopped, cause = self._step(token_id)
            text += piece
            if stopped:
                hidden = token_id in self._rules.hidden_ids and not isinstance(cause, str)
                return DecodedOutput(text + self._stream.flush(), used, True, cause, hidden)
        return DecodedOutput(text, len(token_ids))

    def flush(self) -> str:
        """What was held back, for an output that ends without a rule."""
        return self.release() + self._stream.flush()

    def release(self) -> str:
        """What was held back as the beginning of a stop string."""
        held = self._recent[len(self._recent) - self._held :]
        self._held = 0
        return held

    def _step(self, token_id: int) -> tuple[str, bool, str | int | None]:
        self._tokens += 1
        rules = self._rules
        counts = self._tokens > rules.min_tokens
        if counts and token_id in rules.hidden_ids and token_id not in rules.visible_ids:
            cause = token_id if token_id in rules.requested_ids else None
            return self.flush(), True, cause
        token = self._stream.step(token_id)
        if not counts:
            return token or "", False, None
        if token_id in rules.visible_ids:
            return self.release() + (token or ""), True, token_id
        if not rules.strings or token is None:
            return token or "", False, None
        return self._find_stop(token)

    def _find_stop(self, token: str) -> tuple[str, bool, str | None]:
        """What the text of a token releases, whether a stop string ends in it, and which."""
        rules = self._rules
        start = len(self._recent) - self._held
        recent = self._recent = self._recent + token
        for string in rules.strings:
            at = recent.find(string)
            if at >= 0:
                self._held = 0
                end = at + len(string) if rules.keep_string else at
                return recent[start:end], True, string
        self._held = 0 if rules.keep_string else self._begun()
        released = recent[start : len(recent) - self._held]
        self._recent = recent[-self._longest :]
        return released, False, None

    def _begun(self) -> int:
        """The length of the longest end of the text with which a stop string may begin."""
        recent = self._recent
        for length in range(min(self._longest - 1, len(recent)), 0, -1):
            end = recent[-length:]
            if any(
                string.startswith(end) and len(string) > length for string in self._rules.strings
            ):
                return length
        return 0
