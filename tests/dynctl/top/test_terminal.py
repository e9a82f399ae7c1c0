"""The dashboard on a real terminal (tmux), before a fleet of real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from dynctl.simulation.demo.fleet import DemoFleet
from tests.forks import forked_demos
from tests.waiting import patience, until_now

TMUX = shutil.which("tmux")
ROOT = Path(__file__).parents[3]
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hello " * 40}], "max_tokens": 4}
BOUND = {"routing_constraints": {"required_taints": ["dynamo.topology/zone=zone-a"]}}

_NUMBERS = count()

pytestmark = pytest.mark.skipif(TMUX is None, reason="tmux is not installed")


class Terminal:
    """One tmux server with one window. ``run`` types nothing: the command is the window's own."""

    def __init__(self, name: str, command: str, size: tuple[int, int] = (80, 24)) -> None:
        self._name = name
        after = 'echo "ended with $?"; stty -a; exec sleep 60'
        self._tmux(
            "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]),
            f"cd {ROOT}; {command}; {after}",
        )  # fmt: skip

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def wait(self, wanted: str | Callable[[str], object], seconds: float = 15.0) -> str:
        """The first screen with a text on it (or that is as wanted)."""
        is_there = wanted if callable(wanted) else lambda text: wanted in text
        deadline = time.monotonic() + patience(seconds)
        while time.monotonic() < deadline:
            text = self.screen()
            if is_there(text):
                return text
            time.sleep(0.05)
        raise AssertionError(f"{wanted!r} did not come up:\n{self.screen()}")

    def format(self, variable: str) -> str:
        return self._tmux("display-message", "-p", f"#{{{variable}}}").strip()

    def pane_children(self) -> list[int]:
        shell = self.format("pane_pid")
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", shell], capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def close(self) -> None:
        self._tmux("kill-server")

    def restored(self) -> None:
        """The command ended, and the terminal is as it was before."""
        self.wait("ended with")
        self.wait("opost")  # stty prints the modes after that line
        assert self.format("alternate_on") == "0"
        assert self.format("cursor_flag") == "1"
        assert self.format("mouse_any_flag") == "0"
        modes = self.screen()
        for mode in ("icanon", "echo", "isig", "icrnl", "opost"):
            assert re.search(rf"(?<![-a-z]){mode}\b", modes), mode

    def _tmux(self, *arguments: str) -> str:
        assert TMUX is not None
        done = subprocess.run(
            [TMUX, "-L", self._name, "-f", "/dev/null", *arguments],
            capture_output=True, text=True, env=os.environ | {"TERM": "xterm-256color"},
        )  # fmt: skip
        return done.stdout


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(command: str, size: tuple[int, int] = (80, 24)) -> Terminal:
        name = f"dynctl-test-{os.getpid()}-{next(_NUMBERS)}"
        opened.append(Terminal(name, command, size))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[DemoFleet]:
    with forked_demos(), DemoFleet() as running:
        yield running


def command(*arguments: str) -> str:
    return f"{sys.executable} -m dynctl top {' '.join(arguments)}"


def ask(fleet: DemoFleet, **more: object) -> httpx.Response:
    return httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY | more, timeout=patience(20))


def test_a_session_with_a_fleet_of_processes(terminal, fleet: DemoFleet):
    screen = terminal(command("--frontend", fleet.url, "--rate", "0.3"))
    screen.wait("[3] decisions (0")
    assert ask(fleet).status_code == 200
    served = screen.wait(lambda text: re.search(r"\[3\] decisions \((last )?1\b", text))
    assert re.search(r"prefill-\w\d +decode-\w\d", served)
    screen.keys("Enter")
    screen.wait("answer   prefill-")
    screen.keys("Escape")
    screen.wait("[4] alerts")
    # Sort, filter.
    screen.keys("2", "s", "S")
    screen.wait("by NAME↓")
    screen.keys("/", "decode")
    screen.wait("(4 of 6)")
    screen.keys("Enter")
    screen.keys("Escape")
    screen.wait(lambda text: "(4 of 6)" not in text)
    # A threshold: tried, confirmed, set.
    screen.keys("t")
    screen.wait("busy thresholds of demo")
    screen.keys("Down")
    screen.keys("BSpace", "BSpace", "BSpace", "9", "9")
    screen.keys("Enter")
    screen.wait("y sets these values")
    screen.keys("y")
    screen.wait("set prefill tokens 99")
    present = httpx.get(f"{fleet.url}/busy_threshold").json()["thresholds"][0]
    assert present["active_prefill_tokens_threshold"] == 99
    # An engine is killed: its domain changes; what is bound to it is refused.
    killed = time.monotonic()
    for name in ("decode-a0", "decode-a1"):
        fleet.stop(name)
    screen.wait("STRANDED", seconds=10)
    assert time.monotonic() - killed < patience(10)
    assert ask(fleet, nvext=BOUND).status_code == 503
    screen.keys("3")
    screen.wait("REFUSED")
    screen.keys("Enter")
    screen.wait("stopped")
    screen.keys("Escape")
    screen.wait("[4] alerts")
    screen.keys("q")
    screen.restored()
    assert "ended with 0" in screen.screen()


