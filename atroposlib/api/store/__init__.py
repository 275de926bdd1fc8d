"""Stores of a run: its log, the payloads of its groups, and its snapshot."""
