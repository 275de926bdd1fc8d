"""IFEval: requests with instructions that a program can verify, such as a number of words.

    prompt, instruction_id_list, kwargs -> one chat -> `follows` for each instruction
                                                         strict: the completion as it is
                                                         loose: any of its eight variants

    python environments/eval_environments/ifeval_eval.py evaluate \
        --env.dataset_path environments/data/ifeval_sample --env.data_dir_to_save_evals results

`CHECKS` has the 25 instructions with the names of their arguments. An empty text follows none.

Metrics: `eval/prompt_level_strict_acc` (all instructions of a prompt are followed),
`eval/inst_level_strict_acc` (mean over all instructions), and both as `_loose_acc`. The whole data
set has instructions that name a language; they need the extra `instructions`.

Source: Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models",
arXiv:2311.07911. Differs in counting sentences by a rule of its own, without a trained splitter,
and in checking the case of letters without detecting the language.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import answer_part
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion, EvalSource, EvaluationEnv
from atroposlib.tasks.instructions import validate_response_language
from atroposlib.utils.text import near_name

__all__ = [
    "CHECKS",
    "IFEvalEnv",
    "InstructionCheck",
    "VerifiableInstruction",
    "count_sentences",
    "follows",
    "follows_loosely",
    "instructions_of",
    "loose_variants",
    "require_language_detection",
]

CARD = EnvironmentCard(
    task="requests with verifiable instructions (IFEval)",
    turns="1",
    reward="1 if all instructions of a prompt are followed, else 0",
    data="IFEval from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/ifeval_sample",
    needs="core install; `pip install '.[instructions]'` for the data set of the hub",
)
SAMPLE = Path(__file__).parents[1] / "data" / "ifeval_sample"
Arguments = Mapping[str, Any]
LANGUAGE_ID = "language:response_language"


class InstructionCheck(NamedTuple):
    """The check of one kind of instruction."""

    check: Callable[[str, Arguments], bool]
    arguments: tuple[str, ...] = ()
    """Names of the required arguments."""


class VerifiableInstruction(NamedTuple):
    """One instruction of a prompt."""

    id: str
    arguments: Arguments


def instructions_of(
    ids: Sequence[str], arguments: Sequence[Arguments]
) -> tuple[VerifiableInstruction, ...]:
    """Return the instructions of a row, without arguments that are None.

    Raises:
        ConfigError: an id is unknown, or an argument is missing or has a wrong value.
    """
    if not ids or len(ids) != len(arguments):
        raise ConfigError(
            f"instruction_id_list has {len(ids)} entries and kwargs has {len(arguments)}; expected "
            "the same number, at least one"
        )
    found = []
    for name, given in zip(ids, arguments, strict=True):
        if name not in CHECKS:
            raise ConfigError(f"unknown instruction {name!r}{near_name(name, CHECKS)}")
        kept = {key: value for key, value in (given or {}).items() if value is not None}
        missing = [key for key in CHECKS[name].arguments if key not in kept]
        if missing:
            raise ConfigError(f"instruction {name} has no {', '.join(missing)}")
        for key in kept:
            if key.endswith("relation") and kept[key] not in RELATIONS:
                raise ConfigError(
                    f"{key} of {name} is {kept[key]!r}; expected {' or '.join(RELATIONS)}"
                )
        found.append(VerifiableInstruction(name, kept))
    return tuple(found)


def follows(instruction: VerifiableInstruction, text: str) -> bool:
    """Return whether a text follows an instruction.

    Raises:
        MissingExtraError: the instruction names a language, and langdetect is not installed.
    """
    return bool(text.strip()) and CHECKS[instruction.id].check(text, instruction.arguments)


def follows_loosely(instruction: VerifiableInstruction, text: str) -> bool:
    """Return whether one of the variants of a text follows an instruction."""
    return any(follows(instruction, variant) for variant in loose_variants(text))


def loose_variants(text: str) -> list[str]:
    """Return a text with and without its first line, last line and asterisks, in all combinations.

    They forgive an introduction, a closing remark and markup that nothing asked for.
    """
    lines = text.split("\n")
    cuts = (lines, lines[1:], lines[:-1], lines[1:-1])
    plain = ["\n".join(cut).strip() for cut in cuts]
    return [*plain, *(each.replace("*", "") for each in plain)]


def require_language_detection() -> None:
    """Check that languages can be detected.

    Raises:
        MissingExtraError: langdetect is not installed.
    """
    try:
        import langdetect  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("langdetect", extra="instructions") from error


RELATIONS = ("at least", "less than")


def _relates(count: int, relation: str, number: Any) -> bool:
    return count >= int(number) if relation == RELATIONS[0] else count < int(number)


def _has_keywords(text: str, given: Arguments) -> bool:
    return all(word.casefold() in text.casefold() for word in given["keywords"])


def _keyword_frequency(text: str, given: Arguments) -> bool:
    count = text.casefold().count(given["keyword"].casefold())
    return _relates(count, given["relation"], given["frequency"])


def _has_no_forbidden_words(text: str, given: Arguments) -> bool:
    words = (re.escape(word) for word in given["forbidden_words"])
    return not any(re.search(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE) for word in words)


def _letter_frequency(text: str, given: Arguments) -> bool:
    count = text.casefold().count(given["letter"].casefold())
    return _relates(count, given["let_relation"], given["let_frequency"])


def _is_in_language(text: str, given: Arguments) -> bool:
    require_language_detection()
    return validate_response_language(text, given["language"])


_ABBREVIATION = re.compile(
    r"(?<![\w.])(?:(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|cf|No|approx|Inc|Ltd|Co|Fig)|[A-Za-z]"
    r"|(?:[A-Za-z]\.){1,5}[A-Za-z])\.$"
)
_SENTENCE_END = re.compile(
    r"(?<![.!?\u3002\uff01\uff1f])[.!?\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]*_]*(?=\s|$)"
)


_WORD_CHARACTER = re.compile(r"\w")


def count_sentences(text: str) -> int:
    """Return the number of sentences; each ends with a mark or at the end of a paragraph.

    Initials and common abbreviations do not end a sentence unless they end the paragraph.
    """
    count = 0
    for paragraph in re.split(r"\n\s*\n", text):
        start, words_end = 0, _end_of_words(paragraph)
        for end in _SENTENCE_END.finditer(paragraph):
            is_last = end.end() >= words_end
            if not _WORD_CHARACTER.search(paragraph, start, end.end()):
                start = end.end()  # a later search need not read these marks again
                continue
            if _ABBREVIATION.search(paragraph[max(0, end.end() - 12) : end.end()]) and not is_last:
                continue
            count += 1
            start = end.end()
        count += start < words_end
    return count


def _end_of_words(text: str) -> int:
    """Return the position after the last character of a word; 0 without one."""
    end = len(text)
    while end and not _WORD_CHARACTER.match(text, end - 1):
        end -= 1
    return end


def _number_of_sentences(text: str, given: Arguments) -> bool:
    return _relates(count_sentences(text), given["relation"], given["num_sentences"])


def _number_of_paragraphs(text: str, given: Arguments) -> bool:
    parts = _between(re.split(r"\s?\*\*\*\s?", text))
    return all(parts) and len(parts) == int(given["num_paragraphs"])


def _between(parts: Sequence[str]) -> list[str]:
    """Return the stripped parts between separators, which may also open and close the text."""
    stripped = [part.strip() for part in parts]
    return stripped[1 if not stripped[0] else 0 : -1 if not stripped[-1] else None]


def _number_of_words(text: str, given: Arguments) -> bool:
    return _relates(len(re.findall(r"\w+", text)), given["relation"], given["num_words"])


def _first_word_of_paragraph(text: str, given: Arguments) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    position = int(given["nth_paragraph"])
    if len(paragraphs) != int(given["num_paragraphs"]) or not 1 <= position <= len(paragraphs):
        return False
    words = re.findall(r"[\w'\u2019-]+", paragraphs[position - 1])
    return bool(words) and words[0].casefold() == given["first_word"].casefold()


def _number_of_placeholders(text: str, given: Arguments) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= int(given["num_placeholders"])


def _has_postscript(text: str, given: Arguments) -> bool:
    letters = re.sub(r"[.\s]", "", given["postscript_marker"]).casefold()
    pattern = r"\.?\s?".join(map(re.escape, letters))
    return re.search(rf"(?m)^\W{{0,3}}{pattern}(?!\w)", text.casefold()) is not None


def _number_of_bullets(text: str, given: Arguments) -> bool:
    bullets = re.findall(r"(?m)^[ \t]*(?:\*(?!\*)|-(?!-))[ \t]*\S", text)
    return len(bullets) == int(given["num_bullets"])


ALLOWED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _is_constrained(text: str, _: Arguments) -> bool:
    return any(response in text for response in ALLOWED_RESPONSES)


def _number_of_highlights(text: str, given: Arguments) -> bool:
    marked = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    count = sum(1 for double, single in marked if (double or single).strip())
    return count >= int(given["num_highlights"])


def _number_of_sections(text: str, given: Arguments) -> bool:
    heads = re.findall(rf"(?m)^\W{{0,5}}{re.escape(given['section_spliter'])}\s?\d+", text)
    return len(heads) >= int(given["num_sections"])


def _is_json(text: str, _: Arguments) -> bool:
    block = text.strip()
    start, *content = block.split("\n", 1)
    is_fenced = start.rstrip().lower() in ("```", "```json") and block.endswith("\n```")
    try:
        json.loads(content[0].removesuffix("\n```") if content and is_fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str, _: Arguments) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^\n<>]+)>>", text))


def _are_two_responses(text: str, _: Arguments) -> bool:
    parts = _between(text.split("******"))
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeats_prompt(text: str, given: Arguments) -> bool:
    return text.strip().casefold().startswith(given["prompt_to_repeat"].strip().casefold())


def _ends_with(text: str, given: Arguments) -> bool:
    ending = given["end_phrase"].strip().casefold()
    return text.strip().strip('"').strip().casefold().endswith(ending)


def _is_quoted(text: str, _: Arguments) -> bool:
    whole = text.strip()
    return len(whole) > 1 and whole[0] == whole[-1] == '"'


def _capital_words(text: str, given: Arguments) -> bool:
    words = re.findall(r"[^\W_]+(?:['\u2019-][^\W_]+)*", text)
    count = sum(word.isupper() for word in words)
    return _relates(count, given["capital_relation"], given["capital_frequency"])


def _is_upper(text: str, _: Arguments) -> bool:
    return text.isupper()


def _is_lower(text: str, _: Arguments) -> bool:
    return text.islower()


def _has_no_comma(text: str, _: Arguments) -> bool:
    return "," not in text


CHECKS: Mapping[str, InstructionCheck] = {
    "keywords:existence": InstructionCheck(_has_keywords, ("keywords",)),
    "keywords:frequency": InstructionCheck(
        _keyword_frequency, ("keyword", "frequency", "relation")
    ),
    "keywords:forbidden_words": InstructionCheck(_has_no_forbidden_words, ("forbidden_words",)),
    "keywords:letter_frequency": InstructionCheck(
        _letter_frequency, ("letter", "let_frequency", "let_relation")
    ),
    LANGUAGE_ID: InstructionCheck(_is_in_language, ("language",)),
    "length_constraints:number_sentences": InstructionCheck(
        _number_of_sentences, ("num_sentences", "relation")
    ),
    "length_constraints:number_paragraphs": InstructionCheck(
        _number_of_paragraphs, ("num_paragraphs",)
    ),
    "length_constraints:number_words": InstructionCheck(
        _number_of_words, ("num_words", "relation")
    ),
    "length_constraints:nth_paragraph_first_word": InstructionCheck(
        _first_word_of_paragraph, ("first_word", "num_paragraphs", "nth_paragraph")
    ),
    "detectable_content:number_placeholders": InstructionCheck(
        _number_of_placeholders, ("num_placeholders",)
    ),
    "detectable_content:postscript": InstructionCheck(_has_postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": InstructionCheck(_number_of_bullets, ("num_bullets",)),
    "detectable_format:constrained_response": InstructionCheck(_is_constrained),
    "detectable_format:number_highlighted_sections": InstructionCheck(
        _number_of_highlights, ("num_highlights",)
    ),
    "detectable_format:multiple_sections": InstructionCheck(
        _number_of_sections, ("section_spliter", "num_sections")
    ),
    "detectable_format:json_format": InstructionCheck(_is_json),
    "detectable_format:title": InstructionCheck(_has_title),
    "combination:two_responses": InstructionCheck(_are_two_responses),
    "combination:repeat_prompt": InstructionCheck(_repeats_prompt, ("prompt_to_repeat",)),
    "startend:end_checker": InstructionCheck(_ends_with, ("end_phrase",)),
    "startend:quotation": InstructionCheck(_is_quoted),
    "change_case:capital_word_frequency": InstructionCheck(
        _capital_words, ("capital_frequency", "capital_relation")
    ),
    "change_case:english_capital": InstructionCheck(_is_upper),
    "change_case:english_lowercase": InstructionCheck(_is_lower),
    "punctuation:no_comma": InstructionCheck(_has_no_comma),
}
"""Instruction id to its check."""


STRICT, LOOSE = "eval/prompt_level_strict_acc", "eval/prompt_level_loose_acc"


def read_row(row: Mapping[str, Any]) -> EvalQuestion:
    """Return the prompt of a row with its instructions; raises `ConfigError` if one is unknown."""
    instructions = instructions_of(row["instruction_id_list"], row["kwargs"])
    return EvalQuestion(str(row["prompt"]), instructions, reference=row.get("reference"))


class IFEvalEnv(EvaluationEnv):
    """IFEval; the gold answer of an item is the list of its instructions."""

    name = "ifeval_eval"
    source = EvalSource(
        path="google/IFEval",
        split="train",
        columns=("prompt", "instruction_id_list", "kwargs"),
        optional=("reference",),
        read=read_row,
        overall=STRICT,
    )
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def load_questions(self) -> list[EvalQuestion]:
        """Read the prompts.

        Raises:
            MissingExtraError: an instruction names a language, and langdetect is not installed.
        """
        questions = super().load_questions()
        if any(each.id == LANGUAGE_ID for question in questions for each in question.gold):
            require_language_detection()
        return questions

    def question_text(self, item: EvalQuestion) -> str:
        return item.question

    def gold_text(self, item: EvalQuestion) -> str:
        return ", ".join(instruction.id for instruction in item.gold)

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        answer = answer_part(completion)
        strict = [follows(instruction, answer) for instruction in item.gold]
        loose = [follows_loosely(instruction, answer) for instruction in item.gold]
        values = {
            STRICT: float(all(strict)),
            LOOSE: float(all(loose)),
            "num_instructions": float(len(item.gold)),
            "num_strict": float(sum(strict)),
            "num_loose": float(sum(loose)),
        }
        broken = [
            instruction.id
            for instruction, is_followed in zip(item.gold, strict, strict=True)
            if not is_followed
        ]
        method = f"broken: {', '.join(broken)}" if broken else "all followed"
        return EvalGrade(float(all(strict)), answer, method, bool(answer), values)

    def evaluation_values(self, record: Mapping[str, Any]) -> dict[str, float]:
        return {name: record["values"][name] for name in (STRICT, LOOSE)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        total = sum(sample["values"]["num_instructions"] for sample in samples)
        by_instruction = {
            f"eval/inst_level_{kind}_acc": sum(s["values"][f"num_{kind}"] for s in samples) / total
            for kind in ("strict", "loose")
        }
        return {
            **super().evaluation_metrics(samples),
            LOOSE: statistics.fmean(sample["values"][LOOSE] for sample in samples),
            **by_instruction,
        }

    def check_gold_answer(self, item: EvalQuestion) -> str | None:
        return item.reference


if __name__ == "__main__":
    IFEvalEnv.cli()
