"""Pairwise judgement: the model is the judge, and has to find the best of several answers.

    request, answers A to D -> one chat -> verdict [[B]] -> right or wrong
    ties: each answer -> one chat -> rating [[7]] -> right if all correct answers are above the rest

    python environments/eval_environments/pairwise_judgement_environment.py evaluate \
        --env.dataset_path environments/data/pairwise_judgement_sample \
        --env.data_dir_to_save_evals results

Evaluations use RewardBench 2. In its subset `Ties`, several answers of a question are correct.
`serve` and `process` train on verdicts; their answers come from `--env.train_path` or
`--env.train_dataset`, whose default is a placeholder: comparisons are then made on the spot, of
small tasks with one right result.

Metrics: `eval/percent_correct` (0 to 1), `eval/percent_correct_{subset}`,
`eval/format_compliance_rate` (exactly one verdict, or one rating for each answer). Of the verdicts:
`eval/chosen_{letter}_rate` next to `eval/gold_{letter}_rate`, `eval/position_bias` (0 to 1, half
the sum of their differences), `eval/longest_chosen_rate` next to `eval/longest_gold_rate`.
"""

from __future__ import annotations

import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import hub_rows
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import answer_part
from atroposlib.tasks.evaluations import (
    TRAIN_SETTINGS,
    EvalGrade,
    EvalQuestion,
    EvalSource,
    TrainableEvalConfig,
    TrainableEvaluation,
    metric_key,
)
from atroposlib.tasks.judge import quotations
from atroposlib.utils.aio import all_results

__all__ = [
    "PairwiseJudgementConfig",
    "PairwiseJudgementEnv",
    "are_ties_right",
    "made_question",
    "read_choice",
    "read_rating",
]

