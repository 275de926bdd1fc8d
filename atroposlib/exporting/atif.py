"""Rollouts as ATIF trajectories, and back; pure.

    rollout      a trajectory; each further branch of the agent is a sub-agent's trajectory
    turn         an agent step: message, tool calls; ids and logprobs of its model call as metrics
    tool result  an entry of the observation of the step with the call

What the format has no place for is in `extra.atropos` of the trajectory, of steps, of tool calls
and of results. Files of other programs lack it; their times become a trace.

Source: Harbor, "Agent Trajectory Interchange Format", version 1.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, Literal

from pydantic import Field

from atroposlib.agent_tasks.trace import AgentTrace, TraceEvent, read_trace, sendable
from atroposlib.errors import ConfigError
from atroposlib.exporting.trace_records import (
    OURS,
    ModelCall,
    RolloutRecord,
    RowRecord,
    TraceDocument,
    check_call,
    is_finite,
    ours_in,
    ours_of,
    own_record,
    parsed_arguments,
    rows_of_calls,
    validated,
)

__all__ = ["atif_of", "read_atif"]

ATIF_VERSION = "ATIF-v1.7"
"""The oldest version with all parts that are written."""
_READ_VERSIONS = "ATIF-v1."
Chat = list[dict[str, Any]]


def atif_of(record: RolloutRecord, *, name: str) -> dict[str, Any]:
    """Return a rollout as an ATIF trajectory; `name` becomes its id."""
    trace: AgentTrace = record.trace or {}
    branches = _traced_steps(record) if record.is_aligned else _chat_steps(record)
    agent = {
        "name": trace.get("agent") or "policy",
        "version": trace.get("agent_version") or "unknown",
    }
    if trace.get("model"):
        agent["model_name"] = trace["model"]
    subs = []
    for branch, steps in branches.items():
        if branch == 0:
            continue
        sub_id = f"{name}-branch-{branch}"
        subs.append(_trajectory(sub_id, name, agent, steps))
        _refer(branches[0], steps, sub_id)
    document = _trajectory(name, name, agent, branches[0])
    ours = ours_of(record, trace, in_steps=record.is_aligned)
    document["final_metrics"] = _final_metrics(record, len(branches[0]))
    document["extra"] = {"reward": record.score, OURS: ours}
    if subs:
        document["subagent_trajectories"] = subs
    return document


def _trajectory(
    trajectory_id: str, session_id: str, agent: Mapping[str, Any], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "schema_version": ATIF_VERSION,
        "session_id": session_id,
        "trajectory_id": trajectory_id,
        "agent": dict(agent),
        "steps": [{"step_id": i, **step} for i, step in enumerate(steps, start=1)],
    }


def _refer(parents: list[dict[str, Any]], steps: Sequence[Mapping[str, Any]], sub_id: str) -> None:
    """Name a sub-agent's trajectory in the last step of its parent before it."""
    start = next((_event_of(step) for step in steps if _event_of(step) is not None), None)
    before = [
        step
        for step in parents
        if start is None or (event := _event_of(step)) is None or event < start
    ]
    parent = before[-1] if before else parents[0]
    results = parent.setdefault("observation", {"results": []})["results"]
    results.append({"subagent_trajectory_ref": [{"trajectory_id": sub_id}]})


def _event_of(step: Mapping[str, Any]) -> int | None:
    event: int | None = step.get("extra", {}).get(OURS, {}).get("event")
    return event


def _traced_steps(record: RolloutRecord) -> dict[int, list[dict[str, Any]]]:
    """Return the steps of each branch of a trace whose turns are the calls."""
    trace = record.trace or {}
    calls = {
        call.turn: (number, call)
        for number, row in enumerate(record.rows)
        for call in row.calls
        if call.turn is not None
    }
    branches: dict[int, list[dict[str, Any]]] = {0: _first_steps(record)}
    call_steps: dict[tuple[int, str], dict[str, Any]] = {}
    for i, event in enumerate(trace.get("events", [])):
        steps = branches.setdefault(event.get("branch", 0), [])
        if event["kind"] == "turn":
            steps.append(_turn_step(trace, i, event))
            if i in calls:
                number, call = calls[i]
                steps[-1]["extra"][OURS]["row"] = number
                steps[-1]["metrics"] = _metrics(call)
        elif event["kind"] == "tool_call":
            step = _agent_step(steps)
            made = _tool_call(i, event)
            step.setdefault("tool_calls", []).append(made)
            call_steps[event.get("branch", 0), made["tool_call_id"]] = step
        elif event["kind"] == "tool_result":
            known = call_steps.get((event.get("branch", 0), event.get("call_id", "")))
            _add_result(known or _agent_step(steps), i, event, is_known=known is not None)
    return {branch: steps for branch, steps in branches.items() if steps}


