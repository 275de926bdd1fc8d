"""How trainers of others take their batches from the trajectory service."""
