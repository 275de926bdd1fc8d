"""A tokenizer that needs no files: one token per character, with the interface the library uses."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CharTokenizer"]

_SPECIALS = re.compile("(<pad>|<s>|</s>)")


class CharTokenizer:
    r"""One token per character, its id the code point; ids 0, 1 and 2 are pad, bos and eos.

    `encode("ab")` is `[1, 97, 98]`. The chat template renders each message as
    `[role]content</s>\n` and opens the reply with `[assistant]`.

    Args:
        template_bos: Whether the template itself writes the bos, as some real ones do.
        strips_thinking: Whether the template drops `<think>` blocks of assistant messages.
    """

    pad_token, bos_token, eos_token = "<pad>", "<s>", "</s>"
    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
    name_or_path = "char-tokenizer"
    vocab_size = 256
    model_max_length = 1_000_000
    padding_side = "right"

    def __init__(self, *, template_bos: bool = False, strips_thinking: bool = False) -> None:
        self.template_bos = template_bos
        self.strips_thinking = strips_thinking
        self.chat_template = "char"
        self._specials = {self.pad_token: 0, self.bos_token: 1, self.eos_token: 2}

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of pad, bos and eos."""
        return [0, 1, 2]

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def get_vocab(self) -> dict[str, int]:
        """Return the ids below `vocab_size` by their text."""
        return {chr(i): i for i in range(3, self.vocab_size)} | self._specials

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Return one id per character, behind the bos unless told otherwise."""
        ids = [self.bos_token_id] if add_special_tokens else []
        for piece in _SPECIALS.split(text):
            if piece in self._specials:
                ids.append(self._specials[piece])
            else:
                ids.extend(map(ord, piece))
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        names = {i: s for s, i in self._specials.items()}
        pieces = []
        for token_id in (int(t) for t in token_ids):
            if token_id not in names:
                pieces.append(chr(token_id))
            elif not skip_special_tokens:
                pieces.append(names[token_id])
        return "".join(pieces)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id."""
        return [self.decode([i]) for i in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or the ids of several."""
        if isinstance(tokens, str):
            return self.get_vocab().get(tokens, 0)
        return [self.get_vocab().get(token, 0) for token in tokens]

    def __call__(self, text: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of one text, or of several."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        ids = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **_: Any,
    ) -> Any:
        """Render a conversation; ids unless `tokenize` is False, a mapping with `return_dict`."""
        text = self.bos_token if self.template_bos else ""
        if tools:
            text += f"[tools]{len(tools)}{self.eos_token}\n"
        for message in conversation:
            content = message.get("content") or ""
            if self.strips_thinking and "</think>" in content:
                content = content.split("</think>")[-1]
            text += f"[{message['role']}]{content}{self.eos_token}\n"
        if add_generation_prompt:
            text += "[assistant]"
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids
