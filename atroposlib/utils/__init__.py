"""Leaves: one subject per file, imported by whoever needs it."""
