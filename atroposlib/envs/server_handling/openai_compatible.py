"""Chat and completion requests through the OpenAI client, for every engine that offers them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.engine_http import EngineHttp
from atroposlib.envs.server_handling.loop_turns import LoopTurns
from atroposlib.envs.server_handling.openai_transport import make_http_client
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["OpenAICompatibleServer", "WrongChoiceCountError", "append_choices"]

AnyCompletion = TypeVar("AnyCompletion", "ChatCompletion", "Completion")
Create = Callable[..., Awaitable[AnyCompletion]]


class WrongChoiceCountError(InferenceError, ValueError):
    """A server answered another number of choices than was asked for."""


def append_choices(first: AnyCompletion, others: list[AnyCompletion]) -> AnyCompletion:
    """Return `first` with the choices of `others` behind its own, numbered from 0."""
    for other in others:
        first.choices.extend(other.choices)  # type: ignore[arg-type]  # both of the same kind
    for index, choice in enumerate(first.choices):
        choice.index = index
    return first


class OpenAICompatibleServer(APIServer):
    """A server reached through the OpenAI client for chat and text completions.

    Attributes:
        openai: The client; it does not retry by itself, the pipeline does.
    """

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        import openai  # here, since it takes a second and `--help` makes no client

        super().__init__(config, reasoning_config)
        if not (config.known_base_url or "http://").startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url is {config.base_url!r}; expected an address such as "
                "http://localhost:9001/v1"
            )
        try:
            self.openai = openai.AsyncClient(
                api_key=config.key_for_client,
                base_url=config.known_base_url,
                timeout=config.timeout,
                max_retries=0,
                http_client=make_http_client(config.known_base_url or ""),
            )
        except openai.OpenAIError as error:
            raise ConfigError(
                f"no usable API key for model {config.model_name!r} at the official OpenAI "
                "endpoint; set api_key, or OPENAI_API_KEY, or base_url for another server "
                f"({error})"
            ) from error
        self.http = EngineHttp(
            str(self.openai.base_url), api_key=config.api_key, timeout_s=config.timeout
        )
        self.share_turns(self._turns)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Probe until the server answers, then end; failures start it again."""
        while not await self.health.confirm(self._probe):  # noqa: ASYNC110 - asks a server
            await asyncio.sleep(self.health_poll_s)

    async def close(self) -> None:
        """End the health check and close every connection."""
        await super().close()
        await self.http.close()
        await self.openai.close()

    def share_turns(self, turns: LoopTurns) -> None:
        """Take turns on the event loop together with the other servers that were given `turns`."""
        super().share_turns(turns)
        self.http.turns = turns

    async def _probe(self) -> bool:
        return await self.http.answers("/health")

    def _request_url(self) -> str | None:
        return str(self.openai.base_url)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        _require(kwargs, "model", "messages")
        create: Create[ChatCompletion] = self.openai.chat.completions.create
        return await self._with_n_choices(create, kwargs)

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        _require(kwargs, "model", "prompt")
        create: Create[Completion] = self.openai.completions.create
        return await self._with_n_choices(create, kwargs)

    async def _with_n_choices(
        self, create: Create[AnyCompletion], kwargs: dict[str, Any]
    ) -> AnyCompletion:
        """Call `create` so that `n` choices come back, even from a server that ignores `n`."""
        wanted = kwargs.get("n") or 1
        single = {name: value for name, value in kwargs.items() if name != "n"}
        if self.config.n_kwarg_is_ignored:
            answers = await asyncio.gather(*(create(**single) for _ in range(wanted)))
            return append_choices(answers[0], list(answers[1:]))
        answer = await create(**kwargs)
        received = len(answer.choices)
        if received == wanted:
            return answer
        if received != 1:
            raise WrongChoiceCountError(
                f"inference server {self.health.name} answered {received} choices, "
                f"expected {wanted}"
            )
        warnings.warn(
            f"inference server {self.health.name} ignores n: asked for {wanted} choices, got 1; "
            "sending one request per choice from now on (set n_kwarg_is_ignored to skip the test)",
            stacklevel=2,
        )
        self.config.n_kwarg_is_ignored = True
        others = await asyncio.gather(*(create(**single) for _ in range(wanted - 1)))
        return append_choices(answer, list(others))


def _require(kwargs: dict[str, Any], *names: str) -> None:
    for name in names:
        assert name in kwargs, f"the request has no {name!r}"
