"""One typed value a command: what every output format renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynctl.documents.thresholds import SignalRow
from dynctl.documents.workers import WorkerRow

SCHEMA = 1


class PeerVersion(msgspec.Struct, frozen=True):
    """A frontend that was asked for its version. ``error`` says why it did not tell."""

    url: str
    version: str | None = None
    error: str | None = None


class Versions(msgspec.Struct, frozen=True):
    client: str
    python: str
    peers: list[PeerVersion] = []
    kind: str = "Versions"
    schema: int = SCHEMA


class WorkerList(msgspec.Struct, frozen=True):
    """The workers of a router. ``source`` says whose they are."""

    source: str
    workers: list[WorkerRow] = []
    kind: str = "WorkerList"
    schema: int = SCHEMA


class WorkerDetail(msgspec.Struct, frozen=True):
    source: str
    worker: WorkerRow
    kind: str = "Worker"
    schema: int = SCHEMA


class ModelThresholds(msgspec.Struct, frozen=True):
    """Busy thresholds of one model; None is off. ``busy`` of ``ranks`` ranks are over one."""

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None


class ReplicaThresholds(msgspec.Struct, frozen=True):
    """The thresholds of one model on one replica; None is off.

    ``differs``: those that most replicas hold otherwise. ``problem``: why the replica told nothing
    (then there is no model), or does not serve the model.
    """

    replica: str
    model: str | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    differs: list[str] = []
    problem: str = ""


class ThresholdList(msgspec.Struct, frozen=True):
    """A row a replica and model. ``agree``: whether all that answered hold the same.

    ``signals`` (None: not asked for): how each rank stands against them. ``notes``: what could not
    be known; whole sentences.
    """

    source: str
    thresholds: list[ReplicaThresholds] = []
    agree: bool = True
    signals: list[SignalRow] | None = None
    notes: list[str] = []
    kind: str = "ThresholdList"
    schema: int = SCHEMA


class RankEffect(msgspec.Struct, frozen=True):
    """What a threshold change does to one rank, by the load that ``replica`` counts. ``reasons``:
    what it is over afterwards."""

    worker: str
    worker_id: int
    dp_rank: int
    before: bool
    after: bool
    worker_busy: bool
    reasons: list[str] = []
    replica: str = ""


class ReplicaChange(msgspec.Struct, frozen=True):
    """What became of one replica. ``state``: set, failed, set back (as before, because another one
    failed), left over (it could not be set back), or tried (a dry run)."""

    replica: str
    state: str
    before: ModelThresholds | None = None
    after: ModelThresholds | None = None
    problem: str = ""


class Waited(msgspec.Struct, frozen=True):
    """Whether the thresholds act and are not only stored. ``pending``: where they do not yet;
    ``untold``: where nobody says."""

    seconds: float
    acts: bool
    pending: list[str] = []
    untold: list[str] = []


class ThresholdChange(msgspec.Struct, frozen=True):
    """Before and after, on the first replica. ``applied`` is False for a dry run, and where nothing
    stayed set.

    ``agree``: whether all replicas hold the same afterwards. ``waited`` None: nobody asked.
    """

    source: str
    before: ModelThresholds
    after: ModelThresholds
    applied: bool
    ranks: list[RankEffect] = []
    replicas: list[ReplicaChange] = []
    agree: bool = True
    waited: Waited | None = None
    notes: list[str] = []
    kind: str = "ThresholdChange"
    schema: int = SCHEMA


def rank_effects(
    before: Sequence[WorkerRow], after: Sequence[WorkerRow], replica: str = ""
) -> list[RankEffect]:
    """What becomes of each rank: its state now, and under the thresholds of ``after``."""
    was = {(row.worker_id, rank.dp_rank): rank.busy for row in before for rank in row.ranks}
    return [
        RankEffect(
            worker=row.name,
            worker_id=row.worker_id,
            dp_rank=rank.dp_rank,
            before=was.get((row.worker_id, rank.dp_rank), False),
            after=rank.busy,
            worker_busy=row.busy,
            reasons=rank.busy_reasons,
            replica=replica,
        )
        for row in after
        for rank in row.ranks
    ]


class SettingRow(msgspec.Struct, frozen=True):
    """One setting: its value, where that came from, what it may be and how it is set."""

    name: str
    value: Any
    source: str
    default: Any
    bounds: str
    flag: str
    env: str
    help: str
    built: bool = True


class ConfigReport(msgspec.Struct, frozen=True):
    source: str
    preset: str | None
    settings: list[SettingRow]
    warnings: list[str] = []
    kind: str = "RouterConfig"
    schema: int = SCHEMA


class TopologyValue(msgspec.Struct, frozen=True):
    """What a worker would read for one topology domain, and the file it stands in."""

    domain: str
    value: str
    path: str
    kind: str = "TopologyValue"
    schema: int = SCHEMA


class CompletionScript(msgspec.Struct, frozen=True):
    """What completes command lines in a shell: bash, zsh or fish."""

    shell: str
    script: str
    kind: str = "CompletionScript"
    schema: int = SCHEMA


class BundleMember(msgspec.Struct, frozen=True):
    """One file of a bundle. ``notes``: what could not be known for it."""

    file: str
    what: str
    bytes: int
    sha256: str
    notes: list[str] = []


class LeftOut(msgspec.Struct, frozen=True):
    """What a bundle should hold and does not, and why."""

    file: str
    what: str
    why: str


class BundleManifest(msgspec.Struct, frozen=True):
    """What is in a bundle. ``created``: UTC. ``redacted``: what was done to it."""

    created: str
    client: str
    members: list[BundleMember]
    left_out: list[LeftOut]
    redacted: str
    kind: str = "BundleManifest"
    schema: int = SCHEMA


class BundleReport(msgspec.Struct, frozen=True):
    """A bundle that was written. ``bytes``: of the file."""

    path: str
    bytes: int
    members: list[BundleMember]
    left_out: list[LeftOut]
    kind: str = "Bundle"
    schema: int = SCHEMA


def versions(peers: Sequence[tuple[str, str | None, str | None]]) -> Versions:
    """This client's version, and ``(url, version, error)`` of each peer."""
    import platform

    from dynctl import version

    return Versions(version(), platform.python_version(), [PeerVersion(*peer) for peer in peers])


class ContextRow(msgspec.Struct, frozen=True):
    """One context as the file has it."""

    name: str
    current: bool
    values: dict[str, Any]


class ContextList(msgspec.Struct, frozen=True):
    """``current`` may name one that is not there."""

    file: str
    current: str | None = None
    contexts: list[ContextRow] = []
    kind: str = "ContextList"
    schema: int = SCHEMA


class ContextValue(msgspec.Struct, frozen=True):
    """What holds for one option, and who says so.

    ``source``: ``flag --x``, ``env X``, ``context NAME`` or ``default`` (then ``value`` is None
    and ``default`` is what holds). ``unused``: what the context says and does not count here,
    because of ``unused_because``.
    """

    name: str
    value: Any
    source: str
    default: str
    unused: Any = None
    unused_because: str | None = None


class ContextDetail(msgspec.Struct, frozen=True):
    """``chosen_by``: ``argument``, ``--context``, ``$DYNCTL_CONTEXT`` or ``current``."""

    name: str | None
    chosen_by: str
    file: str
    values: list[ContextValue]
    kind: str = "Context"
    schema: int = SCHEMA


class ContextChange(msgspec.Struct, frozen=True):
    """What was done: ``added``, ``replaced``, ``removed``, ``used`` or ``left``."""

    name: str | None
    done: str
    file: str
    current: str | None = None
    kind: str = "ContextChange"
    schema: int = SCHEMA
