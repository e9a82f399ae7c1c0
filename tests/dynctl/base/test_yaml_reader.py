"""The YAML reader: values, bounds and errors."""

import pytest

from dynctl.base.yaml_reader import YamlError, YamlTooLarge, read_yaml, read_yaml_documents


def test_values():
    text = b"day: 2026-11-22\nbad: 2026-13-45\nbase: &b {x: 1}\nmore: {<<: *b, x: 2, y: [3]}\n"
    assert read_yaml(text) == {
        "day": "2026-11-22",
        "bad": "2026-13-45",
        "base": {"x": 1},
        "more": {"x": 2, "y": [3]},
    }
    assert read_yaml(b"") is None
    assert read_yaml_documents(b"a: 1\n---\nb: 2\n") == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        (b"a: 1\nb: {c: 1, c: 2}", "line 2, column 11", "the key 'c' occurs twice"),
        (b"a: 1\n2: b", "line 2, column 1", "the key 2 is not text"),
        (b"? [1]\n: 2", "line 1, column 3", "a key is not text"),
        (b"a: [", "line", "did not find"),
        (b"a: !!python/name:os.system", "line 1, column 4", "could not determine"),
        (b"a: !!bool x", "", "a value does not fit its type"),
        (b"a: " + b"1" * 5000, "", "a value does not fit its type"),
        (b"a: 1\n---\nb: 2", "", "2 documents; expected one"),
    ],
)
def test_errors_have_a_position(text: bytes, position: str, problem: str):
    with pytest.raises(YamlError) as caught:
        read_yaml(text)
    assert caught.value.position.startswith(position)
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    "text", [b"[" * 20_000 + b"]" * 20_000, b"a: &a [*a]", b"a: " + b"x" * 2000]
)
def test_bounds(text: bytes):
    with pytest.raises(YamlTooLarge):
        read_yaml(text, most_bytes=1000 if b"x" in text else 1 << 20)


def test_the_last_of_two_keys_counts_if_not_strict():
    assert read_yaml(b"a: 1\na: 2\n3: b", strict=False) == {"a": 2, 3: "b"}


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 30_000 + b"]" * 30_000,
        b"{a: " * 30_000,
        b"- " * 30_000,
        b"? " * 30_000,
        b"".join(b" " * depth + b"a:\n" for depth in range(1_000)),
    ],
    ids=["lists", "maps", "sequences", "keys", "blocks"],
)
def test_deep_nesting_is_refused_before_libyaml_recurses(text: bytes):
    with pytest.raises(YamlTooLarge, match="nested more than 100 deep"):
        read_yaml(text)
