"""Tokenizers whose parts are unknown run in a process of their own, within limits."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization import DEMO_MODEL_DIR, PromptError, TokenizerError, load_tokenizer
from dynctl.tokenization.isolated import ChildLimits, IsolatedEncoder
from dynctl.tokenization.known_parts import PATTERNS, unknown_decoder, unknown_part
from tests.waiting import until_now

PLAIN = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())
#: Groups digits from the right: it takes the square of their number.
FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(inner: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", inner: list(parts)}


def with_parts(**parts: Any) -> str:
    return json.dumps({**PLAIN, **parts})


def directory(tmp_path: Path, **parts: Any) -> Path:
    made = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    (made / "tokenizer.json").write_text(with_parts(**parts))
    return made


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WITH_DIGITS = sequence("pretokenizers", split(FROM_THE_RIGHT), BYTES)


@pytest.mark.parametrize(
    ("parts", "unknown"),
    [
        ({}, None),
        ({"normalizer": sequence("normalizers", {"type": "NFC"}, replace(" ", "\u2581"))}, None),
        ({"normalizer": replace("e", "e" * 8)}, None),
        ({"normalizer": replace("e", "e" * 9)}, "normalizer Replace"),
        ({"normalizer": sequence("normalizers", *[replace("e", "ee")] * 4)}, "normalizer Replace"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a*"}, "content": ""}},
         "normalizer Replace with the pattern 'a*'"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "x"}},
         "normalizer Precompiled"),
        ({"normalizer": {"type": "New"}}, "normalizer New"),
        ({"normalizer": 7}, "normalizer of an unknown form"),
        ({"pre_tokenizer": sequence("pretokenizers", *map(split, sorted(PATTERNS)))}, None),
        ({"pre_tokenizer": WITH_DIGITS},
         f"pre-tokenizer Split with the pattern {FROM_THE_RIGHT!r}"),
        ({"pre_tokenizer": sequence("pretokenizers", sequence("pretokenizers"))},
         "pre-tokenizer Sequence inside a Sequence"),
        ({"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 65)},
         "pre-tokenizer Sequence of more than 64 parts"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [{}] * 65}},
         "post-processor TemplateProcessing"),
        ({"model": {"type": "New"}}, "model New"),
        ({"model": None}, "model of an unknown form"),
    ],
)  # fmt: skip
def test_each_part_is_judged(parts: dict[str, Any], unknown: str | None) -> None:
    assert unknown_part({**PLAIN, **parts}) == unknown
    assert unknown_decoder({**PLAIN, **parts}) is None


@given(
    st.dictionaries(
        st.sampled_from(["normalizer", "pre_tokenizer", "post_processor", "decoder", "model"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["type", "pattern", "content", "normalizers", "String"]), inner
                )
            ),
        ),
    )
)
def test_any_file_is_judged(parts: dict[str, Any]) -> None:
    for found in (unknown_part(parts), unknown_decoder(parts)):
        assert found is None or found


@pytest.fixture(scope="module")
def isolated() -> IsolatedEncoder:
    limits = ChildLimits(text_s=0.3, memory_bytes=1 << 30)
    return IsolatedEncoder(with_parts(pre_tokenizer=WITH_DIGITS), "t.json", "pattern", limits)


@given(text=st.text(max_size=60), special=st.booleans())
def test_the_child_gives_the_same_ids(isolated: IsolatedEncoder, text: str, special: bool) -> None:
    from tokenizers import Tokenizer

    try:
        text.encode()
    except UnicodeEncodeError:
        return
    here = Tokenizer.from_str(with_parts(pre_tokenizer=WITH_DIGITS))
    expected = here.encode(text, add_special_tokens=special).ids
    assert isolated.encode(text, add_special_tokens=special).tolist() == expected


def test_a_text_that_takes_long_is_refused_and_the_next_one_is_not(
    isolated: IsolatedEncoder,
) -> None:
    before = isolated.encode("1234567", add_special_tokens=False)
    with pytest.raises(PromptError, match=r"95,000 characters is refused: .* 0\.3 s of CPU"):
        isolated.encode("7" * 95_000, add_special_tokens=False)
    assert isolated.encode("1234567", add_special_tokens=False) == before


def test_a_child_that_ends_in_another_way_is_not_called_a_limit(isolated: IsolatedEncoder) -> None:
    before = isolated.encode("1234567", add_special_tokens=False)
    assert isolated._child is not None
    isolated._child._process.kill()
    with pytest.raises(PromptError, match=r"ended its process \(code -9\)"):
        isolated.encode("1234567", add_special_tokens=False)
    assert isolated.encode("1234567", add_special_tokens=False) == before


def test_ten_characters_of_one_ten_times_over_end_the_child_alone() -> None:
    bomb = sequence("normalizers", *[replace("e", "e" * 10)] * 10)
    limits = ChildLimits(memory_bytes=1 << 30)
    encoder = IsolatedEncoder(with_parts(normalizer=bomb), "t.json", "normalizer", limits)
    assert encoder.encode("a", add_special_tokens=False)
    with pytest.raises(PromptError, match=r"1,024 MiB of memory|s of CPU"):
        encoder.encode("e", add_special_tokens=False)
    few = IsolatedEncoder(
        with_parts(normalizer=sequence("normalizers", *[replace("e", "e" * 10)] * 4)),
        "t.json", "normalizer",
    )  # fmt: skip
    with pytest.raises(PromptError, match=r"makes [\d,]+ tokens of 1 bytes, more than 1,028"):
        few.encode("e", add_special_tokens=False)


@pytest.mark.parametrize("charsmap", ["AAAA////", "!", ""])
def test_a_file_that_panics_or_takes_all_memory_is_refused_by_name(
    tmp_path: Path, charsmap: str
) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is (not a tokenizer|refused)"):
        load_tokenizer(directory(tmp_path, normalizer=broken))


def test_a_decoder_of_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="its decoder New is not one of those"):
        load_tokenizer(directory(tmp_path, decoder={"type": "New"}))


def test_a_model_with_an_unknown_part_is_served(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path, pre_tokenizer=WITH_DIGITS))
    assert tokenizer.decode(tokenizer.encode("1234567 apples")) == "1234567 apples"
    assert tokenizer.encoder.thread_chars == 0
    (reason,) = tokenizer.speed_up("auto")
    assert "may cost more than its text" in reason
    with pytest.raises(TokenizerError, match="no fast tokenizer"):
        tokenizer.speed_up("fast")


async def test_no_text_of_it_is_encoded_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(directory(tmp_path, pre_tokenizer=WITH_DIGITS))
    in_threads = []
    later = tokenizer._in_thread

    async def counted(work: Any) -> Any:
        in_threads.append(work)
        return await later(work)

    monkeypatch.setattr(tokenizer, "_in_thread", counted)
    ids = await tokenizer.encode_prompt_async("1")
    assert ids.tolist() == tokenizer.encode_prompt("1")
    assert len(in_threads) == 1


def test_the_child_ends_with_its_tokenizer_and_sees_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    encoder = IsolatedEncoder(with_parts(), "t.json", "part")
    assert encoder._child is not None
    process = encoder._child._process
    proc = Path(f"/proc/{process.pid}")
    if proc.exists():
        assert b"s3cret" not in (proc / "environ").read_bytes()
    del encoder
    gc.collect()
    until_now(lambda: process.poll() is not None)
