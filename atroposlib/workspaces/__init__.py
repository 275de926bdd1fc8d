"""Prepared states of a machine, forked for each rollout of an agent."""
