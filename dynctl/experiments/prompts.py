"""Texts of canary requests: random, so that no cache has them, and of a known number of words."""

from __future__ import annotations

from random import Random
from typing import Final

#: Common words, each of which is one token in most vocabularies.
_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back"
).split()
#: The same for all canaries: a reader of a log sees who sent the request.
_FIRST: Final = "dynctl-test:"
#: After the random part, so that the answer is short whatever the words are.
_QUESTION: Final = "\nReply with one word."


class Prompts:
    """Random texts. ``seed``: the same texts again; they are in the caches of an earlier test."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def fresh(self, words: int) -> str:
        """A text of ``words`` random words, with which no earlier text starts."""
        return _sentence(self._random.choices(_WORDS, k=words))

    def branched(self, text: str, words: int) -> str:
        """A text that begins as ``text`` and goes on with ``words`` other ones."""
        more = " ".join(self._random.choices(_WORDS, k=words))
        return f"{text.removesuffix(_QUESTION)} {more}{_QUESTION}"

    def reordered(self, words: int, count: int) -> list[str]:
        """``count`` texts of the same words in another order: their tokens are equally many."""
        chosen = self._random.choices(_WORDS, k=words)
        return [_sentence(self._random.sample(chosen, k=words)) for _ in range(count)]

    def salt(self) -> str:
        """A random cache salt."""
        return f"dynctl-test-{self._random.getrandbits(64):016x}"


def _sentence(words: list[str]) -> str:
    return " ".join([_FIRST, *words]) + _QUESTION
