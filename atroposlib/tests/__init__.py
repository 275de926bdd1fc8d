"""Helpers that outside test suites import."""
