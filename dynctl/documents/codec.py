"""The codec of all documents: value -> JSON -> value.

A document is a frozen msgspec struct. Its ``kind`` names it and its ``schema`` grows when a field
changes its meaning; new fields may appear at any time and are ignored by older readers.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from dynctl.base.decode_errors import WireError

Document = TypeVar("Document", bound=msgspec.Struct)


def encode(document: msgspec.Struct) -> bytes:
    """The document as compact JSON."""
    return msgspec.json.encode(document)


def decode(data: bytes, form: type[Document], name: str = "") -> Document:
    """Read a document of one form; raises WireError.

    ``name`` is what the error calls it, else its kind. A document of another kind or of a newer
    schema is refused.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(form)}
    kind, schema = defaults.get("kind"), defaults.get("schema")
    name = name or str(kind)
    try:
        found = msgspec.json.decode(data, type=form)
    except msgspec.MsgspecError as error:
        raise WireError(name, str(error)) from None
    got, version = getattr(found, "kind", None), getattr(found, "schema", None)
    if got != kind or (schema is not None and version is not None and version > schema):
        raise WireError(name, f"expected schema {schema} or older, got {got} of schema {version}")
    return found
