"""The harness of `check`: dry runs of an environment, and their observations as findings.

The environment is built three times with the same seed:

    first run   setup -> items -> groups -> a failed rollout -> a cancelled one -> evaluate -> close
    second run  setup -> the same items -> groups -> close            (determinism)
    third run   setup -> the same items -> groups, rolled out with another seed -> close  (scores)

Runs are compared as sorted collections, since the rollouts of a group send requests in any order.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

from atroposlib.envs.checks.group_checks import SCORING_TIMED_OUT, check_groups, copied_answer
from atroposlib.envs.checks.report import (
    CheckReport,
    Findings,
    Outcome,
    class_site,
    hook_site,
    is_named_method,
    mentioned_site,
    method_name,
    misspelled_setting,
    site_of,
    traceback_site,
)
from atroposlib.envs.checks.runner import (
    COLLECTING,
    OTHER_SEED,
    SCORE_METHODS,
    SCORING,
    SETUP_LIMIT_S,
    STEP_LIMIT_S,
    WITH_COPIED,
    DryRun,
    Stage,
    StepTimeoutError,
    changed_path,
    check_cancel,
    check_evaluation,
    check_failed_rollout,
    data_of,
    dry_run,
    is_local_tokenizer,
    limited_here,
    next_item,
    seeded,
    staged_settings,
)
from atroposlib.envs.checks.scripted_model import OPTIONS, CharTokenizer
from atroposlib.envs.checks.watchers import (
    CapturedOutput,
    LoopStall,
    NetworkAttempt,
    NetworkBlockedError,
    Running,
    block_network,
    capture_output,
    end_default_executor,
    end_leftover_tasks,
    wait_for_end,
    watch_loop,
)
from atroposlib.envs.running import missing_methods, outside_event_loop
from atroposlib.envs.server_handling.engine_http import make_http_client
from atroposlib.envs.settings import Settings
from atroposlib.utils.aio import settle
from atroposlib.utils.score_pool import ScoreTimeoutError

__all__ = ["check_class", "finding_on_error", "run_checks"]

CONTEXT = 40
"""Characters shown around the first difference of two prompts."""


class Trace(NamedTuple):
    """The prompts and trajectories of one run, sorted."""

    prompts: list[str]
    trajectories: list[tuple[str, str]]
    """Tokens and score, as text, so that NaN equals itself."""


def trace_of(runs: Sequence[DryRun]) -> Trace:
    """Return the trace of the dry runs of several items."""
    prompts = sorted(sampled.prompt for run in runs for sampled in run.sampled)
    groups = [group for run in runs for group in run.groups]
    trajectories = [row for group in groups for row in _rows(group)]
    return Trace(prompts, sorted(trajectories))


def _rows(group: Any) -> list[tuple[str, str]]:
    try:
        pairs = zip(group["tokens"], group["scores"], strict=False)
        return [(json.dumps(tokens, default=str), repr(float(score))) for tokens, score in pairs]
    except (TypeError, KeyError, ValueError):
        return []  # reported under the rule `shape`


def difference(first: Trace, second: Trace) -> str | None:
    """Return an error message for the first difference between two runs, or None."""
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
    return "with the same prompts and replies, trajectories have different tokens or scores"


def changed_score(one: Trace, other: Trace) -> str | None:
    """Return an error message if the same answer scores differently in two runs, or None.

    Only trajectories of both runs are compared, since prompts may differ under another seed.
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


RAISED_BY_AUTHOR = "correct that line, or the values that reach it"
NOT_INSTALLED = "install what the error names into this Python; the code may be right"
NOT_IN_STAND_IN = (
    "set --env.tokenizer_name to a folder on this machine: the tokenizer of characters, which "
    "replaces the configured one here, lacks this attribute; the code may be right"
)
ENDED_PROGRAM = "raise an exception in place of sys.exit, which ends the whole process"
RAISED_ABOUT_METHOD = "correct the arguments or the return value of that method"
TOO_LATE = "find what it waits for, or give it less to do here"
SCORED_TOO_LONG = (
    "score in a worker with a time limit and a default: await self.score_pool.run(function, *args, "
    "timeout=5, default=0.0)"
)
RANDOM_SCORE = (
    "let the score depend on the item and the answer only; if the task needs randomness, store a "
    "seed in the item"
)

