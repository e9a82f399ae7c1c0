"""The global options: the source of data, and the output format."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class OutputFormat(StrEnum):
    """Output formats; all render the same value."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    NAME = "name"
    JUNIT = "junit"


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """``timeout`` and ``wait`` are in seconds.

    Of ``frontend``, ``view``, ``demo`` and the planes (``discovery`` and what belongs to it) at
    most one is a source; frontends beside planes add load and settings. ``namespace`` is the one of
    Kubernetes (``dyn_namespace`` is Dynamo's); dynctl.sources.kubernetes describes its combination
    with ``all_namespaces``.

    ``context`` is that of the option. ``given``: the fields that were set on the command line
    (a value can equal its default); ``context_applied``: the context's values are included already;
    ``environment_sources``: variables may still set a source (see
    dynctl.settings.contexts.precedence).
    """

    frontend: tuple[str, ...] = ()
    view: Path | None = None
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
    etcd_client: str | None = None
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
