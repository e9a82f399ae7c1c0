"""The base of every test: no trace of the developer's machine, reproducible hypothesis runs."""

import gc
import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from jinja2 import Environment
from tokenizers import Tokenizer

from dynctl.cli import app
from dynctl.cli.table import COMMANDS
from dynctl.serving.telemetry.log_format import LOGGERS
from dynctl.simulation.engine import engine
from dynctl.tokenization import DEMO_MODEL_DIR, model, template
from tests.waiting import cores

# "quick" and "thorough" use the same examples every time, so that a failure is reproducible;
# "explore" looks for new ones. `make test` is quick; `make test-thorough PROFILE=explore`.
for name, examples in (("quick", 30), ("thorough", 300)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# In a background run (`make test &`, nohup) SIGINT is ignored, and children inherit that: without
# this line the children that tests interrupt would not end.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The documents are refreshed without xdist, which has this hook.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process for each core that the container may use, not for each of its machine."""
    return cores()


# No search for garbage while modules and tests are made: they stay. It took a quarter of that time.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave 10,000 tests and all modules out of each later search for garbage, and search after
    10,000 new objects, not after 700: it took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests that ran once more failed first: a second chance hides nothing."""
    again = terminalreporter.stats.get("rerun", [])
    if again:
        terminalreporter.section("failed first, then ran once more")
    for report in again:
        terminalreporter.section(report.nodeid, "-")
        terminalreporter.line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.line(f"-- {title}")
            terminalreporter.line(text[-_SHOWN:])


_SHOWN = 4_000
"""Characters of each output of such a test."""

_PREFIXES = ("DYN_", "DYNCTL_", "ETCD_", "NATS_", "OTEL_")
_NAMES = {
    "KUBECONFIG",
    "KUBERNETES_SERVICE_HOST",
    "KUBERNETES_SERVICE_PORT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLUMNS",
    "LINES",
}


def _isolate(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Settings, clusters, proxies and colours of the machine do not reach a test.

    Child processes inherit the same clean environment, because ``os.environ`` changes.
    """
    for name in list(os.environ):
        if name.upper() in _NAMES or name.upper().startswith(_PREFIXES):
            monkeypatch.delenv(name)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    for name in ("CONFIG", "CACHE", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """New directories; processes that tests share have the first as their home.

    The factory's own names would cost a look at each of the thousands before.
    """
    root = tmp_path_factory.mktemp("homes")
    made = (root / str(number) for number in itertools.count())
    with pytest.MonkeyPatch.context() as monkeypatch:
        _isolate(monkeypatch, next(made))
        yield made


@pytest.fixture(autouse=True)
def isolated_machine(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, and nothing that another test has set."""
    _isolate(monkeypatch, next(homes))


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Restore the log handlers that a command in this process has changed."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(one.handlers), one.propagate, one.level) for one in loggers]
    yield
    for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
        one.handlers[:] = handlers
        one.propagate = propagate
        one.setLevel(level)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No search for garbage, for tests of what recurses until Python stops it: the finalizer of an
    object that an earlier test left has no room to run there, and its error fails the test."""
    gc.disable()
    yield
    gc.enable()


_WORDS = frozenset(word for path in COMMANDS for word in path.split())


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Use the commands of an earlier line with the same words again: Typer needs up to 40 ms to
    build them. A page of help changes what its command shows, so it gets a command of its own.
    """
    built: dict[frozenset[str], Any] = {}
    build = app.program

    def program(arguments: Sequence[str] | None = None) -> Any:
        if arguments is None or not {"--help", "-h"}.isdisjoint(arguments):
            return build(arguments)
        words = _WORDS.intersection(arguments)
        if words not in built:
            built[words] = build(arguments)
        return built[words]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(app, "program", program)
        yield


@pytest.fixture(scope="session", autouse=True)
def demo_model_compiled_once() -> Iterator[None]:
    """Most frontends and engines of tests load the demo model, which takes 12 ms: its vocabulary
    and its compiled template are shared."""
    of_demo: set[Any] = {(DEMO_MODEL_DIR / "chat_template.jinja").read_text()}

    def once(method: Callable[..., Any]) -> Callable[..., Any]:
        results: dict[tuple[type[Environment], Any], Any] = {}

        def result(environment: Environment, source: Any, *more: Any, **options: Any) -> Any:
            if source not in of_demo or more or options:
                return method(environment, source, *more, **options)
            key = type(environment), source
            if key not in results:
                results[key] = method(environment, source)
                of_demo.add(results[key])  # the parsed template, which is then compiled
            return results[key]

        return result

    shared = [(model, "_divide_tokenizer"), (template, "_content_shape"), (engine, "Vocabulary")]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Environment, "parse", once(Environment.parse))
        monkeypatch.setattr(Environment, "compile", once(Environment.compile))
        tokenizer = SimpleNamespace(from_str=lru_cache(4)(Tokenizer.from_str))
        monkeypatch.setattr(model, "Tokenizer", tokenizer)
        for owner, name in shared:
            monkeypatch.setattr(owner, name, lru_cache(4)(getattr(owner, name)))
        yield
