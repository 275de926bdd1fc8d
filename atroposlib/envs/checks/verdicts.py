"""Turning what was watched during a run into findings: errors, stalls, attempts, leftovers.

Whether two runs of an environment do the same. Pure.

Rollouts of a group may ask in any order, so both sides are compared as sorted collections.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from atroposlib.envs.checks.report import (
    Findings,
    class_site,
    hook_site,
    is_named_method,
    mentioned_site,
    method_name,
    traceback_site,
)
from atroposlib.envs.checks.runner import (
    COLLECTING,
    SCORE_METHODS,
    SCORING,
    Rehearsal,
    StepTimeoutError,
)
from atroposlib.envs.checks.watchers import (
    NetworkAttempt,
    NetworkBlockedError,
    Running,
    Stall,
    end_leftover_tasks,
    wait_for_end,
)
from atroposlib.utils.score_pool import ScoreTimeoutError

__all__ = [
    "Trace",
    "changed_score",
    "difference",
    "judge_determinism",
    "judge_leftovers",
    "judge_network",
    "judge_stalls",
    "judging",
    "trace_of",
]

CONTEXT = 40


class Trace(NamedTuple):
    """What one run asked and what it made of the answers."""

    prompts: list[str]
    trajectories: list[tuple[str, str]]
    """Tokens, and score; as text, so that NaN equals itself."""


def trace_of(rehearsals: Sequence[Rehearsal]) -> Trace:
    """Return the trace of some items."""
    prompts = sorted(sampled.prompt for r in rehearsals for sampled in r.sampled)
    groups = [group for rehearsal in rehearsals for group in rehearsal.groups]
    trajectories = [row for group in groups for row in _rows(group)]
    return Trace(prompts, sorted(trajectories))


def _rows(group: Any) -> list[tuple[str, str]]:
    try:
        pairs = zip(group["tokens"], group["scores"], strict=False)
        return [(json.dumps(tokens, default=str), repr(float(score))) for tokens, score in pairs]
    except (TypeError, KeyError, ValueError):
        return []  # the check of the shape says what is wrong with it


def difference(first: Trace, second: Trace) -> str | None:
    """Return what the second run did otherwise, or None."""
    if len(first.prompts) != len(second.prompts):
        return f"{len(first.prompts)} prompts in the first run, {len(second.prompts)} in the second"
    for one, other in zip(first.prompts, second.prompts, strict=True):
        if one != other:
            return f"the prompts differ: {_apart(one, other)}"
    if first.trajectories == second.trajectories:
        return None
    scores = [sorted(score for _, score in trace.trajectories) for trace in (first, second)]
    if scores[0] != scores[1]:
        shown = [", ".join(f"{float(score):g}" for score in row) for row in scores]
        return f"the scores differ: {shown[0]} in the first run, {shown[1]} in the second"
    return "the same prompts and replies gave other tokens or scores to the trajectories"


def changed_score(one: Trace, other: Trace) -> str | None:
    """Return how the score of the same answer changed between two runs, or None.

    Only trajectories that both runs have are compared: prompts may differ under another seed.
    """
    scores = _scores_by_tokens(one), _scores_by_tokens(other)
    for tokens in sorted(scores[0].keys() & scores[1].keys()):
        first, second = scores[0][tokens], scores[1][tokens]
        if len(first) == len(second) and first != second:
            shown = [", ".join(f"{float(score):g}" for score in row) for row in (first, second)]
            return f"the same answer scores {shown[0]} under one seed and {shown[1]} under another"
    return None


def _scores_by_tokens(trace: Trace) -> dict[str, list[str]]:
    scores: dict[str, list[str]] = {}
    for tokens, score in trace.trajectories:  # sorted, and so are the scores of equal tokens
        scores.setdefault(tokens, []).append(score)
    return scores


def _apart(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - CONTEXT // 2)
    return f"{one[start : start + CONTEXT]!r} and {other[start : start + CONTEXT]!r}"


RAISED_BY_AUTHOR = "correct that line, or what reaches it"
RAISED_ABOUT_METHOD = "correct that method: the arguments it takes, or what it returns"
TOO_LATE = "look for what it waits for; a step of the check may take a minute"
SCORED_TOO_LONG = (
    "score in a worker with a limit and a default: await self.score_pool.run(function, *args, "
    "timeout=5, default=0.0)"
)
SCORED_BY_LUCK = (
    "score by the item and the answer alone; luck that belongs to the task goes into the item, as "
    "a seed"
)

NOT_RENDERED = (
    "keep to the roles and the order that the template knows, or name a tokenizer whose template "
    "takes this conversation: --env.tokenizer_name"
)
NO_TEMPLATE = (
    "name the tokenizer of an instruct model with --env.tokenizer_name, or write the prompt as "
    "text and ask for a completion"
)
RENDERERS = ("apply_chat_template", "_apply_chat_template")
"""Methods of tokenizers that turn a conversation into a prompt."""

BEFORE_ROLLOUTS = ("config", "setup")
"""Rules whose own remedy also fits what a package raises."""

OTHER_HOOKS = ("start_conversation", "score_all", "prompt", "score")
"""Methods of authors whose base class collects; in the order in which they tell most."""


@contextmanager
def judging(
    findings: Findings, name: str, env_cls: type[Any], hooks: Sequence[str]
) -> Iterator[None]:
    """Turn what a step raises into a finding of one rule, and go on behind the block."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - one step of the check: what it raises is the result
        if _is_by_network(error):
            findings.skip(name, "stopped by the attempt to reach the network")
            return
        if _is_unrendered(error) and findings.has_failed("rollout"):
            findings.skip(name, "stopped by the chat template, as the rollouts")
            return
        where, remedy = _place_and_remedy(name, error, env_cls, hooks)
        findings.fail(name, _told(error), where, remedy=remedy)


