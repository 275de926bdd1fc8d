"""Atropos: environments, a trajectory service and trainers for reinforcement learning of LLMs."""

__version__ = "0.5.0"
