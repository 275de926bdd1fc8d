"""Traces in the OpenTelemetry protocol, from an item to the step that trained on it.

Off by default. `ATROPOS_TRACING` turns it on in one program (docs/telemetry.md lists the spans):

    otlp         OTLP over HTTP as JSON, to the collector of OTEL_EXPORTER_OTLP_ENDPOINT
    file:PATH    the same JSON, one line per export, appended to a file
    console      one line per span on standard error

    Tracer.begin ─► TraceSpan ─► end ─► bounded queue ─► thread: encode ─► sink
       ▲
       └── parent: the current span of this task, or a W3C `traceparent` of another program

A span costs a few microseconds, in total; the SDK of OpenTelemetry costs ten times as much. The
number of spans per second is limited, which bounds the cost of a fast program. A span
never delays or fails what it measures: when the collector is away, spans are dropped and counted.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel

from atroposlib.errors import ConfigError
from atroposlib.scored_data import is_traceparent
from atroposlib.utils.text import inert_line

__all__ = [
    "CLIENT",
    "HEADER",
    "NO_SPAN",
    "SpanLimit",
    "TraceSpan",
    "Tracer",
    "child_span",
    "continued_span",
    "current_span",
    "each_in_span",
    "entered",
    "is_recorded",
    "model_span",
    "note_answer",
    "open_tracer",
    "remote_span",
    "root_span",
    "slow_span",
    "tool_span",
    "trace_headers",
]

logger = logging.getLogger(__name__)

VARIABLE = "ATROPOS_TRACING"
HEADER = "traceparent"
"""Name of the header that carries a position in a trace, and of the field of a group."""

INTERNAL = 1
CLIENT = 3
"""Kinds of spans, as numbered by the protocol."""

Attributes = Mapping[str, Any]
"""Names to texts, numbers, booleans or lists of one of them; None leaves an attribute out."""

SPANS_PER_SECOND = 200
"""Limit of a program, unless OTEL_TRACES_SAMPLER is set; less than a hundredth of a processor."""

MAX_TEXT_CHARACTERS = 256
MAX_ENTRIES = 64
MAX_LINKS = 512
MAX_QUEUED_SPANS = 16_384
MAX_FILE_BYTES = 2**30
_BATCH_SPANS = 512
_LIMIT_WINDOW_S = 10.0
_EXPORT_INTERVAL_S = 1.0
_CLOSING_S = 5.0
_SEND_TIMEOUT_S = 10.0
_ERROR = 2
_SAMPLER = "OTEL_TRACES_SAMPLER"

_ids = random.Random(os.urandom(16))
"""Source of span ids only, so that the random numbers of a seeded run stay the same."""
os.register_at_fork(after_in_child=lambda: _ids.seed(os.urandom(16)))


def _new_span_id() -> str:
    return f"{_ids.getrandbits(64) or 1:016x}"


class TraceSpan:
    """One operation of a trace; ended once.

    A span without a tracer records nothing and only carries its position in a trace, to be sent on.

    Attributes:
        trace_id: 32 hexadecimal digits; empty outside of any trace.
        span_id: 16 hexadecimal digits.
        tracer: Receives the span at its end; None if the span records nothing.
        is_recording: Whether attributes are kept; if not, they need not be computed.
    """

    __slots__ = (
        *("name", "trace_id", "span_id", "parent_id", "kind", "start_ns", "end_ns"),
        *("attributes", "links", "error_type", "tracer"),
    )

    def __init__(
        self,
        name: str,
        trace_id: str,
        span_id: str,
        *,
        tracer: Tracer | None = None,
        parent_id: str = "",
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        kind: int = INTERNAL,
        start_ns: int = 0,
    ) -> None:
        self.name = name
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.kind = kind
        self.start_ns = start_ns
        self.end_ns = 0
        self.attributes: dict[str, Any] = dict(attributes or {})
        self.links = links
        self.error_type: str | None = None
        self.tracer = tracer

    @property
    def is_recording(self) -> bool:
        return self.tracer is not None

    @property
    def traceparent(self) -> str | None:
        """The position of this span as a W3C header; None outside of any trace."""
        if not self.trace_id:
            return None
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_recording else '00'}"

    def set(self, attributes: Attributes) -> None:
        if self.tracer is not None:
            self.attributes.update(attributes)

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        links: Sequence[str] = (),
        kind: int = INTERNAL,
        start_ns: int | None = None,
    ) -> TraceSpan:
        """Return a new child; this span itself if it records nothing.

        Args:
            name: Name of the operation, one of a few.
            attributes: Attributes that are known at the start.
            links: W3C headers of spans in other traces.
            kind: Kind of the span.
            start_ns: Start in nanoseconds of Unix time; None: now.
        """
        tracer = self.tracer
        if tracer is None:
            return self
        return TraceSpan(
            name,
            self.trace_id,
            _new_span_id(),
            tracer=tracer,
            parent_id=self.span_id,
            attributes=attributes,
            links=links,
            kind=kind,
            start_ns=start_ns or time.time_ns(),
        )

    def end(self, error: BaseException | None = None, *, end_ns: int | None = None) -> None:
        """Hand the span over to be exported; of an error only the class is kept."""
        if self.tracer is None:
            return
        self.end_ns = end_ns or time.time_ns()
        if error is not None:
            self.error_type = type(error).__name__
        self.tracer.add(self)
        self.tracer = None


class _RemoteSpan(TraceSpan):
    """A span of another program; its header is sent on unchanged."""

    __slots__ = ("_header",)

    def __init__(self, header: str) -> None:
        super().__init__("remote", header[3:35], header[36:52])
        self._header = header

    @property
    def traceparent(self) -> str | None:
        return self._header


NO_SPAN = TraceSpan("none", "", "")
_CURRENT: ContextVar[TraceSpan] = ContextVar("current_span", default=NO_SPAN)


def current_span() -> TraceSpan:
    """Return the span of this task; `NO_SPAN` outside of any trace."""
    return _CURRENT.get()


class _Entered:
    """Context in which a span is the current one; ends the span, unless it was current before."""

    __slots__ = ("_before", "_span")

    def __init__(self, span: TraceSpan) -> None:
        self._span = span

    def __enter__(self) -> TraceSpan:
        self._before = _CURRENT.get()
        _CURRENT.set(self._span)
        return self._span

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        _CURRENT.set(self._before)
        if self._span is not self._before:
            # The end of `each_in_span` is not an error.
            self._span.end(None if isinstance(error, GeneratorExit) else error)


def entered(span: TraceSpan) -> AbstractContextManager[TraceSpan]:
    """Make a span the current one, and end it."""
    return _Entered(span)


def child_span(
    name: str, attributes: Attributes | None = None, *, kind: int = INTERNAL
) -> AbstractContextManager[TraceSpan]:
    """Measure a part of the current span; without one, nothing is recorded."""
    return entered(_CURRENT.get().begin(name, attributes, kind=kind))


@contextmanager
def slow_span(name: str, *, at_least_s: float) -> Iterator[None]:
    """Measure a part of the current span that is recorded only if it takes long or fails.

    For parts that are many and usually short: a span would cost more than it says.
    """
    start_ns = time.time_ns()
    try:
        yield
    except BaseException as error:
        _CURRENT.get().begin(name, start_ns=start_ns).end(error)
        raise
    if time.time_ns() - start_ns >= at_least_s * 1e9:
        _CURRENT.get().begin(name, start_ns=start_ns).end()


def model_span(operation: str, model: str, address: str) -> AbstractContextManager[TraceSpan]:
    """Measure a request to an engine, named as OpenTelemetry names requests to models."""
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "rl.engine.address": address,
    }
    return child_span(f"{operation} {model[:64]}", attributes, kind=CLIENT)


def note_answer(span: TraceSpan, answer: Any) -> None:
    """Add the numbers of tokens and the finish reasons of an engine's answer, never its texts.

    Args:
        span: span of the request.
        answer: an answer of the OpenAI client, or ids of the prompt and of the completions, their
            logprobs and finish reasons; others, such as those of fakes, are left out.
    """
    if not span.is_recording:
        return
    if isinstance(answer, tuple) and len(answer) == 4:
        prompt_ids, completions, _, reasons = answer
        numbers: tuple[int | None, int | None] = (len(prompt_ids), sum(map(len, completions)))
    elif isinstance(answer, BaseModel):
        choices, usage = answer.choices, answer.usage  # type: ignore[attr-defined]
        reasons = [choice.finish_reason for choice in choices]
        numbers = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
    else:
        return
    span.set(
        {
            "gen_ai.usage.input_tokens": numbers[0],
            "gen_ai.usage.output_tokens": numbers[1],
            "gen_ai.response.finish_reasons": [str(reason) for reason in reasons],
        }
    )


def tool_span(name: str) -> AbstractContextManager[TraceSpan]:
    """Measure a call of a tool; its arguments and its result are not recorded."""
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
    return child_span(f"execute_tool {name[:64]}", attributes)


def root_span(
    tracer: Tracer | None, name: str, attributes: Attributes | None = None
) -> AbstractContextManager[TraceSpan]:
    """Start a trace, if there is a tracer."""
    return entered(NO_SPAN if tracer is None else tracer.begin(name, attributes))


def each_in_span(name: str, indices: range, attribute: str) -> Iterator[int]:
    """Yield indices, each within a child span that has its index."""
    for index in indices:
        with child_span(name, {attribute: index}):
            yield index


def is_recorded(traceparent: str) -> bool:
    """Return whether a position is one of a trace that is recorded."""
    return int(traceparent[53:], 16) & 1 == 1


def remote_span(header: str | None) -> TraceSpan:
    """Return the position that a header names; `NO_SPAN` for a missing or malformed one."""
    return _RemoteSpan(header) if header is not None and is_traceparent(header) else NO_SPAN


def continued_span(
    owner: TraceSpan, header: str | None, name: str, attributes: Attributes | None = None
) -> AbstractContextManager[TraceSpan]:
    """Measure a request that another program sends on behalf of `owner`.

    The parent is the sender's span, if it is of the same trace; otherwise it is `owner`, with a
    link to the sender's. Without `owner`, the sender's position is sent on unchanged.
    """
    sender = remote_span(header)
    if owner.tracer is None:
        return entered(sender if sender.trace_id else owner)
    if sender.trace_id == owner.trace_id:
        return entered(owner.tracer.begin(name, attributes, parent=header))
    links = [header] if header is not None and sender.trace_id else []
    return entered(owner.begin(name, attributes, links=links))


def trace_headers() -> dict[str, str]:
    """Return the headers of a request that continues the current trace; empty without one."""
    traceparent = _CURRENT.get().traceparent
    return {} if traceparent is None else {HEADER: traceparent}


class SpanLimit:
    """Limits the spans per second of a program, as a mean over ten seconds.

    Traces that have started are recorded to their ends; others start when the mean allows it.

    Args:
        per_second: Spans per second.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, per_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._allowance = self._most = _LIMIT_WINDOW_S * per_second
        self._time = clock()
        self._has_refused = False

    def admits(self) -> bool:
        """Return whether a trace may start, or a part of one of another program."""
        now = self._clock()
        earned = (now - self._time) * self._per_second
        self._allowance, self._time = min(self._most, self._allowance + earned), now
        if self._allowance <= 0 and not self._has_refused:
            self._has_refused = True
            logger.info(
                "some traces are not recorded, since there are more than %g spans per second; "
                "OTEL_TRACES_SAMPLER=always_on records all",
                self._per_second,
            )
        return self._allowance > 0

    def spend(self) -> None:
        """Count a span."""
        self._allowance -= 1


