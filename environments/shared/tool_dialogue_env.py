"""`ToolDialogueEnv`: dialogues with tools that are played along a data set.

    rows ─► Dialogue ─► DialogueConversation ─► Rollout, its turns checked ─► subclass: rewards

A subclass says what the checked turns of a rollout are worth.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs.base import Item
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.multi_turn import Limits, Rollout
from atroposlib.envs.multi_turn_env import MultiTurnEnv
from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import read_records
from environments.shared.hub import hub_rows
from environments.shared.hub_items import HubItems
from environments.shared.thinking import DEEP_THINKING
from environments.shared.tool_dialogue_config import ToolDialogueConfig
from environments.shared.tool_dialogues import (
    Dialogue,
    DialogueConversation,
    DialogueRule,
    Helpers,
    TurnCheck,
    check_call_turn,
    check_text_turn,
    dialogue_of,
    has_leading_thought,
)

__all__ = ["MODEL", "ToolDialogueEnv", "conversation_of"]

MODEL = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
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


class ToolDialogueEnv(HubItems, MultiTurnEnv):
    """Write `turn_rewards`; the texts and the checks of turns may be overridden.

    Attributes:
        min_call_turns: dialogues with fewer call turns are left out.
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
            conversation: has the checks of the turns; a turn that a limit cut has none.
            num_turns: T, at least 1.
        """

    def get_system_prompt(self) -> str:
        """Return what stands before the list of tools."""
        return SYSTEM_PROMPT

    def get_few_shot_example(self, dialogue: Dialogue) -> str:
        """Return a dialogue as an example: its request and the calls to be written first."""
        calls = "\n".join(
            f"<tool_call>\n{call}\n</tool_call>" for call in dialogue.expected_calls_by_turn[0]
        )
        answer = calls or "I am sorry, none of the tools fits. What exactly do you need?"
        request = dialogue.messages[-1]["content"]
        thought = "<think>\nWhich tools help, and with which arguments?\n</think>"
        return f"An example, with tools of its own.\nUser: {request}\nYou: {thought}\n{answer}"

    def get_sequential_helper(self) -> str:
        """Return what stands behind a request that needs calls one after the other."""
        return SEQUENTIAL

    def get_narration_helper(self) -> str:
        """Return what stands behind answers of tools that are to be told to the user."""
        return NARRATION

    def get_continuation_helper(self) -> str:
        """Return what stands behind answers of tools after which more calls are needed."""
        return CONTINUATION

    def validate_tool_call_turn(self, text: str, expected: Sequence[str]) -> TurnCheck:
        """Check a whole turn that must call tools."""
        check = check_call_turn(visible_text(text), expected)
        return check if self._thought_is_fine(text) else check._replace(**NOTHING_RIGHT)

    def validate_summary_turn(self, text: str) -> TurnCheck:
        """Check a whole turn that must be a text."""
        check = check_text_turn(visible_text(text))
        return check if self._thought_is_fine(text) else check._replace(**NOTHING_RIGHT)

    def _thought_is_fine(self, text: str) -> bool:
        return not self.config.validate_think_blocks or has_leading_thought(text)

    async def setup(self) -> None:
        """Read the rows and make dialogues of those that are of the scenario."""
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
        """Return the first test dialogues."""
        return self.test[:MAX_EVAL_ITEMS]

    def start_conversation(self, item: Item) -> DialogueConversation:
        """Begin a dialogue, under an example where the settings ask for one."""
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
        """Play one dialogue and reward its turns."""
        rollout, backlog = await super().collect_trajectory(item)
        return self._rewarded(rollout), backlog

    async def play_for_evaluation(self, item: Item) -> Rollout:
        """Play one dialogue on any server and reward its turns."""
        return self._rewarded(await super().play_for_evaluation(item))

    def _rewarded(self, rollout: Rollout) -> Rollout:
        if rollout.rewards:
            rollout.rewards = self.turn_rewards(
                conversation_of(rollout), num_turns=len(rollout.rewards)
            )
        return rollout

    def limits(self) -> Limits:
        """Return the limits, with that of a turn."""
        return dataclasses.replace(super().limits(), max_turn_tokens=self.config.max_gen_per_turn)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        """Return the mean reward and the share of dialogues that were right to the end."""
        if not rollouts:
            return {}
        complete = [conversation_of(rollout).is_complete for rollout in rollouts]
        return {
            f"{area}/avg_reward": statistics.fmean(self.score_of(r) for r in rollouts),
            f"{area}/percent_correct": statistics.fmean(complete),
            **super().metrics_of(rollouts, area),
        }

    def score_of(self, rollout: Rollout) -> float:
        """Return what a whole dialogue is worth; the sum of its rewards unless overridden."""
        return sum(rollout.rewards)

    def check_gold_answer(self, item: Item) -> Sequence[str]:
        """Return the expected calls of each turn, or a text."""
        turns = []
        for calls in item.expected_calls_by_turn:
            blocks = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            turns.append(f"<think>Next.</think>\n{blocks or 'I am sorry; which one do you mean?'}")
        return turns


def conversation_of(rollout: Rollout) -> DialogueConversation:
    """Return what was played in a rollout of these environments."""
    conversation = rollout.conversation
    if not isinstance(conversation, DialogueConversation):
        raise TypeError(f"the rollout is of {conversation!r}; expected a DialogueConversation")
    return conversation


NOTHING_RIGHT = {"is_well_formed": False, "is_match": False}


def _request_of(row: dict[str, Any]) -> str:
    texts = (m["value"] for m in row["conversations"] if m["from"] == "human")
    return next(texts, "").strip()


def _num_characters(dialogue: Dialogue) -> int:
    return sum(len(message["content"]) for message in dialogue.messages)