def test_the_terminal_is_restored_after_every_kind_of_end(terminal):
    """Ctrl-C and every signal, side by side (a start takes seconds on a busy machine)."""
    screens = {end: terminal(command("--demo")) for end in ("C-c", "INT", "TERM", "HUP")}
    for end, screen in screens.items():
        screen.wait("● live", seconds=30)
        if end == "C-c":
            screen.keys("C-c")
        else:
            (child,) = screen.pane_children()
            os.kill(child, getattr(signal, f"SIG{end}"))
    for end, screen in screens.items():
        screen.restored()
        assert "ended with 130" in screen.screen(), end


def test_a_defect_restores_the_terminal_and_is_reported(terminal, tmp_path: Path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from dynctl.cli import app as cli\n"
        "from dynctl.top import app\n"
        "def broken(self, width): raise ZeroDivisionError('a defect')\n"
        "app.Panel.draw = lambda self: broken(self, 0)\n"
        "sys.exit(cli.run(['top', '--demo']))\n"
    )
    screen = terminal(f"PYTHONPATH={ROOT} {sys.executable} {script}")
    screen.restored()
    text = screen.screen()
    assert "ended with 70" in text
    assert "dynctl failed unexpectedly: ZeroDivisionError: a defect" in text
    assert "Traceback" not in text


def test_an_unreachable_frontend_is_an_error_on_the_normal_screen(terminal):
    screen = terminal(command("--frontend", "http://127.0.0.1:1"))
    screen.restored()
    text = screen.screen()
    assert "ended with 3" in text
    assert "error: no frontend reports its fleet" in text


def test_sixteen_colours_and_a_large_screen(terminal):
    screen = terminal(f"TERM=xterm-16color {command('--demo')}", size=(200, 60))
    text = screen.wait("● live")
    assert "KV 4 MIN" in text
    assert "KV flow by zone" in text
    assert max(map(len, text.splitlines())) <= 200
    screen.keys("q")
    screen.restored()


def test_a_dumb_terminal_is_refused(terminal):
    screen = terminal(f"TERM=dumb {command('--demo')}")
    screen.restored()
    assert "ended with 2" in screen.screen()


def test_it_works_with_a_log_on_standard_input(terminal, tmp_path: Path):
    (tmp_path / "kv").mkdir()
    log = "Selected worker router_mode=kv request_id=r1 worker_id=255 worker_type=decode logit=1.5"
    line = command("--file-kv", str(tmp_path / "kv"), "--frontend-log", "-")
    screen = terminal(f"(echo '{log}'; sleep 30) | {line}")
    screen.wait("winners only")
    screen.keys("d")
    screen.wait("selection     selected")
    screen.keys("Escape")
    screen.wait("[4] alerts")
    screen.keys("q")
    screen.wait(lambda text: "[4] alerts" not in text)


@pytest.mark.parametrize("log", ["", "sleep 60 |"])
def test_it_ends_with_its_terminal_where_the_shell_ignores_the_hangup(
    terminal, tmp_path: Path, log: str
):
    store = tmp_path / "kv"
    store.mkdir()
    more = ("--frontend-log", "-") if log else ()
    line = command("--file-kv", str(store), *more)
    screen = terminal(f"trap '' HUP; {log} {line}; exit")
    screen.wait("no workers are registered")
    found = subprocess.run(["pgrep", "-f", f"top --file-kv {store}"], capture_output=True)
    pids = [int(pid) for pid in found.stdout.split()]
    assert pids
    screen.close()

    def ended() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    until_now(ended, 20)
