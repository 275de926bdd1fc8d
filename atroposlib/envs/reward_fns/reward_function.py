"""The base class of reward functions, which map completions to one number each.

completions [G] -> compute -> raw rewards [G] -> times weight -> rewards [G]
                                    └─> logger (optional)
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["MetricLogger", "RewardFunction", "one_per_completion"]

logger = logging.getLogger(__name__)


class MetricLogger(Protocol):
    """An object that logs metrics by name, such as `wandb` or one of its runs."""

    def log(self, metrics: dict[str, float]) -> Any: ...


class RewardFunction(ABC):
    """A function that scores completions; subclasses implement `compute`.

    An exception of `compute` is a defect of the reward function, not a bad completion: it is
    counted and raised. With `tolerate_errors=True` it is counted and logged with its traceback, and
    each completion of that call earns `error_reward`.

    Args:
        weight: factor of the raw rewards.
        name: name in logs and metrics; None means the class name in lower case.
        tolerate_errors: see above.
        **kwargs: stored in `config`.

    Attributes:
        config: the remaining keyword arguments.
        wandb_logger: receives the metrics of every call; None until set.
        num_errors: number of calls that raised, tolerated or not.
    """

    error_reward: float = 0.0
    """Raw reward of a completion when an exception is tolerated."""

    def __init__(
        self,
        weight: float = 1.0,
        name: str | None = None,
        *,
        tolerate_errors: bool = False,
        **kwargs: Any,
    ) -> None:
        self.weight = weight
        self.config: dict[str, Any] = kwargs
        self.wandb_logger: MetricLogger | None = None
        self.tolerates_errors = tolerate_errors
        self.num_errors = 0
        self._name = name

    @property
    def name(self) -> str:
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Return [G] raw rewards, in the order of the completions.

        Args:
            completions: [G] strings, messages, or lists of messages; `get_content` reads them.
            **kwargs: data of the item, such as `solution`; ignore unknown ones.
        """

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Return [G] weighted rewards and log their metrics if a logger is set.

        Raises:
            ValueError: `compute` returned a wrong number of values.
        """
        raw = self.try_compute(completions, kwargs, tolerates_errors=self.tolerates_errors)
        if raw is None:
            return [self.error_reward * self.weight] * len(completions)
        weighted = [reward * self.weight for reward in raw]
        self.log_metrics(raw, weighted)
        return weighted

    def try_compute(
        self, completions: list[Any], keywords: Mapping[str, Any], *, tolerates_errors: bool
    ) -> list[float] | None:
        """Return the raw rewards as floats; None after a tolerated exception."""
        try:
            rewards = [float(reward) for reward in self.compute(completions, **keywords)]
            if len(rewards) != len(completions):
                raise ValueError(
                    f"reward function {self.name!r} returned {len(rewards)} values for "
                    f"{len(completions)} completions; it must return one per completion"
                )
        except Exception:
            self.num_errors += 1
            if self.wandb_logger is not None:
                self.wandb_logger.log({f"reward/{self.name}/num_errors": self.num_errors})
            if not tolerates_errors:
                raise
            logger.exception("reward function %s failed (%d so far)", self.name, self.num_errors)
            return None
        return rewards

    def set_wandb_logger(self, logger: MetricLogger | None) -> None:
        """Log the metrics of every call to this logger; None disables logging."""
        self.wandb_logger = logger

    def log_metrics(self, raw: Sequence[float], weighted: Sequence[float]) -> None:
        """Log mean, minimum and maximum of one call, if there are a logger and values."""
        if self.wandb_logger is None or not raw:
            return
        prefix = f"reward/{self.name}"
        self.wandb_logger.log(
            {
                f"{prefix}/mean_raw": sum(raw) / len(raw),
                f"{prefix}/mean_weighted": sum(weighted) / len(weighted),
                f"{prefix}/min": min(raw),
                f"{prefix}/max": max(raw),
            }
        )

    @staticmethod
    def get_content(completion: Any) -> str:
        """Return the text of a completion; empty without an assistant message.

        Args:
            completion: a string; an assistant message; a choice with such a `message`; a list of
                messages, of which the first assistant message counts.
        """
        if isinstance(completion, str):
            return completion
        if isinstance(completion, Mapping):
            message = completion if "role" in completion else completion.get("message")
            return _message_text(message)
        if isinstance(completion, (list, tuple)):
            texts = (_message_text(m) for m in completion if _is_assistant(m))
            return next(texts, "")
        return ""


def one_per_completion(value: Any, num_completions: int) -> list[Any]:
    """Return [G] gold answers from a list, or from one value for all.

    A list that is too short is padded with None, one that is too long is truncated, both with a
    warning.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * num_completions
    if len(value) != num_completions:
        logger.warning(
            "%d gold answers for %d completions: expected one per completion, or one for all",
            len(value),
            num_completions,
        )
    return [*value, *[None] * num_completions][:num_completions]


def _is_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _message_text(message: Any) -> str:
    content = message.get("content") if _is_assistant(message) else None
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):  # parts: texts and images
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "".join(text for text in parts if isinstance(text, str))
    return ""
