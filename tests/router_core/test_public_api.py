"""The public names of router_core: each resolves, is documented, and the examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import router_core

ROOT = Path(router_core.__file__).parents[1]
README = ROOT / "router_core" / "README.md"
PAGE = ROOT / "docs" / "router-api.md"

_BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda path: path.name)
def test_examples_print_what_the_page_shows(page: Path) -> None:
    names: dict[str, Any] = {}
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks
    for code, shown in blocks:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), names)
        assert printed.getvalue() == shown, code


def test_every_public_name_resolves() -> None:
    assert len(router_core.__all__) == len(set(router_core.__all__))
    for name in router_core.__all__:
        assert getattr(router_core, name) is not None
    assert set(router_core.__all__) <= set(dir(router_core))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        router_core.Nothing  # noqa: B018


def test_every_public_name_is_documented() -> None:
    text = PAGE.read_text(encoding="utf-8")
    documented = set(re.findall(r"`([A-Za-z_]+)", text))
    assert set(router_core.__all__) - documented == set()


def test_a_public_name_loads_only_its_own_module() -> None:
    code = (
        "import sys\n"
        "from router_core import PRESETS, Role\n"
        "print(*sorted(m for m in sys.modules if m.startswith('router_core')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[2] for name in done.stdout.split()}
    assert modules == {
        "", "conditional_disagg", "config", "errors", "forms", "taints", "workers",
    }  # fmt: skip


def test_no_module_names_flags_variables_or_the_command_line() -> None:
    for path in sorted(README.parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"DYN_|DYNCTL|dynctl|\s--[a-z]|command line|environment variable", text)
        assert found == [], path.name


def test_dynctl_imports_only_public_names() -> None:
    for path in sorted((ROOT / "dynctl").rglob("*.py")):
        found = re.findall(r"(?:from|import) router_core\.\w+", path.read_text(encoding="utf-8"))
        assert found == [], path.name
