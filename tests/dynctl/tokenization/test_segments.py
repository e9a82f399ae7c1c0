"""The parts of a chat are found in its token ids, for templates of published models' kinds."""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.tokenization import DEMO_MODEL_DIR, ModelTokenizer, load_tokenizer
from dynctl.tokenization.segments import MOST_SEGMENTS, SegmentMarks, segment_marks

DEMO = load_tokenizer(DEMO_MODEL_DIR)
MARKS = segment_marks(DEMO)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

#: Template, and its special tokens.
TEMPLATES = {
    "llama": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
        "'<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma": (
        "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + "
        "('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "mistral": (
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'system' %}"
        "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% else %}"
        "{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "deepseek": (
        "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}"
        "{% elif m.role == 'assistant' %}{{ '<Assistant>' + m.content + '<eos>' }}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}",
        ("<bos>", "<eos>", "<User>", "<Assistant>"),
    ),
}


def model(tmp_path: Path, template: str, specials: tuple[str, ...]) -> ModelTokenizer:
    """The demo tokenizer with another template and its special tokens."""
    directory = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    path = directory / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    row = content["added_tokens"][0]
    following = max(max(content["model"]["vocab"].values()), row["id"], 100) + 50
    for number, special in enumerate(specials):
        content["added_tokens"].append(
            {**row, "id": following + number, "content": special, "special": True}
        )
    path.write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory, trust_template=True)


def chat(roles: list[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": f"the {role} {n} writes"} for n, role in enumerate(roles)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_headers_of_a_template_are_found_in_its_prompts(tmp_path: Path, name: str) -> None:
    tokenizer = model(tmp_path, *TEMPLATES[name])
    marks = segment_marks(tokenizer)
    roles = ["system", "user", "assistant", "user"]
    ids = tokenizer.encode_chat(chat(roles))
    segments = marks.segments(ids)
    shown = [kind for kind, _ in segments]
    assert shown == [*roles, "assistant"]
    for (kind, at), (_, end) in zip(segments, [*segments[1:], ("", len(ids))], strict=True):
        text = tokenizer.decode(ids[at:end], skip_special_tokens=False)
        others = [f"the {role} {n} writes" for n, role in enumerate(roles) if role != kind]
        assert not any(other in text for other in others), (kind, text)


@settings(max_examples=60, deadline=None)
@given(
    system=st.text(max_size=30),
    turns=st.lists(st.text(max_size=30), max_size=6),
    tools=st.integers(0, 2),
    answer=st.booleans(),
)
def test_each_part_of_a_chat_of_the_demo_begins_where_it_is_rendered(
    system: str, turns: list[str], tools: int, answer: bool
) -> None:
    messages = [{"role": "system", "content": system}]
    messages += [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)
    ]
    options: dict[str, Any] = {"tools": [TOOL] * tools, "add_generation_prompt": answer}
    ids = DEMO.encode_chat(messages, **options)
    if any("<|" in text or "Tools," in text for text in (system, *turns)):
        return
    parts = [message["role"] for message in messages if message["role"] != "system"]
    if system or tools:
        parts = ["system", *["tools"] * bool(tools), *parts]
    segments = MARKS.segments(ids)
    assert [kind for kind, _ in segments] == [*parts, *["assistant"] * answer]
    for kind, at in segments:
        begins = "Tools" if kind == "tools" else f"<|im_start|>{kind}"
        assert DEMO.decode(ids[at:], skip_special_tokens=False).startswith(begins)
    assert MARKS.segments(array("I", ids)) == segments


def test_a_template_whose_headers_are_plain_text_has_no_known_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer = model(tmp_path, template, ())
    marks = segment_marks(tokenizer)
    assert marks.segments(tokenizer.encode_chat(chat(["user", "assistant"]))) == ()


def test_a_template_that_refuses_chats_has_no_known_parts(tmp_path: Path) -> None:
    refusing = model(tmp_path, "{{ raise_exception('no') }}", ())
    assert segment_marks(refusing).marks == {}


def test_parts_are_bounded_and_tokens_of_other_bytes_are_no_header() -> None:
    marks = SegmentMarks({"user": (1, 7), "assistant": (1, 8)})
    assert marks.segments([1, 7, 256, 7 << 8, 1, 8, 1, 9]) == (("user", 0), ("assistant", 4))
    assert len(marks.segments([1, 7] * 1_000)) == MOST_SEGMENTS
    assert marks.segments([]) == ()
