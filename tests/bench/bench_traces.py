"""What traces cost a request: CPU of the spans of one request (`--otlp-endpoint`).

    python -m tests.bench.bench_traces [--smoke]

One decision over 8 workers is made once; a request begins its trace, sends one hop, gets its first
token and ends, as in a frontend. Off: no endpoint. Sampled out: `--otlp-sample-ratio 0`, no
`traceparent`. On: two spans a request with all their attributes, encoded and sent over HTTP to a
collector in another process. CPU is user and system time of this process with its export thread,
until the collector has every span; the requests come in groups that fit the queue.
"""

import subprocess
import sys
import time

from dynctl.adapters.otlp import BATCH, SpanExport, collector_url
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.serving.telemetry.traces import Traces
from router_core import ModelRuntimeConfig, Router, RoutingPlan, RoutingRequest, Worker
from tests.bench.harness import Row, alternate, bench_parser, print_table, row

WORKERS = 8
GROUP = BATCH // 2  # requests; two spans each: one message
#: Takes each message and answers that it was taken.
_COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Requests:
    """Requests that are all decided the same."""

    def __init__(self) -> None:
        self.service = RoutingService(router=Router(exact_reuse=True))
        for number in range(WORKERS):
            runtime = ModelRuntimeConfig(total_kv_blocks=100_000)
            worker = Worker(number + 1, f"w{number}", "m", runtime_config=runtime)
            self.service.upsert_worker(worker)
        request = RoutingRequest(self.service.new_id(), "m", 1024, 16, list(range(1, 65)))
        self.plan: RoutingPlan = self.service.plan(request)

    def run(self, traces: Traces | None, count: int) -> None:
        service, plan = self.service, self.plan
        for _ in range(count):
            now = service.clock()
            record = RequestRecord(plan.id, plan.id, "chat", now, service.wall(), "m")
            record.isl_tokens, record.plan = 1024, plan
            if traces is not None:
                traces.begin(record, {"content-type": "application/json"}, "/v1/chat/completions")
            if record.trace is not None:
                record.trace.hop(plan.final, now)
            record.dispatched_at = record.first_token_at = record.finished_at = now
            record.outcome, record.status = "success", 200
            if traces is not None:
                traces.on_finished(record)


def rows_of(groups: int, rounds: int) -> list[Row]:
    requests = Requests()
    clock = requests.service.clock
    with subprocess.Popen(
        [sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, text=True
    ) as collector:
        try:
            assert collector.stdout is not None
            url = collector_url(f"http://127.0.0.1:{int(collector.stdout.readline())}")
            none = Traces(SpanExport(url, 0.0, "bench"), clock)
            every = Traces(SpanExport(url, 1.0, "bench"), clock)

            def cpu(traces: Traces | None) -> float:
                """Microseconds a request."""
                began = time.process_time()
                for _ in range(groups):
                    before = 0 if traces is None else sum(traces.export.counts().values())
                    requests.run(traces, GROUP)
                    while traces is every and (
                        sum(traces.export.counts().values()) < before + 2 * GROUP
                    ):
                        time.sleep(0.002)
                return 1e6 * (time.process_time() - began) / (groups * GROUP)

            off, out, on = alternate(
                (lambda: cpu(None), lambda: cpu(none), lambda: cpu(every)), rounds
            )
            counts = every.export.counts()
            none.export.close()
            every.export.close()
        finally:
            collector.kill()
    return [
        row("traces off: the record alone", "us/req", off),
        row("sampled out: more CPU", "us/req", out - off),
        row("every request traced: more CPU", "us/req", on - off),
        row("spans not exported", "", counts["failed"] + counts["dropped"]),
    ]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--groups", type=int, default=20, help="of 256 requests, a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    groups, rounds = (2, 1) if arguments.smoke else (arguments.groups, arguments.rounds)
    print_table("what traces cost", rows_of(groups, rounds))


if __name__ == "__main__":
    main()
