"""What every engine that gives token ids needs: the served model's tokenizer and prompt ids."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.server_handling.engine_payloads import drop_double_bos
from atroposlib.envs.server_handling.openai_compatible import OpenAICompatibleServer
from atroposlib.envs.server_handling.tokenizer_loading import load_tokenizer

__all__ = ["TokenServer", "top_k_of"]


class TokenServer(OpenAICompatibleServer):
    """A server that is sent token ids and answers token ids."""

    _tokenizer: Any = None
    _compares_for_all = False

    @property
    def tokenizer(self) -> Any:
        """The served model's tokenizer, loaded at first use; may be assigned."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value

    def expect_tokenizer(self, tokenizer: Any, *, name: str, is_for_all: bool = False) -> None:
        """Compare the engine's ids with a tokenizer's at the first request; see `APIServer`."""
        self.identity.expect_tokenizer(tokenizer, name=name)
        self._compares_for_all = is_for_all

    async def _check_identity(self, *, gives_tokens: bool) -> None:
        await super()._check_identity(gives_tokens=gives_tokens)
        if gives_tokens or self._compares_for_all:
            await self.identity.check_tokenizer()

    def _load_tokenizer(self) -> Any:
        return load_tokenizer(self.config)

    def _prompt_ids(self, kwargs: dict[str, Any]) -> list[int]:
        """Return the ids to send: `input_ids` as they are, else the encoded `prompt`."""
        input_ids = kwargs.get("input_ids")
        if input_ids:
            return list(input_ids)
        assert kwargs.get("prompt"), "the request has neither prompt nor input_ids"
        ids = self.tokenizer.encode(kwargs["prompt"])
        return drop_double_bos(ids, self.tokenizer.bos_token_id)


def top_k_of(kwargs: dict[str, Any]) -> int:
    """Take `top_k` (or `top_logprobs`, else 1) of a request for prompt logprobs out of `kwargs`.

    0 asks for the prompt's own tokens only.
    """
    top_k = kwargs.pop("top_k", None)
    top_logprobs = kwargs.pop("top_logprobs", None)
    if top_k is None:
        top_k = 1 if top_logprobs is None else top_logprobs
    return max(0, int(top_k))
