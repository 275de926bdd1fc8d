"""The page with the timeline of an agent's rollout: what it said, ran, printed and changed; pure.

    summary      score, outcome, agent, durations of the phases
    replay       the agent's terminal, played by `player.js`
    events       turns, tool calls with their results and exit codes, output, errors, by time
    changes      the files that differ from the start, as diffs in color
    verifier     its exit code and output

All text of a trace is untrusted and is escaped as on the other pages. The replay gets its data as
JSON in an attribute, and shows it with `textContent` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atroposlib.agent_tasks.trace import (
    AgentTrace,
    TracedRollout,
    TraceEvent,
    phases_of,
    rollout_of_row,
    terminal_pieces,
)
from atroposlib.utils.text import inert_line
from atroposlib.viewer.pages import (
    block,
    chip,
    empty,
    folded,
    number,
    part_chips,
    score_chip,
    shown,
)
from atroposlib.viewer.rollouts import Group, ShownRollout, finite_number

__all__ = ["plain_text", "timeline_page"]

MAX_TEXT_CHARACTERS = 200_000
"""Maximum length of a text on the page; the rest is only in the group."""
MAX_EVENTS = 2_000
MAX_EVENT_MARKUP = 2_000_000
"""Length of the markup of events after which the others are left out."""
MAX_DIFF_CHARACTERS = 500_000
"""Maximum length of all diffs on the page."""
MAX_CHANGES = 200
_OPEN_CHARACTERS = 1_200
_OPEN_LINES = 16
_EXCERPT_CHARACTERS = 80
_OPEN_DIFF_LINES = 40
_MAX_REPLAY_CHARACTERS = 400_000
_COMMAND_NAMES = ("command", "cmd", "script", "code")
"""Arguments of tools that are shown as a command."""


def timeline_page(group: Group, rollout: ShownRollout) -> str:
    """Return the page of the rollout that a sequence belongs to."""
    traced = rollout_of_row(group.fields, rollout.number)
    if traced is None:
        return empty("This rollout has no trace of an agent; its text is on the conversation page.")
    trace = traced.trace
    parts = [
        _summary(trace, rollout),
        _phases(trace),
        _instruction(trace),
        _replay(trace),
        "<h2>Timeline</h2>",
        _events(traced, rollout.number),
        _changes(trace.get("changes", [])),
        _verifier(trace.get("verifier")),
        _metrics(trace),
    ]
    return "".join(parts)


_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)


def plain_text(text: str) -> str:
    """Return terminal output without escape sequences; of a rewritten line, the last version.

    A control string without an end is removed up to the end of its line, so that it hides no more.
    """
    lines = _SEQUENCE.sub("", text).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def seconds(value: float) -> str:
    """Format a duration or a time of the rollout."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{int(value // 60)} min {int(value % 60)} s"


def _summary(trace: AgentTrace, rollout: ShownRollout) -> str:
    agent = " ".join(filter(None, (trace.get("agent", ""), trace.get("agent_version", ""))))
    outcome = trace.get("outcome", "")
    facts = [score_chip(rollout.score)]
    if outcome:
        kind = "v-pos" if outcome == "done" else "v-neg"
        facts.append(f'<span class="v-chip {kind}">{shown(outcome)}</span>')
    facts += [chip(text) for text in (trace.get("task", ""), agent, trace.get("model", "")) if text]
    events = trace.get("events", [])
    turns = [event for event in events if event["kind"] == "turn"]
    branches = {event.get("branch", 0) for event in turns}
    facts.append(chip(f"{len(turns):,} turns"))
    if len(branches) > 1:
        facts.append(chip(f"{len(branches)} branches"))
    num_calls = sum(event["kind"] == "tool_call" for event in events)
    if num_calls:
        facts.append(chip(f"{num_calls:,} tool calls"))
    if "duration_s" in trace:
        facts.append(chip(seconds(trace["duration_s"])))
    parts = trace.get("reward_parts") or rollout.reward_parts
    return f'<div class="v-chips">{"".join(facts)}{part_chips(parts)}</div>'


