"""Manifests from files: YAML or JSON documents, read within bounds, told apart by kind.

Nothing here knows what a document means; :mod:`dynctl.manifests.graphs` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynctl.base.errors import UsageProblem
from dynctl.wire.kubernetes.fields import mapping, sequence, text

_MAX_BYTES: Final = 8 << 20
_MAX_DOCUMENTS: Final = 2000
_MAX_NODES: Final = 500_000
_MAX_DEPTH: Final = 100


@dataclass(frozen=True, slots=True)
class Manifest:
    """One object. ``source``: the file as it was named, and which document where it has several."""

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


def read_manifests(files: Iterable[str]) -> list[Manifest]:
    """Every object of the files, in order; ``-`` is stdin, a List counts as its items.

    Raises UsageProblem naming the file (and the line, where YAML knows it).
    """
    return [manifest for file in files for manifest in parse_manifests(_bytes(file), _shown(file))]


def parse_manifests(data: bytes, source: str) -> list[Manifest]:
    """The objects of one file. Raises UsageProblem."""
    if len(data) > _MAX_BYTES:
        raise UsageProblem(
            f"{source}: larger than {_MAX_BYTES >> 20} MiB; expected Kubernetes manifests"
        )
    documents = [one for one in _documents(data, source) if one is not None]
    named = [source if len(documents) == 1 else f"{source}#{n + 1}" for n in range(len(documents))]
    found: list[Manifest] = []
    for document, name in zip(documents, named, strict=True):
        _bounded(document, name)
        found += [Manifest(where, body) for where, body in _objects(document, name)]
    return found


def _shown(file: str) -> str:
    return "stdin" if file == "-" else file


def _bytes(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read(_MAX_BYTES + 1)
    try:
        with Path(file).open("rb") as stream:
            return stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageProblem(
            f"{file}: {error.strerror}; expected a file of Kubernetes manifests"
        ) from None
    except ValueError:
        raise UsageProblem(f"{file!r}: expected the name of a file") from None


def _documents(data: bytes, source: str) -> list[Any]:
    import yaml

    documents: list[Any] = []
    try:
        for document in yaml.load_all(data, Loader=_loader()):
            documents.append(document)
            if len(documents) > _MAX_DOCUMENTS:
                raise UsageProblem(f"{source}: more than {_MAX_DOCUMENTS} documents")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise UsageProblem(
            f"{source}{where}: not YAML: {error.problem or error.context}",
            "kubectl could not read it either; templates (Helm, Kustomize) must be rendered first",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{source}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageProblem(f"{source}: nested deeper than can be read") from None
    except (ValueError, TypeError) as error:  # a date that is none, a key that is a list
        raise UsageProblem(f"{source}: not YAML: {error}") from None
    return documents


def _loader() -> Any:
    """A safe loader whose merge keys are bounded.

    ``<<: [*a, *a]`` doubles a mapping with each line, while it is built: by then it is too late to
    count its nodes.
    """
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class BoundedLoader(base):  # type: ignore[misc]
        merged = 0

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > _MAX_NODES:
                raise yaml.constructor.ConstructorError(
                    None, None, f"more than {_MAX_NODES:,} merged keys", node.start_mark
                )

    return BoundedLoader


def _objects(document: Any, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(document, Mapping) or not text(document.get("kind")):
        raise UsageProblem(
            f"{source}: no Kubernetes object; expected apiVersion, kind and metadata"
        )
    if document["kind"] == "List" or (
        document["kind"].endswith("List") and isinstance(document.get("items"), list)
    ):
        for place, item in enumerate(sequence(document.get("items"))):
            yield from _objects(item, f"{source} items[{place}]")
        return
    yield source, document


def _bounded(document: Any, source: str) -> None:
    """Refuse what grows when it is walked: aliases make a small file a huge tree."""
    waiting: list[tuple[Any, int]] = [(document, 0)]
    seen = 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > _MAX_NODES or depth > _MAX_DEPTH:
            raise UsageProblem(
                f"{source}: more than {_MAX_NODES:,} values or nested more than {_MAX_DEPTH} deep"
            )
        if isinstance(value, Mapping):
            strange = next((key for key in value if not isinstance(key, str)), None)
            if strange is not None:
                raise UsageProblem(
                    f"{source}: the key {strange!r} is no text; Kubernetes takes quoted keys only"
                )
            waiting += [(one, depth + 1) for one in value.values()]
        elif isinstance(value, list):
            waiting += [(one, depth + 1) for one in value]
