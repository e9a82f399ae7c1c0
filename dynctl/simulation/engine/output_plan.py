"""OutputPlan: the generated text of an engine, determined by the prompt and the seed.

All engines of a fleet generate the same words for a prompt, so that a hand-off or a retry can be
checked token for token. The words encode to the streamed tokens again, so that the next turn of a
chat finds the previous answer in the cache, as with a real model.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Protocol

from xxhash import xxh3_64_intdigest

_TEXT = (
    "the a of and to in is it that for on with as by this from at or an be are was "
    "one two three all more time day way light water stone river north south east west "
    "small large new old good long first last high low open near far warm cold bright"
)
_WORDS = _TEXT.split()
_PAIR = Struct("<QQ")


class OutputEncoder(Protocol):
    """The methods of a tokenizer that generation uses."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class Vocabulary:
    """The words of the generated text with their token ids and the text each token adds."""

    def __init__(self, encoder: OutputEncoder) -> None:
        self._first = [_pieces(encoder, word, "") for word in _WORDS]
        self._later = [_pieces(encoder, word, " ") for word in _WORDS]

    def word(self, index: int, *, first: bool) -> list[tuple[int, str]]:
        words = self._first if first else self._later
        return words[index % len(words)]


class OutputPlan:
    """Token `i` of the answer and its text, generated on demand.

    The answer of a chat starts with a word; a completion (`follows_text`) starts with a blank.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        seed: int,
        *,
        follows_text: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._key = xxh3_64_intdigest(Struct(f"<{len(prompt)}I").pack(*prompt), seed)
        self._tokens: list[tuple[int, str]] = []
        self._words = 0
        self._follows_text = follows_text

    def __getitem__(self, index: int) -> tuple[int, str]:
        while index >= len(self._tokens):
            draw = xxh3_64_intdigest(_PAIR.pack(self._key, self._words))
            self._tokens += self._vocabulary.word(
                draw, first=not (self._words or self._follows_text)
            )
            self._words += 1
        return self._tokens[index]

    def token(self, index: int) -> int:
        return self[index][0]

    def text(self, index: int) -> str:
        return self[index][1]


def _pieces(encoder: OutputEncoder, word: str, lead: str) -> list[tuple[int, str]]:
    # A tokenizer may add special tokens or drop a leading blank, so the word is encoded after a
    # known word and cut out; the tokens before it are the same with and without the word.
    if lead:
        before, both = encoder.encode("the"), encoder.encode("the " + word)
        ids = both[len(before) :] if both[: len(before)] == before else encoder.encode(word)
    else:
        ids = encoder.encode(word)
    pieces: list[tuple[int, str]] = []
    text = lead + word
    done = 0
    for position, token in enumerate(ids):
        if position == len(ids) - 1:
            piece = text[done:]
        else:
            shown = encoder.decode(ids[: position + 1]).lstrip()
            end = len(lead) + len(shown) if text.startswith(lead + shown) else done
            piece, done = text[done:end], max(done, end)
        pieces.append((token, piece))
    return pieces or [(0, text)]
