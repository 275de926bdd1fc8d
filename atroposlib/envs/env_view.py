"""The live view of an environment: what is shown of it, and running it with the view."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atroposlib.envs.recent_errors import RecentErrors
from atroposlib.envs.run_snapshot import ErrorLine, RunSnapshot

if TYPE_CHECKING:
    from atroposlib.envs.env_offline import OfflineEnv

__all__ = ["run_viewed", "snapshot_of"]


def run_viewed(
    env: OfflineEnv, main: Callable[[], Coroutine[Any, Any, None]], *, quiet: bool
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return `main` with the live view around it, or as it is where no view can be shown.

    Args:
        env: the environment that `main` runs.
        main: its main coroutine.
        quiet: the user wants plain log lines.
    """
    # Checked first: nothing of the view is imported, or could fail, where none is shown.
    if quiet or not sys.stdout.isatty():
        return main
    from atroposlib.envs.terminal_display import can_show

    return (lambda: _with_view(env, main)) if can_show(sys.stdout) else main


async def _with_view(env: OfflineEnv, main: Callable[[], Awaitable[None]]) -> None:
    from atroposlib.envs.terminal_display import TerminalDisplay

    errors = RecentErrors()
    has_ended = False

    def take_snapshot() -> RunSnapshot | None:
        snapshot = snapshot_of(env, errors.lines)
        return replace(snapshot, activity="ended") if snapshot and has_ended else snapshot

    logging.getLogger().addHandler(errors)
    try:
        async with TerminalDisplay(take_snapshot, stream=sys.stdout):
            try:
                await main()
            finally:
                has_ended = True
    finally:
        logging.getLogger().removeHandler(errors)


def snapshot_of(env: OfflineEnv, errors: tuple[ErrorLine, ...] = ()) -> RunSnapshot | None:
    """Return what an environment looks like now; None before its rollouts have begun.

    Args:
        env: under `serve` or `process`.
        errors: the latest of the log.
    """
    figures = env.run_figures
    if figures.begun_at is None:
        return None
    groups_per_s, tokens_per_s = figures.rates()
    staleness = figures.recent_staleness
    return RunSnapshot(
        name=env.wandb_prepend or env.desired_name,
        elapsed_s=figures.elapsed_s,
        step=env.curr_step,
        group_size=env.config.group_size,
        groups_done=figures.num_groups,
        groups_per_s=groups_per_s,
        tokens_done=figures.num_tokens,
        tokens_per_s=tokens_per_s,
        staleness_mean=sum(staleness) / len(staleness) if staleness else None,
        staleness_max=max(staleness, default=None),
        scores=tuple(figures.recent_scores),
        drops=dict(env.drop_counts),
        failures=dict(env.failure_counts),
        stragglers=dict(env.straggler_counts),
        errors=errors,
        **(_offline_part(env) if env.service_session is None else _serving_part(env)),
    )


def _offline_part(env: OfflineEnv) -> dict[str, Any]:
    is_over = env.run_figures.is_over
    return {
        "activity": "closing" if is_over else "rolling out",
        "step_word": "group",
        "total_steps": env.n_groups_to_process,
        "groups_running": env.run_figures.num_items_running,
        "most_groups_running": env.max_num_workers,
        "oldest_rollout_s": env.run_figures.oldest_item_s,
    }


def _serving_part(env: OfflineEnv) -> dict[str, Any]:
    now = time.time()
    queue_groups = env._queue_status().queue_groups
    started = [record["start_time"] for record in env.running_items.values()]
    is_batch_known = env.config.batch_size > 0
    return {
        "activity": _activity(env),
        "total_steps": env.config.total_steps,
        "groups_running": len(started),
        "most_groups_running": env.max_num_workers,
        "groups_sending": max(0, len(env.workers) - len(started)),
        "oldest_rollout_s": max(0.0, now - min(started)) if started else None,
        "queue_groups": queue_groups,
        "queue_batches": queue_groups * env.config.group_size / env.config.batch_size
        if is_batch_known
        else None,
    }


def _activity(env: OfflineEnv) -> str:
    if env.run_figures.is_over:
        return "closing"
    if not env._joined_session().is_registered:
        return "waiting for the service"
    if env.evaluation_runner.is_running:
        return "evaluating"
    if env._are_starts_held_back():
        return "held back: queue is full"
    return "rolling out" if env.workers else "waiting for items or room"
