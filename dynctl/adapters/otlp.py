"""Spans to an OpenTelemetry collector, over OTLP/HTTP: the only user of the opentelemetry packages.

They are the optional extra ``dynctl[otlp]``. Spans wait in the SDK's bounded queue; its thread
sends them. A collector that does not answer costs the spans, which are counted, and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit, urlunsplit

from dynctl import version
from dynctl.base.errors import UsageProblem
from dynctl.base.terminal import printable

#: Spans that wait for the collector, and those of one message.
QUEUE: Final = 4096
BATCH: Final = 512
#: Seconds until a message is sent that is not full, for a message, and for the rest at the end.
EVERY_S: Final = 1.0
SEND_S: Final = 5.0
LAST_S: Final = 3.0
_PATH: Final = "/v1/traces"
_INSTALL: Final = "pip install 'dynctl[otlp]'"
_EXPORTER_LOG: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

#: The id of a span's trace, of the span, and the state of other vendors: what engines get.
Headers = dict[str, str]
Value = str | int | float | bool | Sequence[str]


def collector_url(text: str) -> str:
    """The address for spans of an address of a collector. Raises UsageProblem."""
    parts = urlsplit(text)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or "@" in parts.netloc or parts.query or parts.fragment:
        shown = "URL" if "@" in text or "?" in text else printable(text)[:200]
        raise UsageProblem(
            f"--otlp-endpoint {shown}: expected the http(s) address of a collector, without "
            "credentials",
            "--otlp-endpoint http://127.0.0.1:4318; its headers: OTEL_EXPORTER_OTLP_HEADERS",
        )
    path = parts.path.rstrip("/")
    path = path if path.endswith(_PATH) else path + _PATH
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def require_opentelemetry() -> None:
    """Raises UsageProblem where the packages are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise UsageProblem(
            f"--otlp-endpoint: the OpenTelemetry packages are not installed ({error})", _INSTALL
        ) from None


class Span:
    """One open span."""

    __slots__ = ("_owner", "_span")

    def __init__(self, owner: SpanExport, span: Any) -> None:
        self._owner = owner
        self._span = span

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, at_ns: int, attributes: Mapping[str, Value] | None = None) -> None:
        self._span.add_event(name, attributes or {}, timestamp=at_ns)

    def fail(self, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self, at_ns: int) -> None:
        self._owner._end(self._span, at_ns)

    def child(self, name: str, at_ns: int) -> Span:
        """A span of a request to another process, inside this one."""
        return self._owner._child(self._span, name, at_ns)

    def headers(self) -> Headers:
        """``traceparent`` and ``tracestate`` of W3C Trace Context, for what this span calls."""
        return self._owner._headers(self._span)


class SpanExport:
    """Makes spans and sends them. ``url`` is that of :func:`collector_url`.

    ``ratio``: the share of requests that begin a trace here (0..1); a request that comes with a
    ``traceparent`` is traced if its caller's span is. ``instance``: the name of this process.
    """

    def __init__(self, url: str, ratio: float, instance: str) -> None:
        require_opentelemetry()
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._context = TraceContextTextMapPropagator()
        self._exporter = _Counted(OTLPSpanExporter(endpoint=url, timeout=SEND_S))
        self._processor = BatchSpanProcessor(
            cast(Any, self._exporter),
            max_queue_size=QUEUE,
            schedule_delay_millis=1000 * EVERY_S,
            max_export_batch_size=BATCH,
            export_timeout_millis=1000 * SEND_S,
        )
        self._ended = self._dropped = 0
        resource = Resource.create(
            {
                "service.name": "dynctl",
                "service.version": version(),
                "service.instance.id": instance,
            }
        )
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=resource,
            shutdown_on_exit=False,
            span_limits=SpanLimits(
                max_span_attributes=64, max_events=32, max_span_attribute_length=1024
            ),
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("dynctl", version())

    def begin(self, name: str, at_ns: int, headers: Mapping[str, str]) -> Span | None:
        """The span of a request that arrived; None where the request is not traced."""
        context = self._context.extract({k: headers[k] for k in _CONTEXT if k in headers})
        kind = self._api.SpanKind.SERVER
        span = self._tracer.start_span(name, context=context, kind=kind, start_time=at_ns)
        return Span(self, span) if span.is_recording() else None

    def counts(self) -> dict[str, int]:
        """Spans since the start: exported, failed (not taken by the collector), dropped (the queue
        was full)."""
        exporter = self._exporter
        return {
            "exported": exporter.exported,
            "failed": exporter.failed,
            "dropped": self._dropped,
        }

    @property
    def problem(self) -> str:
        """Why the last message was not taken; empty if it was."""
        return self._exporter.problem

    def close(self) -> None:
        """Send what is left, for LAST_S at most. Blocks."""
        self._exporter.ending = True
        # The SDK waits 30 s, or without limit before 1.33. It ends once its exporter refuses.
        ending = threading.Thread(
            target=self._processor.shutdown, name="span export end", daemon=True
        )
        ending.start()
        ending.join(LAST_S)
        if ending.is_alive():
            self._exporter.shutdown()

    def _end(self, span: Any, at_ns: int) -> None:
        """End a span, or forget it where QUEUE spans wait: the SDK drops older ones uncounted."""
        if self._ended - self._exporter.taken >= QUEUE:
            self._dropped += 1
            return
        self._ended += 1
        span.end(end_time=at_ns)

    def _child(self, parent: Any, name: str, at_ns: int) -> Span:
        context = self._api.set_span_in_context(parent)
        kind = self._api.SpanKind.CLIENT
        return Span(
            self, self._tracer.start_span(name, context=context, kind=kind, start_time=at_ns)
        )

    def _headers(self, span: Any) -> Headers:
        headers: Headers = {}
        self._context.inject(headers, self._api.set_span_in_context(span))
        return headers


_CONTEXT: Final = ("traceparent", "tracestate")


class _LastMessage(logging.Handler):
    """The last message of the exporter's log."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(printable(record.getMessage()).split())[:300]


class _Counted:
    """An exporter that counts what it is given: ``taken``, in messages that ended or run.

    ``ending``: after a message that fails, the rest is not sent any more.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._log = _LastMessage()
        logger = logging.getLogger(_EXPORTER_LOG)
        # The condition and the metric report failures; a log line for each message does not help.
        logger.handlers, logger.propagate = [self._log], False
        self.taken = self.exported = self.failed = 0
        self.problem = ""
        self.ending = False

    def export(self, spans: Sequence[Any]) -> Any:
        """Called in the thread of the SDK, with at most BATCH spans."""
        self.taken += len(spans)
        self._log.text = ""
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            # As text: the SDK would log it with a traceback, for each message.
            self._count_failed(spans, f"{type(error).__name__}: {error}")
            return None
        if result.name == "SUCCESS":
            self.exported += len(spans)
            self.problem = ""
        else:
            self._count_failed(spans, self._log.text)
        return result

    def shutdown(self) -> None:
        """End the message that is sent, and refuse all others."""
        self._exporter.shutdown()

    def _count_failed(self, spans: Sequence[Any], reason: str) -> None:
        self.failed += len(spans)
        self.problem = reason or "the collector did not take the spans"
        if self.ending:
            self.shutdown()
