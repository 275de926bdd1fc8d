"""The tokenizer of a served model, loaded when first needed."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.server_handling.config import ServerBaseline
from atroposlib.utils.tokenizers.earlier_calls import read_template_file

__all__ = ["load_tokenizer", "tokenizer_name_of"]


def tokenizer_name_of(config: ServerBaseline) -> str:
    """Return the tokenizer's name: `tokenizer_name`, or `model_name` where that is unset."""
    return config.model_name if config.tokenizer_name in ("", "none") else config.tokenizer_name


def load_tokenizer(config: ServerBaseline) -> Any:
    """Load the tokenizer of a server's model with transformers."""
    from transformers import AutoTokenizer

    return read_template_file(AutoTokenizer.from_pretrained(tokenizer_name_of(config)))
