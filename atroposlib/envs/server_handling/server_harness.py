"""A scripted server for tests of environments: returns preset answers without any network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.envs.server_handling.chat_rendering import (
    FinishReason,
    TextAnswer,
    build_chat,
    build_completion,
)
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_baseline import (
    AsyncSemWithAdaptiveWeight,
    TokensAndLogprobs,
)

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

Answer = TypeVar("Answer")

__all__ = ["ServerHarness", "create_chat_completion", "create_completion"]


def create_chat_completion(
    resp: str | list[str],
    n: int = 1,
    finish_reason: FinishReason | list[FinishReason] = "stop",
) -> ChatCompletion:
    """Build a chat answer of `n` choices; a list gives each choice its own text or reason."""
    answers = _answers(resp, n, finish_reason)
    return build_chat(answers, model="test_model", id_="test_id", created=0)


def create_completion(
    resp: str | list[str],
    n: int = 1,
    finish_reason: FinishReason | list[FinishReason] = "stop",
) -> Completion:
    """Build a completion of `n` choices; a list gives each choice its own text or reason."""
    answers = _answers(resp, n, finish_reason)
    return build_completion(answers, model="test_model", id_="test_id", created=0)


def _answers(
    resp: str | list[str], n: int, finish_reason: FinishReason | list[FinishReason]
) -> list[TextAnswer]:
    texts = resp if isinstance(resp, list) else [resp] * n
    reasons = finish_reason if isinstance(finish_reason, list) else [finish_reason] * n
    return [TextAnswer(texts[i], reasons[i]) for i in range(n)]


def _preset(answers: Mapping[str, Answer], key: str) -> Answer:
    if key not in answers:
        raise KeyError(
            "the scripted test server (testing) has no preset answer for this request; tests set "
            "answers with the set_ methods of ServerHarness, and `check` needs none. "
            f"The request: {key}"
        )
    return answers[key]


class ServerHarness:
    """A server with preset answers, one per conversation or prompt.

    It can be used alone or through a `ServerManager` built with `testing=True`. Attributes such as
    `tokenizer` or `get_logprobs` may be assigned. Without a preset answer, requests raise KeyError.
    """

    def __init__(self) -> None:
        self.response_map: dict[str, Any] = {}
        self.tokens_and_logprobs_map: dict[str, TokensAndLogprobs] = {}
        self.sem = AsyncSemWithAdaptiveWeight(1)
        self.eval_sem = AsyncSemWithAdaptiveWeight(1)
        self.server_healthy = True
        self.config: Any = APIServerConfig(model_name="test_model", health_check=False)

    def conv_to_dictkey(self, input_message: Sequence[Mapping[str, Any]]) -> str:
        lines = []
        for message in input_message:
            lines += [f"role:{message['role']}", f"content:{message['content']}"]
        return "\n".join(lines)

    def set_desired_response(
        self, input_message: Sequence[Mapping[str, Any]], desired_response: ChatCompletion
    ) -> None:
        self.response_map[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: Completion) -> None:
        self.response_map[input_message] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[Any],
    ) -> None:
        self.tokens_and_logprobs_map[prompt] = (
            prompt_tokens,
            output_tokens_list,
            output_logprobs_list,
            finish_reasons,
        )

    async def chat_completion(self, **kwargs: Any) -> Any:
        return _preset(self.response_map, self.conv_to_dictkey(kwargs["messages"]))

    async def completion(self, **kwargs: Any) -> Any:
        return _preset(self.response_map, kwargs["prompt"])

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        return _preset(self.tokens_and_logprobs_map, kwargs["prompt"])

    async def update_weight(self, weight: float) -> None:
        """Do nothing, since preset answers need no slots."""

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        return {} if metrics_dict is None else metrics_dict

    async def close(self) -> None:
        """Do nothing, since there is no connection."""
