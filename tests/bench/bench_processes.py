"""`serve frontend` with one process, and with two that share a router process.

The command as users start it, `dynctl serve frontend --processes N`. Engines that cost nothing, as
in bench_frontend; 64 streams, prompts of about 140 and 2,000 tokens that the frontends tokenize and
hash. Two frontends share a port, and the kernel spreads the connections. Both commands run all the
time and are measured one after the other, round by round; medians of the rounds. CPU is user and
system time of each process per finished request.

*A core each*: the requests a second at which the busiest process fills a core, were each on a core
of its own: the frontends' share each, or all of the router. That of eight frontends is less than
they reach: a full router gets more requests in a message. Processes, engines and load generator
share this machine's cores, so the measured rate says less where it has few.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import uvloop

from tests.bench import sse_upstream
from tests.bench.contestants import DEMO_MODEL, ENGINES, Command, Contestant, frontend
from tests.bench.harness import Options, Row, row
from tests.bench.load_generator import Prompts, load

STREAMS = 64


@dataclass(frozen=True)
class Result:
    """CPU us a request of all frontends, of the router and of the parent; requests a second as
    measured, and with a core for each process."""

    frontends: int
    frontend_us: float
    router_us: float
    parent_us: float
    rate: float

    @property
    def cpu_us(self) -> float:
        return self.frontend_us + self.router_us + self.parent_us

    @property
    def core_each(self) -> float:
        return self.core_each_of(self.frontends)

    def core_each_of(self, frontends: int) -> float:
        """As ``core_each``, with another number of frontends that cost as much a request."""
        busiest = max(self.frontend_us / frontends, self.router_us)
        return 1e6 / busiest if busiest else 0.0


def command(count: int, urls: Sequence[str]) -> Command:
    options = ("--processes", str(count), "--model-path", str(DEMO_MODEL))
    return frontend(f"--processes {count}", urls, *options)


def used(serving: Contestant) -> tuple[float, float, float]:
    """Seconds of CPU of the frontends, the router and the parent; one process is a frontend."""
    whole = serving.cpu_s()
    if not serving.processes:
        return whole, 0.0, 0.0
    router = serving.cpu_of("router")
    frontends = sum(serving.cpu_of(name) for name in serving.processes if name != "router")
    return frontends, router, whole - frontends - router


async def measure(serving: Contestant, prompts: Prompts, seconds: float) -> Result:
    readings: list[tuple[float, float, float]] = []

    def cpu() -> float:
        readings.append(used(serving))
        return sum(readings[-1])

    measured = await load(serving.port, prompts, STREAMS, seconds, cpu=cpu)
    before, after = readings
    frontends, router, parent = (
        (end - start) * 1e6 / max(1, measured.finished)
        for start, end in zip(before, after, strict=True)
    )
    count = max(1, len(serving.processes) - 1)
    return Result(count, frontends, router, parent, measured.rate)


async def measure_all(
    lengths: Sequence[int], rounds: int, seconds: float
) -> dict[int, dict[str, Result]]:
    engines = await sse_upstream.serve(sse_upstream.Pacer(), ENGINES)
    urls = [f"http://127.0.0.1:{sse_upstream.port_of(engine)}" for engine in engines]
    found: dict[int, dict[str, Result]] = {}
    with ExitStack() as stack:
        running = []
        for count in (1, 2):
            contestant = Contestant(command(count, urls), pinned=False)
            # Starting blocks, and the frontends ask our engines meanwhile.
            await asyncio.to_thread(contestant.__enter__)
            stack.callback(contestant.close)
            running.append(contestant)
        for tokens in lengths:
            prompts = Prompts(tokens)
            taken: dict[str, list[Result]] = {one.name: [] for one in running}
            for _ in range(rounds):
                for one in running:
                    taken[one.name].append(await measure(one, prompts, seconds))
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
        middle(lambda one: one.parent_us),
        middle(lambda one: one.rate),
    )


def rows_of(found: dict[int, dict[str, Result]]) -> list[Row]:
    """Two processes beside one."""
    rows: list[Row] = []
    for tokens, by_name in found.items():
        one, two = by_name.values()
        name = f"{tokens:,} tokens"
        rows += [
            row(f"{name}: CPU a request, two processes beside one", "us", two.cpu_us, one.cpu_us),
            row(f"{name}: the same", "req/s, a core each", two.core_each, one.core_each, "1.8x",
                better="higher"),
            row(f"{name}: eight frontends, from the CPU of two", "req/s, a core each",
                two.core_each_of(8), one.core_each, "6.5x", better="higher"),
            row(f"{name}: the same, as measured", "req/s", two.rate, one.rate, better="higher"),
        ]  # fmt: skip
    return rows


def rows(options: Options) -> Iterator[Row]:
    lengths, rounds, seconds = ([140], 1, 0.3) if options.smoke else ([140, 2000], 5, 1.5)
    yield from rows_of(uvloop.run(measure_all(lengths, rounds, seconds)))
