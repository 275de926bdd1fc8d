"""What the groups of an item tell: shape, masks, logprobs, context, numbers and scores.

The shape of a group, and the numbers in it. Pure.

Laying a trajectory over what the model wrote: masks, logprobs and prefix continuity. Pure.

tokens   p p p p c c c e o o o c c e        p prompt, c sampled, o observation, e end of turn
spans            [-----]       [---]        found by prompt and reply, each a `Span`
masks    . . . . c c c e . . . c c e        trained positions must lie in a span

Whether scores tell good answers from bad ones. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.checks.report import Findings, hook_site
from atroposlib.envs.checks.runner import COLLECTING, SCORING, Rehearsal
from atroposlib.envs.checks.scripted_model import Role, SampledReply
from atroposlib.envs.rollouts import check_signal, wrong_number
from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.wire import encode_group

__all__ = [
    "Alignment",
    "ScoredReply",
    "Span",
    "align",
    "check_groups",
    "equal_scores",
    "non_finite_path",
    "scored_replies",
    "shape_problem",
    "too_good",
    "wrong_score",
]

NUMBER_FIELDS = ("scores", "advantages", "inference_logprobs", "ref_logprobs")


def shape_problem(group: Any, *, group_size: int) -> str | None:
    """Return what the service or the base class would refuse a group for, or None.

    Infinite and NaN values are left to `non_finite_path`, scores that are not numbers to
    `wrong_score`.
    """
    if isinstance(group, Mapping):
        scores = [0.0] * len(group["scores"]) if wrong_score(group) else group.get("scores")
        group = {key: _finite(value) for key, value in {**group, "scores": scores}.items()}
    admission = check_signal(group, group_size=group_size, scores_must_differ=False)
    if not admission.is_accepted:
        return f"a group would be dropped as {admission.reason}: {admission.detail}"
    try:
        encode_group(group)
    except (GroupError, TypeError, ValueError) as error:
        return f"a group cannot be sent: {error}"
    return None


def wrong_score(group: Any) -> str | None:
    """Return the first score of a group that is not a number, or None."""
    scores = group.get("scores") if isinstance(group, Mapping) else None
    return wrong_number("scores", scores) if isinstance(scores, list | tuple) else None


def non_finite_path(group: Mapping[str, Any]) -> str | None:
    """Return where the first number that is not finite stands, or None."""
    for name in NUMBER_FIELDS:
        path = _non_finite(group.get(name), name)
        if path:
            return path
    return None


def _non_finite(value: Any, path: str) -> str | None:
    if isinstance(value, list | tuple):
        paths = (_non_finite(entry, f"{path}[{i}]") for i, entry in enumerate(value))
        return next((found for found in paths if found), None)
    if isinstance(value, int | float) and not math.isfinite(value):
        return f"{path} is {value}"
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


TOLERANCE = 1e-4


class Span(NamedTuple):
    """Where one reply lies in a trajectory."""

    start: int
    end: int
    reply: SampledReply
    is_exact: bool
    """Whether the tokens before it are those the model read."""


class Alignment(NamedTuple):
    """One trajectory against what the model wrote; texts say what is wrong, None nothing."""

    spans: list[Span]
    mask_problem: str | None
    logprob_problem: str | None
    context_problem: str | None
    num_trained: int


def align(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float] | None,
    sampled: Sequence[SampledReply],
    tokenizer: Any,
) -> Alignment:
    """Compare one trajectory with the replies of the model.

    Args:
        path: its index for messages, as `[0]`.
        tokens: [L].
        masks: [L].
        logprobs: [L], or None when the group has none.
        sampled: every reply given for the item.
        tokenizer: of the environment.
    """
    trained = [i for i, mask in enumerate(masks) if mask != IGNORE_INDEX]
    spans = _spans(list(tokens), trained, sampled)
    written = {i for span in spans for i in range(span.start, span.end)}
    return Alignment(
        spans=spans,
        mask_problem=_mask_problem(path, tokens, masks, written, tokenizer),
        logprob_problem=None
        if logprobs is None
        else _logprob_problem(path, tokens, masks, logprobs, spans),
        context_problem=_context_problem(path, tokens, spans, tokenizer),
        num_trained=len(trained),
    )


def _spans(
    tokens: list[int], trained: Sequence[int], sampled: Sequence[SampledReply]
) -> list[Span]:
    """Find the replies in a trajectory: by their whole context first, by their text otherwise."""
    exact: dict[int, Span] = {}
    for reply in sampled:
        start = len(reply.prompt_ids)
        length = _shared(reply.ids, tokens[start:])
        if tokens[:start] != reply.prompt_ids or not length:
            continue
        if start not in exact or start + length > exact[start].end:
            exact[start] = Span(start, start + length, reply, True)
    spans = list(exact.values())
    covered = {i for span in spans for i in range(span.start, span.end)}
    for i in trained:
        if i in covered:
            continue
        loose = _loose_span(tokens, i, sampled)
        if loose is not None:
            spans.append(loose)
            covered |= set(range(loose.start, loose.end))
    return sorted(spans)


def _shared(ids: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens of a reply begin `tokens`: all, all but the end of turn, or none."""
    for length in (len(ids), len(ids) - 1):
        if length > 0 and list(tokens[:length]) == list(ids[:length]):
            return length
    return 0


