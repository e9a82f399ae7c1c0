"""Which cluster is meant and who asks: kubeconfig files, plugins, service accounts."""

from __future__ import annotations

import json
import os
import sys
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynctl.adapters.kubernetes.kubeconfig import kube_context
from dynctl.adapters.kubernetes.login import Login
from dynctl.base.errors import Unreachable, UsageProblem

SECRET = "s3cr3t-t0ken-value"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's kubeconfig, and no pod."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)


def config(
    *contexts: str,
    user: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    namespace: str | None = None,
    current: str | None = None,
) -> dict[str, Any]:
    names = contexts or ("lab",)
    place = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": f"{one}-cluster", "cluster": {"server": f"http://{one}:1", **(cluster or {})}}
            for one in names
        ],
        "users": [
            {"name": f"{one}-user", "user": dict({"token": SECRET} if user is None else user)}
            for one in names
        ],
        "contexts": [
            {
                "name": one,
                "context": {"cluster": f"{one}-cluster", "user": f"{one}-user", **place},
            }
            for one in names
        ],
        "current-context": names[0] if current is None else current,
    }


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def login(tmp_path: Path, **values: Any) -> Login:
    return Login(kube_context(written(tmp_path / "config", config(**values)), None))


def headers(tmp_path: Path, **values: Any) -> list[tuple[str, str]]:
    return login(tmp_path, **values).headers()


def refused(kubeconfig: Path | None, context: str | None = None) -> UsageProblem:
    with pytest.raises(UsageProblem) as caught:
        Login(kube_context(kubeconfig, context))
    assert SECRET not in f"{caught.value.message} {caught.value.hint}"
    return caught.value


# -- where it is looked for ----------------------------------------------------------------------


def test_the_option_then_the_variable_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    written(tmp_path / "home" / ".kube" / "config", config("home"))
    variable = written(tmp_path / "variable", config("variable"))
    option = written(tmp_path / "option", config("option"))
    assert kube_context(None, None).name == "home"
    monkeypatch.setenv("KUBECONFIG", str(variable))
    assert kube_context(None, None).name == "variable"
    assert kube_context(option, None).name == "option"


def test_nothing_anywhere_says_what_was_looked_for():
    problem = refused(None)
    for word in ("--kubeconfig", "$KUBECONFIG", "~/.kube/config", "service account"):
        assert word in problem.message
    assert "--kubeconfig FILE" in problem.hint


def test_files_that_are_named_and_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert "the file does not exist" in refused(tmp_path / "absent").message
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}")
    assert "$KUBECONFIG is" in refused(None).message


def test_a_pods_service_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    account = tmp_path / "account"
    for name, text in (("token", SECRET), ("ca.crt", "x"), ("namespace", "lab\n")):
        written(account / name, text)
    with pytest.raises(UsageProblem):
        kube_context(None, None, account=account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    context = kube_context(None, None, account=account)
    assert context.title == "in-cluster (https://[fd00::1]:443)"
    assert context.namespace == "lab"
    with pytest.raises(UsageProblem, match="--kube-context west: no kubeconfig"):
        kube_context(None, "west", account=account)


# -- merging -------------------------------------------------------------------------------------


def test_of_several_files_the_first_that_says_something_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    first = written(tmp_path / "first", config("east", "both", current=""))
    second = written(tmp_path / "second", config("west", "both", namespace="second"))
    third = written(tmp_path / "third", config("north"))
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, (first, second, third))))
    assert kube_context(None, None).name == "west"
    assert kube_context(None, "both").namespace == "default"
    assert kube_context(None, "north").server == "http://north:1"


def test_missing_files_of_the_variable_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    there = written(tmp_path / "there", config("lab"))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'absent'}{os.pathsep}{there}{os.pathsep}")
    assert kube_context(None, None).name == "lab"


def test_paths_are_relative_to_the_file_that_they_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Also a user's, where the cluster stands in another file."""
    written(tmp_path / "two" / "token", SECRET)
    here, there = config("lab"), config("lab", user={"tokenFile": "token"})
    first = written(tmp_path / "one" / "config", here | {"users": []})
    second = written(tmp_path / "two" / "config", there | {"clusters": []})
    monkeypatch.setenv("KUBECONFIG", f"{first}{os.pathsep}{second}")
    assert Login(kube_context(None, None)).headers() == [("Authorization", f"Bearer {SECRET}")]


# -- what cannot be used -------------------------------------------------------------------------


