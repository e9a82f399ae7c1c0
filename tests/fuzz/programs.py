"""Tokenizers and chat templates by grammar: ``python -m tests.fuzz.programs [--minutes N]``.

A tokenizer.json and a chat template are programs of others. Each case is made by a grammar, valid
and hostile, and runs in a process of its own with limits, as the unknown ones do in dynctl. A case
is a defect where

- a file or a chat raises anything else than an error of ``dynctl.tokenization``;
- a tokenizer whose parts are all known takes longer than `TEXT_MS` of CPU for a text of 4,000
  characters, which a frontend encodes on its event loop, or makes more tokens than its growth
  allows.

The same seed gives the same cases; ``--only KIND --case N`` prints one and runs it here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynctl.tokenization import RenderLimits, TokenizationError, load_tokenizer
from dynctl.tokenization.known_parts import PATTERNS, unknown_decoder, unknown_part
from dynctl.tokenization.template import CompiledTemplate

#: Milliseconds of CPU for 4,000 characters: the known patterns take 8, and a machine is busy.
TEXT_MS: Final = 100.0
_CHARS: Final = 4_000
#: Seconds of CPU and bytes of a case.
_CASE_S: Final = 4
_CASE_BYTES: Final = 2 << 30
_TEXTS: Final = (
    "word ", "7", " ", "\n", "\t \n", "'s", "e", "\xe9", "e\u0301", "\u6f22", "\U0001f600",
    "\u0130", "<|a|>", "\u2581", "A", "!?", "\x00", "\xa0", "\u0e33", "aB1 ",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What one case did. ``outcome``: a few words to count; ``defect``: what is wrong, if so."""

    outcome: str
    defect: str = ""


# -- tokenizers ------------------------------------------------------------------------------------


