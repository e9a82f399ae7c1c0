"""Traces of requests: what a collector gets, and that its absence costs requests nothing."""

import asyncio
import time

import pytest

from dynctl.adapters import otlp
from dynctl.adapters.otlp import SpanExport, collector_url
from dynctl.base.errors import UsageProblem
from dynctl.health import conditions as codes
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import build_router
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.serving.collectors import collector
from tests.dynctl.serving.fleets import SLOW_HEALTH, site, zone
from tests.waiting import patience, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CALLER = f"00-{TRACE}-{PARENT}-01"
PROMPT = "a prompt that no span may have, with the word xylophone"
PAIR = [
    {"name": "p0", "role": "prefill", **zone("zone-a")},
    {"name": "p1", "role": "prefill", **zone("zone-b")},
    {"name": "d0", "role": "decode", **zone("zone-a")},
    {"name": "d1", "role": "decode", **zone("zone-b")},
]


def traced(engines, spans, **values):
    return site(engines, health=SLOW_HEALTH, otlp_endpoint=collector_url(spans.url), **values)


@pytest.mark.seed("dynamo-1.6: operation: traces")
async def test_a_request_has_a_span_with_its_decision_and_hops():
    async with collector() as spans, traced(PAIR, spans) as fleet:
        before = time.time_ns()
        status, events, headers = await fleet.stream(
            PROMPT, max_tokens=4, stream_options={"include_usage": True}
        )
        assert status == 200
        assert events[-1] == "[DONE]"
        found = {span.name.split(" ")[0]: span for span in await spans.have(3)}
        root, prefill, decode = found["POST"], found["prefill"], found["decode"]
        assert root.name == "POST /v1/chat/completions"
        assert root.parent == ""
        assert (root.kind, prefill.kind) == (2, 3)
        assert {prefill.parent, decode.parent} == {root.id}
        assert {prefill.trace, decode.trace} == {root.trace}
        assert before <= root.begin <= prefill.begin <= prefill.end <= decode.begin <= decode.end
        assert decode.end <= root.end <= time.time_ns()
        assert root.resource["service.name"] == "dynctl"
        about = root.attributes
        assert about["dynctl.decision_id"] == headers["x-dynctl-decision"]
        assert about["gen_ai.request.model"] == "demo"
        assert about["http.response.status_code"] == 200
        assert about["dynctl.outcome"] == "success"
        assert about["dynctl.retries"] == 0
        assert about["gen_ai.usage.output_tokens"] == 4
        names = ["sent", "prefill done", "first token"]
        assert [name for name in root.events if name in names] == names
        moments = [root.events[name][0] for name in names]
        assert moments == sorted(moments)
        about = prefill.attributes
        assert about["dynctl.candidates"] == 2
        assert about["dynctl.worker"] in ("p0", "p1")
        assert about["dynctl.domain.zone"] in ("zone-a", "zone-b")
        assert len(about["dynctl.costs"]) == 2
        assert about["dynctl.cached_blocks"] == 0
        assert about["dynctl.cost"] == pytest.approx(
            sum(value for name, value in about.items() if name.startswith("dynctl.cost."))
        )
        assert decode.attributes["dynctl.domain.zone"] == about["dynctl.domain.zone"]
        assert decode.events["first token"][0] == moments[-1]


async def test_traces_of_callers_continue_and_engines_get_the_hops(engine_log):
    seen, url = engine_log
    async with collector() as spans, traced([], spans, workers=(f"{url},name=e,model=m",)) as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        headers = {"traceparent": CALLER, "tracestate": "vendor=1"}
        await fleet.post("/v1/chat/completions", body, headers=headers)
        root, hop = sorted(await spans.have(2), key=lambda span: span.kind)
        assert (root.trace, root.parent, root.state) == (TRACE, PARENT, "vendor=1")
        assert hop.parent == root.id
        got = seen[-1][1]
        assert got["traceparent"] == f"00-{TRACE}-{hop.id}-01"
        assert got["tracestate"] == "vendor=1"
        # A caller that is not traced: nothing is sent, and engines get what it sent.
        quiet = CALLER[:-2] + "00"
        await fleet.post("/v1/chat/completions", body, headers={"traceparent": quiet})
        assert seen[-1][1]["traceparent"] == quiet
        # A header that is not one begins a trace of its own.
        await fleet.post("/v1/chat/completions", body, headers={"traceparent": "zz-" + "x" * 900})
        await spans.have(4)
        assert len(spans.of(TRACE)) == 2


