"""OpenAI's Responses protocol in front of a session."""
