"""The keys of a context, and their agreement with the global options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dynctl.adapters.dynamo.planes import DISCOVERY_VARIABLE, NAMESPACE_VARIABLE
from dynctl.base.backends import BACKENDS
from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.keys import (
    KEYS,
    checked_name,
    checked_values,
    given_value,
    option_value,
)
from dynctl.sources.dynamo.frontend_pods import REACHES
from dynctl.sources.named import FRONTEND_VARIABLE


def test_every_key_is_a_global_option():
    assert {key.field for key in KEYS.values()} <= {one.name for one in fields(GlobalOptions)}


def test_no_key_contains_a_token():
    assert "token" not in KEYS
    assert {name for name in KEYS if "token" in name} == {"token-env", "token-file"}


def test_choices_and_variables_match_the_global_options():
    assert KEYS["discovery"].choices == tuple(BACKENDS)
    assert KEYS["reach"].choices == REACHES
    assert KEYS["frontend"].variable == FRONTEND_VARIABLE
    assert KEYS["discovery"].variable == DISCOVERY_VARIABLE
    assert KEYS["dyn-namespace"].variable == NAMESPACE_VARIABLE
    assert KEYS["reach"].default == GlobalOptions().reach
    assert float(KEYS["timeout"].default) == GlobalOptions().timeout


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"frontnd": "x"}, "frontnd: unknown key; did you mean frontend?"),
        ({"frontend": 8000}, "frontend: expected a list of 1 to 64 values, .* got 8000"),
        ({"frontend": []}, "frontend: expected a list of 1 to 64 values"),
        ({"frontend": [1]}, "frontend: expected text in quotes, got 1"),
        ({"discovery": "zookeeper"}, "discovery: expected one of file, etcd, kubernetes"),
        ({"reach": "far"}, "reach: expected one of auto, direct, port-forward"),
        ({"timeout": "5"}, "timeout: expected a number of seconds, 0.001 to 86400; got '5'"),
        ({"timeout": True}, "timeout: expected a number of seconds"),
        ({"timeout": 0}, "timeout: expected a number of seconds"),
        ({"timeout": float("nan")}, "timeout: expected a number of seconds"),
        ({"all-namespaces": False}, "all-namespaces: expected true, or remove the key; got false"),
        ({"namespace": " "}, "namespace: expected 1 to 4096 visible characters"),
        ({"namespace": "a\nb"}, "namespace: expected 1 to 4096 visible characters"),
        ({"namespace": {"a": 1}}, "namespace: expected text in quotes, got a table"),
        ({"namespace": "a", "all-namespaces": True}, "namespace and all-namespaces: expected one"),
        ({"token-env": "A", "token-file": "/t"}, "token-env and token-file: expected one"),
        ({"file-kv": "/d", "etcd-endpoints": "h:1"}, "file-kv and etcd-endpoints: expected one"),
        ({"discovery": "etcd", "file-kv": "/d"}, "file-kv and discovery etcd: expected one"),
    ],
)
def test_a_wrong_value_is_reported_with_what_was_expected(values, said):
    with pytest.raises(UsageProblem, match=rf"^p\.{said}"):
        checked_values(values, "p.")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frontend", ["http://u:hunter2@host:8000"]),
        ("frontend", ["http://hunter2@host"]),
        ("frontend", ["http://host/?key=hunter2"]),
        ("etcd-endpoints", "a:2379,hunter2@b:2379"),
        ("nats-server", "nats://hunter2@h:4222"),
        ("token-env", "hunter2-and-more"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(key, value):
    with pytest.raises(UsageProblem) as error:
        checked_values({key: value}, "")
    assert "hunter2" not in error.value.message + error.value.hint


def test_values_come_in_the_order_of_the_table_and_one_frontend_needs_no_list():
    found = checked_values({"timeout": 3, "frontend": "http://a:1"}, "")
    assert list(found.items()) == [("frontend", ["http://a:1"]), ("timeout", 3.0)]


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "x" * 64, "é", "a\n"])
def test_invalid_names_are_refused(name):
    with pytest.raises(UsageProblem, match="is not a valid context name"):
        checked_name(name)


def test_paths_are_saved_as_absolute_text(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    kept = given_value(Path("store"))
    assert kept == str(tmp_path / "store")
    assert option_value(KEYS["file-kv"], str(kept)) == tmp_path / "store"
    assert option_value(KEYS["frontend"], ["a", "b"]) == ("a", "b")
