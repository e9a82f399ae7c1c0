"""Feed a target with mutants, and keep what fails in the corpus."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from tests.fuzz.decoders import Target
from tests.fuzz.mutator import Message, Mutator

CORPUS: Final = Path(__file__).parent / "corpus"
"""Messages that failed once, by target: each is a seed, and `make test` reads all of them."""

LONGEST_ERROR: Final = 4096  # characters
MOST_CPU_S: Final = 5.0  # of one message: far above what any message of 64 KiB should take
_DIGITS: Final = re.compile(r"\d+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Defect(Exception):
    """A message that a decoder does not handle; ``message`` reproduces it."""

    def __init__(self, target: str, problem: str, message: Message) -> None:
        super().__init__(f"{target}: {problem}")
        self.message = message


@dataclass
class Result:
    """What a run saw: ``read`` messages without an error, ``refused`` with one of the target's."""

    read: int = 0
    refused: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def messages(self) -> int:
        return self.read + self.refused


def feed(target: Target, message: Message) -> str:
    """Read one message. Returns the error's outline, "" without one; raises Defect."""
    started = time.process_time()
    try:
        target.read(*message)
        outcome = ""
    except target.errors as error:
        text = str(error)
        outcome = f"{type(error).__name__} {_DIGITS.sub('0', text)[:60]}"
        if len(text) > LONGEST_ERROR:
            problem = f"the error has {len(text):,} characters: {text[:200]!r}"
            raise Defect(target.name, problem, message) from None
        if _CONTROL.search(text):
            problem = f"the error has control characters: {text[:200]!r}"
            raise Defect(target.name, problem, message) from None
    except TypeError as error:
        if "positional argument" in str(error):  # a message with more or fewer frames
            return "frames"
        raise Defect(target.name, f"TypeError: {error}", message) from error
    except Exception as error:
        raise Defect(target.name, f"{type(error).__name__}: {error}", message) from error
    taken = time.process_time() - started
    if taken > MOST_CPU_S:
        raise Defect(target.name, f"one message took {taken:.1f} s of CPU", message)
    return outcome


def run(target: Target, messages: int, seed: int) -> Result:
    """Feed ``messages`` mutants; raises Defect at the first that is not handled."""
    result = Result()
    mutator = Mutator([*target.seeds(), *corpus(target.name)], seed)
    choose = Random(seed)
    for _ in range(messages):
        written = target.grammar is not None and choose.random() < 0.5
        message = target.grammar(choose) if written and target.grammar else next(mutator)
        outcome = feed(target, message)
        if outcome:
            result.refused += 1
        else:
            result.read += 1
        if outcome not in result.outcomes:
            mutator.keep(message)
        result.outcomes[outcome] += 1
    return result


def corpus(name: str) -> Iterator[Message]:
    """The kept messages of a target, in a fixed order."""
    for path in sorted((CORPUS / name).glob("*.msgpack")):
        yield tuple(msgspec.msgpack.decode(path.read_bytes(), type=list[bytes]))


def save(name: str, message: Message) -> Path:
    """Add a message to the corpus of a target."""
    data = msgspec.msgpack.encode(list(message))
    path = CORPUS / name / f"{hashlib.sha256(data).hexdigest()[:16]}.msgpack"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
