"""What a request costs through Envoy and `serve epp`, beside our frontend.

The engines, prompts of about 140 tokens and streams are those of bench_frontend: 32 events, each
a write of its own. Frontend, Envoy and picker share one core; load generator and engines have the
other one. Both tokenize. CPU of Envoy and of the picker together per finished request; the peer of
a row is our frontend. Without an Envoy only the frontend is measured.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import uvloop

from tests.bench import sse_upstream
from tests.bench.contestants import (
    DEMO_MODEL,
    ENGINES,
    LOAD_CORE,
    TOKENIZING,
    Command,
    Contestant,
    free_ports,
    frontend,
    serve,
    with_core,
)
from tests.bench.harness import Median, Options, Row, row
from tests.bench.load_generator import Measured, Prompts, load
from tests.envoy.gateway import configuration

FULL = "FULL_DUPLEX_STREAMED"
#: Contestant -> modes of the request's and the response's body; TLS to the picker.
MODES = {
    "full duplex": (FULL, FULL, False),
    "full duplex, TLS": (FULL, FULL, True),
    "response body NONE": (FULL, "NONE", False),
}


class Gateways:
    """The running contestants: name -> the port of requests, and the processes that are counted."""

    def __init__(self, stack: ExitStack, engines: list[int]) -> None:
        self._stack = stack
        self._urls = [f"http://127.0.0.1:{port}" for port in engines]
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.running: dict[str, tuple[int, list[Contestant]]] = {}

    def start(self, envoy: str | None) -> None:
        ours = self._start(frontend(TOKENIZING, self._urls, "--model-path", str(DEMO_MODEL)))
        self.running[TOKENIZING] = (ours.port, [ours])
        if envoy is None:
            return
        pickers = {tls: self._picker(tls) for tls in (False, True)}
        for name, (request, response, tls) in MODES.items():
            picker, port = pickers[tls]
            listener, admin = free_ports(2)
            shown = configuration(
                listener, admin, port, request_body=request, response_body=response, tls=tls
            )
            file = self._folder / f"{listener}.json"
            file.write_text(json.dumps(shown))
            argv = (envoy, "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1")
            command = Command("Envoy", (*argv, "--log-level", "error"), admin, "/ready")
            self.running[name] = (listener, [self._start(command), picker])

    def _start(self, command: Command) -> Contestant:
        return self._stack.enter_context(Contestant(command))

    def _picker(self, tls: bool) -> tuple[Contestant, int]:
        port, health, http = free_ports(3)
        ports = ("--port", str(port), "--health-port", str(health), "--http-port", str(http))
        options = ("--tls" if tls else "--no-tls", "--model-path", str(DEMO_MODEL))
        argv = (*serve("epp", self._urls), *ports, *options)
        return self._start(Command("picker", argv, http, "/ready")), port


async def measured(
    envoy: str | None, streams: int, rounds: int, seconds: float
) -> dict[str, Median]:
    """Contestant -> CPU microseconds a request."""
    engines = await sse_upstream.serve(sse_upstream.Pacer(), ENGINES)
    prompts = Prompts(140)
    windows: dict[str, list[Measured]] = {}
    with ExitStack() as stack:
        gateways = Gateways(stack, [sse_upstream.port_of(engine) for engine in engines])
        # The engines are probed meanwhile.
        await asyncio.to_thread(gateways.start, envoy)
        for _ in range(rounds):
            for name, (port, processes) in gateways.running.items():

                def used(processes: list[Contestant] = processes) -> float:
                    return sum(process.cpu_s() for process in processes)

                window = await load(port, prompts, streams, seconds, cpu=used)
                windows.setdefault(name, []).append(window)
    for engine in engines:
        engine.close()
    return {name: Median.of([w.cpu_us for w in taken]) for name, taken in windows.items()}


def rows(options: Options) -> Iterator[Row]:
    streams, rounds, seconds = (8, 1, 0.3) if options.smoke else (64, 5, 1.0)
    with_core(LOAD_CORE)
    costs = uvloop.run(measured(options.peers.get("envoy"), streams, rounds, seconds))
    ours = costs.pop(TOKENIZING)
    yield row(f"{streams} streams: our frontend, CPU", "us/req", ours)
    for name, cost in costs.items():
        yield row(f"{streams} streams: Envoy and picker, {name}, CPU", "us/req", cost, ours)
