"""Where the payloads of acknowledged groups live."""
