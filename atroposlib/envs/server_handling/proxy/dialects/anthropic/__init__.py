"""Anthropic's Messages protocol in front of a session."""
