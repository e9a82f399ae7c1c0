"""The wheel and the sdist: built from this tree, installed into a clean environment, run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.kube.witness.conftest import Kubectl
from tests.shipping.artefacts import DEPLOY, ROOT
from tests.waiting import patience


def pythons() -> list[str]:
    """The Pythons of this machine that the package supports, those of pyenv included."""
    found = []
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in (11, 12, 13):
        name = f"python3.{minor}"
        paths = [*sorted(map(str, root.glob(f"3.{minor}.*/bin/{name}"))), shutil.which(name)]
        for path in filter(None, paths):
            if subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
                found.append(path)
                break
    return found


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "COLUMNS": "80", **more}
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        if name in os.environ:
            environment[name] = os.environ[name]
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=patience(300), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist of this tree, and the wheel that is made from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(tools / "python", "-m", "build", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="session", params=pythons(), ids=lambda path: Path(path).name)
def installed(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The environment of a Python with nothing but the wheel and what it needs."""
    home = tmp_path_factory.mktemp(Path(request.param).name)
    (wheel,) = built.glob("*.whl")
    run(request.param, "-m", "venv", home / "venv", cwd=home)
    pip = (home / "venv/bin/python", "-m", "pip", "install", "--quiet")
    flags = ("--disable-pip-version-check", "--require-hashes", "--requirement")
    run(*pip, *flags, ROOT / "requirements.lock", cwd=home)
    run(*pip, "--disable-pip-version-check", "--no-deps", wheel, cwd=home)
    return home / "venv"


def tracked(folder: str) -> set[str]:
    """The files of the package in the version control; generated ones are not shipped."""
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.splitlines())


def test_the_wheel_and_the_sdist_hold_everything(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert tracked("dynctl") | tracked("router_core") <= names
    shared = {name.partition(".data/data/")[2] for name in names if ".data/" in name}
    assert shared == {
        "share/bash-completion/completions/dynctl",
        "share/zsh/site-functions/_dynctl",
        "share/fish/vendor_completions.d/dynctl.fish",
        "share/man/man1/dynctl.1",
    }
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("dynctl", "router_core", "tests", "docs", "completions"):
        assert tracked(folder) <= members, folder
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "requirements.lock"} <= members


def test_the_program_runs_from_a_clean_environment(installed: Path, tmp_path: Path) -> None:
    program = installed / "bin" / "dynctl"
    version = run(program, "--version", cwd=tmp_path).strip()
    assert version.endswith("0.1.0")
    assert "DYT0404" in run(program, "explain", "DYT0404", cwd=tmp_path)
    for shell in ("bash", "zsh", "fish"):
        assert "dynctl" in run(program, "completion", shell, cwd=tmp_path)
    steps = run(program, "demo", "-o", "jsonl", cwd=tmp_path).splitlines()
    assert [json.loads(line) for line in steps]
    assert (installed / "share" / "man" / "man1" / "dynctl.1").is_file()


def test_it_is_a_plugin_of_kubectl(installed: Path, kubectl: Kubectl, tmp_path: Path) -> None:
    path = f"{installed / 'bin'}:/usr/bin:/bin"
    assert "kubectl-dynctl" in run(kubectl.program, "plugin", "list", cwd=tmp_path, PATH=path)
    shown = run(kubectl.program, "dynctl", "explain", "DYT0404", cwd=tmp_path, PATH=path)
    assert "DYT0404" in shown


def test_the_plugin_of_krew_starts_the_program(kubectl: Kubectl, tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    shutil.copy(DEPLOY / "krew" / "kubectl-dynctl", plugins)
    ours = Path(sys.executable).parent
    path = f"{plugins}:{ours}:{os.environ['PATH']}"
    assert "DYT0404" in run(
        kubectl.program, "dynctl", "explain", "DYT0404", cwd=tmp_path, PATH=path
    )
    alone = subprocess.run(
        [plugins / "kubectl-dynctl"], env={"PATH": "/usr/bin:/bin"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (alone.returncode, "pipx install dynctl" in alone.stderr) == (2, True)


def test_the_bill_of_materials_is_that_of_the_wheel_in_locked_versions(
    tools: Path, built: Path, tmp_path: Path
) -> None:
    """`make bill`, as `make dist` runs it."""
    (wheel,) = built.glob("*.whl")
    # The home of pip, with its cache, is beside it.
    bill = tmp_path / "bill" / "dynctl.cdx.json"
    bill.parent.mkdir()
    python = f"DYNCTL_SHIP_PYTHON={tools / 'python'}"
    venv = f"VENV={Path(sys.prefix)}"
    run("make", "-C", ROOT, "bill", f"WHEEL={wheel}", f"BILL={bill}", python, venv, cwd=tmp_path)

    assert [path.name for path in bill.parent.iterdir()] == [bill.name]
    text = bill.read_text()
    found = json.loads(text)
    assert found["bomFormat"] == "CycloneDX"
    root = found["metadata"]["component"]
    assert (root["name"], root["version"]) == ("dynctl", wheel.name.split("-")[1])
    versions = {_plain(part["name"]): part["version"] for part in found["components"]}
    assert {"aiohttp", "msgspec", "kubernetes"} <= set(versions)
    # Tools for tests, and what installed the environment, are no part of it.
    assert not {"dynctl", "pip", "setuptools", "pytest", "ruff"} & set(versions)
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = dict(re.split("==| ", line)[:2] for line in lock if line[:1].isalnum())
    locked = {_plain(name): version for name, version in pinned.items()}
    assert versions == {name: locked[name] for name in versions}
    needed = {ref for one in found["dependencies"] for ref in one.get("dependsOn", ())}
    assert needed >= {part["bom-ref"] for part in found["components"]}
    # The same wheel has the same bill on every machine.
    assert "serialNumber" not in found
    assert "timestamp" not in found["metadata"]
    for path in (tmp_path, built, ROOT):
        assert str(path) not in text


def _plain(name: str) -> str:
    """The name of a package as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
