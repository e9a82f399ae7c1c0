"""Run the commands of a scene as they are written; only ports are replaced."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final
from unittest import mock

from dynctl.cli.app import run
from tests.docs.comparing import Judge
from tests.docs.pages import ROOT, Command, File, Scene, pages
from tests.forks import Program, shell_command
from tests.ports import free_port
from tests.waiting import patience

FRONTEND_PORT: Final = "8000"
#: Names the kubeconfig of kubectl, which has more rights than the one of dynctl.
ADMIN_KUBECONFIG: Final = "KUBECTL_KUBECONFIG"
_READY_S: Final = 30.0
_QUOTED = re.compile(r"'[^']*'|\"[^\"`$]*\"")
_NEEDS_SHELL = re.compile(r"[|&;<>()$`]")
_PORT = re.compile(r"(?:127\.0\.0\.1:|localhost:|--(?:[a-z]+-)*port )(\d{4})\b")


class Session:
    """A shell of one scene. ``environment`` is added to the process's own; ``directory`` is the
    scene's own; commands run there, or in ``place`` if given. Lines that export ``fixed`` variables
    change nothing: the scene has its own values for them. ``after`` is called after each kubectl
    command.

    Programs that do not end (``serve``, ``demo --keep``) run beside it until :meth:`close`.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        *,
        place: Path | None = None,
        fixed: Iterable[str] = (),
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self._directory = place or directory
        self._fixed = frozenset(fixed)
        self._after = after
        self._environment = dict(environment)
        self._ports: dict[str, str] = {}
        self._running: list[tuple[Program, str]] = []
        self._starting: list[str] = []
        self._log = directory / "background.log"
        self._environment["PATH"] = f"{_programs(directory)}{os.pathsep}{os.environ['PATH']}"
        self._environment |= {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}

    @property
    def written_ports(self) -> dict[str, str]:
        """Port in use -> the one of the page."""
        return {real: written for written, real in self._ports.items()}

    def environ(self) -> dict[str, str]:
        return {**os.environ, **self._environment}

    def use_frontend(self, url: str) -> None:
        """A frontend runs at ``url``, which pages write as port 8000."""
        self._ports[FRONTEND_PORT] = url.rpartition(":")[2]
        self._environment["DYNCTL_FRONTEND"] = url

    def write(self, file: File) -> None:
        text = self._with_ports(file.text)
        (self._directory / file.name).write_text(text, encoding="utf-8")

    def run(self, command: Command) -> tuple[int, str]:
        """Exit code and output (both streams). A program that does not end is started: 0, ""."""
        text = self._with_ports(command.text)
        if self._exported(text):
            return 0, ""
        words = shlex.split(text, comments=True)
        if _stays(words):
            self._start(words)
            return 0, ""
        self._await_started()
        if words[0] == "dynctl" and not _NEEDS_SHELL.search(_QUOTED.sub("", text)):
            return self._here(words[1:])
        done = self._shell(text)
        if words[0] == "kubectl":
            self._after()
        return done

    def close(self) -> None:
        for process, _ in self._running:
            process.terminate()
        for process, _ in self._running:
            try:
                process.wait(patience(10))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # -- inside ------------------------------------------------------------------------------------

    def _with_ports(self, text: str) -> str:
        for port in _PORT.findall(text):
            if port not in self._ports:
                self._ports[port] = free_page_port()
        return re.sub(r"\b\d{4}\b", lambda found: self._ports.get(found[0], found[0]), text)

    def _exported(self, text: str) -> bool:
        if not text.startswith("export "):
            return False
        for word in shlex.split(text, comments=True)[1:]:
            name, _, value = word.partition("=")
            if name not in self._fixed:
                self._environment[name] = value
        return True

    def _here(self, arguments: list[str]) -> tuple[int, str]:
        output = io.StringIO()
        # Pages write the default frontend as port 8000, which another program may have here.
        port = self._ports.setdefault(FRONTEND_PORT, free_page_port())
        with (
            mock.patch("dynctl.sources.named.DEFAULT_FRONTEND", f"http://127.0.0.1:{port}"),
            contextlib.chdir(self._directory),
            _environment(self.environ()),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code = run(arguments)
        return code, output.getvalue()

    def _shell(self, text: str) -> tuple[int, str]:
        done = subprocess.run(
            ["/bin/bash", "-o", "pipefail", "-c", text],
            cwd=self._directory,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=patience(60),
        )
        return done.returncode, done.stdout

    def _start(self, words: list[str]) -> None:
        if words[:3] != ["dynctl", "serve", "engine"]:
            port = next((words[i + 1] for i, word in enumerate(words) if word == "--http-port"), "")
            if not port and words[2:3] != ["attach"]:
                port = self._ports.setdefault(FRONTEND_PORT, free_page_port())
                self.use_frontend(f"http://127.0.0.1:{port}")
                self._environment["DYN_HTTP_PORT"] = port
            scheme = "https" if "--tls-cert" in words else "http"
            path = "/health" if words[2:3] == ["indexer"] else ""
            if words[2:3] == ["attach"]:
                port, path = words[words.index("--system-port") + 1], "/health"
            if "--select-service-port" in words:  # a router whose workers come over HTTP
                port = words[words.index("--select-service-port") + 1]
                path = "/health"
            self._starting.append(f"{scheme}://127.0.0.1:{port}{path}")
        with self._log.open("ab") as log:
            process = Program(
                words,
                cwd=self._directory,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running.append((process, shlex.join(words)))

    def _await_started(self) -> None:
        deadline = time.monotonic() + patience(_READY_S)
        while self._starting:
            if _ready(self._starting[0]):
                self._starting.pop(0)
                continue
            ended = [text for process, text in self._running if process.poll() is not None]
            assert not ended, f"{ended[0]} ended:\n{self._log.read_text()}"
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)


def follow(scene: Scene, shell: Session, judge: Judge) -> None:
    """Do the steps of a scene in their order; ``judge`` sees what each command did."""
    for step in scene.steps:
        if isinstance(step, File):
            shell.write(step)
        else:
            judge(shell.run(step), step, shell.written_ports, scene.page)


def free_page_port() -> str:
    """A port of four digits, so that lines are as wide as those of the page. No page has this
    number: in an output it is always the port."""
    while (port := free_port(2000, 9999)) in _numbers_of_pages():
        pass
    return str(port)


@functools.cache
def _numbers_of_pages() -> frozenset[int]:
    texts = (path.read_text(encoding="utf-8") for path in pages())
    return frozenset(int(found) for text in texts for found in re.findall(r"\d{4}", text))


def _stays(words: list[str]) -> bool:
    return words[0] == "dynctl" and (words[1] == "serve" or "--keep" in words)


def _ready(url: str) -> bool:
    """Whether a frontend responds, all its workers are ready and their event streams connected.
    With https, which pages show with an admin token: whether it can serve a request."""
    try:
        if url.endswith("/health"):  # a service without a list of workers that are ready
            with urllib.request.urlopen(url, timeout=patience(5)):
                return True
        if url.startswith("https:"):
            unverified = ssl._create_unverified_context()
            with urllib.request.urlopen(f"{url}/ready", context=unverified, timeout=patience(5)):
                return True
        with urllib.request.urlopen(f"{url}/v1/workers", timeout=patience(5)) as answer:
            workers = json.load(answer)["workers"]
    except OSError:
        return False
    streams = {rank["index"] for one in workers for rank in one["ranks"]}
    connected = streams.isdisjoint({"disconnected", "recovering"})
    return bool(workers) and connected and all(one["status"] == "ready" for one in workers)


def _programs(directory: Path) -> Path:
    """A directory with the programs that pages name, as this test has them."""
    found = directory / ".programs"
    found.mkdir()
    # A test does not update an environment that is older than pyproject.toml.
    kubectl = Path(sysconfig.get_path("scripts"), "kubectl")
    old = "".join(f" -o requirements{kind}.lock" for kind in ("", "-build", "-dev"))
    make = f"exec {shutil.which('make')} -o pyproject.toml{old}"
    programs = {
        "dynctl": f"exec {shell_command()}",
        "python3": f"exec {shlex.quote(sys.executable)}",
        "kubectl": f"KUBECONFIG=${ADMIN_KUBECONFIG} exec {shlex.quote(str(kubectl))}",
        "make": f"unset MAKEFLAGS; {make}",
    }
    for name, program in programs.items():
        script = found / name
        script.write_text(f'#!/bin/sh\n{program} "$@"\n')
        script.chmod(0o755)
    return found


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
