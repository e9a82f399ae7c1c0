"""The global options: the source of data, and the output format."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from dynctl.base import backends


class OutputFormat(StrEnum):
    """Output formats; all render the same value."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    NAME = "name"
    JUNIT = "junit"
    CSV = "csv"
    PROMETHEUS = "prometheus"


#: Formats of a stream of lines.
STREAM_FORMATS: Final = (OutputFormat.TABLE, OutputFormat.WIDE, OutputFormat.JSONL)
#: The usual formats of a command.
FORMATS: Final = (
    *(OutputFormat.TABLE, OutputFormat.WIDE, OutputFormat.JSON, OutputFormat.JSONL),
    *(OutputFormat.YAML, OutputFormat.NAME),
)
#: Formats of what `topology render` writes.
MANIFEST_FORMATS: Final = (OutputFormat.TABLE, OutputFormat.YAML, OutputFormat.JSON)


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """``timeout`` and ``wait`` are in seconds.

    Of ``frontend``, ``view``, ``recording`` (at the time ``at``), ``demo`` and the planes
    (``discovery`` and what belongs to it) at most one is a source; frontends beside planes add load
    and settings. ``namespace`` is the one of Kubernetes (``dyn_namespace`` is Dynamo's);
    dynctl.sources.dynamo.frontend_pods describes its combination with ``all_namespaces``.

    ``context`` is that of the option. ``given``: the fields that were set on the command line
    (a value can equal its default); ``context_applied``: the context's values are included already;
    ``environment_sources``: variables may still set a source (see
    dynctl.settings.contexts.precedence).
    """

    frontend: tuple[str, ...] = ()
    view: Path | None = None
    recording: Path | None = None
    at: str | None = None
    demo: bool = False
    output: OutputFormat = OutputFormat.TABLE
    timeout: float = 10.0
    token: str | None = None
    token_env: str | None = None
    token_file: Path | None = None
    ca_cert: Path | None = None
    context: str | None = None
    discovery: str | None = None
    dyn_namespace: str | None = None
    file_kv: Path | None = None
    etcd_endpoints: str | None = None
    nats_server: str | None = None
    namespace: str | None = None
    all_namespaces: bool = False
    kube_context: str | None = None
    kubeconfig: Path | None = None
    reach: str = "auto"
    wait: float = 5.0
    no_color: bool = False
    debug: bool = False
    given: frozenset[str] = frozenset()
    context_applied: bool = False
    environment_sources: bool = True

    @property
    def planes(self) -> bool:
        """Whether a discovery backend is named, by its name or by its address."""
        named = (self.discovery, *(getattr(self, place) for place in backends.PLACES))
        return any(value is not None for value in named)

    @property
    def offline(self) -> str | None:
        """The flag of a source that is not a running deployment; None without one."""
        saved = {"--view": self.view, "--recording": self.recording}
        return "--demo" if self.demo else next((f for f, path in saved.items() if path), None)


#: Options that a command without a source reads: those about its output.
OUTPUT: Final = frozenset({"output", "no_color", "debug"})
#: Options that name a source: a command that cannot have one refuses them.
SOURCES: Final = frozenset(
    {"frontend", "view", "recording", "at", "demo", "discovery", *backends.PLACES}
)
#: Options that name a place: where a fleet is. A place that is given and not read is an error, as
#: the command would read or change another fleet.
PLACES: Final = (
    SOURCES - {"at"}
    | {"context", "dyn_namespace", "nats_server"}
    | {"namespace", "all_namespaces", "kube_context", "kubeconfig"}
)
_FRONTENDS: Final = frozenset(
    {"frontend", "timeout", "token", "token_env", "token_file", "ca_cert", "context"}
)
_PLANES: Final = _FRONTENDS | {"discovery", "dyn_namespace", "nats_server", "wait"}
#: Source (a flag, or a discovery backend) -> the options that it reads beside OUTPUT. An option
#: that is given and not read has no effect: a warning names it, or an error if it names a place.
READ_BY: Final[Mapping[str, frozenset[str]]] = {
    "--demo": frozenset({"demo"}),
    "--view": frozenset({"view"}),
    "--recording": frozenset({"recording", "at"}),
    "--frontend": _FRONTENDS,
    **{
        name: _PLANES | backend.reads | ({backend.place} if backend.place else set())
        for name, backend in backends.BACKENDS.items()
    },
}
#: Variables of Dynamo's planes: Dynamo's frontends and workers read them, `serve` does not. Those
#: of dynctl's other commands (DYNCTL_FRONTEND, DYNCTL_TOKEN, ..) and KUBECONFIG are not among them:
#: a shell has them for other commands and programs.
PLANE_VARIABLES: Final = (
    *(*backends.VARIABLES, "NATS_SERVER", "DYN_NAMESPACE"),
    *("DYN_EVENT_PLANE", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE_HOST"),
    "DYN_TCP_RESPONSE_STREAM_HOST",
)
#: Variables of workers, which publish what they set; the first turns the others on.
WORKER_VARIABLES: Final = (
    *("DYN_TOPOLOGY_ENABLED", "DYN_TOPOLOGY_MOUNT_PATH", "DYN_KV_TRANSFER_DOMAIN"),
    *("DYN_KV_TRANSFER_ENFORCEMENT", "DYN_KV_TRANSFER_PREFERRED_WEIGHT"),
)
