"""Rules on the groups of an item: shape, masks, logprobs, context, numbers and scores; pure.

Masks, logprobs and context are checked by aligning a trajectory with the replies of the model:

tokens   p p p p c c c e o o o c c e        p prompt, c sampled, o observation, e end of turn
spans            [-----]       [---]        found by prompt and reply, each a `ReplySpan`
masks    . . . . c c c e . . . c c e        trained positions must lie in a span
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.checks.report import Findings, hook_site, site_of
from atroposlib.envs.checks.runner import COLLECTING, SCORING, DryRun
from atroposlib.envs.checks.scripted_model import Role, ScriptedSample
from atroposlib.envs.rollouts import INCOMPLETE, Vocabulary, check_signal
from atroposlib.errors import GroupError
from atroposlib.scored_data import (
    GROUP_FIELDS,
    IGNORE_INDEX,
    MASKED_LOGPROB,
    GroupField,
    has_zeroed_advantage,
    wrong_number,
)
from atroposlib.wire import decode_group, encode_group

__all__ = [
    "SCORING_TIMED_OUT",
    "Alignment",
    "ReplySpan",
    "align",
    "check_groups",
    "copied_answer",
]

NUMBER_FIELDS = ("scores", "advantages", "inference_logprobs", "ref_logprobs")


def shape_problem(group: Any, *, group_size: int, tokenizer: Any = None) -> str | None:
    """Return why the base class or the service would reject a group, or None.

    With a `tokenizer`, its token ids are compared with those of the group.

    `non_finite_path` reports infinite and NaN values, `wrong_score` scores that are not numbers.
    """
    if isinstance(group, Mapping):
        scores = [0.0] * len(group["scores"]) if wrong_score(group) else group.get("scores")
        group = {key: _finite(value) for key, value in {**group, "scores": scores}.items()}
    admission = check_signal(group, group_size=group_size, scores_must_differ=False)
    if admission.is_accepted and tokenizer is not None:
        admission = Vocabulary(tokenizer).check(group["tokens"])
    if not admission.is_accepted:
        return f"a group would be dropped as {admission.reason}: {admission.detail}"
    try:
        body = encode_group(group)
        decode_group(body)
    except (GroupError, TypeError, ValueError) as error:
        return f"a group cannot be sent: {error}"
    sent = json.loads(body)
    problems = (_misaligned(sent, field) for field in GROUP_FIELDS if field.per_trajectory)
    return next((problem for problem in problems if problem), None)


def _misaligned(group: Mapping[str, Any], field: GroupField) -> str | None:
    """Return an error message for a field whose counts or lengths are not those of the tokens.

    The service accepts it; a trainer refuses it, or it belongs to another trajectory there.
    """
    name, tokens = field.name, group["tokens"]
    values = group.get(name) or ()
    if all(entry is None or entry == [] for entry in values):  # trainers ignore it
        return None
    if len(values) != len(tokens):
        return f"{name}: {len(values)} entries; expected one for each of {len(tokens)} trajectories"
    if not field.shape.startswith("GL"):
        return None
    is_advantage = name == "advantages"
    remedy = "expected one per token" + ", or a number in place of the list" * is_advantage
    for i, (row, ids) in enumerate(zip(values, tokens, strict=True)):
        if is_advantage and _needs_no_advantages(group, i):
            continue
        if len(row) != len(ids):
            return f"{name}[{i}]: {len(row)} entries, tokens[{i}] has {len(ids)}; {remedy}"
    return None


def _needs_no_advantages(group: Mapping[str, Any], i: int) -> bool:
    """Whether a trajectory has one number as its advantage, or trainers do not use the list."""
    is_list = isinstance(group["advantages"][i], list)
    return not is_list or _is_demonstration(group, i) or has_zeroed_advantage(group, i)


def wrong_score(group: Any) -> str | None:
    """Return an error message for the first score that is not a number, or None."""
    scores = group.get("scores") if isinstance(group, Mapping) else None
    return wrong_number("scores", scores) if isinstance(scores, list | tuple) else None


def non_finite_path(group: Mapping[str, Any]) -> str | None:
    """Return an error message for the first number that is not finite, or None."""
    paths = (_non_finite(group.get(name), name) for name in NUMBER_FIELDS)
    return next((path for path in paths if path), None)


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
"""Largest difference of a logprob from the engine's."""


