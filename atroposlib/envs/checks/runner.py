"""One environment built for a check: its rollouts, a failed and a cancelled one, an evaluation.

settings -> adjusted -> constructor -> servers replaced by scripted ones -> Stage
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from atroposlib.envs.checks.report import (
    OTHER_HOOKS,
    Findings,
    pending_method,
    site_of,
    suspended_site,
    traceback_site,
)
from atroposlib.envs.checks.scripted_model import (
    CharTokenizer,
    Role,
    Script,
    ScriptedModel,
    ScriptedSample,
    ScriptedServer,
    make_script,
)
from atroposlib.envs.checks.watchers import CapturedOutput
from atroposlib.envs.evaluation_statistics import INTERVAL_ENDS
from atroposlib.envs.rollouts import INCOMPLETE, Vocabulary, as_pair
from atroposlib.envs.running import build_environment
from atroposlib.envs.scheduler import next_item_of
from atroposlib.envs.settings import Settings
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.utils.aio import NUM_WAITS, ends_within, refuse_cancelled, settle
from atroposlib.utils.json_text import single_number, to_plain

__all__ = [
    "COLLECTING",
    "OTHER_SEED",
    "SCORE_METHODS",
    "SCORING",
    "SETUP_LIMIT_S",
    "STEP_LIMIT_S",
    "WITH_COPIED",
    "DryRun",
    "Stage",
    "StepTimeoutError",
    "changed_path",
    "check_cancel",
    "check_evaluation",
    "check_failed_rollout",
    "data_of",
    "dry_run",
    "gold_answer",
    "is_local_tokenizer",
    "limited_here",
    "next_item",
    "roll_out",
    "seeded",
    "staged_settings",
    "within_limit",
]

SEED = 0
OTHER_SEED = 1
MIN_GROUP_SIZE, MAX_GROUP_SIZE = 5, 8
CHARACTERS_PER_TOKEN = 4


@dataclass
class Stage:
    """An environment whose inference servers are the scripted model."""

    env: Any
    model: ScriptedModel

    @classmethod
    def build(cls, env_cls: type[Any], settings: Settings, *, is_stand_in: bool) -> Stage:
        """Construct an environment.

        Args:
            env_cls: Class of the environment.
            settings: Return value of `staged_settings`.
            is_stand_in: Whether a tokenizer of characters replaces the configured one.
        """
        extra = {"_stand_in_tokenizer": CharTokenizer(template_bos=True)} if is_stand_in else None
        env = build_environment(env_cls, settings, extra)
        model = ScriptedModel(
            env.tokenizer, is_stand_in=is_stand_in, judge_reply=env.check_judge_reply
        )
        configs = env.server_configs or [server.config for server in env.server.servers]
        env.server.servers = [ScriptedServer(model, config) for config in configs]
        return cls(env, model)


def staged_settings(settings: Settings, folder: Path, *, is_stand_in: bool) -> Settings:
    """Return settings for a check: no accounts, files in `folder`, 5 to 8 rollouts per group."""
    group_size = min(max(settings.env.group_size, MIN_GROUP_SIZE), MAX_GROUP_SIZE)
    factor = CHARACTERS_PER_TOKEN if is_stand_in else 1
    changes = {
        "group_size": group_size,
        "max_token_length": settings.env.max_token_length * factor,
        "use_wandb": False,
        "data_path_to_save_groups": None,
        "data_dir_to_save_evals": str(folder / "evaluation"),
        "metrics_path": str(folder / "metrics.jsonl"),
    }
    manager = settings.manager.model_copy(update={"testing": True, "slurm": False})
    return settings._replace(env=settings.env.model_copy(update=changes), manager=manager)


def is_local_tokenizer(name: str) -> bool:
    """Whether a tokenizer is a folder, or a hub repository whose files are in the cache."""
    if Path(name).is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except HFValidationError:
        return False


@contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Seed the random generators of Python and NumPy, and restore their state at the end."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


COLLECTING = ("postprocess_histories", "collect_trajectories", "collect_trajectory")
"""A finding about a group points at the first of these hooks that the author defines."""

SCORE_METHODS = ("score", "_score", "compute_score", "reward", "compute_reward", "grade")
"""Common names of methods that score one answer."""

SCORING = (*SCORE_METHODS, *COLLECTING)
"""A finding about scores points at the first of these methods that the author defines."""

STEP_LIMIT_S = 60.0
SETUP_LIMIT_S = 600.0
"""Data and models may take minutes to load."""
MAX_BACKLOG_ROUNDS = 20

FALLBACKS: Sequence[Sequence[Role]] = ((), ("gold", "empty", "garbage"), ("gold", "garbage"))
"""Roles tried in turn until there is a group: some environments drop groups with some answers."""

WITH_COPIED: Sequence[Sequence[Role]] = (
    ("gold", "copied", "foreign", "garbage"),
    ("gold", "copied", "foreign"),
)
"""Roles of a group that shows whether the answer can be copied from the prompt."""

Result = TypeVar("Result")


class DryRun(NamedTuple):
    """The rollouts of one item against the scripted model."""

    groups: list[Any]
    """Groups that the environment returned, arrays as lists; without None."""
    sampled: list[ScriptedSample]
    max_in_flight: int
    """Largest number of concurrent requests."""
    script: Script
    num_score_timeouts: int = 0
    """Calls of the score pool that timed out and returned their default."""


class StepTimeoutError(TimeoutError):
    """A step of the environment did not end in time.

    Attributes:
        where: The author's line that it was suspended at, None if unknown.
    """

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


async def within_limit(step: Awaitable[Result], *, limit_s: float = STEP_LIMIT_S) -> Result:
    """Wait for a step of the environment; one that swallows its cancellation is left behind.

    Raises:
        StepTimeoutError: the step takes longer; the message names a scoring method it was in.
        RuntimeError: the step let a CancelledError pass.
    """
    task = asyncio.ensure_future(step)
    try:
        if await ends_within(task, limit_s):
            refuse_cancelled(task)
            return task.result()
        late = _too_late(task, limit_s)
    finally:
        if not task.done():
            task.cancel()
            await ends_within(task, CANCEL_LIMIT_S)
        if task.done() and not task.cancelled():
            task.exception()  # so that it is not logged as never retrieved after a sys.exit
    raise late


@contextmanager
def limited_here(
    limit_s: float, *, on_swallowed: Callable[[StepTimeoutError], None] = lambda _: None
) -> Iterator[None]:
    """Limit the time of a block of this task.

    Some clients must be closed by the task that has opened them, so that `setup` and `close` have
    none of their own.

    Args:
        limit_s: Time limit of the block in seconds.
        on_swallowed: Called if the block continues after it was cancelled, and so does its task.

    Raises:
        StepTimeoutError: the block takes longer.
        RuntimeError: the block let a CancelledError pass (from Python 3.11 on).
    """
    task = asyncio.current_task()
    assert task is not None
    late: list[StepTimeoutError] = []
    timer: asyncio.TimerHandle

    def wait(wait_s: float, then: Callable[[], None], num_waits: int = NUM_WAITS) -> None:
        nonlocal timer
        call = partial(wait, wait_s, then, num_waits - 1) if num_waits > 1 else then
        timer = asyncio.get_running_loop().call_later(wait_s / NUM_WAITS, call)

    def end() -> None:
        late.append(_too_late(task, limit_s))
        task.cancel()
        wait(CANCEL_LIMIT_S, lambda: on_swallowed(late[0]))

    wait(limit_s, end)
    try:
        yield
        if late:  # the block has let the cancellation pass
            raise late[0]
    except asyncio.CancelledError as error:
        if not late and sys.version_info >= (3, 11) and not task.cancelling():
            raise RuntimeError(
                "its own code let a CancelledError pass, such as that of a cancelled task"
            ).with_traceback(error.__traceback__) from error
        if not late:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise late[0] from None
    finally:
        timer.cancel()


def _too_late(task: asyncio.Task[Any], limit_s: float) -> StepTimeoutError:
    text = f"did not end within {limit_s:g} s"
    scoring = pending_method(SCORE_METHODS)
    if scoring is not None:
        method, where = scoring
        return StepTimeoutError(f"scoring timed out: {method} {text}", where)
    pending = pending_method((*COLLECTING, *OTHER_HOOKS))  # of a rollout in a task of its own
    return StepTimeoutError(text, suspended_site(task) or (pending[1] if pending else None))


async def next_item(env: Any) -> Any:
    """Return the next item of the environment, None if there is none.

    Raises:
        TypeError: the item is what an `await` or an iteration would have given.
    """
    item = await within_limit(next_item_of(env))
    if inspect.iscoroutine(item):
        item.close()  # otherwise Python warns that it was never awaited
    if inspect.iscoroutine(item) or inspect.isasyncgen(item) or inspect.isgenerator(item):
        raise TypeError(
            f"{type(env).__name__}.get_next_item returned an object of type {type(item).__name__}; "
            "expected the item: `await` a coroutine, and write `return` in place of `yield`"
        )
    return item


async def gold_answer(env: Any, item: Any) -> str | Sequence[str] | None:
    """Return the gold answer of an item, or one per turn, or None.

    Raises:
        TypeError: the environment returned another value.
    """
    gold = await within_limit(settle(env.check_gold_answer(item)))
    turns = gold if isinstance(gold, list | tuple) else [gold]
    if gold is not None and not all(isinstance(turn, str) for turn in turns):
        raise TypeError(
            f"{type(env).__name__}.check_gold_answer returned {gold!r:.60}; expected the text of a "
            "reply, a list with one text per turn, or None"
        )
    return gold  # type: ignore[no-any-return]  # checked above


async def roll_out(env: Any, item: Any) -> list[Any]:
    """Collect and postprocess the groups of an item and, until there is one, of its backlog."""
    groups: list[Any] = []
    backlog = [item]
    for _ in range(MAX_BACKLOG_ROUNDS):
        if not backlog or groups:
            break
        collected, later = as_pair(await settle(env.collect_trajectories(backlog.pop(0))))
        backlog += later
        if collected:
            collected = await settle(env.postprocess_histories(collected))
        found = collected if isinstance(collected, list) else [collected]
        groups += [_plain(group) for group in found if group is not None]
    return groups


async def dry_run(
    stage: Stage,
    item: Any,
    *,
    fallbacks: Sequence[Sequence[Role]] = FALLBACKS,
    prompts: Sequence[str] = (),
) -> DryRun:
    """Roll out an item against good and bad answers.

    If the first of `fallbacks` yields no group, the item is rolled out again with the next.
    `prompts` are those of other items, which the role `foreign` repeats.
    """
    gold = await gold_answer(stage.env, item)
    num_before = _num_score_timeouts(stage.env)
    run = DryRun([], [], 0, make_script(gold))
    for roles in fallbacks if gold else fallbacks[:1]:
        script = make_script(gold, roles=roles, prompts=prompts)
        stage.model.start(script)
        groups = await within_limit(roll_out(stage.env, item))
        run = DryRun(
            groups,
            list(stage.model.sampled),
            stage.model.max_in_flight,
            script,
            _num_score_timeouts(stage.env) - num_before,
        )
        if groups:
            break
    return run


def _num_score_timeouts(env: Any) -> int:
    pool = env._opened_score_pool()
    return 0 if pool is None else int(pool.num_timeouts)


def _plain(group: Any) -> Any:
    if not isinstance(group, Mapping):
        return group
    plain = dict(group)
    for field in GROUP_FIELDS:
        try:
            plain[field.name] = to_plain(plain.get(field.name))
        except TypeError:
            continue  # reported under the rule `shape`
    scores = plain.get("scores")
    if isinstance(scores, list | tuple):
        plain["scores"] = [single_number(score) for score in scores]
    logprobs = plain.get("inference_logprobs")
    if isinstance(logprobs, list) and not logprobs:  # as some environments without logprobs do
        plain["inference_logprobs"] = None
    return plain


MAX_DEPTH = 12
OPAQUE = "<object>"


def data_of(value: Any, depth: int = 0) -> Any:
    """Return a copy of the plain data in a value.

    Mappings, sequences, sets, dataclasses and pydantic models are copied. Other objects are
    replaced by a constant: a stateful object in an item, such as a game, may change.
    """
    if depth > MAX_DEPTH:
        return OPAQUE
    if isinstance(value, BaseModel):
        value = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): data_of(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [data_of(entry, depth + 1) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(data_of(entry, depth + 1)) for entry in value)
    return value if isinstance(value, str | bytes | int | float | None) else OPAQUE


def changed_path(before: Any, after: Any, path: str = "item") -> str | None:
    """Return the path and values of the first difference between two copies, or None."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{path}[{key!r}]"
            if key not in before:
                return f"{place} was added"
            if key not in after:
                return f"{place} was removed"
            changed = changed_path(before[key], after[key], place)
            if changed:
                return changed
        return None
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{path} had {len(before)} entries and has {len(after)}"
        pairs = enumerate(zip(before, after, strict=True))
        changes = (changed_path(old, new, f"{path}[{i}]") for i, (old, new) in pairs)
        return next((change for change in changes if change), None)
    if type(before) is not type(after) or (before != after and before == before):
        return f"{path} was {_short(before)} and is {_short(after)}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


