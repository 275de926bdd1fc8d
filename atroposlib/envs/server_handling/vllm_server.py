"""vLLM over HTTP: the sampled token ids and their logprobs, from a stock server or a companion."""

from __future__ import annotations

from typing import Any, Literal

import aiohttp

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.engine_payloads import sampling_options
from atroposlib.envs.server_handling.loop_turns import SEND_COST_S
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.resolve import resolve_openai_configs
from atroposlib.envs.server_handling.retry import EngineStatusError
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs
from atroposlib.envs.server_handling.shared_search import SharedSearch
from atroposlib.envs.server_handling.token_server import TokenServer, top_k_of
from atroposlib.envs.server_handling.vllm_payloads import (
    COMPLETIONS_DECODER,
    completions_body,
    generate_body,
    normalize_topk_entry,
    parse_completions,
    parse_generate,
    prompt_rows,
)
from atroposlib.errors import ConfigError, NoTokenIdsError

__all__ = ["VLLMServer", "aiohttp", "resolve_openai_configs"]  # and AutoTokenizer, see below

TokenRoute = Literal["/v1/completions", "/generate"]

_REQUEST_NOT_UNDERSTOOD = frozenset({400, 404, 405, 422, 501})


def __getattr__(name: str) -> Any:
    if name == "AutoTokenizer":  # importing transformers takes seconds
        from transformers import AutoTokenizer

        return AutoTokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class VLLMServer(TokenServer):
    """A vLLM server, spoken to over HTTP only.

    Which route gives tokens is found out once, at the first request for tokens, and remembered.

    The logprobs are those of the engine's `--logprobs-mode`: by default *raw*, the log-softmax of
    the model's logits before temperature, top-p and penalties. At temperature 1 without
    truncation they are the sampling distribution's own.
    """

    lists_every_model = True

    _token_route: TokenRoute | None = None
    _context_length: int | None = None

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        super().__init__(config, reasoning_config)
        self._route_search: SharedSearch[TokenRoute] = SharedSearch()

    _normalize_topk_entry = staticmethod(normalize_topk_entry)

    @property
    def takes_structural_tags(self) -> bool:
        """Whether the route for tokens is vLLM's own, as it is until another one was found."""
        return self._token_route != "/generate"

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt_ids = self._prompt_ids(kwargs)
        options = sampling_options(kwargs)
        answer = await self._post_tokens(prompt_ids, options, kwargs.get("timeout"))
        parse = parse_generate if self._token_route == "/generate" else parse_completions
        return parse(answer, prompt_ids, num_choices=options.get("n", 1))

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        top_k = top_k_of(kwargs)
        prompt_ids = self._prompt_ids(kwargs)
        options = {
            "max_tokens": 1,
            **sampling_options(kwargs),
            "prompt_logprobs": top_k,
            "n": 1,
            "temperature": 0.0,
            "top_p": 1.0,
        }
        answer = await self._post_tokens(prompt_ids, options, kwargs.get("timeout"))
        holder = answer if self._token_route == "/generate" else answer["choices"][0]
        rows = [
            normalize_topk_entry(entry)
            for entry in prompt_rows(holder.get("prompt_logprobs"), len(prompt_ids))
        ]
        return {
            "prompt_tokens": prompt_ids,
            "prompt_topk_token_ids": [ids for ids, _ in rows],
            "prompt_topk_logprobs": [logprobs for _, logprobs in rows],
        }

    async def _post_tokens(
        self, prompt_ids: list[int], options: dict[str, Any], timeout_s: float | None
    ) -> Any:
        if self._token_route is None:
            search = self._route_search
            self._token_route = await search.result(lambda: self._find_route(prompt_ids[:1]))
            await self._turns.turn(SEND_COST_S)  # all who waited for it go on at the same moment
        if self._token_route == "/generate":
            body = generate_body(prompt_ids, options)
            return await self.http.post_json("/generate", body, timeout_s=timeout_s)
        options = await self._with_limit(options, num_prompt_ids=len(prompt_ids))
        body = completions_body(self.config.model_name, prompt_ids, options)
        return await self.http.post_json(
            "/v1/completions", body, timeout_s=timeout_s, decoder=COMPLETIONS_DECODER
        )

    async def _with_limit(self, options: dict[str, Any], *, num_prompt_ids: int) -> dict[str, Any]:
        """Write "as long as the context allows" as a number: the engine reads null as 16."""
        if "max_tokens" not in options or options["max_tokens"] is not None:
            return options
        if self._context_length is None:
            listing = await self.http.get_json("/v1/models")
            lengths = {model["id"]: model.get("max_model_len") for model in listing["data"]}
            self._context_length = lengths.get(self.config.model_name)
        if self._context_length is None:
            raise ConfigError(
                f"server {self.http.shown_url} does not tell the context length of model "
                f"{self.config.model_name!r}; give max_tokens"
            )
        # At least one, so that a prompt that is too long is refused as such.
        return {**options, "max_tokens": max(1, self._context_length - num_prompt_ids)}

    async def _find_route(self, some_ids: list[int]) -> TokenRoute:
        options = {"max_tokens": 1}
        body = completions_body(self.config.model_name, some_ids, options)
        try:
            answer = await self.http.post_json("/v1/completions", body)
            if answer["choices"][0].get("token_ids") is not None:
                return "/v1/completions"
            reason = "/v1/completions returns no token_ids"
        except EngineStatusError as error:
            if error.status not in _REQUEST_NOT_UNDERSTOOD:
                raise
            reason = str(error)
        try:
            await self.http.post_json("/generate", generate_body(some_ids, options))
        except EngineStatusError as error:
            if not error.is_route_missing:
                raise
            raise NoTokenIdsError(
                f"server {self.http.shown_url} gives no token ids: {reason}; and it has no "
                "/generate. Check base_url (--openai.base_url) and model_name, or serve the model "
                "with vLLM 0.10.2 or newer"
            ) from error
        return "/generate"
