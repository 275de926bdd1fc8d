"""Requests in the engine: prompts, how they are sampled, and the completions that grow."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from example_trainer.torch_engine.grammars import Grammar, GrammarState, GrammarTime
from example_trainer.torch_engine.images import PromptImages
from example_trainer.torch_engine.prefixes import block_keys
from example_trainer.torch_engine.sampling import PastTokens, SamplingSettings

NOT_FINITE = (
    "the model's logits are NaN or infinite: its weights have such numbers, or their type cannot "
    "represent the activations"
)
_OR_EXCLUDED = "; or the other settings exclude every token that the grammar allows"
TopEntries = list[tuple[int, float]]
"""Token ids and their logprobs, most likely first."""


@dataclass(frozen=True)
class PromptRequest:
    """One prompt and how its completions are sampled, within the limits of the engine."""

    prompt_ids: tuple[int, ...]
    """[P], at least one."""
    images: PromptImages | None = None
    num_completions: int = 1
    max_tokens: int = 16
    """Completion tokens; 0 with `prompt_top` computes the logprobs of the prompt only."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    grammar: Grammar | None = None
    """Limits the tokens of the completions; None: any text."""
    seed: int | None = None
    """The completion with index i uses `seed + i`; None: from the engine's seed."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion, of which they are part."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion after `sampling.min_tokens`."""
    num_top: int = 0
    """Most likely tokens to return for each completion token."""
    prompt_top: int | None = None
    """Most likely tokens to return for each prompt token; None: no logprobs of the prompt."""

    @property
    def identity_ids(self) -> tuple[int, ...]:
        """[P] numbers that are equal for equal tokens, those of images for equal images."""
        return self.prompt_ids if self.images is None else self.images.identity_ids

    @cached_property
    def block_keys(self) -> tuple[int, ...]:
        """Hashes by which prompts that begin alike are found."""
        return tuple(block_keys(self.identity_ids))

    @cached_property
    def grammar_time(self) -> GrammarTime:
        """Time that the completions have left in the grammar, which they share."""
        return GrammarTime()

    @cached_property
    def distinct_D(self) -> torch.Tensor:
        """Distinct tokens of the prompt."""
        return torch.tensor(list(set(self.prompt_ids)))


class Completion:
    """The tokens of one completion; grows while it is generated."""

    def __init__(self, request: PromptRequest, index: int, generator: random.Random) -> None:
        self.request = request
        self.index = index
        self.generator = generator
        self.grammar: GrammarState | None = None
        if request.grammar is not None:
            self.grammar = request.grammar.start(request.stop_ids, request.grammar_time)
        self.tokens: list[int] = []
        """[C]"""
        self.counts: Counter[int] = Counter()
        """Number of times that each token was sampled."""
        self.logprobs: list[float] = []
        """[C]"""
        self.tops: list[TopEntries] = []
        """[C][K] if requested."""
        self.version_runs: list[tuple[str | None, int]] = []
        """Weight versions that sampled the tokens, each with its number of tokens, in order."""
        self.finish_reason: str | None = None
        """`stop`, `length`, `abort`; None while it is generated."""
        self.stop_reason: int | str | None = None
        """The stop token or text that ended it; None for the end of the turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def all_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.tokens]

    @property
    def identity_ids(self) -> list[int]:
        """Numbers that are equal for equal tokens, those of images for equal images."""
        return [*self.request.identity_ids, *self.tokens]

    def positions(self, first: int, end: int) -> torch.Tensor:
        """Return (3, end - first): positions in time, height and width, equal for text."""
        images = self.request.images
        if images is not None:
            return images.positions(first, end)
        return torch.arange(first, end).expand(3, -1)

    def whole_length(self, length: int) -> int:
        """Return the number of tokens, at most `length`, that have whole images only."""
        images = self.request.images
        return length if images is None else images.whole_length(length)

    @property
    def past(self) -> PastTokens:
        return PastTokens(self.request.distinct_D, self.counts, self.tokens)

    def problem_of(self, logprob: float) -> str | None:
        """Return why the completion cannot go on by a token with this logprob; None if it can."""
        if self.grammar is not None and self.grammar.failure is not None:
            return self.grammar.failure
        # NaN if any logit of the row is NaN or infinite; minus infinity if no token is allowed.
        if math.isfinite(logprob):
            return None
        return NOT_FINITE if self.grammar is None else NOT_FINITE + _OR_EXCLUDED

    def append(self, token: int, logprob: float, top: TopEntries, version: str | None) -> None:
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        self.counts[token] += 1
        self.logprobs.append(logprob)
        if self.request.num_top:
            self.tops.append(top)
        last, count = self.version_runs[-1] if self.version_runs else (version, 0)
        if last == version:
            self.version_runs[-1:] = [(version, count + 1)]
        else:
            self.version_runs.append((version, 1))


class Job:
    """A request in the engine, with the callbacks that receive its results in the thread."""

    def __init__(
        self,
        request: PromptRequest,
        *,
        on_done: Callable[[Job], None],
        on_token: Callable[[Completion], None] | None = None,
        find_stop: Callable[[Completion], str | None] | None = None,
    ) -> None:
        self.request = request
        self.on_done = on_done
        self.on_token = on_token
        """Called after each token and at the end of a completion."""
        self.find_stop = find_stop
        """Returns the stop text that a completion contains since its last token."""
        self.completions: list[Completion] = []
        self.prompt_logprobs: list[tuple[float, TopEntries]] | None = None
        """[P-1] logprob and most likely tokens of the prompt's tokens after the first."""
        self.error: Exception | None = None
        """Set before `on_done` if the request failed."""
        self.num_open = request.num_completions

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are requested and not computed yet."""
        return self.request.prompt_top is not None and self.prompt_logprobs is None

    def end(self, completion: Completion, reason: str) -> None:
        """End one of the completions; with the last one, the request is done."""
        completion.finish_reason = reason
        if self.on_token is not None:
            self.on_token(completion)
        self.num_open -= 1
        if self.num_open == 0:
            self.on_done(self)
