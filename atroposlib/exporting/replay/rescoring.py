"""Scoring recorded trajectories with the scoring code an environment has now, without a model.

item of the environment ─► its prompt ─► groups recorded for that prompt
                                            │ played by the recorded engine, one at a time
                                            ▼
                          collect_trajectories of today ─► new scores beside the old ones
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.hooks import settle
from atroposlib.envs.rollouts import as_pair
from atroposlib.envs.running import build_environment
from atroposlib.errors import InferenceError
from atroposlib.exporting.replay.recorded_engine import (
    RecordedGroup,
    RecordedModel,
    RecordedServer,
)

__all__ = ["Rescored", "build_replayed", "recorded_group", "rescore", "rescoring_text"]

_MOST_SHOWN = 20
_ROUNDS_WITHOUT_NEWS = 4
"""So often an environment that draws its items at random hardly leaves one out."""
_LEAST_ITEMS_WITHOUT_NEWS = 100


class Rescored(NamedTuple):
    """One group, scored again."""

    where: str
    old: list[float]
    """[G] recorded."""
    new: list[float | None] | None
    """[G]; None for a trajectory that did not come back; None when the group did not."""
    reason: str = ""
    """Why the group did not come back."""

    def changes(self) -> list[tuple[int, float, float]]:
        """Return position, old and new score where they differ."""
        return [
            (i, before, after)
            for i, (before, after) in enumerate(zip(self.old, self.new or (), strict=False))
            if after is not None and after != before
        ]


def recorded_group(where: str, group: Mapping[str, Any]) -> RecordedGroup:
    """Take what a replay needs out of a group."""
    return RecordedGroup(
        where,
        group["tokens"],
        group["masks"],
        [float(score) for score in group["scores"]],
        group.get("inference_logprobs") or None,
    )


def build_replayed(env_cls: type[Any], settings: Any, groups: Sequence[RecordedGroup]) -> Any:
    """Build an environment that the recorded engine answers.

    Args:
        env_cls: the environment.
        settings: `config_layers.Settings` of the run.
        groups: what was recorded.

    Returns:
        The environment and its `RecordedModel`.
    """
    changes = {
        "use_wandb": False,
        "data_path_to_save_groups": None,
        "include_messages": False,
        "metrics_path": None,
    }
    manager = settings.manager.model_copy(update={"testing": True, "slurm": False})
    env_config = settings.env.model_copy(update=changes)
    env = build_environment(env_cls, settings._replace(env=env_config, manager=manager))
    model = RecordedModel(groups, env.tokenizer.all_special_ids)
    configs = env.server_configs or [server.config for server in env.server.servers]
    env.server.servers = [RecordedServer(model, env.tokenizer, config) for config in configs]
    return env, model


async def rescore(
    env: Any,
    model: RecordedModel,
    *,
    max_items: int,
    on_group: Callable[[Rescored], None] = lambda _: None,
    on_item: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Rescored]:
    """Score all groups again whose prompts the environment still asks.

    Args:
        env: of `build_replayed`.
        model: of `build_replayed`.
        max_items: items of the environment to look at, before the rest counts as not found. Fewer
            are looked at when it hands the same ones round.
        on_group: called after each group.
        on_item: called after each item.
        tell: gets a line when the items repeat.
    """
    results: list[Rescored] = []
    rounds = _Rounds()
    await settle(env.setup())
    try:
        for _ in range(max_items):
            if not model.num_waiting:
                break
            item = await settle(env.get_next_item())
            if item is None:
                break
            model.listen()
            await _collect(env, item)
            has_news = rounds.has_news(model.asked)
            while (group := model.play_next()) is not None:
                env.config.group_size = len(group.tokens)
                results.append(_compare(group, *await _collect(env, item)))
                on_group(results[-1])
            on_item()
            if not has_news:
                tell(f"the environment repeats its items: {rounds.text()}")
                break
    finally:
        await settle(env.close())
        await env.server.close()
    return results


class _Rounds:
    """Tells when an environment hands the same items round."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...] | None] = set()
        self._num_items = 0
        self._num_repeated = 0

    def has_news(self, prompt: tuple[int, ...] | None) -> bool:
        """Take note of the prompt of an item; False after several rounds without a new one."""
        self._num_items += 1
        self._num_repeated = self._num_repeated + 1 if prompt in self._seen else 0
        self._seen.add(prompt)
        limit = max(_LEAST_ITEMS_WITHOUT_NEWS, _ROUNDS_WITHOUT_NEWS * len(self._seen))
        return self._num_repeated < limit

    def text(self) -> str:
        """Say what was seen."""
        return f"{len(self._seen)} different prompts in {self._num_items} items"


async def _collect(env: Any, item: Any) -> tuple[list[Any], str]:
    """Return the groups an item gives, and why it gives none."""
    try:
        collected, _ = as_pair(await settle(env.collect_trajectories(item)))
        if collected:
            collected = await settle(env.postprocess_histories(collected))
    except InferenceError as error:
        return [], str(error)
    found = collected if isinstance(collected, list) else [collected]
    groups = [group for group in found if group]
    return groups, "" if groups else "the environment gives no group of it now"


def _compare(group: RecordedGroup, found: Sequence[Mapping[str, Any]], reason: str) -> Rescored:
    if not found:
        return Rescored(group.where, group.scores, None, reason)
    by_tokens: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for new in found:
        for ids, score in zip(new["tokens"], new["scores"], strict=True):
            by_tokens[tuple(ids)].append(float(score))
    scores: list[float | None] = []
    for ids in group.tokens:
        left = by_tokens.get(tuple(ids))
        scores.append(left.pop(0) if left else None)
    if not any(score is not None for score in scores):
        reason = "the environment makes other tokens of it now"
        return Rescored(group.where, group.scores, None, reason)
    return Rescored(group.where, group.scores, scores)


def rescoring_text(results: Sequence[Rescored], *, num_groups: int) -> str:
    """Write for people what changed.

    Args:
        results: of `rescore`.
        num_groups: recorded.
    """
    done = [result for result in results if result.new is not None]
    changed = [result for result in done if result.changes()]
    old = [score for result in done for score in result.old]
    new = [score for result in done for score in result.new or () if score is not None]
    lines = [
        f"{len(done)} of {num_groups} groups scored again, {len(changed)} changed, "
        f"{sum(len(result.changes()) for result in changed)} of {len(old)} trajectories"
    ]
    if new:
        lines.append(f"mean score {sum(old) / len(old):.4g} before, {sum(new) / len(new):.4g} now")
    for result in changed[:_MOST_SHOWN]:
        shown = ", ".join(f"{i + 1}: {a:g} to {b:g}" for i, a, b in result.changes())
        lines.append(f"  {result.where}: {shown}")
    if len(changed) > _MOST_SHOWN:
        lines.append(f"  and {len(changed) - _MOST_SHOWN} more groups")
    failed = [result for result in results if result.new is None]
    lines += [f"  {result.where} not scored: {result.reason}" for result in failed[:_MOST_SHOWN]]
    if num_groups > len(results):
        lines.append(
            f"{num_groups - len(results)} groups not found: the environment did not ask their "
            "prompts; their items may come later (--max-items), or prompts or tokenizer changed"
        )
    return "\n".join(lines)
