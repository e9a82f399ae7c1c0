"""Pages made from the code: ``python -m tests.docs.generated`` writes them (`make docs`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from dynctl.serving.http.openapi import openapi_document
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import build_router
from tests.docs.benchmarks_page import benchmarks_page
from tests.docs.cli_page import cli_page
from tests.docs.compatibility_page import compatibility_page
from tests.docs.grafana import dashboard_json
from tests.docs.man_page import man_page
from tests.docs.pages import DOCS
from tests.docs.prometheus_rules import rules_yaml
from tests.docs.reliability_page import reliability_page, soak_plot
from tests.docs.seeds_page import seeds_page
from tests.docs.settings_table import settings_tables
from tests.soak.result import RESULT


def openapi_json(build: Callable[[FrontendConfig], ServingProcess]) -> str:
    """The OpenAPI document of a process with the defaults."""
    process = build(FrontendConfig())
    document = openapi_document(process.build_app(), process.title)
    return json.dumps(document, indent=1) + "\n"


_END: Final = "<!-- end -->"
SETTINGS: Final = DOCS / "operations" / "settings.md"


def _between(path: Path, name: str, made: str) -> str:
    """The page with ``made`` between the marks of that name."""
    text = path.read_text(encoding="utf-8")
    pattern = rf"(<!-- generated: {name} -->\n).*?({_END})"
    replaced, count = re.subn(
        pattern, lambda found: f"{found[1]}{made}{found[2]}", text, flags=re.DOTALL
    )
    assert count == 1, f"{path.name}: expected one part that is called {name}"
    return replaced


#: File -> its whole text, with what is made in it.
FILES: Final[Mapping[Path, Callable[[], str]]] = {
    **({DOCS / "soak.svg": soak_plot} if RESULT.exists() else {}),
    DOCS / "benchmarks.md": benchmarks_page,
    DOCS / "cli.md": cli_page,
    DOCS / "compatibility.md": compatibility_page,
    DOCS / "reliability.md": reliability_page,
    DOCS / "seeds.md": seeds_page,
    SETTINGS: lambda: _between(SETTINGS, "settings", settings_tables()),
    DOCS / "grafana" / "dynctl.json": dashboard_json,
    DOCS / "prometheus" / "rules.yaml": rules_yaml,
    DOCS / "deploy" / "dynctl.1": man_page,
    DOCS / "openapi" / "frontend.json": lambda: openapi_json(build_frontend),
    DOCS / "openapi" / "router.json": lambda: openapi_json(build_router),
}

if __name__ == "__main__":
    for path, made in FILES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(made(), encoding="utf-8")
