"""Evaluations of questions with options, as a table of data sets.

    row ─► ChoiceColumns ─► EvalQuestion ─► question, A. B. C. ... ─► <answer>B</answer> ─► letter

A row of `CHOICE_SOURCES` names the columns of one data set. An answer is the letter between the
tags, the text of an option between the tags, or a phrase such as "the answer is B"; an answer that
names several options, or none, is wrong and counted under the name of its case.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from pydantic import Field

from atroposlib.errors import ConfigError
from atroposlib.tasks.eval_answers import (
    answer_part,
    extract_letter_from_answer_tag,
    extract_mcqa_answer_with_fallback,
)
from atroposlib.tasks.evaluations import (
    EXAMPLE_FILES,
    EvalFamilyConfig,
    EvalGrade,
    EvalQuestion,
    EvalSource,
    EvaluationEnv,
)

__all__ = [
    "AGIEVAL_ENGLISH",
    "AGIEVAL_GAOKAO",
    "CHOICE_SOURCES",
    "MMLU_CATEGORIES",
    "ChoiceColumns",
    "ChoiceEvalConfig",
    "ChoiceEvalEnv",
    "FewShotEvalConfig",
    "choice_text",
    "shuffled_choices",
]

Row = Mapping[str, Any]
MAX_CHOICES = len(ascii_uppercase)
REQUEST = (
    "Choose one option. End your reply with its letter between <answer> and </answer>, as in "
    "<answer>{letter}</answer>."
)


@dataclass(frozen=True, kw_only=True)
class ChoiceColumns:
    """The columns of a data set of questions with options; converts a row when called.

    Example:
        ChoiceColumns(question=("question",), choices="choices", gold="answer")
    """

    question: tuple[str, ...]
    """Columns of the question, joined in this order; empty ones are left out."""
    choices: str | tuple[str, ...]
    """Column of the list of options, or one column per option."""
    gold: str | None
    """Column of the gold answer: index, letter, label or the digits of an index. None if the first
    of `choices` is correct."""
    texts: str | None = None
    """Key of the options within the column, if that is a mapping; `labels` likewise."""
    labels: str | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    """Name of a group to its column."""
    joint: str = "\n\n"
    """Text between the columns of the question."""
    request: str = ""
    """Question about the columns, for data sets that have none of their own."""
    first_index: int = 0
    """Index of the first option in the column of the gold answer."""

    def __call__(self, row: Row) -> EvalQuestion:
        """Return the question of a row.

        Raises:
            ConfigError: there are fewer than two options, or the gold answer is not among them.
        """
        if isinstance(self.choices, str):
            column = row[self.choices]
            choices = list(column[self.texts] if self.texts else column)
            labels = [str(label) for label in column[self.labels]] if self.labels else []
        else:
            choices = [row[name] for name in self.choices if row.get(name) is not None]
            labels = []
        if not 2 <= len(choices) <= MAX_CHOICES:
            raise ConfigError(f"it has {len(choices)} options; expected 2 to {MAX_CHOICES}")
        gold = 0 if self.gold is None else self._index_of(row[self.gold], labels, len(choices))
        parts = [*(str(row.get(name) or "").strip() for name in self.question), self.request]
        return EvalQuestion(
            question=self.joint.join(part for part in parts if part),
            gold=ascii_uppercase[gold],
            choices=tuple(str(choice).strip() for choice in choices),
            groups=tuple(
                (name, str(row[column]))
                for name, column in self.groups.items()
                if row.get(column) is not None
            ),
        )

    def _index_of(self, gold: Any, labels: Sequence[str], num_choices: int) -> int:
        """Return the index of a gold answer: a label, an index, its digits or a letter."""
        text = str(gold).strip()
        if text in labels:
            return labels.index(text)
        letters = ascii_uppercase[:num_choices]
        if not labels and text.isdecimal() and 0 <= int(text) - self.first_index < num_choices:
            return int(text) - self.first_index
        if len(text) == 1 and text.upper() in letters:
            return letters.index(text.upper())
        raise ConfigError(f"the answer {gold!r} is not one of its {num_choices} options")


def shuffled_choices(question: EvalQuestion, seed: int) -> EvalQuestion:
    """Return a question with its options in an order that depends on the seed and the question."""
    digest = hashlib.sha256(question.question.encode()).hexdigest()
    order = list(range(len(question.choices)))
    random.Random(f"{seed} {digest}").shuffle(order)
    gold = order.index(ascii_uppercase.index(question.gold))
    choices = tuple(question.choices[i] for i in order)
    return question._replace(choices=choices, gold=ascii_uppercase[gold])


def choice_text(question: EvalQuestion) -> str:
    """Return a question and its options, one per line, without a request."""
    options = zip(ascii_uppercase, question.choices, strict=False)
    return "\n".join([question.question, "", *(f"{name}. {text}" for name, text in options)])


class ChoiceEvalConfig(EvalFamilyConfig):
    """Settings of the evaluations of questions with options."""

    shuffle_seed: int = Field(
        42, description="Seed of the order of the options, for data sets whose first is correct."
    )


class FewShotEvalConfig(ChoiceEvalConfig):
    """Settings of evaluations that have solved questions for their prompts."""

    num_few_shot: int = Field(
        0,
        ge=0,
        le=64,
        description="Solved questions before each question, from the data set's split for them, or "
        "the file dev or validation of a local folder.",
    )


class ChoiceEvalEnv(EvaluationEnv):
    """Questions with options; `gold` is the letter of the correct one, or all such letters."""

    env_config_cls: type[Any] = ChoiceEvalConfig
    config: ChoiceEvalConfig

    def load_questions(self) -> list[EvalQuestion]:
        questions = super().load_questions()
        columns = self.source.read
        if isinstance(columns, ChoiceColumns) and columns.gold is None:
            seed = self.config.shuffle_seed
            questions = [shuffled_choices(question, seed) for question in questions]
        num_examples = getattr(self.config, "num_few_shot", 0)  # a field of some data sets
        return self._with_examples(questions, num_examples) if num_examples else questions

    def question_text(self, item: EvalQuestion) -> str:
        return f"{choice_text(item)}\n\n{REQUEST.format(letter='A')}"

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        answer = answer_part(completion)
        letters = ascii_uppercase[: len(item.choices)]
        found = extract_letter_from_answer_tag(answer, letters, choices=item.choices)
        is_compliant = found.letter is not None
        if found.letter is None and found.method != "answer_tag_ambiguous":
            found = extract_mcqa_answer_with_fallback(answer, len(item.choices))
        score = float(found.letter is not None and found.letter in item.gold)
        return EvalGrade(score, found.letter, found.method, is_compliant)

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>I compare them.</think><answer>{item.gold[0]}</answer>"

    def _with_examples(self, questions: list[EvalQuestion], count: int) -> list[EvalQuestion]:
        """Add the first `count` solved questions of the same group to each question."""
        split = self.source.example_split or self.source.split
        solved = self.read_rows(self.rows(split, EXAMPLE_FILES))
        found: list[EvalQuestion] = []
        for question in questions:
            related = [
                (self.question_text(each), f"<answer>{each.gold}</answer>")
                for each in solved
                if each.groups == question.groups and each.question != question.question
            ]
            if len(related) < count:
                raise ConfigError(
                    f"num_few_shot is {count}, but {self.place_of_data} has only {len(related)} "
                    f"solved questions for {dict(question.groups) or 'its questions'}"
                )
            found.append(question._replace(examples=tuple(related[:count])))
        return found


MMLU_CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "stem": (
        "abstract_algebra", "anatomy", "astronomy", "college_biology", "college_chemistry",
        "college_computer_science", "college_mathematics", "college_physics", "computer_security",
        "conceptual_physics", "electrical_engineering", "elementary_mathematics",
        "high_school_biology", "high_school_chemistry", "high_school_computer_science",
        "high_school_mathematics", "high_school_physics", "high_school_statistics",
        "machine_learning",
    ),
    "humanities": (
        "formal_logic", "high_school_european_history", "high_school_us_history",
        "high_school_world_history", "international_law", "jurisprudence", "logical_fallacies",
        "moral_disputes", "moral_scenarios", "philosophy", "prehistory", "professional_law",
        "world_religions",
    ),
    "social_sciences": (
        "econometrics", "high_school_geography", "high_school_government_and_politics",
        "high_school_macroeconomics", "high_school_microeconomics", "high_school_psychology",
        "human_sexuality", "professional_psychology", "public_relations", "security_studies",
        "sociology", "us_foreign_policy",
    ),
    "other": (
        "business_ethics", "clinical_knowledge", "college_medicine", "global_facts", "human_aging",
        "management", "marketing", "medical_genetics", "miscellaneous", "nutrition",
        "professional_accounting", "professional_medicine", "virology",
    ),
}  # fmt: skip
"""Category to its subjects, as in Hendrycks et al. 2021, arXiv:2009.03300."""
MMLU_SUBJECTS = tuple(sorted(name for names in MMLU_CATEGORIES.values() for name in names))

AGIEVAL_ENGLISH = (
    "aqua-rat", "logiqa-en", "lsat-ar", "lsat-lr", "lsat-rc", "sat-en", "sat-en-without-passage",
    "sat-math",
)  # fmt: skip
AGIEVAL_GAOKAO = (
    "gaokao-biology", "gaokao-chemistry", "gaokao-chinese", "gaokao-english", "gaokao-geography",
    "gaokao-history", "gaokao-mathqa", "gaokao-physics", "logiqa-zh",
)  # fmt: skip
"""Parts of AGIEval about Chinese examinations."""


def _read_agieval(row: Row) -> EvalQuestion:
    """Convert a row whose options start with their letters, and whose gold answer may be a list."""
    golds = row["gold"] if isinstance(row["gold"], Sequence) else [row["gold"]]
    choices = [
        re.sub(rf"\A\s*\({letter}\)", "", str(choice))
        for letter, choice in zip(ascii_uppercase, row["choices"], strict=False)
    ]
    columns = ChoiceColumns(
        question=("query",), choices="choices", gold="gold", groups={"subset": "subset"}
    )
    questions = [columns({**row, "choices": choices, "gold": gold}) for gold in golds]
    return questions[0]._replace(gold="".join(question.gold for question in questions))


def _read_boolq(row: Row) -> EvalQuestion:
    answer = str(row["answer"]).strip().lower()
    answer = {"true": "yes", "false": "no"}.get(answer, answer)
    if answer not in {"yes", "no"}:
        raise ConfigError(f"the answer {row['answer']!r} is neither yes nor no")
    return EvalQuestion(
        question=f"{str(row['passage']).strip()}\n\n{str(row['question']).strip()}",
        gold="A" if answer == "yes" else "B",
        choices=("Yes", "No"),
        groups=(("answer", answer),),
    )


def _read_musr(row: Row) -> EvalQuestion:
    """Convert a row whose options are a list, or the text of a Python list."""
    choices = row["choices"]
    if isinstance(choices, str):
        try:
            choices = ast.literal_eval(choices)
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"its options {choices!r:.200} are not a list") from error
    columns = ChoiceColumns(
        question=("narrative", "question"), choices="choices", gold="answer_index"
    )
    return columns({**row, "choices": choices})


CHOICE_SOURCES: Mapping[str, EvalSource] = {
    "mmlu": EvalSource(
        path="lighteval/mmlu",
        subsets=MMLU_SUBJECTS,
        subset_column="subject",
        columns=("question", "choices", "answer"),
        read=ChoiceColumns(
            question=("question",),
            choices="choices",
            gold="answer",
            groups={"subject": "subject"},
        ),
        example_split="dev",
        overall="eval/overall_accuracy",
        group_metrics={
            "category": "eval/category_{}_accuracy",
            "subject": "eval/subject_{}_accuracy",
        },
    ),
    "mmlu_pro": EvalSource(
        path="TIGER-Lab/MMLU-Pro",
        columns=("question", "options", "answer"),
        optional=("category",),
        read=ChoiceColumns(
            question=("question",),
            choices="options",
            gold="answer",
            groups={"category": "category"},
        ),
        example_split="validation",
        group_metrics={"category": "category_{}_accuracy"},
    ),
    "gpqa": EvalSource(
        path="Idavidrein/gpqa",
        subset="gpqa_diamond",
        split="train",
        columns=(
            "Question",
            "Correct Answer",
            "Incorrect Answer 1",
            "Incorrect Answer 2",
            "Incorrect Answer 3",
        ),
        optional=("Subdomain",),
        read=ChoiceColumns(
            question=("Question",),
            choices=(
                "Correct Answer",
                "Incorrect Answer 1",
                "Incorrect Answer 2",
                "Incorrect Answer 3",
            ),
            gold=None,
            groups={"subdomain": "Subdomain"},
        ),
        overall="eval/overall_accuracy",
        group_metrics={"subdomain": "eval/subdomain_{}_accuracy"},
    ),
    "arc": EvalSource(
        path="allenai/ai2_arc",
        subset="ARC-Challenge",
        columns=("question", "choices", "answerKey"),
        read=ChoiceColumns(
            question=("question",),
            choices="choices",
            texts="text",
            labels="label",
            gold="answerKey",
        ),
    ),
    "hellaswag": EvalSource(
        path="Rowan/hellaswag",
        split="validation",
        columns=("ctx_a", "endings", "label"),
        optional=("ctx_b", "activity_label"),
        read=ChoiceColumns(
            question=("activity_label", "ctx_a", "ctx_b"),
            choices="endings",
            gold="label",
            groups={"activity": "activity_label"},
            joint="\n",
        ),
        group_metrics={"activity": "activity_{}_accuracy"},
    ),
    "bbh": EvalSource(
        path="lighteval/bbh",
        subsets=(),
        split="train",
        columns=("input", "choices", "target_idx"),
        optional=("task_prefix",),
        read=ChoiceColumns(
            question=("task_prefix", "input"),
            choices="choices",
            gold="target_idx",
            groups={"subset": "subset"},
        ),
        group_metrics={"subset": "subset_{}_accuracy"},
    ),
    "agieval": EvalSource(
        path="dmayhem93/agieval-{}",
        columns=("query", "choices", "gold"),
        read=_read_agieval,
        overall="eval/overall_accuracy",
        group_metrics={"subset": "eval/subset_{}_accuracy"},
    ),
    "boolq": EvalSource(
        path="lighteval/boolq_helm",
        split="validation",
        columns=("passage", "question", "answer"),
        read=_read_boolq,
        group_metrics={"answer": "{}_accuracy"},
    ),
    "musr": EvalSource(
        path="TAUR-Lab/MuSR",
        split="murder_mysteries",
        columns=("narrative", "question", "choices", "answer_index"),
        read=_read_musr,
        overall="eval/accuracy",
    ),
    "obqa": EvalSource(
        path="allenai/openbookqa",
        subset="main",
        columns=("question_stem", "choices", "answerKey"),
        read=ChoiceColumns(
            question=("question_stem",),
            choices="choices",
            texts="text",
            labels="label",
            gold="answerKey",
        ),
        overall="eval/accuracy",
    ),
    "piqa": EvalSource(
        path="ybisk/piqa",
        split="validation",
        columns=("goal", "sol1", "sol2", "label"),
        read=ChoiceColumns(
            question=("goal",),
            choices=("sol1", "sol2"),
            gold="label",
            request="Which of the two ways reaches this goal?",
        ),
    ),
    "siqa": EvalSource(
        path="allenai/social_i_qa",
        split="validation",
        columns=("context", "question", "answerA", "answerB", "answerC", "label"),
        read=ChoiceColumns(
            question=("context", "question"),
            choices=("answerA", "answerB", "answerC"),
            gold="label",
            first_index=1,
        ),
    ),
    "winogrande": EvalSource(
        path="allenai/winogrande",
        subset="winogrande_xl",
        split="validation",
        columns=("sentence", "option1", "option2", "answer"),
        read=ChoiceColumns(
            question=("sentence",),
            choices=("option1", "option2"),
            gold="answer",
            request="Which option belongs in the place of the _?",
            first_index=1,
        ),
    ),
}
"""Data sets of questions with options."""
