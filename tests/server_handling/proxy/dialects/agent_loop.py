"""The conversation every agent of these tests has, and what must be recorded of it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.fakes import logprob_of
from tests.server_handling.proxy.engine import Call

__all__ = ["PARAMETERS", "QUESTION", "TURNS", "assert_engines_own_tokens", "weather_in"]

QUESTION = "Which city is warmest?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def _call_of(city: str) -> str:
    # Spaces that no JSON writer puts there: text rendered anew would show.
    return f'<tool_call>{{"name":  "weather", "arguments": {{"city" : "{city}"}}}}</tool_call>'


TURNS = [
    f"<think>\nI need both.\n</think>\n\nLet me look.\n{_call_of('Rome')}\n{_call_of('Oslo')}",
    f"One more. {_call_of('Riga')} done",
    "<think>\nClear.\n</think>\n\nRome is warmest.",
]


def weather_in(city: str) -> str:
    return json.dumps({"city": city, "celsius": len(city)})


def assert_engines_own_tokens(nodes: Sequence[SequenceNode], calls: Sequence[Call]) -> None:
    """Check that one sequence holds what the engine read and wrote, call after call."""
    (node,) = nodes
    masks: list[int] = []
    logprobs: list[float] = []
    so_far: list[int] = []
    for call in calls:
        assert call.prompt_ids[: len(so_far)] == so_far
        (sampled,) = call.completion_ids
        so_far = call.prompt_ids + sampled
        num_new = len(call.prompt_ids) - len(masks)
        masks += [IGNORE_INDEX] * num_new + sampled
        logprobs += [MASKED_LOGPROB] * num_new + [logprob_of(t, j) for j, t in enumerate(sampled)]
    assert (node.tokens, node.masked_tokens, node.logprobs) == (so_far, masks, logprobs)
