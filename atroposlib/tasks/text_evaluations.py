"""Evaluations with a short answer between tags, as a table of data sets.

row ─► read ─► EvalQuestion ─► prompt ─► <answer>text</answer> ─► comparison with gold answers
"""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from atroposlib.errors import ConfigError
from atroposlib.tasks.eval_answers import (
    answer_part,
    extract_freeform_from_answer_tag,
    with_leading_zeros,
)
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion, EvalSource, EvaluationEnv

__all__ = [
    "PUBMED_DECISIONS",
    "TEXT_SOURCES",
    "TextEvalEnv",
    "best_drop_match",
    "contains_answer",
    "contains_words",
    "list_of_mappings",
    "normalized_answer",
]

Row = Mapping[str, Any]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WORD_PUNCTUATION = str.maketrans("", "", string.punctuation)
NUMBER_WORDS = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6",
    "seven": "7", "eight": "8", "nine": "9", "ten": "10", "eleven": "11", "twelve": "12",
}  # fmt: skip


def normalized_answer(text: str) -> str:
    """Return a short answer for comparison: lower case, without articles and punctuation.

    Numbers are written alike: `1,000` and `1000.0`, `three` and `3`, `.5` and `0.5`. They keep
    their sign.
    """
    words = []
    text = with_leading_zeros(text.lower().replace("\u2212", "-"))
    for word in re.split(r"\s+|(?<=[\w.%)])[\u2013\u2014-]+", text):
        number = _as_number(word.strip(string.punctuation.replace("-", "") + "$%"))
        words.append(number if number is not None else word.translate(_WORD_PUNCTUATION))
    joined = " ".join(words)
    # An answer may be an article itself, such as the grade A.
    return " ".join(_ARTICLES.sub(" ", joined).split() or joined.split())


def _as_number(word: str) -> str | None:
    word = re.sub(r"[,$]", "", NUMBER_WORDS.get(word, word))
    found = re.fullmatch(r"(-?)(\d{1,30})(?:\.(\d{1,30}))?", word)
    if not found:
        return None
    # As text: a float cannot hold long numbers, such as those of books.
    part = (found[3] or "").rstrip("0")
    number = f"{int(found[2])}.{part}" if part else f"{int(found[2])}"
    return number if number == "0" else found[1] + number


def contains_answer(reply: str, gold: str) -> bool:
    """Return whether the words of the gold answer occur in a reply, in order and adjacent."""
    return contains_words(normalized_answer(reply).split(), normalized_answer(gold).split())


