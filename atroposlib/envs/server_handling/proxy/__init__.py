"""The proxy: tracked sessions behind OpenAI-style addresses, for agents left as they are."""
