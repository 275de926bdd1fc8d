"""TRL's vLLM server over HTTP: the `/generate/` route of older versions, or vLLM's own server.

Older versions of `trl vllm-serve` return token ids on a route of their own; newer ones start vLLM's
server. The first request detects which one is running, and the result is kept.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import ClientResponse, ClientTimeout

from atroposlib.envs.server_handling.chat_rendering import TextAnswer, build_chat, build_completion
from atroposlib.envs.server_handling.engine_http import body_of, decode_answer, list_of
from atroposlib.envs.server_handling.openai_compatible import check_count, sampling_options
from atroposlib.envs.server_handling.retry import EngineStatusError
from atroposlib.envs.server_handling.server_baseline import (
    APIServerConfig,
    ReasoningConfig,
    SharedSearch,
    TokensAndLogprobs,
)
from atroposlib.envs.server_handling.vllm_server import AutoTokenizer, VLLMServer
from atroposlib.errors import ConfigError, InferenceError, NoTokenIdsError
from atroposlib.scored_data import are_token_ids
from atroposlib.utils.text import without_secrets
from atroposlib.utils.tokenizers.content_parts import in_readable_form
from atroposlib.utils.tracing import trace_headers

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["AutoTokenizer", "TrlVllmServer", "aiohttp"]

logger = logging.getLogger(__name__)

_DEFAULTS: Mapping[str, Any] = {
    "n": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 1024,
}
"""Every option of `/generate/` in addition to the prompts."""


class TrlVllmServer(VLLMServer):
    """A server started with `trl vllm-serve`, of any version.

    The older route returns no logprobs, so it offers chat and text only. vLLM's routes offer
    everything a `VLLMServer` does.
    """

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        super().__init__(config, reasoning_config)
        # TRL users give the URL without /v1, which vLLM's OpenAI routes need.
        self.openai.base_url = f"{self.http.root_url}/v1"
        # Users may replace the class of either module.
        self._from_pretrained = AutoTokenizer.from_pretrained
        self._headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._is_searched = False
        self._generate_url: str | None = None
        self._generate_search: SharedSearch[str | None] = SharedSearch()
        self._ignored_options: set[str] = set()

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        url = await self._find_generate_once()
        if url is None:
            return await super()._chat_completion_wrapper(**kwargs)
        messages = in_readable_form(self.tokenizer, kwargs.pop("messages"))
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        answers = await self._generate(url, prompt, kwargs)
        return build_chat(answers, **self._answer_fields())

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        url = await self._find_generate_once()
        if url is None:
            return await super()._completion_wrapper(**kwargs)
        answers = await self._generate(url, kwargs.pop("prompt"), kwargs)
        return build_completion(answers, **self._answer_fields())

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        await self._require_vllm_routes("logprobs")
        return await super()._tokens_and_logprobs_completion_wrapper(**kwargs)

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        await self._require_vllm_routes("prompt logprobs")
        return await super()._get_logprobs_wrapper(**kwargs)

    async def _require_vllm_routes(self, wanted: str) -> None:
        url = await self._find_generate_once()
        if url is not None:
            raise NoTokenIdsError(
                f"{without_secrets(url)} returns no {wanted}; serve the model with a trl that "
                "starts vLLM's own server, or with vLLM and server_type vllm"
            )

    def _answer_fields(self) -> dict[str, Any]:
        return {
            "model": self.config.model_name,
            "id_": str(uuid.uuid4()),
            "created": int(time.time()),
        }

    async def _generate(self, url: str, prompt: str, kwargs: dict[str, Any]) -> list[TextAnswer]:
        body = self._body(prompt, kwargs)
        ids = await self._post(url, body, timeout_s=kwargs.get("timeout"))
        if not isinstance(ids, Mapping):
            raise InferenceError("the engine's answer is not a JSON object")
        rows = list_of(ids, "completion_ids")
        check_count(rows, body["n"])
        if not all(map(are_token_ids, rows)):
            raise InferenceError("the engine's completion_ids are not integers from 0")
        return [self._answer_of(row) for row in rows]

    def _body(self, prompt: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        options = sampling_options(kwargs)
        given = {
            name: value
            for name, value in options.items()
            if name in _DEFAULTS and value is not None
        }
        ignored = options.keys() - _DEFAULTS.keys() - self._ignored_options
        if ignored:
            self._ignored_options |= ignored
            logger.warning("TRL's /generate/ ignores unsupported %s", ", ".join(sorted(ignored)))
        return {"prompts": [prompt], **_DEFAULTS, **given}

    def _answer_of(self, ids: list[int]) -> TextAnswer:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return TextAnswer(text, "stop" if self.tokenizer.eos_token_id in ids else "length")

    async def _post(self, url: str, body: dict[str, Any], *, timeout_s: float | None) -> Any:
        timeout = ClientTimeout(total=timeout_s or self.config.timeout)
        headers = {**self._headers, **trace_headers()}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers, timeout=timeout) as response,
        ):
            if isinstance(response, ClientResponse):
                raw = await body_of(response)
                return decode_answer(response, raw, api_key=self.config.api_key)
            return await response.json()  # of a replaced session, such as in tests

    async def _find_generate_once(self) -> str | None:
        """Return the URL of TRL's own route; None if vLLM's server runs."""
        if not self._is_searched:
            self._generate_url = await self._generate_search.result(self._find_generate)
            self._is_searched = True
        return self._generate_url

    async def _find_generate(self) -> str | None:
        written = (self.config.known_base_url or self.http.root_url).rstrip("/")
        body = {"prompts": ["a"], **_DEFAULTS, "max_tokens": 1}
        for base_url in dict.fromkeys([written, self.http.root_url]):
            url = f"{base_url}/generate/"
            try:
                await self._post(url, body, timeout_s=None)
                return url
            except EngineStatusError as error:
                if not error.is_route_missing:
                    raise
        try:
            await self.http.get_json("/v1/models")
        except EngineStatusError as error:
            if not error.is_route_missing:
                raise
            raise ConfigError(
                f"server {self.http.shown_url} has neither TRL's /generate/ nor vLLM's "
                "/v1/models; check base_url"
            ) from error
        return None
