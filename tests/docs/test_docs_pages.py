"""Pages beside their commands: links, codes, names, faults, and the symptoms they must cover."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest

from dynctl.cli.table import COMMANDS
from dynctl.findings.catalogue import all_codes
from router_core import SETTINGS
from tests.commands import all_commands
from tests.docs.pages import DOCS, ROOT, Block, blocks, by_hand, name_of, pages, written
from tests.docs.tables import table, tables
from tests.docs.worlds import WORLDS
from tests.kube.faults import FAULTS, fault_of

CHECKS = sorted((DOCS / "checks").iterdir())
WRITTEN = [*pages(), DOCS / "cli.md", ROOT / "CHANGELOG.md"]
RUNBOOK = DOCS / "operations"
INDEX = RUNBOOK / "README.md"
FAULT_TABLES = {name: page for page in RUNBOOK.iterdir() for name in tables(page, "faults")}

#: A longer thought is a paragraph below its table.
LONGEST_CELL = 25
#: Words of all written pages, without code blocks, whose output is recorded.
WORDS = 55_000

#: Symptoms and failures that the product's requirements list.
REQUIRED_SYMPTOMS = (
    "Worker exits during startup",
    "Required policy returns no endpoint",
    "Preferred policy still routes cross-domain",
    "Router sees no topology metadata",
    "Pod has no copied topology label",
    "Worker exits while waiting for topology",
    "Required policy fails requests",
    "Webhook rejects DGD",
    "Grove not installed",
    "ClusterTopology CR not found",
    "level references a domain not in ClusterTopology",
    "Topology volume files not present",
    "No same-domain decode workers, other-domain workers exist",
    "Worker missing topology level for configured domain",
    "kv_transfer_topology_level` unset",
    "Prefill worker has no decode workers available in its domain",
)


def prose(path: Path) -> str:
    """A page without its code blocks and comments."""
    text = re.sub(r"^(```+).*?^\1$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of the headings."""
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", prose(path), flags=re.M)}


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", [*WRITTEN, *CHECKS], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(path)):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name_of(path)}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{name_of(path)}: {target}"


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_codes_exist(path: Path) -> None:
    codes = all_codes()
    for code in re.findall(r"\bDY[A-Z]\d{4}\b", path.read_text(encoding="utf-8")):
        assert codes.get(code) is not None, f"{name_of(path)}: {code}"


@functools.cache
def _flags_of_commands() -> dict[str, set[str]]:
    known: dict[str, set[str]] = {}
    for command in COMMANDS:
        found = all_commands()
        for word in command.split():
            found = found.commands[word]
        flags = {flag for one in found.params for flag in (*one.opts, *one.secondary_opts)}
        known[command] = flags | {"--help", "-h"}
    return known


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_a_command_in_a_sentence_exists(path: Path) -> None:
    known = _flags_of_commands()
    for text in re.findall(r"`dynctl ([^`]+)`", prose(path)):
        words = shlex.split(text.replace("\\|", "|"))
        named = [one for one in (" ".join(words[:2]), words[0]) if one in known]
        groups = {command.split()[0] for command in known}
        assert named or words[0] in groups or words[0].startswith(("-", "COMMAND")), text
        for word in words[1:]:
            if word.startswith("-") and named and len(word) > 1:
                assert word.partition("=")[0] in known[named[0]], f"{name_of(path)}: {text}"


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_variables_and_settings_in_a_sentence_are_read_by_the_code(path: Path) -> None:
    source = "".join(
        one.read_text(encoding="utf-8")
        for room in ("dynctl", "router_core", "tests/dynamo", "tests/kube")
        for one in (ROOT / room).rglob("*.py")
    )
    for name in re.findall(r"`((?:DYN|DYNCTL|ETCD|NATS)_[A-Z_]+)`", prose(path)):
        assert name in source, f"{name_of(path)}: {name}"
    for name in re.findall(r"`((?:router|overlap|prefill_load|active)_[a-z_]+)`", prose(path)):
        assert name in SETTINGS or name in source, f"{name_of(path)}: {name}"


@pytest.mark.parametrize("path", pages(), ids=name_of)
def test_no_command_is_in_a_block_that_is_not_run(path: Path) -> None:
    for item in blocks(path.read_text(encoding="utf-8")):
        if isinstance(item, Block):
            if item.language not in ("console", "sh"):
                assert not re.search(r"^(\$ )?(dynctl|kubectl|make) ", "\n".join(item.lines), re.M)
        elif item[0] == "world":
            kind, _, fault = item[1].partition(" ")
            assert kind in WORLDS
            assert not fault or fault in {one.name for one in FAULTS}


@pytest.mark.parametrize("name", sorted(FAULT_TABLES))
def test_a_fault_of_the_runbook_is_reported_by_the_code_that_the_runbook_names(name: str) -> None:
    # tests/kube/test_faults.py injects each and asserts that verify reports exactly these codes.
    for code, cause, todo in table(FAULT_TABLES[name], name, "faults"):
        (fault,) = re.findall(r"<!-- (\S+) -->", cause)
        known = fault_of(FAULTS, fault)
        assert code in (known.code, *known.also), cause
        assert todo


def sections(path: Path) -> dict[str, str]:
    """Anchor -> text of the sections of a page, without its head."""
    parts = path.read_text(encoding="utf-8").split("\n## ")[1:]
    return {anchor_of(part.splitlines()[0]): part for part in parts}


def runbook_rows() -> list[str]:
    return [row for row in sections(INDEX)["runbook"].splitlines() if row.startswith("|")]


def test_every_required_symptom_leads_to_a_section_with_a_command() -> None:
    for symptom in REQUIRED_SYMPTOMS:
        (row,) = [row for row in runbook_rows() if symptom.lower() in row.lower()]
        ((page, anchor),) = re.findall(r"\((\w+\.md)#([^)]+)\)", row)
        assert "`dynctl " in row
        section = sections(RUNBOOK / page)[anchor]
        assert "$ dynctl " in section or "<!-- faults:" in section, symptom


def test_every_section_of_a_symptom_page_is_in_the_index() -> None:
    pages_of_symptoms = set(re.findall(r"\((\w+\.md)#", "\n".join(runbook_rows())))
    for page in pages_of_symptoms:
        for anchor in sections(RUNBOOK / page):
            assert f"({page}#{anchor})" in INDEX.read_text(encoding="utf-8")


def test_the_map_and_the_index_of_a_folder_name_every_page() -> None:
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for index in (DOCS / "README.md", INDEX, DOCS / "routing" / "README.md")
        for target in re.findall(r"\]\(([^)]+)\)", index.read_text(encoding="utf-8"))
    }
    every = {*pages(), DOCS / "cli.md", DOCS / "checks" / "README.md"}
    assert every - {DOCS / "README.md"} <= linked


def words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def without_blocks(path: Path) -> str:
    """What a person writes, also without the blocks that are part of a list."""
    return re.sub(r"^( *```+)\w*$.*?^\1$", "", by_hand(path), flags=re.M | re.S)


@pytest.mark.parametrize("path", written(), ids=name_of)
def test_a_cell_of_a_table_is_short(path: Path) -> None:
    for line in without_blocks(path).splitlines():
        cells = re.split(r"(?<!\\)\|", line) if line.startswith("|") else []
        for cell in cells:
            assert words(cell) <= LONGEST_CELL, f"a paragraph below the table: {cell.strip()}"


def test_the_pages_can_be_read() -> None:
    assert sum(words(without_blocks(path)) for path in written()) <= WORDS