def test_an_unknown_context_names_those_that_exist_close_ones_first(tmp_path: Path):
    path = written(tmp_path / "config", config("aa-dev", "production-west", "zz"))
    problem = refused(path, "produktion-west")
    assert f"--kube-context produktion-west: no such context in {path}" in problem.message
    assert problem.hint == "defined: production-west, aa-dev, zz"


def test_the_first_document_of_a_file_counts(tmp_path: Path):
    text = yaml.safe_dump(config("lab"))
    path = written(tmp_path / "config", f"{text}---\n{yaml.safe_dump(config('other'))}---\n")
    assert kube_context(path, None).name == "lab"


def test_an_unknown_current_context(tmp_path: Path):
    problem = refused(written(tmp_path / "config", config("lab", current="gone")))
    assert "the current context gone: no such context" in problem.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"a: [1\ntoken: {SECRET}", "is not YAML (line 2"),
        (f"{SECRET}", "is not a kubeconfig: expected a mapping"),
        ("", "defines no cluster"),
        (config("lab") | {"clusters": []}, "defines no cluster"),
        (config("lab") | {"clusters": {"name": SECRET}}, "expected clusters to be a list"),
        (config("lab") | {"users": [{"user": {"token": SECRET}}]}, "user number 1 has no name"),
        (config("lab") | {"users": []}, "its user lab-user is not defined"),
        (config("lab") | {"current-context": ""}, "has no current context"),
        (config("lab", cluster={"server": ""}), "has no server"),
        (config("lab", cluster={"server": "lab:6443"}), "has no server"),
        (config("lab", cluster={"certificate-authority": "x.pem"}), "no file"),
        (config("lab", cluster={"certificate-authority-data": "%%%"}), "is not base64"),
        (config("lab", user={"client-key-data": f"%{SECRET}"}), "client-key-data of user lab-user"),
        (config("lab", user={"tokenFile": "absent"}), "tokenFile of user lab-user"),
        (config("lab", user={"auth-provider": {"name": "oidc"}}), "without a saved token"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: Any, words: str):
    assert words in refused(written(tmp_path / "config", content)).message


def test_a_file_that_is_no_text_or_a_directory(tmp_path: Path):
    (tmp_path / "binary").write_bytes(b"\x80\x81" * 10)
    assert "is not YAML" in refused(tmp_path / "binary").message
    assert "is not readable: is a directory" in refused(tmp_path).message


@pytest.mark.parametrize("part", ["certificate-authority", "client-certificate"])
def test_certificates_that_are_none(tmp_path: Path, part: str):
    junk = b64encode(f"no PEM {SECRET}".encode()).decode()
    pair = {"client-certificate-data": junk, "client-key-data": junk}
    server = {"server": "https://lab:1"}
    if part == "client-certificate":
        values = config("lab", cluster=server, user=pair)
    else:
        values = config("lab", cluster=server | {"certificate-authority-data": junk})
    problem = refused(written(tmp_path / "config", values))
    assert f"the {part}" in problem.message
    assert "expected PEM" in problem.message


def test_the_title_has_no_credentials(tmp_path: Path):
    values = config("lab", cluster={"server": f"https://me:{SECRET}@api.lab:6443/base/"})
    assert kube_context(written(tmp_path / "config", values), None).title == (
        "lab (https://api.lab:6443/base)"
    )


def test_a_context_does_not_show_its_user(tmp_path: Path):
    assert SECRET not in repr(kube_context(written(tmp_path / "config", config()), None))


# -- who asks ------------------------------------------------------------------------------------


def test_a_token_and_a_password(tmp_path: Path):
    assert headers(tmp_path) == [("Authorization", f"Bearer {SECRET}")]
    basic = b64encode(b"me:pass").decode()
    given = headers(tmp_path, user={"username": "me", "password": "pass"})
    assert given == [("Authorization", f"Basic {basic}")]


def test_nobody(tmp_path: Path):
    values = config("lab")
    values["contexts"][0]["context"].pop("user")
    assert Login(kube_context(written(tmp_path / "config", values), None)).headers() == []


def test_a_token_file_is_read_each_time(tmp_path: Path):
    token = written(tmp_path / "token", "one\n")
    asks = login(tmp_path, user={"tokenFile": "token"})
    assert asks.headers() == [("Authorization", "Bearer one")]
    token.write_text("two")
    assert asks.headers() == [("Authorization", "Bearer two")]
    token.unlink()
    with pytest.raises(Unreachable, match="is not readable"):
        asks.headers()


