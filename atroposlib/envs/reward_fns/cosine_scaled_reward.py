"""Reward for similarity to the solution, by the cosine of sentence embeddings.

texts -> encoder -> mean over tokens [H] -> cosine distance -> 1 - distance * scale, clamped
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, one_per_completion
from atroposlib.errors import MissingExtraError

__all__ = ["CosineScaledReward", "cosine_scaled_reward"]

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
EXTRA = "rewardfns"
MAX_TOKENS = 512
TEXTS_PER_FORWARD = 32


@registry.register
class CosineScaledReward(RewardFunction):
    """`1 - cosine distance * scale_factor`, between `min_reward` and `max_reward`.

    The encoder is loaded on first use and kept on the class. Only the first 512 tokens of a text
    count.

    Args:
        model_name: hub name or folder of an encoder; None means a small sentence encoder.
        scale_factor: factor of the distance, which is in [0, 2].
        min_reward: lower bound.
        max_reward: upper bound.
        default_reward: reward without a solution and, with `tolerate_errors`, after an exception.
        **kwargs: as for `RewardFunction`, such as `weight`.

    Raises:
        MissingExtraError: torch is not installed.
    """

    _encoders: ClassVar[dict[str, tuple[Any, Any]]] = {}

    def __init__(
        self,
        model_name: str | None = None,
        scale_factor: float = 1.0,
        min_reward: float = -1.0,
        max_reward: float = 1.0,
        default_reward: float = 0.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        if importlib.util.find_spec("torch") is None:
            raise MissingExtraError("torch", extra=EXTRA)
        self.model_name = model_name or DEFAULT_MODEL
        self.scale_factor = scale_factor
        self.min_reward = min_reward
        self.max_reward = max_reward
        self.default_reward = default_reward
        self.error_reward = default_reward

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        """Return [G] rewards; `default_reward` without a solution.

        Args:
            completions: [G] completions.
            solution: one for all (a string, a message or a list of messages), or a list of [G].
            **kwargs: ignored.
        """
        golds = _solution_texts(solution, len(completions))
        texts = [self.get_content(each) for each in completions]
        pairs = [(text, gold) for text, gold in zip(texts, golds, strict=True) if gold]
        if not pairs:
            return [self.default_reward] * len(completions)
        unique = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = dict(zip(unique, self.embed(unique), strict=True))
        return [
            self._reward(vectors[text], vectors[gold]) if gold else self.default_reward
            for text, gold in zip(texts, golds, strict=True)
        ]

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """Return one tensor (H,) per text: the mean of the encoder's last layer over its tokens."""
        import torch

        tokenizer, model = self._encoder()
        vectors: list[Any] = []
        for start in range(0, len(texts), TEXTS_PER_FORWARD):
            inputs = tokenizer(
                list(texts[start : start + TEXTS_PER_FORWARD]),
                padding=True,
                truncation=True,
                max_length=min(tokenizer.model_max_length, MAX_TOKENS),
                return_tensors="pt",
            )
            with torch.inference_mode():
                hidden = model(**inputs).last_hidden_state  # (B, T, H)
            is_token = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)  # (B, T, 1)
            vectors.extend((hidden * is_token).sum(1) / is_token.sum(1).clamp(min=1))
        return vectors

    def _reward(self, answer: Any, gold: Any) -> float:
        import torch

        distance = 1.0 - float(torch.nn.functional.cosine_similarity(answer, gold, dim=0))
        return max(self.min_reward, min(self.max_reward, 1.0 - distance * self.scale_factor))

    def _encoder(self) -> tuple[Any, Any]:
        if self.model_name not in self._encoders:
            from transformers import AutoModel, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model_name)
            self._encoders[self.model_name] = (
                tokenizer,
                AutoModel.from_pretrained(self.model_name).eval(),
            )
        return self._encoders[self.model_name]


def _solution_texts(solution: Any, num_completions: int) -> list[str]:
    is_list = isinstance(solution, (list, tuple))
    if is_list and solution and isinstance(solution[0], Mapping):  # the messages of one solution
        solution = RewardFunction.get_content(solution)
    elif not is_list and not isinstance(solution, (str, Mapping)):
        solution = None if solution is None else str(solution)
    return [
        RewardFunction.get_content(each) for each in one_per_completion(solution, num_completions)
    ]


def cosine_scaled_reward(
    completions: list[Any], solution: Any = None, **kwargs: Any
) -> list[float]:
    """Return the rewards of `CosineScaledReward` with its defaults."""
    return CosineScaledReward().compute(completions, solution, **kwargs)
