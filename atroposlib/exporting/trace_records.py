"""The neutral form of a recorded rollout, between groups and the formats of other programs; pure.

    group ─► records_of_group ─► RolloutRecord ─► group_of_records ─► group
                                     │
                                     └ rows ─► calls: prompt ids, sampled ids, their logprobs

One row is one sequence of the group. What a format has no place for is kept in `fields`, so that a
group that is exported and imported again is equal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict, ValidationError

from atroposlib.agent_tasks.trace import TRACES_KEY, AgentTrace, rollout_of_row
from atroposlib.errors import ConfigError
from atroposlib.exporting.selection import Span, trained_spans
from atroposlib.scored_data import (
    GROUP_FIELDS,
    IGNORE_INDEX,
    MASKED_LOGPROB,
    check_group,
    merge_columns,
)
from atroposlib.utils.tokenize_for_trainer import (
    UNMASKED_ROLES,
    ChatTokenizer,
    render_chat_ids,
    tokenize_for_trainer,
)
from atroposlib.wire.columns import column_parts, plain_columns

__all__ = [
    "OURS",
    "STEP_KINDS",
    "GroupPlace",
    "ModelCall",
    "RolloutRecord",
    "RowRecord",
    "TraceDocument",
    "check_call",
    "group_of_records",
    "is_finite",
    "ours_in",
    "ours_of",
    "own_record",
    "parsed_arguments",
    "records_of_group",
    "rows_of_calls",
    "validated",
]

Chat = list[dict[str, Any]]
OURS = "atropos"
"""Key of what a format has no place for, in the objects that it leaves to programs."""
STEP_KINDS = ("turn", "tool_call", "tool_result")
"""Events that other formats have as steps or messages."""
_MAX_TOKEN_ID = 2**31 - 1
_COLUMNS = ("tokens", "masks", "inference_logprobs")
_PER_ROW = frozenset(field.name for field in GROUP_FIELDS if field.per_trajectory)


@dataclass
class ModelCall:
    """One request to the model: the ids it read and the ids it sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None = None
    """[C] logprobs of the sampled ids."""
    is_trained: list[bool] | None = None
    """[C]; None if all of them are."""
    turn: int | None = None
    """Position of its turn among the events of the trace."""


@dataclass
class RowRecord:
    """One sequence of a group."""

    calls: list[ModelCall] = field(default_factory=list)
    tail_ids: list[int] = field(default_factory=list)
    """Ids after the last sampled one."""
    chat: Chat | None = None
    untrained: list[int] = field(default_factory=list)
    """Positions in `chat` of assistant messages that are not trained, if tokens come from text."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Its entries of other fields; of `tokens` and the like only if the calls lack them."""


