"""The comparison of encoders on real vocabularies; the run itself is `make fuzz-tokenizers`."""

import base64
from array import array

import pytest
from tokenizers import pre_tokenizers

from tests.dynctl.tokenization.test_encoders import SHAPES
from tests.fuzz import tokenizers as module


@pytest.fixture
def ranks(tmp_path):
    """A vocabulary of all bytes and some merges, as lines of tokens and ranks."""
    tokens = [bytes([value]) for value in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"]
    path = tmp_path / "small.tiktoken"
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_ranks_become_the_same_tokens(ranks):
    made = module.from_ranks(ranks, SHAPES["qwen-2"])
    assert made.encode("hello world").ids == [259, 260, *b"orld"]
    assert made.encode("h\xe9\n").ids == [*"h\xe9\n".encode()]
    assert made.decode([259, 260]) == "hello w"
    assert sorted(module.byte_names()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_encoders_that_differ_are_counted_with_a_text(ranks, monkeypatch, capsys):
    made = module.from_ranks(ranks, SHAPES["qwen-2"]).to_str()
    assert module.compare("small", made, seed=2, count=20) == 0
    assert "0 of" in capsys.readouterr().out

    class Wrong:
        name, thread_chars = "wrong", 0

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
            return array("I", [1] if "Z" in text else [])

    monkeypatch.setattr(module, "FastEncoder", Wrong)
    assert module.compare("small", made, seed=2, count=20) > 0
    assert "the first: " in capsys.readouterr().out
