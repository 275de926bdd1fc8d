"""One prompt, G completions, one group: what environments of a single turn share.

messages -> sample_trajectories -> [G] Trajectory -> scores of the environment -> build_group
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atroposlib.envs.reward_parts import complete_parts
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.errors import NoTextCompletionsError
from atroposlib.scored_data import IGNORE_INDEX, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import render_chat_ids

__all__ = [
    "Answer",
    "Trajectory",
    "ask",
    "build_group",
    "complete",
    "completion_budget",
    "sample_trajectories",
]

logger = logging.getLogger(__name__)

RESERVED_TOKENS = 2


class Answer(NamedTuple):
    """One completion as text."""

    completion: str
    """With the prefill before it, if there was one."""
    finish_reason: str


@dataclass(frozen=True)
class Trajectory:
    """One completion of a prompt, with the tokens the engine reported, or those of its text."""

    completion: str
    """What the policy wrote, as text."""
    finish_reason: str
    """`stop`, or `length` when it was cut."""
    tokens: list[int]
    """[L] prompt and completion ids."""
    masks: list[int]
    """[L] -100 on the prompt, the ids on the completion."""
    inference_logprobs: list[float]
    """[L] 1.0 on the prompt, the policy's logprobs on the completion; 1.0 there too where the
    tokens are those of its text."""

    @property
    def is_truncated(self) -> bool:
        """Whether the token budget cut the completion."""
        return self.finish_reason == "length"

    @property
    def num_completion_tokens(self) -> int:
        """Tokens the policy wrote."""
        return sum(1 for mask in self.masks if mask != IGNORE_INDEX)

    def chat(self, prompt: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages of the prompt and, behind them, the completion as a message."""
        return [*prompt, {"role": "assistant", "content": self.completion}]


def completion_budget(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_token_length: int,
    prefill: str = "",
) -> int:
    """Return how many tokens a completion may have; below 1 the prompt leaves no room.

    `RESERVED_TOKENS` stay free: a trajectory that fills the limit to the last token is refused as
    too long, its whole group with it, and some engines put a start token before the prompt.
    """
    prompt = render_chat_ids(tokenizer, messages, add_generation_prompt=True)
    begun = tokenizer.encode(prefill, add_special_tokens=False) if prefill else ()
    return max_token_length - len(prompt) - len(begun) - RESERVED_TOKENS


async def ask(
    server: Any,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    prefill: str = "",
    **sampling: Any,
) -> list[Answer]:
    """Wait for the completions of one prompt.

    Args:
        server: a `ServerManager` or a managed server.
        tokenizer: renders the prompt where there is a prefill.
        messages: the prompt.
        prefill: how every completion begins; it is part of what the policy reads. A server that
            answers chats only is asked without it.
        sampling: what the engine takes, as `n` and `max_tokens`. A prompt that leaves no token is
            not sent, which engines refuse; its completions are empty and cut.
    """
    if sampling.get("max_tokens", 1) < 1:
        return [Answer("", "length")] * sampling.get("n", 1)
    if not prefill:
        return await _chat(server, messages, sampling)
    prompt = render_messages(tokenizer, messages) + prefill
    return await complete(server, prompt, prefill=prefill, chat=messages, **sampling)


async def complete(
    server: Any,
    prompt: str,
    *,
    prefill: str = "",
    chat: Sequence[Mapping[str, Any]] | None = None,
    **sampling: Any,
) -> list[Answer]:
    """Wait for the continuations of a text; a server that answers chats only is asked a chat.

    Args:
        server: a `ServerManager` or a managed server.
        prompt: the text.
        prefill: end of `prompt` that belongs to the completions.
        chat: what a server is asked that cannot continue a text: the messages that `prompt`
            renders; None asks with `prompt` as one user message.
        sampling: what the engine takes.

    Returns:
        [n] completions. An answer to `chat` is given as it is, for it did not read the prefill.
    """
    try:
        texts = await server.completion(prompt=prompt, **sampling)
    except NoTextCompletionsError as error:
        logger.debug("%s", error)
        asked = [{"role": "user", "content": prompt}] if chat is None else chat
        return await _chat(server, asked, sampling)
    return [Answer(prefill + c.text, c.finish_reason or "stop") for c in texts.choices]


async def _chat(
    server: Any, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
) -> list[Answer]:
    chat = await server.chat_completion(messages=list(messages), **sampling)
    return [Answer(c.message.content or "", c.finish_reason or "stop") for c in chat.choices]


async def sample_trajectories(
    server: Any,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    group_size: int,
    max_tokens: int,
    **sampling: Any,
) -> list[Trajectory]:
    """Wait for G completions of one prompt.

    Args:
        server: the environment's `ServerManager`.
        tokenizer: the environment's tokenizer.
        messages: the prompt.
        group_size: G.
        max_tokens: budget of one completion.
        sampling: what else `ask` takes, as `temperature`.

    Returns:
        [G] trajectories, in the order of the engine's choices.
    """
    async with server.managed_server(tokenizer=tokenizer) as managed:
        answers = await ask(
            managed, tokenizer, messages, n=group_size, max_tokens=max_tokens, **sampling
        )
        nodes = managed.get_state()["nodes"]
    return [
        Trajectory(
            completion=answer.completion,
            finish_reason=answer.finish_reason,
            tokens=node.tokens,
            masks=node.masked_tokens,
            inference_logprobs=node.logprobs,
        )
        for answer, node in zip(answers, nodes, strict=True)
    ]


def build_group(
    messages: Sequence[Mapping[str, Any]],
    trajectories: Sequence[Trajectory],
    scores: Sequence[float],
    *,
    is_muted: Sequence[bool],
    generation_params: Mapping[str, Any],
    include_messages: bool,
    reward_parts: Sequence[Mapping[str, float]] = (),
) -> ScoredDataGroup:
    """Put trajectories and their scores together.

    Args:
        messages: the prompt.
        trajectories: [G].
        scores: [G], in the order of `trajectories`.
        is_muted: [G] whether a trajectory must not move the policy (`set_advantage_to_zero`).
        generation_params: sampling settings, for the record.
        include_messages: add the chats.
        reward_parts: [G] named parts of each score, before weighing; left out where there are none.
    """
    group: ScoredDataGroup = {
        "tokens": [trajectory.tokens for trajectory in trajectories],
        "masks": [trajectory.masks for trajectory in trajectories],
        "scores": [float(score) for score in scores],
        "inference_logprobs": [trajectory.inference_logprobs for trajectory in trajectories],
        "overrides": [{"set_advantage_to_zero": True} if muted else {} for muted in is_muted],
        "generation_params": dict(generation_params),
        "finish_reasons": [trajectory.finish_reason for trajectory in trajectories],
    }
    parts = complete_parts(reward_parts)
    if parts is not None:
        group["reward_parts"] = parts
    if include_messages:
        group["messages"] = [trajectory.chat(messages) for trajectory in trajectories]
    return group
