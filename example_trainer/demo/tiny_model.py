"""A small language model made from nothing: tokenizer, chat template, random weights.

The tokenizer is byte-level BPE, so it can write any text, but its merges are learned on the texts
of the task at hand and may span words: a sentence that stands in every prompt becomes one token.
Digits always stay apart, one token each. No file is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from example_trainer.doors import require_extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["TinyModelShape", "build_model", "save_tiny_model", "train_tokenizer"]

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# ChatML, as Qwen and Hermes models have it.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


@dataclass(frozen=True)
class TinyModelShape:
    """Sizes of a Llama-like model; the defaults give about 1.1 million parameters."""

    hidden_size: int = 128
    """Width of the residual stream."""

    num_layers: int = 4
    """Number of transformer blocks."""

    num_heads: int = 4
    """Attention heads; the width of one head must be a multiple of 32 for vLLM on CPU."""

    max_length: int = 256
    """Longest sequence in tokens."""

    max_vocabulary: int = 768
    """Most tokens of its tokenizer; 259 of them are the bytes and the marks of a chat."""


def train_tokenizer(
    conversations: Iterable[Sequence[Mapping[str, str]]],
    *,
    max_length: int,
    max_vocabulary: int = TinyModelShape.max_vocabulary,
) -> PreTrainedTokenizerFast:
    """Learn a tokenizer from conversations of the task and give it a ChatML template.

    Args:
        conversations: Prompts with their completions, as messages.
        max_length: Longest sequence of the model, in tokens.
        max_vocabulary: Most tokens.

    Returns:
        A fast tokenizer: any text round-trips, `<|im_end|>` ends a turn, `<|endoftext|>` pads.
    """
    with require_extra("trainer"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # The line that opens a message stays apart: the tokens of a prompt are a prefix of
            # those of the whole conversation, whatever the completion begins with.
            pre_tokenizers.Split(Regex(r"\A(system|user|assistant)\n"), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated"),
            # Without the usual word pattern, so that merges may span words.
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocabulary,
        min_frequency=8,
        special_tokens=[PAD_TOKEN, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for messages in conversations
        for message in messages
        for text in (f"{message['role']}\n", message["content"])
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, shape: TinyModelShape, *, seed: int
) -> PreTrainedModel:
    """Make a Llama-like model with random float32 weights for `tokenizer`."""
    with require_extra("trainer"):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.max_length,
        # vLLM on a CPU does not replace a tied output layer when weights change in place.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def save_tiny_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write model and tokenizer to `folder`, loadable offline with `from_pretrained`."""
    with require_extra("trainer"):
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one bar of its own for a file of 4 MB
    model.save_pretrained(os.fspath(folder))
    tokenizer.save_pretrained(os.fspath(folder))