async def test_no_prompt_and_no_key_is_in_a_span():
    values = {"api_keys": ("sk-a-secret-key",), "api_token": "adm1n-token"}
    async with collector() as spans, traced([{"name": "a0"}], spans, **values) as fleet:
        headers = {"authorization": "Bearer sk-a-secret-key"}
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": PROMPT}],
            "nvext": {"cache_salt": "a-tenant-salt"},
        }
        status, answer, _ = await fleet.post("/v1/chat/completions", body, headers=headers)
        assert status == 200
        await spans.have(2)
        said = answer["choices"][0]["message"]["content"]
        for text in ("xylophone", "secret-key", "adm1n", "a-tenant-salt", said[:20]):
            assert text.encode() not in spans.raw, text


async def test_retries_and_refusals_are_in_their_spans():
    engines = [{"name": "a0"}, {"name": "a1"}]
    async with collector() as spans, traced(engines, spans) as fleet:
        fleet.engines["a0"].engine.faults.update({"refuse": 500})
        # Ties are drawn: until one request tried the engine that fails.
        for number in range(64):
            assert (await fleet.chat(f"prompt {number}"))[0] == 200
            if fleet.service.engine_failures:
                break
        await until(lambda: any(span.failed for span in spans.spans), 20)
        lost = [span for span in spans.spans if span.failed]
        assert lost[0].attributes["dynctl.worker"] == "a0"
        assert lost[0].failed == "status"
        await until(lambda: any(s.attributes.get("dynctl.retries") for s in spans.spans), 20)
        (root, *_) = [span for span in spans.spans if span.attributes.get("dynctl.retries")]
        assert root.failed is None
        assert root.attributes["dynctl.failed_workers"][0].endswith(" a0")
        constraints = {"routing_constraints": {"required_taints": ["nowhere"]}}
        status, _, headers = await fleet.chat(nvext=constraints)
        assert status == 503
        decision = headers["x-dynctl-decision"]

        def refused():
            return [s for s in spans.spans if s.attributes.get("dynctl.decision_id") == decision]

        await until(refused, 20)
        (span,) = refused()
        assert span.attributes["dynctl.refusal"] == "no_eligible_worker"
        assert span.attributes["http.response.status_code"] == 503
        assert span.failed is not None
        assert any(step.endswith(" 0") for step in span.attributes["dynctl.funnel"])


async def test_a_bad_request_has_a_span_too():
    async with collector() as spans, traced([{"name": "a0"}], spans) as fleet:
        assert (await fleet.post("/v1/chat/completions", {"model": "demo"}))[0] == 400
        (span,) = await spans.have(1)
        assert span.attributes["dynctl.outcome"] == "client_error"
        assert span.failed is None


async def test_a_router_has_a_span_for_each_booking():
    async with collector() as spans, site([{"name": "a0"}], health=SLOW_HEALTH) as fleet:
        config = FrontendConfig(
            port=0,
            workers=(f"{fleet.engines['a0'].url},name=a0",),
            model_path=DEMO_MODEL_DIR,
            health=SLOW_HEALTH,
            otlp_endpoint=collector_url(spans.url),
        )
        router = build_router(config)
        await router.start()
        try:
            body = {"model": "demo", "token_ids": list(range(64))}
            url = f"{router.url}/v1/select_and_book"
            async with fleet.client.post(url, json=body, headers={"traceparent": CALLER}) as answer:
                assert answer.status == 201, await answer.text()
                booked = (await answer.json())["id"]
            async with fleet.client.delete(f"{router.url}/v1/bookings/{booked}") as answer:
                assert answer.status < 300
            (span,) = await spans.have(1)
        finally:
            await router.close()
        assert (span.name, span.parent) == ("POST /v1/select_and_book", PARENT)
        assert span.attributes["gen_ai.request.model"] == "demo"
        assert span.attributes["dynctl.worker"] == "a0"


async def test_a_ratio_traces_a_share_of_requests():
    async with collector() as spans, traced([{"name": "a0"}], spans, otlp_sample_ratio=0.0) as one:
        await one.chat()
        await one.post(
            "/v1/chat/completions",
            {"model": "demo", "messages": [{"role": "user", "content": "x"}]},
            headers={"traceparent": CALLER},
        )
        await spans.have(2)
        assert len(spans.spans) == 2
        assert {span.trace for span in spans.spans} == {TRACE}


