r"""Answers of evaluations: an option, a number, a text or a boxed result in a completion. Pure.

Each function also returns the way in which the answer was found, so that an evaluation counts it:
`(answer or None, method)`.

    completion ─► answer_part (without thinking) ─► <answer> tag ─► letter, number or text
                                                 └► phrases such as "the answer is B", no tag
                                                 └► \boxed{} exactly once

All searches are linear in the text.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Sequence
from string import ascii_uppercase
from typing import NamedTuple

__all__ = [
    "BoxedAnswer",
    "FoundLetter",
    "FoundNumber",
    "FoundText",
    "answer_part",
    "build_mcqa_fallback_patterns",
    "compare_math_strings",
    "extract_boxed_answers",
    "extract_first_boxed_answer",
    "extract_freeform_from_answer_tag",
    "extract_letter_from_answer_tag",
    "extract_mcqa_answer_with_fallback",
    "extract_number_from_answer_tag",
    "extract_thinking_content",
    "extract_word_from_answer_tag",
    "math_normalize_string",
    "only_boxed_answer",
    "validate_thinking_format",
    "with_leading_zeros",
]

logger = logging.getLogger(__name__)

_OPENED = re.compile("<answer>", re.IGNORECASE | re.ASCII)
_CLOSED = re.compile("</answer>", re.IGNORECASE | re.ASCII)


class FoundLetter(NamedTuple):
    """The option that an answer names; unpacks as `(letter, method)`."""

    letter: str | None
    method: str


class FoundNumber(NamedTuple):
    """The numbered option that an answer names; unpacks as `(number, method)`."""

    number: int | None
    method: str


class FoundText(NamedTuple):
    """The text of an answer; unpacks as `(text, method)`."""

    text: str | None
    method: str


_THINKING_TAGS = (
    (re.compile("<think>", re.IGNORECASE), re.compile("</think>", re.IGNORECASE)),
    (
        re.compile(r"<\|start_of_scratchpad\|>", re.IGNORECASE),
        re.compile(r"<\|end_of_scratchpad\|>", re.IGNORECASE),
    ),
)


def validate_thinking_format(text: str, mode: bool) -> tuple[bool, str]:
    """Return whether a completion has exactly one block of thinking, and the text after it.

    Args:
        text: the completion.
        mode: Whether thinking is expected; without it, every text is valid and returned as it is.

    Returns:
        Whether the format is valid; and the stripped rest, or the whole text if it is not.
    """
    if not mode:
        return True, text
    for opening, closing in _THINKING_TAGS:
        opened, closed = list(opening.finditer(text)), list(closing.finditer(text))
        if len(opened) == len(closed) == 1 and opened[0].end() <= closed[0].start():
            return True, text[closed[0].end() :].strip()
    return False, text


def extract_thinking_content(text: str) -> str | None:
    """Return the stripped thinking of a completion; None unless there is exactly one block."""
    for opening, closing in _THINKING_TAGS:
        opened, closed = list(opening.finditer(text)), list(closing.finditer(text))
        if len(opened) == len(closed) == 1 and opened[0].end() <= closed[0].start():
            return text[opened[0].end() : closed[0].start()].strip()
    return None


def answer_part(completion: str) -> str:
    """Return the text after the last block of thinking; empty if a block was not closed.

    A chat template may write the opening tag itself, so a lone closing tag also ends the thinking.
    """
    text = completion
    for opening, closing in _THINKING_TAGS:
        closed = list(closing.finditer(text))
        text = text[closed[-1].end() :] if closed else text
        opened = opening.search(text)
        text = text[: opened.start()] if opened else text
    return text.strip()


_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore)[\s,]{1,5})?"
    r"(?:(?:the|my)\s{1,5})?(?:(?:final|correct|best|right)\s{1,5})?"
    r"(?:(?:answer|choice|option)(?:\s{1,5}(?:is|would\s{1,5}be)|\s{0,5}:)"
    r"|i\s{1,5}(?:choose|pick|select)|option|choice)"
    r"[\s:]{0,5}(?:option\s{1,5}|choice\s{1,5})?",
    re.IGNORECASE,
)
_PUNCTUATION = " \t\r\n.,:;!?*_`'\"()[]{}$"
MIN_CONTAINED_CHARACTERS = 3
"""Shorter texts of options are not searched within an answer: they occur in other words."""


def extract_letter_from_answer_tag(
    response: str,
    valid_letters: Collection[str],
    debug: bool = False,
    choices: Sequence[str] | None = None,
) -> FoundLetter:
    """Return the letter in the first pair of answer tags.

    Args:
        response: the completion, without its thinking.
        valid_letters: the letters of the options, such as `"ABCD"`, in the order of `choices`.
        debug: Whether to log the result.
        choices: the texts of the options; an answer may repeat one of them in place of its letter.

    Returns:
        The letter, or None, and one of `answer_tag`, `answer_tag_choice_match`,
        `answer_tag_ambiguous`, `answer_tag_no_letter`, `no_answer_tag` and `empty_answer_tag`.
    """
    found = _letter_in_tag(response, [letter.upper() for letter in valid_letters], choices)
    if debug:
        logger.info("answer %r, found by %s", found.letter, found.method)
    return found


def _letter_in_tag(
    response: str, letters: Sequence[str], choices: Sequence[str] | None
) -> FoundLetter:
    content, method = extract_freeform_from_answer_tag(response)
    if content is None:
        return FoundLetter(None, method)
    bare = _without_lead_in(content)
    if bare.upper() in letters:
        return FoundLetter(bare.upper(), "answer_tag")
    matched = _matching_choices(bare, content, choices or ())
    if len(matched) == 1 and matched[0] < len(letters):
        return FoundLetter(letters[matched[0]], "answer_tag_choice_match")
    named = _letters_in(content, letters)
    if len(matched) > 1 or len(named) > 1:
        return FoundLetter(None, "answer_tag_ambiguous")
    if named:
        return FoundLetter(named.pop(), "answer_tag")
    return FoundLetter(None, "answer_tag_no_letter")


def _without_lead_in(content: str) -> str:
    text = content.strip(_PUNCTUATION)
    lead = _LEAD_IN.match(text)
    return (text[lead.end() :] if lead else text).strip(_PUNCTUATION)


def _matching_choices(bare: str, content: str, choices: Sequence[str]) -> list[int]:
    """Return the indices of the options whose text an answer is, or else contains."""
    texts = [" ".join(choice.strip(_PUNCTUATION).casefold().split()) for choice in choices]
    wanted = " ".join(bare.casefold().split())
    equal = [i for i, text in enumerate(texts) if text and text == wanted]
    if equal:
        return equal
    whole = " ".join(content.casefold().split())
    contained = [
        i
        for i, text in enumerate(texts)
        if len(text) >= MIN_CONTAINED_CHARACTERS
        and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", whole)
    ]
    # "New York City" also contains "New York".
    return [
        i
        for i in contained
        if not any(i != k and texts[i] != texts[k] and texts[i] in texts[k] for k in contained)
    ]


_WORD_AS_LETTER = re.compile(
    r"[AI]\s{1,5}(?!(?:because|since|as|for|is|or|and|but|not)\b)[a-z]|I'[a-z]"
)
"""The article `A` or the pronoun `I`, which are words and not options."""


def _letters_in(text: str, letters: Collection[str]) -> set[str]:
    """Return the capital letters of options that stand alone in a text."""
    return {
        match[0]
        for match in re.finditer(r"(?<![\w'\u2019-])[A-Z](?![\w\u2019]|'[a-z]|-\w)", text)
        if match[0] in letters and not _WORD_AS_LETTER.match(text, match.start())
    }


def extract_number_from_answer_tag(
    response: str, num_choices: int, debug: bool = False
) -> FoundNumber:
    """Return the number of an option in the first pair of answer tags.

    Args:
        response: the completion, without its thinking.
        num_choices: the options are numbered from 1 to this number.
        debug: Whether to log the result.

    Returns:
        The number, or None, and one of `answer_tag`, `answer_tag_ambiguous`,
        `answer_tag_no_number`, `no_answer_tag` and `empty_answer_tag`.
    """
    content, method = extract_freeform_from_answer_tag(response)
    found = FoundNumber(None, method)
    if content is not None:
        bare = _without_lead_in(content)
        texts = (
            [bare]
            if bare.isdecimal()
            else re.findall(r"(?<![\w.,-])\d{1,9}(?![\w]|[.,]\d)", content)
        )
        numbers = {int(text) for text in texts if len(text) < 10 and 1 <= int(text) <= num_choices}
        if len(numbers) == 1:
            found = FoundNumber(numbers.pop(), "answer_tag")
        else:
            found = FoundNumber(None, f"answer_tag_{'ambiguous' if numbers else 'no_number'}")
    if debug:
        logger.info("answer %r, found by %s", found.number, found.method)
    return found


def extract_word_from_answer_tag(response: str, words: Collection[str]) -> FoundText:
    """Return the one of `words`, which are lower case, that the first pair of answer tags names.

    Returns:
        The word, or None, and one of `answer_tag`, `answer_tag_ambiguous`, `answer_tag_no_word`,
        `no_answer_tag` and `empty_answer_tag`.
    """
    content, method = extract_freeform_from_answer_tag(response)
    if content is None:
        return FoundText(None, method)
    named = set(words) & set(re.findall(r"\w+", content.lower()))
    if len(named) == 1:
        return FoundText(named.pop(), "answer_tag")
    return FoundText(None, f"answer_tag_{'ambiguous' if named else 'no_word'}")


def extract_freeform_from_answer_tag(response: str) -> FoundText:
    """Return the stripped text in the first pair of answer tags, which may span lines.

    Returns:
        The text, or None, and one of `answer_tag`, `no_answer_tag` and `empty_answer_tag`.
    """
    opened = _OPENED.search(response)
    closed = _CLOSED.search(response, opened.end()) if opened else None
    if opened is None or closed is None:
        return FoundText(None, "no_answer_tag")
    text = response[opened.end() : closed.start()].strip()
    return FoundText(text, "answer_tag") if text else FoundText(None, "empty_answer_tag")


_LAST_MATCH = (
    "final_answer_hope",
    "final_answer_is",
    "the_answer_is",
    "answer_colon",
    "answer_space",
)
"""Patterns whose last match counts: a conclusion follows its reasons."""


def build_mcqa_fallback_patterns(num_choices: int = 4) -> list[tuple[str, re.Pattern[str]]]:
    """Return name and pattern of each way to name an option without tags, in their order.

    Args:
        num_choices: number of options, up to 26; they are A, B, ...
    """
    last = ascii_uppercase[num_choices - 1]
    letter = rf"[\s*_(\[]{{0,5}}([A-{last}])(?![\w'\u2019])"
    final = r"(?i:\bfinal\s{1,5}answer)"
    return [
        (
            "final_answer_hope",
            re.compile(rf"{final}\s{{1,5}}(?i:is)[\s:]{{0,5}}{letter}[^\n]{{0,40}}(?i:\bI\s+hope)"),
        ),
        ("final_answer_is", re.compile(rf"{final}(?:\s{{1,5}}(?i:is))?[\s:]{{0,5}}{letter}")),
        (
            "the_answer_is",
            re.compile(
                rf"(?i:\bthe\s{{1,5}}(?:(?:correct|best|right)\s{{1,5}})?answer\s{{1,5}}is)"
                rf"[\s:]{{0,5}}{letter}"
            ),
        ),
        ("answer_colon", re.compile(rf"(?i:\banswer)[\s*_]{{0,5}}:[\s*_]{{0,5}}{letter}")),
        ("answer_space", re.compile(rf"(?i:\banswer)\s{{1,5}}{letter}")),
        ("start", re.compile(rf"\A[\s*_(\[]{{0,5}}([A-{last}])(?:[.):\]*_]|\s*\Z|\s*\n)")),
        ("line_start", re.compile(rf"(?m)^[*_(\[]{{0,3}}([A-{last}])(?:[.):\]*_]|[ \t]*$)")),
        ("standalone", re.compile(rf"(?<![\w'\u2019-])([A-{last}])(?![\w'\u2019-])")),
    ]


def extract_mcqa_answer_with_fallback(
    response: str,
    num_choices: int = 4,
    fallback_patterns: Sequence[tuple[str, re.Pattern[str]]] | None = None,
    debug: bool = False,
) -> FoundLetter:
    """Return the letter in the answer tags, or of a phrase if there is no such letter.

    Only capital letters count, and an article or a pronoun does not. A text that mentions several
    options without a phrase is unanswered, as is a tag with several: nothing is guessed.

    Args:
        response: the completion, without its thinking.
        num_choices: number of options, up to 26.
        fallback_patterns: name and pattern of phrases, with the letter as first group; the default
            is that of `build_mcqa_fallback_patterns`.
        debug: Whether to log the result.

    Returns:
        The letter, or None, and the method: that of `extract_letter_from_answer_tag`,
        `fallback_<name of the pattern>`, or `no_match`.
    """
    letters = ascii_uppercase[:num_choices]
    found = extract_letter_from_answer_tag(response, letters)
    if found.letter is None and found.method != "answer_tag_ambiguous":
        if fallback_patterns is None:
            fallback_patterns = build_mcqa_fallback_patterns(num_choices)
        found = _letter_of_phrase(response, letters, fallback_patterns)
    if debug:
        logger.info("answer %r, found by %s", found.letter, found.method)
    return found


def _letter_of_phrase(
    response: str, letters: str, patterns: Sequence[tuple[str, re.Pattern[str]]]
) -> FoundLetter:
    matches = {
        name: [
            match
            for match in pattern.finditer(response)
            if not _WORD_AS_LETTER.match(response, match.start(1))
        ]
        for name, pattern in patterns
    }
    several = {name for name, found in matches.items() if len({match[1] for match in found}) > 1}
    skipped = several & {"line_start", "standalone"}
    if "line_start" in skipped:
        skipped.add("start")  # the answer repeats the list of options
    for name, found in matches.items():
        if found and name not in skipped:
            chosen = found[-1 if name in _LAST_MATCH else 0][1].upper()
            if chosen in letters:
                return FoundLetter(chosen, f"fallback_{name}")
    return FoundLetter(None, "no_match")


class BoxedAnswer(NamedTuple):
    """The one boxed answer of a completion."""

    text: str | None
    """None without exactly one box."""
    method: str
    """`boxed`, `no_boxed` or `multiple_boxed`."""

    @property
    def is_multiple(self) -> bool:
        return self.method == "multiple_boxed"


_BOX_PARTS = re.compile(r"\\boxed\s{0,5}\{|\\.|[{}]", re.DOTALL)


def extract_boxed_answers(text: str) -> list[str]:
    r"""Return the stripped content of each closed `\boxed{}`; braces may be nested.

    A box within a box is part of the outer one.
    """
    open_braces: list[int | None] = []  # start of the content of a box; None for another brace
    spans: list[tuple[int, int]] = []
    for part in _BOX_PARTS.finditer(text):
        if part[0].startswith("\\boxed"):
            open_braces.append(part.end())
        elif part[0] == "{":
            open_braces.append(None)
        elif part[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                spans.append((start, part.start()))
    found, end = [], 0
    for start, stop in sorted(spans):
        if start >= end:
            found.append(text[start:stop].strip())
            end = stop
    return found


def extract_first_boxed_answer(text: str) -> str | None:
    r"""Return the content of the first `\boxed{}`; None without one."""
    found = extract_boxed_answers(text)
    return found[0] if found else None


def only_boxed_answer(response: str, *, after_think: bool = True) -> BoxedAnswer:
    """Return the boxed answer of a completion that has exactly one.

    Args:
        response: the completion.
        after_think: Whether only the text after the thinking is searched.
    """
    found = extract_boxed_answers(answer_part(response) if after_think else response)
    if len(found) == 1 and found[0]:
        return BoxedAnswer(found[0], "boxed")
    return BoxedAnswer(None, "multiple_boxed" if len(found) > 1 else "no_boxed")


_WRAPPER = re.compile(r"\\(?:boxed|text|mathrm|mathbf)\s{0,3}\{([^{}]{0,10000})\}")
_SPACING = re.compile(r"\\(?:[,;:! ]|quad|qquad|left(?![a-z])|right(?![a-z]))|~|\$")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_BARE_DECIMAL = re.compile(r"(?<![\w.])\.(?=\d)")
"""The point of a number such as `.5`, which is kept, unlike punctuation."""
MAX_WRAPPERS = 10
"""Commands around one content that are removed."""
RELATIVE_TOLERANCE = 1e-6


def with_leading_zeros(text: str) -> str:
    """Return a text with numbers such as `.5` written as `0.5`."""
    return _BARE_DECIMAL.sub("0.", text)


def math_normalize_string(text: str) -> str:
    r"""Return a mathematical answer in a form for comparison as text.

    Removes `\boxed`, `\text`, `\mathrm` and `\mathbf` around a content, spacing and `$`; writes
    products and divisions as `*` and `/`; trims punctuation and lowers the case.
    """
    for _ in range(MAX_WRAPPERS):
        text = _WRAPPER.sub(r"\1", text)
    text = _SPACING.sub("", text)
    text = re.sub(r"\\(?:times|cdot)(?![a-z])", "*", text)
    text = re.sub(r"\\div(?![a-z])", "/", text)
    text = with_leading_zeros(text).strip(" \t\r\n.,:;").lower()
    text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    return " ".join(text.split())


def compare_math_strings(pred: str, gold: str) -> bool:
    """Return whether two answers are equal as normalized texts, or as numbers within 1e-6."""
    first, second = math_normalize_string(pred), math_normalize_string(gold)
    if not first or not second:
        return False
    if first.replace(" ", "") == second.replace(" ", ""):
        return True
    if "_" in first + second:
        return False  # Python reads 25_8, a number in base 8, as 258
    try:
        return math.isclose(float(first), float(second), rel_tol=RELATIVE_TOLERANCE)
    except ValueError:
        return False
