"""An engine that samples a script in unusual tokens, and a check of what was recorded of it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.clients.scripts import Turn, text_of
from tests.scripted_engine import Fault, ScriptedEngine, logprob_of
from tests.templates.make_tokenizers import FAMILIES, load_tokenizer

__all__ = ["EngineCall", "PolicyEngine", "calls_at", "mistakes_in"]


@dataclass(frozen=True)
class EngineCall:
    """One completion as the engine knows it."""

    prompt_ids: list[int]
    """[P] ids it read."""
    completion_ids: list[int]
    """[C] ids it sampled."""

    @property
    def logprobs(self) -> list[float]:
        """[C] what it reported of each."""
        return [logprob_of(token, i) for i, token in enumerate(self.completion_ids)]


class PolicyEngine(ScriptedEngine):
    """Speaks HTTP as vLLM does; plays the turns of a script in the order of its calls.

    Args:
        family: Name of a tokenizer and chat template in `tests/templates`.
        turns: The script.
    """

    def __init__(self, family: str, turns: Sequence[Turn]) -> None:
        super().__init__(model="policy", aliases=(), tokenizer=load_tokenizer(family))
        self.family = family
        self.turns = turns
        self.calls: list[EngineCall] = []

    @property
    def num_played(self) -> int:
        """Turns of the script played so far."""
        return min(len(self.calls), len(self.turns))

    def prompt_text(self, call: EngineCall) -> str:
        """Return what the engine read."""
        return str(self.tokenizer.decode(call.prompt_ids))

    def _sample(
        self, prompt_ids: list[int], body: dict[str, Any], fault: Fault | None
    ) -> list[tuple[str, list[int], str]]:
        if body.get("max_tokens") == 1:  # asked once, to learn whether the route returns ids
            token = self.tokenizer.eos_token_id
            return [("", [token], "stop")]
        sampled = []
        for _ in range(body.get("n") or 1):
            text = self._next_text()
            ids = [*self.unusual_ids(text), self.tokenizer.eos_token_id]
            limit = body.get("max_tokens") or 16
            reason = "stop" if len(ids) <= limit else "length"
            ids = ids[:limit]
            self.calls.append(EngineCall(list(prompt_ids), ids))
            sampled.append((self.tokenizer.decode(ids, skip_special_tokens=True), ids, reason))
        return sampled

    def _next_text(self) -> str:
        if len(self.calls) >= len(self.turns):
            return "The script has ended."
        return text_of(self.turns[len(self.calls)], self.family)

    def unusual_ids(self, text: str) -> list[int]:
        """Return one of a text's many tokenizations, seldom the one the tokenizer makes."""
        chance = random.Random(len(self.calls))
        family = FAMILIES[self.family]
        whole = "|".join(map(re.escape, (*family.specials, *family.marks)))
        ids: list[int] = []
        for part in re.split(f"({whole})", text):
            while part:
                is_whole = re.fullmatch(whole, part) is not None
                length = len(part) if is_whole else chance.choice([1, 2, 5, 40])
                ids += self.tokenizer.encode(part[:length], add_special_tokens=False)
                part = part[length:]
        return ids


def calls_at(nodes: Sequence[SequenceNode], engine: PolicyEngine) -> list[int]:
    """Return the numbers of the engine's calls that stand in some sequences."""
    return [i for i, call in enumerate(engine.calls) if _places_of(call, nodes)]


def _places_of(call: EngineCall, nodes: Sequence[SequenceNode]) -> list[int]:
    """Return which sequences hold a call, with its tokens trained at the logprobs it reported."""
    start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.completion_ids)
    return [
        i
        for i, node in enumerate(nodes)
        if node.tokens[:end] == call.prompt_ids + call.completion_ids
        and node.masked_tokens[start:end] == call.completion_ids
        and node.logprobs[start:end] == call.logprobs
    ]


def mistakes_in(nodes: Sequence[SequenceNode], engine: PolicyEngine) -> list[str]:
    """Return what is wrong with the recorded sequences of an engine's calls.

    Every call must be at its place: its prompt in front of it, its tokens trained, their logprobs
    those it reported. No other token may be trained.
    """
    wrong = []
    sampled: list[set[int]] = [set() for _ in nodes]
    """Positions of each node that a call of the engine stands at."""
    for number, call in enumerate(engine.calls):
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.completion_ids)
        places = _places_of(call, nodes)
        if not places:
            wrong.append(f"call {number} is at no place: {engine.prompt_text(call)[-300:]!r}")
        for i in places:
            sampled[i].update(range(start, end))
    for i, node in enumerate(nodes):
        trained = {t for t, mask in enumerate(node.masked_tokens) if mask != IGNORE_INDEX}
        if trained != sampled[i]:
            wrong.append(f"row {i} trains {len(trained - sampled[i])} tokens that nobody sampled")
        if any(
            (mask == IGNORE_INDEX) != (logprob == MASKED_LOGPROB)
            for mask, logprob in zip(node.masked_tokens, node.logprobs, strict=True)
        ):
            wrong.append(f"row {i} has logprobs where nothing is trained")
    return wrong