def _phases(trace: AgentTrace) -> str:
    phases = phases_of(trace)
    if not phases:
        return ""
    bars = "".join(
        f'<span class="v-phase" style="flex-grow:{max(phase.duration_s, 1e-3):.3f}" '
        f'title="{shown(phase.name)} {seconds(phase.duration_s)}"></span>'
        for phase in phases
    )
    names = "".join(
        f"<li><i></i>{shown(phase.name)} <b>{seconds(phase.duration_s)}</b>"
        f"{_exit_chip(phase.exit_code)}</li>"
        for phase in phases
    )
    return (
        f'<div class="v-phases"><div class="v-phase-bar" aria-hidden="true">{bars}</div>'
        f"<ul>{names}</ul></div>"
    )


def _instruction(trace: AgentTrace) -> str:
    text = trace.get("instruction", "")
    if not text:
        return ""
    return folded("instruction", _text(text), is_open=len(text) <= _OPEN_CHARACTERS)


def _replay(trace: AgentTrace) -> str:
    pieces, length = [], 0
    for at, text in terminal_pieces(trace):
        length += len(text)
        if length > _MAX_REPLAY_CHARACTERS:
            break
        pieces.append([round(at, 3), text])
    if not pieces:
        return ""
    # ASCII, so that no control character is replaced when the attribute is escaped.
    data = shown(json.dumps(pieces, ensure_ascii=True, separators=(",", ":")))
    return folded(
        "terminal replay", f'<div class="v-player" data-cast="{data}"></div>', kind="v-replay"
    )


def _events(traced: TracedRollout, row: int) -> str:
    events = traced.trace.get("events", [])
    if not events:
        return empty("The trace has no events.")
    items: list[str] = []
    num_shown, length = 0, 0
    for entry in _entries(events[:MAX_EVENTS]):
        if length > MAX_EVENT_MARKUP:
            break
        items.append(_entry(entry, traced, row))
        num_shown += len(entry)
        length += len(items[-1])
    if len(events) > num_shown:
        more = empty(f"{len(events) - num_shown:,} more events are in the group")
        items.append(f'<li class="v-event">{more}</li>')
    return f'<ol class="v-timeline">{"".join(items)}</ol>'


def _entries(events: Sequence[TraceEvent]) -> Iterator[list[TraceEvent]]:
    """Yield what is shown together: a call with its results, output of one stream in a row."""
    results: dict[tuple[str, int], list[TraceEvent]] = {}
    calls = {_call_key(event) for event in events if event["kind"] == "tool_call"}
    for event in events:
        if event["kind"] == "tool_result" and _call_key(event) in calls:
            results.setdefault(_call_key(event), []).append(event)
    output: list[TraceEvent] = []
    for event in events:
        if output and not (event["kind"] == "output" and _stream(event) == _stream(output[0])):
            yield output
            output = []
        if event["kind"] == "output":
            output.append(event)
        elif event["kind"] == "tool_call":
            yield [event, *results.pop(_call_key(event), [])]
        elif event["kind"] != "tool_result" or _call_key(event) not in calls:
            yield [event]
    if output:
        yield output


def _call_key(event: TraceEvent) -> tuple[str, int]:
    # Ids are unique in a branch only; some programs write none, which makes the event its own.
    name = event.get("call_id", "")
    return (name, event.get("branch", 0)) if name else (f"\0{id(event)}", 0)


def _stream(event: TraceEvent) -> str:
    return event.get("stream", "output")


def _entry(events: list[TraceEvent], traced: TracedRollout, row: int) -> str:
    event = events[0]
    kind = event["kind"]
    content = {
        "phase": _phase_entry,
        "output": _output_entry,
        "tool_call": _call_entry,
        "tool_result": _result_entry,
        "error": _error_entry,
    }.get(kind)
    body = _turn_entry(event, traced, row) if content is None else content(events)
    return (
        f'<li class="v-event v-event-{kind}"><span class="v-time">{seconds(event["at"])}</span>'
        f'<div class="v-what">{body}</div></li>'
    )


