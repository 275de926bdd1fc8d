"""BLEUBERI: follow instructions, rewarded by BLEU against reference answers.

    instruction -> [system, user] -> G completions -> answer in tags -> BLEU

BLEU is computed here. Instructions come from the Tulu 3 mixture on the hub or from local files:

    python environments/community/bleuberi/bleuberi_env.py process --env.dataset_path \
        environments/community/bleuberi/sample --env.total_steps 4
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["BLEUBERIConfig", "BLEUBERIEnv", "bleu", "instruction_of", "words_of"]

CARD = EnvironmentCard(
    task="follow instructions",
    turns="1",
    reward="BLEU against reference answers, 0 to 1",
    data="Tulu 3 mixture from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/community/bleuberi/sample --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
MAX_ORDER = 4
MAX_WORDS = 4_000
"""Words of a text that are compared; the rest is left out."""
WORD = re.compile(r"\w+|[^\w\s]")
REASONING_PROMPT = (
    "Follow the instruction. Reason first between <think> and </think>, then write your whole "
    "answer between <answer> and </answer>, once."
)
DIRECT_PROMPT = "Follow the instruction. Write your whole answer between <answer> and </answer>."
Instruction = Mapping[str, Any]
"""One item: `messages` up to the last one of the user, and `references` by name of the model."""


class BLEUBERIConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the instructions and the references."""

    ref_models: list[str] = Field(
        ["gold"],
        min_length=1,
        description="References that count: gold is the reply of the data, other names are those "
        "of the column `references`.",
    )
    reward_funcs: list[Literal["bleu"]] = Field(
        ["bleu"], min_length=1, description="Rewards; bleu is the only one."
    )
    selection_mode: Literal["random", "easy", "medium", "hard"] = Field(
        "random",
        description="Training instructions if max_train_examples is less than their number: "
        "random ones, or those with the shortest, middle or longest gold reply.",
    )
    max_train_examples: int | None = Field(
        None, ge=1, description="Maximum number of training instructions; None: all."
    )
    max_test_examples: int | None = Field(
        None, ge=1, description="Maximum number of test instructions; None: all."
    )
    reasoning: bool = Field(True, description="Whether the policy is asked to reason first.")
    seed: int = Field(42, description="Seed of the selection.")


def words_of(text: str) -> list[str]:
    """Return the words and punctuation marks of a text in lower case, `MAX_WORDS` at most."""
    found = WORD.finditer(text.lower())
    return [match[0] for match, _ in zip(found, range(MAX_WORDS), strict=False)]


def bleu(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the BLEU score of one text, 0 to 1, with n-grams up to 4.

    Orders above the length of the shortest reference are left out. An order above 1 without a match
    counts half a match, also if the candidate is too short for it. A candidate without a common
    word scores 0.

    Args:
        candidate: [C] words.
        references: words of each reference, at least one.

    Source: Papineni et al. 2002, "BLEU: a Method for Automatic Evaluation of Machine Translation",
    ACL, section 2. Differs in scoring single texts, for which it needs the smoothing.
    """
    lengths = [len(reference) for reference in references]
    if not candidate or not min(lengths):
        return 0.0
    order = min(MAX_ORDER, min(lengths))
    logarithms = []
    for n in range(1, order + 1):
        own = _ngrams(candidate, n)
        most: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            most |= _ngrams(reference, n)
        matches: float = (own & most).total()
        if n == 1 and not matches:
            return 0.0
        total = max(1, own.total())
        logarithms.append(math.log((matches or 0.5) / total))
    closest = min(lengths, key=lambda length: (abs(length - len(candidate)), length))
    brevity = min(0.0, 1 - closest / len(candidate))
    return math.exp(brevity + sum(logarithms) / order)


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def instruction_of(row: Mapping[str, Any]) -> Instruction | None:
    """Return the instruction of a row; None without a user's message and a reply to it."""
    chat = [m for m in row["messages"] or () if isinstance(m, Mapping) and m.get("content")]
    messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in chat]
    if len(messages) < 2 or [m["role"] for m in messages[-2:]] != ["user", "assistant"]:
        return None
    others = row.get("references")
    named = {str(k): str(v) for k, v in others.items()} if isinstance(others, Mapping) else {}
    return {"messages": messages[:-1], "references": {**named, "gold": messages[-1]["content"]}}


class BLEUBERIEnv(DatasetItems, SingleTurnEnv):
    """Instructions with reference answers; an item is an `Instruction`."""

    name = "bleuberi"
    hub_dataset = "allenai/tulu-3-sft-mixture"
    env_config_cls = BLEUBERIConfig
    config: BLEUBERIConfig
    columns = ("messages",)
    optional_columns = ("references",)
    scores_thinking = True
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "wandb_name": "bleuberi",
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def _read(self) -> tuple[list[Instruction], list[Instruction]]:
        train, test = (self._wanted(rows) for rows in super()._read())
        if not train:
            names = ", ".join(self.config.ref_models)
            raise ConfigError(f"no training row has a reply to a user and the references {names}")
        most = self.config.max_train_examples
        return self._selected(train, most), test[: self.config.max_test_examples]

    def _wanted(self, rows: Sequence[Mapping[str, Any]]) -> list[Instruction]:
        found = [item for row in rows if (item := instruction_of(row))]
        names = self.config.ref_models
        return [i for i in found if all(words_of(i["references"].get(n, "")) for n in names)]

    def _selected(self, items: list[Instruction], most: int | None) -> list[Instruction]:
        if most is None or most >= len(items):
            return items
        mode, source = self.config.selection_mode, random.Random(self.config.seed)
        if mode == "random":
            return source.sample(items, most)
        ordered = sorted(items, key=lambda item: len(item["references"]["gold"]))
        spare = len(items) - most
        start = {"easy": 0, "medium": spare // 2, "hard": spare}[mode]
        chosen = ordered[start : start + most]
        source.shuffle(chosen)
        return chosen

    def prompt(self, item: Instruction) -> list[dict[str, str]]:
        system = REASONING_PROMPT if self.config.reasoning else DIRECT_PROMPT
        first, *rest = item["messages"]
        if first["role"] == "system":  # many chat templates take only one
            system = f"{first['content']}\n\n{system}"
        else:
            rest = [first, *rest]
        return [{"role": "system", "content": system}, *rest]

    async def score(self, item: Instruction, answer: str) -> float:
        """Return BLEU of the text in the tags after the thinking; 0.0 without one pair of tags."""
        text = only_tagged(visible_text(answer), "answer")
        if not text:
            return 0.0
        references = [words_of(item["references"][name]) for name in self.config.ref_models]
        return await self.score_pool.run(bleu, words_of(text), references, default=0.0)

    def check_gold_answer(self, item: Instruction) -> str:
        reference = item["references"][self.config.ref_models[0]]
        return f"<think>It asks for this.</think><answer>{reference}</answer>"


if __name__ == "__main__":
    BLEUBERIEnv.cli()
