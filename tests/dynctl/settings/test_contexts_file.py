"""The contexts file: its path, reading it, changing it without loss."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.settings.contexts import edit as changing
from dynctl.settings.contexts.edit import change
from dynctl.settings.contexts.file import Contexts, config_path, read_contexts
from dynctl.settings.contexts.path import LARGEST_BYTES


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path / "c.toml"))
    return tmp_path / "c.toml"


def put(name: str, **values: Any) -> Contexts:
    named = {key.replace("_", "-"): value for key, value in values.items()}
    return change(lambda found: replace(found, contexts={**found.contexts, name: named}))


def drop(name: str) -> Contexts:
    return change(
        lambda found: replace(
            found, contexts={k: v for k, v in found.contexts.items() if k != name}
        )
    )


def use(name: str | None) -> Contexts:
    return change(lambda found: replace(found, current=name))


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "x"))
    assert config_path() == tmp_path / "x/dynctl/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_path() == tmp_path / ".config/dynctl/config.toml"
    monkeypatch.setenv("DYNCTL_CONFIG", "~/mine.toml")
    assert config_path() == tmp_path / "mine.toml"


def test_no_file_is_no_contexts(path):
    assert read_contexts() == Contexts(path)


def test_a_change_is_written_for_the_owner_alone_and_leaves_nothing_else(path):
    put("a", frontend=["http://a:1"], timeout=2.5)
    put("b.c", all_namespaces=True, file_kv='/with "quotes" and \\')
    use("a")
    found = read_contexts()
    assert found.current == "a"
    assert found.contexts == {
        "a": {"frontend": ["http://a:1"], "timeout": 2.5},
        "b.c": {"all-namespaces": True, "file-kv": '/with "quotes" and \\'},
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


OURS = """\
# my contexts

current = "prod"  # careful
[contexts.lab]   # the lab
# a note on the lab
frontend = ["http://lab:1"]
timeout = 3 # slow there

# production, do not touch
[contexts."prod"]
frontend = "http://prod:1"
"""


def test_comments_and_order_stay(path):
    path.write_text(OURS)
    put("lab", frontend=["http://lab:2"], timeout=3)
    assert path.read_text() == OURS.replace("lab:1", "lab:2")
    path.write_text(OURS)
    use("lab")
    assert path.read_text() == OURS.replace('current = "prod"', 'current = "lab"')
    use(None)
    assert path.read_text() == OURS.replace('current = "prod"  # careful\n', "")
    use("prod")
    assert '# my contexts\ncurrent = "prod"\n\n[contexts.lab]' in path.read_text()
    path.write_text(OURS)
    drop("lab")
    assert read_contexts().contexts == {"prod": {"frontend": ["http://prod:1"]}}
    assert "# production, do not touch\n[contexts." in path.read_text()
    assert "# my contexts\n" in path.read_text()
    assert not list(path.parent.glob("*.bak"))


@pytest.mark.parametrize(
    "text",
    [
        'contexts = { a = { frontend = ["http://a:1"] } }\n',
        '[contexts]\na.frontend = "http://a:1"\n',
        '[contexts]\n[contexts.a]\nfrontend = [\n  "http://a:1",\n]\n',
        '[contexts.a]\nfrontend = """http://a:1"""\n',
        'contexts.a.frontend = "http://a:1"\n',
        "[contexts.a]\r\ntimeout = 3 # CRLF\r\n",
    ],
)
def test_every_form_of_toml_is_changed_in_place(path, text):
    path.write_text("# mine\n" + text)
    put("a", frontend=["http://b:1"])
    put("b.c", timeout=2)
    assert read_contexts().contexts == {"a": {"frontend": ["http://b:1"]}, "b.c": {"timeout": 2}}
    drop("b.c")
    use("a")
    assert read_contexts() == Contexts(path, "a", {"a": {"frontend": ["http://b:1"]}})
    drop("a")
    assert read_contexts().contexts == {}
    assert path.read_text().startswith("# mine\n")
    assert os.listdir(path.parent) == [path.name]


def test_adding_and_removing_leaves_no_trace(path):
    path.write_text(OURS)
    drop("lab")
    put("lab", timeout=1)
    drop("prod")
    put("prod", timeout=1)
    once = path.read_text()
    drop("lab")
    put("lab", timeout=1)
    drop("prod")
    put("prod", timeout=1)
    assert path.read_text() == once


def test_a_link_stays_a_link(path, tmp_path):
    real = tmp_path / "dotfiles" / "dynctl.toml"
    real.parent.mkdir()
    real.write_text("# kept elsewhere\n")
    path.symlink_to(real)
    put("a", namespace="n")
    assert path.is_symlink()
    assert real.read_text().startswith("# kept elsewhere\n")
    assert "[contexts.a]" in real.read_text()


def test_writers_wait_for_each_other(path):
    threads = [
        threading.Thread(target=put, args=(f"c{i}",), kwargs={"timeout": 1}) for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_contexts().contexts) == {f"c{i}" for i in range(16)}


def test_a_change_that_fails_changes_nothing(path, monkeypatch):
    put("a", timeout=1)
    before = path.read_bytes()

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(UsageProblem, match=r"c\.toml: cannot be written: no space is left"):
        put("b", timeout=2)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_more_than_can_be_read_is_never_written(path, monkeypatch):
    monkeypatch.setattr(changing, "MOST_CONTEXTS", 2)
    put("a", timeout=1)
    put("b", timeout=1)
    with pytest.raises(UsageProblem, match="full; at most 2 contexts"):
        put("c", timeout=1)
    assert set(read_contexts().contexts) == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("current = ", "not TOML: Invalid value .at end of document."),
        ("[contexts.a]\ntimeout = 1\ntimeout = 2\n", r"not TOML: .*line 3"),
        ("curent = 'a'", "curent: unknown key; did you mean current?"),
        ("current = 3", "current: expected the name of a context, in quotes"),
        ("contexts = 3", r"contexts: expected tables \[contexts.NAME\]"),
        ("[contexts]\na = 3", r"contexts\.a: expected a table \[contexts\.a\]"),
        ("[contexts.'a b']\n", "contexts: 'a b' is not a valid context name"),
        (
            "[contexts.a]\nfrontnd = 'x'",
            r"contexts\.a\.frontnd: unknown key; did you mean frontend",
        ),
        ("[contexts.a]\ntimeout = '5'", r"contexts\.a\.timeout: expected a number of seconds"),
        ("a = " + "[" * 100_000, "not TOML"),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_a_broken_file_names_file_key_and_expectation(path, text, said):
    path.write_text(text)
    with pytest.raises(UsageProblem, match=rf"^{path}: {said}"):
        read_contexts()
    with pytest.raises(UsageProblem, match=rf"^{path}: {said}"):
        put("b", timeout=1)
    assert path.read_text() == text


def test_a_file_that_cannot_be_read(path, tmp_path, monkeypatch):
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageProblem, match="expected TOML in UTF-8"):
        read_contexts()
    path.write_bytes(b"#" * (LARGEST_BYTES + 1))
    with pytest.raises(UsageProblem, match="larger than 1,048,576 bytes"):
        read_contexts()
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path))
    with pytest.raises(UsageProblem, match="cannot be read: is a directory"):
        read_contexts()
    monkeypatch.setenv("DYNCTL_CONFIG", str(path / "below" / "c.toml"))
    with pytest.raises(UsageProblem, match=r"c\.toml: cannot be (read|written)"):
        put("a", timeout=1)
