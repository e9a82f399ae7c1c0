"""The words of errors: problems of files, and where they come from."""

import ast
import errno
import os
from pathlib import Path

import pytest

import dynctl
from dynctl.base.errors import file_problem

#: Sources with errors of sockets and processes, not of files.
_OTHERS = {
    "base/errors.py",
    "base/worker_environment.py",  # Dynamo's messages, word for word
    "serving/services/processes.py",  # a process that does not start
}


@pytest.mark.parametrize(
    ("number", "reading", "writing"),
    [
        (errno.ENOENT, "the file does not exist", "its directory does not exist"),
        (errno.EACCES, "no permission to read it", "no permission to write it"),
        (errno.EPERM, "no permission to read it", "no permission to write it"),
        (errno.EISDIR, "is a directory; expected a file", "is a directory; expected a file"),
        (errno.ENOTDIR, *["a part of the path is not a directory"] * 2),
        (errno.EEXIST, *["the file exists already"] * 2),
        (errno.ENOSPC, *["no space is left on its device"] * 2),
        (errno.ENAMETOOLONG, *["the name is too long"] * 2),
        (errno.EIO, *[os.strerror(errno.EIO)] * 2),
    ],
)
def test_the_problem_of_a_file_in_words(number: int, reading: str, writing: str) -> None:
    error = OSError(number, os.strerror(number), "x")
    assert file_problem(error) == reading
    assert file_problem(error, writing=True) == writing
    assert "Errno" not in file_problem(OSError(number, os.strerror(number)))


def test_a_missing_directory_and_an_error_without_a_number() -> None:
    assert file_problem(FileNotFoundError(2, "x"), "directory") == "the directory does not exist"
    assert file_problem(OSError("AF_UNIX path too long")) == "AF_UNIX path too long"


def test_every_problem_of_a_file_or_an_address_has_the_same_words() -> None:
    """The system's texts are not used elsewhere."""
    room = Path(next(iter(dynctl.__path__)))
    found = {
        path.relative_to(room).as_posix()
        for path in room.rglob("*.py")
        if b"strerror" in path.read_bytes()
        and any(
            isinstance(node, ast.Attribute) and node.attr == "strerror"
            for node in ast.walk(ast.parse(path.read_bytes()))
        )
    }
    assert found == _OTHERS
