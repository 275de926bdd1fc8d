"""What an answer with citations is worth. Pure.

    turn ─► parse_answer ─► Answer ─┐
    question, pages read, calls ────┴► judge ─► Verdict ─► score, -0.4 to 1

Texts are compared word by word: no model judges, so nothing can be talked into a better score.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Answer", "Citation", "Question", "Verdict", "judge", "parse_answer", "words_of"]

RIGHT = 0.4
SUPPORTED = 0.4
ECONOMICAL = 0.2
FAKE_CITATION = -0.2
MAX_FAKES_COUNTED = 2
MIN_QUOTE_WORDS = 4
MAX_QUOTE_WORDS = 60
MAX_CITATIONS = 5
MAX_JUDGED = 10
"""Citations behind these count as false."""
MAX_ANSWER_CHARACTERS = 200
ARTICLES = frozenset({"a", "an", "the"})

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# No page shows an angle bracket, so a quote needs none.
CITATION = re.compile(r'<cite page="([^"<>]*)">([^<]*)</cite>')
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
SIGNED = re.compile(r"(?<!\w)-?\d+(?:[./]\d+)+|(?<!\w)-\d+|\w+[+#]*")
"""Words of an answer, in which -5 is not 5, 3.5 is not 3/5, and C++ is not C."""
ESCAPE = re.compile(r"\\[nrt]")
"""How the JSON that pages are shown in spells the end of a line."""


class Question(NamedTuple):
    """One item."""

    question: str
    answers: Sequence[str]
    """Ways to write the right answer."""
    pages: Sequence[str]
    """Pages it takes; each must be cited."""
    quotes: Sequence[str]
    """A sentence of each of them that helps; for `check`."""


class Citation(NamedTuple):
    """Words said to stand on a page."""

    page: str
    quote: str


class Answer(NamedTuple):
    """What the last turn says."""

    text: str
    citations: Sequence[Citation]


class Verdict(NamedTuple):
    """What is known of an answer."""

    score: float
    is_right: bool = False
    support: float = 0.0
    """0 to 1: how far the citations bear the answer."""
    num_fakes: int = 0
    """Citations whose words are not on the page, or whose page was not read."""


def parse_answer(text: str) -> Answer | None:
    """Return the answer of a turn without its thinking; None unless there is exactly one."""
    found = ANSWER.search(text) if text.count("<answer>") == 1 else None
    if found is None or text.count("</answer>") != 1:
        return None
    answer = found[1].strip()
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return None
    citations = [Citation(page.strip(), quote) for page, quote in CITATION.findall(text)]
    return Answer(answer, citations)


def words_of(text: str) -> list[str]:
    """Return the words of a text: lower case, without punctuation and thousands commas."""
    return re.findall(r"\w+", _folded(text))


def _folded(text: str) -> str:
    return THOUSANDS.sub("", unicodedata.normalize("NFKC", text).casefold())


def judge(
    answer: Answer | None,
    question: Question,
    read: Mapping[str, str],
    *,
    num_calls: int,
    max_calls: int,
) -> Verdict:
    """Return what an answer is worth.

    Args:
        answer: from `parse_answer`.
        question: what was asked.
        read: page -> whole text, of the pages opened in this rollout.
        num_calls: tool calls that were made, wrong ones too.
        max_calls: as many leave nothing of the reward for economy.
    """
    if answer is None:
        return Verdict(0.0)
    judged = answer.citations[:MAX_JUDGED]
    pages = {page: words_of(read.get(page, "")) for page in {c.page for c in judged}}
    faithful = [c for c in judged if _is_faithful(c, pages[c.page])]
    num_fakes = len(answer.citations) - len(faithful)
    penalty = FAKE_CITATION * min(num_fakes, MAX_FAKES_COUNTED)
    if not _is_right(answer.text, question.answers):
        return Verdict(penalty, num_fakes=num_fakes)
    support = _support(answer, faithful, question)
    economy = _economy(num_calls, _needed_calls(question), max_calls)
    score = RIGHT + support * (SUPPORTED + ECONOMICAL * economy) + penalty
    return Verdict(score, is_right=True, support=support, num_fakes=num_fakes)


def _is_right(text: str, answers: Sequence[str]) -> bool:
    words = _without_articles(text)
    return bool(words) and any(words == _without_articles(answer) for answer in answers)


def _without_articles(text: str) -> list[str]:
    words = SIGNED.findall(_folded(text).replace("\N{MINUS SIGN}", "-"))
    return [word for word in words if word not in ARTICLES] or words


def _is_faithful(citation: Citation, page: Sequence[str]) -> bool:
    readings = (words_of(citation.quote), words_of(ESCAPE.sub(" ", citation.quote)))
    return any(
        MIN_QUOTE_WORDS <= len(words) <= MAX_QUOTE_WORDS and _contains(page, words)
        for words in readings
    )


def _support(answer: Answer, faithful: Sequence[Citation], question: Question) -> float:
    """Return share of true citations times share of needed pages; 0 if none has the answer."""
    if not faithful or len(answer.citations) > MAX_CITATIONS:
        return 0.0
    golds = [words_of(gold) for gold in question.answers]
    wanted = [c for c in faithful if c.page in question.pages or not question.pages]
    quotes = [words_of(citation.quote) for citation in wanted]
    if not any(_contains(quote, gold) for quote in quotes for gold in golds):
        return 0.0
    cited = {citation.page for citation in faithful}
    pages = question.pages or list(cited)
    covered = sum(page in cited for page in pages) / len(pages)
    return covered * len(faithful) / len(answer.citations)


def _needed_calls(question: Question) -> int:
    """Return the calls of a straight way: a search and an opened page for each page."""
    return 2 * max(1, len(question.pages))


def _economy(num_calls: int, needed: int, max_calls: int) -> float:
    """Return 1.0 up to the calls that are needed, from there linearly down to 0.0."""
    if num_calls <= needed:
        return 1.0
    return max(0.0, (max_calls - num_calls) / max(1, max_calls - needed))


def _contains(words: Sequence[str], part: Sequence[str]) -> bool:
    """Say whether a part stands in words, in one piece."""
    # Words hold no space, so joined texts contain each other only at the borders of words.
    return bool(part) and f" {' '.join(part)} " in f" {' '.join(words)} "
