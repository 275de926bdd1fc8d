"""Command-line doors."""