def _phase_entry(events: list[TraceEvent]) -> str:
    return f"<b>{shown(events[0].get('text', ''))}</b> {_exit_chip(events[0].get('exit_code'))}"


def _turn_entry(event: TraceEvent, traced: TracedRollout, row: int) -> str:
    facts = ["turn"]
    if event.get("branch", 0):
        facts.append(f"of branch {event['branch']}")
    if "num_tokens" in event:
        facts.append(f"· {event['num_tokens']:,} tokens")
    own = traced.first_row + event.get("row", 0)
    link = ""
    if traced.num_rows > 1 and own != row and event.get("row", 0) < traced.num_rows:
        link = f' <button class="v-pick" data-rollout="{own}">sequence {own}</button>'
    text = event.get("text", "")
    body = _text(text) if text.strip() else '<p class="v-legend">no text</p>'
    return f"<h3>{' '.join(facts)}{link}</h3>{body}"


def _call_entry(events: list[TraceEvent]) -> str:
    call, results = events[0], events[1:]
    name = call.get("name") or "tool"
    command = _command_of(call.get("arguments"))
    exits = "".join(_exit_chip(result.get("exit_code")) for result in results)
    took = f" {chip(seconds(max(0.0, results[-1]['at'] - call['at'])))}" if results else ""
    branch = chip(f"branch {call['branch']}") if call.get("branch", 0) else ""
    head = f"<h3>{shown(name)} {branch}{exits}{took}</h3>"
    if command is None:
        arguments = call.get("arguments")
        is_text = isinstance(arguments, str)
        text = arguments if is_text else json.dumps(arguments, indent=1, ensure_ascii=False)
        head += _text(str(text)) if arguments not in (None, "", {}) else ""
    else:
        head += f'<div class="v-command">{_text(command)}</div>'
    if not results:
        return f'{head}<p class="v-legend">no result was recorded</p>'
    return head + "".join(
        f'<div class="v-result">{_output(result.get("text", ""))}</div>' for result in results
    )


def _result_entry(events: list[TraceEvent]) -> str:
    head = f"<h3>result {_exit_chip(events[0].get('exit_code'))}</h3>"
    return head + _output(events[0].get("text", ""))


def _output_entry(events: list[TraceEvent]) -> str:
    text = plain_text("".join(event.get("text", "") for event in events))
    title = f"{_stream(events[0])}, {len(text):,} characters: " + inert_line(
        text, max_characters=_EXCERPT_CHARACTERS
    )
    return folded(title, _text(text))


def _error_entry(events: list[TraceEvent]) -> str:
    return f'<div class="v-notice v-bad">{_text(events[0].get("text", ""))}</div>'


def _command_of(arguments: Any) -> str | None:
    """Return the command of a tool call that runs one."""
    if not isinstance(arguments, Mapping):
        return None
    for name in _COMMAND_NAMES:
        value = arguments.get(name)
        if isinstance(value, str) and len(arguments) <= 3:
            return value
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            return " ".join(value)
    return None


def _exit_chip(code: Any) -> str:
    if code is None or isinstance(code, bool) or not isinstance(code, int):
        return ""
    return f'<b class="v-score {"v-pos" if code == 0 else "v-neg"}">exit {code}</b>'


def _output(text: str) -> str:
    text = plain_text(text)
    return _text(text) if text.strip() else '<p class="v-legend">no output</p>'


def _text(text: str) -> str:
    """Show a text, of which only the beginning is open if it is long."""
    text = text.strip("\n")
    more = ""
    if len(text) > MAX_TEXT_CHARACTERS:
        cut = len(text) - MAX_TEXT_CHARACTERS
        more = empty(f"{cut:,} more characters are not shown; the group has them")
        text = text[:MAX_TEXT_CHARACTERS]
    lines = text.splitlines(keepends=True)
    start = "".join(lines[:_OPEN_LINES])[:_OPEN_CHARACTERS]
    rest = text[len(start) :]
    if len(rest) <= _OPEN_CHARACTERS // 4 and len(lines) <= _OPEN_LINES + 4:
        return block(text) + more
    title = f"{rest.count(chr(10)) + 1:,} more lines, {len(rest):,} characters"
    return block(start.rstrip("\n")) + folded(
        title, block(rest.lstrip("\n"), max_characters=MAX_TEXT_CHARACTERS) + more
    )


