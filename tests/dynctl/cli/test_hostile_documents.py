"""Views, manifests and answers that are mistyped, huge or deep: an error, never a defect."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.documents.view import decode_view, encode_view
from router_core import LoadReported
from tests.dynctl.cli.test_unfriendly_servers import Server, server
from tests.dynctl.serving.routed import request, router, worker

__all__ = ["server"]  # a fixture

DEEP = "[" * 30_000 + "]" * 30_000
STRANGE: list[Any] = [
    None, True, [], {}, [1], {"a": 1}, "text", -1, 0, 2**53, 2**64, 10**400, 1e308, [[[]]], 0.5
]  # fmt: skip


def _view() -> dict[str, Any]:
    made = router(worker(1, zone="a"), worker(2, zone="b"))
    made.apply(LoadReported(1, 0, active_decode_blocks=3, active_prefill_tokens=7), 1.0)
    plan = made.plan(request())
    assert plan.ok
    document: dict[str, Any] = json.loads(encode_view(made.capture(), now=5.0))
    return document


VIEW = _view()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, one in inner:
        found.append((*path, key))
        if isinstance(one, (dict, list)):
            found += _places(one, (*path, key))
    return found


def _changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(VIEW)
    at: Any = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return document


@given(st.sampled_from(_places(VIEW)), st.sampled_from(STRANGE))
@settings(max_examples=400, deadline=None)
def test_a_changed_view_is_refused_or_works(path, value):
    try:
        view = decode_view(json.dumps(_changed(path, value)).encode())
    except WireError:
        return
    view.router.plan(request(), detail=True)
    view.router.snapshot()


@pytest.mark.parametrize(
    "text", [DEEP, f'{{"kind": "RoutingView", "snapshot": {DEEP}}}', "[1]", "\ud800"]
)
@pytest.mark.parametrize(
    "command",
    [
        ["route", "hi", "--view", "{file}"],
        ["workers", "list", "--view", "{file}"],
        ["config", "show", "--view", "{file}"],
        ["why", "{file}"],
        ["topology", "lint", "{file}"],
        ["route", "--messages", "@{file}", "--demo"],
        ["route", "--tokens", "@{file}", "--demo"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
@pytest.mark.usefixtures("no_collection")
def test_files(dynctl, tmp_path, command, text):
    file = tmp_path / "file.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    ran = dynctl(*(word.format(file=file) for word in command))
    assert ran.code in (1, 2)
    assert "Traceback" not in ran.err
    assert "defect" not in ran.err


ANSWERS = [
    DEEP, "[]", "{}", "[[1]]", '"text"', "1e999", '{"workers": {}}', '{"workers": [[]]}',
    '{"data": [[]]}', '{"data": {}}', '{"thresholds": [1]}', '{"settings": []}',
    '{"settings": {}}', '{"models": [], "settings": [[1]]}', '{"kind": "RouteResult"}',
    '{"kind": [], "schema": {}}', '{"schema": 1e308}',
]  # fmt: skip
COMMANDS = [
    ["workers", "list"],
    ["workers", "show", "a0"],
    ["why", "abc"],
    ["route", "hi"],
    ["top", "--once"],
    ["thresholds", "get"],
    ["thresholds", "set", "--model", "m", "--active-decode-blocks", "0.5"],
    ["config", "show"],
    ["check"],
    ["topology", "show"],
    ["version"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("no_collection")
def test_answers(dynctl, server: Server, command):
    errors = [DEEP, '{"error": []}', '{"error": {"message": [[]]}}', "\x1b[2J"]
    for status, answer in [(200, one) for one in ANSWERS] + [(500, one) for one in errors]:
        server.status = status
        server.body = answer.encode()
        ran = dynctl(*command, "--frontend", server.url, "--timeout", "5")
        assert ran.code in (0, 1, 2, 3), (answer[:60], ran.err)
        assert "Traceback" not in ran.err, answer[:60]
        assert "defect" not in ran.err, answer[:60]
