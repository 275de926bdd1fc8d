"""Parts of the distillation benchmark."""
