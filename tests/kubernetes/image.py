"""Images for containerd, as archives: an almost empty one, and the one of this checkout.

The second has the layout of docs/deploy/Containerfile: ``/opt/dynctl`` is a virtual environment
with the wheel of the checkout and the locked versions, its user is 65532, its command is
``dynctl``. What differs: the base is the Python of this machine with the libraries that it loads,
and dependencies are copied from the environment of the tests, where pip has compared them with the
lock.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[2]
USER: Final = 65532
ENVIRONMENT: Final = "/opt/dynctl"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS: Final = ("dev", "etc", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var", "work")
LINKS: Final = ("bin", "sbin", "lib", "lib64")
_UNUSED: Final = ("site-packages", "test", "idlelib", "tkinter", "ensurepip", "turtledemo")
_LOCKED: Final = re.compile(r"^([\w.-]+==[^\s\\]+(?: ;[^\\]+)?)", re.MULTILINE)
_COMMAND: Final = f"""#!{ENVIRONMENT}/bin/python
import sys
from dynctl.__main__ import main
sys.exit(main())
"""


class Layer:
    """A layer of an image in a file. Entries belong to root and keep their times: bytecode is valid
    for the time of its source."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = tarfile.open(path, "w")  # noqa: SIM115
        self._folders: set[str] = set()
        for name in FOLDERS:
            self.add_folder(name)
        for name in LINKS:
            self.add_folder(f"usr/{name}")
            self.add_link(name, f"usr/{name}")

    def add_folder(self, name: str) -> None:
        """With those above it, once."""
        if name in self._folders or name == ".":
            return
        self.add_folder(os.path.dirname(name) or ".")
        self._folders.add(name)
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
        self._archive.addfile(entry)

    def add_link(self, name: str, target: str) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        self._archive.addfile(entry)

    def add_text(self, name: str, text: str, mode: int = 0o644) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(text.encode()), mode
        self.add_folder(os.path.dirname(name))
        self._archive.addfile(entry, io.BytesIO(text.encode()))

    def add_file(self, name: str, source: Path) -> None:
        """A copy of a file, or of the file that a link names."""
        self.add_folder(os.path.dirname(name) or ".")
        entry = self._archive.gettarinfo(source.resolve(), name)
        entry.uid = entry.gid = 0
        entry.mode |= 0o444
        with source.open("rb") as content:
            self._archive.addfile(entry, content)

    def close(self) -> str:
        """Its digest."""
        self._archive.close()
        with self.path.open("rb") as written:
            return hashlib.file_digest(written, "sha256").hexdigest()


def base_image(path: Path, names: Sequence[str], pause: Path, environment: Path) -> Path:
    """Folders and links, /pause, and a PATH: its programs are the machine's, by mounts.
    ``environment``: a virtual environment, which pods mount; it is the first of the PATH."""
    layer = Layer(path.with_suffix(".layer"))
    layer.add_file("pause", pause)
    search = f"PATH={environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    return write_image(path, names, layer, {"Cmd": ["/pause"], "Env": [search, "HOME=/tmp"]})


def checkout_image(path: Path, name: str, folder: Path) -> Path:
    """The image of this checkout. ``folder``: for its wheel."""
    layer = Layer(path.with_suffix(".layer"))
    packages = f"{ENVIRONMENT[1:]}/lib/python{sysconfig.get_python_version()}/site-packages"
    modules = [*add_python(layer), *add_dependencies(layer, packages), add_openssl(layer)]
    for source in files_of(install_wheel(folder)):
        layer.add_file(f"{packages}/{source.relative_to(folder / 'installed')}", source)
    for library in libraries_of(modules):
        layer.add_file(place_of(library), library)
    layer.add_link(f"{ENVIRONMENT[1:]}/bin/python", "/usr/local/bin/python3")
    layer.add_text(f"{ENVIRONMENT[1:]}/pyvenv.cfg", "home = /usr/local/bin\n")
    layer.add_text(f"{ENVIRONMENT[1:]}/bin/dynctl", _COMMAND, 0o755)
    variables = [
        f"PATH={ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin",
        *("PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1", "HOME=/tmp"),
    ]
    settings = {"Entrypoint": ["dynctl"], "Env": variables, "User": f"{USER}:{USER}"}
    return write_image(path, [name], layer, {**settings, "WorkingDir": "/tmp"})


def add_python(layer: Layer) -> Iterator[Path]:
    """This machine's Python below /usr/local, without its tests and packages; yields what loads
    libraries."""
    program = Path(sys.executable).resolve()
    home = program.parents[1]
    layer.add_file("usr/local/bin/python3", program)
    yield program
    library = Path(sysconfig.get_path("stdlib"))
    for source in files_of(library):
        parts = source.relative_to(library).parts
        if parts[0] in _UNUSED or source.name.startswith("_tkinter"):
            continue
        layer.add_file(f"usr/local/lib/{library.name}/{'/'.join(parts)}", source)
        if source.suffix == ".so":
            yield source
    for source in home.glob("lib/libpython*.so.*"):
        layer.add_file(place_of(source), source)


def add_dependencies(layer: Layer, packages: str) -> Iterator[Path]:
    """What requirements.lock names, from this environment; yields what loads libraries."""
    for line in _LOCKED.findall((ROOT / "requirements.lock").read_text()):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), line
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." in file.parts or not source.is_file():
                continue  # its commands, which the image does not have
            layer.add_file(f"{packages}/{file}", source)
            if ".so" in source.suffixes:
                yield source


def add_openssl(layer: Layer) -> Path:
    """The program, which `serve epp` runs: python:slim has it as what ca-certificates needs."""
    program = Path("/usr/bin/openssl")
    layer.add_file("usr/bin/openssl", program)
    layer.add_file("usr/lib/ssl/openssl.cnf", Path("/usr/lib/ssl/openssl.cnf"))
    return program


def install_wheel(folder: Path) -> Path:
    """Build the wheel of the checkout and unpack it; the folder of its packages."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*wheel, str(ROOT)], check=True)
    [built] = folder.glob("*.whl")
    installed = folder / "installed"
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(built)]
    subprocess.run(install, check=True)
    return installed


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def libraries_of(modules: Sequence[Path]) -> list[Path]:
    """The libraries of the machine that programs and modules load."""
    listed = subprocess.run(
        ["ldd", *map(str, modules)], check=False, capture_output=True, text=True
    ).stdout
    paths = {Path(path) for path in re.findall(r"(/\S+\.so\S*) \(0x", listed)}
    own = {path for path in paths if "site-packages" in path.parts or "libpython" in path.name}
    return sorted(paths - own)


def place_of(library: Path) -> str:
    """Where the image has a library of the machine: in a folder that the loader searches."""
    if library.parts[1] in LINKS:
        return f"usr{library}"
    return f"usr/lib/{platform.machine()}-linux-gnu/{library.name}"


def write_image(
    path: Path, names: Sequence[str], layer: Layer, settings: Mapping[str, Any]
) -> Path:
    """An archive in Docker's format, of one layer."""
    digest = layer.close()
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    file, blob = f"{hashlib.sha256(config).hexdigest()}.json", f"{digest}/layer.tar"
    manifest = json.dumps([{"Config": file, "RepoTags": list(names), "Layers": [blob]}]).encode()
    with tarfile.open(path, "w") as archive:
        archive.add(layer.path, blob)
        for member, content in ((file, config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    layer.path.unlink()
    return path