SIBLING_LATENCY_S = 0.05
CANCEL_LIMIT_S = 10.0
POLL_S = 0.005

NO_ITEMS_LEFT = "get_next_item returned None: no item was left for it"


async def check_failed_rollout(
    stage: Stage, findings: Findings, output: CapturedOutput, *, max_in_flight: int
) -> None:
    """Make one request of a group fail; check the other rollouts and whether it is reported.

    Args:
        stage: The environment.
        findings: Collects the findings.
        output: Log records and output of the environment.
        max_in_flight: Largest number of concurrent requests of a group.
    """
    item = await next_item(stage.env)
    if item is None:
        for name in ("siblings", "swallowed"):
            findings.skip(name, NO_ITEMS_LEFT)
        return
    gold = await gold_answer(stage.env, item)
    model = stage.model
    model.start(make_script(gold))
    model.fail_at = 1 if max_in_flight > 1 else 0
    model.latency_s = SIBLING_LATENCY_S
    position, num_counted = output.position(), _num_counted(stage.env)
    error, groups = await _outcome(stage.env, item)
    if isinstance(error, StepTimeoutError):
        raise StepTimeoutError(f"{error} after a request failed", error.where)
    num_running, num_cancelled = model.num_in_flight, model.num_cancelled
    while model.num_in_flight:  # noqa: ASYNC110 - the requests of this check end by themselves
        await asyncio.sleep(POLL_S)
    if model.failure is None:
        for name in ("siblings", "swallowed"):
            findings.skip(name, "the rollout made no request that could fail")
        return
    _report_siblings(stage.env, findings, max_in_flight, num_running, num_cancelled)
    kept = [row for group in groups if "tokens" in group for row in group["tokens"]]
    num_kept = sum(_has_reply(row, model) for row in kept)
    if error is not None:
        findings.passed("swallowed", f"{type(error).__name__} reaches the base class")
    elif num_kept >= stage.env.config.group_size:
        findings.passed("swallowed", "the environment retries a failed request itself")
    elif _num_counted(stage.env) > num_counted or output.mentions(model.failure, since=position):
        findings.passed("swallowed", "the environment logs or counts it")
    else:
        instead = ", a trajectory without a reply takes its place" if len(kept) > num_kept else ""
        findings.fail(
            "swallowed",
            f"an inference request failed{instead}, and neither an exception nor a log line nor a "
            "count reports it",
            traceback_site(model.failure.__traceback__, outermost=True)
            or site_of(type(stage.env), COLLECTING),
        )


