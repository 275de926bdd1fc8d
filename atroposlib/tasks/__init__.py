"""What the programs of `environments/` share, and what their tasks are made of."""