class ReplySpan(NamedTuple):
    """The position of one reply in a trajectory."""

    start: int
    end: int
    reply: ScriptedSample
    is_exact: bool
    """Whether the tokens before it are the prompt that the model received."""


class Alignment(NamedTuple):
    """A trajectory compared with the replies of the model; a problem is None if there is none."""

    spans: list[ReplySpan]
    mask_problem: str | None
    logprob_problem: str | None
    context_problem: str | None
    num_trained: int
    omits_end: bool
    """Whether a reply is trained without its end of turn."""


def align(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float] | None,
    sampled: Sequence[ScriptedSample],
    tokenizer: Any,
    *,
    is_demonstration: bool = False,
) -> Alignment:
    """Compare one trajectory with the replies of the model.

    Args:
        path: Index of the trajectory for error messages, such as `[0]`.
        tokens: [L].
        masks: [L].
        logprobs: [L], or None for a group without logprobs.
        sampled: All replies to the requests of the item.
        tokenizer: Tokenizer of the environment.
        is_demonstration: Whether the trajectory is trained by likelihood (`sft`), so that its
            trained tokens may come from a data set.
    """
    trained = [i for i, mask in enumerate(masks) if mask != IGNORE_INDEX]
    spans = _spans(list(tokens), trained, sampled)
    written = {i for span in spans for i in range(span.start, span.end)}
    if is_demonstration:
        written = set(range(len(tokens)))
    return Alignment(
        spans=spans,
        mask_problem=_mask_problem(path, tokens, masks, written, tokenizer),
        logprob_problem=None
        if logprobs is None
        else _logprob_problem(path, tokens, masks, logprobs, spans),
        context_problem=_context_problem(path, tokens, spans, tokenizer),
        num_trained=len(trained),
        omits_end=any(_omits_end(span, masks, tokenizer.eos_token_id) for span in spans),
    )


def _omits_end(span: ReplySpan, masks: Sequence[int], eos_token_id: int | None) -> bool:
    """Whether a reply ended by itself, and is trained without the token that ended it."""
    ids = span.reply.ids
    if eos_token_id is None or ids[-1:] != [eos_token_id]:
        return False
    trained = [i for i in range(span.start, span.end) if masks[i] != IGNORE_INDEX]
    return bool(trained) and trained[-1] != span.start + len(ids) - 1


def _spans(
    tokens: list[int], trained: Sequence[int], sampled: Sequence[ScriptedSample]
) -> list[ReplySpan]:
    """Locate replies in a trajectory: first by prompt and tokens, then by tokens alone."""
    exact: dict[int, ReplySpan] = {}
    for reply in sampled:
        start = len(reply.prompt_ids)
        length = _shared(reply.ids, tokens[start:])
        if tokens[:start] != reply.prompt_ids or not length:
            continue
        if start not in exact or start + length > exact[start].end:
            exact[start] = ReplySpan(start, start + length, reply, True)
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
    """Return the number of reply tokens that `tokens` starts with.

    It is all of them, all but the end of turn, or 0.
    """
    for length in (len(ids), len(ids) - 1):
        if length > 0 and list(tokens[:length]) == list(ids[:length]):
            return length
    return 0


