"""``python -m tests.soak.frontend_process SETTINGS``: a frontend that reports its state."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

from dynctl.serving.http.process import serve
from dynctl.serving.http.server import build_frontend
from dynctl.serving.http.start import settle_malloc
from dynctl.serving.routing.config import FrontendConfig, HealthConfig, ReplicaConfig
from dynctl.serving.telemetry.log_format import configure_logging
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import RouterConfig
from tests.soak.reports import report_on_request


async def run(settings: dict[str, Any]) -> int:
    """``workers``: specs; ``replica`` and ``peer``: addresses of replica sync, if any;
    ``index_peers``: frontends whose index it begins with."""
    replicas = None
    if "replica" in settings:
        replicas = ReplicaConfig(bind=settings["replica"], peers=(settings["peer"],))
    config = FrontendConfig(
        port=0,
        workers=tuple(settings["workers"]),
        router=RouterConfig().with_values(settings.get("router", {})),
        model_path=DEMO_MODEL_DIR,
        announce=True,
        log_level="error",
        decision_memory_bytes=2_000_000,
        health=HealthConfig(interval_s=0.5, timeout_s=5.0),
        replicas=replicas,
        index_peers=tuple(settings.get("index_peers", ())),
    )
    configure_logging(config.log_format, config.log_level)
    loop = asyncio.get_running_loop()
    settle_malloc()  # `serve` starts no thread before it does; one would have its own arena
    report_on_request(
        lambda: {"tasks": len(asyncio.all_tasks(loop)), "objects": sys.getallocatedblocks()}
    )
    return await serve(lambda: build_frontend(config))


if __name__ == "__main__":
    sys.exit(uvloop.run(run(json.loads(sys.argv[1]))))
