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

from dynctl.tokenization import (
    DEMO_MODEL_DIR,
    PromptError,
    PromptTooLongError,
    RenderLimits,
    TemplateError,
    TokenizationError,
    TokenizerError,
    load_tokenizer,
)
from dynctl.tokenization.isolated import (
    ChildLimits,
    IsolatedParts,
    IsolatedTemplate,
    UnknownParts,
    UnknownTemplate,
    UnknownTokenizer,
)
from dynctl.tokenization.known_parts import PATTERNS, unknown_decoder, unknown_part
from dynctl.tokenization.known_templates import is_known
from dynctl.tokenization.template import CompiledTemplate
from tests.waiting import until_now

PLAIN = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())
#: A character that no text of the check has.
RARE = "\u2603"
#: Groups digits from the right: it takes the square of their number.
FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(inner: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", inner: list(parts)}


def added(content: str, **flags: bool) -> dict[str, Any]:
    names = ("normalized", "lstrip", "rstrip", "single_word")
    return {"id": 5000, "content": content, "special": True} | dict.fromkeys(names, False) | flags


def with_parts(**parts: Any) -> str:
    return json.dumps({**PLAIN, **parts})


def parts(
    content: str, part: str = "pattern", limits: ChildLimits | None = None, **templates: str
) -> IsolatedParts:
    """A tokenizer and templates in a child."""
    unknown = {name: UnknownTemplate(source, f"{name}.jinja") for name, source in templates.items()}
    tokenizer = UnknownTokenizer(content, "t.json", part)
    return IsolatedParts(UnknownParts(tokenizer, unknown, 8 << 20), limits)


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
        ({"added_tokens": [added("<mask>", lstrip=True), added("\n\n")]}, None),
        ({"added_tokens": [added("\n\n", rstrip=True)]},
         "added token '\\n\\n' that takes white space with it"),
        ({"added_tokens": [added(" ", lstrip=True)]},
         "added token ' ' that takes white space with it"),
        ({"added_tokens": [added("x", lstrip=True, normalized=True)]}, None),
        ({"added_tokens": [added("x", lstrip=True, normalized=True)],
          "normalizer": replace("x", " ")},
         "added token 'x' that takes white space with it"),
        ({"added_tokens": [7]}, "added token '' that takes white space with it"),
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
def isolated() -> IsolatedParts:
    limits = ChildLimits(text_s=0.3, memory_bytes=1 << 30)
    return parts(with_parts(pre_tokenizer=WITH_DIGITS), "pattern", limits)


@given(text=st.text(max_size=60), special=st.booleans())
def test_the_child_gives_the_same_ids(isolated: IsolatedParts, text: str, special: bool) -> None:
    from tokenizers import Tokenizer

    try:
        text.encode()
    except UnicodeEncodeError:
        return
    here = Tokenizer.from_str(with_parts(pre_tokenizer=WITH_DIGITS))
    expected = here.encode(text, add_special_tokens=special).ids
    assert isolated.encode(text, add_special_tokens=special).tolist() == expected


def test_a_text_that_takes_long_is_refused_and_the_next_one_is_not(
    isolated: IsolatedParts,
) -> None:
    before = isolated.encode("1234567", add_special_tokens=False)
    with pytest.raises(PromptError, match=r"95,000 characters is refused: .* 0\.3 s of CPU"):
        isolated.encode("7" * 95_000, add_special_tokens=False)
    assert isolated.encode("1234567", add_special_tokens=False) == before


def test_a_child_that_ends_in_another_way_is_not_called_a_limit(isolated: IsolatedParts) -> None:
    before = isolated.encode("1234567", add_special_tokens=False)
    assert isolated._child is not None
    isolated._child._process.kill()
    with pytest.raises(PromptError, match=r"ended its process \(code -9\)"):
        isolated.encode("1234567", add_special_tokens=False)
    assert isolated.encode("1234567", add_special_tokens=False) == before


def test_ten_characters_of_one_ten_times_over_end_the_child_alone() -> None:
    bomb = sequence("normalizers", *[replace(RARE, RARE * 10)] * 10)
    limits = ChildLimits(memory_bytes=1 << 30)
    encoder = parts(with_parts(normalizer=bomb), "normalizer", limits)
    assert encoder.encode("a", add_special_tokens=False)
    with pytest.raises(PromptError, match=r"1,024 MiB of memory|s of CPU") as raised:
        encoder.encode(RARE, add_special_tokens=False)
    assert raised.value.over_limit is not None
    assert raised.value.over_limit.file == "t.json"
    few = parts(with_parts(normalizer=sequence("normalizers", *[replace(RARE, RARE * 10)] * 4)))
    with pytest.raises(PromptError, match=r"makes [\d,]+ tokens of 3 bytes, more than 1,036"):
        few.encode(RARE, add_special_tokens=False)


@pytest.mark.parametrize("times", [4, 10])
def test_a_tokenizer_that_cannot_read_usual_text_is_refused_at_load(times: int) -> None:
    bomb = sequence("normalizers", *[replace("e", "e" * 10)] * times)
    limits = ChildLimits(memory_bytes=1 << 30)
    with pytest.raises(TokenizerError, match=r"t\.json is refused: of a text of the check, .*more"):
        parts(with_parts(normalizer=bomb), "normalizer", limits)


def test_a_tokenizer_that_takes_long_to_load_is_refused_by_name() -> None:
    many = {f"word{number}": number for number in range(400_000)}
    content = with_parts(model={"type": "WordLevel", "vocab": many, "unk_token": "word0"})
    with pytest.raises(TokenizerError, match=r"t\.json is refused .*loading it takes more than"):
        parts(content, "pattern", ChildLimits(load_s=0.02))


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
    encoder = parts(with_parts())
    assert encoder._child is not None
    process = encoder._child._process
    proc = Path(f"/proc/{process.pid}")
    if proc.exists():
        assert b"s3cret" not in (proc / "environ").read_bytes()
    del encoder
    gc.collect()
    until_now(lambda: process.poll() is not None)


# -- templates ---------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": True}
TEMPLATE = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}{{ bos_token }}"
#: One call of Python that takes hours: each character is looked up in eight million.
STRIP = "{{ ('a' * 8000000).strip('b' * 7999999 ~ 'a') | length }}"
#: The same, for one word of a client only.
RARE_STRIP = "{% if 'snow' in messages[0].content %}" + STRIP + "{% endif %}ok"
#: Sorts texts of 8,000 equal characters: seconds in few calls.
SORT = "{% set rows = ['a' * 8000] * 400000 %}{{ rows | sort | length }}"


