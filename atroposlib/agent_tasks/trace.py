"""The record of one agent's rollout: phases, output, turns, changes of files, the verifier; pure.

A trace is JSON, so that it travels with its group: `group["traces"]` has one per sequence of the
group, or None. Sequences of one rollout share its trace, which only the first of them has.

Traces may come from files of other programs: `read_trace` leaves out fields of wrong types.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from typing_extensions import TypedDict

__all__ = [
    "TRACES_KEY",
    "AgentTrace",
    "TraceEvent",
    "TracedRollout",
    "cast_lines",
    "drawn_pieces",
    "phases_of",
    "read_trace",
    "rollout_of_row",
    "sendable",
    "terminal_pieces",
]

TRACES_KEY = "traces"

EventKind = Literal["phase", "output", "turn", "tool_call", "tool_result", "error"]


class TraceEvent(TypedDict, total=False):
    """One event; `at` and `kind` are always present, the others by kind."""

    at: float
    """Seconds since the start of the rollout."""
    kind: EventKind
    text: str
    """phase: its name (`fork`, `agent`, `verifier`); output, turn, tool_result, error: the text."""
    stream: str
    """output: `agent/stdout`, `agent/stderr`, `verifier/stdout` or `verifier/stderr`."""
    branch: int
    """turn, tool_call, tool_result: number of the branch, 0 for the first."""
    row: int
    """turn: index of the sequence in the group, relative to the first of the rollout."""
    num_tokens: int
    """turn: number of sampled tokens."""
    call_id: str
    name: str
    """tool_call: name of the tool."""
    arguments: Any
    """tool_call: its arguments as JSON, or the text that is not JSON."""
    exit_code: int | None
    """tool_result: exit code of a command, if the result names one; phase: that of its program."""


class AgentTrace(TypedDict, total=False):
    """The record of one rollout."""

    version: Literal[1]
    task: str
    agent: str
    agent_version: str
    model: str
    instruction: str
    started_at: float
    """Seconds since the epoch."""
    duration_s: float
    events: list[TraceEvent]
    """In the order of time; output beyond a limit is cut, and says so."""
    changes: list[dict[str, Any]]
    """Each `path`, `kind`, `size`, `diff`, as in `FileChange`."""
    verifier: dict[str, Any]
    """`exit_code`, `ended_by`, `duration_s`, `output`."""
    reward: float
    reward_parts: dict[str, float]
    outcome: str
    """`done`, `agent_timeout`, `agent_failed`, `verifier_failed`, ..."""
    metrics: dict[str, float]


_MAX_DEPTH = 50
"""Objects and lists within each other in a trace."""
_KINDS = frozenset(get_args(EventKind))
_TEXTS = ("text", "stream", "call_id", "name")
_COUNTS = ("branch", "row", "num_tokens")
_TRACE_TEXTS = ("task", "agent", "agent_version", "model", "instruction", "outcome")
_TRACE_NUMBERS = ("started_at", "duration_s", "reward")


class TracedRollout(NamedTuple):
    """The trace of a rollout and the place of its sequences in the group."""

    trace: AgentTrace
    first_row: int
    num_rows: int


def rollout_of_row(group: Mapping[str, Any], row: int) -> TracedRollout | None:
    """Return the trace of the rollout that a sequence of a group belongs to; None without one."""
    traces = group.get(TRACES_KEY)
    if not isinstance(traces, list) or not 0 <= row < len(traces):
        return None
    starts = [i for i, trace in enumerate(traces) if isinstance(trace, Mapping)]
    first = max((i for i in starts if i <= row), default=None)
    trace = None if first is None else read_trace(traces[first])
    if first is None or trace is None:
        return None
    stop = min((i for i in starts if i > row), default=len(traces))
    return TracedRollout(trace, first, stop - first)


def read_trace(value: Any) -> AgentTrace | None:
    """Return a trace with the fields that have the right types; None if it is not an object."""
    if not isinstance(value, Mapping):
        return None
    events = value.get("events")
    trace: AgentTrace = {
        "version": 1,
        "events": list(filter(None, map(_read_event, events if isinstance(events, list) else ()))),
    }
    fields: dict[str, Any] = {
        **{name: value[name] for name in _TRACE_TEXTS if isinstance(value.get(name), str)},
        **{name: value[name] for name in _TRACE_NUMBERS if _is_number(value.get(name))},
    }
    for name in ("reward_parts", "metrics"):
        if isinstance(value.get(name), Mapping):
            fields[name] = {str(k): v for k, v in value[name].items() if _is_number(v)}
    if isinstance(value.get("verifier"), Mapping):
        fields["verifier"] = dict(value["verifier"])
    if isinstance(value.get("changes"), list):
        fields["changes"] = [
            dict(change)
            for change in value["changes"]
            if isinstance(change, Mapping) and isinstance(change.get("path"), str)
        ]
    trace.update(fields)  # type: ignore[typeddict-item]
    return trace


def sendable(value: Any, depth: int = 0) -> Any:
    """Return a value that every JSON reader accepts.

    Python's also reads numbers that are not finite and lone surrogates, which file names have too.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if _is_integer(value) and not -(2**63) <= value < 2**63:
        return f"{value:#x}"
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth >= _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {sendable(str(k)): sendable(v, depth + 1) for k, v in value.items()}
    return [sendable(each, depth + 1) for each in value]


