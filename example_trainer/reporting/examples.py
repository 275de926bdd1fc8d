"""Choose the rollouts that a report shows, and render them; pure.

    groups of the start ┐                ┌ the same question at the start and at the end
                        ├─ condensed ──► ┤
    groups of the end   ┘                └ highest and lowest scores at the end

Changes are not only the favorable ones: they are the largest increase of a group's mean score, the
median change and the smallest. Text of a rollout is untrusted; it is escaped and cut.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.utils.json_text import decode_line
from atroposlib.utils.text import inert_line, inert_markup
from atroposlib.viewer.rollouts import group_of, text_of_content

MAX_CHARACTERS = 20_000
"""Maximum characters of a question or an answer in the page."""
OPEN_CHARACTERS = 600
"""Characters that are shown unfolded."""
_MAX_CHIPS = 16
_PER_END = 2


class ScoredText(NamedTuple):
    """Answer of one rollout."""

    text: str
    score: float


class GroupExcerpt(NamedTuple):
    """A group, condensed to what the report shows."""

    question: str
    step: int | None
    """Trainer step at which it was sampled, if known."""
    answers: Sequence[ScoredText]
    """At least one, with finite scores, in the order of the group."""

    @property
    def mean(self) -> float:
        return sum(answer.score for answer in self.answers) / len(self.answers)

    @property
    def best(self) -> ScoredText:
        return max(self.answers, key=lambda answer: answer.score)

    @property
    def worst(self) -> ScoredText:
        return min(self.answers, key=lambda answer: answer.score)


class AnswerChange(NamedTuple):
    """Groups of the start and of the end of a run; of one question if there is one in both."""

    before: GroupExcerpt
    after: GroupExcerpt

    @property
    def increase(self) -> float:
        return self.after.mean - self.before.mean


class RolloutExamples(NamedTuple):
    """Rollouts that the report of a run shows."""

    changes: Sequence[AnswerChange] = ()
    best: Sequence[tuple[str, ScoredText]] = ()
    """(question, answer) with the highest scores at the end."""
    worst: Sequence[tuple[str, ScoredText]] = ()
    """(question, answer) with the lowest scores at the end."""


def read_excerpt(line: bytes) -> GroupExcerpt | None:
    """Condense a JSON line of a group; None without messages or finite scores."""
    try:
        fields = decode_line(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    group = group_of(fields)
    answers = []
    for rollout in group.rollouts:
        has_score = rollout.score is not None and math.isfinite(rollout.score)
        if rollout.chat and has_score:
            answers.append(ScoredText(_answer(rollout.chat), float(rollout.score or 0.0)))
    if not answers:
        return None
    shared = group.rollouts[0].chat[: group.num_shared_messages]
    question = text_of_content(shared[-1].get("content")) if shared else ""
    return GroupExcerpt(question[:MAX_CHARACTERS], _step(fields), answers)


def _answer(chat: Sequence[Mapping[str, Any]]) -> str:
    said = [message for message in chat if message.get("role") == "assistant"] or [chat[-1]]
    return text_of_content(said[-1].get("content"))[:MAX_CHARACTERS]


def _step(fields: Mapping[str, Any]) -> int | None:
    steps = (fields.get(key) for key in ("step", "policy_version"))
    return next((s for s in steps if isinstance(s, int) and not isinstance(s, bool)), None)


def choose_examples(first: Iterable[GroupExcerpt], last: Iterable[GroupExcerpt]) -> RolloutExamples:
    """Choose from groups of the start and of the end of a run, in the order of the run."""
    first, last = list(first), list(last)
    if not last:
        return RolloutExamples()
    best = heapq.nlargest(_PER_END, last, key=lambda group: group.best.score)
    worst = heapq.nsmallest(_PER_END, reversed(last), key=lambda group: group.worst.score)
    return RolloutExamples(
        _changes(first, last),
        [(group.question, group.best) for group in best],
        [(group.question, group.worst) for group in worst],
    )


def _changes(first: Sequence[GroupExcerpt], last: Sequence[GroupExcerpt]) -> list[AnswerChange]:
    earliest: dict[str, GroupExcerpt] = {}
    for group in first:
        if group.question:
            earliest.setdefault(group.question, group)
    latest = {group.question: group for group in last}
    pairs = [
        AnswerChange(before, latest[question])
        for question, before in earliest.items()
        if question in latest
    ]
    if not pairs:
        return [AnswerChange(_typical(first), _typical(last))] if first else []
    pairs.sort(key=lambda change: -change.increase)
    chosen = dict.fromkeys((0, len(pairs) // 2, len(pairs) - 1))
    return [pairs[i] for i in chosen]


def _typical(groups: Sequence[GroupExcerpt]) -> GroupExcerpt:
    """Return the group whose mean score is nearest to that of all."""
    mean = sum(group.mean for group in groups) / len(groups)
    return min(groups, key=lambda group: abs(group.mean - mean))


def examples_section(examples: RolloutExamples) -> str:
    """Return the rollouts as a section of the report; empty without any."""
    parts = []
    if examples.changes:
        parts.append(
            '<h2 id="answers">How the answers changed</h2>'
            f'<p class="note">{_note(examples.changes)}</p>'
            + "".join(_change_card(change) for change in examples.changes)
        )
    if examples.best:
        parts.append(
            f"<h2{'' if parts else ' id=answers'}>Best and worst rollouts of the last steps</h2>"
            f'<div class="pair"><div><h3>Highest scores</h3>{_ranked(examples.best)}</div>'
            f"<div><h3>Lowest scores</h3>{_ranked(examples.worst)}</div></div>"
        )
    return f'<section class="answers">{"".join(parts)}</section>' if parts else ""


def _note(changes: Sequence[AnswerChange]) -> str:
    if changes[0].before.question != changes[0].after.question:
        return "No question was seen at both ends of the run; these groups have typical scores."
    if len(changes) < 3:
        return "Questions that were seen both in the first and in the last steps."
    return (
        "Questions seen in the first and in the last steps: the one whose mean score increased "
        "most, one with a median change, and the one that increased least."
    )


def _change_card(change: AnswerChange) -> str:
    is_same = change.before.question == change.after.question
    sides = "".join(
        f"<div><h4>{_when(group, end)}, mean score {group.mean:.3g}</h4>{_chips(group)}"
        f"{'' if is_same else _folded_text(group.question, 'question')}{_ends(group)}</div>"
        for group, end in ((change.before, "start"), (change.after, "end"))
    )
    title = inert_markup(inert_line(change.before.question, max_characters=200)) or "no question"
    heading = f'<h3 class="untrusted">{title}</h3>' if is_same else "<h3>Typical groups</h3>"
    return f'<article class="change">{heading}<div class="pair">{sides}</div></article>'


def _when(group: GroupExcerpt, end: str) -> str:
    return f"At the {end}" if group.step is None else f"Step {group.step:,}"


def _chips(group: GroupExcerpt) -> str:
    more = len(group.answers) - _MAX_CHIPS
    chips = "".join(_chip(answer.score) for answer in group.answers[:_MAX_CHIPS])
    return f'<p class="chips">{chips}{f" and {more} more" if more > 0 else ""}</p>'


def _chip(score: float) -> str:
    kind = "pos" if score > 0 else "neg" if score < 0 else "zero"
    return f'<b class="chip {kind}">{score:.3g}</b> '


def _ends(group: GroupExcerpt) -> str:
    """Show the best answer of a group and, if its score differs, the worst."""
    shown = [group.best, group.worst] if group.best.score != group.worst.score else [group.best]
    return "".join(_answer_block(answer) for answer in shown)


def _answer_block(answer: ScoredText) -> str:
    return f'<div class="answer">{_chip(answer.score)}{_folded_text(answer.text, "answer")}</div>'


def _ranked(found: Sequence[tuple[str, ScoredText]]) -> str:
    return "".join(
        f'<article class="change"><h4 class="untrusted">'
        f"{inert_markup(inert_line(question, max_characters=200)) or 'no question'}</h4>"
        f"{_answer_block(answer)}</article>"
        for question, answer in found
    )


def _folded_text(text: str, name: str) -> str:
    """Show a text with its line breaks; the part over the limit is folded."""
    if not text.strip():
        return f'<p class="text note">an empty {name}</p>'
    start = f'<div class="text untrusted">{inert_markup(text[:OPEN_CHARACTERS])}</div>'
    rest = text[OPEN_CHARACTERS:]
    if not rest:
        return start
    return (
        f"{start}<details><summary>{len(rest):,} more characters</summary>"
        f'<div class="text untrusted">{inert_markup(rest)}</div></details>'
    )