class TokenizerGrammar:
    """Contents of a tokenizer.json."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def content(self) -> dict[str, Any]:
        """A tokenizer with parts of any kind, most of them valid."""
        draw = self._draw
        made: dict[str, Any] = {
            "version": "1.0",
            "truncation": draw.choice((None, None, {"max_length": 4, "direction": "Left",
                                                    "strategy": "LongestFirst", "stride": 0})),
            "padding": None,
            "added_tokens": self._added(),
            "normalizer": self._part(self._normalizer, "normalizers"),
            "pre_tokenizer": self._part(self._pre_tokenizer, "pretokenizers"),
            "post_processor": self._part(self._post_processor, "processors"),
            "decoder": self._part(self._decoder, "decoders"),
            "model": self._model(),
        }  # fmt: skip
        if draw.random() < 0.08:
            made[draw.choice(tuple(made))] = draw.choice((7, "x", [], {}, {"type": "New"}))
        return made

    def _part(self, make: Callable[[], dict[str, Any]], inner: str) -> dict[str, Any] | None:
        draw = self._draw
        shape = draw.random()
        if shape < 0.25:
            return None
        if shape < 0.7:
            return make()
        count = draw.choice((0, 1, 2, 3, 6, 12))
        return {"type": "Sequence", inner: [make() for _ in range(count)]}

    def _text(self) -> str:
        draw = self._draw
        return draw.choice(_TEXTS) * draw.choice((1, 1, 2, 3, 10))

    def _pattern(self) -> dict[str, str]:
        draw = self._draw
        if draw.random() < 0.4:
            return {"String": draw.choice((self._text(), ""))}
        hostile = (r"(a+)+b", r"\d{1,3}(?=(?:\d{3})*\b)", r"(.*)*x", r"(?:(?=.).)*\z", "(", "",
                   "a*", r"(\w+\s?)+$", r"(?<!\w)(\w|\s)*", r"\p{L}+|\s+")  # fmt: skip
        return {"Regex": draw.choice((*sorted(PATTERNS), *hostile))}

    def _normalizer(self) -> dict[str, Any]:
        draw = self._draw
        kind = draw.choice(
            "NFC NFD NFKC NFKD Lowercase Strip StripAccents BertNormalizer Nmt ByteLevel Replace "
            "Replace Replace Prepend Precompiled".split()
        )
        more: dict[str, Any] = {}
        if kind == "Replace":
            more = {"pattern": self._pattern(), "content": self._text()}
        elif kind == "Prepend":
            more = {"prepend": self._text()}
        elif kind == "Strip":
            more = {"strip_left": draw.random() < 0.5, "strip_right": draw.random() < 0.5}
        elif kind == "BertNormalizer":
            names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
            more = {name: draw.random() < 0.5 for name in names}
        elif kind == "Precompiled":
            more = {"precompiled_charsmap": draw.choice(("", "AAAA////", "AAAAAA==", "!"))}
        return {"type": kind, **more}

    def _pre_tokenizer(self) -> dict[str, Any]:
        draw = self._draw
        kind = draw.choice(
            "ByteLevel Whitespace WhitespaceSplit BertPreTokenizer Metaspace Digits Punctuation "
            "CharDelimiterSplit UnicodeScripts FixedLength Split Split Split".split()
        )
        behavior = draw.choice(
            "Removed Isolated MergedWithPrevious MergedWithNext Contiguous".split()
        )
        more: dict[str, dict[str, Any]] = {
            "ByteLevel": {"add_prefix_space": draw.random() < 0.5, "trim_offsets": True,
                          "use_regex": draw.random() < 0.5},
            "Metaspace": {"replacement": draw.choice("\u2581_"), "split": draw.random() < 0.5,
                          "prepend_scheme": draw.choice(("always", "never", "first"))},
            "Digits": {"individual_digits": draw.random() < 0.5},
            "Punctuation": {"behavior": behavior},
            "CharDelimiterSplit": {"delimiter": draw.choice(" a7")},
            "FixedLength": {"length": draw.choice((0, 1, 5))},
            "Split": {"pattern": self._pattern(), "behavior": behavior,
                      "invert": draw.random() < 0.3},
        }  # fmt: skip
        return {"type": kind, **more.get(kind, {})}

    def _post_processor(self) -> dict[str, Any]:
        draw = self._draw
        if draw.random() < 0.4:
            return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
                    "use_regex": True}  # fmt: skip
        if draw.random() < 0.3:
            return {"type": "BertProcessing", "sep": ["a", 0], "cls": ["b", 1]}
        special = {"SpecialToken": {"id": "a", "type_id": 0}}
        count = draw.choice((0, 1, 3, 70))
        return {
            "type": "TemplateProcessing",
            "single": [*[special] * count, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"a": {"id": "a", "ids": [0] * draw.choice((1, 5, 70)),
                                     "tokens": ["a"]}},
        }  # fmt: skip

    def _decoder(self) -> dict[str, Any]:
        draw = self._draw
        kind = draw.choice(
            "ByteLevel Metaspace WordPiece BPEDecoder ByteFallback Fuse Strip Replace CTC".split()
        )
        more: dict[str, dict[str, Any]] = {
            "ByteLevel": {"add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "Metaspace": {"replacement": "\u2581", "prepend_scheme": "always", "split": True},
            "WordPiece": {"prefix": draw.choice(("##", "")), "cleanup": draw.random() < 0.5},
            "BPEDecoder": {"suffix": draw.choice(("</w>", ""))},
            "Strip": {"content": " ", "start": draw.choice((0, 1, 1000)), "stop": 0},
            "Replace": {"pattern": self._pattern(), "content": self._text()},
            "CTC": {"pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
        }
        return {"type": kind, **more.get(kind, {})}

    def _added(self) -> list[dict[str, Any]]:
        draw = self._draw
        names = ("normalized", "lstrip", "rstrip", "single_word", "special")
        return [
            {"id": 400 + at, "content": self._text(),
             **{name: draw.random() < 0.3 for name in names}}
            for at in range(draw.choice((0, 0, 1, 4, 40)))
        ]  # fmt: skip

    def _model(self) -> dict[str, Any]:
        draw = self._draw
        letters = [*map(chr, range(33, 127)), *"\u0120\u010a\u00c3\u00a9\u2581 "]
        vocabulary = {letter: at for at, letter in enumerate(dict.fromkeys(letters))}
        words = ("he", "ll", "hell", "hello", "##a", "a</w>", "\u0120w", "77", "777", "aa", "aaaa")
        for word in words:
            vocabulary.setdefault(word, len(vocabulary))
        kind = draw.choice(("BPE", "BPE", "BPE", "WordPiece", "Unigram", "WordLevel"))
        if kind == "BPE":
            merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["7", "7"], ["77", "7"], ["a", "a"],
                      ["aa", "aa"]]  # fmt: skip
            return {
                "type": kind, "vocab": vocabulary, "merges": merges[: draw.randrange(8)],
                "dropout": draw.choice((None, None, 0.5)), "unk_token": draw.choice((None, "a")),
                "continuing_subword_prefix": draw.choice((None, None, "##")),
                "end_of_word_suffix": draw.choice((None, None, "</w>")),
                "fuse_unk": draw.random() < 0.5, "byte_fallback": draw.random() < 0.3,
                "ignore_merges": draw.random() < 0.5,
            }  # fmt: skip
        if kind == "WordPiece":
            longest = draw.choice((1, 100, 1000, 1000, 10**9))
            return {
                "type": kind, "vocab": vocabulary, "unk_token": draw.choice(("a", "none")),
                "continuing_subword_prefix": "##", "max_input_chars_per_word": longest,
            }  # fmt: skip
        if kind == "Unigram":
            rows = [[word, -float(at)] for word, at in vocabulary.items()]
            return {"type": kind, "vocab": rows, "unk_id": draw.choice((0, None, 5000)),
                    "byte_fallback": draw.random() < 0.3}  # fmt: skip
        return {"type": kind, "vocab": vocabulary, "unk_token": draw.choice(("a", "none"))}


def tokenizer_of(seed: int) -> str:
    """The tokenizer.json of a case."""
    return json.dumps(TokenizerGrammar(seed).content())


def run_tokenizer(seed: int) -> Case:
    """Load and use the tokenizer of a case, in this process where its parts are all known."""
    source = tokenizer_of(seed)
    content = json.loads(source)
    decoder = unknown_decoder(content) is not None
    known = not decoder and unknown_part(content) is None
    if not known and not decoder and seed % 10:
        return Case("runs apart")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(source, encoding="utf-8")
        try:
            tokenizer = load_tokenizer(folder)
        except TokenizationError as error:
            return Case("refused: " + ("decoder" if decoder else type(error).__name__))
    choose = random.Random(seed)
    for _ in range(4):
        piece = choose.choice(_TEXTS) + choose.choice(("", choose.choice(_TEXTS)))
        text = (piece * _CHARS)[:_CHARS]
        began = time.process_time()
        try:
            ids = tokenizer.encode_prompt(text)
            tokenizer.decode(ids)
        except TokenizationError as error:
            if known and error.over_limit is not None:
                return Case("over", f"a known tokenizer exceeded a limit: {error}")
            continue
        taken = (time.process_time() - began) * 1000
        if known and taken > TEXT_MS:
            return Case("slow", f"{taken:.0f} ms for 4,000 times {piece!r}")
        if len(ids) > 40 * len(text) + 1024:
            return Case("long", f"{len(ids):,} tokens of {len(text):,} times {piece!r}")
    return Case("known" if known else "encoded apart")


# -- templates -------------------------------------------------------------------------------------

_FILTERS: Final = (
    "abs", "capitalize", "center(9)", "center(10 ** 9)", "count", "default('d')", "dictsort", "e",
    "escape", "first", "float", "format(1, 2)", "groupby('role')", "indent(4)", "indent(9999)",
    "int", "int(0, 16)", "items", "join(',')", "last", "length", "list", "lower", "map('upper')",
    "map(attribute='role')", "max", "min", "reject", "rejectattr('x')", "replace('a', 'bb')",
    "replace('', 'x')", "reverse", "round(3)", "safe", "select", "selectattr('role')", "sort",
    "sort(attribute='role')", "string", "sum", "title", "tojson", "tojson(indent=9)", "trim",
    "unique", "upper", "wordcount",
)  # fmt: skip
_REFUSED_FILTERS: Final = ("batch(2)", "urlize", "xmlattr", "slice(3)", "pprint", "attr('x')")
_METHODS: Final = (
    "upper()", "lower()", "strip()", "strip('abc')", "split()", "split('a')", "splitlines()",
    "replace('a', 'bcd')", "join(['a', 'b'])", "center(99)", "zfill(99)", "ljust(10 ** 7)",
    "expandtabs(999)", "format(1, x=2)", "count('a')", "find('b')", "title()", "casefold()",
    "partition('a')", "startswith('a')", "items()", "keys()", "get('role')", "index('a')",
    "encode()", "__class__", "copy()", "isalnum()", "removeprefix('a')", "translate({97: 'b'})",
)  # fmt: skip
_ATOMS: Final = (
    "messages", "messages[0]", "messages[0].content", "message", "message.content", "tools", "ns.x",
    "bos_token", "'a'", "'a b\\n'", "'%s %d'", "'%9999999d'", "'{:>9999999}'", "'{0}{1}'", "0", "1",
    "7", "-1", "1.5", "10 ** 9", "2 ** 4000", "[1, 2]", "{'a': 1}", "(1, 2)", "none", "true",
    "range(90000)", "range(9)", "loop.index", "loop", "nothing", "'a' * 4000000", "['a'] * 400000",
    "dict(a=1)", "namespace(x=1)", "strftime_now('%Y')", "cycler", "self", "1e308",
    "[messages, messages]",
)  # fmt: skip
_OPERATORS: Final = (
    "+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is not",
)  # fmt: skip


class TemplateGrammar:
    """Sources of chat templates."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def source(self) -> str:
        """A template; now and then cut, or with a character that does not belong there."""
        draw = self._draw
        made = "{% set ns = namespace(x='a') %}" + self._body(3)
        if draw.random() < 0.05:
            made = made[: draw.randrange(len(made))]
        if draw.random() < 0.05:
            at = draw.randrange(len(made))
            made = made[:at] + draw.choice("{}%'\"(\x00\ud800#-") + made[at:]
        return made

    def _body(self, depth: int) -> str:
        return "".join(self._statement(depth) for _ in range(self._draw.randint(1, 4)))

    def _statement(self, depth: int) -> str:
        draw = self._draw
        kind = draw.randrange(11) if depth else 0
        value = self._value(3)
        if kind <= 3:
            return "{{ " + value + " }}"
        inner = self._body(depth - 1)
        match kind:
            case 4 | 5:
                loop = draw.choice(("message in messages", f"v in {value}", "k, v in ns.x | items"))
                return "{% for " + loop + " %}" + inner + "{% endfor %}"
            case 6:
                return "{% if " + value + " %}" + inner + "{% else %}b{% endif %}"
            case 7:
                return "{% set ns.x = " + value + " %}" + inner
            case 8:
                again = draw.choice(("m(a)", "m(a ~ a)", "1"))
                return "{% macro m(a) %}" + inner + "{{ " + again + " }}{% endmacro %}{{ m('a') }}"
            case 9:
                return "{% set block %}" + inner + "{% endset %}{{ block ~ block }}"
            case _:
                double = draw.choice(("ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x]", "ns.x * 2"))
                turns = draw.choice(("9", "40", "90000"))
                return (
                    "{% for i in range(" + turns + ") %}{% set ns.x = " + double + " %}{% endfor %}"
                )

    def _value(self, depth: int) -> str:
        draw = self._draw
        kind = draw.randrange(8) if depth else 0
        if kind <= 1:
            return draw.choice(_ATOMS)
        left = self._value(depth - 1)
        match kind:
            case 2 | 3:
                names = _FILTERS if draw.random() < 0.99 else _REFUSED_FILTERS
                return f"({left}) | {draw.choice(names)}"
            case 4:
                return f"({left}).{draw.choice(_METHODS)}"
            case 5:
                return f"({left})[{draw.choice(('0', '-1', '1:', '::2', '::-1', 'ns.x', '0:9'))}]"
            case 6:
                test = draw.choice(("string", "mapping", "iterable", "defined", "none", "sequence"))
                return f"(1 if ({left}) is {test} else {self._value(depth - 1)})"
            case _:
                return f"({left}) {draw.choice(_OPERATORS)} ({self._value(depth - 1)})"


