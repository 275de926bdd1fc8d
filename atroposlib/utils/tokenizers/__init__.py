"""Tokenizers with another chat template, or with the calls of an earlier version."""
