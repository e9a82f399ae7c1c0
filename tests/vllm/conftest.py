"""The suite against a real vLLM: marked, with a plain message when vLLM is not installed."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.rates import AIM, Outcome, Rate
from tests.vllm.stack import VLLM_PYTHON
from tests.waiting import patience

# Its assertions show values, as those of tests.
pytest.register_assert_rewrite("tests.vllm.every_engine")

HERE = Path(__file__).resolve().parent
_LINES = pytest.StashKey[list[str]]()

Judge = Callable[..., Rate]


@pytest.fixture(scope="session")
def judged(pytestconfig: pytest.Config) -> Judge:
    """``judged("sequential", outcomes)``: the rate, printed at the end of the run, at the aim.

    ``explain`` names causes of unequal outcomes. ``least`` is the share that must be equal;
    together with the explained ones it must reach the aim.
    """
    lines = pytestconfig.stash.setdefault(_LINES, [])

    def judge(
        name: str,
        outcomes: list[Outcome],
        explain: Callable[[Outcome], str | None] = lambda _: None,
        *,
        least: float = AIM,
    ) -> Rate:
        rate = Rate(name, outcomes)
        rate.judge(explain)
        lines.append(rate.line())
        total = len(outcomes)
        assert rate.reused, f"nothing was reused, so nothing was compared\n{rate.details()}"
        assert rate.equal >= least * total, rate.details()
        assert total - len(rate.unexplained) >= AIM * total, rate.details()
        return rate

    return judge


@pytest.fixture(scope="session")
def finding(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """A line of the summary at the end of the run."""
    return pytestconfig.stash.setdefault(_LINES, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("predicted and reported cached tokens")
        for line in lines:
            terminalreporter.line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session", autouse=True)
def vllm_version() -> str:
    return installed_version("vllm", VLLM_PYTHON)


def installed_version(package: str, python: str) -> str:
    """The version of an engine; ends the run if there is none: a suite that skips itself would look
    like a green one."""
    if not python:
        variable = f"DYNCTL_{package.upper()}_PYTHON"
        pytest.exit(f"{variable} is not set; run `make test-{package}`", returncode=2)
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run(
            [python, "-c", asked], capture_output=True, text=True, timeout=patience(60), check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.exit(f"{python} has no {package}: {error}; run `make test-{package}`", 2)
    return done.stdout.strip()
