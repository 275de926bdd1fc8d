"""Replay of recorded trajectories: rescoring with current environment code, without a model.

item of the environment ─► its prompt ─► groups recorded for that prompt
                                            │ replayed by the recorded engine, one at a time
                                            ▼
                          current collect_trajectories ─► new scores next to the recorded ones

The recorded engine is an inference server that answers with tokens an earlier policy wrote:

    environment asks ─► prompt ids ─► the trajectory that continues these ids ─► its ids

A request that no recorded trajectory continues is refused; the engine never generates tokens.

The page also compares two runs, prompt by prompt. That part is pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from atroposlib.envs.rollouts import as_pair
from atroposlib.envs.running import build_environment
from atroposlib.envs.server_handling.chat_rendering import (
    Answer,
    build_chat,
    build_completion,
    render_messages,
)
from atroposlib.envs.server_handling.server_baseline import (
    AsyncSemWithAdaptiveWeight,
    TokensAndLogprobs,
)
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.errors import InferenceError
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.selection import prompt_lengths, trained_spans
from atroposlib.utils.aio import settle

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "NotRecordedError",
    "RecordedGroup",
    "RecordedModel",
    "build_replayed",
    "comparison_text",
    "record_run",
    "recorded_group",
    "rescore",
    "rescoring_text",
]

_NUM_SLOTS = 4096


class NotRecordedError(InferenceError):
    """The environment asked something that the record has no answer to."""


class RecordedGroup(NamedTuple):
    """One group of an earlier run."""

    where: str
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    logprobs: list[list[float]] | None

    def prompts(self) -> set[tuple[int, ...]]:
        """Return what the policy read before it first wrote, of each trajectory."""
        found = set()
        for ids, mask in zip(self.tokens, self.masks, strict=True):
            start = next((span.start for span in trained_spans(mask) if span.is_trained), None)
            if start is not None:
                found.add(tuple(ids[:start]))
        return found


class Turn(NamedTuple):
    """One completion of the policy within a trajectory."""

    ids: list[int]
    logprobs: list[float]


class RecordedModel:
    """Finds groups by their prompts and plays one of them at a time.

    Args:
        groups: of the earlier run.
        end_ids: special tokens; a completion without one at its end was cut.
    """

    def __init__(self, groups: Sequence[RecordedGroup], end_ids: Collection[int]) -> None:
        self._waiting: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._groups = groups
        self._end_ids = frozenset(end_ids)
        for number, group in enumerate(groups):
            for prompt in group.prompts():
                self._waiting[prompt].append(number)
        self._done: set[int] = set()
        self._playing: RecordedGroup | None = None
        self._used: set[tuple[int, int]] = set()
        self.asked: tuple[int, ...] | None = None
        """The prompt that was asked for first since `listen`; None when none was."""

    @property
    def num_waiting(self) -> int:
        return len(self._groups) - len(self._done)

    def listen(self) -> None:
        """Answer nothing, only take note of the next prompt."""
        self._playing, self.asked = None, None

    def play_next(self) -> RecordedGroup | None:
        """Play the next group with the prompt last asked for; None when there is none left."""
        left = [i for i in self._waiting.get(self.asked or (), ()) if i not in self._done]
        if not left:
            return None
        self._done.add(left[0])
        self._playing = self._groups[left[0]]
        self._used = set()
        return self._playing

    def answer(self, prompt_ids: Sequence[int], num_replies: int) -> list[Turn]:
        """Return what the policy wrote after a prompt, once per trajectory.

        Raises:
            NotRecordedError: no trajectory of the group goes on there, or too few do.
        """
        prompt = list(prompt_ids)
        if self._playing is None:
            self.asked = self.asked or tuple(prompt)
            raise NotRecordedError("the group is looked for by its prompt")
        turns: list[Turn] = []
        for i, ids in enumerate(self._playing.tokens):
            place = (i, len(prompt))
            if len(turns) == num_replies:
                break
            if place not in self._used and ids[: len(prompt)] == prompt:
                turn = _turn_at(self._playing, i, len(prompt))
                if turn is not None:
                    self._used.add(place)
                    turns.append(turn)
        if len(turns) < num_replies:
            raise NotRecordedError(
                f"{self._playing.where}: {num_replies} replies to a prompt of {len(prompt)} tokens "
                f"were asked for, {len(turns)} are recorded"
            )
        return turns

    def finish_reason(self, turn: Turn) -> Any:
        """Return `stop`, or `length` for a turn that does not end with a special token."""
        return "stop" if turn.ids and turn.ids[-1] in self._end_ids else "length"

    def without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self._end_ids else ids


class RecordedServer(ServerHarness):
    """An inference server of an environment that is replayed."""

    def __init__(self, model: RecordedModel, tokenizer: Any, config: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.sem = AsyncSemWithAdaptiveWeight(_NUM_SLOTS)
        self.eval_sem = AsyncSemWithAdaptiveWeight(_NUM_SLOTS)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        text = render_messages(self.tokenizer, list(kwargs["messages"]))
        answers = self._answers(self._encoded(text), kwargs)
        return build_chat(answers, model=self.config.model_name, id_="replay", created=0)

    async def completion(self, **kwargs: Any) -> Completion:
        answers = self._answers(self._prompt_ids(kwargs), kwargs)
        return build_completion(answers, model=self.config.model_name, id_="replay", created=0)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        ids = self._prompt_ids(kwargs)
        turns = self.model.answer(ids, kwargs.get("n") or 1)
        return (
            ids,
            [list(turn.ids) for turn in turns],
            [list(turn.logprobs) for turn in turns],
            [self.model.finish_reason(turn) for turn in turns],
        )

    def _answers(self, ids: list[int], kwargs: Mapping[str, Any]) -> list[Answer]:
        turns = self.model.answer(ids, kwargs.get("n") or 1)
        return [
            Answer(
                str(self.tokenizer.decode(self.model.without_end(turn.ids))),
                self.model.finish_reason(turn),
            )
            for turn in turns
        ]

    def _prompt_ids(self, kwargs: Mapping[str, Any]) -> list[int]:
        ids, prompt = kwargs.get("input_ids"), kwargs.get("prompt")
        if ids is not None:
            return list(ids)
        return self._encoded(prompt) if isinstance(prompt, str) else list(prompt or [])

    def _encoded(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]


def _turn_at(group: RecordedGroup, trajectory: int, start: int) -> Turn | None:
    for span in trained_spans(group.masks[trajectory]):
        if span.is_trained and span.start == start:
            ids = group.tokens[trajectory][start : span.end]
            known = group.logprobs
            logprobs = known[trajectory][start : span.end] if known else [0.0] * len(ids)
            return Turn(ids, logprobs)
    return None


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
    """Reason why the environment returned no group."""

    def changes(self) -> list[tuple[int, float, float]]:
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
        return f"{len(self._seen)} different prompts in {self._num_items} items"


async def _collect(env: Any, item: Any) -> tuple[list[Any], str]:
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
    """Write for people what changed."""
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


_MOST_CHANGES_SHOWN = 10


@dataclass
class PromptRecord:
    """The trajectories of one prompt in a run."""

    where: str
    """Where it was first found."""
    scores: list[float] = field(default_factory=list)
    completions: set[tuple[int, ...]] = field(default_factory=set)


@dataclass
class RunRecord:
    """The data of a run that a comparison uses."""

    num_groups: int = 0
    scores: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of completions."""
    prompts: dict[tuple[int, ...], PromptRecord] = field(default_factory=dict)


