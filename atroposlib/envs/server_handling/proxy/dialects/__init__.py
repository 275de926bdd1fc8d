"""Protocols besides OpenAI's chat that agents speak to the proxy."""
