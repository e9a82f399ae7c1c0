"""The codec of all documents: value -> JSON -> value.

A document is a frozen msgspec struct. Its ``kind`` names it, and its ``schema`` grows when a field
changes its meaning. New fields may appear at any time; older readers ignore them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.json_reader import read_json

Document = TypeVar("Document", bound=msgspec.Struct)


class _Header(msgspec.Struct, frozen=True):
    kind: Any = None
    schema: Any = None


def encode(document: msgspec.Struct) -> bytes:
    """The document as compact JSON."""
    return msgspec.json.encode(document)


def decode(data: bytes, form: type[Document], name: str = "") -> Document:
    """Read a document; raises WireError for another kind, a newer schema, other fields,
    or a depth that no document has.

    ``name`` is what the error calls the document; by default its kind.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(form)}
    kind, schema = defaults.get("kind"), defaults.get("schema")
    name = name or (kind if isinstance(kind, str) else form.__name__)
    header = read_json(data, name, _Header)
    if isinstance(kind, str) and header.kind not in (None, kind):
        raise WireError(name, f"expected kind {kind}, got {str(header.kind)[:64]!r}")
    if isinstance(schema, int) and isinstance(header.schema, int) and header.schema > schema:
        raise WireError(name, f"expected schema {schema}, got {header.schema}")
    return read_json(data, name, form)


def field_values(document: msgspec.Struct) -> dict[str, Any]:
    """The fields by name, to make a document with more fields of them."""
    return {name: getattr(document, name) for name in document.__struct_fields__}
