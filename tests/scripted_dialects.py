"""Scripted engines with the routes of SGLang and of older TRL servers."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tests.scripted_engine import Fault, ScriptedEngine, logprob_of

__all__ = ["ScriptedSGLang", "ScriptedTrl"]


class ScriptedSGLang(ScriptedEngine):
    """An engine with SGLang's `/generate` in addition to the OpenAI routes.

    Attributes:
        weight_version: Version of the weights in `meta_info`.
    """

    weight_version: str | None = "default"

    def _add_routes(self, app: web.Application) -> None:
        super()._add_routes(app)
        app.router.add_post("/generate", self._guarded(self._native))

    def _native(self, body: dict[str, Any], fault: Fault | None) -> Any:
        params = dict(body["sampling_params"])
        limit = params.pop("max_new_tokens", 128)
        prompt_ids = body["input_ids"]
        if limit is None:
            limit = self.max_model_len - len(prompt_ids)
        answers = [
            self._completion(body, text, ids, reason, fault)
            for text, ids, reason in self._sample(
                prompt_ids, {**params, "max_tokens": limit}, fault
            )
        ]
        return answers if params.get("n", 1) > 1 else answers[0]

    def _completion(
        self, body: dict[str, Any], text: str, ids: list[int], reason: str, fault: Fault | None
    ) -> dict[str, Any]:
        finish = {"type": reason, "matched": ids[-1]} if reason == "stop" else {"type": reason}
        info: dict[str, Any] = {"id": "scripted", "finish_reason": finish}
        if self.weight_version is not None:
            info["weight_version"] = self.weight_version
        if body.get("return_logprob") and not (fault and fault.kind == "no_logprobs"):
            info["output_token_logprobs"] = [[logprob_of(t, j), t, None] for j, t in enumerate(ids)]
        if body.get("logprob_start_len") == 0:
            info |= self._prompt_info(body["input_ids"], body.get("top_logprobs_num", 0))
        return {"text": text, "output_ids": ids, "meta_info": info}

    def _prompt_info(self, ids: list[int], top_k: int) -> dict[str, Any]:
        """Return each token's logprob; its successors are the next most likely tokens."""
        own: list[list[Any]] = [[None, ids[0], None]]
        top: list[list[list[Any]] | None] = [None]
        for position, token_id in enumerate(ids[1:], start=1):
            logprob = logprob_of(token_id, position)
            own.append([logprob, token_id, None])
            rest = [[-2.5 - k, token_id + k, None] for k in range(1, top_k)]
            top.append([[logprob, token_id, None], *rest] if top_k else None)
        info: dict[str, Any] = {"input_token_logprobs": own}
        return info | ({"input_top_logprobs": top} if top_k else {})


class ScriptedTrl(ScriptedEngine):
    """An older TRL server: `/generate/` with token ids, no OpenAI routes.

    Attributes:
        prefix: Path prefix of all routes.
    """

    prefix = ""

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_get(f"{self.prefix}/health/", self._health)
        app.router.add_post(f"{self.prefix}/generate/", self._guarded(self._trl_generate))

    def _trl_generate(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
        rows = [
            ids
            for prompt in body["prompts"]
            for _, ids, _ in self._sample(self.tokenizer.encode(prompt), body, fault)
        ]
        return {"completion_ids": rows}