@dataclass
class GroupPlace:
    """The group that a rollout is from."""

    group_id: str
    rollout: int
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the whole group; with its first rollout only."""


@dataclass
class RolloutRecord:
    """One rollout: its sequences, its trace, and its group if known."""

    where: str
    """File or place in a source, for messages."""
    rows: list[RowRecord]
    trace: AgentTrace | None = None
    place: GroupPlace | None = None
    task: str = ""
    """Name or text that rollouts of one group share, if `place` is unknown."""
    score: float | None = None
    is_exact: bool = True
    """Whether the tokens are those of an engine."""

    @property
    def is_aligned(self) -> bool:
        """Whether every call is one turn of the trace."""
        calls = [call for row in self.rows for call in row.calls]
        return self.trace is not None and all(call.turn is not None for call in calls)


def records_of_group(group: Mapping[str, Any], where: str) -> list[RolloutRecord]:
    """Return the rollouts of a group; the sequences of one agent are one rollout.

    Raises:
        GroupError: it is not a group.
    """
    check_group(group)
    size = len(group["tokens"])
    content = json.dumps([group["tokens"], group["scores"]]).encode()
    group_id = f"{where}:{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    per_row = {
        name: values
        for name, values in group.items()
        if name in _PER_ROW - {TRACES_KEY} and isinstance(values, list) and len(values) == size
    }
    if group.get("columns"):
        column_parts(group["columns"], list(map(len, group["tokens"])))  # checks them
        columns = plain_columns(group["columns"])
        per_row["columns"] = [
            {name: rows[i] for name, rows in columns.items()} for i in range(size)
        ]
    is_exact = not group.get("tokenized_from_text")
    records: list[RolloutRecord] = []
    row = 0
    while row < size:
        traced = rollout_of_row(group, row)
        num_rows = 1 if traced is None else traced.num_rows
        trace = None if traced is None else traced.trace
        rows = [
            _row({name: values[i] for name, values in per_row.items()}, trace, i - row, is_exact)
            for i in range(row, row + num_rows)
        ]
        place = GroupPlace(group_id, len(records))
        score = float(group["scores"][row])
        records.append(RolloutRecord(where, rows, trace, place, score=score, is_exact=is_exact))
        row += num_rows
    records[0].place = GroupPlace(
        group_id, 0, {k: v for k, v in group.items() if k not in per_row and k != TRACES_KEY}
    )
    return records


def _row(
    entries: dict[str, Any], trace: AgentTrace | None, number: int, is_exact: bool
) -> RowRecord:
    tokens, masks = entries["tokens"], entries["masks"]
    logprobs = entries.get("inference_logprobs")
    chat = entries.get("messages")
    is_chat = _is_chat(chat)
    row = RowRecord(chat=chat if is_chat else None)
    if is_exact:
        row.calls = _calls(tokens, masks, logprobs, trace, number)
        end = len(row.calls[-1].prompt_ids + row.calls[-1].completion_ids) if row.calls else 0
        row.tail_ids = tokens[end:]
    written = _columns(row.calls, row.tail_ids)
    row.fields = {
        name: value
        for name, value in entries.items()
        if not (name in _COLUMNS and value == written[name])
        and not (is_chat and name == "messages")
    }
    return row


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _calls(
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float] | None,
    trace: AgentTrace | None,
    number: int,
) -> list[ModelCall]:
    spans = [span for span in trained_spans(masks) if span.is_trained]
    turns = [
        (i, event.get("num_tokens"))
        for i, event in enumerate((trace or {}).get("events", []))
        if event["kind"] == "turn" and event.get("row", 0) == number
    ]
    parts = split_spans(spans, [count for _, count in turns])
    is_aligned = parts is not None
    if logprobs is not None and any(
        logprobs[i] > 0 for span in spans for i in range(span.start, span.end)
    ):
        logprobs = None  # placeholders, which the row keeps
    return [
        ModelCall(
            list(tokens[: span.start]),
            list(tokens[span.start : span.end]),
            None if logprobs is None else list(logprobs[span.start : span.end]),
            turn=turns[i][0] if is_aligned else None,
        )
        for i, span in enumerate(spans if parts is None else parts)
    ]


def split_spans(spans: Sequence[Span], counts: Sequence[int | None]) -> list[Span] | None:
    """Return one span for each count of tokens; None if the spans do not consist of such parts.

    Two turns without tokens between them are one span of the mask.
    """
    if len(spans) == len(counts):
        pairs = zip(spans, counts, strict=True)
        if all(count in (None, span.end - span.start) for span, count in pairs):
            return list(spans)
    parts: list[Span] = []
    left = list(counts)
    for span in spans:
        start = span.start
        while start < span.end:
            count = left.pop(0) if left else None
            if not count or start + count > span.end:
                return None
            parts.append(Span(start, start + count, True))
            start += count
    return None if left else parts


def _columns(calls: Sequence[ModelCall], tail_ids: Sequence[int]) -> dict[str, Any]:
    """Return tokens, masks and logprobs of a row; logprobs are None if a call has none."""
    last = calls[-1] if calls else ModelCall([], [])
    tokens = [*last.prompt_ids, *last.completion_ids, *tail_ids]
    masks = [IGNORE_INDEX] * len(tokens)
    logprobs = [MASKED_LOGPROB] * len(tokens)
    has_logprobs = bool(calls)
    for call in calls:
        start = len(call.prompt_ids)
        is_trained = call.is_trained or [True] * len(call.completion_ids)
        has_logprobs &= call.logprobs is not None
        for i, (token, trains) in enumerate(zip(call.completion_ids, is_trained, strict=True)):
            if trains:
                masks[start + i] = token
                logprobs[start + i] = call.logprobs[i] if call.logprobs is not None else 0.0
    return {
        "tokens": tokens,
        "masks": masks,
        "inference_logprobs": logprobs if has_logprobs else None,
    }


def rows_of_calls(calls: Iterable[ModelCall]) -> list[RowRecord]:
    """Put each call into the row that its prompt continues, or into a row of its own."""
    rows: list[RowRecord] = []
    for call in calls:
        for row in reversed(rows):
            last = row.calls[-1]
            known = len(last.prompt_ids) + len(last.completion_ids)
            if call.prompt_ids[:known] == last.prompt_ids + last.completion_ids:
                row.calls.append(call)
                break
        else:
            rows.append(RowRecord([call]))
    return rows


def group_of_records(
    records: Sequence[RolloutRecord], tokenizer: ChatTokenizer | None = None
) -> dict[str, Any]:
    """Return the group of rollouts, each of which has a score.

    Tokens come from the calls if every rollout is exact. Otherwise they are made from the text, and
    the group is marked `tokenized_from_text` and has no logprobs.

    Raises:
        ConfigError: a rollout has neither ids nor text, or its calls contradict each other.
    """
    rows: list[dict[str, Any]] = []
    traces: list[Any] = []
    for record in records:
        for i, row in enumerate(record.rows):
            rows.append({**_entries(record, row, tokenizer), **row.fields})
            traces.append(record.trace if i == 0 else None)
    names = dict.fromkeys(name for row in rows for name in row)
    group: dict[str, Any] = {
        name: [row[name] for row in rows] for name in names if all(name in row for row in rows)
    }
    if "inference_logprobs" in group and any(r is None for r in group["inference_logprobs"]):
        group.pop("inference_logprobs")
    if any(trace is not None for trace in traces):
        group[TRACES_KEY] = traces
    if "columns" in group:
        group["columns"], _ = merge_columns(group["columns"], len(rows))
    known = next((r.place.fields for r in records if r.place and r.place.fields), None)
    if known is not None:
        return _with_group_fields(group, known)
    if len(rows) != len(records):
        group["group_overrides"] = {"group_size": len(rows)}
    group["tokenized_from_text"] = not all(record.is_exact for record in records)
    return group


def _with_group_fields(group: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    group = {**group, **{name: value for name, value in known.items() if name not in group}}
    overrides = group.get("group_overrides")
    size = len(group["tokens"])
    if isinstance(overrides, dict) and overrides.get("group_size", size) != size:
        # Some of the rollouts of the group were not given.
        group["group_overrides"] = {**overrides, "group_size": size}
    return group


def _entries(
    record: RolloutRecord, row: RowRecord, tokenizer: ChatTokenizer | None
) -> dict[str, Any]:
    entries: dict[str, Any] = {"scores": record.score}
    if row.chat is not None:
        entries["messages"] = row.chat
    if "tokens" in row.fields:
        return entries
    if record.is_exact:
        _check_calls(record.where, row.calls)
        return {**entries, **_columns(row.calls, row.tail_ids)}
    return {**entries, **_tokenized(record.where, row, tokenizer)}


def _check_calls(where: str, calls: Sequence[ModelCall]) -> None:
    if not calls:
        return
    last = calls[-1].prompt_ids
    for i, call in enumerate(calls[:-1]):
        known = call.prompt_ids + call.completion_ids
        if last[: len(known)] != known:
            raise ConfigError(
                f"{where}: the ids of model call {i + 1} of a sequence are not at the start of the "
                "prompt of its last call; expected calls that continue each other"
            )


def _tokenized(where: str, row: RowRecord, tokenizer: ChatTokenizer | None) -> dict[str, Any]:
    if not row.chat:
        raise ConfigError(f"{where}: neither token ids nor messages; expected one of them")
    if tokenizer is None:
        raise ConfigError(
            f"{where}: not every model call has prompt_token_ids and completion_token_ids, so the "
            "text has to be tokenized; name the model's tokenizer with --tokenizer"
        )
    chat = [_for_template(where, message) for message in row.chat]
    made = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True)
    tokens, masks = made["tokens"], made["masks"]
    for i in row.untrained:
        start = len(render_chat_ids(tokenizer, chat[:i], add_generation_prompt=True))
        end = len(tokens) if i == len(chat) - 1 else len(render_chat_ids(tokenizer, chat[: i + 1]))
        masks[start:end] = [IGNORE_INDEX] * len(masks[start:end])
    return {"tokens": tokens, "masks": masks}


def _for_template(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: content as text, arguments as an object."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or "text" not in part for part in content):
            raise ConfigError(
                f"{where}: a message has an image or audio, which cannot be tokenized from text; "
                "expected text, or token ids for every model call"
            )
        content = "".join(str(part["text"]) for part in content)
    made = {**message, "content": content or ""}
    if made.get("role") in UNMASKED_ROLES and isinstance(made.get("tool_calls"), list):
        made["tool_calls"] = [_call_for_template(call) for call in made["tool_calls"]]
    return made


def _call_for_template(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = parsed_arguments(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def parsed_arguments(text: str) -> Any:
    """Return the arguments of a tool call; the text, which is the model's, if it is not JSON."""
    try:
        arguments = json.loads(text)
        json.dumps(arguments, allow_nan=False)  # Python also reads NaN, and 1e999 as infinity
    except (ValueError, RecursionError):
        return text
    return arguments