def record_run(groups: Iterable[tuple[str, ExportGroup]]) -> RunRecord:
    """Gather the groups of a run by prompt."""
    run = RunRecord()
    for where, group in groups:
        run.num_groups += 1
        run.scores += group.scores
        for ids, length, score in zip(
            group.tokens, prompt_lengths(group), group.scores, strict=True
        ):
            length = len(ids) if length is None else length
            run.lengths.append(len(ids) - length)
            known = run.prompts.setdefault(tuple(ids[:length]), PromptRecord(where))
            known.scores.append(score)
            known.completions.add(tuple(ids[length:]))
    return run


def comparison_text(first: RunRecord, second: RunRecord, *, names: tuple[str, str]) -> str:
    """Write for people how two runs differ."""
    rows = [("", *names), *_figures(first, second)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    shared = first.prompts.keys() & second.prompts.keys()
    lines.append(
        f"{len(shared)} prompts are in both, {len(first.prompts) - len(shared)} only in "
        f"{names[0]}, {len(second.prompts) - len(shared)} only in {names[1]}"
    )
    if not shared:
        return "\n".join(lines)
    same = sum(len(first.prompts[p].completions & second.prompts[p].completions) for p in shared)
    lines.append(f"{same} different completions of these prompts are in both")
    return "\n".join([*lines, *_changes(first.prompts, second.prompts, shared)])


def _figures(*runs: RunRecord) -> list[tuple[str, ...]]:
    rows: dict[str, list[float | None]] = {
        "groups": [run.num_groups for run in runs],
        "trajectories": [len(run.scores) for run in runs],
        "mean score": [fmean(run.scores) if run.scores else None for run in runs],
        "mean completion tokens": [fmean(run.lengths) if run.lengths else None for run in runs],
    }
    return [
        (name, *("-" if value is None else f"{value:.4g}" for value in values))
        for name, values in rows.items()
    ]


def _changes(
    first: Mapping[tuple[int, ...], PromptRecord],
    second: Mapping[tuple[int, ...], PromptRecord],
    shared: Iterable[tuple[int, ...]],
) -> list[str]:
    by_change: dict[float, list[tuple[int, ...]]] = defaultdict(list)
    for prompt in shared:
        by_change[fmean(second[prompt].scores) - fmean(first[prompt].scores)].append(prompt)
    ups = sum(len(prompts) for change, prompts in by_change.items() if change > 0)
    downs = sum(len(prompts) for change, prompts in by_change.items() if change < 0)
    lines = [f"mean score of {ups} of them is higher in the second run, of {downs} lower"]
    for change in sorted(by_change, key=abs, reverse=True):
        for prompt in by_change[change]:
            if change and len(lines) <= _MOST_CHANGES_SHOWN:
                before, after = first[prompt], second[prompt]
                lines.append(
                    f"  {before.where} and {after.where}: {fmean(before.scores):.4g} to "
                    f"{fmean(after.scores):.4g}"
                )
    return lines