def _has_reply(row: Any, model: ScriptedModel) -> bool:
    """Whether a trajectory has the text of a reply, or is not a row of token ids.

    An empty reply has the text of its prompt.
    """
    if (
        not isinstance(row, list | tuple)
        or not Vocabulary(model.tokenizer).check([row]).is_accepted
    ):
        return True  # reported under the rule `shape`

    def text_of(ids: Sequence[int]) -> str:
        return str(model.tokenizer.decode(list(ids), skip_special_tokens=True))

    text = text_of(row)
    pairs = ((text_of(each.ids), each.prompt_ids) for each in model.sampled)
    return any(reply in text if reply else text_of(prompt) in text for reply, prompt in pairs)


async def check_cancel(stage: Stage, findings: Findings) -> None:
    """Cancel a rollout while it waits for the model, then roll out its item again."""
    item = await next_item(stage.env)
    if item is None:
        findings.skip("cancel", NO_ITEMS_LEFT)
        return
    site = site_of(type(stage.env), COLLECTING)
    gold = await gold_answer(stage.env, item)
    before = data_of(item)
    stage.model.start(make_script(gold))
    stage.model.hangs = True
    rollout = asyncio.create_task(roll_out(stage.env, item))
    try:
        await within_limit(_until_waiting(rollout, stage.model))
    except StepTimeoutError as late:
        rollout.cancel()
        await ends_within(rollout, CANCEL_LIMIT_S)
        raise StepTimeoutError(f"{late} and made no request", late.where) from None
    if rollout.done() and not stage.model.num_in_flight and rollout.exception() is None:
        findings.skip("cancel", "the rollout made no request during which it could be cancelled")
        return
    rollout.cancel()
    if not await ends_within(rollout, CANCEL_LIMIT_S):
        findings.fail("cancel", f"a cancelled rollout continued for {CANCEL_LIMIT_S:g} s", site)
        return
    if not rollout.cancelled() and rollout.exception() is None:
        findings.fail("cancel", "a cancelled rollout returned without CancelledError", site)
        return
    changed = changed_path(before, data_of(item))
    if changed:
        findings.fail("items", f"after a cancelled rollout {changed}", site)
    stage.model.start(make_script(gold))
    error, _ = await _outcome(stage.env, item)
    if error is not None:
        where = traceback_site(error.__traceback__) or site
        findings.fail("cancel", f"rolling out the item again raised {error!r}", where)
    findings.passed("cancel", "it ended at once, and its item was rolled out again")


