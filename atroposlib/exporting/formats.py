"""Records of SFT examples and preference pairs: one pure function per format.

A format receives a trajectory or a pair and returns one record, without the score. For a chat that
it does not support it raises `ChatError` with a reason, which the report counts.

Two recipes make records of decoded groups:

pick(group) ─► picks, a few per group          build(picks of many groups) ─► records
               └ numbers dropped, by reason                texts decoded in one batch
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.selection import (
    UNKNOWN_ENDS,
    GroupChooser,
    PairRule,
    SelectionRule,
    Span,
    TrajectoryReader,
    TruncationRule,
    UsableTrajectory,
    pair_prompt_length,
    pair_up,
    select,
    trained_spans,
)
from atroposlib.exporting.texts import Decoder, TextPair, split_texts
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.aio import CONTEXT_TOKENS

__all__ = [
    "DPO_FORMATS",
    "SFT_FORMATS",
    "Built",
    "ChatError",
    "DpoRecipe",
    "Recipe",
    "SftRecipe",
    "split_chats",
]

Chat = list[dict[str, Any]]

_OPENAI_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_ASSISTANT_ROLES = frozenset({"assistant", "agent"})


class ChatError(ValueError):
    """A format does not support a chat; the message is the reason for the report."""


def check_chat(messages: Any) -> Chat:
    """Return the messages of a chat that ends with an assistant message; raises `ChatError`."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("no messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError("a message without a role")
    if messages[-1]["role"] not in _ASSISTANT_ROLES:
        raise ChatError("the last message is not the assistant's")
    return messages


def plain_chat(messages: Any) -> Chat:
    """Return a chat without fields other than role, content and tool calls; raises `ChatError`."""
    chat = []
    for message in check_chat(messages):
        role = "assistant" if message["role"] in _ASSISTANT_ROLES else message["role"]
        content = message.get("content")
        plain: dict[str, Any] = {"role": role, "content": "" if content is None else content}
        for name in ("tool_calls", "tool_call_id", "name"):
            if message.get(name):
                plain[name] = message[name]
        chat.append(plain)
    return chat


def openai_chat(messages: Any) -> Chat:
    """Return a chat in the format of OpenAI's fine-tuning; raises `ChatError`."""
    chat = plain_chat(messages)
    for message in chat:
        if message["role"] not in _OPENAI_ROLES:
            raise ChatError("a role that OpenAI's format does not support")
        if message["role"] == "tool" and not message.get("tool_call_id"):
            raise ChatError("a tool message without tool_call_id")
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list):
                raise ChatError("tool calls that are not a list")
            message["tool_calls"] = [_openai_call(call) for call in message["tool_calls"]]
    return chat


def split_chats(chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[Chat, Chat, Chat]:
    """Return the common first messages of two chats, and the other messages of each.

    Raises:
        ChatError: one of the chats starts with the other, so nothing is left to prefer.
    """
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), None)
    if shared is None:
        raise ChatError("one chat of the pair starts with the other")
    return list(chosen[:shared]), list(chosen[shared:]), list(rejected[shared:])


def _openai_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError("a tool call without a function")
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": str(call.get("id") or f"call_{function['name']}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


class SftExample(NamedTuple):
    """The input of an SFT format."""

    side: UsableTrajectory
    text: TextPair
    """Empty unless the format needs text."""
    segments: Sequence[str]
    """The text of each span of `spans_of`; empty unless the format needs segments."""


class Preference(NamedTuple):
    """The input of a DPO format."""

    chosen: TextPair
    """Empty unless the format needs text; both sides have the same prompt."""
    rejected: TextPair
    chosen_messages: Any
    rejected_messages: Any


class OutputFormat(NamedTuple):
    """A format of the output."""

    build: Callable[[Any], dict[str, Any]]
    """Makes a record of an `SftExample` or a `Preference`."""
    about: str
    """Description for `--help`."""
    needs_text: bool = False
    needs_segments: bool = False
    needs_messages: bool = False
    has_score: bool = False
    """Whether records have the score without `--keep-scores`."""

    @property
    def needs_tokenizer(self) -> bool:
        return self.needs_text or self.needs_segments


def spans_of(side: UsableTrajectory) -> list[Span]:
    """Return trained and masked spans; without a mask every token after the prompt is trained."""
    if side.mask:
        return trained_spans(side.mask)
    end = side.prompt_length
    spans = [Span(0, end, False), Span(end, len(side.tokens), True)]
    return [span for span in spans if span.start < span.end]


def _messages(example: SftExample) -> dict[str, Any]:
    return {"messages": plain_chat(example.side.messages)}


def _chat_prompt_completion(example: SftExample) -> dict[str, Any]:
    chat = plain_chat(example.side.messages)
    return {"prompt": chat[:-1], "completion": chat[-1:]}


def _segments(example: SftExample) -> dict[str, Any]:
    pairs = zip(spans_of(example.side), example.segments, strict=True)
    return {"segments": [{"label": span.is_trained, "text": text} for span, text in pairs]}


