"""Spans of recoveries and moves: real times, parts as children, through OpenTelemetry's SDK and over the wire."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from eventful_run import LAST, PARTS, eventful, migrated, regrouped, switched
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator.events import types as events
from orchestrator.events.types import Record
from orchestrator.telemetry.otel import SpanSink, make_exporter
from orchestrator.telemetry.spans import Spans, recovery

END_S = 1_763_628_100.0


def exported(records: list[Record]) -> tuple[ReadableSpan, ...]:
    exporter, warnings = InMemorySpanExporter(), list[str]()
    sink = SpanSink(exporter, job="traced", warn=warnings.append)
    sink.accept(records)
    sink._provider.force_flush()
    spans = exporter.get_finished_spans()
    sink.close()
    assert warnings == []
    return spans


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def children(span: ReadableSpan, spans: tuple[ReadableSpan, ...]) -> list[ReadableSpan]:
    own = span.get_span_context()
    assert own is not None
    return [each for each in spans if each.parent is not None and each.parent.span_id == own.span_id]


def test_a_recovery_is_a_span_and_its_parts_are_its_children() -> None:
    run = eventful()
    spans = exported(run.records)
    (whole,) = [span for span in spans if span.name == "recovery"]
    ended = next(each.time_s for each in run.records if isinstance(each.event, events.Regrouped))
    assert seconds(whole) == pytest.approx((ended - sum(PARTS.values()), ended), abs=1e-5)
    parts = children(whole, spans)
    assert [part.name for part in parts] == ["detect", "settle", "plan", "move", "resume"]
    assert [stop - start for start, stop in map(seconds, parts)] == pytest.approx([*PARTS.values()], abs=1e-5)
    assert seconds(parts[0])[0] == pytest.approx(seconds(whole)[0], abs=1e-5)
    assert whole.parent is None
    assert whole.attributes is not None
    assert whole.attributes["freshet.cause"] == "loss"
    assert whole.attributes["freshet.steps_rerun"] == 11
    assert whole.resource.attributes["service.name"] == "freshet"
    assert whole.resource.attributes["freshet.job"] == "traced"


def test_a_move_is_a_span_with_each_switch_in_it() -> None:
    at = [
        Record(time_s=END_S - 99, event=switched(3, LAST, END_S - 99)),
        Record(time_s=END_S - 0.2, event=switched(0, LAST, END_S - 0.2)),
        Record(time_s=END_S - 0.1, event=switched(1, LAST, END_S - 0.1)),
        Record(time_s=END_S, event=migrated(LAST)),
    ]
    spans = exported(at)
    (whole,) = [span for span in spans if span.name == "move"]
    assert seconds(whole) == pytest.approx((END_S - 1.5, END_S), abs=1e-5)
    switches = children(whole, spans)
    assert [(each.attributes or {})["freshet.rank"] for each in switches] == [0, 1], "not of an earlier move"
    assert seconds(switches[0]) == pytest.approx((END_S - 0.45, END_S - 0.2), abs=1e-5)
    assert (whole.attributes or {})["freshet.layers"] == "3"


def test_the_wait_for_capacity_is_no_part_of_detecting() -> None:
    """The job paused half a minute before it trained again."""
    spans = Spans()
    assert spans.fold(Record(time_s=END_S - 30, event=events.Paused(reason="too few ranks", step=9))) is None
    whole = spans.fold(Record(time_s=END_S, event=regrouped("capacity", step=9)))
    assert whole is not None
    assert [(child.name, child.start_s - END_S, child.end_s - END_S) for child in whole.children] == [
        ("detect", -30.75, -30.25),
        ("settle", -30.25, -30.0),
        ("wait", -30.0, -3.125),
        ("plan", -3.125, -3.0),
        ("move", -3.0, -1.0),
        ("resume", -1.0, 0.0),
    ]
    assert (whole.start_s, whole.end_s) == (END_S - 30.75, END_S)
    assert recovery(regrouped(step=9), END_S).children[0].start_s == END_S - 3.875, "without a pause"


class Refusing(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


def test_an_endpoint_that_refuses_costs_one_warning() -> None:
    warnings: list[str] = []
    sink = SpanSink(Refusing(), job="traced", warn=warnings.append)
    for _ in range(2):
        sink.accept(eventful().records)
        sink._provider.force_flush()
    sink.close()
    assert len(warnings) == 1
    assert warnings[0].startswith("OpenTelemetry's endpoint does not take")


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP endpoint that keeps what it gets."""
    taken: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("by", ["spec", "environment"])
def test_spans_reach_an_otlp_endpoint(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        sink = SpanSink(
            make_exporter(url if by == "spec" else "env"), job="traced", warn=lambda text: pytest.fail(text)
        )
        sink.accept(eventful().records)
        sink.close()
    names = [
        span.name
        for request in taken
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]
    assert sorted(names) == sorted(["recovery", "move", "detect", "settle", "plan", "move", "resume"])
