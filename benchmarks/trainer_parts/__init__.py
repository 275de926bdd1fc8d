"""What `trainer.py` measures, a process for each contender."""
