"""A Qwen tokenizer whose chat template renders all messages unchanged.

The templates of these models drop the thinking of earlier turns, so that a rendered history differs
from the sampled tokens. The template next to this module keeps it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["QwenFixedTokenizer"]

_TEMPLATE = Path(__file__).with_name("qwen_chat_template.jinja")


class QwenFixedTokenizer:
    """Wraps a tokenizer and replaces its chat template.

    The arguments are those of `transformers.AutoTokenizer.from_pretrained`.
    """

    def __init__(self, model_name_or_path: str, **kwargs: Any) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **kwargs)
        self.tokenizer.chat_template = _TEMPLATE.read_text(encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet, for example during a copy
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        tokenize: bool = True,
        padding: bool = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation as in transformers; ids are a list unless `return_dict` is set."""
        return self.tokenizer.apply_chat_template(
            conversation,
            tools=tools,
            tokenize=tokenize,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            return_dict=return_dict,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
