from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from atroposlib.envs.server_handling import vllm_server
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.engine_http import root_of
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.retry import RetriesExhaustedError
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError, ContextOverflowError
from tests.fakes import CharTokenizer, Fault, ScriptedEngine, logprob_of

MakeServer = Callable[..., VLLMServer]

# `hi` with bos, and the reply `ok` with its eos.
PROMPT_IDS = [1, 104, 105]
REPLY_IDS = [111, 107, 2]
REPLY_LOGPROBS = [logprob_of(token, t) for t, token in enumerate(REPLY_IDS)]


@pytest.mark.parametrize(
    ("returns_token_ids", "offers_generate"), [(True, False), (True, True), (False, True)]
)
async def test_tokens_are_the_engines_whatever_route_it_offers(
    returns_token_ids: bool, offers_generate: bool, make_server: MakeServer
) -> None:
    async with ScriptedEngine(
        ["ok"], returns_token_ids=returns_token_ids, offers_generate=offers_generate
    ) as engine:
        server = make_server(engine, VLLMServer)

        answer = await server.tokens_and_logprobs_completion(prompt="hi", n=2, max_tokens=9)

        assert answer == (PROMPT_IDS, [REPLY_IDS] * 2, [REPLY_LOGPROBS] * 2, ["stop"] * 2)


async def test_route_is_looked_for_once_by_many_requests(make_server: MakeServer) -> None:
    async with ScriptedEngine(["ok"], returns_token_ids=False, offers_generate=True) as engine:
        server = make_server(engine, VLLMServer)

        await asyncio.gather(
            *(server.tokens_and_logprobs_completion(prompt="hi") for _ in range(10))
        )

        assert engine.count("/v1/completions") == 1
        assert engine.count("/generate") == 11


async def test_search_for_the_route_survives_a_passing_fault(make_server: MakeServer) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        server = make_server(engine, VLLMServer)
        engine.fail_next(Fault(status=500))

        _, ids, _, _ = await server.tokens_and_logprobs_completion(prompt="hi")

        assert ids == [REPLY_IDS]


async def test_server_without_any_token_route_is_refused_with_the_remedy(
    make_server: MakeServer,
) -> None:
    async with ScriptedEngine(["ok"], returns_token_ids=False) as engine:
        server = make_server(engine, VLLMServer)

        with pytest.raises(ConfigError, match="no token_ids; and it has no /generate"):
            await server.tokens_and_logprobs_completion(prompt="hi")

        assert engine.count("/v1/completions") == 1


async def test_input_ids_are_sent_as_they_are(make_server: MakeServer) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        server = make_server(engine, VLLMServer)

        prompt_ids, *_ = await server.tokens_and_logprobs_completion(
            prompt="ignored", input_ids=[9, 9, 8], stop=["x"], top_p=0.5, max_new_tokens=4
        )

        body = engine.requests[-1].body
        assert prompt_ids == body["prompt"] == [9, 9, 8]
        assert (body["stop"], body["top_p"], body["max_tokens"]) == (["x"], 0.5, 4)


async def test_unlimited_request_asks_for_what_the_context_leaves(make_server: MakeServer) -> None:
    async with ScriptedEngine(["ok"], max_model_len=50) as engine:
        server = make_server(engine, VLLMServer)

        for prompt in ("hi", "x" * 20):
            await server.tokens_and_logprobs_completion(prompt=prompt, max_tokens=-1)

        limits = [request.body["max_tokens"] for request in engine.requests[1:]]
        assert limits == [50 - 3, 50 - 21]


@pytest.mark.parametrize(("restarted_with", "max_age_s"), [(30, 3600.0), (80, -1.0)])
async def test_unlimited_request_follows_an_engine_restarted_with_another_context(
    restarted_with: int, max_age_s: float, make_server: MakeServer
) -> None:
    async with ScriptedEngine(["ok"], max_model_len=50) as engine:
        server = make_server(engine, VLLMServer)
        await server.tokens_and_logprobs_completion(prompt="hi", max_tokens=None)

        engine.max_model_len = restarted_with
        server.context_max_age_s = max_age_s
        answer = await server.tokens_and_logprobs_completion(prompt="hi", max_tokens=None)

        assert answer[1] == [REPLY_IDS]
        assert engine.requests[-1].body["max_tokens"] == restarted_with - 3


