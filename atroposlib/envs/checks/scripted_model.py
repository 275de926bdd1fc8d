"""The scripted model behind the inference servers of a checked environment.

Every server of the environment is a `ScriptedServer`; all of them answer from one
`ScriptedModel`, which records what was asked, gives known logprobs, fails and hangs on request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from atroposlib.envs.checks.message_parts import has_images, text_only
from atroposlib.envs.checks.script import Reply, Role, RoleBook, Script, make_script
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.server_handling.completion_objects import (
    Answer,
    build_chat,
    build_completion,
)
from atroposlib.envs.server_handling.semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.errors import InferenceError
from atroposlib.utils.tokenize_for_trainer import render_chat_ids

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["FAILURE", "SampledReply", "ScriptedModel", "ScriptedServer", "known_logprob"]

FAILURE = "scripted failure of one request"
"""In the message of every error the model raises on request."""

NUM_SLOTS = 4096


def known_logprob(token_id: int, position: int) -> float:
    """Return the logprob of a token at a position of its reply.

    Neighbours differ, and every value is exact in binary, so that a shift shows.
    """
    return -(1 + (37 * position + token_id) % 2047) / 512


@dataclass(frozen=True)
class SampledReply:
    """One reply as the engine would report it."""

    role: Role | None
    """Who answered; None where the environment scripted the answer itself, as for a judge."""
    prompt: str
    prompt_ids: list[int]
    """[P] what the model read."""
    ids: list[int]
    """[C] what it wrote, with the end-of-turn token unless the reply was cut."""
    logprobs: list[float] | None
    """[C]; None when the request asked for text only."""
    has_images: bool = False
    """Whether the model saw images, which no tokens of the environment stand for."""


class _Seen(NamedTuple):
    """What the model read for one request."""

    prompt: str
    prompt_ids: list[int]
    has_images: bool
    is_judge: bool


class ScriptedModel:
    """Answers by a script and keeps what it answered.

    Args:
        tokenizer: of the environment.
        is_stand_in: whether the tokenizer replaces the configured one. Its prompts are longer,
            so a missing `max_tokens` budget says nothing then.
        judge_reply: the environment's own answer to some conversations, or None for the others.

    Attributes:
        sampled: replies to training requests since the last `start`.
        fail_at: number of the training request that fails, counted from 0; None for none.
        hangs: whether requests wait for ever.
        latency_s: time before each answer.
        failure: the error that was raised.
        num_answered: requests answered since the beginning, evaluations included.
        most_in_flight: most requests open at once since the last `start`.
        num_cancelled: requests whose rollout was cancelled since then.
    """

    def __init__(
        self, tokenizer: Any, *, is_stand_in: bool, judge_reply: Callable[[list[Any]], str | None]
    ) -> None:
        self.tokenizer = tokenizer
        self._is_stand_in = is_stand_in
        self._judge_reply = judge_reply
        self.num_answered = 0
        self.start(make_script(None))

    def start(self, script: Script) -> None:
        """Begin with the rollouts of an item, and forget the last ones."""
        self._book = RoleBook(script)
        self.sampled: list[SampledReply] = []
        self.fail_at: int | None = None
        self.hangs = False
        self.latency_s = 0.0
        self.failure: InferenceError | None = None
        self.num_requests = 0
        self.most_in_flight = 0
        self.num_cancelled = 0
        self.num_in_flight = 0

    async def answer(
        self,
        prompt: str,
        prompt_ids: Sequence[int],
        messages: list[Any],
        kwargs: dict[str, Any],
        *,
        with_logprobs: bool = False,
    ) -> list[tuple[Reply, SampledReply]]:
        """Wait for the replies to one request.

        Raises:
            InferenceError: it was this request's turn to fail, or it leaves no room for a reply.
        """
        is_training = kwargs.get("split", "train") == "train"
        number, self.num_requests = self.num_requests, self.num_requests + int(is_training)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            await self._delay(number, kwargs)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_in_flight -= 1
        self.num_answered += 1
        num_replies = kwargs.get("n") or 1
        judged = self._judge_reply(messages)
        if judged is not None:
            replies = [Reply("gold", judged)] * num_replies
        else:
            replies = self._book.replies(prompt, num_replies)
        seen = _Seen(prompt, list(prompt_ids), has_images(messages), is_judge=judged is not None)
        pairs = [(reply, self._sampled(reply, seen, with_logprobs)) for reply in replies]
        if is_training:
            self.sampled += [sampled for _, sampled in pairs]
        return pairs

    async def _delay(self, number: int, kwargs: dict[str, Any]) -> None:
        limit = kwargs.get("max_tokens")
        if isinstance(limit, int) and limit < 1 and limit != -1 and not self._is_stand_in:
            raise InferenceError(f"max_tokens must be at least 1, got {limit}")
        if number == self.fail_at:
            self.failure = InferenceError(f"{FAILURE} (made by the check)")
            raise self.failure
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.latency_s)

    def _sampled(self, reply: Reply, seen: _Seen, with_logprobs: bool) -> SampledReply:
        ids = list(self.tokenizer.encode(reply.text, add_special_tokens=False))
        if not reply.is_cut and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        logprobs = [known_logprob(token_id, i) for i, token_id in enumerate(ids)]
        return SampledReply(
            role=None if seen.is_judge else reply.role,
            prompt=seen.prompt,
            prompt_ids=seen.prompt_ids,
            ids=ids,
            logprobs=logprobs if with_logprobs else None,
            has_images=seen.has_images,
        )


class ScriptedServer(ServerHarness):
    """One inference server of a checked environment.

    Args:
        model: who answers.
        config: of the server it stands for.
    """

    def __init__(self, model: ScriptedModel, config: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.config = config
        self.sem = AsyncSemWithAdaptiveWeight(NUM_SLOTS)
        self.eval_sem = AsyncSemWithAdaptiveWeight(NUM_SLOTS)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the scripted answers to `messages`."""
        messages = list(kwargs["messages"])
        shown = [text_only(message) for message in messages]
        prompt = render_messages(self.tokenizer, shown)
        ids = render_chat_ids(self.tokenizer, shown, add_generation_prompt=True)
        pairs = await self.model.answer(prompt, ids, messages, kwargs)
        return build_chat(_answers(pairs), model=self.config.model_name, id_="check", created=0)

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the scripted continuations of `prompt`."""
        prompt, ids, messages = self._prompt(kwargs)
        pairs = await self.model.answer(prompt, ids, messages, kwargs)
        answers = _answers(pairs)
        return build_completion(answers, model=self.config.model_name, id_="check", created=0)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return the scripted continuations of `prompt` or `input_ids` as tokens."""
        prompt, ids, messages = self._prompt(kwargs)
        pairs = await self.model.answer(prompt, ids, messages, kwargs, with_logprobs=True)
        return (
            ids,
            [list(sampled.ids) for _, sampled in pairs],
            [list(sampled.logprobs or []) for _, sampled in pairs],
            [_finish_reason(reply) for reply, _ in pairs],
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return a known logprob for each token of a prompt."""
        _, ids, _ = self._prompt(kwargs)
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [[token_id] for token_id in ids],
            "prompt_topk_logprobs": [[known_logprob(t, i)] for i, t in enumerate(ids)],
        }

    def _prompt(self, kwargs: dict[str, Any]) -> tuple[str, list[int], list[Any]]:
        """Return a prompt as text, as ids, and as the one message it would be."""
        prompt, ids = kwargs.get("prompt"), kwargs.get("input_ids")
        if not isinstance(prompt, str):
            ids = ids or list(prompt or [])
            prompt = str(self.tokenizer.decode(ids))
        if ids is None:
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        return prompt, list(ids), [{"role": "user", "content": prompt}]


def _finish_reason(reply: Reply) -> Any:
    return "length" if reply.is_cut else "stop"


def _answers(pairs: Sequence[tuple[Reply, SampledReply]]) -> list[Answer]:
    return [Answer(reply.text, _finish_reason(reply)) for reply, _ in pairs]
