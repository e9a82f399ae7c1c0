"""What traces cost a request: CPU of the spans of one request (`--otlp-endpoint`).

One decision over 8 workers is made once; a request begins its trace, sends one hop, gets its first
token and ends, as in a frontend. Sampled out: `--otlp-sample-ratio 0`, no `traceparent`. On: two
spans a request with all their attributes, sent over HTTP to a collector in another process. CPU of
this process with its export thread, until the collector has every span, less that without traces.
"""

import time
from collections.abc import Iterator
from functools import partial

from dynctl.adapters.otlp import BATCH, SpanExport, collector_url
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.serving.telemetry.traces import Traces
from router_core import ModelRuntimeConfig, Router, RoutingRequest, Worker
from tests.bench.harness import Options, Row, alternate, program, row

GROUP = BATCH // 2  # requests; two spans each: one message
#: Takes each message and answers that it was taken.
_COLLECTOR = """
from tests.http_servers import HttpServer
with HttpServer(lambda exchange: exchange.reply(b"")) as server:
    print(server.url, flush=True)
    input()
"""


class Requests:
    """Requests that are all decided the same."""

    def __init__(self) -> None:
        self.service = RoutingService(router=Router(exact_reuse=True))
        for number in range(8):
            runtime = ModelRuntimeConfig(total_kv_blocks=100_000)
            worker = Worker(number + 1, f"w{number}", "m", runtime_config=runtime)
            self.service.upsert_worker(worker)
        request = RoutingRequest(self.service.new_id(), "m", 1024, 16, list(range(1, 65)))
        self.plan = self.service.plan(request)

    def run(self, traces: Traces | None) -> None:
        """`GROUP` requests, and what is sent of them."""
        before = 0 if traces is None else sum(traces.export.counts().values())
        service, plan, begun = self.service, self.plan, False
        for _ in range(GROUP):
            now = service.clock()
            record = RequestRecord(plan.id, plan.id, "chat", now, service.wall(), "m")
            record.isl_tokens, record.plan = 1024, plan
            if traces is not None:
                traces.begin(record, {"content-type": "application/json"}, "/v1/chat/completions")
            begun = record.trace is not None
            if record.trace is not None:
                record.trace.hop(plan.final, now)
            record.dispatched_at = record.first_token_at = record.finished_at = now
            record.outcome, record.status = "success", 200
            if traces is not None:
                traces.on_finished(record)
        if begun and traces is not None:
            while sum(traces.export.counts().values()) < before + 2 * GROUP:
                time.sleep(0.002)


def _cpu_us(requests: Requests, groups: int, traces: Traces | None) -> float:
    """Microseconds a request."""
    began = time.process_time()
    for _ in range(groups):
        requests.run(traces)
    return 1e6 * (time.process_time() - began) / (groups * GROUP)


def rows(options: Options) -> Iterator[Row]:
    groups, rounds = (2, 1) if options.smoke else (20, 5)
    requests = Requests()
    with program("-c", _COLLECTOR) as collector:
        assert collector.stdout is not None
        url = collector_url(collector.stdout.readline().strip())
        clock = requests.service.clock
        none = Traces(SpanExport(url, 0.0, "bench"), clock)
        every = Traces(SpanExport(url, 1.0, "bench"), clock)
        sides = [partial(_cpu_us, requests, groups, traces) for traces in (None, none, every)]
        off, out, on = (side.value for side in alternate(sides, rounds))
        counts = every.export.counts()
        none.export.close()
        every.export.close()
    yield row("sampled out", "us/req", out - off)
    yield row("every request traced", "us/req", on - off)
    yield row("spans not exported", "", counts["failed"] + counts["dropped"])
