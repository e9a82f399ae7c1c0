"""Flags over environment over context over default, and nothing of two deployments mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.dynamo.planes import backend, namespace
from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.keys import KEYS
from dynctl.settings.contexts.precedence import apply_context, effective_value, in_context
from dynctl.sources import named

FILE = """
current = "etcd"
[contexts.etcd]
discovery = "etcd"
etcd-endpoints = "e:2379"
nats-server = "nats://e:4222"
dyn-namespace = "team"
namespace = "kube"
timeout = 3
[contexts.http]
frontend = ["http://a:1", "http://b:1"]
token-env = "HTTP_TOKEN"
timeout = 4
[contexts.cluster]
discovery = "kubernetes"
kube-context = "k"
kubeconfig = "/k.yaml"
all-namespaces = true
reach = "port-forward"
[contexts.slow]
timeout = 60
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(FILE)
    monkeypatch.setenv("DYNCTL_CONFIG", str(path))
    return path


def given(**values: Any) -> GlobalOptions:
    """Options as the command line hands them on."""
    return GlobalOptions(**values, given=frozenset(values))


def held(options: GlobalOptions) -> dict[str, tuple[Any, str]]:
    """Key -> value and origin, without defaults."""
    found = apply_context(options)
    return {
        key.name: (effective_value(key, found), found.origins[key.name])
        for key in KEYS.values()
        if found.origins[key.name] != "default"
    }


def test_the_current_context_applies_without_flags_and_variables():
    assert held(given()) == {
        "discovery": ("etcd", "context etcd"),
        "etcd-endpoints": ("e:2379", "context etcd"),
        "nats-server": ("nats://e:4222", "context etcd"),
        "dyn-namespace": ("team", "context etcd"),
        "namespace": ("kube", "context etcd"),
        "timeout": (3.0, "context etcd"),
    }
    assert backend(given()) == ("etcd", "--discovery")
    assert namespace(given()) == "team"


