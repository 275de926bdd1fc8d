"""Filters, draws and texts of the torch engine, by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from example_trainer.torch_engine.sampling import (
    PastTokens,
    SamplingSettings,
    filter_logits,
    sample_rows,
)
from example_trainer.torch_engine.texts import GrowingText, StopFinder

pytestmark = pytest.mark.slow  # imports torch

NO_TOKENS = PastTokens(torch.empty(0, dtype=torch.long), {}, [])
PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]


def kept_tokens(**settings: Any) -> list[int]:
    logits = torch.tensor([PROBS]).log()
    scores = filter_logits(logits, [SamplingSettings(**settings)], [NO_TOKENS])
    return [token for token, score in enumerate(scores[0].tolist()) if score > -math.inf]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.64}, [1, 3]),  # 0.4 + 0.25
        ({"top_p": 0.66}, [1, 3, 4]),  # the token that crosses the limit is kept
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.49}, [1, 3, 4]),  # at least 0.196
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # of the three: 0.47, 0.29, 0.24
        ({"temperature": 0, "top_k": 1}, [0, 1, 2, 3, 4]),  # greedy rows are not filtered
    ],
)
def test_filters_keep_the_tokens_of_their_definition(
    settings: dict[str, Any], kept: list[int]
) -> None:
    assert kept_tokens(**settings) == kept


def test_rows_have_settings_of_their_own_and_do_not_change_the_logits() -> None:
    logits = torch.tensor([PROBS] * 3).log()
    before = logits.clone()
    settings = [
        SamplingSettings(temperature=0),
        SamplingSettings(top_k=1),
        SamplingSettings(temperature=0, logit_bias={2: 50.0}),
    ]

    rows = sample_rows(
        logits,
        settings,
        [NO_TOKENS] * 3,
        [random.Random(n) for n in range(3)],
        num_top=2,
        is_processed=False,
    )

    assert rows.tokens == [1, 1, 2]
    assert rows.logprobs == pytest.approx([math.log(0.4), math.log(0.4), math.log(0.05)])
    assert rows.top_tokens == [[1, 3]] * 3
    assert torch.equal(logits, before)


def test_processed_logprobs_are_of_the_distribution_that_was_sampled() -> None:
    logits = torch.tensor([PROBS]).log()

    rows = sample_rows(
        logits,
        [SamplingSettings(temperature=0.5, top_k=1)],
        [NO_TOKENS],
        [random.Random(0)],
        num_top=0,
        is_processed=True,
    )

    assert rows.logprobs == [0.0]


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.tensor([PROBS]).log().repeat(4000, 1)
    generators = [random.Random(n) for n in range(4000)]

    rows = sample_rows(
        logits,
        [SamplingSettings(top_k=3)] * 4000,
        [NO_TOKENS] * 4000,
        generators,
        num_top=0,
        is_processed=True,
    )

    assert set(rows.tokens) == {1, 3, 4}
    assert rows.tokens.count(1) / 4000 == pytest.approx(0.4 / 0.85, abs=0.04)


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_growing_text_shows_a_character_with_its_last_byte() -> None:
    data = "aé🙂b".encode()
    text = GrowingText(ByteTokenizer(), skips_special=True)

    shown = [text.add(list(data[: end + 1])) for end in range(len(data))]

    assert shown == ["a", "a", "aé", "aé", "aé", "aé", "aé🙂", "aé🙂b"]


def test_stop_text_over_several_tokens_is_found_once_complete() -> None:
    data = b"one stop two"
    finder = StopFinder(GrowingText(ByteTokenizer(), skips_special=True), ["two", "stop"])

    found = [finder.find(list(data[: end + 1])) for end in range(8)]

    assert found == [None] * 7 + ["stop"]


def test_stop_text_counts_after_the_minimum_of_tokens() -> None:
    data = b"stop, longer stop, stop"
    text = GrowingText(ByteTokenizer(), skips_special=True)
    finder = StopFinder(text, ["stop", "er stop, st"], min_tokens=4)

    found = [finder.find(list(data[: end + 1])) for end in range(17)]

    assert found == [None] * 16 + ["stop"]


def test_tokens_without_text_are_decoded_a_few_times_only() -> None:
    decoded: list[int] = []

    class SilentTokenizer:
        def decode(self, tokens: list[int], **_: object) -> str:
            decoded.append(len(tokens))
            return "a" * tokens.count(1)

    text = GrowingText(SilentTokenizer(), skips_special=True)
    tokens = [0] * 2000
    for end in range(1, len(tokens)):
        text.add(tokens[:end])

    assert text.add([*tokens, 1]) == "a"
    assert max(decoded) < 200