NOT_RENDERED = (
    "use the roles and the order that the template supports, or set --env.tokenizer_name to a "
    "tokenizer whose template supports this conversation"
)
NO_TEMPLATE = (
    "set --env.tokenizer_name to the tokenizer of an instruct model, or write the prompt as text "
    "and request a completion"
)
RENDERERS = ("apply_chat_template", "_apply_chat_template")
"""Methods of tokenizers that turn a conversation into a prompt."""

BEFORE_ROLLOUTS = ("config", "setup")
"""Rules whose own remedy also fits exceptions from installed packages."""

BEFORE_GROUPS = (*BEFORE_ROLLOUTS, "rollout")
"""Rules that a run breaks which ends before it has groups."""

RUN_ONCE = (
    "keep state in self, not in the class or the module, and end in close() what setup has opened"
)


@contextmanager
def finding_on_error(
    findings: Findings, name: str, env_cls: type[Any], hooks: Sequence[str]
) -> Iterator[None]:
    """Record an exception of the block, or its `sys.exit`, as a failure of one rule; suppress it.

    Args:
        findings: Collects the finding.
        name: Key in `RULES`.
        env_cls: Class of the environment.
        hooks: The finding points at the first of these that the author defines, unless a line of
            the author raised the exception.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one step: what it raises is the result
        if _is_by_network(error):
            findings.skip(name, "stopped by the attempt to reach the network")
            return
        if _is_unrendered(error) and findings.has_failed("rollout"):
            findings.skip(name, "stopped by the chat template, like the rollouts")
            return
        if name == "setup" and isinstance(error, getattr(env_cls, "mistakes", ())):
            findings.mistake = error
        where, remedy = _place_and_remedy(name, error, env_cls, hooks)
        findings.fail(name, _description(error), where, remedy=remedy)


def _description(error: BaseException) -> str:
    """Return the text of an exception, prefixed if scoring timed out or a template failed."""
    unrendered = describe_unrendered(error)
    if unrendered is not None:
        return unrendered
    text = _named(error)
    if isinstance(error, StepTimeoutError) or not _is_scoring_timeout(error):
        return text
    methods = [method_name(f) for f in _frames(error) if is_named_method(f, SCORE_METHODS)]
    return f"scoring timed out{f' in {methods[0]}' if methods else ''}: {text}"


def describe_unrendered(error: BaseException) -> str | None:
    """Return the message of an exception of a chat template, None for others."""
    if not _is_unrendered(error):
        return None
    reason = "it has none" if _lacks_template(error) else _named(error)
    return f"the tokenizer's chat template does not render the conversation: {reason}"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_scoring_timeout(error: BaseException) -> bool:
    if isinstance(error, StepTimeoutError):
        return str(error).startswith("scoring")
    is_late = isinstance(error, TimeoutError | asyncio.TimeoutError)  # two before Python 3.11
    is_scoring = any(is_named_method(frame, SCORE_METHODS) for frame in _frames(error))
    return isinstance(error, ScoreTimeoutError) or (is_late and is_scoring)


def _is_unrendered(error: BaseException) -> bool:
    return any(frame.f_code.co_name in RENDERERS for frame in _frames(error))


def _lacks_template(error: BaseException) -> bool:
    return "has no chat template" in str(error) or "chat_template is not set" in str(error)


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _place_and_remedy(
    name: str, error: BaseException, env_cls: type[Any], hooks: Sequence[str]
) -> tuple[str | None, str | None]:
    """Return the place in the author's files, and a remedy if the rule's does not fit."""
    if _is_scoring_timeout(error):
        where = error.where if isinstance(error, StepTimeoutError) else None
        where = where or traceback_site(error.__traceback__) or site_of(env_cls, SCORING)
        return where, SCORED_TOO_LONG
    if isinstance(error, StepTimeoutError) and error.where is not None:
        return error.where, TOO_LATE
    own_line = traceback_site(error.__traceback__)
    if _is_unrendered(error):
        remedy = NO_TEMPLATE if _lacks_template(error) else NOT_RENDERED
        return own_line or site_of(env_cls, hooks), remedy
    if isinstance(error, AttributeError) and isinstance(error.obj, CharTokenizer):
        return own_line or site_of(env_cls, hooks), NOT_IN_STAND_IN
    if isinstance(error, SystemExit):
        return own_line or site_of(env_cls, hooks), ENDED_PROGRAM
    if isinstance(error, ImportError):
        return own_line or hook_site(env_cls, hooks) or class_site(env_cls), NOT_INSTALLED
    if own_line is not None:
        is_raised_there = own_line == traceback_site(error.__traceback__, anywhere=True)
        fits = is_raised_there or name not in BEFORE_ROLLOUTS
        return own_line, RAISED_BY_AUTHOR if fits else None
    mentioned = mentioned_site(error, SCORING)
    if mentioned is not None:
        return mentioned, RAISED_ABOUT_METHOD
    if isinstance(error, NotImplementedError):  # the author does not define a hook
        return hook_site(env_cls, hooks) or class_site(env_cls), None
    where = site_of(env_cls, hooks)
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return where, TOO_LATE
    return where, None if name in BEFORE_ROLLOUTS else RAISED_ABOUT_METHOD


def _is_by_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, NetworkBlockedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report_later_runs(again: Findings, findings: Findings) -> None:
    """Report a run that failed although the first one, in the same process, did not."""
    for outcome in again.outcomes():
        is_new = outcome.status == "failed" and not findings.has_failed(outcome.name)
        if is_new and outcome.name in BEFORE_GROUPS:
            detail = f"a later run in the same process failed: {outcome.detail}"
            findings.fail("determinism", detail, outcome.where, remedy=RUN_ONCE)


def _report_determinism(
    env_cls: type[Any],
    first: list[DryRun],
    second: list[DryRun],
    other_seed: list[DryRun],
    findings: Findings,
) -> None:
    one, two, three = (trace_of(runs) for runs in (first, second, other_seed))
    changed, changed_by_seed = difference(one, two), changed_score(one, three)
    has_timed_out = any(run.num_score_timeouts for run in (*first, *second, *other_seed))
    if has_timed_out and one.prompts == two.prompts and (changed or changed_by_seed):
        # As on a busy machine; a default takes the place of a score.
        findings.skip("determinism", f"{SCORING_TIMED_OUT} in some runs, so that scores differ")
        return
    if changed:
        findings.fail("determinism", changed, site_of(env_cls, ("get_next_item", *COLLECTING)))
    if changed_by_seed:
        where = site_of(env_cls, SCORING)
        findings.fail("determinism", changed_by_seed, where, remedy=RANDOM_SCORE)
    findings.passed("determinism", f"two runs of {len(first)} items are the same")


def _report_network(attempts: list[NetworkAttempt], findings: Findings) -> None:
    blocked = [attempt for attempt in attempts if attempt.is_blocked]
    if blocked:
        hosts = ", ".join(dict.fromkeys(attempt.host for attempt in blocked))
        where = next((attempt.where for attempt in blocked if attempt.where), None)
        findings.fail("network", f"{len(blocked)} attempts to reach {hosts}", where)
    for attempt in attempts:
        if not attempt.is_blocked:
            findings.note(
                f"{attempt.where} connects to {attempt.host} directly; the scripted model "
                "answers through self.server only"
            )
    findings.passed("network", "no other machine was contacted")


def _report_stalls(stalls: list[LoopStall], findings: Findings) -> None:
    if stalls:
        longest = max(stalls)
        findings.fail(
            "blocking", f"one call blocked it for {longest.duration_s:.2f} s", longest.where
        )
    findings.passed("blocking", "no call blocked it for more than 100 ms")


async def _report_leftovers(before: Running, findings: Findings) -> None:
    """Report what still runs after `close`, and cancel leftover tasks."""
    await end_default_executor()
    left = await wait_for_end(before)
    if left:
        names = ", ".join(sorted({leftover.what for leftover in left}))
        where = next((leftover.where for leftover in left if leftover.where), None)
        findings.fail("leftovers", f"still running after close(): {names}", where)
    findings.passed("leftovers", "tasks, threads and processes have ended")
    await end_leftover_tasks(before)


NUM_ITEMS = 2
"""Items that must yield a group."""
MAX_ITEMS = 6
"""Items rolled out at most."""

LEAKED = (
    "remove the answer from the prompt, or do not accept it with the rest of the prompt around it; "
    "otherwise the model learns to copy"
)

NO_ITEM = "return an item; None means that there is none at the moment"

GREEDY = (
    "rollouts are requested with temperature 0: an engine then gives all answers to an item alike, "
    "and a group of equal scores is dropped"
)

TOOLS = (
    "requests have tools, but the scripted model answers with text only: its message.tool_calls is "
    "None, and an answer that an engine would read as a call scores like any other text. Use "
    "managed_server with self.server.tool_parser, which reads the calls here as well"
)

WARNED = "correct what the warning names"

MISSPELLED = "correct the name, or declare a setting of your own as a field of env_config_cls"

UNDESCRIBED_TOOL = re.compile(r'"name": "(\w+)", "description": ""')


def run_checks(env_cls: type[Any], settings: Settings) -> CheckReport:
    """Check an environment class under the settings of a run."""
    started_at = time.monotonic()
    findings = Findings()
    _check_class(env_cls, settings, findings)
    if not missing_methods(env_cls):
        outside_event_loop(lambda: _run_all(env_cls, settings, findings))
    return _report(env_cls, findings, started_at)


def check_class(env_cls: type[Any], read_settings: Callable[[], Settings]) -> CheckReport:
    """Check an environment class; an exception of `read_settings` becomes a finding."""
    started_at = time.monotonic()
    findings = Findings()
    with finding_on_error(findings, "config", env_cls, ["config_init"]):
        return run_checks(env_cls, read_settings())
    return _report(env_cls, findings, started_at)


def _report(env_cls: type[Any], findings: Findings, started_at: float) -> CheckReport:
    is_named = isinstance(env_cls.name, str) and env_cls.name  # else None, or a property
    return CheckReport(
        environment=env_cls.name if is_named else env_cls.__name__,
        outcomes=findings.outcomes(),
        notes=findings.notes,
        duration_s=time.monotonic() - started_at,
        mistake=findings.mistake,
    )


def _check_class(env_cls: type[Any], settings: Settings, findings: Findings) -> None:
    """Check for missing methods and misspelled settings."""
    missing = missing_methods(env_cls)
    if missing:
        lines = " and ".join(f"`{line}`" for line in missing.values())
        detail = f"{env_cls.__name__} has no {', no '.join(missing)}"
        findings.fail("config", detail, class_site(env_cls), remedy=f"write {lines}")
    misspelled = misspelled_setting(env_cls, settings.env)
    if misspelled:
        where = hook_site(env_cls, ["config_init"]) or class_site(env_cls)
        findings.fail("config", misspelled, where, remedy=MISSPELLED)


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
                f"the tokenizer {name} is not on this machine; a tokenizer of characters replaces "
                "it, and max_token_length is multiplied by 4"
            )
            findings.note(
                "its chat template was not tried; to check that it accepts the conversations, set "
                "--env.tokenizer_name to a folder on this machine"
            )
        staged = staged_settings(settings, Path(folder), is_stand_in=is_stand_in)
        staged, first = _first_run(
            env_cls, settings, staged, findings, output, is_stand_in=is_stand_in
        )
        if first:
            again = Findings()
            second, third = (
                _run(env_cls, staged, again, None, is_stand_in=is_stand_in, rollout_seed=seed)
                for seed in (None, OTHER_SEED)
            )
            _report_later_runs(again, findings)
            _report_determinism(env_cls, first, second, third, findings)
    _report_network(attempts, findings)


def _first_run(
    env_cls: type[Any],
    settings: Settings,
    staged: Settings,
    findings: Findings,
    output: CapturedOutput,
    *,
    is_stand_in: bool,
) -> tuple[Settings, list[DryRun]]:
    """Run with a group size that has every kind of answer, or as set if that alone works.

    Some environments make groups of one size, such as pairs.

    Returns:
        The settings of the run, and its rollouts.
    """
    found = Findings()
    runs = _run(env_cls, staged, found, output, is_stand_in=is_stand_in)
    size, own_size = staged.env.group_size, settings.env.group_size
    failed = [outcome for outcome in found.outcomes() if _may_be_of_group_size(outcome)]
    if size != own_size and failed:
        as_set = staged._replace(env=staged.env.model_copy(update={"group_size": own_size}))
        found_as_set = Findings()
        runs_as_set = _run(env_cls, as_set, found_as_set, output, is_stand_in=is_stand_in)
        if not any(found_as_set.has_failed(outcome.name) for outcome in failed):
            found_as_set.note(
                f"the check uses group_size {own_size}, as set, in which not every kind of answer "
                f"has a place: with {size}, the environment fails ({failed[0].detail})"
            )
            findings.add(found_as_set)
            return as_set, runs_as_set
    if size != own_size:
        found.note(
            f"the check uses group_size {size} instead of {own_size}, so that a group has every "
            "kind of answer"
        )
    findings.add(found)
    return staged, runs


def _may_be_of_group_size(outcome: Outcome) -> bool:
    """Whether an environment may break a rule because it cannot have groups of another size."""
    is_early = outcome.name in BEFORE_ROLLOUTS
    is_size = outcome.name == "shape" and "wrong_size" in outcome.detail
    return outcome.status == "failed" and (is_early or is_size)


def _run(
    env_cls: type[Any],
    settings: Settings,
    findings: Findings,
    output: CapturedOutput | None,
    *,
    is_stand_in: bool,
    rollout_seed: int | None = None,
) -> list[DryRun]:
    """Build an environment, run it and close it; without `output` only its items are rolled out."""
    _load_slow_modules()
    with seeded():
        before = Running.now()
        with finding_on_error(findings, "config", env_cls, ["__init__", "config_init"]):
            # The environment writes into its config: each run has its own.
            own = settings._replace(env=settings.env.model_copy(deep=True))
            stage = Stage.build(env_cls, own, is_stand_in=is_stand_in)
            findings.passed("config", f"group_size {own.env.group_size}")
            try:
                return asyncio.run(_perform(stage, findings, output, before, rollout_seed))
            except SystemExit as error:  # of a task, which ends the event loop
                is_evaluating = any(is_named_method(f, ("evaluate",)) for f in _frames(error))
                name = "evaluation" if is_evaluating else "rollout"
                with finding_on_error(findings, name, env_cls, COLLECTING):
                    raise
    return []


def _load_slow_modules() -> None:
    """Import the modules that the OpenAI client loads on first use, before stalls are measured."""
    import openai.types.chat
    import openai.types.completion

    client = openai.AsyncOpenAI(
        api_key="none",  # pragma: allowlist secret
        base_url="http://localhost",
        http_client=make_http_client("http://localhost"),
    )
    _ = client.chat.completions, client.completions


async def _perform(
    stage: Stage,
    findings: Findings,
    output: CapturedOutput | None,
    before: Running,
    rollout_seed: int | None,
) -> list[DryRun]:
    """Run the steps of the environment; a `setup` or `close` that never ends is left behind."""
    endless: asyncio.Future[tuple[str, str, StepTimeoutError]]
    endless = asyncio.get_running_loop().create_future()
    steps = asyncio.create_task(_steps(stage, findings, output, rollout_seed, endless))
    waited: set[asyncio.Future[Any]] = {steps, endless}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    stage.env._close_records()
    if steps.done():
        await _report_leftovers(before, findings)
        return steps.result()
    name, hook, late = endless.result()
    with finding_on_error(findings, name, type(stage.env), [hook]):
        raise late
    await stage.env._close_score_pool()
    await end_leftover_tasks(before)
    return []


async def _steps(
    stage: Stage,
    findings: Findings,
    output: CapturedOutput | None,
    rollout_seed: int | None,
    endless: asyncio.Future[tuple[str, str, StepTimeoutError]],
) -> list[DryRun]:
    """Set up, roll out items, close; `endless` gets the rule and the hook that does not end."""

    def give_up(name: str, hook: str, late: StepTimeoutError) -> None:
        endless.set_result((name, hook, late))

    env_cls = type(stage.env)
    runs: list[DryRun] = []
    with finding_on_error(findings, "setup", env_cls, ["setup"]):
        with limited_here(SETUP_LIMIT_S, on_swallowed=partial(give_up, "setup", "setup")):
            await settle(stage.env.setup())
        findings.passed("setup")
        with watch_loop() as stalls:
            with finding_on_error(findings, "rollout", env_cls, COLLECTING):
                runs = await _run_items(stage, findings, output, rollout_seed)
            if output is not None:
                await _try_failures(stage, findings, output, runs)
        _report_stalls(stalls, findings)
    with finding_on_error(findings, "leftovers", env_cls, ["close"]):
        with limited_here(STEP_LIMIT_S, on_swallowed=partial(give_up, "leftovers", "close")):
            await settle(stage.env.close())
        await stage.env._close_score_pool()
        await stage.env.server.close()
    return runs


async def _run_items(
    stage: Stage, findings: Findings, output: CapturedOutput | None, rollout_seed: int | None
) -> list[DryRun]:
    """Roll out items until enough of them yield a group, and check the groups.

    A `rollout_seed` applies to rollouts only: the items are the same with every seed.
    """
    runs: list[DryRun] = []
    for _ in range(MAX_ITEMS):
        item = await next_item(stage.env)
        if item is None:
            break
        before = data_of(item)
        with nullcontext() if rollout_seed is None else seeded(rollout_seed):
            run = await dry_run(stage, item)
        runs.append(run)
        for tool in UNDESCRIBED_TOOL.findall("".join(r.prompt for r in run.sampled)):
            findings.note(f"tool {tool} has no docstring; the model sees its name and types only")
        changed = changed_path(before, data_of(item))
        if changed:
            findings.fail("items", f"after a rollout {changed}", _site(stage, *COLLECTING))
        if run.groups:
            check_groups(stage.env, run, findings)
        if sum(bool(each.groups) for each in runs) == NUM_ITEMS:
            break
    if not runs:
        where = _site(stage, "get_next_item")
        findings.fail("rollout", "get_next_item returns None", where, remedy=NO_ITEM)
        return runs
    if not any(run.groups for run in runs):
        warning = None if output is None else output.last_warning()
        if warning is not None and not stage.env.drop_counts:
            findings.fail("rollout", f"no item yields a group: {warning}", None, remedy=WARNED)
        check_groups(stage.env, runs[-1], findings)
    if stage.model.has_been_greedy:
        findings.note(GREEDY)
    if "tools" in stage.model.options:
        findings.note(TOOLS)
    for option in sorted(stage.model.options.difference(OPTIONS)):
        for close in get_close_matches(option, OPTIONS, n=1, cutoff=0.8):
            findings.note(
                f"a request has the option {option}, which engines ignore if they do not know it; "
                f"did you mean {close}?"
            )
    findings.passed("items", f"{len(runs)} items are unchanged")
    return runs


async def _try_failures(
    stage: Stage, findings: Findings, output: CapturedOutput, runs: list[DryRun]
) -> None:
    env_cls = type(stage.env)
    if runs:
        max_in_flight = max(run.max_in_flight for run in runs)
        with finding_on_error(findings, "siblings", env_cls, COLLECTING):
            await check_failed_rollout(stage, findings, output, max_in_flight=max_in_flight)
        with finding_on_error(findings, "cancel", env_cls, COLLECTING):
            await check_cancel(stage, findings)
    if any(run.groups and run.script.turns for run in runs) and not findings.has_failed("spread"):
        with finding_on_error(findings, "rollout", env_cls, COLLECTING):
            await _check_prompt(stage, findings, runs)
    with finding_on_error(findings, "evaluation", env_cls, ["evaluate"]):
        await check_evaluation(stage, findings)


async def _check_prompt(stage: Stage, findings: Findings, runs: list[DryRun]) -> None:
    """Report if the prompts of all items that are tried contain an answer that can be copied."""
    decode = stage.env.tokenizer.decode
    firsts = [run.sampled[0].prompt_ids for run in runs if run.sampled]
    prompts = [str(decode(list(ids), skip_special_tokens=True)) for ids in firsts]
    for _ in range(NUM_ITEMS):
        item = await next_item(stage.env)
        if item is None:
            return
        run = await dry_run(stage, item, fallbacks=WITH_COPIED, prompts=prompts)
        found = copied_answer(stage.env, run)
        if found is None:
            return
    findings.fail("wrong", str(found), _site(stage, "prompt", *SCORING), remedy=LEAKED)


def _site(stage: Stage, *names: str) -> str | None:
    return site_of(type(stage.env), names)
