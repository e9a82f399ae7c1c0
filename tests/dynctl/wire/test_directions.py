"""Fields of bodies that direct engines: refused unless they are allowed."""

from typing import Any

import pytest

from dynctl.base.decode_errors import RequestError
from dynctl.wire.directions import DIRECTING, DIRECTIONS, ENGINE_HEADERS, check_directions

NONE: frozenset[str] = frozenset()


def _with(name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {"model": "demo", outer: {inner: value} if inner else value}


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("value", [0, "", {}, [], False, {"remote_host": "10.0.0.1"}], ids=repr)
def test_every_value_but_null_is_refused_by_name(name: str, value: Any) -> None:
    body = _with(name, value)
    assert not DIRECTING.isdisjoint(body)
    with pytest.raises(RequestError) as caught:
        check_directions(body, NONE)
    assert (caught.value.status, caught.value.field) == (400, name)
    assert f"--client-fields {name}" in str(caught.value)
    assert "10.0.0.1" not in str(caught.value)
    check_directions(body, frozenset({name}))
    check_directions(_with(name, None), NONE)


@pytest.mark.parametrize("path", [("vllm_xargs",), ("sampling_params", "extra_args")])
def test_fields_inside_other_objects_are_refused_by_their_path(path: tuple[str, ...]) -> None:
    value: dict[str, Any] = {"ngram_size": 3, "kv_transfer_params": "x"}
    for name in reversed(path):
        value = {name: value}
    assert not DIRECTING.isdisjoint(value)
    with pytest.raises(RequestError) as caught:
        check_directions(value, NONE)
    assert caught.value.field == ".".join((*path, "kv_transfer_params"))
    check_directions(value, frozenset({"kv_transfer_params"}))


def test_what_directs_nothing_is_accepted() -> None:
    body = {
        "nvext": {"decode_worker_id": 1, "metadata_upload": None},
        "vllm_xargs": {"ngram_size": 3},
        "sampling_params": {"temperature": 0, "extra_args": {"a": 1}},
        "cache_salt": "mine",
    }
    check_directions(body, NONE)
    odds: list[Any] = [[], "text", 1, True]
    for odd in odds:
        check_directions({"nvext": odd, "vllm_xargs": odd, "sampling_params": odd}, NONE)


def test_each_header_sets_a_field_that_may_be_allowed() -> None:
    assert set(ENGINE_HEADERS.values()) <= DIRECTIONS.keys()
    assert all(name == name.lower() for name in ENGINE_HEADERS)
