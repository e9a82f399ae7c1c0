"""Files that operators name: every reader ends, every private file is for its owner and whole."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from dynctl.base import files
from dynctl.base.errors import LinkedFile, NotARegularFile, SilentPipe, file_problem, open_regular
from dynctl.base.files import expect_regular, read_file, write_private_file


def test_a_file_is_read_up_to_one_byte_above_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_file(path, 100) == b"x" * 100
    assert read_file(path, 9) == b"x" * 10
    assert read_file(os.devnull, 9) == b""


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"piped")
    os.close(writing)
    try:
        assert read_file(f"/dev/fd/{reading}", 100) == b"piped"
        with pytest.raises(NotARegularFile):
            read_file(f"/dev/fd/{reading}", 100, pipe=False)
    finally:
        os.close(reading)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"late",))
    writer.start()
    assert read_file(path, 100) == b"late"
    writer.join()


@pytest.mark.parametrize("with_writer", [False, True])
def test_a_pipe_that_does_not_end_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_writer: bool
) -> None:
    monkeypatch.setattr(files, "PIPE_S", 0.05)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR) if with_writer else None
    try:
        with pytest.raises(SilentPipe) as raised:
            read_file(path, 100)
    finally:
        if held is not None:
            os.close(held)
    assert raised.value.filename == str(path)
    assert "did not end in time" in file_problem(raised.value)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/proc/self/mem", "/dev"])
def test_what_never_ends_and_what_fails_has_a_name_and_a_reason(path: str) -> None:
    with pytest.raises(OSError) as raised:
        read_file(path, 1000)
    assert raised.value.filename == path
    assert "errno" not in file_problem(raised.value).lower()
    if path != "/proc/self/mem":
        with pytest.raises(OSError):
            expect_regular(path)
        with pytest.raises(OSError):
            open_regular(path).close()


def test_a_private_file_is_for_its_owner_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "view.json"
    path.write_text("old")
    path.chmod(0o666)
    write_private_file(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    with pytest.raises(FileExistsError):
        write_private_file(path, b"newer", new=True)
    other = tmp_path / "other.json"
    write_private_file(other, b"first", new=True)
    assert stat.S_IMODE(other.stat().st_mode) == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other.json", "view.json"]


def test_a_private_file_follows_no_link_and_fills_no_pipe(tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to(target)
    with pytest.raises(LinkedFile) as raised:
        write_private_file(link, b"x")
    assert file_problem(raised.value) == "is a symbolic link; expected a file"
    assert not target.exists()
    os.mkfifo(pipe)
    with pytest.raises(NotARegularFile):
        write_private_file(pipe, b"x")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "view.json"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space") as raised:
        write_private_file(path, b"new")
    assert raised.value.filename == str(path)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("view.json", "old")]
