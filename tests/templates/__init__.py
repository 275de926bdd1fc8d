"""Small tokenizers whose chat templates are built like those of well-known model families."""
