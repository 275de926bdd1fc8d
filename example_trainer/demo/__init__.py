"""The demo: all components on one machine, by one command."""
