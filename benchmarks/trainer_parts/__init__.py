"""Contenders of `trainer.py`, each run in its own process, and their workload."""