def own_record(ours: Mapping[str, Any], where: str) -> RolloutRecord:
    """Read what `ours_of` wrote: a rollout whose calls and trace are still missing.

    Raises:
        ConfigError: a part is missing or has another type.
    """
    rows = ours.get("rows")
    score = ours.get("score")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{where}: atropos.rows: expected a list of objects")
    if not is_finite(score):
        raise ConfigError(f"{where}: atropos.score: expected a finite number")
    made = []
    for row in rows:
        tail, fields = row.get("tail_token_ids"), row.get("fields")
        if not isinstance(tail, list) or not isinstance(fields, dict):
            raise ConfigError(
                f"{where}: atropos.rows: expected tail_token_ids, a list, and fields, an object"
            )
        if not isinstance(fields.get("columns", {}), dict):
            raise ConfigError(f"{where}: atropos.rows.fields.columns: expected an object")
        chat = row.get("messages")
        if chat is not None and not _is_chat(chat):
            raise ConfigError(f"{where}: atropos.rows.messages: expected a list of objects or null")
        if any(not isinstance(token, int) for token in tail):
            raise ConfigError(f"{where}: atropos.rows.tail_token_ids: expected integers")
        made.append(RowRecord(tail_ids=tail, chat=chat, fields=fields))
    fields, rollout = ours.get("group_fields"), ours.get("rollout")
    place = GroupPlace(
        str(ours.get("group")),
        rollout if isinstance(rollout, int) else 0,
        fields if isinstance(fields, dict) else {},
    )
    is_exact = ours.get("is_exact") is not False
    return RolloutRecord(where, made, place=place, score=float(score), is_exact=is_exact)


