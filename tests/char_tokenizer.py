"""The tokenizer of the tests: one token per character."""

from __future__ import annotations

from atroposlib.envs.checks.char_tokenizer import CharTokenizer

__all__ = ["CharTokenizer"]