def _read_event(value: Any) -> TraceEvent | None:
    if not isinstance(value, Mapping) or not _is_number(value.get("at")):
        return None
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        return None
    event: dict[str, Any] = {"at": float(value["at"]), "kind": kind}
    event.update({name: value[name] for name in _TEXTS if isinstance(value.get(name), str)})
    event.update({name: value[name] for name in _COUNTS if _is_count(value.get(name))})
    if "arguments" in value:
        event["arguments"] = value["arguments"]
    if "exit_code" in value and (value["exit_code"] is None or _is_integer(value["exit_code"])):
        event["exit_code"] = value["exit_code"]
    return event  # type: ignore[return-value]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Phase(NamedTuple):
    """A part of a rollout, such as `agent`."""

    name: str
    start_s: float
    duration_s: float
    exit_code: int | None


def phases_of(trace: AgentTrace) -> list[Phase]:
    """Return the phases in order; each lasts until the next, the last until the end."""
    events = trace.get("events", [])
    starts = [event for event in events if event["kind"] == "phase"]
    end = max([trace.get("duration_s", 0.0), *(event["at"] for event in events[-1:])])
    stops = [*(event["at"] for event in starts[1:]), end]
    return [
        Phase(
            start.get("text", ""),
            start["at"],
            max(0.0, stop - start["at"]),
            start.get("exit_code"),
        )
        for start, stop in zip(starts, stops, strict=False)
    ]


_TERMINAL_STREAMS = ("agent/stdout", "agent/stderr")
_WIDTH, _HEIGHT = 100, 30
_MAX_IDLE_S = 2.0
_MAX_HELD = 4096
_DRAWING = (
    r"\x1b(?:\[[0-9;:]*[ABCDEFGHIJKLMPSX@`adefmrsu]|\[[0-9]*T|\[[0-9;]*[Z]"
    r"|\[\?(?:7|25|47|1047|1048|1049)[hl]|[78M]|\([0B])"
)
"""Sequences that draw: colors, the cursor, erasing and scrolling."""
_SEQUENCE = re.compile(
    rf"(?P<kept>{_DRAWING})"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x18\x1a\x1b\x90\x98\x9c-\x9f]*(?:[\x07\x18\x1a\x9c]|\x1b\\)"
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
    r"|[\x00-\x07\x0b-\x0c\x0e-\x1f\x7f-\x9f]"
)
_UNFINISHED = re.compile(
    r"(?:\x1b(?:\[[0-?]*[ -/]*|[ -/]*|[\]PX^_][^\x07\x18\x1a\x1b\x90\x98\x9c-\x9f]*\x1b?)"
    r"|[\x90\x98\x9d-\x9f][^\x07\x18\x1a\x1b\x90\x98\x9c-\x9f]*\x1b?)\Z"
)


def terminal_pieces(trace: AgentTrace) -> list[tuple[float, str]]:
    """Return the agent's output as (seconds, text), with the line ends of a terminal.

    The text has the escape sequences that the agent wrote; it is untrusted.
    """
    return [
        (event["at"], event.get("text", "").replace("\r\n", "\n").replace("\n", "\r\n"))
        for event in trace.get("events", [])
        if event["kind"] == "output" and event.get("stream") in _TERMINAL_STREAMS
    ]


def drawn_pieces(pieces: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Yield terminal output with those escape sequences only that draw.

    The others would be executed by the terminal in which a recording is played: they write to its
    clipboard, or make it answer as if something was typed.
    """
    held = ""
    for at, text in pieces:
        text = held + text
        unfinished = _UNFINISHED.search(text)
        held = unfinished[0] if unfinished is not None else ""
        if len(held) > _MAX_HELD:  # it draws nothing; without its start it is text
            held = ""
        else:
            text = text[: len(text) - len(held)]
        drawn = _SEQUENCE.sub(lambda found: found["kept"] or "", text)
        if drawn:
            yield at, drawn


def cast_lines(trace: AgentTrace) -> Iterator[str]:
    """Yield the lines of an asciinema recording, version 2, of the agent's output.

    Phases are markers. Players shorten pauses to two seconds. Of the escape sequences, only those
    that draw are kept.

    Source: asciinema, "asciicast v2".
    """
    names = [trace.get("task", ""), trace.get("agent", "")]
    header: dict[str, Any] = {
        "version": 2,
        "width": _WIDTH,
        "height": _HEIGHT,
        "idle_time_limit": _MAX_IDLE_S,
        "title": _line(", ".join(name for name in names if name)) or "rollout of an agent",
        "env": {"TERM": "xterm-256color"},
    }
    if "started_at" in trace:
        header["timestamp"] = int(trace["started_at"])
    yield json.dumps(header)
    output = drawn_pieces(sorted(terminal_pieces(trace), key=_time_of))
    pieces: list[tuple[float, str, str]] = [(at, "o", text) for at, text in output]
    pieces += [(phase.start_s, "m", _line(phase.name)) for phase in phases_of(trace)]
    for at, code, text in sorted(pieces, key=_time_of):
        yield json.dumps([round(at, 6), code, text])


def _line(text: str) -> str:
    return "".join(filter(str.isprintable, text))


def _time_of(piece: Sequence[Any]) -> float:
    return float(piece[0])
