"""Tokens, masks and logprobs of tracked sessions, against a forward pass of the same weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from atroposlib.api.concurrency import ConcurrencyRule
from atroposlib.api.engines import EngineArbiter, read_metrics
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ContextOverflowError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.end_to_end.conftest import MAX_MODEL_LEN, EngineWithModel

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3


@pytest.fixture
async def manager(vllm_engine: EngineWithModel) -> AsyncIterator[ServerManager]:
    config = APIServerConfig(
        base_url=vllm_engine.base_url,
        server_type="vllm",
        model_name=vllm_engine.model_name,
        tokenizer_name=str(vllm_engine.folder),
    )
    manager = ServerManager([config])
    yield manager
    await manager.close()


def forward_logprobs(model: Any, ids: Sequence[int]) -> list[list[float]]:
    """Return [L-1][V]: at position t the logprobs of token t+1, temperature 1."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1]
    rows: list[list[float]] = torch.log_softmax(logits.double(), dim=-1).tolist()
    return rows


def worst_difference(model: Any, node: SequenceNode) -> float:
    """Return the largest gap between recorded and computed logprobs of the sampled tokens."""
    expected = forward_logprobs(model, node.tokens)
    return max(
        abs(node.logprobs[t] - expected[t - 1][node.tokens[t]])
        for t, mask in enumerate(node.masked_tokens)
        if mask != IGNORE_INDEX
    )


def assert_aligned(node: SequenceNode) -> None:
    """Masks hold the id or the ignore index, and masked positions hold the masked logprob."""
    rows = zip(node.tokens, node.masked_tokens, node.logprobs, strict=True)
    for token, mask, logprob in rows:
        if mask == IGNORE_INDEX:
            assert logprob == MASKED_LOGPROB
        else:
            assert mask == token
            assert logprob <= 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_single_turn_tokens_and_raw_logprobs_equal_a_forward_pass(
    vllm_engine: EngineWithModel, manager: ServerManager, temperature: float
) -> None:
    messages = [{"role": "user", "content": "What is 3 plus 1?"}]
    prompt = vllm_engine.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    prompt_ids = vllm_engine.tokenizer.encode(prompt)

    async with manager.managed_server() as session:
        await session.chat_completion(
            messages=messages, n=3, max_tokens=24, temperature=temperature, seed=7
        )
        nodes = session.get_state()["nodes"]

    assert len(nodes) == 3
    for node in nodes:
        assert node.tokens[: len(prompt_ids)] == prompt_ids
        assert node.masked_tokens[: len(prompt_ids)] == [IGNORE_INDEX] * len(prompt_ids)
        assert node.masked_tokens[len(prompt_ids) :] == node.tokens[len(prompt_ids) :]
        assert_aligned(node)
        assert worst_difference(vllm_engine.model, node) < TOLERANCE


async def test_three_turns_stay_one_sequence_of_the_engines_own_tokens(
    vllm_engine: EngineWithModel, manager: ServerManager
) -> None:
    eos = vllm_engine.tokenizer.eos_token_id
    sent: list[list[int]] = []
    server = manager.servers[0]
    call = server._tokens_and_logprobs_completion_wrapper
    answered: list[list[int]] = []

    async def recording(**kwargs: Any) -> Any:
        answer = await call(**kwargs)
        sent.append(answer[0])
        answered.append(answer[1][0])
        return answer

    server._tokens_and_logprobs_completion_wrapper = recording
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer with a number."}]

    async with manager.managed_server() as session:
        for turn in range(3):
            messages.append({"role": "user", "content": f"What is {turn} plus 1?"})
            answer = await session.chat_completion(
                messages=messages, max_tokens=20, temperature=1.0, logit_bias={str(eos): 8.0}
            )
            reply = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": reply})
        nodes = session.get_state()["nodes"]

    assert len(nodes) == 1
    node = nodes[0]
    assert node.tokens == sent[-1] + answered[-1]
    for turn in range(2):
        assert sent[turn + 1][: len(sent[turn]) + len(answered[turn])] == (
            sent[turn] + answered[turn]
        )
    trained = [mask for mask in node.masked_tokens if mask != IGNORE_INDEX]
    assert trained == [token for ids in answered for token in ids]
    text = vllm_engine.tokenizer.decode(node.tokens)
    assert "<|im_end|><|im_end|>" not in text
    assert sum(ids[-1] == eos for ids in answered) >= 1
    assert_aligned(node)
    assert worst_difference(vllm_engine.model, node) < TOLERANCE


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "presence_penalty": 0.3},
    {"allowed_token_ids": [5, 17, 40, 41], "presence_penalty": 0.4},
    {"min_tokens": 5, "logit_bias": {"17": 30}, "stop_token_ids": [17]},
    {"bad_words": ["zz", "1"], "logit_bias": {"92": 30}},
]


