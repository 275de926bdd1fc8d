"""The tokenizer and the model the demo makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from example_trainer.demo.settings import (
    TinyModelShape,
    build_model,
    save_tiny_model,
    train_tokenizer,
)

PROMPT = [
    {"role": "system", "content": "Give the answer in <answer> tags."},
    {"role": "user", "content": "State the final answer to: 4 - 1 - 7 ="},
]
ANSWER = {"role": "assistant", "content": "4 - 1 = 3 ; 3 - 7 = -4 <answer>-4</answer>"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([[*PROMPT, ANSWER]] * 10, max_length=64)


@pytest.mark.parametrize(
    "text",
    ["", "4 - 1 = 3", " two  spaces\n\ttab", "naïve 你好 🙂", "<answer>007</answer>", "\x00"],
)
def test_tokenizer_any_text_round_trips(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)

    assert tokenizer.decode(tokens) == text


def test_tokenizer_digits_stay_apart(tokenizer: Any) -> None:
    tokens = tokenizer.encode("12345", add_special_tokens=False)

    assert [tokenizer.decode([token]) for token in tokens] == list("12345")


def test_tokenizer_sentence_of_every_prompt_is_one_token(tokenizer: Any) -> None:
    assert len(tokenizer.encode("Give the answer in <answer> tags.")) == 1


def test_chat_template_is_chatml(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(PROMPT[1:], tokenize=False, add_generation_prompt=True)

    assert text == (
        "<|im_start|>user\nState the final answer to: 4 - 1 - 7 =<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_prompt_tokens_are_a_prefix_of_the_conversation(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*PROMPT, ANSWER], tokenize=False)

    prompt_tokens, tokens = tokenizer.encode(prompt), tokenizer.encode(whole)

    assert tokens[: len(prompt_tokens)] == prompt_tokens
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"


def test_chat_template_completion_like_the_prompt_leaves_its_tokens_a_prefix() -> None:
    # Were the line before a completion no token of its own, "\n" and "State" could join here.
    tokenizer = train_tokenizer(
        [[{"role": "user", "content": "\nState"}, {"role": "assistant", "content": "State"}]] * 10,
        max_length=64,
    )

    together = tokenizer.encode("<|im_start|>assistant\nState")

    assert together == [
        *tokenizer.encode("<|im_start|>assistant\n"),
        *tokenizer.encode("State"),
    ]


def test_build_model_same_seed_same_weights(tokenizer: Any) -> None:
    shape = TinyModelShape(hidden_size=32, num_layers=1, num_heads=1, max_length=64)

    first, again, other = (build_model(tokenizer, shape, seed=seed) for seed in (3, 3, 4))

    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_build_model_default_shape_has_one_to_three_million_parameters(tokenizer: Any) -> None:
    model = build_model(tokenizer, TinyModelShape(), seed=0)

    assert 1_000_000 <= model.num_parameters() <= 3_000_000


def test_save_tiny_model_loads_with_the_usual_classes(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = TinyModelShape(hidden_size=32, num_layers=1, num_heads=1, max_length=64)
    model = build_model(tokenizer, shape, seed=0)

    save_tiny_model(model, tokenizer, tmp_path)

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("4 - 1 = 3") == tokenizer.encode("4 - 1 = 3")
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.apply_chat_template(PROMPT, tokenize=False) == tokenizer.apply_chat_template(
        PROMPT, tokenize=False
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == len(tokenizer)
