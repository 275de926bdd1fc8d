"""Penalty for repeated words, phrases, beginnings of sentences, and sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from atroposlib.envs.reward_fns.reasoning_steps_reward import merge_weights
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import ConfigError

__all__ = ["RepetitionPenaltyReward", "repetition_penalty_reward"]

DEFAULT_WEIGHTS = {
    "word_repetition": 0.3,
    "phrase_repetition": 0.4,
    "consecutive_repetition": 0.6,
    "beginning_repetition": 0.5,
}
# fmt: off
DEFAULT_STOPWORDS = frozenset({
    "this", "that", "with", "from", "what", "when", "where", "which", "who", "whom", "whose",
    "will", "shall", "should", "would", "could", "have", "has", "had", "been", "being", "than",
    "then", "there", "these", "those", "their",
})
# fmt: on
SENTENCE_REPEAT_PENALTY = 0.4
"""Additional penalty if every sentence is a repetition."""
MIN_SENTENCE_WORDS = 4
MIN_PENALTY = 0.1
BEGINNING_WORDS = 3
PHRASE_WORDS = (3, 4, 5)


@registry.register
class RepetitionPenaltyReward(RewardFunction):
    """A penalty from 0 to -1 for repetition in a text.

    Short texts earn `short_text_penalty`. A repeated sentence of more than three words earns
    `paragraph_repetition_base_penalty` and up to 0.4 less. Otherwise the penalty is the weighted
    sum of four measures, each per word or per sentence, rescaled from [`threshold`, 1] to [0, 1]
    and at least 0.1.

    Args:
        threshold: in [0, 1); repetition without a penalty.
        min_words: minimum number of words of a text that is not short.
        min_sentences: minimum number of sentences of a text that is not short.
        short_text_penalty: reward of a short text.
        paragraph_repetition_base_penalty: see above.
        component_weights: overrides of the defaults: word_repetition 0.3, phrase_repetition 0.4,
            consecutive_repetition 0.6, beginning_repetition 0.5.
        stopwords: words that may be repeated, instead of the defaults.
        **kwargs: as for `RewardFunction`, such as `weight`.

    Raises:
        ConfigError: a component is unknown, or `threshold` is out of range.
    """

    error_reward = -0.2

    def __init__(
        self,
        threshold: float = 0.05,
        min_words: int = 10,
        min_sentences: int = 2,
        short_text_penalty: float = -0.1,
        paragraph_repetition_base_penalty: float = -0.6,
        component_weights: Mapping[str, float] | None = None,
        stopwords: Iterable[str] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        if not 0 <= threshold < 1:
            raise ConfigError(f"threshold is {threshold}; expected at least 0 and less than 1")
        self.threshold = threshold
        self.min_words = min_words
        self.min_sentences = min_sentences
        self.short_text_penalty = short_text_penalty
        self.paragraph_repetition_base_penalty = paragraph_repetition_base_penalty
        self.component_weights = merge_weights(DEFAULT_WEIGHTS, component_weights)
        self.stopwords = DEFAULT_STOPWORDS if stopwords is None else frozenset(stopwords)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self._score(self.get_content(each)) for each in completions]

    def _score(self, text: str) -> float:
        words = re.findall(r"\w+", text.lower())
        sentences = [part.strip() for part in re.split(r"[.!?]", text) if part.strip()]
        if not words or len(words) < self.min_words or len(sentences) < self.min_sentences:
            return self.short_text_penalty
        long_sentences = [s for s in sentences if len(s.split()) >= MIN_SENTENCE_WORDS]
        repeats = _num_repeats(long_sentences)
        if repeats:
            extra = SENTENCE_REPEAT_PENALTY * min(1.0, repeats / len(sentences))
            return self.paragraph_repetition_base_penalty - extra
        repetition = self._repetition(words, sentences)
        if repetition <= self.threshold:
            return 0.0
        excess = (repetition - self.threshold) / (1 - self.threshold)
        return min(-MIN_PENALTY, -min(1.0, excess))

    def _repetition(self, words: list[str], sentences: list[str]) -> float:
        starts = [tuple(s.split()[:BEGINNING_WORDS]) for s in sentences]
        measures = {
            "word_repetition": self._word_repeats(words) / len(words),
            "phrase_repetition": sum(
                _num_repeats(_phrases(words, n)) * n / PHRASE_WORDS[0] for n in PHRASE_WORDS
            )
            / len(words),
            "consecutive_repetition": sum(a == b and len(a) > 2 for a, b in pairwise(words))
            / len(words),
            "beginning_repetition": _num_repeats(s for s in starts if len(s) == BEGINNING_WORDS)
            / len(sentences),
        }
        return sum(measure * self.component_weights[kind] for kind, measure in measures.items())

    def _word_repeats(self, words: list[str]) -> int:
        counts = Counter(word for word in words if len(word) > 3 and word not in self.stopwords)
        return sum(count - 1 for count in counts.values() if count > 2)


def _phrases(words: list[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + length]) for i in range(len(words) - length + 1))


def _num_repeats(things: Iterable[Any]) -> int:
    return sum(count - 1 for count in Counter(things).values())


def repetition_penalty_reward(
    completions: list[Any], threshold: float = 0.05, **kwargs: Any
) -> list[float]:
    """Return the rewards of `RepetitionPenaltyReward` with this threshold."""
    return RepetitionPenaltyReward(threshold=threshold).compute(completions, **kwargs)