def template_of(seed: int) -> str:
    """The source of a case."""
    return TemplateGrammar(seed).source()


def run_template(seed: int) -> Case:
    """Compile and render the template of a case in the sandbox."""
    clock = time.process_time
    limits = RenderLimits(seconds=1.0)
    variables = {
        "messages": [
            {"role": "user", "content": "a b"},
            {"role": "assistant", "content": "a" * 5000},
        ],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "<s>",
    }
    try:
        template = CompiledTemplate(template_of(seed), origin="t", limits=limits, clock=clock)
    except TokenizationError:
        return Case("does not compile")
    try:
        template.run(variables)
    except TokenizationError as error:
        return Case(type(error).__name__ + (" by a limit" if error.over_limit else ""))
    return Case("rendered")


# -- cases -----------------------------------------------------------------------------------------

KINDS: Final[dict[str, Callable[[int], Case]]] = {
    "tokenizer": run_tokenizer,
    "template": run_template,
}


def isolated(run: Callable[[int], Case], seed: int) -> Case:
    """Run a case in a process of its own: a limit of the kernel is an outcome."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_CASE_BYTES, _CASE_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.setitimer(signal.ITIMER_PROF, _CASE_S)
            signal.alarm(60)
            try:
                case = run(seed)
            except MemoryError:
                case = Case("memory")
            except BaseException as error:
                case = Case("error", f"{type(error).__name__}: {str(error)[:300]}")
            os.write(writing, json.dumps([case.outcome, case.defect]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(process, 0)
    if answer:
        return Case(*json.loads(answer))
    return Case(f"ended by signal {os.WTERMSIG(status)}")


def fuzz(kind: str, seed: int, seconds: float, most: int = sys.maxsize) -> tuple[Counter[str], int]:
    """Run cases for a time; their outcomes, and the number of defects, which are printed."""
    outcomes: Counter[str] = Counter()
    defects = number = 0
    until = time.monotonic() + seconds
    while number < most and time.monotonic() < until:
        case = isolated(KINDS[kind], seed * 1_000_000 + number)
        outcomes[case.outcome] += 1
        # A tokenizer whose parts are known runs in the frontend: nothing may end it.
        ended = kind == "tokenizer" and case.outcome.startswith("ended")
        if case.defect or ended:
            defects += 1
            print(f"FAIL  {kind} {seed * 1_000_000 + number}: {case.defect or case.outcome}")
        number += 1
    return outcomes, defects


def main() -> int:
    """Returns 1 if a case is a defect."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.programs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=tuple(KINDS))
    parser.add_argument("--case", type=int, help="print one case, and run it in this process")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if given.case is not None:
        kind = given.only or "template"
        print(tokenizer_of(given.case) if kind == "tokenizer" else template_of(given.case))
        print(KINDS[kind](given.case))
        return 0
    failed = 0
    for kind in [given.only] if given.only else KINDS:
        outcomes, defects = fuzz(kind, given.seed, given.minutes * 60)
        failed += defects
        shown = ", ".join(f"{name} {count:,}" for name, count in outcomes.most_common())
        print(
            f"{kind}: {sum(outcomes.values()):,} cases with seed {given.seed}: {shown}", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
