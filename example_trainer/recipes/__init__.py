"""Other trainers on batches of the trajectory service."""
