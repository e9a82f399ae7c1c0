"""The suite against a real Dynamo: marked, with a plain message when Dynamo is not installed."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dynamo.fleet import DYNAMO_PYTHON
from tests.dynamo.versions import version_of

HERE = Path(__file__).resolve().parent
_FINDINGS = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def finding(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """``finding("199 of 200 predicted")``: a line of the summary at the end of the run."""
    return pytestconfig.stash.setdefault(_FINDINGS, []).append


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        action="store_true",
        help="write what works with this version of Dynamo, for docs/compatibility.md",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process of several: its findings go to the one that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["findings"] = session.config.stash.get(_FINDINGS, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the process that prints: one of the others has ended."""
    found = getattr(node, "workeroutput", {}).get("findings", [])
    node.config.stash.setdefault(_FINDINGS, []).extend(found)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(_FINDINGS, [])
    if lines:
        terminalreporter.section("findings")
        for line in lines:
            terminalreporter.line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.dynamo)


@pytest.fixture(scope="session", autouse=True)
def dynamo_version() -> str:
    """Ends the run if there is no Dynamo: a suite that skips itself would look like a green one."""
    if not DYNAMO_PYTHON:
        pytest.exit("DYNCTL_DYNAMO_PYTHON is not set; run `make test-dynamo`", returncode=2)
    try:
        return version_of(DYNAMO_PYTHON)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.exit(f"{DYNAMO_PYTHON} has no ai-dynamo: {error}; run `make test-dynamo`", 2)
