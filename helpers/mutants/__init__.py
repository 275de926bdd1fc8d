"""Mutation testing of the pure rules: `python -m helpers.mutants --help`."""
