"""The environment side: base class, scheduler, configuration and commands."""
