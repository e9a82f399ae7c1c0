"""Policy classes: how requests are divided and ordered where they wait in the router queue.

A class is a cell of a table: the ``policy_family`` that a request names, and the bucket of its
uncached prompt tokens. A class without both is explicit: requests name the class itself. Without
classes there is one, ``default``, made of the settings ``router_queue_threshold`` and
``router_queue_policy``. Names and rules are those of Dynamo's ``--router-policy-config``.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from router_core.config import MOST_INTEGER, MOST_NUMBER, QUEUE_POLICIES, RouterConfig
from router_core.errors import ConfigError
from router_core.forms import brief

#: The class of all requests where no classes are configured.
DEFAULT_CLASS = "default"
#: Largest numbers of classes in one table, of buckets, and of models with a table of their own.
MOST_CLASSES = 256
MOST_BUCKETS = 64
MOST_MODELS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TABLE = ("default_policy_family", "uncached_isl_buckets", "policy_classes")


@dataclass(frozen=True, slots=True)
class PolicyClass:
    """One class of the router queue.

    ``quantum``: uncached prompt tokens that it may admit in one round, relative to other classes.
    A rank is busy for it above ``prefill_busy_threshold`` active prefill tokens, or above
    ``prefill_busy_threshold_frac`` times its max_num_batched_tokens; with neither its requests
    never wait. The limits bound what waits in it, for each worker of the model: requests, their
    prompt tokens, and the cached ones among these.
    """

    name: str
    queue_policy: str = "fcfs"
    quantum: int = 1
    prefill_busy_threshold: int | None = None
    prefill_busy_threshold_frac: float | None = None
    request_queue_limit_per_worker: int | None = None
    raw_isl_token_queue_limit_per_worker: int | None = None
    cached_token_queue_limit_per_worker: int | None = None
    policy_family: str | None = None
    cache_bucket: str | None = None

    @property
    def queues(self) -> bool:
        """Whether requests of the class can wait."""
        return (
            self.prefill_busy_threshold is not None or self.prefill_busy_threshold_frac is not None
        )

    def limit(self, max_num_batched_tokens: int) -> float:
        """Active prefill tokens above which (strictly) a rank is busy for this class."""
        limit = math.inf
        if self.prefill_busy_threshold is not None:
            limit = self.prefill_busy_threshold
        if self.prefill_busy_threshold_frac is not None:
            limit = min(limit, self.prefill_busy_threshold_frac * max_num_batched_tokens)
        return limit


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """The classes of one model, in the order of their turns.

    ``buckets``: (lowest number of uncached tokens, name), ascending from 0. A table without
    ``default_family`` has one class, which takes every request.
    """

    classes: tuple[PolicyClass, ...]
    default_family: str | None = None
    buckets: tuple[tuple[int, str], ...] = ((0, "all"),)

    @property
    def queues(self) -> bool:
        """Whether any request can wait."""
        return any(policy_class.queues for policy_class in self.classes)

    def class_named(self, name: str) -> PolicyClass | None:
        """The class of that name."""
        return next(
            (policy_class for policy_class in self.classes if policy_class.name == name), None
        )

    def class_of(self, wanted: str | None, uncached_tokens: int) -> PolicyClass:
        """The class of a request that names the family or explicit class ``wanted``.

        An unknown name counts as the default family, as in Dynamo.
        """
        if self.default_family is None:
            return self.classes[0]
        for policy_class in self.classes:
            if policy_class.policy_family is None and policy_class.name == wanted:
                return policy_class
        families = {policy_class.policy_family for policy_class in self.classes}
        family = wanted if wanted is not None and wanted in families else self.default_family
        place = bisect_right(self.buckets, uncached_tokens, key=lambda bucket: bucket[0]) - 1
        bucket = self.buckets[place][1]
        return next(
            policy_class
            for policy_class in self.classes
            if policy_class.policy_family == family and policy_class.cache_bucket == bucket
        )


@dataclass(frozen=True, slots=True)
class PolicyClasses:
    """The tables of a router: ``models`` have their own, ``root`` is for all others."""

    root: PolicyTable | None = None
    models: Mapping[str, PolicyTable] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.root is not None or bool(self.models)

    def table(self, model: str, config: RouterConfig) -> PolicyTable:
        """The table of a model; that of ``config`` where none is configured for it."""
        table = self.models.get(model, self.root)
        return table if table is not None else default_table(config)

    def dump(self) -> dict[str, Any]:
        """Plain data that :func:`read_policy_classes` takes."""
        plain = {} if self.root is None else _dump_table(self.root)
        if self.models:
            plain["models"] = {name: _dump_table(table) for name, table in self.models.items()}
        return plain


NO_CLASSES = PolicyClasses()


def default_table(config: RouterConfig) -> PolicyTable:
    """The one class of a router without configured classes."""
    return PolicyTable(
        (
            PolicyClass(
                DEFAULT_CLASS,
                config.router_queue_policy,
                prefill_busy_threshold_frac=config.router_queue_threshold,
            ),
        )
    )


def read_policy_classes(plain: Any) -> PolicyClasses:
    """Read the classes of a policy configuration (plain data of its YAML).

    Raises ConfigError with the path of the field, its value and what was expected.
    """
    document = _mapping(plain, "")
    if "worker_selection" in document:
        raise ConfigError(
            "worker_selection: worker-selection plug-ins are not supported; remove it, and give "
            "the router settings as flags or variables"
        )
    _only(document, (*_TABLE, "models"), "")
    root = None
    if any(name in document for name in _TABLE):
        root = _table({name: document[name] for name in _TABLE if name in document}, "")
    tables = _mapping(document.get("models", {}), "models")
    if len(tables) > MOST_MODELS:
        raise ConfigError(f"models: expected at most {MOST_MODELS}, got {len(tables):,}")
    models = {}
    for name, table in tables.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"models: expected names of models, got {brief(name)}")
        models[name] = _table(_mapping(table, f"models.{name}"), f"models.{name}.")
    if root is None and not models:
        raise ConfigError(f"no classes: expected {', '.join(_TABLE)}, or models with these")
    return PolicyClasses(root, models)


# -- inside --------------------------------------------------------------------------------


def _table(plain: Mapping[str, Any], at: str) -> PolicyTable:
    _only(plain, _TABLE, at)
    missing = [name for name in _TABLE if name not in plain]
    if missing:
        raise ConfigError(f"{at}{missing[0]}: required beside {', '.join(plain) or 'the others'}")
    buckets = _buckets(plain["uncached_isl_buckets"], f"{at}uncached_isl_buckets")
    rows = _list(plain["policy_classes"], f"{at}policy_classes", MOST_CLASSES)
    classes: list[PolicyClass] = []
    for number, row in enumerate(rows):
        where = f"{at}policy_classes[{number}]"
        policy_class = _class(_mapping(row, where), where, [name for _, name in buckets])
        if any(policy_class.name == other.name for other in classes):
            raise ConfigError(f"{where}.name: {policy_class.name!r} occurs twice")
        classes.append(policy_class)
    default = _name(plain["default_policy_family"], f"{at}default_policy_family")
    _check_families(classes, default, [bucket for _, bucket in buckets], at)
    return PolicyTable(tuple(classes), default, buckets)


def _check_families(
    classes: Sequence[PolicyClass], default: str, buckets: Sequence[str], at: str
) -> None:
    """Raise ConfigError unless each family has one class for each bucket and one is the default."""
    families = list(dict.fromkeys(c.policy_family for c in classes if c.policy_family))
    if default not in families:
        known = ", ".join(families) or "none"
        raise ConfigError(
            f"{at}default_policy_family: no class has the family {default!r}; families: {known}"
        )
    for lone in classes:
        if lone.policy_family is None and lone.name in families:
            raise ConfigError(
                f"{at}policy_classes: the class {lone.name!r} without a family has the name of a "
                "family; rename one"
            )
    _check_cells(classes, families, buckets, at)


def _check_cells(
    classes: Sequence[PolicyClass], families: Sequence[str], buckets: Sequence[str], at: str
) -> None:
    for family, bucket in product(families, buckets):
        cell = [c for c in classes if (c.policy_family, c.cache_bucket) == (family, bucket)]
        if len(cell) != 1:
            names = ", ".join(c.name for c in cell) or "none"
            raise ConfigError(
                f"{at}policy_classes: expected one class of family {family!r} and bucket "
                f"{bucket!r}, got {names}"
            )


def _buckets(plain: Any, at: str) -> tuple[tuple[int, str], ...]:
    buckets: list[tuple[int, str]] = []
    for number, row in enumerate(_list(plain, at, MOST_BUCKETS)):
        where = f"{at}[{number}]"
        bucket = _mapping(row, where)
        _only(bucket, ("min_tokens", "bucket"), f"{where}.")
        least = _whole(bucket.get("min_tokens"), f"{where}.min_tokens")
        name = _name(bucket.get("bucket"), f"{where}.bucket")
        if not buckets and least != 0:
            raise ConfigError(f"{where}.min_tokens: expected 0 for the first bucket, got {least}")
        if buckets and least <= buckets[-1][0]:
            raise ConfigError(
                f"{where}.min_tokens: expected more than {buckets[-1][0]}, got {least}"
            )
        if any(name == other for _, other in buckets):
            raise ConfigError(f"{where}.bucket: {name!r} occurs twice")
        buckets.append((least, name))
    return tuple(buckets)


def _fraction(value: Any, at: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_NUMBER:
        raise ConfigError(
            f"{at}.prefill_busy_threshold_frac: expected a number from 0 to {MOST_NUMBER:g}, "
            f"got {brief(value)}"
        )
    return float(value)


def _cell(row: Mapping[str, Any], at: str, buckets: Sequence[str]) -> tuple[str | None, str | None]:
    """The family and the bucket of a class; None for both where requests name the class."""
    family, bucket = row.get("policy_family"), row.get("cache_bucket")
    if (family is None) != (bucket is None):
        given, other = "policy_family", "cache_bucket"
        if family is None:
            given, other = other, given
        raise ConfigError(
            f"{at}.{other}: required beside {given}; a class with neither is named by requests"
        )
    if family is None:
        return None, None
    family = _name(family, f"{at}.policy_family")
    if bucket not in buckets:
        raise ConfigError(
            f"{at}.cache_bucket: expected one of {', '.join(buckets)}, got {brief(bucket)}"
        )
    return family, bucket


def _class(row: Mapping[str, Any], at: str, buckets: Sequence[str]) -> PolicyClass:
    _only(row, [item.name for item in fields(PolicyClass)], f"{at}.")
    name = _name(row.get("name"), f"{at}.name")
    policy = row.get("queue_policy", "fcfs")
    if policy not in QUEUE_POLICIES:
        raise ConfigError(
            f"{at}.queue_policy: expected one of {', '.join(QUEUE_POLICIES)}, got {brief(policy)}"
        )
    quantum = _whole(row.get("quantum"), f"{at}.quantum")
    if quantum < 1:
        raise ConfigError(f"{at}.quantum: expected at least 1, got {quantum}")
    counts = {
        key: None if row.get(key) is None else _whole(row[key], f"{at}.{key}")
        for key in (
            "prefill_busy_threshold",
            "request_queue_limit_per_worker",
            "raw_isl_token_queue_limit_per_worker",
            "cached_token_queue_limit_per_worker",
        )
    }
    family, bucket = _cell(row, at, buckets)
    return PolicyClass(
        name,
        policy,
        quantum,
        prefill_busy_threshold_frac=_fraction(row.get("prefill_busy_threshold_frac"), at),
        policy_family=family,
        cache_bucket=bucket,
        **counts,
    )


def _dump_table(table: PolicyTable) -> dict[str, Any]:
    return {
        "default_policy_family": table.default_family,
        "uncached_isl_buckets": [{"min_tokens": n, "bucket": name} for n, name in table.buckets],
        "policy_classes": [
            {
                item.name: value
                for item in fields(policy_class)
                if (value := getattr(policy_class, item.name)) is not None
            }
            for policy_class in table.classes
        ],
    }


def _mapping(plain: Any, at: str) -> Mapping[Any, Any]:
    if not isinstance(plain, Mapping):
        where = at or "document"
        got = "nothing" if plain is None else brief(plain)
        raise ConfigError(f"{where}: expected a mapping, got {got}")
    return plain


def _list(plain: Any, at: str, most: int) -> Sequence[Any]:
    if not isinstance(plain, Sequence) or isinstance(plain, str) or not 0 < len(plain) <= most:
        got = f"{len(plain):,}" if isinstance(plain, (list, tuple)) else brief(plain)
        raise ConfigError(f"{at}: expected a list of 1 to {most}, got {got}")
    return plain


def _only(plain: Mapping[str, Any], known: Sequence[str], at: str) -> None:
    for name in plain:
        if name not in known:
            raise ConfigError(f"{at}{str(name)[:80]}: unknown, expected {', '.join(known)}")


def _whole(value: Any, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_INTEGER:
        raise ConfigError(f"{at}: expected a whole number, at least 0, got {brief(value)}")
    return value


def _name(value: Any, at: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{at}: expected letters, digits, '_', '.' and '-', got {brief(value)}")
    return value
