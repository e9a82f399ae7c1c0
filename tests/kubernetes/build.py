"""Build the programs of Kubernetes from their Go modules: usage: build.py GO DIRECTORY [VERSION]

Without VERSION that of ``programs/go.mod``, with the sums of ``programs/go.sum``. Another version
resolves its modules again. Without Go or the network nothing is built, and the output says why:
tests that need the programs are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).resolve().parent / "programs"
_MODULE: Final = "k8s.io/kubernetes"
_VERSION_PACKAGE: Final = "k8s.io/component-base/version"


def default_version() -> str:
    """``1.36.3``."""
    [version] = re.findall(rf"{_MODULE} v([\d.]+)", (SOURCES / "go.mod").read_text())
    return str(version)


class NotAvailableError(Exception):
    """Go or a module cannot be had on this machine."""


def build(go: str, directory: Path, version: str) -> None:
    """All programs into ``directory``, which is made whole or not at all.

    Raises NotAvailableError, and CalledProcessError where Go refuses the code.
    """
    if shutil.which(go) is None:
        raise NotAvailableError(f"{go} is not a program: install Go 1.26, or name it with GO=...")
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        sources = SOURCES
        if version != default_version():
            sources = Path(folder, "sources")
            shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("go.*"))
            write_module_file(go, sources, version)
            _fetch(go, "mod", "tidy", folder=sources)
        _fetch(go, "list", "-deps", "./...", folder=sources)
        made = Path(folder, "programs")
        made.mkdir()
        minor = version.split(".")[1]
        values = {"gitVersion": f"v{version}", "gitMajor": "1", "gitMinor": minor}
        flags = [f"-X {_VERSION_PACKAGE}.{name}={value}" for name, value in values.items()]
        options = ["-trimpath", "-ldflags", " ".join(["-s", "-w", *flags]), "-o", str(made)]
        _run(go, "build", *options, "./...", folder=sources)
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)


def write_module_file(go: str, folder: Path, version: str) -> None:
    """A go.mod with this version. Its own modules, which are folders of its repository, are those
    that were published with it."""
    printed = _fetch(go, "mod", "download", "-json", f"{_MODULE}@v{version}", folder=folder)
    upstream = Path(json.loads(printed)["GoMod"]).read_text()
    staged = sorted(set(re.findall(r"(k8s\.io/[a-z0-9-]+) v0\.0\.0\s", upstream)))
    published = f"v0.{version.partition('.')[2]}"
    lines = ["module dynctl.test/kubernetes", "", *re.findall(r"^go .*", upstream, re.MULTILINE)]
    lines += ["", f"require {_MODULE} v{version}", "", "replace ("]
    lines += [f"\t{module} => {module} {published}" for module in staged]
    (folder / "go.mod").write_text("\n".join([*lines, ")", ""]))


def _fetch(go: str, *words: str, folder: Path) -> str:
    """A command of Go that needs the network where its cache does not have the modules."""
    try:
        return _run(go, *words, folder=folder)
    except subprocess.CalledProcessError as error:
        raise NotAvailableError(f"`go {' '.join(words)}` failed: see above") from error


def _run(go: str, *words: str, folder: Path) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-p=2", "GOWORK": "off"}
    environment.setdefault("GOGC", "400")  # two compilers have room
    done = subprocess.run(
        [go, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    try:
        build(sys.argv[1], Path(sys.argv[2]), (*sys.argv[3:], default_version())[0])
    except NotAvailableError as reason:
        sys.stderr.write(f"left out: the programs of Kubernetes: {reason}\n")
