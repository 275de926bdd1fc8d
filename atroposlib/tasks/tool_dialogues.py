"""Recorded dialogues with tools: settings, scenarios, checks of turns, and the environment.

row ─► Dialogue (expected calls of each turn) ─► DialogueConversation ─► checked turns ─► scores
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import statistics
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from atroposlib.envs.base import Item
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn, visible_text
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig, hub_rows
from atroposlib.envs.multi_turn_env import Limits, MultiTurnEnv, MultiTurnEnvConfig, Rollout
from atroposlib.errors import ConfigError
from atroposlib.tasks.single_turn_parts import DEEP_THINKING
from atroposlib.tasks.tool_calls import calls_match, read_calls
from atroposlib.utils.length_penalty import length_factor
from atroposlib.utils.local_records import read_records

__all__ = [
    "Dialogue",
    "DialogueConversation",
    "DialogueRule",
    "Helpers",
    "Scenario",
    "ToolDialogueConfig",
    "ToolDialogueEnv",
    "TurnCheck",
    "check_call_turn",
    "check_text_turn",
    "conversation_of",
    "dialogue_of",
    "has_leading_thought",
    "shortened_scores",
]

FREE_LENGTH_FRACTION = 0.5
FULL_SCORE = 0.99
"""Groups whose scores are all above are reduced by length."""

Scenario = Literal["single", "multistep", "multiturn", "relevance", "all"]
"""Kind of the dialogues: one call turn; sequential calls; a call for each of several requests;
requests that no tool can answer; all dialogues with a call."""


class ToolDialogueConfig(HubItemsConfig, MultiTurnEnvConfig):
    """Settings of the dialogues and of the format of turns."""

    max_tool_call_turns_cap: int = Field(
        2, ge=1, description="Maximum number of call turns of one dialogue."
    )
    validate_think_blocks: bool = Field(
        False, description="Whether a turn is wrong unless it begins with its only thinking block."
    )
    generate_all_gpt_turns: bool = Field(
        False,
        description="Whether the policy also writes the texts between calls, instead of reading "
        "those of the data.",
    )
    max_gen_per_turn: int = Field(1024, ge=1, description="Maximum tokens of one turn.")
    wrong_call_penalty: float = Field(-0.2, le=0, description="Penalty for a wrong turn.")
    skip_completed: bool = Field(
        True, description="Whether dialogues of completed_dataset_id are left out."
    )
    completed_dataset_id: str | None = Field(
        None,
        description="File, or data set of the hub, of completed dialogues, with the column "
        "conversations.",
    )
    scenario_category: Scenario = Field(
        "multiturn",
        description="Kind of the dialogues: one call turn; calls that depend on each other; a call "
        "for each of several requests; requests that no tool can answer; all with a call.",
    )
    add_dynamic_few_shot: bool = Field(
        True, description="Whether the prompt shows another training dialogue as an example."
    )
    temperature: float = Field(0.8, ge=0, description="Sampling temperature of rollouts.")


def shortened_scores(
    scores: Sequence[float], lengths: Sequence[int], *, max_tokens: int
) -> list[float]:
    """Return the scores of a group; if all are full, subtract a linear length penalty.

    Args:
        scores: [G].
        lengths: [G] tokens, prompt included.
        max_tokens: length at which the penalty is 1; it begins at half of it.
    """
    if min(scores) <= FULL_SCORE:
        return list(scores)
    factors = (
        length_factor(length, max_tokens=max_tokens, free_fraction=FREE_LENGTH_FRACTION)
        for length in lengths
    )
    return [score - (1.0 - factor) for score, factor in zip(scores, factors, strict=True)]


PATTERNS: Mapping[str, str] = {
    "single": r"H[^C]*C[^C]*",
    "multistep": r"H(?:CT)+CT?N?",
    "multiturn": r"(?:HCTN)+HC.*",
    "relevance": r"HN.*",
    "all": r"H.*C.*",
}
"""Sequences of messages: H human, C reply with calls, N reply without, T tool results."""

TAG = re.compile(r"</?tool_(?:call|response)>")


class Dialogue(NamedTuple):
    """One item."""

    messages: tuple[ChatMessage, ...]
    """Opening messages."""
    expected_calls_by_turn: tuple[tuple[str, ...], ...]
    """[T] expected calls as canonical JSON; empty for a text turn."""
    inter_turns: tuple[tuple[ChatMessage, ...], ...]
    """[T - 1] messages between two turns of the policy."""

    @property
    def num_call_turns(self) -> int:
        return sum(bool(calls) for calls in self.expected_calls_by_turn)


class Helpers(NamedTuple):
    """Instructions appended to the last message before a turn; may be empty."""

    sequential: str = ""
    """For requests that need sequential calls."""
    narration: str = ""
    """For tool results that the policy summarizes."""
    continuation: str = ""
    """For tool results after which more calls are needed."""
    relevance: str = ""
    """For requests that no tool can answer."""


@dataclass(frozen=True, kw_only=True)
class DialogueRule:
    """Conversion of rows to dialogues."""

    scenario: Scenario = "multiturn"
    max_call_turns: int = 2
    """Number of call turns after which a dialogue is cut."""
    generate_all: bool = False
    """Whether the policy also writes the texts between calls, instead of reading those of the
    data."""
    system_prompt: str = ""
    """Text before the system message of the row, which lists the tools."""
    helpers: Helpers = field(default_factory=Helpers)


class TurnCheck(NamedTuple):
    """The check of one turn."""

    is_call_turn: bool
    """Whether calls were expected."""
    is_well_formed: bool
    """Whether the turn has the format of its kind."""
    is_match: bool
    """Whether the turn is also right."""


CheckTurn = Callable[[str, Sequence[str]], TurnCheck]


class _Message(NamedTuple):
    kind: str
    text: str
    calls: tuple[str, ...] = ()


def dialogue_of(row: Mapping[str, Any], rule: DialogueRule) -> Dialogue | None:
    """Return the dialogue of a row; None if it is of another scenario.

    Raises:
        ConfigError: the row does not hold messages.
    """
    recorded = _messages_of(row)
    messages = [_as_message(m) for m in recorded if m["from"] != "system"]
    systems = [m["value"] for m in recorded if m["from"] == "system"]
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
    """Check a turn, without its thinking, that must consist of calls only."""
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
    """Check a turn, without its thinking, that must be text without calls."""
    is_text = bool(answer.strip()) and not TAG.search(answer)
    return TurnCheck(False, is_text, is_text)


def has_leading_thought(text: str) -> bool:
    """Whether a turn begins with its only thinking block; the template may have opened it."""
    before, closing, after = text.partition("</think>")
    thought = before.lstrip().removeprefix("<think>")
    return bool(closing) and "<think>" not in thought + after and "</think>" not in after


class DialogueConversation(Conversation):
    """A recorded dialogue as a conversation; it ends at the first wrong turn.

    Attributes:
        checks: checks of the turns so far.
        latest: latest turn without its thinking.
    """

    def __init__(self, dialogue: Dialogue, check_turn: CheckTurn) -> None:
        self.dialogue = dialogue
        self.checks: list[TurnCheck] = []
        self.latest = ""
        self._check_turn = check_turn

    @property
    def is_complete(self) -> bool:
        is_whole = len(self.checks) == len(self.dialogue.expected_calls_by_turn)
        return is_whole and all(check.is_match for check in self.checks)

    def opening(self) -> Sequence[ChatMessage]:
        return self.dialogue.messages

    async def reply(self, turn: Turn) -> Reply:
        check = self._check_turn(turn.text, self.dialogue.expected_calls_by_turn[turn.index])
        self.checks.append(check)
        self.latest = turn.answer
        if not check.is_match or turn.index == len(self.dialogue.inter_turns):
            return Reply(is_done=True)
        return Reply(self.dialogue.inter_turns[turn.index])


def _messages_of(row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    messages = row["conversations"]
    is_list = isinstance(messages, list | tuple) and all(isinstance(m, Mapping) for m in messages)
    if not is_list or not all(
        isinstance(m.get(key), str) for m in messages for key in ("from", "value")
    ):
        raise ConfigError(
            'conversations: expected a list of {"from": "human", "value": "..."}, got '
            f"{messages!r:.200}"
        )
    return list(messages)


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


MAX_EVAL_ITEMS = 128

SYSTEM_PROMPT = (
    f"{DEEP_THINKING}\n\nBegin every reply with one thought in those tags. Where tools are needed, "
    "what follows it is one <tool_call> block per call and nothing else. Where they are not, tell "
    "the user what you found, without a block. What the tools answer is shown to you between "
    "<tool_response> tags; never write such tags yourself."
)
SEQUENTIAL = (
    "Several calls are needed, and later ones depend on what earlier ones give: make the calls "
    "that can be made now and wait for their answers before you make the next."
)
NARRATION = "Tell me what these answers mean for my request, in a sentence or two, without a call."
CONTINUATION = "Go on with the call that comes next."
RELEVANCE = (
    "If no tool fits, or something needed is missing, make no call: say that you are sorry, and "
    "ask for what you need."
)


class ToolDialogueEnv(DatasetItems, MultiTurnEnv):
    """Base class of the dialogue environments; write `turn_rewards`.

    Prompts and checks of turns may be overridden.

    Attributes:
        min_call_turns: minimum number of call turns of a dialogue.
        examples: dialogues that are shown as examples.
    """

    columns: ClassVar[Sequence[str]] = ("conversations",)
    env_config_cls = ToolDialogueConfig
    config: ToolDialogueConfig  # type: ignore[assignment]
    min_call_turns = 0

    @abstractmethod
    def turn_rewards(self, conversation: DialogueConversation, *, num_turns: int) -> list[float]:
        """Return [T] rewards of the turns of a rollout.

        Args:
            conversation: the conversation; a turn that a limit cut has no check.
            num_turns: T, at least 1.
        """

    def get_system_prompt(self) -> str:
        """Return the text before the list of tools."""
        return SYSTEM_PROMPT

    def get_few_shot_example(self, dialogue: Dialogue) -> str:
        """Return an example: the request of a dialogue and the calls of its first turn."""
        calls = "\n".join(
            f"<tool_call>\n{call}\n</tool_call>" for call in dialogue.expected_calls_by_turn[0]
        )
        answer = calls or "I am sorry, none of the tools fits. What exactly do you need?"
        request = dialogue.messages[-1]["content"]
        thought = "<think>\nWhich tools help, and with which arguments?\n</think>"
        return f"An example, with tools of its own.\nUser: {request}\nYou: {thought}\n{answer}"

    def get_sequential_helper(self) -> str:
        """Return the instruction for requests that need sequential calls."""
        return SEQUENTIAL

    def get_narration_helper(self) -> str:
        """Return the instruction for tool results that the policy summarizes."""
        return NARRATION

    def get_continuation_helper(self) -> str:
        """Return the instruction for tool results after which more calls are needed."""
        return CONTINUATION

    def validate_tool_call_turn(self, text: str, expected: Sequence[str]) -> TurnCheck:
        """Check a whole turn, thinking included, that must call tools."""
        return self._with_thought(text, check_call_turn(visible_text(text), expected))

    def validate_summary_turn(self, text: str) -> TurnCheck:
        """Check a whole turn, thinking included, that must be text."""
        return self._with_thought(text, check_text_turn(visible_text(text)))

    def _with_thought(self, text: str, check: TurnCheck) -> TurnCheck:
        if not self.config.validate_think_blocks or has_leading_thought(text):
            return check
        return check._replace(is_well_formed=False, is_match=False)

    async def setup(self) -> None:
        await super().setup()
        await asyncio.to_thread(self._make_dialogues)

    def _make_dialogues(self) -> None:
        rule = DialogueRule(
            scenario=self.config.scenario_category,
            max_call_turns=self.config.max_tool_call_turns_cap,
            generate_all=self.config.generate_all_gpt_turns,
            system_prompt=self.get_system_prompt(),
            helpers=Helpers(
                sequential=self.get_sequential_helper(),
                narration=self.get_narration_helper(),
                continuation=self.get_continuation_helper(),
                relevance=RELEVANCE,
            ),
        )
        done = self._completed_requests()
        for name in ("train", "test"):
            rows = [row for row in getattr(self, name) if _request_of(row) not in done]
            made = (dialogue_of(row, rule) for row in rows)
            setattr(self, name, [d for d in made if d is not None and self._is_playable(d)])
        if not self.train:
            raise ConfigError(
                f"no training row is a dialogue of scenario {self.config.scenario_category!r}; "
                "--env.scenario_category all takes every row with a call"
            )
        dialogues: list[Any] = self.train
        self.examples: list[Dialogue] = sorted(dialogues, key=_num_characters)[:2]

    def _is_playable(self, dialogue: Dialogue) -> bool:
        has_turns = len(dialogue.expected_calls_by_turn) <= self.config.max_turns
        return has_turns and dialogue.num_call_turns >= self.min_call_turns

    def _completed_requests(self) -> set[str]:
        source = self.config.completed_dataset_id
        if source is None or not self.config.skip_completed:
            return set()
        path = Path(source)
        rows = (
            read_records(path, self.columns) if path.exists() else hub_rows(source, split="train")
        )
        return {_request_of(row) for row in rows}

    def eval_items(self) -> Sequence[Any]:
        return self.test[:MAX_EVAL_ITEMS]

    def start_conversation(self, item: Item) -> DialogueConversation:
        messages = item.messages
        others = [e for e in self.examples if e.messages[1:] != messages[1:]]
        if self.config.add_dynamic_few_shot and others:
            system = f"{messages[0]['content']}\n\n{self.get_few_shot_example(others[0])}"
            messages = ({"role": "system", "content": system}, *messages[1:])
        return DialogueConversation(item._replace(messages=messages), self._check_turn)

    def _check_turn(self, text: str, expected: Sequence[str]) -> TurnCheck:
        if expected:
            return self.validate_tool_call_turn(text, expected)
        return self.validate_summary_turn(text)

    async def collect_trajectory(self, item: Item) -> tuple[Rollout, list[Item]]:
        rollout, backlog = await super().collect_trajectory(item)
        return self._rewarded(rollout), backlog

    async def play_for_evaluation(self, item: Item) -> Rollout:
        return self._rewarded(await super().play_for_evaluation(item))

    def _rewarded(self, rollout: Rollout) -> Rollout:
        if rollout.rewards:
            rollout.rewards = self.turn_rewards(
                conversation_of(rollout), num_turns=len(rollout.rewards)
            )
        return rollout

    def limits(self) -> Limits:
        return dataclasses.replace(super().limits(), max_turn_tokens=self.config.max_gen_per_turn)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        if not rollouts:
            return {}
        complete = [conversation_of(rollout).is_complete for rollout in rollouts]
        return {
            f"{area}/avg_reward": statistics.fmean(self.score_of(r) for r in rollouts),
            f"{area}/percent_correct": statistics.fmean(complete),
            **super().metrics_of(rollouts, area),
        }

    def score_of(self, rollout: Rollout) -> float:
        """Return the score of a dialogue, by default the sum of its rewards."""
        return sum(rollout.rewards)

    def is_correct(self, rollout: Rollout) -> bool:
        """Whether all turns are right; a part of them may have a positive score."""
        return conversation_of(rollout).is_complete

    def check_gold_answer(self, item: Item) -> Sequence[str]:
        turns = []
        for calls in item.expected_calls_by_turn:
            blocks = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            turns.append(f"<think>Next.</think>\n{blocks or 'I am sorry; which one do you mean?'}")
        return turns


def conversation_of(rollout: Rollout) -> DialogueConversation:
    """Return the conversation of a rollout of these environments."""
    conversation = rollout.conversation
    if not isinstance(conversation, DialogueConversation):
        raise TypeError(f"the rollout is of {conversation!r}; expected a DialogueConversation")
    return conversation


def _request_of(row: dict[str, Any]) -> str:
    texts = (m["value"] for m in _messages_of(row) if m["from"] == "human")
    return next(texts, "").strip()


def _num_characters(dialogue: Dialogue) -> int:
    return sum(len(message["content"]) for message in dialogue.messages)
