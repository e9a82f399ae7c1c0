"""A name with line breaks makes no line of its own in any output: no forged row or check."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynctl.base.terminal import UNSAFE, escaped, printable, printable_json
from dynctl.serving.telemetry.exposition import escape
from dynctl.serving.telemetry.log_format import TextFormatter
from tests.dynctl.cli.test_escape_sequences import documents
from tests.dynctl.cli.test_escape_sequences import hostile as with_attack
from tests.dynctl.cli.test_unfriendly_servers import Server, server
from tests.golden.fleets import TOKENS, two_zones

__all__ = ["documents", "server"]  # fixtures

#: What ends a line for a terminal, a pager or a program that reads lines, and what hides text.
BREAKS = [
    "\n", "\r", "\r\n", "\t", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029",
    "\u061c", "\u200b", "\u202e", "\u2066", "\xad", "\x9b", "\U000e0041",
]  # fmt: skip
FORGED = re.compile(r"^\s*(FAIL|pass|WARN) DYR9999|^forged-0", re.MULTILINE)
FORMATS = ["table", "wide", "yaml", "name", "jsonl"]


def lines_of(text: str) -> str:
    """``text`` with a line break at each character that ends a line for some program."""
    return "\n".join(text.splitlines())


def hostile(value: Any, attack: str, key: str = "") -> Any:
    """``value`` with the attack behind each name and label, which are not the words of dynctl."""
    if isinstance(value, dict):
        return {
            (name + attack if key in ("topology_domains", "domains") else name): hostile(
                one, attack, name if key not in ("topology_domains",) else "name"
            )
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [hostile(one, attack, key) for one in value]
    names = ("name", "model", "worker", "kv_transfer_domain", "endpoint", "device", "version")
    return value + attack if isinstance(value, str) and key in names else value


def clean(ran: Any) -> None:
    for stream in (ran.out, ran.err):
        assert FORGED.search(lines_of(stream)) is None, lines_of(stream)
        left = UNSAFE.search(stream.replace("\n", ""))
        assert left is None, ascii(stream)
        assert "Traceback" not in stream


@pytest.mark.parametrize("ending", BREAKS, ids=ascii)
def test_a_view_whose_names_have_line_breaks(dynctl: Any, tmp_path: Path, ending: str) -> None:
    attack = f"{ending}FAIL DYR9999 forged{ending}forged-0  prefill  zone-a"
    saved = hostile(json.loads(two_zones().save()), attack)
    view = tmp_path / "view.json"
    view.write_text(json.dumps(saved))
    tokens = tmp_path / "tokens.json"
    tokens.write_text(str(TOKENS))
    commands: list[list[Any]] = [
        ["workers", "list"],
        ["topology", "show"],
        ["check"],
        ["route", "--explain", "--tokens", tokens],
        ["top", "--once"],
        ["workers", "show", "prefill-a0" + attack],
        ["workers", "show", "no-such" + attack],
        ["topology", "show", "--domain", "rack" + attack],
        ["topology", "plan"],
        ["decisions", "list"],
        ["thresholds", "get"],
    ]
    shown = 0
    formats = FORMATS if ending in ("\n", "\u2028") else FORMATS[:1]
    for command in commands:
        for output in formats:
            ran = dynctl(*command, "--view", view, "-o", output)
            clean(ran)
            shown += "prefill-a0" in ran.out and "forged" in ran.out
    assert shown >= 4, "the names of the view are in the outputs"


@pytest.mark.parametrize("ending", BREAKS, ids=ascii)
def test_a_frontend_and_a_decision_whose_names_have_line_breaks(
    dynctl: Any, server: Server, documents: dict[str, Any], tmp_path: Path, ending: str
) -> None:
    attack = f"{ending}FAIL DYR9999 forged{ending}forged-0  prefill  zone-a"
    server.body = json.dumps(with_attack(documents["workers"], attack)).encode()
    ran = dynctl("workers", "list", "--frontend", server.url)
    assert "forged" in ran.out
    clean(ran)
    file = tmp_path / "decision.json"
    file.write_text(json.dumps(with_attack(documents["route"], attack)))
    clean(dynctl("why", file))
    server.status = 400
    server.body = json.dumps({"error": {"message": f"bad{attack}"}}).encode()
    for command in (["workers", "list"], ["route", "hi"], ["check"], ["decisions"], ["why", "x"]):
        clean(dynctl(*command, "--frontend", server.url, "--timeout", "5"))


@pytest.mark.parametrize("ending", BREAKS, ids=ascii)
def test_every_function_that_shows_names_knows_the_same_characters(ending: str) -> None:
    text = f"a{ending}b"
    assert UNSAFE.search(text)
    for shown in (
        printable(text),
        escaped(text),
        escape(text),
        msgspec.json.decode(json.dumps(printable(text))),
        printable_json(json.dumps(text, ensure_ascii=False)),
    ):
        assert UNSAFE.search(shown) is None, ascii(shown)


def test_labels_that_differ_stay_different() -> None:
    values = ["a\t", "a\\u0009", "a\\t", "a?", "a", "a\n", "a\\n", "a\\u005cu0009"]
    assert len({escape(value) for value in values}) == len(values)


def test_names_are_cut_at_a_width_in_tables(dynctl: Any, tmp_path: Path) -> None:
    saved = json.loads(two_zones().save().decode().replace("prefill-a0", "p" * 5_000))
    view = tmp_path / "view.json"
    view.write_text(json.dumps(saved))
    ran = dynctl("workers", "list", "--view", view)
    assert max(map(len, ran.out.splitlines())) < 400
    rows = dynctl("workers", "list", "--view", view, "-o", "json").json["workers"]
    assert "p" * 5_000 in {row["name"] for row in rows}


@pytest.mark.parametrize("ending", BREAKS, ids=ascii)
def test_a_log_line_and_its_traceback_are_lines_of_the_log(ending: str) -> None:
    forged = f"x{ending}2026-01-01T00:00:00Z  INFO dynctl: forged"
    try:
        raise ValueError(forged)
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord("dynctl", logging.WARNING, "f", 1, "%s", (forged,), raised)
    record.worker = forged
    first, *rest = lines_of(TextFormatter().format(record)).split("\n")
    assert UNSAFE.search(first) is None
    assert rest
    assert all(line.startswith("  ") for line in rest)
