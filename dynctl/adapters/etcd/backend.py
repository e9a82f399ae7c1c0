"""etcd as a discovery backend, opened as the options and Dynamo's variables name it."""

from __future__ import annotations

import os
from typing import Any, Final

from dynctl.adapters.etcd.address import DEFAULT_ENDPOINTS
from dynctl.adapters.etcd.discovery import EtcdDiscovery
from dynctl.adapters.etcd.grpc import Etcd3Discovery
from dynctl.adapters.etcd.registration import EtcdRegistrar, registrar_of
from dynctl.adapters.ports import BackendPort, Discovery
from dynctl.base.options import GlobalOptions


def _open(options: GlobalOptions) -> Discovery:
    named = options.etcd_endpoints or os.environ.get("ETCD_ENDPOINTS") or DEFAULT_ENDPOINTS
    endpoints = [part.strip() for part in named.split(",") if part.strip()]
    access = {
        "user": os.environ.get("ETCD_AUTH_USERNAME"),
        "password": os.environ.get("ETCD_AUTH_PASSWORD"),
        "ca": os.environ.get("ETCD_AUTH_CA"),
        "cert": os.environ.get("ETCD_AUTH_CLIENT_CERT"),
        "key": os.environ.get("ETCD_AUTH_CLIENT_KEY"),
    }
    given: dict[str, Any] = {name: value for name, value in access.items() if value}
    discovery = Etcd3Discovery(endpoints, **given)
    discovery.reach_s = min(discovery.reach_s, options.timeout)
    return discovery


def _open_registrar(options: GlobalOptions, discovery: Discovery) -> EtcdRegistrar:
    assert isinstance(discovery, EtcdDiscovery)
    return registrar_of(discovery)


BACKEND: Final = BackendPort(_open, _open_registrar)