def ours_of(record: RolloutRecord, trace: AgentTrace, *, in_steps: bool) -> dict[str, Any]:
    """Return what neither format has a place for.

    Events that are steps are null; with `in_steps` they are read from the steps again.
    """
    place = record.place or GroupPlace("", 0)
    ours: dict[str, Any] = {
        "version": 1,
        "group": place.group_id,
        "rollout": place.rollout,
        "score": record.score,
        "is_exact": record.is_exact,
        "rows": [
            {"tail_token_ids": row.tail_ids, "messages": row.chat, "fields": row.fields}
            for row in record.rows
        ],
    }
    if place.fields:
        ours["group_fields"] = place.fields
    if record.trace is not None:
        events = trace.get("events", [])
        left = [None if in_steps and e["kind"] in STEP_KINDS else e for e in events]
        ours["trace"] = {**trace, "events": left}
    return ours


class TraceDocument(BaseModel):
    """A part of a document in a format of another program; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


def ours_in(extra: Any) -> Mapping[str, Any]:
    """Return the object under `OURS`; an empty one if a program left it out."""
    ours = extra.get(OURS) if isinstance(extra, Mapping) else None
    return ours if isinstance(ours, Mapping) else {}


def validated(model: type[Any], value: Any, where: str) -> Any:
    """Return a document as a `TraceDocument`.

    Raises:
        ConfigError: it is malformed; the message has the file, the step and the field.
    """
    try:
        return model.model_validate(value, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = _place(first["loc"])
        raise ConfigError(f"{where}, {place}: {first['msg']}") from error


def _place(loc: Sequence[int | str]) -> str:
    names = {"steps": "step", "turns": "turn"}
    head = ""
    if len(loc) > 1 and loc[0] in names and isinstance(loc[1], int):
        head, loc = f"{names[str(loc[0])]} {loc[1] + 1}", loc[2:]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    path = path if len(path) <= 200 else f"…{path[-200:]}"
    return f"{head}: {path}".strip(": ") if head and path else head or path or "the document"


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Whether a value from a file is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_call(where: str, call: ModelCall) -> None:
    """Check the ids and logprobs of a call from a file.

    Raises:
        ConfigError: counts differ, or a number is out of range.
    """
    for name, ids in (
        ("prompt_token_ids", call.prompt_ids),
        ("completion_token_ids", call.completion_ids),
    ):
        if any(not 0 <= token <= _MAX_TOKEN_ID for token in ids):
            raise ConfigError(f"{where}: {name}: expected ids from 0 to {_MAX_TOKEN_ID}")
    count = len(call.completion_ids)
    if call.logprobs is not None:
        if len(call.logprobs) != count:
            raise ConfigError(
                f"{where}: {len(call.logprobs)} logprobs for {count} completion_token_ids; "
                "expected one for each"
            )
        if any(not math.isfinite(logprob) or logprob > 0 for logprob in call.logprobs):
            raise ConfigError(f"{where}: logprobs: expected finite numbers of at most 0")
    if call.is_trained is not None and len(call.is_trained) != count:
        raise ConfigError(f"{where}: {len(call.is_trained)} mask entries for {count} ids")
