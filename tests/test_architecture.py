"""The contracts of pyproject.toml refuse what they claim, and no room has import circles."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path
from typing import Final

import grimp
import pytest

from tests.waiting import patience

ROOT: Final = Path(__file__).parents[1]
CONTRACTS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]
NAMES: Final[Mapping[str, str]] = {one["id"]: one["name"] for one in CONTRACTS}

#: Contract, module with a forbidden import, import.
REFUSED: Final = (
    # Upwards, from each room at least once.
    ("tiers", "dynctl.web", "dynctl.cli"),
    ("tiers", "dynctl.top", "dynctl.web"),
    ("tiers", "dynctl.screens", "dynctl.top"),
    ("tiers", "dynctl.verify", "dynctl.screens"),
    ("tiers", "dynctl.experiments", "dynctl.screens"),
    ("tiers", "dynctl.sources", "dynctl.verify"),
    ("tiers", "dynctl.serving", "dynctl.sources"),
    ("tiers", "dynctl.simulation", "dynctl.sources"),
    ("tiers", "dynctl.health", "dynctl.serving"),
    ("tiers", "dynctl.planning", "dynctl.screens"),
    ("tiers", "dynctl.manifests", "dynctl.planning"),
    ("tiers", "dynctl.adapters", "dynctl.sources"),
    ("tiers", "dynctl.documents", "dynctl.serving"),
    ("tiers", "dynctl.documents", "dynctl.adapters"),
    ("tiers", "dynctl.wire", "dynctl.documents"),
    ("tiers", "dynctl.findings", "dynctl.documents"),
    ("tiers", "dynctl.tokenization", "dynctl.adapters"),
    ("tiers", "dynctl.settings", "dynctl.cli"),
    ("tiers", "dynctl.base", "dynctl.wire"),
    # Sideways.
    ("tiers", "dynctl.serving", "dynctl.simulation"),
    ("tiers", "dynctl.simulation", "dynctl.serving"),
    ("tiers", "dynctl.wire", "dynctl.findings"),
    ("tiers", "dynctl.findings", "dynctl.wire"),
    ("tiers", "dynctl.tokenization", "dynctl.settings"),
    ("tiers", "dynctl.settings", "dynctl.tokenization"),
    # Libraries.
    ("pure-core", "router_core", "dynctl.base"),
    ("pure-core", "router_core", "asyncio"),
    ("pure-core", "router_core", "os"),
    ("terminal", "dynctl.health", "rich"),
    ("terminal", "dynctl.screens", "typer"),
    ("terminal", "dynctl.serving", "textual"),
    ("clients", "dynctl.sources", "kubernetes"),
    ("clients", "dynctl.serving", "zmq"),
    ("clients", "dynctl.settings", "etcd3"),
    ("templates", "dynctl.serving", "jinja2"),
    ("templates", "dynctl.cli", "tokenizers"),
)


def inner_imports() -> list[tuple[str, str, str]]:
    """Of every contract about the order inside a room: an import from each layer into the one
    above it, and one between siblings of each layer that has some."""
    refused = []
    for contract in CONTRACTS:
        if contract["type"] != "layers" or contract["id"] == "tiers":
            continue
        (room,) = contract["containers"]
        layers = [[part.strip() for part in layer.split("|")] for layer in contract["layers"]]
        pairs = [(lower[0], upper[0]) for upper, lower in pairwise(layers)]
        pairs += [(siblings[0], siblings[1]) for siblings in layers if len(siblings) > 1]
        refused += [
            (contract["id"], f"{room}.{part}", f"{room}.{imported}") for part, imported in pairs
        ]
    return refused


INNER: Final = inner_imports()

#: Circles between modules that still exist. A circle that is gone is removed from this list;
#: the list gets no new entries.
KNOWN_CIRCLES: Final[frozenset[tuple[str, ...]]] = frozenset()


def lint(directory: Path) -> str:
    """The report of import-linter on the packages in ``directory``."""
    lint_imports = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", lint_imports, "--no-cache"],
        cwd=directory,
        env={"PYTHONPATH": str(directory), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", directory)
    for package in ("dynctl", "router_core"):
        shutil.copytree(
            ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return directory


@pytest.fixture(scope="module")
def reports(copy: Path) -> dict[str, str]:
    """Name of each broken contract -> its report, with every forbidden import in the copy."""
    originals: dict[Path, str] = {}
    for number, (_, room, imported) in enumerate([*REFUSED, *INNER]):
        place = copy / room.replace(".", "/")
        if place.is_dir():
            (place / f"intruder_{number}.py").write_text(f"import {imported}\n")
        else:
            module = place.with_suffix(".py")
            originals.setdefault(module, module.read_text(encoding="utf-8"))
            with module.open("a", encoding="utf-8") as end:
                end.write(f"\nimport {imported}\n")
    try:
        report = lint(copy)
    finally:
        for intruder in copy.rglob("intruder_*.py"):
            intruder.unlink()
        for module, text in originals.items():
            module.write_text(text, encoding="utf-8")
    broken = report.partition("Broken contracts")[2]
    places = sorted((broken.find(f"\n{name}\n"), name) for name in NAMES.values())
    ends = [place for place, _ in places[1:]] + [len(broken)]
    return {
        name: broken[place:end]
        for (place, name), end in zip(places, ends, strict=True)
        if place >= 0
    }


def test_a_copy_without_forbidden_imports_keeps_every_contract(copy: Path) -> None:
    report = lint(copy)
    for name in NAMES.values():
        assert re.search(rf"^{re.escape(name)} KEPT", report, re.M), report


def test_every_contract_has_an_import_that_it_refuses() -> None:
    assert {contract for contract, _, _ in [*REFUSED, *INNER]} == set(NAMES)


def test_every_room_has_an_import_that_is_refused() -> None:
    (tiers,) = [one["layers"] for one in CONTRACTS if one["id"] == "tiers"]
    rooms = {f"dynctl.{room.strip()}" for tier in tiers for room in tier.split("|")}
    tried = {module for contract, module, _ in REFUSED if contract == "tiers"}
    assert tried == rooms - {"dynctl.cli"}  # the top tier may import every room


@pytest.mark.parametrize(
    ("number", "contract", "module", "imported"),
    [(number, *case) for number, case in enumerate(REFUSED)],
    ids=[f"{module}-imports-{imported}" for _, module, imported in REFUSED],
)
def test_a_forbidden_import_breaks_its_contract(
    reports: dict[str, str], number: int, contract: str, module: str, imported: str
) -> None:
    line = rf"{re.escape(f'{module}.intruder_{number}')} -> {re.escape(imported)} "
    assert re.search(line, reports.get(NAMES[contract], "")), reports


@pytest.mark.parametrize(
    ("number", "contract", "module", "imported"),
    [(number, *case) for number, case in enumerate(INNER, len(REFUSED))],
    ids=[f"{module}-imports-{imported.rpartition('.')[2]}" for _, module, imported in INNER],
)
def test_an_import_against_the_order_of_a_room_breaks_its_contract(
    reports: dict[str, str], number: int, contract: str, module: str, imported: str
) -> None:
    line = rf"{re.escape(module)}(\.intruder_{number})? -> {re.escape(imported)} "
    assert re.search(line, reports.get(NAMES[contract], "")), reports


@cache
def import_graph() -> grimp.ImportGraph:
    """All imports, those inside functions and under TYPE_CHECKING included."""
    return grimp.build_graph(
        "dynctl", "router_core", include_external_packages=True, cache_dir=None
    )


def circles() -> set[tuple[str, ...]]:
    """Modules that import one another."""
    graph = import_graph()
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    def reached(start: str) -> set[str]:
        found, left = set[str](), [start]
        while left:
            for module in imported[left.pop()] - found:
                found.add(module)
                left.append(module)
        return found

    reachable = {module: reached(module) for module in graph.modules}
    groups: dict[str, set[str]] = defaultdict(set)
    for module, others in reachable.items():
        if module in others:
            circle = {other for other in others if module in reachable[other]}
            groups[min(circle)] |= circle
    return {tuple(sorted(group)) for group in groups.values()}


def test_modules_have_no_import_circles() -> None:
    found = circles()
    assert not found - KNOWN_CIRCLES, "new circles"
    assert not KNOWN_CIRCLES - found, "circles that are gone: remove them from KNOWN_CIRCLES"


def test_each_library_that_is_imported_is_a_dependency_and_no_other():
    """A library that comes with another one may go with the other's next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = {_distribution(one) for one in project["dependencies"]}
    optional = {_distribution(one) for one in (*extras["otlp"], *extras["nkeys"])}
    homes = packages_distributions()
    imported: set[str] = set()
    names = {module.partition(".")[0] for module in import_graph().modules}
    for name in names - sys.stdlib_module_names - {"dynctl", "router_core"}:
        distributions = {_distribution(one) for one in homes[name]}
        assert distributions & (needed | optional), f"{name} is imported and not declared"
        imported |= distributions
    assert needed <= imported, f"declared and not imported: {needed - imported}"


def _distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")
