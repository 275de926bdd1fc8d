"""The tokenizer of the tests: one token per character."""

from __future__ import annotations

from atroposlib.envs.checks.scripted_model import CharTokenizer

__all__ = ["CharTokenizer"]
