"""The harness of `check`: an environment against a scripted model.

The environment is built three times with the same seed:

    first run   setup -> items -> groups -> a failed rollout -> a cancelled one -> evaluate -> close
    second run  setup -> the same items -> groups -> close            (determinism)
    third run   setup -> the same items -> groups, rolled out with another seed -> close  (scores)

What was observed in a run becomes findings: errors, stalls, attempts, leftovers. Two runs are
compared as sorted collections, since the rollouts of a group may send requests in any order.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

from atroposlib.envs.checks.group_checks import check_groups
from atroposlib.envs.checks.report import (
    CheckReport,
    Findings,
    class_site,
    hook_site,
    is_named_method,
    mentioned_site,
    method_name,
    misspelt_setting,
    traceback_site,
)
from atroposlib.envs.checks.runner import (
    COLLECTING,
    OTHER_SEED,
    SCORE_METHODS,
    SCORING,
    Rehearsal,
    Stage,
    StepTimeoutError,
    changed_path,
    check_cancel,
    check_evaluation,
    check_failed_rollout,
    data_of,
    is_local_tokenizer,
    next_item,
    rehearse,
    seeded,
    staged_settings,
)
from atroposlib.envs.checks.watchers import (
    CapturedOutput,
    NetworkAttempt,
    NetworkBlockedError,
    Running,
    Stall,
    block_network,
    capture_output,
    end_leftover_tasks,
    wait_for_end,
    watch_loop,
)
from atroposlib.envs.running import missing_methods, outside_event_loop
from atroposlib.envs.settings import Settings
from atroposlib.utils.aio import settle
from atroposlib.utils.score_pool import ScoreTimeoutError

__all__ = [
    "Trace",
    "changed_score",
    "check_class",
    "difference",
    "judge_determinism",
    "judge_leftovers",
    "judge_network",
    "judge_stalls",
    "judging",
    "run_checks",
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


NUM_ITEMS = 2
MAX_ITEMS = 6
"""Items looked at until so many of them gave a group."""

MISSPELT = "correct the name, or declare a setting of your own as a field of env_config_cls"

UNDESCRIBED_TOOL = re.compile(r'"name": "(\w+)", "description": ""')


def run_checks(env_cls: type[Any], settings: Settings) -> CheckReport:
    """Check an environment class under the settings of a run."""
    started_at = time.monotonic()
    findings = Findings()
    _judge_class(env_cls, settings, findings)
    if not missing_methods(env_cls):
        outside_event_loop(lambda: _run_all(env_cls, settings, findings))
    return _report(env_cls, findings, started_at)


def check_class(env_cls: type[Any], read_settings: Callable[[], Settings]) -> CheckReport:
    """Check an environment class; settings that cannot be read become a finding.

    Args:
        env_cls: the environment.
        read_settings: called once; what it raises is reported under `config`.
    """
    started_at = time.monotonic()
    findings = Findings()
    with judging(findings, "config", env_cls, ["config_init"]):
        return run_checks(env_cls, read_settings())
    return _report(env_cls, findings, started_at)


def _report(env_cls: type[Any], findings: Findings, started_at: float) -> CheckReport:
    return CheckReport(
        environment=env_cls.name or env_cls.__name__,
        outcomes=findings.outcomes(),
        notes=findings.notes,
        duration_s=time.monotonic() - started_at,
    )


def _judge_class(env_cls: type[Any], settings: Settings, findings: Findings) -> None:
    """Look at what can be told without an instance: methods to be written, names of settings."""
    missing = missing_methods(env_cls)
    if missing:
        lines = " and ".join(f"`{line}`" for line in missing.values())
        detail = f"{env_cls.__name__} has no {', no '.join(missing)}"
        findings.fail("config", detail, class_site(env_cls), remedy=f"write {lines}")
    misspelt = misspelt_setting(env_cls, settings.env)
    if misspelt:
        where = hook_site(env_cls, ["config_init"]) or class_site(env_cls)
        findings.fail("config", misspelt, where, remedy=MISSPELT)


def _run_all(env_cls: type[Any], settings: Settings, findings: Findings) -> None:
    name = settings.env.tokenizer_name
    is_stand_in = not is_local_tokenizer(name)
    with (
        TemporaryDirectory() as folder,
        block_network() as attempts,
        capture_output() as output,
    ):
        if is_stand_in:
            findings.note(
                f"the tokenizer {name} is not on this machine; one token per character stands in "
                "for it, and max_token_length is four times as large"
            )
            findings.note(
                "its chat template was not tried either: a conversation that it refuses shows with "
                "a tokenizer that is here, --env.tokenizer_name FOLDER"
            )
        staged = staged_settings(settings, Path(folder), is_stand_in=is_stand_in)
        if staged.env.group_size != settings.env.group_size:
            findings.note(
                f"group_size is {staged.env.group_size} for the check, not "
                f"{settings.env.group_size}, so that every kind of answer is in a group"
            )
        first = _run(env_cls, staged, findings, output, is_stand_in=is_stand_in)
        if first:
            second, third = (
                _run(env_cls, staged, Findings(), None, is_stand_in=is_stand_in, rollout_seed=seed)
                for seed in (None, OTHER_SEED)
            )
            judge_determinism(env_cls, first, second, third, findings)
    judge_network(attempts, findings)


def _run(
    env_cls: type[Any],
    settings: Settings,
    findings: Findings,
    output: CapturedOutput | None,
    *,
    is_stand_in: bool,
    rollout_seed: int | None = None,
) -> list[Rehearsal]:
    """Build an environment, rehearse it and close it; everything is checked where `output` is."""
    _load_slow_modules()
    with seeded():
        before = Running.now()
        with judging(findings, "config", env_cls, ["__init__", "config_init"]):
            # The environment writes into its config: each run has its own.
            own = settings._replace(env=settings.env.model_copy(deep=True))
            stage = Stage.build(env_cls, own, is_stand_in=is_stand_in)
            findings.passed("config", f"group_size {own.env.group_size}")
            return asyncio.run(_perform(stage, findings, output, before, rollout_seed))
    return []


def _load_slow_modules() -> None:
    """Import what a real inference server would have imported, so that nothing waits for it.

    The OpenAI client imports its parts when they are first used; `BaseEnv.client` is one.
    """
    import openai.types.chat
    import openai.types.completion

    client = openai.AsyncOpenAI(
        api_key="none",  # pragma: allowlist secret
        base_url="http://localhost",
    )
    _ = client.chat.completions, client.completions


async def _perform(
    stage: Stage,
    findings: Findings,
    output: CapturedOutput | None,
    before: Running,
    rollout_seed: int | None,
) -> list[Rehearsal]:
    env_cls = type(stage.env)
    rehearsals: list[Rehearsal] = []
    with judging(findings, "setup", env_cls, ["setup"]):
        await settle(stage.env.setup())
        findings.passed("setup")
        with watch_loop() as stalls:
            with judging(findings, "rollout", env_cls, COLLECTING):
                rehearsals = await _rehearse_items(stage, findings, rollout_seed)
            if output is not None:
                await _try_failures(stage, findings, output, rehearsals)
        judge_stalls(stalls, findings)
    with judging(findings, "leftovers", env_cls, ["close"]):
        await settle(stage.env.close())
        await stage.env._close_score_pool()
        await stage.env.server.close()
    stage.env._close_records()
    await judge_leftovers(before, findings)
    return rehearsals


async def _rehearse_items(
    stage: Stage, findings: Findings, rollout_seed: int | None
) -> list[Rehearsal]:
    """Roll out items until enough of them gave a group, and look at what came of each.

    A `rollout_seed` holds while an item is rolled out; the next item is drawn as without it.
    """
    rehearsals: list[Rehearsal] = []
    for _ in range(MAX_ITEMS):
        item = await next_item(stage.env)
        if item is None:
            break
        before = data_of(item)
        with nullcontext() if rollout_seed is None else seeded(rollout_seed):
            rehearsal = await rehearse(stage, item)
        rehearsals.append(rehearsal)
        for tool in UNDESCRIBED_TOOL.findall("".join(r.prompt for r in rehearsal.sampled)):
            findings.note(f"tool {tool} has no docstring; the model is told its name and types")
        changed = changed_path(before, data_of(item))
        if changed:
            findings.fail("items", f"after a rollout {changed}", _site(stage, *COLLECTING))
        if rehearsal.groups:
            check_groups(stage.env, rehearsal, findings)
        if sum(bool(r.groups) for r in rehearsals) == NUM_ITEMS:
            break
    if not rehearsals:
        findings.fail("rollout", "get_next_item gives no item", _site(stage, "get_next_item"))
        return rehearsals
    if not any(r.groups for r in rehearsals):
        check_groups(stage.env, rehearsals[-1], findings)
    findings.passed("items", f"{len(rehearsals)} items are as they were")
    return rehearsals


async def _try_failures(
    stage: Stage, findings: Findings, output: CapturedOutput, rehearsals: list[Rehearsal]
) -> None:
    env_cls = type(stage.env)
    if rehearsals:
        num_first_requests = max(r.num_first_requests for r in rehearsals)
        with judging(findings, "siblings", env_cls, COLLECTING):
            await check_failed_rollout(
                stage, findings, output, num_first_requests=num_first_requests
            )
        with judging(findings, "cancel", env_cls, COLLECTING):
            await check_cancel(stage, findings)
    with judging(findings, "evaluation", env_cls, ["evaluate"]):
        await check_evaluation(stage, findings)


def _site(stage: Stage, *names: str) -> str | None:
    return hook_site(type(stage.env), names)
