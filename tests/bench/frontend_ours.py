"""Our frontend as `dynctl serve frontend` runs it, on a free port, its address on stdout.

python -m tests.bench.frontend_ours [--model-path DIR] URL [URL ..]
python -m tests.bench.frontend_ours --serve-router URL [URL ..]
python -m tests.bench.frontend_ours [--model-path DIR] --router URL --port PORT
"""

import argparse
import sys
from pathlib import Path

from dynctl.serving.http.server import run_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import run_router


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--serve-router", action="store_true")
    parser.add_argument("--router", help="a router process; several frontends share the port")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("urls", nargs="*")
    arguments = parser.parse_args()
    run = run_router if arguments.serve_router else run_frontend
    return run(
        FrontendConfig(
            port=arguments.port,
            workers=tuple(arguments.urls),
            model_path=arguments.model_path,
            router_url=arguments.router,
            share_port=arguments.router is not None,
            log_level="warning",
            announce=True,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
