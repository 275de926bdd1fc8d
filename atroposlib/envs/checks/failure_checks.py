"""What becomes of a rollout that fails or is cancelled, and of its siblings."""

from __future__ import annotations

import asyncio
from typing import Any

from atroposlib.envs.checks.call_site import hook_site, traceback_site
from atroposlib.envs.checks.captured_output import CapturedOutput
from atroposlib.envs.checks.item_state import changed_path, data_of
from atroposlib.envs.checks.rehearsal import (
    COLLECTING,
    next_item,
    roll_out,
    within_limit,
)
from atroposlib.envs.checks.report import Findings
from atroposlib.envs.checks.script import make_script
from atroposlib.envs.checks.stage import Stage
from atroposlib.envs.hooks import settle

__all__ = ["check_cancel", "check_failed_rollout"]

SIBLING_LATENCY_S = 0.05
CANCEL_LIMIT_S = 2.0
POLL_S = 0.005


async def check_failed_rollout(
    stage: Stage, findings: Findings, output: CapturedOutput, *, num_first_requests: int
) -> None:
    """Let one request of a group fail; look at the other rollouts and at the trace it leaves.

    Args:
        stage: what is checked.
        findings: gathers what is seen.
        output: what the environment logs and prints.
        num_first_requests: requests that a group opens together.
    """
    item = await next_item(stage.env)
    if item is None:
        return
    gold = await settle(stage.env.check_gold_answer(item))
    model = stage.model
    model.start(make_script(gold))
    model.fail_at = 1 if num_first_requests > 1 else 0
    model.latency_s = SIBLING_LATENCY_S
    traces = _Traces(stage.env, output)
    error, groups = await _outcome(stage.env, item)
    num_running, num_cancelled = model.num_in_flight, model.num_cancelled
    while model.num_in_flight:  # noqa: ASYNC110 - the requests of this check end by themselves
        await asyncio.sleep(POLL_S)
    if model.failure is None:
        for name in ("siblings", "swallowed"):
            findings.skip(name, "the rollout made no request that could fail")
        return
    _judge_siblings(stage.env, findings, num_first_requests, num_running, num_cancelled)
    num_kept = sum(len(group["tokens"]) for group in groups if "tokens" in group)
    if error is not None:
        findings.passed("swallowed", f"{type(error).__name__} reaches the base class")
    elif num_kept >= stage.env.config.group_size:
        findings.passed("swallowed", "the environment repeats a failed request by itself")
    elif traces.tell_of(model.failure):
        findings.passed("swallowed", "the environment logs or counts it")
    else:
        _tell_of_swallowed(stage.env, model.failure, findings)


async def check_cancel(stage: Stage, findings: Findings) -> None:
    """Cancel a rollout that waits for the model, and roll its item out again."""
    item = await next_item(stage.env)
    if item is None:
        return
    site = hook_site(type(stage.env), COLLECTING)
    gold = await settle(stage.env.check_gold_answer(item))
    before = data_of(item)
    stage.model.start(make_script(gold))
    stage.model.hangs = True
    rollout = asyncio.create_task(roll_out(stage.env, item))
    while not stage.model.num_in_flight and not rollout.done():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    rollout.cancel()
    await asyncio.wait({rollout}, timeout=CANCEL_LIMIT_S)
    if not rollout.done():
        findings.fail("cancel", f"a cancelled rollout ran on for {CANCEL_LIMIT_S:g} s", site)
        return
    if not rollout.cancelled() and rollout.exception() is None:
        findings.fail("cancel", "a cancelled rollout went on as if nothing had happened", site)
        return
    changed = changed_path(before, data_of(item))
    if changed:
        findings.fail("items", f"after a cancelled rollout {changed}", site)
    stage.model.start(make_script(gold))
    error, _ = await _outcome(stage.env, item)
    if error is not None:
        where = traceback_site(error.__traceback__) or site
        findings.fail("cancel", f"rolling the item out again raised {error!r}", where)
    findings.passed("cancel", "it ended at once, and its item was rolled out again")


def _tell_of_swallowed(env: Any, failure: Exception, findings: Findings) -> None:
    findings.fail(
        "swallowed",
        "an inference request failed, and neither an exception nor a log line nor a count "
        "tells of it",
        traceback_site(failure.__traceback__, outermost=True) or hook_site(type(env), COLLECTING),
    )


def _judge_siblings(
    env: Any, findings: Findings, num_requests: int, num_running: int, num_cancelled: int
) -> None:
    site = hook_site(type(env), COLLECTING)
    if num_requests <= 1:
        findings.passed("siblings", "one request makes the whole group")
    elif num_running:
        detail = f"the hook ended while {num_running} other rollouts of its group were running"
        findings.fail("siblings", detail, site)
    elif num_cancelled:
        findings.fail("siblings", f"{num_cancelled} other rollouts were cancelled", site)
    findings.passed("siblings", f"the other {num_requests - 1} ran to their end")


async def _outcome(env: Any, item: Any) -> tuple[Exception | None, list[Any]]:
    try:
        return None, await within_limit(roll_out(env, item))
    except Exception as error:  # noqa: BLE001 - one rollout: what it raises is the result
        return error, []


class _Traces:
    """What an environment has logged, printed and counted since this object was made."""

    def __init__(self, env: Any, output: CapturedOutput) -> None:
        self._env = env
        self._output = output
        self._since = output.position()
        self._num_counted = self._count()

    def tell_of(self, error: Exception) -> bool:
        """Whether somebody could learn of an error."""
        return self._count() > self._num_counted or self._output.tells_of(error, since=self._since)

    def _count(self) -> int:
        return int(sum((self._env.failure_counts + self._env.drop_counts).values()))
