from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.reward_fns.cosine_scaled_reward import CosineScaledReward, cosine_scaled_reward
from atroposlib.errors import MissingExtraError


class ClockReward(CosineScaledReward):
    """Embeds a text, which is an angle in degrees, as that direction."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedded: list[list[str]] = []

    def embed(self, texts: Sequence[str]) -> list[Any]:
        import torch

        self.embedded.append(list(texts))
        angles = [math.radians(float(text)) for text in texts]
        return [torch.tensor([math.cos(a), math.sin(a)], dtype=torch.float64) for a in angles]


@pytest.mark.parametrize(
    ("angle", "parameters", "expected"),
    [
        ("0", {}, 1.0),
        ("60", {}, 0.5),  # cosine 0.5, distance 0.5
        ("90", {}, 0.0),
        ("180", {}, -1.0),
        ("60", {"scale_factor": 2.0}, 0.0),  # 1 - 0.5 x 2
        ("180", {"scale_factor": 2.0}, -1.0),  # 1 - 2 x 2 = -3, clamped
        ("0", {"max_reward": 0.25}, 0.25),
        ("60", {"weight": 4.0}, 2.0),
    ],
)
def test_reward_by_angle(angle: str, parameters: dict[str, Any], expected: float) -> None:
    reward = ClockReward(**parameters)

    assert reward([angle], solution="0") == pytest.approx([expected])


def test_one_solution_is_embedded_once() -> None:
    reward = ClockReward()

    assert reward(["0", "60", "60"], solution="0") == pytest.approx([1.0, 0.5, 0.5])
    assert [sorted(texts) for texts in reward.embedded] == [["0", "60"]]


def test_solutions_per_completion_and_missing_ones() -> None:
    reward = ClockReward(default_reward=-0.5)

    assert reward(["0", "60", "0"], solution=["0", "0", None]) == pytest.approx([1.0, 0.5, -0.5])
    assert reward(["0", "60"]) == [-0.5, -0.5]
    assert reward(["0"], solution="") == [-0.5]
    assert reward([], solution="0") == []


def test_a_list_of_messages_is_one_solution() -> None:
    messages = [{"role": "user", "content": "90"}, {"role": "assistant", "content": "0"}]
    reward = ClockReward()

    assert reward(["0", "60"], solution=messages) == pytest.approx([1.0, 0.5])
    assert reward(["0", "60"], solution=[messages, messages]) == pytest.approx([1.0, 0.5])
    assert reward(["0"], solution=0) == pytest.approx([1.0])


def test_a_failure_raises_or_earns_the_default_when_tolerated() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        ClockReward(default_reward=0.3)(["north"], solution="0")
    tolerant = ClockReward(default_reward=0.3, tolerate_errors=True)
    assert tolerant(["north"], solution="0") == [0.3]


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(MissingExtraError, match="rewardfns"):
        CosineScaledReward()
    with pytest.raises(ImportError):
        cosine_scaled_reward(["a"], "b")


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder with random weights and a vocabulary of five words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "the", "cat", "sat", "dog", "ran"]
    splitter = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    splitter.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def test_embeddings_of_a_real_encoder(tiny_encoder: str) -> None:
    reward = CosineScaledReward(model_name=tiny_encoder)
    completions = ["the cat sat", "the dog ran", "", "the " * 100]

    rewards = reward(completions, solution="the cat sat")

    assert rewards[0] == pytest.approx(1.0, abs=1e-6)
    assert rewards[0] == max(rewards)
    assert all(-1.0 <= r < 1.0 for r in rewards[1:])
    assert reward(completions[:1], solution="the dog ran") == pytest.approx(rewards[1:2], abs=1e-5)
    assert list(CosineScaledReward._encoders) == [tiny_encoder]


def test_padding_does_not_change_an_embedding(tiny_encoder: str) -> None:
    reward = CosineScaledReward(model_name=tiny_encoder)

    alone = reward.embed(["the cat"])[0]
    padded = reward.embed(["the cat", "the cat sat the dog ran"])[0]

    assert alone.tolist() == pytest.approx(padded.tolist(), abs=1e-5)
