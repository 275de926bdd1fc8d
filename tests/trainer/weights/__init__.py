"""Weights as published versions."""
