"""Instructions that a program can verify, and the curriculum over such items.

    row -> Instruction(verifier, arguments) -> is_followed(text)

A verifier is a pure function of the text and of the arguments that the data set gives it. All of
them take linear time. Words and letters are compared without case, phrases as they are written.
`UnsolvedQueue` rotates the items and removes those that the policy has solved.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.text import near_name

__all__ = [
    "LANGUAGES",
    "VERIFIERS",
    "Instruction",
    "UnsolvedQueue",
    "item_id",
    "read_instruction",
    "require_language_detector",
]

WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
SENTENCE_END = re.compile(r"(?<![.!?\u3002])[.!?\u3002]+[\"'\u201d\u2019)\]]*(?=\s|$)")
BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")
BULLET = re.compile(r"^[ \t]*[*+-][ \t]+(?=\S)(?![*+-](?:\s|$))", re.MULTILINE)
"""A mark and a text, which may be bold; no divider such as `* * *`."""
HIGHLIGHT = re.compile(r"\*{1,2}(?=[^\s*])[^*\n]+\*{1,2}")
PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
TITLE = re.compile(r"<<([^<>\n]+)>>")
DIVIDER = "* * *"
TWO_RESPONSES = "******"
QUOTES = "\"'\u201c\u201d\u2018\u2019"


def count_words(text: str) -> int:
    """Return the number of words; a contraction or a hyphenated word is one."""
    return sum(1 for _ in WORD.finditer(text))


def count_sentences(text: str) -> int:
    """Return the number of parts with a word between marks that end a sentence."""
    return sum(1 for part in SENTENCE_END.split(text) if WORD.search(part))


def paragraphs_of(text: str) -> list[str]:
    """Return the paragraphs, which blank lines separate."""
    return [part for part in BLANK_LINES.split(text.strip()) if part.strip()]


def whole_words(phrase: str) -> re.Pattern[str]:
    """Return a pattern for a word or phrase that is not a part of a longer word."""
    return re.compile(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", re.IGNORECASE)


def is_count(count: int, wanted: int, quantifier: str, *, tolerance: int) -> bool:
    """Whether a count is `at least`, `at most` or `around` a number, up to a tolerance."""
    if quantifier == "at least":
        return count >= wanted
    if quantifier == "at most":
        return count <= wanted
    return abs(count - wanted) <= tolerance


def verify_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    """Whether every keyword occurs as a whole word."""
    return all(whole_words(keyword).search(text) for keyword in keyword_list)


def verify_keyword_frequency(text: str, word: str, N: int) -> bool:
    """Whether a word occurs N times."""
    return len(whole_words(word).findall(text)) == N


def validate_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """Whether no forbidden word occurs as a whole word."""
    return not any(whole_words(word).search(text) for word in forbidden_words)


def verify_letter_frequency(text: str, letter: str, N: int) -> bool:
    """Whether a letter occurs N times, in either case."""
    return text.lower().count(letter.lower()) == N


def validate_response_language(text: str, language: str) -> bool:
    """Whether the package langdetect finds a language, given by its code or English name."""
    import langdetect

    wanted = LANGUAGES.get(language.strip().lower(), language.strip().lower())
    langdetect.DetectorFactory.seed = 0  # the package draws random parts of the text
    try:
        return bool(langdetect.detect(text) == wanted)
    except langdetect.LangDetectException:  # a text without letters
        return False


def verify_paragraph_count(text: str, N: int) -> bool:
    """Whether there are N paragraphs, separated by the divider `* * *`."""
    parts = text.split(DIVIDER)
    return len(parts) == N and all(part.strip() for part in parts)


def validate_word_constraint(text: str, N: int, quantifier: str) -> bool:
    """Whether the number of words fits; `around` allows a tenth more or less."""
    return is_count(count_words(text), N, quantifier, tolerance=N // 10)


def verify_sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    """Whether the number of sentences fits; `around` allows one more or less."""
    return is_count(count_sentences(text), N, quantifier, tolerance=1)


def validate_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """Whether there are N paragraphs, and the i-th (from 1) starts with a word."""
    paragraphs = paragraphs_of(text)
    if len(paragraphs) != N or not 1 <= i <= N:
        return False
    start = paragraphs[i - 1].lstrip(" \t*_#>" + QUOTES)
    return whole_words(first_word).match(start) is not None


def verify_postscript(text: str, postscript_marker: str) -> bool:
    """Whether a line starts with the marker of a postscript, such as `P.S.`, and text follows."""
    marker = postscript_marker.strip()
    at = re.search(rf"^[ \t*_]*{re.escape(marker)}", text, re.MULTILINE | re.IGNORECASE)
    return at is not None and WORD.search(text, at.end()) is not None


def validate_placeholders(text: str, N: int) -> bool:
    """Whether there are N placeholders or more, such as `[address]`."""
    return len(PLACEHOLDER.findall(text)) >= N


def verify_bullet_points(text: str, N: int) -> bool:
    """Whether there are N bullet points in Markdown."""
    return len(BULLET.findall(text)) == N


def validate_title(text: str) -> bool:
    """Whether there is a title in double angle brackets."""
    return any(title.strip() for title in TITLE.findall(text))


def validate_choice(text: str, options: Sequence[str]) -> bool:
    """Whether exactly one of the options occurs; a part of a longer option does not count."""
    found = set()
    for option in sorted(options, key=len, reverse=True):
        text, count = whole_words(option).subn("\0", text)
        if count:
            found.add(option.strip().lower())
    return len(found) == 1


def validate_highlighted_sections(text: str, N: int) -> bool:
    """Whether there are N highlighted parts or more, such as `*this one*`."""
    return len(HIGHLIGHT.findall(text)) >= N


def validate_sections(text: str, N: int, section_splitter: str) -> bool:
    """Whether N sections start with the splitter and a number, such as `SECTION 1`."""
    splitter = re.escape(section_splitter.strip())
    heading = re.compile(rf"^[ \t#*_]*{splitter}[ \t]*\d+(?!\w)", re.MULTILINE | re.IGNORECASE)
    return len(heading.findall(text)) == N


def validate_json_format(text: str) -> bool:
    """Whether the text, or the one fenced block that it consists of, is JSON."""
    block = text.strip()
    if block.startswith("```") and block.endswith("```"):
        block = block.removeprefix("```").removesuffix("```").removeprefix("json")
    try:
        json.loads(block, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """Whether the text starts with the request, word for word, and an answer follows."""
    prompt = original_prompt.strip()
    rest = text.strip().removeprefix(prompt)
    return len(rest) < len(text.strip()) and WORD.search(rest) is not None


def validate_two_responses(text: str) -> bool:
    """Whether there are two different responses, separated by six asterisks."""
    parts = [part.strip() for part in text.split(TWO_RESPONSES)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def validate_uppercase(text: str) -> bool:
    """Whether all letters are capital letters."""
    return text.isupper()


def validate_lowercase(text: str) -> bool:
    """Whether there are no capital letters."""
    return text.islower()


def validate_frequency_capital_words(text: str, N: int, quantifier: str) -> bool:
    """Whether the number of words in capital letters fits; `around` allows a tenth, at least 1."""
    count = sum(1 for word in WORD.finditer(text) if word[0].isupper())
    return is_count(count, N, quantifier, tolerance=max(1, N // 10))


def validate_end(text: str, end_phrase: str) -> bool:
    """Whether the text ends with a phrase; closing quotation marks are ignored."""
    return text.rstrip().rstrip(QUOTES).endswith(end_phrase.strip().rstrip(QUOTES))


def validate_quotation(text: str) -> bool:
    """Whether the whole text is in double quotation marks."""
    body = text.strip()
    return len(body) > 2 and body[0] in '"\u201c' and body[-1] in '"\u201d'


def validate_no_commas(text: str) -> bool:
    """Whether there are no commas."""
    return "," not in text


VERIFIERS: dict[str, Callable[..., bool]] = {
    verifier.__name__: verifier
    for verifier in (
        verify_keywords,
        verify_keyword_frequency,
        validate_forbidden_words,
        verify_letter_frequency,
        validate_response_language,
        verify_paragraph_count,
        validate_word_constraint,
        verify_sentence_constraint,
        validate_paragraphs,
        verify_postscript,
        validate_placeholders,
        verify_bullet_points,
        validate_title,
        validate_choice,
        validate_highlighted_sections,
        validate_sections,
        validate_json_format,
        validate_repeat_prompt,
        validate_two_responses,
        validate_uppercase,
        validate_lowercase,
        validate_frequency_capital_words,
        validate_end,
        validate_quotation,
        validate_no_commas,
    )
}
"""Function by its name in the data set, `func_name`."""

_LANGUAGE_CODES = """
afrikaans:af albanian:sq arabic:ar bengali:bn bulgarian:bg catalan:ca chinese:zh-cn
croatian:hr czech:cs danish:da dutch:nl english:en estonian:et finnish:fi french:fr
german:de greek:el gujarati:gu hebrew:he hindi:hi hungarian:hu indonesian:id italian:it
japanese:ja kannada:kn korean:ko latvian:lv lithuanian:lt macedonian:mk malayalam:ml
marathi:mr nepali:ne norwegian:no persian:fa polish:pl portuguese:pt punjabi:pa
romanian:ro russian:ru slovak:sk slovenian:sl somali:so spanish:es swahili:sw swedish:sv
tagalog:tl tamil:ta telugu:te thai:th turkish:tr ukrainian:uk urdu:ur vietnamese:vi
welsh:cy zh:zh-cn
"""
LANGUAGES: dict[str, str] = dict(pair.split(":") for pair in _LANGUAGE_CODES.split())
"""English name to the code of langdetect; `zh` is its simplified Chinese."""

LANGUAGE_VERIFIER = validate_response_language.__name__
QUANTIFIERS = ("at least", "at most", "around")
NUMBERS = ("N", "i")
LISTS = ("keyword_list", "forbidden_words", "options")


@dataclass(frozen=True)
class Instruction:
    """A verifier and its arguments."""

    func_name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_language_detector(self) -> bool:
        return self.func_name == LANGUAGE_VERIFIER

    def is_followed(self, text: str) -> bool:
        """Whether a text follows the instruction; an empty one follows none."""
        return bool(text.strip()) and VERIFIERS[self.func_name](text, **self.arguments)


def read_instruction(ground_truth: Any) -> Instruction:
    """Return the instruction of a row.

    Args:
        ground_truth: an object, or its JSON text, with `func_name` and the arguments. Arguments
            that its verifier does not have are ignored: rows of some data sets list all of them.

    Raises:
        ConfigError: the verifier is unknown, or an argument is missing or has another type.
    """
    row = ground_truth
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except ValueError as error:
            raise ConfigError(f"ground_truth is not JSON ({error}): {row[:200]!r}") from error
    if not isinstance(row, Mapping) or not isinstance(row.get("func_name"), str):
        raise ConfigError(
            "ground_truth has no func_name; expected an object such as "
            f'{{"func_name": "validate_end", "end_phrase": "The end."}}, got {str(row)[:200]}'
        )
    name = row["func_name"]
    if name not in VERIFIERS:
        hint = near_name(name, VERIFIERS) or f"; known: {', '.join(VERIFIERS)}"
        raise ConfigError(f"no verifier is called {name!r}{hint}")
    wanted = list(inspect.signature(VERIFIERS[name]).parameters)[1:]
    return Instruction(name, {key: _argument(name, key, row.get(key)) for key in wanted})


def _argument(func_name: str, key: str, value: Any) -> Any:
    """Return a checked argument of a verifier."""
    if key in NUMBERS:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if is_whole and not isinstance(value, bool) and value >= 0:
            return int(value)
        raise ConfigError(f"{func_name}: expected {key} to be an integer >= 0, got {value!r}")
    if key in LISTS:
        texts = _texts(value)
        if texts and all(isinstance(text, str) and text.strip() for text in texts):
            return texts
        raise ConfigError(f"{func_name}: expected {key} to be a list of texts, got {value!r}")
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{func_name}: expected {key} to be a text, got {value!r}")
    if key == "quantifier" and value not in QUANTIFIERS:
        raise ConfigError(
            f"{func_name}: expected quantifier to be one of {', '.join(QUANTIFIERS)}, got {value!r}"
        )
    return value


def _texts(value: Any) -> list[Any]:
    """Return a list of texts, given as a list, as the literal of one, or as one text."""
    if isinstance(value, str):
        try:
            literal = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            literal = None
        return list(literal) if isinstance(literal, list | tuple) else [value]
    return list(value) if isinstance(value, list | tuple) else []


def require_language_detector(instructions: Iterable[Instruction]) -> None:
    """Check that langdetect is installed if an instruction needs it.

    Raises:
        MissingExtraError: it is not.
    """
    is_needed = any(instruction.needs_language_detector for instruction in instructions)
    if is_needed and importlib.util.find_spec("langdetect") is None:
        raise MissingExtraError("langdetect", extra="instructions")


def item_id(prompt: str, ground_truth: Any) -> str:
    """Return an identifier of an item that is the same in every process."""
    text = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)
    return hashlib.sha256(f"{prompt}\0{text}".encode()).hexdigest()[:16]


ALMOST_ALWAYS = 0.9


class UnsolvedQueue:
    """Items in rotation until they are solved.

    An item stays in the queue while it is rolled out, so a failed or cancelled rollout loses
    none. When all items are solved, they start again.

    Args:
        ids: identifiers of the items, in order.
        max_average: mean score above which an item is solved.
        solve_on_single_correct: whether one score of 1 solves an item.
    """

    def __init__(
        self, ids: Iterable[str], *, max_average: float, solve_on_single_correct: bool = False
    ) -> None:
        self._active = deque(dict.fromkeys(ids))
        self._solved: list[str] = []
        self._attempts: Counter[str] = Counter()
        self._max_average = max_average
        self._solve_on_single_correct = solve_on_single_correct

    @property
    def active(self) -> list[str]:
        """Identifiers of the unsolved items; the first one is next."""
        return list(self._active)

    def next(self) -> str:
        """Return the next item and move it to the end."""
        if not self._active:
            self._active.extend(self._solved)
            self._solved.clear()
        self._active.rotate(-1)
        return self._active[-1]

    def record(self, item: str, scores: Sequence[float]) -> bool:
        """Count an attempt with [G] scores; return whether it solves the item."""
        self._attempts[item] += 1
        mean = sum(scores) / len(scores)
        is_solved = (
            mean > self._max_average
            or mean >= ALMOST_ALWAYS
            or (self._solve_on_single_correct and max(scores) >= 1.0)
        )
        if is_solved and item in self._active:
            self._active.remove(item)
            self._solved.append(item)
        return is_solved

    def metrics(self) -> dict[str, float]:
        """Return the metrics `curriculum/*`."""
        num_active, num_solved = len(self._active), len(self._solved)
        total = num_active + num_solved
        attempts = sum(self._attempts[item] for item in self._active)
        return {
            "curriculum/active_items": num_active,
            "curriculum/solved_items": num_solved,
            "curriculum/total_items": total,
            "curriculum/percent_solved": num_solved / total if total else 0.0,
            "curriculum/avg_attempts_active": attempts / num_active if num_active else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "active": list(self._active),
            "solved": list(self._solved),
            "attempts": dict(self._attempts),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; items that it does not have follow the others."""
        known = {*self._active, *self._solved}
        self._solved = [item for item in state["solved"] if item in known]
        saved = [item for item in state["active"] if item in known]
        placed = {*self._solved, *saved}
        self._active = deque([*saved, *(item for item in self._active if item not in placed)])
        self._attempts = Counter(
            {item: int(count) for item, count in state["attempts"].items() if item in known}
        )
