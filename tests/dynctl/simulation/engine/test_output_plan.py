"""The generated text: tokens and text agree, for whatever tokenizer."""

from pathlib import Path

import pytest

from dynctl.simulation.engine.output_plan import OutputPlan, Vocabulary
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer

CAPTURED = Path(__file__).parents[3] / "captures" / "tiny-model"


@pytest.mark.parametrize("model", [DEMO_MODEL_DIR, CAPTURED], ids=["demo", "captured"])
@pytest.mark.parametrize("follows_text", [False, True])
def test_the_text_encodes_to_the_tokens_and_back(model: Path, follows_text: bool) -> None:
    tokenizer = load_tokenizer(model)
    plan = OutputPlan(Vocabulary(tokenizer), [1, 2, 3], 0, follows_text=follows_text)
    tokens = [plan.token(index) for index in range(200)]
    text = "".join(plan.text(index) for index in range(200))
    assert text.startswith(" ") is follows_text
    assert all(plan.text(index) for index in range(200))
    assert tokenizer.decode(tokens) == text
    # Whole words only: the last one may be cut within its tokens.
    assert tokenizer.encode(text)[:190] == tokens[:190]


def test_prompt_and_seed_fix_the_text() -> None:
    words = Vocabulary(load_tokenizer(DEMO_MODEL_DIR))

    def text(prompt: list[int], seed: int) -> str:
        plan = OutputPlan(words, prompt, seed)
        return "".join(plan.text(index) for index in range(50))

    assert text([1, 2], 0) == text([1, 2], 0)
    assert len({text([1, 2], 0), text([1, 3], 0), text([1, 2], 1)}) == 3
