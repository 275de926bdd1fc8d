"""Caches of finished sequences in the torch engine: what is found, what it costs, exact tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.torch_engine.attention import SavedSlot
from example_trainer.torch_engine.prefixes import PrefixPool
from tests.trainer.torch_engine.conftest import LocalEngine, serve_locally, wait_until
from tests.trainer.torch_engine.test_generation import logits_of_completion, worst_gap
from tests.trainer.torch_engine.test_recurrent import MODELS, save_model

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


def pool_of(*sequences: Sequence[int], whole: bool = False) -> PrefixPool:
    """Return a pool with sequences that cost a token more than they have."""
    pool = PrefixPool(whole=whole)
    for number, tokens in enumerate(sequences):
        pool.add(tokens, numbered(number), cost=len(tokens) + 1)
    return pool


def numbered(number: int) -> SavedSlot:
    """Return caches that are known by a layer with that number."""
    return SavedSlot({number: (torch.empty(0), torch.empty(0))}, {})


def found_in(pool: PrefixPool, tokens: Sequence[int]) -> tuple[int, int] | None:
    """Return the number of the sequence and the length of the beginning."""
    found = pool.find(tokens)
    return None if found is None else (next(iter(found.caches.layers)), found.length)


def test_longest_beginning_is_found_without_the_last_token() -> None:
    first, second = list(range(40)), [*range(20), *range(100, 130)]
    pool = pool_of(first, second)

    assert found_in(pool, [*first, 7, 8]) == (0, 40)
    assert found_in(pool, first) == (0, 39)
    assert found_in(pool, [*second[:35], 7]) == (1, 35)
    assert found_in(pool, [*range(16), 7]) in ((0, 16), (1, 16))
    assert found_in(pool, range(16)) is None
    assert found_in(pool, [7, *first]) is None


def test_sequence_replaces_the_one_that_it_continues() -> None:
    pool = pool_of(range(20), range(50), range(50))

    assert pool.cost == 51
    assert found_in(pool, range(60)) == (2, 50)


def test_sequences_used_as_a_whole_are_found_by_what_continues_them() -> None:
    pool = pool_of(range(20), range(50), [*range(20), *range(90, 120)], range(50), whole=True)

    assert pool.cost == 21 + 51 + 51
    assert found_in(pool, range(51)) == (3, 50)
    assert found_in(pool, range(50)) == (0, 20)
    assert found_in(pool, [*range(20), 7]) == (0, 20)
    assert found_in(pool, range(20)) is None
    pool.shrink(0)
    assert pool._by_block == {}


def test_unused_sequences_are_removed_first() -> None:
    sequences = [[number] * 20 for number in range(3)]
    pool = pool_of(*sequences)
    pool.find([*sequences[0], 9])

    pool.shrink(42)

    assert [found_in(pool, [*each, 9]) is not None for each in sequences] == [True, False, True]
    assert pool.cost == 42
    pool.shrink(0)
    assert pool._by_block == {}


# Few different blocks, so that many sequences share some.
blocks = st.lists(st.sampled_from([(1,) * 16, (2,) * 16, (1,) * 15 + (3,), (4,)]), max_size=6)
sequences = blocks.map(lambda parts: [token for part in parts for token in part])


@given(
    added=st.lists(sequences, max_size=12),
    wanted=sequences,
    room=st.integers(0, 300),
    whole=st.booleans(),
)
def test_whatever_is_found_is_a_beginning_of_both(
    added: list[list[int]], wanted: list[int], room: int, whole: bool
) -> None:
    pool = pool_of(*added, whole=whole)
    pool.shrink(room)
    kept = [sequence.tokens for sequence in pool._sequences.values()]
    assert pool.cost == sum(len(tokens) + 1 for tokens in kept) <= room

    found = found_in(pool, wanted)

    lengths = [shared(each, wanted[:-1]) for each in kept]
    if whole:
        pairs = zip(lengths, kept, strict=True)
        lengths = [length for length, tokens in pairs if length == len(tokens)]
    longest = max(lengths, default=0)
    if found is None:
        assert longest < 16
    else:
        number, length = found
        assert added[number][:length] == wanted[:length]
        assert length == longest if whole else length >= longest - longest % 16
        assert length < len(wanted)


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@pytest.fixture(scope="module")
def small_engine(model_folder: Path) -> Iterator[LocalEngine]:
    """An engine whose caches hold few sequences."""
    with serve_locally(model_folder, max_num_seqs=4, kv_cache_memory_bytes=2**20) as local:
        yield local


def conversation(local: LocalEngine, source: random.Random, *, num_turns: int) -> list[Any]:
    """Return the choices of turns, each of which sends the ones before it again."""
    prompt = [source.randrange(3, 250) for _ in range(30)]
    choices = []
    for _ in range(num_turns):
        # With a seed, since other tokens may be at a tie of two experts.
        options = {"max_tokens": 20, "ignore_eos": True, "seed": len(prompt)}
        [choice] = local.complete(prompt, **options)["choices"]
        choices.append(choice)
        prompt = prompt + choice["token_ids"] + [source.randrange(3, 250) for _ in range(9)]
    return choices


def test_turns_of_a_conversation_compute_only_what_is_new(
    torch_engine: LocalEngine, model: Any
) -> None:
    cached = torch_engine.engine.counts().cached_tokens

    choices = conversation(torch_engine, random.Random(1), num_turns=5)

    for choice in choices:
        assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE
    # The last token of a turn was sampled, but not computed.
    expected = sum(len(choice["prompt_token_ids"]) - 10 for choice in choices[1:])
    assert torch_engine.engine.counts().cached_tokens == cached + expected
    metrics = torch_engine.http.get("/metrics").text
    assert f'vllm:prefix_cache_hits_total{{model_name="tiny"}} {cached + expected}' in metrics


def test_caches_of_finished_sequences_leave_the_memory_to_running_ones(
    small_engine: LocalEngine, model: Any
) -> None:
    engine = small_engine.engine
    with ThreadPoolExecutor(6) as workers:
        futures = [
            workers.submit(conversation, small_engine, random.Random(n), num_turns=4)
            for n in range(6)
        ]
        choices = [choice for future in futures for choice in future.result()]

    assert 0 < engine.batch.shared.cost <= engine.batch.limits.max_cache_tokens // 2
    for choice in choices:
        assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE


INSTRUCTIONS = [3 + (7 * n) % 240 for n in range(100)]
"""Tokens that several prompts begin with: 6 blocks and a part of the next one."""


def wait_until_waiting(local: LocalEngine, answers: list[Future[Any]], *, count: int) -> None:
    """Wait until so many sequences wait in a paused engine; raise the error of a request."""

    def are_waiting() -> bool:
        for answer in answers:
            if answer.done():
                answer.result()
        return bool(local.engine.counts().waiting == count)

    wait_until(are_waiting)


def start_together(local: LocalEngine, prompts: Sequence[Any], **options: Any) -> list[Any]:
    """Return the choices of requests that the engine finds at the same time."""
    local.engine.pause("keep").result()
    with ThreadPoolExecutor(len(prompts)) as workers:
        try:
            answers = [workers.submit(local.complete, each, **options) for each in prompts]
            wait_until_waiting(local, answers, count=len(prompts))
        finally:
            local.engine.resume().result()
        return [choice for answer in answers for choice in answer.result()["choices"]]


def test_prompts_that_begin_alike_are_computed_once_at_the_same_time(
    torch_engine: LocalEngine, model: Any
) -> None:
    torch_engine.engine.reset_caches().result()
    cached = torch_engine.engine.counts().cached_tokens
    prompts = [[*INSTRUCTIONS, number, 9, 8] for number in range(10, 17)]

    choices = start_together(torch_engine, prompts, max_tokens=12, ignore_eos=True, seed=3)

    assert torch_engine.engine.counts().cached_tokens == cached + 6 * 100
    for choice in choices:
        assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE


def test_prompt_of_a_running_request_is_not_computed_again(
    torch_engine: LocalEngine, model: Any
) -> None:
    torch_engine.engine.reset_caches().result()
    options = {"max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(1) as workers:
        running = workers.submit(torch_engine.complete, [*INSTRUCTIONS, 5], n=8, **options)
        wait_until(lambda: torch_engine.engine.counts().running or running.done())
        cached = torch_engine.engine.counts().cached_tokens
        same, shorter = start_together(
            torch_engine, [[*INSTRUCTIONS, 5], INSTRUCTIONS[:64]], max_tokens=12, ignore_eos=True
        )

    # A prompt's last token is always computed, since its logits are needed.
    assert torch_engine.engine.counts().cached_tokens - cached >= 96 + 63
    for choice in (same, shorter, *running.result()["choices"]):
        assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE


def test_running_sequences_share_their_prompt_again_after_an_update(
    model_folder: Path, model: Any
) -> None:
    with serve_locally(model_folder) as local, ThreadPoolExecutor(1) as workers:
        prompts = [[*INSTRUCTIONS, number] for number in range(10, 18)]
        options = {"max_tokens": 100, "ignore_eos": True}
        local.engine.pause("keep").result()
        running = workers.submit(local.complete, prompts, **options)
        wait_until(lambda: local.engine.counts().waiting == 8)
        while local.engine.counts().running < 8:  # for a few steps at a time
            local.engine.resume().result()
            local.engine.pause("keep").result()
        cached = local.engine.counts().cached_tokens
        local.engine.reload(model_folder, version="2").result()
        local.engine.resume().result()
        choices = running.result()["choices"]

    # Two completions of a prompt also share its last token.
    assert 7 * 100 <= local.engine.counts().cached_tokens - cached <= 7 * 101
    for choice in choices:
        assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE


def random_requests(count: int, *, trunks: Sequence[int], vocabulary: int) -> list[dict[str, Any]]:
    """Return requests that begin with a part of one of a few sequences, of these lengths."""
    source = random.Random(4)
    shared = [[source.randrange(3, vocabulary) for _ in range(length)] for length in trunks]
    requests: list[dict[str, Any]] = []
    for _ in range(count):
        prompt = [*source.choice(shared)[: source.randint(1, max(trunks))]]
        prompt += [source.randrange(3, vocabulary) for _ in range(source.randint(0, 40))]
        requests.append(
            {
                "prompt": prompt, "max_tokens": source.randint(1, 30), "ignore_eos": True,
                "n": source.randint(1, 3), "seed": source.randint(0, 99),
                **({"prompt_logprobs": 0} if source.random() < 0.1 else {}),
            }
        )  # fmt: skip
    return requests


def test_random_requests_that_share_beginnings_have_exact_logprobs(
    model_folder: Path, model: Any
) -> None:
    requests = random_requests(60, trunks=(20, 48, 90), vocabulary=250)
    with (
        serve_locally(model_folder, max_num_seqs=12, kv_cache_memory_bytes=2**21) as local,
        ThreadPoolExecutor(16) as workers,
    ):
        answers = list(workers.map(lambda each: local.complete(**each), requests))
        counts = local.engine.counts()

    assert counts.cached_tokens > 1000
    for answer in answers:
        for choice in answer["choices"]:
            assert worst_gap(logits_of_completion(model, choice), choice) < TOLERANCE


def test_prompt_logprobs_of_a_cached_prompt_are_complete(torch_engine: LocalEngine) -> None:
    prompt = [5 + 3 * n for n in range(50)]
    first = torch_engine.complete(prompt, max_tokens=2, temperature=0, prompt_logprobs=1)

    second = torch_engine.complete(prompt, max_tokens=2, temperature=0, prompt_logprobs=1)

    entries = [answer["choices"][0]["prompt_logprobs"] for answer in (first, second)]
    assert [set(entry or ()) for entry in entries[0]] == [set(entry or ()) for entry in entries[1]]
    assert len(entries[1]) == 50


def test_scored_prompts_count_in_full_in_a_step(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from example_trainer.torch_engine import batching

    sizes: list[int] = []
    forward = batching._forward

    def recorded(model: Any, cache: Any, packed: Any, starts: Any) -> Any:
        sizes.append(len(packed.tokens))
        return forward(model, cache, packed, starts)

    monkeypatch.setattr(batching, "_forward", recorded)
    prompts = [[5 + number] * 50 for number in range(6)]
    with serve_locally(model_folder, max_num_batched_tokens=64) as local:
        local.complete(prompts, max_tokens=2)
        sizes.clear()
        answer = local.complete(prompts, max_tokens=2, prompt_logprobs=0)
        scored = max(sizes)
        sizes.clear()
        local.complete(prompts, max_tokens=2)

    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [50] * 6
    assert 50 <= scored <= 64 + 6
    assert max(sizes) <= 6  # the last token of each prompt


def test_engine_without_the_cache_computes_every_prompt(model_folder: Path) -> None:
    with serve_locally(model_folder, enable_prefix_caching=False) as local:
        for _ in range(2):
            local.complete(list(range(3, 60)), max_tokens=3)
        start_together(local, [[*INSTRUCTIONS, 5], [*INSTRUCTIONS, 6]], max_tokens=3)

        assert local.engine.counts().cached_tokens == 0


FROM_NO_STATES = ("mamba", "jamba")
"""Models whose layers compute several tokens from no states."""


@pytest.mark.parametrize("kind", MODELS)
def test_recurrent_layers_continue_from_the_states_of_finished_sequences(
    tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path, kind)
    with serve_locally(folder) as local:
        at_start = local.engine.counts().cached_tokens
        choices = conversation(local, random.Random(1), num_turns=4)
        conversation(local, random.Random(2), num_turns=1)
        again = conversation(local, random.Random(1), num_turns=2)
        cached = local.engine.counts().cached_tokens - at_start

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for choice in (*choices, *again):
        assert worst_gap(logits_of_completion(model, choice), choice) < 1e-3
    expected = sum(len(choice["prompt_token_ids"]) - 10 for choice in [*choices[1:], again[1]])
    assert cached == (0 if kind in FROM_NO_STATES else expected)


CONTINUED = sorted(set(MODELS) - set(FROM_NO_STATES))


def worst_recurrent_gap(folder: Path, choices: list[Any]) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return max(worst_gap(logits_of_completion(model, choice), choice) for choice in choices)


@pytest.mark.parametrize("kind", CONTINUED)
def test_recurrent_layers_compute_common_instructions_once(tmp_path: Path, kind: str) -> None:
    folder = save_model(tmp_path, kind)
    shared = [3 + number % 50 for number in INSTRUCTIONS]
    prompts = [[*shared, number, 9, 8] for number in range(10, 17)]
    with serve_locally(folder) as local:
        cached = local.engine.counts().cached_tokens
        choices = start_together(local, prompts, max_tokens=12, ignore_eos=True, seed=3)
        together = local.engine.counts().cached_tokens - cached
        # The first completion of each prompt was saved too; a new question has the instructions.
        [later] = start_together(local, [[*shared, 55, 9, 8]], max_tokens=12, ignore_eos=True)
        after = local.engine.counts().cached_tokens - cached - together

    assert (together, after) == (6 * len(shared), len(shared))
    assert worst_recurrent_gap(folder, [*choices, later]) < 1e-3


def test_recurrent_layers_know_instructions_of_requests_that_ended(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3_5_text")
    shared = [3 + number % 50 for number in INSTRUCTIONS]
    cached, choices = [], []
    with serve_locally(folder) as local:
        before = local.engine.counts().cached_tokens
        for number in range(10, 14):
            choices += local.complete([*shared, number, 9], max_tokens=9, ignore_eos=True)[
                "choices"
            ]
            cached.append(local.engine.counts().cached_tokens - before)

    # Of the second request, the beginning is saved; the last two begin with whole blocks of it.
    assert cached == [0, 0, 96, 2 * 96]
    assert worst_recurrent_gap(folder, choices) < 1e-3


def test_recurrent_layers_share_a_prompt_that_another_one_continues(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3_5_text")
    shared = [3 + number % 50 for number in INSTRUCTIONS]
    with serve_locally(folder) as local:
        before = local.engine.counts().cached_tokens
        prompts = [shared, [*shared, 5, 6]]
        choices = start_together(local, prompts, max_tokens=9, ignore_eos=True)
        cached = local.engine.counts().cached_tokens - before

    assert cached == len(shared) - 1  # the last token of the first prompt is computed after them
    assert worst_recurrent_gap(folder, choices) < 1e-3


@pytest.mark.parametrize("cache_bytes", [2**19, 2**17], ids=["roomy", "small"])
@pytest.mark.parametrize("kind", CONTINUED)
def test_random_requests_of_recurrent_models_have_exact_logprobs(
    tmp_path: Path, kind: str, cache_bytes: int
) -> None:
    folder = save_model(tmp_path, kind)
    requests = random_requests(40, trunks=(80, 110, 150), vocabulary=60)
    with (
        serve_locally(folder, max_num_seqs=12, kv_cache_memory_bytes=cache_bytes) as local,
        ThreadPoolExecutor(len(requests)) as workers,
    ):
        local.engine.pause("keep").result()
        running = [workers.submit(local.complete, **each) for each in requests]
        wait_until_waiting(local, running, count=sum(each["n"] for each in requests))
        local.engine.resume().result()
        answers = [each.result() for each in running]
        counts = local.engine.counts()

    assert counts.cached_tokens > 500 or cache_bytes == 2**17
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert worst_recurrent_gap(folder, choices) < 1e-3


def test_no_request_waits_for_instructions_that_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, "qwen3_5_text")
    shared = [3 + number % 50 for number in INSTRUCTIONS]
    prompts = [[*shared, number] for number in range(10, 18)]
    with serve_locally(folder) as local:
        batch = local.engine.batch
        batch.shared._max_tokens = 100  # half of them are for saved caches
        num_running, step = [], batch.step

        def noted_step() -> None:
            num_running.append(batch.num_running)
            step()

        monkeypatch.setattr(batch, "step", noted_step)
        choices = start_together(local, prompts, max_tokens=4, ignore_eos=True)

    assert num_running[:2] == [0, len(prompts)]
    assert worst_recurrent_gap(folder, choices) < 1e-3
