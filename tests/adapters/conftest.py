"""Fixtures of adapter tests: those of the base environment."""

from tests.envs.conftest import make_env

__all__ = ["make_env"]