CARD = EnvironmentCard(
    task="find the best of several answers, as a judge (RewardBench 2)",
    turns="1",
    reward="1 if the verdict is the best answer, else 0",
    data="RewardBench 2 from the hub, or `--env.dataset_path`; made on the spot for training",
    command="evaluate --env.dataset_path environments/data/pairwise_judgement_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "pairwise_judgement_sample"

PLACEHOLDER = "dummy/dataset"
"""Name of the data set for training that stands for comparisons made on the spot."""
NUM_MADE = 2000
TIES = "ties"

CHOICE_REQUEST = (
    "You are the judge of several answers to a request. {quotations}\n\n"
    "Which answer is the best one? It is right, does what was asked, and does no harm. Its "
    "position and its length mean nothing. End with one verdict in double square brackets: "
    "{verdicts}."
)
RATING_REQUEST = (
    "You are the judge of an answer to a request. {quotations}\n\n"
    "Rate the answer from 1 (wrong or useless) to 10 (right and complete). Several different "
    "answers may be right; each of those deserves the same rating. End with the rating in double "
    "square brackets: [[rating]]."
)
CHOICE = re.compile(r"\[\[\s{0,9}([A-Z])\s{0,9}\]\]")
RATING = re.compile(r"\[\[\s{0,9}(-?\d{1,9}(?:\.\d{1,9})?)\s{0,9}\]\]")


class PairwiseJudgementConfig(TrainableEvalConfig):
    """Settings of the answers to choose from."""

    num_choices: int = Field(
        4, ge=2, le=len(ascii_uppercase), description="Maximum number of answers to choose from."
    )
    max_ties_responses: int = Field(
        100, ge=2, le=1000, description="Maximum number of answers that are rated for one question."
    )
    eval_categories: list[str] | None = Field(
        None, description="Subsets to evaluate, such as Math or Ties; None: all."
    )
    shuffle_seed: int = Field(42, description="Seed of the order of the answers.")
    train_dataset: str = Field(
        PLACEHOLDER,
        description="Data set of the hub with the columns prompt, chosen and rejected, for `serve` "
        "and `process`; dummy/dataset: comparisons that are made on the spot.",
    )
    train_split: str = Field("train", description="Split of train_dataset.")


def _answers(value: Any) -> list[str]:
    """Return a text, a list of texts, or the last message of a chat, as texts."""
    if isinstance(value, str):
        return [value]
    entries = list(value or ())
    if entries and all(isinstance(entry, Mapping) for entry in entries):
        entries = [entries[-1].get("content")]
    if not all(isinstance(entry, str) for entry in entries):
        raise ConfigError("an answer is not a text")
    return entries


def _read(row: Mapping[str, Any]) -> EvalQuestion:
    """Convert a row; its gold answer is the lists of chosen and of rejected answers."""
    chosen = list(dict.fromkeys(_answers(row["chosen"])))
    rejected = [text for text in dict.fromkeys(_answers(row["rejected"])) if text not in chosen]
    if not chosen or not rejected:
        raise ConfigError("it needs a chosen answer, and a rejected one that differs from it")
    subset = row.get("subset")
    groups = (("subset", str(subset)),) if subset else ()
    return EvalQuestion(str(row["prompt"]), (chosen, rejected), groups=groups)


class PairwiseJudgementEnv(TrainableEvaluation):
    """Verdicts on answers; an item has the group `subset`.

    The gold answer is the letter of the best answer; for ties, a tuple with a bool for each answer.
    """

    name = "pairwise_judgement"
    source = EvalSource(
        path="allenai/reward-bench-2",
        columns=("prompt", "chosen", "rejected"),
        read=_read,
        overall="eval/percent_correct",
        group_metrics={"subset": "eval/percent_correct_{}"},
    )
    default_settings: ClassVar[dict[str, Any]] = {**TRAIN_SETTINGS, "group_size": 16}
    env_config_cls = PairwiseJudgementConfig
    config: PairwiseJudgementConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def load_questions(self) -> list[EvalQuestion]:
        questions = super().load_questions()
        known = {_subset(question) for question in questions}
        wanted = {metric_key(name) for name in self.config.eval_categories or ()} or known
        if unknown := sorted(wanted - known):
            raise ConfigError(
                f"eval_categories: {self.place_of_data} has no subset {', '.join(unknown)}; "
                f"expected some of {', '.join(sorted(known))}"
            )
        chosen = [question for question in questions if _subset(question) in wanted]
        return [self.with_ties(q) if _subset(q) == TIES else self.with_choices(q) for q in chosen]

    def load_train_questions(self) -> list[EvalQuestion]:
        config = self.config
        if config.train_path:
            questions = super().load_train_questions()
        elif config.train_dataset == PLACEHOLDER:
            questions = [made_question(f"{config.shuffle_seed} {i}") for i in range(NUM_MADE)]
        else:
            rows = hub_rows(config.train_dataset, split=config.train_split)
            questions = self.questions_of(rows, place=config.train_dataset)
        return [self.with_choices(question) for question in questions]

    def with_choices(self, question: EvalQuestion) -> EvalQuestion:
        """Return a question with one chosen answer and some others, in an order of its own."""
        chosen, rejected = question.gold
        answers = [chosen[0], *rejected[: self.config.num_choices - 1]]
        random.Random(f"{self.config.shuffle_seed} {question.question}").shuffle(answers)
        letter = ascii_uppercase[answers.index(chosen[0])]
        return question._replace(choices=tuple(answers), gold=letter)

    def with_ties(self, question: EvalQuestion) -> EvalQuestion:
        """Return a question with all answers up to the limit, and whether each is correct."""
        chosen, rejected = question.gold
        limit = self.config.max_ties_responses
        rejected = rejected[: limit - 1]
        chosen = chosen[: limit - len(rejected)]
        gold = (*(True for _ in chosen), *(False for _ in rejected))
        return question._replace(choices=(*chosen, *rejected), gold=gold)

    def question_text(self, item: EvalQuestion) -> str:
        letters = ascii_uppercase[: len(item.choices)]
        answers = zip(letters, item.choices, strict=True)
        parts = {"request": item.question, **{f"answer {name}": text for name, text in answers}}
        verdicts = f"{', '.join(f'[[{letter}]]' for letter in letters[:-1])} or [[{letters[-1]}]]"
        return CHOICE_REQUEST.format(quotations=quotations(parts), verdicts=verdicts)

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        letter = read_choice(completion, len(item.choices))
        method = "no_verdict" if letter is None else "verdict"
        return EvalGrade(float(letter == item.gold), letter, method, letter is not None)

    async def evaluate_item(self, item: EvalQuestion) -> dict[str, Any]:
        if _subset(item) == TIES:
            return await self.rated(item)
        longest = max(range(len(item.choices)), key=lambda i: len(item.choices[i]))
        return {**await super().evaluate_item(item), "longest_answer": ascii_uppercase[longest]}

    async def rated(self, item: EvalQuestion) -> dict[str, Any]:
        """Rate each answer in a chat of its own; return the record, with the first chat."""
        chats = [self.rating_chat(item, answer) for answer in item.choices]
        replies = await all_results(self.reply_to(chat) for chat in chats)
        texts = ["" if reply.finish_reason == "length" else reply.text for reply in replies]
        ratings = [read_rating(text) for text in texts]
        is_right = are_ties_right(ratings, item.gold)
        return {
            "messages": [*chats[0], {"role": "assistant", "content": replies[0].text}],
            "score": float(is_right),
            "is_correct": is_right,
            "question": item.question,
            "gold_answer": f"{sum(item.gold)} of {len(item.gold)} answers are correct",
            "model_answer": None,
            "ratings": ratings,
            "extraction_method": "no_rating" if None in ratings else "ratings",
            "format_compliant": None not in ratings,
            "has_thinking": any(reply.has_thinking for reply in replies),
            "finish_reason": replies[0].finish_reason,
            "groups": dict(item.groups),
            "values": {},
        }

    def rating_chat(self, item: EvalQuestion, answer: str) -> list[dict[str, str]]:
        """Return the messages that ask for the rating of one answer."""
        parts = quotations({"request": item.question, "answer": answer})
        text = RATING_REQUEST.format(quotations=parts)
        return [*self.prompt(item)[:-1], {"role": "user", "content": text}]

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**super().evaluation_metrics(samples), **bias_metrics(samples)}

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>I compare them.</think>[[{item.gold}]]"


