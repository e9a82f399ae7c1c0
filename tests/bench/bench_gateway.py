"""What a request costs through Envoy and `serve epp`, beside our frontend.

    python -m tests.bench.bench_gateway [--envoy PATH] [--seconds 3] [--smoke]

The engines, prompts of about 140 tokens and streams are those of bench_frontend: 32 events, each
a write of its own. Frontend, Envoy and picker share one core; load generator and engines have the
other one. Both tokenize. CPU is user and system time per finished request; Envoy's and the
picker's are shown apart. Without an Envoy (`make test-envoy` installs one in .venv-envoy) only the
frontend is measured.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from tests.bench import sse_upstream
from tests.bench.bench_frontend import ENGINES
from tests.bench.contestants import (
    DEMO_MODEL,
    LOAD_CORE,
    TOKENIZING,
    Command,
    Contestant,
    commands,
    free_ports,
    with_core,
)
from tests.bench.harness import Row, bench_parser, print_table, row
from tests.bench.load_generator import Measured, Prompts, load
from tests.envoy.gateway import configuration

INSTALLED = Path(__file__).parents[2] / ".venv-envoy" / "bin" / "envoy"
ALONE = "Envoy alone"
FULL = "FULL_DUPLEX_STREAMED"
#: Contestant -> modes of the request's and the response's body; TLS to the picker.
MODES = {
    "full duplex": (FULL, FULL, False),
    "full duplex, TLS": (FULL, FULL, True),
    "response body NONE": (FULL, "NONE", False),
    "buffered, response body NONE": ("BUFFERED", "NONE", False),
}


@dataclass(frozen=True)
class Cost:
    """Medians over the rounds: requests a second, us CPU a request in Envoy and behind it."""

    rate: float
    envoy_us: float
    ours_us: float


def _without_picker(engines: list[int], port: int, admin: int) -> dict[str, Any]:
    """An Envoy that spreads requests over the engines by itself."""
    found = configuration(port, admin, 1)
    resources = found["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": one}}}}
        for one in engines
    ]
    resources["clusters"] = [
        {
            "name": "workers",
            "type": "STATIC",
            "connect_timeout": "2s",
            "load_assignment": {
                "cluster_name": "workers",
                "endpoints": [{"lb_endpoints": endpoints}],
            },
        }
    ]
    return found


class Measuring:
    """The running contestants, and what they cost."""

    def __init__(self, stack: ExitStack, engines: list[int], envoy: str | None) -> None:
        self._stack = stack
        self._engines = engines
        self._envoy = envoy
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        #: Name -> where requests go, Envoy if there is one, and the process of ours.
        self.running: dict[str, tuple[int, Contestant | None, Contestant | None]] = {}

    def start(self) -> None:
        urls = [f"http://127.0.0.1:{port}" for port in self._engines]
        tokenizing = next(one for one in commands(urls) if one.name == TOKENIZING)
        frontend = self._start(tokenizing)
        self.running[frontend.name] = (frontend.port, None, frontend)
        if self._envoy is None:
            return
        alone = self._gateway(None, {})
        self.running[ALONE] = (alone.port, alone, None)
        for tls in (False, True):
            picker, port = self._picker(urls, tls)
            for name, (request, response, wanted) in MODES.items():
                if wanted == tls:
                    modes = {"request_body": request, "response_body": response, "tls": tls}
                    gateway = self._gateway(port, modes)
                    self.running[name] = (gateway.port, gateway, picker)

    def _start(self, command: Command) -> Contestant:
        found = Contestant(command)
        found.__enter__()
        self._stack.callback(found.close)
        return found

    def _picker(self, urls: list[str], tls: bool) -> tuple[Contestant, int]:
        port, health, http = free_ports(3)
        argv = [*commands(urls)[0].argv[:2], "dynctl", "serve", "epp"]
        argv += ["--port", str(port), "--health-port", str(health), "--http-port", str(http)]
        argv += ["--tls" if tls else "--no-tls", "--model-path", str(DEMO_MODEL)]
        argv += ["--log-level", "warning"]
        for url in urls:
            argv += ["--worker", url]
        return self._start(Command("picker", tuple(argv), http, "/ready")), port

    def _gateway(self, picker: int | None, modes: Mapping[str, Any]) -> Contestant:
        port, admin = free_ports(2)
        shown = (
            _without_picker(self._engines, port, admin)
            if picker is None
            else configuration(port, admin, picker, **modes)
        )
        file = self._directory / f"{port}.json"
        file.write_text(json.dumps(shown))
        assert self._envoy is not None
        argv = (self._envoy, "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1")
        command = Command("Envoy", (*argv, "--log-level", "error"), admin, "/ready")
        found = self._start(command)
        found.port = port
        return found

    async def cost(self, streams: int, rounds: int, seconds: float) -> dict[str, Cost]:
        prompts, taken = Prompts(140), dict[str, list[tuple[Measured, float]]]()
        for _ in range(rounds):
            for name, (port, envoy, ours) in self.running.items():
                parts: list[float] = []

                def used(
                    envoy: Contestant | None = envoy,
                    ours: Contestant | None = ours,
                    parts: list[float] = parts,
                ) -> float:
                    parts.append(0.0 if envoy is None else envoy.cpu_s())
                    return parts[-1] + (0.0 if ours is None else ours.cpu_s())

                measured = await load(port, prompts, streams, seconds, cpu=used)
                taken.setdefault(name, []).append((measured, parts[-1] - parts[0]))
        return {
            name: Cost(
                median(one.rate for one, _ in found),
                median(1e6 * envoy / one.finished for one, envoy in found),
                median(one.cpu_us - 1e6 * envoy / one.finished for one, envoy in found),
            )
            for name, found in taken.items()
        }


async def measure_all(
    envoy: str | None, streams: list[int], rounds: int, seconds: float
) -> dict[int, dict[str, Cost]]:
    """Streams -> contestant -> its cost."""
    engines = await sse_upstream.serve(sse_upstream.Pacer(), ENGINES)
    try:
        with ExitStack() as stack:
            measuring = Measuring(stack, [sse_upstream.port_of(one) for one in engines], envoy)
            # The engines are probed meanwhile.
            await asyncio.to_thread(measuring.start)
            return {count: await measuring.cost(count, rounds, seconds) for count in streams}
    finally:
        for engine in engines:
            engine.close()


def rows_of(results: dict[int, dict[str, Cost]]) -> list[Row]:
    rows = []
    for streams, found in results.items():
        frontend = found[TOKENIZING]
        for name, cost in found.items():
            where = f"{streams} streams: {name}"
            rows.append(row(f"{where}, requests", "1/s", cost.rate))
            if cost is frontend:
                rows.append(row(f"{where}, CPU", "us/req", cost.ours_us))
                continue
            rows.append(row(f"{where}, Envoy's CPU", "us/req", cost.envoy_us))
            if name != ALONE:
                rows.append(row(f"{where}, picker's CPU", "us/req", cost.ours_us, frontend.ours_us))
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    found = str(INSTALLED) if INSTALLED.exists() else None
    parser.add_argument("--envoy", default=found, help="the Envoy program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    arguments = parser.parse_args()
    streams, rounds, seconds = [1, 16, 64], arguments.rounds, arguments.seconds
    if arguments.smoke:
        streams, rounds, seconds = [8], 1, 0.3
    with_core(LOAD_CORE)
    results = uvloop.run(measure_all(arguments.envoy, streams, rounds, seconds))
    plain = [
        {"streams": count, "name": name, **asdict(cost)}
        for count, found in results.items()
        for name, cost in found.items()
    ]
    print(json.dumps({"gateways": plain}))
    print_table("a gateway with our picker, beside our frontend", rows_of(results))


if __name__ == "__main__":
    main()
