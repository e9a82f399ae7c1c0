"""Our frontend as `dynctl serve frontend` runs it, on a free port, its address on stdout.

python -m tests.bench.frontend_ours [--model-path DIR] URL [URL ..]
"""

import argparse
import sys
from pathlib import Path

from dynctl.serving.config import FrontendConfig
from dynctl.serving.http.server import run_frontend


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("urls", nargs="+")
    arguments = parser.parse_args()
    return run_frontend(
        FrontendConfig(
            port=0,
            workers=tuple(arguments.urls),
            model_path=arguments.model_path,
            log_level="warning",
            announce=True,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
