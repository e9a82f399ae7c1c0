"""One frontend with its own router, and one and two frontends that share a router process.

    python -m tests.bench.bench_processes [--smoke]

Engines that cost nothing, as in bench_frontend; 64 streams, prompts of about 140 and 2,000 tokens
that the frontends tokenize and hash. Two frontends share a port, and the kernel spreads the
connections. The three arrangements run all the time and are measured one after the other, round by
round; medians of the rounds. CPU is user and system time of each process per finished request.

*A core each*: the requests a second at which the busiest process fills a core, were each on a core
of its own: the frontends' share each, or all of the router. Processes, engines and load generator
share this machine's cores, so the measured rate says less where it has few.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench import sse_upstream
from tests.bench.contestants import DEMO_MODEL, Command, Contestant, free_ports
from tests.bench.harness import Row, bench_parser, print_table, row
from tests.bench.load_generator import Prompts, load

ENGINES = 4
STREAMS = 64
ALONE = "1 frontend, its own router"


@dataclass(frozen=True)
class Result:
    """CPU us a request of all frontends and of the router; requests a second as measured, and
    with a core for each process."""

    frontends: int
    frontend_us: float
    router_us: float
    rate: float

    @property
    def core_each(self) -> float:
        busiest = max(self.frontend_us / self.frontends, self.router_us)
        return 1e6 / busiest if busiest else 0.0


class Arrangement:
    """Running processes that answer at one port."""

    def __init__(
        self, name: str, port: int, frontends: Sequence[Contestant], router: Contestant | None
    ) -> None:
        self.name, self.port = name, port
        self.frontends, self.router = frontends, router

    async def measure(self, prompts: Prompts, seconds: float) -> Result:
        readings: list[tuple[float, float]] = []

        def cpu() -> float:
            router = 0.0 if self.router is None else self.router.cpu_s()
            readings.append((sum(one.cpu_s() for one in self.frontends), router))
            return sum(readings[-1])

        measured = await load(self.port, prompts, STREAMS, seconds, cpu=cpu)
        (f0, r0), (f1, r1) = readings
        done = max(1, measured.finished)
        return Result(
            len(self.frontends), (f1 - f0) * 1e6 / done, (r1 - r0) * 1e6 / done, measured.rate
        )


def started(stack: ExitStack, urls: Sequence[str]) -> list[Arrangement]:
    """The three arrangements over the same engines."""
    run = (sys.executable, "-m", "tests.bench.frontend_ours", "--model-path", str(DEMO_MODEL))

    def start(name: str, *more: str) -> Contestant:
        contestant = Contestant(Command(name, (*run, *more)), pinned=False)
        return stack.enter_context(contestant)

    alone = start(ALONE, *urls)
    found = [Arrangement(ALONE, alone.port, [alone], None)]
    for count in (1, 2):
        router = start("router", "--serve-router", *urls)
        (port,) = free_ports(1)
        shared = ("--router", f"http://127.0.0.1:{router.port}", "--port", str(port))
        frontends = [start(f"frontend {number}", *shared) for number in range(count)]
        plural = "s" if count > 1 else ""
        found.append(
            Arrangement(f"{count} frontend{plural}, one router process", port, frontends, router)
        )
    return found


async def measure_all(
    lengths: Sequence[int], rounds: int, seconds: float
) -> dict[int, dict[str, Result]]:
    engines = await sse_upstream.serve(sse_upstream.Pacer(), ENGINES)
    urls = [f"http://127.0.0.1:{sse_upstream.port_of(engine)}" for engine in engines]
    found: dict[int, dict[str, Result]] = {}
    with ExitStack() as stack:
        # Starting blocks, and the frontends ask our engines meanwhile.
        arrangements = await asyncio.to_thread(started, stack, urls)
        for tokens in lengths:
            prompts = Prompts(tokens)
            taken: dict[str, list[Result]] = {one.name: [] for one in arrangements}
            for _ in range(rounds):
                for one in arrangements:
                    taken[one.name].append(await one.measure(prompts, seconds))
            found[tokens] = {name: _summary(results) for name, results in taken.items()}
    for engine in engines:
        engine.close()
    return found


def _summary(results: Sequence[Result]) -> Result:
    def middle(value: Callable[[Result], float]) -> float:
        return median(map(value, results))

    return Result(
        results[0].frontends,
        middle(lambda one: one.frontend_us),
        middle(lambda one: one.router_us),
        middle(lambda one: one.rate),
    )


def show(found: dict[int, dict[str, Result]]) -> None:
    table = Table(title=f"processes, {STREAMS} streams", title_justify="left")
    for column in ("prompt", "processes"):
        table.add_column(column)
    for column in ("frontend us/req", "router us/req", "req/s", "req/s, a core each"):
        table.add_column(column, justify="right")
    for tokens, by_name in found.items():
        for number, (name, one) in enumerate(by_name.items()):
            table.add_row(
                f"{tokens:,} tokens" if number == 0 else "",
                name,
                f"{one.frontend_us:,.0f}",
                f"{one.router_us:,.0f}" if one.router_us else "-",
                f"{one.rate:,.0f}",
                f"{one.core_each:,.0f}",
                end_section=number == len(by_name) - 1,
            )
    Console(width=120).print(table)
    plain = [
        {"tokens": tokens, "processes": name, **asdict(one), "core_each": one.core_each}
        for tokens, by_name in found.items()
        for name, one in by_name.items()
    ]
    print(json.dumps({"processes": plain}))


def rows_of(found: dict[int, dict[str, Result]]) -> list[Row]:
    """Each arrangement beside the one before it."""
    rows: list[Row] = []
    for tokens, by_name in found.items():
        alone, one, two = by_name.values()
        cpu = one.frontend_us + one.router_us
        rows += [
            row(f"{tokens:,} tokens: CPU a request, one router process", "us", cpu,
                alone.frontend_us),
            row(f"{tokens:,} tokens: 2 frontends beside 1", "req/s, a core each", two.core_each,
                one.core_each, better="higher"),
            row(f"{tokens:,} tokens: 2 frontends beside 1 alone", "req/s, a core each",
                two.core_each, alone.core_each, "more", better="higher"),
        ]  # fmt: skip
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one measurement")
    arguments = parser.parse_args()
    lengths, rounds, seconds = [140, 2000], arguments.rounds, arguments.seconds
    if arguments.smoke:
        lengths, rounds, seconds = [140], 1, 0.3
    found = uvloop.run(measure_all(lengths, rounds, seconds))
    show(found)
    print_table("frontend processes", rows_of(found))


if __name__ == "__main__":
    main()
