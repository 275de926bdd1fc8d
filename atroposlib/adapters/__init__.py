"""Environments of other libraries as ours; `interface` is for authors of adapters."""
