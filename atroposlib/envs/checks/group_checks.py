"""What the groups of an item tell: shape, masks, logprobs, context, numbers and scores."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.checks.alignment import Alignment, align
from atroposlib.envs.checks.call_site import hook_site
from atroposlib.envs.checks.group_shape import non_finite_path, shape_problem, wrong_score
from atroposlib.envs.checks.rehearsal import COLLECTING, SCORING, Rehearsal
from atroposlib.envs.checks.report import Findings
from atroposlib.envs.checks.scoring import ScoredReply, equal_scores, scored_replies, too_good
from atroposlib.envs.checks.script import Role

__all__ = ["check_groups"]

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