async def test_prompt_that_is_too_long_for_an_unlimited_request_is_refused_once(
    make_server: MakeServer,
) -> None:
    async with ScriptedEngine(["ok"], max_model_len=10) as engine:
        server = make_server(engine, VLLMServer)

        with pytest.raises(ContextOverflowError):
            await server.tokens_and_logprobs_completion(prompt="x" * 20, max_tokens=None)

        assert len(engine.requests) == 2  # one of them looks for the route


async def test_unlimited_requests_at_the_same_time_ask_for_the_context_once(
    make_server: MakeServer,
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        server = make_server(engine, VLLMServer)
        await server.tokens_and_logprobs_completion(prompt="hi")
        num_listings = engine.num_listings

        await asyncio.gather(
            *(
                server.tokens_and_logprobs_completion(prompt="hi", max_tokens=None)
                for _ in range(10)
            )
        )

        assert engine.num_listings == num_listings + 1


async def test_unlimited_request_for_an_adapter_asks_for_the_context_of_its_base_model(
    make_server: MakeServer,
) -> None:
    class AdapterEngine(ScriptedEngine):
        async def _models(self, _: web.Request) -> web.Response:
            base = {"id": "base", "max_model_len": 50, "parent": None}
            adapter = {"id": self.model, "root": "/adapter", "parent": "base"}  # as vLLM lists it
            return web.json_response({"object": "list", "data": [base, adapter]})

    async with AdapterEngine(["ok"]) as engine:
        server = make_server(engine, VLLMServer)

        await server.tokens_and_logprobs_completion(prompt="hi", max_tokens=None)

        assert engine.requests[-1].body["max_tokens"] == 50 - 3


async def test_unlimited_request_needs_a_known_context(make_server: MakeServer) -> None:
    class SilentEngine(ScriptedEngine):
        def _model_card(self) -> dict[str, Any]:
            return {"id": self.model}

    async with SilentEngine(["ok"]) as engine:
        server = make_server(engine, VLLMServer)

        with pytest.raises(ConfigError, match="give max_tokens"):
            await server.tokens_and_logprobs_completion(prompt="hi", max_tokens=None)


@pytest.mark.parametrize("prompt", [{"prompt": "<s>hi"}, {"input_ids": [1, *PROMPT_IDS]}])
async def test_prompt_with_its_own_bos_gets_no_second_one(
    prompt: dict[str, Any], make_server: MakeServer
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        server = make_server(engine, VLLMServer)

        prompt_ids, *_ = await server.tokens_and_logprobs_completion(**prompt)

        assert engine.requests[-1].body["prompt"] == prompt_ids == PROMPT_IDS


async def test_prompt_ids_may_be_an_array(engine: ScriptedEngine, make_server: MakeServer) -> None:
    server = make_server(engine, VLLMServer)

    prompt_ids, *_ = await server.tokens_and_logprobs_completion(input_ids=np.array(PROMPT_IDS))

    assert prompt_ids == PROMPT_IDS


def test_tokenizer_class_may_be_replaced_during_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tokenizers:
        @staticmethod
        def from_pretrained(name: str) -> CharTokenizer:
            assert name == "a-name"
            return CharTokenizer()

    with monkeypatch.context() as patched:
        patched.setattr(vllm_server, "AutoTokenizer", Tokenizers)
        server = VLLMServer(
            APIServerConfig(base_url="http://h/v1", model_name="m", tokenizer_name="a-name")
        )

    assert isinstance(server.tokenizer, CharTokenizer)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"logprobs": [None]},
        {"logprobs": [[{}]]},
        {"logprobs": [[{"a": -1.0}]]},
        {"logprobs": [[{"5": "a"}]]},
        {"logprobs": [[{"5": -1.0}]], "token_ids": [5]},
        {"logprobs": [[{"-5": -1.0}]]},
        {"logprobs": [[{"5": float("nan")}]]},
        {"logprobs": [[{"5": -1.0}]], "prompt_token_ids": [-1]},
    ],
)
async def test_malformed_answer_of_generate_is_retried(
    answer: Any, make_server: MakeServer
) -> None:
    class FaultyEngine(ScriptedEngine):
        is_faulty = False

        def _generate(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
            made = super()._generate(body, fault)
            return answer if self.is_faulty else made

    engine = FaultyEngine(["ok"], returns_token_ids=False, offers_generate=True)
    async with engine:
        server = make_server(engine, VLLMServer)
        server.max_backoff_s = 0.0
        await server.tokens_and_logprobs_completion(prompt="hi")

        engine.is_faulty = True
        with pytest.raises(RetriesExhaustedError, match="last error was InferenceError"):
            await server.tokens_and_logprobs_completion(prompt="hi")


@pytest.mark.parametrize(
    "answer", [None, {"choices": [None]}, {"choices": []}, {"error": "overloaded"}]
)
async def test_malformed_answer_to_the_search_for_the_route_is_retried(
    answer: Any, make_server: MakeServer
) -> None:
    class FaultyEngine(ScriptedEngine):
        num_faults = 2

        def _completions(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
            self.num_faults -= 1
            return answer if self.num_faults >= 0 else super()._completions(body, fault)

    async with FaultyEngine(["ok"]) as engine:
        server = make_server(engine, VLLMServer)
        server.max_backoff_s = 0.0

        _, ids, _, _ = await server.tokens_and_logprobs_completion(prompt="hi")

        assert ids == [REPLY_IDS]


async def test_request_without_prompt_is_a_programming_error(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    with pytest.raises(AssertionError, match="neither prompt nor input_ids"):
        await make_server(engine, VLLMServer).tokens_and_logprobs_completion(max_tokens=1)


@pytest.mark.parametrize("offers_generate", [False, True])
@pytest.mark.parametrize(
    ("request_kwargs", "width"),
    [({"top_k": 0}, 1), ({}, 1), ({"top_k": 3}, 3), ({"top_logprobs": 2}, 2)],
)
async def test_prompt_logprobs_come_per_position_with_the_width_asked_for(
    offers_generate: bool, request_kwargs: dict[str, int], width: int, make_server: MakeServer
) -> None:
    async with ScriptedEngine(
        ["ok"], returns_token_ids=not offers_generate, offers_generate=offers_generate
    ) as engine:
        server = make_server(engine, VLLMServer)

        rows = await server.get_logprobs(input_ids=[5, 6, 7], **request_kwargs)

        assert rows["prompt_tokens"] == [5, 6, 7]
        assert [len(ids) for ids in rows["prompt_topk_token_ids"]] == [0, width, width]
        assert [len(values) for values in rows["prompt_topk_logprobs"]] == [0, width, width]
        assert rows["prompt_topk_token_ids"][1][0] == 6
        assert rows["prompt_topk_logprobs"][1][0] == logprob_of(6, 1)
        body = engine.requests[-1].body
        assert (body["n"], body["temperature"], body["max_tokens"]) == (1, 0.0, 1)


async def test_text_prompts_for_logprobs_are_encoded(make_server: MakeServer) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        rows = await make_server(engine, VLLMServer).get_logprobs(prompt="<s>hi", top_k=1)

        assert rows["prompt_tokens"] == PROMPT_IDS


@pytest.mark.parametrize(
    ("base_url", "root"),
    [
        ("http://host:1/v1", "http://host:1"),
        ("http://host:1/v1/", "http://host:1"),
        ("http://host:1", "http://host:1"),
        ("http://v1.host/v1x", "http://v1.host/v1x"),
        ("http://host/v1/models/v1", "http://host/v1/models"),
    ],
)
def test_only_a_trailing_v1_is_taken_off(base_url: str, root: str) -> None:
    assert root_of(base_url) == root


async def test_vllm_is_not_an_openai_server(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    assert not isinstance(make_server(engine, VLLMServer), OpenAIServer)


def test_tokenizer_is_loaded_by_name_when_first_needed(
    engine: ScriptedEngine, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def from_pretrained(name: str) -> CharTokenizer:
        loaded.append(name)
        return CharTokenizer()

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    server = make_server(engine, VLLMServer, tokenizer_name="org/tokenizer")
    server._tokenizer = None
    assert loaded == []

    assert server.tokenizer is server.tokenizer

    assert loaded == ["org/tokenizer"]
