"""Exports the spans of recoveries and moves with OpenTelemetry's SDK."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace import Tracer, set_span_in_context

from orchestrator.events.types import Record
from orchestrator.telemetry.spans import Spans, TimeSpan

EVERY_MS = 1_000
"""Between two exports."""
TIMEOUT_S = 5.0
"""Time limit for an endpoint to answer."""
TRACES_PATH = "/v1/traces"
"""Path of traces at an OTLP endpoint."""


class SpanSink:
    """Exports one trace for each recovery and move.

    Args:
        exporter: takes the spans.
        warn: takes the one warning if exports fail.
    """

    def __init__(self, exporter: SpanExporter, *, job: str, warn: Callable[[str], None]) -> None:
        resource = Resource.create({"service.name": "freshet", "freshet.job": job})
        # The controller's process ends once it has closed this.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(_Watched(exporter, warn), schedule_delay_millis=EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("freshet")
        self._spans = Spans()

    def accept(self, records: Sequence[Record]) -> None:
        """Export the spans that end with `records`."""
        for record in records:
            if (span := self._spans.fold(record)) is not None:
                emit(span, self._tracer)

    def close(self) -> None:
        """Export what waits."""
        self._provider.shutdown()


def emit(span: TimeSpan, tracer: Tracer, parent: Context | None = None) -> None:
    """Hand `span` and its children to `tracer`, with their own times."""
    started = tracer.start_span(
        span.name,
        context=parent,
        start_time=_ns(span.start_s),
        attributes=span.attributes,
    )
    for child in span.children:
        emit(child, tracer, set_span_in_context(started))
    started.end(end_time=_ns(span.end_s))


def make_exporter(target: str) -> SpanExporter:
    """The exporter for `console`, `env` or an endpoint."""
    if target == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if target == "env":
        return OTLPSpanExporter()
    url = target.rstrip("/")
    return OTLPSpanExporter(
        endpoint=url if url.endswith(TRACES_PATH) else url + TRACES_PATH, timeout=TIMEOUT_S
    )


class _Watched(SpanExporter):
    """An exporter whose first failure is told; the SDK only prints it."""

    def __init__(self, exporter: SpanExporter, warn: Callable[[str], None]) -> None:
        self._exporter = exporter
        self._warn = warn
        self._warned = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS and not self._warned:
            self._warned = True
            self._warn(
                "OpenTelemetry's endpoint does not take this job's spans: its address or its log says why"
            )
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
