"""Environments that ask for thinking in tags and look only at what follows it."""

from __future__ import annotations

import re
from functools import cached_property

from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.single_turn_env import SingleTurnEnv

__all__ = ["DEEP_THINKING", "ThinkingEnv", "answer_after_thinking"]

DEEP_THINKING = (
    "You are an AI that thinks deeply. Before you answer you may reason for as long as you need: "
    "look at the problem from several sides, try ideas, and check each step. Put all of that "
    "inside <think> </think> tags, and give your solution or answer after the closing tag."
)

THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)


def answer_after_thinking(completion: str) -> str | None:
    """Return what follows the thinking; None unless there is exactly one pair of tags."""
    tags = list(THINK_TAG.finditer(completion))
    if [tag[1] for tag in tags] != ["", "/"]:
        return None
    return completion[tags[1].end() :]


class ThinkingEnv(SingleTurnEnv):
    """`score` receives the whole completion; very short ones do not move the policy."""

    scores_thinking = True
    min_trained_tokens = 10

    @cached_property
    def opened_tag(self) -> str:
        """The opening tag where the chat template writes it before every answer, else empty."""
        prompt = render_messages(self.tokenizer, [{"role": "user", "content": "?"}])
        return "<think>" if prompt.rstrip().endswith("<think>") else ""
