"""The keys of a context: the global options that name a source, each with its rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from dynctl.base import backends
from dynctl.base.errors import UsageProblem

Value = str | float | bool | list[str]
"""A value in the file: paths are text, a list has several frontends."""

_LONGEST: Final = 4096
_MOST_ITEMS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_INVISIBLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
#: The parts of an address that may be a password: `http://user:secret@host`, `http://host?key=..`.
_LOGIN: Final = re.compile(r"(^|//|,)[^/,]*@|[?#]")


class Part(StrEnum):
    """How a flag or a variable that names another source changes a context's value.

    Sources and the values that belong to them are ignored then; the rest still applies.
    """

    SOURCE = "source"
    BELONGS = "belongs to the source"
    REST = "rest"


@dataclass(frozen=True, slots=True)
class Key:
    """One key. ``field`` is its name in GlobalOptions, ``variable`` its environment variable.

    ``kind``: ``text``, ``texts``, ``path``, ``seconds`` or ``switch``. ``no_login``: values with
    a user or a password are refused. ``default`` describes the value of a key that is not set.
    """

    name: str
    part: Part
    default: str
    kind: str = "text"
    variable: str | None = None
    choices: tuple[str, ...] = ()
    no_login: bool = False
    pattern: re.Pattern[str] | None = None

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    def checked(self, value: object, place: str) -> Value:
        """The value if it is valid for this key; a single frontend needs no list around it.

        Raises UsageProblem, whose message begins with ``place``.
        """
        if self.kind == "switch":
            if value is not True:
                raise UsageProblem(
                    f"{place}: expected true, or remove the key; got {_shown_value(value)}"
                )
            return True
        if self.kind == "seconds":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0.001 <= value <= 86400:  # type: ignore[arg-type,operator]
                raise UsageProblem(
                    f"{place}: expected a number of seconds, 0.001 to 86400; "
                    f"got {_shown_value(value)}"
                )
            return float(value)  # type: ignore[arg-type]
        if self.kind == "texts":
            items = [value] if isinstance(value, str) else value
            if not isinstance(items, list) or not 1 <= len(items) <= _MOST_ITEMS:
                raise UsageProblem(
                    f"{place}: expected a list of 1 to {_MOST_ITEMS} values, each in quotes; "
                    f"got {_shown_value(value)}"
                )
            return [self._text(item, place) for item in items]
        return self._text(value, place)

    def _text(self, value: object, place: str) -> str:
        if not isinstance(value, str):
            raise UsageProblem(f"{place}: expected text in quotes, got {_shown_value(value)}")
        if not value.strip() or len(value) > _LONGEST or _INVISIBLE.search(value):
            raise UsageProblem(
                f"{place}: expected 1 to {_LONGEST} visible characters; got {_shown_value(value)}"
            )
        if self.choices and value not in self.choices:
            raise UsageProblem(
                f"{place}: expected one of {', '.join(self.choices)}; got {_shown_value(value)}"
            )
        if self.pattern is not None and not self.pattern.fullmatch(value):
            # The value is not shown: it may be the secret itself, typed in place of its name.
            raise UsageProblem(f"{place}: expected the name of an environment variable")
        if self.no_login and _LOGIN.search(value):
            # This value is not shown either.
            raise UsageProblem(
                f"{place}: expected an address without a login (before an @) and without a query "
                "(after a ?): a context contains no secrets",
                "use --token-env or --token-file for frontends, NATS_AUTH_* variables for NATS, "
                "ETCD_AUTH_* variables for etcd",
            )
        return value


#: In the order in which they are shown and saved.
KEYS: Final[Mapping[str, Key]] = {
    key.name: key
    for key in (
        Key(
            "frontend",
            Part.SOURCE,
            "http://127.0.0.1:8000 if a dynctl frontend answers",
            "texts",
            "DYNCTL_FRONTEND",
            no_login=True,
        ),
        Key("token-env", Part.BELONGS, "none", pattern=_VARIABLE),
        Key("token-file", Part.BELONGS, "none", "path"),
        Key("ca-cert", Part.BELONGS, "those of the machine", "path", "DYNCTL_CA_CERT"),
        Key(
            "discovery",
            Part.SOURCE,
            "none",
            variable="DYN_DISCOVERY_BACKEND",
            choices=tuple(backends.BACKENDS),
        ),
        Key("file-kv", Part.SOURCE, "none", "path", "DYN_FILE_KV"),
        Key("etcd-endpoints", Part.SOURCE, "none", variable="ETCD_ENDPOINTS", no_login=True),
        Key(
            "nats-server",
            Part.BELONGS,
            "nats://localhost:4222",
            variable="NATS_SERVER",
            no_login=True,
        ),
        Key("dyn-namespace", Part.REST, "dynamo; all in Kubernetes", variable="DYN_NAMESPACE"),
        Key("namespace", Part.REST, "the namespace of the kubeconfig"),
        Key("all-namespaces", Part.REST, "no", "switch"),
        Key("kube-context", Part.REST, "the current context of the kubeconfig"),
        Key("kubeconfig", Part.REST, "~/.kube/config", "path", "KUBECONFIG"),
        Key("reach", Part.REST, "auto", choices=("auto", "direct", "port-forward")),
        Key("timeout", Part.REST, "10", "seconds"),
    )
}

#: Pairs of keys that exclude each other.
_EXCLUSIVE: Final = (
    ("namespace", "all-namespaces"),
    ("token-env", "token-file"),
    *combinations((place.replace("_", "-") for place in backends.PLACES), 2),
)


def checked_name(name: str) -> str:
    """``name`` if it is valid for a context. Raises UsageProblem."""
    if not _NAME.fullmatch(name):
        raise UsageProblem(
            f"{name!r} is not a valid context name; expected 1 to 63 letters, digits, . _ @ or -, "
            "starting with a letter or digit"
        )
    return name


def checked_values(values: Mapping[str, object], place: str) -> dict[str, Value]:
    """The values of one context in the order of KEYS.

    Raises UsageProblem; ``place`` is the prefix of the key's name in its message.
    """
    for name in values:
        if name not in KEYS:
            raise UsageProblem(
                f"{place}{name}: unknown key{did_you_mean(name, KEYS)}", known_names(KEYS)
            )
    checked = {
        name: key.checked(values[name], place + name)
        for name, key in KEYS.items()
        if name in values
    }
    for key, other in _EXCLUSIVE:
        if key in checked and other in checked:
            raise UsageProblem(f"{place}{key} and {other}: expected one of the two")
    for backend in backends.BACKENDS.values():
        name, discovery = backend.flag.removeprefix("--"), checked.get("discovery", backend.name)
        if name in checked and discovery != backend.name:
            raise UsageProblem(f"{place}{name} and discovery {discovery}: expected one of the two")
    return checked


def given_value(value: object) -> object:
    """A value of GlobalOptions in the form of a context; relative paths become absolute."""
    if isinstance(value, Path):
        return str(Path(value.expanduser()).absolute())
    return list(value) if isinstance(value, tuple) else value


def option_value(key: Key, value: Value) -> Any:
    """A value of a context in the form of GlobalOptions."""
    if key.kind == "path":
        return Path(str(value)).expanduser()
    return tuple(value) if isinstance(value, list) else value


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean X?`` if one of ``names`` is similar to ``name``."""
    import difflib

    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def known_names(names: Iterable[str]) -> str:
    return f"known: {', '.join(names)}"


def _shown_value(value: object) -> str:
    kinds = {dict: "a table", list: "a list", bool: "true" if value else "false"}
    if type(value) in kinds:
        return kinds[type(value)]
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