def _loose_span(
    tokens: list[int], start: int, sampled: Sequence[ScriptedSample]
) -> ReplySpan | None:
    """Return the longest reply of several tokens at `start`, regardless of the tokens before it."""
    longest: ReplySpan | None = None
    for reply in sampled:
        length = _shared(reply.ids, tokens[start:])
        if length > 1 and (longest is None or start + length > longest.end):
            longest = ReplySpan(start, start + length, reply, False)
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
    # Tokens without text only close a turn: a chat template adds them after a reply.
    foreign = [
        i
        for i, mask in enumerate(masks)
        if mask != IGNORE_INDEX and i not in written and _text([mask], tokenizer).strip()
    ]
    if foreign:
        i = foreign[0]
        shown = _text(tokens[i : i + 12], tokenizer)
        return (
            f"masks{path} trains on {len(foreign)} tokens that the model did not generate, from "
            f"position {i}: {shown!r}"
        )
    return None


def _logprob_problem(
    path: str,
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[ReplySpan],
) -> str | None:
    shift = _shift(masks, logprobs, spans)
    if shift:
        direction = "early" if shift < 0 else "late"
        return (
            f"inference_logprobs{path} are shifted: each is {abs(shift)} position too {direction}"
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


def _shift(masks: Sequence[int], logprobs: Sequence[float], spans: Sequence[ReplySpan]) -> int:
    """Return the number of positions that the logprobs are shifted by: -1, 0 or 1."""
    pairs = [pair for span in spans for pair in _known(span, masks)]
    if len(pairs) < 3 or _share(pairs, logprobs, 0) == 1.0:
        return 0
    return next((by for by in (-1, 1) if _share(pairs, logprobs, by) > 0.6), 0)


def _share(pairs: Sequence[tuple[int, float]], logprobs: Sequence[float], by: int) -> float:
    """Return the fraction of known logprobs that are `by` positions from their token."""
    hits = [
        0 <= i + by < len(logprobs) and abs(logprobs[i + by] - known) <= TOLERANCE
        for i, known in pairs
    ]
    return sum(hits) / len(hits)


def _known(span: ReplySpan, masks: Sequence[int]) -> list[tuple[int, float]]:
    """Return the position and the engine's logprob of each trained token of a reply."""
    if span.reply.logprobs is None:
        return []
    values = zip(range(span.start, span.end), span.reply.logprobs, strict=False)
    return [(i, value) for i, value in values if masks[i] != IGNORE_INDEX]


def _context_problem(
    path: str, tokens: Sequence[int], spans: Sequence[ReplySpan], tokenizer: Any
) -> str | None:
    for span in spans:
        if span.is_exact or span.reply.has_images:
            continue
        read, found = span.reply.prompt_ids, list(tokens[: span.start])
        pairs = zip(read, found, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), len(found)))
        return (
            f"tokens{path} has {len(found)} tokens before the reply at {span.start}, the model "
            f"received {len(read)}; the first difference is at {first}: "
            f"{_text(found[first : first + 12], tokenizer)!r}, "
            f"the model received {_text(read[first : first + 12], tokenizer)!r}"
        )
    return None


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


class ScoredTrajectory(NamedTuple):
    """The score of one trajectory with the role of its last reply."""

    role: Role
    score: float
    is_masked: bool
    """Whether the trajectory has no gradient: every token is masked or its advantage is 0."""


