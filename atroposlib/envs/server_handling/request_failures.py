"""What went wrong so far in one request, and whether it is worth another attempt; no waiting."""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.engine_refusals import as_context_overflow, as_setup_error
from atroposlib.envs.server_handling.retry import (
    MAX_ATTEMPTS,
    MAX_OUTAGES,
    RetriesExhaustedError,
    describe,
    describe_connection,
    is_retryable,
)
from atroposlib.errors import EngineSetupError

__all__ = ["RequestFailures", "how_to_start"]

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_START_COMMANDS = {
    "openai": "vllm serve",
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server --model-path",
    "trl": "trl vllm-serve --model",
}


class RequestFailures:
    """The failures of one request.

    A request that fails because its server went down has not used up an attempt; that may happen
    `MAX_OUTAGES` times. Anything else that may pass is tried `MAX_ATTEMPTS` times.

    Args:
        server_name: for messages.
        config: of the server.

    Attributes:
        num_attempts: attempts that failed at a server that was up.
        num_outages: attempts that failed because the server was down.
    """

    def __init__(self, server_name: str, config: APIServerConfig) -> None:
        self.num_attempts = 0
        self.num_outages = 0
        self._server_name = server_name
        self._config = config
        self._last_error: Exception | None = None

    def note(self, error: Exception, *, url: str) -> None:
        """Take note of an error; raise when it is final.

        Args:
            error: What the request failed with.
            url: Where it was sent.

        Raises:
            ContextOverflowError: The prompt is too long for the engine.
            EngineSetupError: Address, model or key are wrong.
            Exception: `error` itself, when the same request cannot succeed later.
        """
        self._last_error = error
        overflow = as_context_overflow(error)
        if overflow is not None:
            raise overflow from error
        wrong_setup = as_setup_error(
            error, url=url, model=self._config.model_name, api_key=self._config.api_key
        )
        if wrong_setup is not None:
            raise wrong_setup from None  # the original may repeat the key
        if not is_retryable(error):
            raise error

    def count(self, error: Exception, *, was_down: bool) -> bool:
        """Count a failure that may pass; returns whether it was an attempt, not an outage.

        Raises:
            RetriesExhaustedError: There were too many of either.
        """
        if was_down:
            self.num_outages += 1
            if self.num_outages <= MAX_OUTAGES:
                return False
        self.num_attempts += 1
        if self.num_attempts >= MAX_ATTEMPTS or self.num_outages > MAX_OUTAGES:
            raise RetriesExhaustedError(
                f"inference server {self._server_name} failed {self.num_attempts} attempts and was "
                f"down during {self.num_outages} others; the last error was {describe(error)}",
                error,
                num_attempts=self.num_attempts,
            ) from error
        return True

    def as_never_answered(self) -> EngineSetupError:
        """Return the error of a server that has not come up in the time it may take to start."""
        tried = f" ({describe_connection(self._last_error)})" if self._last_error else ""
        return EngineSetupError(
            f"inference server {self._server_name} has not answered within "
            f"{self._config.startup_timeout:g} seconds{tried}; {how_to_start(self._config)}. "
            "A server that takes longer to start needs a larger startup_timeout "
            "(--openai.startup_timeout)"
        )


def how_to_start(config: APIServerConfig) -> str:
    """Return what to do about a server that has never answered.

    Args:
        config: of the server; its address may be of a provider, which nobody here can start.
    """
    address = urlsplit(config.known_base_url or "")
    start = "start it"
    if address.hostname in LOOPBACK:
        with contextlib.suppress(ValueError):  # a port that is no number
            command = _START_COMMANDS[config.server_type]
            start += f" ({command} {config.model_name} --port {address.port or 80})"
    return (
        f"{start}, or set base_url (--openai.base_url) to its address, such as "
        "http://localhost:9001/v1"
    )