def test_the_token_of_an_auth_provider_is_used_as_it_is(tmp_path: Path):
    provider = {"name": "oidc", "config": {"id-token": "abc.def", "refresh-token": SECRET}}
    asks = headers(tmp_path, user={"auth-provider": provider})
    assert asks == [("Authorization", "Bearer abc.def")]


def test_acting_as_somebody_else(tmp_path: Path):
    user = {"as": "bob", "as-groups": ["a", "b"], "as-user-extra": {"x/y": ["1"]}}
    assert headers(tmp_path, user=user) == [
        ("Impersonate-User", "bob"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-x%2Fy", "1"),
    ]


# -- credential plugins --------------------------------------------------------------------------

API = "client.authentication.k8s.io/v1"


def plugin(folder: Path, code: str, **more: Any) -> dict[str, Any]:
    """A plugin that runs this Python; it counts its runs in a file called ``runs``."""
    path = folder / "plugin"
    counting = f"open({str(folder / 'runs')!r}, 'a').write('x')\n"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{counting}{code}\n")
    path.chmod(0o755)
    return {"exec": {"apiVersion": API, "command": "./plugin", "interactiveMode": "Never", **more}}


def answering(**status: str) -> str:
    body = {"apiVersion": API, "kind": "ExecCredential", "status": status}
    return f"print({json.dumps(body)!r})"


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text())


def test_a_plugin_runs_once_while_its_token_lasts(tmp_path: Path):
    user = plugin(tmp_path, answering(token="abc", expirationTimestamp="2999-01-01T00:00:00Z"))
    asks = login(tmp_path, user=user)
    assert [asks.headers() for _ in range(2)] == [[("Authorization", "Bearer abc")]] * 2
    assert runs(tmp_path) == 1


def test_a_plugin_runs_again_when_its_token_is_over_or_was_refused(tmp_path: Path):
    code = "n = os.path.getsize(os.path.join(os.path.dirname(sys.argv[0]), 'runs'))\n"
    body = {"apiVersion": API, "kind": "ExecCredential", "status": {"token": "t"}}
    ends = {"expirationTimestamp": "2001-01-01T00:00:00Z"}
    over = f"{code}b={body!r}; b['status']['token'] += str(n); b['status'] |= {ends!r}"
    asks = login(tmp_path, user=plugin(tmp_path, f"{over}\nprint(json.dumps(b))"))
    assert [asks.headers()[0][1] for _ in range(2)] == ["Bearer t2", "Bearer t3"]
    assert asks.renew()
    assert asks.headers()[0][1] == "Bearer t5"


def test_the_same_token_again_is_nothing_new(tmp_path: Path):
    assert not login(tmp_path, user=plugin(tmp_path, answering(token="abc"))).renew()
    assert not login(tmp_path).renew()


def test_a_plugin_that_is_not_installed_gives_its_hint(tmp_path: Path):
    user = {"exec": {"apiVersion": API, "command": "no-such-plugin", "installHint": "get it"}}
    problem = refused(written(tmp_path / "config", config(user=user)))
    assert "the credential plugin no-such-plugin of context lab is not installed" in problem.message
    assert problem.hint == "get it"


def test_what_a_failing_plugin_says_is_told_without_its_secrets(tmp_path: Path):
    code = f"sys.exit('SSO session of {SECRET}\\nhas expired')"
    env = [{"name": "CLIENT", "value": SECRET}]
    with pytest.raises(Unreachable) as caught:
        login(tmp_path, user=plugin(tmp_path, code, env=env))
    assert "SSO session of *** has expired" in caught.value.message
    assert "kubectl --context lab auth whoami" in caught.value.hint


@pytest.mark.parametrize("output", ["no json", "[]", '{"apiVersion": 1}'])
def test_a_plugin_that_answers_nonsense(tmp_path: Path, output: str):
    with pytest.raises((Unreachable, UsageProblem), match="credential plugin plugin of context"):
        login(tmp_path, user=plugin(tmp_path, f"print({output!r})"))


def test_a_plugin_without_credentials(tmp_path: Path):
    with pytest.raises(Unreachable, match="neither a token nor a client certificate"):
        login(tmp_path, user=plugin(tmp_path, answering()))


def test_a_plugin_that_is_set_up_wrongly(tmp_path: Path):
    with pytest.raises((Unreachable, UsageProblem), match="of context lab"):
        login(tmp_path, user={"exec": {"command": "true"}})
