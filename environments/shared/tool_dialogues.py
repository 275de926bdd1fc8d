"""Dialogues with tools, from the rows of a data set to turns with expected calls. Pure.

    row: system, human, gpt (call), tool, gpt (text), human, ...
      └─► Dialogue: opening messages, expected calls by turn, what is read between the turns

The tools are not run: what they answered stands in the data, and is shown as long as the calls are
the expected ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn, visible_text
from environments.shared.tool_calls import calls_match, read_calls

__all__ = [
    "Dialogue",
    "DialogueConversation",
    "DialogueRule",
    "Helpers",
    "Scenario",
    "TurnCheck",
    "check_call_turn",
    "check_text_turn",
    "dialogue_of",
    "has_leading_thought",
]

Scenario = Literal["single", "multistep", "multiturn", "relevance", "all"]
"""Which dialogues are taken: one call turn; calls one after the other; a call for each request;
requests no tool helps with; all that have a call."""

PATTERNS: Mapping[str, str] = {
    "single": r"H[^C]*C[^C]*",
    "multistep": r"H(?:CT)+CT?N?",
    "multiturn": r"(?:HCTN)+HC.*",
    "relevance": r"HN.*",
    "all": r"H.*C.*",
}
"""H human, C reply with calls, N reply without, T answers of tools."""

TAG = re.compile(r"</?tool_(?:call|response)>")


class Dialogue(NamedTuple):
    """One item."""

    messages: tuple[ChatMessage, ...]
    """What the policy reads first."""
    expected_calls_by_turn: tuple[tuple[str, ...], ...]
    """[T] calls as canonical JSON; none where the turn is to be a text."""
    inter_turns: tuple[tuple[ChatMessage, ...], ...]
    """[T - 1] what is read between two turns."""

    @property
    def num_call_turns(self) -> int:
        """Turns that are to call tools."""
        return sum(bool(calls) for calls in self.expected_calls_by_turn)


class Helpers(NamedTuple):
    """Texts put behind what the policy reads, by what its next turn is to be; may be empty."""

    sequential: str = ""
    """Behind a request that needs calls one after the other."""
    narration: str = ""
    """Behind the answers of tools that are to be told to the user."""
    continuation: str = ""
    """Behind the answers of tools after which more calls are needed."""
    relevance: str = ""
    """Behind a request no tool helps with."""


@dataclass(frozen=True, kw_only=True)
class DialogueRule:
    """What is taken from a row."""

    scenario: Scenario = "multiturn"
    max_call_turns: int = 2
    """Call turns of the policy; the dialogue is cut behind them."""
    generate_all: bool = False
    """Whether the policy also writes the texts between calls; else those of the data are shown."""
    system_prompt: str = ""
    """Comes before the system text of the row, which lists the tools."""
    helpers: Helpers = field(default_factory=Helpers)


class TurnCheck(NamedTuple):
    """What is known of one turn."""

    is_call_turn: bool
    """Whether calls were expected."""
    is_well_formed: bool
    """Whether it is what its kind must look like."""
    is_match: bool
    """Whether it is right as well."""


CheckTurn = Callable[[str, Sequence[str]], TurnCheck]


class _Message(NamedTuple):
    kind: str
    text: str
    calls: tuple[str, ...] = ()


def dialogue_of(row: Mapping[str, Any], rule: DialogueRule) -> Dialogue | None:
    """Return what the policy plays of a row; None when it is of another scenario."""
    messages = [_as_message(m) for m in row["conversations"] if m["from"] != "system"]
    systems = [m["value"] for m in row["conversations"] if m["from"] == "system"]
    kinds = re.sub("T+", "T", "".join(message.kind for message in messages))
    if not re.fullmatch(PATTERNS[rule.scenario], kinds):
        return None
    chats: list[list[ChatMessage]] = [
        [{"role": "system", "content": "\n\n".join([rule.system_prompt, *systems[:1]]).strip()}]
    ]
    expected: list[tuple[str, ...]] = []
    for message in _cut(messages, rule):
        is_turn = message.kind == "C" or rule.generate_all or rule.scenario == "relevance"
        if message.kind in "CN" and is_turn:
            chats[-1] = _with_helper(chats[-1], message, rule, is_first=not expected)
            expected.append(message.calls)
            chats.append([])
        else:
            _add(chats[-1], "assistant" if message.kind == "N" else "user", message.text)
    inter_turns = tuple(tuple(chat) for chat in chats[1:-1])
    if not expected or not all(inter_turns):
        return None
    return Dialogue(tuple(chats[0]), tuple(expected), inter_turns)


def check_call_turn(answer: str, expected: Sequence[str]) -> TurnCheck:
    """Check a turn, without its thinking, that must be calls and nothing else."""
    read = read_calls(answer, allow_literals=True)
    is_well_formed = bool(
        read.calls
        and not read.num_broken
        and not read.rest.strip()
        and all(isinstance(call.get("name"), str) for call in read.calls)
    )
    wanted = [json.loads(call) for call in expected]
    is_match = is_well_formed and calls_match(wanted, read.calls, coerce=True)
    return TurnCheck(True, is_well_formed, is_match)


def check_text_turn(answer: str) -> TurnCheck:
    """Check a turn, without its thinking, that must be a text without calls."""
    is_text = bool(answer.strip()) and not TAG.search(answer)
    return TurnCheck(False, is_text, is_text)


def has_leading_thought(text: str) -> bool:
    """Say whether a turn begins with its one thought; the template may have opened it."""
    before, closing, after = text.partition("</think>")
    thought = before.lstrip().removeprefix("<think>")
    return bool(closing) and "<think>" not in thought + after and "</think>" not in after


class DialogueConversation(Conversation):
    """The data's side of a dialogue; it ends at the first turn that is not the expected one.

    Attributes:
        checks: [T] of the turns so far.
        latest: the latest turn without its thinking.
    """

    def __init__(self, dialogue: Dialogue, check_turn: CheckTurn) -> None:
        self.dialogue = dialogue
        self.checks: list[TurnCheck] = []
        self.latest = ""
        self._check_turn = check_turn

    @property
    def is_complete(self) -> bool:
        """Whether every turn was played and right."""
        is_whole = len(self.checks) == len(self.dialogue.expected_calls_by_turn)
        return is_whole and all(check.is_match for check in self.checks)

    def opening(self) -> Sequence[ChatMessage]:
        """Return the tools and the first request."""
        return self.dialogue.messages

    async def reply(self, turn: Turn) -> Reply:
        """Show what comes next in the data."""
        check = self._check_turn(turn.text, self.dialogue.expected_calls_by_turn[turn.index])
        self.checks.append(check)
        self.latest = turn.answer
        if not check.is_match or turn.index == len(self.dialogue.inter_turns):
            return Reply(is_done=True)
        return Reply(self.dialogue.inter_turns[turn.index])


def _as_message(message: Mapping[str, str]) -> _Message:
    text = message["value"]
    if message["from"] == "gpt":
        answer = visible_text(text)
        calls = read_calls(answer, allow_literals=True).calls
        canonical = tuple(json.dumps(call, sort_keys=True, default=str) for call in calls)
        return _Message("C" if calls else "N", answer, canonical)
    if message["from"] == "tool" and "<tool_response>" not in text:
        text = f"<tool_response>\n{text}\n</tool_response>"
    return _Message("T" if message["from"] == "tool" else "H", text)


def _cut(messages: Sequence[_Message], rule: DialogueRule) -> Sequence[_Message]:
    """Return the messages up to the last turn of the policy."""
    num_calls = 0
    end = 0
    for position, message in enumerate(messages):
        if num_calls == rule.max_call_turns and message.kind in "HC":
            break
        num_calls += message.kind == "C"
        is_text_turn = rule.generate_all or rule.scenario == "relevance"
        if message.kind == "C" or (message.kind == "N" and is_text_turn):
            end = position + 1
        if rule.scenario == "relevance" and end:
            break
    return messages[:end]


def _add(chat: list[ChatMessage], role: str, text: str) -> None:
    """Add a message; one of the same role as the last becomes part of that."""
    if chat and chat[-1]["role"] == role:
        chat[-1] = {"role": role, "content": f"{chat[-1]['content']}\n{text}"}
    else:
        chat.append({"role": role, "content": text})


def _with_helper(
    chat: list[ChatMessage], turn: _Message, rule: DialogueRule, *, is_first: bool
) -> list[ChatMessage]:
    if not chat or chat[-1]["role"] != "user":
        return chat
    helpers = rule.helpers
    after_tool = "<tool_response>" in chat[-1]["content"]
    if is_first:
        by_scenario = {"multistep": helpers.sequential, "relevance": helpers.relevance}
        text = by_scenario.get(rule.scenario, "")
    elif after_tool:
        text = helpers.continuation if turn.kind == "C" else helpers.narration
    else:
        text = ""
    if not text:
        return chat
    return [*chat[:-1], {"role": "user", "content": f"{chat[-1]['content']}\n\n{text}"}]