def _told(error: Exception) -> str:
    """Return what is shown of an exception; a time limit that ended the scoring is called that."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if _is_unrendered(error):
        reason = "it has none" if _lacks_template(error) else text
        return f"the tokenizer's chat template does not render the conversation: {reason}"
    if isinstance(error, StepTimeoutError) or not _is_scoring_timeout(error):
        return text
    methods = [method_name(f) for f in _frames(error) if is_named_method(f, SCORE_METHODS)]
    return f"scoring timed out{f' in {methods[0]}' if methods else ''}: {text}"


def _is_scoring_timeout(error: Exception) -> bool:
    if isinstance(error, StepTimeoutError):
        return str(error).startswith("scoring")
    is_late = isinstance(error, TimeoutError | asyncio.TimeoutError)  # two before Python 3.11
    is_scoring = any(is_named_method(frame, SCORE_METHODS) for frame in _frames(error))
    return isinstance(error, ScoreTimeoutError) or (is_late and is_scoring)


def _is_unrendered(error: Exception) -> bool:
    return any(frame.f_code.co_name in RENDERERS for frame in _frames(error))


def _lacks_template(error: Exception) -> bool:
    return "has no chat template" in str(error) or "chat_template is not set" in str(error)


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _place_and_remedy(
    name: str, error: Exception, env_cls: type[Any], hooks: Sequence[str]
) -> tuple[str | None, str | None]:
    """Return the place in the author's files, and the remedy where the rule's does not fit."""
    if _is_scoring_timeout(error):
        where = error.where if isinstance(error, StepTimeoutError) else None
        where = where or traceback_site(error.__traceback__) or hook_site(env_cls, SCORING)
        return where, SCORED_TOO_LONG
    own_line = traceback_site(error.__traceback__)
    if _is_unrendered(error):
        remedy = NO_TEMPLATE if _lacks_template(error) else NOT_RENDERED
        return own_line or hook_site(env_cls, (*hooks, *OTHER_HOOKS)), remedy
    if own_line is not None:
        is_raised_there = own_line == traceback_site(error.__traceback__, anywhere=True)
        fits = is_raised_there or name not in BEFORE_ROLLOUTS
        return own_line, RAISED_BY_AUTHOR if fits else None
    mentioned = mentioned_site(error, SCORING)
    if mentioned is not None:
        return mentioned, RAISED_ABOUT_METHOD
    if isinstance(error, NotImplementedError):  # a hook is not there at all
        return hook_site(env_cls, hooks) or class_site(env_cls), None
    where = hook_site(env_cls, (*hooks, *OTHER_HOOKS)) or class_site(env_cls)
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return where, TOO_LATE
    return where, None if name in BEFORE_ROLLOUTS else RAISED_ABOUT_METHOD


def _is_by_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, NetworkBlockedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def judge_determinism(
    env_cls: type[Any],
    first: list[Rehearsal],
    second: list[Rehearsal],
    other_seed: list[Rehearsal],
    findings: Findings,
) -> None:
    """Compare runs of the same items: two with one seed, and one that rolls out with another."""
    changed = difference(trace_of(first), trace_of(second))
    if changed:
        findings.fail("determinism", changed, hook_site(env_cls, ("get_next_item", *COLLECTING)))
    changed = changed_score(trace_of(first), trace_of(other_seed))
    if changed:
        where = hook_site(env_cls, SCORING)
        findings.fail("determinism", changed, where, remedy=SCORED_BY_LUCK)
    findings.passed("determinism", f"two runs of {len(first)} items are the same")


def judge_network(attempts: list[NetworkAttempt], findings: Findings) -> None:
    """Tell of attempts to reach other machines, and of servers on this one."""
    blocked = [attempt for attempt in attempts if attempt.is_blocked]
    if blocked:
        hosts = ", ".join(dict.fromkeys(attempt.host for attempt in blocked))
        where = next((attempt.where for attempt in blocked if attempt.where), None)
        findings.fail("network", f"{len(blocked)} attempts to reach {hosts}", where)
    for attempt in attempts:
        if not attempt.is_blocked:
            findings.note(
                f"{attempt.where} connects to {attempt.host} by itself; the scripted model "
                "answers through self.server only"
            )
    findings.passed("network", "nothing but this machine was reached for")


def judge_stalls(stalls: list[Stall], findings: Findings) -> None:
    """Tell of the longest call that held the event loop."""
    if stalls:
        longest = max(stalls)
        what = "one call" if longest.where else "a computation that let no other thread run"
        findings.fail("blocking", f"{what} held it for {longest.duration_s:.2f} s", longest.where)
    findings.passed("blocking", "no call held it for more than 100 ms")


async def judge_leftovers(before: Running, findings: Findings) -> None:
    """Tell of what goes on running after `close`, and end its tasks."""
    await asyncio.get_running_loop().shutdown_default_executor()
    left = await wait_for_end(before)
    if left:
        names = ", ".join(sorted({leftover.what for leftover in left}))
        where = next((leftover.where for leftover in left if leftover.where), None)
        findings.fail("leftovers", f"after close() there is still {names}", where)
    findings.passed("leftovers", "tasks, threads and processes have ended")
    await end_leftover_tasks(before)