def template_directory(tmp_path: Path, source: str) -> Path:
    made = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    (made / "chat_template.jinja").write_text(source, encoding="utf-8")
    return made


def test_an_unknown_template_renders_the_same_in_its_process(tmp_path: Path) -> None:
    made = template_directory(tmp_path, TEMPLATE)
    apart, here = load_tokenizer(made), load_tokenizer(made, trust_template=True)
    template = apart.template_for(with_tools=False)
    assert isinstance(template.program, IsolatedTemplate)
    messages = [{"role": "user", "content": "caf\u00e9 \U0001f600 \ud800"}]
    assert apart.render_chat(messages) == here.render_chat(messages)
    messages[0]["content"] = "hello"
    assert apart.encode_chat(messages) == here.encode_chat(messages)
    with pytest.raises(PromptError, match="cannot be encoded"):
        apart.encode_chat([{"role": "user", "content": "\ud800"}])


def test_a_chat_of_unknown_template_and_tokenizer_takes_one_exchange(tmp_path: Path) -> None:
    made = template_directory(tmp_path, TEMPLATE)
    (made / "tokenizer.json").write_text(with_parts(pre_tokenizer=WITH_DIGITS))
    tokenizer = load_tokenizer(made)
    asked = []
    assert tokenizer._parts is not None
    child = tokenizer._parts._child
    assert child is not None
    ask = child.ask

    def counted(kind: int, data: bytes) -> bytes:
        asked.append(kind)
        return ask(kind, data)

    child.ask = counted  # type: ignore[method-assign]
    ids = tokenizer.encode_chat([{"role": "user", "content": "1234567"}])
    assert len(asked) == 1
    assert ids == tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "1234567"}]))
    with pytest.raises(PromptError, match="cannot be encoded"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud800"}])
    assert tokenizer.encode_chat([{"role": "user", "content": "1234567"}]) == ids


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", PromptError, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", TemplateError, "TypeError while rendering"),
        ("{{ nothing.x.y }}", TemplateError, "'nothing' is undefined"),
        ("{{ messages.append(1) }}", TemplateError, "not allowed"),
        ("{% for i in range(90000) %}" * 2 + "{% endfor %}" * 2, TemplateError, "stopped, more"),
    ],
)
def test_errors_of_an_unknown_template_are_those_of_any(
    source: str, error: type[TokenizationError], text: str
) -> None:
    rare = "{% if messages[0].content != 'Hello.' %}" + source + "{% endif %}"
    made = parts(with_parts(), t=rare)
    with pytest.raises(error, match=text) as apart:
        made.render("t", CHAT)
    with pytest.raises(error) as here:
        CompiledTemplate(rare, origin="t.jinja", limits=RenderLimits(seconds=60)).run(CHAT)
    assert str(apart.value) == str(here.value)
    assert apart.value.over_limit == here.value.over_limit


