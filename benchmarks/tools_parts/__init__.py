"""What `benchmarks/tools.py` measures, one tool per module."""
