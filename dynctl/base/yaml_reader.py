"""Read YAML that people or other programs wrote: within bounds, data only, errors with their line.

Every YAML input of dynctl is read here: manifests, workers files, kubeconfigs. Dates stay text, as
in Kubernetes. PyYAML is imported on the first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

from dynctl.base.files import read_file

MOST_BYTES: Final = 8 << 20
MOST_DOCUMENTS: Final = 2000
MOST_NODES: Final = 500_000
MOST_DEPTH: Final = 100
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"
_MERGE: Final = "tag:yaml.org,2002:merge"
_TEXT: Final = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:value", _TIMESTAMP)


class YamlError(ValueError):
    """A text that cannot be read as YAML.

    ``problem`` is PyYAML's message and may quote the text; it must not be shown for files with
    secrets. ``line`` and ``column`` count from 1; both are None where PyYAML reports no position.
    """

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        self.problem = problem
        self.line = line
        self.column = column
        super().__init__(f"{self.position}: {problem}" if self.position else problem)

    @property
    def position(self) -> str:
        """``line 2, column 1``; empty where it is unknown."""
        return "" if self.line is None else f"line {self.line}, column {self.column}"


class YamlTooLarge(YamlError):
    """A text beyond a bound. ``problem`` names the bound and never quotes the text."""


def read_yaml_file(path: Path, *, most_bytes: int = MOST_BYTES, strict: bool = True) -> Any:
    """The document of a file, None if it is empty. Raises OSError and YamlError.

    If not ``strict``, the first of several documents counts, as in kubectl.
    """
    data = read_file(path, most_bytes)
    if strict:
        return read_yaml(data, most_bytes=most_bytes)
    return next(iter(read_yaml_documents(data, most_bytes=most_bytes, strict=False)), None)


def read_yaml(data: bytes, *, most_bytes: int = MOST_BYTES, strict: bool = True) -> Any:
    """The one document of a text, None if it is empty. Raises YamlError."""
    documents = read_yaml_documents(data, most_bytes=most_bytes, strict=strict)
    if len(documents) > 1:
        raise YamlError(f"{len(documents)} documents; expected one")
    return documents[0] if documents else None


def read_yaml_documents(
    data: bytes, *, most_bytes: int = MOST_BYTES, strict: bool = True
) -> list[Any]:
    """All documents of a text: dicts, lists and scalars. Raises YamlError.

    If ``strict``, keys must be text and unique in their mapping; else, as in kubectl, the last of
    two equal keys counts.
    """
    import yaml

    if len(data) > most_bytes:
        raise YamlTooLarge(f"larger than {_size(most_bytes)}")
    documents: list[Any] = []
    loader = _loader(strict)
    try:
        _check_depth(yaml.parse(data, Loader=loader))
        for document in yaml.load_all(data, Loader=loader):
            if len(documents) == MOST_DOCUMENTS:
                raise YamlTooLarge(f"more than {MOST_DOCUMENTS} documents")
            _check_size(document)
            documents.append(document)
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem or error.context)
        mark = error.problem_mark or error.context_mark
        if mark is None:
            raise YamlError(problem) from None
        raise YamlError(problem, mark.line + 1, mark.column + 1) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise YamlTooLarge("nested too deeply") from None
    except YamlError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # PyYAML converts scalars without checks: `!!int x`, `!!bool x`, a number of 5000 digits.
        raise YamlError(f"a value does not fit its type: {error}") from None
    return documents


def yaml_lines(data: bytes) -> dict[tuple[str | int, ...], int]:
    """Path -> line, counted from 1, of each key and list item of a text that `read_yaml` accepts.

    A path has the keys and positions from the top: ``("levels", 0, "latency")``.
    """
    import yaml

    lines: dict[tuple[str | int, ...], int] = {}
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), yaml.compose(data, _loader(True)))]
    while waiting and len(lines) < MOST_NODES:
        path, node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[*path, key.value] = key.start_mark.line + 1
                waiting.append(((*path, key.value), value))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                lines[*path, number] = value.start_mark.line + 1
                waiting.append(((*path, number), value))
    return lines


@cache
def _loader(strict: bool) -> Any:
    """PyYAML's safe loader, the C one where it is installed, with three changes.

    Dates stay text. Merge keys are counted while they are merged: ``<<: [*a, *a]`` doubles a
    mapping with each line. If ``strict``, keys are checked.
    """
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class BoundedLoader(base):  # type: ignore[misc]
        merged = 0

        def flatten_mapping(self, node: Any) -> None:
            if strict and not hasattr(node, "dynctl_checked"):
                node.dynctl_checked = True  # merging adds keys that the mapping may repeat
                _check_keys(node)
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > MOST_NODES:
                raise YamlTooLarge(f"more than {MOST_NODES:,} merged keys")

    def _check_keys(node: Any) -> None:
        seen = set()
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key is not text"
            elif key.tag not in _TEXT:
                problem = f"the key {key.value[:100]} is not text; put it in quotes"
            elif key.value in seen:
                problem = f"the key {key.value[:100]!r} occurs twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)

    BoundedLoader.add_constructor(_TIMESTAMP, base.construct_yaml_str)
    return BoundedLoader


def _check_depth(events: Iterable[Any]) -> None:
    """Refuse deep nesting before a document is made of it: libyaml's recursion has no limit, and
    the process would end."""
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_DEPTH:
                raise YamlTooLarge(f"nested more than {MOST_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_size(document: Any) -> None:
    """Refuse what grows when it is walked: aliases make a small text a huge tree."""
    waiting: list[tuple[Any, int]] = [(document, 0)]
    seen = 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > MOST_NODES or depth > MOST_DEPTH:
            raise YamlTooLarge(
                f"more than {MOST_NODES:,} values or nested more than {MOST_DEPTH} deep"
            )
        if isinstance(value, dict):
            waiting += [(one, depth + 1) for one in value.values()]
        elif isinstance(value, list):
            waiting += [(one, depth + 1) for one in value]


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count:,} bytes"