class Sink(Protocol):
    """Destination of exported spans."""

    def write(self, body: bytes, spans: Sequence[TraceSpan]) -> None:
        """Write an export request, given also as spans; raises OSError."""


class Tracer:
    """Starts spans and exports those that have ended, in a thread of its own.

    Args:
        sink: Receives the exports.
        resource: Attributes of the program, such as `service.name`.
        sampled_fraction: Fraction of new traces that are recorded. A trace that another program
            started is recorded if that program records it.
        limit: Leaves out traces that would exceed it; None: no limit.

    Attributes:
        num_dropped: Spans that were not exported because the sink failed or was too slow.
    """

    def __init__(
        self,
        sink: Sink,
        resource: Attributes,
        *,
        sampled_fraction: float = 1.0,
        limit: SpanLimit | None = None,
    ) -> None:
        self.num_dropped = 0
        self._sink = sink
        self._resource = encoded_attributes(resource)
        self._sampled_below = round(sampled_fraction * 2**64)
        self._limit = limit
        self._deferred: deque[Callable[[], None]] = deque()
        self._ended: deque[TraceSpan] = deque()
        self._wakes = threading.Event()
        self._is_closed = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._export_until_closed, daemon=True)
        self._thread.start()

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
        kind: int = INTERNAL,
        start_ns: int | None = None,
    ) -> TraceSpan:
        """Start a span.

        Args:
            name: Name of the operation, one of a few.
            attributes: Attributes that are known at the start.
            parent: W3C header of the parent; None, or a malformed one, starts a trace.
            links: W3C headers of spans in other traces.
            kind: Kind of the span.
            start_ns: Start in nanoseconds of Unix time; None: now.
        """
        span_id = _new_span_id()
        if parent is not None and is_traceparent(parent):
            trace_id, parent_id = parent[3:35], parent[36:52]
            is_sampled = self.admits(parent)
        else:
            trace_id, parent_id = f"{_ids.getrandbits(128) or 1:032x}", ""
            is_sampled = int(trace_id[16:], 16) < self._sampled_below and self._has_room()
        if not is_sampled:
            return TraceSpan(name, trace_id, span_id)
        return TraceSpan(
            name,
            trace_id,
            span_id,
            tracer=self,
            parent_id=parent_id,
            attributes=attributes,
            links=links,
            kind=kind,
            start_ns=start_ns or time.time_ns(),
        )

    def admits(self, parent: str) -> bool:
        """Return whether a span that starts now under a W3C header is recorded."""
        return is_recorded(parent) and self._has_room()

    def _has_room(self) -> bool:
        return self._limit is None or self._limit.admits()

    def add(self, span: TraceSpan) -> None:
        """Queue an ended span for export; called by `TraceSpan.end`."""
        if self._limit is not None:
            self._limit.spend()
        if len(self._ended) >= MAX_QUEUED_SPANS:
            self.num_dropped += 1
            return
        self._ended.append(span)
        if len(self._ended) == _BATCH_SPANS:
            self._wakes.set()

    def defer(self, write: Callable[[], None]) -> None:
        """Call `write`, which starts and ends spans, in the thread before the next export.

        It costs a fraction in the thread of what it costs between other work of the program.
        """
        if len(self._deferred) >= MAX_QUEUED_SPANS:
            self.num_dropped += 1
            return
        self._deferred.append(write)

    def close(self) -> None:
        """Export what has ended, waiting a few seconds at most."""
        self._is_closed = True
        self._wakes.set()
        self._thread.join(_CLOSING_S)

    def _export_until_closed(self) -> None:
        while not self._is_closed:
            self._wakes.wait(_EXPORT_INTERVAL_S)
            self._wakes.clear()
            self._export()
        self._export()

    def _export(self) -> None:
        while self._deferred or self._ended:
            self._begin_deferred()
            num_spans = min(len(self._ended), _BATCH_SPANS)
            spans = [self._ended.popleft() for _ in range(num_spans)]
            try:
                if spans:
                    self._sink.write(encode_spans(spans, self._resource), spans)
            except Exception as error:  # noqa: BLE001 - spans must not end the program
                self._note_failure(error, num_spans)
                return
            self._is_failing = False

    def _begin_deferred(self) -> None:
        while self._deferred and len(self._ended) < _BATCH_SPANS:
            write = self._deferred.popleft()
            try:
                write()
            except Exception as error:  # noqa: BLE001 - as above
                self._note_failure(error, 1)

    def _note_failure(self, error: Exception, num_spans: int) -> None:
        self.num_dropped += num_spans
        level = logging.DEBUG if self._is_failing else logging.WARNING
        self._is_failing = True
        logger.log(
            level,
            "spans cannot be exported and are dropped (%d so far): %s",
            self.num_dropped,
            error if isinstance(error, OSError) else type(error).__name__,
        )


