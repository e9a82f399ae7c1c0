"""docs/compatibility.md: what works with each version of Dynamo, from the recorded runs."""

from __future__ import annotations

from typing import Final

from tests.dynamo.versions import LAST_WITH_DURABLE_EVENTS, Row, minor, recorded

_COLUMNS: Final = {
    "workers": "workers are seen",
    "one component": "requests predicted",
    "two zones": "in two zones",
    "under load": "under load",
    "caches read later": "caches read later",
    "tokens of a chat": "tokens of a chat",
    "over NATS": "over NATS",
    "durable KV events": "durable KV events",
    "check": "checks without a finding",
    "served": "served by `serve frontend`",
    "attached": "served from `serve attach`",
    "component": "through `serve router --endpoint`",
    "observed": "choices in `serve observe`",
}

#: The first and the last version of a note, and its text.
_NOTES: Final = (
    (
        (1, 0),
        (1, 5),
        "`DYN_TCP_RESPONSE_STREAM_HOST` is the name of a network interface, such as `lo`, and not "
        "an address. On a machine without another interface it has to be set. `dynctl` reads both.",
    ),
    (
        (1, 0),
        (1, 3),
        "Event channels belong to a component, and only the events name their worker. Until a "
        "worker has had an event, its index is current only while all channels of its component "
        "are connected. A card names `hf://MODEL/FILE` and no address that serves the tokenizer: "
        "use `--model-path DIR`.",
    ),
    (
        (1, 0),
        (1, 3),
        "The frontend's metrics do not show whether it uses KV events (DYR0404 and DYR0405 are "
        "skipped).",
    ),
    (
        (1, 0),
        (1, 2),
        "Cards have no worker type: beside prefill workers of the same model, the others decode. "
        "Workers publish no topology, so no transfer is constrained. The frontend does not report "
        "its readiness by worker (DYR0406 and DYR0407 are skipped).",
    ),
    (
        (1, 0),
        (1, 0),
        "Workers need a NATS server, and events come over NATS. A worker's local indexer does not "
        "report the number of its last event (DYR0306 is skipped). The frontend does not fetch the "
        "files that a card of `serve attach` names, and serves no engine that it registered.",
    ),
    (
        (1, 0),
        (1, 3),
        "Workers with `--durable-kv-events` have their KV events in a stream of NATS JetStream "
        "only, for at most an hour. `dynctl` reads the stream, and the snapshot of what routers "
        "removed from it; only `serve frontend --router-durable-kv-events` writes there, as "
        "Dynamo's routers do (tested beside 1.3.1). A worker "
        "whose events are not all there any more has a `degraded` index; until its first event "
        "is read, DYR0790 is a doubt. `dynctl events tail` does not show these events.",
    ),
)

_HEAD: Final = """\
# Which versions of Dynamo

`make test-dynamo VERSION=1.5.1` installs a version into an environment of its own and runs these
rows against it: real frontends and mock workers on loopback, file discovery, events over ZMQ (1.0:
NATS), requests over TCP. A cell is what was right, of what was tried. This page is generated from
the recorded runs in `tests/dynamo/compatibility/`. `dynctl check` warns about versions that are
not on it (DYR0501).

"""

_OTHER_SYSTEMS: Final = """
## Gateways

| with `serve epp` | tried |
|---|---|
| Envoy 1.40 (`make test-envoy`) | body modes `FULL_DUPLEX_STREAMED`, \
`BUFFERED`, `STREAMED` and `NONE`, subsets, refusals, \
clients that leave, a picker that is killed, TLS |
| messages of `ext_proc` v3 | bytes equal to those of Envoy's own stubs |
| Dynamo 1.6.1 (`--discovery`, `--dynamo-frontend`) | its frontends with \
`--router-mode direct` send each request to the workers of the picker's headers, prefill \
and decode |
| InferencePool `inference.networking.k8s.io/v1` | on a real Kubernetes 1.36 |
| Envoy Gateway, Istio, kgateway, llm-d's sidecar, Dynamo's sidecar | not tried: \
from their documentation |

## Kubernetes

| version | tried |
|---|---|
| 1.36.3 (`make test-kube`) | two nodes with a real Dynamo: `topology verify` with faults, \
`topology sync`, `serve attach`, lost nodes and API servers, each account, the chart under Helm |
| 1.34.4 (`VERSION=1.34.4`, by hand on 2026-11-27) | the same |
"""


def compatibility_page() -> str:
    """The whole page."""
    rows = recorded()
    lines = [
        "| Dynamo | " + " | ".join(_COLUMNS.values()) + " |",
        "|---" * (len(_COLUMNS) + 1) + "|",
    ]
    for version, found in rows.items():
        cells = [
            _cell(found.get(name))
            if name != "durable KV events" or minor(version) <= LAST_WITH_DURABLE_EVENTS
            else "no such option"
            for name in _COLUMNS
        ]
        lines.append(f"| {version} | " + " | ".join(cells) + " |")
    notes = ["", "## What is different in older versions", ""]
    for first, last, text in _NOTES:
        versions = [one for one in rows if first <= minor(one) <= last]
        if versions:
            notes.append(f"- **{', '.join(versions)}**: {text}")
    return _HEAD + "\n".join([*lines, *notes]) + "\n" + _OTHER_SYSTEMS


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    return f"{row.right} of {row.of}" + (f" ({row.note})" if row.note else "")
