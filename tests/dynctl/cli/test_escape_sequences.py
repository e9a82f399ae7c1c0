"""No escape sequence from outside reaches the terminal: names, messages, errors; both streams."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynctl
from dynctl.base.terminal import printable, printable_json, printable_value
from tests.dynctl.cli.test_unfriendly_servers import Server, server

__all__ = ["server"]  # a fixture

#: Clear the screen, set the title and end it, an 8-bit CSI, a hyperlink, a fake mark, hidden and
#: reversed text, backspaces, a carriage return.
ATTACKS = [
    "\x1b[2J", "\x1b]0;owned\x07", "\x1b]8;;http://evil\x1b\\x", "\x9b31m", "\x9d0;t\x9c",
    "\x1b[32mpass\x1b[0m", "\x1b[2mhidden\x1b[0m", "\u202egnp", "a\x08\x08b", "ok\rFAIL", "\x1bP1q",
    "\x7f", "\x85", "\u2066x", "\ufeff", "\x00",
]  # fmt: skip
_BAD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
FORMATS = ["table", "wide", "json", "jsonl", "yaml", "name"]


def hostile(value: Any, attack: str) -> Any:
    """``value`` with the attack at the end of every text."""
    if isinstance(value, dict):
        fixed = ("kind", "status", "state", "role", "outcome", "stage", "event", "schema")
        return {
            key: one if key in fixed else hostile(one, attack) for key, one in value.items()
        } | ({attack: attack} if not value else {})
    if isinstance(value, list):
        return [hostile(one, attack) for one in value]
    return value + attack if isinstance(value, str) else value


def clean(ran) -> None:
    for stream in (ran.out, ran.err):
        found = _BAD.search(stream)
        assert found is None, (repr(found), stream[max(0, found.start() - 60) :][:120])
    assert "Traceback" not in ran.err


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    from dynctl.documents.route_of_plan import route_result
    from dynctl.documents.workers import rank_rows, worker_row
    from tests.dynctl.serving.routed import request, router, worker

    made = router(worker(1, zone="a"), worker(2, zone="b"))
    plan = made.plan(request(), detail=True)
    result = route_result(made, request(), plan, now=1.0, preset=None, assumptions=[])
    rows = [worker_row(one, rank_rows(made, one, 1.0)) for one in made.registry]
    return {
        "route": json.loads(msgspec.json.encode(result)),
        "workers": {"workers": json.loads(msgspec.json.encode(rows))},
    }


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_data(dynctl, server: Server, documents, tmp_path, attack):
    server.body = json.dumps(hostile(documents["workers"], attack)).encode()
    for output in FORMATS:
        ran = dynctl("workers", "list", "--frontend", server.url, "-o", output)
        assert ran.code == 0, ran.err
        clean(ran)
    clean(dynctl("workers", "show", "aggregated-1" + attack, "--frontend", server.url))
    file = tmp_path / "decision.json"
    file.write_text(json.dumps(hostile(documents["route"], attack)))
    for output in FORMATS[::2]:
        ran = dynctl("why", str(file), "-o", output)
        assert ran.out, ran.err
        clean(ran)
    # The data of JSON are unchanged.
    ran = dynctl("workers", "list", "--frontend", server.url, "-o", "json")
    assert json.loads(ran.out)["workers"][0]["name"] == "aggregated-1" + attack


@pytest.mark.parametrize("attack", ATTACKS[::4], ids=ascii)
def test_errors(dynctl, server: Server, attack, tmp_path):
    commands = [
        ["workers", "show", "a0" + attack.replace("\x00", "")],
        ["why", "abc" + attack.replace("\x00", "")],
        ["route", "hi"],
        ["check"],
        ["thresholds", "get"],
        ["top", "--once"],
    ]
    for status, body in (
        (400, {"error": {"message": f"bad {attack} thing"}}),
        (500, {"error": attack}),
        (200, {"kind": attack, "workers": [{"name": attack}], "data": [{"id": attack}]}),
    ):
        server.status, server.body = status, json.dumps(body).encode()
        for command in commands:
            clean(dynctl(*command, "--frontend", server.url, "--timeout", "5"))
    file = tmp_path / "graph.yaml"
    file.write_text(f'kind: "{ascii(attack)[1:-1]}"\nmetadata: {{name: "{ascii(attack)[1:-1]}"}}\n')
    clean(dynctl("topology", "lint", str(file)))
    clean(dynctl("route", "hi", "--output", attack))
    clean(dynctl("route", "hi", "--frontend", f"http://{attack}"))


TEXT = st.text(st.sampled_from('ab\\"\x1b\x9b\u202e\n\t\x00\r\x7fé猫'), max_size=12)


class _Row(msgspec.Struct, frozen=True):
    name: str
    more: dict[str, str] = {}


@given(TEXT, st.dictionaries(TEXT, TEXT, max_size=2))
def test_values(text, more):
    row = _Row(text, more)
    plain = printable_value(row)
    assert plain.name == printable(text)
    assert set(plain.more.values()) <= set(map(printable, more.values()))
    encoded = msgspec.json.encode(row).decode()
    assert _BAD.search(printable_json(encoded)) is None
    assert msgspec.json.decode(printable_json(encoded), type=_Row) == row


#: Modules that write to a stream themselves; all their text is printable.
WRITERS = {
    "base/terminal.py", "screens/render.py", "screens/streaming.py", "screens/canvas.py",
    "cli/app.py", "cli/commands/help.py", "cli/completion/live.py", "top/run.py",
    "serving/http/start.py", "serving/telemetry/log_format.py",
}  # fmt: skip


def test_there_is_one_writer_of_each_stream():
    root = Path(dynctl.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        if path.parts[-3] == "simulation" or "simulation" in path.parts:
            continue
        text = path.read_text()
        if re.search(r"sys\.(stdout|stderr)\.write\(|(?<![.\w])print\(", text):
            found.add(str(path.relative_to(root)))
    assert found <= WRITERS