def _token_ids(example: SftExample) -> dict[str, Any]:
    tokens, end = example.side.tokens, example.side.prompt_length
    return {
        "input_ids": list(tokens),
        "attention_mask": [1] * len(tokens),
        "labels": list(example.side.mask or [*[IGNORE_INDEX] * end, *tokens[end:]]),
    }


SFT_FORMATS: Mapping[str, OutputFormat] = {
    "atropos": OutputFormat(
        lambda example: {"prefix": example.text.prompt, "completion": example.text.completion},
        "prefix, completion, score",
        needs_text=True,
        has_score=True,
    ),
    "atropos-messages": OutputFormat(
        lambda example: {"messages": example.side.messages},
        "messages as the environment sent them, score",
        needs_messages=True,
        has_score=True,
    ),
    "trl": OutputFormat(
        lambda example: example.text._asdict(), "TRL: prompt, completion", needs_text=True
    ),
    "trl-messages": OutputFormat(_messages, "TRL: conversational messages", needs_messages=True),
    "trl-chat": OutputFormat(
        _chat_prompt_completion,
        "TRL: conversational prompt, completion",
        needs_messages=True,
    ),
    "axolotl": OutputFormat(
        _segments, "Axolotl, type input_output: trained and masked segments", needs_segments=True
    ),
    "axolotl-chat": OutputFormat(
        _messages, "Axolotl, type chat_template: messages", needs_messages=True
    ),
    "openai": OutputFormat(
        lambda example: {"messages": openai_chat(example.side.messages)},
        "OpenAI fine-tuning: messages",
        needs_messages=True,
    ),
    "tokens": OutputFormat(_token_ids, "TRL and Axolotl: input_ids, attention_mask, labels"),
}
"""The formats of `atropos-sft-gen`, by name."""


def _explicit(pair: Preference) -> dict[str, Any]:
    chosen, rejected = pair.chosen.completion, pair.rejected.completion
    return {"prompt": pair.chosen.prompt, "chosen": chosen, "rejected": rejected}


