"""What a context may hold: the global options that say where to look, each with its own rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from dynctl.base.errors import UsageProblem

Value = str | float | bool | list[str]
"""A value as the file has it: paths are text, a list is several frontends."""

_LONGEST: Final = 4096
_MOST_ITEMS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_INVISIBLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
#: Where addresses may hide a password: `http://user:secret@host`, `http://host?key=secret`.
_LOGIN: Final = re.compile(r"(^|//|,)[^/,]*@|[?#]")


class Part(StrEnum):
    """What becomes of a value when a flag or a variable names another source than the context.

    A source is replaced, with what belongs to it; the rest still holds.
    """

    SOURCE = "source"
    BELONGS = "belongs to the source"
    REST = "rest"


@dataclass(frozen=True, slots=True)
class Key:
    """One key. ``field`` is the one of GlobalOptions, ``variable`` the environment's name for it.

    ``kind``: ``text``, ``texts``, ``path``, ``seconds`` or ``switch``. ``secretless``: a value
    that could hold a login is refused. ``default`` is what holds where nobody says anything.
    """

    name: str
    part: Part
    default: str
    kind: str = "text"
    variable: str | None = None
    choices: tuple[str, ...] = ()
    secretless: bool = False
    pattern: re.Pattern[str] | None = None

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    def checked(self, value: object, place: str) -> Value:
        """The value, once it is one of this key; raises UsageProblem that begins with ``place``.

        A single frontend may stand without the list around it.
        """
        if self.kind == "switch":
            if value is not True:
                raise UsageProblem(f"{place}: expected true, or leave it out; got {_shown(value)}")
            return True
        if self.kind == "seconds":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0.001 <= value <= 86400:  # type: ignore[arg-type,operator]
                raise UsageProblem(
                    f"{place}: expected a number of seconds, 0.001 to 86400; got {_shown(value)}"
                )
            return float(value)  # type: ignore[arg-type]
        if self.kind == "texts":
            items = [value] if isinstance(value, str) else value
            if not isinstance(items, list) or not 1 <= len(items) <= _MOST_ITEMS:
                raise UsageProblem(
                    f"{place}: expected 1 to {_MOST_ITEMS} of them, each in quotes, in a list; "
                    f"got {_shown(value)}"
                )
            return [self._text(item, place) for item in items]
        return self._text(value, place)

    def _text(self, value: object, place: str) -> str:
        if not isinstance(value, str):
            raise UsageProblem(f"{place}: expected text in quotes, got {_shown(value)}")
        if not value.strip() or len(value) > _LONGEST or _INVISIBLE.search(value):
            raise UsageProblem(
                f"{place}: expected 1 to {_LONGEST} characters that can be seen; "
                f"got {_shown(value)}"
            )
        if self.choices and value not in self.choices:
            raise UsageProblem(
                f"{place}: expected one of {', '.join(self.choices)}; got {_shown(value)}"
            )
        if self.pattern is not None and not self.pattern.fullmatch(value):
            # Not shown: who confuses the name of a secret with the secret has typed it here.
            raise UsageProblem(f"{place}: expected the name of an environment variable")
        if self.secretless and _LOGIN.search(value):
            # Not shown either.
            raise UsageProblem(
                f"{place}: an address with a login (before an @) or with a query (after a ?) may "
                "hold a secret, and a context holds none",
                "frontends take --token-env or --token-file, NATS its NATS_AUTH_* variables, "
                "etcd ETCD_AUTH_*",
            )
        return value


#: In the order in which they are shown and written.
KEYS: Final[Mapping[str, Key]] = {
    key.name: key
    for key in (
        Key(
            "frontend",
            Part.SOURCE,
            "http://127.0.0.1:8000 if ours is there",
            "texts",
            "DYNCTL_FRONTEND",
            secretless=True,
        ),
        Key("token-env", Part.BELONGS, "none", pattern=_VARIABLE),
        Key("token-file", Part.BELONGS, "none", "path"),
        Key(
            "discovery",
            Part.SOURCE,
            "none",
            variable="DYN_DISCOVERY_BACKEND",
            choices=("file", "etcd", "kubernetes"),
        ),
        Key("file-kv", Part.SOURCE, "none", "path", "DYN_FILE_KV"),
        Key("etcd-endpoints", Part.SOURCE, "none", variable="ETCD_ENDPOINTS", secretless=True),
        Key("etcd-client", Part.BELONGS, "etcd3", choices=("etcd3", "gateway")),
        Key(
            "nats-server",
            Part.BELONGS,
            "nats://localhost:4222",
            variable="NATS_SERVER",
            secretless=True,
        ),
        Key("dyn-namespace", Part.REST, "dynamo; all in Kubernetes", variable="DYN_NAMESPACE"),
        Key("namespace", Part.REST, "the kubeconfig's"),
        Key("all-namespaces", Part.REST, "no", "switch"),
        Key("kube-context", Part.REST, "the kubeconfig's current one"),
        Key("kubeconfig", Part.REST, "~/.kube/config", "path", "KUBECONFIG"),
        Key("reach", Part.REST, "auto", choices=("auto", "direct", "port-forward")),
        Key("timeout", Part.REST, "10", "seconds"),
    )
}

#: Each of these is a whole source, or a part of one, and cannot stand beside the other.
_APART: Final = (
    ("namespace", "all-namespaces"),
    ("token-env", "token-file"),
    ("file-kv", "etcd-endpoints"),
)
_BACKENDS: Final = (("file-kv", "file"), ("etcd-endpoints", "etcd"))


def checked_name(name: str) -> str:
    """``name`` where it can be a context's; raises UsageProblem."""
    if not _NAME.fullmatch(name):
        raise UsageProblem(
            f"{name!r}: no name of a context, expected 1 to 63 letters, digits, . _ @ or -, the "
            "first a letter or digit"
        )
    return name


def checked_values(values: Mapping[str, object], place: str) -> dict[str, Value]:
    """The values of one context in the order of KEYS.

    ``place`` stands before a key's name in what is raised (UsageProblem).
    """
    for name in values:
        if name not in KEYS:
            raise UsageProblem(f"{place}{name}: unknown key{near(name, KEYS)}", known(KEYS))
    found = {
        name: key.checked(values[name], place + name)
        for name, key in KEYS.items()
        if name in values
    }
    for one, other in _APART:
        if one in found and other in found:
            raise UsageProblem(f"{place}{one} and {other}: expected one of the two")
    for name, backend in _BACKENDS:
        said = found.get("discovery", backend)
        if name in found and said != backend:
            raise UsageProblem(f"{place}{name} and discovery {said}: expected one of the two")
    return found


def given_value(value: object) -> object:
    """A value of GlobalOptions as a context has it; a relative path becomes an absolute one."""
    if isinstance(value, Path):
        return str(Path(value.expanduser()).absolute())
    return list(value) if isinstance(value, tuple) else value


def option_value(key: Key, value: Value) -> Any:
    """A value of a context as GlobalOptions has it."""
    if key.kind == "path":
        return Path(str(value)).expanduser()
    return tuple(value) if isinstance(value, list) else value


def near(name: str, names: Iterable[str]) -> str:
    """``; did you mean X?`` where a name is almost ``name``."""
    import difflib

    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def known(names: Iterable[str]) -> str:
    return f"known: {', '.join(names)}"


def _shown(value: object) -> str:
    kinds = {dict: "a table", list: "a list", bool: "true" if value else "false"}
    if type(value) in kinds:
        return kinds[type(value)]
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
