"""An inference engine with scripted replies that speaks HTTP on a loopback port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from tests.char_tokenizer import CharTokenizer

__all__ = ["Fault", "RecordedRequest", "ScriptedEngine", "logprob_of"]


def logprob_of(token_id: int, position: int) -> float:
    """Return the logprob that `ScriptedEngine` reports for a token at a position of its reply."""
    return -0.125 * (1 + (token_id + position) % 16)


@dataclass
class Fault:
    """A failure of one request.

    `hang` responds after `ScriptedEngine.stop`, `drop` closes the connection, `cut` closes it in
    the middle of a response, `garbage` sends a 200 that is not JSON, `fewer_choices` returns one
    choice, `no_logprobs` omits logprobs.
    """

    kind: Literal["status", "hang", "drop", "cut", "garbage", "fewer_choices", "no_logprobs"] = (
        "status"
    )
    status: int = 500
    message: str = "scripted failure"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class RecordedRequest:
    """One request the engine received."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class ScriptedEngine:
    """An OpenAI/vLLM-like HTTP server on a free loopback port; `async with` it.

    Replies come from `replies`: a list is cycled, a function receives the prompt text, None
    echoes the prompt. A reply ends with the eos token unless `max_tokens` cuts it.

    Args:
        replies: Source of the texts.
        returns_token_ids: Whether completions return ids on request, as a stock vLLM does.
        offers_completions: Whether `/v1/completions` exists; many providers offer chats only.
        messages: Makes the message of each choice of a chat from the request, such as one with
            `tool_calls` or `reasoning_content`, in place of `replies`.
        offers_generate: Whether `POST /generate` of the contract's companion server exists.
        honours_n: Whether a request returns `n` choices instead of one.
        max_model_len: Limit on prompt plus `max_tokens`; larger requests get vLLM's error.
        delay_s: Time before each response.
        model: Name in `/v1/models` and in responses.
        aliases: Further names in `/v1/models`.
    """

    def __init__(
        self,
        replies: Sequence[str] | Callable[[str], str] | None = None,
        *,
        returns_token_ids: bool = True,
        offers_completions: bool = True,
        messages: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        offers_generate: bool = False,
        honours_n: bool = True,
        max_model_len: int = 100_000,
        delay_s: float = 0.0,
        model: str = "scripted",
        aliases: Sequence[str] = ("m",),
        tokenizer: CharTokenizer | None = None,
    ) -> None:
        self.replies = replies
        self.returns_token_ids = returns_token_ids
        self.offers_completions = offers_completions
        self.messages = messages
        self.offers_generate = offers_generate
        self.honours_n = honours_n
        self.max_model_len = max_model_len
        self.delay_s = delay_s
        self.model = model
        self.aliases = aliases
        self.tokenizer = tokenizer or CharTokenizer()
        self.healthy = True
        self.requests: list[RecordedRequest] = []
        self.num_health_checks = 0
        self.num_listings = 0
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.faults: list[Fault] = []
        self._num_replies = 0
        self._stopping = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def root_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"

    def count(self, path: str) -> int:
        """Return the number of generation requests to a path."""
        return sum(request.path == path for request in self.requests)

    def fail_next(self, *faults: Fault) -> None:
        """Let the next generation requests fail, one fault each, in order."""
        self.faults.extend(faults)

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen on a port; pass the earlier port to restart the engine at the same address."""
        self._stopping.clear()
        app = web.Application()
        self._add_routes(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and all connections; hanging requests end."""
        self._stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._guarded(self._chat))
        if self.offers_completions:
            app.router.add_post("/v1/completions", self._guarded(self._completions))
        if self.offers_generate:
            app.router.add_post("/generate", self._guarded(self._generate))

    async def _health(self, _: web.Request) -> web.Response:
        self.num_health_checks += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        self.num_listings += 1
        if not self.healthy:
            return web.Response(status=503)
        cards = [self._model_card(), *({"id": alias} for alias in self.aliases)]
        return web.json_response({"object": "list", "data": cards})

    def _model_card(self) -> dict[str, Any]:
        return {"id": self.model, "max_model_len": self.max_model_len}

    def _guarded(
        self, handler: Callable[[dict[str, Any], Fault | None], Any]
    ) -> Callable[[web.Request], Any]:
        async def guarded(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.requests.append(RecordedRequest(request.path, body, dict(request.headers)))
            self.num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
            try:
                return await self._answer(request, body, handler)
            finally:
                self.num_in_flight -= 1

        return guarded

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        handler: Callable[[dict[str, Any], Fault | None], Any],
    ) -> web.StreamResponse:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and fault.kind == "hang":
            await self._stopping.wait()
        if fault is not None and fault.kind == "drop" and request.transport is not None:
            request.transport.close()
            return web.Response()
        if fault is not None and fault.kind == "cut":
            return await _cut_short(request)
        if fault is not None and fault.kind == "garbage":
            return web.Response(text="<html>not json</html>", content_type="application/json")
        if fault is not None and fault.kind == "status":
            return _refusal(fault.status, fault.message, fault.headers)
        try:
            return web.json_response(handler(body, fault))
        except _BadRequest as error:
            return _refusal(400, str(error), {})

    def _chat(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
        if self.messages is not None:
            made = [{"role": "assistant", **self.messages(body)} for _ in range(body.get("n") or 1)]
            choices = [
                {
                    "index": i,
                    "message": message,
                    "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
                }
                for i, message in enumerate(made)
            ]
            return self._envelope("chat.completion", choices)
        prompt_ids = self.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True
        )
        if not (body.get("max_completion_tokens") or body.get("max_tokens")):
            # A chat without a limit may fill the context; a completion has 16 tokens.
            body = {**body, "max_tokens": max(1, self.max_model_len - len(prompt_ids))}
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
                "logprobs": None,
            }
            for i, (text, _, finish_reason) in enumerate(self._sample(prompt_ids, body, fault))
        ]
        return self._envelope("chat.completion", choices)

    def _completions(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
        prompt_ids = self._prompt_ids(body["prompt"])
        wants_ids = self.returns_token_ids and body.get("return_token_ids")
        choices = []
        for i, (text, ids, finish_reason) in enumerate(self._sample(prompt_ids, body, fault)):
            choice: dict[str, Any] = {"index": i, "text": text, "finish_reason": finish_reason}
            choice["logprobs"] = None
            if body.get("logprobs") is not None and not (fault and fault.kind == "no_logprobs"):
                choice["logprobs"] = {
                    "tokens": [self.tokenizer.decode([t]) for t in ids],
                    "token_logprobs": [logprob_of(t, j) for j, t in enumerate(ids)],
                    "top_logprobs": None,
                    "text_offset": [],
                }
            if wants_ids:
                choice |= {"token_ids": ids, "prompt_token_ids": prompt_ids}
            if body.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(
                    prompt_ids, body["prompt_logprobs"]
                )
            choices.append(choice)
        return self._envelope("text_completion", choices)

    def _generate(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
        prompt = body["prompt"]
        prompt_ids = self._prompt_ids(
            prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        )
        sampled = self._sample(prompt_ids, body, fault)
        answer: dict[str, Any] = {
            "text": [text for text, _, _ in sampled],
            "prompt": self.tokenizer.decode(prompt_ids),
            "finish_reasons": [finish_reason for _, _, finish_reason in sampled],
        }
        if body.get("logprobs") is not None and not (fault and fault.kind == "no_logprobs"):
            answer |= {
                "logprobs": [
                    [[{str(t): logprob_of(t, j)}] for j, t in enumerate(ids)]
                    for _, ids, _ in sampled
                ],
                "prompt_token_ids": prompt_ids,
                "token_ids": [ids for _, ids, _ in sampled],
            }
        if body.get("prompt_logprobs") is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(prompt_ids, body["prompt_logprobs"])
        return answer

    def _prompt_logprobs(self, ids: Sequence[int], top_k: int) -> list[dict[str, Any] | None]:
        """Return None for the first position, else the token and its `top_k - 1` successors."""
        rows: list[dict[str, Any] | None] = [None]
        for position, token_id in enumerate(ids[1:], start=1):
            entries = {str(token_id + k): {"logprob": -0.5 - k} for k in range(max(1, top_k))}
            entries[str(token_id)] = {"logprob": logprob_of(token_id, position)}
            rows.append(entries)
        return rows

    def _prompt_ids(self, prompt: Any) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _sample(
        self, prompt_ids: list[int], body: dict[str, Any], fault: Fault | None
    ) -> list[tuple[str, list[int], str]]:
        """Return (text, ids, finish reason) per choice."""
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if len(prompt_ids) + max_tokens > self.max_model_len:
            raise _BadRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {max_tokens} output tokens and your prompt contains "
                f"{len(prompt_ids)} input tokens."
            )
        num_choices = body.get("n") or 1
        if not self.honours_n or (fault and fault.kind == "fewer_choices"):
            num_choices = 1
        prompt_text = self.tokenizer.decode(prompt_ids, skip_special_tokens=True)
        sampled = []
        for _ in range(num_choices):
            ids = self.tokenizer.encode(self._next_reply(prompt_text), add_special_tokens=False)
            ids.append(self.tokenizer.eos_token_id)
            finish_reason = "stop" if len(ids) <= max_tokens else "length"
            ids = ids[:max_tokens]
            sampled.append((self.tokenizer.decode(ids, True), ids, finish_reason))
        return sampled

    def _next_reply(self, prompt_text: str) -> str:
        if self.replies is None:
            return prompt_text
        if callable(self.replies):
            return self.replies(prompt_text)
        reply = self.replies[self._num_replies % len(self.replies)]
        self._num_replies += 1
        return reply

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"scripted-{len(self.requests)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": len(choices),
                "total_tokens": 2 + len(choices),
            },
        }


class _BadRequest(Exception):
    pass


async def _cut_short(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "4096"})
    response.content_type = "application/json"
    await response.prepare(request)
    await response.write(b'{"choices": [{"index": 0, "text": "hal')
    if request.transport is not None:
        request.transport.close()
    return response


def _refusal(status: int, message: str, headers: Mapping[str, str]) -> web.Response:
    error = {"error": {"message": message, "type": "scripted", "code": status}}
    return web.json_response(error, status=status, headers=headers)