class _EncodedAttribute(msgspec.Struct, gc=False):
    key: str
    value: dict[str, Any]


class _EncodedSpan(msgspec.Struct, gc=False, omit_defaults=True, rename="camel"):
    """A span as OTLP has it in JSON."""

    trace_id: str
    span_id: str
    name: str
    kind: int
    start_time_unix_nano: str
    end_time_unix_nano: str
    attributes: list[_EncodedAttribute]
    status: Mapping[str, int]
    parent_span_id: str = ""
    links: Sequence[Mapping[str, str]] = ()


def encode_spans(spans: Sequence[TraceSpan], resource: Sequence[Any]) -> bytes:
    """Return an OTLP export request as JSON, in one line."""
    scope = {"scope": {"name": "atropos"}, "spans": [_encoded(span) for span in spans]}
    scoped = {"resource": {"attributes": resource}, "scopeSpans": [scope]}
    return msgspec.json.encode({"resourceSpans": [scoped]})


def _encoded(span: TraceSpan) -> _EncodedSpan:
    attributes = span.attributes
    if span.error_type is not None:
        attributes["error.type"] = span.error_type
    return _EncodedSpan(
        trace_id=span.trace_id,
        span_id=span.span_id,
        name=_cut(span.name),
        kind=span.kind,
        start_time_unix_nano=str(span.start_ns),
        end_time_unix_nano=str(max(span.start_ns, span.end_ns)),
        attributes=encoded_attributes(attributes),
        parent_span_id=span.parent_id,
        links=[{"traceId": link[3:35], "spanId": link[36:52]} for link in span.links[:MAX_LINKS]],
        status={} if span.error_type is None else {"code": _ERROR},
    )


