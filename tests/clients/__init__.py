"""Third-party agents, unmodified and pinned, in front of the agent proxy; see `docs/clients.md`."""
