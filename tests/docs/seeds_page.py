"""docs/seeds.md: what the documents ask for, where it is, and the tests that prove it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.docs.pages import ROOT

_ITEMS: Final = ROOT / "tests" / "docs" / "seeds.toml"
_TESTS: Final = ROOT / "tests"

_HEAD: Final = """\
# What was asked for, and the tests that prove it

`dynctl` is built after five documents: two guides to Dynamo's router, two pages on topology-aware
KV transfer, and the proposal of that feature. This page has each of their settings, table rows and
rules, where it is in `dynctl`, and the tests that name it (`@pytest.mark.seed`). Tests below
`tests/dynamo` run against a real Dynamo (`make test-dynamo`). The third column has what is
different in `dynctl`, and why. The page is generated from `tests/docs/seeds.toml` and the tests.

"""


def items() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of an item as tests give it, and the item."""
    for document in tomllib.loads(_ITEMS.read_text(encoding="utf-8"))["document"]:
        for section in document["section"]:
            for item in section["items"]:
                yield f"{document['id']}: {section['id']}: {item['id']}", item


@cache
def proofs() -> dict[str, list[str]]:
    """Name of an item -> the tests that name it, as ``path::function``, sorted."""
    found: dict[str, list[str]] = {}
    for path in sorted(_TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.seed(" not in text:
            continue
        for test in ast.walk(ast.parse(text)):
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT)}::{test.name}"
                for item in _named(test):
                    found.setdefault(item, []).append(name)
    return found


def _named(test: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The items that a test's decorators name."""
    return {
        argument.value
        for decorator in test.decorator_list
        for node in ast.walk(decorator)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.seed"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def seeds_page() -> str:
    """The whole page."""
    tests, lines = proofs(), []
    for document in tomllib.loads(_ITEMS.read_text(encoding="utf-8"))["document"]:
        lines += [f"## {document['title']}", ""]
        for section in document["section"]:
            lines += [f"### {section['title']}", "", "| item | here | different | tests |"]
            lines.append("|---|---|---|---|")
            for item in section["items"]:
                name = f"{document['id']}: {section['id']}: {item['id']}"
                proved = ", ".join(_link(test) for test in tests.get(name, ())) or "none"
                different = item.get("differs", "")
                lines.append(f"| {item['id']} | {item['here']} | {different} | {proved} |")
            lines.append("")
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{name.removeprefix('test_')}](../{Path(path).as_posix()})"