async def _until_waiting(rollout: asyncio.Future[Any], model: ScriptedModel) -> None:
    while not model.num_in_flight and not rollout.done():  # noqa: ASYNC110 - no event
        await asyncio.sleep(POLL_S)


def _num_counted(env: Any) -> int:
    """Count failures and drops, except those that only say that a rollout returned None."""
    counted = env.failure_counts + env.drop_counts
    return int(sum(num for name, num in counted.items() if name != INCOMPLETE))


def _report_siblings(
    env: Any, findings: Findings, num_requests: int, num_running: int, num_cancelled: int
) -> None:
    site = site_of(type(env), COLLECTING)
    if num_requests <= 1:
        findings.passed("siblings", "the group is made of one request at a time")
    elif num_running:
        detail = f"the hook returned while {num_running} other rollouts of its group were running"
        findings.fail("siblings", detail, site)
    elif num_cancelled:
        findings.fail("siblings", f"{num_cancelled} other rollouts were cancelled", site)
    findings.passed("siblings", f"the other {num_requests - 1} ran to completion")


async def _outcome(env: Any, item: Any) -> tuple[Exception | None, list[Any]]:
    try:
        return None, await within_limit(roll_out(env, item))
    except Exception as error:  # noqa: BLE001 - one rollout: what it raises is the result
        return error, []