def _loose_span(tokens: list[int], start: int, sampled: Sequence[SampledReply]) -> Span | None:
    """Find a reply of several tokens that begins at `start`, behind another context."""
    longest: Span | None = None
    for reply in sampled:
        length = _shared(reply.ids, tokens[start:])
        if length > 1 and (longest is None or start + length > longest.end):
            longest = Span(start, start + length, reply, False)
    return longest


def _mask_problem(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    written: set[int],
    tokenizer: Any,
) -> str | None:
    for i, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
        if mask not in (IGNORE_INDEX, token):
            return (
                f"masks{path}[{i}] is {mask}; expected {IGNORE_INDEX} or the token, {token} "
                f"({_text([token], tokenizer)!r})"
            )
    # Tokens without text only close a turn: a chat template adds them behind a reply.
    foreign = [
        i
        for i, mask in enumerate(masks)
        if mask != IGNORE_INDEX and i not in written and _text([mask], tokenizer).strip()
    ]
    if foreign:
        i = foreign[0]
        shown = _text(tokens[i : i + 12], tokenizer)
        return (
            f"masks{path} trains on {len(foreign)} tokens that the model did not write, from "
            f"position {i}: {shown!r}"
        )
    return None


def _logprob_problem(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[Span],
) -> str | None:
    shift = _shift(masks, logprobs, spans)
    if shift:
        direction = "early" if shift < 0 else "late"
        return (
            f"inference_logprobs{path} are shifted: each stands {abs(shift)} position too "
            f"{direction}"
        )
    for span in spans:
        for i, known in _known(span, masks):
            if math.isfinite(logprobs[i]) and abs(logprobs[i] - known) > TOLERANCE:
                return (
                    f"inference_logprobs{path}[{i}] is {logprobs[i]:.6g}; "
                    f"the engine reported {known:.6g} for this token"
                )
    for i, mask in enumerate(masks):
        value = logprobs[i]
        if mask == IGNORE_INDEX and math.isfinite(value) and value != MASKED_LOGPROB:
            return (
                f"inference_logprobs{path}[{i}] is {value:.6g} where the mask is {IGNORE_INDEX}; "
                f"expected {MASKED_LOGPROB}"
            )
    return None


def _shift(masks: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]) -> int:
    """Return by how many positions the logprobs are moved; 0 when they are not."""
    pairs = [pair for span in spans for pair in _known(span, masks)]
    if len(pairs) < 3 or _share(pairs, logprobs, 0) == 1.0:
        return 0
    return next((by for by in (-1, 1) if _share(pairs, logprobs, by) > 0.6), 0)


def _share(pairs: Sequence[tuple[int, float]], logprobs: Sequence[float], by: int) -> float:
    """Return the share of known logprobs found `by` positions from where they belong."""
    hits = [
        0 <= i + by < len(logprobs) and abs(logprobs[i + by] - known) <= TOLERANCE
        for i, known in pairs
    ]
    return sum(hits) / len(hits)


def _known(span: Span, masks: Sequence[int]) -> list[tuple[int, float]]:
    """Return position and engine's logprob of each trained token of a reply."""
    if span.reply.logprobs is None:
        return []
    values = zip(range(span.start, span.end), span.reply.logprobs, strict=False)
    return [(i, value) for i, value in values if masks[i] != IGNORE_INDEX]


def _context_problem(
    path: str, tokens: Sequence[int], spans: Sequence[Span], tokenizer: Any
) -> str | None:
    for span in spans:
        if span.is_exact or span.reply.has_images:
            continue
        read, found = span.reply.prompt_ids, list(tokens[: span.start])
        pairs = zip(read, found, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), len(found)))
        return (
            f"tokens{path} has {len(found)} tokens before the reply at {span.start}, the model "
            f"read {len(read)}; the first difference is at {first}: "
            f"{_text(found[first : first + 12], tokenizer)!r}, "
            f"the model read {_text(read[first : first + 12], tokenizer)!r}"
        )
    return None


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