def encoded_attributes(attributes: Attributes) -> list[_EncodedAttribute]:
    """Return attributes as OTLP has them; longer texts and lists are cut, other types left out."""
    return [
        _EncodedAttribute(name, encoded)
        for name, value in attributes.items()
        if (encoded := _encoded_value(value)) is not None
    ]


def _encoded_value(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        return {"stringValue": _cut(value)}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(int(value))} if -(2**63) <= value < 2**63 else None
    if isinstance(value, float):
        # numpy's are floats as well, which the encoder refuses
        return {"doubleValue": float(value)} if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        entries = map(_encoded_value, value[:MAX_ENTRIES])
        return {"arrayValue": {"values": [entry for entry in entries if entry is not None]}}
    return None


def _cut(text: str) -> str:
    if text.isascii():
        return text[:MAX_TEXT_CHARACTERS]
    # A lone surrogate, which no encoding has, becomes a question mark.
    return text[:MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()


class FileSink:
    """Appends exports to a file of JSON lines, up to `MAX_FILE_BYTES`.

    Several programs of a machine may share the file: each export is one write.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"{VARIABLE}=file:{path}: the file cannot be written ({error.strerror}); "
                "name one in a folder that exists"
            ) from error

    def write(self, body: bytes, spans: Sequence[TraceSpan]) -> None:
        with self._path.open("ab", buffering=0) as file:
            if file.tell() + len(body) >= MAX_FILE_BYTES:
                raise OSError(f"{self._path} has reached {MAX_FILE_BYTES} bytes")
            file.write(body + b"\n")


class ConsoleSink:
    """Writes a line per span to standard error."""

    def write(self, body: bytes, spans: Sequence[TraceSpan]) -> None:
        lines = [
            f"trace {span.trace_id} {inert_line(span.name, max_characters=100)} "
            f"{(span.end_ns - span.start_ns) / 1e6:.1f} ms"
            f"{'' if span.error_type is None else ' ' + span.error_type}\n"
            for span in spans
        ]
        sys.stderr.write("".join(lines))


class _RefusedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would send the key of the collector to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_RefusedRedirects)


class CollectorSink:
    """Posts exports to a collector.

    Args:
        url: Full address of its route for traces.
        headers: Further headers, such as a key; never logged.

    Raises:
        ConfigError: the address is not one of HTTP.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "the address of the collector does not start with http:// or https://; set "
                "OTEL_EXPORTER_OTLP_ENDPOINT to one such as http://localhost:4318"
            )
        self._url = url
        self._headers = {**headers, "Content-Type": "application/json"}

    def write(self, body: bytes, spans: Sequence[TraceSpan]) -> None:
        request = urllib.request.Request(self._url, data=body, headers=self._headers)
        try:
            with _opener.open(request, timeout=_SEND_TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            raise OSError(f"the collector answered {error.code}") from None
        except urllib.error.URLError as error:
            raise OSError(f"the collector cannot be reached ({error.reason})") from None


def open_tracer(program: str, *, environ: Mapping[str, str] = os.environ) -> Tracer | None:
    """Return the tracer of a program, as the environment variables ask for; None if they do not.

    Args:
        program: Name of the program, such as `atropos-environment`, unless OTEL_SERVICE_NAME is
            set.
        environ: The environment variables.

    Raises:
        ConfigError: a variable has an unknown value.
    """
    wanted = environ.get(VARIABLE, "").strip()
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if wanted in ("", "off") or is_disabled:
        return None
    sink: Sink
    if wanted == "otlp":
        sink = CollectorSink(_collector_url(environ), _collector_headers(environ))
    elif wanted.startswith("file:") and wanted != "file:":
        sink = FileSink(Path(wanted.removeprefix("file:")))
    elif wanted == "console":
        sink = ConsoleSink()
    else:
        raise ConfigError(
            f"{VARIABLE} is {wanted[:60]!r}; expected off, otlp, console or file:PATH"
        )
    resource = {
        "service.name": program,
        "service.instance.id": f"{_ids.getrandbits(64):016x}",
        "process.pid": os.getpid(),
        **_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", "")),
    }
    if name := environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = name
    limit = None if environ.get(_SAMPLER, "").strip() else SpanLimit(SPANS_PER_SECOND)
    return Tracer(sink, resource, sampled_fraction=_sampled_fraction(environ), limit=limit)


def _collector_url(environ: Mapping[str, str]) -> str:
    if environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip() == "grpc":
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc; spans are sent over HTTP: set it to http/json "
            "and name the HTTP port of the collector, usually 4318"
        )
    exact = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    return exact or f"{base.rstrip('/')}/v1/traces"


def _collector_headers(environ: Mapping[str, str]) -> dict[str, str]:
    given = environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS")
    return _pairs(given or environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))


def _pairs(text: str) -> dict[str, str]:
    """Read `name=value,name=value` with percent-encoded values, as OpenTelemetry's variables."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {
        name.strip(): urllib.parse.unquote(value.strip())
        for name, mark, value in pairs
        if mark and name.strip()
    }


def _sampled_fraction(environ: Mapping[str, str]) -> float:
    sampler = environ.get(_SAMPLER, "").strip().removeprefix("parentbased_")
    if sampler in ("", "always_on"):
        return 1.0
    if sampler == "always_off":
        return 0.0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "1").strip()
    fraction = float(text) if re.fullmatch(r"[01]?(\.\d+)?|1\.?", text) and text else math.nan
    if sampler != "traceidratio" or not 0 <= fraction <= 1:
        raise ConfigError(
            f"{_SAMPLER} is {sampler[:60]!r} with the argument {text[:60]!r}; expected "
            "always_on, always_off, or traceidratio with a fraction from 0 to 1"
        )
    return fraction
