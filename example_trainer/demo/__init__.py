"""The demo: the whole loop on one machine, by one command."""