def scored_replies(
    group: Mapping[str, Any], roles: Sequence[Role | None]
) -> list[ScoredTrajectory]:
    """Return the scores of trajectories with a known role and a finite score.

    If all scores of a group are equal and it has token-level advantages, the mean advantage of the
    trained tokens takes the place of the score.

    Args:
        group: [G] trajectories.
        roles: [G] role of the last reply, None if unknown.
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
        is_masked = not trained or (
            isinstance(override, Mapping) and bool(override.get("set_advantage_to_zero"))
        )
        if role is not None and wrong_number("", [score]) is None and math.isfinite(score):
            found.append(ScoredTrajectory(role, float(score), is_masked))
    return found


def repeated_trajectory(group: Mapping[str, Any], sampled: Sequence[ScriptedSample]) -> str | None:
    """Return an error message if different scores belong to one trajectory, or None."""
    num_replies = len({tuple(reply.ids) for reply in sampled if reply.role is not None})
    rows = {tuple(row) for row in group["tokens"]}
    if len(rows) > 1 or num_replies < 2 or len(set(map(str, group["scores"]))) < 2:
        return None
    return (
        f"every trajectory has the same tokens, with different scores; the model gave "
        f"{num_replies} different replies"
    )


def equal_scores(replies: Sequence[ScoredTrajectory]) -> str | None:
    """Return an error message if the gold answer and all others score the same, or None."""
    scores = {reply.score for reply in replies}
    roles = {reply.role for reply in replies}
    if len(scores) > 1 or "gold" not in roles or len(roles) < 2:
        return None
    others = ", ".join(sorted(role for role in roles if role != "gold"))
    return f"every answer scores {scores.pop():g}: gold, {others}"


def too_good(
    replies: Sequence[ScoredTrajectory], roles: Sequence[Role], *, unless_masked: bool = False
) -> str | None:
    """Return an error message for an answer that does not score less than the gold one, or None.

    Args:
        replies: All answers to one item.
        roles: Roles that must score less than gold.
        unless_masked: Whether a trajectory without a gradient may score as much.
    """
    gold = [reply.score for reply in replies if reply.role == "gold"]
    for reply in replies:
        is_exempt = unless_masked and reply.is_masked
        if gold and reply.role in roles and reply.score >= min(gold) and not is_exempt:
            return f"the {NAMES[reply.role]} scores {reply.score:g}, the gold answer {min(gold):g}"
    return None


NAMES: dict[Role, str] = {
    "gold": "gold answer",
    "empty": "empty answer",
    "garbage": "meaningless answer",
    "truncated": "first half of the gold answer, truncated by the token budget,",
    "unclosed": "gold answer inside a thought that was truncated by the token budget",
    "copied": "prompt, repeated as the answer,",
    "foreign": "prompt of another item",
}


NO_GOLD = (
    "there is no gold answer; define check_gold_answer(self, item) -> str and return the reply of "
    "a perfect model"
)
WORSE_ROLES: Mapping[str, tuple[Role, ...]] = {
    "wrong": ("empty", "garbage"),
    "truncated": ("truncated", "unclosed"),
}
"""Roles that must score less than gold, by rule."""
NO_GOLD_EITHER = "there is no gold answer"
SCORE_RULES = ("spread", *WORSE_ROLES)
SCORING_TIMED_OUT = "scoring timed out and returned its default"
MORE_TIME = (
    "time the scoring function with such an answer, or raise its time limit, score_timeout_s"
)
ONE_EACH = "add the tokens, masks and logprobs of each reply to the group next to its score"
OUTSIDE_VOCABULARY = "outside_vocabulary"
OTHER_TOKENIZER = "encode text with self.tokenizer, and copy token ids as they are"
UNSCRIPTED_JUDGE = (
    "if a judge model scores the answers, define check_judge_reply(self, messages) -> str | None "
    "and return its verdict on them; otherwise check what the scoring function compares"
)
UNSAMPLED = "rollouts yield no group and make no request to the model"
SAMPLE = "request replies through self.server, and return a group or a scored trajectory"
OMITTED_END = (
    "the model does not learn to stop: replies are trained without their last token, the end of "
    "turn; add it to tokens, masks and logprobs"
)
NO_NUMBER = "return a number for every answer, also for one that cannot be parsed"


def check_groups(env: Any, run: DryRun, findings: Findings) -> None:
    """Check the groups that one item yielded, and add the findings."""
    site = site_of(type(env), COLLECTING)
    if not run.groups:
        if not run.sampled:
            findings.fail("rollout", UNSAMPLED, site, remedy=SAMPLE)
        elif run.script.turns:
            seen = "good and bad answers together yielded no group"
            if env.drop_counts[INCOMPLETE]:
                seen += "; collect_trajectory returned None for some of them"
            findings.fail("rollout", seen, site)
        else:
            findings.skip("rollout", f"bad answers alone yielded no group; {_no_gold(env)}")
        return
    findings.passed("rollout", f"{len(run.sampled)} replies to an item became a group")
    scoring_site = site_of(type(env), SCORING)
    replies: list[ScoredTrajectory] = []
    policy_prompts: set[str] = set()
    for group in run.groups:
        problem = shape_problem(group, group_size=env.config.group_size, tokenizer=env.tokenizer)
        if problem:
            is_foreign = OUTSIDE_VOCABULARY in problem
            findings.fail("shape", problem, site, remedy=OTHER_TOKENIZER if is_foreign else None)
            if not _can_be_aligned(group, env.tokenizer):
                continue
        wrong = wrong_score(group)
        if wrong:
            findings.fail("finite", wrong, scoring_site, remedy=NO_NUMBER)
        path = non_finite_path(group)
        if path:
            findings.fail("finite", path, scoring_site)
        repeated = repeated_trajectory(group, run.sampled)
        if repeated:
            findings.fail("spread", repeated, site, remedy=ONE_EACH)
        alignments = _alignments(group, run.sampled, env.tokenizer)
        _check_alignments(group, alignments, findings, site)
        replies += scored_replies(group, _roles(alignments))
        policy_prompts |= {span.reply.prompt for each in alignments for span in each.spans}
    if not findings.has_failed("shape"):
        counts = f"{len(run.groups[0]['tokens'])} trajectories, group_size {env.config.group_size}"
        findings.passed("shape", counts)
    findings.passed("finite", "scores, advantages and logprobs")
    others = {sampled.prompt for sampled in run.sampled if sampled.role} - policy_prompts
    is_judged = bool(others) and hook_site(type(env), ["check_judge_reply"]) is None
    remedy = UNSCRIPTED_JUDGE if is_judged else None
    _check_scores(replies, run, findings, scoring_site, no_gold=_no_gold(env), remedy=remedy)


def copied_answer(env: Any, run: DryRun) -> str | None:
    """Return an error message if the answer can be copied from the prompt, or None.

    Repeating the prompt then scores as much as the gold answer, and more than repeating the prompt
    of another item.
    """
    replies: list[ScoredTrajectory] = []
    for group in run.groups:
        if not _can_be_aligned(group, env.tokenizer):
            continue
        replies += scored_replies(group, _roles(_alignments(group, run.sampled, env.tokenizer)))
    scores: dict[Role, float] = {reply.role: reply.score for reply in replies}
    if not {"copied", "foreign"} <= scores.keys() or scores["foreign"] >= scores["copied"]:
        return None
    return too_good(replies, ["copied"])


def _no_gold(env: Any) -> str:
    """Return why no reply is known to be right; some environments cannot follow the advice."""
    return getattr(env, "no_gold_answer", NO_GOLD)


def _can_be_aligned(group: Any, tokenizer: Any) -> bool:
    """Whether tokens are ids of the tokenizer, and masks and logprobs have the same lengths."""
    try:
        lengths = [[len(row) for row in group[name]] for name in ("tokens", "masks")]
        logprobs = group.get("inference_logprobs")
        lengths += [[len(row) for row in logprobs]] if logprobs else []
        are_ids = all(isinstance(token, int | float) for row in group["tokens"] for token in row)
        are_known = are_ids and Vocabulary(tokenizer).check(group["tokens"]).is_accepted
        return are_known and all(row == lengths[0] for row in lengths)
    except (TypeError, KeyError, AttributeError):
        return False


def _alignments(group: Any, sampled: Sequence[ScriptedSample], tokenizer: Any) -> list[Alignment]:
    logprobs = group.get("inference_logprobs") or [None] * len(group["tokens"])
    rows = zip(group["tokens"], group["masks"], logprobs, strict=True)
    return [
        align(
            f"[{i}]",
            tokens,
            masks,
            values,
            sampled,
            tokenizer,
            is_demonstration=_is_demonstration(group, i),
        )
        for i, (tokens, masks, values) in enumerate(rows)
    ]


def _roles(alignments: Sequence[Alignment]) -> list[Role | None]:
    """Return the role of the last reply of each trajectory, None if it has none."""
    return [each.spans[-1].reply.role if each.spans else None for each in alignments]


def _is_demonstration(group: Any, i: int) -> bool:
    overrides = group.get("overrides")
    is_listed = isinstance(overrides, list) and i < len(overrides)
    for switches in (overrides[i] if is_listed else None, group.get("group_overrides")):
        if isinstance(switches, Mapping) and switches.get("sft") is not None:
            return bool(switches["sft"])
    return False


def _check_alignments(
    group: Any, alignments: list[Alignment], findings: Findings, site: str | None
) -> None:
    # As a preference pair, whose sides were sampled with other prompts than the one they share.
    is_from_text = group.get("tokenized_from_text") and not group.get("inference_logprobs")
    for alignment in alignments:
        for name, problem in (
            ("masks", alignment.mask_problem),
            ("logprobs", alignment.logprob_problem),
            ("context", None if is_from_text else alignment.context_problem),
        ):
            if problem:
                findings.fail(name, problem, site)
    if any(alignment.omits_end for alignment in alignments):
        findings.note(OMITTED_END)
    trained = sum(alignment.num_trained for alignment in alignments)
    if not trained:
        findings.fail("masks", "every token of the group is masked; nothing is trained", site)
    findings.passed("masks", f"{trained} of {sum(map(len, group['tokens']))} tokens are trained")
    spans = [span for alignment in alignments for span in alignment.spans]
    if any(span.reply.has_images for span in spans):
        findings.skip("context", "the prompt had images, which the tokens of a group lack")
    elif is_from_text:
        findings.skip("context", "groups are marked tokenized_from_text and have no logprobs")
    else:
        findings.passed("context", f"{len(spans)} replies follow the prompts the model received")
    if group.get("inference_logprobs"):
        findings.passed("logprobs", "each is the one the engine reported")
    else:
        findings.skip("logprobs", "groups have no inference_logprobs; use managed_server")


def _check_scores(
    replies: list[ScoredTrajectory],
    run: DryRun,
    findings: Findings,
    site: str | None,
    *,
    no_gold: str,
    remedy: str | None,
) -> None:
    if not any(reply.role == "gold" for reply in replies):
        is_known = bool(run.script.turns)
        reason = "no trajectory has the gold answer and a finite score" if is_known else no_gold
        findings.skip(SCORE_RULES[0], reason)
        for name in SCORE_RULES[1:]:
            findings.skip(name, reason if is_known else NO_GOLD_EITHER)
        return
    timed_out = ""
    if run.num_score_timeouts:
        timed_out, remedy = f"; {SCORING_TIMED_OUT}", MORE_TIME
        findings.note(
            f"scoring timed out {run.num_score_timeouts} times and its default was used: "
            f"{MORE_TIME}"
        )
    equal = equal_scores(replies)
    if equal:
        findings.fail("spread", f"{equal}{timed_out}", site, remedy=remedy)
        for name in ("wrong", "truncated"):
            findings.skip(name, "all scores are equal")
        return
    scores: dict[Role, float] = {reply.role: reply.score for reply in replies}
    findings.passed("spread", ", ".join(f"{role} {score:g}" for role, score in scores.items()))
    for name, roles in WORSE_ROLES.items():
        present = sorted({reply.role for reply in replies} & set(roles))
        problem = too_good(replies, roles, unless_masked=name == "truncated")
        if problem:
            findings.fail(name, f"{problem}{timed_out}", site, remedy=remedy)
        elif present:
            findings.passed(name, f"{', '.join(present)}: below gold")
        else:
            findings.passed(name, "the environment drops groups with such answers")