def _subset(item: EvalQuestion) -> str:
    return metric_key(dict(item.groups).get("subset", ""))


def read_choice(completion: str, num_choices: int) -> str | None:
    """Return the letter of the one verdict; None for no verdict, several, or one out of range."""
    letters = set(CHOICE.findall(answer_part(completion)))
    letter = letters.pop() if len(letters) == 1 else None
    return letter if letter in tuple(ascii_uppercase[:num_choices]) else None


def read_rating(completion: str) -> float | None:
    """Return the one rating from 1 to 10; None for no rating, several, or one out of range."""
    ratings = {float(rating) for rating in RATING.findall(answer_part(completion))}
    rating = ratings.pop() if len(ratings) == 1 else 0.0
    return rating if 1 <= rating <= 10 else None


def are_ties_right(ratings: Sequence[float | None], is_correct: Sequence[bool]) -> bool:
    """Return whether all correct answers have higher ratings than all others, none missing.

    Args:
        ratings: one for each answer.
        is_correct: Whether each answer is correct; both kinds occur.

    Source: Malik et al. 2025, "RewardBench 2", arXiv:2506.01937, subset Ties. Differs in that the
    distance of the two kinds, compared with the spread of the correct ones, does not count.
    """
    known = [rating for rating in ratings if rating is not None]
    if len(known) < len(ratings):
        return False
    pairs = list(zip(known, is_correct, strict=True))
    return min(r for r, right in pairs if right) > max(r for r, right in pairs if not right)


def bias_metrics(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how often each letter, and the longest answer, was chosen and was right.

    Of the samples with a verdict; none without any.
    """
    judged = [s for s in samples if "longest_answer" in s and s["model_answer"] is not None]
    if not judged:
        return {}
    rates = {}
    for name, key in (("chosen", "model_answer"), ("gold", "gold_answer")):
        counts = Counter(str(sample[key]) for sample in judged)
        rates[name] = {letter: count / len(judged) for letter, count in counts.items()}
    letters = sorted({*rates["chosen"], *rates["gold"]})
    shares = {n: {letter: rates[n].get(letter, 0.0) for letter in letters} for n in rates}
    difference = sum(abs(shares["chosen"][k] - shares["gold"][k]) for k in letters)
    return {
        **{f"eval/{n}_{letter}_rate": r for n in shares for letter, r in shares[n].items()},
        "eval/position_bias": difference / 2,
        **{
            f"eval/longest_{name}_rate": statistics.fmean(
                s[key] == s["longest_answer"] for s in judged
            )
            for name, key in (("chosen", "model_answer"), ("gold", "gold_answer"))
        },
    }


def _product(source: random.Random) -> tuple[str, list[str]]:
    one, two = source.randint(12, 98), source.randint(3, 19)
    wrong = source.sample([-20, -10, -2, -1, 1, 2, 10, 20], 3)
    return f"What is {one} times {two}?", [str(one * two + by) for by in (0, *wrong)]


def _clock(source: random.Random) -> tuple[str, list[str]]:
    start, length = source.randrange(24 * 60), source.randint(35, 400)
    wrong = source.sample([-60, -15, -10, 10, 15, 60], 3)
    times = [(start + length + by) % (24 * 60) for by in (0, *wrong)]
    question = f"A train leaves at {start // 60}:{start % 60:02} and runs for {length} minutes. "
    return question + "When does it arrive?", [f"{t // 60}:{t % 60:02}" for t in times]


WORDS = ("acorn", "barge", "cedar", "dune", "ember", "flint", "gravel", "heron", "inlet", "jetty")


def _order(source: random.Random) -> tuple[str, list[str]]:
    words = source.sample(WORDS, 5)
    right = sorted(words)
    answers = [right]
    while len(answers) < 4:
        other = list(right)
        i, k = source.sample(range(5), 2)
        other[i], other[k] = other[k], other[i]
        if other not in answers:
            answers.append(other)
    question = f"Put these words into the order of the alphabet: {', '.join(words)}."
    return question, [", ".join(answer) for answer in answers]


KINDS: Sequence[Callable[[random.Random], tuple[str, list[str]]]] = (_product, _clock, _order)
PHRASES = ("{}", "It is {}.", "I went through it step by step, and my result is {}.", "Answer: {}")
"""Forms of an answer; a longer one is not a better one."""


def made_question(seed: str) -> EvalQuestion:
    """Return a small task with one right and three wrong answers, the same for a seed."""
    source = random.Random(seed)
    question, results = source.choice(KINDS)(source)
    right, *wrong = (source.choice(PHRASES).format(result) for result in results)
    return EvalQuestion(question, ([right], wrong))


if __name__ == "__main__":
    PairwiseJudgementEnv.cli()
