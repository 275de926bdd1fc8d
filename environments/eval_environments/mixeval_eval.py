"""MixEval: questions of users and of other benchmarks, graded by a judge who has the answers.

    question -> one chat -> reply -> judge -> [[0.7]] for a text, [[0]] or [[1]] for a choice

    python environments/eval_environments/mixeval_eval.py evaluate \
        --env.dataset_path environments/data/mixeval_sample --env.data_dir_to_save_evals results

The judge is `gpt-4o` on the server of OpenAI, with the key of `OPENAI_API_KEY`; see the settings
`judge_*`. With `--env.judge_base_url None`, the evaluated model judges itself.
Metrics: `avg_score` (0 to 1), `freeform_avg_score`, `multichoice_avg_score`,
`benchmark_{k}_avg_score`, and `no_verdict_rate`: replies that the judge gave no verdict on, or
several; they count as 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar, Literal

from pydantic import Field

from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import answer_part
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion, EvalSource
from atroposlib.tasks.judge import quotations, quoted_parts
from atroposlib.tasks.judged_evaluations import HostedJudgeConfig, JudgedEvaluationEnv

__all__ = ["MixEvalConfig", "MixEvalEnv", "judge_request", "read_score"]

CARD = EnvironmentCard(
    task="questions of users and of other benchmarks, compared with the gold by a judge (MixEval)",
    turns="1",
    reward="0 to 1 from a judge",
    data="MixEval from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/mixeval_sample "
    "--env.judge_base_url None",
)
SAMPLE = Path(__file__).parents[1] / "data" / "mixeval_sample"

QuestionType = Literal["freeform", "multichoice"]
SUBSETS = {"easy": "MixEval", "hard": "MixEval_Hard"}
"""Difficulty to configuration on the hub."""
SPLITS = {"freeform": "free_form", "multichoice": "multiple_choice"}
"""Question type to split on the hub."""
MAX_OPTIONS = len(ascii_uppercase)

FREEFORM_REQUEST = "Answer in a few words."
CHOICE_REQUEST = "Choose one option, and give its letter and its text."
JUDGE_REQUEST = (
    "Grade the reply of a model to a question. All gold answers are correct, and a reply needs to "
    "agree with one of them only. {quotations}\n\n{scale}"
)
SCALES = {
    "freeform": (
        "How far does the reply agree with a gold answer, in meaning and not in words? Explain it "
        "in a sentence or two. End with a number from 0.0 (not at all) to 1.0 (fully), in double "
        "square brackets: [[number]]."
    ),
    "multichoice": (
        "Does the reply choose the gold option and no other one? Explain it in a sentence or two. "
        "End with 1 for yes or 0 for no, in double square brackets: [[number]]."
    ),
}
SCORE = re.compile(r"\[\[\s{0,9}(-?\d{1,9}(?:\.\d{1,9})?)\s{0,9}\]\]")
GOLD_REPLY = "The answer is: {}"


class MixEvalConfig(HostedJudgeConfig):
    """Settings of MixEval and its judge."""

    difficulty: Literal["easy", "hard"] = Field(
        "easy", description="Part of the data set of the hub: MixEval, or MixEval-Hard."
    )
    question_types: list[QuestionType] = Field(
        ["freeform", "multichoice"], min_length=1, description="Types of questions to evaluate."
    )


def type_of(problem_type: str) -> QuestionType:
    """Return the type of a question, which data sets spell `free-form` or `single-choice`."""
    words = re.findall(r"[a-z]+", problem_type.lower())
    if "".join(words) == "freeform":
        return "freeform"
    if "choice" in words or "multichoice" in words:
        return "multichoice"
    raise ConfigError(f"problem_type is {problem_type!r}; expected free-form or single-choice")


def _read(row: Mapping[str, Any]) -> EvalQuestion:
    """Convert a row; the gold answer is the list of accepted texts."""
    kind = type_of(str(row["problem_type"]))
    targets = row["target"] if isinstance(row["target"], list | tuple) else [row["target"]]
    texts = [text for target in targets if (text := str(target).strip())]
    choices = tuple(str(text).strip() for text in row.get("options") or ())
    if not texts:
        raise ConfigError("its gold answer is empty")
    if kind == "multichoice":
        if not 2 <= len(choices) <= MAX_OPTIONS:
            raise ConfigError(f"it has {len(choices)} options, expected 2 to {MAX_OPTIONS}")
        texts = [_option(choices, texts)]
    else:
        choices = ()
    parts = [str(part).strip() for part in (row.get("context"), row["prompt"]) if part]
    benchmark = row.get("benchmark_name")
    groups = (("question_type", kind), *((("benchmark", str(benchmark)),) if benchmark else ()))
    return EvalQuestion("\n\n".join(parts), tuple(texts), choices, groups)


def _option(choices: Sequence[str], targets: Sequence[str]) -> str:
    """Return `B. text` for the one target, which is an index from 0, a letter or a text."""
    if len(targets) != 1:
        raise ConfigError(f"it has {len(targets)} gold options, expected one")
    [target] = targets
    names = ([str(i) for i in range(len(choices))], list(ascii_uppercase[: len(choices)]), choices)
    for known in names:
        if target in known:
            return _lettered(choices)[known.index(target)]
    raise ConfigError(f"its gold answer {target!r} is not one of its options")


def _lettered(choices: Sequence[str]) -> list[str]:
    return [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices, strict=False)]


class MixEvalEnv(JudgedEvaluationEnv):
    """MixEval; an item has the groups `question_type` and `benchmark`."""

    name = "mixeval_eval"
    source = EvalSource(
        path="MixEval/MixEval",
        columns=("prompt", "target", "problem_type"),
        optional=("options", "benchmark_name", "context"),
        read=_read,
        overall="avg_score",
        group_metrics={"question_type": "{}_avg_score", "benchmark": "benchmark_{}_avg_score"},
    )
    env_config_cls = MixEvalConfig
    config: MixEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {
        "dataset_path": str(SAMPLE),
        "judge_base_url": None,
    }

    def load_questions(self) -> list[EvalQuestion]:
        if self.config.dataset_path or self.config.dataset_split:
            loaded = super().load_questions()
        else:
            splits = [SPLITS[kind] for kind in dict.fromkeys(self.config.question_types)]
            loaded = [q for split in splits for q in self.read_rows(self.rows(split, ()))]
        return [q for q in loaded if dict(q.groups)["question_type"] in self.config.question_types]

    def subsets_of(self, name: str) -> Sequence[str | None]:
        if self.config.dataset_subset is None and name == self.source.path:
            return [SUBSETS[self.config.difficulty]]
        return super().subsets_of(name)

    def question_text(self, item: EvalQuestion) -> str:
        if not item.choices:
            return f"{item.question}\n\n{FREEFORM_REQUEST}"
        return "\n".join([item.question, "", *_lettered(item.choices), "", CHOICE_REQUEST])

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        """Ask the judge about a reply; one without text scores 0 and is not sent to it."""
        answer = answer_part(completion)
        if not answer:
            return EvalGrade(0.0, None, "no_answer", False, {"no_verdict_rate": 0.0})
        is_choice = bool(item.choices)
        score = read_score(await self.judge.reply(judge_request(item, answer)), is_choice=is_choice)
        method = "no_verdict" if score is None else "judge"
        return EvalGrade(
            score or 0.0, answer, method, True, {"no_verdict_rate": float(score is None)}
        )

    def gold_text(self, item: EvalQuestion) -> str:
        return " | ".join(item.gold)

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>I recall it.</think>{GOLD_REPLY.format(item.gold[0])}"

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        parts = quoted_parts(str(messages[-1]["content"]))
        if "gold answers" not in parts:
            return None
        golds = parts["gold answers"].splitlines()
        return f"[[{int(parts['reply'] in map(GOLD_REPLY.format, golds))}]]"


def judge_request(item: EvalQuestion, reply: str) -> str:
    """Return the request for a grade of a reply."""
    question = "\n".join([item.question, *_lettered(item.choices)])
    parts = {"question": question, "gold answers": "\n".join(item.gold), "reply": reply}
    scale = SCALES["multichoice" if item.choices else "freeform"]
    return JUDGE_REQUEST.format(quotations=quotations(parts), scale=scale)


def read_score(reply: str, *, is_choice: bool) -> float | None:
    """Return the one score of a judge, 0 to 1; 0 or 1 for a choice. None for none or several."""
    scores = {float(score) for score in SCORE.findall(answer_part(reply))}
    score = scores.pop() if len(scores) == 1 else -1.0
    is_valid = score in (0, 1) if is_choice else 0 <= score <= 1
    return score if is_valid else None


if __name__ == "__main__":
    MixEvalEnv.cli()
