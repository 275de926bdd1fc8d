"""An inference server that answers with what an earlier run's policy wrote.

    environment asks ─► prompt ids ─► the trajectory of the group that goes on from there ─► its ids

A request that no recorded trajectory continues is refused: nothing is ever made up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.server_handling.completion_objects import Answer, build_chat, build_completion
from atroposlib.envs.server_handling.semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.errors import InferenceError
from atroposlib.exporting.splitting import trained_spans

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["NotRecordedError", "RecordedGroup", "RecordedModel", "RecordedServer"]

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
    """What the policy wrote at one point of a trajectory."""

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
        self._asked: tuple[int, ...] | None = None

    @property
    def num_waiting(self) -> int:
        """Groups that were not played yet."""
        return len(self._groups) - len(self._done)

    @property
    def asked(self) -> tuple[int, ...] | None:
        """The prompt that was asked for first since `listen`; None when none was."""
        return self._asked

    def listen(self) -> None:
        """Answer nothing, only take note of the next prompt."""
        self._playing, self._asked = None, None

    def play_next(self) -> RecordedGroup | None:
        """Play the next group with the prompt last asked for; None when there is none left."""
        left = [i for i in self._waiting.get(self._asked or (), ()) if i not in self._done]
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
            self._asked = self._asked or tuple(prompt)
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
        """Return a turn without the special token that ended it."""
        return ids[:-1] if ids and ids[-1] in self._end_ids else ids


class RecordedServer(ServerHarness):
    """An inference server of an environment that is replayed.

    Args:
        model: who answers.
        tokenizer: of the environment.
        config: of the server it stands for.
    """

    def __init__(self, model: RecordedModel, tokenizer: Any, config: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.sem = AsyncSemWithAdaptiveWeight(_NUM_SLOTS)
        self.eval_sem = AsyncSemWithAdaptiveWeight(_NUM_SLOTS)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the recorded answers to `messages`."""
        text = render_messages(self.tokenizer, list(kwargs["messages"]))
        answers = self._answers(self._encoded(text), kwargs)
        return build_chat(answers, model=self.config.model_name, id_="replay", created=0)

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the recorded continuations of `prompt`."""
        answers = self._answers(self._prompt_ids(kwargs), kwargs)
        return build_completion(answers, model=self.config.model_name, id_="replay", created=0)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return the recorded continuations of `prompt` or `input_ids` as tokens."""
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
    """Return what was written from a position on; None when nothing was."""
    for span in trained_spans(group.masks[trajectory]):
        if span.is_trained and span.start == start:
            ids = group.tokens[trajectory][start : span.end]
            known = group.logprobs
            logprobs = known[trajectory][start : span.end] if known else [0.0] * len(ids)
            return Turn(ids, logprobs)
    return None