_SIGNS = {"added": ("A", "v-pos"), "modified": ("M", "v-zero"), "removed": ("D", "v-neg")}


def _changes(changes: Sequence[Mapping[str, Any]]) -> str:
    if not changes:
        return ""
    shown_changes = changes[:MAX_CHANGES]
    left = _OPEN_DIFF_LINES
    parts = [f"<h2>Changed files ({len(changes):,})</h2>"]
    room = MAX_DIFF_CHARACTERS
    for change in shown_changes:
        diff = str(change.get("diff") or "")
        num_lines = diff.count("\n")
        parts.append(_change(change, is_open=0 < num_lines <= left, has_room=len(diff) <= room))
        room -= len(diff)
        left -= num_lines
    if len(changes) > MAX_CHANGES:
        parts.append(empty(f"{len(changes) - MAX_CHANGES:,} more files"))
    return "".join(parts)


def _change(change: Mapping[str, Any], *, is_open: bool, has_room: bool) -> str:
    sign, kind = _SIGNS.get(str(change.get("kind")), ("?", ""))
    diff = change.get("diff")
    size = change.get("size")
    facts = f"{size:,} bytes" if isinstance(size, int) and change.get("kind") != "removed" else ""
    if not isinstance(diff, str) or not diff or not has_room:
        note = "" if change.get("kind") == "removed" else " binary, or too large for the page"
        body = f'<p class="v-legend">{shown(facts + note)}</p>'
        is_open = False
    else:
        lines = diff.split("\n")
        added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
        removed = sum(line.startswith("-") and not line.startswith("---") for line in lines)
        facts = f"+{added:,} -{removed:,} · {facts}"
        body = _diff(diff)
    title = (
        f'<b class="v-score {kind}">{sign}</b><span class="v-path">{shown(change["path"])}</span> '
        f"<small>{shown(facts)}</small>"
    )
    return (
        f'<details class="v-fold v-change"{" open" if is_open else ""}>'
        f"<summary>{title}</summary>{body}</details>"
    )


def _diff(diff: str) -> str:
    cut = diff[:MAX_TEXT_CHARACTERS]
    more = "" if cut == diff else empty(f"{len(diff) - len(cut):,} more characters")
    # Not as terminal output, where a carriage return would hide the sign and the text before it.
    lines = (line.rstrip("\r") for line in cut.split("\n"))
    spans = "".join(_diff_line(line) for line in lines if line)
    return f'<div class="v-patch">{spans}</div>{more}'


def _diff_line(line: str) -> str:
    if line.startswith(("+++", "---")):
        return f"<i>{shown(line)}</i>"
    if line.startswith("@@"):
        return f'<i class="v-at">{shown(line)}</i>'
    tag = "ins" if line.startswith("+") else "del" if line.startswith("-") else "span"
    return f"<{tag}>{shown(line)}</{tag}>"


def _verifier(verifier: Mapping[str, Any] | None) -> str:
    if not verifier:
        return ""
    facts = _exit_chip(verifier.get("exit_code"))
    ended_by = verifier.get("ended_by")
    if isinstance(ended_by, str) and ended_by != "exit":
        facts += chip(f"ended by {ended_by}")
    duration = finite_number(verifier.get("duration_s"))
    if duration is not None:
        facts += chip(seconds(duration))
    output = verifier.get("output")
    text = output if isinstance(output, str) else ""
    return f"<h2>Verifier {facts}</h2>{_output(text)}"


def _metrics(trace: AgentTrace) -> str:
    metrics = trace.get("metrics")
    if not metrics:
        return ""
    chips = "".join(chip(f"{name} {number(value)}") for name, value in metrics.items())
    return f'<h2>Measurements</h2><div class="v-chips">{chips}</div>'
