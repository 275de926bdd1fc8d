"""Entry points of the console commands."""