def _first_steps(record: RolloutRecord) -> list[dict[str, Any]]:
    """Return the messages before the first answer; without messages, the instruction."""
    chat = record.rows[0].chat or []
    stop = next((i for i, m in enumerate(chat) if m.get("role") == "assistant"), 0)
    instruction = (record.trace or {}).get("instruction", "")
    steps = list(_steps_of_chat(chat[:stop]))
    return steps or [{"source": "user", "message": instruction}]


def _agent_step(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last agent step; without one, a step that stands for no model call."""
    if not steps or steps[-1]["source"] != "agent":
        steps.append({"source": "agent", "message": "", "llm_call_count": 0})
    return steps[-1]


def _turn_step(trace: AgentTrace, i: int, event: TraceEvent) -> dict[str, Any]:
    kept = {k: v for k, v in event.items() if k not in ("text", "kind")}
    step: dict[str, Any] = {
        "source": "agent",
        "message": event.get("text", ""),
        "llm_call_count": 1,
        "extra": {OURS: {"event": i, "fields": kept}},
    }
    if "started_at" in trace:
        with suppress(ValueError, OverflowError, OSError):  # not a year that calendars have
            at = datetime.fromtimestamp(trace["started_at"] + event["at"], timezone.utc)
            step["timestamp"] = at.isoformat()
    return step


def _tool_call(i: int, event: TraceEvent) -> dict[str, Any]:
    kept: dict[str, Any] = {k: v for k, v in event.items() if k not in ("kind", "name")}
    arguments = kept.pop("arguments", None) if isinstance(event.get("arguments"), dict) else None
    return {
        "tool_call_id": event.get("call_id") or f"call-{i}",
        "function_name": event.get("name") or "tool",
        "arguments": arguments if arguments is not None else _as_object(event.get("arguments")),
        "extra": {
            OURS: {
                "event": i,
                "fields": {**kept, **({"name": event["name"]} if "name" in event else {})},
                "has_object": arguments is not None,
            }
        },
    }


def _as_object(arguments: Any) -> dict[str, Any]:
    """Return arguments that are no object as one, which the format requires."""
    return {} if arguments is None else {"arguments": arguments}


def _add_result(step: dict[str, Any], i: int, event: TraceEvent, *, is_known: bool) -> None:
    kept = {k: v for k, v in event.items() if k not in ("kind", "text")}
    result: dict[str, Any] = {
        "content": event.get("text", ""),
        "extra": {OURS: {"event": i, "fields": kept}},
    }
    if is_known:
        result["source_call_id"] = event.get("call_id", "")
    step.setdefault("observation", {"results": []})["results"].append(result)


def _metrics(call: ModelCall) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.completion_ids),
        "prompt_token_ids": call.prompt_ids,
        "completion_token_ids": call.completion_ids,
    }
    if call.logprobs is not None:
        metrics["logprobs"] = call.logprobs
    if call.is_trained is not None:
        metrics["extra"] = {OURS: {"is_trained": [int(trains) for trains in call.is_trained]}}
    return metrics


def _chat_steps(record: RolloutRecord) -> dict[int, list[dict[str, Any]]]:
    """Return the steps of each row, from its messages.

    The last answers are those of the calls; earlier ones are context. Calls that have no message
    are steps without text.
    """
    branches = {}
    for number, row in enumerate(record.rows):
        steps = list(_steps_of_chat(row.chat or []))
        answers = [step for step in steps if step["source"] == "agent"]
        num_calls = len(row.calls)
        num_context = 0 if not num_calls else len(answers) - num_calls
        if num_context < 0:
            num_context = len(answers)
            answers += [{"source": "agent", "message": ""} for _ in row.calls]
            steps += answers[num_context:]
        for step in answers[:num_context]:
            step["is_copied_context"] = True
        for step, call in zip(answers[num_context:], row.calls, strict=False):
            step["llm_call_count"] = 1
            step["metrics"] = _metrics(call)
            step["extra"] = {OURS: {"row": number}}
        branches[number] = steps or [{"source": "user", "message": ""}]
    return branches


def _steps_of_chat(chat: Chat) -> Iterator[dict[str, Any]]:
    step: dict[str, Any] | None = None
    for message in chat:
        role, text = message.get("role"), _content(message.get("content"))
        if role == "tool" and step is not None and step["source"] == "agent":
            result: dict[str, Any] = {"content": text}
            ids = [call["tool_call_id"] for call in step.get("tool_calls", [])]
            if message.get("tool_call_id") in ids:
                result["source_call_id"] = message["tool_call_id"]
            step.setdefault("observation", {"results": []})["results"].append(result)
            continue
        if step is not None:
            yield step
        is_agent = role in ("assistant", "agent")
        step = {"source": "agent" if is_agent else "system" if role == "system" else "user"}
        step["message"] = text
        if is_agent and isinstance(message.get("reasoning_content"), str):
            step["reasoning_content"] = message["reasoning_content"]
        calls = message.get("tool_calls") if is_agent else None
        if isinstance(calls, list) and calls:
            step["tool_calls"] = [_call_of_chat(i, call) for i, call in enumerate(calls)]
    if step is not None:
        yield step


def _content(content: Any) -> str:
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping)]
        return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _call_of_chat(i: int, call: Any) -> dict[str, Any]:
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    return {
        "tool_call_id": str(call.get("id") or f"call-{i}"),
        "function_name": str(function.get("name") or "tool"),
        "arguments": arguments if isinstance(arguments, dict) else _as_object(arguments),
    }


def _final_metrics(record: RolloutRecord, num_steps: int) -> dict[str, Any]:
    calls = [call for row in record.rows for call in row.calls]
    trace: AgentTrace = record.trace or {}
    extra = {
        "reward": record.score,
        **{f"reward/{name}": part for name, part in trace.get("reward_parts", {}).items()},
        **trace.get("metrics", {}),
    }
    return {
        "total_prompt_tokens": sum(len(call.prompt_ids) for call in calls),
        "total_completion_tokens": sum(len(call.completion_ids) for call in calls),
        "total_steps": num_steps,
        "extra": extra,
    }


class AtifMetrics(TraceDocument):
    """Ids and logprobs of the model call of a step."""

    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class AtifToolCall(TraceDocument):
    """A tool call of a step."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class AtifResult(TraceDocument):
    """The result of a tool call, or of another action."""

    source_call_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class AtifObservation(TraceDocument):
    """The results of a step."""

    results: list[AtifResult]


class AtifStep(TraceDocument):
    """A message of the system, the user or the agent."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[dict[str, Any]]
    timestamp: datetime | None = None
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = Field(None, ge=0)
    extra: dict[str, Any] | None = None

    @property
    def ours(self) -> Mapping[str, Any]:
        return ours_in(self.extra)

    @property
    def is_call(self) -> bool:
        """Whether the step is the answer of a model, as opposed to a copy or an action without."""
        return self.source == "agent" and self.llm_call_count != 0 and not self.is_copied_context

    @property
    def call(self) -> ModelCall | None:
        """The ids of the step; None if it lacks some, or stands for several calls."""
        metrics = self.metrics
        if not self.is_call or metrics is None or (self.llm_call_count or 1) > 1:
            return None
        if not metrics.prompt_token_ids or not metrics.completion_token_ids:
            return None
        trained = ours_in(metrics.extra).get("is_trained")
        return ModelCall(
            metrics.prompt_token_ids,
            metrics.completion_token_ids,
            metrics.logprobs,
            is_trained=[bool(trains) for trains in trained] if isinstance(trained, list) else None,
        )


class AtifAgent(TraceDocument):
    """The agent of a trajectory."""

    name: str
    version: str
    model_name: str | None = None


class AtifFinalMetrics(TraceDocument):
    """Totals of a trajectory."""

    extra: dict[str, Any] | None = None


class AtifTrajectory(TraceDocument):
    """A trajectory, with those of its sub-agents."""

    schema_version: str
    agent: AtifAgent
    steps: list[AtifStep] = Field(min_length=1)
    final_metrics: AtifFinalMetrics | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[AtifTrajectory] | None = None

    def all(self) -> Iterator[AtifTrajectory]:
        """Yield the trajectory and those of its sub-agents."""
        yield self
        for sub in self.subagent_trajectories or ():
            yield from sub.all()


def read_atif(value: Any, where: str) -> RolloutRecord:
    """Read a trajectory; `where` is its file, for messages.

    Without ids for every model call, tokens have to be made from the text.

    Raises:
        ConfigError: it is malformed; the message has the step.
    """
    document: AtifTrajectory = validated(AtifTrajectory, value, where)
    documents = list(document.all())
    _check_version(document, where)
    for part in documents:
        for i, step in enumerate(part.steps, start=1):
            if step.step_id != i:
                raise ConfigError(f"{where}, step {i}: step_id {step.step_id}; expected {i}")
            call = step.call
            if call is not None:
                check_call(f"{where}, step {i}", call)
    ours = ours_in(document.extra)
    if ours.get("version") == 1:
        return _read_own_atif(documents, ours, where)
    steps = [step for part in documents for step in part.steps if step.is_call]
    is_exact = bool(steps) and all(step.call is not None for step in steps)
    rows: list[RowRecord] = []
    for part in documents:
        chat, untrained = _chat_of(part)
        if is_exact:
            found = rows_of_calls(call for step in part.steps if (call := step.call))
        else:
            found = [RowRecord()] if any(step.is_call for step in part.steps) else []
        for row in found:
            row.chat, row.untrained = chat, untrained
        rows += found
    if not rows:
        raise ConfigError(f"{where}: no step is the answer of a model; expected at least one")
    return RolloutRecord(
        where,
        rows,
        _trace_of(documents),
        task=_first_user_text(document),
        score=_reward_of(document),
        is_exact=is_exact,
    )


def _check_version(document: AtifTrajectory, where: str) -> None:
    if not document.schema_version.startswith(_READ_VERSIONS):
        raise ConfigError(
            f"{where}: schema_version {document.schema_version!r:.40}; expected {_READ_VERSIONS}…, "
            "an ATIF trajectory"
        )


def _first_user_text(document: AtifTrajectory) -> str:
    steps = [step for step in document.steps if step.source == "user"]
    return _content(steps[0].message) if steps else ""


def _reward_of(document: AtifTrajectory) -> float | None:
    """Return the reward, which the format has no field for, from the places it is written to."""
    final = document.final_metrics
    for extra in (document.extra, final.extra if final else None):
        value = (extra or {}).get("reward")
        if is_finite(value):
            return float(value)
    return None


def _chat_of(document: AtifTrajectory) -> tuple[Chat, list[int]]:
    """Return the steps as messages, and the positions of answers that are not trained."""
    chat: Chat = []
    untrained: list[int] = []
    for step in document.steps:
        role = {"agent": "assistant"}.get(step.source, step.source)
        message: dict[str, Any] = {"role": role, "content": _as_content(step.message)}
        if step.reasoning_content:
            message["reasoning_content"] = step.reasoning_content
        if step.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.tool_call_id,
                    "type": "function",
                    "function": {
                        "name": call.function_name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for call in step.tool_calls
            ]
        if step.source == "agent" and not step.is_call:
            untrained.append(len(chat))
        chat.append(message)
        for result in step.observation.results if step.observation else ():
            if result.content is not None:
                role = "tool" if step.source == "agent" else "user"
                answer = {"role": role, "content": _as_content(result.content)}
                if result.source_call_id is not None:
                    answer["tool_call_id"] = result.source_call_id
                chat.append(answer)
    return chat, untrained


def _as_content(content: str | list[dict[str, Any]]) -> Any:
    """Return content in the form of chat APIs; images and audio keep their address only."""
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part["text"]} if isinstance(part.get("text"), str) else dict(part)
        for part in content
    ]


def _trace_of(documents: Sequence[AtifTrajectory]) -> AgentTrace | None:
    """Return the trace of steps of another program; None if they have no times."""
    times = [step.timestamp for part in documents for step in part.steps if step.timestamp]
    if not times:
        return None
    stamps = [_stamp(time) for time in times]
    start = min(stamps)
    events: list[tuple[float, int, dict[str, Any]]] = []
    for branch, part in enumerate(documents):
        at = 0.0
        for step in part.steps:
            at = at if step.timestamp is None else _stamp(step.timestamp) - start
            for event in _events_of(step, branch):
                events.append((at, len(events), {"at": at, **event}))
    events.sort(key=lambda entry: entry[:2])
    agent = documents[0].agent
    return read_trace(
        {
            "agent": agent.name,
            "agent_version": agent.version,
            "model": agent.model_name,
            "instruction": _first_user_text(documents[0]),
            "started_at": start,
            "duration_s": max(stamps) - start,
            "events": [event for _, _, event in events],
        }
    )


def _stamp(time: datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


def _events_of(step: AtifStep, branch: int) -> Iterator[dict[str, Any]]:
    if step.is_call:
        metrics = step.metrics
        ids = metrics.completion_token_ids if metrics else None
        count = {"num_tokens": len(ids)} if ids else {}
        yield {"kind": "turn", "branch": branch, "text": _content(step.message), **count}
    for call in step.tool_calls or ():
        yield {
            "kind": "tool_call",
            "branch": branch,
            "call_id": call.tool_call_id,
            "name": call.function_name,
            "arguments": sendable(call.arguments),
        }
    for result in step.observation.results if step.observation else ():
        if result.content is not None:
            call_id = {} if result.source_call_id is None else {"call_id": result.source_call_id}
            text = _content(result.content)
            yield {"kind": "tool_result", "branch": branch, "text": text, **call_id}


def _read_own_atif(
    documents: Sequence[AtifTrajectory], ours: Mapping[str, Any], where: str
) -> RolloutRecord:
    record = own_record(ours, where)
    for part in documents:
        for i, step in enumerate(part.steps, start=1):
            call, row = step.call, step.ours.get("row")
            if call is None:
                continue
            if not isinstance(row, int) or not 0 <= row < len(record.rows):
                raise ConfigError(
                    f"{where}, step {i}: extra.atropos.row {row!r:.40}; expected the number of a "
                    f"sequence, below {len(record.rows)}"
                )
            record.rows[row].calls.append(call)
    for row_record in record.rows:
        row_record.calls.sort(key=lambda call: len(call.prompt_ids))
    value = ours.get("trace")
    if isinstance(value, Mapping) and isinstance(value.get("events"), list):
        events = list(value["events"])
        are_in_steps = None in events  # of a trace whose turns are the calls
        for place, event in _own_events(documents) if are_in_steps else ():
            if not 0 <= place < len(events):
                raise ConfigError(
                    f"{where}: extra.atropos.event {place}; expected one of the trace"
                )
            events[place] = event
        record.trace = read_trace({**value, "events": events})
    return record


def _own_events(documents: Sequence[AtifTrajectory]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the events that were written as steps, each with its place in the trace."""
    for part in documents:
        for step in part.steps:
            if "event" in step.ours:
                text = _content(step.message)
                yield _own_event(step.ours, {"kind": "turn", "text": text})
            for call in step.tool_calls or ():
                own = ours_in(call.extra)
                has_object = own.get("has_object") is True
                arguments = {"arguments": call.arguments} if has_object else {}
                yield _own_event(own, {"kind": "tool_call", **arguments})
            for result in step.observation.results if step.observation else ():
                if result.content is not None:
                    text = _content(result.content)
                    yield _own_event(ours_in(result.extra), {"kind": "tool_result", "text": text})


def _own_event(ours: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    place, fields = ours.get("event"), ours.get("fields")
    is_place = isinstance(place, int) and not isinstance(place, bool)
    return (place if is_place else -1), {  # type: ignore[return-value]
        **(fields if isinstance(fields, Mapping) else {}),
        **known,
    }
