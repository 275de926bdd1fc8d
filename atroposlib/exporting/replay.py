"""Rescoring of recorded trajectories without a model, and comparison of two runs by prompt.

item of the environment ─► its prompt ─► groups recorded for that prompt
                                            │ replayed by recorded servers, one at a time
                                            ▼
                          current collect_trajectories ─► new and recorded scores

Recorded servers reply with tokens that an earlier policy generated:

    request ─► prompt ids ─► a recorded trajectory that starts with them ─► its next completion

They reject a request that no recorded trajectory continues, and never generate tokens.
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
    TextAnswer,
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
from atroposlib.exporting.selection import (
    end_of_reply,
    line_break_ids,
    prompt_lengths,
    trained_spans,
)
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
    """No recorded trajectory continues the prompt of a request."""


class RecordedGroup(NamedTuple):
    """A group of an earlier run."""

    where: str
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    logprobs: list[list[float]] | None

    def prompts(self) -> set[tuple[int, ...]]:
        """Return the ids before the first completion of each trajectory."""
        found = set()
        for ids, mask in zip(self.tokens, self.masks, strict=True):
            start = next((span.start for span in trained_spans(mask) if span.is_trained), None)
            if start is not None:
                found.add(tuple(ids[:start]))
        return found


class ReplayedTurn(NamedTuple):
    """One completion of the policy within a trajectory."""

    ids: list[int]
    logprobs: list[float]


class RecordedModel:
    """Finds groups by their prompts and replays one of them at a time.

    Args:
        groups: Groups of the earlier run.
        end_ids: Special tokens; a completion that ends with another token was truncated.
        tail_ids: Tokens that a chat template may write after them.
    """

    def __init__(
        self,
        groups: Sequence[RecordedGroup],
        end_ids: Collection[int],
        tail_ids: Collection[int] = (),
    ) -> None:
        self._waiting: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._groups = groups
        self._end_ids = frozenset(end_ids)
        self._tail_ids = frozenset(tail_ids)
        for number, group in enumerate(groups):
            for prompt in group.prompts():
                self._waiting[prompt].append(number)
        self._done: set[int] = set()
        self._replayed: RecordedGroup | None = None
        self._used: set[tuple[int, int]] = set()
        self.requested: tuple[int, ...] | None = None
        """Prompt of the first request since `listen`, None without a request."""

    @property
    def num_waiting(self) -> int:
        return len(self._groups) - len(self._done)

    def listen(self) -> None:
        """Record the prompt of the next request, and reject it."""
        self._replayed, self.requested = None, None

    def replay_next(self) -> RecordedGroup | None:
        """Replay the next group with the requested prompt; None if none is left."""
        left = [i for i in self._waiting.get(self.requested or (), ()) if i not in self._done]
        if not left:
            return None
        self._done.add(left[0])
        self._replayed = self._groups[left[0]]
        self._used = set()
        return self._replayed

    def answer(self, prompt_ids: Sequence[int], num_replies: int) -> list[ReplayedTurn]:
        """Return the recorded completions of a prompt, each of them once.

        Raises:
            NotRecordedError: too few trajectories of the group continue the prompt.
        """
        prompt = list(prompt_ids)
        if self._replayed is None:
            self.requested = self.requested or tuple(prompt)
            raise NotRecordedError("no group is replayed; the prompt is recorded")
        turns: list[ReplayedTurn] = []
        for i, ids in enumerate(self._replayed.tokens):
            place = (i, len(prompt))
            if len(turns) == num_replies:
                break
            if place not in self._used and ids[: len(prompt)] == prompt:
                turn = _turn_at(self._replayed, i, len(prompt))
                if turn is not None:
                    self._used.add(place)
                    turns.append(turn)
        if len(turns) < num_replies:
            where, prompt_text = self._replayed.where, f"a prompt of {len(prompt)} tokens"
            raise NotRecordedError(
                f"{where}: {num_replies} replies to {prompt_text} were requested, "
                f"{len(turns)} are recorded; the item is another one with the same first prompt, "
                "or the environment answered a turn differently than in the recording"
            )
        return turns

    def finish_reason(self, turn: ReplayedTurn) -> Any:
        is_complete = end_of_reply(turn.ids, self._end_ids, self._tail_ids) is not None
        return "stop" if is_complete else "length"

    def without_end(self, ids: list[int]) -> list[int]:
        return ids[: end_of_reply(ids, self._end_ids, self._tail_ids)]


class RecordedServer(ServerHarness):
    """An inference server that replies with recorded completions."""

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

    def _answers(self, ids: list[int], kwargs: Mapping[str, Any]) -> list[TextAnswer]:
        turns = self.model.answer(ids, kwargs.get("n") or 1)
        texts = [str(self.tokenizer.decode(self.model.without_end(turn.ids))) for turn in turns]
        reasons = map(self.model.finish_reason, turns)
        return [TextAnswer(*pair) for pair in zip(texts, reasons, strict=True)]

    def _prompt_ids(self, kwargs: Mapping[str, Any]) -> list[int]:
        ids, prompt = kwargs.get("input_ids"), kwargs.get("prompt")
        if ids is not None:
            return list(ids)
        return self._encoded(prompt) if isinstance(prompt, str) else list(prompt or [])

    def _encoded(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]


def _turn_at(group: RecordedGroup, trajectory: int, start: int) -> ReplayedTurn | None:
    for span in trained_spans(group.masks[trajectory]):
        if span.is_trained and span.start == start:
            ids = group.tokens[trajectory][start : span.end]
            known = group.logprobs
            logprobs = known[trajectory][start : span.end] if known else [0.0] * len(ids)
            return ReplayedTurn(ids, logprobs)
    return None


_MAX_SHOWN = 20
_ROUNDS_OF_REPEATED_ITEMS = 4
"""After this many rounds an environment that draws items at random has drawn nearly all of them."""
_MIN_REPEATED_ITEMS = 100


class Rescored(NamedTuple):
    """A group with its recorded and its new scores."""

    where: str
    old: list[float]
    """[G]."""
    new: list[float | None] | None
    """[G], None for a trajectory that the environment did not return; None without any."""
    reason: str = ""
    """Reason why there are no new scores."""

    def changes(self) -> list[tuple[int, float, float]]:
        return [
            (i, before, after)
            for i, (before, after) in enumerate(zip(self.old, self.new or (), strict=False))
            if after is not None and after != before
        ]


def recorded_group(where: str, group: Mapping[str, Any]) -> RecordedGroup:
    """Return the fields of a group that a replay needs."""
    return RecordedGroup(
        where,
        group["tokens"],
        group["masks"],
        [float(score) for score in group["scores"]],
        group.get("inference_logprobs") or None,
    )


def build_replayed(env_cls: type[Any], settings: Any, groups: Sequence[RecordedGroup]) -> Any:
    """Build an environment with recorded servers; return it with its `RecordedModel`."""
    changes = {
        "use_wandb": False,
        "data_path_to_save_groups": None,
        "include_messages": False,
        "metrics_path": None,
    }
    manager = settings.manager.model_copy(update={"testing": True, "slurm": False})
    env_config = settings.env.model_copy(update=changes)
    env = build_environment(env_cls, settings._replace(env=env_config, manager=manager))
    tokenizer = env.tokenizer
    model = RecordedModel(groups, tokenizer.all_special_ids, line_break_ids(tokenizer))
    configs = env.server_configs or [server.config for server in env.server.servers]
    env.server.servers = [RecordedServer(model, env.tokenizer, config) for config in configs]
    return env, model


async def rescore(
    env: Any,
    model: RecordedModel,
    *,
    max_items: int,
    on_item: Callable[[], object],
    notify: Callable[[str], None],
) -> list[Rescored]:
    """Score the groups whose prompts the environment still requests.

    Args:
        env: From `build_replayed`.
        model: From `build_replayed`.
        max_items: Maximum number of items to draw. Fewer are drawn if they repeat.
        on_item: Called after each item.
        notify: Receives a line if the items repeat.
    """
    results: list[Rescored] = []
    prompts: set[tuple[int, ...] | None] = set()
    num_repeated = 0
    await settle(env.setup())
    try:
        for num_items in range(1, max_items + 1):
            if not model.num_waiting:
                break
            item = await settle(env.get_next_item())
            if item is None:
                break
            model.listen()
            await _collect(env, item)
            num_repeated = num_repeated + 1 if model.requested in prompts else 0
            prompts.add(model.requested)
            while (group := model.replay_next()) is not None:
                env.config.group_size = len(group.tokens)
                results.append(_compare(group, *await _collect(env, item)))
            on_item()
            limit = max(_MIN_REPEATED_ITEMS, _ROUNDS_OF_REPEATED_ITEMS * len(prompts))
            if num_repeated >= limit:
                counts = f"{len(prompts)} different prompts in {num_items} items"
                notify(f"the environment repeats its items: {counts}")
                break
    finally:
        await settle(env.close())
        await env.server.close()
    return results


async def _collect(env: Any, item: Any) -> tuple[list[Any], str]:
    try:
        collected, _ = as_pair(await settle(env.collect_trajectories(item)))
        if collected:
            collected = await settle(env.postprocess_histories(collected))
    except InferenceError as error:
        return [], str(error)
    found = collected if isinstance(collected, list) else [collected]
    groups = [group for group in found if group]
    return groups, "" if groups else "the environment no longer returns a group of it"


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
        reason = "the environment now returns other tokens for it"
        return Rescored(group.where, group.scores, None, reason)
    return Rescored(group.where, group.scores, scores)


def rescoring_text(results: Sequence[Rescored], *, num_groups: int) -> str:
    """Return the changes of scores as text."""
    done = [result for result in results if result.new is not None]
    changed = [result for result in done if result.changes()]
    pairs = [pair for result in done for pair in zip(result.old, result.new or (), strict=True)]
    both = [(before, after) for before, after in pairs if after is not None]
    lines = [
        f"{len(done)} of {num_groups} groups scored again, {len(changed)} changed, "
        f"{sum(len(result.changes()) for result in changed)} of {len(pairs)} trajectories"
    ]
    if both:
        before, after = (fmean(scores) for scores in zip(*both, strict=True))
        lines.append(f"mean score {before:.4g} before, {after:.4g} now")
    if len(both) < len(pairs):
        lines.append(
            f"{len(pairs) - len(both)} trajectories keep their scores and are not in the mean: the "
            "environment returns other tokens for them"
        )
    for result in changed[:_MAX_SHOWN]:
        shown = ", ".join(f"{i + 1}: {a:g} to {b:g}" for i, a, b in result.changes())
        lines.append(f"  {result.where}: {shown}")
    if len(changed) > _MAX_SHOWN:
        lines.append(f"  and {len(changed) - _MAX_SHOWN} more groups")
    failed = [result for result in results if result.new is None]
    lines += [f"  {result.where} not scored: {result.reason}" for result in failed[:_MAX_SHOWN]]
    if num_groups > len(results):
        lines.append(
            f"{num_groups - len(results)} groups not found: the environment did not request their "
            "prompts; their items may come later (--max-items), or prompts or tokenizer changed"
        )
    return "\n".join(lines)


_MAX_CHANGES_SHOWN = 10


@dataclass
class PromptRecord:
    """The trajectories of one prompt in a run."""

    where: str
    """Place of its first group."""
    scores: list[float] = field(default_factory=list)
    completions: set[tuple[int, ...]] = field(default_factory=set)


@dataclass
class RunRecord:
    """The scores and completions of a run, by prompt."""

    num_groups: int = 0
    scores: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of completions."""
    prompts: dict[tuple[int, ...], PromptRecord] = field(default_factory=dict)


def record_run(groups: Iterable[tuple[str, ExportGroup]]) -> RunRecord:
    """Collect the groups of a run by prompt."""
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
    """Return a comparison of two runs as text."""
    rows = [("", *names), *_summary(first, second)]
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


def _summary(*runs: RunRecord) -> list[tuple[str, ...]]:
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
            if change and len(lines) <= _MAX_CHANGES_SHOWN:
                before, after = first[prompt], second[prompt]
                lines.append(
                    f"  {before.where} and {after.where}: {fmean(before.scores):.4g} to "
                    f"{fmean(after.scores):.4g}"
                )
    return lines
