"""Inference servers: a client class per engine, and the manager that routes requests."""
