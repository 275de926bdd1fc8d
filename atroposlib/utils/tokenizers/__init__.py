"""Tokenizers whose own chat template needs replacing."""
