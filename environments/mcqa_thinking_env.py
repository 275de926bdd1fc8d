"""MCQA: questions with lettered options, answered in one sentence after thinking.

    question, options -> [system, user] -> G completions -> the one option named -> +1 or -1

Reads the columns of AcademicMCQA and those of MMLU, with up to 26 options:

    prompt, answer (index), ground_truth (letter), options      question, answer, choices

    python environments/mcqa_thinking_env.py process --env.dataset_path \
        environments/data/mcqa_sample --env.total_steps 4

For MMLU: `--env.dataset_name lighteval/mmlu --env.dataset_split test`, and for one of its subjects
`--env.dataset_subset astronomy`; or local files with `--env.dataset_path`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import (
    DEEP_THINKING,
    ThinkingEnv,
    answer_after_thinking,
    deep_hermes_settings,
)

__all__ = [
    "ChoiceQuestion",
    "MCQAThinkingEnv",
    "MCQAThinkingEnvConfig",
    "read_question",
    "score_answer",
]

CARD = EnvironmentCard(
    task="questions with lettered options (AcademicMCQA, MMLU)",
    turns="1",
    reward="+1 right, -1 wrong",
    data="AcademicMCQA from the hub, MMLU with `--env.dataset_name`, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/mcqa_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "mcqa_sample"
INSTRUCTION = (
    "Close with one sentence that names the option you choose, in exactly this form:\n"
    "The best answer is: {Answer}"
)

LEADS = (
    r"(?i:\bthe\s{1,9}(?:(?:correct|best)\s{1,9})?answer\s{1,9}is|\bfinal\s{1,9}answer\b)"
    r"[ :*\n]{0,9}"
)
"""Phrases that announce an answer; the bounds keep the search linear."""

LETTER_END = r"(?=$|[^\w\s'\u2019-]|\s*\n|\s+(?:(?i:because|since|as|for)\b|[^\w\s]))"
"""After a letter: the sentence ends or a reason follows, so that 'a dog' is not read as A."""

OTHER_LETTER = r"(?!\w\)?[\s,/&]{{1,5}}(?:(?:or|and)\s{{1,5}})?\(?[A-{last}]\b)"
"""Rejects a letter that is followed by another one: 'B or C', 'B, C'."""

TEXT_END = r"(?!\w|[.,]\d|\^|/\d)"
"""After an option's text: no word or number continues."""

OPTION = r"(?:(?i:option|choice)\s{1,5})?"
WRAPPED = r"(?:[\"'`\[{{$\u201c\u2018]|\\\()([A-{last}])(?:[\"'`\]}}$\u201d\u2019]|\\\))(?!\w)"
"""A letter in quotation marks, in square or curly brackets, or as a formula."""

ALSO = re.compile(
    r"[\s*_)\]]{0,5}(?:[,;/|&]|\(?(?i:or|and)\b)[\s*_(\[|]{0,5}"
    r"(?:(?i:or|and|also|maybe|perhaps|possibly)\b[\s*_(\[]{0,5}){0,2}"
)
"""Between two options that an answer names."""


class ChoiceQuestion(NamedTuple):
    """One question."""

    prompt: str
    """Question with its options."""
    letter: str
    """Letter of the right option."""
    options: tuple[str, ...]
    """Options without their letters."""

    @property
    def text(self) -> str:
        return self.options[ascii_uppercase.index(self.letter)]


class MCQAThinkingEnvConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the data set and of sampling."""

    eval_temperature: float = Field(0.5, ge=0, description="Sampling temperature of evaluations.")


def read_question(row: Mapping[str, Any]) -> ChoiceQuestion:
    """Return the question of a row of AcademicMCQA or MMLU.

    Raises:
        ConfigError: the row has the columns of neither, or its answer is not among the options.
    """
    options = row.get("options") or row.get("choices")
    body = row.get("prompt") or row.get("question")
    if not options or not body or len(options) > len(ascii_uppercase):
        raise ConfigError(
            "a row has no question with options; expected the columns prompt, options, answer "
            f"and ground_truth, or question, choices and answer; got {str(row)[:200]}"
        )
    letters = ascii_uppercase[: len(options)]
    gold = row.get("ground_truth") or row["answer"]
    letter = letters[gold] if isinstance(gold, int) and 0 <= gold < len(letters) else str(gold)
    if len(letter) != 1 or letter.upper() not in letters:
        raise ConfigError(f"the answer {gold!r} is not among the options {', '.join(letters)}")
    if not row.get("prompt"):
        pairs = zip(letters, options, strict=True)
        body = "\n".join([str(body), *(f"{name}. {option}" for name, option in pairs)])
    return ChoiceQuestion(str(body), letter.upper(), tuple(str(option) for option in options))


def named_options(answer: str, options: Sequence[str]) -> set[int]:
    """Return the indices of the options that an answer names, by letter or exact text.

    An option after `or`, `and` or a comma is also counted.
    """
    last = ascii_uppercase[len(options) - 1]
    texts = OptionTexts(options)
    other, either = OTHER_LETTER.format(last=last), f"A-{last}a-{last.lower()}"
    wrapped = WRAPPED.format(last=last)
    letter = re.compile(
        rf"{OPTION}(?:{wrapped}|\(?{other}(?:([{either}])\)?{LETTER_END}|((?![AI])[A-{last}])\s))"
    )
    next_letter = re.compile(rf"{OPTION}\(?(?:{wrapped}|([A-{last}])(?!\w))")
    found = set()
    for lead in re.finditer(LEADS, answer):
        named = texts.match(answer, lead.end())
        read = letter.match(answer, lead.end())
        if named is None and read:
            named = ascii_uppercase.index((read[1] or read[2] or read[3]).upper()), read.end()
        while named:
            found.add(named[0])
            link = ALSO.match(answer, named[1])
            if link is None:
                break
            another = next_letter.match(answer, link.end())
            named = texts.match(answer, link.end())
            if named is None and another:
                named = ascii_uppercase.index(another[1] or another[2]), another.end()
    boxed = rf"\\boxed\{{\s{{0,9}}(?:\\(?:text|math)(?:bf|rm)?\{{)?\(?([{either}])\)?\}}{{1,2}}"
    return found | {ascii_uppercase.index(box.upper()) for box in re.findall(boxed, answer)}


class OptionTexts:
    """Matcher for the texts of the options.

    A one-letter text is left out: it cannot be distinguished from the letter of an option.
    """

    def __init__(self, options: Sequence[str]) -> None:
        texts = [(i, option.strip()) for i, option in enumerate(options)]
        texts = [(i, text) for i, text in texts if len(text) > 1 or text.isdigit()]
        self._exact = [(i, re.compile(rf"{re.escape(text)}{TEXT_END}")) for i, text in texts]
        folded = [text.lower() for _, text in texts]
        self._any_case = [
            (i, re.compile(rf"(?i:{re.escape(text)}){TEXT_END}"))
            for i, text in texts
            if folded.count(text.lower()) == 1
        ]

    def match(self, answer: str, start: int) -> tuple[int, int] | None:
        """Return the index and the end of the option at a position, None without one.

        The longest match wins, and among equally long ones the one with matching case.
        """
        found = [
            (place.end(), is_exact, i)
            for is_exact, texts in ((True, self._exact), (False, self._any_case))
            for i, text in texts
            if (place := text.match(answer, start))
        ]
        if not found:
            return None
        end, _, option = max(found)
        return option, end


def score_answer(completion: str, question: ChoiceQuestion) -> float:
    """Return 1.0 if the answer after the thinking names only the right option, else -1.0."""
    answer = answer_after_thinking(completion)
    if answer is None:
        return -1.0
    gold = ascii_uppercase.index(question.letter)
    return 1.0 if named_options(answer, question.options) == {gold} else -1.0


class MCQAThinkingEnv(DatasetItems, ThinkingEnv):
    """Questions with lettered options; an item is a row of the data set."""

    env_config_cls = MCQAThinkingEnvConfig
    config: MCQAThinkingEnvConfig
    hub_dataset = "NousResearch/AcademicMCQA"
    hub_subset = "default"
    columns = ("answer",)
    optional_columns = ("prompt", "ground_truth", "options", "question", "choices")
    logs_percent_correct = True
    rollout_columns = ("answer", "string_answer")
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def config_init(cls) -> tuple[MCQAThinkingEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            MCQAThinkingEnvConfig,
            group_size=32,
            max_num_workers=128,
            total_steps=2000,
            steps_per_eval=20,
            max_token_length=15360,
            wandb_name="mcqa_deep_thinking",
        )

    async def setup(self) -> None:
        await super().setup()
        for row in (*self.train, *self.test):
            read_question(row)

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        question = read_question(item)
        return [
            {"role": "system", "content": DEEP_THINKING},
            {"role": "user", "content": f"{question.prompt}\n\n{INSTRUCTION}"},
        ]

    async def score(self, item: Mapping[str, Any], answer: str) -> float:
        return score_answer(self.opened_tag + answer, read_question(item))

    def rollout_cells(self, item: Mapping[str, Any]) -> Sequence[Any]:
        question = read_question(item)
        return question.letter, question.text

    def check_gold_answer(self, item: Mapping[str, Any]) -> str:
        return f"<think>I compare them.</think> The best answer is: {read_question(item).letter}"


if __name__ == "__main__":
    MCQAThinkingEnv.cli()
