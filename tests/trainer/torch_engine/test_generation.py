"""Tokens and logprobs of the torch engine against the same weights in transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.torch_engine.conftest import LocalEngine, serve_locally

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def processed_engine(model_folder: Path) -> Iterator[LocalEngine]:
    with serve_locally(model_folder, logprobs_mode="processed_logprobs", max_num_seqs=4) as local:
        yield local


def logits_of_completion(model: Any, choice: Any) -> Any:
    """Return (C, V): the logits that each token of a choice was sampled from."""
    import torch

    prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    return logits[len(prompt) - 1 : -1]


def worst_gap(logits: Any, choice: Any) -> float:
    """Return the largest difference to the logprobs that `logits` (C, V) give."""
    import torch

    logprobs = torch.log_softmax(logits, dim=-1)
    found = choice["logprobs"]["token_logprobs"]
    rows = enumerate(zip(choice["token_ids"], found, strict=True))
    return max(abs(float(logprobs[t, token]) - value) for t, (token, value) in rows)


def random_prompts(count: int) -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(3, 290) for _ in range(source.randint(1, 90))] for _ in range(count)]


def test_greedy_tokens_are_those_of_generate(
    torch_engine: LocalEngine, model: Any, tokenizer: Any
) -> None:
    import torch

    ids = tokenizer.encode("What is 7 plus 1?")
    expected = model.generate(
        torch.tensor([ids]), max_new_tokens=40, do_sample=False, pad_token_id=0
    )[0, len(ids) :].tolist()

    answer = torch_engine.complete(ids, max_tokens=40, temperature=0)

    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_raw_logprobs_are_those_of_a_forward_pass(
    torch_engine: LocalEngine, model: Any, temperature: float
) -> None:
    prompts = random_prompts(3)

    answer = torch_engine.complete(
        prompts, n=3, max_tokens=30, temperature=temperature, ignore_eos=True
    )

    assert [choice["index"] for choice in answer["choices"]] == list(range(9))
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 30
        assert choice["prompt_token_ids"] == prompts[choice["index"] // 3]
        assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 9


def test_processed_logprobs_are_after_temperature_and_filters(
    processed_engine: LocalEngine, model: Any
) -> None:
    from transformers import (  # fmt: skip
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    options = {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02}
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(40), TopPLogitsWarper(0.8)]
    )

    answer = processed_engine.complete([5, 6, 7], n=4, max_tokens=20, **options)

    for choice in answer["choices"]:
        scores = warpers(None, logits_of_completion(model, choice).float())
        scores = MinPLogitsWarper(0.02)(None, scores).double()
        assert worst_gap(scores, choice) < TOLERANCE


def test_frequencies_of_sampled_tokens_are_their_probabilities(
    torch_engine: LocalEngine, model: Any
) -> None:
    import torch

    answer = torch_engine.complete([9, 30, 31], n=512, max_tokens=1, seed=1)
    with torch.no_grad():
        probs = model(torch.tensor([[9, 30, 31]])).logits[0, -1].softmax(-1)

    drawn = [choice["token_ids"][0] for choice in answer["choices"]]
    for token in probs.topk(3).indices.tolist():
        expected = float(probs[token])
        deviation = (expected * (1 - expected) / 512) ** 0.5
        assert abs(drawn.count(token) / 512 - expected) < 5 * deviation


def test_requests_at_the_same_time_have_the_tokens_of_each_alone(
    torch_engine: LocalEngine,
) -> None:
    prompts = random_prompts(32)

    def complete(number: int) -> Any:
        answer = torch_engine.complete(
            prompts[number], max_tokens=5 + number, seed=number, temperature=1.0, top_p=0.95
        )
        return answer["choices"][0]

    alone = [complete(number) for number in range(32)]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(complete, range(32)))

    for one, other in zip(alone, together, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(
            other["logprobs"]["token_logprobs"], abs=TOLERANCE
        )


def test_negative_seeds_are_different_ones_and_minus_one_is_none(
    torch_engine: LocalEngine,
) -> None:
    def tokens(seed: int, **options: Any) -> list[list[int]]:
        answer = torch_engine.complete(
            [9, 30], seed=seed, max_tokens=12, ignore_eos=True, **options
        )
        return [choice["token_ids"] for choice in answer["choices"]]

    several = tokens(-5, n=11)

    assert several == tokens(-5, n=11)
    assert len(set(map(tuple, several))) == 11
    assert tokens(-1) != tokens(-1)


def test_completions_that_begin_alike_are_computed_once_and_have_the_tokens_of_each_alone(
    torch_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from example_trainer.torch_engine.batching import PackedBatch

    options = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    options["logit_bias"] = {"40": 100, "41": 98}  # ends and splits at random positions
    alone = [
        torch_engine.complete([5, 6, 7], seed=seed, **options)["choices"][0] for seed in range(12)
    ]
    computed: list[int] = []

    def record(packed: Any, *rest: Any) -> PackedBatch:
        computed.append(len(packed.tokens))
        return PackedBatch(packed, *rest)

    monkeypatch.setattr("example_trainer.torch_engine.batching.PackedBatch", record)
    together = torch_engine.complete([5, 6, 7], n=12, seed=0, **options)["choices"]

    prefixes = {tuple(each["token_ids"][:end]) for each in alone for end in range(20)}
    assert 20 < len(prefixes) < 12 * 20
    assert sum(computed) == 3 + len(prefixes) - 1
    for one, other in zip(alone, together, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(
            other["logprobs"]["token_logprobs"], abs=TOLERANCE
        )


def test_more_requests_than_slots_and_cache_are_all_answered(
    model_folder: Path, model: Any
) -> None:
    with serve_locally(model_folder, max_num_seqs=3, kv_cache_memory_bytes=2**19) as local:
        assert local.engine.batch.limits.max_cache_tokens < 3 * 256
        answer = local.complete(random_prompts(12), max_tokens=100, ignore_eos=True)
        assert local.engine.counts().preemptions > 0

    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 100
        assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE


def test_echo_has_the_logprobs_of_prompt_and_completion(
    torch_engine: LocalEngine, model: Any
) -> None:
    import torch

    prompt = [9, 30, 31, 32]
    answer = torch_engine.complete(prompt, max_tokens=0, echo=True, logprobs=2)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], dim=-1)

    [choice] = answer["choices"]
    found = choice["logprobs"]["token_logprobs"]
    assert choice["token_ids"] == []
    assert found[0] is None
    for t in range(1, 4):
        assert found[t] == pytest.approx(float(logprobs[t - 1, prompt[t]]), abs=TOLERANCE)
        assert len(choice["logprobs"]["top_logprobs"][t]) in (2, 3)


def test_top_logprobs_of_a_chat_are_the_most_likely_tokens(
    torch_engine: LocalEngine, model: Any, tokenizer: Any
) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 3 plus 1?"}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }

    answer = torch_engine.http.post("/v1/chat/completions", json=body).json()

    choice = answer["choices"][0]
    choice["prompt_token_ids"] = answer["prompt_token_ids"]
    logits = logits_of_completion(model, choice)
    for t, entry in enumerate(choice["logprobs"]["content"]):
        best = [f"token_id:{token}" for token in logits[t].topk(3).indices.tolist()]
        assert [each["token"] for each in entry["top_logprobs"]] == best
        assert entry["token"] == best[0]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_a_stream_has_the_text_and_tokens_of_the_whole_answer(
    torch_engine: LocalEngine,
) -> None:
    import json

    body = {
        "prompt": [9, 30, 31], "n": 3, "max_tokens": 25, "seed": 4, "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip
    whole = torch_engine.http.post("/v1/completions", json=body).json()["choices"]

    streamed = {index: {"text": "", "token_ids": [], "logprobs": []} for index in range(3)}
    options = {**body, "stream": True, "stream_options": {"include_usage": True}}
    usage = None
    with torch_engine.http.stream("POST", "/v1/completions", json=options) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            parts = streamed[choice["index"]]
            parts["text"] += choice["text"]
            parts["token_ids"] += choice["token_ids"]
            parts["logprobs"] += choice["logprobs"]["token_logprobs"]
            parts["finish_reason"] = choice["finish_reason"]

    assert usage is not None
    for choice in whole:
        assert streamed[choice["index"]] == {
            "text": choice["text"],
            "token_ids": choice["token_ids"],
            "logprobs": pytest.approx(choice["logprobs"]["token_logprobs"], abs=TOLERANCE),
            "finish_reason": choice["finish_reason"],
        }


def test_streamed_text_never_contains_the_beginning_of_a_stop_text(
    torch_engine: LocalEngine, tokenizer: Any
) -> None:
    options = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = torch_engine.complete([9, 30, 31], **options)["choices"][0]["text"]
    stop = text[20:26]
    body = {"prompt": [9, 30, 31], "stop": stop, "stream": True, **options}

    chunks = streamed_choices(torch_engine, body)

    assert "".join(chunk["text"] for chunk in chunks) == text[: text.index(stop)]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_stop_text_before_the_minimum_of_tokens_is_text(
    torch_engine: LocalEngine, tokenizer: Any, min_tokens: int
) -> None:
    [one] = tokenizer.encode("1")
    body = {"prompt": [9, 30, 31], "allowed_token_ids": [one], "min_tokens": min_tokens,
            "stop": "11", "max_tokens": 60}  # fmt: skip

    [choice] = torch_engine.complete(**body)["choices"]
    chunks = streamed_choices(torch_engine, {**body, "stream": True})

    # As in vLLM, the stop text may begin in the last token of the minimum.
    assert choice["token_ids"] == [one] * (min_tokens + 1 if min_tokens else 2)
    assert choice["text"] == "1" * max(0, min_tokens - 1)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "11")
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]


def streamed_choices(local: LocalEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the first choice of each chunk of a stream."""
    import json

    with local.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_one_long_sequence_is_not_padded_to_several() -> None:
    import torch

    from example_trainer.torch_engine.attention import SlotCache

    cache = SlotCache(device=torch.device("cpu"), dtype=torch.float32)

    assert [cache.padded_size(slots, 64) // 64 for slots in (1, 2, 3, 5, 9)] == [1, 2, 4, 8, 16]


def test_events_of_a_client_that_does_not_read_do_not_pile_up() -> None:
    import asyncio
    import random

    from example_trainer.torch_engine.jobs import Completion, Job, PromptRequest
    from example_trainer.torch_engine.server import _Progress, _StreamEvents

    async def unread() -> None:
        request = PromptRequest((1,))
        completion = Completion(request, 0, random.Random(0))
        events = _StreamEvents()
        for num_tokens in range(1, 1000):
            events.put(_Progress(0, completion, num_tokens, False))
        events.put(Job(request, on_done=lambda _: None))

        progress = await events.get()
        assert isinstance(progress, _Progress)
        assert progress.num_tokens == 999
        assert isinstance(await events.get(), Job)

    asyncio.run(unread())


def test_prompt_logprobs_do_not_depend_on_the_parts_they_are_computed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from example_trainer.torch_engine.batching import _prompt_entries

    logits = torch.randn(9, 20)
    tokens = list(range(10))
    whole = _prompt_entries(logits, tokens, 2)
    monkeypatch.setattr("example_trainer.torch_engine.batching._SCORED_ROWS", 4)

    assert _prompt_entries(logits, tokens, 2) == whole