FILE_NAME = "metrics.json"


async def check_evaluation(stage: Stage, findings: Findings) -> None:
    """Evaluate once with wrong answers, then look for results in files and metrics.

    Exceptions of `evaluate` propagate.
    """
    env = stage.env
    site = site_of(type(env), ["evaluate"])
    stage.model.start(make_script(None))
    num_before = stage.model.num_answered
    env._reporter.start_local_run()
    returned = await within_limit(settle(env.evaluate()))
    await within_limit(settle(env.wandb_log({})))
    num_requests = stage.model.num_answered - num_before
    requests = f"{num_requests} request{'' if num_requests == 1 else 's'}"
    path = Path(env.config.data_dir_to_save_evals) / FILE_NAME
    if path.exists():
        _check_file(path, findings, site, requests)
        return
    keys = _logged_keys(Path(env.config.metrics_path))
    if keys:
        findings.passed("evaluation", f"{requests}; logged {', '.join(keys)}")
    elif not num_requests and not returned:
        findings.skip("evaluation", "evaluate does nothing")
    else:
        findings.fail("evaluation", f"no result was written after {requests} to the model", site)


def _check_file(path: Path, findings: Findings, site: str | None, requests: str) -> None:
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))["results"]["all"]
    except (ValueError, KeyError) as error:
        findings.fail("evaluation", f"{path.name} cannot be read: {error!r}", site)
        return
    names = ", ".join(name for name in metrics if not name.endswith(INTERVAL_ENDS))
    if names:
        findings.passed("evaluation", f"{requests}; {path.name} has {names}")
    else:
        findings.fail("evaluation", f"{path.name} has no metric after {requests}", site)


def _logged_keys(path: Path) -> list[str]:
    """Return the evaluation's metrics in the local metrics file.

    Authors name them freely; those of the training and of the servers are logged without one, too.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = {key for line in lines for key in json.loads(line)} - {"step", "time"}
    return sorted(key for key in keys if "server_" not in key and not key.startswith("train/"))