async def test_a_dead_collector_is_a_condition_and_a_metric():
    async with collector(status=400) as spans, traced([{"name": "a0"}], spans) as fleet:
        assert (await fleet.chat())[0] == 200
        subject = collector_url(spans.url)
        conditions = fleet.service.conditions
        await until(lambda: conditions.get(codes.TRACES_NOT_EXPORTED, subject), 20)
        text = (await fleet.get("/metrics"))[1].decode()
        assert 'dynctl_trace_spans_total{result="failed"} 2' in text
        spans.status = 200
        assert (await fleet.chat())[0] == 200
        await until(lambda: conditions.get(codes.TRACES_NOT_EXPORTED, subject) is None, 20)
        assert len(await spans.have(2)) == 2


async def test_a_frontend_stops_in_time_while_the_collector_is_away():
    async with collector() as spans:
        gone = spans.url
    async with site(
        [{"name": "a0"}], health=SLOW_HEALTH, otlp_endpoint=collector_url(gone)
    ) as fleet:
        assert (await fleet.chat())[0] == 200
        began = time.monotonic()
        await fleet.frontend.close()
        assert time.monotonic() - began < patience(otlp.LAST_S + 10)


def end_spans(export: SpanExport, count: int) -> None:
    for number in range(count):
        span = export.begin(f"n{number}", number, {})
        assert span is not None
        span.end(number + 1)


async def test_spans_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(otlp, "BATCH", 8)
    monkeypatch.setattr(otlp, "QUEUE", 16)
    async with collector() as spans:
        spans.answering.clear()
        export = SpanExport(collector_url(spans.url), 1.0, "test")
        end_spans(export, 8)
        await until(lambda: spans.messages == 1, 20)
        end_spans(export, 50)
        assert export.counts() == {"exported": 0, "failed": 0, "dropped": 34}
        spans.answering.set()
        await spans.have(24)
        assert [span.name for span in spans.spans[8:]] == [f"n{n}" for n in range(16)]
        await until(lambda: export.counts() == {"exported": 24, "failed": 0, "dropped": 34}, 20)
        await asyncio.to_thread(export.close)


async def test_the_end_does_not_wait_for_a_collector_that_is_silent(monkeypatch):
    """The SDK alone would wait 30 s: longer than an orchestrator waits for a process."""
    monkeypatch.setattr(otlp, "SEND_S", 600.0)
    monkeypatch.setattr(otlp, "LAST_S", 0.1)
    async with collector() as spans:
        spans.answering.clear()
        export = SpanExport(collector_url(spans.url), 1.0, "test")
        end_spans(export, 3 * otlp.BATCH)
        await until(lambda: spans.messages == 1, 20)
        await asyncio.wait_for(asyncio.to_thread(export.close), min(patience(2), 25))
        spans.answering.set()
        # What the collector did not get any more is counted, not sent after the end.
        await until(lambda: sum(export.counts().values()) == 3 * otlp.BATCH, 20)
        assert export.counts()["failed"] == 2 * otlp.BATCH


async def test_a_collector_that_refuses_at_the_end_is_not_sent_the_rest(monkeypatch):
    monkeypatch.setattr(otlp, "LAST_S", patience(60))
    async with collector(status=400) as spans:
        spans.answering.clear()
        export = SpanExport(collector_url(spans.url), 1.0, "test")
        end_spans(export, 3 * otlp.BATCH)
        await until(lambda: spans.messages == 1, 20)
        closed = asyncio.create_task(asyncio.to_thread(export.close))
        await until(lambda: export._exporter.ending, 20)
        spans.answering.set()
        await closed
        assert spans.messages == 1
        assert export.counts() == {"exported": 0, "failed": 3 * otlp.BATCH, "dropped": 0}


async def test_without_the_option_nothing_is_traced(engine_log):
    seen, url = engine_log
    async with site([], workers=(f"{url},name=e,model=m",)) as fleet:
        assert fleet.service.traces is None
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        await fleet.post("/v1/chat/completions", body)
        assert "traceparent" not in seen[-1][1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:4318",
        "ftp://x",
        "http://",
        "http://a:b@x:4318",
        "http://x?key=1",
        "http://x:0",
    ],
)
def test_addresses_that_are_refused(text):
    with pytest.raises(UsageProblem) as error:
        collector_url(text)
    assert "--otlp-endpoint" in error.value.message
    assert "a:b" not in error.value.message


def test_addresses():
    assert collector_url("http://x:4318") == "http://x:4318/v1/traces"
    assert collector_url("https://x/otlp/") == "https://x/otlp/v1/traces"
    assert collector_url("https://x/v1/traces") == "https://x/v1/traces"


def test_without_the_packages_the_option_says_how_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageProblem) as error:
        otlp.require_opentelemetry()
    assert "dynctl[otlp]" in str(error.value.hint)
