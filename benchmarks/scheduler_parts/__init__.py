"""Parts of the benchmark of the scheduler."""