def _chat_explicit(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = _split(pair)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _chat_implicit(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = _split(pair)
    return {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]}


def _axolotl_chat(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = _split(pair)
    _check_single(chosen, rejected)
    return {"messages": prompt, "chosen": chosen[0], "rejected": rejected[0]}


def _pair_openai(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = split_chats(
        openai_chat(pair.chosen_messages), openai_chat(pair.rejected_messages)
    )
    _check_single(chosen, rejected)
    return {
        "input": {"messages": prompt},
        "preferred_output": chosen,
        "non_preferred_output": rejected,
    }


def _check_single(chosen: Any, rejected: Any) -> None:
    if len(chosen) > 1 or len(rejected) > 1:
        raise ChatError("the chats differ before their last message")


def _split(pair: Preference) -> tuple[Any, Any, Any]:
    return split_chats(plain_chat(pair.chosen_messages), plain_chat(pair.rejected_messages))


DPO_FORMATS: Mapping[str, OutputFormat] = {
    "atropos": OutputFormat(
        lambda pair: {
            "prefix": pair.chosen.prompt,
            "pos": pair.chosen.completion,
            "neg": pair.rejected.completion,
        },
        "prefix, pos, neg, score of pos",
        needs_text=True,
        has_score=True,
    ),
    "atropos-messages": OutputFormat(
        lambda pair: {"pos": pair.chosen_messages, "neg": pair.rejected_messages},
        "pos and neg as the environment sent them, score of pos",
        needs_messages=True,
        has_score=True,
    ),
    "trl": OutputFormat(_explicit, "TRL: prompt, chosen, rejected", needs_text=True),
    "trl-implicit": OutputFormat(
        lambda pair: {"chosen": "".join(pair.chosen), "rejected": "".join(pair.rejected)},
        "TRL: chosen and rejected with the prompt in both",
        needs_text=True,
    ),
    "trl-chat": OutputFormat(
        _chat_explicit, "TRL: conversational prompt, chosen, rejected", needs_messages=True
    ),
    "trl-chat-implicit": OutputFormat(
        _chat_implicit, "TRL: conversational chosen and rejected", needs_messages=True
    ),
    "axolotl": OutputFormat(
        _explicit, "Axolotl, type user_defined.default: prompt, chosen, rejected", needs_text=True
    ),
    "axolotl-chat": OutputFormat(
        _axolotl_chat,
        "Axolotl, type chat_template.default: messages, chosen, rejected",
        needs_messages=True,
    ),
    "openai": OutputFormat(_pair_openai, "OpenAI preference fine-tuning", needs_messages=True),
}
"""The formats of `atropos-dpo-gen`, by name."""


class Built(NamedTuple):
    """A record and its statistics for the report."""

    record: dict[str, Any] | None
    """None if the format does not support the chat."""
    score: float
    num_tokens: int
    """Completion tokens; of a pair, those of both sides."""
    is_truncated: bool
    where: str
    reason: str = ""
    """Reason why there is no record."""


class Picked(NamedTuple):
    """The trajectories or pairs selected from one group."""

    picks: list[Any]
    """Opaque; input of `build` of the same recipe."""
    dropped: Mapping[str, int]
    """Numbers of trajectories that were dropped, by reason."""


class Recipe(Protocol):
    """Selects trajectories or pairs, and makes records of them."""

    def pick(self, group: ExportGroup, where: str) -> Picked: ...

    def build(self, picks: Sequence[Any]) -> list[Built]: ...


class SftRecipe:
    """Makes records of the best trajectories."""

    def __init__(
        self,
        form: OutputFormat,
        rule: SelectionRule,
        decode: Decoder | None,
        truncation: TruncationRule = UNKNOWN_ENDS,
    ) -> None:
        self._form = form
        self._rule = rule
        self._decode = decode
        self._reader = TrajectoryReader(truncation, needs_messages=form.needs_messages)

    def pick(self, group: ExportGroup, where: str) -> Picked:
        sides, dropped = self._reader.read(group)
        selection = select(group.scores, self._rule, eligible=list(sides))
        picks = [(where, sides[i]) for i in selection.chosen]
        return Picked(picks, {**dropped, **selection.dropped})

    def build(self, picks: Sequence[Any]) -> list[Built]:
        parts = [(side.tokens, side.prompt_length) for _, side in picks]
        texts = _texts(self._form, self._decode, parts)
        built = []
        for (where, side), text, segments in zip(picks, texts, self._segments(picks), strict=True):
            place = f"{where}, trajectory {side.position + 1}"
            record, reason = _record_or_reason(self._form, SftExample(side, text, segments))
            num_tokens = len(side.tokens) - side.prompt_length
            built.append(Built(record, side.score, num_tokens, side.is_truncated, place, reason))
        return built

    def _segments(self, picks: Sequence[Any]) -> list[list[str]]:
        if not self._form.needs_segments:
            return [[] for _ in picks]
        assert self._decode is not None
        spans = [spans_of(side) for _, side in picks]
        parts = [
            (side.tokens[first : span.end], span.start - first)
            for (_, side), own in zip(picks, spans, strict=True)
            for span in own
            for first in [max(0, span.start - CONTEXT_TOKENS)]
        ]
        pairs = iter(split_texts(parts, self._decode))
        return [[next(pairs).completion for _ in own] for own in spans]


class DpoRecipe:
    """Makes records of preference pairs."""

    def __init__(
        self,
        form: OutputFormat,
        rule: PairRule,
        decode: Decoder | None,
        truncation: TruncationRule = UNKNOWN_ENDS,
        *,
        seed: int = 0,
    ) -> None:
        self._form = form
        self._rule = rule
        self._decode = decode
        self._seed = seed
        self._reader = TrajectoryReader(truncation, needs_messages=form.needs_messages)

    def pick(self, group: ExportGroup, where: str) -> Picked:
        sides, dropped = self._reader.read(group)
        positions = list(sides)
        if not positions:
            return Picked([], dropped)
        scores = [group.scores[i] for i in positions]
        pairing = pair_up(scores, self._rule, GroupChooser(self._seed, where))
        picks = [
            (where, sides[positions[pair.chosen]], sides[positions[pair.rejected]])
            for pair in pairing.pairs
        ]
        return Picked(picks, {**dropped, **pairing.dropped})

    def build(self, picks: Sequence[Any]) -> list[Built]:
        lengths = [
            pair_prompt_length(
                chosen.tokens,
                rejected.tokens,
                chosen_prompt=chosen.prompt_length,
                rejected_prompt=rejected.prompt_length,
            )
            for _, chosen, rejected in picks
        ]
        parts = [
            (side.tokens, length)
            for (_, *pair), length in zip(picks, lengths, strict=True)
            for side in pair
        ]
        texts = _texts(self._form, self._decode, parts)
        built = []
        for i, (where, chosen, rejected) in enumerate(picks):
            best, worst = texts[2 * i : 2 * i + 2]
            pair = Preference(best, worst, chosen.messages, rejected.messages)
            place = f"{where}, trajectories {chosen.position + 1} and {rejected.position + 1}"
            record, reason = _record_or_reason(self._form, pair)
            num_tokens = len(chosen.tokens) + len(rejected.tokens) - 2 * lengths[i]
            is_truncated = chosen.is_truncated or rejected.is_truncated
            built.append(Built(record, chosen.score, num_tokens, is_truncated, place, reason))
        return built


def _texts(
    form: OutputFormat, decode: Decoder | None, parts: Sequence[tuple[Sequence[int], int]]
) -> list[TextPair]:
    if not form.needs_text:
        return [TextPair("", "")] * len(parts)
    assert decode is not None
    return split_texts(parts, decode)


def _record_or_reason(form: OutputFormat, source: Any) -> tuple[dict[str, Any] | None, str]:
    try:
        return form.build(source), ""
    except ChatError as error:
        return None, str(error)
