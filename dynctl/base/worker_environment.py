"""The worker environment contract: where a worker reads its topology and KV transfer policy.

Modelled on Dynamo 1.6.1, whose messages are reproduced word for word so that a runbook written
for it stays valid; where they do not name the variable, a sentence that does follows. The variables
are read once, at start, and checked before the worker waits for a file:

    DYN_TOPOLOGY_ENABLED             true/1/on/yes turn it on; an unknown word warns and stays off
    DYN_TOPOLOGY_MOUNT_PATH          directory of domain files, default /etc/dynamo/topology
    DYN_KV_TRANSFER_DOMAIN           the domain that ties prefill to decode; required when on
    DYN_KV_TRANSFER_ENFORCEMENT      required (default) or preferred
    DYN_KV_TRANSFER_PREFERRED_WEIGHT 0..1, needed with preferred

Every non-hidden, non-empty regular file in the directory is one domain: the file's name is the
domain, its stripped content the value.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dynctl.base.files import read_file
from dynctl.base.options import WORKER_VARIABLES
from router_core import ModelRuntimeConfig, WorkerError

#: What DYN_TOPOLOGY_ENABLED turns on.
VARIABLES = WORKER_VARIABLES[1:]
DEFAULT_MOUNT_PATH = "/etc/dynamo/topology"
POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 30.0

# Bounds of what is read from a mounted directory; a label value has at most 63 bytes.
_MAX_FILE_BYTES = 4096
_MAX_FILES = 256

_TRUE = frozenset({"true", "1", "on", "yes"})
_FALSE = frozenset({"false", "0", "off", "no"})

Log = Callable[[int, str], None]
"""Receives a `logging` level and one line."""


class TopologyEnvironmentError(Exception):
    """The environment is invalid; the worker must print this text and exit 1."""


@dataclass(frozen=True)
class TopologyConfig:
    """A worker's published topology, under the field names of ModelRuntimeConfig.

    `kv_transfer_preferred_weight` lies in 0..1 and is set exactly with `preferred`.
    """

    topology_domains: Mapping[str, str]
    kv_transfer_domain: str
    kv_transfer_enforcement: Literal["required", "preferred"]
    kv_transfer_preferred_weight: float | None

    def fields(self) -> dict[str, Any]:
        """Keyword arguments for ModelRuntimeConfig or EngineConfig."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def read_worker_environment(
    env: Mapping[str, str],
    *,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    log: Log,
) -> TopologyConfig | None:
    """The worker's topology, or None unless DYN_TOPOLOGY_ENABLED turns it on.

    Blocks (through `sleep`, seconds) for up to 30 s by `now` (monotonic seconds) while the
    transfer domain's file is missing or empty. Raises TopologyEnvironmentError.
    """
    if not _enabled(env.get("DYN_TOPOLOGY_ENABLED", ""), log):
        return None
    domain = env.get("DYN_KV_TRANSFER_DOMAIN", "").strip()
    if not domain:
        raise TopologyEnvironmentError(
            "DYN_TOPOLOGY_ENABLED is set but DYN_KV_TRANSFER_DOMAIN is not set. "
            "Set it to the name of the topology domain file to use for KV transfer. Exiting."
        )
    if not names_a_file(domain):
        raise TopologyEnvironmentError(
            f"DYN_KV_TRANSFER_DOMAIN is {domain!r}; expected the plain name of a file in the "
            "topology directory. Exiting."
        )
    mount = Path(env.get("DYN_TOPOLOGY_MOUNT_PATH", "").strip() or DEFAULT_MOUNT_PATH)
    enforcement, weight = transfer_policy(env)
    try:
        # What registration would reject of the variables, with any value of the domain.
        ModelRuntimeConfig(**TopologyConfig({domain: "-"}, domain, enforcement, weight).fields())
    except WorkerError as error:
        raise TopologyEnvironmentError(
            f"{error} (DYN_KV_TRANSFER_DOMAIN, DYN_KV_TRANSFER_ENFORCEMENT and "
            "DYN_KV_TRANSFER_PREFERRED_WEIGHT)"
        ) from None
    expect_directory(mount, "DYN_TOPOLOGY_MOUNT_PATH")
    domains = wait_for_domain(mount, domain, now=now, sleep=sleep, log=log)
    config = TopologyConfig(domains, domain, enforcement, weight)
    try:
        ModelRuntimeConfig(**config.fields())
    except WorkerError as error:
        raise TopologyEnvironmentError(f"{error} (topology files in {mount})") from None
    log(logging.INFO, f"Topology config: {config} (from {mount})")
    return config


def variables_without_effect(env: Mapping[str, str]) -> list[str]:
    """The variables that are set and have no effect, because DYN_TOPOLOGY_ENABLED is not set."""
    if env.get("DYN_TOPOLOGY_ENABLED", "").strip():
        return []
    return [name for name in VARIABLES if env.get(name, "").strip()]


def expect_directory(mount: Path, source: str) -> None:
    """Raise TopologyEnvironmentError for a path that will never be a directory. One that does not
    exist may still be mounted. ``source``: the option or variable that has it."""
    try:
        wrong = mount.exists() and not mount.is_dir()
    except (OSError, ValueError):
        wrong = True
    if wrong:
        raise TopologyEnvironmentError(
            f"{source} is {str(mount)!r}, which is not a directory; expected the directory of "
            "topology files. Exiting."
        )


