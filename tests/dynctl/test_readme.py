"""The README, run as written: its engines, its frontend, its questions. Only ports are replaced.

And the map of the code, beside the contract and the folders."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynctl.cli.table import COMMANDS
from tests.forks import Program
from tests.ports import free_port
from tests.waiting import patience

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text(encoding="utf-8")
ARCHITECTURE = README.parent / "docs" / "architecture.md"
MAP = ARCHITECTURE.read_text(encoding="utf-8")
PAGES = README.parent / "docs" / "README.md"
PORTS = ("8101", "8102", "5601", "5602", "5603", "5604", "8000")


def command_lines(program: str) -> list[str]:
    """Every line of a code block that starts with ``program``, continuation lines joined."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", TEXT, flags=re.M | re.S):
        joined = block.replace("\\\n", " ")
        found += [line for line in joined.splitlines() if line.startswith(program + " ")]
    return found


@pytest.fixture(scope="module")
def ports() -> dict[str, str]:
    return {port: str(free_port()) for port in PORTS}


def with_ports(line: str, ports: dict[str, str]) -> str:
    return re.sub(r"\b(\d{4})\b", lambda found: ports.get(found[1], found[1]), line)


def environment(ports: dict[str, str]) -> dict[str, str]:
    url = f"http://127.0.0.1:{ports['8000']}"
    return os.environ | {"DYN_HTTP_PORT": ports["8000"], "DYNCTL_FRONTEND": url}


@pytest.fixture(scope="module")
def running(ports: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The README's `dynctl serve` lines, each a process of its own, until two workers are ready."""
    log = tmp_path_factory.mktemp("readme") / "serve.log"
    processes = []
    try:
        for line in command_lines("dynctl"):
            words = shlex.split(with_ports(line, ports))
            if words[1] == "serve":
                with log.open("ab") as output:
                    processes.append(
                        Program(words, stdout=output, stderr=output, env=environment(ports))
                    )
        assert len(processes) == 3
        deadline = time.monotonic() + patience(30)
        while _ready(ports) != 2:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _ready(ports: dict[str, str]) -> int:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{ports['8000']}/v1/workers", timeout=5
        ) as answer:
            return int(answer.read().decode().count('"status":"ready"'))
    except OSError:
        return 0


@pytest.mark.parametrize(
    "line", [line for line in command_lines("dynctl") if " serve " not in line]
)
def test_questions_are_answered(line: str, running: None, ports: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(with_ports(line, ports))],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
        env=environment(ports),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_a_completion(running: None, ports: dict[str, str]) -> None:
    (line,) = command_lines("curl")
    done = subprocess.run(
        ["/bin/sh", "-c", with_ports(line, ports)],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    assert '"object":"chat.completion"' in done.stdout


def test_a_page_leads_to_every_command() -> None:
    text = PAGES.read_text(encoding="utf-8")
    for path in COMMANDS:
        assert f"`dynctl {path.split()[0]}" in text, path


def test_the_readme_is_short() -> None:
    assert len(TEXT.split()) <= 900


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (README.parent / target).exists(), target


def test_the_map_names_the_rooms_in_the_order_of_the_contract() -> None:
    section = MAP.split("\n## Where a new thing goes")[0]
    tiers: dict[str, list[str]] = {}
    tier = ""
    for row in re.findall(r"^\| +(\d*) *\| `([a-z_]+)/?` \|", section, flags=re.M):
        tier = row[0] or tier
        tiers.setdefault(tier, []).append(row[1])
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(
        one for one in project["tool"]["importlinter"]["contracts"] if one["id"] == "tiers"
    )
    layers = [layer.split(" | ") for layer in contract["layers"]]
    assert list(tiers.values()) == [*layers, ["router_core"]]
    assert list(tiers) == [str(number) for number in range(len(layers), -1, -1)]


def test_the_map_shows_the_floors_of_serving_in_the_order_of_their_contract() -> None:
    floors = MAP.split("\n### The floors of serving\n\n")[1].split("\n\n")[0].splitlines()
    shown = [set(re.findall(r"`([a-z_]+)/`", floor)) for floor in floors]
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(
        one for one in project["tool"]["importlinter"]["contracts"] if one["id"] == "serving"
    )
    assert shown == [set(layer.split(" | ")) for layer in contract["layers"]]


def test_the_places_for_new_things_exist() -> None:
    section = MAP.split("\n## Where a new thing goes")[1].split("\n## ")[0]
    rows = re.findall(r"^\|[^|\n]+\|([^|\n]+)\|$", section, flags=re.M)[2:]
    places = {place for row in rows for place in re.findall(r"`([\w/]+(?:/|\.py|\.toml))`", row)}
    assert len(places) >= 10
    root = README.parent
    missing = [
        place
        for place in places
        if not (root / place).exists() and not (root / "dynctl" / place).exists()
    ]
    assert missing == []