def contains_words(words: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether `wanted` occurs in `words`, in order and adjacent; not if it is empty."""
    return bool(wanted) and any(
        words[start : start + len(wanted)] == wanted
        for start in range(len(words) - len(wanted) + 1)
    )


MAX_SPANS = 32
MAX_REPLY_CHARACTERS = 10_000
"""Longer replies are no short answers."""
_COMMA = r"[;\n]|,(?!(?<=\d,)\d{3}(?!\d))"
SPAN_ENDS = tuple(map(re.compile, (rf"{_COMMA}|\band\b", _COMMA, r"[;\n]|\band\b", r"[;\n]")))
"""Separators of spans, except for the comma in `1,000`; spans may contain some of them."""


def best_drop_match(reply: str, golds: Sequence[Sequence[str]]) -> tuple[bool, float]:
    """Return whether a reply equals one of the gold answers, and its best F1 score of words.

    Args:
        reply: the answer; for a gold answer of several spans, they are separated by commas,
            semicolons, lines or `and`.
        golds: accepted answers, each a list of spans.

    Source: Dua et al. 2019, "DROP", arXiv:1903.00161, section 5. Differs in aligning spans
    greedily, best pairs first.
    """
    is_equal, best = False, 0.0
    if len(reply) > MAX_REPLY_CHARACTERS:
        return is_equal, best
    for spans in golds:
        wanted = [normalized_answer(span) for span in spans]
        for texts in [end.split(reply) for end in SPAN_ENDS] if len(spans) > 1 else [[reply]]:
            given = [text for each in texts[:MAX_SPANS] if (text := normalized_answer(each))]
            is_equal = is_equal or (bool(given) and sorted(given) == sorted(wanted))
            best = max(best, _aligned_f1(given, wanted))
    return is_equal, 1.0 if is_equal else best


def _aligned_f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    pairs = sorted(
        ((_word_f1(one, two), i, k) for i, one in enumerate(given) for k, two in enumerate(wanted)),
        reverse=True,
    )
    used_given: set[int] = set()
    used_wanted: set[int] = set()
    total = 0.0
    for score, i, k in pairs:
        if i not in used_given and k not in used_wanted:
            used_given.add(i)
            used_wanted.add(k)
            total += score
    return total / max(len(given), len(wanted), 1)


def _word_f1(given: str, wanted: str) -> float:
    first, second = set(given.split()), set(wanted.split())
    numbers = {word for word in second if word[0].isdigit()}
    common = first & second
    if not common or (numbers and not numbers & first):
        return 0.0
    precision, recall = len(common) / len(first), len(common) / len(second)
    return 2 * precision * recall / (precision + recall)


ANSWER_REQUEST = "Give your final answer, as short as possible, between <answer> and </answer>."


class TextEvalEnv(EvaluationEnv):
    """Questions with a short answer in tags; `gold` is the list of accepted answers.

    Implement `grade_text`.
    """

    answer_request: ClassVar[str] = ANSWER_REQUEST

    def question_text(self, item: EvalQuestion) -> str:
        return f"{item.question}\n\n{self.answer_request}"

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        found = extract_freeform_from_answer_tag(answer_part(completion))
        return await self.grade_text(item, found.text, found.method)

    @abstractmethod
    async def grade_text(self, item: EvalQuestion, answer: str | None, method: str) -> EvalGrade:
        """Grade the text between the tags; None without one."""

    def gold_text(self, item: EvalQuestion) -> str:
        return " | ".join(", ".join(spans) for spans in item.gold)

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>I looked.</think><answer>{', '.join(item.gold[0])}</answer>"


def _read_drop(row: Row) -> EvalQuestion:
    answers = [row["answer"], *list_of_mappings(row.get("validated_answers"))]
    golds = [spans for answer in answers if (spans := _drop_spans(answer))]
    if not golds:
        raise ConfigError("its answer has neither number nor spans nor date")
    unique = tuple(dict.fromkeys(tuple(spans) for spans in golds))
    return EvalQuestion(f"{row['passage']}\n\nQuestion: {row['question']}", unique)


def list_of_mappings(columns: Any) -> list[Any]:
    """Return a list of mappings, which the hub may store as one mapping of lists."""
    if not isinstance(columns, Mapping):
        return list(columns or ())
    count = max((len(values) for values in columns.values()), default=0)
    return [
        {name: values[i] for name, values in columns.items() if i < len(values)}
        for i in range(count)
    ]


def _drop_spans(answer: Any) -> list[str]:
    if isinstance(answer, str):
        return [answer] if answer.strip() else []
    spans = [str(span) for span in answer.get("spans") or () if str(span).strip()]
    number = str(answer.get("number") or "").strip()
    date = answer.get("date") or {}
    words = [str(date.get(part) or "").strip() for part in ("day", "month", "year")]
    return (
        spans
        or ([number] if number else [])
        or ([" ".join(filter(None, words))] if any(words) else [])
    )


PUBMED_DECISIONS = ("yes", "no", "maybe")


def _read_pubmedqa(row: Row) -> EvalQuestion:
    """Convert a row whose context is a text, or the paragraphs of an abstract."""
    context = row["context"]
    paragraphs = context["contexts"] if isinstance(context, Mapping) else [context]
    decision = str(row["final_decision"]).strip().lower()
    if decision not in PUBMED_DECISIONS:
        raise ConfigError(f"the decision {decision!r} is not yes, no or maybe")
    abstract = "\n".join(str(paragraph).strip() for paragraph in paragraphs)
    return EvalQuestion(f"{abstract}\n\nQuestion: {str(row['question']).strip()}", decision)


def _read_hle(row: Row) -> EvalQuestion:
    gold = str(row["answer"]).strip()
    if not gold:
        raise ConfigError("its gold answer is empty")
    category = row.get("category")
    groups = (("category", str(category)),) if category else ()
    return EvalQuestion(str(row["question"]), ((gold,),), groups=groups)


def _read_arc_agi(row: Row) -> EvalQuestion:
    """Convert a row with solved pairs of grids, and one pair as its question."""
    lines = ["Each example is a grid of digits and what the same rule makes of it."]
    for number, pair in enumerate(list_of_mappings(row["fewshots"]), 1):
        lines += ["", f"Example {number}", f"Input: {pair['input']}", f"Output: {pair['output']}"]
    asked = row["question"]
    gold = tuple(tuple(int(cell) for cell in line) for line in asked["output"])
    return EvalQuestion("\n".join([*lines, "", "Test", f"Input: {asked['input']}"]), gold)


def _read_mtbench(row: Row) -> EvalQuestion:
    """Convert a row with the turns of a user; `gold` has each turn and its reference, if any."""
    turns, references = list(row["turns"]), list(row.get("reference") or ())
    if not turns:
        raise ConfigError("it has no turns")
    pairs = tuple(
        (str(turn), str(references[i]) if i < len(references) and references[i] else None)
        for i, turn in enumerate(turns)
    )
    return EvalQuestion(pairs[0][0], pairs, groups=(("category", str(row["category"])),))


TEXT_SOURCES: Mapping[str, EvalSource] = {
    "drop": EvalSource(
        path="lighteval/drop_harness",
        split="validation",
        columns=("passage", "question", "answer"),
        optional=("validated_answers",),
        read=_read_drop,
        overall="eval/accuracy",
    ),
    "simpleqa": EvalSource(
        path="lighteval/SimpleQA",
        columns=("problem", "answer"),
        read=lambda row: EvalQuestion(str(row["problem"]), ((str(row["answer"]),),)),
        overall="eval/exact_match_accuracy",
    ),
    "pubmedqa": EvalSource(
        path="pubmed_qa",
        subset="pqa_labeled",
        split="train",
        columns=("question", "context", "final_decision"),
        optional=("pubid",),
        read=_read_pubmedqa,
    ),
    "hle": EvalSource(
        path="cais/hle",
        columns=("question", "answer"),
        optional=("category", "image"),
        read=_read_hle,
        group_metrics={"category": "category_{}_accuracy"},
    ),
    "arc_agi": EvalSource(
        path="arc-agi-community/arc-agi-2",
        columns=("fewshots", "question"),
        read=_read_arc_agi,
    ),
    "mtbench": EvalSource(
        path="lighteval/mt-bench",
        split="train",
        columns=("turns", "category"),
        optional=("reference",),
        read=_read_mtbench,
        overall="avg_score",
        group_metrics={"category": "category_{}_avg_score"},
    ),
}
"""Data sets with answers in free text."""
