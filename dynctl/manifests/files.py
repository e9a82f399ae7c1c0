"""Read Kubernetes manifests from files: YAML or JSON documents, with a size limit.

The meaning of a document is in :mod:`dynctl.manifests.graphs`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.files import read_file
from dynctl.base.json_fields import mapping, sequence, text
from dynctl.base.yaml_reader import MOST_BYTES, YamlError, YamlTooLarge, read_yaml_documents


@dataclass(frozen=True, slots=True)
class Manifest:
    """One object. ``source``: the name of its file, and the document number if it has several."""

    source: str
    body: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return text(self.body.get("kind"))

    @property
    def group(self) -> str:
        return text(self.body.get("apiVersion")).rpartition("/")[0]

    @property
    def version(self) -> str:
        return text(self.body.get("apiVersion")).rpartition("/")[2]

    @property
    def name(self) -> str:
        return text(mapping(self.body.get("metadata")).get("name")) or "(no name)"

    @property
    def namespace(self) -> str:
        return text(mapping(self.body.get("metadata")).get("namespace"))

    @property
    def annotations(self) -> Mapping[str, Any]:
        return mapping(mapping(self.body.get("metadata")).get("annotations"))

    @property
    def deleting(self) -> bool:
        """Whether the object is in a cluster that is deleting it."""
        return "deletionTimestamp" in mapping(self.body.get("metadata"))


def read_manifests(files: Iterable[str]) -> list[Manifest]:
    """Read all objects of the files, in order; ``-`` is stdin, a List is read as its items.

    Raises UsageProblem with the file, and with the line of a YAML error; also for a file that is
    specified twice, whose objects would count twice.
    """
    files = list(files)
    read: dict[str, str] = {}
    for file in files:
        # A NUL is not in any path; reading the file refuses it by name.
        path = file if file == "-" or "\0" in file else os.path.realpath(file)
        if path in read:
            also = "" if read[path] == file else f" (also as {_file_name(read[path])})"
            raise UsageProblem(
                f"{_file_name(file)}: specified twice{also}; expected each file once"
            )
        read[path] = file
    return [
        manifest for file in files for manifest in parse_manifests(_bytes(file), _file_name(file))
    ]


def parse_manifests(data: bytes, source: str) -> list[Manifest]:
    """Parse the objects of one file. Raises UsageProblem."""
    documents = [document for document in _documents(data, source) if document is not None]
    named = [source if len(documents) == 1 else f"{source}#{n + 1}" for n in range(len(documents))]
    manifests: list[Manifest] = []
    for document, name in zip(documents, named, strict=True):
        manifests += [Manifest(where, body) for where, body in _objects(document, name)]
    return manifests


def _file_name(file: str) -> str:
    return "stdin" if file == "-" else file


def _bytes(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read(MOST_BYTES + 1)
    try:
        return read_file(file, MOST_BYTES)
    except OSError as error:
        raise UsageProblem(
            f"{file}: {file_problem(error)}", "expected files of Kubernetes manifests: -f FILE"
        ) from None
    except ValueError:
        raise UsageProblem(f"{file!r}: expected the name of a file") from None


def _documents(data: bytes, source: str) -> list[Any]:
    try:
        return read_yaml_documents(data)
    except YamlTooLarge as error:
        raise UsageProblem(f"{source}: {error}; expected Kubernetes manifests") from None
    except YamlError as error:
        place = f", {error.position}" if error.position else ""
        raise UsageProblem(
            f"{source}{place}: invalid YAML: {error.problem}", _yaml_hint(data, error.line)
        ) from None


def _yaml_hint(data: bytes, line: int | None) -> str:
    """What to do about two common faults; empty for others."""
    if b"{{" in data or b"${" in data:
        return "render a template (Helm, Kustomize) before you check it"
    wrong = data.split(b"\n")[line - 1 : line] if line is not None else []
    if any(b"\t" in text for text in wrong):
        return "indent with spaces: YAML does not allow tabs there"
    return ""


def _objects(document: Any, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(document, Mapping) or not text(document.get("kind")):
        raise UsageProblem(
            f"{source}: not a Kubernetes object; expected apiVersion, kind and metadata"
        )
    if document["kind"] == "List" or (
        document["kind"].endswith("List") and isinstance(document.get("items"), list)
    ):
        for place, item in enumerate(sequence(document.get("items"))):
            yield from _objects(item, f"{source} items[{place}]")
        return
    yield source, document
