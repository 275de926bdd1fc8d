"""The environments that are trained, and the training of one of them."""
