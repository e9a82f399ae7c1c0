"""Makes ``import etcd3`` (0.12) work with current protobuf versions.

The generated modules of etcd3 build their message classes in a way that protobuf refuses since
version 4. They contain the serialized descriptors of the messages, from which current protobuf
makes the same classes. So modules of the same names are registered before etcd3 imports its own.
The descriptors go to a separate pool, because names like ``kv.proto`` may exist in the default one.
"""

import ast
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_PACKAGE: Final = "etcd3.etcdrpc"
_FILES: Final = ("kv", "auth", "rpc")
"""In the order of their imports."""

# The one string literal with the descriptor; parsing the whole file as Python takes a hundred
# times longer.
_DESCRIPTOR: Final = re.compile(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)")
_MAX_SOURCE_BYTES: Final = 4 * 1024 * 1024
_lock = threading.Lock()


class Etcd3Unusable(Exception):
    """etcd3 is missing, or has another version than the shim supports."""


def load_etcdrpc() -> Any:
    """``etcd3.etcdrpc``: the messages and stubs of etcd's v3 API. Raises Etcd3Unusable.

    Takes about a third of a second the first time, most of it grpc's own import.
    """
    with _lock:
        # Else gRPC writes to stderr each time that a TLS connection fails.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        try:
            if "etcd3" not in sys.modules:
                _install_messages()
            from etcd3 import etcdrpc  # type: ignore[import-untyped]
        except Etcd3Unusable:
            raise
        except Exception as error:
            for name in [name for name in sys.modules if name.partition(".")[0] == "etcd3"]:
                del sys.modules[name]
            raise Etcd3Unusable(f"the etcd3 library does not work: {error}") from error
        return etcdrpc


def _install_messages() -> None:
    from google.protobuf import descriptor_pool  # type: ignore[import-untyped]

    folder = _folder()
    pool = descriptor_pool.DescriptorPool()
    modules = {f"{_PACKAGE}.{name}_pb2": _module(pool, folder, name) for name in _FILES}
    sys.modules.update(modules)


def _folder() -> Path:
    found = importlib.util.find_spec("etcd3")
    if found is None or not found.submodule_search_locations:
        raise Etcd3Unusable("the etcd3 library is not installed")
    return Path(found.submodule_search_locations[0], "etcdrpc")


def _module(pool: Any, folder: Path, name: str) -> ModuleType:
    """A replacement of protoc's output for ``name.proto``."""
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.internal import enum_type_wrapper  # type: ignore[import-untyped]

    source = folder / f"{name}_pb2.py"
    if source.stat().st_size > _MAX_SOURCE_BYTES:
        raise Etcd3Unusable(f"{source} is not the file of etcd3 0.12")
    match = _DESCRIPTOR.search(source.read_text(encoding="utf-8"))
    if match is None:
        raise Etcd3Unusable(f"{source} has no descriptor; expected etcd3 0.12")
    serialized = ast.literal_eval(match[1]).encode("latin1")
    pool.AddSerializedFile(serialized)
    file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
    prefix = f"{file.package}." if file.package else ""
    module = ModuleType(f"{_PACKAGE}.{name}_pb2", f"The messages of {file.name}.")
    module.__file__ = str(source)
    for message in file.message_type:
        descriptor = pool.FindMessageTypeByName(prefix + message.name)
        setattr(module, message.name, message_factory.GetMessageClass(descriptor))
    for enum in file.enum_type:
        descriptor = pool.FindEnumTypeByName(prefix + enum.name)
        setattr(module, enum.name, enum_type_wrapper.EnumTypeWrapper(descriptor))
        for value in enum.value:
            setattr(module, value.name, value.number)
    return module
