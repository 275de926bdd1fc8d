"""Parts of the model of large runs."""
