"""Every option that reads a file ends with exit 2 and a sentence where the file never ends."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dynctl.base import files

READERS = {
    "view": ["workers", "list", "--view", "{}"],
    "why": ["why", "{}"],
    "manifest": ["topology", "lint", "-f", "{}"],
    "plan": ["topology", "plan", "-f", "{}"],
    "kubeconfig": ["topology", "verify", "--kubeconfig", "{}"],
    "prompt tokens": ["route", "--demo", "--tokens", "{}"],
    "messages": ["route", "--demo", "--messages", "{}"],
    "admin token": ["serve", "frontend", "--admin-token-file", "{}"],
    "engine key": ["serve", "frontend", "--engine-api-key-file", "{}"],
    "keys": ["serve", "frontend", "--port", "0", "--api-key-file", "{}"],
    "workers": ["serve", "frontend", "--port", "0", "--workers-file", "{}"],
    "policy classes": ["serve", "frontend", "--port", "0", "--router-policy-config", "{}"],
    "links": [
        *("serve", "frontend", "--port", "0", "--router-kv-transfer-weight", "1"),
        *("--router-kv-transfer-qos", "{}"),
    ],
    "certificate": ["serve", "frontend", "--port", "0", "--tls-cert", "{}", "--tls-key", "{}"],
    "authority": ["--frontend", "https://127.0.0.1:1", "--ca-cert", "{}", "workers", "list"],
    "token": ["--frontend", "http://127.0.0.1:1", "--token-file", "{}", "workers", "list"],
    "trace": ["replay", "{}"],
    "recording": ["workers", "list", "--recording", "{}", "--at", "0"],
}


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_S", 0.05)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/proc/self/mem"])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_ends(dynctl: Any, tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path(kind)
    ran = dynctl(*(word.format(path) for word in READERS[reader]))
    assert ran.code == 2, (ran.out, ran.err)
    assert ran.err.startswith("error: ")
    assert "defect" not in ran.err
    assert "Traceback" not in ran.err


def test_a_pipe_of_the_shell_is_a_file(dynctl: Any, tmp_path: Path) -> None:
    saved = tmp_path / "view.json"
    assert dynctl("route", "--demo", "hi", "--save-view", saved).code == 0
    reading, writing = os.pipe()
    os.write(writing, saved.read_bytes())
    os.close(writing)
    try:
        assert "prefill-a0" in dynctl("workers", "list", "--view", f"/dev/fd/{reading}").out
    finally:
        os.close(reading)


def test_a_saved_view_is_private_and_follows_no_link(dynctl: Any, tmp_path: Path) -> None:
    saved, link = tmp_path / "view.json", tmp_path / "link"
    saved.write_text("old")
    saved.chmod(0o644)
    assert dynctl("route", "--demo", "hi", "--save-view", saved).code == 0
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert json.loads(saved.read_bytes())
    link.symlink_to(tmp_path / "victim")
    ran = dynctl("route", "--demo", "hi", "--save-view", link)
    assert ran.code == 2
    assert "is a symbolic link" in ran.err
    assert not (tmp_path / "victim").exists()


def test_a_secret_of_many_bytes_is_refused(dynctl: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"x" * (1 << 20))
    ran = dynctl("serve", "frontend", "--admin-token-file", token)
    assert ran.code == 2
    assert f"--admin-token-file {token}: larger than 16,384 bytes" in ran.err


def test_compressed_blank_lines_end_a_trace(dynctl: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress(b"\n" * 1_000_000))
    ran = dynctl("replay", trace)
    assert ran.code == 2
    assert "more than 10,000 blank lines" in ran.err


def test_the_shared_file_store_of_another_user_is_refused(
    dynctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYN_FILE_KV", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = tmp_path / "dynamo_store_kv"
    store.mkdir()
    assert "belongs to user" not in dynctl("workers", "list", "--discovery", "file").err
    owner = store.stat().st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: owner)
    if owner == 1:  # root owns the directory and is trusted: it must be another's
        os.chown(store, 4242, -1)
        monkeypatch.setattr(os, "getuid", lambda: 4243)
    ran = dynctl("workers", "list", "--discovery", "file")
    assert ran.code == 2
    assert f"{store}: belongs to user" in ran.err
    assert (
        "belongs to user"
        not in dynctl("workers", "list", "--discovery", "file", "--file-kv", store).err
    )
