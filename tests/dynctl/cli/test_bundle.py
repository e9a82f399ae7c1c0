"""`dynctl bundle`: what is in the file, what is not, and that nothing secret is."""

from __future__ import annotations

import base64
import gzip
import json
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynctl.cli.bundle import archive
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.cli.test_against_frontend import all_read, start
from tests.kube import crds, deployment
from tests.kube.api_server import ApiServer
from tests.kube.objects.accounts import VIEWER_RULES, role, user_binding
from tests.waiting import patience

MEMBERS = [
    "manifest.json",
    "versions.json",
    "options.json",
    "environment.json",
    "check.json",
    "topology-verify.json",
    "workers.json",
    "topology.json",
    "config.json",
    "thresholds.json",
    "view.json",
]
TOKEN = "planted-api-token-77"
PROMPT = (
    "A planted prompt about the harvest of blue turnips in an imaginary valley, told at length."
)


def read(path: Path) -> dict[str, Any]:
    """File -> document, in the order of the archive."""
    with tarfile.open(path) as found:
        members = found.getmembers()
        assert all(one.name.startswith("dynctl-bundle/") for one in members)
        assert all(one.isfile() and one.mode == 0o600 and one.uid == 0 for one in members)
        documents = {}
        for one in members:
            content = found.extractfile(one)
            assert content is not None
            documents[one.name.removeprefix("dynctl-bundle/")] = json.loads(content.read())
    return documents


