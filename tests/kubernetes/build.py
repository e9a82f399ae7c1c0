"""Build the programs of Kubernetes from their Go modules: usage: build.py GO DIRECTORY [VERSION]

Without VERSION that of ``programs/go.mod``, with the sums of ``programs/go.sum``. Another version
resolves its modules again.
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


def build(go: str, directory: Path, version: str) -> None:
    """All programs into ``directory``, which is made whole or not at all."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        sources = SOURCES
        if version != default_version():
            sources = Path(folder, "sources")
            shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("go.*"))
            write_module_file(go, sources, version)
            _run(go, "mod", "tidy", folder=sources)
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
    found = _run(go, "mod", "download", "-json", f"{_MODULE}@v{version}", folder=folder)
    upstream = Path(json.loads(found)["GoMod"]).read_text()
    staged = sorted(set(re.findall(r"(k8s\.io/[a-z0-9-]+) v0\.0\.0\s", upstream)))
    published = f"v0.{version.partition('.')[2]}"
    lines = ["module dynctl.test/kubernetes", "", *re.findall(r"^go .*", upstream, re.MULTILINE)]
    lines += ["", f"require {_MODULE} v{version}", "", "replace ("]
    lines += [f"\t{module} => {module} {published}" for module in staged]
    (folder / "go.mod").write_text("\n".join([*lines, ")", ""]))


def _run(go: str, *words: str, folder: Path) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-p=2", "GOWORK": "off"}
    done = subprocess.run(
        [go, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]), (*sys.argv[3:], default_version())[0])