class ScoredReply(NamedTuple):
    """What one trajectory was worth."""

    role: Role
    score: float
    is_muted: bool
    """Whether it cannot move the policy."""


def scored_replies(group: Mapping[str, Any], roles: Sequence[Role | None]) -> list[ScoredReply]:
    """Return the worth of each trajectory whose role is known and whose score is a finite number.

    Where all scores of a group are equal and it has token-level advantages, the mean over the
    trained tokens is the worth: such an environment says it all in the advantages.

    Args:
        group: [G] trajectories.
        roles: [G] who answered, None where that cannot be told.
    """
    scores = list(group["scores"])
    advantages = group.get("advantages")
    if not advantages or any(score != scores[0] for score in scores):
        advantages = [None] * len(roles)
    overrides = group.get("overrides") or [None] * len(roles)
    found = []
    for role, score, advantage, override, mask in zip(
        roles, scores, advantages, overrides, group["masks"], strict=False
    ):
        trained = [i for i, label in enumerate(mask) if label != IGNORE_INDEX]
        if isinstance(advantage, list | tuple) and len(advantage) == len(mask) and trained:
            score = sum(advantage[i] for i in trained) / len(trained)
        is_muted = not trained or bool((override or {}).get("set_advantage_to_zero"))
        if role is not None and wrong_number("", [score]) is None and math.isfinite(score):
            found.append(ScoredReply(role, float(score), is_muted))
    return found


def equal_scores(replies: Sequence[ScoredReply]) -> str | None:
    """Return what all answers score, gold and others, or None when they differ."""
    scores = {reply.score for reply in replies}
    roles = {reply.role for reply in replies}
    if len(scores) > 1 or "gold" not in roles or len(roles) < 2:
        return None
    others = ", ".join(sorted(role for role in roles if role != "gold"))
    return f"every answer scores {scores.pop():g}: gold, {others}"


def too_good(
    replies: Sequence[ScoredReply], roles: Sequence[Role], *, unless_muted: bool = False
) -> str | None:
    """Return which of the answers scores at least as much as the gold one, or None.

    Args:
        replies: all answers to one item.
        roles: those that must score less than gold.
        unless_muted: let an answer pass that cannot move the policy.
    """
    gold = [reply.score for reply in replies if reply.role == "gold"]
    for reply in replies:
        muted = unless_muted and reply.is_muted
        if gold and reply.role in roles and reply.score >= min(gold) and not muted:
            return f"the {NAMES[reply.role]} scores {reply.score:g}, the gold answer {min(gold):g}"
    return None


NAMES: dict[Role, str] = {
    "gold": "gold answer",
    "empty": "empty answer",
    "garbage": "meaningless answer",
    "truncated": "first half of the gold answer, cut by the token budget,",
    "unclosed": "gold answer inside a thought that was cut by the token budget",
}


NO_GOLD = (
    "check_gold_answer gives none; define check_gold_answer(self, item) -> str and return what a "
    "perfect model would write"
)
SCORE_RULES = ("spread", "wrong", "truncated")
SCORING_TIMED_OUT = "scoring timed out and gave its default"
NO_NUMBER = "return a number for every answer; one that cannot be judged gets a score as well"


def check_groups(env: Any, rehearsal: Rehearsal, findings: Findings) -> None:
    """Look at the groups made of one item against a script."""
    site = hook_site(type(env), COLLECTING)
    if not rehearsal.groups:
        _tell_of_no_group(rehearsal, findings, site)
        return
    findings.passed("rollout", f"{len(rehearsal.sampled)} replies to an item became a group")
    replies: list[ScoredReply] = []
    for group in rehearsal.groups:
        problem = shape_problem(group, group_size=env.config.group_size)
        if problem:
            findings.fail("shape", problem, site)
            if not _can_be_aligned(group):
                continue
        scoring_site = hook_site(type(env), SCORING)
        wrong = wrong_score(group)
        if wrong:
            findings.fail("finite", wrong, scoring_site, remedy=NO_NUMBER)
        path = non_finite_path(group)
        if path:
            findings.fail("finite", path, scoring_site)
        alignments = _alignments(group, rehearsal, env.tokenizer)
        _check_alignments(group, alignments, findings, site)
        roles = [a.spans[-1].reply.role if a.spans else None for a in alignments]
        replies += scored_replies(group, roles)
    first = rehearsal.groups[0]
    findings.passed("shape", f"{_count(first)} trajectories, group_size {env.config.group_size}")
    findings.passed("finite", "scores, advantages and logprobs")
    _check_scores(replies, rehearsal, findings, hook_site(type(env), SCORING))