@pytest.mark.parametrize("settings", PENALTIES, ids=lambda settings: "+".join(settings))
def test_penalties_and_limits_of_tokens_change_the_logits_by_their_formulas(
    vllm_engine: EngineWithModel, settings: dict[str, Any]
) -> None:
    prompt = vllm_engine.tokenizer.encode("3 plus 1 is 4, 3 plus 2 is")
    body = {"model": vllm_engine.model_name, "prompt": prompt, "max_tokens": 16, "temperature": 0,
            "ignore_eos": True, "logprobs": 0, "return_token_ids": True, **settings}  # fmt: skip

    answer = httpx.post(f"{vllm_engine.base_url}/completions", json=body, timeout=60)

    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    encode = vllm_engine.tokenizer.encode
    bad = [encode(word, add_special_tokens=False) for word in settings.get("bad_words", [])]
    known = {"held": vllm_engine.tokenizer.eos_token_id, "bad": bad, **settings}
    assert choice["token_ids"] == greedy_tokens(vllm_engine.model, prompt, 16, known)
    rows = forward_logprobs(vllm_engine.model, [*prompt, *choice["token_ids"]])[len(prompt) - 1 :]
    expected = [row[token] for row, token in zip(rows, choice["token_ids"], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def greedy_tokens(
    model: Any, prompt: Sequence[int], count: int, settings: dict[str, Any]
) -> list[int]:
    """Return the most likely tokens, one by one, under penalties written as in their definition."""
    import torch

    stops = settings.get("stop_token_ids", [])
    tokens: list[int] = []
    while len(tokens) < count and not set(tokens) & set(stops):
        with torch.no_grad():
            scores = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double().tolist()
        for token in range(len(scores)):
            if token not in settings.get("allowed_token_ids", [token]):
                scores[token] = float("-inf")
            if any([*tokens, token][-len(word) :] == word for word in settings["bad"]):
                scores[token] = float("-inf")
            if len(tokens) < settings.get("min_tokens", 0) and token in [settings["held"], *stops]:
                scores[token] = float("-inf")
            scores[token] += settings.get("logit_bias", {}).get(str(token), 0)
            if token in prompt or token in tokens:
                penalty = settings.get("repetition_penalty", 1)
                scores[token] *= penalty if scores[token] < 0 else 1 / penalty
            scores[token] -= settings.get("frequency_penalty", 0) * tokens.count(token)
            scores[token] -= settings.get("presence_penalty", 0) * (token in tokens)
        tokens.append(scores.index(max(scores)))
    return tokens


async def test_prompt_logprobs_equal_a_forward_pass(
    vllm_engine: EngineWithModel, manager: ServerManager
) -> None:
    ids = vllm_engine.tokenizer.encode("It is 12 and 1. What is 7 plus 1?")
    expected = forward_logprobs(vllm_engine.model, ids)

    chosen = await manager.get_logprobs(input_ids=ids, top_k=0)
    top = await manager.get_logprobs(input_ids=ids, top_k=3)

    assert chosen["prompt_tokens"] == ids
    assert chosen["prompt_topk_token_ids"] == [[], *[[token] for token in ids[1:]]]
    for t in range(1, len(ids)):
        assert chosen["prompt_topk_logprobs"][t][0] == pytest.approx(
            expected[t - 1][ids[t]], abs=TOLERANCE
        )
        best = max(range(len(expected[t - 1])), key=expected[t - 1].__getitem__)
        entries = dict(
            zip(top["prompt_topk_token_ids"][t], top["prompt_topk_logprobs"][t], strict=True)
        )
        assert len(entries) in (3, 4)  # the prompt's own token comes on top of the best three
        assert entries[best] == pytest.approx(expected[t - 1][best], abs=TOLERANCE)


async def test_stop_string_and_token_limit_set_the_finish_reason(
    vllm_engine: EngineWithModel, manager: ServerManager
) -> None:
    seven = vllm_engine.tokenizer.encode("7")[0]

    async with manager.managed_server() as session:
        limited = await session.completion(prompt="It is 1", max_tokens=3, ignore_eos=True)
        stopped = await session.completion(
            prompt="What is 2 plus 1?", max_tokens=9, stop=["7"], logit_bias={str(seven): 100.0}
        )
        nodes = session.get_state()["nodes"]

    assert limited.choices[0].finish_reason == "length"
    assert stopped.choices[0].finish_reason == "stop"
    assert len(nodes[0].tokens) - nodes[0].masked_tokens.count(IGNORE_INDEX) == 3
    assert nodes[1].tokens[-1] == seven


async def test_chat_without_a_limit_may_fill_the_context(manager: ServerManager) -> None:
    async with manager.managed_server() as session:
        await session.chat_completion(messages=[{"role": "user", "content": "1"}], ignore_eos=True)
        nodes = session.get_state()["nodes"]

    assert len(nodes[0].tokens) == MAX_MODEL_LEN


async def test_prompt_beyond_the_context_raises_once_and_names_the_lengths(
    vllm_engine: EngineWithModel, manager: ServerManager
) -> None:
    prompt = "What is 1 plus 1? " * MAX_MODEL_LEN

    async with manager.managed_server() as session:
        with pytest.raises(ContextOverflowError, match=str(MAX_MODEL_LEN)):
            await session.completion(prompt=prompt, max_tokens=4)

    assert manager.servers[0].attempts_list == []


async def test_chat_and_text_routes_answer_through_the_openai_client(
    manager: ServerManager,
) -> None:
    chat = await manager.chat_completion(
        messages=[{"role": "user", "content": "What is 1 plus 1?"}], n=2, max_tokens=4
    )
    text = await manager.completion(prompt="It is", n=2, max_tokens=4)

    assert [choice.index for choice in chat.choices] == [0, 1]
    assert [choice.index for choice in text.choices] == [0, 1]


async def test_engine_reports_the_metrics_that_the_service_reads(
    vllm_engine: EngineWithModel,
) -> None:
    url = vllm_engine.base_url.removesuffix("/v1")
    arbiter = EngineArbiter([url], rule=ConcurrencyRule())
    async with httpx.AsyncClient(timeout=60.0) as client:
        await arbiter.poll(client)
        reading = read_metrics((await client.get(f"{url}/metrics")).text)

    assert reading.cache_use is not None
    assert reading.preemptions is not None
    assert 0.0 <= reading.cache_use <= 1.0
    assert {sample.value for metric in arbiter.collect() for sample in metric.samples} >= {1.0, 64}