def read_domain_files(mount: Path) -> dict[str, str]:
    """Domain name -> value for every non-hidden, non-empty regular file, in name order.

    A Downward API volume shows each file as a symlink through `..data`; symlinks are followed,
    and the `..` entries themselves are hidden. A missing directory has no domains.
    """
    try:
        names = sorted(os.listdir(mount))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise TopologyEnvironmentError(
            f"cannot read the topology directory {mount}: {error.strerror}; expected a readable "
            "directory in DYN_TOPOLOGY_MOUNT_PATH. Exiting."
        ) from error
    domains: dict[str, str] = {}
    for name in names:
        path = mount / name
        if name.startswith(".") or not path.is_file():
            continue
        value = _read_value(path)
        if value:
            domains[name] = value
            if len(domains) > _MAX_FILES:
                raise TopologyEnvironmentError(
                    f"{mount} holds more than {_MAX_FILES} topology files; expected one file for "
                    "each domain in DYN_TOPOLOGY_MOUNT_PATH. Exiting."
                )
    return domains


def _read_value(path: Path) -> str:
    try:
        raw = read_file(path, _MAX_FILE_BYTES, pipe=False)
    except FileNotFoundError:
        return ""  # the kubelet swapped `..data` between listing and reading: poll again
    except OSError as error:
        raise TopologyEnvironmentError(
            f"cannot read topology file {path}: {error.strerror}. Exiting."
        ) from error
    if len(raw) > _MAX_FILE_BYTES:
        raise TopologyEnvironmentError(
            f"topology file {path} is larger than {_MAX_FILE_BYTES} bytes; expected one short "
            "value. Exiting."
        )
    try:
        value = raw.decode().strip()
    except UnicodeDecodeError:
        raise TopologyEnvironmentError(
            f"topology file {path} is not UTF-8 text; expected one short value. Exiting."
        ) from None
    if not value.isprintable():
        # Such as a byte order mark: the value would match no other worker's.
        lines = len(value.splitlines())
        what = f"{lines} lines" if lines > 1 else "characters that are not printable"
        raise TopologyEnvironmentError(
            f"topology file {path} has {what}; expected one short value. Exiting."
        )
    return value


def _enabled(raw: str, log: Log) -> bool:
    word = raw.strip().lower()
    if word in _TRUE:
        return True
    if word and word not in _FALSE:
        log(
            logging.WARNING,
            f"Unrecognized DYN_TOPOLOGY_ENABLED={raw!r}, treating as disabled; "
            "use 'true'/'false' (or 1/0, on/off, yes/no)",
        )
    return False


def names_a_file(domain: str) -> bool:
    """Whether a domain can be the name of a visible file in the topology directory."""
    return bool(domain) and "/" not in domain and "\0" not in domain and domain[0] != "."


def wait_for_domain(
    mount: Path,
    domain: str,
    *,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    log: Log,
    timeout_s: float = POLL_TIMEOUT_S,
) -> dict[str, str]:
    """All domains of the directory, as soon as the file of ``domain`` has content.

    Checks once, then every second for ``timeout_s`` seconds of ``now`` (monotonic); ``log`` gets
    a line while it waits. Raises TopologyEnvironmentError with the worker's own message.
    """
    deadline = now() + timeout_s
    waits = 0
    while True:
        domains = read_domain_files(mount)
        if domain in domains:
            return domains
        remaining = deadline - now()
        if remaining <= 0:
            raise TopologyEnvironmentError(
                f"DYN_TOPOLOGY_ENABLED is set but topology file {mount / domain} was not "
                f"populated within {timeout_s:g}s. This indicates the configured topology "
                "source did not publish the selected transfer domain. Exiting."
            )
        # Counted, not computed from the clock: a sleep that overshoots by a millisecond must
        # not skip a number in the countdown.
        shown = max(1, int(timeout_s) - waits)
        log(
            logging.INFO, f"Waiting for topology domain {domain} in {mount} ({shown}s remaining)..."
        )
        waits += 1
        sleep(min(POLL_INTERVAL_S, remaining))


def transfer_policy(
    env: Mapping[str, str],
) -> tuple[Literal["required", "preferred"], float | None]:
    """Enforcement and weight of the variables. Raises TopologyEnvironmentError."""
    raw_weight = env.get("DYN_KV_TRANSFER_PREFERRED_WEIGHT", "").strip()
    try:
        weight = float(raw_weight) if raw_weight else None
    except ValueError:
        raise TopologyEnvironmentError(
            f"could not convert string to float: {raw_weight!r} "
            "(DYN_KV_TRANSFER_PREFERRED_WEIGHT; expected a number 0..1)"
        ) from None
    enforcement = env.get("DYN_KV_TRANSFER_ENFORCEMENT", "").strip() or "required"
    if enforcement not in ("required", "preferred"):
        raise TopologyEnvironmentError(
            "kv_transfer_enforcement must be 'required' or 'preferred', got "
            f'"{enforcement}". Set DYN_KV_TRANSFER_ENFORCEMENT to required or preferred'
        )
    if enforcement == "preferred" and weight is None:
        raise TopologyEnvironmentError(
            "__all__: kv_transfer_preferred_weight is required when kv_transfer_enforcement is "
            "preferred (set DYN_KV_TRANSFER_PREFERRED_WEIGHT to 0..1)"
        )
    if weight is not None and not 0.0 <= weight <= 1.0:
        shown = weight if math.isfinite(weight) else "null"
        raise TopologyEnvironmentError(
            "kv_transfer_preferred_weight: Validation error: range "
            f'[{{"value": Number({shown}), "min": Number(0.0), "max": Number(1.0)}}]'
            f". DYN_KV_TRANSFER_PREFERRED_WEIGHT is {raw_weight}; expected a number from 0 to 1"
        )
    return ("required" if enforcement == "required" else "preferred"), weight
