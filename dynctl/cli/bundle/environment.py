"""The environment variables of a bundle; only listed ones show their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynctl.cli.bundle.redaction import MASK
from dynctl.settings.router_options import ROUTER_OPTIONS

PREFIXES: Final = ("DYN_", "DYNCTL_", "ETCD_", "NATS_", "KUBE", "OTEL_")
_ALONE: Final = frozenset({"COLUMNS", "LANG", "LC_ALL", "NO_COLOR", "TERM", "TZ", "HF_HUB_OFFLINE"})

#: Variables whose values are addresses, names, paths, switches and numbers. All others are masked.
SHOWN: Final = frozenset(
    {
        *_ALONE,
        "DYNCTL_CONFIG",
        "DYNCTL_CONTEXT",
        "DYNCTL_FRONTEND",
        "DYNCTL_LOG_DECISIONS",
        "DYNCTL_LOG_FORMAT",
        "DYNCTL_PRESET",
        "DYNCTL_ROUTER",
        "DYN_COMPONENT",
        "DYN_DISABLE_FRONTEND_ADMIN_API",
        "DYN_DISCOVERY_BACKEND",
        "DYN_EVENT_PLANE",
        "DYN_EVENT_PLANE_HOST",
        "DYN_FILE_KV",
        "DYN_HTTP_HOST",
        "DYN_HTTP_OVERLOAD_STATUS_CODE",
        "DYN_HTTP_PORT",
        "DYN_HTTP_RPC_HOST",
        "DYN_KUBE_DISCOVERY_MODE",
        "DYN_KV_TRANSFER_DOMAIN",
        "DYN_KV_TRANSFER_ENFORCEMENT",
        "DYN_KV_TRANSFER_PREFERRED_WEIGHT",
        "DYN_LOG",
        "DYN_NAMESPACE",
        "DYN_NAMESPACE_PREFIX",
        "DYN_REQUEST_PLANE",
        "DYN_ROUTER_MODE",
        "DYN_SDK_DISABLE_ANSI_LOGGING",
        "DYN_SYSTEM_HOST",
        "DYN_SYSTEM_PORT",
        "DYN_TCP_RESPONSE_STREAM_HOST",
        "DYN_TCP_RPC_HOST",
        "DYN_TOPOLOGY_ENABLED",
        "DYN_TOPOLOGY_MOUNT_PATH",
        "ETCD_ENDPOINTS",
        "KUBECONFIG",
        "KUBERNETES_SERVICE_HOST",
        "KUBERNETES_SERVICE_PORT",
        "NATS_SERVER",
    }
    | {name for option in ROUTER_OPTIONS.values() for name in option.env}
)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by name; values of unlisted ones are masked, empty ones stay empty.

    Shown values still need redaction: an address may contain credentials.
    """
    return {
        name: value if name in SHOWN or not value else MASK
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) or name in _ALONE
    }