def test_a_prompt_that_is_too_long_is_refused_with_its_length() -> None:
    unknown = {"t": UnknownTemplate("{{ messages[0].content * 30 }}", "t.jinja")}
    made = IsolatedParts(UnknownParts(None, unknown, 200))
    assert made.render("t", {"messages": [{"content": "12345"}]}) == "12345" * 30
    with pytest.raises(PromptTooLongError, match="the prompt has 210 characters, the limit is 200"):
        made.render("t", {"messages": [{"content": "1234567"}]})


@pytest.mark.parametrize("source", [STRIP, SORT])
def test_a_template_that_cannot_render_a_word_is_refused_at_load(source: str) -> None:
    limits = ChildLimits(text_s=0.3)
    with pytest.raises(TemplateError, match=r"t\.jinja: is refused: of a chat of one word, .*more"):
        parts(with_parts(), limits=limits, t=source)


def test_a_template_that_takes_long_to_compile_is_refused_by_name() -> None:
    source = "{% if a %}b{{ a + 1 }}{% endif %}" * 6000
    with pytest.raises(TemplateError, match=r"t\.jinja: is refused: loading it takes more than"):
        parts(with_parts(), limits=ChildLimits(load_s=0.2), t=source)


def test_a_template_over_a_limit_fails_the_request_and_not_the_next_one() -> None:
    made = parts(with_parts(), limits=ChildLimits(text_s=0.3), t=RARE_STRIP)
    assert made.render("t", CHAT) == "ok"
    with pytest.raises(TemplateError, match=r"stopped, rendering these messages takes more") as it:
        made.render("t", {"messages": [{"role": "user", "content": "snow"}]})
    assert it.value.over_limit == ("t.jinja", "rendering a chat takes more than 0.3 s of CPU")
    assert made.render("t", CHAT) == "ok"


def test_known_and_trusted_templates_need_no_process(tmp_path: Path) -> None:
    assert load_tokenizer(DEMO_MODEL_DIR)._parts is None
    made = template_directory(tmp_path, TEMPLATE)
    assert load_tokenizer(made, trust_template=True)._parts is None
    source = (DEMO_MODEL_DIR / "chat_template.jinja").read_text()
    assert is_known(source)
    assert is_known(source.removesuffix("\n"))
    assert not is_known(source + " ")