def test_a_bundle_of_the_demo_fleet(dynctl, tmp_path):
    path = tmp_path / "b.tar.gz"
    ran = dynctl("bundle", path, "--demo", "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    documents = read(path)
    left_out = {one["file"]: one["why"] for one in ran.json["left_out"]}
    assert set(left_out) == {"check.json", "topology-verify.json"}
    assert "needs a running deployment" in left_out["check.json"]
    assert "no cluster specified" in left_out["topology-verify.json"]
    assert list(documents) == [one for one in MEMBERS if one not in left_out]
    manifest = documents["manifest.json"]
    assert [one["file"] for one in manifest["members"]] == list(documents)[1:]
    assert manifest["left_out"] == ran.json["left_out"]
    assert documents["versions.json"]["client"] == manifest["client"]
    # The view in it answers as the fleet itself does.
    view = tmp_path / "view.json"
    view.write_text(json.dumps(documents["view.json"]))
    assert dynctl("workers", "list", "--view", view).out == dynctl("workers", "list", "--demo").out


def test_what_is_there_is_not_overwritten(dynctl, tmp_path):
    path = tmp_path / "b.tar.gz"
    path.write_text("mine")
    ran = dynctl("bundle", path, "--demo")
    assert (ran.code, ran.out, path.read_text()) == (2, "", "mine")
    assert "exists already" in ran.err
    assert dynctl("bundle", path, "--demo", "--force").code == 0
    assert "manifest.json" in read(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_the_file_may_be_named_in_three_ways(dynctl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, line in enumerate((["a.tgz"], ["--to", "b.tgz"], ["-o", "c.tgz"])):
        assert dynctl("bundle", *line, "--demo").code == 0
        assert len([*tmp_path.iterdir()]) == number + 1
    # A word that is a format is no file; with none named, the time names it.
    named = dynctl("bundle", "--demo", "-o", "name")
    assert named.out.startswith("dynctl-bundle-2")
    assert (tmp_path / named.out.strip()).exists()
    assert dynctl("-o", "name", "bundle", "d.tgz", "--demo").out == "d.tgz\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["a.tgz", "-o", "b.tgz"], "2 files specified"),
        (["."], "is a directory"),
        (["no/such/place.tgz"], "does not exist"),
        (["a.tgz", "-o", "junit"], "-o junit"),
    ],
)
def test_a_file_that_cannot_be_written(dynctl, tmp_path, monkeypatch, line, expected):
    monkeypatch.chdir(tmp_path)
    ran = dynctl("bundle", *line, "--demo")
    assert (ran.code, ran.out) == (2, "")
    assert expected in ran.err
    assert [*tmp_path.iterdir()] == []


def test_a_bundle_without_a_reachable_source_lists_what_is_missing(dynctl, tmp_path):
    path = tmp_path / "b.tgz"
    ran = dynctl("bundle", path, "--frontend", "http://127.0.0.1:1", "-o", "json")
    assert ran.code == 3
    left_out = {one["file"]: one["why"] for one in ran.json["left_out"]}
    assert {"workers.json", "config.json", "thresholds.json", "view.json"} <= set(left_out)
    assert "does not answer" in left_out["workers.json"]
    (peer,) = read(path)["versions.json"]["frontends"]
    assert "does not answer" in peer["error"]


def test_an_address_with_a_password_is_an_error_and_not_in_the_bundle(dynctl, tmp_path):
    path = tmp_path / "b.tgz"
    ran = dynctl("bundle", path, "--frontend", "http://planted:pw-planted@127.0.0.1:1")
    assert ran.code == 2
    assert "expected http://HOST:PORT, without user" in " ".join(ran.out.split())
    assert "planted" not in ran.out + ran.err
    assert b"planted" not in gzip.decompress(path.read_bytes())


def test_a_section_that_is_too_large_is_left_out(dynctl, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_MEMBER", 4000)
    ran = dynctl("bundle", tmp_path / "b.tgz", "--demo", "-o", "json")
    left_out = {one["file"]: one["why"] for one in ran.json["left_out"]}
    assert "the limit is 4,000" in left_out["view.json"]
    assert "topology.json" in read(tmp_path / "b.tgz")


def test_the_same_members_make_the_same_bytes():
    members = [("b.json", b"{}"), ("a.json", b"[1]")]
    assert archive.pack(members, 1_795_262_671.4) == archive.pack(members, 1_795_262_671.0)
    assert archive.pack(members, 1_795_262_671.0) != archive.pack(members[::-1], 1_795_262_671.0)


# -- nothing secret --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A frontend that wants a token, before an engine, after it served the planted prompt."""
    logs = tmp_path_factory.mktemp("logs")
    processes = []
    try:
        process, ready = start(
            "serve", "engine", "--name", "a0", "--speedup-ratio", "1000", errors=logs / "a0.log"
        )
        processes.append(process)
        process, front = start(
            "serve", "frontend", "--announce", "--http-port", "0", "--api-token", TOKEN,
            "--model-path", str(DEMO_MODEL_DIR), "--worker",
            f"{ready['url']},name=a0,kv-events={ready['kv_events']},replay={ready['replay']}",
            errors=logs / "frontend.log",
        )  # fmt: skip
        processes.append(process)
        all_read(front["url"], TOKEN)
        body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
        url = f"{front['url']}/v1/chat/completions"
        answer = httpx.post(url, json=body, trust_env=False, timeout=patience(30))
        assert answer.status_code == 200
        yield front["url"]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def test_no_planted_secret_and_no_prompt_is_in_it(dynctl, frontend, tmp_path, monkeypatch):
    planted = {
        "DYNCTL_TOKEN": TOKEN,
        "ETCD_AUTH_USERNAME": "planted-etcd-user",
        "ETCD_AUTH_PASSWORD": "planted-etcd-password",
        "NATS_AUTH_TOKEN": "planted-nats-token",
        "HF_TOKEN": "hf_planted_hub_token",
        "DYN_UNHEARD_OF": "planted-in-a-new-variable",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NATS_SERVER", "nats://planted-nats-user:planted-nats-pw@127.0.0.1:1")
    monkeypatch.setenv("DYN_NAMESPACE", "shown-namespace")
    path = tmp_path / "b.tgz"
    with ApiServer(rbac=True) as server:
        crds.install(server)
        server.add_user("planted-kube-token-1", "somebody")
        bound = (role("", "viewer", VIEWER_RULES), user_binding("viewer", "somebody"))
        for body in (*deployment.healthy(), *bound):
            server.store.create(body)
        config = server.kubeconfig(tmp_path / "kubeconfig", token="planted-kube-token-1")
        line = ["--frontend", frontend, "--kubeconfig", config, "-n", "prod"]
        ran = dynctl("bundle", path, *line, "-o", "json")
    assert (ran.code, ran.json["left_out"]) == (0, [])
    documents = read(path)
    assert list(documents) == MEMBERS
    secrets = [*planted.values(), "planted-nats-user", "planted-nats-pw", "planted-kube-token-1"]
    content = gzip.decompress(path.read_bytes())
    for secret in secrets:
        assert secret.encode() not in content, secret
        assert base64.b64encode(secret.encode()).rstrip(b"=") not in content, secret
    for word in ("turnips", "imaginary valley"):
        assert word.encode() not in content
    # It holds what a bug report needs all the same.
    assert documents["environment.json"]["DYN_NAMESPACE"] == "shown-namespace"
    assert documents["environment.json"]["NATS_SERVER"] == "nats://***@127.0.0.1:1"
    assert documents["environment.json"]["DYN_UNHEARD_OF"] == "***"
    assert [row["name"] for row in documents["workers.json"]["workers"]] == ["a0"]
    assert documents["workers.json"]["workers"][0]["ranks"][0]["cached_blocks"] > 0
    assert documents["versions.json"]["frontends"][0]["kind"] == "dynctl"
    assert documents["versions.json"]["cluster"]["version"]
    assert documents["topology-verify.json"]["kind"] == "VerifyReport"
    assert documents["check.json"]["kind"] == "CheckReport"
    assert documents["thresholds.json"]["thresholds"][0]["replica"] == frontend
