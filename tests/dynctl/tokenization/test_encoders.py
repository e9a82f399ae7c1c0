"""Faster encoders give the ids of the reference, or are not used."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from dynctl.tokenization import DEMO_MODEL_DIR, PromptError, TokenizerError, load_tokenizer
from dynctl.tokenization import encoders as module
from dynctl.tokenization.encoders import (
    FastEncoder,
    ReferenceEncoder,
    SegmentEncoder,
    atomic_tokens,
    cache_directory,
    difference,
    faster,
    sample_texts,
)

ROOT = Path(__file__).parents[3]
#: How families of models cut a text into words before the merges.
SHAPES = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen-2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def byte_level(pattern: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return trained(made, pre_tokenizers.ByteLevel.alphabet())


def sentence_pieces() -> Tokenizer:
    """As Llama 2: spaces are letters, and a text begins with one."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Metaspace()
    return trained(made, ["\u2581"])


def trained(made: Tokenizer, alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "routing").iterdir())]
    made.train_from_iterator((page.read_text() for page in pages), trainer)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return made


@pytest.fixture(scope="module", params=[*SHAPES, "sentence pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    pattern = SHAPES.get(request.param)
    return sentence_pieces() if pattern is None else byte_level(pattern)


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
    return byte_level(SHAPES["qwen-2"])


def segmented(tokenizer: Tokenizer, **options: int) -> SegmentEncoder:
    text = tokenizer.to_str()
    return SegmentEncoder(ReferenceEncoder(tokenizer), atomic_tokens(text), **options)


def test_every_faster_encoder_gives_the_ids_of_the_reference(tokenizer: Tokenizer):
    text, reference = tokenizer.to_str(), ReferenceEncoder(tokenizer)
    found, reasons = faster(text, reference, "auto")
    assert found is not None
    if "Prepend" in text:
        assert found.name == SegmentEncoder.name
        assert len(reasons) == 1
        assert reasons[0].startswith("fastokens does not support this tokenizer")
    else:
        assert (found.name, reasons) == ("fastokens", [])
    assert not difference(segmented(tokenizer), reference, sample_texts(text, reference))


TEXTS = st.lists(
    st.one_of(st.text(max_size=20), st.sampled_from([*SPECIAL, *module._ODD, "<|im", "|>", "Hi "])),
    max_size=12,
).map("".join)


@given(texts=st.lists(TEXTS, max_size=4))
def test_any_text_has_the_same_ids(chatml: Tokenizer, texts: list[str]):
    reference = ReferenceEncoder(chatml)
    encoders = (FastEncoder(chatml.to_str()), segmented(chatml, cache_bytes=4_000))
    for encoder in encoders:
        for text in [*texts, *texts]:
            for special in (False, True):
                expected = reference.encode(text, add_special_tokens=special)
                assert encoder.encode(text, add_special_tokens=special) == expected


def test_an_encoder_with_other_ids_is_not_used(chatml: Tokenizer, monkeypatch):
    class Wrong(FastEncoder):
        def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
            ids = super().encode(text, add_special_tokens=add_special_tokens)
            return ids[:-1] if "\u3000" in text else ids

    monkeypatch.setattr(module, "FastEncoder", Wrong)
    reference = ReferenceEncoder(chatml)
    found, reasons = faster(chatml.to_str(), reference, "auto")
    assert found is not None
    assert found.name == SegmentEncoder.name
    assert reasons[0].startswith("fastokens: other ids for ")
    assert faster(chatml.to_str(), reference, "fast")[0] is None


def test_the_result_of_a_check_is_kept_by_checksum(tmp_path, monkeypatch, chatml: Tokenizer):
    kept = tmp_path / "new" / "tokenizers"
    text, reference = chatml.to_str(), ReferenceEncoder(chatml)
    checks: list[str] = []

    def counted(encoder: module.Encoder, *rest: object) -> str:
        checks.append(encoder.name)
        return "made up" if len(checks) == 1 else ""

    monkeypatch.setattr(module, "difference", counted)
    assert faster(text, reference, "fast", cache=kept) == (None, ["fastokens: made up"])
    assert faster(text, reference, "fast", cache=kept) == (None, ["fastokens: made up"])
    assert checks == ["fastokens"]
    assert len(list(kept.iterdir())) == 1
    for broken in (b"", b"[]", b'{"difference": 1}', b"\xff"):
        next(kept.iterdir()).write_bytes(broken)
        assert faster(text, reference, "fast", cache=kept)[0] is not None
    assert len(checks) == 5
    other = json.loads(text)
    other["added_tokens"][-1]["content"] = "<|other|>"
    assert faster(json.dumps(other), reference, "fast", cache=kept)[0] is not None
    assert len(list(kept.iterdir())) == 2


def test_a_result_that_cannot_be_kept_is_found_again(tmp_path, chatml: Tokenizer):
    blocked = tmp_path / "file"
    blocked.write_text("")
    found, _ = faster(chatml.to_str(), ReferenceEncoder(chatml), "fast", cache=blocked / "below")
    assert found is not None


def test_where_results_are_kept():
    assert cache_directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/dynctl/tokenizers")
    assert cache_directory({"HOME": "/h"}) == Path("/h/.cache/dynctl/tokenizers")
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) is None
    assert cache_directory({}) is None


def test_a_text_is_cut_only_at_tokens_that_no_other_token_changes():
    rows = [
        {"id": 1, "content": "<|a|>", "special": True},
        {"id": 2, "content": "<b>", "special": False},
        {"id": 3, "content": "<c>", "special": True, "lstrip": True},
        {"id": 4, "content": "<d>", "special": True, "normalized": True},
        {"id": 5, "content": "inner", "special": True},
        {"id": 6, "content": "<inner>", "special": True},
        {"id": 7, "content": "[xy", "special": True},
        {"id": 8, "content": "yz]", "special": True},
        {"id": 9, "content": "##", "special": True},
        {"id": 10, "content": "<|e|>", "special": True},
        {"id": 11, "content": "<" + "f" * 100 + ">", "special": True},
    ]
    assert atomic_tokens(json.dumps({"added_tokens": rows})) == {"<|a|>": 1, "<|e|>": 10}
    assert atomic_tokens("{}") == {}


def test_the_cache_of_segments_is_bounded_and_used(chatml: Tokenizer):
    encoder = segmented(chatml, cache_bytes=20_000)
    turn = "<|im_start|>the same words<|im_end|>"
    expected = ReferenceEncoder(chatml).encode(turn, add_special_tokens=False)
    for _ in range(3):
        assert encoder.encode(turn, add_special_tokens=False) == expected
    assert encoder.cache()["hits"] == 2
    for number in range(300):
        encoder.encode(f"<|im_start|>{number} words<|im_end|>{turn}", add_special_tokens=False)
        assert encoder.cache()["bytes"] <= 20_000
    assert encoder.cache()["misses"] == 301
    huge = "words " * 10_000
    encoder.encode(f"<|im_start|>{huge}", add_special_tokens=False)
    assert encoder.cache()["bytes"] <= 20_000


def test_a_model_serves_with_the_chosen_encoder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load_tokenizer(DEMO_MODEL_DIR)
    expected = model.encode("Hello <|im_end|> world")
    choices: tuple[tuple[module.Choice, str], ...] = (
        ("exact", "tokenizers"),
        ("auto", "fastokens"),
        ("fast", "fastokens"),
    )
    for choice, name in choices:
        model = load_tokenizer(DEMO_MODEL_DIR)
        assert model.speed_up(choice) == []
        assert model.encoder.name == name
        assert model.encode("Hello <|im_end|> world") == expected
        with pytest.raises(PromptError, match="expected Unicode text"):
            model.encode("lone \ud800")


def test_a_fast_tokenizer_that_is_not_there_is_an_error_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sentence_pieces().save(str(tmp_path / "tokenizer.json"))
    model = load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"fastokens does not support .*--tokenizer auto"):
        model.speed_up("fast")
    assert len(model.speed_up("auto")) == 1
    assert model.encoder.name == SegmentEncoder.name


def test_what_a_faster_encoder_refuses_is_for_the_reference(monkeypatch):
    class Broken(FastEncoder):
        def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
            raise RuntimeError("match limit")

    model = load_tokenizer(DEMO_MODEL_DIR)
    expected = model.encode("Hello")
    model.encoder = Broken((DEMO_MODEL_DIR / "tokenizer.json").read_text())
    assert model.encode("Hello") == expected
