"""Shared parts of the programs in `environments/`, and their tasks."""
