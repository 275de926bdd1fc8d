"""The exception tree: one leaf per kind of failure that callers may handle differently.

Each leaf also inherits the built-in it refines, so that existing `except ValueError` clauses keep
working.
"""

from __future__ import annotations

__all__ = [
    "AtroposError",
    "ConfigError",
    "ContextOverflowError",
    "EngineSetupError",
    "EpisodeConnectionError",
    "EpisodeError",
    "EpisodeFailedError",
    "EpisodeRewardError",
    "EpisodeTimeoutError",
    "GroupError",
    "InferenceError",
    "MissingExtraError",
    "NoDataError",
    "NoTextCompletionsError",
    "NoTokenIdsError",
    "NoVerdictError",
    "PromptError",
    "RunStoreError",
    "TaskError",
    "TrajectoryApiError",
    "UnknownRewardError",
]


class AtroposError(Exception):
    """Base class of the exceptions of this package."""


class ConfigError(AtroposError, ValueError):
    """A setting is missing, unknown or out of range; the message names it and the remedy."""


class UnknownRewardError(ConfigError, ImportError):
    """No reward function has that name; the message suggests similar names."""


class NoTokenIdsError(ConfigError, NotImplementedError):
    """A server of the configured type returns no token ids or logprobs; names a type that does."""


class NoDataError(AtroposError, RuntimeError):
    """An environment repeatedly produced no data; the message quotes its log."""


class NoVerdictError(AtroposError, RuntimeError):
    """A judge gave no verdict on an answer, so its group has no scores; its item is left out."""


class PromptError(AtroposError, ValueError):
    """A conversation cannot be rendered completely as a prompt; names the message."""


class GroupError(AtroposError, ValueError):
    """A scored group is malformed; the message names the path, as in `masks[1]`."""


class InferenceError(AtroposError, RuntimeError):
    """An inference server failed, or returned an unusable response."""


class ContextOverflowError(InferenceError):
    """The prompt and its completion do not fit the engine's context.

    Attributes:
        prompt_tokens: Length of the prompt; None if the engine did not report it.
        context_tokens: Limit on prompt and completion together; None likewise.
    """

    def __init__(
        self,
        message: str,
        *,
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class EngineSetupError(ConfigError, InferenceError):
    """An inference server does not match its configuration; names what was tried and the remedy."""


class NoTextCompletionsError(EngineSetupError):
    """An inference server serves chat completions only, so it cannot continue a plain prompt."""


class EpisodeError(AtroposError, RuntimeError):
    """An environment of another library broke a rollout; the subclass names how."""


class EpisodeFailedError(EpisodeError):
    """An environment of another library raised an exception, or broke its protocol."""


class EpisodeTimeoutError(EpisodeError, TimeoutError):
    """An environment of another library did not answer a call in time."""


class EpisodeRewardError(EpisodeError, ValueError):
    """An environment of another library gave no reward, or one that is not a finite number."""


class EpisodeConnectionError(EpisodeError, ConnectionError):
    """The server of an episode disappeared, and with it the state of the episode."""


class RunStoreError(AtroposError, OSError):
    """The store of a run is unreachable or rejects a write; nothing was acknowledged."""


class TaskError(AtroposError, RuntimeError):
    """A task folder cannot do what was asked of it; the message names the task and the remedy."""


class TrajectoryApiError(AtroposError, RuntimeError):
    """The trajectory service rejected a request or could not be reached.

    Attributes:
        status: HTTP status of the response; None if no response arrived.
        retry_after_s: Seconds to wait, as requested by the service; None if unspecified.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class MissingExtraError(AtroposError, ImportError, RuntimeError):
    """An optional dependency is not installed; the message names the extra that includes it."""

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; run in a clone of the repository: "
            f"pip install '.[{extra}]'"
        )
        self.package = package
        self.extra = extra
