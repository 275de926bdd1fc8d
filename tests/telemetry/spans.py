"""Reads the spans that programs wrote to a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ReadSpan:
    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    start_ns: int
    end_ns: int
    is_error: bool


def read_spans(text: str) -> list[ReadSpan]:
    """Return the spans of a file of exports, or of the body of one."""
    found = []
    for line in text.splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            service = values_of(resource["resource"]["attributes"])["service.name"]
            for scope in resource["scopeSpans"]:
                found += [_span(service, span) for span in scope["spans"]]
    return found


def spans_in(path: Path) -> list[ReadSpan]:
    return read_spans(path.read_text()) if path.exists() else []


def _span(service: str, span: dict[str, Any]) -> ReadSpan:
    return ReadSpan(
        name=span["name"],
        service=service,
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        attributes=values_of(span["attributes"]),
        links=[(link["traceId"], link["spanId"]) for link in span.get("links", [])],
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        is_error=span["status"].get("code") == 2,
    )


def values_of(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["key"]: _value(entry["value"]) for entry in attributes}


def _value(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(entry) for entry in content["values"]]
    return int(content) if kind == "intValue" else content
