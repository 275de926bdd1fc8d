"""Utilities without dependencies on other packages of the library, one subject per file."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name == "ConfigHandler":  # imported from here by older runners
        from atroposlib.utils.config_handler import ConfigHandler

        return ConfigHandler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
