"""SGLang over HTTP: the sampled token ids and their logprobs from its own `/generate`."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.server_handling.engine_payloads import sampling_options
from atroposlib.envs.server_handling.resolve import resolve_openai_configs
from atroposlib.envs.server_handling.retry import EngineStatusError
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs
from atroposlib.envs.server_handling.sglang_payloads import (
    parse_prompt_logprobs,
    parse_tokens,
    prompt_logprobs_body,
    tokens_body,
)
from atroposlib.envs.server_handling.token_server import TokenServer, top_k_of
from atroposlib.errors import NoTokenIdsError

__all__ = ["SGLangServer", "resolve_openai_configs"]


class SGLangServer(TokenServer):
    """An SGLang server, spoken to over HTTP only.

    Chat and text go through its OpenAI routes, tokens through `/generate`. The answers with
    tokens are `VersionedTokens`: they tell which weights sampled each completion.
    """

    @property
    def takes_structural_tags(self) -> bool:
        """Whether forms of replies are understood; they are sent under SGLang's own names."""
        return True

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt_ids = self._prompt_ids(kwargs)
        options = sampling_options(kwargs)
        answer = await self._generate(tokens_body(prompt_ids, options), kwargs)
        return parse_tokens(answer, prompt_ids, num_choices=options.get("n", 1))

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        top_k = top_k_of(kwargs)
        prompt_ids = self._prompt_ids(kwargs)
        body = prompt_logprobs_body(prompt_ids, sampling_options(kwargs), top_k=top_k)
        rows = parse_prompt_logprobs(await self._generate(body, kwargs), prompt_ids, top_k=top_k)
        return {
            "prompt_tokens": prompt_ids,
            "prompt_topk_token_ids": rows.token_ids,
            "prompt_topk_logprobs": rows.logprobs,
        }

    async def _generate(self, body: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        try:
            return await self.http.post_json("/generate", body, timeout_s=kwargs.get("timeout"))
        except EngineStatusError as error:
            if not error.is_route_missing:
                raise
            raise NoTokenIdsError(
                f"server {self.http.shown_url} has no /generate, so it is not SGLang's; check "
                f"base_url and server_type ({error})"
            ) from error
