"""A tokenizer of whole words, made here: fast like those of real models, and without a download."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_tokenizer"]

_NUM_WORDS = 50_000


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer that knows the words w0, w1, ... and return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary.update({f"w{number}": number + 3 for number in range(_NUM_WORDS)})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder
