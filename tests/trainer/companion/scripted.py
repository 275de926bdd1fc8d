"""A scripted engine for the companion server."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from fastapi.testclient import TestClient

from example_trainer.vllm_api_server import CompanionState, EngineFacts, EngineTypes, create_app


class ClientError(Exception):
    """Error of newer engines, which is not a `ValueError`."""


class Params(msgspec.Struct, dict=True):
    """Some of vLLM's sampling parameters."""

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    output_kind: str = "delta"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError("n must be at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ClientError("max_tokens must be at least 1")


class LoraRequest(NamedTuple):
    name: str
    number: int
    path: str


def logprob(value: float) -> Any:
    return SimpleNamespace(logprob=value)


class Engine:
    """Writes ` a`, ` b` per choice, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.adapters: dict[int, str] = {}
        self.calls: list[Any] = []
        self.broken: BaseException | None = None
        self.paused = False
        self.errored = False

    async def generate(self, prompt, params, request_id, *, lora_request=None):
        self.asked.append((prompt, params, request_id, lora_request))
        if self.broken is not None:
            raise self.broken
        is_text = isinstance(prompt, str)
        texts = [" a", " a b"] if params.output_kind == "cumulative" else [" a b"]
        for text in texts:
            yield SimpleNamespace(
                prompt=prompt if is_text else None,
                prompt_token_ids=[1, 2] if is_text else prompt["prompt_token_ids"],
                prompt_logprobs=None
                if params.prompt_logprobs is None
                else [None, {2: logprob(-0.5), 9: logprob(-1.0)}],
                outputs=[
                    SimpleNamespace(
                        text=text,
                        finish_reason="stop",
                        token_ids=[5, 6],
                        logprobs=[
                            {5: logprob(-0.1 - choice)},
                            {6: logprob(float("-inf")), 7: logprob(-0.2)},
                        ],
                    )
                    for choice in range(params.n)
                ],
            )

    async def add_lora(self, request: LoraRequest) -> bool:
        if request.path.endswith("broken"):
            raise RuntimeError("rank 64 is above --max-lora-rank 16")
        self.adapters[request.number] = request.name
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(number) is not None

    async def pause_generation(self, *, mode: str) -> None:
        self.calls.append(("pause", mode))
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        self.calls.append("wake_up")

    async def is_sleeping(self) -> bool:
        return self.calls[-1:] == ["sleep"]


TYPES = EngineTypes(Params, "final", "cumulative", LoraRequest, (ValueError, ClientError))


def serve(engine: Any, **facts: Any) -> TestClient:
    state = CompanionState(
        lambda: engine,
        lambda: TYPES,
        os.environ,
        EngineFacts(model="tiny", has_lora=True, **facts),
    )
    return TestClient(create_app(state), raise_server_exceptions=False)