def _tell_of_no_group(rehearsal: Rehearsal, findings: Findings, site: str | None) -> None:
    if rehearsal.script.turns:
        findings.fail("rollout", "no group came of good and bad answers mixed", site)
        return
    findings.skip("rollout", f"no group came of bad answers alone; {NO_GOLD}")


def _can_be_aligned(group: Any) -> bool:
    """Whether the rows of a group have one length each, whatever else is wrong with it."""
    try:
        lengths = [[len(row) for row in group[name]] for name in ("tokens", "masks")]
        logprobs = group.get("inference_logprobs")
        lengths += [[len(row) for row in logprobs]] if logprobs else []
        return all(row == lengths[0] for row in lengths)
    except (TypeError, KeyError, AttributeError):
        return False


def _alignments(group: Any, rehearsal: Rehearsal, tokenizer: Any) -> list[Alignment]:
    logprobs = group.get("inference_logprobs") or [None] * len(group["tokens"])
    rows = zip(group["tokens"], group["masks"], logprobs, strict=True)
    return [
        align(f"[{i}]", tokens, masks, values, rehearsal.sampled, tokenizer)
        for i, (tokens, masks, values) in enumerate(rows)
    ]


def _check_alignments(
    group: Any, alignments: list[Alignment], findings: Findings, site: str | None
) -> None:
    for alignment in alignments:
        for name, problem in (
            ("masks", alignment.mask_problem),
            ("logprobs", alignment.logprob_problem),
            ("context", alignment.context_problem),
        ):
            if problem:
                findings.fail(name, problem, site)
    trained = sum(alignment.num_trained for alignment in alignments)
    if not trained:
        findings.fail("masks", "every token of the group is masked; nothing is trained", site)
    findings.passed("masks", f"{trained} of {sum(map(len, group['tokens']))} tokens are trained")
    spans = [span for alignment in alignments for span in alignment.spans]
    if any(span.reply.has_images for span in spans):
        findings.skip("context", "the model saw images, which no tokens of the group stand for")
    else:
        findings.passed("context", f"{len(spans)} replies stand behind the tokens the model read")
    if group.get("inference_logprobs"):
        findings.passed("logprobs", "each is the one the engine reported")
    else:
        findings.skip("logprobs", "groups carry no inference_logprobs; managed_server gives them")


def _check_scores(
    replies: list[ScoredReply], rehearsal: Rehearsal, findings: Findings, site: str | None
) -> None:
    if not rehearsal.script.turns:
        for name in SCORE_RULES:
            findings.skip(name, NO_GOLD)
        return
    if not any(reply.role == "gold" for reply in replies):
        for name in SCORE_RULES:
            findings.skip(name, "no trajectory with the gold answer and a finite score was found")
        return
    if rehearsal.num_score_timeouts:
        findings.note(
            f"scoring timed out {rehearsal.num_score_timeouts} times and its default was taken: "
            "look at what the scoring function does with such an answer, or raise "
            "--env.score_timeout_s"
        )
    scores: dict[Role, float] = {reply.role: reply.score for reply in replies}
    seen = ", ".join(f"{role} {score:g}" for role, score in scores.items())
    equal = equal_scores(replies)
    if equal:
        late = f"; {SCORING_TIMED_OUT}" if rehearsal.num_score_timeouts else ""
        findings.fail("spread", f"{equal}{late}", site)
        for name in ("wrong", "truncated"):
            findings.skip(name, "all scores are equal")
        return
    findings.passed("spread", seen)
    is_late = rehearsal.num_score_timeouts > 0
    _check_role(replies, ("empty", "garbage"), "wrong", findings, site, is_late=is_late)
    _check_role(replies, ("truncated", "unclosed"), "truncated", findings, site, is_late=is_late)


def _check_role(
    replies: list[ScoredReply],
    roles: tuple[Role, ...],
    name: str,
    findings: Findings,
    site: str | None,
    *,
    is_late: bool,
) -> None:
    present = sorted({reply.role for reply in replies} & set(roles))
    if not present:
        findings.passed(name, "the environment gives up groups with such answers")
        return
    problem = too_good(replies, roles, unless_muted=name == "truncated")
    if problem:
        late = f"; {SCORING_TIMED_OUT}" if is_late else ""
        findings.fail(name, f"{problem}{late}", site)
    findings.passed(name, f"{', '.join(present)}: below gold")


def _count(group: Any) -> int:
    return len(group["tokens"])
