"""Static pages that show rollouts."""
