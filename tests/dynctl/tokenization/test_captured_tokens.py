"""Token ids that a real Dynamo 1.6.1 frontend computed for chats with tests/captures/tiny-model."""

from pathlib import Path

import pytest

from dynctl.tokenization import load_tokenizer

MODEL = Path(__file__).parents[2] / "captures" / "tiny-model"
_FOX = [316, 315, 264, 313, 307, 309]  # "hello world the quick brown fox"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (
            "unary dry run" + " hello world" * 4,
            [2, 287, 202, 88, 81, 68, 85, 92, 224, 71, 85, 92, 224, 85, 88, 81]
            + [224, 316, 315] * 4
            + [3, 202, 2, 266, 305, 202],
        ),
        (
            "pin h hello world the quick brown fox",
            [2, 287, 202, 83, 76, 81, 224, 75, 224, *_FOX, 3, 202, 2, 266, 305, 202],
        ),
    ],
)
def test_a_chat_has_the_token_ids_of_a_real_frontend(prompt, ids):
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer.encode_chat([{"role": "user", "content": prompt}]) == ids


def test_all_files_of_the_directory_are_read():
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer.vocab_size == 317
    assert tokenizer.max_length == 8192
    assert tokenizer.eos_token_ids == {1}
