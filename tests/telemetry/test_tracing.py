"""Spans: their context, their encoding, their export, and what the variables may say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.errors import ConfigError
from atroposlib.scored_data import is_traceparent
from atroposlib.utils import tracing
from atroposlib.utils.tracing import (
    MAX_ENTRIES,
    MAX_TEXT_CHARACTERS,
    NO_SPAN,
    SpanLimit,
    Tracer,
    TraceSpan,
    child_span,
    continued_span,
    current_span,
    each_in_span,
    note_answer,
    open_tracer,
    root_span,
    slow_span,
    trace_headers,
)
from tests.telemetry.spans import ReadSpan, read_spans

HEADER = f"00-{'a' * 32}-{'b' * 16}-01"


class ListSink:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def write(self, body: bytes, spans: Sequence[TraceSpan]) -> None:
        self.bodies.append(body)

    def spans(self) -> dict[str, ReadSpan]:
        found = [span for body in self.bodies for span in read_spans(body.decode())]
        return {span.name: span for span in found}


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def tracer(sink: ListSink) -> Iterator[Tracer]:
    tracer = Tracer(sink, {"service.name": "test"})
    yield tracer
    tracer.close()


def test_spans_of_tasks_have_the_span_they_were_started_in_as_parent(
    tracer: Tracer, sink: ListSink
) -> None:
    async def work(name: str) -> None:
        with child_span(name):
            await asyncio.sleep(0)
            with child_span(f"{name}.inner"):
                pass

    async def main() -> None:
        with root_span(tracer, "root"):
            await asyncio.gather(work("a"), work("b"))
        assert current_span() is NO_SPAN

    asyncio.run(main())
    tracer.close()

    spans = sink.spans()
    assert {span.trace_id for span in spans.values()} == {spans["root"].trace_id}
    assert spans["a"].parent_id == spans["b"].parent_id == spans["root"].span_id
    assert spans["a.inner"].parent_id == spans["a"].span_id


def test_a_span_that_fails_has_the_class_of_the_error_and_not_its_text(
    tracer: Tracer, sink: ListSink
) -> None:
    with pytest.raises(KeyError), root_span(tracer, "root"):
        raise KeyError("what the prompt was")
    tracer.close()

    span = sink.spans()["root"]
    assert (span.is_error, span.attributes) == (True, {"error.type": "KeyError"})
    assert b"prompt" not in b"".join(sink.bodies)


def test_leaving_a_loop_ends_its_span_without_an_error(tracer: Tracer, sink: ListSink) -> None:
    def first() -> int:
        for index in each_in_span("turn", range(5), "index"):
            assert current_span() is not NO_SPAN
            return index
        return -1

    with root_span(tracer, "root") as root:
        assert first() == 0
        assert current_span() is root
    tracer.close()

    span = sink.spans()["turn"]
    assert (span.is_error, span.attributes) == (False, {"index": 0})


@pytest.mark.parametrize(("at_least_s", "names"), [(60.0, ["root"]), (0.0, ["part", "root"])])
def test_a_short_part_has_no_span(
    tracer: Tracer, sink: ListSink, at_least_s: float, names: list[str]
) -> None:
    with root_span(tracer, "root"), slow_span("part", at_least_s=at_least_s):
        pass
    tracer.close()

    spans = sink.spans()
    assert list(spans) == names
    assert all(span.start_ns >= spans["root"].start_ns for span in spans.values())


def test_a_short_part_that_fails_has_one(tracer: Tracer, sink: ListSink) -> None:
    with pytest.raises(TimeoutError), root_span(tracer, "root"):  # noqa: SIM117 - the parent
        with slow_span("part", at_least_s=60.0):
            raise TimeoutError

    tracer.close()
    assert sink.spans()["part"].attributes == {"error.type": "TimeoutError"}
    assert sink.spans()["part"].parent_id == sink.spans()["root"].span_id


def test_without_a_trace_nothing_is_recorded_and_no_header_is_sent() -> None:
    with root_span(None, "root"), child_span("a") as span:
        span.set({"x": 1})
        assert (span.is_recording, span.traceparent, trace_headers()) == (False, None, {})

    assert NO_SPAN.attributes == {}


def test_a_request_continues_the_trace_of_its_sender(tracer: Tracer, sink: ListSink) -> None:
    owner = tracer.begin("owner")
    own = f"00-{owner.trace_id}-{'c' * 16}-01"
    for name, header in (("own", own), ("other", HEADER), ("bad", "00-x"), ("none", None)):
        with continued_span(owner, header, name):
            assert trace_headers() != {}
    owner.end()
    tracer.close()

    spans = sink.spans()
    assert {span.trace_id for span in spans.values()} == {owner.trace_id}
    assert spans["own"].parent_id == "c" * 16
    assert spans["other"].links == [("a" * 32, "b" * 16)]
    parents = [spans[name].parent_id for name in ("other", "bad", "none")]
    assert parents == [owner.span_id] * 3


@pytest.mark.parametrize(("header", "sent"), [(HEADER, HEADER), ("nonsense", None), (None, None)])
def test_without_tracing_the_header_of_the_sender_is_sent_on(
    header: str | None, sent: str | None
) -> None:
    with continued_span(NO_SPAN, header, "turn"):
        assert trace_headers().get("traceparent") == sent


@pytest.mark.parametrize(
    "value",
    [
        *("", "00", HEADER.upper(), HEADER[:-1], f"{HEADER}-x", f" {HEADER}", f"{HEADER}\n"),
        *(f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01", f"ff{HEADER[2:]}"),
        *(None, 5, ["x"]),
    ],
)
def test_malformed_traceparents_are_recognized(value: Any) -> None:
    assert is_traceparent(HEADER)
    assert not is_traceparent(value)


def test_attributes_are_bounded_and_of_plain_types(tracer: Tracer, sink: ListSink) -> None:
    given = {
        "text": "x" * 10_000,
        "list": list(range(1000)),
        "huge": 2**70,
        "nan": float("nan"),
        "none": None,
        "object": object(),
        "surrogate": "\ud800",
        "flag": True,
        "pi": 3.5,
        "score": np.mean([1.0, 0.0]),
        "scores": [np.float64(0.25)],
    }
    tracer.begin("a", given).end()
    tracer.close()

    found = sink.spans()["a"].attributes
    assert len(found.pop("text")) == MAX_TEXT_CHARACTERS
    assert len(found.pop("list")) == MAX_ENTRIES
    assert found == {"surrogate": "?", "flag": True, "pi": 3.5, "score": 0.5, "scores": [0.25]}


def test_answers_give_numbers_and_no_text(tracer: Tracer, sink: ListSink) -> None:
    span = tracer.begin("chat")
    note_answer(span, ([1, 2, 3], [[4], [5, 6]], [[-1.0], [-1.0, -2.0]], ["stop", "length"]))
    span.end()
    tracer.close()

    assert sink.spans()["chat"].attributes == {
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop", "length"],
    }


def test_exports_are_what_the_protocol_defines(tracer: Tracer, sink: ListSink) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    with root_span(tracer, "root", {"a": [1, 2], "b": 0.5, "c": False}):
        tracer.begin("linked", links=[HEADER], kind=tracing.CLIENT).end()
    tracer.close()

    kinds = {}
    for body in sink.bodies:  # two, if an export falls between the spans
        request = service.ExportTraceServiceRequest()
        json_format.Parse(body, request)
        spans = request.resource_spans[0].scope_spans[0].spans
        kinds.update({span.name: span.kind for span in spans})
    assert kinds == {"root": tracing.INTERNAL, "linked": tracing.CLIENT} == {"root": 1, "linked": 3}


def test_a_sink_that_fails_loses_spans_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingSink:
        def write(self, body: bytes, spans: Sequence[TraceSpan]) -> None:
            raise OSError("the collector cannot be reached")

    tracer = Tracer(FailingSink(), {})
    for _ in range(3 * tracing._BATCH_SPANS):
        tracer.begin("a").end()
    tracer.close()

    assert tracer.num_dropped >= 1
    assert caplog.text.count("cannot be exported") == 1


def test_the_queue_of_spans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    is_released = threading.Event()

    class SlowSink:
        def write(self, body: bytes, spans: Sequence[TraceSpan]) -> None:
            is_released.wait(30)

    monkeypatch.setattr(tracing, "MAX_QUEUED_SPANS", 1000)
    tracer = Tracer(SlowSink(), {})
    for _ in range(5000):
        tracer.begin("a").end()
    is_released.set()
    tracer.close()

    assert 3000 <= tracer.num_dropped <= 4000


def test_sampling_is_decided_by_the_trace(sink: ListSink) -> None:
    tracer = Tracer(sink, {}, sampled_fraction=0.5)
    roots = [tracer.begin("root") for _ in range(400)]
    unsampled = next(root for root in roots if not root.is_recording)

    child = tracer.begin("child", parent=unsampled.traceparent)

    assert 100 < sum(root.is_recording for root in roots) < 300
    assert unsampled.traceparent is not None
    assert unsampled.traceparent.endswith("-00")
    assert not child.is_recording
    tracer.close()


def test_spans_per_second_are_limited_as_a_mean_over_ten_seconds(
    sink: ListSink, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    tracer = Tracer(sink, {}, limit=SpanLimit(3, clock=lambda: now))

    def num_recorded() -> int:
        """Begin 40 traces of 4 spans; return how many are recorded."""
        found = 0
        for _ in range(40):
            with root_span(tracer, "root") as root:
                for index in each_in_span("turn", range(3), "index"):
                    assert current_span().is_recording == root.is_recording, index
                found += root.is_recording
        return found

    with caplog.at_level("INFO"):
        first = num_recorded()
        now = 4.0
        second = num_recorded()
        now = 1000.0
        third = num_recorded()
    tracer.close()

    # 30 spans at first: the eighth trace exceeds it by 2. Then 12 - 2 spans, and again 30.
    assert [first, second, third] == [8, 3, 8]
    assert caplog.text.count("OTEL_TRACES_SAMPLER=always_on records all") == 1


def test_deferred_spans_are_exported_and_one_that_fails_loses_only_itself(
    tracer: Tracer, sink: ListSink, caplog: pytest.LogCaptureFixture
) -> None:
    threads = []

    def write() -> None:
        threads.append(threading.current_thread())
        tracer.begin("deferred", start_ns=1).end(end_ns=2)

    tracer.defer(lambda: [][0])
    for _ in range(3):
        tracer.defer(write)
    with root_span(tracer, "root"):
        pass
    tracer.close()

    names = [span.name for body in sink.bodies for span in read_spans(body.decode())]
    assert sorted(names) == ["deferred"] * 3 + ["root"]
    assert "IndexError" in caplog.text
    assert threading.current_thread() not in threads


def test_the_limit_applies_to_parts_of_traces_of_other_programs(sink: ListSink) -> None:
    tracer = Tracer(sink, {}, limit=SpanLimit(0.1, clock=lambda: 0.0))
    recorded = []
    for number in range(3):
        span = tracer.begin("part", parent=f"00-{number + 1:032x}-{1:016x}-01")
        recorded.append(span.is_recording)
        span.end()
    tracer.close()

    assert recorded == [True, False, False]


@pytest.mark.parametrize(
    ("variables", "is_limited"),
    [
        ({}, True),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1"}, False),
    ],
)
def test_spans_are_limited_unless_a_sampler_is_named(
    variables: dict[str, str], is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "SPANS_PER_SECOND", 1e-6)
    tracer = open_tracer("a", environ={"ATROPOS_TRACING": "console", **variables})
    assert tracer is not None
    recorded = []
    for _ in range(10):
        span = tracer.begin("root")
        recorded.append(span.is_recording)
        span.end()
    tracer.close()

    assert recorded == ([True] + [False] * 9 if is_limited else [True] * 10)


@pytest.mark.parametrize("value", ["", "off"])
def test_tracing_is_off_by_default(value: str) -> None:
    assert open_tracer("a", environ={"ATROPOS_TRACING": value} if value else {}) is None
    disabled = {"ATROPOS_TRACING": "otlp", "OTEL_SDK_DISABLED": "true"}
    assert open_tracer("a", environ=disabled) is None


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ATROPOS_TRACING": "jaeger"}, "expected off, otlp, console or file:PATH"),
        ({"ATROPOS_TRACING": "file:/dev/null/a"}, "the file cannot be written"),
        (
            {"ATROPOS_TRACING": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
            "does not start with http://",
        ),
        ({"ATROPOS_TRACING": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "over HTTP"),
        ({"ATROPOS_TRACING": "console", "OTEL_TRACES_SAMPLER": "jaeger_remote"}, "traceidratio"),
        (
            {
                "ATROPOS_TRACING": "console",
                "OTEL_TRACES_SAMPLER": "traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "2",
            },
            "a fraction from 0 to 1",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(variables: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_tracer("a", environ=variables)

    assert "\n" not in str(caught.value)


def test_a_file_gets_a_line_per_export_and_stays_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new" / "spans.jsonl"
    variables = {
        "ATROPOS_TRACING": f"file:{path}",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_RESOURCE_ATTRIBUTES": "rl.run.name=first%20run,bad",
    }
    tracer = open_tracer("a", environ=variables)
    assert tracer is not None
    tracer.begin("one").end()
    tracer.close()
    (span,) = read_spans(path.read_text())
    assert (span.name, span.service) == ("one", "mine")
    assert '"stringValue":"first run"' in path.read_text()

    monkeypatch.setattr(tracing, "MAX_FILE_BYTES", path.stat().st_size + 10)
    again = open_tracer("a", environ=variables)
    assert again is not None
    again.begin("two").end()
    again.close()
    assert again.num_dropped == 1
    assert "has reached" in caplog.text


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    received: list[tuple[str, str | None, bytes]]
    location: str | None = None

    def do_POST(self) -> None:
        self.send_nothing()

    def send_nothing(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.received.append((self.path, self.headers.get("x-key"), body))
        self.send_response(200 if self.location is None else 302)
        if self.location is not None:
            self.send_header("Location", self.location)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_redirect_does_not_get_the_key_of_the_collector() -> None:
    kind = type("Redirecting", (Collector,), {"received": []})
    other = type("Other", (Collector,), {"received": [], "do_GET": Collector.send_nothing})
    with HTTPServer(("127.0.0.1", 0), kind) as server, HTTPServer(("127.0.0.1", 0), other) as thief:
        kind.location = f"http://127.0.0.1:{thief.server_port}/"
        threads = [threading.Thread(target=each.serve_forever) for each in (server, thief)]
        for thread in threads:
            thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        with pytest.raises(OSError, match="answered 302"):
            tracing.CollectorSink(url, {"x-key": "a key"}).write(b"{}", [])
        for each in (server, thief):
            each.shutdown()
        for thread in threads:
            thread.join()

    assert (len(kind.received), other.received) == (1, [])


def test_a_name_that_cannot_be_encoded_loses_no_span(tracer: Tracer, sink: ListSink) -> None:
    tracer.begin("a tool \ud800").end()
    tracer.close()

    assert list(sink.spans()) == ["a tool ?"]


def test_a_span_is_one_line_of_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer(tracing.ConsoleSink(), {})
    tracer.begin("tool\nforged \x1b[31m line").end()
    tracer.close()

    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "\x1b" not in said


def test_spans_are_posted_to_a_collector(caplog: pytest.LogCaptureFixture) -> None:
    kind = type("OwnCollector", (Collector,), {"received": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        variables = {
            "ATROPOS_TRACING": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}/",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20secret",  # pragma: allowlist secret
        }
        tracer = open_tracer("atropos-trainer", environ=variables)
        assert tracer is not None
        tracer.begin("one").end()
        tracer.close()
        server.shutdown()
        thread.join()

    ((path, key, body),) = kind.received
    assert (path, key) == ("/v1/traces", "a secret")
    assert [span.service for span in read_spans(body.decode())] == ["atropos-trainer"]
    assert caplog.text == ""


def test_nothing_of_opentelemetry_is_imported() -> None:
    script = (
        "import sys, fastapi\n"  # later versions import it themselves
        "before = set(sys.modules)\n"
        "import atroposlib.envs.base, atroposlib.api.server, example_trainer.run_log\n"
        "print([m for m in set(sys.modules) - before if m.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
