"""Parts of `h200.py`, each run in its own process."""