def test_a_source_by_flag_replaces_the_source_and_its_values():
    assert held(given(frontend=("http://x:1",))) == {
        "frontend": (("http://x:1",), "flag --frontend"),
        "dyn-namespace": ("team", "context etcd"),
        "namespace": ("kube", "context etcd"),
        "timeout": (3.0, "context etcd"),
    }
    assert backend(given(frontend=("http://x:1",))) is None
    assert named.frontends(given(context="http", file_kv=Path("/d"))) == ()
    assert set(held(given(demo=True))) == {"dyn-namespace", "namespace", "timeout"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DYNCTL_FRONTEND", "http://x:1"),
        ("DYN_DISCOVERY_BACKEND", "file"),
        ("DYN_FILE_KV", "/d"),
        ("ETCD_ENDPOINTS", "x:1"),
    ],
)
@pytest.mark.seed("smart-routing-guide-0.9: infrastructure: ETCD_ENDPOINTS")
def test_a_source_by_environment_replaces_it_too(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    found = apply_context(given())
    assert "nats-server" in found.overridden
    assert found.options.discovery is None
    assert found.options.etcd_endpoints is None
    assert found.options.nats_server is None
    assert found.options.timeout == 3.0
    key = next(key for key in KEYS.values() if key.variable == variable)
    assert found.origins[key.name] == f"env {variable}"
    assert effective_value(key, found) == value


def test_other_values_are_replaced_one_by_one(monkeypatch):
    monkeypatch.setenv("DYN_NAMESPACE", "other")
    found = apply_context(given(timeout=10.0, all_namespaces=True))
    assert found.options.timeout == 10.0
    assert found.options.namespace is None
    assert found.options.dyn_namespace is None
    assert found.options.discovery == "etcd"
    assert found.overridden == {
        "dyn-namespace": "env DYN_NAMESPACE",
        "namespace": "flag --all-namespaces",
        "timeout": "flag --timeout",
    }
    assert namespace(given()) == "other"


def test_a_kubeconfig_by_flag_takes_the_kube_context_with_it():
    found = in_context(given(context="cluster", kubeconfig=Path("/x"), namespace="n"))
    assert (found.kubeconfig, found.kube_context) == (Path("/x"), None)
    assert (found.namespace, found.all_namespaces) == ("n", False)
    assert (found.discovery, found.reach) == ("kubernetes", "port-forward")


def test_the_flag_has_precedence_over_the_variable(monkeypatch):
    monkeypatch.setenv("DYNCTL_CONTEXT", "http")
    assert in_context(given()).frontend == ("http://a:1", "http://b:1")
    assert in_context(given(context="slow")).frontend == ()
    assert in_context(given(context="slow")).timeout == 60.0
    monkeypatch.setenv("DYNCTL_FRONTEND", "http://x:1")
    assert named.frontends(given()) == ("http://x:1",)


def test_a_context_by_flag_has_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("DYNCTL_FRONTEND", "http://x:1")
    monkeypatch.setenv("ETCD_ENDPOINTS", "x:1")
    monkeypatch.setenv("DYN_NAMESPACE", "elsewhere")
    http, etcd = given(context="http"), given(context="etcd")
    assert named.frontends(http) == ("http://a:1", "http://b:1")
    assert backend(http) is None
    assert namespace(http) == "elsewhere"
    assert named.frontends(etcd) == ()
    assert in_context(etcd).etcd_endpoints == "e:2379"
    assert namespace(etcd) == "team"
    # It names no source, so the environment still does.
    assert named.frontends(given(context="slow")) == ("http://x:1",)


def test_a_token_goes_to_the_servers_of_its_context_only(monkeypatch):
    monkeypatch.setenv("HTTP_TOKEN", "secret")
    assert named.token(given(context="http")) == "secret"
    assert named.token(given(context="http", frontend=("http://x:1",))) is None
    assert named.token(given(context="http", token="mine")) == "mine"
    monkeypatch.setenv("DYNCTL_TOKEN", "ambient")
    assert named.token(given(context="http")) == "secret"
    monkeypatch.setenv("DYNCTL_CONTEXT", "http")
    assert named.token(given()) == "ambient"


def test_tokens_come_from_variable_or_file_and_are_never_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("T", "abc\n")
    assert named.token(given(token_env="T")) == "abc"
    file = tmp_path / "token"
    file.write_text("def\n")
    assert named.token(given(token_file=file)) == "def"
    for options, said in (
        (given(token_env="NONE"), "--token-env NONE: this variable contains no token"),
        (given(token_file=tmp_path / "no"), "--token-file .*no: the file does not exist"),
        (given(token="a", token_env="T"), "--token and --token-env: expected one of them"),
    ):
        with pytest.raises(UsageProblem, match=said):
            named.token(options)
    for strange in (b"two words", b"a\r\nHost: b", b"\xff", b"x" * 100_000):
        file.write_bytes(strange)
        with pytest.raises(UsageProblem, match="expected one word") as error:
            named.token(given(token_file=file))
        assert "words" not in error.value.message.replace("one word", "")


def test_applying_twice_changes_nothing(config):
    once = in_context(given())
    config.write_text("broken")
    assert in_context(once) is once


def test_options_set_by_code_count_as_flags():
    assert in_context(GlobalOptions(timeout=1.5)).timeout == 1.5


@pytest.mark.parametrize("by", ["flag", "variable", "file"])
def test_an_unknown_context_error_names_its_origin(monkeypatch, config, by):
    options = given(context="htp") if by == "flag" else given()
    if by == "variable":
        monkeypatch.setenv("DYNCTL_CONTEXT", "htp")
    if by == "file":
        config.write_text(FILE.replace('current = "etcd"', 'current = "htp"'))
    who = {
        "flag": "--context htp",
        "variable": r"\$DYNCTL_CONTEXT htp",
        "file": f"{config}: current = 'htp'",
    }[by]
    with pytest.raises(
        UsageProblem, match=rf"^{who}: unknown context; did you mean http\?"
    ) as error:
        in_context(options)
    assert error.value.hint == "known: cluster, etcd, http, slow"


def test_a_context_of_the_kubeconfig_is_recognised(monkeypatch, tmp_path):
    kube = tmp_path / "kube.yaml"
    kube.write_text("contexts:\n- name: gke_prod\n  context: {cluster: c}\n- 3\n- name: [x]\n")
    hint = "--context names a dynctl context; did you mean --kube-context gke_prod?"
    monkeypatch.setenv("KUBECONFIG", f"/nowhere:{kube}")
    with pytest.raises(UsageProblem) as error:
        in_context(given(context="gke_prod"))
    assert error.value.hint.splitlines()[0] == hint
    monkeypatch.delenv("KUBECONFIG")
    with pytest.raises(UsageProblem) as error:
        in_context(given(context="gke_prod", kubeconfig=kube))
    assert error.value.hint.splitlines()[0] == hint
    for broken in ("{", "contexts: {}", "a: &a [*a", "\x00", "[]"):
        kube.write_text(broken)
        with pytest.raises(UsageProblem) as error:
            in_context(given(context="gke_prod", kubeconfig=kube))
        assert "kube-context" not in error.value.hint
