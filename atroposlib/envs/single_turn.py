"""One prompt, G completions, one group: what environments of a single turn share.

messages -> sample_trajectories -> [G] Trajectory -> scores of the environment -> build_group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.scored_data import IGNORE_INDEX, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import render_chat_ids

__all__ = ["Trajectory", "build_group", "completion_budget", "sample_trajectories"]

RESERVED_TOKENS = 2


@dataclass(frozen=True)
class Trajectory:
    """One completion of a prompt, with the tokens the engine reported."""

    completion: str
    """What the policy wrote, as text."""
    finish_reason: str
    """`stop`, or `length` when it was cut."""
    tokens: list[int]
    """[L] prompt and completion ids."""
    masks: list[int]
    """[L] -100 on the prompt, the ids on the completion."""
    inference_logprobs: list[float]
    """[L] 1.0 on the prompt, the policy's logprobs on the completion."""

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
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, max_token_length: int
) -> int:
    """Return how many tokens a completion may have; below 1 the prompt leaves no room.

    `RESERVED_TOKENS` stay free: a trajectory that fills the limit to the last token is refused as
    too long, its whole group with it, and some engines put a start token before the prompt.
    """
    prompt = render_chat_ids(tokenizer, messages, add_generation_prompt=True)
    return max_token_length - len(prompt) - RESERVED_TOKENS


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
        sampling: what else the engine takes, as `temperature`.

    Returns:
        [G] trajectories, in the order of the engine's choices.
    """
    async with server.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(
            messages=list(messages), n=group_size, max_tokens=max_tokens, **sampling
        )
        nodes = managed.get_state()["nodes"]
    return [
        Trajectory(
            completion=choice.message.content or "",
            finish_reason=choice.finish_reason or "stop",
            tokens=node.tokens,
            masks=node.masked_tokens,
            inference_logprobs=node.logprobs,
        )
        for choice, node in zip(answer.choices, nodes, strict=True)
    ]


def build_group(
    messages: Sequence[Mapping[str, Any]],
    trajectories: Sequence[Trajectory],
    scores: Sequence[float],
    *,
    is_muted: Sequence[bool],
    generation_params: Mapping[str, Any],
    include_messages: bool,
) -> ScoredDataGroup:
    """Put trajectories and their scores together.

    Args:
        messages: the prompt.
        trajectories: [G].
        scores: [G], in the order of `trajectories`.
        is_muted: [G] whether a trajectory must not move the policy (`set_advantage_to_zero`).
        generation_params: sampling settings, for the record.
        include_messages: add the chats.
    """
    group: ScoredDataGroup = {
        "tokens": [trajectory.tokens for trajectory in trajectories],
        "masks": [trajectory.masks for trajectory in trajectories],
        "scores": [float(score) for score in scores],
        "inference_logprobs": [trajectory.inference_logprobs for trajectory in trajectories],
        "overrides": [{"set_advantage_to_zero": True} if muted else {} for muted in is_muted],
        "generation_params": dict(generation_params),
    }
    if include_messages:
        group["messages"] = [trajectory.chat(messages) for trajectory in trajectories]
    return group
