"""Inference servers: one client per engine behind one manager."""
