"""`.ci/run` with a `make` that takes down what it is asked for."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import patience, until_now

MAKE = """#!/bin/sh
case "$*" in $FAILS) echo "why $*"; exit 2;; esac
echo "+ $*" >> "$TAKEN"
trap 'echo "interrupted $*" >> "$TAKEN"; kill $!; exit 2' INT
case "$*" in $HANGS) sleep 100 & wait;; esac
echo "- $*" >> "$TAKEN"
"""

TESTS = "test PROFILE=thorough"
"""Runs what `make test` and `make test-thorough` would run one after the other."""


class Run:
    """`.ci/run`, with suites that fail and hang by their patterns of a shell."""

    def __init__(self, root: Path, fails: str = "none", hangs: str = "none") -> None:
        (root / ".ci").mkdir()
        shutil.copy(Path(__file__).parents[1] / ".ci" / "run", root / ".ci")
        make = root / "make"
        make.write_text(MAKE)
        make.chmod(0o755)
        self._taken = root / "taken"
        self._taken.touch()
        environment = {"TAKEN": str(self._taken), "FAILS": fails, "HANGS": hangs}
        self.process = subprocess.Popen(
            [root / ".ci" / "run"],
            env={**os.environ, **environment, "PATH": f"{root}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def taken(self) -> list[str]:
        """``+`` before a suite that has started, ``-`` before one that has ended."""
        return self._taken.read_text().splitlines()

    def end(self) -> str:
        """The output, once it has ended."""
        return self.process.communicate(timeout=patience(20))[0]


def test_all_suites_run_once_and_the_measurement_alone_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    output = run.end()
    taken = run.taken()
    started = [line for line in taken if line.startswith("+")]
    assert run.process.returncode == 0, output
    assert len(set(started)) == len(started) > 15
    assert taken[:2] == ["+ .venv/.dev-stamp", "- .venv/.dev-stamp"]
    assert taken.index("- check") < min(taken.index(f"+ {TESTS}"), taken.index("+ test-browser"))
    assert taken[-2:] == ["+ bench-guard", "- bench-guard"]
    assert taken.index("- test-vllm") < taken.index("+ test-sglang")
    assert taken.index("- environments") < taken.index("+ test-dynamo")
    assert taken.index("- kubernetes") < taken.index("+ test-kube")


def test_the_suite_of_kubernetes_runs_beside_the_tests(tmp_path: Path) -> None:
    run = Run(tmp_path, hangs=TESTS)
    until_now(lambda: "- test-kube" in run.taken())
    assert f"+ {TESTS}" in run.taken()
    assert not {f"- {TESTS}", "+ test-ship"} & set(run.taken())
    run.process.terminate()
    run.end()


def test_the_output_of_a_suite_that_fails_is_shown_and_all_others_run(tmp_path: Path) -> None:
    run = Run(tmp_path, fails="test-sdk")
    output = run.end()
    assert run.process.returncode == 1
    assert "\nwhy test-sdk\n" in output
    assert output.endswith("failed:\nmake test-sdk\n")
    assert {"- test-envoy", "- bench-guard"} <= set(run.taken())


def test_no_suite_starts_after_a_check_that_fails(tmp_path: Path) -> None:
    run = Run(tmp_path, fails="check", hangs="environments")
    output = run.end()
    assert run.process.returncode == 2
    assert re.search(r"^why check\n\d+ s: make check FAILED", output, re.MULTILINE), output
    assert {line for line in run.taken() if line.startswith("+")} <= {
        "+ .venv/.dev-stamp",
        "+ environments",
        "+ kubernetes",
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_interrupts_what_runs_and_starts_nothing_more(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = Run(tmp_path, hangs="test*")
    until_now(lambda: {f"+ {TESTS}", "+ test-browser"} <= set(run.taken()))
    run.process.send_signal(number)
    run.end()
    assert run.process.returncode == code
    assert {f"interrupted {TESTS}", "interrupted test-browser"} <= set(run.taken())
    assert not {"+ test-kube", "+ test-chaos", "+ bench-guard"} & set(run.taken())
