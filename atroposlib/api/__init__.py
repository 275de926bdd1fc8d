"""The trajectory service: collects scored groups from environments, hands batches to trainers.

`app` is built on first use, so that `atroposlib.api.client` can be imported without FastAPI.
"""

from __future__ import annotations

from typing import Any

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from atroposlib.api.server import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
