"""The locks: each version has hashes, and what has another hash is not installed."""

import hashlib
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
RUN, DEV, BUILD = (ROOT / f"requirements{kind}.lock" for kind in ("", "-dev", "-build"))
_PINNED = re.compile(
    r"^([a-z0-9-]+)==(\S+)(?: ; [^\\]+)?((?: \\\n +--hash=sha256:[0-9a-f]{64})+)\n", re.M
)


def pinned(lock: Path) -> dict[str, tuple[str, set[str]]]:
    """Package -> its version and the hashes of its files; fails for a line of another form."""
    text = "".join(line for line in lock.read_text().splitlines(True) if line[0] != "#")
    assert _PINNED.sub("", text) == "", lock.name
    return {
        name: (version, set(re.findall("sha256:(.*?)(?: |$)", hashes, re.M)))
        for name, version, hashes in _PINNED.findall(text)
    }


def test_the_locks_agree_and_have_what_the_project_declares() -> None:
    run, dev, build = map(pinned, (RUN, DEV, BUILD))
    assert len(run) > 40
    assert run.items() <= dev.items()
    assert build.items() <= dev.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for lock, wanted in (
        (run, project["project"]["dependencies"]),
        (build, project["build-system"]["requires"]),
        (build, project["dependency-groups"]["build"]),
        (dev, chain.from_iterable(project["project"]["optional-dependencies"].values())),
    ):
        names = {re.split(r"[<>=!~;\[ ]", one)[0].lower().replace("_", "-") for one in wanted}
        assert names <= set(lock)


def test_the_lowest_versions_are_those_that_the_project_declares() -> None:
    """`make test-lowest` installs them; `make lock` writes the file again."""
    lines = (ROOT / "tests/lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for wanted in map(Requirement, [*project["dependencies"], *extras["otlp"], *extras["nkeys"]]):
        name = wanted.name.lower().replace("_", "-")
        assert wanted.specifier.contains(lowest[name]), name


_STAMPS = ("/none/.run-stamp", "/none/.dev-stamp")


@cache
def installs() -> list[list[str]]:
    """The pip commands by which `make` and the image install."""
    listed = subprocess.run(
        ["make", "--dry-run", "--always-make", "VENV=/none", *_STAMPS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    image = (ROOT / "docs/deploy/Containerfile").read_text().replace("\\\n", " ")
    commands = re.split(r"\n| && ", f"{listed.stdout}\n{image}")
    found = [shlex.split(one) for one in commands if re.search(r"-m pip (install|wheel)", one)]
    assert len(found) == 10
    return found


def test_what_is_installed_is_in_a_lock_or_is_dynctl() -> None:
    for words in installs():
        if "--requirement" in words:
            assert {"--require-hashes", "--no-build-isolation"} <= set(words)
            assert words[words.index("--requirement") + 1] in (RUN.name, DEV.name, BUILD.name)
        else:
            assert "--no-deps" in words
            assert words[-1] in (".", "/wheels/*.whl")


_ABOUT = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-example\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


@pytest.mark.parametrize("changed", [False, True], ids=["the file of the lock", "another file"])
def test_a_file_with_another_hash_is_not_installed(tmp_path: Path, changed: bool) -> None:
    wheel = tmp_path / "tiny_example-1.0-py3-none-any.whl"
    lock = tmp_path / "requirements.lock"
    for content in ("VALUE = 1\n", "VALUE = 2\n")[: 1 + changed]:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_example.py", content)
            about = "tiny_example-1.0.dist-info"
            archive.writestr(
                f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-example\nVersion: 1.0\n"
            )
            archive.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{about}/RECORD", "")
        if content == "VALUE = 1\n":
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            lock.write_text(f"tiny-example==1.0 \\\n    --hash=sha256:{digest}\n")
    (words,) = [one for one in installs() if RUN.name in one and "/none/bin/python" in one]
    words = [sys.executable, *words[words.index("-m") :]]
    done = subprocess.run(
        [*words, "--no-index", "--find-links", tmp_path, "--target", tmp_path / "out"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode != 0) == changed, done.stderr
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == changed
    assert (tmp_path / "out" / "tiny_example.py").exists() != changed
