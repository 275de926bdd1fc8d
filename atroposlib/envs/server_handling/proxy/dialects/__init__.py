"""Protocols besides OpenAI's chat that agents speak to the proxy."""

from __future__ import annotations

from atroposlib.envs.server_handling.proxy.dialect import Dialect
from atroposlib.envs.server_handling.proxy.dialects.anthropic.routes import ANTHROPIC
from atroposlib.envs.server_handling.proxy.dialects.responses.routes import RESPONSES

__all__ = ["DIALECTS"]

DIALECTS: tuple[Dialect, ...] = (RESPONSES, ANTHROPIC)
"""Served by the proxy, in this order."""
