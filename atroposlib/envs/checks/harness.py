"""The harness of `check`: an environment against a scripted model.

The environment is built three times with the same seed:

    first run   setup -> items -> groups -> a failed rollout -> a cancelled one -> evaluate -> close
    second run  setup -> the same items -> groups -> close            (determinism)
    third run   setup -> the same items -> groups, rolled out with another seed -> close  (scores)
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from atroposlib.envs.checks.group_checks import check_groups
from atroposlib.envs.checks.report import (
    CheckReport,
    Findings,
    class_site,
    hook_site,
    misspelt_setting,
)
from atroposlib.envs.checks.runner import (
    COLLECTING,
    OTHER_SEED,
    Rehearsal,
    Stage,
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
from atroposlib.envs.checks.verdicts import (
    judge_determinism,
    judge_leftovers,
    judge_network,
    judge_stalls,
    judging,
)
from atroposlib.envs.checks.watchers import (
    CapturedOutput,
    Running,
    block_network,
    capture_output,
    watch_loop,
)
from atroposlib.envs.hooks import settle
from atroposlib.envs.running import missing_methods, outside_event_loop
from atroposlib.envs.settings import Settings

__all__ = ["check_class", "run_checks"]

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
