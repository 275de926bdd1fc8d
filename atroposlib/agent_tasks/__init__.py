"""Tasks in folders, and the agents that work on them."""
