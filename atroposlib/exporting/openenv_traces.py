"""Rollouts as training traces of OpenEnv, and back; pure.

    rollout    a list of turns, one per model call, in the order of the calls
    turn       ids of prompt and completion, logprobs, a mask over both; request and response

What the format has no place for is in `metadata.atropos` of the first turn. Files of other programs
lack it. A list of trace entries, as reward functions receive it, is read like a trace.

Source: OpenEnv, `TrainingTrace`, version 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from atroposlib.agent_tasks.trace import AgentTrace, TraceEvent, read_trace
from atroposlib.errors import ConfigError, GroupError
from atroposlib.exporting.trace_records import (
    OURS,
    STEP_KINDS,
    ModelCall,
    RolloutRecord,
    RowRecord,
    TraceDocument,
    check_call,
    is_finite,
    ours_in,
    ours_of,
    own_record,
    rows_of_calls,
    validated,
)

__all__ = ["openenv_of", "read_openenv"]

Chat = list[dict[str, Any]]


def openenv_of(record: RolloutRecord) -> dict[str, Any]:
    """Return a rollout as an OpenEnv training trace.

    Raises:
        GroupError: tokens or logprobs are not those of an engine.
    """
    if not record.is_exact:
        raise GroupError("tokenized from text; a training trace needs the token ids of an engine")
    calls = [
        (number, k, row, call)
        for number, row in enumerate(record.rows)
        for k, call in enumerate(row.calls)
    ]
    if not calls:
        raise GroupError("no token is trained; a training trace needs a call of the model")
    if record.is_aligned:
        calls.sort(key=lambda entry: entry[3].turn or 0)
    turns = [
        _openenv_turn(record, number, k, row, call, index)
        for index, (number, k, row, call) in enumerate(calls)
    ]
    trace: AgentTrace = record.trace or {}
    turns[0]["metadata"][OURS] = ours_of(record, trace, in_steps=False)
    return {"schema_version": 1, "turns": turns}


def _openenv_turn(
    record: RolloutRecord, number: int, k: int, row: RowRecord, call: ModelCall, index: int
) -> dict[str, Any]:
    if call.logprobs is None or any(logprob > 0 for logprob in call.logprobs):
        raise GroupError("inference_logprobs: missing; a training trace needs them")
    is_trained = call.is_trained or [True] * len(call.completion_ids)
    request, reply = _exchange(record, row, k, call)
    model = (record.trace or {}).get("model")
    return {
        "node_id": f"sequence-{number}-call-{k}",
        "prompt_token_ids": call.prompt_ids,
        "completion_token_ids": call.completion_ids,
        "per_token_logps": [float(logprob) for logprob in call.logprobs],
        "loss_mask": [0] * len(call.prompt_ids) + [int(trains) for trains in is_trained],
        "request": {"messages": request},
        "response": {"choices": [{"message": reply}]},
        "metadata": {
            "index": index,
            "row": number,
            "reward": record.score,
            **({"model": model} if model else {}),
            **({} if call.turn is None else {"event": call.turn}),
        },
    }


def _exchange(
    record: RolloutRecord, row: RowRecord, k: int, call: ModelCall
) -> tuple[Chat, dict[str, Any]]:
    """Return the messages of a call and its answer, as far as they are known."""
    chat = row.chat or []
    answers = [i for i, message in enumerate(chat) if message.get("role") == "assistant"]
    if len(answers) >= len(row.calls):  # earlier answers are context
        place = answers[len(answers) - len(row.calls) + k]
        return chat[:place], chat[place]
    if record.trace is None or call.turn is None:
        return [], {"role": "assistant", "content": ""}
    events = record.trace.get("events", [])
    branch = events[call.turn].get("branch", 0)
    messages: Chat = []
    if branch == 0 and record.trace.get("instruction"):
        messages.append({"role": "user", "content": record.trace["instruction"]})
    place = 0
    for i, event in enumerate(events):
        if event["kind"] in STEP_KINDS and event.get("branch", 0) == branch:
            if i == call.turn:
                place = len(messages)
            elif i > call.turn and event["kind"] != "tool_call":
                break
            _add_message(messages, event)
    return messages[:place], messages[place]


def _add_message(messages: Chat, event: TraceEvent) -> None:
    text = event.get("text", "")
    if event["kind"] == "turn":
        messages.append({"role": "assistant", "content": text})
    elif event["kind"] == "tool_result":
        message = {"role": "tool", "content": text}
        if event.get("call_id"):
            message["tool_call_id"] = event["call_id"]
        messages.append(message)
    elif messages and messages[-1]["role"] == "assistant":
        arguments = event.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        messages[-1].setdefault("tool_calls", []).append(
            {
                "id": event.get("call_id", ""),
                "type": "function",
                "function": {"name": event.get("name", ""), "arguments": text},
            }
        )


class OpenEnvTurn(TraceDocument):
    """One model call of a training trace."""

    node_id: str = ""
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    reward: float | None = None

    @property
    def answer(self) -> dict[str, Any] | None:
        """The message of the model; None if it was not recorded."""
        choices = self.response.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, Mapping) else None
        return dict(message) if isinstance(message, Mapping) else None


class OpenEnvTrace(TraceDocument):
    """A training trace."""

    schema_version: Literal[1] = 1
    turns: list[OpenEnvTurn] = Field(min_length=1)


def read_openenv(value: Any, where: str) -> RolloutRecord:
    """Read a training trace; `where` is its file, for messages.

    Raises:
        ConfigError: it is malformed; the message has the turn.
    """
    document: OpenEnvTrace = validated(OpenEnvTrace, value, where)
    calls: list[ModelCall] = []
    for i, turn in enumerate(document.turns, start=1):
        split = len(turn.prompt_token_ids)
        at = f"{where}, turn {i}"
        if len(turn.loss_mask) != split + len(turn.completion_token_ids):
            raise ConfigError(f"{at}: loss_mask: expected one entry per token of both")
        if any(turn.loss_mask[:split]) or not set(turn.loss_mask) <= {0, 1}:
            raise ConfigError(f"{at}: loss_mask: expected 0 for the prompt, then 0 or 1")
        trained = [bool(entry) for entry in turn.loss_mask[split:]]
        call = ModelCall(
            turn.prompt_token_ids,
            turn.completion_token_ids,
            turn.per_token_logps,
            is_trained=None if all(trained) else trained,
        )
        check_call(at, call)
        calls.append(call)
    ours = ours_in(document.turns[0].metadata)
    if ours.get("version") == 1:
        return _read_own_openenv(document, calls, ours, where)
    rows = rows_of_calls(calls)
    turn_of = {id(call): turn for call, turn in zip(calls, document.turns, strict=True)}
    for row in rows:
        row.chat = _openenv_chat(turn_of[id(row.calls[-1])])
    prompt = calls[0].prompt_ids
    rewards = [
        value
        for turn in document.turns
        for value in (turn.reward, turn.metadata.get("reward"))
        if is_finite(value)
    ]
    return RolloutRecord(
        where,
        rows,
        task=" ".join(map(str, prompt)),
        score=float(rewards[-1]) if rewards else None,
    )


def _openenv_chat(turn: OpenEnvTurn) -> Chat | None:
    messages = turn.request.get("messages")
    if not isinstance(messages, list) or turn.answer is None:
        return None
    found = [dict(m) for m in messages if isinstance(m, Mapping)]
    is_chat = all("role" in m for m in found) and "role" in turn.answer
    return [{"content": "", **m} for m in [*found, turn.answer]] if is_chat and found else None


def _read_own_openenv(
    document: OpenEnvTrace, calls: Sequence[ModelCall], ours: Mapping[str, Any], where: str
) -> RolloutRecord:
    record = own_record(ours, where)
    for i, (turn, call) in enumerate(zip(document.turns, calls, strict=True), start=1):
        row = turn.metadata.get("row")
        if not isinstance(row, int) or not 0 <= row < len(record.rows):
            raise ConfigError(
                f"{where}, turn {i}: metadata.row {row!r:.40}; expected the number of a sequence, "
                f"below {len(record.rows)}"
            )
        record.rows[row].calls.append(call)
    for row_record in record.rows:
        row_record.calls.sort(key=lambda call: len(call.prompt_ids))
    record.trace = read_trace(ours.get("trace"))
    return record
