"""Real SGLang engines on CPUs with a real ``dynctl serve frontend`` before them.

``DYNCTL_SGLANG_PYTHON`` names the Python that has SGLang; ``make test-sglang`` makes one.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.ports import free_port
from tests.vllm.stack import BLOCK, Engine, Stack, consecutive_ports

# Read when imported, since the tests' environment is emptied of DYNCTL_* variables.
SGLANG_PYTHON = os.environ.get("DYNCTL_SGLANG_PYTHON", "")


class SglangStack(Stack):
    """As the stack of vLLM engines, with engines of SGLang."""

    def engine(
        self,
        name: str,
        *arguments: str,
        model: str = "llama",
        ranks: int = 1,
        blocks: int = 1024,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        again: Engine | None = None,
    ) -> Engine:
        """As for vLLM. ``again``: at the addresses of an engine that has ended."""
        base = _port(again.events) if again else consecutive_ports(2 * ranks)
        replay = base + ranks
        port = port or free_port()
        publisher = {
            "publisher": "zmq",
            "topic": "",
            "endpoint": f"tcp://*:{base}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        command = [SGLANG_PYTHON, "-m", "sglang.launch_server"]
        command += ["--model-path", str(self.directory / "models" / model)]
        command += ["--served-model-name", "tiny", "--device", "cpu"]
        if not (self.directory / "models" / model / "model.safetensors").exists():
            command += ["--load-format", "dummy"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--context-length", "2048"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--page-size", str(BLOCK), "--max-total-tokens", str(blocks * BLOCK)]
        command += ["--mem-fraction-static", "0.05", "--max-running-requests", "8"]
        command += ["--disable-overlap-schedule", "--skip-server-warmup", "--enable-metrics"]
        # Else each scheduler takes all of a core that it can get, also without a request.
        command += ["--sleep-on-idle"]
        command += ["--enable-cache-report", "--kv-events-config", json.dumps(publisher)]
        if ranks > 1:
            command += ["--data-parallel-size", str(ranks)]
        # One CPU for each rank: without, SGLang wants as many NUMA nodes as ranks.
        bound = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
        ours = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": bound}
        ours |= environment or {}
        process = self._start(name, [*command, *arguments], ours)
        dialled = f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{replay}"
        engine = Engine(name, port, *dialled, process)
        self._clients.enter_context(engine.http)
        return engine

    def wait(self, *engines: Engine) -> None:
        super().wait(*engines)
        for engine in engines:
            _let_others_go_first(engine.process.pid)


def _let_others_go_first(group: int) -> None:
    """What hands requests to ranks asks for them all the time. So its engine, a process group and
    a session, has less of busy cores than other sessions, and the ranks in it go first."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            process = int(path.parent.name)
            busy = b"data_parallel_controller" in path.read_bytes()
            if busy and os.getpgid(process) == group:
                os.setpriority(os.PRIO_PROCESS, process, 19)
                path.with_name("autogroup").write_text("10")


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
