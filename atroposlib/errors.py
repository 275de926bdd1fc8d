"""The exception tree: one leaf per kind of failure a caller can answer differently.

Each leaf also inherits the built-in it refines, so an `except ValueError` written against an
earlier version keeps catching what it caught.
"""

from __future__ import annotations

__all__ = [
    "AtroposError",
    "ConfigError",
    "ContextOverflowError",
    "EngineSetupError",
    "GroupError",
    "InferenceError",
    "MissingExtraError",
    "NoDataError",
    "NoTextCompletionsError",
    "NoTokenIdsError",
    "PromptError",
    "RunStoreError",
    "TrajectoryApiError",
    "UnknownRewardError",
]


class AtroposError(Exception):
    """Root of every exception this package raises on purpose."""


class ConfigError(AtroposError, ValueError):
    """A setting is missing, unknown or out of range; the message names it and the remedy."""


class UnknownRewardError(ConfigError, ImportError):
    """No reward function has that name; the message names the nearest."""


class NoTokenIdsError(ConfigError, NotImplementedError):
    """A server of the configured type gives no token ids or logprobs; names a type that does."""


class NoDataError(AtroposError, RuntimeError):
    """An environment keeps giving no data; the message says what its log says of it."""


class PromptError(AtroposError, ValueError):
    """A conversation cannot be written as a prompt that holds all of it; names the message."""


class GroupError(AtroposError, ValueError):
    """A scored group is malformed; the message names the path, as in `masks[1]`."""


class InferenceError(AtroposError, RuntimeError):
    """An inference server failed, or answered something that cannot be used."""


class ContextOverflowError(InferenceError):
    """The prompt and its completion do not fit the engine's context.

    Attributes:
        prompt_tokens: Length of the prompt, None when the engine did not say.
        context_tokens: What prompt and completion may take together, None likewise.
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
    """An inference server is not as it is configured; names what was tried and the remedy."""


class NoTextCompletionsError(EngineSetupError):
    """An inference server answers chats only, so a bare prompt cannot be continued there."""


class RunStoreError(AtroposError, OSError):
    """The store of a run cannot be reached or refuses to write; nothing was acknowledged."""


class TrajectoryApiError(AtroposError, RuntimeError):
    """The trajectory service refused a request or could not be reached.

    Attributes:
        status: HTTP status of the refusal, None when no answer arrived.
        retry_after_s: Seconds the service asked to wait, None when it did not say.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class MissingExtraError(AtroposError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; run in a clone of the repository: "
            f"pip install '.[{extra}]'"
        )
        self.package = package
        self.extra = extra
